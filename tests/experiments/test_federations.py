from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perdl_experiments import run_experiment
from perdl_experiments.engine import federate
from perdl_experiments.studies import configure, federations, find

SMALL: dict[str, Any] = {
    "seeds": 1,
    "sizes": "8,30",
    "failures": "0,40",
    "weak": 4,
    "weak_samples": "20,200",
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    out = tmp_path_factory.mktemp("federations")
    return run_experiment("federations", clients=10, rounds=6, out=out, options=SMALL), out


def point(**changes: Any) -> federations.Config:
    config = configure(find("federations"), clients=12, rounds=4, options=SMALL)
    return replace(config, axis="failing", weak=0, method="consensus", **changes)


def test_consensus_recovers_everywhere_and_clients_alone_do_not(small: Any) -> None:
    metrics = small[0]["metrics"]
    for place in ("clients_8", "clients_30", "failing_40", "weak_size_20"):
        assert metrics[f"recovered_{place}_consensus"] == 1
    for place in ("clients_30", "failing_40"):  # a mean over clients, many of which start badly
        assert metrics[f"error_{place}_alone"] > 0.05
    assert metrics["error_weak_size_20_alone"] > 0.1 > 1e-6 > metrics["error_weak_size_200_alone"]


def test_as_many_clients_fail_as_asked_half_of_them_with_nan() -> None:
    report = federate(federations, point(failing=50, clients=40, rounds=8)).history
    reasons = [reason for one in report for reason in one.dropped.values()]
    silent = sum("this client fails" in reason for reason in reasons)
    assert 0.4 < len(reasons) / 320 < 0.6
    assert 0.35 < silent / len(reasons) < 0.65
    assert all("NaN" in reason for reason in reasons if "this client fails" not in reason)


def test_the_papers_clients_withhold_nothing() -> None:
    each = federations.federations(configure(find("federations"), options=SMALL))
    assert {(one.method, one.min_support) for one in each} == {
        ("consensus", 3),
        ("paths", 3),
        ("paper", 0),
    }
