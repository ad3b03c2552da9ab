from __future__ import annotations

import cvxpy as cp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import huber

from flwr_perdl.network.objectives import (
    Biclustering,
    HuberNMF,
    NonnegativeMF,
    Objective,
    SparseSVD,
)
from tests.network.objectives import each_of, four

every = each_of(four(0.3, 0.5, beta=0.2, eta=0.7))
rows = arrays(np.float64, (3, 4), elements=st.floats(-4, 4, allow_subnormal=False))


@every
@given(U=rows, V=rows)
def test_fenchel_young_of_the_loss(objective: Objective, U: np.ndarray, V: np.ndarray) -> None:
    NU = objective.project(V)
    inner = (NU * U).sum(axis=1)
    assert (objective.loss(U) + objective.conjugate(NU) >= inner - 1e-12).all()
    best = objective.conjugate_gradient(NU)
    at_best = (NU * best).sum(axis=1) - objective.loss(best)
    np.testing.assert_allclose(objective.conjugate(NU), at_best, atol=1e-12)


@every
@given(Y=rows, S=rows)
def test_fenchel_young_of_the_regulariser(
    objective: Objective, Y: np.ndarray, S: np.ndarray
) -> None:
    Y = np.abs(Y) if objective.nonnegative else Y
    inner = (S * Y).sum(axis=1)
    assert (objective.regulariser(Y) + objective.regulariser_conjugate(S) >= inner - 1e-12).all()
    best = objective.code(S)
    at_best = (S * best).sum(axis=1) - objective.regulariser(best)
    np.testing.assert_allclose(objective.regulariser_conjugate(S), at_best, atol=1e-12)


@every
@given(A=rows, B=rows)
def test_a_projection_is_the_nearest_point(
    objective: Objective, A: np.ndarray, B: np.ndarray
) -> None:
    for project in (objective.project, objective.project_dictionary):
        nearest, inside = project(A), project(B)
        np.testing.assert_allclose(project(nearest), nearest, atol=1e-12)
        assert (((A - nearest) * (inside - nearest)).sum(axis=1) <= 1e-10).all()


@every
def test_prox_and_projection_of_atoms_solve_their_problems(objective: Objective) -> None:
    rng = np.random.default_rng(1)
    step = 0.8
    for row in rng.standard_normal((5, 6)) * rng.uniform(0.2, 2, (5, 1)):
        w = cp.Variable(6)
        penalty = step * objective.beta if isinstance(objective, Biclustering) else 0.0
        cost = cp.sum_squares(w - row) / 2 + penalty * cp.norm1(w)
        cp.Problem(cp.Minimize(cost)).solve()
        np.testing.assert_allclose(objective.prox_dictionary(row, step), w.value, atol=1e-5)
        limits = [cp.norm2(w) <= 1, *([w >= 0] if objective.nonnegative else [])]
        cp.Problem(cp.Minimize(cp.sum_squares(w - row)), limits).solve()
        np.testing.assert_allclose(objective.project_dictionary(row), w.value, atol=1e-5)


def test_values_by_hand() -> None:
    U = np.array([[3.0, -4.0, 0.0]])
    S = np.array([[2.0, -2.0, 0.5]])
    svd, nmf = SparseSVD(1.0, 0.5), NonnegativeMF(1.0, 0.5)
    assert svd.loss(U) == pytest.approx([12.5])
    assert svd.regulariser(S) == pytest.approx([4.5 + 0.25 * 8.25])
    assert nmf.regulariser(S) == np.inf
    np.testing.assert_allclose(svd.code(S), [[2.0, -2.0, 0.0]])
    np.testing.assert_allclose(nmf.code(S), [[2.0, 0.0, 0.0]])


def test_huber_by_hand_and_by_scipy() -> None:
    objective = HuberNMF(0.1, 0.1, eta=0.5)
    U = np.array([[0.25, -2.0]])
    assert objective.loss(U) == pytest.approx([0.0625 + 1.75])
    grid = np.linspace(-3, 3, 41)[:, None]
    np.testing.assert_allclose(objective.loss(grid), huber(0.5, grid[:, 0]) / 0.5)
    assert objective.conjugate(np.array([[1.01, 0.0]])) == np.inf


def test_table_iii() -> None:
    assert SparseSVD(0.1, 0.5).step_bound(3) == pytest.approx(1 / (1 + 3 / 0.5))
    assert HuberNMF(0.1, 0.5, 0.2).step_bound(1) == pytest.approx(1 / (0.2 + 1 / 0.5))
    assert HuberNMF(0.1, 0.5, 0.2).step_bound(1, 50) == pytest.approx(1 / (0.004 + 1 / 0.5))


@every
def test_the_step_bound_is_the_gradients_lipschitz_constant(objective: Objective) -> None:
    rng = np.random.default_rng(0)
    W = objective.project_dictionary(5 * rng.standard_normal((3, 6)))
    A, B = objective.project(rng.standard_normal((2, 200, 6)))

    def gradient(NU: np.ndarray) -> np.ndarray:
        return objective.conjugate_gradient(NU) / 10 + objective.code(NU @ W.T) @ W

    rise = np.linalg.norm(gradient(A) - gradient(B), axis=1)
    assert (rise <= np.linalg.norm(A - B, axis=1) / objective.step_bound(3, 10)).all()


@every
def test_float32_stays_float32_and_inputs_stay_as_they_are(objective: Objective) -> None:
    A = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    before = A.copy()
    both = "loss conjugate conjugate_gradient project regulariser regulariser_conjugate"
    for method in [*both.split(), "code", "project_dictionary"]:
        value = getattr(objective, method)(A)
        assert value.dtype == np.float32, method
        assert value.shape[:2] == (2, 3)
    assert objective.prox_dictionary(A, 0.1).dtype == np.float32
    np.testing.assert_array_equal(A, before)
