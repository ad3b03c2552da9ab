"""PersonalizedRidge: what is planted is found, in the units of the data."""

from __future__ import annotations

import numpy as np
import pytest
import sklearn
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from flwr_perdl.estimators import PersonalizedRidge

RNG = np.random.default_rng(0)
N = 12
GROUPS = RNG.permutation(np.repeat(np.arange(N), 40))
X = RNG.standard_normal((len(GROUPS), 3))
NOISE = RNG.standard_normal(len(GROUPS))
NAMES = np.array([f"ward {i:02d}" for i in range(N)])
LEVELS = np.linspace(-3, 3, N)[GROUPS]


def test_each_group_has_its_own_model_whatever_the_units() -> None:
    y = 1e4 + 50 * (np.sin(X[:, 0]) - X[:, 1] + LEVELS + 0.1 * NOISE)
    train = np.arange(len(y)) % 2 == 0
    model = PersonalizedRidge("personal", features=50)
    model.fit(X[train], y[train], NAMES[GROUPS[train]])
    np.testing.assert_array_equal(model.groups_, NAMES)
    assert model.score(X[~train], y[~train], NAMES[GROUPS[~train]]) > 0.95
    new = model.predict(X, groups=["elsewhere"] * len(X))
    np.testing.assert_array_equal(new, model.predict(X))
    assert abs(new.mean() - y.mean()) < 20


def test_groups_of_clusters_have_their_cluster_s_model() -> None:
    y = X[:, 0] * np.where(GROUPS % 2, 3, -1) + 0.1 * NOISE
    table = np.where(RNG.random(X.shape) < 0.05, np.nan, X)
    model = PersonalizedRidge("groups", features=0).fit(table, y, GROUPS)
    assert len(model.shared_coef_) == 2
    assert model.score(X, y, GROUPS) > 0.9
    with pytest.raises(ValueError, match="groups must be some that fit saw"):
        model.predict(X)


def test_a_group_with_too_few_samples_takes_no_part() -> None:
    y = X[:, 0] + LEVELS
    few = np.append(np.flatnonzero(GROUPS != 7), np.flatnonzero(GROUPS == 7)[:2])
    how = {"level": "personal", "features": 0}
    model = PersonalizedRidge(**how).fit(X[few], y[few], GROUPS[few])
    without = PersonalizedRidge(**how).fit(X[GROUPS != 7], y[GROUPS != 7], GROUPS[GROUPS != 7])
    np.testing.assert_array_equal(model.predict(X, GROUPS), without.predict(X, GROUPS))
    with pytest.raises(ValueError, match="min_support=99"):
        PersonalizedRidge(min_support=99).fit(X, y, GROUPS)


def test_groups_reach_the_end_of_a_pipeline() -> None:
    y = X @ [2.0, -1.0, 0.0] + LEVELS + 0.1 * NOISE
    with sklearn.config_context(enable_metadata_routing=True):
        model = make_pipeline(StandardScaler(), PersonalizedRidge("personal", features=0))
        assert model.fit(X, y, groups=GROUPS).score(X, y, groups=GROUPS) > 0.95
