"""The experiment private: what noise costs, and beside what."""

from __future__ import annotations

import pytest

from perdl_experiments.studies import private
from tests.studies import config_of, run_study

ERRORS = ("private", "not_private", "alone", "public")


def test_noise_costs_more_the_smaller_epsilon_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "EPSILONS", (0.5, 20.0))
    found = run_study("private", clients=4, rounds=3, epsilon=200.0, trust="central")
    little, much = found.curves["error_central"][::-1]
    errors = {name: found.metrics[f"error_{name}"] for name in ERRORS}
    assert much > little > errors["private"]
    assert errors["private"] == pytest.approx(errors["not_private"], rel=0.05)
    assert errors["not_private"] < errors["public"]


def test_more_frequencies_than_pixels_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"^basis"):
        config_of("private", basis=65)
