"""Attacks on clustered learning: clients that send the reverse of what they have learned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord
from flwr.client import NumPyClient

from flwr_perdl.clients import client_app
from flwr_perdl.regression import model_error
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import ClusteredFedAvg, client_report
from tests.grids import partition_of

#: What all kinds of client have in common, so that all reversed steps point the same way.
COMMON, D, SIZE = 1.0, 10, 5


def attacked(seed: int, k: int, reverse: bool, **options: Any) -> tuple[float, set[int]]:
    """Return the largest error of k models, the last of each five clients lying; who is named."""
    rng = np.random.default_rng(seed)
    truth = COMMON * rng.standard_normal(D) + rng.standard_normal((k, D))

    class Kind(NumPyClient):
        def __init__(self, i: int) -> None:
            own = np.random.default_rng([seed, i])
            self.X = own.standard_normal((80, D))
            self.y = self.X @ truth[i // SIZE] + 0.3 * own.standard_normal(80)
            self.sign = -1 if reverse and i % SIZE == SIZE - 1 else 1

        def fit(self, parameters: Any, config: Any) -> Any:
            w = parameters[0].copy()
            for _ in range(5):
                w -= 0.3 * self.X[:40].T @ (self.X[:40] @ w - self.y[:40]) / 40
            return [parameters[0] + self.sign * (w - parameters[0])], 40, {}

        def evaluate(self, parameters: Any, config: Any) -> Any:
            return float(np.mean((self.X[40:] @ parameters[0] - self.y[40:]) ** 2)), 40, {}

    strategy = ClusteredFedAvg(k, fraction_evaluate=0.0, **options)
    grid = InProcessGrid(client_app(lambda context: Kind(partition_of(context))), SIZE * k)
    strategy.start(grid, ArrayRecord([np.zeros(D)]), num_rounds=6)
    models = np.stack([model["0"].numpy() for model in strategy.result.models])
    named = {p for p, own in client_report(strategy.history).items() if len(own) > 1}
    return model_error(models, truth), named


@pytest.mark.parametrize("start", ["one-shot", "anchors"])
@pytest.mark.parametrize(("k", "seeds"), [(2, range(2, 6)), (3, range(2, 4))])
def test_reversed_steps_of_one_client_in_each_cluster_get_no_model(
    k: int, seeds: range, start: str
) -> None:
    for seed in seeds:
        error, named = attacked(seed, k, True, robust=True, start=start)
        assert error < 0.3
        assert {SIZE * j + SIZE - 1 for j in range(k)} <= named


def test_without_robust_they_take_a_cluster() -> None:
    assert attacked(2, 2, True)[0] > 3  # the control
    assert attacked(2, 2, False)[0] < 0.15


def test_a_small_group_of_honest_clients_keeps_its_model_and_is_reported() -> None:
    """Twelve clients, two of a kind of their own: no more are lost than without robust."""
    rng = np.random.default_rng(0)
    targets = np.repeat(rng.standard_normal((2, D)), [10, 2], axis=0)
    targets += 0.05 * rng.standard_normal(targets.shape)

    class Near(NumPyClient):
        def __init__(self, i: int) -> None:
            self.target = targets[i]

        def fit(self, parameters: Any, config: Any) -> Any:
            return [(parameters[0] + self.target) / 2], 1, {}

        def evaluate(self, parameters: Any, config: Any) -> Any:
            return float(np.sum((parameters[0] - self.target) ** 2)), 1, {}

    strategy = ClusteredFedAvg(2, robust=True, fraction_evaluate=0.0)
    grid = InProcessGrid(client_app(lambda context: Near(partition_of(context))), 12)
    strategy.start(grid, ArrayRecord([np.zeros(D)]), num_rounds=3)
    assert sorted(strategy.result.sizes) == [2, 10]
    assert {10, 11} <= {p for report in strategy.history for p in report.anomalies}
