"""What a federation withstands: three clients in ten lie (see `benchmarks/_liars.py`).

PerMA on planted dictionaries with noise of 0.05 on the data, and FedMD with FedX in settings C.1
and C.2: the error over that of the same run in which nobody lies, the largest over seeds, by attack
and rule. Writes results/adversaries.md.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _liars import DATA, MESSAGES, NUDGE, LyingDictionaryClient, regress

from flwr_perdl.clients import DictionaryClient, client_app
from flwr_perdl.dictionary import OrthogonalLearner, dictionary_distance
from flwr_perdl.random import DATA as DRAWS
from flwr_perdl.random import spawn
from flwr_perdl.regression import TwoPhase, model_error
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import PerMA
from perdl_experiments.data import planted_clients
from perdl_experiments.mixed_regression_data import setting

SHARE = 0.3
ATTACKS = (*MESSAGES, NUDGE)
N_CLIENTS, N_ROUNDS = 10, 15
AGGREGATIONS = ("statistics", "geometric-median", "median", "trimmed", "mean")
RULES: Mapping[str, Mapping[str, Any]] = {
    "filtered": {"n_clusters": 3, "robust": "filtered"},
    "filtered, k unknown": {"robust": "filtered"},
    "clip": {"n_clusters": 3, "robust": "clip"},
    "geometric-median": {"n_clusters": 3, "robust": "geometric-median"},
    "mean": {"n_clusters": 3},
}


def perma(aggregation: str, attack: str | None, seed: int) -> float:
    """Return the error of PerMA's global atoms."""
    planted = planted_clients(
        np.random.default_rng(seed),
        [6] * N_CLIENTS,
        [200] * N_CLIENTS,
        3,
        n_features=6,
        noise=0.05,
    )
    learner = OrthogonalLearner(6, threshold=0.15)

    def make_client(context: Any) -> DictionaryClient:
        partition = int(context.node_config["partition-id"])
        X = planted.samples[partition]
        if attack is not None and partition < SHARE * N_CLIENTS:
            return LyingDictionaryClient(X, learner, context, attack=attack)
        return DictionaryClient(X, learner, context)

    strategy = PerMA(3, aggregation=aggregation, fraction_evaluate=0.0, seed=seed)
    result = strategy.start(InProcessGrid(client_app(make_client), N_CLIENTS), num_rounds=N_ROUNDS)
    return dictionary_distance(result.arrays.to_numpy_ndarrays()[0], planted.global_atoms)


def fedx(name: str, rule: str, attack: str | None, seed: int, n_rounds: int) -> float:
    """Return the error of FedX's models."""
    data = setting(name, spawn(seed, DRAWS))
    centers = regress(data, TwoPhase(**RULES[rule]), n_rounds, attack=attack, seed=seed)
    return model_error(centers, data.theta)


def row(name: str, clean: Sequence[float], errors: Mapping[str, Sequence[float]]) -> str:
    """Return a line of the table: the largest ratio per attack."""
    cells = [f"{np.max(np.divide(found, clean)):.3g}" for found in errors.values()]
    return f"| {name} | {' | '.join(cells)} |"


def table() -> str:
    """Return all tables."""
    lines = ["PerMA, noise 0.05, 10 clients, 3 seeds (nobody lies, `statistics`: 1):", ""]
    lines += [f"| aggregation | nobody lies | {' | '.join(ATTACKS)} |"]
    lines += ["|" + " --- |" * (2 + len(ATTACKS))]
    seeds = range(3)
    clean = [perma("statistics", None, seed) for seed in seeds]
    for rule in AGGREGATIONS:
        found = {str(a): [perma(rule, a, seed) for seed in seeds] for a in (None, *ATTACKS)}
        lines.append(row(rule, clean, found))
    for name, n_rounds, seeds in (("C1", 60, range(2)), ("C2", 80, range(1))):
        lines += ["", f"FedX, setting {name}, {len(seeds)} seed(s) (nobody lies, mean: 1):", ""]
        lines += [f"| robust | nobody lies | {' | '.join((*ATTACKS, *DATA))} |"]
        lines += ["|" + " --- |" * (2 + len(ATTACKS) + len(DATA))]
        clean = [fedx(name, "mean", None, seed, n_rounds) for seed in seeds]
        for rule in RULES:
            found = {
                str(attack): [fedx(name, rule, attack, seed, n_rounds) for seed in seeds]
                for attack in (None, *ATTACKS, *DATA)
            }
            lines.append(row(rule, clean, found))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    logging.getLogger("flwr").setLevel(logging.ERROR)
    np.seterr(all="ignore")  # means of a million times something overflow: that is what is shown
    text = table()
    (Path(__file__).parent / "results" / "adversaries.md").write_text(text)
    print(text)
