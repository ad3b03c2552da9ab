"""What local differential privacy costs: epsilon against the error of PerMA's atoms, FedX's models.

Clients begin from given atoms or models that are somewhat off, as from a pilot on public data. Run
from the repository's root: ``python benchmarks/privacy.py``; it writes
``benchmarks/results/privacy.json`` and its table, ``privacy.md``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from _measure import main
from flwr.app import ArrayRecord, Context
from flwr.client import NumPyClient

from flwr_perdl.clients import DictionaryClient, RegressionClient, client_app
from flwr_perdl.clients.privacy import LocalPrivacy
from flwr_perdl.dictionary import (
    OrthogonalLearner,
    dictionary_distance,
    normalize_atoms,
    warm_start,
)
from flwr_perdl.regression import Refinement, model_error
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import FedX, PerMA, ProtocolStrategy
from perdl_experiments.data import planted_clients
from perdl_experiments.mixed_regression_data import mixed_regression
from perdl_experiments.render import markdown_table

EPSILONS = (1.0, 3.0, 10.0, 30.0, 100.0)
DELTA = 1e-5
CLIENTS = (100, 1000)
SEEDS = 3


class Task(NamedTuple):
    """A federation with a planted truth, and what it begins from."""

    make_client: Callable[[Context], NumPyClient]
    strategy: ProtocolStrategy
    start: Any
    error: Callable[[Any], float]


def atoms(seed: int, n_clients: int) -> Task:
    """PerMA: three shared atoms of eight, 100 samples per client, noise 0.05."""
    rng = np.random.default_rng(seed)
    planted = planted_clients(rng, [8] * n_clients, [100] * n_clients, 3, n_features=8, noise=0.05)
    truth = planted.global_atoms
    start = normalize_atoms(truth + 0.1 * rng.standard_normal(truth.shape))

    def make_client(context: Context) -> NumPyClient:
        X = planted.samples[int(context.node_config["partition-id"])]
        first = partial(warm_start, n_iter=20)
        return DictionaryClient(X, OrthogonalLearner(8), context, min_support=0, start=first)

    strategy = PerMA(3, aggregation="mean", local_steps=8, fraction_evaluate=0.0)
    return Task(make_client, strategy, start, lambda found: dictionary_distance(found, truth))


def models(seed: int, n_clients: int) -> Task:
    """FedX: three models of five coefficients, 50 points per client, noise 0.2."""
    rng = np.random.default_rng(seed)
    data = mixed_regression(np.full(n_clients, 50), np.full(3, 1 / 3), rng, d=5)
    start = data.theta + 0.15 * rng.standard_normal(data.theta.shape)

    def make_client(context: Context) -> NumPyClient:
        i = int(context.node_config["partition-id"])
        return RegressionClient(data.X[i], data.y[i], context)

    phase_2 = Refinement(n_steps=5, step_size=0.2, momentum=False, check_every=0)
    strategy = FedX(3, phase_2=phase_2, fraction_evaluate=0.0)
    return Task(make_client, strategy, start, lambda found: model_error(found, data.theta))


#: Title, task, rounds, clip.
TASKS = {
    "PerMA's atoms, d1,2": (atoms, 1, 0.5),
    "FedX's models, largest error": (models, 3, 0.3),
}


def seeded(seed: int) -> Callable[[], np.random.Generator]:
    """Return what gives every reply the same generator, so that results are reproducible."""
    rng = np.random.default_rng(seed)
    return lambda: rng


def measure(
    make: Callable[[int, int], Task], n_rounds: int, clip: float, n_clients: int
) -> dict[str, float]:
    """Return the median errors over seeds: at the start, without privacy, and per epsilon."""
    found: dict[str, list[float]] = {}
    for seed in range(SEEDS):
        for epsilon in (*EPSILONS, None):
            task = make(seed, n_clients)
            noise = seeded(seed)
            mods = [LocalPrivacy(epsilon, DELTA, n_rounds, clip, rng=noise)] if epsilon else []
            grid = InProcessGrid(client_app(task.make_client, train_mods=mods), n_clients)
            result = task.strategy.start(grid, ArrayRecord([task.start]), num_rounds=n_rounds)
            error = task.error(result.arrays.to_numpy_ndarrays()[0])
            found.setdefault("none" if epsilon is None else f"{epsilon:g}", []).append(error)
        found.setdefault("start", []).append(task.error(task.start))
    return {name: float(np.median(errors)) for name, errors in found.items()}


def table(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    columns = [*(f"{epsilon:g}" for epsilon in EPSILONS), "none", "start"]
    heads = [*(f"ε = {name}" for name in columns[:-2]), "no privacy", "at the start"]
    rows = [
        [
            *(str(row[key]) for key in ("what", "clients", "rounds", "clip")),
            *(f"{row['medians'][name]:.3f}" for name in columns),
        ]
        for row in results["errors"]
    ]
    return markdown_table(["", "clients", "rounds", "clip", *heads], rows)


def rest() -> dict[str, Any]:
    """Measure errors."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    errors = []
    for (what, (make, n_rounds, clip)), n_clients in product(TASKS.items(), CLIENTS):
        given = {"what": what, "clients": n_clients, "rounds": n_rounds, "clip": clip}
        errors.append({**given, "medians": measure(make, n_rounds, clip, n_clients)})
    return {"seeds": SEEDS, "delta": DELTA, "errors": errors}


if __name__ == "__main__":
    main("privacy", (__doc__ or "").splitlines()[0], dict, rest, table)
