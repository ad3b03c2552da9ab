from __future__ import annotations

import numpy as np
import pytest

from flwr_perdl.dictionary import (
    GradientLearner,
    MODLearner,
    OrthogonalLearner,
    dictionary_distance,
    normalize_atoms,
    polar_factor,
    refine_local,
)

LEARNERS = [
    OrthogonalLearner(6),
    GradientLearner(6, coding="threshold"),
    MODLearner(6, coding="threshold"),
]


@pytest.mark.parametrize("learner", LEARNERS, ids=lambda x: type(x).__name__)
def test_refinement_finds_local_atoms_and_leaves_global_ones(rng, orthonormal, sparse, learner):
    D = orthonormal(6, 8)
    X = sparse(300, 6) @ D
    local = normalize_atoms(D[3:] + 0.1 * rng.standard_normal((3, 8)))
    if learner.orthogonal:
        local = polar_factor(local - local @ D[:3].T @ D[:3], D[3:])
    start = np.vstack([D[:3], local])
    refined = refine_local(X, start, 3, learner, n_iter=30)
    assert np.array_equal(refined[:3], D[:3])
    assert dictionary_distance(refined[3:], D[3:]) < 1e-3 * dictionary_distance(local, D[3:])
    if learner.orthogonal:
        assert np.allclose(refined @ refined.T, np.eye(6), atol=1e-12)


@pytest.mark.parametrize("n_global", [0, 6])
def test_nothing_local_and_nothing_global(rng, orthonormal, n_global):
    D, X = orthonormal(6, 8), rng.standard_normal((50, 8))
    before = D.copy()
    refined = refine_local(X, D, n_global, OrthogonalLearner(6), n_iter=2)
    expected = D if n_global else OrthogonalLearner(6).step(X, OrthogonalLearner(6).step(X, D))
    assert np.array_equal(refined, expected)
    assert np.array_equal(D, before)
