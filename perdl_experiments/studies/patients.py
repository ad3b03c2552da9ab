"""Tables of natural clients, such as hospitals or patients: which part of a linear model is shared.

The clients are what the file says, such as hospitals or patients; nobody made them heterogeneous.
Every client has rows for training, rows for validation and rows that its error is measured on:
drawn at random, or in the order of a column such as the time, the last ones for testing. The model
is linear; it predicts a number, or by a logistic regression one of two classes.

Direct solvers, given all clients' rows in one place or one client's:

==============  ==================================================================================
method          what it is
==============  ==================================================================================
``mean``        the mean of a client's training rows, or their more frequent class
``last``        the last of its training rows, where they are in the order of a column
``latest``      the last of its validation rows, likewise: later than what others are trained on
``alone``       local training: a ridge (or penalized logistic) regression per client
``pooled``      one such regression of all clients' rows
``shrunk``      a regression per client, shrunk to the pooled one
``intercepts``  a mixed model: common coefficients, a random intercept per client
``slopes``      a mixed model with random intercepts and slopes
==============  ==================================================================================

``intercepts-tuned`` is each client's mixed model, trained on as the federated methods are.

Federated, each also fine-tuned (``METHOD-tuned``: every client trains on until its own validation
loss no longer falls):

==============  ==================================================================================
``fedavg``      FedAvg
``personal``    `PersonalizedFedAvg` with a private intercept
``ditto``       `Ditto`
``clustered``   `ClusteredFedAvg`, ``k="auto"``
``ifca``        IFCA: three random models, each client trains the best for it
``ifca-best``   the best of five such starts by the validation loss, at five times the cost
==============  ==================================================================================

Every method has its best learning rate, or penalties, by the mean validation loss over clients.
Random effects are penalized, their variances chosen like all penalties, in place of REML.

``--data FILE.npz`` with ``X`` (n, n_features), NaN where missing, ``y`` (n,) and ``client`` (n,).
Features are scaled by all clients' training rows; a missing value becomes the mean and, where a
twentieth of a feature is missing, an indicator; a feature of three to five integers, one indicator
each. Without a file, planted mixed models.

Metrics: ``error_METHOD``, the mean over clients of the share of wrong classes, or of the root mean
squared error, and of that the mean over seeds; ``lead_METHOD``, by how much it is below FedAvg
fine-tuned on the same split, with the interval ``lead_low_METHOD`` to ``lead_high_METHOD``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit, logit

from flwr_perdl.clients import client_app
from flwr_perdl.core.checks import Matrix
from flwr_perdl.protocol.records import PARTITION_ID, Scalar
from flwr_perdl.random import DATA, spawn
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import ClusteredFedAvg, Ditto, PersonalizedFedAvg, ServerSettings
from perdl_experiments.data import NAMES, by_client, cached_by_file, read_arrays
from perdl_experiments.outcome import Outcome
from perdl_experiments.render import Record
from perdl_experiments.studies._experiment import Arrays, Keep, leads, words
from perdl_experiments.studies._experiment import Config as Common
from perdl_experiments.studies._network import stopped_each
from perdl_experiments.studies._parts import keep_all

#: Shares of a client's rows for training and for validation; the rest is for testing.
TRAIN, VALIDATION = 0.5, 0.25
#: The grids: learning rates, in units of the inverse of the largest curvature at a client; Ditto's
#: proximal weights; penalties of coefficients and of what is a client's own. Gradient steps of a
#: client per round.
STEPS, PULLS = (0.1, 0.3, 1.0, 1.9), (0.03, 0.1, 0.3, 1.0)
PENALTIES = tuple(10.0**power for power in range(-4, 2))
LOCAL_STEPS = 5
#: Integers that a categorical feature has, and the share of missing values that has an indicator.
CATEGORIES, MISSING = (3, 5), 0.05
METHODS = words("patients")
FEDERATED = ("fedavg", "personal", "ditto", "clustered", "ifca", "ifca-best")
#: IFCA's models, and starts of which the best counts.
MODELS, STARTS = 3, 5
#: What every method is compared with.
BASELINE = "fedavg-tuned"


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """The options of patients.toml."""

    task: Literal["number", "class"]
    order: int
    n_train: int

    def check(self) -> None:
        """Reject a number of clients that is not that of the data."""
        self.check_nodes(len(_load(self.data).y), "client of the data")


class Table(NamedTuple):
    """Every client's rows as they are, and the clients' names."""

    X: list[Matrix]
    y: list[Matrix]
    names: list[str]


class Rows(NamedTuple):
    """Rows of one client: features, and what is to be predicted."""

    X: Matrix
    y: Matrix


class Split(NamedTuple):
    """A client's rows by what they are for."""

    train: Rows
    choose: Rows
    test: Rows


class Found(NamedTuple):
    """Each client's validation loss and error, and what was chosen."""

    losses: Matrix
    errors: Matrix
    how: str


# The model -----------------------------------------------------------------------------------


def loss(task: str, z: Matrix, y: Matrix) -> float:
    """Return the mean squared error, halved, or the mean logistic loss."""
    return float(
        np.mean((z - y) ** 2) / 2 if task == "number" else np.mean(np.logaddexp(0, z) - y * z)
    )


def residual(task: str, z: Matrix, y: Matrix) -> Matrix:
    """Return the derivative of the loss of each row."""
    return (z if task == "number" else expit(z)) - y


def error(task: str, z: Matrix, y: Matrix) -> float:
    """Return the root mean squared error, or the share of wrong classes."""
    return float(np.sqrt(np.mean((z - y) ** 2)) if task == "number" else np.mean((z > 0) != y))


def curvature(task: str, X: Matrix) -> float:
    """Return the largest second derivative of the mean loss."""
    ones = np.column_stack([X, np.ones(len(X))])
    top = float(np.linalg.norm(ones, 2)) ** 2 / len(X)
    return top if task == "number" else top / 4


def rate(task: str, own: Sequence[Split], step: float) -> float:
    """Return a learning rate that is ``step`` of the inverse of the largest curvature."""
    return step / max(curvature(task, one.train.X) for one in own)


class Client:
    """A linear model on a client's rows; any client of Flower's is like it."""

    def __init__(self, own: Split, task: str, step: float) -> None:
        self.own, self.task, self.step = own, task, step

    def fit(
        self, parameters: list[Matrix], config: Mapping[str, Scalar]
    ) -> tuple[list[Matrix], int, dict[str, Scalar]]:
        """Take gradient steps."""
        w, b = (array.copy() for array in parameters)
        X, y = self.own.train
        for _ in range(LOCAL_STEPS):
            r = residual(self.task, X @ w + b, y) * self.step / len(y)
            w -= r @ X
            b -= r.sum()
        return [w, b], len(y), {}

    def evaluate(
        self, parameters: list[Matrix], config: Mapping[str, Scalar]
    ) -> tuple[float, int, dict[str, Scalar]]:
        """Return the validation loss."""
        w, b = parameters
        X, y = self.own.choose
        return loss(self.task, X @ w + b, y), len(y), {}


def judged(
    task: str, own: Sequence[Split], models: Sequence[tuple[Matrix, Any]], how: str
) -> Found:
    """Return what every client's model comes to."""
    measured = [
        (
            loss(task, one.choose.X @ w + b, one.choose.y),
            error(task, one.test.X @ w + b, one.test.y),
        )
        for one, (w, b) in zip(own, models, strict=True)
    ]
    losses, errors = np.array(measured).T
    return Found(losses, errors, how)


def best(tried: Sequence[Found]) -> Found:
    """Return what has the lowest mean validation loss."""
    return min(tried, key=lambda one: float(one.losses.mean()))


# Direct solvers ------------------------------------------------------------------------------


def solve(
    task: str,
    parts: Sequence[Rows],
    penalty: float,
    own: Sequence[float],
    toward: Matrix | None = None,
) -> tuple[Matrix, Matrix]:
    """Return common coefficients, and what each of several clients adds to them.

    Minimizes the mean loss over all rows, plus half of ``penalty`` times the squared distance of
    the common coefficients from ``toward`` (of the intercept only where that is given), plus half
    of ``own`` times the squares of what clients add, per client. The intercept is the last.

    Parameters
    ----------
    task : {"number", "class"}
        What is predicted.
    parts : sequence of Rows
        Every client's rows.
    penalty : float
        Of the common coefficients.
    own : pair of float
        Of what clients add to the coefficients, and to the intercept; infinite: nothing.
    toward : ndarray, optional
        Coefficients and intercept; zero, by default.
    """
    X = np.vstack([np.column_stack([one.X, np.ones(len(one.X))]) for one in parts])
    y = np.concatenate([one.y for one in parts])
    who = np.repeat(np.arange(len(parts)), [len(one.y) for one in parts])
    k, d = len(parts), X.shape[1]
    weight = np.full(d, penalty)
    weight[-1] = 0 if toward is None else penalty
    center = np.zeros(d) if toward is None else toward
    more = np.append(np.full(d - 1, own[0]), own[1]) / k
    free = np.isfinite(more)
    more = np.where(free, more, 0)

    def value(flat: Matrix) -> tuple[float, Matrix]:
        common, added = flat[:d], flat[d:].reshape(k, d) * free
        z = np.einsum("nd,nd->n", X, (common + added)[who])
        R = (residual(task, z, y) / len(y))[:, None] * X
        each = np.zeros((k, d))
        np.add.at(each, who, R)
        away = common - center
        total = loss(task, z, y) + (weight * away**2).sum() / 2 + (more * added**2).sum() / 2
        return total, np.append(
            R.sum(axis=0) + weight * away, ((each + more * added) * free).ravel()
        )

    flat = minimize(
        value, np.zeros(d * (k + 1)), jac=True, method="L-BFGS-B", options={"maxiter": 2000}
    ).x
    return flat[:d], flat[d:].reshape(k, d) * free


def level(task: str, mean: float) -> float:
    """Return the intercept of a model without features."""
    return mean if task == "number" else float(logit(np.clip(mean, 0.01, 0.99)))


def direct(task: str, own: Sequence[Split], rounds: int, *, ordered: bool) -> dict[str, Found]:
    """Return what the direct solvers come to, by method; the best is fine-tuned for ``rounds``."""
    parts, none = [one.train for one in own], (np.inf, np.inf)

    def measured(thetas: Sequence[Matrix], how: str) -> Found:
        return judged(task, own, [(theta[:-1], theta[-1]) for theta in thetas], how)

    def alone(penalty: float, toward: Matrix | None = None) -> Found:
        thetas = [solve(task, [one], penalty, none, toward)[0] for one in parts]
        return measured(thetas, f"penalty {penalty:g}")

    pooled = {p: solve(task, parts, p, none)[0] for p in PENALTIES}
    one = {p: measured([theta] * len(own), f"penalty {p:g}") for p, theta in pooled.items()}
    least = min(one, key=lambda p: float(one[p].losses.mean()))

    def mixed(slopes: bool) -> dict[str, list[Matrix]]:
        found = {}
        for penalty, spread in product((least / 10, least, 10 * least), PENALTIES):
            common, added = solve(task, parts, penalty, (spread if slopes else np.inf, spread))
            found[f"penalties {penalty:g} and {spread:g}"] = list(common + added)
        return found

    intercepts = mixed(slopes=False)
    random = {how: measured(thetas, how) for how, thetas in intercepts.items()}
    chosen = best([*random.values()])
    tuned = [fine_tuned(task, own, intercepts[chosen.how], step, rounds) for step in STEPS]

    flat = np.zeros(parts[0].X.shape[1])
    levels = {"mean": [level(task, one.y.mean()) for one in parts]}
    if task == "number" and ordered:
        levels["last"] = [one.y[-1] for one in parts]
        levels["latest"] = [one.choose.y[-1] for one in own]
    return {
        **{how: judged(task, own, [(flat, b) for b in at], how) for how, at in levels.items()},
        "alone": best([alone(p) for p in PENALTIES]),
        "pooled": one[least],
        "shrunk": best([alone(p, pooled[least]) for p in PENALTIES]),
        "intercepts": chosen,
        "intercepts-tuned": best(tuned),
        "slopes": best([measured(thetas, how) for how, thetas in mixed(slopes=True).items()]),
    }


def fine_tuned(
    task: str, own: Sequence[Split], thetas: Sequence[Matrix], step: float, fits: int
) -> Found:
    """Return each client's model, fine-tuned from coefficients, at its least validation loss."""
    clients = [Client(one, task, rate(task, own, step)) for one in own]
    kept = stopped_each(clients, [[theta[:-1], np.asarray(theta[-1])] for theta in thetas], fits)
    return judged(task, own, [(w, b) for w, b in kept], f"learning rate {step:g}")


# Federated -----------------------------------------------------------------------------------


def federated(
    config: Config, own: Sequence[Split], method: str, step: float, tuned: int, seed: int
) -> Found:
    """Return what a strategy comes to, with its best other options.

    Parameters
    ----------
    config : Config
        The study's options.
    own : sequence of Split
        Every client's rows.
    method : str
        One of `FEDERATED`.
    step : float
        One of `STEPS`.
    tuned : int
        So many further fits at most, on each client's own model.
    seed : int
        What IFCA's starts are drawn by.
    """
    options: dict[str, Any] = {
        "fine_tune": tuned,
        "server": ServerSettings(evaluate_every=config.rounds),
    }
    strategies: dict[str, Callable[[], Any]] = {
        "fedavg": partial(ClusteredFedAvg, 1, **options),
        "personal": partial(PersonalizedFedAvg, ["bias"], **options),
        "clustered": partial(ClusteredFedAvg, "auto", start_rounds=5, **options),
    }
    tries = {"": strategies[method]} if method in strategies else {}
    if method == "ditto":
        tries = {f", proximal weight {pull:g}": partial(Ditto, pull, **options) for pull in PULLS}

    if method.startswith("ifca"):
        start = partial(ClusteredFedAvg, MODELS, start="given", **options)
        draws = STARTS if method == "ifca-best" else 1
        tries = {f", start {draw}": start for draw in range(draws)}

    length = rate(config.task, own, step)

    def make_client(context: Context) -> Client:
        return Client(own[int(context.node_config[PARTITION_ID])], config.task, length)

    part: Any = {"private": ["bias"], "names": ["weight", "bias"]} if method == "personal" else {}
    app = client_app(make_client, **part)
    d, found = own[0].train.X.shape[1], []
    for draw, (more, make) in enumerate(tries.items()):
        strategy, grid = make(), InProcessGrid(app, len(own))
        first = {"weight": np.zeros(d), "bias": np.zeros(())}
        if method.startswith("ifca"):
            drawn = spawn(seed, DATA, 1 + draw).standard_normal((MODELS, d)) / np.sqrt(d)
            first = {"weight": drawn, "bias": np.zeros(MODELS)}
        initial = ArrayRecord({name: Array(array) for name, array in first.items()})
        strategy.start(grid, initial, num_rounds=config.rounds, verbose="quiet")
        models = [strategy.result.model_of(i) for i in range(len(own))]
        pairs = [(one["weight"].numpy(), one["bias"].numpy()) for one in models]
        found.append(judged(config.task, own, pairs, f"learning rate {step:g}{more}"))
    return best(found)


# The data ------------------------------------------------------------------------------------


@cached_by_file(maxsize=2)
def _load(path: str) -> Table:
    """Return every client's rows; planted ones where there is no file."""
    return Table(
        *by_client(path, *(read_arrays(path, *NAMES) if path else _planted()), missing=True)
    )


def _planted() -> tuple[Matrix, Matrix, NDArray[np.intp]]:
    """Return the rows of twelve clients with random intercepts and slopes."""
    rng, k, n, d = spawn(0, DATA), 12, 60, 6
    who, X = np.repeat(np.arange(k), n), rng.standard_normal((k * n, d))
    theta = rng.standard_normal(d) + 0.3 * rng.standard_normal((k, d))
    y = np.einsum("nd,nd->n", X, theta[who]) + rng.standard_normal(k)[who]
    return X, y + rng.standard_normal(k * n), who


def splits(config: Config, seed: int) -> tuple[list[Split], float]:
    """Return every client's rows, scaled, and the unit of the errors."""
    table, rng, found = _load(config.data), spawn(seed, DATA), []
    for X, y in zip(table.X, table.y, strict=True):
        random, n = rng.permutation(len(y)), len(y)
        rows = random if config.order < 0 else np.argsort(X[:, config.order], kind="stable")
        a, b = int(TRAIN * n), int((TRAIN + VALIDATION) * n)
        if min(a, b - a, n - b) < 1:
            raise ValueError(f"data must have at least 4 rows of each client, got {n} of one.")
        train = rows[np.sort(rng.permutation(a)[: config.n_train or a])]
        found.append([Rows(X[part], y[part]) for part in (train, rows[a:b], rows[b:])])
    encode = _encoder(np.vstack([own[0].X for own in found]))
    y = np.concatenate([own[0].y for own in found])
    mean, unit = (y.mean(), y.std() or 1.0) if config.task == "number" else (0.0, 1.0)

    def ready(rows: Rows) -> Rows:
        target = (rows.y - mean) / unit if config.task == "number" else (rows.y > 0).astype(float)
        return Rows(encode(rows.X), target)

    return [Split(*map(ready, own)) for own in found], float(unit)


def _encoder(train: Matrix) -> Callable[[Matrix], Matrix]:
    """Return what makes features of a table's columns, by the training rows."""
    columns: list[Callable[[Matrix], Matrix]] = []
    for j, column in enumerate(train.T):
        known = column[~np.isnan(column)]
        values = np.unique(known)
        if CATEGORIES[0] <= len(values) <= CATEGORIES[1] and (values == values.round()).all():
            columns += [partial(_equal, j, float(value)) for value in values]
        elif len(values) > 1:
            columns.append(partial(_filled, j, float(known.mean())))
        if len(known) < (1 - MISSING) * len(column):
            columns.append(partial(_missing, j))

    if not columns:
        raise ValueError("X must have a feature that varies, got none.")

    def raw(X: Matrix) -> Matrix:
        return np.column_stack([one(X) for one in columns])

    center, scale = raw(train).mean(axis=0), raw(train).std(axis=0)
    return lambda X: (raw(X) - center) / np.where(scale > 0, scale, 1)


def _equal(j: int, value: float, X: Matrix) -> Matrix:
    return np.asarray(X[:, j] == value, float)


def _filled(j: int, mean: float, X: Matrix) -> Matrix:
    return np.where(np.isnan(X[:, j]), mean, X[:, j])


def _missing(j: int, X: Matrix) -> Matrix:
    return np.asarray(np.isnan(X[:, j]), float)


# The run -------------------------------------------------------------------------------------


def compare(config: Config, seed: int) -> Arrays:
    """Return every method's errors, as "METHOD", by client, and "how-METHOD"."""
    own, unit = splits(config, seed)
    found = direct(config.task, own, config.rounds, ordered=config.order >= 0)
    for method, (more, tuned) in product(FEDERATED, {"": 0, "-tuned": config.rounds}.items()):
        found[method + more] = best(
            [federated(config, own, method, step, tuned, seed) for step in STEPS]
        )
    return {
        **{name: one.errors * unit for name, one in found.items()},
        **{f"how-{name}": np.array(one.how) for name, one in found.items()},
    }


def run(config: Config, keep: Keep) -> Outcome:
    """Compare all methods with every seed."""
    parts = {f"seed-{seed}": partial(compare, config, seed) for seed in config.each_seed}
    kept, table = keep_all(keep, parts), _load(config.data)
    names = [name for name in METHODS if name in kept[0]]
    errors = {name: np.array([one[name] for one in kept]) for name in names}  # (seeds, clients)
    means = {name: values.mean(axis=1) for name, values in errors.items()}
    order = sorted(means, key=lambda name: float(means[name].mean()))
    sizes, shown = [len(y) for y in table.y], len(table.y) <= 12
    return Outcome(
        records=[
            *(Record("error", means[name], name) for name in order),
            *leads(
                {name: means[BASELINE] - each for name, each in means.items()},
                BASELINE,
                (1 - TRAIN - VALIDATION) / TRAIN,
            ),
            *(
                Record("client_error", errors[name][:, i], name, {"client": who})
                for name in order
                for i, who in enumerate(table.names)
                if shown
            ),
        ],
        curves={},
        arrays={**{f"error_{name}": values for name, values in errors.items()}},
        figures=_figures({METHODS[name]: means[name] for name in order}),
        rounds=config.rounds,
        floats_up=0.0,
        floats_down=0.0,
        facts={
            "n_clients": len(sizes),
            "least": min(sizes),
            "most": max(sizes),
            "best": METHODS[order[0]],
            "unit": "root mean squared error"
            if config.task == "number"
            else "share of wrong classes",
            "drawn": "at random"
            if config.order < 0
            else "in the order of time, the last for testing",
        },
    )


def _figures(means: Mapping[str, Matrix]) -> dict[str, Any]:
    from perdl_experiments import pictures  # an extra: clients must not need it

    return {"errors": pictures.bars({"": means}, np.mean)}
