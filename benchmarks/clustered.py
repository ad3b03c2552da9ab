"""ClusteredFedAvg beside Flower's FedAvg: a client's share of a round, in processor time.

Run from the repository's root: ``python benchmarks/clustered.py``; it writes
``benchmarks/results/clustered.json`` and the table of it, ``clustered.md``. Under a minute. The
clients train and evaluate nothing: what is measured is the strategy, the
messages and the averages alone. Both strategies run in process, in turn.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
from _measure import main
from flwr.app import ArrayRecord, Context
from flwr.client import NumPyClient
from flwr.serverapp.strategy import FedAvg

from flwr_perdl.clients import client_app
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import ClusteredFedAvg

CLIENTS, ROUNDS, TIMES = 20, 4, 3
#: Shapes of a model's arrays.
MODELS = {
    "650": [(64, 10), (10,)],
    "55,000": [(784, 64), (64,), (64, 64), (64,), (64, 10), (10,)],
    "1,000,000": [(1000, 1000)],
}
STRATEGIES = {
    "k = 1": {"k": 1},
    "k = 4, a choice in every round": {"k": 4, "start": "random"},
    "k = 4, between choices": {"k": 4, "start": "random", "choose_every": ROUNDS},
}


class Idle(NumPyClient):
    """Returns what it receives."""

    def fit(self, parameters: Any, config: Any) -> Any:
        """Train nothing."""
        return parameters, 10, {}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        """Evaluate nothing."""
        return 1.0, 10, {}


def idle(context: Context) -> Idle:
    """Return a client."""
    return Idle()


def seconds(strategy: Any, model: list[np.ndarray]) -> float:
    """Return the least processor time of a round but the first, per client."""
    ends: list[float] = []
    strategy.start(
        InProcessGrid(client_app(idle), CLIENTS),
        ArrayRecord(model),
        num_rounds=ROUNDS,
        evaluate_fn=lambda round_, arrays: ends.append(time.process_time()),
    )
    return float(np.diff(ends)[1:].min()) / CLIENTS


def ratios() -> dict[str, Any]:
    """Measure times, in turn."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    rng = np.random.default_rng(0)
    least: dict[str, float] = {}
    for _ in range(TIMES):
        for size, shapes in MODELS.items():
            model = [rng.standard_normal(shape) for shape in shapes]
            runs = {"FedAvg": FedAvg(fraction_evaluate=0.0, min_available_nodes=CLIENTS)}
            runs |= {
                name: ClusteredFedAvg(**options, fraction_evaluate=0.0, num_clients=CLIENTS)
                for name, options in STRATEGIES.items()
            }
            for name, strategy in runs.items():
                key = f"{name}, {size} numbers"
                least[key] = min(least.get(key, np.inf), seconds(strategy, model))
    compared = {
        f"FedAvg / {name}, {size} numbers": least[f"FedAvg, {size} numbers"]
        / least[f"{name}, {size} numbers"]
        for name in STRATEGIES
        for size in MODELS
    }
    return {"ratios": compared, "seconds": least}


def tables(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = [
        f"Milliseconds per client and round, {CLIENTS} clients in process that train nothing "
        "(times FedAvg's):",
        "",
        f"| numbers in a model | FedAvg | {' | '.join(STRATEGIES)} |",
        f"|---:|---:|{'---:|' * len(STRATEGIES)}",
    ]
    for size in MODELS:
        base = results["seconds"][f"FedAvg, {size} numbers"]
        row = [f"{1e3 * base:.3f}"]
        for name in STRATEGIES:
            own = results["seconds"][f"{name}, {size} numbers"]
            row.append(f"{1e3 * own:.3f} ({own / base:.2f})")
        lines.append(f"| {size} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main("clustered", (__doc__ or "").splitlines()[0], ratios, dict, tables)
