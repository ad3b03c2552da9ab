from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure

from flwr_perdl.dictionary import OrthogonalLearner
from flwr_perdl.estimators import MixedRegression, PersonalizedDictionaryLearning
from perdl_experiments.estimator_plots import plot_clusters, plot_sharing, sharing

BASIS = np.linalg.qr(np.random.default_rng(0).standard_normal((8, 8)))[0]


def test_who_shares_what_is_drawn_and_adds_up() -> None:
    # Sites 0 and 1 share two atoms; site 1 uses the first three times as much as the second.
    rng = np.random.default_rng(1)
    weights = [np.array([1.0, 1.0, 1.0, 1.0]), np.array([3.0, 1.0, 1.0, 1.0])]
    tables = [
        rng.choice([-1, 0, 1], (300, 4), p=[0.2, 0.6, 0.2])
        * weights[i]
        @ BASIS[[0, 1, 2 + 2 * i, 3 + 2 * i]]
        for i in range(2)
    ]
    model = PersonalizedDictionaryLearning(4, 2, learner=OrthogonalLearner, rounds=4).fit(tables)
    shares = sharing(model, tables)
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    first = int(np.abs(model.global_atoms_ @ BASIS[0]).argmax())
    np.testing.assert_allclose(shares[1, [first, 1 - first, 2]], [3 / 6, 1 / 6, 2 / 6], atol=0.05)
    axes = plot_sharing(model, tables, axes=Figure().add_subplot())
    np.testing.assert_allclose(axes.get_images()[0].get_array(), shares)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "1", "own"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1"]


def test_every_groups_own_model_is_the_lowest_point() -> None:
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(10), 20)
    X = rng.standard_normal((200, 2))
    y = np.where(groups % 2, X[:, 0], -X[:, 1]) + 0.01 * rng.standard_normal(200)
    model = MixedRegression(2, rounds=20).fit(X, y, groups)
    axes = plot_clusters(model, X, y, groups, axes=Figure().add_subplot())
    drawn = np.array([line.get_ydata() for line in axes.get_lines()])
    np.testing.assert_array_equal(drawn.argmin(axis=0), np.sort(model.labels_))
    assert drawn.min(axis=0).max() == pytest.approx(0.01, rel=0.5)
    names = [int(label.get_text()) for label in axes.get_xticklabels()]
    np.testing.assert_array_equal(model.labels_[names], np.sort(model.labels_))
