"""Synthetic dictionaries: PerMA, A.1 and Fig. 2, local training against PerMA.

Metrics: ``error_global_median``, ``error_global_max``, ``share_below_1e_2``, ``share_below_1e_3``,
``share_below_1e_6`` (shares of seeds), ``error_start_median`` and ``error_start_max`` (before the
first update), ``error_local_max``, ``error_independent_mean``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
from flwr.app import Context

from flwr_perdl.clients import DictionaryClient
from flwr_perdl.core.checks import Matrix
from flwr_perdl.dictionary import (
    OrthogonalLearner,
    WarmStart,
    dictionary_distance,
    warm_start,
)
from flwr_perdl.protocol.records import PARTITION_ID
from flwr_perdl.random import spawn
from flwr_perdl.strategies import PerMA
from perdl_experiments.data import Planted
from perdl_experiments.outcome import Outcome
from perdl_experiments.render import MANY, WORST, Record
from perdl_experiments.studies import _planted
from perdl_experiments.studies._experiment import Arrays, Federate, Keep
from perdl_experiments.studies._planted import EXACT, N_GLOBAL, STARTS, THRESHOLD


@dataclass(frozen=True, kw_only=True)
class Config(_planted.Config):
    """The options of synthetic.toml."""

    atoms: tuple[int, ...]
    start: str

    @property
    def planted(self) -> Planted:
        """The clients' data."""
        return _plant(self)

    @property
    def warm_start(self) -> partial[WarmStart]:
        """The clients' start."""
        return partial(warm_start, **STARTS[self.start])


@lru_cache(maxsize=4)
def _plant(config: Config) -> Planted:
    """Return the clients' data; every client asks, and lists of all sizes take long to compare."""
    n_atoms = tuple(config.atoms[i % len(config.atoms)] for i in range(config.clients))
    return _planted.plant(config.seed, n_atoms, config.sizes)


def client(context: Context, config: Config) -> DictionaryClient:
    """Return the client of partition ``context.node_config["partition-id"]``."""
    partition, planted = int(context.node_config[PARTITION_ID]), config.planted
    return DictionaryClient(
        planted.samples[partition],
        _learner(planted, partition),
        context,
        extra_metrics=partial(_measure, planted, partition),
        start=config.warm_start,
        **config.private,
    )


def _measure(planted: Planted, partition: int, shared: Matrix, own: Matrix) -> dict[str, float]:
    return {
        "error_global": dictionary_distance(shared, planted.global_atoms),
        "error_local": dictionary_distance(own, planted.local_atoms[partition]),
    }


def strategy(config: Config, **options: Any) -> PerMA:
    """Return the strategy; ``options`` are the server's own."""
    return config.strategy(N_GLOBAL, **options)


def federations(config: Config) -> list[Config]:
    """Return the config of every federation: one per seed."""
    return [replace(config, seed=seed) for seed in config.each_seed]


def run(config: Config, federate: Federate, keep: Keep) -> Outcome:
    """Run one federation per seed, and local training from the same starts."""
    seeds = [
        keep(f"seed-{one.seed}", partial(_one_seed, one, federate)) for one in federations(config)
    ]
    errors, alone, local = (
        np.array([seed[name] for seed in seeds]) for name in ("global", "alone", "local")
    )
    final, strong = errors[:, -1], config.clients - config.weak
    together = np.repeat(final[:, None], alone.shape[1], axis=1)
    curves = {
        "error_global_median": np.median(errors, axis=0).tolist(),
        "error_global_max": errors.max(axis=0).tolist(),
    }
    return Outcome(
        records=[
            Record("error", final, "global"),
            Record("error", errors[:, 0], "start"),
            Record("error", alone, "independent"),
            Record("error", local, "local"),
            Record("error", local[:, :strong] if strong else 0.0, "local_strong"),
            Record("error", local.max(axis=1), "local_worst"),
            *(
                Record("client_error", errors[:, i], name, {"client": f"client {i}"})
                for i in range(config.clients)
                for name, errors in {"alone": alone, "together": together, "own": local}.items()
            ),
        ],
        curves=curves,
        arrays={
            "errors_global": errors,
            "errors_local": local,
            "errors_independent": alone,
            "global_atoms": seeds[0]["atoms"],
        },
        figures=_figures(curves, together, alone),
        facts={
            "drawn": f"Quantiles over clients, then the {WORST} worst. " * (config.clients > MANY)
        },
        **_planted.mean_cost([seed["cost"] for seed in seeds]),
    )


def _one_seed(config: Config, federate: Federate) -> Arrays:
    """Return one seed's errors: of the global atoms per round, of the clients' own at the end."""
    alone = _alone(config)
    federated = federate(config)
    reports = [report.metrics for report in federated.history if report.step == "evaluate"]
    return {
        "global": np.array([max(m["error_global"] for m in one.values()) for one in reports]),
        "local": np.array([m["error_local"] for m in reports[-1].values()]),
        "alone": alone,
        "atoms": federated.arrays[0],
        "cost": _planted.cost(federated),
    }


def _alone(config: Config) -> Matrix:
    """Return every client's error where it learns by itself, from its start in the federation.

    As in the paper, those of its atoms count that align best with the planted global ones.
    """
    planted = config.planted
    errors = np.empty(config.clients)
    for i, X in enumerate(planted.samples):
        learner = _learner(planted, i)
        D = warm_start(X, learner, rng=spawn(config.seed, i), **STARTS[config.start]).dictionary
        learned = _planted.learn_alone(X, learner, D, config.rounds)
        errors[i] = dictionary_distance(planted.global_atoms, learned)
    return errors


def _learner(planted: Planted, partition: int) -> OrthogonalLearner:
    n_atoms = N_GLOBAL + len(planted.local_atoms[partition])
    return OrthogonalLearner(n_atoms, threshold=THRESHOLD)


def _figures(curves: dict[str, list[float]], together: Matrix, alone: Matrix) -> dict[str, Any]:
    from perdl_experiments import plots  # an extra: clients must not need it

    error = "error of the global atoms"
    errors = {"local training": np.maximum(alone, EXACT), "PerMA": np.maximum(together, EXACT)}
    rows, names = plots.of_many(errors, [f"client {i}" for i in range(alone.shape[1])])
    return {
        "clients": plots.dots({"": rows}, names, x=error, log=True),
        "rounds": plots.lines(
            {
                "PerMA, median over seeds": curves["error_global_median"],
                "PerMA, worst seed": curves["error_global_max"],
            },
            levels={"local training, worst client": float(alone.max())},
            x="communication round",
            y=error,
            log=True,
            floor=EXACT,
        ),
    }
