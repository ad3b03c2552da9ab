"""Decentralized averaging on label-skewed digits: what the graph costs, against FedAvg.

Every node has two labels' worth of training images, sorted by label, and a softmax regression whose
``fit`` takes a few gradient steps on all of them. `DiffusionAveraging` trains it on each graph;
FedAvg averages all nodes' models in every round; a node alone averages nothing. Accuracy is that on
held-out images of all ten digits.

A network has reached FedAvg from the round on in which its *worst* node stays within a hundredth of
FedAvg's accuracy after the last round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from flwr.client import NumPyClient
from scipy.special import softmax

from flwr_perdl.checks import Matrix
from flwr_perdl.diffusion import DiffusionAveraging, Topology
from flwr_perdl.random import DATA, spawn
from perdl_experiments.data import load_images
from perdl_experiments.measures import rounds_to
from perdl_experiments.outcome import Outcome
from perdl_experiments.render import Record
from perdl_experiments.studies._experiment import Arrays, Keep, words
from perdl_experiments.studies._experiment import Config as Common
from perdl_experiments.studies._parts import keep_all

#: Share of the images that are held out, and what counts as FedAvg's accuracy.
HELD_OUT, NEAR = 0.25, 0.01
#: Numbers of a model: weights and intercepts of ten digits of 8 x 8 pixels.
MODEL = 650

#: How a reader sees the graphs, and FedAvg, which has a server instead.
WORDS = words("decentralized", "graph")
GRAPHS = [name for name in WORDS if name != "fedavg"]


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """The options of decentralized.toml."""

    method: str
    step: float
    local_steps: int


class Nodes:
    """All nodes' data and the common test images: ``nodes(k)`` is node k's client.

    Parameters
    ----------
    config : Config
        The study's options.
    seed : int
        Which images a node has, and which are held out.
    """

    def __init__(self, config: Config, seed: int) -> None:
        images, rng, n = load_images(""), spawn(seed, DATA), config.clients
        order = rng.permutation(len(images.y))
        n_test = int(HELD_OUT * len(order))
        test, train = order[:n_test], order[n_test:]
        shards = np.array_split(train[np.argsort(images.y[train], kind="stable")], 2 * n)
        dealt = [shards[i] for i in rng.permutation(2 * n)]
        own = [np.concatenate(dealt[2 * k : 2 * k + 2]) for k in range(n)]
        X, y = images.X, np.eye(10)[images.y]
        self.train = [(X[mine], y[mine]) for mine in own]
        self.test = X[test], y[test]
        self.config = config

    def __call__(self, node: int) -> NumPyClient:
        """Return a node's client."""
        return _Softmax(*self.train[node], self)

    @property
    def initial(self) -> list[Matrix]:
        """The first model of all nodes: zeros."""
        return [np.zeros((self.test[0].shape[1], 10)), np.zeros(10)]

    def accuracy(self, parameters: list[Matrix]) -> float:
        """Return a model's accuracy on the held-out images."""
        (W, b), (X, y) = parameters, self.test
        return float(np.mean((X @ W + b).argmax(axis=1) == y.argmax(axis=1)))


class _Softmax(NumPyClient):
    """Softmax regression on a node's images."""

    def __init__(self, X: Matrix, y: Matrix, nodes: Nodes) -> None:
        self.X, self.y, self.nodes = X, y, nodes

    def fit(
        self, parameters: list[Matrix], config: Mapping[str, Any]
    ) -> tuple[list[Matrix], int, dict[str, Any]]:
        """Take gradient steps on all images."""
        W, b = parameters
        step = self.nodes.config.step / len(self.y)
        for _ in range(self.nodes.config.local_steps):
            error = softmax(self.X @ W + b, axis=1) - self.y
            W, b = W - step * self.X.T @ error, b - step * error.sum(axis=0)
        return [W, b], len(self.y), {}

    def evaluate(
        self, parameters: list[Matrix], config: Mapping[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        """Return the accuracy on all nodes' common test images."""
        accuracy = self.nodes.accuracy(parameters)
        return 1 - accuracy, len(self.nodes.test[0]), {"accuracy": accuracy}


def topologies(n: int, seed: int) -> dict[str, Topology]:
    """Return the graphs by name."""
    rows = max(d for d in range(1, int(n**0.5) + 1) if n % d == 0)
    return {
        "ring": Topology.ring(n),
        "torus": Topology.torus(rows, n // rows),
        "exponential": Topology.exponential(n),
        "erdos-renyi": Topology.erdos_renyi(n, min(1.0, 2 * np.log(n) / n), seed=seed),
        "complete": Topology.complete(n),
    }


def run(config: Config, keep: Keep) -> Outcome:
    """Run all graphs, FedAvg and the nodes alone with every seed."""
    kept = keep_all(
        keep, {f"seed-{seed}": partial(_one_seed, config, seed) for seed in config.each_seed}
    )
    fedavg = np.array([one["fedavg"] for one in kept])
    curves = {name: np.stack([one[name] for one in kept]) for name in GRAPHS}
    worst = {name: curve.min(axis=2) for name, curve in curves.items()}
    targets = fedavg[:, -1] - NEAR
    rounds = {
        name: [rounds_to(row, target) for row, target in zip(rows, targets, strict=True)]
        for name, rows in worst.items()
    }
    server = np.array([rounds_to(*pair) for pair in zip(fedavg, targets, strict=True)])
    gaps = {name: np.array([one[f"gap/{name}"] for one in kept]) for name in GRAPHS}
    floats = {name: np.array([one[f"floats/{name}"] for one in kept]) for name in GRAPHS}
    return Outcome(
        records=[
            Record("worst", fedavg[:, -1], parameters={"graph": "fedavg"}),
            Record("rounds", server, parameters={"graph": "fedavg"}, unit="rounds"),
            Record("floats", MODEL * server, parameters={"graph": "fedavg"}),
            Record("accuracy_alone", np.array([one["alone"].mean() for one in kept])),
            *(
                record
                for name in GRAPHS
                for record in (
                    Record("gap", gaps[name], parameters={"graph": name}),
                    Record("worst", worst[name][:, -1], parameters={"graph": name}),
                    Record("rounds", rounds[name], parameters={"graph": name}, unit="rounds"),
                    Record("floats", floats[name] * rounds[name], parameters={"graph": name}),
                )
            ),
        ],
        curves={
            "accuracy_fedavg": np.median(fedavg, axis=0).tolist(),
            **{f"worst_{name}": np.median(rows, axis=0).tolist() for name, rows in worst.items()},
        },
        arrays={f"accuracy_{name}": curve for name, curve in curves.items()},
        figures=_figures(
            {name: curve[0] for name, curve in curves.items()},
            float(fedavg[0, -1]),
            {name: (np.median(gaps[name]), np.median(rounds[name])) for name in GRAPHS},
        ),
        rounds=config.rounds,
        floats_up=float(MODEL * config.rounds),
        floats_down=float(np.median(floats["ring"])) * config.rounds,
        facts={"near": NEAR},
    )


def _one_seed(config: Config, seed: int) -> Arrays:
    """Return all curves, (rounds, n_nodes), and what a round costs, by graph."""
    nodes, n = Nodes(config, seed), config.clients
    average, alone = nodes.initial, [nodes.initial] * n
    fedavg = np.empty(config.rounds)
    for t in range(config.rounds):
        fitted = [nodes(k).fit(average, {})[0] for k in range(n)]
        average = [np.mean(arrays, axis=0) for arrays in zip(*fitted, strict=True)]
        fedavg[t] = nodes.accuracy(average)
        alone = [nodes(k).fit(model, {})[0] for k, model in enumerate(alone)]
    kept: Arrays = {"fedavg": fedavg, "alone": np.array([nodes.accuracy(own) for own in alone])}
    for name, topology in topologies(n, seed).items():
        learner = DiffusionAveraging(topology, method=config.method, metrics=["accuracy"])
        learned = learner.fit(nodes, config.rounds, initial=nodes.initial)
        kept[name] = learned.curves["evaluate-accuracy"]
        kept[f"gap/{name}"] = np.array(learner.weights.spectral_gap)
        kept[f"floats/{name}"] = np.array(learned.floats_sent / config.rounds / n)
    return kept


def _figures(
    curves: Mapping[str, Matrix], level: float, costs: Mapping[str, tuple[float, float]]
) -> dict[str, Any]:
    from perdl_experiments import network_plots  # an extra: clients must not need it

    named = {WORDS[name]: curve for name, curve in curves.items()}
    found = {WORDS[name]: at for name, at in costs.items() if np.isfinite(at[1])}
    return {
        "curves": network_plots.learning_curves(named, y="accuracy", level=level),
        "gaps": network_plots.rounds_against_gaps(found),
    }
