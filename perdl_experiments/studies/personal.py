"""Personalization methods under four types of heterogeneity (non-IID data).

Every client has a few training images, half as many for validation, and a test set. The data are
heterogeneous in one of four ways:

===========  =====================================================================================
kind         what differs
===========  =====================================================================================
``labels``   label permutation (concept shift): each client numbers the classes differently
``turned``   four groups of clients with images rotated by 0, 90, 180 or 270 degrees
``cameras``  feature shift: each client's camera has its own gain per pixel and offset
``missing``  label skew: each client has images of three classes only
===========  =====================================================================================

The network has one hidden layer, the *body*, and an output layer, the *head*.

=============  ===================================================================================
method         what it is
=============  ===================================================================================
``alone``      local training, stopped at the best epoch, at most one epoch per round
``linear``     local training of a softmax regression instead of the network
``fedavg``     FedAvg
``fedper``     `PersonalizedFedAvg` with a private head (Arivazhagan et al., 2019)
``fedrep``     the same, head and body trained alternately (Collins et al., 2021)
``lg-fedavg``  `PersonalizedFedAvg` with a private body (Liang et al., 2020)
``ditto``      `Ditto` (Li et al., 2021)
``clustered``  `ClusteredFedAvg`, ``k="auto"``
=============  ===================================================================================

``tuned`` (FedAvg) and ``METHOD-tuned`` are a federated method's last models, fine-tuned by each
client with its own learning rate, stopped at its best epoch.

Every method has the same rounds, one epoch per array and round, and its best learning rate of a
grid by the mean validation accuracy (Ditto also its best pull; the regression its best penalty).

``--data FILE.npz`` with ``X`` (n, h, w) and ``y`` (n,), as for ``images``; without it,
scikit-learn's digits.

Metrics: ``accuracy_KIND_METHOD``: the mean test accuracy over clients, and its median over seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from numpy.typing import NDArray

from flwr_perdl.clients import client_app
from flwr_perdl.core.checks import Matrix
from flwr_perdl.protocol.records import PARTITION_ID, Scalar
from flwr_perdl.random import DATA, spawn
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import (
    ClusteredFedAvg,
    Ditto,
    PersonalizedFedAvg,
    ProtocolStrategy,
    ServerSettings,
)
from perdl_experiments.data import load_images
from perdl_experiments.outcome import Outcome
from perdl_experiments.render import Record
from perdl_experiments.studies._experiment import Arrays, Keep, words
from perdl_experiments.studies._experiment import Config as Common
from perdl_experiments.studies._network import (
    NAMES,
    Evaluated,
    Model,
    Network,
    by_epoch,
    random_network,
)
from perdl_experiments.studies._parts import keep_all

#: Images of a step of training, most images that a client's accuracy is measured on, and classes
#: that a client of the kind "missing" has.
BATCH, MOST_TEST, CLASSES = 10, 200, 3
#: The tuning grid: lengths of a step, Ditto's pulls, and penalties of a regression.
STEPS, PULLS, PENALTIES = (0.1, 0.3, 1.0), (0.03, 0.1, 0.3), (1e-5, 1e-4, 1e-3, 0.01, 0.1)
KINDS, METHODS = words("personal", "kind"), words("personal")


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """The options of personal.toml."""

    images: int
    hidden: int
    kinds: tuple[str, ...]
    methods: tuple[str, ...]


class Split(NamedTuple):
    """A client's images and labels: for training, to choose by, and to measure."""

    train: tuple[Matrix, NDArray[np.intp]]
    choose: tuple[Matrix, NDArray[np.intp]]
    test: tuple[Matrix, NDArray[np.intp]]


class Client(Network):
    """A network on a client's images; any client of Flower's is like it."""

    def __init__(self, own: Split, seed: int, partition: int, step: float) -> None:
        n, m = len(own.train[1]), len(own.choose[1])
        X, y = (np.concatenate(parts) for parts in zip(*own, strict=True))
        ends = n, n + m
        super().__init__(X, y, ends, seed=seed, partition=partition, step=step, batch=BATCH)

    def evaluate(self, parameters: Model, config: Mapping[str, Scalar]) -> Evaluated:
        """Return the loss on the images to choose by, and the accuracy there and on the others."""
        loss, n, metrics = super().evaluate(parameters, config)
        return loss, n, {**metrics, "chosen-by": self.accuracy(parameters, self.choice)}


# The clients ---------------------------------------------------------------------------------


def splits(config: Config, kind: str, seed: int) -> list[Split]:
    """Return every client's images, for one kind of difference.

    Parameters
    ----------
    config : Config
        The study's options.
    kind : str
        One of `KINDS`.
    seed : int
        Which images a client has, and how it differs.
    """
    images, rng, n = load_images(config.data), spawn(seed, DATA), config.clients
    stack = images.X.reshape(len(images.X), *images.shape)
    labels = np.unique(images.y, return_inverse=True)[1]
    found, need = [], config.images + config.images // 2
    for i, rows in enumerate(_dealt(labels, kind, n, rng)):
        if len(rows) < need + config.images // 2:
            raise ValueError(
                f"images must leave {config.images // 2} for the accuracy beside {need} of a "
                f"client's own, got {config.images} with {len(rows)} images at client {i}."
            )
        X, y = _changed(stack[rows], labels[rows], kind, i, rng)
        parts = np.split(np.arange(len(y)), [config.images, need, need + MOST_TEST])[:3]
        found.append(Split(*((X[part].reshape(len(part), -1), y[part]) for part in parts)))
    return found


def _dealt(
    labels: NDArray[np.intp], kind: str, n: int, rng: np.random.Generator
) -> list[NDArray[np.intp]]:
    """Return every client's rows, in random order."""
    if kind != "missing":
        return np.array_split(rng.permutation(len(labels)), n)
    order = rng.permutation(labels.max() + 1)  # every class has as many clients, but for one
    own = [order[(CLASSES * i + np.arange(CLASSES)) % len(order)] for i in range(n)]
    rows: list[list[Any]] = [[] for _ in range(n)]
    for label in order:
        has = [i for i in range(n) if label in own[i]]
        parts = np.array_split(rng.permutation(np.flatnonzero(labels == label)), max(len(has), 1))
        for i, part in zip(has, parts, strict=False):
            rows[i].append(part)
    return [rng.permutation(np.concatenate(own_rows)) for own_rows in rows]


def _changed(
    stack: Matrix, labels: NDArray[np.intp], kind: str, i: int, rng: np.random.Generator
) -> tuple[Matrix, NDArray[np.intp]]:
    """Return what client i sees, and what it calls it."""
    if kind == "labels":
        return stack, rng.permutation(labels.max() + 1)[labels]
    if kind == "turned":
        return np.rot90(stack, i % 4, axes=(1, 2)), labels
    if kind == "cameras":
        sensitivity = np.exp(rng.standard_normal(stack.shape[1:]))
        place = rng.integers(-1, 2, size=2)
        return np.roll(stack, place, axis=(1, 2)) * sensitivity, labels
    return stack, labels


def first_model(config: Config, own: Sequence[Split], seed: int) -> Model:
    """Return a random network."""
    rng, n_labels = spawn(seed, DATA, 1), 1 + max(int(y.max()) for one in own for _, y in one)
    return random_network(own[0].train[0].shape[1], config.hidden, n_labels, rng)


# The methods ---------------------------------------------------------------------------------


def strategies(rounds: int) -> dict[str, dict[str, ProtocolStrategy]]:
    """Return, by method, the strategies among which it is tuned, by what differs between them."""
    server = ServerSettings(evaluate_every=rounds)
    head = ["head.*"]
    return {
        "fedavg": {"": ClusteredFedAvg(1, server=server)},
        "fedper": {"": PersonalizedFedAvg(head, server=server)},
        "fedrep": {"": PersonalizedFedAvg(head, alternate=True, server=server)},
        "lg-fedavg": {"": PersonalizedFedAvg(["body.*"], server=server)},
        "ditto": {f"{pull:g}": Ditto(pull, server=server) for pull in PULLS},
        "clustered": {"": ClusteredFedAvg("auto", start_rounds=5, server=server)},
    }


#: Arrays that stay at the clients.
PRIVATE = {"fedper": ["head.*"], "fedrep": ["head.*"], "lg-fedavg": ["body.*"]}


def tuned(method: str) -> str:
    """Return what a method is called, fine-tuned."""
    return "tuned" if method == "fedavg" else f"{method}-tuned"


class Found(NamedTuple):
    """What chooses among what was tried, every client's accuracy on its own images, and how."""

    chosen_by: float
    accuracy: Matrix
    how: str


def federated(
    clients: Sequence[Client],
    model: Model,
    method: str,
    strategy: ProtocolStrategy,
    rounds: int,
) -> tuple[Matrix, list[Model]]:
    """Return what chooses and the accuracy of each client's own model, and these models.

    Parameters
    ----------
    clients : sequence of Client
        By partition.
    model : list of ndarray
        The first model.
    method : str
        What it is: which arrays are private.
    strategy : ProtocolStrategy
        What trains it.
    rounds : int
        Communication rounds.
    """

    def make_client(context: Context) -> Client:
        return clients[int(context.node_config[PARTITION_ID])]

    app = client_app(make_client, private=PRIVATE.get(method, ()))
    record = ArrayRecord({name: Array(array) for name, array in zip(NAMES, model, strict=True)})
    grid = InProcessGrid(app, len(clients))
    strategy.start(grid, record, num_rounds=rounds, verbose="quiet")
    own: Any = strategy  # any of `strategies` ends with models
    models = [own.result.model_of(p).to_numpy_ndarrays() for p in range(len(clients))]
    pairs = zip(clients, models, strict=True)
    measured = [one.evaluate(model, {})[2] for one, model in pairs]
    return _table(measured), models


def _table(measured: Sequence[Mapping[str, Scalar]]) -> Matrix:
    return np.array([[float(own[name]) for name in ("chosen-by", "accuracy")] for own in measured])


def stopped(
    clients: Sequence[Client], models: Sequence[Model], epochs: int, how: str = ""
) -> Found:
    """Return the best of all numbers of epochs of local training.

    Parameters
    ----------
    clients : sequence of Client
        All clients.
    models : sequence of list of ndarray
        What each begins with.
    epochs : int
        At most.
    how : str
        What else was chosen.
    """
    each = enumerate(by_epoch(clients, models, epochs))
    return _best(
        _tried(_table([own for *_, own in measured]), f"{how}, {epoch} epochs")
        for epoch, measured in each
    )


def linear(own: Sequence[Split]) -> Found:
    """Return a softmax regression at each client, with the best penalty.

    Parameters
    ----------
    own : sequence of Split
        Every client's images.
    """
    from sklearn.linear_model import LogisticRegression  # an extra

    tried = []
    for penalty in PENALTIES:
        models = [LogisticRegression(C=1 / penalty, max_iter=2000).fit(*one.train) for one in own]
        pairs = list(zip(models, own, strict=True))
        table = np.array([[m.score(*one.choose), m.score(*one.test)] for m, one in pairs])
        tried.append(_tried(table, f"penalty {penalty:g}"))
    return _best(tried)


def _tried(table: Matrix, how: str) -> Found:
    chosen_by, accuracies = table.T
    return Found(float(chosen_by.mean()), accuracies, how)


def _best(tried: Iterable[Found]) -> Found:
    return max(tried, key=lambda one: one.chosen_by)


def _read(kept: Arrays, method: str) -> Found:
    chosen_by, accuracies, how = (kept[f"{method}/{field}"] for field in Found._fields)
    return Found(float(chosen_by), accuracies, str(how))


def compare(config: Config, kind: str, seed: int, step: float) -> Arrays:
    """Return `Found` of every method, as "METHOD/FIELD", with one learning rate.

    Parameters
    ----------
    config : Config
        The study's options.
    kind : str
        Type of heterogeneity.
    seed : int
        Which images they have.
    step : float
        One of `STEPS`. What is best with it competes with the best of the others in `run`.
    """
    own = splits(config, kind, seed)
    of_step = {s: [Client(one, seed, i, s) for i, one in enumerate(own)] for s in STEPS}
    model, clients = first_model(config, own, seed), of_step[step]
    start = [model] * len(clients)
    found = {"alone": stopped(clients, start, config.rounds, f"{step:g}"), "linear": linear(own)}
    for method, tried in strategies(config.rounds).items():
        if method not in config.methods and method != "fedavg":
            continue
        ends, further = [], []
        for more, strategy in tried.items():
            table, models = federated(clients, model, method, strategy, config.rounds)
            how = f"{step:g} {more}".strip()
            ends.append(_tried(table, how))
            further += [
                stopped(each, models, config.rounds, f"{how}, then {s:g}")
                for s, each in of_step.items()
            ]
        found |= {method: _best(ends), tuned(method): _best(further)}
    return {
        f"{method}/{field}": np.array(value)
        for method, one in found.items()
        for field, value in one._asdict().items()
    }


def run(config: Config, keep: Keep) -> Outcome:
    """Run all kinds with every seed."""
    tried = list(product(config.kinds, config.each_seed, STEPS))
    names = [f"{kind}-seed-{seed}-step-{step:g}" for kind, seed, step in tried]
    parts = [partial(compare, config, *one) for one in tried]
    kept = dict(zip(tried, keep_all(keep, dict(zip(names, parts, strict=True))), strict=True))
    methods = [name for name in METHODS if f"{name}/how" in kept[tried[0]]]
    best = {
        (kind, seed, method): _best(_read(kept[kind, seed, step], method) for step in STEPS)
        for kind, seed, method in product(config.kinds, config.each_seed, methods)
    }
    records, medians = [], np.empty((len(config.kinds), len(methods)))
    for (i, kind), (j, method) in product(enumerate(config.kinds), enumerate(methods)):
        values = np.array([best[kind, seed, method].accuracy.mean() for seed in config.each_seed])
        medians[i, j] = np.median(values)
        records.append(Record("accuracy", values, method, {"kind": kind}))
    size = sum(array.size for array in first_model(config, splits(config, "turned", 0), 0))
    return Outcome(
        records=records,
        curves={},
        arrays={
            f"{kind}-{seed}-{method}-{part}": np.array(getattr(one, part))
            for (kind, seed, method), one in best.items()
            for part in ("accuracy", "how")
        },
        figures=_figures(medians, config.kinds, methods),
        rounds=config.rounds,
        floats_up=float(size * config.rounds),
        floats_down=float(size * config.rounds),
        facts={"best": _said(medians, config.kinds, methods), "headline": "FedAvg"},
    )


def _said(medians: Matrix, kinds: Sequence[str], methods: Sequence[str]) -> str:
    """Return which method is best for each kind, in words."""
    return ", ".join(
        f"{METHODS[methods[j]]} ({KINDS[kind]}, {row[j]:.3f})"
        for kind, row, j in zip(kinds, medians, medians.argmax(axis=1), strict=True)
    )


def _figures(medians: Matrix, kinds: Sequence[str], methods: Sequence[str]) -> dict[str, Any]:
    from perdl_experiments import pictures  # an extra: clients must not need it

    drawn = [
        m for m in methods if m == "fedavg" or tuned(m) not in methods
    ]  # fine-tuned, all others
    rows, columns = [KINDS[kind] for kind in kinds], [METHODS[method] for method in drawn]
    return {"heat": pictures.heat_map(medians[:, [methods.index(m) for m in drawn]], rows, columns)}
