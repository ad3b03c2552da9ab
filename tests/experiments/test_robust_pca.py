"""Principal component pursuit: planted parts come back, at a point where no step helps."""

from __future__ import annotations

import numpy as np

from perdl_experiments.robust_pca import principal_component_pursuit


def test_planted_parts_come_back() -> None:
    rng = np.random.default_rng(0)
    low = rng.standard_normal((40, 2)) @ rng.standard_normal((2, 200))
    sparse = np.where(rng.random(low.shape) < 0.05, 5 * rng.standard_normal(low.shape), 0)
    given = low + sparse
    X = given.copy()
    found = principal_component_pursuit(X, tol=1e-7)
    assert found.converged
    np.testing.assert_array_equal(X, given)
    np.testing.assert_allclose(found.low_rank, low, atol=1e-3)
    np.testing.assert_allclose(found.low_rank + found.sparse, X, atol=1e-4)


def test_it_ends_where_the_optimality_conditions_hold() -> None:
    """No small move of a part of the low-rank matrix to the sparse one lowers the objective."""
    rng = np.random.default_rng(1)
    X = rng.random((12, 60))
    L, S, _, converged = principal_component_pursuit(X, tol=1e-10, max_iter=20_000)
    assert converged
    weight = 1 / np.sqrt(60)
    values = np.linalg.svd(L, compute_uv=False)
    best = values.sum() + weight * np.abs(S).sum()
    for seed in range(5):
        step = 1e-3 * np.random.default_rng(seed).standard_normal(X.shape)
        other = np.linalg.svd(L + step, compute_uv=False).sum() + weight * np.abs(S - step).sum()
        assert other >= best - 1e-9
    assert 0 < np.sum(values > 1e-6 * values[0]) < 12
