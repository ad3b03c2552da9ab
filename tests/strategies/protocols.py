"""A small run of every protocol, with clients whose data the tests know nothing of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.client import NumPyClient

from flwr_perdl.clients import (
    DictionaryClient,
    DiffusionClient,
    RegressionClient,
    client_app,
)
from flwr_perdl.dictionary import OrthogonalLearner
from flwr_perdl.diffusion import Averaging, Topology
from flwr_perdl.network import Faults
from flwr_perdl.regression import MomentDescent
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import (
    Adam,
    ClusteredFedAvg,
    FedMD,
    FedX,
    NeighborRelay,
    OneShotClustering,
    PerMA,
    ProtocolStrategy,
)
from tests.grids import partition_of

N = 6
SLOPES = np.array([[2.0, 0.0], [-2.0, 1.0]])
X = np.random.default_rng(0).standard_normal((N, 12, 2))
ATOMS = np.random.default_rng(1).standard_normal((N, 30, 5))
VALUES = {node: np.array([float(node)]) for node in range(N)}
ZEROS = np.zeros(12)
RING = Topology.ring(N)


class Mean(NumPyClient):
    """A model of one vector, for `ClusteredFedAvg`."""

    def __init__(self, partition: int) -> None:
        self.own = X[partition] @ SLOPES[partition % 2]

    def fit(self, parameters: Any, config: Any) -> Any:
        return [(parameters[0] + self.own) / 2], 1, {}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        return float(np.sum((parameters[0] - self.own) ** 2)), 1, {}


class Case(NamedTuple):
    """A strategy and its clients; rounds after which it has a model, and what it starts from."""

    strategy: Callable[..., ProtocolStrategy]
    client: Callable[[Context, int], Any]
    cut: int
    initial: Any = None

    def run(self, grid: InProcessGrid, rounds: int, **options: Any) -> list[np.ndarray]:
        strategy = self.strategy(fraction_evaluate=0.0, **options)
        start = None if self.initial is None else ArrayRecord([self.initial])
        arrays = strategy.start(grid, start, num_rounds=rounds).arrays.to_numpy_ndarrays()
        if isinstance(strategy, NeighborRelay) and rounds >= strategy.exchanges:
            return [*strategy.outcome.observed.values(), strategy.outcome.traffic.toarray()]
        return arrays

    def make_client(self, context: Context) -> Any:
        return self.client(context, partition_of(context))

    def grid(self, state_dir: Path | None = None) -> InProcessGrid:
        return InProcessGrid(client_app(self.make_client), N, state_dir=state_dir)


def dictionaries(context: Context, i: int) -> Any:
    return DictionaryClient(ATOMS[i], OrthogonalLearner(4), context)


def regressions(context: Context, i: int) -> Any:
    return RegressionClient(X[i], X[i] @ SLOPES[i % 2], context)


def means(context: Context, i: int) -> Any:
    return Mean(i)


def nodes(context: Context, i: int) -> Any:
    return DiffusionClient(Averaging(VALUES), context, max_delay=3)


CASES = {
    "perma": Case(lambda **o: PerMA(2, remember=2, **o), dictionaries, 2),
    "clusters": Case(lambda **o: ClusteredFedAvg(2, choose_every=2, **o), means, 2, ZEROS),
    "measured": Case(lambda **o: ClusteredFedAvg("auto", **o), means, 1, ZEROS),
    "fedmd": Case(lambda **o: FedMD(2, **o), regressions, 2),
    "fedx": Case(lambda **o: FedX(2, robust=True, **o), regressions, 6),
    "one-shot": Case(lambda **o: OneShotClustering(2, **o), regressions, 3),
    "relay": Case(lambda **o: NeighborRelay(RING, 4, **o), nodes, 3),
}
SOME: dict[str, Any] = {"fraction_train": 0.8}
PERTURBED = MomentDescent(n_products=2, n_iterations=2, perturbation=0.1)
FAULTS = Faults(0.2, 0.2, {}, {0: 2}, 2, seed=4)
#: The same with other options, and with clients that are not drawn in every round.
VARIANTS = {
    "perma, mean": CASES["perma"]._replace(
        strategy=lambda **o: PerMA(2, aggregation="mean", **SOME, **o)
    ),
    "perma, auto": Case(lambda **o: PerMA(**SOME, **o), dictionaries, 10),
    "clusters, adam": CASES["clusters"]._replace(
        strategy=lambda **o: ClusteredFedAvg(2, optimizer=Adam(), choose_every=2, **SOME, **o)
    ),
    "fedx, auto": Case(lambda **o: FedX(**SOME, **o), regressions, 6),
    "fedx, random": Case(lambda **o: FedX(2, start="random", **SOME, **o), regressions, 3),
    "fedx, perturbed": Case(lambda **o: FedX(2, phase_1=PERTURBED, **SOME, **o), regressions, 6),
    "relay, sealed": Case(
        lambda **o: NeighborRelay(RING, 4, faults=FAULTS, sealed=True, staleness=1, **o), nodes, 4
    ),
}
