"""Rounds on Flower's simulation engine (Ray): PerMA against an empty train handler.

The empty rounds are asked for by a server as Flower's own strategies ask, and by one that has the
engine wait as little as this library's strategies do.

Run from the repository's root: ``python benchmarks/engines.py``; it writes
``benchmarks/results/engines.json`` and the table of it, ``engines.md``. Some minutes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
from _measure import main
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from flwr_perdl.protocol.records import ARRAYS, CONFIG
from flwr_perdl.protocol.strategy import poll_faster
from perdl_experiments.engine import federate, on_ray
from perdl_experiments.studies import configure, find, synthetic

CLIENTS = 200
#: Rounds of a run, and how many are left out: in the first two, workers start and plant data.
ROUNDS, WARM = 12, 2
#: Runs of each, in turn; the median of all their rounds is reported.
TIMES = 5

empty = ClientApp()


@empty.train()
def train(message: Message, context: Context) -> Message:
    """Return what was sent."""
    return Message(message.content, reply_to=message)


def perma(config: synthetic.Config) -> list[float]:
    """Return when each round of a run of `synthetic` was over."""
    ends: list[float] = []
    federate(
        synthetic,
        replace(config, rounds=ROUNDS),
        engine="ray",
        fraction_evaluate=0.0,
        on_round=lambda report: ends.append(time.perf_counter()),
    )
    return ends


def nothing(atoms: np.ndarray, waiting: Callable[[Grid], Any]) -> list[float]:
    """Return when each round was over in which as many clients return as many numbers."""

    def serve(grid: Grid) -> list[float]:
        with waiting(grid):
            return ask(grid)

    def ask(grid: Grid) -> list[float]:
        nodes, ends = list(grid.get_node_ids()), []
        while len(nodes) < CLIENTS:
            time.sleep(0.1)
            nodes = list(grid.get_node_ids())
        for round_ in range(1, ROUNDS + 1):
            records = {ARRAYS: ArrayRecord([atoms]), CONFIG: ConfigRecord({"server-round": round_})}
            content = RecordDict(records)
            requests = [Message(content, node, MessageType.TRAIN) for node in nodes]
            assert len(list(grid.send_and_receive(requests))) == CLIENTS
            ends.append(time.perf_counter())
        return ends

    return on_ray(serve, empty, CLIENTS)


def ratios() -> dict[str, Any]:
    """Measure times."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    config = configure(find("synthetic"), clients=CLIENTS, options={"seeds": 1})
    atoms = federate(synthetic, replace(config, rounds=1)).arrays[0]  # as many numbers
    runs: dict[str, Callable[[], list[float]]] = {
        "perma": lambda: perma(config),
        "empty": lambda: nothing(atoms, lambda grid: nullcontext()),
        "poll_faster": lambda: nothing(atoms, poll_faster),
    }
    rounds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(TIMES):
        for name, run in runs.items():
            rounds[name] += np.diff(run())[WARM:].tolist()
    took = {name: float(np.median(seconds)) for name, seconds in rounds.items()}
    compared = {
        "empty handler / PerMA, a round on Ray": took["empty"] / took["perma"],
        "empty handler, waiting as PerMA / PerMA, a round on Ray": took["poll_faster"]
        / took["perma"],
    }
    return {"ratios": compared, "seconds": took}


def tables(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    perma, empty, waiting = (results["seconds"][n] for n in ("perma", "empty", "poll_faster"))
    return (
        f"A round of `synthetic` with {CLIENTS} clients on Flower's simulation engine: "
        f"{perma:.2f} s; one of clients that return what they are sent: {empty:.2f} s. "
        f"PerMA's takes {100 * (perma / empty - 1):.0f} % longer. Its strategy has the engine wait "
        f"less than it does of its own accord; with that the empty round takes {waiting:.2f} s, "
        f"and PerMA's {100 * (perma / waiting - 1):.0f} % longer.\n"
    )


if __name__ == "__main__":
    main("engines", (__doc__ or "").splitlines()[0], ratios, dict, tables)
