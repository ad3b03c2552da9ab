"""The experiment patients: its solver, its tables, and what is known of its results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit

from perdl_experiments.studies import patients
from perdl_experiments.studies.patients import Rows, solve
from tests.studies import config_of, run_study, save


def test_the_mixed_model_solves_its_normal_equations() -> None:
    rng = np.random.default_rng(0)
    parts = [Rows(rng.standard_normal((n, 2)), rng.standard_normal(n)) for n in (5, 8, 11)]
    common, added = solve("number", parts, 0.1, (0.5, 0.2))
    n, d, k = 24, 3, 3
    ones = [np.column_stack([one.X, np.ones(len(one.X))]) for one in parts]
    block = np.zeros((n, k * d))
    rows = np.split(np.arange(n), [5, 13])
    for i, (own, A) in enumerate(zip(rows, ones, strict=True)):
        block[own, i * d : (i + 1) * d] = A
    A, y = np.hstack([np.vstack(ones), block]), np.concatenate([one.y for one in parts])
    weight = np.diag([0.1, 0.1, 0, *np.tile([0.5, 0.5, 0.2], k) / k])
    expected = np.linalg.solve(A.T @ A / n + weight, A.T @ y / n)
    np.testing.assert_allclose(np.append(common, added), expected, atol=1e-4)


def test_a_penalized_logistic_regression_has_no_gradient() -> None:
    rng = np.random.default_rng(1)
    part = Rows(rng.standard_normal((40, 3)), (rng.random(40) < 0.4).astype(float))
    center = np.array([1.0, -1.0, 0.5, 0.2])
    theta, added = solve("class", [part], 0.3, (np.inf, np.inf), center)
    A = np.column_stack([part.X, np.ones(40)])
    gradient = A.T @ (expit(A @ theta) - part.y) / 40 + 0.3 * (theta - center)
    np.testing.assert_allclose(gradient, 0, atol=1e-4)
    assert not added.any()


def test_what_is_tested_has_learned_from_training_and_validation_rows() -> None:
    rng = np.random.default_rng(3)

    def rows(n: int) -> Rows:
        return Rows(rng.standard_normal((n, 2)), rng.standard_normal(n) + 1)

    own = [patients.Split(rows(6), rows(3), rows(4)) for _ in range(2)]
    found = patients.direct("number", own, 1, ordered=True)
    for i, one in enumerate(own):
        known = np.concatenate([one.train.y, one.choose.y])
        for method, constant in {"mean": known.mean(), "latest": known[-1]}.items():
            error = np.sqrt(np.mean((one.test.y - constant) ** 2))
            assert found[method].errors[i] == pytest.approx(error)
    leveled = patients.leveled("number", own, [np.zeros(3)] * 2)
    shifts = [one.choose.y.mean() for one in own]
    errors = [np.sqrt(np.mean((one.test.y - b) ** 2)) for one, b in zip(own, shifts, strict=True)]
    np.testing.assert_allclose(leveled.errors, errors, rtol=1e-4)


def test_rows_come_in_order_and_columns_become_features(tmp_path: Path) -> None:
    rng, n = np.random.default_rng(2), 40
    X = np.column_stack([rng.permutation(2 * n), rng.integers(1, 4, 2 * n), rng.random(2 * n)])
    X[::4, 2] = np.nan
    path = save(tmp_path, X=X, y=X[:, 0] - n, client=np.repeat(["a", "b"], n))
    own, unit = patients.splits(config_of("patients", data=path, order=0, n_train=10), 0)
    assert [len(one.train.y) for one in own] == [10, 10]
    for one in own:
        assert max(one.train.y.max(), one.choose.y.max()) < one.test.y.min()
        assert (np.diff(one.train.y) > 0).all()  # so that the last one is the last in time
        assert one.train.X.shape[1] == 1 + 3 + 2  # a number, three categories, one with gaps
    train = np.vstack([one.train.X for one in own])
    np.testing.assert_allclose(train.mean(axis=0), 0, atol=1e-12)
    y = np.concatenate([one.train.y for one in own])
    np.testing.assert_allclose([y.mean(), y.std()], [0, 1], atol=1e-12)
    assert unit > 1
    labels, _ = patients.splits(config_of("patients", data=path, task="class"), 0)
    assert {*labels[0].test.y} <= {0.0, 1.0}


def test_planted_clients_have_intercepts_and_slopes_of_their_own() -> None:
    own, _ = patients.splits(config_of("patients"), 0)
    rows = [(np.c_[X, np.ones(len(X))], y) for (X, y), *_ in own]
    found = np.array([np.linalg.lstsq(*one, rcond=None)[0] for one in rows])
    assert found.shape == (12, 7)
    assert (found.std(axis=0) > 0.1).all()  # twice what the noise of 30 rows makes of it


@pytest.mark.parametrize(("n", "name"), [(2, "data"), (8, "X")])
def test_too_few_rows_or_no_feature_is_an_error(n: int, name: str, tmp_path: Path) -> None:
    client = np.repeat([0, 1], n)
    path = save(tmp_path, X=np.ones((2 * n, 2)), y=np.arange(2.0 * n), client=client)
    with pytest.raises(ValueError, match=name):
        run_study("patients", data=path, seeds=1)
