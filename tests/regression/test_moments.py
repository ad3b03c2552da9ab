from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from flwr_perdl.regression import moment_step, residual_moment
from flwr_perdl.regression.moments import left_subspace


def client(n: int = 6, d: int = 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n)
    return rng.standard_normal((n, d)), rng.standard_normal(n), rng.standard_normal((3, d))


def test_u_statistic_is_the_sum_over_all_pairs() -> None:
    X, y, thetas = client()
    found = residual_moment(X, y, thetas, np.tile(np.eye(4), (3, 1, 1)))
    for h in range(3):
        eps = (y - X @ thetas[h])[:, None] * X
        pairs = sum(np.outer(eps[i], eps[j]) for i, j in permutations(range(6), 2))
        np.testing.assert_allclose(found[h], pairs / 5, atol=1e-12)


@pytest.mark.parametrize("n", [6, 7])
def test_halves_are_the_outer_product_of_two_means(n: int) -> None:
    X, y, thetas = client(n)
    Q = np.random.default_rng(0).standard_normal((3, 4, 2))
    straight = residual_moment(X, y, thetas, Q, estimate="halves")
    across = residual_moment(X, y, thetas, Q, estimate="halves", transpose=True)
    for h in range(3):
        eps = (y - X @ thetas[h])[:, None] * X
        Y = n * np.outer(eps[:3].mean(axis=0), eps[3:6].mean(axis=0))
        np.testing.assert_allclose(straight[h], Y @ Q[h], atol=1e-12)
        np.testing.assert_allclose(across[h], Y.T @ Q[h], atol=1e-12)


def test_a_pair_is_the_first_two_points() -> None:
    X, y, thetas = client()
    Q = np.eye(4)[None]
    found = residual_moment(X, y, thetas[:1], Q, estimate="pair")
    eps = (y - X @ thetas[0])[:, None] * X
    np.testing.assert_allclose(found[0], np.outer(eps[0], eps[1]), atol=1e-12)


@pytest.mark.parametrize("estimate", ["u-statistic", "halves", "pair"])
def test_one_point_says_nothing(estimate: str) -> None:
    X, y, thetas = client(1)
    Q = np.ones((3, 4, 2))
    assert not residual_moment(X, y, thetas, Q, estimate=estimate).any()


def angle(A: np.ndarray, B: np.ndarray) -> float:
    """The sine of the largest angle between two subspaces of one dimension."""
    return float(np.linalg.norm(A @ A.T - B @ B.T, 2))


def test_federated_orthogonal_iteration_finds_left_singular_vectors() -> None:
    """Algorithm 3: products with Y and its transpose take turns."""
    rng = np.random.default_rng(6)
    Y = rng.standard_normal((12, 2)) @ rng.standard_normal((2, 12))
    Y += 0.01 * rng.standard_normal((12, 12))
    Q = np.linalg.qr(rng.standard_normal((1, 12, 2)))[0]
    for _ in range(10):
        Q = np.linalg.qr(Y @ Q)[0]
        product = Y.T @ Q
        U = left_subspace(Q, product, 2)[0]
        Q = np.linalg.qr(product)[0]
    assert angle(U, np.linalg.svd(Y)[0][:, :2]) < 1e-8


def test_least_squares_in_the_subspace() -> None:
    X, y, thetas = client(20)
    U = np.linalg.qr(np.random.default_rng(1).standard_normal((4, 2)))[0]
    moved = moment_step(X, y, thetas[0], U)
    residual = y - X @ moved
    np.testing.assert_allclose(U.T @ X.T @ residual, 0, atol=1e-12)
    step = moved - thetas[0]
    np.testing.assert_allclose(U @ U.T @ step, step, atol=1e-12)


def test_nothing_moves_along_directions_in_which_the_points_hardly_vary() -> None:
    rng = np.random.default_rng(3)
    a, b, noise = rng.standard_normal((3, 12))
    X = np.column_stack([a, a + 1e-3 * b])
    y = X @ [1.0, 1.0] + noise
    alone = np.linalg.lstsq(X, y, rcond=None)[0]
    assert np.abs(alone).max() > 50  # noise over 1e-3 sqrt(12)
    moved = moment_step(X, y, np.array([0.3, 0.1]), np.eye(2))
    assert moved[0] - moved[1] == pytest.approx(0.2, abs=1e-2)
    best = a @ y / (a @ a)  # of models of the sum alone
    assert moved.sum() == pytest.approx(best, abs=1e-2)


def test_the_papers_step_halves_the_error() -> None:
    """eta = sigma / 2 with sigma = ||delta||, for standard normal features in plenty."""
    rng = np.random.default_rng(8)
    delta = np.array([2.0, -1.0, 0.5])
    X = rng.standard_normal((40000, 3))
    moved = moment_step(X, X @ delta, np.zeros(3), np.eye(3), step="paper")
    np.testing.assert_allclose(moved, delta / 2, atol=0.05)


@pytest.mark.parametrize("step", ["least-squares", "paper"])
def test_steps_without_information_stay_finite(step: str) -> None:
    U = np.eye(3)[:, :2]
    X = np.array([[1.0, 1.0, 1.0]])
    assert np.isfinite(moment_step(X, np.ones(1), np.zeros(3), U, step=step)).all()
    zero = moment_step(np.zeros((4, 3)), np.ones(4), np.ones(3), U, step=step)
    np.testing.assert_array_equal(zero, np.ones(3))
