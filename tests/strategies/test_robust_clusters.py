"""Robust rules where clients belong to several clusters: nobody lies, or a few do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context
from flwr.client import NumPyClient

from flwr_perdl.clients import RegressionClient, client_app
from flwr_perdl.regression import Refinement, model_error
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import ClusteredFedAvg, FedX, client_report

TRUTH = np.array([[2.0, -1.0, 0.5], [-1.0, 2.0, 1.0]])


def data(partition: int, kind: int, n: int = 60) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(partition)
    X = rng.standard_normal((n, 3))
    return X, X @ TRUTH[kind] + 0.1 * rng.standard_normal(n)


class Linear(NumPyClient):
    """A linear model by ten gradient steps; a liar turns what it has learned round."""

    def __init__(self, partition: int, kind: int, lie: float = 0.0) -> None:
        self.X, self.y = data(partition, kind)
        self.lie = lie

    def fit(self, parameters: Any, config: Any) -> Any:
        w = parameters[0].copy()
        for _ in range(10):
            w -= 0.3 * self.X.T @ (self.X @ w - self.y) / len(self.y)
        return [w if not self.lie else parameters[0] - self.lie * (w + 1)], len(self.y), {}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        return float(np.mean((self.X @ parameters[0] - self.y) ** 2)), len(self.y), {}


def error(sizes: tuple[int, int], liars: tuple[int, ...] = (), **options: Any) -> float:
    """Return the largest distance of a true model from the learned one that is nearest to it."""
    kinds = np.repeat([0, 1], sizes)

    def make(context: Context) -> Linear:
        i = int(context.node_config["partition-id"])
        return Linear(i, int(kinds[i]), 20.0 if i in liars else 0.0)

    strategy = ClusteredFedAvg(fraction_evaluate=0.0, **options)
    grid = InProcessGrid(client_app(make), len(kinds))
    models = strategy.start(grid, ArrayRecord([np.zeros(3)]), num_rounds=8).arrays["0"].numpy()
    apart = np.linalg.norm(TRUTH[:, None] - models, axis=2)
    return float(apart.min(axis=1).max())


@pytest.mark.parametrize("temperature", [1.0, 30.0])
@pytest.mark.parametrize("sizes", [(4, 8), (5, 6), (8, 4), (10, 20)])
def test_soft_clusters_of_honest_clients_need_no_choice_of_the_rule(
    sizes: tuple[int, int], temperature: float
) -> None:
    options: dict[str, Any] = {"k": 2, "temperature": temperature}
    assert error(sizes, robust=True, **options) < error(sizes, **options) + 0.1


@pytest.mark.parametrize("temperature", [0.0, 1.0, 30.0])
def test_a_liar_in_each_cluster_is_withstood(temperature: float) -> None:
    options: dict[str, Any] = {"k": 2, "temperature": temperature}
    assert error((8, 8), liars=(0, 9), robust=True, **options) < 0.2
    assert error((8, 8), liars=(0, 9), **options) > 1


@pytest.mark.parametrize("robust", [True, "geometric-median"])
@pytest.mark.parametrize("sizes", [(4, 8), (10, 20)])
def test_soft_regression_of_honest_clients(sizes: tuple[int, int], robust: Any) -> None:
    kinds = np.repeat([0, 1], sizes)

    def learned(robust: Any) -> float:
        def make(context: Context) -> RegressionClient:
            i = int(context.node_config["partition-id"])
            return RegressionClient(*data(i, int(kinds[i])), context)

        strategy = FedX(2, start="random", phase_2=Refinement(softness=1.0), robust=robust)
        grid = InProcessGrid(client_app(make), len(kinds))
        return model_error(strategy.start(grid, num_rounds=40).arrays["0"].numpy(), TRUTH)

    assert learned(robust) < learned(False) + 0.1


@pytest.mark.parametrize("start", ["anchors", "one-shot"])
def test_a_liar_starts_no_model(start: str) -> None:
    def make(context: Context) -> Linear:
        i = int(context.node_config["partition-id"])
        return Linear(i, i % 2, 20.0 if i == 3 else 0.0)

    strategy = ClusteredFedAvg(2, start=start, robust=True, fraction_evaluate=0.0)
    strategy.start(InProcessGrid(client_app(make), 14), ArrayRecord([np.zeros(3)]), num_rounds=1)
    starts = np.stack([model["0"].numpy() for model in strategy.result.models])
    assert np.linalg.norm(TRUTH[:, None] - starts, axis=2).min(axis=0).max() < 1
    assert set(client_report(strategy.history)[3]) == {"asked", "left out"}


class Votes(Linear):
    """A liar says that one number of groups is right, and all others are wrong by far."""

    asked = 0

    def evaluate(self, parameters: Any, config: Any) -> Any:
        self.asked += 1
        loss, n, metrics = super().evaluate(parameters, config)
        return (300.0 * (self.asked > 1) if self.lie else loss), n, metrics


def test_one_client_does_not_decide_how_many_models_there_are() -> None:
    def make(context: Context) -> Votes:
        i = int(context.node_config["partition-id"])
        return Votes(i, i % 2, 1e-9 if i == 3 else 0.0)

    strategy = ClusteredFedAvg("auto", robust=True, fraction_evaluate=0.0)
    strategy.start(InProcessGrid(client_app(make), 14), ArrayRecord([np.zeros(3)]), num_rounds=8)
    models = np.stack([model["0"].numpy() for model in strategy.result.models])
    assert np.linalg.norm(TRUTH[:, None] - models, axis=2).min(axis=1).max() < 0.2
