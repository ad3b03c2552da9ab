"""The experiment people: whose rows are for what, and a network's steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from perdl_experiments.studies import people
from perdl_experiments.studies._network import Network, random_network
from tests.studies import config_of, save


def test_rows_are_contiguous_and_the_same_ones_test_every_share(tmp_path: Path) -> None:
    n = 20  # rows of a client and class, whose time is the one column
    y, client = np.tile(np.repeat([3, 7], n), 2), np.repeat([0, 1], 2 * n)
    path = save(tmp_path, X=np.arange(4.0 * n)[:, None], y=y, client=client)
    config, tested = config_of("people", data=path, shares="30,60"), []
    for share, sizes in ((30, [5, 1, 8]), (60, [10, 2, 8])):
        own = people.rows_of(config, share, 0)
        unit = np.diff(np.unique(np.concatenate([one.X for one in own]))).min()
        known = np.concatenate([one.X[: one.ends[1]] for one in own])
        np.testing.assert_allclose([known.mean(), known.std()], [0, 1], atol=1e-12)
        for one in own:
            time = np.round(one.X[:, 0] / unit).astype(int)
            for label in (0, 1):
                parts = np.split(np.arange(len(one.y)), one.ends)
                times = [time[part][one.y[part] == label] for part in parts]
                assert [*map(len, times)] == sizes
                assert {*(np.diff(np.concatenate(times[:2])) % n)} == {1}
                assert {*(np.diff(times[2]) % n)} == {1}
                tested.append((times[2][0] - times[0][0]) % n)
    assert {*tested} == {12}


def test_few_rows_of_a_client_are_an_error(tmp_path: Path) -> None:
    path = save(tmp_path, X=np.ones((4, 2)), y=np.arange(4) % 2, client=np.repeat([0, 1], 2))
    with pytest.raises(ValueError, match=r"^data must have more rows"):
        people.rows_of(config_of("people", data=path), 15, 0)


def test_a_fit_is_as_many_epochs_and_a_refit_sees_the_validation_rows() -> None:
    rng = np.random.default_rng(0)
    rows = people.Rows(rng.standard_normal((12, 4)), rng.integers(3, size=12), (5, 8))
    model = random_network(4, 6, 3, rng)
    for refit, end in ((False, 5), (True, 8)):
        client = people.Client(rows, 0, 0, 0.3, epochs=2, refit=refit)
        other = Network(rows.X, rows.y, (end, 8), seed=0, partition=0, step=0.3, batch=people.BATCH)
        expected = model
        for round_ in (1, 2):  # one batch per epoch: its order doesn't count
            expected = other.fit(expected, {"server-round": round_})[0]
        for ours, theirs in zip(client.fit(model, {"server-round": 1})[0], expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-12)


def test_pooled_rows_keep_what_they_are_for() -> None:
    own = [
        people.Rows(np.arange(4.0)[:, None] + 10 * i, np.arange(4) % 2, (2, 3)) for i in range(2)
    ]
    whole = people.pooled(own)
    assert whole.ends == (4, 6)
    assert [*whole.X[:, 0]] == [0, 1, 10, 11, 2, 12, 3, 13]
    assert [*whole.y] == [0, 1, 0, 1, 0, 0, 1, 1]
