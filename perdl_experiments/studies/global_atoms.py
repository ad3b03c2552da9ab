"""How many atoms are shared: Appendix B.2 and Fig. 7.

The matching round alone, with ``n_global="auto"``: the server counts the atoms on which the
clients' dictionaries agree, and is right if it finds as many as were planted.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from flwr_perdl._checks import check_count, check_real
from flwr_perdl._random import DATA, spawn
from flwr_perdl._records import PARTITION_ID
from flwr_perdl.clients import DictionaryClient
from flwr_perdl.dictionary import OrthogonalLearner, global_matching, warm_start
from flwr_perdl.strategies import PerMA
from perdl_experiments.data import Planted, planted_clients
from perdl_experiments.engine import Config
from perdl_experiments.outcome import Outcome, Picture, Table
from perdl_experiments.studies._experiment import (
    MIN_SUPPORT,
    Federate,
    Keep,
    Value,
    make_strategy,
    numbers,
    private,
    seeds_of,
)
from perdl_experiments.words import plural

NAME = "global-atoms"
ABOUT = "How many atoms do the clients share? PerMA's matching round finds the number"
SOURCE = "Liang et al., NeurIPS 2023, Appendix B.2 and Fig. 7"
DEFAULTS: dict[str, Value] = {
    "clients": 10,
    "rounds": 1,
    "seed": 0,
    "seeds": 50,
    "n_global": "4,6,8",
    "noise": 0.0,
    "samples": 500,
    "weak": 0,
    "weak_samples": 60,
    "aggregation": "statistics",
    "matching": "consensus",
    "min_support": MIN_SUPPORT,
}
HELP: dict[str, str] = {
    "seeds": "per number",
    "n_global": "numbers of shared atoms to plant",
    "noise": "standard deviation of noise on the data",
}
FIGURES: tuple[str, ...] = ("paths.png",)
ERROR = "mse"

N_ATOMS = 10


def client(context: Context, config: Config) -> DictionaryClient:
    """Return the client of partition ``context.node_config["partition-id"]``."""
    X = _planted(config).samples[int(context.node_config[PARTITION_ID])]
    return DictionaryClient(X, OrthogonalLearner(N_ATOMS), context, **private(config))


def strategy(config: Config, **options: Any) -> PerMA:
    """Return the strategy; ``options`` are the server's own."""
    return make_strategy(config, "auto", options)


def federations(config: Config) -> list[Config]:
    """Return the config of every federation: one per planted number of atoms and seed."""
    shared = numbers("n_global", config["n_global"], 0, N_ATOMS)
    return [
        {**config, "n_global": str(g), "seed": seed} for g in shared for seed in seeds_of(config)
    ]


def run(config: Config, federate: Federate, keep: Keep) -> Outcome:
    """Run all federations and count the right answers."""
    found: dict[int, list[int]] = {}
    costs = []
    for one in federations(config):
        planted = int(one["n_global"])
        kept = keep(f"shared-{planted}-seed-{one['seed']}", partial(_one_seed, one, federate))
        found.setdefault(planted, []).append(int(kept["found"]))
        costs.append(kept["cost"])
    shares = {g: float(np.mean(np.array(counts) == g)) for g, counts in found.items()}
    lengths = {g: _path_lengths({**config, "n_global": str(g)}) for g in found}
    rounds, floats_up, floats_down = np.mean(costs, axis=0)
    return Outcome(
        metrics={f"correct_{g}": share for g, share in shares.items()},
        curves={f"path_lengths_{g}": values for g, values in lengths.items()},
        arrays={f"found_{g}": np.array(counts) for g, counts in found.items()},
        tables=[_table(found, shares)],
        pictures=_pictures(lengths),
        notes=[
            f"{config['clients']} clients, {N_ATOMS} atoms each, "
            f"{plural(config['samples'], 'sample')}"
            + (f" ({config['weak_samples']} at {config['weak']} of them)" if config["weak"] else "")
            + f", noise of standard deviation {config['noise']}."
        ],
        rounds=int(rounds),
        floats_up=floats_up,
        floats_down=floats_down,
    )


def _one_seed(config: Config, federate: Federate) -> dict[str, NDArray[Any]]:
    """Return how many atoms the federation found, and what it cost."""
    _planted(config)  # a wrong option is told before the clients fall over it
    federated = federate(config)
    return {
        "found": np.array(len(federated.arrays[0])),
        "cost": np.array([federated.rounds, federated.floats_up, federated.floats_down]),
    }


def _path_lengths(config: Config) -> list[float]:
    """Return how far apart the first seed's clients are in their best, second best, … atom."""
    seed, learner = int(config["seed"]), OrthogonalLearner(N_ATOMS)
    dictionaries = [
        warm_start(X, learner, rng=spawn(seed, i)).dictionary
        for i, X in enumerate(_planted(config).samples)
    ]
    matching = global_matching(dictionaries, N_ATOMS, method=str(config["matching"]))
    lengths: list[float] = matching.path_lengths.tolist()
    return lengths


def _planted(config: Config) -> Planted:
    clients = int(config["clients"])
    weak = check_count("weak", config["weak"], 0, clients)
    samples = check_count("samples", config["samples"], 1)
    weak_samples = check_count("weak_samples", config["weak_samples"], 1)
    n_samples = (samples,) * (clients - weak) + (weak_samples,) * weak
    (shared,) = numbers("n_global", config["n_global"], 0, N_ATOMS)
    noise = check_real("noise", config["noise"], 0)
    return _plant(int(config["seed"]), shared, n_samples, noise)


@lru_cache(maxsize=2)
def _plant(seed: int, n_global: int, n_samples: tuple[int, ...], noise: float) -> Planted:
    sizes = [N_ATOMS] * len(n_samples)
    rng = spawn(seed, DATA)
    return planted_clients(rng, sizes, n_samples, n_global, n_features=N_ATOMS, noise=noise)


def _table(found: dict[int, list[int]], shares: dict[int, float]) -> Table:
    return Table(
        "The number of shared atoms",
        "Over all seeds.",
        ["Planted", "Found right", "Least found", "Most found", "Seeds"],
        [
            [str(g), f"{shares[g]:.0%}", str(min(counts)), str(max(counts)), str(len(counts))]
            for g, counts in found.items()
        ],
    )


def _pictures(lengths: dict[int, list[float]]) -> list[Picture]:
    from perdl_experiments import plots  # an extra: clients must not need it

    return [
        Picture(
            "paths",
            "How far apart the clients are in each matched atom",
            "First seed. The jump after the last shared atom tells their number (the paper's Fig. "
            "7; for consensus matching, the length is the number of clients less one times the "
            "median distance).",
            plots.lines(
                {f"{g} shared": values for g, values in lengths.items()},
                x="matched atom, best first",
                y="path length",
            ),
        )
    ]
