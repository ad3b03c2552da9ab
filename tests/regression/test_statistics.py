from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression

from flwr_perdl.regression import choose_mixture, model_error, sufficient_statistics
from perdl_experiments.mixed_regression_data import Mixed, mixed_regression, oracle


def planted(noise: float = 0.3, clusters: int = 3) -> Mixed:
    rng = np.random.default_rng(4)
    shares = np.full(clusters, 1 / clusters)
    return mixed_regression(rng.integers(8, 30, 60), shares, rng, d=5, noise=noise)


def by_client(data: Mixed, n_folds: int = 1) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.stack(
        [sufficient_statistics(X, y, n_folds, rng=rng) for X, y in zip(data.X, data.y, strict=True)]
    )


def choose(statistics: np.ndarray, *candidates: Any, **options: Any) -> Any:
    return choose_mixture(statistics, *candidates, rng=np.random.default_rng(0), **options)


def fit(data: Mixed, k: int, **options: float) -> Any:
    return choose(by_client(data, 2), (k,), **{"shrinkage": 0, **options}).mixture


def test_folds_add_up_to_the_second_moments() -> None:
    X, y = planted().X[0], planted().y[0]
    found = sufficient_statistics(X, y, 3, rng=np.random.default_rng(1)).sum(axis=0)
    joined = np.column_stack([X, y])
    np.testing.assert_allclose(found[1:].reshape(6, 6), joined.T @ joined, atol=1e-12)
    assert found[0] == len(X)


@pytest.mark.parametrize("shrinkage", [0, 100])
def test_one_cluster_is_least_squares(shrinkage: float) -> None:
    data = planted()
    X, y = np.vstack(data.X), np.concatenate(data.y)
    found = fit(data, 1, shrinkage=shrinkage)
    pooled = LinearRegression(fit_intercept=False).fit(X, y).coef_
    np.testing.assert_allclose(found.centers[0], pooled, atol=1e-6)
    assert found.variance == pytest.approx(np.mean((y - X @ found.centers[0]) ** 2))


def test_the_defaults_are_least_squares_of_clear_clusters() -> None:
    data = planted(noise=0.1)
    assert model_error(fit(data, 3).centers, oracle(data)) < 1e-6


@pytest.mark.parametrize("seed", range(2))
def test_data_without_noise_have_exact_models(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slopes, statistics = [1.0, -2.0], []
    for i in range(8):
        X = rng.integers(-3, 4, (5, 1)).astype(float)
        statistics.append(sufficient_statistics(X, X[:, 0] * slopes[i % 2], 2, rng=rng))
    found = choose(np.stack(statistics), (2,), shrinkage=0).mixture
    np.testing.assert_allclose(np.sort(found.centers[:, 0]), [-2, 1])


def test_shrinkage_is_so_many_points_of_all_on_the_pooled_model() -> None:
    data = planted(clusters=2)
    X, y = np.vstack(data.X), np.concatenate(data.y)
    pooled = LinearRegression(fit_intercept=False).fit(X, y).coef_
    both, responses = np.vstack([X, X]), np.concatenate([y, X @ pooled])
    found = fit(data, 2, shrinkage=50)
    for theta, weights in zip(found.centers, found.weights.T, strict=True):
        own = np.repeat(weights, [len(b) for b in data.y])
        counts = np.concatenate([own, np.full(len(X), 50 / len(X))])
        fitted = LinearRegression(fit_intercept=False).fit(both, responses, counts)
        np.testing.assert_allclose(theta, fitted.coef_, rtol=1e-6)


@pytest.mark.parametrize("origin", [0.0, 1e3])
def test_no_origin_of_the_features_matters_beside_a_constant_one(origin: float) -> None:
    """Like temperatures in kelvin, or years."""
    data = planted(clusters=2)
    folds = []
    for X, y in zip(data.X, data.y, strict=True):
        moved = np.column_stack([X + origin, np.ones(len(X))])
        folds.append(sufficient_statistics(moved, y, 5, rng=np.random.default_rng(0)))
    mixture = choose(np.stack(folds), (1, 2, 3)).mixture
    slopes = mixture.centers[:, :-1]
    distances = np.abs(data.theta[:, None] - slopes).max(axis=2).min(axis=1)
    assert len(slopes) == 2
    assert distances.max() < 0.1


def test_the_shrinkage_that_predicts_best_is_taken() -> None:
    rng = np.random.default_rng(1)
    data = mixed_regression(np.full(20, 10), np.full(2, 0.5), rng, d=3, noise=0.1)
    clear, strong = (choose(by_client(data, 5), **o) for o in ({}, {"shrinkage": 100.0}))
    assert min(clear.errors) < 0.02 < 0.09 < min(strong.errors)
    assert model_error(clear.mixture.centers, data.theta) < 0.1
    noisy = by_client(planted(noise=3.0), 4)
    chosen, *each = (
        min(choose(noisy, shrinkage=points).errors)
        for points in ((1.0, 10.0, 100.0), 1.0, 10.0, 100.0)
    )
    assert each[2] == min(each)
    assert chosen == pytest.approx(each[2], rel=1e-12)


def test_planted_models_and_labels_are_found() -> None:
    data = planted()
    found = fit(data, 3, restarts=8)
    assert model_error(found.centers, data.theta) < 0.15
    assert found.variance == pytest.approx(0.09, rel=0.15)
    labels = found.weights.argmax(axis=1)
    for j in range(3):
        assert len(np.unique(labels[data.labels == j])) == 1
    assert (np.diff(found.weights.sum(axis=0)) <= 0).all()


@pytest.mark.parametrize("clusters", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"shrinkage": 10, "restarts": 8}])
def test_the_number_of_clusters_is_chosen(clusters: int, options: dict[str, Any]) -> None:
    data = planted(clusters=clusters)
    choice = choose(by_client(data, 4), **options)
    assert len(choice.mixture.centers) == clusters
    np.testing.assert_allclose(choice.mixture.weights.sum(axis=1), 1)
    best = choice.errors[choice.candidates.index(clusters)]
    assert min(choice.errors) > 0.98 * best
    assert clusters == 1 or choice.errors[0] > 2 * best


def test_of_numbers_that_predict_alike_the_smallest_is_chosen() -> None:
    choice = choose(by_client(planted(noise=3.0), 4), (4, 2, 1))
    assert choice.candidates == (4, 2, 1)
    assert min(choice.errors) < choice.errors[2] < 1.02 * min(choice.errors)
    assert len(choice.mixture.centers) == 1


@pytest.mark.parametrize("fault", ["collinear", "constant", "zero"])
def test_degenerate_data_stay_finite(fault: str) -> None:
    data = planted()
    X = [np.hstack([A, A[:, :1]]) if fault == "collinear" else A for A in data.X]
    X = [np.zeros_like(A) if fault == "zero" else A for A in X]
    y = [np.ones_like(b) if fault == "constant" else b for b in data.y]
    statistics = by_client(Mixed(X, y, data.labels, data.theta), 2)
    choice = choose(statistics, (1, 3))
    assert np.isfinite(choice.mixture.centers).all()
    assert np.isfinite(choice.errors).all()


@pytest.mark.parametrize(("scale", "dtype"), [(1, float), (1e-170, float), (1, np.float32)])
def test_statistics_of_any_size_have_finite_models(scale: float, dtype: type) -> None:
    statistics = (scale * by_client(planted(), 2)).astype(dtype)
    found = choose(statistics, (2,), shrinkage=0).mixture
    assert np.isfinite(found.centers).all()
    np.testing.assert_allclose(found.weights.sum(axis=1), 1)
