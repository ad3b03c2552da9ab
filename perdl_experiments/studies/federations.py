"""Large federations, failing clients and weak ones: what the global atoms come to.

Figures that P0 (Liang, Shi, Al Kontar, Fattahi, "Personalized Dictionary Learning for
Heterogeneous Datasets", NeurIPS 2023) does not have, on its planted data (A.1): the error of
PerMA's global atoms against

- the number of clients, each from a poor start (`synthetic`'s, with which about one client in five
  fails by itself): the paper's chain of shortest paths needs all clients to be close to each other,
  consensus matching does not;
- the share of clients that fail in a round, from poor starts too: each round, the matching round
  included, every client fails with this probability, and then, by the toss of a coin, answers with
  an error or with NaN;
- the number of samples of the weak ones among the clients, from good starts.

==============  =================================================================================
method          what it is
==============  =================================================================================
``consensus``   PerMA with its defaults: consensus matching, statistics
``paths``       the same with the paper's chain of shortest paths
``paper``       shortest paths and the mean: the paper's
``alone``       clients alone from the same starts, with as many iterations; their mean, and in the
                last panel the weak ones'
==============  =================================================================================
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from flwr_perdl._checks import Matrix, check_count
from flwr_perdl._random import FAILURES, spawn
from flwr_perdl._records import PARTITION_ID, ROUND, SEED, Scalar
from flwr_perdl.clients import DictionaryClient
from flwr_perdl.clients.dictionary import Start
from flwr_perdl.dictionary import (
    Learner,
    OrthogonalLearner,
    WarmStart,
    dictionary_distance,
    warm_start,
)
from flwr_perdl.strategies import PerMA
from perdl_experiments.data import Planted
from perdl_experiments.engine import Config, arranged
from perdl_experiments.outcome import Outcome, Picture, Table
from perdl_experiments.studies._experiment import (
    MIN_SUPPORT,
    Federate,
    Keep,
    Value,
    numbers,
    private,
    seeds_of,
)
from perdl_experiments.studies.synthetic import N_GLOBAL, STARTS, THRESHOLD, plant

NAME = "federations"
ABOUT = "PerMA with up to 1,000 clients, with clients that fail, and with weak ones"
SOURCE = "beyond the paper: Liang et al., NeurIPS 2023, data of Appendix A.1"
DEFAULTS: dict[str, Value] = {
    "clients": 20,
    "rounds": 6,
    "seed": 0,
    "seeds": 3,
    "samples": 200,
    "sizes": "10,30,100,300,1000",
    "failures": "0,10,20,30,40,50",
    "weak": 10,
    "weak_samples": "10,20,50,100,200",
    "min_support": MIN_SUPPORT,
}

HELP: dict[str, str] = {
    "clients": "number of clients where it is not on the axis",
    "seeds": "per point",
    "samples": "per client",
    "sizes": "numbers of clients",
    "failures": "clients that fail in a round, in percent",
    "weak_samples": "samples of each",
}
FIGURES: tuple[str, ...] = ("federations.png",)
ERROR = "mse"

N_ATOMS = 6
METHODS = {
    "consensus": "consensus",
    "paths": "shortest paths",
    "paper": "the paper's",
    "alone": "alone",
}
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
#: An error below this counts as recovery.
RECOVERED = 1e-3


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
    given = {"start": _start(config, partition), **private(config)}
    X, learner = _planted(config).samples[partition], _learner()
    if not config["failing"]:
        return DictionaryClient(X, learner, context, **given)
    share, n_clients = int(config["failing"]) / 100, int(config["clients"])
    return FailingClient(X, learner, context, share=share, n_clients=n_clients, **given)


def strategy(config: Config, **options: Any) -> PerMA:
    """Return PerMA as ``config["method"]`` says; ``options`` are the server's own."""
    given: dict[str, Any] = {"fraction_evaluate": 0.0, **options}
    return PerMA(N_GLOBAL, **FEDERATED[str(config["method"])], **arranged(given))


def federations(config: Config) -> list[Config]:
    """Return the config of every federation: all methods at every point."""
    return [
        {**point, "method": method} for point in _points(config).values() for method in FEDERATED
    ]


def run(config: Config, federate: Federate, keep: Keep) -> Outcome:
    """Run all methods at every point of the figure."""
    found = {
        name: keep(name, partial(_at, point, federate)) for name, point in _points(config).items()
    }
    seeds, axes = seeds_of(config), _axes(config)
    errors = {
        (axis, method): np.array(
            [[float(found[_name(axis, value, seed)][method]) for value in values] for seed in seeds]
        )
        for axis, values in axes.items()
        for method in METHODS
    }
    metrics = {
        f"{what}_{axis}_{value}_{method}": float(figure)
        for (axis, method), table in errors.items()
        for value, column in zip(axes[axis], table.T, strict=True)
        for what, figure in {
            "error": np.median(column),
            "error_max": column.max(),
            "recovered": np.mean(column < RECOVERED),
        }.items()
    }
    costs = np.mean([kept["cost"] for kept in found.values()], axis=0)
    return Outcome(
        metrics=metrics,
        curves={
            f"error_{axis}_{method}": np.median(table, axis=0).tolist()
            for (axis, method), table in errors.items()
        },
        arrays={f"errors_{axis}_{method}": table for (axis, method), table in errors.items()}
        | {axis: np.array(values) for axis, values in axes.items()},
        tables=[_table(axis, axes[axis], errors) for axis in axes],
        pictures=[_picture(axes, errors)],
        notes=list(_notes(config)),
        rounds=int(config["rounds"]),
        floats_up=float(costs[0]),
        floats_down=float(costs[1]),
    )


# The figure's points -------------------------------------------------------------------------


def _axes(config: Config) -> dict[str, list[int]]:
    return {
        "clients": numbers("sizes", config["sizes"], 2, 10_000),
        "failing": numbers("failures", config["failures"], 0, 99),
        "weak_size": numbers("weak_samples", config["weak_samples"], 1, 10_000),
    }


def _points(config: Config) -> dict[str, Config]:
    """Return the config of every point and seed, under the name that it is kept by."""
    check_count("samples", config["samples"], 1)
    weak = check_count("weak", config["weak"], 1, int(config["clients"]))
    points: dict[str, Config] = {}
    for axis, values in _axes(config).items():
        base = {**config, "axis": axis, "failing": 0, "weak": 0, "weak_size": 1}
        base["start"] = AXES[axis][1]
        if axis == "weak_size":
            base["weak"] = weak
        for value in values:
            for seed in seeds_of(config):
                points[_name(axis, value, seed)] = {**base, axis: value, "seed": seed}
    return points


def _name(axis: str, value: int, seed: int) -> str:
    return f"{axis}-{value}-seed-{seed}"


# Data and starts -----------------------------------------------------------------------------


def _sizes(config: Config) -> tuple[int, ...]:
    weak, clients = int(config["weak"]), int(config["clients"])
    return (int(config["samples"]),) * (clients - weak) + (int(config["weak_size"]),) * weak


def _planted(config: Config) -> Planted:
    sizes = _sizes(config)
    return plant(int(config["seed"]), (N_ATOMS,) * len(sizes), sizes)


def _learner() -> OrthogonalLearner:
    return OrthogonalLearner(N_ATOMS, threshold=THRESHOLD)


def _start(config: Config, partition: int) -> Start:
    """Return the client's start, which all methods have in common, made when it is asked for."""

    def start(X: Matrix, learner: Learner, *, rng: np.random.Generator) -> WarmStart:
        return _started(int(config["seed"]), _sizes(config), str(config["start"]), partition)

    return start


@lru_cache(maxsize=2048)
def _started(seed: int, sizes: tuple[int, ...], start: str, partition: int) -> WarmStart:
    X = plant(seed, (N_ATOMS,) * len(sizes), sizes).samples[partition]
    return warm_start(X, _learner(), rng=spawn(seed, partition), **STARTS[start])


# The methods ---------------------------------------------------------------------------------


def _at(point: Config, federate: Federate) -> dict[str, NDArray[Any]]:
    """Return every method's error at a point, and what a client sends and receives."""
    found, costs = {"alone": np.array(_alone(point))}, []
    for method in FEDERATED:
        with _told_in_events_only() if point["failing"] else nullcontext():
            federated = federate({**point, "method": method})
        found[method] = np.array(
            dictionary_distance(federated.arrays[0], _planted(point).global_atoms)
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
    """Return the mean error of clients alone: of the weak ones where there are any."""
    planted, weak = _planted(config), int(config["weak"])
    everybody = range(len(planted.samples))
    errors = []
    for i in everybody[-weak:] if weak else everybody:
        D = _started(int(config["seed"]), _sizes(config), str(config["start"]), i).dictionary
        for _ in range(int(config["rounds"]) - 1):
            D = _learner().step(planted.samples[i], D)
        errors.append(dictionary_distance(planted.global_atoms, D))
    return float(np.mean(errors))


# The report ----------------------------------------------------------------------------------


def _table(axis: str, values: Sequence[int], errors: Mapping[tuple[str, str], Matrix]) -> Table:
    words, start = AXES[axis]

    def cell(column: Matrix) -> str:
        return f"{np.median(column):.0e} ({column.min():.0e}…{column.max():.0e})"

    return Table(
        f"Error against the {words}",
        f"Distance d_{{1,2}} of the global atoms to the planted ones after the last round: median "
        f"over seeds, and range. Clients have a {start} start; alone: the mean over clients.",
        [words, *METHODS.values()],
        [
            [str(value), *(cell(errors[axis, method][:, i]) for method in METHODS)]
            for i, value in enumerate(values)
        ],
    )


def _picture(
    axes: Mapping[str, Sequence[int]], errors: Mapping[tuple[str, str], Matrix]
) -> Picture:
    from perdl_experiments import plots  # an extra: clients must not need it

    panels = [
        plots.Panel(
            AXES[axis][0],
            f"error of the global atoms ({AXES[axis][1]} start)",
            values,
            {words: np.median(errors[axis, m], axis=0).tolist() for m, words in METHODS.items()},
            {words: np.quantile(errors[axis, m], [0, 1], axis=0) for m, words in METHODS.items()},
            log=axis != "failing",
        )
        for axis, values in axes.items()
    ]
    return Picture(
        "federations",
        "Many clients, failing clients, weak clients",
        "Distance of the global atoms to the planted ones, logarithmic: medians and ranges over "
        "seeds; errors below 1e-16 are drawn there. Consensus and shortest paths: PerMA with "
        "statistics, matched in these two ways; the paper's: shortest paths and the mean.",
        plots.panels(panels, columns=len(panels)),
    )


def _notes(config: Config) -> Iterator[str]:
    yield (
        f"{config['seeds']} seed(s), {config['rounds']} rounds, {config['samples']} samples per "
        f"client, {N_ATOMS} atoms each, {N_GLOBAL} of them shared. Where the number of clients is "
        f"not on the axis it is {config['clients']}, of which in the last panel {config['weak']} "
        "are weak."
    )
    yield (
        "A client that fails answers with an error or with NaN, as the toss of a coin says; both "
        "are left out of the round. The matching round is no exception."
    )
