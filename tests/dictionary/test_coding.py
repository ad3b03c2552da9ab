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
    normalize_atoms,
    omp,
    soft_threshold,
    sparse_code,
)

matrices = arrays(float, (3, 5), elements=st.floats(-5, 5))


def test_thresholds_by_hand():
    A = np.array([[-2.0, -0.5, 0.0, 0.5, 1.0]])
    assert np.array_equal(hard_threshold(A, 0.5), [[-2.0, -0.5, 0.0, 0.5, 1.0]])
    assert np.array_equal(hard_threshold(A, 0.6), [[-2.0, 0.0, 0.0, 0.0, 1.0]])
    assert np.array_equal(soft_threshold(A, 0.5), [[-1.5, 0.0, 0.0, 0.0, 0.5]])


@given(matrices, st.floats(0.01, 5))
def test_thresholds_minimize_their_objectives(A, t):
    """Hard: (a - c)^2 + t^2 [c != 0]; soft: (a - c)^2 / 2 + t |c|."""
    hard, soft = hard_threshold(A, t), soft_threshold(A, t)
    for c in (np.zeros_like(A), A, hard + 0.01, hard - 0.01):
        ours = (A - hard) ** 2 + t**2 * (hard != 0)
        assert (ours <= (A - c) ** 2 + t**2 * (c != 0) + 1e-9).all()
    for c in (np.zeros_like(A), A, soft + 0.01, soft - 0.01):
        ours = (A - soft) ** 2 / 2 + t * np.abs(soft)
        assert (ours <= (A - c) ** 2 / 2 + t * np.abs(c) + 1e-9).all()


@pytest.mark.parametrize("k", [1, 3, 7])
def test_omp_is_scikit_learns(rng, unit, k):
    X, D = rng.standard_normal((40, 12)), unit(25, 12)
    expected = orthogonal_mp(D.T, X.T, n_nonzero_coefs=k).T
    assert np.allclose(omp(X, D, k), expected, atol=1e-10)


def test_omp_by_residual_leaves_least_in_every_step(rng, unit):
    """Beside a least squares fit for each atom that a step could take."""
    X, D = rng.standard_normal((5, 6)), unit(9, 6)
    for x in X:
        taken = []
        for k in range(1, 5):
            left = [
                np.linalg.norm(x - np.linalg.lstsq(own.T, x, rcond=None)[0] @ own)
                for own in (D[[*taken, j]] for j in range(9))
            ]
            taken.append(int(np.argmin(left)))
            codes = omp(x[None], D, k, selection="residual")
            assert set(np.flatnonzero(codes)) == set(taken)


@pytest.mark.parametrize("selection", ["correlation", "residual"])
def test_omp_takes_the_first_of_equal_atoms_and_none_that_the_taken_span(selection):
    D = np.array([[1.0, 0, 0], [1, 0, 0], [0, 1, 0], [0.6, 0.8, 0], [-1, 0, 0], [0, 0, 1]])
    X = np.array([[3.0, 1, 0], [0, 0, 0], [1, 1, 1e-20]])
    C = omp(X, D, 3, selection=selection)
    assert np.allclose(C @ D, X, atol=1e-14)
    assert not C[:, [1, 4]].any()
    assert (np.count_nonzero(C, axis=1) <= 2).all()


@pytest.mark.parametrize("selection", ["correlation", "residual"])
def test_omp_fits_with_atoms_that_are_nearly_alike(rng, unit, selection):
    D = unit(12, 6)
    D[6:] = normalize_atoms(D[:6] + 1e-7 * rng.standard_normal((6, 6)))
    X = rng.standard_normal((100, 6))
    for x, codes in zip(X, omp(X, D, 5, selection=selection), strict=True):
        own = D[codes != 0]
        best = x - np.linalg.lstsq(own.T, x, rcond=None)[0] @ own
        assert np.linalg.norm(x - codes @ D) == pytest.approx(np.linalg.norm(best), abs=1e-8)


@pytest.mark.parametrize(
    "function", [lambda X, D: omp(X, D, 4), lambda X, D: lasso(X, D, 0.1).codes]
)
def test_codes_are_the_same_bits_in_any_number_of_threads(rng, unit, monkeypatch, function):
    X, D = rng.standard_normal((200, 8)), unit(12, 8)
    whole = function(X, D)
    monkeypatch.setattr("flwr_perdl.dictionary.coding._BLOCK", 12 * 30)
    codes = []
    for threads in ("1", "2", "64"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        codes.append(function(X, D))
    assert np.array_equal(codes[0], codes[1])
    assert np.array_equal(codes[0], codes[2])
    assert np.allclose(codes[0], whole, atol=1e-13)


def lasso_objective(X, D, C, alpha):
    return (0.5 * ((X - C @ D) ** 2).sum() + alpha * np.abs(C).sum()).item()


@pytest.mark.parametrize("alpha", [0.05, 0.5])
def test_lasso_is_scikit_learns(rng, unit, alpha):
    X, D = rng.standard_normal((6, 12)), unit(20, 12)
    ours = lasso(X, D, alpha)
    assert ours.converged
    oracle = SklearnLasso(alpha=alpha / 12, fit_intercept=False, tol=1e-12, max_iter=100000)
    expected = np.stack([oracle.fit(D.T, x).coef_ for x in X])
    assert np.allclose(ours.codes, expected, atol=1e-7)


def test_lasso_may_start_from_any_codes(rng, unit):
    X, D = rng.standard_normal((20, 10)), unit(30, 10)
    D[4] = 0  # an atom that was withheld
    cold = lasso(X, D, 0.2)
    start = rng.standard_normal((20, 30))
    before = start.copy()
    found = lasso(X, D, 0.2, start=start)
    assert np.array_equal(start, before)
    assert found.converged
    assert np.allclose(found.codes, cold.codes, atol=1e-6)
    again = lasso(X, D, 0.2, start=cold.codes)
    assert again.n_iter == 0
    assert np.array_equal(again.codes, cold.codes)


def test_the_gap_bounds_what_the_objective_can_still_lose(rng, unit):
    X, D = rng.standard_normal((1, 10)), unit(40, 10)
    best = lasso_objective(X, D, lasso(X, D, 0.01, tol=0.0).codes, 0.01)
    for sweeps in (0, 1, 2, 4):
        codes, n_iter, gap, converged = lasso(X, D, 0.01, max_iter=sweeps)
        assert n_iter == sweeps
        assert not converged
        lost = lasso_objective(X, D, codes, 0.01) - best
        assert 0 < lost <= gap * 0.5 * (X**2).sum()


@settings(max_examples=50, deadline=None)
@given(
    arrays(float, (3, 4), elements=st.integers(-3, 3).map(float)),
    arrays(float, (7, 4), elements=st.integers(-2, 2).map(float)),
    st.sampled_from([0.01, 1.0, 2.0]),
    st.booleans(),
)
def test_lasso_ends_where_atoms_are_equal_or_products_are_tied(X, D, alpha, warm):
    """Whole numbers: atoms that are zero, equal, opposite or dependent, and codes that tie."""
    start = np.ones((3, 7)) if warm else None
    found = lasso(X, D, alpha, start=start)
    assert found.converged
    products = (X - found.codes @ D) @ D.T
    assert np.abs(products).max() < alpha + 1e-3
    slack = alpha * np.abs(found.codes).sum() - (found.codes * products).sum()
    assert slack < 1e-6


def test_lasso_in_float32_is_float64s(rng, unit):
    X, D = rng.standard_normal((30, 12)).astype(np.float32), unit(40, 12).astype(np.float32)
    for alpha in (1.0, 1e-3):
        found = lasso(X, D, alpha)
        wide = lasso(X.astype(float), D.astype(float), alpha)
        assert found.codes.dtype == np.float32
        assert found.converged
        assert lasso_objective(X, D, found.codes.astype(float), alpha) == pytest.approx(
            lasso_objective(X, D, wide.codes, alpha), rel=1e-4
        )


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


@pytest.mark.parametrize("options", [{}, {"n_nonzero": 1, "alpha": 0.1}])
def test_sparse_code_has_one_method(options):
    with pytest.raises(ValueError, match="n_nonzero"):
        sparse_code(np.ones((2, 3)), np.eye(3), **options)
