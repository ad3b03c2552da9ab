"""The experiment forecast: its days, its graph, and what is known of its results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from perdl_experiments.studies import forecast
from perdl_experiments.studies._network import random_network
from tests.studies import config_of, run_study, save


def test_a_forecast_sees_the_days_before_and_training_comes_first(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    X = np.exp(rng.standard_normal((3, 24 * 800, 2)))
    X[0, : 24 * 10, 0] = np.nan
    config = config_of("forecast", data=save(tmp_path, X=X), days=30)
    own = forecast.splits(config, 0)
    assert [len(one.train.y) for one in own] == [30, 30, 30]
    y = np.concatenate([one.train.y for one in own])
    np.testing.assert_allclose([y.mean(), y.std()], [0, 1], atol=1e-9)
    test, days = own[1].test, np.log1p(X[1, :, 0].reshape(800, 24).mean(axis=1))
    assert np.corrcoef(test.y, days[-len(test.y) :])[0, 1] == pytest.approx(1)
    before = np.mean(np.diff(days[-len(test.y) - 1 :]) ** 2)
    spread = np.var(days[-len(test.y) :]) / np.var(test.y)
    assert own[1].yesterday == pytest.approx(before / spread)


def test_a_client_descends_and_does_not_change_its_input() -> None:
    own = forecast.splits(config_of("forecast"), 0)[0]
    rng = np.random.default_rng(1)
    first = random_network(own.train.X.shape[1], 4, 1, rng)
    kept = [array.copy() for array in first]
    station = forecast.Station(own.train, own.choose, 0.05, 0.1)
    moved = station.fit(first, {})[0]
    assert forecast.squared(moved, own.train) < forecast.squared(first, own.train)
    assert all(np.array_equal(*pair) for pair in zip(first, kept, strict=True))


@pytest.mark.parametrize("shape", [(3, 40), (3, 24 * 100, 2)])
def test_data_of_less_than_two_years_are_an_error(shape: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="X"):
        run_study("forecast", data=save(tmp_path, X=np.ones(shape)), seeds=1)
