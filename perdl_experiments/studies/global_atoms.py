"""How many atoms are shared: PerMA, B.2 and Fig. 7.

Only the matching round, with ``n_global="agree"``: the server counts the atoms on which the
clients' dictionaries agree, and is correct if it finds the true number. Compared with the paper's
rule, the largest jump of the shortest paths' lengths (Algorithm 2), and the same rule on the
lengths of consensus matching, both on the clients' initial dictionaries.

Metrics: ``correct_4``, ``correct_6``, ``correct_8`` (shares of seeds); ``correct_paths_4`` and so
on with the paper's rule, the largest jump of the path lengths, and ``correct_consensus_4`` and so
on with the largest jump of the lengths of consensus matching, both on the clients' starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from flwr.app import Context

from flwr_perdl.clients import DictionaryClient
from flwr_perdl.core.checks import Matrix
from flwr_perdl.dictionary import OrthogonalLearner, global_matching, warm_start
from flwr_perdl.protocol.records import PARTITION_ID
from flwr_perdl.random import spawn
from flwr_perdl.strategies import PerMA
from perdl_experiments.data import Planted
from perdl_experiments.outcome import Outcome
from perdl_experiments.render import Record
from perdl_experiments.studies import _planted
from perdl_experiments.studies._experiment import Arrays, Federate, Keep

N_ATOMS = 10
#: Matchings whose lengths are drawn, the paper's first.
MATCHINGS = ("paths", "consensus")


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
    return config.strategy("agree", **options)


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
    lengths: dict[str, dict[int, list[Matrix]]] = {matching: {} for matching in MATCHINGS}
    costs: list[Matrix] = []
    for one in federations(config):
        (planted,) = one.n_global
        kept = keep(f"shared-{planted}-seed-{one.seed}", partial(_one_seed, one, federate))
        found.setdefault(planted, []).append(int(kept["found"]))
        costs.append(kept["cost"])
        for matching, of in lengths.items():
            of.setdefault(planted, []).append(kept[matching])
    counted = {"": found} | {
        matching: {g: [_jump(one) for one in each] for g, each in of.items()}
        for matching, of in lengths.items()
    }
    first = {m: {g: each[0].tolist() for g, each in of.items()} for m, of in lengths.items()}
    return Outcome(
        records=[
            record
            for rule, of in counted.items()
            for g, counts in of.items()
            for record in (
                Record("correct", np.array(counts) == g, rule, {"planted": g}),
                Record("found", counts, rule, {"planted": g}),
            )
        ],
        curves={
            f"{'path' if matching == 'paths' else matching}_lengths_{g}": values
            for matching, of in first.items()
            for g, values in of.items()
        },
        arrays={f"found_{g}": np.array(counts) for g, counts in found.items()},
        figures=_figures(first),
        facts={
            "right": float(np.mean([c == g for g, counts in found.items() for c in counts])),
            "n_runs": sum(map(len, found.values())),
        },
        **_planted.mean_cost(costs),
    )


def _one_seed(config: Config, federate: Federate) -> Arrays:
    """Return how many atoms the federation found, what it cost, and the lengths of matchings."""
    federated, learner = federate(config), OrthogonalLearner(N_ATOMS)
    dictionaries = [
        warm_start(X, learner, rng=spawn(config.seed, i)).dictionary
        for i, X in enumerate(config.planted.samples)
    ]
    lengths = {
        matching: global_matching(dictionaries, N_ATOMS, method=matching).path_lengths
        for matching in MATCHINGS
    }
    found = np.array(len(federated.arrays[0]))
    return {"found": found, "cost": _planted.cost(federated), **lengths}


def _jump(lengths: Matrix) -> int:
    """Return the number of atoms before the largest jump of the lengths, best atom first (B.2)."""
    return int(np.diff(lengths).argmax()) + 1


def _figures(lengths: Mapping[str, Mapping[int, list[float]]]) -> dict[str, Any]:
    from perdl_experiments import plots  # an extra: clients must not need it

    says = {
        "paths": "length of the path, shortest paths",
        "consensus": "length, consensus",
    }
    panels = [
        plots.Panel(
            "matched atom, best first",
            says[matching],
            range(1, N_ATOMS + 1),
            {f"{g} shared": values for g, values in of.items()},
            linear=True,
        )
        for matching, of in lengths.items()
    ]
    return {"paths": plots.panels(panels)}
