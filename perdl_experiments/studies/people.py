"""Natural clients' networks: when federating pays, and which part of a model is shared.

The clients are what the file says, such as people whose activity a phone tells; nobody made them
heterogeneous. Of each client and class so many percent of the rows, contiguous in time from a drawn
one on, are for training, the last fifth of these for validation; the rows after the largest such
share are for testing, for every share alike. The network has one hidden layer, the *body*, and an
output layer, the *head*.

==============  ==================================================================================
method          what it is
==============  ==================================================================================
``alone``       local training
``fedavg``      FedAvg
``fedavg-long`` FedAvg with four times the rounds
``fedper``      `PersonalizedFedAvg` with a private head
``lg-fedavg``   `PersonalizedFedAvg` with a private body
``ditto``       `Ditto`
``clustered``   `ClusteredFedAvg`, ``k="auto"``
``ifca``        IFCA: three random models, each client trains the best for it
``diffusion``   `DiffusionAveraging`, four neighbors each, without a server
``exchange``    `FederatedRidge`, ``"personal"``: one exchange of sums, nothing to choose
``pooled``      one network of all clients' rows in one place
==============  ==================================================================================

``exchange-small`` has 100 random features instead of 600, ``exchange-auto`` chooses its level, and
``exchange-alone`` is the same ridge regression of a client's own rows. ``forest`` and ``boosting``
are a random forest and gradient boosting of all clients' rows in one place, each with the best of
three settings by the mean validation accuracy over clients.

``METHOD-tuned`` is the same, fine-tuned: each client trains on, with a learning rate chosen for
that, until its own lowest validation loss, at most 20 epochs. So do local training and the pooled
network from the initial model, for at most as many epochs as the federated methods have.

Every method has the learning rate, Ditto also the proximal weight, with the lowest mean validation
loss over clients. With these, and as many epochs, it learns again from the training and the
validation rows before it is tested.

``--data FILE.npz`` with ``X`` (n, n_features), NaN where missing, ``y`` (n,), the classes, and
``client`` (n,), a client's rows of a class in order of time. Without it, planted clients. Columns
are standardized by all clients' rows for training and validation, a missing value is the mean.

Metrics: ``accuracy_SHARE_METHOD``, the mean over clients and seeds; ``megabytes_SHARE_METHOD`` that
a client sends in one run, and ``exchanges_SHARE_METHOD`` that it takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.checks import Matrix
from flwr_perdl.network import Topology
from flwr_perdl.protocol.records import ROUND, Scalar
from flwr_perdl.random import DATA, spawn
from flwr_perdl.strategies import (
    ClusteredFedAvg,
    DiffusionAveraging,
    Ditto,
    PersonalizedFedAvg,
)
from perdl_experiments.data import NAMES, by_client, cached_by_file, read_arrays
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
from perdl_experiments.studies._ridge import one_exchange
from perdl_experiments.studies._trees import TREES, trees

#: Share of the rows that are no test rows with which a model is trained while others choose, rows
#: of a gradient step, and beyond how many deviations a column is cut.
FIT, BATCH, CUT = 0.8, 8, 5.0
#: The grid: learning rates and Ditto's proximal weights; IFCA's number of models.
RATES, PULLS, MODELS = (0.1, 0.3, 1.0), (0.1, 0.3), 3
#: Epochs of a round, rounds before clients are clustered, the most pairs of epochs of fine-tuning,
#: and the neighbors of a node.
LOCAL_EPOCHS, START, FURTHER, DEGREE = 4, 2, 10, 4
#: Times the rounds; levels and options of one exchange.
LONGER = {"fedavg-long": 4}
EXCHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "exchange": ("personal", {}),
    "exchange-small": ("personal", {"features": 100}),
    "exchange-auto": ("auto", {}),
}
METHODS = words("people")
PRIVATE = {"fedper": ["head.*"], "lg-fedavg": ["body.*"]}
OURS = (*PRIVATE, "ditto", "clustered", "diffusion", *EXCHANGES)


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """The options of people.toml."""

    shares: tuple[int, ...]
    hidden: int
    methods: tuple[str, ...]

    def check(self) -> None:
        """Reject a number of clients that is not that of the data."""
        self.check_nodes(len(_load(self.data)[0]), "client of the data")


class Rows(NamedTuple):
    """A client's rows: for training, then to choose by, then to measure; where the former end."""

    X: Matrix
    y: NDArray[np.intp]
    ends: tuple[int, int]


class Learned(NamedTuple):
    """Every client's model of the training rows, and that of the validation rows, too."""

    fitted: Sequence[Model]
    refitted: Sequence[Model]
    how: str
    megabytes: float = 0.0
    exchanges: int = 0


# The clients ---------------------------------------------------------------------------------


@cached_by_file(maxsize=2)
def _load(path: str) -> tuple[list[Matrix], list[NDArray[np.intp]]]:
    """Return every client's rows and classes, from 0 on."""
    given = read_arrays(path, *NAMES) if path else _planted()
    X, y, _ = by_client(path, *given, missing=True)
    classes = np.unique(np.concatenate(y))
    return X, [np.searchsorted(classes, own) for own in y]


def _planted() -> tuple[Matrix, NDArray[np.intp], NDArray[np.intp]]:
    """Return rows of ten clients: each moves the three classes' common centers."""
    rng, k, n, d = spawn(0, DATA), 10, 90, 8
    who, y = np.repeat(np.arange(k), n), np.tile(np.repeat(np.arange(3), n // 3), k)
    centers = rng.standard_normal((3, d)) + rng.standard_normal((k, 3, d))
    return centers[who, y] + rng.standard_normal((k * n, d)), y, who


def rows_of(config: Config, share: int, seed: int) -> list[Rows]:
    """Return every client's rows, of which so many percent are no test rows."""
    X, y = _load(config.data)
    rng, most, drawn = spawn(seed, DATA), max(config.shares) / 100, []
    for own in y:
        parts: list[list[int]] = [[], [], []]
        for label in np.unique(own):
            rows = np.flatnonzero(own == label)
            rows = np.roll(rows, -rng.integers(len(rows)))
            known = round(len(rows) * share / 100)
            found = np.split(rows, [round(FIT * known), known, round(len(rows) * most)])
            for part, more in zip(parts, (found[0], found[1], found[3]), strict=True):
                part += more.tolist()
        drawn.append(parts)
        if not all(parts):
            raise ValueError(f"data must have more rows of each client, got {len(own)} of one.")
    seen = [[*fit, *choose] for fit, choose, _ in drawn]
    together = np.concatenate([one[part] for one, part in zip(X, seen, strict=True)])
    mean, deviation = np.nanmean(together, axis=0), np.nanstd(together, axis=0)

    def scaled(raw: Matrix) -> Matrix:
        z: Matrix = np.nan_to_num((raw - mean) / np.where(deviation > 0, deviation, 1))
        return z.clip(-CUT, CUT)

    return [
        Rows(scaled(one[order]), labels[order], (len(parts[0]), len(parts[0]) + len(parts[1])))
        for one, labels, parts in zip(X, y, drawn, strict=True)
        for order in [np.concatenate(parts).astype(int)]
    ]


class Client(Network):
    """A network on a client's rows; with ``refit`` it learns from the validation rows, too."""

    def __init__(
        self, own: Rows, i: int, seed: int, step: float, *, epochs: int, refit: bool
    ) -> None:
        super().__init__(*own, seed=seed, partition=i, step=step, batch=BATCH)
        self.epochs = epochs
        if refit:
            self.train = np.arange(own.ends[1])

    def fit(
        self, parameters: Model, config: Mapping[str, Scalar]
    ) -> tuple[Model, int, dict[str, Scalar]]:
        """Train for some epochs."""
        for epoch in range(self.epochs):
            one = {**config, ROUND: self.epochs * int(config[ROUND]) + epoch}
            parameters, *_ = super().fit(parameters, one)
        return parameters, len(self.train), {}


def made(
    own: Sequence[Rows],
    seed: int,
    step: float,
    *,
    epochs: int = LOCAL_EPOCHS,
    refit: bool = False,
) -> list[Client]:
    """Return every client's network."""
    return [Client(one, i, seed, step, epochs=epochs, refit=refit) for i, one in enumerate(own)]


def losses(clients: Sequence[Network], models: Sequence[Model]) -> Matrix:
    """Return each client's validation loss."""
    pairs = zip(clients, models, strict=True)
    return np.array([client.evaluate(model, {})[0] for client, model in pairs])


# The methods ---------------------------------------------------------------------------------


def trained_on(own: Sequence[Rows], start: Learned, seed: int, fits: int) -> Learned:
    """Return models that each client trained on until its lowest validation loss."""
    tried = []
    for rate in RATES:
        clients = made(own, seed, rate, epochs=2)
        path = np.array([losses(clients, m) for m in by_epoch(clients, start.fitted, fits)])
        tried.append((float(path.min(axis=0).mean()), rate, path.argmin(axis=0)))
    _, rate, counts = min(tried, key=lambda one: one[0])
    models = list(start.refitted)
    for i, client in enumerate(made(own, seed, rate, epochs=2, refit=True)):
        for fit in range(counts[i]):
            models[i] = client.fit(models[i], {ROUND: fit + 1})[0]
    return start._replace(
        refitted=models, how=f"{start.how}, then {rate:g}".removeprefix(", then ")
    )


def strategy(method: str, option: float, n: int) -> Any:
    """Return what trains a method."""
    options: dict[str, Any] = {"fraction_evaluate": 0.0}
    match method:
        case "fedper" | "lg-fedavg":
            return PersonalizedFedAvg(PRIVATE[method], **options)
        case "ditto":
            return Ditto(option, **options)
        case "diffusion":
            graph = Topology.k_regular(n, DEGREE)
            return DiffusionAveraging(graph, evaluate_every=0, shows_models=True)
        case "ifca":
            return ClusteredFedAvg(MODELS, start="given", **options)
        case "clustered":
            return ClusteredFedAvg("auto", start_rounds=START, **options)
    return ClusteredFedAvg(1, min_clients=1, **options)


def trained(
    clients: Sequence[Network], first: Sequence[Model], method: str, option: float, rounds: int
) -> tuple[list[Model], float, int]:
    """Return every client's model, the megabytes that one sends, and the exchanges.

    Parameters
    ----------
    clients : sequence of Network
        By partition.
    first : sequence of list of ndarray
        Random models, of which IFCA takes several.
    method : str
        FedAvg, one of `PRIVATE` or `LONGER`, Ditto, clustered, diffusion or IFCA.
    option : float
        Of the grid.
    rounds : int
        Communication rounds.
    """
    model = first[0]
    if method == "ifca":
        model = [np.stack(arrays) for arrays in zip(*first, strict=True)]
    trainer = strategy(method, option, len(clients))
    models = federated(clients, model, trainer, rounds, PRIVATE.get(method, ()))
    return models, *cost(trainer)


def cost(trainer: Any) -> tuple[float, int]:
    """Return the megabytes that a client sent, and the exchanges."""
    reports = trainer.history.trainings
    return 8e-6 * sum(report.floats_up for report in reports), len(reports)


def chosen(
    own: Sequence[Rows], first: Sequence[Model], method: str, seed: int, rounds: int
) -> Learned:
    """Return a strategy's models with the best of its grid."""
    tried = []
    options = PULLS if method == "ditto" else (0.0,)
    for rate, option in product(RATES, options):
        clients = made(own, seed, rate)
        models, *_ = trained(clients, first, method, option, rounds)
        tried.append((float(losses(clients, models).mean()), rate, option, models))
    _, rate, option, models = min(tried, key=lambda one: one[0])
    again = trained(made(own, seed, rate, refit=True), first, method, option, rounds)
    more = f" with {option:g}" if len(options) > 1 else ""
    return Learned(models, again[0], f"{rate:g}{more}", *again[1:])


def exchanged(
    own: Sequence[Rows], seed: int, classes: int, level: str, **options: Any
) -> tuple[Matrix, float, int]:
    """Return each client's accuracy after one exchange of sums, and what that costs."""
    known = [(X[:end], y[:end]) for X, y, (_, end) in own]
    trainer, models = one_exchange(known, level, classes=classes, seed=seed, **options)
    right = [
        np.mean(model.predict(X[end:]) == y[end:])
        for model, (X, y, (_, end)) in zip(models, own, strict=True)
    ]
    return np.array(right), *cost(trainer)


def boosted(own: Sequence[Rows], seed: int, method: str) -> tuple[Matrix, str]:
    """Return each client's accuracy by trees of all clients' rows, and what was chosen."""
    X, y, (fit, known) = pooled(own)

    def right(model: Any, part: int) -> Matrix:
        each = (np.split(model.predict(one.X) == one.y, one.ends)[part] for one in own)
        return np.array([np.mean(one) for one in each])

    rows = (X[:fit], y[:fit]), (X[:known], y[:known])
    model, how = trees(method, *rows, lambda m: -right(m, 1).mean(), seed=seed, classes=True)
    return right(model, 2), how


def pooled(own: Sequence[Rows]) -> Rows:
    """Return all clients' rows as those of one."""
    pieces = [[np.split(values, one.ends) for values in (one.X, one.y)] for one in own]
    X, y = (np.concatenate([one[j][k] for k in range(3) for one in pieces]) for j in (0, 1))
    fit, known = np.sum([one.ends for one in own], axis=0)
    return Rows(X, y, (int(fit), int(known)))


def compare(config: Config, share: int, seed: int) -> Arrays:
    """Return every method's accuracies by client, "METHOD", "cost-METHOD" and "how-METHOD"."""
    own, rounds, n = rows_of(config, share, seed), config.rounds, len(_load(config.data)[0])
    classes = 1 + max(int(y.max()) for y in _load(config.data)[1])
    shape, rng = (own[0].X.shape[1], config.hidden, classes), spawn(seed, DATA, 1)
    first = [random_network(*shape, rng) for _ in range(MODELS)]
    most, together = rounds * LOCAL_EPOCHS // 2, pooled(own)
    sent = 8e-6 * (together.X[: together.ends[1]].size + together.ends[1]) / n
    begun = Learned([first[0]] * n, [first[0]] * n, "")
    found, kept = {"alone": trained_on(own, begun, seed, most)}, Arrays()
    for method in ("fedavg", *config.methods):
        if method in EXCHANGES:
            level, options = EXCHANGES[method]
            kept[method], *spent = exchanged(own, seed, classes, level, **options)
            kept[f"cost-{method}"] = np.array(spent)
        elif method == "exchange-alone":
            each = [exchanged([one], seed, classes, "shared")[0] for one in own]
            kept |= {method: np.concatenate(each), f"cost-{method}": np.zeros(2)}
        elif method in TREES:
            kept[method], kept[f"how-{method}"] = map(np.array, boosted(own, seed, method))
            kept[f"cost-{method}"] = np.array([sent, 1])
        elif method == "pooled":
            one = begun._replace(fitted=first[:1], refitted=first[:1])
            one = trained_on([together], one, seed, most)
            both = list(one.fitted) * n, list(one.refitted) * n
            found[method] = Learned(*both, one.how, sent, 1)
        else:
            more = rounds * LONGER.get(method, 1)
            found[method] = chosen(own, first, method, seed, more)
    further = {
        f"{method}-tuned": trained_on(own, end, seed, FURTHER)
        for method, end in found.items()
        if method != "alone"
    }
    tests = made(own, seed, 0.0)
    for method, end in {**found, **further}.items():
        pairs = zip(tests, end.refitted, strict=True)
        kept[method] = np.array([client.accuracy(model) for client, model in pairs])
        kept[f"cost-{method}"] = np.array([end.megabytes, end.exchanges])
        kept[f"how-{method}"] = np.array(end.how)
    return kept


# The run -------------------------------------------------------------------------------------


def run(config: Config, keep: Keep) -> Outcome:
    """Compare all methods with every seed and share."""
    tried = list(product(config.each_seed, config.shares))
    parts = {
        f"seed-{seed}-share-{share}": partial(compare, config, share, seed) for seed, share in tried
    }
    kept = dict(zip(tried, keep_all(keep, parts), strict=True))
    names = [name for name in METHODS if name in kept[tried[0]]]
    right = {
        (share, name): np.array([kept[seed, share][name] for seed in config.each_seed])
        for share, name in product(config.shares, names)
    }
    middle = sorted(config.shares)[len(config.shares) // 2]
    order = sorted(names, key=lambda name: -float(right[middle, name].mean()))
    records = []
    for share, name in product(config.shares, order):
        spent = np.array([kept[seed, share][f"cost-{name}"] for seed in config.each_seed])
        values = {"accuracy": right[share, name].mean(axis=1)}
        values |= {"megabytes": spent[:, 0], "exchanges": spent[:, 1]}
        records += [Record(one, each, name, {"share": share}) for one, each in values.items()]
    sizes = [len(y) for y in _load(config.data)[1]]
    return Outcome(
        records=records,
        curves={},
        arrays={f"accuracy_{share}_{name}": values for (share, name), values in right.items()},
        figures=_figures({share: {n: right[share, n] for n in order} for share in config.shares}),
        rounds=config.rounds,
        floats_up=0.0,
        floats_down=0.0,
        facts={
            "n_clients": len(sizes),
            "least": min(sizes),
            "most": max(sizes),
            "middle": middle,
            "best": METHODS[order[0]],
            **{name: f"{right[middle, name].mean():.4f}" for name in names},
        },
    )


def _figures(right: dict[int, dict[str, Matrix]]) -> dict[str, Any]:
    from perdl_experiments import pictures  # an extra: clients must not need it

    ours = [said for name, said in METHODS.items() if name.removesuffix("-tuned") in OURS]
    return {
        "accuracy": pictures.intervals(
            {
                f"{share} % of the rows": pictures.ranges(
                    {METHODS[name]: values.mean(axis=1) for name, values in each.items()}, np.mean
                )
                for share, each in right.items()
            },
            ours=ours,
        )
    }
