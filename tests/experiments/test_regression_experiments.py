"""The experiments of mixed regression: figures from arithmetic, batched is Flower, bad input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import multivariate_normal
from sklearn.linear_model import LinearRegression, Ridge

from flwr_perdl.regression import Refinement, model_error, sufficient_statistics
from perdl_experiments.engine import federate
from perdl_experiments.mixed_model import fit_mixed_model, shrink_to_pooled
from perdl_experiments.mixed_regression_data import mixed_regression as draw
from perdl_experiments.mixed_regression_data import oracle
from perdl_experiments.studies import mixed_regression, regression
from tests.studies import Ran, compute_all, config_of, run_study, save


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


def test_the_oracle_is_least_squares_with_the_true_labels() -> None:
    rng = np.random.default_rng(0)
    data = draw(rng.integers(5, 20, 30), np.full(3, 1 / 3), rng, d=6)
    errors = []
    for j, theta in enumerate(data.theta):
        mine = np.flatnonzero(data.labels == j)
        model = LinearRegression(fit_intercept=False)
        model.fit(np.vstack([data.X[i] for i in mine]), np.concatenate([data.y[i] for i in mine]))
        errors.append(np.linalg.norm(model.coef_ - theta))
    assert model_error(oracle(data), data.theta) == pytest.approx(max(errors))


def test_one_federation_runs_through_flower_and_is_the_batched_path() -> None:
    options = {"setting": "C1", "seeds": 1, "rounds": 9, "seed": 3}
    one = config_of("mixed-regression", **options)
    assert mixed_regression.federations(one) == [replace(one, clients=200)]
    batched = mixed_regression._one_seed("C1", 3, one)
    federated = federate(mixed_regression, replace(one, clients=200))
    errors, models = mixed_regression._federated(
        replace(one, clients=200), partial(federate, mixed_regression)
    )
    np.testing.assert_allclose(errors, batched["ours/errors"], atol=1e-10)
    assert np.isfinite(errors[3:]).all()
    assert len(models) == batched["ours/found"] == 3
    sent = (federated.floats_up, federated.floats_down)
    np.testing.assert_allclose(batched["ours/floats"][-1], sent)


def test_the_papers_first_phase_tells_the_clusters_apart() -> None:
    """Each of its models is nearer to one true model than to any other, a different one each."""
    data = mixed_regression._data("C1", 0)
    models, spent = mixed_regression.paper_start(data, np.random.default_rng(0))
    apart = np.linalg.norm(models[:, None] - data.theta, axis=2)
    assert sorted(apart.argmin(axis=1)) == [0, 1, 2]
    assert len(spent) == 10
    assert spent[0] == (10 * 100**2, 10 * 100)  # ten anchors' moments; their estimates


def test_restarts_go_on_from_the_start_that_fits_best() -> None:
    data = mixed_regression._data("C1", 0)
    clients, phase_2 = mixed_regression.Counted(data.X, data.y), Refinement(check_every=0)
    starts = [np.full((3, 100), [[1e-3], [2e-3], [3e-3]]), data.theta]
    way = mixed_regression._restarts(clients, data, phase_2, starts, 0)
    assert way.start is starts[1]
    assert len(way.spent) == mixed_regression.BUDGET // 2  # the other start's share


@pytest.mark.slow
def test_a_study_has_the_stable_figures_and_both_panels() -> None:
    kept: dict[str, Any] = {}

    def keep(name: str, compute: Callable[[], Any], of: int) -> Any:
        kept[name] = compute()
        return kept[name]

    options = {"setting": "C1", "seeds": 2, "rounds": 30}
    outcome = run(mixed_regression, keep, **options)
    assert set(kept) == {"C1-seed-0", "C1-seed-1"}
    metrics = outcome.metrics
    assert {"rounds_max", "share_k_unknown", "share_paper", "share_ifca_same"} < set(metrics)
    assert metrics["share_within_5pct_of_oracle"] == 1
    assert metrics["error_over_oracle_max"] == pytest.approx(1, abs=1e-5)
    assert 5 < metrics["rounds_median"] <= 8
    assert metrics["error_ours"] == pytest.approx(metrics["error_oracle"], rel=1e-5)
    assert metrics["error_ours"] < metrics["error_fedavg"]
    assert all(isinstance(value, float) for value in metrics.values())
    assert outcome.figures == ["fig1-C1.png"]
    assert len(outcome.outcome.figures["fig1-C1"].axes) == len(mixed_regression.PANELS)
    ours, papers = outcome.tables
    assert len(ours.rows) + len(papers.rows) == len(mixed_regression.METHODS)
    # The best of five starts is known only after 100 rounds.
    assert "share_ifca_restarts" in metrics
    assert "error_ifca_restarts" not in metrics
    for table in outcome.tables:
        assert {len(row) for row in table.rows} == {len(table.columns)}
    assert outcome.outcome.floats_up < outcome.outcome.floats_down

    def refuse() -> Any:
        raise AssertionError("a resumed run computes nothing again")

    again = run(mixed_regression, lambda name, compute, of: kept.get(name) or refuse(), **options)
    assert again.metrics == metrics


def test_several_settings_have_figures_each() -> None:
    outcome = run(mixed_regression, setting="C1,C2", seeds=1, rounds=5, k="auto")
    assert {"error_oracle", "error_oracle_C1", "error_oracle_C2"} < set(outcome.metrics)
    assert outcome.metrics["rounds_median"] == -1
    assert outcome.figures == ["fig1-C1.png", "fig2-C2.png"]


# Your own data --------------------------------------------------------------------------------


def two_kinds(seed: int = 0) -> dict[str, np.ndarray]:
    """Thirty clients, the even ones with opposite slopes to the odd ones, features of any scale."""
    rng = np.random.default_rng(seed)
    client = np.repeat(np.arange(30), rng.integers(20, 60, 30))
    X = rng.standard_normal((len(client), 3)) * [1.0, 100.0, 0.01] + [5.0, 0.0, 1.0]
    slopes = np.where(client % 2, 1.0, -1.0)[:, None] * [1.0, 0.01, 50.0]
    y = 3 + np.sum((X - [5.0, 0.0, 1.0]) * slopes, axis=1) + 0.3 * rng.standard_normal(len(client))
    return {"X": X, "y": y, "client": np.array([f"c{i:02}" for i in client])}


def test_planted_clusters_are_found_and_pay(tmp_path: Path) -> None:
    data = two_kinds()
    outcome = run(regression, data=save(tmp_path, **data), splits=1)
    metrics, clusters = outcome.metrics, outcome.arrays["clusters"]
    ceiling = 1 - 0.09 / np.var(data["y"])
    assert metrics["ev_clustered"] > ceiling - 0.05  # the models are shrunk to the pooled one
    assert metrics["ev_fedx"] > ceiling - 0.02
    assert metrics["ev_pooled"] < 0.2
    assert metrics["ev_local"] < metrics["ev_fedx"]
    for kind in (0, 1):
        assert set(clusters[kind::2]).isdisjoint(clusters[1 - kind :: 2])
    assert outcome.arrays["clients"].tolist() == sorted(set(data["client"]))
    given = run(regression, data=save(tmp_path, **data), splits=1, k="2")
    assert given.metrics["k"] == len(given.arrays["models"]) == 2
    assert len(set(given.arrays["clusters"])) == 2


def test_few_points_of_clear_clusters_are_not_shrunk(tmp_path: Path) -> None:
    rng, client = np.random.default_rng(1), np.repeat(np.arange(20), 10)
    X = rng.standard_normal((200, 3))
    slopes = np.where(client[:, None] % 2, [-3.0, 1.0, 0.0], [1.0, 2.0, 3.0])
    y = np.sum(X * slopes, axis=1) + 0.1 * rng.standard_normal(200)
    for k in ("auto", "2"):
        metrics = run(regression, data=save(tmp_path, X=X, y=y, client=client), splits=1, k=k)
        assert metrics.metrics["k"] == 2
        assert metrics.metrics["ev_clustered"] > 0.99


def test_the_clusters_of_the_bundled_tumors_are_the_diagnoses() -> None:
    outcome = run(regression, splits=2)
    assert {"ev_clustered", "ev_pooled", "ev_local", "k"} <= set(outcome.metrics)
    assert outcome.metrics["ev_clustered"] > outcome.metrics["ev_pooled"]
    assert outcome.figures == ["coefficients.png"]
    scores, _, members = outcome.tables
    assert len(scores.rows) == len(regression.METHODS)
    assert {len(row) for row in scores.rows} == {len(scores.columns)}
    kinds = [{name.split()[0] for name in row[3].split(", ")} for row in members.rows]
    assert sorted(map(sorted, kinds)) == [["benign"], ["malignant"]]


def test_the_bundled_diabetes_patients_have_one_model() -> None:
    outcome = run(regression, splits=1, bundled="diabetes", rounds=10)
    assert outcome.metrics["k"] == 1
    members = outcome.tables[-1]
    who = [name for row in members.rows for name in row[3].split(", ") if name]
    assert sorted(map(int, who)) == list(range(20))
    assert "gain_over_pooled" in outcome.metrics
    assert "gain_low_over_pooled" not in outcome.metrics  # one split tells no spread


def test_pooled_is_least_squares_on_the_training_points() -> None:
    data = regression._load("", "diabetes")
    split = regression._split(data, 4)
    train = [(X[rows], y[rows]) for X, y, rows in zip(data.X, data.y, split.train, strict=True)]
    test = [(X[rows], y[rows]) for X, y, rows in zip(data.X, data.y, split.test, strict=True)]
    X, y = (np.concatenate(part) for part in zip(*train, strict=True))
    held_X, held_y = (np.concatenate(part) for part in zip(*test, strict=True))
    expected = LinearRegression().fit(X, y).score(held_X, held_y)
    kept = regression._one_split(data, 4, 1, 10)
    assert float(kept["ev_pooled"]) == pytest.approx(expected)


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
    data = two_kinds()
    data["X"] = np.column_stack([data["X"], data["X"][:, 0], np.ones(len(data["y"]))])
    keep = np.array([name != "c03" for name in data["client"]])
    keep[np.flatnonzero(~keep)[0]] = True  # a client with one point
    odd = {name: values[keep] for name, values in data.items()}
    outcome = run(regression, data=save(tmp_path, **odd), splits=1)
    assert outcome.metrics["ev_clustered"] > 0.9
    odd["y"] = np.full_like(odd["y"], 2.0)
    constant = run(regression, data=save(tmp_path, **odd), splits=1)
    assert np.isfinite(list(constant.metrics.values())).all()


def test_its_clients_and_strategy_run_on_flower(tmp_path: Path) -> None:
    path = save(tmp_path, **two_kinds())
    one = config_of("regression", data=path, k="2", clients=30, rounds=12)
    federated = federate(regression, one)
    last = federated.history[-1]
    assert last.step == "evaluate"
    assert last.aggregate["mse"] < 0.12
    clusters = np.array([last.metrics[i]["cluster"] for i in range(30)])
    assert len(set(clusters[::2])) == len(set(clusters[1::2])) == 1
