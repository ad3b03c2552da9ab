from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from flwr_perdl.regression import LogisticLoss, model_error
from flwr_perdl.regression.fedx import average_updates, local_change
from flwr_perdl.regression.losses import SQUARED


def client(n: int, d: int = 6) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n)
    return rng.standard_normal((n, d)), rng.standard_normal(n), rng.standard_normal(d)


def changed(X: np.ndarray, y: np.ndarray, theta: np.ndarray, step: float, **how: Any) -> np.ndarray:
    how = {"n_steps": 5, "local": "fedavg", "loss": SQUARED} | how
    return local_change(X, y, theta, step=step, **how)


def lemma_1(gram: np.ndarray, step: float, s: int, local: str) -> np.ndarray:
    """Return the paper's ``P_i``."""
    one = np.eye(len(gram))
    if local == "fedprox":
        return np.linalg.inv(one + step * gram)
    return sum(np.linalg.matrix_power(one - step * gram, i) for i in range(s))


@pytest.mark.parametrize("n", [1, 4, 6, 15])
@pytest.mark.parametrize("s", [1, 5])
@pytest.mark.parametrize("local", ["fedavg", "fedprox"])
def test_local_work_is_lemma_1(n: int, s: int, local: str) -> None:
    X, y, theta = client(n)
    change = changed(X, y, theta, step=0.1, n_steps=s, local=local)
    P = lemma_1(X @ X.T / n, 0.1, s, local)
    np.testing.assert_allclose(change, 0.1 / n * X.T @ P @ (y - X @ theta), atol=1e-12)
    F = lemma_1(X.T @ X / n, 0.1, s, local)
    np.testing.assert_allclose(change, 0.1 / n * F @ X.T @ (y - X @ theta), atol=1e-12)


@pytest.mark.parametrize("n", [1, 4, 15])
def test_fedprox_is_scipys_minimum(n: int) -> None:
    X, y, theta = client(n)

    def objective(t: np.ndarray) -> tuple[float, np.ndarray]:
        value = np.sum((y - X @ t) ** 2) / (2 * n) + np.sum((t - theta) ** 2) / (2 * 0.3)
        return float(value), X.T @ (X @ t - y) / n + (t - theta) / 0.3

    options = {"gtol": 1e-12, "ftol": 0.0}
    best = minimize(objective, theta, jac=True, method="L-BFGS-B", options=options).x
    change = changed(X, y, theta, step=0.3, local="fedprox")
    np.testing.assert_allclose(theta + change, best, atol=1e-8)


def test_fedprox_of_another_loss_is_stationary() -> None:
    X, y, theta = client(9)
    y, loss = np.sign(y), LogisticLoss()
    moved = theta + changed(X, y, theta, step=0.4, local="fedprox", loss=loss)
    np.testing.assert_allclose(loss.gradient(X, y, moved) + (moved - theta) / 0.4, 0, atol=1e-8)


def test_fedavg_of_another_loss_is_gradient_steps() -> None:
    X, y, theta = client(9)
    y, loss = np.sign(y), LogisticLoss()
    expected = theta.copy()
    for _ in range(3):
        expected -= 0.2 * X.T @ (-y / (1 + np.exp(y * (X @ expected)))) / 9
    change = changed(X, y, theta, step=0.2, n_steps=3, loss=loss)
    np.testing.assert_allclose(theta + change, expected, atol=1e-12)


def test_averages_by_hand() -> None:
    packed = np.array([[[0.0, 1.0, 1.0]], [[0.0, 4.0, 1.0]], [[2.0, 5.0, 0.0]]])
    n = np.array([1.0, 2.0, 7.0])
    by_cluster = average_updates(packed, n, 3)
    np.testing.assert_allclose(by_cluster.value, [[3, 1], [0, 0], [5, 0]])
    np.testing.assert_array_equal(by_cluster.weight, [3, 0, 7])
    by_all = average_updates(packed, n, 3, normalise="all")
    np.testing.assert_allclose(by_all.value, [[0.9, 0.3], [0, 0], [3.5, 0]])


@pytest.mark.parametrize("robust", ["clip", "trimmed", "median", "geometric-median"])
def test_robust_averages_withstand_one_huge_update(robust: str) -> None:
    rng = np.random.default_rng(0)
    packed = np.column_stack([np.zeros(20), 1 + 0.1 * rng.standard_normal((20, 3))])[:, None]
    clean = average_updates(packed, np.ones(20), 1, robust=robust).value
    packed[7, 0, 1:] = -1e100
    n = np.ones(20)
    n[7] = 1e9
    dirty = average_updates(packed, n, 1, robust=robust).value
    assert np.abs(dirty - clean).max() < 1.2
    assert (dirty > 0).all()


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(0, 2))
def test_model_error_is_the_best_of_all_matchings(seed: int, k: int, more: int) -> None:
    rng = np.random.default_rng(seed)
    centers, theta = rng.standard_normal((k + more, 2)), rng.standard_normal((k, 2))
    distance = np.linalg.norm(theta[:, None] - centers, axis=2)
    worst = [max(distance[j, p[j]] for j in range(k)) for p in permutations(range(k + more), k)]
    assert model_error(centers, theta) == pytest.approx(min(worst))


def test_models_are_shared_where_there_are_too_few() -> None:
    assert model_error(np.zeros((1, 2)), np.array([[3.0, 4.0], [0.0, 1.0]])) == 5
