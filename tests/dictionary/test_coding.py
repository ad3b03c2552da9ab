from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.linear_model import Lasso as SklearnLasso
from sklearn.linear_model import orthogonal_mp

from flwr_perdl.dictionary import (
    hard_threshold,
    lasso,
    omp,
    reconstruct,
    soft_threshold,
    sparse_code,
    top_k,
)

matrices = arrays(float, (3, 5), elements=st.floats(-5, 5))


def test_thresholds_by_hand():
    A = np.array([[-2.0, -0.5, 0.0, 0.5, 1.0]])
    assert np.array_equal(hard_threshold(A, 0.5), [[-2.0, -0.5, 0.0, 0.5, 1.0]])
    assert np.array_equal(hard_threshold(A, 0.6), [[-2.0, 0.0, 0.0, 0.0, 1.0]])
    assert np.array_equal(soft_threshold(A, 0.5), [[-1.5, 0.0, 0.0, 0.0, 0.5]])


def test_top_k_by_hand():
    A = np.array([[1.0, -3.0, 2.0], [0.0, 1.0, 0.5]])
    assert np.array_equal(top_k(A, 1), [[0.0, -3.0, 0.0], [0.0, 1.0, 0.0]])
    assert np.array_equal(top_k(A, 0), np.zeros((2, 3)))
    assert np.array_equal(top_k(A, 7), A)


@given(matrices, st.floats(0.01, 5))
def test_thresholds_minimise_their_objectives(A, t):
    """Hard: (a - c)^2 + t^2 [c != 0]; soft: (a - c)^2 / 2 + t |c|."""
    hard, soft = hard_threshold(A, t), soft_threshold(A, t)
    for c in (np.zeros_like(A), A, hard + 0.01, hard - 0.01):
        ours = (A - hard) ** 2 + t**2 * (hard != 0)
        assert (ours <= (A - c) ** 2 + t**2 * (c != 0) + 1e-9).all()
    for c in (np.zeros_like(A), A, soft + 0.01, soft - 0.01):
        ours = (A - soft) ** 2 / 2 + t * np.abs(soft)
        assert (ours <= (A - c) ** 2 / 2 + t * np.abs(c) + 1e-9).all()


@given(matrices, st.integers(0, 5))
def test_top_k_keeps_the_largest(A, k):
    C = top_k(A, k)
    assert (np.count_nonzero(C, axis=1) <= k).all()
    expected = np.sort(np.abs(A), axis=1)[:, 5 - k :].sum(axis=1)
    assert np.allclose(np.abs(C).sum(axis=1), expected)


@pytest.mark.parametrize("k", [1, 3, 7])
def test_omp_is_scikit_learns(rng, unit, k):
    X, D = rng.standard_normal((40, 12)), unit(25, 12)
    expected = orthogonal_mp(D.T, X.T, n_nonzero_coefs=k).T
    assert np.allclose(omp(X, D, k), expected, atol=1e-10)


def test_omp_residuals_are_orthogonal_to_the_atoms_taken(rng, unit):
    X, D = rng.standard_normal((20, 12)), unit(25, 12)
    C = omp(X, D, 4)
    rest = X - C @ D
    assert np.abs((rest @ D.T)[C != 0]).max() < 1e-12


def test_omp_with_orthonormal_atoms_keeps_the_largest_products(rng, orthonormal):
    X, D = rng.standard_normal((20, 8)), orthonormal(6, 8)
    assert np.allclose(omp(X, D, 3), top_k(X @ D.T, 3), atol=1e-12)


def test_omp_stops_where_the_sample_is_fitted(rng, unit):
    D = unit(10, 6)
    X = np.vstack([2 * D[3], -D[7], np.zeros(6)])
    expected = np.zeros((3, 10))
    expected[0, 3], expected[1, 7] = 2, -1
    assert np.allclose(omp(X, D, 4), expected, atol=1e-12)


def test_omp_copes_with_equal_atoms_and_more_atoms_than_dimensions(rng):
    D = np.vstack([np.eye(3), np.eye(3)])
    X = rng.standard_normal((10, 3))
    C = omp(X, D, 6)
    assert np.isfinite(C).all()
    assert np.allclose(C @ D, X, atol=1e-12)


def test_omp_in_pieces_is_omp(rng, unit, monkeypatch):
    X, D = rng.standard_normal((50, 8)), unit(12, 8)
    whole = omp(X, D, 3)
    monkeypatch.setattr("flwr_perdl.dictionary.coding._WORKSPACE", 100)
    assert np.allclose(omp(X, D, 3), whole, atol=1e-13)


@pytest.mark.parametrize("alpha", [0.05, 0.5])
def test_lasso_is_scikit_learns(rng, unit, alpha):
    X, D = rng.standard_normal((6, 12)), unit(20, 12)
    ours = lasso(X, D, alpha, tol=1e-12, max_iter=20000)
    assert ours.converged
    oracle = SklearnLasso(alpha=alpha / 12, fit_intercept=False, tol=1e-12, max_iter=100000)
    expected = np.stack([oracle.fit(D.T, x).coef_ for x in X])
    assert np.allclose(ours.codes, expected, atol=1e-7)


def test_lasso_optimality(rng, unit):
    X, D = rng.standard_normal((30, 10)), unit(15, 10)
    codes, n_iter, violation, converged = lasso(X, D, 0.3)
    products = (X - codes @ D) @ D.T
    scale = np.abs(X @ D.T).max()
    assert converged
    assert n_iter > 0
    assert violation <= 1e-8
    assert np.abs(products[codes != 0] - 0.3 * np.sign(codes[codes != 0])).max() < 1e-7 * scale
    assert np.abs(products[codes == 0]).max() < 0.3 + 1e-7 * scale


def test_lasso_with_orthonormal_atoms_is_the_soft_threshold(rng, orthonormal):
    X, D = rng.standard_normal((20, 8)), orthonormal(6, 8)
    result = lasso(X, D, 0.4)
    assert np.allclose(result.codes, soft_threshold(X @ D.T, 0.4), atol=1e-12)


def test_lasso_says_when_it_has_not_converged(rng, unit):
    result = lasso(rng.standard_normal((5, 10)), unit(40, 10), 0.01, max_iter=2)
    assert result.n_iter == 2
    assert not result.converged


@pytest.mark.parametrize("option", [{"n_nonzero": 2}, {"threshold": 0.1}, {"alpha": 0.1}])
def test_sparse_code_keeps_float32_and_its_inputs(rng, unit, option):
    X, D = rng.standard_normal((5, 6)).astype(np.float32), unit(8, 6).astype(np.float32)
    before = X.copy(), D.copy()
    C = sparse_code(X, D, **option)
    assert C.shape == (5, 8)
    assert C.dtype == np.float32
    assert np.allclose(C, sparse_code(X.astype(float), D.astype(float), **option), atol=1e-4)
    assert np.array_equal(X, before[0])
    assert np.array_equal(D, before[1])
    assert sparse_code(X[:0], D, **option).shape == (0, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "Exactly one of n_nonzero, threshold and alpha must be given, got 0"),
        ({"n_nonzero": 1, "alpha": 0.1}, "got 2"),
        ({"alpha": 0.0}, "alpha must be in"),
        ({"threshold": -1.0}, "threshold must be in"),
        ({"n_nonzero": 1.5}, "n_nonzero must be an integer"),
    ],
)
def test_sparse_code_says_what_is_wrong(options, message):
    with pytest.raises(ValueError, match=message):
        sparse_code(np.ones((2, 3)), np.eye(3), **options)


@settings(max_examples=25, deadline=None)
@given(arrays(float, (4, 6), elements=st.floats(-5, 5)), st.integers(0, 6))
def test_more_atoms_never_fit_worse(X, k):
    D = np.vstack([np.eye(6), np.full((1, 6), 6**-0.5)])
    errors = [
        ((X - reconstruct(sparse_code(X, D, n_nonzero=n), D)) ** 2).sum(axis=1) for n in (k, k + 1)
    ]
    assert (errors[1] <= errors[0] + 1e-9).all()


def test_reconstruct_checks_shapes():
    with pytest.raises(ValueError, match="C must have 3 columns"):
        reconstruct(np.ones((2, 4)), np.eye(3))
