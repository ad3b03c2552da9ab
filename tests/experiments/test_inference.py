from __future__ import annotations

from typing import Any

import numpy as np
import pytest

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


def test_the_papers_figure_of_a_fully_connected_network() -> None:
    """The slowest error shrinks by 1 - mu eta / N per round: 40 dB after at most 458 rounds."""
    options = {"dimension": 300, "density": 0.1, "connectivity": 1.0, "loss": "huber", "step": 0.5}
    found = outcome(500, **options)
    latest = np.ceil(np.log(100) / -np.log(1 - 0.5 * 0.2 / 10))
    assert 0.9 * latest < found.metrics["rounds_to_40db_atc"] <= latest
    assert found.curves["snr_atc_nu"][99] < 40 < found.curves["snr_atc_y"][99]
    assert found.metrics["rounds_to_40db_admm"] < 100
