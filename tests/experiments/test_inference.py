from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flwr_perdl.diffusion.inference import exact_dual
from perdl_experiments.studies import inference
from tests.studies import Ran, run_study

SMALL: dict[str, Any] = {"agents": 10, "dimension": 30, "connectivity": 0.5, "seeds": 1}


def outcome(rounds: int = 400, **options: Any) -> Ran:
    return run_study("inference", rounds=rounds, **{**SMALL, **options})


@pytest.mark.parametrize("loss", ["squared", "huber"])
def test_the_stable_names_and_the_order_of_the_methods(loss: str) -> None:
    found = outcome(loss=loss)
    rounds = {name: found.metrics[f"rounds_to_40db_{name}"] for name in inference.METHODS}
    assert 0 < rounds["admm"] < rounds["plain_admm"]
    assert rounds["atc"] == -1
    assert found.metrics["agreement_db"] >= 100
    for name in inference.METHODS:
        for what in ("y", "nu"):
            assert len(found.curves[f"snr_{name}_{what}"]) == 400
    assert found.outcome.figures["inference"].axes


def test_one_informed_agent_is_enough() -> None:
    alone, together = outcome(informed=1), outcome()
    for found in (alone, together):
        assert found.arrays["snr_admm_nu"][:, -1].min() == inference.TOP
    assert not np.array_equal(alone.arrays["snr_admm_nu"], together.arrays["snr_admm_nu"])


def test_a_case_holds_the_answer_and_the_impulses() -> None:
    rng = np.random.default_rng(0)
    case = inference.draw("huber", 8, 200, 0.5, rng, 0.1)
    assert (case.X >= 0).all()
    assert (case.X > 0.3).any()
    assert (np.abs(case.nu) == 1).any()
    exact = exact_dual(case.objective, case.X, list(case.atoms))
    np.testing.assert_array_equal(case.nu, exact.nu[0])


def test_when_40_db_are_reached() -> None:
    never = np.array([10.0, 45.0, 39.0])
    assert inference.reached(never) == np.inf
    assert inference.reached(np.array([10.0, 45.0, 39.0, 41.0])) == 4
    assert inference.reached(np.array([40.0, 50.0])) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "absolute"}, r"^loss must be one of 'squared', 'huber', got 'absolute'\.$"),
        ({"agents": 1}, r"^agents must be at least 2, got 1\.$"),
        ({"informed": 11}, r"^informed must be between 0 and 10, got 11\.$"),
        ({"connectivity": 0.0}, r"^connectivity must be in \(0, 1\], got 0\.$"),
        ({"clients": 4}, r"^clients must be given as agents, got 4\.$"),
    ],
)
def test_wrong_options_are_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        outcome(rounds=5, **options)
