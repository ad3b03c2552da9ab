"""A small run of every protocol.

What every protocol owes, or refuses, is in ``test_every_protocol.py``: a new one is a line here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context

from flwr_perdl.clients import client_app
from flwr_perdl.network import Topology, metropolis_weights
from flwr_perdl.privacy import Noise
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import (
    Adam,
    ClusteredFedAvg,
    DiffusionAveraging,
    Ditto,
    FederatedRidge,
    FedMD,
    FedX,
    Momentum,
    NeighborRelay,
    OneShotClustering,
    PerMA,
    PersonalizedFedAvg,
    ProtocolStrategy,
    Yogi,
)
from tests.grids import Dying, partition_of
from tests.network.programs import sleeping
from tests.strategies import own_protocol
from tests.strategies.everyone import N, dictionaries, models, nodes, owners, regressions, ridges

RING, COMPLETE = Topology.ring(N), Topology.complete(N)
ASLEEP = sleeping(metropolis_weights(RING), 0.2, seed=4)
#: A model of two arrays, whose names are not in the alphabet's order.
START = {"head": np.zeros(2), "body": np.zeros(12)}
NOISE = Noise(epsilon=1000.0, rng=lambda: np.random.default_rng(0))
NOISED: dict[str, Any] = {"privacy": NOISE, "min_clients": 3}
HIDDEN: dict[str, Any] = {**NOISED, "privacy": replace(NOISE, level="client")}


class Case(NamedTuple):
    """A strategy and its clients; rounds after which it has a model, and what it starts from."""

    strategy: Callable[..., ProtocolStrategy]
    client: Callable[[Context, int], Any]
    cut: int
    initial: Mapping[str, Any] | None = None
    #: Options with which it has secure rounds, or noise; None: it has none, and refuses them.
    secure: Mapping[str, Any] | None = None
    privacy: Mapping[str, Any] | None = None
    #: Whether its clients may keep a part of the model private.
    private: bool = False
    #: Where its client's steps are, if they are not the library's.
    protocols: tuple[Any, ...] = ()

    def start(self, grid: Any, rounds: int, **options: Any) -> tuple[ProtocolStrategy, list[Any]]:
        """Return the strategy after so many rounds, and what it has learned."""
        initial = options.pop("initial", self.initial)
        config = ConfigRecord({"client": self.client.__name__})
        strategy = self.strategy(**{"fraction_evaluate": 0.0, **options})
        given = initial and ArrayRecord({k: Array(a) for k, a in initial.items()})
        rounds -= isinstance(strategy, DiffusionAveraging)  # it counts its own
        result = strategy.start(grid, given, num_rounds=rounds, train_config=config)
        if isinstance(strategy, DiffusionAveraging):
            return strategy, [*strategy.averaged.curves.values()]
        if isinstance(strategy, NeighborRelay) and rounds >= strategy.exchanges:
            outcome = strategy.outcome
            return strategy, [*outcome.observed.values(), outcome.traffic.toarray()]
        if isinstance(strategy, FederatedRidge) and strategy.network is not None:
            # The models are at the nodes; of these there is what they measured.
            return strategy, [
                np.array([*one.values()]) for one in strategy.history[-1].numbers.values()
            ]
        return strategy, result.arrays.to_numpy_ndarrays()

    def run(self, grid: Any, rounds: int, **options: Any) -> list[np.ndarray]:
        return self.start(grid, rounds, **options)[1]

    def die(self, grid: Dying, **options: Any) -> None:
        """Let the server die with all replies to the round after the cut in."""
        grid.dies = self.cut + 1
        with suppress(KeyboardInterrupt):
            self.run(grid, self.cut + 2, **options)
            raise AssertionError("the server lives")
        grid.dies = 0

    def make_client(self, context: Context) -> Any:
        return self.client(context, partition_of(context))

    def grid(
        self,
        state_dir: Path | None = None,
        kind: type[InProcessGrid] = Dying,
        n: int = N,
        faults: Any = None,
        **guards: Any,
    ) -> Any:
        if "private" in guards and self.initial:
            guards["names"] = [*self.initial]
        app = client_app(self.make_client, protocols=self.protocols, **guards)
        return kind(app, n, state_dir=state_dir, faults=faults)


def relay(topology: Topology = RING, **options: Any) -> NeighborRelay:
    return NeighborRelay(topology, 4, **options)


def averaging(topology: Topology = RING, **options: Any) -> DiffusionAveraging:
    return DiffusionAveraging(topology, **options)


#: A part that stays at the clients, and fewer bytes.
PARTS: dict[str, Any] = {"private": ["head"], "transport": "float16"}

CASES = {
    "perma": Case(
        lambda **o: PerMA(2, **o),
        dictionaries,
        2,
        secure={"secure": True, "min_clients": 3},
        privacy={**NOISED, "initial": {"atoms": np.eye(2, 5)}},
    ),
    "clusters": Case(
        lambda k=2, **o: ClusteredFedAvg(k, choose_every=2, **o),
        models,
        2,
        START,
        private=True,
    ),
    "measured": Case(lambda **o: ClusteredFedAvg("auto", **o), models, 1, START, private=True),
    "personal": Case(
        lambda **o: PersonalizedFedAvg(["head"], **o),
        models,
        1,
        START,
        privacy=HIDDEN,
        private=True,
    ),
    "ditto": Case(lambda **o: Ditto(0.3, **o), models, 1, START),
    "fedmd": Case(lambda **o: FedMD(2, **o), regressions, 2),
    "fedx": Case(
        lambda k=2, robust=True, **o: FedX(k, robust=robust, **o),
        regressions,
        6,
    ),
    "one-shot": Case(lambda **o: OneShotClustering(2, **o), regressions, 3),
    "ridge": Case(
        lambda **o: FederatedRidge("personal", features=3, **o),
        ridges,
        1,
        secure={"secure": True, "min_clients": 3, "bounds": [[-9, 9]] * 3},
        privacy={**NOISED, "bounds": [[-9, 9]] * 3},
    ),
    "relay": Case(relay, nodes, 3),
    "averaging": Case(averaging, models, 3, START, private=True),
    "clusters, parts": Case(
        lambda k=2, **o: ClusteredFedAvg(k, **PARTS, choose_every=2, **o),
        models,
        2,
        START,
        private=True,
    ),
    "averaging, parts": Case(
        lambda topology=RING, **o: averaging(topology, **PARTS, **o), models, 3, START, private=True
    ),
    "own": Case(own_protocol.OwnMean, owners, 1, protocols=(own_protocol,)),
}
SOME: dict[str, Any] = {"fraction_train": 0.8}
#: The same with other options, and with clients that are not drawn in every round.
VARIANTS = {
    "perma, mean": CASES["perma"]._replace(
        strategy=lambda **o: PerMA(2, aggregation="mean", **SOME, **o)
    ),
    "perma, remember": CASES["perma"]._replace(
        strategy=lambda **o: PerMA(2, reuse_last_reply=2, **o)
    ),
    "perma, auto": Case(lambda **o: PerMA(**SOME, **o), dictionaries, 10),
    "clusters, adam": CASES["clusters"]._replace(
        strategy=lambda **o: ClusteredFedAvg(2, optimizer=Adam(), choose_every=2, **SOME, **o)
    ),
    "fedx, auto": Case(lambda **o: FedX(**SOME, **o), regressions, 6),
    "fedx, random": Case(lambda **o: FedX(2, start="random", **SOME, **o), regressions, 3),
    "ridge, auto": Case(
        lambda **o: FederatedRidge(scale=(1, 2), features=3, **SOME, **o), ridges, 3
    ),
    "ridge, columns": Case(
        lambda **o: FederatedRidge("personal", random="columns", features=0, **o), ridges, 1
    ),
    "ridge, network": Case(
        lambda topology=COMPLETE, **o: FederatedRidge(
            "personal", topology=topology, features=3, **o
        ),
        ridges,
        2,
    ),
    "personal, momentum": CASES["personal"]._replace(
        strategy=lambda **o: PersonalizedFedAvg(["head"], optimizer=Momentum(), **SOME, **o)
    ),
    "personal, yogi": CASES["personal"]._replace(
        strategy=lambda **o: PersonalizedFedAvg(["head"], optimizer=Yogi(), **SOME, **o)
    ),
    "ditto, adam": CASES["ditto"]._replace(
        strategy=lambda **o: Ditto(0.3, optimizer=Adam(), **SOME, **o)
    ),
    "averaging, sealed": CASES["averaging"]._replace(
        strategy=lambda **o: averaging(sealed=True, **o)
    ),
    "relay, sealed": Case(
        lambda **o: NeighborRelay(ASLEEP, 4, sealed=True, staleness=1, **o), nodes, 4
    ),
}
