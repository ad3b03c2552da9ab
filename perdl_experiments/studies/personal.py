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

The network has one hidden layer (or, ``network=convolutional``, two convolutions before it, in
PyTorch), the *body*, and an output layer, the *head*.

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
``apfl``       APFL: mixtures of a local and a global model, trained together (Deng et al., 2020)
``ensemble``   the mean of the probabilities of local training and FedAvg, with the best weight
``clustered``  `ClusteredFedAvg`, ``k="auto"``
``ifca``       IFCA: four random models, each client trains the best for it (Ghosh et al., 2020)
``ifca-best``  the best of five such starts, at five times the cost
``known``      FedAvg within each of the four groups (oracle groups)
=============  ===================================================================================

The last three are for ``turned`` only.

``tuned`` (FedAvg) and ``METHOD-tuned`` are a federated method's last models, fine-tuned by each
client with its own learning rate, stopped at its best epoch.

Every method has the same rounds, one epoch per array and round, and its best learning rate of a
grid by the mean validation accuracy (Ditto also its best pull, APFL its share of the local model;
the regression its best penalty).

``--data FILE.npz`` with ``X`` (n, h, w) or, for a convolutional network, (n, h, w, 3), and ``y``
(n,); without it, scikit-learn's digits.

APFL deviates from the paper in that a client trains its local model after, not during, the epoch of
the global one, and in that its share is chosen for all clients.

Metrics: ``accuracy_KIND_METHOD``: the mean test accuracy over clients, and its median over seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from flwr_perdl.core.checks import Matrix
from flwr_perdl.protocol.records import ROUND
from flwr_perdl.random import DATA, spawn
from flwr_perdl.strategies import (
    ClusteredFedAvg,
    Ditto,
    PersonalizedFedAvg,
    ProtocolStrategy,
    ServerSettings,
)
from perdl_experiments.data import (
    cached_by_file,
    check_pixels,
    load_images,
    read_arrays,
    to_unit_range,
)
from perdl_experiments.outcome import Outcome
from perdl_experiments.render import Record
from perdl_experiments.studies._experiment import Arrays, Keep, words
from perdl_experiments.studies._experiment import Config as Common
from perdl_experiments.studies._network import (
    Model,
    Network,
    by_epoch,
    federated,
    random_network,
)
from perdl_experiments.studies._parts import keep_all

#: Images of a step of training, most images that a client's accuracy is measured on, and classes
#: that a client of the kind "missing" has.
BATCH, MOST_TEST, CLASSES = 10, 200, 3
#: The tuning grid: learning rates, Ditto's pulls, shares of APFL's local model and of the ensemble,
#: and penalties of a regression.
STEPS, PULLS, PENALTIES = (0.1, 0.3, 1.0), (0.03, 0.1, 0.3), (1e-5, 1e-4, 1e-3, 0.01, 0.1)
SHARES = (0.25, 0.5, 0.75)
#: The same of the convolutional network.
CONVOLUTIONAL_BATCH, CONVOLUTIONAL_STEPS = 25, (0.05, 0.15)
#: Groups of the kind "turned", and IFCA's starts of which the best counts.
GROUPS, STARTS = 4, 5
KINDS, METHODS = words("personal", "kind"), words("personal")


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """The options of personal.toml."""

    network: Literal["dense", "convolutional"]
    images: int
    hidden: int
    kinds: tuple[str, ...]
    methods: tuple[str, ...]

    @property
    def steps(self) -> tuple[float, ...]:
        """The learning rates."""
        return STEPS if self.network == "dense" else CONVOLUTIONAL_STEPS


class Split(NamedTuple):
    """A client's images and labels: for training, to choose by, and to measure."""

    train: tuple[Matrix, NDArray[np.intp]]
    choose: tuple[Matrix, NDArray[np.intp]]
    test: tuple[Matrix, NDArray[np.intp]]


class Client(Network):
    """A network on a client's images; any client of Flower's is like it."""

    def __init__(self, own: Split, seed: int, partition: int, step: float) -> None:
        super().__init__(*_joined(own), seed=seed, partition=partition, step=step, batch=BATCH)


def _joined(own: Split) -> tuple[Matrix, NDArray[np.intp], tuple[int, int]]:
    """Return all images of a client, their labels, and where those for training and choice end."""
    n, m = len(own.train[1]), len(own.choose[1])
    X, y = (np.concatenate(parts) for parts in zip(*own, strict=True))
    return X, y, (n, n + m)


def make_clients(config: Config, own: Sequence[Split], seed: int, step: float) -> list[Network]:
    """Return every client with its network and a learning rate."""
    if config.network == "dense":
        return [Client(one, seed, i, step) for i, one in enumerate(own)]
    from perdl_experiments.studies._convolutional import Convolutional  # PyTorch is an extra

    how: dict[str, Any] = {"seed": seed, "step": step, "batch": CONVOLUTIONAL_BATCH}
    return [Convolutional(*_joined(one), partition=i, **how) for i, one in enumerate(own)]


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
    rng, n = spawn(seed, DATA), config.clients
    stack, labels = _load(config.data, config.network == "convolutional")
    found, need = [], config.images + config.images // 2
    for i, rows in enumerate(_dealt(labels, kind, n, rng)):
        if len(rows) < need + config.images // 2:
            raise ValueError(
                f"images must leave {config.images // 2} for the accuracy beside {need} of a "
                f"client's own, got {config.images} with {len(rows)} images at client {i}."
            )
        X, y = _changed(stack[rows], labels[rows], kind, i, rng)
        parts = np.split(np.arange(len(y)), [config.images, need, need + MOST_TEST])[:3]
        X = X.reshape(len(X), -1) if config.network == "dense" else X
        found.append(Split(*((X[part], y[part]) for part in parts)))
    return found


@cached_by_file(maxsize=2)
def _load(path: str, color: bool) -> tuple[Matrix, NDArray[np.intp]]:
    """Return images and labels from 0 on: (n, height, width), or with a last axis of colors."""
    if path and color:
        X, y = read_arrays(path, "X", "y")
        if X.ndim == 4:
            check_pixels(X, path)
            return to_unit_range(X).astype(np.float32), np.unique(y, return_inverse=True)[1]
    images = load_images(path)
    stack = images.X.reshape(len(images.X), *images.shape)
    return stack[..., None] if color else stack, np.unique(images.y, return_inverse=True)[1]


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


def first_model(config: Config, own: Sequence[Split], seed: int, draw: int = 0) -> Model:
    """Return a random network."""
    n_labels, X = 1 + max(int(y.max()) for one in own for _, y in one), own[0].train[0]
    rng = spawn(seed, DATA, 1 + draw)
    if config.network == "dense":
        return random_network(X.shape[1], config.hidden, n_labels, rng)
    from perdl_experiments.studies import _convolutional  # PyTorch is an extra

    drawn = int(rng.integers(2**32))
    return _convolutional.random_network(X.shape[3], config.hidden, n_labels, drawn)


def with_step(clients: Sequence[Network], step: float) -> list[Network]:
    """Return the same clients with another learning rate."""
    others = [copy(one) for one in clients]
    for one in others:
        one.step = step
    return others


# The methods ---------------------------------------------------------------------------------


def strategies(rounds: int) -> dict[str, dict[str, ProtocolStrategy]]:
    """Return, by method, the strategies among which it is tuned, by what differs between them."""
    server = ServerSettings(evaluate_every=rounds)
    head = ["head.*"]
    return {
        "fedavg": {"": ClusteredFedAvg(1, min_clients=1, server=server)},
        "fedper": {"": PersonalizedFedAvg(head, server=server)},
        "fedrep": {"": PersonalizedFedAvg(head, alternate=True, server=server)},
        "lg-fedavg": {"": PersonalizedFedAvg(["body.*"], server=server)},
        "ditto": {f"{pull:g}": Ditto(pull, server=server) for pull in PULLS},
        "clustered": {"": ClusteredFedAvg("auto", start_rounds=5, server=server)},
        "ifca": {"": ClusteredFedAvg(GROUPS, start="given", server=server)},
    }


#: Arrays that stay at the clients.
PRIVATE = {"fedper": ["head.*"], "fedrep": ["head.*"], "lg-fedavg": ["body.*"]}


def tuned(method: str) -> str:
    """Return what a method is called, fine-tuned."""
    return "tuned" if method == "fedavg" else f"{method}-tuned"


class Found(NamedTuple):
    """What chooses among what was tried, every client's accuracy on its own images, how, models."""

    chosen_by: float
    accuracy: Matrix
    how: str
    models: Sequence[Model] = ()


def measured(clients: Sequence[Network], models: Sequence[Model]) -> Matrix:
    """Return each client's accuracy on the images to choose by, and on the others."""
    pairs = zip(clients, models, strict=True)
    return np.array([[one.accuracy(own, one.choice), one.accuracy(own)] for one, own in pairs])


def stopped(
    clients: Sequence[Network], models: Sequence[Model], epochs: int, how: str = ""
) -> Found:
    """Return the best of all numbers of epochs of local training.

    Parameters
    ----------
    clients : sequence of Network
        All clients.
    models : sequence of list of ndarray
        What each begins with.
    epochs : int
        At most.
    how : str
        What else was chosen.
    """
    return _best(
        _tried(clients, own, f"{how}, {epoch} epochs")
        for epoch, own in enumerate(by_epoch(clients, models, epochs))
    )


def apfl(
    clients: Sequence[Network], slow: Sequence[Network], model: Model, share: float, rounds: int
) -> list[Model]:
    """Return each client's mixture of models by APFL.

    Parameters
    ----------
    clients, slow : sequence of Network
        With a learning rate, and with ``share ** 2`` of it: a step of the mixture by so much is
        one of the local model along the loss of the mixture.
    model : list of ndarray
        The first one, global and local.
    share : float
        Of the local model.
    rounds : int
        Communication rounds.
    """
    local = [model] * len(clients)

    def mixed(own: Model, other: Model) -> Model:
        return [share * a + (1 - share) * b for a, b in zip(own, other, strict=True)]

    for t in range(1, rounds + 1):
        fitted = [one.fit(model, {ROUND: t})[0] for one in clients]
        for i, (one, other) in enumerate(zip(slow, fitted, strict=True)):
            before = mixed(local[i], other)
            after = one.fit(before, {ROUND: t})[0]
            moves = zip(local[i], after, before, strict=True)
            local[i] = [v + (a - b) / share for v, a, b in moves]
        model = [np.mean(arrays, axis=0) for arrays in zip(*fitted, strict=True)]
    return [mixed(own, model) for own in local]


def ensemble(clients: Sequence[Network], one: Sequence[Model], other: Sequence[Model]) -> Found:
    """Return the mean of two models' probabilities, with the best weight of the first."""

    def right(weight: float, client: Network, pair: Sequence[Model], rows: Any) -> float:
        first, second = (softmax(client.scores(model, rows), axis=1) for model in pair)
        guessed = (weight * first + (1 - weight) * second).argmax(axis=1)
        return float(np.mean(guessed == client.y[rows]))

    tried = []
    for weight in (0.0, *SHARES, 1.0):
        table = [
            [right(weight, each, pair, rows) for rows in (each.choice, each.test)]
            for each, *pair in zip(clients, one, other, strict=True)
        ]
        tried.append(_found(np.array(table), f"share {weight:g}"))
    return _best(tried)


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
        tried.append(_found(table, f"penalty {penalty:g}"))
    return _best(tried)


def _tried(clients: Sequence[Network], models: Sequence[Model], how: str) -> Found:
    return _found(measured(clients, models), how, models)


def _found(table: Matrix, how: str, models: Sequence[Model] = ()) -> Found:
    """Return what was found with each client's accuracy on the images to choose by, and others."""
    chosen_by, accuracies = table.T
    return Found(float(chosen_by.mean()), accuracies, how, models)


def _best(tried: Iterable[Found]) -> Found:
    return max(tried, key=lambda one: one.chosen_by)


def _read(kept: Arrays, method: str) -> Found:
    chosen_by, accuracies, how = (kept[f"{method}/{field}"] for field in Found._fields[:3])
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
    own, rounds = splits(config, kind, seed), config.rounds
    model, made = first_model(config, own, seed), make_clients(config, own, seed, step)
    of_step = {one: with_step(made, one) for one in config.steps}
    found = {"alone": stopped(made, [model] * len(made), rounds, f"{step:g}")}
    if config.network == "dense":
        found["linear"] = linear(own)
    ends = _ends(config, made, model)
    if kind == "turned" and "ifca" in config.methods:
        ends |= _groups(config, own, seed, made, model)
    for method, tried in ends.items():
        end = _best(tried)
        further = (
            stopped(clients, end.models, rounds, f"{end.how}, then {other:g}")
            for other, clients in of_step.items()
        )
        found |= {method: end, tuned(method): _best(further)}
    if "ensemble" in config.methods:
        found["ensemble"] = ensemble(made, found["alone"].models, found["fedavg"].models)
    return {
        f"{method}/{field}": np.array(getattr(one, field))
        for method, one in found.items()
        for field in Found._fields[:3]
    }


def _ends(config: Config, clients: Sequence[Network], model: Model) -> dict[str, list[Found]]:
    """Return what the methods for all kinds end with, each with all that it is tuned over."""
    rounds, step = config.rounds, clients[0].step
    ends = {
        method: [
            _tried(
                clients,
                federated(clients, model, one, rounds, PRIVATE.get(method, ())),
                f"{step:g} {more}".strip(),
            )
            for more, one in tried.items()
        ]
        for method, tried in strategies(rounds).items()
        if method in {"fedavg", *config.methods} - {"ifca"}
    }
    if "apfl" in config.methods:
        ends["apfl"] = [
            _tried(
                clients,
                apfl(clients, with_step(clients, step * share**2), model, share, rounds),
                f"{step:g} share {share:g}",
            )
            for share in SHARES
        ]
    return ends


def _groups(
    config: Config, own: Sequence[Split], seed: int, clients: Sequence[Network], model: Model
) -> dict[str, list[Found]]:
    """Return what the methods for groups end with: IFCA, and FedAvg where they are known."""
    rounds, step = config.rounds, clients[0].step
    starts = []
    for start in range(STARTS):
        drawn = [first_model(config, own, seed, start * GROUPS + j) for j in range(GROUPS)]
        stacked = [np.stack(arrays) for arrays in zip(*drawn, strict=True)]
        ended = federated(clients, stacked, strategies(rounds)["ifca"][""], rounds)
        starts.append(_tried(clients, ended, f"{step:g} start {start}"))
    models = [model] * len(clients)
    for j in range(GROUPS):
        strategy = strategies(rounds)["fedavg"][""]
        models[j::GROUPS] = federated(clients[j::GROUPS], model, strategy, rounds)
    known = _tried(clients, models, f"{step:g}")
    return {"ifca-best": starts, "ifca": starts[:1], "known": [known]}


def run(config: Config, keep: Keep) -> Outcome:
    """Run all kinds with every seed."""
    tried = list(product(config.kinds, config.each_seed, config.steps))
    names = [f"{kind}-seed-{seed}-step-{step:g}" for kind, seed, step in tried]
    parts = [partial(compare, config, *one) for one in tried]
    kept = dict(zip(tried, keep_all(keep, dict(zip(names, parts, strict=True))), strict=True))
    best = {
        (kind, seed, method): _best(_read(kept[kind, seed, step], method) for step in config.steps)
        for kind, seed in product(config.kinds, config.each_seed)
        for method in METHODS
        if f"{method}/how" in kept[kind, seed, config.steps[0]]
    }
    methods = [name for name in METHODS if any(name == method for *_, method in best)]
    records, medians = [], np.full((len(config.kinds), len(methods)), np.nan)
    for (i, kind), (j, method) in product(enumerate(config.kinds), enumerate(methods)):
        if (kind, config.seed, method) in best:
            each = [best[kind, seed, method].accuracy.mean() for seed in config.each_seed]
            medians[i, j] = np.median(each)
            records.append(Record("accuracy", np.array(each), method, {"kind": kind}))
    own = splits(config, config.kinds[0], config.seed)
    size = sum(array.size for array in first_model(config, own, config.seed))
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
        facts={
            "rates": " or ".join(f"{step:g}" for step in config.steps),
            "best": _said(medians, config.kinds, methods),
            "headline": "FedAvg",
        },
    )


def _said(medians: Matrix, kinds: Sequence[str], methods: Sequence[str]) -> str:
    """Return which method is best for each kind, in words."""
    return ", ".join(
        f"{METHODS[methods[j]]} ({KINDS[kind]}, {row[j]:.3f})"
        for kind, row, j in zip(kinds, medians, np.nanargmax(medians, axis=1), strict=True)
    )


def _figures(medians: Matrix, kinds: Sequence[str], methods: Sequence[str]) -> dict[str, Any]:
    from perdl_experiments import pictures  # an extra: clients must not need it

    drawn = [one for one in methods if one == "fedavg" or tuned(one) not in methods]
    rows, columns = [KINDS[kind] for kind in kinds], [METHODS[method] for method in drawn]
    return {"heat": pictures.heat_map(medians[:, [methods.index(m) for m in drawn]], rows, columns)}
