"""Diagnosis where the right answer is planted."""

from __future__ import annotations

import pytest

from benchmarks.diagnosis import PLANTED, planted


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_difference_is_found(kind: str) -> None:
    found = planted(kind, 0)
    mean, low, high = found.lead
    assert found.choice == found.best == PLANTED[kind]
    assert 0 < low < mean < high
