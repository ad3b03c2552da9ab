"""Rounds on Flower's simulation engine (Ray): PerMA against an empty train handler.

Run from the repository's root: ``python benchmarks/engines.py``; it writes
``benchmarks/results/engines.json`` and the table of it, ``engines.md``. Some minutes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from _measure import main
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from flwr_perdl._records import ARRAYS, CONFIG
from flwr_perdl.simulations.engine import federate
from flwr_perdl.simulations.experiments import configure, synthetic

CLIENTS = 200
#: A round's time is the difference of a long and a short run, over the difference of rounds.
SHORT, LONG = 2, 6
#: Runs of each, in turn; medians are reported.
TIMES = 3

empty = ClientApp()


@empty.train()
def train(message: Message, context: Context) -> Message:
    """Return what was sent."""
    return Message(message.content, reply_to=message)


def perma(config: dict[str, Any], n_rounds: int) -> float:
    """Return the seconds of a run of `synthetic`, from the first request to the last reply."""
    rounds = {**config, "rounds": n_rounds}
    return federate(synthetic, rounds, engine="ray", fraction_evaluate=0.0).seconds


def nothing(atoms: np.ndarray, n_rounds: int) -> float:
    """Return the seconds in which as many clients return as many numbers as often."""
    server, found = ServerApp(), []

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        nodes = list(grid.get_node_ids())
        while len(nodes) < CLIENTS:
            time.sleep(0.1)
            nodes = list(grid.get_node_ids())
        started = time.perf_counter()
        for round_ in range(1, n_rounds + 1):
            records = {ARRAYS: ArrayRecord([atoms]), CONFIG: ConfigRecord({"server-round": round_})}
            content = RecordDict(records)
            requests = [Message(content, node, MessageType.TRAIN) for node in nodes]
            assert len(list(grid.send_and_receive(requests))) == CLIENTS
        found.append(time.perf_counter() - started)

    run_simulation(
        server_app=server,
        client_app=empty,
        num_supernodes=CLIENTS,
        backend_config={"client_resources": {"num_cpus": 1}, "init_args": {"log_to_driver": False}},
    )
    return found[0]


def ratios() -> dict[str, Any]:
    """Measure times."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    config = configure(synthetic, clients=CLIENTS, options={"seeds": 1})
    atoms = federate(synthetic, {**config, "rounds": 1}).arrays[0]  # as many numbers
    runs: dict[str, Callable[[int], float]] = {
        "perma": lambda n: perma(config, n),
        "empty": lambda n: nothing(atoms, n),
    }
    seconds: dict[tuple[str, int], list[float]] = {}
    for _ in range(TIMES):
        for name, run in runs.items():
            for n in (SHORT, LONG):
                seconds.setdefault((name, n), []).append(run(n))
    median = {key: float(np.median(values)) for key, values in seconds.items()}
    took = {name: (median[name, LONG] - median[name, SHORT]) / (LONG - SHORT) for name in runs}
    ratio = took["empty"] / took["perma"]
    return {"ratios": {"empty handler / PerMA, a round on Ray": ratio}, "seconds": took}


def tables(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    perma, empty = results["seconds"]["perma"], results["seconds"]["empty"]
    return (
        f"A round of `synthetic` with {CLIENTS} clients on Flower's simulation engine: "
        f"{perma:.2f} s; one of clients that return what they are sent: {empty:.2f} s. "
        f"PerMA's takes {100 * (perma / empty - 1):.0f} % longer.\n"
    )


if __name__ == "__main__":
    main("engines", (__doc__ or "").splitlines()[0], ratios, dict, tables)
