"""Decentralized averaging on label-skewed digits: what the graph costs, against FedAvg.

Every node has a few shards of the training images, which are sorted by label, and a softmax
regression whose ``fit`` takes a few gradient steps on all of them. `DiffusionAveraging` trains it
on each graph; FedAvg averages all nodes' models in every round; local training averages none.
Accuracy is that on held-out images of all ten digits. A second, larger set of networks, over the
same images, can be asked for, and networks that change from round to round.

A network has reached FedAvg from the round on in which its *worst* node stays within a hundredth of
FedAvg's accuracy after the last round.

Metrics, medians over the seeds, for GRAPH ``ring``, ``torus``, ``exponential``, ``erdos-renyi``,
``complete`` (with ``changing`` also ``random-pairs`` and ``one-peer``, which have no spectral gap):
``accuracy_worst_GRAPH`` of the worst node after the last round, ``rounds_to_fedavg_GRAPH`` (from
which on the worst node stays within 0.01 of FedAvg's last accuracy; -1: never),
``spectral_gap_GRAPH``, ``bytes_sent_GRAPH`` (by a node, in all rounds);
``rounds_to_fedavg_fedavg``, ``accuracy_fedavg``, ``accuracy_alone``. Those of the larger networks
end in ``_larger``. With ``tune``: ``accuracy_tuned_METHOD`` for ``fedavg``, ``pooled`` (all data in
one place) and, of the worst node of a ring, ``exact_diffusion``, ``gradient_tracking`` and ``atc``,
each at its best of three learning rates, by held-out training images of the nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from flwr_perdl.core.checks import Matrix
from flwr_perdl.network import (
    RandomQuantization,
    Schedule,
    TopK,
    Topology,
    diffusion_averaging,
    metropolis_weights,
)
from flwr_perdl.random import DATA, spawn
from perdl_experiments.data import load_images
from perdl_experiments.measures import rounds_to
from perdl_experiments.outcome import Outcome
from perdl_experiments.render import Record
from perdl_experiments.studies._experiment import Arrays, Keep, stacked, words
from perdl_experiments.studies._experiment import Config as Common
from perdl_experiments.studies._parts import keep_all
from perdl_experiments.words import megabytes

#: Share of the images that are held out, and what counts as FedAvg's accuracy.
HELD_OUT, NEAR = 0.25, 0.01
#: Learning rates to choose from, in units of ``step``, and the share of a node's images to do so.
FACTORS, CHOICE = (0.3, 1.0, 3.0), 0.2
#: Numbers of a model: weights and intercepts of ten digits of 8 x 8 pixels.
MODEL = 650

#: The compression behind each choice of ``send``; models are float32 but for the first.
SEND: dict[str, Any] = {
    "float64": None,
    "float32": None,
    "top-10%": TopK(0.1),
    "top-1%": TopK(0.01),
    "4-bit": RandomQuantization(4),
}

#: How a reader sees the graphs, and FedAvg, which has a server instead.
WORDS = words("decentralized", "graph")
#: How a reader sees the methods that have a learning rate of their own.
TUNED = words("decentralized")


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """The options of decentralized.toml."""

    method: str
    step: float
    local_steps: int
    shards: int
    larger: int
    larger_rounds: int
    changing: int
    tune: int
    send: str

    @property
    def sizes(self) -> dict[str, Config]:
        """The config of each set of networks, by its name."""
        found = {"": self}
        if self.larger:
            found["larger"] = replace(self, clients=self.larger, rounds=self.larger_rounds, tune=0)
        return found


class Nodes:
    """All nodes' data and the common test images: ``nodes(k)`` is node k's client.

    Parameters
    ----------
    config : Config
        The study's options.
    seed : int
        Which images a node has, and which are held out.
    choose : bool
        Whether a share of each node's training images takes the place of the test images.
    """

    def __init__(self, config: Config, seed: int, *, choose: bool = False) -> None:
        images, rng, n = load_images(""), spawn(seed, DATA), config.clients
        order = rng.permutation(len(images.y))
        n_test = int(HELD_OUT * len(order))
        test, train = order[:n_test], order[n_test:]
        if not config.shards:
            own = np.array_split(train, n)
        else:
            each, by_label = config.shards, train[np.argsort(images.y[train], kind="stable")]
            shards = np.array_split(by_label, each * n)
            dealt = [shards[i] for i in rng.permutation(each * n)]
            own = [np.concatenate(dealt[each * k : each * (k + 1)]) for k in range(n)]
        if choose:
            parts = [np.split(rng.permutation(mine), [round(CHOICE * len(mine))]) for mine in own]
            test, own = np.concatenate([held for held, _ in parts]), [rest for _, rest in parts]
        X, y = images.X, np.eye(10)[images.y]
        self.train = [(X[mine], y[mine]) for mine in own]
        self.test = X[test], images.y[test]
        self.config = config

    def __call__(self, node: int) -> Any:
        """Return a node's client."""
        return _Softmax(*self.train[node], self)

    @property
    def pooled(self) -> _Softmax:
        """A client with all nodes' data."""
        X, y = (np.concatenate(arrays) for arrays in zip(*self.train, strict=True))
        return _Softmax(X, y, self)

    @property
    def initial(self) -> list[Matrix]:
        """The first model of all nodes: zeros."""
        dtype = np.float64 if self.config.send == "float64" else np.float32
        return [np.zeros((self.test[0].shape[1], 10), dtype), np.zeros(10, dtype)]

    def accuracy(self, parameters: list[Matrix]) -> float:
        """Return a model's accuracy on the held-out images."""
        (W, b), (X, y) = parameters, self.test
        return float(np.mean((X @ W + b).argmax(axis=1) == y))


class _Softmax:
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
            scores = self.X @ W + b
            p = np.exp(scores - scores.max(axis=1, keepdims=True))
            error = p / p.sum(axis=1, keepdims=True) - self.y
            W, b = W - step * self.X.T @ error, b - step * error.sum(axis=0)
        return [W, b], len(self.y), {}

    def evaluate(
        self, parameters: list[Matrix], config: Mapping[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        """Return the accuracy on all nodes' common test images."""
        accuracy = self.nodes.accuracy(parameters)
        return 1 - accuracy, len(self.nodes.test[0]), {"accuracy": accuracy}


def networks(n: int, seed: int, changing: int) -> dict[str, Topology | Schedule]:
    """Return the graphs by name, with those that change from round to round if wanted."""
    rows = max(d for d in range(1, int(n**0.5) + 1) if n % d == 0)
    graphs: dict[str, Topology | Schedule] = {
        "ring": Topology.ring(n),
        "torus": Topology.torus(rows, n // rows),
        "exponential": Topology.exponential(n),
        "erdos-renyi": Topology.erdos_renyi(n, min(1.0, 2 * np.log(n) / n), seed=seed),
        "complete": Topology.complete(n),
    }
    if changing:
        graphs["random-pairs"] = Schedule.random_pairs(n, seed=seed)
        graphs["one-peer"] = Schedule.one_peer_exponential(n)
    return graphs


def run(config: Config, keep: Keep) -> Outcome:
    """Run all graphs, FedAvg and local training with every seed."""
    parts = {
        _named(size, f"seed-{seed}", between="-"): partial(_one_seed, one, seed)
        for size, one in config.sizes.items()
        for seed in config.each_seed
    }
    kept = keep_all(keep, parts)
    found = {
        size: stacked(kept[i * config.seeds : (i + 1) * config.seeds])
        for i, size in enumerate(config.sizes)
    }
    first, curves, arrays = found[""], {}, {}
    for size, one in found.items():
        for name in WORDS:
            if (curve := one.get(f"curve/{name}")) is None:
                continue
            worst = curve.min(axis=2)
            title = "accuracy_fedavg" if name == "fedavg" else f"worst_{name}"
            curves[_named(title, size)] = np.median(worst, axis=0).tolist()
            if name != "fedavg":
                arrays[_named("accuracy", name, size)] = curve
    return Outcome(
        records=[record for size, one in found.items() for record in _records(one, size)],
        curves=curves,
        arrays=arrays,
        figures=_figures(
            {f"{config.sizes[size].clients} nodes": one for size, one in found.items()}
        ),
        rounds=config.rounds,
        floats_up=float(MODEL * config.rounds),
        floats_down=float(np.median(first["sent/ring"])) * config.rounds,
        facts={
            "skewed": bool(config.shards),
            "has_larger": bool(config.larger),
            "changing": bool(config.changing),
            "headline": "on the ring, relayed by a server",
        },
    )


def _named(*parts: str, between: str = "_") -> str:
    return between.join(filter(None, parts))


def _records(found: Arrays, size: str) -> Iterator[Record]:
    """Yield the results of networks of one size."""
    yield Record("accuracy_alone", found["alone"], parameters={"size": size})
    for method in TUNED:
        for metric in ("tuned", "step"):
            if f"{metric}/{method}" in found:
                yield Record(metric, found[f"{metric}/{method}"], method)
    for name in WORDS:
        for metric in ("gap", "bytes", "worst", "rounds", "megabytes"):
            if f"{metric}/{name}" in found:
                unit, at = "rounds" if metric == "rounds" else "", {"graph": name, "size": size}
                yield Record(metric, found[f"{metric}/{name}"], parameters=at, unit=unit)


def _one_seed(config: Config, seed: int) -> Arrays:
    """Return all curves, (rounds, n_nodes), and what they come to and cost, by graph."""
    nodes, n = Nodes(config, seed), config.clients
    clients, alone = [nodes(k) for k in range(n)], [nodes.initial] * n
    fedavg = _fedavg(nodes, clients)
    for _ in range(config.rounds):
        alone = [one.fit(model, {})[0] for one, model in zip(clients, alone, strict=True)]
    kept: Arrays = {
        **(_tuned(config, seed) if config.tune else {}),
        "alone": np.array(np.mean([nodes.accuracy(own) for own in alone])),
        "curve/fedavg": fedavg,
        "sent/fedavg": np.array(float(MODEL)),
        "megabytes/fedavg": np.array(megabytes(MODEL)),
    }
    for name, network in networks(n, seed, config.changing).items():
        # Exact diffusion is for fixed graphs: others have their default.
        fixed = isinstance(network, Topology) or config.method != "exact_diffusion"
        method = config.method if fixed else None
        learned = diffusion_averaging(
            nodes,
            network,
            config.rounds,
            initial=nodes.initial,
            method=method,
            compression=SEND[config.send],
            metrics=["accuracy"],
        )
        kept[f"curve/{name}"] = learned.curves["evaluate-accuracy"]
        kept[f"sent/{name}"] = np.array(learned.floats_sent / config.rounds / n)
        kept[f"megabytes/{name}"] = np.array(learned.bytes_sent / config.rounds / n / 1e6)
        if isinstance(network, Topology):
            kept[f"gap/{name}"] = np.array(metropolis_weights(network).spectral_gap)
            kept[f"bytes/{name}"] = np.array(learned.bytes_sent / n)
    for name in [name for name in WORDS if f"curve/{name}" in kept]:
        worst = kept[f"curve/{name}"].min(axis=1)
        rounds = rounds_to(worst, fedavg[-1, 0] - NEAR)
        kept[f"worst/{name}"], kept[f"rounds/{name}"] = worst[-1], np.array(float(rounds))
        kept[f"megabytes/{name}"] = kept[f"megabytes/{name}"] * rounds  # a round's until now
    return kept


def _fedavg(nodes: Nodes, clients: Sequence[_Softmax]) -> Matrix:
    """Return FedAvg's accuracy after every round, (rounds, 1); of one client, its own."""
    average, curve = nodes.initial, np.empty((nodes.config.rounds, 1))
    for t in range(nodes.config.rounds):
        fitted = [one.fit(average, {})[0] for one in clients]
        average = [np.mean(arrays, axis=0) for arrays in zip(*fitted, strict=True)]
        curve[t] = nodes.accuracy(average)
    return curve


def _tuned(config: Config, seed: int) -> Arrays:
    """Return each method's accuracy at its best learning rate, and this."""
    kept: Arrays = {}
    configs = [replace(config, step=factor * config.step) for factor in FACTORS]
    for name in TUNED:
        best = max(configs, key=lambda one: _last(name, Nodes(one, seed, choose=True)))
        kept[f"tuned/{name}"] = np.array(_last(name, Nodes(best, seed)))
        kept[f"step/{name}"] = np.array(best.step)
    return kept


def _last(method: str, nodes: Nodes) -> float:
    """Return a method's accuracy after the last round, of the worst node of a ring."""
    config = nodes.config
    clients = {"fedavg": [nodes(k) for k in range(config.clients)], "pooled": [nodes.pooled]}
    if method in clients:
        return float(_fedavg(nodes, clients[method])[-1, 0])
    learned = diffusion_averaging(
        nodes,
        Topology.ring(config.clients),
        config.rounds,
        initial=nodes.initial,
        method=method,
        evaluate_every=0,
    )
    return min(nodes.accuracy(model) for model in learned.models.values())


def _figures(found: Mapping[str, Arrays]) -> dict[str, Any]:
    from perdl_experiments import plots  # an extra: clients must not need it

    first = next(iter(found.values()))
    shown = {n: first[f"curve/{n}"] for n in WORDS if n != "fedavg" and f"curve/{n}" in first}
    rows = sorted(["fedavg", *shown], key=lambda name: -np.median(first.get(f"gap/{name}", np.inf)))
    rounds = {
        size: [np.median(one.get(f"rounds/{name}", np.nan)) for name in rows]
        for size, one in found.items()
    }
    return {
        "curves": plots.lines(
            {WORDS[name]: curve.min(axis=2) for name, curve in shown.items()},
            levels={"FedAvg, final": float(np.median(first["worst/fedavg"]))},
            x="communication round",
            y="accuracy of the worst node",
            log_x=True,
        ),
        "gaps": plots.dots(
            {"": rounds}, [WORDS[name] for name in rows], x="rounds to FedAvg's accuracy"
        ),
    }
