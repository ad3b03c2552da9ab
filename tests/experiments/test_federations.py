from __future__ import annotations

from dataclasses import replace
from typing import Any

from perdl_experiments.engine import federate
from perdl_experiments.studies import configure, federations, find

SMALL: dict[str, Any] = {
    "seeds": 1,
    "sizes": "8,30",
    "failures": "0,40",
    "weak": 4,
    "weak_samples": "20,200",
}


def point(**changes: Any) -> federations.Config:
    config = configure(find("federations"), clients=12, rounds=4, options=SMALL)
    return replace(config, axis="failing", weak=0, method="consensus", **changes)


def test_as_many_clients_fail_as_asked_half_of_them_with_nan() -> None:
    report = federate(federations, point(failing=50, clients=40, rounds=8)).history
    reasons = [reason for one in report for reason in one.dropped.values()]
    silent = sum("this client fails" in reason for reason in reasons)
    assert 0.4 < len(reasons) / 320 < 0.6
    assert 0.35 < silent / len(reasons) < 0.65
    assert all("NaN" in reason for reason in reasons if "this client fails" not in reason)
