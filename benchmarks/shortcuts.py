"""What each shortcut of ``_shortcuts.py`` and ``_memory.py`` saves in processor time.

Run from the repository's root: ``python benchmarks/shortcuts.py``; it writes
``benchmarks/results/shortcuts.json`` and its table, ``shortcuts.md``. About three minutes. Each
measurement is a process of its own, since a shortcut is taken out before anything else is loaded.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
from _measure import main
from flwr.app import Array, ArrayRecord, Context

from flwr_perdl import _memory, _shortcuts


def _updated(record: Any, entries: Mapping[str, Any]) -> Any:
    record.update(entries)
    return record


#: What takes a shortcut's place.
WITHOUT: dict[str, tuple[str, Callable[..., Any]]] = {
    "filled": ("`record.update(entries)`", _updated),
    "entries": ("the record itself", lambda record: record),
    "encode": ("`Array(array)`", lambda array: Array(np.asarray(array, order="C"))),
    "alike": ("`Message(...)` for every message", lambda *args, **changed: None),
    "rare_collections": ("the garbage collector's thresholds", nullcontext),
    "keep_freed_memory": ("the C library's threshold", lambda: None),
}
#: Clients, features, atoms and samples of a PerMA round; and dual inference.
ROUNDS = {"1,000 clients": (1000, 6, 6, 200), "4,000 clients": (4000, 6, 6, 50)}
INFERENCE = "inference"
TIMES = 2


def perma(n_clients: int, d: int, r: int, n: int) -> float:
    """Return the least processor time of a round, in seconds."""
    from flwr_perdl.clients import DictionaryClient, client_app
    from flwr_perdl.dictionary import OrthogonalLearner, warm_start
    from flwr_perdl.simulations import InProcessGrid
    from flwr_perdl.strategies import PerMA, ServerSettings

    rng = np.random.default_rng(0)
    atoms = np.linalg.qr(rng.standard_normal((d, r)))[0].T
    X = rng.standard_normal((n_clients, n, r)) @ atoms
    start, learner = partial(warm_start, n_iter=0), OrthogonalLearner(r)

    def make(context: Context) -> DictionaryClient:
        own = X[int(context.node_config["partition-id"])]
        return DictionaryClient(own, learner, context, start=start)

    ends: list[float] = []
    server = ServerSettings(on_round=lambda report: ends.append(time.process_time()))
    strategy = PerMA(fraction_evaluate=0.0, server=server)
    grid = InProcessGrid(client_app(make), n_clients)
    strategy.start(grid, ArrayRecord([atoms[: r // 2]]), num_rounds=6)
    return float(np.diff(ends).min())


def inference() -> float:
    """Return the least processor time of 100 rounds of dual inference with 196 agents."""
    from flwr_perdl.diffusion import SparseSVD, Topology, infer

    rng = np.random.default_rng(0)
    atoms = rng.standard_normal((196, 1, 100))
    atoms /= np.linalg.norm(atoms, axis=2, keepdims=True)
    topology, X = Topology.erdos_renyi(196, 0.1, seed=1), rng.standard_normal((4, 100))
    taken = []
    for _ in range(TIMES):
        begun = time.process_time()
        infer(SparseSVD(0.1, 0.1), X, list(atoms), topology, n_rounds=100, tolerance=0.0)
        taken.append(time.process_time() - begun)
    return min(taken)


def alone(shortcut: str, workload: str) -> None:
    """Print the seconds of a workload without a shortcut, in this process."""
    logging.disable(logging.INFO)
    if shortcut in WITHOUT:
        home = _shortcuts if hasattr(_shortcuts, shortcut) else _memory
        setattr(home, shortcut, WITHOUT[shortcut][1])
    print(inference() if workload == INFERENCE else perma(*ROUNDS[workload]))


def seconds(shortcut: str, workload: str) -> float:
    """Return what a process of its own prints."""
    command = [sys.executable, __file__, shortcut, workload]
    told = subprocess.run(command, capture_output=True, check=True, text=True)
    return float(told.stdout.split()[-1])


def ratios() -> dict[str, Any]:
    """Time all workloads with all shortcuts, and without each, in turn."""
    least: dict[tuple[str, str], float] = {}
    workloads = (*ROUNDS, INFERENCE)
    for _ in range(TIMES):
        for workload in workloads:
            for shortcut in ("none", *WITHOUT):
                key = shortcut, workload
                least[key] = min(least.get(key, np.inf), seconds(*key))
    return {
        "ratios": {
            f"{shortcut}, {workload}": least[shortcut, workload] / least["none", workload]
            for shortcut in WITHOUT
            for workload in workloads
        }
    }


def tables(results: dict[str, Any]) -> str:
    """Return the table of all ratios."""
    workloads = (*ROUNDS, INFERENCE)
    lines = [
        f"| shortcut | instead | {' | '.join(workloads)} |",
        f"|---|---|{'---:|' * len(workloads)}",
    ]
    for shortcut, (instead, _) in WITHOUT.items():
        found = (results["ratios"][f"{shortcut}, {workload}"] for workload in workloads)
        lines.append(f"| `{shortcut}` | {instead} | {' | '.join(f'{x:.2f}' for x in found)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] in ("none", *WITHOUT):
        alone(*sys.argv[1:])
    else:
        main("shortcuts", str(__doc__), ratios, dict, tables)
