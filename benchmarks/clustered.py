"""ClusteredFedAvg beside Flower's FedAvg: a client's share of a round, in processor time.

Run from the repository's root: ``python benchmarks/clustered.py``; it writes
``benchmarks/results/clustered.json`` and the table of it, ``clustered.md``. Under two minutes. The
clients train and evaluate nothing: what is measured is the strategy, the messages and the averages
alone. The strategies run in turn: in process, then, with one model, on Flower's simulation engine
(Ray), where the time is that of all processes. A run's time is the median of its rounds but the
first.
"""

from __future__ import annotations

import logging
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from _measure import cell, in_turn, main
from flwr.app import ArrayRecord, Context
from flwr.client import NumPyClient
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from flwr_perdl.clients import client_app
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import ClusteredFedAvg
from perdl_experiments.engine import on_ray
from perdl_experiments.render import markdown_table

CLIENTS, ROUNDS, TURNS = 20, 4, 5
#: On Ray: rounds of a run, runs of each strategy.
RAY_ROUNDS, RAY_TURNS = 5, 3
#: Shapes of a model's arrays.
MODELS = {
    "650": [(64, 10), (10,)],
    "55,000": [(784, 64), (64,), (64, 64), (64,), (64, 10), (10,)],
    "1,000,000": [(1000, 1000)],
}
#: Federations on Ray: clients, those asked per round, and models.
ON_RAY: list[tuple[int, int, list[str]]] = [(40, 40, list(MODELS)), (1000, 100, ["650"])]
OURS = {
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


def seconds(name: str, model: list[np.ndarray]) -> float:
    """Return a strategy's processor time of a round, per client."""
    ends: list[float] = []
    strategy: Any = FedAvg(fraction_evaluate=0.0, min_available_nodes=CLIENTS)
    if name in OURS:
        strategy = ClusteredFedAvg(**OURS[name], fraction_evaluate=0.0, num_clients=CLIENTS)
    strategy.start(
        InProcessGrid(client_app(idle), CLIENTS),
        ArrayRecord(model),
        num_rounds=ROUNDS,
        evaluate_fn=lambda round_, arrays: ends.append(time.process_time()),
    )
    return float(np.median(np.diff(ends)[1:])) / CLIENTS


def on_flowers_engine() -> dict[str, Any]:
    """Return the times of all federations on Ray."""
    return {"ray": [row for federation in ON_RAY for row in rounds_on_ray(*federation)]}


def rounds_on_ray(clients: int, asked: int, sizes: list[str]) -> list[dict[str, Any]]:
    """Return processor and wall-clock time of a round, per client that is asked."""
    rng = np.random.default_rng(0)
    models = {size: [rng.standard_normal(shape) for shape in MODELS[size]] for size in sizes}
    options: dict[str, Any] = {"fraction_train": asked / clients, "fraction_evaluate": 0.0}
    took: dict[tuple[str, str], np.ndarray] = {}

    def rounds(grid: Grid, name: str, model: list[np.ndarray]) -> Any:
        ends: list[tuple[float, float]] = []
        strategy: Any = FedAvg(min_available_nodes=clients, **options)
        if name in OURS:
            strategy = ClusteredFedAvg(**OURS[name], num_clients=clients, **options)
        strategy.start(
            grid,
            ArrayRecord(model),
            num_rounds=RAY_ROUNDS,
            evaluate_fn=lambda r, a: ends.append((all_processes(), time.perf_counter())),
        )
        each = np.diff(ends, axis=0)[1:]  # the first also waits for the nodes
        return np.median(each, axis=0) / asked

    def serve(grid: Grid) -> None:
        runs = {
            (size, name): partial(rounds, grid, name, model)
            for size, model in models.items()
            for name in ("FedAvg", "k = 1")
        }
        took.update(in_turn(runs, RAY_TURNS, lambda run: run()))

    logging.getLogger("flwr").setLevel(logging.ERROR)
    on_ray(serve, client_app(idle), clients)
    found = []
    for size in sizes:
        row: dict[str, Any] = {"clients": clients, "asked": asked, "size": size}
        for name in ("FedAvg", "k = 1"):
            row[name] = dict(zip(("processor", "wall"), took[size, name].T, strict=True))
        found.append(row)
    return found


def all_processes() -> float:
    """Return the processor time of this process and all that it has started, in seconds (Linux)."""
    parents, ticks = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        pid = int(path.parent.name)
        parents[pid], ticks[pid] = int(fields[1]), sum(map(int, fields[11:15]))
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(ticks[pid] for pid in ours) / os.sysconf("SC_CLK_TCK")


def ratios() -> dict[str, Any]:
    """Measure times."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    rng = np.random.default_rng(0)
    runs = {}
    for size, shapes in MODELS.items():
        model = [rng.standard_normal(shape) for shape in shapes]
        for name in ("FedAvg", *OURS):
            runs[f"{name}, {size} numbers"] = partial(seconds, name, model)
    took = in_turn(runs, TURNS, lambda run: run())
    compared = {
        f"FedAvg / {name}, {size} numbers": took[f"FedAvg, {size} numbers"]
        / took[f"{name}, {size} numbers"]
        for name in OURS
        for size in MODELS
    }
    return {"ratios": compared, "seconds": took}


def beside(base: np.ndarray, own: list[np.ndarray]) -> list[str]:
    """Return cells of FedAvg's time, and of ours, with the ratio of each turn."""
    shares = [f"{1e3 * np.median(s):.3g}: {cell(s / base)}" for s in own]
    return [f"{1e3 * np.median(base):.3g}", *shares]


def tables(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    here, ray = [], []
    for size in MODELS:
        base, *own = (results["seconds"][f"{of}, {size} numbers"] for of in ("FedAvg", *OURS))
        here.append([size, *beside(base, own)])
    for row in results["ray"]:
        ray.append([f"{row['clients']:,}, {row['asked']} asked", row["size"]])
        for clock in ("processor", "wall"):
            ray[-1] += beside(row["FedAvg"][clock], [row["k = 1"][clock]])
    size, wall = "numbers in a model", ["FedAvg, wall clock", "k = 1, wall clock"]
    return (
        f"Milliseconds per client and round, {CLIENTS} clients in process that train nothing "
        f"(how many times FedAvg's): medians of {TURNS} turns, and the ratios' range:\n\n"
        f"{markdown_table([size, 'FedAvg', *OURS], here)}\n"
        "The same on Flower's simulation engine (Ray), per client that is asked, processor time of "
        f"all processes, and wall-clock time; {RAY_TURNS} turns:\n\n"
        + markdown_table(["clients", size, "FedAvg", "k = 1", *wall], ray)
    )


if __name__ == "__main__":
    main("clustered", (__doc__ or "").splitlines()[0], ratios, on_flowers_engine, tables)
