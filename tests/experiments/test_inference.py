from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse

from flwr_perdl.network import InMemoryNetwork
from perdl_experiments.studies import inference, novel_documents
from tests.studies import Kept, Ran, config_of, run_study, save

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


def test_documents_and_the_atoms_that_the_network_learns_from_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    topics = rng.random((5, 40)) ** 6
    y = np.r_[rng.integers(4, size=1000), rng.integers(5, size=1000)]  # the last topic is new
    counts = sparse.csr_array(rng.poisson(4 * topics[y]).astype(float))
    arrays = {"data": counts.data, "indices": counts.indices, "indptr": counts.indptr}
    data = save(tmp_path, **arrays, shape=counts.shape, format="csr", y=y)
    options = {"connectivity": 1.0, "loss": "huber", "step": 0.5, "dimension": 40}
    kept = Kept()
    found = run_study("inference", kept, data=data, agents=4, rounds=500, seeds=2, **options)
    assert kept["atoms"]["atoms"].shape == (4, 40)
    np.testing.assert_allclose(np.linalg.norm(kept["atoms"]["atoms"], axis=1), 1, atol=1e-5)
    last = found.arrays["snr_atc_nu"][:, -1]
    assert found.metrics["decibels_atc"] == np.median(last) > 40
    assert "2 documents" in found.notes[0]
    config = config_of("inference", data=data, agents=4, **options)
    case = inference.document(config, kept["atoms"]["atoms"], np.random.default_rng(1))
    assert case.codes.any()
    block = novel_documents.stream_of(config.documents).block(1).toarray()
    assert np.abs(block - case.X).max(axis=1).min() < 1e-7
