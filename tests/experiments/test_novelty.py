"""Novelty scores: what normalising mends, and how long to average."""

from __future__ import annotations

import numpy as np

from flwr_perdl.network import (
    HuberNMF,
    NonnegativeMF,
    Topology,
    exact_dual,
    infer,
    metropolis_weights,
)
from perdl_experiments.novelty import averaging_rounds, novelty_scores

NETWORK = Topology.erdos_renyi(7, 0.4, seed=3)
WEIGHTS = metropolis_weights(NETWORK)


def test_the_normalised_score_is_the_cost_over_that_of_explaining_nothing() -> None:
    objective, rng = HuberNMF(0.05, 0.1, 0.2), np.random.default_rng(1)
    X = np.vstack([rng.random((5, 15)) ** 2, np.zeros(15)])
    W = rng.random((7, 2, 15)) ** 3
    W /= np.linalg.norm(W, axis=2, keepdims=True)
    exact = exact_dual(objective, X, list(W))
    nu = np.broadcast_to(exact.nu, (7, *X.shape))
    scores = novelty_scores(objective, X, nu, W, NETWORK)
    wanted = np.append(exact.cost[:5] / objective.loss(X[:5]), 0.0)
    np.testing.assert_allclose(scores, np.broadcast_to(wanted, scores.shape), rtol=1e-5, atol=1e-12)
    assert ((wanted[:5] > 0) & (wanted[:5] < 1)).all()


def test_what_no_atom_explains_scores_one() -> None:
    objective = NonnegativeMF(0.01, 0.02)
    atoms = np.zeros((7, 1, 6))
    atoms[:, 0, :3] = 3**-0.5
    X = np.array([[0.0, 0, 0, 1, 2, 0], [1.0, 1, 1, 0, 0, 0]])
    found = infer(objective, X, list(atoms), NETWORK, tolerance=1e-8)
    scores = novelty_scores(objective, X, found.nu, atoms, NETWORK)
    np.testing.assert_allclose(scores[:, 0], 1, atol=1e-5)
    assert scores[:, 1].max() < 0.05


def test_normalising_mends_the_raw_cost_under_hubers_loss() -> None:
    """A known document of many small entries costs more than a new one of few large entries."""
    objective = HuberNMF(0.05, 0.1, 0.2)
    even = np.append(np.full(25, 0.2), np.zeros(26))
    known = 0.7 * even + np.sqrt(0.51) * np.roll(even, 25)  # half of it is known
    new = np.zeros(51)
    new[:4] = 0.02
    new[50] = np.sqrt(1 - 4 * 0.02**2)
    atoms = np.zeros((7, 1, 51))
    atoms[0, 0] = even
    X = np.stack([known, new])
    exact = exact_dual(objective, X, list(atoms))
    nu = np.broadcast_to(exact.nu, (7, *X.shape))
    raw = novelty_scores(objective, X, nu, atoms, NETWORK, score="raw")
    normalised = novelty_scores(objective, X, nu, atoms, NETWORK)
    assert (raw[:, 1] < raw[:, 0]).all()
    assert (normalised[:, 1] > 0.95).all()
    assert (normalised[:, 0] < 0.7).all()


def test_rounds_of_averaging() -> None:
    assert averaging_rounds(metropolis_weights(Topology.complete(5))) == 1
    assert averaging_rounds(WEIGHTS, 1.0) == 1
    assert averaging_rounds(WEIGHTS, 0.1) == 132  # 0.9^132 < 1e-6 < 0.9^131
    apart = metropolis_weights(Topology.from_edges(4, [(0, 1), (2, 3)]))
    assert averaging_rounds(apart) == 10_000
