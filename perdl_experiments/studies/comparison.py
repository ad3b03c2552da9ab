"""PerMA against other methods on synthetic dictionaries: PerMA, B.1 and Fig. 5.

The data of A.1 with other dimensions, numbers of clients and shares of nonzero codes. In the
figure's second half one client has few samples, in proportion to the dimension, and the errors are
that client's. Errors on shared and local atoms are reported separately: a single dictionary of the
size of a client's has no room for everybody's local atoms, however well it finds the shared ones.

All methods have the same rounds, local iterations, learner and warm starts, and are tuned over
equally many values of one parameter, on a seed of its own, in the middle of the figure: PerPCA over
its learning rate, all others over the learner's threshold. The methods are those of
`perdl_experiments.studies._methods`; averaging and pooled data have as many atoms as one client,
and once more, in the middle of the figure, as many as all clients have with PerMA, with an update
for non-orthogonal atoms: ``averaging_wide`` and ``pooled_wide``.

Metrics, with d = 6, ``--clients`` (10) and a density of 20, for METHOD ``perma``, ``averaging``,
``naive``, ``perpca``, ``local``, ``pooled``, ``averaging_wide``, ``pooled_wide``: ``error_METHOD``
(d₁,₂ of a client's true atoms to its result, mean over clients and seeds), ``error_shared_METHOD``
and ``error_own_METHOD`` (of the true global and the true local atoms), ``seconds_METHOD``, and
``error_weak_METHOD``, ``error_shared_weak_METHOD``, ``error_own_weak_METHOD``,
``seconds_weak_METHOD`` of the second half.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from flwr_perdl.clients import DictionaryClient
from flwr_perdl.core.checks import Matrix
from flwr_perdl.dictionary import (
    MODLearner,
    OrthogonalLearner,
    dictionary_distance,
    warm_start,
)
from flwr_perdl.protocol.records import PARTITION_ID
from flwr_perdl.random import SERVER, spawn
from flwr_perdl.strategies import PerMA
from perdl_experiments.averaging import average, naive_average
from perdl_experiments.data import Planted
from perdl_experiments.engine import arranged
from perdl_experiments.outcome import Outcome
from perdl_experiments.perpca import personalized_pca
from perdl_experiments.render import FAILED, Record
from perdl_experiments.studies import _planted
from perdl_experiments.studies._experiment import (
    Arrays,
    ClientConfig,
    Federate,
    Keep,
    attempt,
    words,
)

METHODS = words("comparison")
#: Rivals with as many atoms as all clients have with PerMA, in the middle of the figure only.
WIDE = ("averaging_wide", "pooled_wide")
#: What every method is tuned over: the threshold, or PerPCA's step.
THRESHOLDS, STEPS = (0.1, 0.15, 0.25), (0.5, 1.0, 2.0)
#: An error below this is rounding.
_EXACT = 1e-12
#: The middle of the figure, where methods are tuned and the tables are taken: A.1.
DIMENSION, DENSITY = 6, 20
#: Seeds for tuning are the run's and so much.
_TUNING = 10_000
#: What a client measures: `Errors` but for the time.
_ERRORS = ("error_full", "error_shared", "error_own")
_ROWS = {"": "clients alike", "weak": "weak client"}
#: Errors below it are drawn there.
_DRAWN = 1e-16


@dataclass(frozen=True, kw_only=True)
class Config(ClientConfig):
    """The options of comparison.toml; below them, what one federation adds."""

    samples: int
    weak_samples: int
    dimensions: tuple[int, ...]
    sizes: tuple[int, ...]
    densities: tuple[int, ...]

    dimension: int = DIMENSION
    density: int = DENSITY
    weak: int = 0
    method: str = ""
    setting: float = 0.0

    @property
    def axes(self) -> dict[str, tuple[int, ...]]:
        """The values on each axis of the figure."""
        return {"dimension": self.dimensions, "clients": self.sizes, "density": self.densities}

    @property
    def name(self) -> str:
        """The name of the point."""
        fields = ("dimension", "clients", "density", "weak", "seed")
        return "-".join(f"{field}{getattr(self, field)}" for field in fields)

    @property
    def n_global(self) -> int:
        """The number of planted atoms that all clients share."""
        return self.dimension // 2

    @property
    def learner(self) -> OrthogonalLearner | MODLearner:
        """The clients' learner."""
        if self.method in WIDE:
            n_own = self.dimension - self.n_global
            return MODLearner(self.n_global + self.clients * n_own, threshold=self.setting)
        return OrthogonalLearner(self.dimension, threshold=self.setting)

    @property
    def planted(self) -> Planted:
        """The clients' data."""
        few = round(self.weak_samples * self.dimension / DIMENSION)
        sizes = _planted.sizes(self.clients, self.samples, self.weak, few)
        atoms = (self.dimension,) * self.clients
        return _planted.plant(self.seed, atoms, sizes, self.n_global, density=self.density / 100)

    def of(self, method: str, setting: float) -> Config:
        """Return the config of a method at this point."""
        return replace(self, method=method, setting=setting)


class Errors(NamedTuple):
    """What a method comes to on one federation's data.

    Attributes
    ----------
    full : float
        Distance d_{1,2} of a client's planted atoms to its dictionary; the mean over clients, or
        the weak client's.
    shared, own : float
        The same of the planted global atoms alone, and of the client's own.
    seconds : float
        Learning time, starts included.
    """

    full: float
    shared: float
    own: float
    seconds: float


def client(context: Context, config: Config) -> DictionaryClient:
    """Return the client of partition ``context.node_config["partition-id"]``."""
    partition, planted = int(context.node_config[PARTITION_ID]), config.planted
    return DictionaryClient(
        planted.samples[partition],
        config.learner,
        context,
        extra_metrics=partial(_measure, planted, partition),
        **config.private,
    )


def _measure(planted: Planted, partition: int, shared: Matrix, own: Matrix) -> dict[str, float]:
    return dict(zip(_ERRORS, _distances(planted, partition, np.vstack([shared, own])), strict=True))


def strategy(config: Config, **options: Any) -> PerMA:
    """Return PerMA; ``options`` are the server's own."""
    return PerMA(config.n_global, **arranged({"evaluate_every": config.rounds, **options}))


def federations(config: Config) -> list[Config]:
    """Return the configs of all federations: for tuning, then the points with every setting.

    Of the latter only those with the setting that was chosen are run: progress passes over the
    rest.
    """
    return [
        place.of("perma", setting)
        for place in (_tuning(config), *_points(config))
        for setting in _settings("perma")
    ]


def run(config: Config, federate: Federate, keep: Keep) -> Outcome:
    """Tune every method, and run it on every point of the figure.

    A method other than PerMA that fails at any point is reported as failed.
    """
    tuned = {
        method: keep(f"tuned-{method}", partial(_tune, config, method, federate))
        for method in METHODS
    }
    failed = {method: str(kept[FAILED]) for method, kept in tuned.items() if FAILED in kept}
    settings = {m: float(kept["setting"]) for m, kept in tuned.items() if m not in failed}
    found = {
        point.name: keep(point.name, partial(_at, point, _there(point, config, settings), federate))
        for point in _points(config)
    }
    for kept in found.values():
        failed |= {m: str(kept[f"{m}_{FAILED}"]) for m in METHODS if f"{m}_{FAILED}" in kept}
    return _outcome(config, settings, found, failed)


def _points(config: Config) -> list[Config]:
    """Return the config of every point and seed."""
    varied: list[dict[str, Any]] = [{"dimension": DIMENSION}]
    varied += [{axis: value} for axis, values in config.axes.items() for value in values]
    points = [
        replace(config, weak=weak, seed=seed, **one)
        for weak in (0, 1)
        for one in varied
        for seed in config.each_seed
    ]
    return list({point.name: point for point in points}.values())


def _there(point: Config, config: Config, settings: Mapping[str, float]) -> dict[str, float]:
    """Return the settings of the methods that run at a point."""
    middle = (point.dimension, point.clients, point.density) == (DIMENSION, config.clients, DENSITY)
    return {m: setting for m, setting in settings.items() if middle or m not in WIDE}


def _settings(method: str) -> tuple[float, ...]:
    return STEPS if method == "perpca" else THRESHOLDS


def _tuning(config: Config) -> Config:
    return replace(config, seed=config.seed + _TUNING)


# The methods ---------------------------------------------------------------------------------


def _tune(config: Config, method: str, federate: Federate) -> Arrays:
    """Return the setting with the least error at the middle of the figure, of several the first.

    Errors that are rounding only count as the same. A rival's settings that fail do not compete.
    """
    tried = {
        setting: _tried(_tuning(config).of(method, setting), federate)
        for setting in _settings(method)
    }
    errors = {
        s: max(float(one["errors"][0]), _EXACT) for s, one in tried.items() if FAILED not in one
    }
    if not errors:
        return next(iter(tried.values()))
    return {"setting": np.array(min(errors, key=lambda setting: errors[setting]))}


def _tried(config: Config, federate: Federate) -> Arrays:
    """Return a method's errors, or why it failed."""

    def learn() -> Arrays:
        return {"errors": np.array(_learn(config, federate))}

    return learn() if config.method == "perma" else attempt(learn)


def _at(point: Config, settings: Mapping[str, float], federate: Federate) -> Arrays:
    """Return every method's errors at a point."""
    found = {}
    for method, setting in settings.items():
        tried = _tried(point.of(method, setting), federate)
        if FAILED in tried:
            found[f"{method}_{FAILED}"] = tried[FAILED]
        else:
            found[method] = tried["errors"]
    return found


def _learn(config: Config, federate: Federate) -> Errors:
    """Return what a method comes to."""
    if config.method == "perma":
        federated = federate(config)
        last = federated.history[-1].metrics
        together = [tuple(one[name] for name in _ERRORS) for _, one in sorted(last.items())]
        return _chosen(config, together, federated.seconds)
    planted, started = config.planted, time.perf_counter()
    own = _rival(config, planted.samples)
    seconds = time.perf_counter() - started
    return _chosen(config, [_distances(planted, i, D) for i, D in enumerate(own)], seconds)


def _rival(config: Config, samples: Sequence[Matrix]) -> list[Matrix]:
    """Return every client's dictionary by a method other than PerMA."""
    learner, seed = config.learner, config.seed
    given: dict[str, Any] = {"seed": seed, "min_support": config.min_support}
    match config.method:
        case "local":
            return [_alone(X, spawn(seed, i), config) for i, X in enumerate(samples)]
        case "perpca":
            n_local, rounds = config.dimension - config.n_global, config.rounds - 1
            given = {"n_rounds": rounds, "step": config.setting, "min_support": config.min_support}
            found = personalized_pca(samples, config.n_global, n_local, **given)
            return [np.vstack([found.global_components, V]) for V in found.local_components]
        case "pooled" | "pooled_wide":
            D = _alone(np.vstack(samples), spawn(seed, SERVER, 1), config)
        case "naive":
            D = naive_average(samples, learner, **given).atoms
        case _:
            D = average(samples, learner, config.rounds, **given).atoms
    return [D] * len(samples)


def _chosen(config: Config, distances: Sequence[tuple[float, ...]], seconds: float) -> Errors:
    """Return the mean over clients, or what the weak client has."""
    counted = distances[-1:] if config.weak else distances
    full, shared, own = np.mean(counted, axis=0)
    return Errors(float(full), float(shared), float(own), seconds)


def _alone(X: Matrix, rng: np.random.Generator, config: Config) -> Matrix:
    start = warm_start(X, config.learner, rng=rng).dictionary
    return _planted.learn_alone(X, config.learner, start, config.rounds)


def _distances(planted: Planted, partition: int, D: Matrix) -> tuple[float, float, float]:
    """Return the distances of all, of the shared and of the own atoms of a client to ``D``."""
    shared, own = planted.global_atoms, planted.local_atoms[partition]
    parts = (np.vstack([shared, own]), shared, own)
    full, of_shared, of_own = (dictionary_distance(part, D) for part in parts)
    return full, of_shared, of_own


# The report ----------------------------------------------------------------------------------


def _outcome(
    config: Config,
    settings: Mapping[str, float],
    found: Mapping[str, Mapping[str, NDArray[Any]]],
    failed: Mapping[str, str],
) -> Outcome:
    def errors(method: str, **changes: Any) -> Errors:
        points = [replace(config, seed=seed, **changes).name for seed in config.each_seed]
        return Errors(*np.mean([found[point][method] for point in points], axis=0))

    records = []
    curves: dict[str, list[float]] = {}
    for method in METHODS:
        if method in failed:
            records.append(Record(FAILED, failed[method], method))
            continue
        parameter = "step" if method == "perpca" else "threshold"
        records.append(Record("setting", f"{parameter} {settings[method]:g}", method))
        for weak, row in enumerate(_ROWS):
            one, prefix = errors(method, weak=weak), f"{row}_" if row else ""
            records += [
                Record("error", one.full, method, {"row": row}),
                Record("error_shared", one.shared, method, {"row": row}),
                Record("error_own", one.own, method, {"row": row}),
                Record("seconds", one.seconds, method, {"row": row}, "s"),
            ]
            for axis, values in config.axes.items() if method not in WIDE else ():
                along = [errors(method, weak=weak, **{axis: value}) for value in values]
                for part in ("", "shared_", "own_"):
                    errors_of = [getattr(point, part.strip("_") or "full") for point in along]
                    curves[f"error_{part}{prefix}{method}_{axis}"] = errors_of
                if axis == "dimension":
                    curves[f"seconds_{prefix}{method}"] = [point.seconds for point in along]
    drawn = [method for method in METHODS if method not in {*failed, *WIDE}]
    return Outcome(
        records=records,
        curves=curves,
        arrays={axis: np.array(values) for axis, values in config.axes.items()},
        figures={"comparison": _figure(config, curves, drawn)},
        rounds=config.rounds,
        floats_up=0.0,
        floats_down=0.0,
        facts={
            "tries": len(THRESHOLDS),
            "wide": config.of("pooled_wide", THRESHOLDS[0]).learner.n_atoms,
            "thresholds": ", ".join(map(str, THRESHOLDS)),
            "steps": ", ".join(map(str, STEPS)),
        },
    )


def _figure(config: Config, curves: Mapping[str, Sequence[float]], methods: Sequence[str]) -> Any:
    from perdl_experiments import plots  # an extra: clients must not need it

    titles = {"dimension": "d = {}", "clients": "{} clients", "density": "{} % non-zero"}
    names = [titles[axis].format(v) for axis, values in config.axes.items() for v in values]
    panels = {
        f"{part} atoms": {
            METHODS[m]: [
                max(v, _DRAWN)
                for axis in config.axes
                for v in curves[f"error_{part}_weak_{m}_{axis}"]
            ]
            for m in methods
        }
        for part in ("shared", "own")
    }
    return plots.dots(panels, names, x="error of the weak client", log=True)
