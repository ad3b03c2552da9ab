"""Ridge regression from sums: by hand, by brute force, and beside scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import Ridge

from flwr_perdl.network import Faults, InMemoryNetwork, Topology, diffusion_averaging
from flwr_perdl.regression import RidgeModel
from flwr_perdl.regression.ridge import (
    Grouping,
    RandomFeatures,
    choose_groups,
    choose_ridge,
    column_moments,
    error_weights,
    expect_deviation,
    fit_deviation,
    fit_part,
    ridge_sums,
    solve_ridge,
    standardize,
    unpack_sums,
)

RNG = np.random.default_rng(0)
Z, Y = RNG.standard_normal((30, 5)), RNG.standard_normal((30, 2))


def test_columns_are_pooled_without_what_is_missing() -> None:
    a = np.array([[1.0, 5.0, 3.0], [3.0, np.nan, 3.0]])
    b = np.array([[5.0, 1.0, 3.0]])
    total = column_moments(a) + column_moments(b)
    np.testing.assert_array_equal(total[0], [3, 2, 3])
    means, deviations = standardize(total)
    np.testing.assert_allclose(means, [3, 3, 3])
    np.testing.assert_allclose(deviations, [np.sqrt(8 / 3), 2, 1])  # a constant column counts as 1
    rounded = column_moments(np.full((7, 1), 0.1)), column_moments(np.full((3, 1), 0.1 + 1e-17))
    assert standardize(sum(rounded))[1] == [1.0]


def test_features_are_those_of_the_definition() -> None:
    features = RandomFeatures.draw(np.array([1.0, 0.0]), np.array([2.0, 1.0]), 3, scale=2.0, seed=4)
    found = features(np.array([[3.0, 7.0], [np.nan, -7.0]]))
    x = np.array([[1.0, 5.0], [0.0, -5.0]])  # cut at 5 deviations; NaN is the mean
    np.testing.assert_allclose(found[:, :3], np.column_stack([np.ones(2), x / np.sqrt(2)]))
    waves = np.sqrt(2 / 3) * np.cos(x @ features.weights + features.offsets)
    np.testing.assert_allclose(found[:, 3:], waves)
    many = RandomFeatures.draw(np.zeros(8), np.ones(8), 4000, scale=2.0, seed=0)
    assert many.weights.var() == pytest.approx(2 / 8, rel=0.02)
    assert (many.offsets >= 0).all()
    assert (many.offsets < 2 * np.pi).all()


def test_sums_by_hand() -> None:
    sums = ridge_sums(np.array([[1.0, 2.0], [1.0, 0.0]]), np.array([[3.0], [1.0]]))
    np.testing.assert_array_equal(sums, [2, 2, 4, 4, 6, 10])
    np.testing.assert_array_equal(unpack_sums(sums, 2, 1)[0], [[2, 2], [0, 4]])
    # (Z'Z + 2 I) w = Z'y: [[4, 2], [2, 6]] w = [4, 6]
    np.testing.assert_allclose(solve_ridge(sums, 2, 1, 2.0), [[0.6], [0.8]])


def test_the_shared_model_is_ridge_of_the_pooled_rows() -> None:
    parts = sum(ridge_sums(Z[i::3], Y[i::3]) for i in range(3))
    expected = Ridge(0.7, fit_intercept=False).fit(Z, Y).coef_.T
    found = solve_ridge(parts, 5, 2, 0.7)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    assert parts @ error_weights(found) == pytest.approx(np.sum((Y - Z @ found) ** 2))


def test_the_penalty_is_that_of_the_least_error_on_left_out_folds() -> None:
    folds = np.stack([ridge_sums(Z[i::3], Y[i::3]) for i in range(3)])
    errors = {}
    for penalty in (0.1, 1.0, 10.0, 100.0, 1000.0):
        models = [Ridge(penalty, fit_intercept=False) for _ in range(3)]
        kept = [np.arange(30) % 3 != i for i in range(3)]
        errors[penalty] = sum(
            np.sum((Y[~k] - model.fit(Z[k], Y[k]).predict(Z[~k])) ** 2)
            for k, model in zip(kept, models, strict=True)
        )
    found = choose_ridge(folds, 5, 2, tuple(errors))
    assert found.penalty == min(errors, key=errors.get)
    assert found.error == pytest.approx(errors[found.penalty])
    # Without responses every model is zero: of equals the largest penalty.
    nothing = np.stack([ridge_sums(Z[i::3], 0 * Y[i::3]) for i in range(3)])
    assert choose_ridge(nothing, 5, 2).penalty == 10


@pytest.mark.parametrize("n", [4, 30])  # fewer samples than features, and more
def test_leave_one_out_is_brute_force(n: int) -> None:
    A, R = Z[:n], Y[:n]

    def direct(rows: np.ndarray, tau: float) -> np.ndarray:
        gram = A[rows] @ A[rows].T + tau * np.eye(rows.sum())
        return A[rows].T @ np.linalg.solve(gram, R[rows])

    for tau in (0.1, 3.0):
        found = fit_deviation(A, R, (tau,))
        np.testing.assert_allclose(
            found.coefficients, direct(np.ones(n, bool), tau), rtol=1e-9, atol=1e-12
        )
        kept = ~np.eye(n, dtype=bool)
        errors = sum(np.sum((R[i] - A[i] @ direct(kept[i], tau)) ** 2) for i in range(n))
        assert found.error == pytest.approx(errors, rel=1e-9)
    none = fit_deviation(A, R, (np.inf,))
    assert not none.coefficients.any()
    assert none.error == pytest.approx(np.sum(R**2))


def test_a_client_like_the_others_does_not_deviate() -> None:
    assert fit_deviation(Z, np.zeros((30, 2))).strength == np.inf  # of equals the largest
    assert fit_deviation(Z, Z @ np.ones((5, 2))).strength == 0.1
    only = fit_part(np.column_stack([np.ones(30), Z]), np.full((30, 1), 3.0), "intercept")
    assert only[0, 0] == pytest.approx(3 * 30 / 30.1)
    assert not only[1:].any()


def test_a_deviation_is_the_mean_of_a_mixed_model() -> None:
    variances, noise = RNG.uniform(0, 2, (2, 5)), np.array([0.5, 2.0])
    variances[0, 3] = 0
    found = expect_deviation(Z, Y, variances, noise)
    for j in range(2):
        T = np.diag(variances[j])
        V = Z @ T @ Z.T + noise[j] * np.eye(30)
        np.testing.assert_allclose(found[:, j], T @ Z.T @ np.linalg.solve(V, Y[:, j]), atol=1e-12)


def federation(n_groups: int, m: int = 9) -> tuple[np.ndarray, np.ndarray]:
    """Return every client's sums by fold, (3, m, ...), and the groups' models."""
    rng = np.random.default_rng(1)
    models = rng.standard_normal((n_groups, 4, 1))
    folds = []
    for i in range(m):
        A = rng.standard_normal((18, 4))
        y = A @ models[i % n_groups] + 0.1 * rng.standard_normal((18, 1))
        folds.append([ridge_sums(A[f::3], y[f::3]) for f in range(3)])
    return np.array(folds).swapaxes(0, 1), models


@pytest.mark.parametrize("k", [1, 2, 3])
def test_groups_and_their_number_are_found(k: int) -> None:
    folds, models = federation(k)
    rng = np.random.default_rng(0)
    found, without = choose_groups(folds, 4, 1, range(1, 6), 0.1, rng=rng)
    np.testing.assert_array_equal(found.members, np.arange(9) % k)
    np.testing.assert_allclose(found.models, models, atol=0.1)
    direct = np.stack([solve_ridge(folds[:, j::k].sum(axis=(0, 1)), 4, 1, 0.1) for j in range(k)])
    np.testing.assert_allclose(found.models, direct)
    assert [len(own.models) for own in without] == [k] * 3


def test_more_groups_than_clients_end_every_start() -> None:
    folds, _ = federation(2, 2)
    rng = np.random.default_rng(0)
    assert Grouping(folds.sum(axis=0), 4, 1, 1.0).fit(3, rng) is None
    assert len(choose_groups(folds, 4, 1, (1, 2, 3), 1.0, rng=rng)[0].models) == 2


def test_sums_by_consensus_are_the_total_though_a_fifth_of_the_links_fails() -> None:
    own = [ridge_sums(Z[i::12], Y[i::12]) for i in range(12)]

    class Node:
        def __init__(self, node: int) -> None:
            self.sums = own[node]

        def fit(self, parameters: Any, config: Any) -> Any:
            return ([self.sums] if config["server-round"] == 1 else parameters), 1, {}

    network = InMemoryNetwork(Topology.exponential(12), faults=Faults(drop=0.2, seed=1))
    how: Any = {"method": "push_sum", "evaluate_every": 0}
    run = diffusion_averaging(Node, network, 60, initial=[np.zeros_like(own[0])], **how)
    for model in run.models.values():
        np.testing.assert_allclose(12 * model[0], np.sum(own, axis=0), atol=1e-10)


def test_a_model_is_complete_in_its_arrays() -> None:
    features = RandomFeatures.draw(np.zeros(2), np.ones(2), 5, scale=2.0, seed=1)
    X = RNG.standard_normal((6, 2))
    w = RNG.standard_normal((8, 3))
    model = RidgeModel.of(RidgeModel(features, w, 3).to_arrays())
    np.testing.assert_array_equal(model.predict(X), (features(X) @ w).argmax(axis=1))
    shares = model.predict_proba(X)
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    none = RidgeModel(features, -np.abs(w[:1]) * np.eye(8)[:, :1], 3)
    np.testing.assert_allclose(none.predict_proba(X), 1 / 3)
    assert RidgeModel(features, w[:, :1]).predict(X).shape == (6,)
    assert RidgeModel(features, w).predict(X).shape == (6, 3)
