"""Attacks on clustered learning: clients that send the reverse of what they have learned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord
from flwr.client import NumPyClient
from scipy.spatial.distance import cdist

from flwr_perdl.strategies import ClusteredFedAvg, client_report
from tests.grids import Trains, grid_of

#: What all kinds of client have in common, so that all reversed steps point the same way.
COMMON, D, SIZE = 1.0, 10, 5


def attacked(
    seed: int,
    groups: int,
    liars: int,
    *,
    k: Any = None,
    apart: int = 0,
    away: float = 0.0,
    **options: Any,
) -> tuple[float, set[int]]:
    """Return the largest error of the groups' models, and who is named.

    Of each five clients so many lie at the end, with a reversed step that ends so far ``away``, and
    ``apart`` more have a model of their own.
    """
    rng = np.random.default_rng(seed)
    truth = COMMON * rng.standard_normal(D) + rng.standard_normal((groups + 1, D))

    class Kind(NumPyClient):
        def __init__(self, i: int) -> None:
            own = np.random.default_rng([seed, i])
            self.X = own.standard_normal((80, D))
            self.y = self.X @ truth[min(i // SIZE, groups)] + 0.3 * own.standard_normal(80)
            self.lies = i % SIZE >= SIZE - liars

        def fit(self, parameters: Any, config: Any) -> Any:
            w = parameters[0].copy()
            for _ in range(5):
                w -= 0.3 * self.X[:40].T @ (self.X[:40] @ w - self.y[:40]) / 40
            return [2 * parameters[0] - w - away if self.lies else w], 40, {}

        def evaluate(self, parameters: Any, config: Any) -> Any:
            return float(np.mean((self.X[40:] @ parameters[0] - self.y[40:]) ** 2)), 40, {}

    strategy = ClusteredFedAvg(k or groups, fraction_evaluate=0.0, **options)
    n = SIZE * groups + apart
    grid = grid_of(lambda _, i: Kind(i), n)
    strategy.start(grid, ArrayRecord([np.zeros(D)]), num_rounds=6)
    models = np.stack([model["0"].numpy() for model in strategy.result.models])
    named = {p for p, own in client_report(strategy.history).items() if len(own) > 1}
    return float(cdist(truth[:groups], models).min(axis=1).max()), named


@pytest.mark.parametrize("start", ["one-shot", "anchors"])
@pytest.mark.parametrize(("k", "seeds"), [(2, range(2, 6)), (3, range(2, 4))])
def test_reversed_steps_of_one_client_in_each_cluster_get_no_model(
    k: int, seeds: range, start: str
) -> None:
    for seed in seeds:
        error, named = attacked(seed, k, 1, robust=True, start=start)
        assert error < 0.3
        assert {SIZE * j + SIZE - 1 for j in range(k)} <= named


@pytest.mark.parametrize("robust", [True, "geometric-median"])
@pytest.mark.parametrize("options", [{}, {"start": "anchors"}, {"k": "auto"}])
def test_no_model_starts_from_an_outlier(options: dict[str, Any], robust: Any) -> None:
    assert attacked(2, 2, 1, away=1e3, robust=robust, **options)[0] < 0.3


def test_without_robust_they_take_a_cluster() -> None:
    assert attacked(2, 2, 1)[0] > 1.5  # the control
    assert attacked(2, 2, 0)[0] < 0.15


@pytest.mark.parametrize("k", [2, "auto"])
def test_two_of_five_are_more_than_it_withstands_with_k_unknown_too(k: Any) -> None:
    assert min(attacked(seed, 2, 2, k=k, robust=True)[0] for seed in range(2, 6)) > 0.5


@pytest.mark.parametrize(
    ("k", "apart", "withstood"), [("auto", 8, True), (2, 4, True), (2, 6, False)]
)
def test_a_cluster_of_their_own_takes_a_model_only_where_k_is_given_and_they_are_enough(
    k: Any, apart: int, withstood: bool
) -> None:
    errors = [attacked(seed, 2, 0, k=k, apart=apart, robust=True)[0] for seed in range(2, 6)]
    assert max(errors) < 0.1 if withstood else min(errors) > 1


def test_a_small_group_of_honest_clients_keeps_its_model_and_is_reported() -> None:
    """Twelve clients, two of a kind of their own: no more are lost than without robust."""
    rng = np.random.default_rng(0)
    targets = np.repeat(rng.standard_normal((2, D)), [10, 2], axis=0)
    targets += 0.05 * rng.standard_normal(targets.shape)

    def near(_: Any, i: int) -> Trains:
        return Trains(lambda w: (w + targets[i]) / 2, lambda w: np.sum((w - targets[i]) ** 2))

    strategy = ClusteredFedAvg(2, robust=True, fraction_evaluate=0.0)
    strategy.start(grid_of(near, 12), ArrayRecord([np.zeros(D)]), num_rounds=3)
    assert sorted(strategy.result.sizes) == [2, 10]
    assert {10, 11} <= {p for report in strategy.history for p in report.anomalies}
