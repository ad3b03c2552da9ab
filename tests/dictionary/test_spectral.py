"""The spectral start finds planted atoms without annealing, in a client too."""

from __future__ import annotations

import numpy as np
import pytest

from flwr_perdl.clients import DictionaryClient
from flwr_perdl.dictionary import (
    LassoLearner,
    MODLearner,
    OrthogonalLearner,
    dictionary_distance,
    iterate,
    match_atoms,
    spectral_start,
)
from flwr_perdl.strategies import PerMA
from tests.grids import grid_of


def codes(rng, n, r, k=2):
    """Return codes with ``k`` atoms per sample."""
    C = rng.uniform(0.5, 1.5, (n, r)) * rng.choice([-1, 1], (n, r))
    return C * (np.argsort(rng.random((n, r)), axis=1) < k)


def test_pairs_that_share_an_atom_are_that_atom():
    # Orthonormal atoms, one per sample: the sum over y of one atom is a multiple of its square.
    X = np.repeat(np.array([[0.6, 0.8], [-0.8, 0.6]]), [30, 70], axis=0)
    X *= np.tile([1.0, -2.0], 50)[:, None]
    found = spectral_start(X, MODLearner(2, n_nonzero=1), rng=np.random.default_rng(0), n_iter=0)
    assert dictionary_distance(np.array([[0.6, 0.8], [-0.8, 0.6]]), found.dictionary) < 1e-12


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("shape", [(16, 16), (12, 20)])
def test_planted_atoms_are_found_that_are_not_orthogonal(rng, unit, shape, dtype):
    D, learner = unit(*shape), MODLearner(shape[0], n_nonzero=2)
    X = (1e-6 * codes(rng, 2000, len(D)) @ D).astype(dtype)
    kept = X.copy()
    start = spectral_start(X, learner, rng=rng, n_iter=0).dictionary
    assert start.dtype == dtype
    assert np.array_equal(X, kept)
    found = spectral_start(X, learner, rng=rng)
    assert np.median(match_atoms(start, D).distances) < 0.2  # of its own start: 1
    assert np.median(match_atoms(found.dictionary, D).distances) < 0.01
    assert found.objective == learner.loss(X, learner.code(X, found.dictionary), found.dictionary)


def test_perma_starts_from_it():
    rng = np.random.default_rng(0)
    atoms = np.linalg.qr(rng.standard_normal((20, 20)))[0]
    own = [np.vstack([atoms[:8], atoms[8 + 4 * i : 12 + 4 * i]]) for i in range(3)]
    tables = [codes(rng, 1000, 12) @ D for D in own]

    def make(context, i):
        return DictionaryClient(tables[i], OrthogonalLearner(12), context, start=spectral_start)

    result = PerMA(8).start(grid_of(make, 3), num_rounds=2)
    assert dictionary_distance(atoms[:8], result.arrays.to_numpy_ndarrays()[0]) < 1e-8


@pytest.mark.parametrize(
    "X", [np.zeros((5, 3)), np.eye(3)[:1], np.ones((4, 3)), np.eye(3)], ids=str
)
@pytest.mark.parametrize("learner", [OrthogonalLearner(3), LassoLearner(4)])
def test_where_pairs_say_nothing_it_is_the_learner_s_own_start(X, learner):
    draw = np.random.default_rng
    found = spectral_start(X, learner, rng=draw(0), n_iter=1).dictionary
    own = iterate(learner, X, learner.start(X, draw(0)), [4.0])
    assert np.allclose(found, own)
