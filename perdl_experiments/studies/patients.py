"""Tables of natural clients, such as hospitals or patients: which part of a linear model is shared.

The clients are what the file says, such as hospitals or patients; nobody made them heterogeneous.
Every client has rows for training, rows for validation and rows that its error is measured on:
drawn at random, or in the order of a column such as the time, the last ones for testing. The model
is linear; it predicts a number, or by a logistic regression one of two classes.

Direct solvers, given all clients' rows in one place or one client's:

==============  ==================================================================================
method          what it is
==============  ==================================================================================
``mean``        the mean of a client's rows, or their more frequent class
``latest``      the last of its rows before the test, where they are in the order of a column
``alone``       local training: a ridge (or penalized logistic) regression per client
``pooled``      one such regression of all clients' rows
``shrunk``      a regression per client, shrunk to the pooled one
``intercepts``  a mixed model: common coefficients, a random intercept per client
``slopes``      a mixed model with random intercepts and slopes
==============  ==================================================================================

``intercepts-tuned`` is each client's mixed model, trained on as the federated methods are.
``intercepts-level`` and ``fedavg-level`` add one number per client to a mixed model and to FedAvg's
model of the training rows: what fits the client's validation rows best, their mean residual.

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

``exchange`` is `FederatedRidge`, ``"personal"`` with a random intercept, and ``exchange-columns``
with random slopes, too: one exchange of sums of the training and validation rows, nothing to
choose. ``forest`` and ``boosting`` are trees of all clients' rows in one place, with the best of
three settings by the mean validation error over clients.

Every method has its best learning rate, or penalties, by the mean validation loss over clients.
With these, and each client's number of further trainings, it learns again from the training and
the validation rows before it is tested. Random effects are penalized, their variances chosen like
all penalties, in place of REML.

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
from functools import cache, partial
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize, minimize_scalar
from scipy.special import expit, logit

from flwr_perdl.core.checks import Matrix
from flwr_perdl.protocol.records import Scalar
from flwr_perdl.random import DATA, spawn
from flwr_perdl.strategies import (
    ClusteredFedAvg,
    Ditto,
    PersonalizedFedAvg,
    ServerSettings,
)
from perdl_experiments.data import NAMES, by_client, cached_by_file, read_arrays
from perdl_experiments.outcome import Outcome
from perdl_experiments.render import Record
from perdl_experiments.studies import _network
from perdl_experiments.studies._experiment import Arrays, Keep, leads, words
from perdl_experiments.studies._experiment import Config as Common
from perdl_experiments.studies._parts import keep_all
from perdl_experiments.studies._ridge import one_exchange
from perdl_experiments.studies._trees import TREES, trees

#: Shares of a client's rows for training and for validation; the rest is for testing.
TRAIN, VALIDATION = 0.5, 0.25
#: The grids: learning rates, in units of the inverse of the largest curvature at a client; Ditto's
#: proximal weights; penalties of coefficients and of what is a client's own. Gradient steps of a
#: client per round.
STEPS, PULLS = (0.1, 0.3, 1.0, 1.9), (0.03, 0.1, 0.3, 1.0)
PENALTIES = tuple(10.0**power for power in range(-4, 2))
LOCAL_STEPS = 5
#: What one number per client may add, in standard deviations of what is predicted, or logits.
SHIFTS = (-10, 10)
#: Integers that a categorical feature has, and the share of missing values that has an indicator.
CATEGORIES, MISSING = (3, 5), 0.05
METHODS = words("patients")
EXCHANGES = {"exchange": "intercept", "exchange-columns": "columns"}
FEDERATED = ("fedavg", "personal", "ditto", "clustered", "ifca", "ifca-best")
OURS = ("personal", "ditto", "clustered", "exchange")
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


class Candidate(NamedTuple):
    """A way to learn every client's coefficients and intercept, as one array.

    ``learn(False)`` learns from the training rows, ``learn(True)`` from the validation rows too.
    """

    how: str
    learn: Callable[[bool], Sequence[Matrix]]
    step: float = 0.0


class Found(NamedTuple):
    """Each client's error, what was chosen, and the models of the training rows alone."""

    errors: Matrix
    how: str
    trained: Sequence[Matrix]


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

    names = ("weight", "bias")

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


def apply(rows: Rows, theta: Matrix) -> Matrix:
    """Return what a model predicts."""
    z: Matrix = rows.X @ theta[:-1] + theta[-1]
    return z


def errors_of(task: str, own: Sequence[Split], thetas: Sequence[Matrix]) -> Matrix:
    """Return the error of each client's model on its test rows."""
    pairs = zip(own, thetas, strict=True)
    return np.array([error(task, apply(one.test, theta), one.test.y) for one, theta in pairs])


def whole(own: Sequence[Split]) -> list[Split]:
    """Return splits whose training rows are the validation rows, too: what is refitted on."""
    rows = (map(np.concatenate, zip(one.train, one.choose, strict=True)) for one in own)
    return [one._replace(train=Rows(*both)) for one, both in zip(own, rows, strict=True)]


def chosen(task: str, own: Sequence[Split], tried: Sequence[Candidate], fits: int = 0) -> Found:
    """Return what has the lowest mean validation loss, learned again from all rows.

    Each client may train on for ``fits`` times, and stops at its own lowest validation loss; from
    all rows it trains as often.
    """
    found = []
    for one in tried:
        thetas = one.learn(False)
        paths = [
            trained_on(task, split, theta, rate(task, own, one.step), fits)
            for split, theta in zip(own, thetas, strict=True)
        ]
        losses = [
            [loss(task, apply(split.choose, theta), split.choose.y) for theta in path]
            for split, path in zip(own, paths, strict=True)
        ]
        found.append((np.mean(np.min(losses, axis=1)), np.argmin(losses, axis=1), thetas, one))
    _, counts, thetas, best = min(found, key=lambda one: float(one[0]))
    rows = whole(own)
    refitted = [
        trained_on(task, split, theta, rate(task, rows, best.step), int(count))[-1]
        for split, theta, count in zip(rows, best.learn(True), counts, strict=True)
    ]
    return Found(errors_of(task, own, refitted), best.how, thetas)


def trained_on(task: str, own: Split, theta: Matrix, length: float, fits: int) -> list[Matrix]:
    """Return a client's model before and after each of so many further trainings."""
    client, path = Client(own, task, length), [theta]
    for _ in range(fits):
        (w, b), *_ = client.fit([path[-1][:-1], path[-1][-1:]], {})
        path.append(np.append(w, b))
    return path


def leveled(task: str, own: Sequence[Split], thetas: Sequence[Matrix]) -> Found:
    """Return models of the training rows with one number per client of its validation rows."""
    moved = []
    for one, theta in zip(own, thetas, strict=True):
        z, y = apply(one.choose, theta), one.choose.y
        shift = minimize_scalar(lambda more, z=z, y=y: loss(task, z + more, y), bounds=SHIFTS).x
        moved.append(np.append(theta[:-1], theta[-1] + shift))
    return Found(errors_of(task, own, moved), "mean residual of the validation rows", thetas)


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
    """Return what the direct solvers come to, by method; the mixed model is fine-tuned, too."""
    parts = [[one.train for one in rows] for rows in (own, whole(own))]
    none, find = (np.inf, np.inf), partial(chosen, task, own)

    def pooled(penalty: float, refit: bool) -> list[Matrix]:
        return [solve(task, parts[refit], penalty, none)[0]] * len(own)

    def alone(penalty: float, refit: bool, toward: float | None = None) -> list[Matrix]:
        center = None if toward is None else pooled(toward, refit)[0]
        return [solve(task, [one], penalty, none, center)[0] for one in parts[refit]]

    def mixed(penalty: float, spread: float, refit: bool, *, slopes: bool) -> list[Matrix]:
        common, added = solve(task, parts[refit], penalty, (spread if slopes else np.inf, spread))
        return list(common + added)

    def each(learn: Callable[..., list[Matrix]], **given: Any) -> list[Candidate]:
        return [Candidate(f"penalty {p:g}", partial(learn, p, **given)) for p in PENALTIES]

    def pairs(slopes: bool) -> list[Candidate]:
        return [
            Candidate(
                f"penalties {penalty:g} and {spread:g}",
                cache(partial(mixed, penalty, spread, slopes=slopes)),
            )
            for penalty, spread in product((least / 10, least, 10 * least), PENALTIES)
        ]

    def constant(of: Callable[[Matrix], float]) -> Found:
        flat = np.zeros(parts[0][0].X.shape[1])
        thetas = [[np.append(flat, of(one.y)) for one in rows] for rows in parts]
        return find([Candidate("", thetas.__getitem__)])

    one = find(each(pooled))
    least = float(one.how.split()[-1])
    random = pairs(slopes=False)
    intercepts = find(random)
    (best,) = [one for one in random if one.how == intercepts.how]
    steps = [best._replace(how=f"learning rate {step:g}", step=step) for step in STEPS]
    return {
        "mean": constant(lambda y: level(task, float(y.mean()))),
        **({"latest": constant(lambda y: float(y[-1]))} if task == "number" and ordered else {}),
        "alone": find(each(alone)),
        "pooled": one,
        "shrunk": find(each(alone, toward=least)),
        "intercepts": intercepts,
        "intercepts-level": leveled(task, own, intercepts.trained),
        "intercepts-tuned": find(steps, rounds),
        "slopes": find(pairs(slopes=True)),
    }


# Federated -----------------------------------------------------------------------------------


def options_of(method: str) -> dict[str, float]:
    """Return what a method is tried with besides learning rates, in words and as a number."""
    if method == "ditto":
        return {f", proximal weight {pull:g}": pull for pull in PULLS}
    starts = {"ifca": 1, "ifca-best": STARTS}.get(method)
    return {f", start {draw}": draw for draw in range(starts)} if starts else {"": 0}


def federated(
    config: Config, own: Sequence[Split], method: str, step: float, option: float, seed: int
) -> list[Matrix]:
    """Return what a strategy comes to at every client.

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
    option : float
        One of `options_of`.
    seed : int
        What IFCA's starts are drawn by.
    """
    options: dict[str, Any] = {"server": ServerSettings(evaluate_every=config.rounds)}
    strategies: dict[str, Callable[[], Any]] = {
        "fedavg": partial(ClusteredFedAvg, 1, **options),
        "personal": partial(PersonalizedFedAvg, ["bias"], **options),
        "clustered": partial(ClusteredFedAvg, "auto", start_rounds=5, **options),
        "ditto": partial(Ditto, option, **options),
    }
    start = partial(ClusteredFedAvg, MODELS, start="given", **options)
    strategy, length = strategies.get(method, start)(), rate(config.task, own, step)
    clients = [Client(one, config.task, length) for one in own]
    d = own[0].train.X.shape[1]
    first: list[Matrix] = [np.zeros(d), np.zeros(())]
    if method.startswith("ifca"):
        drawn = spawn(seed, DATA, 1 + int(option)).standard_normal((MODELS, d)) / np.sqrt(d)
        first = [drawn, np.zeros(MODELS)]
    private = ["bias"] if method == "personal" else ()
    models = _network.federated(clients, first, strategy, config.rounds, private)
    return [np.append(w, b) for w, b in models]


def strategies(config: Config, own: Sequence[Split], seed: int) -> dict[str, Found]:
    """Return what every strategy comes to, as it is and fine-tuned."""
    found, rows = {}, (own, whole(own))

    def learn(method: str, step: float, option: float, refit: bool) -> list[Matrix]:
        return federated(config, rows[refit], method, step, option, seed)

    for method in FEDERATED:
        tried = [
            Candidate(
                f"learning rate {step:g}{more}", cache(partial(learn, method, step, option)), step
            )
            for step, (more, option) in product(STEPS, options_of(method).items())
        ]
        found[method] = chosen(config.task, own, tried)
        found[f"{method}-tuned"] = chosen(config.task, own, tried, config.rounds)
    return {**found, "fedavg-level": leveled(config.task, own, found["fedavg"].trained)}


# One exchange, and trees -----------------------------------------------------------------------


def exchanged(config: Config, own: Sequence[Split], seed: int, random: str) -> Found:
    """Return what one exchange of sums comes to."""
    rows, options = [one.train for one in whole(own)], {}
    if config.task == "class":
        rows, options = [Rows(X, y.astype(int)) for X, y in rows], {"classes": 2}
    _, models = one_exchange(rows, "personal", random=random, features=0, seed=seed, **options)
    pairs = zip(models, (one.test for one in own), strict=True)
    return Found(np.array([told(config.task, *pair) for pair in pairs]), "", ())


def told(task: str, model: Any, rows: Rows) -> float:
    """Return the error of what a model predicts: a number, or a class."""
    return error(task, model.predict(rows.X) - 0.5 * (task == "class"), rows.y)


def boosted(task: str, own: Sequence[Split], seed: int, method: str) -> Found:
    """Return what trees of all clients' rows come to."""
    parts = [[one.train for one in rows] for rows in (own, whole(own))]
    train, known = (Rows(*map(np.concatenate, zip(*part, strict=True))) for part in parts)

    def validated(model: Any) -> float:
        return float(np.mean([told(task, model, one.choose) for one in own]))

    given: Any = {"seed": seed, "classes": task == "class"}
    model, how = trees(method, train, known, validated, **given)
    return Found(np.array([told(task, model, one.test) for one in own]), how, ())


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
    found |= strategies(config, own, seed)
    found |= {name: exchanged(config, own, seed, random) for name, random in EXCHANGES.items()}
    found |= {name: boosted(config.task, own, seed, name) for name in TREES}
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

    ours = [words for name, words in METHODS.items() if name.split("-")[0] in OURS]
    return {"errors": pictures.intervals({"": pictures.ranges(means, np.mean)}, ours=ours)}
