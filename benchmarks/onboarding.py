"""Clients that join after the training beside those that took part, on scikit-learn's digits.

Run from the repository's root: ``python benchmarks/onboarding.py``; it writes
``benchmarks/results/onboarding.json`` and its table. Some three minutes. 20 clients of 40 images to
train by, 20 to choose by and others to measure. All take part in 40 rounds; and five times sixteen
do, and the four others join afterwards by `onboard`, each client once: with PersonalizedFedAvg,
where clients permute the labels, it trains its head up to 40 times; with ClusteredFedAvg, of groups
that turn the images, it takes a cluster.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from _digits import CLIENTS, ROUNDS, digits
from _measure import cell, main

from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import ClusteredFedAvg, PersonalizedFedAvg
from perdl_experiments.render import markdown_table

SEEDS, NEW, FITS = 3, 4, 40
STRATEGIES: dict[str, tuple[str, Callable[..., Any]]] = {
    "PersonalizedFedAvg, labels permuted": (
        "labels",
        lambda **options: PersonalizedFedAvg(["head.*"], **options),
    ),
    "ClusteredFedAvg, images turned": (
        "turned",
        lambda **options: ClusteredFedAvg(4, start_rounds=5, **options),
    ),
}


def run(name: str, seed: int) -> tuple[float, float]:
    """Return the mean accuracy over clients that take part, and over the same where they join."""
    kind, strategy = STRATEGIES[name]
    app, start = digits(kind, seed)

    def grid_of(partitions: Sequence[int]) -> InProcessGrid:
        def node_config(i: int) -> Mapping[str, Any]:
            return {"partition-id": partitions[i]}

        return InProcessGrid(app, len(partitions), node_config=node_config)

    def accuracies(there: Sequence[int], new: Sequence[int] = ()) -> list[float]:
        running, grid = strategy(seed=seed, fraction_evaluate=0.0), grid_of(there)
        running.start(grid, start, num_rounds=ROUNDS)
        if new:
            grid = grid_of(new)
            running.onboard(grid, fits=FITS)
        return [models["own"]["accuracy"] for models in running.compare(grid).values()]

    joined = [
        accuracy
        for part in np.array_split(np.arange(CLIENTS), CLIENTS // NEW)
        for accuracy in accuracies(np.setdiff1d(range(CLIENTS), part).tolist(), part.tolist())
    ]
    return float(np.mean(accuracies(range(CLIENTS)))), float(np.mean(joined))


def measured() -> dict[str, Any]:
    """Measure both strategies."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    found = {name: np.array([run(name, seed) for seed in range(SEEDS)]).T for name in STRATEGIES}
    return {"found": found}


def tables(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    heads = ["accuracy on a client's own images", "took part", "joined afterwards", "difference"]
    rows = [
        [name, *(cell(turns, ".3f") for turns in (one[0], one[1], np.subtract(one[1], one[0])))]
        for name, one in results["found"].items()
    ]
    return (
        f"Digits, {CLIENTS} clients, {ROUNDS} rounds: all take part, or {CLIENTS - NEW} do and "
        f"{NEW} join afterwards, each once. Means over clients, medians of {SEEDS} seeds and their "
        f"range.\n\n"
        f"{markdown_table(heads, rows)}"
    )


if __name__ == "__main__":
    main("onboarding", (__doc__ or "").splitlines()[0], measured, dict, tables)
