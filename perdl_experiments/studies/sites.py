"""PerMA at real sites: every node has its own file, and the server sees no data.

A node reads the file that its node config names (``data``); in process, and under Ray, client i
reads the i-th file of a folder. A tenth of each file is held out, by seed, and evaluated at its
node; there is no pooled baseline. To show whether federating pays, each node also evaluates local
training with five times the iterations; and where the number of shared atoms is chosen, every
candidate, from none to all.

``--data FOLDER`` holds a file per client; in a deployment a node's config names its own file.
A tenth of each file is held out. NaN is a missing entry, with ``learner`` "lasso" or "mod".

Metrics: ``mse_alone``, ``mse_global``, ``mse_full`` (held-out samples coded with
the atoms of local training, with the global atoms, and with global and local ones; means over
samples), ``n_global``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from flwr.app import Context

from flwr_perdl.clients import DictionaryClient
from flwr_perdl.clients.perma import held_out_errors
from flwr_perdl.core.checks import Matrix, check_array
from flwr_perdl.dictionary import reconstruct
from flwr_perdl.protocol.client_state import identify
from flwr_perdl.protocol.records import EVALUATE, NUM_EXAMPLES, PARTITION_ID
from flwr_perdl.random import DATA, spawn
from flwr_perdl.strategies import PerMA
from perdl_experiments.baselines import learn
from perdl_experiments.data import cached_by_file, read_arrays
from perdl_experiments.outcome import Outcome
from perdl_experiments.render import Record
from perdl_experiments.studies._experiment import Federate, Keep, LearnerConfig

#: So many nodes that lost are named.
_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class Config(LearnerConfig):
    """The options of sites.toml."""

    n_global: int | Literal["auto"]


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
    path = str(own) if own else files(config.data)[partition]
    train, held_out = _load(path, partition, config.seed)
    return DictionaryClient(
        train,
        config.make_learner(),
        context,
        evaluation={"": held_out},
        extra_metrics=partial(_alone, train, held_out, partition, config),
        **config.private,
    )


def _alone(
    train: Matrix, held_out: Matrix, partition: int, config: Config, *atoms: Matrix
) -> dict[str, float]:
    """Return the error of local training."""
    learner = config.make_learner()
    D = learn(train, learner, spawn(config.seed, partition), config.rounds)
    rest = held_out - reconstruct(learner.code(held_out, D), D)
    return {"mse_alone": float(np.nanmean(rest**2))}


def strategy(config: Config, **options: Any) -> PerMA:
    """Return the strategy; ``options`` are the server's own. Clients evaluate once, at the end."""
    return config.strategy(config.n_global, **{"evaluate_every": config.rounds, **options})


def federations(config: Config) -> list[Config]:
    """Return the config of the one federation; without a number of clients, one per file."""
    data, clients = config.data, config.clients
    if clients and not data:  # every node has a file of its own
        return [config]
    n_files = len(files(data))
    if clients > n_files:
        raise ValueError(f"clients must be at most {n_files}, the files in {data}, got {clients}.")
    return [replace(config, clients=clients or n_files)]


def run(config: Config, federate: Federate, keep: Keep) -> Outcome:
    """Run the federation, and tell what the clients measured."""
    federated = federate(federations(config)[0])
    atoms = federated.arrays[0]
    training = [report.aggregate["mse"] for report in federated.history if report.step != EVALUATE]
    measured = {
        federated.names[partition]: found
        for report in federated.history
        if report.step == EVALUATE and report.round == federated.rounds
        for partition, found in report.metrics.items()
    }
    tried = {
        (federated.names[partition], n): error
        for report in federated.history  # the last round counts
        for partition, found in report.metrics.items()
        for n, error in held_out_errors(found).items()
    }
    weights = [found[NUM_EXAMPLES] for found in measured.values()]
    names = ("mse_alone", "mse_global", "mse_full")
    errors = {name: [found[name] for found in measured.values()] for name in names}
    return Outcome(
        records=[
            Record("n_global", len(atoms)),
            *(
                Record(name, float(np.average(values, weights=weights)))
                for name, values in errors.items()
            ),
            *(
                Record(f"node_{name}", found[name], parameters={"node": who})
                for who, found in measured.items()
                for name in (NUM_EXAMPLES, *errors)
            ),
            *(
                Record("tried", error, parameters={"node": who, "shared": n})
                for (who, n), error in tried.items()
            ),
        ],
        curves={"mse_training": training},
        arrays={"global_atoms": atoms},
        figures=_figures(training),
        **federated.cost,
        facts={
            "n_nodes": len(measured),
            "found": len(atoms),
            "n_features": atoms.shape[1],
            "paid": _paid(measured),
        },
    )


def _paid(measured: Mapping[str, Mapping[str, float]]) -> str:
    """Return for whom federating paid, in words."""
    lost = [who for who, found in measured.items() if found["mse_full"] >= found["mse_alone"]]
    if not lost:
        return "Federating pays off for every node"
    named = ", ".join(lost[:_NAMED]) + (f" and {len(lost) - _NAMED} more" * (len(lost) > _NAMED))
    if len(lost) == len(measured):
        return f"Federating pays off for no node ({named}): local training is better"
    won = len(measured) - len(lost)
    return f"Federating pays off for {won} of {len(measured)} nodes, not for {named}"


@cached_by_file(maxsize=64)
def _load(path: str, partition: int, seed: int) -> tuple[Matrix, Matrix]:
    """Return the samples to learn from, and those held out."""
    (given,) = read_arrays(path, "X")
    X = check_array(f"X in {path}", given, missing=True)
    X = check_array(f"X in {path}", X[~np.isnan(X).all(axis=1)], min_rows=2, missing=True)
    order = spawn(seed, DATA, partition).permutation(len(X))
    held_out = max(1, len(X) // 10)
    return X[order[held_out:]], X[order[:held_out]]


def _figures(training: list[float]) -> dict[str, Any]:
    from perdl_experiments import plots  # an extra: clients must not need it

    curves = {"PerMA": training}
    return {"error": plots.lines(curves, x="communication round", y="mean squared error")}
