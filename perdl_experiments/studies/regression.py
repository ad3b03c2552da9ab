"""Clustered regression on your clients' data, or on patients of scikit-learn's data sets.

One exchange (`flwr_perdl.regression.choose_mixture`): every client sends the second moments of its
training part, by fold; the server chooses the number of models and fits them. A quarter of
every client's points is the test set. Compared with the two phases of FedMD and FedX, given
as many models; with one model for all: FedAvg, least squares, ridge, ridge with an intercept per
client, and ridge with all products of two features; with a ridge regression per client, by itself
or shrunk to the pooled model; and with mixed models, whose random intercepts and slopes come from
the same second moments (`perdl_experiments.mixed_model`). All methods have the same splits, so
differences are paired; their intervals count that splits overlap (Nadeau and Bengio, "Inference for
the generalization error", Machine Learning 2003).

The bundled data are real, the clients are synthetic: each has patients of one group.

``--data FILE.npz`` with ``X`` (n, n_features), ``y`` (n,) and ``client`` (n,), integers or texts;
without it, patients that come with scikit-learn. A quarter of every client's points is held out;
the number of models is chosen on the rest.

Metrics: ``ev_clustered``, ``ev_fedx`` (FedMD and FedX given as many models), ``ev_fedavg`` and
``ev_pooled`` (one model, by FedAvg and by least squares), ``ev_ridge`` (one ridge model),
``ev_intercepts`` (one ridge model and an intercept per client), ``ev_quadratic`` (one ridge model
with products; not of many features), ``ev_slopes`` and ``ev_correlated`` (mixed models with
a variance per coefficient, and with covariances too), ``ev_shrunk`` (a ridge regression per client,
shrunk to the pooled model), ``ev_local`` (a ridge regression per client): held-out explained
variance, means over splits; ``k``; ``gain_over_METHOD``, by how much the clustered models are ahead
on the same splits, and with two splits or more ``gain_low_over_METHOD`` and
``gain_high_over_METHOD``, the 95 % interval of that mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from flwr_perdl.clients import RegressionClient
from flwr_perdl.core.checks import Matrix
from flwr_perdl.protocol.records import PARTITION_ID
from flwr_perdl.random import DATA, SERVER, spawn
from flwr_perdl.regression import (
    Refinement,
    TwoPhase,
    choose_mixture,
    sufficient_statistics,
)
from flwr_perdl.strategies import FedX
from perdl_experiments.batched_regression import Clients, simulate
from perdl_experiments.data import NAMES, by_client, cached_by_file, read_arrays
from perdl_experiments.engine import arranged
from perdl_experiments.measures import COVERAGE, half_width
from perdl_experiments.mixed_model import fit_mixed_model, shrink_to_pooled
from perdl_experiments.outcome import Outcome
from perdl_experiments.render import Record, Table
from perdl_experiments.studies._experiment import Arrays, Auto, Federate, Keep, words
from perdl_experiments.studies._experiment import Config as Common
from perdl_experiments.studies._parts import Part, keep_all

#: Share of every client's points that is held out.
HELD_OUT = 0.25
FOLDS = 5
#: Numbers of models that "auto" tries.
CANDIDATES = (1, 2, 3, 4, 5, 6)
#: Ridge penalties of the per-client models, chosen by leave-one-out (points, standard deviations).
PENALTIES = tuple(10.0**power for power in np.arange(-2, 4.5, 0.5))
METHODS = words("regression")
#: Most columns that features and their products may be.
_PRODUCTS = 1_000
#: Gradient steps of a FedAvg client per round.
_STEPS = 5
#: Diabetes: blocks of patients per sex.
_BLOCKS = 10
#: Tumors: patients of a client, what is predicted, and from what.
_PATIENTS = 12
_RESPONSE, _FEATURES = "mean concavity", ("mean radius", "mean texture", "mean smoothness")
#: Coefficients that are drawn.
_DRAWN = 10


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """The options of regression.toml."""

    bundled: str
    k: int | Auto
    splits: int

    @property
    def n_models(self) -> int | None:
        """The number of models that is asked for, None where it is to be chosen."""
        return None if self.k == "auto" else self.k


class Data(NamedTuple):
    """The clients' data."""

    X: list[Matrix]
    y: list[Matrix]
    #: What the file calls the clients, and what the features are.
    clients: list[str]
    features: list[str]


class Split(NamedTuple):
    """Each client's training and held-out points."""

    train: list[NDArray[np.intp]]
    test: list[NDArray[np.intp]]


def client(context: Context, config: Config) -> RegressionClient:
    """Return the client of partition ``context.node_config["partition-id"]``."""
    i, table = int(context.node_config[PARTITION_ID]), _load(config.data, config.bundled)
    split = _split(table, config.seed)
    features, responses, _ = _standard(table, split)
    X, y = features[i], responses[i]
    train, test = split.train[i], split.test[i]
    held_out = (X[test], y[test]) if len(test) else None
    return RegressionClient(X[train], y[train], context, evaluation=held_out)


def strategy(config: Config, **options: Any) -> FedX:
    """Return FedX; ``options`` are the server's own."""
    return FedX(config.k, **arranged(options))


def federations(config: Config) -> list[Config]:
    """Return nothing: the one exchange is computed here, batched."""
    clients, there = config.clients, len(_load(config.data, config.bundled).X)
    if clients not in (0, there):
        raise ValueError(f"clients must be {there}, as in the data, got {clients}.")
    return []


def run(config: Config, federate: Federate, keep: Keep) -> Outcome:
    """Fit all methods on every split, measure what was held out, and fit once more to all."""
    table, seed, k = _load(config.data, config.bundled), config.seed, config.n_models
    parts: dict[str, Part] = {
        f"split-{i}": partial(_one_split, table, seed + i, k, config.rounds)
        for i in range(config.splits)
    }
    everything = Split([np.arange(len(y)) for y in table.y], [])
    parts["all"] = partial(_fitted, table, everything, seed, k)
    *splits, final = keep_all(keep, parts)
    there = [name for name in METHODS if f"ev_{name}" in splits[0]]
    explained = {name: [float(one[f"ev_{name}"]) for one in splits] for name in there}
    d, chosen = final["models"].shape[1], len(final["models"])
    counts = [int(one["k"]) for one in splits]
    sizes = [len(y) for y in table.y]
    return Outcome(
        records=[
            *(Record("ev", values, name) for name, values in explained.items()),
            *_gains(explained),
            Record("k", chosen),
            *(
                Record("cv_error", float(error), parameters={"candidate": int(candidate)})
                for candidate, error in zip(final["candidates"], final["errors"], strict=True)
                if np.isfinite(error)
            ),
        ],
        curves={
            **({"cv_error": final["errors"].tolist()} if k is None else {}),
            **{f"ev_{n}": v for n, v in explained.items()},
        },
        arrays={
            "models": final["models"] + final["mean"] * np.eye(d)[-1],
            "weights": final["weights"],
            "clusters": final["weights"].argmax(axis=1),
            "clients": np.array(table.clients),
        },
        figures=_figures(table, final),
        rounds=1,
        floats_up=float(FOLDS * ((d + 1) ** 2 + 1)),
        floats_down=float(chosen * d),
        facts={
            "least_k": min(counts),
            "most_k": max(counts),
            "n_clients": len(sizes),
            "least": min(sizes),
            "most": max(sizes),
            "models": chosen,
            "source": _SAYS[config.bundled],
            "coverage": f"{COVERAGE:.0%}",
            "held_out": f"{HELD_OUT:.0%}",
            "how": "The smallest number is chosen whose error is within one standard error and one "
            "thousandth of the minimum."
            if k is None
            else "The number was given.",
        },
        tables=[_members(table, final)],
    )


def _one_split(table: Data, seed: int, k: int | None, rounds: int) -> Arrays:
    """Return every method's explained variance of one split's held-out points."""
    split = _split(table, seed)
    X, y, _ = _standard(table, split)
    fitted = _fitted(table, split, seed, k)
    statistics = fitted["statistics"]
    sums = statistics.sum(axis=1)
    thetas = {
        "clustered": fitted["weights"] @ fitted["models"],
        "pooled": np.tile(_pooled(X, y, split), (len(X), 1)),
        "ridge": _pooled_ridge(X, y, split, intercepts=False),
        "intercepts": _pooled_ridge(X, y, split, intercepts=True),
        "slopes": fit_mixed_model(sums, correlated=False).models,
        "correlated": fit_mixed_model(sums, correlated=True).models,
        "shrunk": shrink_to_pooled(statistics, PENALTIES),
        "local": _ridges(X, y, split),
        "fedx": _two_phases(X, y, split, len(fitted["models"]), rounds, seed),
        "fedavg": _fedavg(X, y, split, rounds, seed),
    }
    truth = np.concatenate(_at(y, split.test))
    spread = float(np.var(truth)) or 1.0
    predicted = {
        name: np.concatenate([A @ own for A, own in zip(_at(X, split.test), models, strict=True)])
        for name, models in thetas.items()
    }
    d = X[0].shape[1] - 1
    if d * (d + 3) // 2 <= _PRODUCTS:
        predicted["quadratic"] = _quadratic(X, y, split)
    explained = {
        f"ev_{name}": np.array(1 - float(np.mean((truth - own) ** 2)) / spread)
        for name, own in predicted.items()
    }
    return {"k": np.array(len(fitted["models"])), **explained}


def _fitted(table: Data, split: Split, seed: int, k: int | None) -> Arrays:
    """Return the mixture of the training points; its number of models is chosen on those alone."""
    X, y, mean = _standard(table, split)
    statistics = np.stack(
        [
            sufficient_statistics(A[train], b[train], FOLDS, rng=spawn(seed, i))
            for i, (A, b, train) in enumerate(zip(X, y, split.train, strict=True))
        ]
    )
    candidates = CANDIDATES if k is None else (k,)
    choice = choose_mixture(statistics, candidates, rng=spawn(seed, SERVER))
    return {
        "statistics": statistics,
        "mean": np.array(mean),
        "models": choice.mixture.centers,
        "weights": choice.mixture.weights,
        "candidates": np.array(choice.candidates),
        "errors": np.array(choice.errors),
    }


def _pooled(X: Sequence[Matrix], y: Sequence[Matrix], split: Split) -> Matrix:
    """Return least squares on all clients' training points."""
    rows, values = np.vstack(_at(X, split.train)), np.concatenate(_at(y, split.train))
    return np.asarray(np.linalg.lstsq(rows, values, rcond=None)[0])


def _at(arrays: Sequence[Matrix], rows: Sequence[NDArray[np.intp]]) -> list[Matrix]:
    """Return these rows of each client's array."""
    return [array[own] for array, own in zip(arrays, rows, strict=True)]


def _pooled_ridge(
    X: Sequence[Matrix], y: Sequence[Matrix], split: Split, *, intercepts: bool
) -> Matrix:
    """Return one ridge regression of all clients, as each client's model.

    With ``intercepts`` every client adds its own, which the same penalty shrinks to the common one.
    The penalty is chosen by leave-one-out.
    """
    from sklearn.linear_model import RidgeCV  # an extra: clients must not need it

    rows = np.vstack(_at(X, split.train))[:, :-1]
    values = np.concatenate(_at(y, split.train))
    who = np.repeat(np.arange(len(X)), [len(train) for train in split.train])
    own = np.eye(len(X))[who] if intercepts else np.empty((len(who), 0))
    ridge = RidgeCV(PENALTIES).fit(np.hstack([rows, own]), values)
    d = rows.shape[1]
    models = np.tile(np.append(ridge.coef_[:d], ridge.intercept_), (len(X), 1))
    if intercepts:
        models[:, -1] += ridge.coef_[d:]
    return models


def _quadratic(X: Sequence[Matrix], y: Sequence[Matrix], split: Split) -> Matrix:
    """Return what one ridge regression on features and their products predicts of held-out points.

    The products are of any two features, a feature with itself included. The penalty is chosen by
    leave-one-out.
    """
    from sklearn.linear_model import RidgeCV  # an extra: clients must not need it
    from sklearn.preprocessing import PolynomialFeatures

    train, test = (
        PolynomialFeatures(2, include_bias=False).fit_transform(np.vstack(_at(X, rows))[:, :-1])
        for rows in split
    )
    ridge = RidgeCV(PENALTIES).fit(train, np.concatenate(_at(y, split.train)))
    return np.asarray(ridge.predict(test))


def _ridges(X: Sequence[Matrix], y: Sequence[Matrix], split: Split) -> Matrix:
    """Return each client's own ridge regression, its penalty chosen by leave-one-out."""
    from sklearn.linear_model import RidgeCV  # an extra: clients must not need it

    models = []
    for A, b, train in zip(X, y, split.train, strict=True):
        theta = np.zeros(A.shape[1])
        theta[-1] = b[train].mean()
        if len(train) > 2:
            ridge = RidgeCV(PENALTIES).fit(A[train, :-1], b[train])
            theta = np.append(ridge.coef_, ridge.intercept_)
        models.append(theta)
    return np.stack(models)


def _two_phases(
    X: Sequence[Matrix], y: Sequence[Matrix], split: Split, k: int, rounds: int, seed: int
) -> Matrix:
    """Return the model of every client's cluster after FedMD and FedX."""
    clients = Clients(_at(X, split.train), _at(y, split.train))
    models = simulate(clients, TwoPhase(k), rounds, seed=seed).state.centers
    if not len(models):
        raise ValueError(f"rounds must be more than Phase 1 takes, got {rounds}.")
    pairs = zip(clients.X, clients.y, strict=True)
    errors = [np.sum((b[:, None] - A @ models.T) ** 2, axis=0) for A, b in pairs]
    own: Matrix = models[np.argmin(errors, axis=1)]
    return own


def _fedavg(
    X: Sequence[Matrix], y: Sequence[Matrix], split: Split, rounds: int, seed: int
) -> Matrix:
    """Return FedAvg's one model, from zero, as each client's."""
    clients = Clients(_at(X, split.train), _at(y, split.train))
    settings = TwoPhase(1, phase_2=Refinement(n_steps=_STEPS, momentum=False, check_every=0))
    start = np.zeros((1, X[0].shape[1]))
    (model,) = simulate(clients, settings, rounds, centers=start, seed=seed).state.centers
    return np.tile(model, (len(X), 1))


# Data ---------------------------------------------------------------------------------------


@cached_by_file(maxsize=2)
def _load(path: str, bundled: str) -> Data:
    """Return the clients' data.

    Parameters
    ----------
    path : str
        An ``.npz`` file with ``X`` (n, n_features), ``y`` (n,) and ``client`` (n,), integers or
        text; ``""`` for bundled data.
    bundled : {"tumors", "diabetes"}
        Which: a client of `_tumors` has patients of one diagnosis, one of `_diabetes` patients of
        one sex and about the same age.
    """
    features: list[str] = []
    if path:
        X, y, client = read_arrays(path, *NAMES)
    else:
        X, y, client, features = (_tumors if bundled == "tumors" else _diabetes)()
    rows, responses, names = by_client(path, X, y, client)
    return Data(rows, responses, names, features or [f"x{i}" for i in range(rows[0].shape[1])])


def _tumors() -> tuple[Matrix, Matrix, NDArray[Any], list[str]]:
    """Return scikit-learn's breast tumors; clients of about twelve patients with one diagnosis."""
    from sklearn.datasets import load_breast_cancer  # an extra: not needed to import this module

    bunch = load_breast_cancer()
    names = [*bunch.feature_names]
    client = np.empty(len(bunch.target), dtype="U16")
    for kind, said in enumerate(bunch.target_names):
        rows = np.flatnonzero(bunch.target == kind)  # in the file's order
        for i, block in enumerate(np.array_split(rows, len(rows) // _PATIENTS)):
            client[block] = f"{said} {i + 1:02}"
    columns = [names.index(name) for name in _FEATURES]
    return bunch.data[:, columns], bunch.data[:, names.index(_RESPONSE)], client, [*_FEATURES]


def _diabetes() -> tuple[Matrix, Matrix, NDArray[Any], list[str]]:
    """Return scikit-learn's diabetes patients; those of one sex, by age, are ten clients."""
    from sklearn.datasets import load_diabetes  # an extra: not needed to import this module

    bunch = load_diabetes(scaled=False)
    X, features = bunch.data, [*bunch.feature_names]
    age, sex = (X[:, features.index(name)] for name in ("age", "sex"))
    client = np.empty(len(X), dtype=int)
    for number, value in enumerate(np.unique(sex)):
        of_sex = np.flatnonzero(sex == value)
        by_age = of_sex[np.argsort(age[of_sex], kind="stable")]
        for block, rows in enumerate(np.array_split(by_age, _BLOCKS)):
            client[rows] = number * _BLOCKS + block
    return X, bunch.target, client, features


#: What a reader is told of the bundled data.
_SAYS = {
    "tumors": f"scikit-learn's breast tumors: {_RESPONSE} from {', '.join(_FEATURES)}; each client "
    "has patients of one diagnosis, which no method is told. Response and features were chosen so "
    "that there are clusters.",
    "diabetes": "scikit-learn's diabetes patients; of each sex ten clients, sorted by age.",
}


def _split(table: Data, seed: int) -> Split:
    """Hold out a quarter of every client's points, none of a client's only one."""
    rng, train, test = spawn(seed, DATA), [], []
    for y in table.y:
        order = rng.permutation(len(y))
        held = round(HELD_OUT * len(y))
        train.append(np.sort(order[held:]))
        test.append(np.sort(order[:held]))
    if not sum(map(len, test)):
        raise ValueError("X must have clients with at least 2 points, to hold some out.")
    return Split(train, test)


def _standard(table: Data, split: Split) -> tuple[list[Matrix], list[Matrix], float]:
    """Return features, responses, and the mean that these had.

    Over the training points features have mean 0 and variance 1, but for a last one of ones, and
    responses have mean 0.
    """
    train = np.vstack(_at(table.X, split.train))
    mean, deviation = train.mean(axis=0), train.std(axis=0)
    varies = deviation > 1e-12 * np.abs(train).max(axis=0, initial=1e-300)
    scale = np.where(varies, deviation, 1)
    X = [
        np.column_stack([np.where(varies, (A - mean) / scale, 0), np.ones(len(A))]) for A in table.X
    ]
    origin = np.concatenate(_at(table.y, split.train)).mean()
    return X, [b - origin for b in table.y], float(origin)


# The report ----------------------------------------------------------------------------------


def _gains(explained: Mapping[str, Sequence[float]]) -> Iterator[Record]:
    """Yield by how much the clustered models are ahead of each method, with an interval."""
    ours = np.array(explained["clustered"])
    for method in list(explained)[1:]:
        difference = ours - explained[method]
        mean, half = (
            float(difference.mean().round(12)) + 0.0,
            half_width(difference, HELD_OUT / (1 - HELD_OUT)),
        )  # no -0
        yield Record("gain", mean, method)
        if np.isfinite(half):
            yield Record("gain_low", mean - half, method)
            yield Record("gain_high", mean + half, method)


def _members(table: Data, final: Mapping[str, NDArray[Any]]) -> Table:
    labels = final["weights"].argmax(axis=1)
    rows = []
    for j in range(len(final["models"])):
        mine = np.flatnonzero(labels == j)
        points = sum(len(table.y[i]) for i in mine)
        who = ", ".join(table.clients[i] for i in mine)
        rows.append([str(j + 1), str(len(mine)), str(points), who])
    return Table(
        "Who is in which cluster",
        "All points; a client counts where its weight is largest. The weights are in arrays.npz.",
        ["cluster", "clients", "points", "who"],
        rows,
    )


def _figures(table: Data, final: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    from perdl_experiments import plots  # an extra

    models = final["models"].copy()
    models[:, -1] -= models[:, -1].mean()
    names, most = [*table.features, "intercept"], np.argsort(-np.ptp(models, axis=0))[:_DRAWN]
    groups = {f"cluster {j + 1}": list(theta[most]) for j, theta in enumerate(models)}
    rows = [names[i] for i in most]
    return {"coefficients": plots.dots({"": groups}, rows, x="coefficient")}
