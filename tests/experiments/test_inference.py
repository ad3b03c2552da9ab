from __future__ import annotations

from typing import Any

import numpy as np

from flwr_perdl.network import InMemoryNetwork
from perdl_experiments.studies import inference
from tests.studies import Ran, run_study

SMALL: dict[str, Any] = {"agents": 10, "dimension": 30, "connectivity": 0.5, "seeds": 1}


def outcome(rounds: int = 400, **options: Any) -> Ran:
    return run_study("inference", rounds=rounds, **{**SMALL, **options})


def test_jacobian_admm_is_the_papers_recursion_with_one_sign() -> None:
    case = inference.draw("squared", 6, 12, 0.5, np.random.default_rng(0))
    program = case.program(inference.METHODS["jacobian_admm"], penalty=0.3, step=0.4)
    B, W, o = case.topology.adjacency.toarray(), case.atoms[:, 0], inference.OBJECTIVES["squared"]
    c = 0.3 / B.sum(axis=1).mean()
    a = 1 / 6 + 2 * c * B.sum(axis=1)
    multiplier, nu = np.zeros((6, 6, 12)), np.zeros((6, 12))
    for _ in range(6):
        b = case.X / 6 + multiplier.sum(axis=1) + 2 * c * B @ nu
        s = (W * b).sum(axis=1) / a
        y = (s - np.clip(s, -o.gamma, o.gamma)) / (o.delta + 1 / a)
        nu = (b - y[:, None] * W) / a[:, None]
        multiplier -= 0.4 * c * B[..., None] * (nu[:, None] - nu)
    found = InMemoryNetwork(case.topology).run(program, 6).observed["nu"]
    np.testing.assert_allclose(found[:, 0], nu, atol=1e-12)


def test_the_papers_figure_of_a_fully_connected_network() -> None:
    """The slowest error shrinks by 1 - mu eta / N per round: 40 dB after at most 458 rounds."""
    options = {"dimension": 300, "density": 0.1, "connectivity": 1.0, "loss": "huber", "step": 0.5}
    found = outcome(500, **options)
    latest = np.ceil(np.log(100) / -np.log(1 - 0.5 * 0.2 / 10))
    assert 0.9 * latest < found.metrics["rounds_to_40db_atc"] <= latest
    assert found.curves["snr_atc_nu"][99] < 40 < found.curves["snr_atc_y"][99]
    assert found.metrics["rounds_to_40db_admm"] < 100
