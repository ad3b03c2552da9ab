"""Diagnosis on clients that differ in four ways, or not at all: what its choice costs."""

from __future__ import annotations

import pytest

from benchmarks.diagnosis import KINDS, POINT, one


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_the_choice_costs_at_most_a_point_of_accuracy(kind: str, seed: int) -> None:
    choice, found = one(kind, seed)
    assert found[choice] >= max(found.values()) - POINT
    if kind == "none":
        assert choice == "fedavg"
