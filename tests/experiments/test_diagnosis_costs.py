"""Diagnosis where the right answer is planted, and what its choice costs on digits."""

from __future__ import annotations

import pytest

from benchmarks.diagnosis import KINDS, PLANTED, POINT, one, planted


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_the_choice_costs_at_most_a_point_of_accuracy(kind: str, seed: int) -> None:
    choice, found = one(kind, seed)
    assert found[choice] >= max(found.values()) - POINT
    if kind == "none":
        assert choice == "fedavg"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_difference_is_found(kind: str, seed: int) -> None:
    found = planted(kind, seed)
    mean, low, high = found.lead
    assert found.choice == found.best == PLANTED[kind]
    assert 0 < low < mean < high
