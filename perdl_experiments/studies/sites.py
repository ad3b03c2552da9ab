"""PerMA as real sites run it: every node has a file of its own, and the server sees no data.

A node reads the file that its node config names (``data``); in process, and under Ray, client i
reads the i-th file of a folder. A tenth of each file is held out, by seed, and measured at its
node: nothing is compared with pooled data, which nobody has.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from flwr.app import Context

from flwr_perdl._checks import Matrix, check_array, check_count
from flwr_perdl._random import DATA, spawn
from flwr_perdl._records import NUM_EXAMPLES, PARTITION_ID
from flwr_perdl.clients import DictionaryClient
from flwr_perdl.clients.app import identify
from flwr_perdl.strategies import PerMA
from flwr_perdl.strategies._conversation import EVALUATE
from perdl_experiments.data import cached_by_file, read_arrays
from perdl_experiments.engine import Config
from perdl_experiments.outcome import Outcome, Picture, Table
from perdl_experiments.studies._experiment import (
    MIN_SUPPORT,
    Federate,
    Keep,
    Value,
    make_learner,
    make_strategy,
    private,
)
from perdl_experiments.words import plural

NAME = "sites"
ABOUT = "PerMA on real sites: every node has its own file (--data FOLDER, or its node config)"
SOURCE = "Liang et al., NeurIPS 2023, Algorithm 1"
DEFAULTS: dict[str, Value] = {
    "clients": 0,
    "rounds": 20,
    "seed": 0,
    "data": "",
    "n_atoms": 24,
    "n_global": "auto",
    "local_steps": 1,
    "aggregation": "statistics",
    "matching": "consensus",
    "learner": "orthogonal",
    "min_support": MIN_SUPPORT,
}
HELP: dict[str, str] = {
    "clients": "number of clients; 0: one per file",
    "data": "a folder with a file per client",
    "n_global": "of which global: `auto`, or a number",
}
FIGURES: tuple[str, ...] = ("error.png",)
ERROR = "mse"


def files(folder: str | Path) -> list[str]:
    """Return the ``.npz`` files of a folder, sorted by name.

    Raises
    ------
    ValueError
        If it is no folder, or holds fewer than two.
    """
    found = sorted(str(path) for path in Path(folder).glob("*.npz")) if folder else []
    if len(found) < 2:
        raise ValueError(f"data must be a folder with a file per client, got {str(folder)!r}.")
    return found


def client(context: Context, config: Config) -> DictionaryClient:
    """Return the client of this node, on the file that its node config, or the folder, names."""
    partition = int(identify(context)[PARTITION_ID])
    own = context.node_config.get("data")
    path = str(own) if own else files(str(config["data"]))[partition]
    train, held_out = _load(path, partition, int(config["seed"]))
    return DictionaryClient(
        train,
        make_learner(config, int(config["n_atoms"])),
        context,
        evaluation={"": held_out},
        **private(config),
    )


def strategy(config: Config, **options: Any) -> PerMA:
    """Return the strategy; ``options`` are the server's own. Clients evaluate once, at the end."""
    wanted = str(config["n_global"])
    n_global: int | Literal["auto"] = "auto" if wanted == "auto" else _number(wanted)
    return make_strategy(config, n_global, {"evaluate_every": int(config["rounds"]), **options})


def federations(config: Config) -> list[Config]:
    """Return the config of the one federation; without a number of clients, one per file."""
    data, clients = str(config["data"]), int(config["clients"])
    if clients and not data:  # every node has a file of its own
        return [config]
    n_files = len(files(data))
    if clients > n_files:
        raise ValueError(f"clients must be at most {n_files}, the files in {data}, got {clients}.")
    return [{**config, "clients": clients or n_files}]


def run(config: Config, federate: Federate, keep: Keep) -> Outcome:
    """Run the federation, and tell what the clients measured."""
    federated = federate(federations(config)[0])
    atoms = federated.arrays[0]
    training = [report.aggregate["mse"] for report in federated.history if report.step != EVALUATE]
    measured = {
        partition: found
        for report in federated.history
        if report.step == EVALUATE and report.round == federated.rounds
        for partition, found in report.metrics.items()
    }
    return Outcome(
        metrics={
            "n_global": len(atoms),
            **{name: _mean(measured, name) for name in ("mse_global", "mse_full")},
        },
        curves={"mse_training": training},
        arrays={"global_atoms": atoms},
        tables=[_table(measured)],
        pictures=_pictures(training),
        notes=[
            f"{len(measured)} nodes, each on a file of its own, and "
            f"{plural(len(atoms), 'global atom')} of "
            f"{atoms.shape[1]} features. Errors are of the tenth that each node holds out, coded "
            "by its own learner."
        ],
        rounds=federated.rounds,
        floats_up=federated.floats_up,
        floats_down=federated.floats_down,
    )


@cached_by_file(maxsize=64)
def _load(path: str, partition: int, seed: int) -> tuple[Matrix, Matrix]:
    """Return the samples to learn from, and those held out."""
    (given,) = read_arrays(path, "X")
    X = check_array(f"X in {path}", given, min_rows=2)
    order = spawn(seed, DATA, partition).permutation(len(X))
    held_out = max(1, len(X) // 10)
    return X[order[held_out:]], X[order[:held_out]]


def _number(text: str) -> int:
    try:
        return check_count("n_global", int(text), 1)
    except ValueError:
        raise ValueError(f"n_global must be 'auto' or at least 1, got {text!r}.") from None


def _mean(measured: Mapping[int, Mapping[str, float]], name: str) -> float:
    weights = [found[NUM_EXAMPLES] for found in measured.values()]
    return float(np.average([found[name] for found in measured.values()], weights=weights))


def _table(measured: Mapping[int, Mapping[str, float]]) -> Table:
    rows = [
        [str(who), *(f"{found[name]:.6g}" for name in (NUM_EXAMPLES, "mse_global", "mse_full"))]
        for who, found in measured.items()
    ]
    return Table(
        "Held-out samples of every node",
        "Mean squared error of the samples that the node holds out, with the global atoms alone "
        "and with its local atoms besides.",
        ["node", "samples", "global", "global + local"],
        rows,
    )


def _pictures(training: list[float]) -> list[Picture]:
    from perdl_experiments import plots  # an extra: clients must not need it

    return [
        Picture(
            "error",
            "Error against rounds",
            "Mean squared error of each node's dictionary on the samples it learns from; the mean "
            "over nodes. Round 1 is the matching round.",
            plots.lines({"PerMA": training}, x="communication round", y="mean squared error"),
        )
    ]
