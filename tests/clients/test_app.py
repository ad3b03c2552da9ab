"""From NumPyClient to ClientApp: the records, and Flower's own mods around them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, RecordDict
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping

from flwr_perdl.clients import client_app
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import PerMA
from perdl_experiments.studies import configure, find, synthetic

MakeFederation = Callable[..., Any]


class Watching(InProcessGrid):
    """A grid that keeps what crossed it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[tuple[RecordDict, RecordDict]] = []

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        asked: list[Message] = list(messages)
        replies = list(super().send_and_receive(asked, timeout=timeout))
        self.seen += [(q.content, r.content) for q, r in zip(asked, replies, strict=True)]
        return replies


def test_records_are_those_of_fedavg(federation: MakeFederation) -> None:
    planted = federation(3)
    grid = Watching(client_app(planted.make_client), 3)
    PerMA(3).start(grid, num_rounds=2)
    kinds: dict[tuple[Any, ...], int] = {}
    for asked, replied in grid.seen:
        key = (tuple(sorted(asked)), tuple(sorted(replied)))
        kinds[key] = kinds.get(key, 0) + 1
    both = ("arrays", "config")
    assert kinds == {
        (("config",), ("config",)): 3,  # who are you?
        (both, ("arrays", "metrics")): 6,  # two rounds of training
        (both, ("metrics",)): 6,  # two evaluations
    }
    train_replies = [replied for _, replied in grid.seen if "arrays" in replied]
    assert all(len(reply["arrays"]) == 1 for reply in train_replies)
    assert all(reply["metrics"]["num-examples"] == 200 for reply in train_replies)


def test_a_strategy_also_runs_through_flowers_privacy_wrapper(federation: MakeFederation) -> None:
    """The client-side clipping mod rescales what is sent; the records' layout lets it."""
    planted = federation(3)
    app = client_app(planted.make_client, train_mods=[fixedclipping_mod])
    strategy = PerMA(3, aggregation="mean", fraction_evaluate=0.0, num_clients=3)
    start = planted.planted.global_atoms
    private = DifferentialPrivacyClientSideFixedClipping(
        strategy, noise_multiplier=0.0, clipping_norm=100.0, num_sampled_clients=3
    )
    from flwr.app import ArrayRecord

    result = private.start(InProcessGrid(app, 3), ArrayRecord([start]), num_rounds=2)
    atoms = result.arrays.to_numpy_ndarrays()[0]
    np.testing.assert_allclose(np.abs(np.sum(atoms * start, axis=1)), 1, atol=1e-6)
    private.noise_multiplier = 1.0  # which would not reach the clients
    with pytest.raises(ValueError, match="arrays must be those that aggregate_train returned"):
        private.start(InProcessGrid(app, 3), ArrayRecord([start]), num_rounds=2)


def test_metrics_must_be_numbers(federation: MakeFederation) -> None:
    planted = federation(2)

    def make(context: Any) -> Any:
        client = planted.make_client(context)
        client.get_properties = lambda config: {"partition-id": client.partition}
        client.fit = lambda parameters, config: ([], 1, {"name": "text"})
        return client

    strategy = PerMA(3)
    with pytest.raises(RuntimeError, match="Round 1 has 0 good replies"):
        strategy.start(InProcessGrid(client_app(make), 2), num_rounds=1)


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
