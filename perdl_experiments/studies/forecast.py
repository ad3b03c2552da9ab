"""Stations that forecast without a server: what decentralized learning costs on natural data.

Every station is a node with a small network that predicts the logarithm of the next day's first
quantity (fine particles) from the last three days' means of all quantities and the season. A
node's neighbors are the stations whose first year is most like its own: the ``degree`` most
correlated ones, and those of a spanning tree of the largest correlations.

==============  ==================================================================================
method          what it is
==============  ==================================================================================
``exact``       `DiffusionAveraging`, exact diffusion
``tracking``    the same, gradient tracking
``atc``         the same, adapt then combine
``topk``        gradient tracking, a tenth of the values per message
``drops``       gradient tracking, a fifth of the links fail in every round
``exchange``    `FederatedRidge` with a server: one ridge regression of random features
``fedavg``      FedAvg, with a server
``tuned``       FedAvg, fine-tuned at each station, stopped at its best epoch
``alone``       local training, stopped likewise
``yesterday``   tomorrow is as today
``ridge``       a ridge regression of all stations' days in one place
``forest``      a random forest of all stations' days in one place
==============  ==================================================================================

Every method has the best of nine settings by the mean validation loss: three learning rates and
weight decays, scales of the features and penalties, or leaves and shares of columns of the forest;
the ridge regression of nine penalties. The training days are
drawn from the first half of the days, the next quarter validates, the last quarter tests.

``--data FILE.npz`` with ``X`` (n_stations, n_hours, n_quantities), hourly from midnight on, NaN
where missing. Without it, synthetic stations.

Metrics: ``error_METHOD``, the mean over stations of the squared error of the logarithm, which has
variance 1 over all training days; ``worst_METHOD`` of the worst station; ``lead_METHOD``, by how
much it is below local training, with the interval ``lead_low_METHOD`` to ``lead_high_METHOD``;
``megabytes_METHOD`` that a station sends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse.csgraph import minimum_spanning_tree

from flwr_perdl.core.checks import Matrix
from flwr_perdl.network import Faults, InMemoryNetwork, TopK, Topology, diffusion_averaging
from flwr_perdl.random import DATA, spawn
from perdl_experiments.data import HOURS, cached_by_file, hourly_days
from perdl_experiments.outcome import Outcome
from perdl_experiments.render import Record
from perdl_experiments.studies._experiment import Arrays, Keep, leads, words
from perdl_experiments.studies._experiment import Config as Common
from perdl_experiments.studies._network import random_network, stopped_each
from perdl_experiments.studies._parts import keep_all
from perdl_experiments.studies._ridge import one_exchange

#: Hours of a day that must be known, days that a forecast sees, shares of the days to train with
#: and to validate by, and days of the year whose correlation makes neighbors.
KNOWN, SEEN, TRAIN, VALIDATION, YEAR = 18, 3, 0.5, 0.25, 365
#: Learning rates, weight decays; the least days of a leaf of the forest, and the shares of columns
#: that a split is chosen from; penalties per day of the ridge regression.
STEPS, DECAYS, LEAVES, COLUMNS = (0.03, 0.1, 0.2), (0.03, 0.1, 0.3), (2, 5, 10), (1 / 3, 2 / 3, 1.0)
PENALTIES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
#: Scales of the random features, and penalties of the regression of them.
SCALES, STRENGTHS = (0.1, 0.3, 1.0), (1.0, 10.0, 100.0)
#: Gradient steps of a round, the share of links that fail, and of values sent.
LOCAL_STEPS, DROP, SENT = 2, 0.2, 0.1
METHODS = words("forecast")
#: Strategies of this library: without a server but for the last.
OURS = ("exact", "tracking", "atc", "topk", "drops", "exchange")
#: ``diffusion_averaging``'s arguments.
NETWORKS: dict[str, dict[str, Any]] = {
    "exact": {"method": "exact_diffusion"},
    "tracking": {"method": "gradient_tracking"},
    "atc": {"method": "atc"},
    "topk": {"method": "gradient_tracking", "compression": TopK(SENT)},
    "drops": {"method": "gradient_tracking"},
}


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """The options of forecast.toml."""

    days: int
    hidden: int
    degree: int

    def check(self) -> None:
        """Reject a number of clients that is not that of the data."""
        self.check_nodes(len(_load(self.data)), "station of the data")


class Days(NamedTuple):
    """Days of a station: what a forecast sees, and the logarithm that it predicts."""

    X: Matrix
    y: Matrix


class Station:
    """A network with one hidden layer on a station's days; any client of Flower's is like it."""

    def __init__(self, train: Days, choose: Days, step: float, decay: float) -> None:
        self.train, self.choose, self.step, self.decay = train, choose, step, decay

    def fit(
        self, parameters: list[Matrix], config: Mapping[str, Any]
    ) -> tuple[list[Matrix], int, dict[str, Any]]:
        """Take gradient steps on all training days."""
        model = [array.copy() for array in parameters]
        X, y = self.train
        for _ in range(LOCAL_STEPS):
            W, b, v, c = model
            hidden = np.maximum(X @ W + b, 0)
            error = (hidden @ v + c - y[:, None]) * (self.step / len(y))
            back = error @ v.T * (hidden > 0)
            shrink = self.step * self.decay
            body = X.T @ back + shrink * W, back.sum(axis=0)
            moves = *body, hidden.T @ error + shrink * v, error.sum(axis=0)
            model = [array - move for array, move in zip(model, moves, strict=True)]
        return model, len(y), {}

    def evaluate(
        self, parameters: list[Matrix], config: Mapping[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        """Return the validation loss."""
        return squared(parameters, self.choose), len(self.choose.y), {}


def squared(model: Sequence[Matrix], days: Days) -> float:
    """Return a model's mean squared error."""
    W, b, v, c = model
    predicted = (np.maximum(days.X @ W + b, 0) @ v + c)[:, 0]
    return float(np.mean((predicted - days.y) ** 2))


class Split(NamedTuple):
    """A station's days by what they are for, and the errors of tomorrow being as today."""

    train: Days
    choose: Days
    test: Days
    yesterday: float


class Found(NamedTuple):
    """Validation loss, each station's error, and the megabytes that a station sent."""

    loss: float
    errors: Matrix
    megabytes: float


# The data ------------------------------------------------------------------------------------


@cached_by_file(maxsize=2)
def _load(path: str) -> Matrix:
    """Return the days of all stations, as (n_stations, n_days, hours, n_quantities)."""
    if not path:
        rng, n = spawn(0, DATA), 4 * YEAR
        weather = np.cumsum(rng.standard_normal((n * HOURS, 2)), axis=0)[None] * 0.05
        weather = weather - 0.05 * np.roll(weather, HOURS, axis=1)
        X = np.exp(np.sin(weather) + 0.3 * rng.standard_normal((6, n * HOURS, 2)))
        return X.reshape(6, n, HOURS, 2)
    days = hourly_days(path)
    if days.shape[1] < 2 * YEAR:
        raise ValueError(f"X in {path} must have {2 * YEAR} days, got {days.shape[1]}.")
    return days


def _means(hours: Matrix) -> Matrix:
    """Return the means of days, NaN where too few hours are known."""
    known = (~np.isnan(hours)).sum(axis=-2)
    total = np.nansum(hours, axis=-2)
    return np.where(known >= KNOWN, total / np.maximum(known, 1), np.nan)


def splits(config: Config, seed: int) -> list[Split]:
    """Return every station's days, scaled by all stations' training days."""
    days, rng = _means(_load(config.data)), spawn(seed, DATA)
    target = np.log1p(days[:, :, 0])
    n = days.shape[1]
    season = 2 * np.pi * np.arange(n) / 365.25
    seen = [days[:, i : n - SEEN + i] for i in range(SEEN)]  # of day t: t - 3 to t - 1
    features = np.concatenate(
        [*seen, np.tile(np.stack([np.sin(season), np.cos(season)], 1)[SEEN:], (len(days), 1, 1))], 2
    )
    today, y = target[:, SEEN - 1 : n - 1], target[:, SEEN:]
    ends = int(TRAIN * y.shape[1]), int((TRAIN + VALIDATION) * y.shape[1])
    parts = np.split(np.arange(y.shape[1]), ends)
    rows = []
    for own, before in zip(y, today, strict=True):
        known = [part[~np.isnan(own[part] + before[part])] for part in parts]
        if len(known[0]) < config.days:
            raise ValueError(f"days must be at most {len(known[0])}, got {config.days}.")
        rows.append([rng.permutation(known[0])[: config.days], *known[1:]])
    trained = np.concatenate([X[own[0]] for X, own in zip(features, rows, strict=True)])
    mean, scale = np.nanmean(trained, axis=0), np.nanstd(trained, axis=0)
    response = np.concatenate([one[own[0]] for one, own in zip(y, rows, strict=True)])
    origin, unit = response.mean(), response.std()

    found = []
    for X, one, before, own in zip(features, y, today, rows, strict=True):
        scaled = np.nan_to_num((X - mean) / np.where(scale > 0, scale, 1))
        train, choose, test = (Days(scaled[part], (one[part] - origin) / unit) for part in own)
        same = float(np.mean((one[own[2]] - before[own[2]]) ** 2)) / unit**2
        found.append(Split(train, choose, test, same))
    return found


def neighbors(config: Config) -> Topology:
    """Return who talks to whom, by the correlations of the first year."""
    first = np.log1p(_means(_load(config.data))[:, :YEAR, 0])
    alike = np.corrcoef(first[:, ~np.isnan(first).any(axis=0)])
    np.fill_diagonal(alike, -np.inf)
    tree = np.argwhere(minimum_spanning_tree(np.where(np.isinf(alike), 0, 2 - alike)).toarray())
    nearest = np.argsort(-alike, axis=1)[:, : config.degree]
    pairs = [(i, int(j)) for i, own in enumerate(nearest) for j in own]
    edges = {(int(min(pair)), int(max(pair))) for pair in [*pairs, *map(tuple, tree)]}
    return Topology.from_edges(len(first), sorted(edges))


# The methods ---------------------------------------------------------------------------------


def judged(own: Sequence[Split], models: Sequence[Sequence[Matrix]], megabytes: float) -> Found:
    """Return what every station's model comes to."""
    loss = np.mean([squared(model, one.choose) for model, one in zip(models, own, strict=True)])
    errors = [squared(model, one.test) for model, one in zip(models, own, strict=True)]
    return Found(float(loss), np.array(errors), megabytes)


def pooled(own: Sequence[Split], seed: int) -> dict[str, Found]:
    """Return what models of all stations' days in one place come to."""
    from sklearn.ensemble import RandomForestRegressor  # an extra
    from sklearn.linear_model import Ridge

    parts = zip(*(one.train for one in own), strict=True)
    # Which of two equal splits a tree takes hangs on a processor's last bits.
    X, y = (np.round(np.concatenate(part), 6) for part in parts)
    tried = {
        "ridge": [Ridge(alpha=penalty * len(y)) for penalty in PENALTIES],
        "forest": [
            RandomForestRegressor(200, min_samples_leaf=leaf, max_features=share, random_state=seed)
            for leaf, share in product(LEAVES, COLUMNS)
        ],
    }

    def found(model: Any) -> Found:
        model.fit(X, y)
        errors = [
            [np.mean((model.predict(days.X) - days.y) ** 2) for days in (one.choose, one.test)]
            for one in own
        ]
        losses, test = np.array(errors).T
        return Found(float(losses.mean()), test, 0.0)

    return {name: min(map(found, models), key=lambda f: f.loss) for name, models in tried.items()}


def exchanged(own: Sequence[Split], seed: int) -> Found:
    """Return what a model that follows from one exchange of sums comes to."""
    rows = [one.train for one in own]

    def found(scale: float, penalty: float) -> Found:
        how = {"scale": scale, "penalty": penalty, "seed": seed}
        strategy, (model, *_) = one_exchange(rows, "shared", **how)
        losses, errors = (
            np.array([np.mean((model.predict(days.X) - days.y) ** 2) for days in parts])
            for parts in zip(*((one.choose, one.test) for one in own), strict=True)
        )
        sent = sum(report.floats_up for report in strategy.history)
        return Found(float(losses.mean()), errors, 8e-6 * sent)

    return min((found(*both) for both in product(SCALES, STRENGTHS)), key=lambda f: f.loss)


def learned(
    config: Config, own: Sequence[Split], seed: int, step: float, decay: float
) -> dict[str, Found]:
    """Return what all methods come to with one learning rate and weight decay."""
    stations = [Station(one.train, one.choose, step, decay) for one in own]
    first = random_network(own[0].train.X.shape[1], config.hidden, 1, spawn(seed, DATA, 1))
    size, n, graph = sum(array.size for array in first), len(own), neighbors(config)
    found = {"alone": judged(own, stopped_each(stations, [first] * n, config.rounds), 0.0)}
    average = first
    for _ in range(config.rounds):
        fitted = [station.fit(average, {})[0] for station in stations]
        average = [np.mean(arrays, axis=0) for arrays in zip(*fitted, strict=True)]
    sent = 8e-6 * size * config.rounds
    found["fedavg"] = judged(own, [average] * n, sent)
    found["tuned"] = judged(own, stopped_each(stations, [average] * n, config.rounds), sent)
    for name, options in NETWORKS.items():
        faults = Faults(drop=DROP, seed=seed) if name == "drops" else None
        network = InMemoryNetwork(graph, faults=faults)
        run = diffusion_averaging(
            stations.__getitem__, network, config.rounds, initial=first, evaluate_every=0, **options
        )
        models = [run.models[k] for k in range(n)]
        found[name] = judged(own, models, run.bytes_sent / n / 1e6)
    return found


def compare(config: Config, seed: int) -> Arrays:
    """Return every method's errors, as "METHOD", by station, and what it sends, "sent-METHOD"."""
    own = splits(config, seed)
    tried = [learned(config, own, seed, *both) for both in product(STEPS, DECAYS)]
    best = {name: min((one[name] for one in tried), key=lambda f: f.loss) for name in tried[0]}
    best |= {"exchange": exchanged(own, seed), **pooled(own, seed)}
    return {
        "yesterday": np.array([one.yesterday for one in own]),
        **{name: one.errors for name, one in best.items()},
        **{f"sent-{name}": np.array(one.megabytes) for name, one in best.items()},
    }


# The run -------------------------------------------------------------------------------------


def run(config: Config, keep: Keep) -> Outcome:
    """Compare all methods with every seed."""
    parts = {f"seed-{seed}": partial(compare, config, seed) for seed in config.each_seed}
    kept, graph = keep_all(keep, parts), neighbors(config)
    errors = {name: np.array([one[name] for one in kept]) for name in METHODS}
    means = {name: values.mean(axis=1) for name, values in errors.items()}
    order = sorted(means, key=lambda name: float(means[name].mean()))
    sent = {name: np.array([float(one.get(f"sent-{name}", 0)) for one in kept]) for name in order}
    return Outcome(
        records=[
            *(Record("error", means[name], name) for name in order),
            *(Record("worst", errors[name].max(axis=1), name) for name in order),
            *(Record("megabytes", sent[name], name) for name in order),
            *leads({name: means["alone"] - each for name, each in means.items()}, "alone"),
        ],
        curves={},
        arrays={f"error_{name}": values for name, values in errors.items()},
        figures=_figures({METHODS[name]: means[name] for name in order}),
        rounds=config.rounds,
        floats_up=0.0,
        floats_down=0.0,
        facts={
            "best": METHODS[order[0]],
            "n_stations": graph.n_nodes,
            "n_edges": graph.n_edges,
            "failing": f"{DROP:.0%}",
        },
    )


def _figures(means: Mapping[str, Matrix]) -> dict[str, Any]:
    from perdl_experiments import pictures  # an extra: clients must not need it

    ours = [METHODS[name] for name in OURS]
    return {"errors": pictures.intervals({"": pictures.ranges(means, np.mean)}, ours=ours)}
