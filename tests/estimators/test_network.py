from __future__ import annotations

import numpy as np

from flwr_perdl.estimators import NetworkDictionaryLearning
from flwr_perdl.network import DataDiffusion, Topology, metropolis_weights


def planted() -> tuple[np.ndarray, list[np.ndarray]]:
    rng = np.random.default_rng(0)
    atoms = rng.standard_normal((12, 8))
    atoms /= np.linalg.norm(atoms, axis=1, keepdims=True)
    codes = rng.uniform(-1, 1, (600, 12)) * (rng.random((600, 12)).argsort(axis=1) < 2)
    return atoms, np.split(codes @ atoms, 4)


def test_the_nodes_find_the_planted_atoms_together() -> None:
    atoms, tables = planted()
    model = NetworkDictionaryLearning(Topology.ring(4), n_atoms=12, n_nonzero=2, rounds=80)
    codes = model.fit_transform(tables)
    assert (np.abs(atoms @ model.components_.T).max(axis=1) > 0.99).all()
    np.testing.assert_allclose(np.linalg.norm(model.components_, axis=1), 1)
    assert model.disagreement_.shape == (4,)
    assert model.disagreement_.max() < 0.1
    assert model.score(tables[0]) > 0.9
    assert model.score(tables[0], node=3) > 0.9
    np.testing.assert_array_equal(codes[2], model.transform(tables[2], node=2))
    np.testing.assert_allclose(
        model.inverse_transform(codes[2], node=2), codes[2] @ model.node_components_[2]
    )


def test_it_is_data_diffusion_on_the_given_weights() -> None:
    _, tables = planted()
    weights = metropolis_weights(Topology.ring(4))
    model = NetworkDictionaryLearning(weights, n_atoms=5, update="ksvd", rounds=6, seed=3)
    model.fit(tables)
    learned = DataDiffusion(5, update="ksvd").fit(tables, weights, n_rounds=6, seed=3)
    np.testing.assert_array_equal(model.node_components_, learned.dictionaries)
    assert (model.n_iter_, model.floats_sent_) == (6, learned.floats_sent)
    apart = [np.linalg.norm(D - model.components_, axis=1).max() for D in learned.dictionaries]
    np.testing.assert_allclose(model.disagreement_, apart)
