"""What half floats and top-k cost and save: accuracy and bytes on scikit-learn's digits.

Run from the repository's root: ``python benchmarks/communication.py``; it writes
``benchmarks/results/communication.json`` and its table. Some two minutes. Networks with 32 hidden
units in float32, 40 rounds: PersonalizedFedAvg with a private head, 20 clients that permute the
labels; ClusteredFedAvg with four clusters, 20 clients in four groups that turn the images. Bytes
are those of all arrays in training's messages, their headers included.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from _digits import CLIENTS, ROUNDS, digits
from _measure import cell, main
from flwr.app import MessageType

from flwr_perdl.network import TopK
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import ClusteredFedAvg, PersonalizedFedAvg, ServerSettings
from perdl_experiments.render import markdown_table

SEEDS = 3
WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "float16": {"transport": "float16"},
    "top-k, a tenth": {"compression": TopK(0.1)},
    "float16 and top-k, a tenth": {"transport": "float16", "compression": TopK(0.1)},
}
STRATEGIES: dict[str, tuple[str, Callable[..., Any]]] = {
    "PersonalizedFedAvg": (
        "labels",
        lambda **options: PersonalizedFedAvg(["head.*"], **options),
    ),
    "ClusteredFedAvg": (
        "turned",
        lambda **options: ClusteredFedAvg(4, start_rounds=5, choose_every=5, **options),
    ),
}


class CountingGrid(InProcessGrid):
    """Counts the bytes of training's arrays, down and up."""

    n_bytes = 0, 0

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        """Push messages, and return the replies."""
        asked = list(messages)
        replies = list(super().send_and_receive(asked, timeout=timeout))
        if any(one.metadata.message_type == MessageType.TRAIN for one in asked):
            down, up = self.n_bytes
            self.n_bytes = down + size(asked), up + size(replies)
        return replies


def size(messages: list[Any]) -> int:
    """Return the bytes of all arrays."""
    records = [one for m in messages for one in m.content.array_records.values()]
    return sum(len(array.data) for record in records for array in record.values())


def run(name: str, way: str, seed: int) -> tuple[float, float, float]:
    """Return the mean accuracy over clients, and kB down and up per client and round."""
    kind, strategy = STRATEGIES[name]
    app, start = digits(kind, seed, np.float32)
    grid = CountingGrid(app, CLIENTS)
    server = ServerSettings(evaluate_every=ROUNDS)
    running = strategy(seed=seed, server=server, **WAYS[way])
    running.start(grid, start, num_rounds=ROUNDS)
    measured = running.history[-1].metrics.values()
    per = 1000 * CLIENTS * ROUNDS
    return (
        float(np.mean([one["accuracy"] for one in measured])),
        grid.n_bytes[0] / per,
        grid.n_bytes[1] / per,
    )


def measured() -> dict[str, Any]:
    """Measure all ways of both strategies."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    found = {
        name: {way: np.array([run(name, way, seed) for seed in range(SEEDS)]).T for way in WAYS}
        for name in STRATEGIES
    }
    return {"found": found}


def tables(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    heads = ["", "on the wire", "accuracy", "kB down", "kB up"]
    rows = [
        [name, way, cell(one[0], ".3f"), f"{np.median(one[1]):.1f}", f"{np.median(one[2]):.1f}"]
        for name, ways in results["found"].items()
        for way, one in ways.items()
    ]
    return (
        f"Digits, {CLIENTS} clients of 40 images, {ROUNDS} rounds, medians of {SEEDS} seeds and "
        f"their range; kB per client and round.\n\n{markdown_table(heads, rows)}"
    )


if __name__ == "__main__":
    main("communication", (__doc__ or "").splitlines()[0], measured, dict, tables)
