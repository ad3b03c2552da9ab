"""The experiments forecast and stations: their days, and what they compute by themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from perdl_experiments.studies import forecast, stations
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


def test_days_are_whole_scaled_and_in_one_part_only(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    X = np.cumsum(np.ones((3, 24 * 200, 2)), axis=1) + rng.random((3, 24 * 200, 2))
    X[1, 30, 0] = np.nan  # in the second day
    config = config_of("stations", data=save(tmp_path, X=X), days=15, quantities=2).sized
    sites = stations.load_sites(config, 0)
    assert len(sites) == 3
    train = np.vstack([site.train for site in sites]).reshape(-1, 2)
    np.testing.assert_allclose([train.mean(axis=0), train.std(axis=0)], [[0, 0], [1, 1]], atol=1e-9)
    for site in sites:
        whole, holes = site.test
        assert np.isnan(holes).mean() == pytest.approx(stations.HIDDEN, abs=0.03)
        np.testing.assert_array_equal(whole[~np.isnan(holes)], holes[~np.isnan(holes)])
        firsts = np.concatenate([site.train[:, 0], site.choose[0][:, 0], whole[:, 0]])
        assert len(np.unique(firsts)) == len(firsts)


def test_hidden_entries_are_filled_without_a_dictionary() -> None:
    line = np.column_stack([np.arange(24.0), 5 - np.arange(24.0)]).reshape(1, -1)
    holed = line.copy()
    holed[0, [3, 10, 12, 21]] = np.nan
    np.testing.assert_allclose(stations.interpolated(holed), line)
    mean, covariance = np.array([1.0, 2.0]), np.array([[2.0, 0.5], [0.5, 1.0]])
    filled = stations.conditional(np.array([[3.0, np.nan]]), mean, covariance)
    np.testing.assert_allclose(filled, [[3.0, 2 + 0.25 * (3 - 1)]])


SHORT = [(3, 40), (3, 20, 2), (3, 240, 2)]


@pytest.mark.parametrize(
    ("study", "shape"),
    [*(("stations", shape) for shape in SHORT), ("forecast", (3, 40)), ("forecast", (3, 2400, 2))],
)
def test_a_file_without_enough_hours_is_an_error(
    study: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"data|X"):
        run_study(study, data=save(tmp_path, X=np.ones(shape)), seeds=1)
