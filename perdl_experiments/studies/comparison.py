"""PerMA against other methods on planted dictionaries: B.1 and Fig. 5 of P0.

P0 = Liang, Shi, Al Kontar, Fattahi, "Personalized Dictionary Learning for Heterogeneous Datasets",
NeurIPS 2023. The data of A.1 with other dimensions, numbers of clients and shares of non-zero
codes; in the figure's second row one client has few samples, and the errors are that client's.

Every method has as many communication rounds and local iterations, the same learner and warm
starts, and is tuned over as many values of one parameter, on a seed of its own, at the middle of
the figure: PerPCA over its step, all others over the learner's threshold.

==================  =============================================================================
method              what it is
==================  =============================================================================
``perma``           PerMA with its defaults
``averaging``       `DictionaryAveraging` from a common start
``naive``           its one-shot average of the clients' own dictionaries, without matching
``perpca``          `PerPCA`, which finds subspaces: atoms inside them are as they come
``local``           every client alone
``pooled``          one dictionary of all clients' samples, with as many atoms as a client has
==================  =============================================================================
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from flwr_perdl._checks import Matrix, check_count, check_real
from flwr_perdl._random import DATA, SERVER, spawn
from flwr_perdl._records import PARTITION_ID
from flwr_perdl.clients import DictionaryClient
from flwr_perdl.clients.dictionary import PROTOCOLS
from flwr_perdl.dictionary import OrthogonalLearner, dictionary_distance, warm_start
from flwr_perdl.strategies import DictionaryAveraging, PerMA, PerPCA, ProtocolStrategy
from perdl_experiments.data import Planted, planted_clients
from perdl_experiments.engine import Config, arranged
from perdl_experiments.outcome import Outcome, Picture, Table
from perdl_experiments.studies._experiment import (
    MIN_SUPPORT,
    Federate,
    Keep,
    Value,
    numbers,
    private,
)
from perdl_experiments.words import plural

NAME = "comparison"
ABOUT = "PerMA against averaging, PerPCA, clients alone and pooled data, on planted dictionaries"
SOURCE = "Liang et al., NeurIPS 2023, B.1 and Fig. 5"
DEFAULTS: dict[str, Value] = {
    "clients": 10,
    "rounds": 30,
    "seed": 0,
    "seeds": 3,
    "samples": 200,
    "weak_samples": 20,
    "dimensions": "6,12,18",
    "sizes": "5,10,20",
    "densities": "10,20,30,40",
    "min_support": MIN_SUPPORT,
}
HELP: dict[str, str] = {
    "seeds": "per point",
    "dimensions": "features, and atoms per client, half of them shared",
    "sizes": "numbers of clients",
    "densities": "codes that are not zero, in percent",
}
FIGURES: tuple[str, ...] = ("comparison.png",)
ERROR = "error_full"

METHODS = {
    "perma": "PerMA",
    "averaging": "averaging, common start",
    "naive": "naive average",
    "perpca": "PerPCA",
    "local": "clients alone",
    "pooled": "pooled data",
}
FEDERATED = ("perma", "averaging", "naive", "perpca")
#: What every method is tuned over: the threshold, or PerPCA's step.
THRESHOLDS, STEPS = (0.1, 0.15, 0.25), (0.5, 1.0, 2.0)
#: An error below this is rounding.
_EXACT = 1e-12
#: The middle of the figure, where methods are tuned and the tables are taken: A.1.
DIMENSION, DENSITY = 6, 20
#: Seeds for tuning are the run's and so much.
_TUNING = 10_000
_FLOOR = 0.3  # A.1: the codes' least size
_ROWS = {"": "clients alike", "weak_": "one client with few samples"}


class Errors(NamedTuple):
    """What a method comes to on one federation's data.

    Attributes
    ----------
    full : float
        Distance d_{1,2} of a client's planted atoms to its dictionary; the mean over clients, or
        the weak client's.
    shared : float
        The same of the planted global atoms alone.
    seconds : float
        Learning time, starts included.
    """

    full: float
    shared: float
    seconds: float


class ComparedClient(DictionaryClient):
    """A client that knows what was planted, and reports how far its atoms are from that."""

    def __init__(self, *args: Any, planted: Planted, **options: Any) -> None:
        super().__init__(*args, **options)
        self.planted = planted

    def extra_metrics(self, global_atoms: Matrix, local_atoms: Matrix) -> dict[str, float]:
        """Return the errors of `Errors`, with all and with the global atoms."""
        D = np.vstack([global_atoms, local_atoms])
        full, shared = _distances(self.planted, self.partition, D)
        return {ERROR: full, "error_shared": shared}


def client(context: Context, config: Config) -> ComparedClient:
    """Return the client of partition ``context.node_config["partition-id"]``."""
    partition, planted = int(context.node_config[PARTITION_ID]), _planted(config)
    method = str(config["method"])
    return ComparedClient(
        planted.samples[partition],
        _learner(config),
        context,
        planted=planted,
        protocol=method if method in PROTOCOLS else "averaging",
        **private(config),
    )


def strategy(config: Config, **options: Any) -> ProtocolStrategy:
    """Return the strategy of ``config["method"]``; ``options`` are the server's own."""
    given = {"evaluate_every": int(config["rounds"]), **options}
    if config["method"] == "perma":
        return PerMA(_n_global(config), **arranged(given))
    if config["method"] == "perpca":
        return PerPCA(_n_global(config), step=float(config["setting"]), **arranged(given))
    start = "own" if config["method"] == "naive" else "common"
    return DictionaryAveraging(start_from=start, **arranged(given))


def federations(config: Config) -> list[Config]:
    """Return the configs of all federations: for tuning, then the points with every setting.

    Of the latter only those with the setting that was chosen are run: progress passes over the
    rest.
    """
    places = [_tuning(config), *_points(config).values()]
    return [
        _with(place, method, setting)
        for place in places
        for method in FEDERATED
        for setting in _settings(method)
    ]


def run(config: Config, federate: Federate, keep: Keep) -> Outcome:
    """Tune every method, and run it on every point of the figure."""
    settings = {
        method: float(keep(f"tuned-{method}", partial(_tune, config, method, federate))["setting"])
        for method in METHODS
    }
    points = _points(config)
    found: dict[str, dict[str, NDArray[Any]]] = {}
    for name, point in points.items():
        found[name] = keep(name, partial(_at, point, settings, federate))
    return _outcome(config, settings, found)


# The figure's points -------------------------------------------------------------------------


def _axes(config: Config) -> dict[str, list[int]]:
    return {
        "dimension": numbers("dimensions", config["dimensions"], 2, 200),
        "clients": numbers("sizes", config["sizes"], 2, 1000),
        "density": numbers("densities", config["densities"], 1, 100),
    }


def _base(config: Config) -> dict[str, Any]:
    return {**config, "dimension": DIMENSION, "density": DENSITY, "weak": 0}


def _points(config: Config) -> dict[str, Config]:
    """Return the config of every point and seed, under the name that it is kept by."""
    check_count("samples", config["samples"], 1)
    check_count("weak_samples", config["weak_samples"], 1)
    points: dict[str, Config] = {}
    for weak in (0, 1):
        varied = [{"dimension": DIMENSION}]
        varied += [{axis: value} for axis, values in _axes(config).items() for value in values]
        for one in varied:
            for seed in range(check_count("seeds", config["seeds"], 1)):
                point = {**_base(config), **one, "weak": weak, "seed": int(config["seed"]) + seed}
                points[_name(point)] = point
    return points


def _name(point: Mapping[str, Any]) -> str:
    parts = (f"{key}{point[key]}" for key in ("dimension", "clients", "density", "weak", "seed"))
    return "-".join(parts)


def _settings(method: str) -> tuple[float, ...]:
    return STEPS if method == "perpca" else THRESHOLDS


def _tuning(config: Config) -> Config:
    return {**_base(config), "seed": int(config["seed"]) + _TUNING}


def _with(place: Config, method: str, setting: float) -> Config:
    """Return the config of a method at a place."""
    rounds = 1 if method == "naive" else int(place["rounds"])
    return {**place, "method": method, "setting": setting, "rounds": rounds}


def _n_global(config: Config) -> int:
    return int(config["dimension"]) // 2


def _learner(config: Config) -> OrthogonalLearner:
    threshold = 0.0 if config["method"] == "perpca" else float(config["setting"])
    return OrthogonalLearner(int(config["dimension"]), threshold=threshold)


def _planted(config: Config) -> Planted:
    clients, weak = int(config["clients"]), int(config["weak"])
    sizes = (int(config["samples"]),) * (clients - weak) + (int(config["weak_samples"]),) * weak
    return _plant(int(config["seed"]), int(config["dimension"]), int(config["density"]), sizes)


@lru_cache(maxsize=4)
def _plant(seed: int, dimension: int, density: int, sizes: tuple[int, ...]) -> Planted:
    return planted_clients(
        spawn(seed, DATA),
        [dimension] * len(sizes),
        sizes,
        dimension // 2,
        n_features=dimension,
        density=check_real("density", density / 100, 0, 1),
        floor=_FLOOR,
    )


# The methods ---------------------------------------------------------------------------------


def _tune(config: Config, method: str, federate: Federate) -> dict[str, NDArray[Any]]:
    """Return the setting with the least error at the middle of the figure, of several the first.

    Errors that are rounding only count as the same.
    """
    place, tried = _tuning(config), _settings(method)
    errors = [_learn(_with(place, method, setting), federate).full for setting in tried]
    return {"setting": np.array(tried[int(np.argmin(np.maximum(errors, _EXACT)))])}


def _at(
    point: Config, settings: Mapping[str, float], federate: Federate
) -> dict[str, NDArray[Any]]:
    """Return every method's errors at a point."""
    return {
        method: np.array(_learn(_with(point, method, setting), federate))
        for method, setting in settings.items()
    }


def _learn(config: Config, federate: Federate) -> Errors:
    """Return what a method comes to."""
    if config["method"] in FEDERATED:
        return _together(config, federate)
    planted, started = _planted(config), time.perf_counter()
    seed, learner = int(config["seed"]), _learner(config)
    everybody = range(len(planted.samples))
    if config["method"] == "local":
        own = [_alone(planted.samples[i], learner, spawn(seed, i), config) for i in everybody]
    else:
        pooled = _alone(np.vstack(planted.samples), learner, spawn(seed, SERVER, 1), config)
        own = [pooled] * len(everybody)
    seconds = time.perf_counter() - started
    distances = [_distances(planted, i, D) for i, D in enumerate(own)]
    return _chosen(config, distances, seconds)


def _together(config: Config, federate: Federate) -> Errors:
    federated = federate(config)
    last = federated.history[-1].metrics
    distances = [(one[ERROR], one["error_shared"]) for _, one in sorted(last.items())]
    return _chosen(config, distances, federated.seconds)


def _chosen(config: Config, distances: Sequence[tuple[float, float]], seconds: float) -> Errors:
    """Return the mean over clients, or what the weak client has."""
    counted = distances[-1:] if config["weak"] else distances
    full, shared = np.mean(counted, axis=0)
    return Errors(float(full), float(shared), seconds)


def _alone(
    X: Matrix, learner: OrthogonalLearner, rng: np.random.Generator, config: Config
) -> Matrix:
    """Return a dictionary of ``X`` alone: the start, and an iteration for every further round."""
    D = warm_start(X, learner, rng=rng).dictionary
    for _ in range(int(config["rounds"]) - 1):
        D = learner.step(X, D)
    return D


def _distances(planted: Planted, partition: int, D: Matrix) -> tuple[float, float]:
    shared = planted.global_atoms
    truth = np.vstack([shared, planted.local_atoms[partition]])
    return dictionary_distance(truth, D), dictionary_distance(shared, D)


# The report ----------------------------------------------------------------------------------


def _outcome(
    config: Config, settings: Mapping[str, float], found: Mapping[str, Mapping[str, NDArray[Any]]]
) -> Outcome:
    base, axes = _base(config), _axes(config)
    seeds = range(int(config["seed"]), int(config["seed"]) + int(config["seeds"]))

    def errors(method: str, **changes: Any) -> Errors:
        points = [_name({**base, **changes, "seed": seed}) for seed in seeds]
        return Errors(*np.mean([found[point][method] for point in points], axis=0))

    metrics: dict[str, float] = {}
    curves: dict[str, list[float]] = {}
    for weak, row in enumerate(_ROWS):
        for method in METHODS:
            one = errors(method, weak=weak)
            metrics[f"error_{row}{method}"] = one.full
            metrics[f"error_shared_{row}{method}"] = one.shared
            metrics[f"seconds_{row}{method}"] = one.seconds
            for axis, values in axes.items():
                along = [errors(method, weak=weak, **{axis: value}) for value in values]
                curves[f"error_{row}{method}_{axis}"] = [point.full for point in along]
                if axis == "dimension":
                    curves[f"seconds_{row}{method}"] = [point.seconds for point in along]
    return Outcome(
        metrics=metrics,
        curves=curves,
        arrays={axis: np.array(values) for axis, values in axes.items()},
        tables=[_table(metrics, settings)],
        pictures=_pictures(axes, curves),
        notes=list(_notes(config, settings)),
        rounds=int(config["rounds"]),
        floats_up=0.0,
        floats_down=0.0,
    )


def _table(metrics: Mapping[str, float], settings: Mapping[str, float]) -> Table:
    return Table(
        "At the middle of the figure",
        f"d = {DIMENSION}, codes {DENSITY}% non-zero; means over seeds. Error: distance d_{{1,2}} "
        "of a client's planted atoms to the dictionary it ends with, mean over clients; shared: of "
        "the planted global atoms alone. Weak: the errors of the one client that has few samples.",
        ["", "error", "shared", "error, weak", "shared, weak", "seconds", "tuned to"],
        [
            [
                title,
                *(
                    f"{metrics[f'{kind}_{row}{method}']:.1e}"
                    for row in _ROWS
                    for kind in ("error", "error_shared")
                ),
                f"{metrics[f'seconds_{method}']:.2f}",
                f"{'step' if method == 'perpca' else 'threshold'} {settings[method]:g}",
            ]
            for method, title in METHODS.items()
        ],
    )


def _pictures(
    axes: Mapping[str, Sequence[int]], curves: Mapping[str, Sequence[float]]
) -> list[Picture]:
    from perdl_experiments import plots  # an extra: clients must not need it

    titles = {
        "dimension": "dimension d",
        "clients": "number of clients N",
        "density": "non-zero codes (%)",
    }
    panels = []
    for row, words in _ROWS.items():
        for axis, values in axes.items():
            lines = {METHODS[m]: curves[f"error_{row}{m}_{axis}"] for m in METHODS}
            panels.append(plots.Panel(titles[axis], f"error, {words}", values, lines))
            if axis == "dimension":
                times = {METHODS[m]: curves[f"seconds_{row}{m}"] for m in METHODS}
                panels.append(plots.Panel(titles[axis], "seconds", values, times))
    return [
        Picture(
            "comparison",
            "Errors and times",
            "The paper's Fig. 5: above, all clients have as many samples; below, one has few, and "
            "the errors are its own. Means over seeds, logarithmic; errors below 1e-16 are drawn "
            "there.",
            plots.panels(panels, columns=4),
        )
    ]


def _notes(config: Config, settings: Mapping[str, float]) -> Iterator[str]:
    yield (
        f"{plural(config['seeds'], 'seed')}, {plural(config['samples'], 'sample')} per client "
        "(the weak one: "
        f"{config['weak_samples']}), half of a client's atoms shared with all others. Unless on "
        f"the axis: d = {DIMENSION}, {config['clients']} clients, {DENSITY}% non-zero codes."
    )
    yield (
        f"The same budget for all: {plural(config['rounds'], 'round')} of one local iteration, "
        "the same "
        f"learner and warm starts, and {len(THRESHOLDS)} values of one parameter, of which the "
        "best at the middle of the figure on a seed of its own is kept for all points: thresholds "
        f"{', '.join(map(str, THRESHOLDS))}; PerPCA's step {', '.join(map(str, STEPS))}."
    )
    yield (
        "The naive average has round one only. Averaging and pooled data have one dictionary for "
        "all, with as many atoms as one client: it cannot hold all clients' own atoms. PerPCA "
        "finds the subspaces that clients share, which leaves the atoms inside them open."
    )
