"""Three clients in ten lie: a robust run stays within twice the clean error, a mean does not."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from benchmarks._liars import MESSAGES, LyingDictionaryClient, regress
from flwr_perdl.clients import DictionaryClient
from flwr_perdl.dictionary import GradientLearner, OrthogonalLearner, dictionary_distance
from flwr_perdl.random import DATA as DRAWS
from flwr_perdl.random import spawn
from flwr_perdl.regression import TwoPhase, model_error
from flwr_perdl.strategies import PerMA, client_report
from perdl_experiments.data import planted_clients
from perdl_experiments.mixed_regression_data import Mixed, setting
from tests.grids import grid_of

BOUND = 2.0


@lru_cache
def perma(
    attack: str | None, aggregation: str = "statistics", learner: Any = None, n_liars: int = 3
) -> tuple[float, dict[int, dict[str, float]]]:
    """Return the error of the global atoms, and the report on the clients."""
    planted = planted_clients(
        np.random.default_rng(0), [6] * 10, [200] * 10, 3, n_features=6, noise=0.05
    )
    local = learner or OrthogonalLearner(6, threshold=0.15)

    def make_client(context: Any, i: int) -> DictionaryClient:
        if attack is not None and i < n_liars:
            return LyingDictionaryClient(planted.samples[i], local, context, attack=attack)
        return DictionaryClient(planted.samples[i], local, context)

    strategy = PerMA(3, aggregation=aggregation, fraction_evaluate=0.0)
    result = strategy.start(grid_of(make_client, 10), num_rounds=12)
    atoms = result.arrays.to_numpy_ndarrays()[0]
    return dictionary_distance(atoms, planted.global_atoms), client_report(strategy.history)


@pytest.mark.parametrize("attack", MESSAGES)
def test_perma_withstands_three_liars_in_ten(attack: str) -> None:
    clean, quiet = perma(None)
    error, report = perma(attack)
    assert error < BOUND * clean
    assert all(set(counts) == {"asked"} for counts in quiet.values())
    assert [p for p, counts in report.items() if len(counts) > 1] == [0, 1, 2]
    deed = "clipped" if attack == "scaled" else "left out"
    assert min(report[p][deed] for p in range(3)) > 9


def test_perma_withstands_them_with_atoms_that_are_not_orthogonal() -> None:
    learner = GradientLearner(6)
    assert perma("collude", learner=learner)[0] < BOUND * perma(None, learner=learner)[0]


@pytest.mark.parametrize("attack", ["nudge", "collude"])
def test_perma_withstands_four_liars_in_ten_who_agree(attack: str) -> None:
    assert perma(attack, "geometric-median", n_liars=4)[0] < 4 * perma(None)[0]


def test_perma_with_the_mean_does_not() -> None:
    assert perma("collude", "mean")[0] > 20 * perma(None, "mean")[0]


def test_one_client_cannot_stop_the_matching_round() -> None:
    """A client may say that it has no atoms, another learner, or other features: it is alone."""
    planted = planted_clients(np.random.default_rng(0), [6] * 5, [200] * 5, 3, n_features=6)

    class Odd(DictionaryClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            (sent,), n, metrics = super().fit(parameters, config)
            if config["perdl.step"] == "start":
                metrics |= {0: {"n_atoms": 0}, 1: {"orthogonal": 0}}.get(self.partition, {})
                sent = np.eye(4) if self.partition == 2 else sent
            return [sent], n, metrics

    strategy = PerMA(3, fraction_evaluate=0.0)
    result = strategy.start(
        grid_of(lambda c, i: Odd(planted.samples[i], OrthogonalLearner(6), c), 5), num_rounds=3
    )
    atoms = result.arrays.to_numpy_ndarrays()[0]
    assert dictionary_distance(atoms, planted.global_atoms) < 1e-6
    assert [sorted(odd) for odd in strategy.history[0].anomalies.values()] == [["left out"]] * 3


@lru_cache
def c1() -> Mixed:
    return setting("C1", spawn(0, DRAWS))


def fedx(attack: str | None, **options: Any) -> float:
    """Return the error of the models in setting C.1, its full size."""
    with np.errstate(all="ignore"):
        centers = regress(c1(), TwoPhase(**options), 30, attack=attack)
    return model_error(centers, c1().theta)


@lru_cache
def clean() -> float:
    return fedx(None, n_clusters=3)


@pytest.mark.parametrize("attack", [None, *MESSAGES])
def test_fedx_withstands_three_liars_in_ten(attack: str | None) -> None:
    assert fedx(attack, n_clusters=3, robust="filtered") < BOUND * clean()


@pytest.mark.parametrize("attack", ["false model", "false cluster"])
def test_false_data_are_further_models(attack: str) -> None:
    """With k known there is no room for them: nothing tells liars that agree from a cluster."""
    assert fedx(attack, robust="filtered") < BOUND * clean()


def test_fedx_with_the_mean_does_not() -> None:
    assert not fedx("collude", n_clusters=3) <= BOUND * clean()
