"""Malformed calls of all public callables: the first of those that `make fuzz-calls` draws."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from tests.fuzz import calls


@pytest.mark.parametrize("name", calls.callables())
def test_a_valid_call_succeeds(name: str) -> None:
    _, called = calls.callables()[name]
    calls.call(called, calls.valid(name, called))  # compiled here, where no time is measured
    assert calls.finding(called, calls.valid(name, called), "no error names this") is None


def test_malformed_calls_are_right_or_name_the_argument() -> None:
    drawn = islice(calls.draws(seed=0), 3000)
    assert [call for call in drawn if call[-1] is not None] == []


def test_what_a_finding_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(A: float, B: float) -> None:
        raise ValueError("A must be another.")

    assert "not our own" in calls.finding(refuses, {"A": 1.0, "B": 1.0}, "A")
    monkeypatch.setattr(calls, "LIMIT", 0.1)
    assert "over 0.1 s" in calls.finding(lambda A: [None for _ in iter(int, 1)], {"A": 1}, "A")
    assert "NaN" in calls.finding(lambda A: A, {"A": float("nan")}, "A")
    check = calls.dictionary.hard_threshold
    assert "unnamed" in calls.finding(check, {"A": calls.np.eye(2), "threshold": -1}, "A")
    assert calls.finding(check, {"A": calls.np.eye(2), "threshold": -1}, "threshold") is None


def test_a_modified_argument_is_a_finding() -> None:
    def modifies(A: Any) -> None:
        A[:] = 0

    assert "modified" in calls.finding(modifies, {"A": calls.np.eye(2)}, "A")
