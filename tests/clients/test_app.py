"""From NumPyClient to ClientApp: the records, and Flower's own mods around them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context
from flwr.client import NumPyClient
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping

from flwr_perdl.clients import client_app
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import PerMA, ProtocolStrategy, Request
from perdl_experiments.studies import configure, find, synthetic
from tests.grids import as_app, partition_of

MakeFederation = Callable[..., Any]


def test_a_strategy_also_runs_through_flowers_privacy_wrapper(federation: MakeFederation) -> None:
    """The client-side clipping mod rescales what is sent; the records' layout lets it."""
    planted = federation(3)
    app = client_app(planted.make_client, train_mods=[fixedclipping_mod])
    strategy = PerMA(3, aggregation="mean", fraction_evaluate=0.0, num_clients=3)
    start = planted.planted.global_atoms
    private = DifferentialPrivacyClientSideFixedClipping(
        strategy, noise_multiplier=0.0, clipping_norm=100.0, num_sampled_clients=3
    )
    result = private.start(InProcessGrid(app, 3), ArrayRecord([start]), num_rounds=2)
    atoms = result.arrays.to_numpy_ndarrays()[0]
    np.testing.assert_allclose(np.abs(np.sum(atoms * start, axis=1)), 1, atol=1e-6)
    private.noise_multiplier = 1.0  # which would not reach the clients
    with pytest.raises(ValueError, match=r"^arrays"):
        private.start(InProcessGrid(app, 3), ArrayRecord([start]), num_rounds=2)


def test_an_app_is_pickled_by_names_since_ray_does_it_with_every_message() -> None:
    config = configure(find("synthetic"), clients=2)
    app = client_app(partial(synthetic.client, config=config))
    pickled = pickle.dumps(app)  # knows no other way than by name
    assert len(pickled) < 2000
    learned = [
        PerMA(3, num_clients=2).start(InProcessGrid(one, 2), num_rounds=2).arrays["0"].numpy()
        for one in (app, pickle.loads(pickled))
    ]
    np.testing.assert_array_equal(*learned)


class Slope(NumPyClient):
    """Fits ``y = a x`` by one gradient step; nothing of this library."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y = x, y

    def fit(self, parameters: Any, config: Any) -> Any:
        (a,) = parameters
        gradient = np.mean((a * self.x - self.y) * self.x)
        return [a - config["rate"] * gradient], len(self.x), {}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        return float(np.mean((parameters[0] * self.x - self.y) ** 2)), len(self.x), {}


def make_slope(context: Context) -> Slope:
    """Client i has the points (1, i + 1) and (2, 2 i + 2): its slope is i + 1."""
    i = partition_of(context)
    return Slope(np.array([1.0, 2.0]), np.array([1.0, 2.0]) * (i + 1))


class Mean(ProtocolStrategy):
    """FedAvg of one array, as a protocol."""

    def protocol(self, initial: Any, state: Any) -> Any:
        model = initial[0]
        while True:
            replies = yield Request("mean", [model], {"rate": 0.4}, {"model": model})
            model = np.mean([reply.arrays[0] for reply in replies.values()], axis=0)


@pytest.mark.parametrize(
    "given", [make_slope, lambda context: make_slope(context).to_client(), as_app(make_slope)]
)
def test_any_client_takes_part_and_is_known_by_its_partition(given: Any) -> None:
    strategy = Mean(num_clients=3)
    result = strategy.start(
        InProcessGrid(client_app(given), 3), ArrayRecord([np.zeros(1)]), num_rounds=1
    )
    # The gradient at 0 is -2.5 (i + 1), so that a step of 0.4 leads to the client's own slope.
    np.testing.assert_allclose(result.arrays["0"].numpy(), [2.0])
    train, evaluation = strategy.history
    assert list(train.metrics) == list(evaluation.metrics) == [0, 1, 2]
