"""How many atoms are shared: Appendix B.2 and Fig. 7.

The matching round alone, with ``n_global="auto"``: the server counts the atoms on which the
clients' dictionaries agree, and is right if it finds as many as were planted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from flwr.app import Context

from flwr_perdl.checks import Matrix
from flwr_perdl.clients import DictionaryClient
from flwr_perdl.dictionary import OrthogonalLearner, global_matching, warm_start
from flwr_perdl.random import spawn
from flwr_perdl.records import PARTITION_ID
from flwr_perdl.strategies import PerMA
from perdl_experiments.data import Planted
from perdl_experiments.outcome import Outcome
from perdl_experiments.render import Record
from perdl_experiments.studies import _planted
from perdl_experiments.studies._experiment import Arrays, Federate, Keep

N_ATOMS = 10


@dataclass(frozen=True, kw_only=True)
class Config(_planted.Config):
    """The options of global-atoms; a federation has one number of ``n_global``."""

    n_global: tuple[int, ...]
    noise: float

    @property
    def planted(self) -> Planted:
        """The clients' data."""
        n_atoms = (N_ATOMS,) * self.clients
        return _planted.plant(self.seed, n_atoms, self.sizes, self.n_global[0], noise=self.noise)


def client(context: Context, config: Config) -> DictionaryClient:
    """Return the client of partition ``context.node_config["partition-id"]``."""
    X = config.planted.samples[int(context.node_config[PARTITION_ID])]
    return DictionaryClient(X, OrthogonalLearner(N_ATOMS), context, **config.private)


def strategy(config: Config, **options: Any) -> PerMA:
    """Return the strategy; ``options`` are the server's own."""
    return config.strategy("auto", **options)


def federations(config: Config) -> list[Config]:
    """Return the config of every federation: one per planted number of atoms and seed."""
    return [
        replace(config, n_global=(g,), seed=seed)
        for g in config.n_global
        for seed in config.each_seed
    ]


def run(config: Config, federate: Federate, keep: Keep) -> Outcome:
    """Run all federations and count the right answers."""
    found: dict[int, list[int]] = {}
    costs: list[Matrix] = []
    for one in federations(config):
        (planted,) = one.n_global
        kept = keep(f"shared-{planted}-seed-{one.seed}", partial(_one_seed, one, federate))
        found.setdefault(planted, []).append(int(kept["found"]))
        costs.append(kept["cost"])
    lengths = {g: _path_lengths(replace(config, n_global=(g,))) for g in found}
    return Outcome(
        records=[
            record
            for g, counts in found.items()
            for record in (
                Record("correct", np.array(counts) == g, parameters={"planted": g}),
                Record("found", counts, parameters={"planted": g}),
            )
        ],
        curves={f"path_lengths_{g}": values for g, values in lengths.items()},
        arrays={f"found_{g}": np.array(counts) for g, counts in found.items()},
        figures=_figures(lengths),
        facts={
            "n_atoms": N_ATOMS,
            "right": float(np.mean([c == g for g, counts in found.items() for c in counts])),
            "n_runs": sum(map(len, found.values())),
        },
        **_planted.mean_cost(costs),
    )


def _one_seed(config: Config, federate: Federate) -> Arrays:
    """Return how many atoms the federation found, and what it cost."""
    federated = federate(config)
    return {"found": np.array(len(federated.arrays[0])), "cost": _planted.cost(federated)}


def _path_lengths(config: Config) -> list[float]:
    """Return how far apart the first seed's clients are in their best, second best, … atom."""
    learner = OrthogonalLearner(N_ATOMS)
    dictionaries = [
        warm_start(X, learner, rng=spawn(config.seed, i)).dictionary
        for i, X in enumerate(config.planted.samples)
    ]
    matching = global_matching(dictionaries, N_ATOMS, method=config.matching)
    lengths: list[float] = matching.path_lengths.tolist()
    return lengths


def _figures(lengths: dict[int, list[float]]) -> dict[str, Any]:
    from perdl_experiments import plots  # an extra: clients must not need it

    curves = {f"{g} shared": values for g, values in lengths.items()}
    return {"paths": plots.lines(curves, x="matched atom, best first", y="path length")}
