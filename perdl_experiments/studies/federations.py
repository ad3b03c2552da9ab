"""Large federations, failing clients and clients with few samples: the error of the global atoms.

Figures that are not in PerMA's paper (Liang, Shi, Al Kontar, Fattahi, "Personalized Dictionary
Learning for Heterogeneous Datasets", NeurIPS 2023), on its synthetic data (A.1): the error of the
global atoms against

- the number of clients, each from a poor start (that of `synthetic`, with which about one client in
  five fails locally): the paper's chain of shortest paths needs all clients to be close to each
  other, consensus matching does not;
- the share of clients that fail in a round, also from poor starts: in each round, the matching
  round included, every client fails with this probability, half of the time with an error, half of
  the time with NaN;
- the number of samples of clients with few, from good starts.

==============  =================================================================================
method          what it is
==============  =================================================================================
``consensus``   PerMA with its defaults: consensus matching, statistics
``paths``       the same with the paper's chain of shortest paths
``paper``       shortest paths and the mean, and clients that withhold nothing: the paper's
``alone``       local training from the same starts, with as many iterations; the clients' mean, in
                the last panel that of the clients with few samples
==============  =================================================================================

``--clients`` (20) is their number where it is not on the axis. Metrics, for METHOD ``consensus``,
``paths``, ``paper``, ``alone``, and AXIS_VALUE such as ``clients_1000``, ``failing_50``,
``weak_size_10``: ``error_AXIS_VALUE_METHOD`` (median over seeds), ``error_max_AXIS_VALUE_METHOD``,
``recovered_AXIS_VALUE_METHOD`` (share of seeds below 1e-3).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
from flwr.app import Context

from flwr_perdl.clients import DictionaryClient
from flwr_perdl.core.checks import Matrix, check_count
from flwr_perdl.dictionary import (
    Learner,
    OrthogonalLearner,
    WarmStart,
    dictionary_distance,
    warm_start,
)
from flwr_perdl.protocol.records import PARTITION_ID, ROUND, SEED, Scalar
from flwr_perdl.random import FAILURES, spawn
from flwr_perdl.strategies import PerMA
from perdl_experiments.baselines import Start
from perdl_experiments.data import Planted
from perdl_experiments.engine import arranged
from perdl_experiments.outcome import Outcome
from perdl_experiments.render import Record
from perdl_experiments.studies import _planted
from perdl_experiments.studies._experiment import Arrays, ClientConfig, Federate, Keep, words
from perdl_experiments.studies._planted import EXACT, N_GLOBAL, STARTS, THRESHOLD

N_ATOMS = 6
METHODS = words("federations")
FEDERATED: dict[str, dict[str, Any]] = {
    "consensus": {},
    "paths": {"matching": "paths"},
    "paper": {"matching": "paths", "aggregation": "mean"},
}
#: The figure's axes: what they count, and the clients' start.
AXES = {
    "clients": ("number of clients", "poor"),
    "failing": ("failing clients (%)", "poor"),
    "weak_size": ("samples of a weak client", "good"),
}


@dataclass(frozen=True, kw_only=True)
class Config(ClientConfig):
    """The options of federations.toml; below them, what one point of the figure adds."""

    samples: int
    sizes: tuple[int, ...]
    failures: tuple[int, ...]
    weak: int
    weak_samples: tuple[int, ...]

    axis: str = ""
    method: str = ""
    failing: int = 0
    weak_size: int = 1
    start: str = "poor"

    def check(self) -> None:
        """Reject options that do not fit together."""
        if not self.axis:
            check_count("weak", self.weak, 1, self.clients)

    @property
    def axes(self) -> dict[str, tuple[int, ...]]:
        """The values on each axis."""
        return {"clients": self.sizes, "failing": self.failures, "weak_size": self.weak_samples}

    @property
    def n_samples(self) -> tuple[int, ...]:
        """Each client's number of samples."""
        return _planted.sizes(self.clients, self.samples, self.weak, self.weak_size)

    @property
    def planted(self) -> Planted:
        """The clients' data."""
        return _plant(self.seed, self.n_samples)


class FailingClient(DictionaryClient):
    """A client that, in some rounds, answers with an error or with NaN.

    Parameters
    ----------
    *args, **options
        As for `DictionaryClient`.
    share : float
        Share of clients that fail in a round.
    n_clients : int
        Number of clients of the federation.
    """

    def __init__(self, *args: Any, share: float, n_clients: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.share, self.n_clients = share, n_clients

    def fit(
        self, parameters: list[Matrix], config: dict[str, Scalar]
    ) -> tuple[list[Matrix], int, dict[str, Scalar]]:
        """Fail or not, as the federation's seed, the client and the round say."""
        chances = spawn(int(config[SEED]), FAILURES, int(config[ROUND])).random((2, self.n_clients))
        fails, silent = chances[:, self.partition] < (self.share, 0.5)
        if fails and silent:
            raise RuntimeError("this client fails in this round")
        (sent,), n_samples, metrics = super().fit(parameters, config)
        return [np.full_like(sent, np.nan) if fails else sent], n_samples, metrics


def client(context: Context, config: Config) -> DictionaryClient:
    """Return the client of partition ``context.node_config["partition-id"]``."""
    partition = int(context.node_config[PARTITION_ID])
    given = {"start": _start(config, partition), **config.private}
    X, learner = config.planted.samples[partition], _learner()
    if not config.failing:
        return DictionaryClient(X, learner, context, **given)
    share = config.failing / 100
    return FailingClient(X, learner, context, share=share, n_clients=config.clients, **given)


def strategy(config: Config, **options: Any) -> PerMA:
    """Return PerMA as ``config.method`` says; ``options`` are the server's own."""
    given: dict[str, Any] = {"fraction_evaluate": 0.0, **options}
    return PerMA(N_GLOBAL, **FEDERATED[config.method], **arranged(given))


def federations(config: Config) -> list[Config]:
    """Return the config of every federation: all methods at every point."""
    return [_by(method, point) for point in _points(config).values() for method in FEDERATED]


def run(config: Config, federate: Federate, keep: Keep) -> Outcome:
    """Run all methods at every point of the figure."""
    found = {
        name: keep(name, partial(_at, point, federate)) for name, point in _points(config).items()
    }
    axes = config.axes
    errors = {
        (axis, method): np.array(
            [
                [float(found[_name(axis, value, seed)][method]) for value in values]
                for seed in config.each_seed
            ]
        )
        for axis, values in axes.items()
        for method in METHODS
    }
    most = max(config.sizes)
    at_most = {
        m: table[:, config.sizes.index(most)] for (a, m), table in errors.items() if a == "clients"
    }
    costs = np.mean([kept["cost"] for kept in found.values()], axis=0)
    return Outcome(
        records=[
            Record("error", column, method, {"axis": axis, "at": value})
            for (axis, method), table in errors.items()
            for value, column in zip(axes[axis], table.T, strict=True)
        ],
        curves={
            f"error_{axis}_{method}": np.median(table, axis=0).tolist()
            for (axis, method), table in errors.items()
        },
        arrays={f"errors_{axis}_{method}": table for (axis, method), table in errors.items()}
        | {axis: np.array(values) for axis, values in axes.items()},
        figures={"federations": _figure(axes, errors)},
        rounds=config.rounds,
        floats_up=float(costs[0]),
        floats_down=float(costs[1]),
        facts={
            "most_clients": most,
            **{f"most_{m}": float(np.median(column)) for m, column in at_most.items()},
        },
    )


def _points(config: Config) -> dict[str, Config]:
    """Return the config of every point and seed, under the name that it is kept by."""
    points = {}
    for axis, values in config.axes.items():
        weak = config.weak if axis == "weak_size" else 0
        base = replace(config, axis=axis, weak=weak, start=AXES[axis][1])
        for value in values:
            for seed in config.each_seed:
                place: dict[str, Any] = {axis: value, "seed": seed}
                points[_name(axis, value, seed)] = replace(base, **place)
    return points


def _by(method: str, point: Config) -> Config:
    """Return a method's config at a point; the paper's clients send all atoms, whatever shows."""
    return replace(point, method=method, min_support=0 if method == "paper" else point.min_support)


def _name(axis: str, value: int, seed: int) -> str:
    return f"{axis}-{value}-seed-{seed}"


# Data and starts -----------------------------------------------------------------------------


def _plant(seed: int, n_samples: tuple[int, ...]) -> Planted:
    return _planted.plant(seed, (N_ATOMS,) * len(n_samples), n_samples)


def _learner() -> OrthogonalLearner:
    return OrthogonalLearner(N_ATOMS, threshold=THRESHOLD)


def _start(config: Config, partition: int) -> Start:
    """Return the client's start, which all methods have in common, made when it is asked for."""

    def start(X: Matrix, learner: Learner, *, rng: np.random.Generator) -> WarmStart:
        return _started(config.seed, config.n_samples, config.start, partition)

    return start


@lru_cache(maxsize=2048)
def _started(seed: int, n_samples: tuple[int, ...], start: str, partition: int) -> WarmStart:
    X = _plant(seed, n_samples).samples[partition]
    return warm_start(X, _learner(), rng=spawn(seed, partition), **STARTS[start])


# The methods ---------------------------------------------------------------------------------


def _at(point: Config, federate: Federate) -> Arrays:
    """Return every method's error at a point, and what a client sends and receives."""
    found, costs = {"alone": np.array(_alone(point))}, []
    for method in FEDERATED:
        with _told_in_events_only() if point.failing else nullcontext():
            federated = federate(_by(method, point))
        found[method] = np.array(
            dictionary_distance(federated.arrays[0], point.planted.global_atoms)
        )
        costs.append([federated.floats_up, federated.floats_down])
    return {**found, "cost": np.mean(costs, axis=0)}


@contextmanager
def _told_in_events_only() -> Iterator[None]:
    """Keep failures that are planted out of the log; the run's events have them."""
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _alone(config: Config) -> float:
    """Return the mean error of local training: of the clients with few samples if there are any."""
    planted, errors = config.planted, []
    everybody = range(len(planted.samples))
    for i in everybody[-config.weak :] if config.weak else everybody:
        start = _started(config.seed, config.n_samples, config.start, i).dictionary
        D = _planted.learn_alone(planted.samples[i], _learner(), start, config.rounds)
        errors.append(dictionary_distance(planted.global_atoms, D))
    return float(np.mean(errors))


def _figure(axes: Mapping[str, Sequence[int]], errors: Mapping[tuple[str, str], Matrix]) -> Any:
    from perdl_experiments import plots  # an extra: clients must not need it

    panels = [
        plots.Panel(
            AXES[axis][0],
            f"error of the global atoms ({AXES[axis][1]} start)",
            values,
            {title: errors[axis, m] for m, title in METHODS.items()},
            log=axis != "failing",
            floor=EXACT,
        )
        for axis, values in axes.items()
    ]
    return plots.panels(panels)
