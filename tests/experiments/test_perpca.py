from __future__ import annotations

import numpy as np
import pytest
from scipy.linalg import subspace_angles

from flwr_perdl.dictionary import principal_directions
from perdl_experiments.perpca import (
    PCAStep,
    local_start,
    personalized_pca,
    shared_start,
    take_step,
)


def planted(
    seed: int, *, noise: float = 0.0, own: float = 2.0
) -> tuple[list[np.ndarray], np.ndarray, list[np.ndarray]]:
    """Return five clients' samples of 3 shared directions and 2 of each client's own."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.standard_normal((20, 20)))[0].T
    shared = basis[:3]
    local = [np.linalg.qr(rng.standard_normal((17, 2)))[0].T @ basis[3:] for _ in range(5)]
    samples = [
        rng.standard_normal((80, 3)) @ shared
        + own * rng.standard_normal((80, 2)) @ V
        + noise * rng.standard_normal((80, 20))
        for V in local
    ]
    return samples, shared, local


def step_of(X: np.ndarray, U: np.ndarray, V: np.ndarray) -> PCAStep:
    return take_step(X, float(np.vdot(X, X)), U, V, 1.0)


def angle(A: np.ndarray, B: np.ndarray) -> float:
    return float(subspace_angles(A.T, B.T).max())


def test_the_planted_subspaces_are_found_where_own_features_dominate() -> None:
    samples, shared, local = planted(0)
    single = personalized_pca([X.astype(np.float32) for X in samples], 3, 2, n_rounds=1)
    assert single.global_components.dtype == single.local_components[0].dtype == np.float32
    found = personalized_pca(samples, 3, 2, n_rounds=200)
    assert angle(found.global_components, shared) < 1e-6
    assert max(map(angle, found.local_components, local)) < 1e-6
    assert found.losses[-1] < 1e-6 * found.losses[0] + 1e-10


def test_noise_costs_little() -> None:
    samples, shared, _ = planted(0, noise=0.05)
    assert angle(personalized_pca(samples, 3, 2).global_components, shared) < 0.05


def test_components_are_orthonormal_and_the_loss_does_not_rise() -> None:
    rng = np.random.default_rng(0)
    samples = [rng.standard_normal((30, 12)) * np.linspace(1, 3, 12) for _ in range(4)]
    found = personalized_pca(samples, 3, 2, n_rounds=50)
    for W in [found.global_components, *found.local_components]:
        np.testing.assert_allclose(W @ W.T, np.eye(len(W)), atol=1e-10)
    assert found.losses[-1] <= found.losses[0] * (1 + 1e-12)


def test_one_client_alone_does_pca() -> None:
    X = np.random.default_rng(0).standard_normal((40, 8)) * np.arange(1, 9)
    found = personalized_pca([X], 2, 1, n_rounds=300)
    W = np.vstack([found.global_components, *found.local_components])
    assert angle(W, np.linalg.svd(X)[2][:3]) < 1e-6


def test_the_server_can_take_the_median_of_the_clients_components() -> None:
    samples, _, _ = planted(0, noise=0.3)
    U = shared_start([principal_directions(X, 5) for X in samples], 3)
    steps = [step_of(X, U, local_start(X, U, 2)).global_components for X in samples]
    found = personalized_pca(samples, 3, 2, n_rounds=1, aggregation="median").global_components
    left, _, right = np.linalg.svd(np.median(steps, axis=0), full_matrices=False)
    np.testing.assert_allclose(found, left @ right, atol=1e-10)
    mean = personalized_pca(samples, 3, 2, n_rounds=1).global_components
    assert np.abs(found - mean).max() > 1e-4
    with pytest.raises(ValueError, match="aggregation"):
        personalized_pca(samples, 3, 2, aggregation="weighted")


def test_a_step_lowers_the_clients_loss() -> None:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((30, 10)) * np.linspace(0.5, 3, 10)
    W = np.linalg.qr(rng.standard_normal((10, 4)))[0].T
    first = step_of(X, W[:2], W[2:])
    assert first.loss == pytest.approx(((X - X @ W.T @ W) ** 2).sum())
    second = step_of(X, first.global_components, first.local_components)
    assert second.loss < first.loss


def test_starts_with_too_few_samples_are_completed_or_shorter() -> None:
    X = np.random.default_rng(0).standard_normal((2, 6))
    assert principal_directions(X, 4).shape == (2, 6)
    assert principal_directions(np.zeros((3, 6)), 4).shape == (0, 6)
    U = shared_start([principal_directions(X, 4)], 3)
    np.testing.assert_allclose(U @ U.T, np.eye(3), atol=1e-12)
    V = local_start(X, U, 3)
    np.testing.assert_allclose(np.vstack([U, V]) @ np.vstack([U, V]).T, np.eye(6), atol=1e-12)
    still = step_of(np.zeros((2, 6)), U, V)
    assert still.loss == 0
    np.testing.assert_allclose(still.global_components, U, atol=1e-12)


@pytest.mark.parametrize(("n_global", "n_local"), [(1, 1), (2, 0), (0, 0)])
def test_samples_of_zeros_and_no_components_have_an_answer(n_global: int, n_local: int) -> None:
    found = personalized_pca([np.zeros((4, 3))] * 2, n_global, n_local, n_rounds=2)
    np.testing.assert_allclose(
        found.global_components @ found.global_components.T, np.eye(n_global), atol=1e-12
    )
    assert [V.shape for V in found.local_components] == [(n_local, 3)] * 2
    assert found.losses == [0, 0]


def test_components_that_few_samples_make_up_are_not_sent_and_floats_are_counted() -> None:
    samples, _, _ = planted(0)
    found = personalized_pca(samples, 3, 2, n_rounds=4, min_support=3)
    np.testing.assert_allclose(
        found.global_components, personalized_pca(samples, 3, 2, n_rounds=4).global_components
    )
    assert (found.floats_up, found.floats_down) == (5 * 20 + 4 * 3 * 20, 4 * 3 * 20)
    few = personalized_pca([X[:2] for X in samples], 3, 2, n_rounds=4, min_support=3)
    assert few.floats_up == 4 * 3 * 20  # nothing of the start
    np.testing.assert_array_equal(few.global_components, np.eye(3, 20))
