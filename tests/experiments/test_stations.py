"""The experiment stations: its days, and what is known of its results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from perdl_experiments.studies import stations
from tests.studies import config_of, run_study, save


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


@pytest.mark.parametrize("shape", [(3, 40), (3, 20, 2), (3, 240, 2)])
def test_a_file_without_enough_hours_is_an_error(shape: tuple[int, ...], tmp_path: Path) -> None:
    path = save(tmp_path, X=np.ones(shape))
    with pytest.raises(ValueError, match="data"):
        run_study("stations", data=path, seeds=1)
