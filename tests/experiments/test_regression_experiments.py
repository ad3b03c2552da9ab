"""The experiments of mixed regression: figures from arithmetic, batched is Flower, bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import multivariate_normal
from sklearn.linear_model import Ridge

from flwr_perdl.regression import sufficient_statistics
from perdl_experiments.mixed_model import fit_mixed_model, shrink_to_pooled
from perdl_experiments.studies import mixed_regression, regression
from tests.studies import Ran, compute_all, run_study, save, slopes


def run(experiment: Any, keep: Any = compute_all, **options: Any) -> Ran:
    names = {mixed_regression: "mixed-regression", regression: "regression"}
    return run_study(names[experiment], keep, **options)


def study(errors: Any, oracle: Any, found: Any) -> mixed_regression.Study:
    name = "ours"
    runs = {f"{name}/errors": errors, f"{name}/found": found, "oracle": oracle}
    arrays = {part: np.array(values) for part, values in runs.items()}
    return mixed_regression.Study("C1", name, arrays)


def test_a_run_counts_from_the_round_on_in_which_it_stays_close() -> None:
    near, far, nan = 1.04, 2.0, np.nan
    errors = [[nan, near, far, near], [nan, near, near, near], [near] * 4, [near, near, near, far]]
    found = study(errors, [1.0] * 4, [3, 3, 4, 3])
    np.testing.assert_array_equal(found.rounds("ours"), [4, 2, 1, np.inf])
    np.testing.assert_array_equal(found.ratio("ours"), [near, near, near, far])
    np.testing.assert_array_equal(found.good("ours"), [True, True, False, False])
    slow = study([[far] * 100 + [near]], [1.0], [3])
    assert not slow.good("ours")[0]


# Your own data --------------------------------------------------------------------------------


def test_few_points_of_clear_clusters_are_not_shrunk(tmp_path: Path) -> None:
    rng, client = np.random.default_rng(1), np.repeat(np.arange(20), 10)
    X = rng.standard_normal((200, 3))
    slopes = np.where(client[:, None] % 2, [-3.0, 1.0, 0.0], [1.0, 2.0, 3.0])
    y = np.sum(X * slopes, axis=1) + 0.1 * rng.standard_normal(200)
    for k in ("auto", "2"):
        metrics = run(regression, data=save(tmp_path, X=X, y=y, client=client), splits=1, k=k)
        assert metrics.metrics["k"] == 2
        assert metrics.metrics["ev_clustered"] > 0.99


def patients() -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    """Fifteen clients with random intercepts and slopes, and their sums in three folds."""
    rng = np.random.default_rng(0)
    X = [np.column_stack([rng.standard_normal((n, 2)), np.ones(n)]) for n in range(3, 18)]
    thetas = [1, 2, 3] + [1.0, 0.2, 0.5] * rng.standard_normal((len(X), 3))
    y = [A @ theta + 0.5 * rng.standard_normal(len(A)) for A, theta in zip(X, thetas, strict=True)]
    pairs = zip(X, y, strict=True)
    return X, y, np.stack([sufficient_statistics(A, b, 3, rng=rng) for A, b in pairs])


@pytest.mark.parametrize("correlated", [False, True])
def test_the_mixed_model_of_sums_is_that_of_the_points(correlated: bool) -> None:
    X, y, statistics = patients()
    found = fit_mixed_model(statistics.sum(axis=1), correlated=correlated)
    between = found.between
    assert bool(between[0, 1]) == correlated
    spreads = [A @ between @ A.T + found.noise * np.eye(len(A)) for A in X]
    likelihood = [
        multivariate_normal.logpdf(b, A @ found.common, V)
        for A, b, V in zip(X, y, spreads, strict=True)
    ]
    assert found.history[-1] == pytest.approx(sum(likelihood))
    assert np.diff(found.history).min() > 0
    weighted = [np.linalg.solve(V, A) for A, V in zip(X, spreads, strict=True)]
    sums = (sum(W.T @ b for W, b in zip(weighted, other, strict=True)) for other in (X, y))
    np.testing.assert_allclose(found.common, np.linalg.solve(*sums))
    for A, b, W, own in zip(X, y, weighted, found.models, strict=True):
        np.testing.assert_allclose(
            own, found.common + between @ W.T @ (b - A @ found.common), atol=1e-12
        )


def test_shrinking_to_the_pooled_model_is_ridge_on_its_residuals() -> None:
    X, y, statistics = patients()
    pooled = np.linalg.lstsq(np.vstack(X), np.concatenate(y), rcond=None)[0]
    for A, b, own in zip(X, y, shrink_to_pooled(statistics, (2.0,)), strict=True):
        ridge = Ridge(2.0, fit_intercept=False).fit(A, b - A @ pooled)
        np.testing.assert_allclose(own, pooled + ridge.coef_)
    chosen = shrink_to_pooled(statistics, (1e9, 1.0, 1e8))
    np.testing.assert_array_equal(chosen, shrink_to_pooled(statistics, (1.0,)))


def test_odd_data_end_well(tmp_path: Path) -> None:
    data = slopes()
    data["X"] = np.column_stack([data["X"], data["X"][:, 0], np.ones(len(data["y"]))])
    keep = np.array([name != "c03" for name in data["client"]])
    keep[np.flatnonzero(~keep)[0]] = True  # a client with one point
    odd = {name: values[keep] for name, values in data.items()}
    outcome = run(regression, data=save(tmp_path, **odd), splits=1)
    assert outcome.metrics["ev_clustered"] > 0.9
    odd["y"] = np.full_like(odd["y"], 2.0)
    constant = run(regression, data=save(tmp_path, **odd), splits=1)
    assert np.isfinite(list(constant.metrics.values())).all()
