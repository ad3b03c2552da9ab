"""Planted dictionaries: Appendix A.1 and Fig. 2, independent against collaborative clients.

Every client's data is made of orthonormal atoms, three of which all clients share. Errors are
d_{1,2} (Definition 1) to the planted atoms, computed from explicit differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from flwr_perdl._checks import Matrix, check_choice, check_count
from flwr_perdl._random import DATA, spawn
from flwr_perdl._records import PARTITION_ID
from flwr_perdl.clients import DictionaryClient
from flwr_perdl.dictionary import (
    OrthogonalLearner,
    WarmStart,
    dictionary_distance,
    warm_start,
)
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

NAME = "synthetic"
ABOUT = "PerMA on planted dictionaries: independent against collaborative clients"
SOURCE = "Liang et al., NeurIPS 2023, Appendix A.1 and Fig. 2"
DEFAULTS: dict[str, Value] = {
    "clients": 10,
    "rounds": 30,
    "seed": 0,
    "seeds": 10,
    "samples": 200,
    "atoms": "6",
    "start": "good",
    "weak": 0,
    "weak_samples": 20,
    "local_steps": 1,
    "aggregation": "statistics",
    "matching": "consensus",
    "min_support": MIN_SUPPORT,
}
HELP: dict[str, str] = {
    "seeds": "federations, one per seed",
    "atoms": "atoms per client; `5,6,7` gives them to the clients in turn",
    "start": (
        "`good`; or `poor`: Fig. 2's regime, where some clients fail alone; or `short`: "
        "five iterations"
    ),
}
FIGURES: tuple[str, ...] = ("clients.png", "rounds.png")
ERROR = "error_global"

N_GLOBAL = 3
THRESHOLD = 0.15
#: "good" is the library's warm start; "poor" begins with too small a threshold and ends early, so
#: that about one client in five fails by itself; "short" leaves most of the work to the rounds.
STARTS: dict[str, dict[str, Any]] = {
    "good": {},
    "poor": {"boost": 0.5 / THRESHOLD, "decay": 0.97, "n_iter": 100, "restarts": 1},
    "short": {"n_iter": 5},
}


class PlantedClient(DictionaryClient):
    """A client that knows what was planted, and reports how far its atoms are from that."""

    def __init__(self, *args: Any, planted: Planted, **options: Any) -> None:
        super().__init__(*args, **options)
        self.planted = planted

    def extra_metrics(self, global_atoms: Matrix, local_atoms: Matrix) -> dict[str, float]:
        """Return ``error_global`` and ``error_local``, d_{1,2} to the planted atoms."""
        truth = self.planted.local_atoms[self.partition]
        return {
            ERROR: dictionary_distance(global_atoms, self.planted.global_atoms),
            "error_local": dictionary_distance(local_atoms, truth),
        }


def client(context: Context, config: Config) -> DictionaryClient:
    """Return the client of partition ``context.node_config["partition-id"]``."""
    partition, planted = int(context.node_config[PARTITION_ID]), _planted(config)
    return PlantedClient(
        planted.samples[partition],
        _learner(planted, partition),
        context,
        planted=planted,
        start=_start(config),
        **private(config),
    )


def strategy(config: Config, **options: Any) -> PerMA:
    """Return the strategy; ``options`` are the server's own."""
    return make_strategy(config, N_GLOBAL, options)


def federations(config: Config) -> list[Config]:
    """Return the config of every federation: one per seed, counted from ``config["seed"]``."""
    return [{**config, "seed": seed} for seed in seeds_of(config)]


def run(config: Config, federate: Federate, keep: Keep) -> Outcome:
    """Run one federation per seed, and its clients alone from the same starts."""
    seeds = [
        keep(f"seed-{one['seed']}", partial(_one_seed, one, federate))
        for one in federations(config)
    ]
    errors = np.array([seed["global"] for seed in seeds])
    alone = np.array([seed["alone"] for seed in seeds])
    local = np.array([seed["local"] for seed in seeds])
    final = errors[:, -1]
    strong = int(config["clients"]) - int(config["weak"])
    metrics = {
        "error_global_median": float(np.median(final)),
        "error_global_max": float(final.max()),
        **{f"share_below_1e_{p}": float(np.mean(final < 10.0**-p)) for p in (2, 3, 6)},
        "error_start_median": float(np.median(errors[:, 0])),
        "error_start_max": float(errors[:, 0].max()),
        "error_local_max": float(local.max()),
        "error_local_strong_max": float(local[:, :strong].max(initial=0)),
        "share_local_below_1e_6": float(np.mean(local.max(axis=1) < 1e-6)),
        "error_independent_mean": float(alone.mean()),
        "error_independent_max": float(alone.max()),
    }
    rounds, floats_up, floats_down = np.mean([seed["cost"] for seed in seeds], axis=0)
    together = np.repeat(final[:, None], alone.shape[1], axis=1)
    return Outcome(
        metrics=metrics,
        curves={
            "error_global_median": _list(np.median(errors, axis=0)),
            "error_global_max": _list(errors.max(axis=0)),
        },
        arrays={
            "errors_global": errors,
            "errors_local": local,
            "errors_independent": alone,
            "global_atoms": seeds[0]["atoms"],
        },
        tables=[_table(final, errors[:, 0], alone, local)],
        pictures=_pictures(errors, together, alone),
        notes=_notes(config),
        rounds=int(rounds),
        floats_up=floats_up,
        floats_down=floats_down,
    )


def _one_seed(config: Config, federate: Federate) -> dict[str, NDArray[Any]]:
    """Return one seed's errors: of the global atoms per round, of the clients' own at the end."""
    alone = _alone(config)
    federated = federate(config)
    reports = [report.metrics for report in federated.history if report.step == "evaluate"]
    return {
        "global": np.array([max(m[ERROR] for m in report.values()) for report in reports]),
        "local": np.array([m["error_local"] for m in reports[-1].values()]),
        "alone": np.array(alone),
        "atoms": federated.arrays[0],
        "cost": np.array([federated.rounds, federated.floats_up, federated.floats_down]),
    }


def _alone(config: Config) -> list[float]:
    """Return every client's error where it learns by itself, from its start in the federation.

    Its atoms that align best with the planted global ones count, as in the paper.
    """
    planted, start, errors = _planted(config), _start(config), []
    for i, X in enumerate(planted.samples):
        learner, rng = _learner(planted, i), spawn(int(config["seed"]), i)
        D = start(X, learner, rng=rng).dictionary
        for _ in range(int(config["rounds"]) - 1):
            D = learner.step(X, D)
        errors.append(dictionary_distance(planted.global_atoms, D))
    return errors


def _start(config: Config) -> partial[WarmStart]:
    return partial(warm_start, **STARTS[check_choice("start", config["start"], STARTS)])


def _learner(planted: Planted, partition: int) -> OrthogonalLearner:
    n_atoms = N_GLOBAL + len(planted.local_atoms[partition])
    return OrthogonalLearner(n_atoms, threshold=THRESHOLD)


def _planted(config: Config) -> Planted:
    names = ("seed", "clients", "weak", "samples", "weak_samples", "atoms")
    return _of_options(*(config[name] for name in names))


@lru_cache(maxsize=2)
def _of_options(
    seed: Value, clients: Value, weak: Value, samples: Value, weak_samples: Value, atoms: Value
) -> Planted:
    """Return the clients that the options describe; a process that hosts many plants them once."""
    n_clients = int(clients)
    n_weak = check_count("weak", weak, 0, n_clients)
    sizes = numbers("atoms", atoms, N_GLOBAL, 100)
    n_samples = (check_count("samples", samples, 1),) * (n_clients - n_weak)
    n_samples += (check_count("weak_samples", weak_samples, 1),) * n_weak
    return plant(int(seed), tuple(sizes[i % len(sizes)] for i in range(n_clients)), n_samples)


@lru_cache(maxsize=2)
def plant(seed: int, n_atoms: tuple[int, ...], n_samples: tuple[int, ...]) -> Planted:
    """Return A.1's clients, of so many atoms and samples each."""
    rng = spawn(seed, DATA)
    return planted_clients(rng, n_atoms, n_samples, N_GLOBAL, n_features=max(n_atoms))


def _table(final: Matrix, start: Matrix, alone: Matrix, local: Matrix) -> Table:
    """Return the table of errors, over seeds (and clients)."""
    rows: dict[str, Matrix] = {
        "PerMA's global atoms": final,
        "… before its first update round": start,
        "Clients alone, the same atoms": alone,
        "Clients' local atoms in PerMA": local,
    }
    return Table(
        "Errors",
        "Distance d_{1,2} to the planted atoms, over all seeds (and, in the last two rows, all "
        "clients). Before its first update round, PerMA has matched and averaged the clients' "
        "starts.",
        ["", "median", "largest", "below 1e-2", "below 1e-3", "below 1e-6"],
        [
            [
                title,
                f"{np.median(values):.1e}",
                f"{values.max():.1e}",
                *(f"{np.mean(values < level):.0%}" for level in (1e-2, 1e-3, 1e-6)),
            ]
            for title, values in rows.items()
        ],
    )


def _pictures(errors: Matrix, together: Matrix, alone: Matrix) -> list[Picture]:
    from perdl_experiments import plots  # an extra: clients must not need it

    return [
        Picture(
            "clients",
            "Independent against collaborative, per client",
            "Error of the global atoms: median and range over seeds (the paper's Fig. 2). Errors "
            "below 1e-16 are drawn there.",
            plots.boxes(
                {"independent": _columns(alone), "collaborative (PerMA)": _columns(together)},
                x="client",
                y="error of the global atoms",
            ),
        ),
        Picture(
            "rounds",
            "Error against rounds",
            "Round 1 is the matching round: its error is the one before the first update.",
            plots.lines(
                {
                    "median over seeds": _list(np.median(errors, axis=0)),
                    "largest": _list(errors.max(axis=0)),
                },
                x="communication round",
                y="error of the global atoms",
                log=True,
            ),
        ),
    ]


def _columns(values: Matrix) -> Sequence[Sequence[float]]:
    columns: list[list[float]] = values.T.tolist()
    return columns


def _list(values: Matrix) -> list[float]:
    plain: list[float] = values.tolist()
    return plain


def _notes(config: Config) -> list[str]:
    weak = int(config["weak"])
    notes = [
        f"{plural(config['seeds'], 'seed')}, {config['clients']} clients with "
        f"{plural(config['samples'], 'sample')} "
        f"and {config['atoms']} atoms each, {N_GLOBAL} of them shared; {config['start']} start.",
        "Both strategies begin with the same dictionaries and take as many local iterations.",
    ]
    if weak:
        notes.append(f"The last {weak} clients are weak: {config['weak_samples']} samples each.")
    return notes
