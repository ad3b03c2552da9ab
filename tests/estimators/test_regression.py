from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from flwr_perdl.estimators import MixedRegression

SLOPES = np.array([[2.0, 0.0, 1.0], [-1.0, 1.0, 0.0]])


N = 24


@cache
def planted(n_groups: int = N, n: int = 15) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Even groups follow the first slopes, odd groups the second; the rows are shuffled."""
    rng = np.random.default_rng(0)
    groups = rng.permutation(np.repeat(np.arange(n_groups), n))
    X = rng.standard_normal((len(groups), 3))
    y = np.sum(X * SLOPES[groups % 2], axis=1) + 0.1 * rng.standard_normal(len(groups))
    return X, y, groups


@cache
def fitted() -> MixedRegression:
    return MixedRegression(2).fit(*planted())


@pytest.mark.parametrize("k", [2, "auto"])
def test_models_and_members_are_found(k: Any) -> None:
    X, y, groups = planted()
    names = np.array([f"ward {i:02d}" for i in range(N)])
    model = MixedRegression(k).fit(X, y, names[groups])
    np.testing.assert_array_equal(model.groups_, names)
    assert model.coef_.shape == (2, 3)
    np.testing.assert_allclose(model.coef_[model.labels_], SLOPES[np.arange(N) % 2], atol=0.05)
    for j in range(2):  # the oracle: least squares on the cluster's points
        mine = np.isin(groups % 2, j)
        *oracle, level = np.linalg.lstsq(np.c_[X, np.ones(len(X))][mine], y[mine], rcond=None)[0]
        np.testing.assert_allclose(model.coef_[model.labels_[j]], oracle, atol=1e-3)
        np.testing.assert_allclose(model.intercept_[model.labels_[j]], level, atol=1e-3)
    assert model.score(X, y, names[groups]) > 0.99
    np.testing.assert_allclose(
        model.predict(X, names[groups]),
        np.sum(X * model.coef_[model.labels_[groups]], axis=1)
        + model.intercept_[model.labels_[groups]],
    )


def test_units_and_offsets_do_not_matter() -> None:
    """Without standardized numbers an offset of twenty gives six models instead of two."""
    X, y, groups = planted()
    levels = -1e4 + np.array([-0.5, 0.5])[groups % 2]
    scales, shifts = np.array([1e3, 1.0, 1e-4]), np.array([0.0, 50.0, -1.0])
    table = np.c_[scales * X + shifts, np.full(len(X), 7.0)]
    model = MixedRegression().fit(table, 30 * (y + levels), groups)
    assert model.coef_.shape == (2, 4)
    found = model.coef_[model.labels_][:, :3] * scales / 30
    np.testing.assert_allclose(found, SLOPES[np.arange(N) % 2], atol=0.05)
    assert not model.coef_[:, 3].any()
    assert model.score(table, 30 * (y + levels), groups) > 0.99
    plain = MixedRegression(2, fit_intercept=False).fit(X, y, groups)
    assert not plain.intercept_.any()


def test_new_groups_are_assigned_by_their_own_points() -> None:
    X, y, groups = planted()
    model = fitted()
    np.testing.assert_array_equal(model.assign(X, y, groups), model.labels_[groups])
    alone = groups == 4
    assert (model.assign(X[alone], y[alone]) == model.labels_[4]).all()


def test_a_new_group_has_the_model_that_its_own_responses_follow() -> None:
    model = fitted()
    X = np.random.default_rng(1).standard_normal((6, 3))
    truth = X @ SLOPES[1]
    told = np.where(np.arange(6) < 3, truth, np.nan)
    np.testing.assert_allclose(model.predict(X, y_own=told), truth, atol=0.2)
    both = model.predict(X, groups=[0, 0, 99, 99, 0, 99], y_own=truth)  # 0 was in fit: its model
    np.testing.assert_allclose(both[[0, 1, 4]], X[[0, 1, 4]] @ SLOPES[0], atol=0.2)
    np.testing.assert_allclose(both[[2, 3, 5]], truth[[2, 3, 5]], atol=0.2)
    with pytest.raises(ValueError, match=r"^y_own"):
        model.predict(X, groups=[0, 0, 0, 0, 0, 99])
    with pytest.raises(ValueError, match=r"^y_own"):
        model.predict(X)


def test_a_group_with_too_few_points_has_a_label_and_no_part() -> None:
    X, y, groups = planted()
    few = np.append(np.flatnonzero(groups != 7), np.flatnonzero(groups == 7)[:2])
    model = MixedRegression(2).fit(X[few], y[few], groups[few])
    without = MixedRegression(2).fit(X[groups != 7], y[groups != 7], groups[groups != 7])
    np.testing.assert_array_equal(model.coef_, without.coef_)
    assert model.labels_[7] == model.labels_[1]
    with pytest.raises(ValueError, match="min_support=99"):
        MixedRegression(2, min_support=99).fit(X, y, groups)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"y": np.zeros(3)}, "y"),
        ({"groups": np.zeros((N * 15, 1))}, "groups"),
        ({"groups": [None] * (N * 15)}, "groups"),
        ({"groups": [np.nan] * (N * 15)}, "groups"),
        ({"groups": np.array(["a", 1] * (N * 15 // 2), dtype=object)}, "groups"),
        ({"X": np.full((N * 15, 3), np.inf)}, "X"),
    ],
)
def test_wrong_input_is_named(change: dict[str, Any], said: str) -> None:
    given = dict(zip(("X", "y", "groups"), planted(), strict=True))
    with pytest.raises(ValueError, match=f"^{said}"):
        MixedRegression(2).fit(**{**given, **change})


@pytest.mark.parametrize(("constant", "dtype"), [(3.3, np.float32), (0.0, np.float64)])
def test_a_constant_column_has_the_coefficient_0(constant: float, dtype: type) -> None:
    X, y, groups = planted()
    X = np.column_stack([X, np.full(len(X), constant)]).astype(dtype)
    model = MixedRegression(3, rounds=20).fit(X, y.astype(dtype), groups)
    np.testing.assert_array_equal(model.coef_[:, -1], 0)
    assert model.score(X, y, groups) > 0.9
