"""What grows how: seconds and memory against clients, atoms, features, agents and neighbours.

Run from the repository's root: ``python benchmarks/scaling.py``; it writes
``benchmarks/results/scaling.json``, the tables of it, ``scaling.md``, and a picture,
``scaling.png``. Under six minutes.

Every point is measured in a process of its own, in the processor's time of one thread; memory is
the process's most resident memory beyond what it has when everything is imported. A growth exponent
is the slope between the last two points on logarithmic axes: 1 is linear.
"""

from __future__ import annotations

import logging
import resource
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from time import process_time
from typing import Any

import numpy as np
from _measure import main
from flwr.app import Context, Message
from matplotlib.figure import Figure
from threadpoolctl import threadpool_limits

from flwr_perdl.clients import DictionaryClient, client_app
from flwr_perdl.dictionary import (
    OrthogonalLearner,
    global_matching,
    normalize_atoms,
    polar_factor,
    warm_start,
)
from flwr_perdl.dictionary.aggregation import aggregate_statistics
from flwr_perdl.diffusion import DataDiffusion, SparseSVD, Topology, infer
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.simulations.plots import COLORS
from flwr_perdl.strategies import PerMA

#: Features, atoms, global atoms and samples of a client, where they are not what is varied.
FEATURES, ATOMS, GLOBAL, SAMPLES = 32, 16, 8, 100
CLIENTS = (10, 100, 1000, 3000, 10_000)
#: Of the last federation, this share is asked in a round.
FRACTION = 0.05
#: Clients where atoms and features are varied, and features where atoms are.
FEW, WIDE = 50, 256
#: Updates after the matching round; the fastest is reported.
UPDATES = 3
#: Iterations of a client's own start: enough for its cost, which every client bears by itself.
START = 10
AGENTS = (50, 200, 500, 1000, 2000)
#: Neighbours of an agent, and agents where neighbours are varied.
NEIGHBOURS, MANY = 4, 200
#: Features and samples of an agent, and atoms of the dictionary that agents learn.
SMALL, FOUR, SHARED = 100, 4, 16
#: A round's time is the difference of a long and a short run.
SHORT, LONG = 1, 5
MILLION = 1_000_000


class TimedGrid(InProcessGrid):
    """Notes the processor's time that the clients and their messages take."""

    clients_seconds = 0.0

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Exchange messages."""
        messages, since = list(messages), process_time()
        replies = super().send_and_receive(messages, timeout=timeout)
        self.clients_seconds += process_time() - since
        return replies


# What a process of its own measures


def most_memory() -> float:
    """Return the most megabytes that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def draw(n_clients: int, d: int, r: int, n: int) -> np.ndarray:
    """Return the samples of all clients, who share half of their orthonormal atoms."""
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.standard_normal((d, d)))[0]
    X = np.empty((n_clients, n, d))
    for samples in X:
        turn = np.linalg.qr(rng.standard_normal((d - r // 2, r - r // 2)))[0]
        atoms = np.vstack([basis[: r // 2], turn.T @ basis[r // 2 :]])
        codes = rng.standard_normal((n, r)) * (rng.random((n, r)) < 0.2)
        np.matmul(codes, atoms, out=samples)
    return X


def perma(
    n_clients: int,
    d: int = FEATURES,
    r: int = ATOMS,
    n: int = SAMPLES,
    fraction: float = 1.0,
) -> dict[str, float]:
    """Measure a matching round and updates: the clients' part and the server's."""
    imported = most_memory()
    X, learner = draw(n_clients, d, r, n), OrthogonalLearner(r)
    data = most_memory()

    def make_client(context: Context) -> DictionaryClient:
        samples = X[int(context.node_config["partition-id"])]
        start = partial(warm_start, n_iter=START)
        return DictionaryClient(samples, learner, context, start=start)

    grid = TimedGrid(client_app(make_client), n_clients)
    times = [(process_time(), 0.0)]
    held = []

    def note(report: Any) -> None:
        times.append((process_time(), grid.clients_seconds))
        held.append(most_memory())

    strategy = PerMA(r // 2, fraction_train=fraction, fraction_evaluate=0.0, on_round=note)
    strategy.start(grid, num_rounds=1 + UPDATES)
    spent = np.diff(np.array(times), axis=0)  # all, the clients' part
    first, update = spent[0], spent[1:][spent[1:, 0].argmin()]
    asked = max(2, round(fraction * n_clients))
    reports = sum(map(size_of, strategy.history)) / len(strategy.history) / asked
    return {
        "seconds_start": first[0],
        "seconds_start_clients": first[1],
        "seconds_start_server": first[0] - first[1],
        "seconds_update": update[0],
        "seconds_update_clients": update[1],
        "seconds_update_server": update[0] - update[1],
        "mb_data": data - imported,
        "mb_rest": held[-1] - data,
        "kb_reports_per_client_and_round": reports / 2**10,
    }


def size_of(thing: Any) -> int:
    """Return the bytes of nested containers and of the numbers in them."""
    inside: Iterable[Any] = ()
    if isinstance(thing, Mapping):
        inside = (*thing.keys(), *thing.values())
    elif isinstance(thing, tuple | list):
        inside = thing
    return sys.getsizeof(thing) + sum(0 if isinstance(x, str) else size_of(x) for x in inside)


def matching(n_clients: int, method: str) -> dict[str, float]:
    """Measure the server's part of the matching round alone."""
    rng = np.random.default_rng(0)

    def unit(n: int) -> np.ndarray:
        return normalize_atoms(rng.standard_normal((n, FEATURES)))

    shared = unit(GLOBAL)
    dictionaries = [
        normalize_atoms(np.vstack([shared, unit(ATOMS - GLOBAL)]) + 0.1 * unit(ATOMS))
        for _ in range(n_clients)
    ]
    before, since = most_memory(), process_time()
    global_matching(dictionaries, GLOBAL, method=method)
    return {"seconds": process_time() - since, "mb": most_memory() - before}


def aggregation(n_clients: int) -> dict[str, float]:
    """Measure the server's part of an update alone: the sum, and who is an outlier."""
    rng = np.random.default_rng(0)
    current = np.linalg.qr(rng.standard_normal((FEATURES, GLOBAL)))[0].T
    stack = 20 * current + rng.standard_normal((n_clients, GLOBAL, FEATURES))
    before, since = most_memory(), process_time()
    aggregate_statistics(stack, polar_factor(current, current), orthogonal=True)
    return {
        "seconds": process_time() - since,
        "mb": most_memory() - before,
        "mb_stack": stack.nbytes / 2**20,
    }


def per_round(run: Callable[[int], Any]) -> dict[str, float]:
    """Time a round, what comes before the first, and the memory of all."""
    before, seconds = most_memory(), {}
    for length in (SHORT, LONG):
        since = process_time()
        run(length)
        seconds[length] = process_time() - since
    each = (seconds[LONG] - seconds[SHORT]) / (LONG - SHORT)
    before_first = max(seconds[SHORT] - SHORT * each, 0.0)
    return {"seconds": each, "seconds_before": before_first, "mb": most_memory() - before}


def inference(n_agents: int, degree: int) -> dict[str, float]:
    """Measure dual inference, an atom per agent."""
    rng = np.random.default_rng(0)
    atoms = normalize_atoms(rng.standard_normal((n_agents, SMALL)))[:, None]
    X = rng.standard_normal((FOUR, SMALL)) / 10
    # `infer` keeps what it knows of a topology: each run has its own.
    return per_round(
        lambda n: infer(
            SparseSVD(0.05, 0.1),
            X,
            list(atoms),
            Topology.k_regular(n_agents, degree),
            n_rounds=n,
            tolerance=0,
            compress=False,
        )
    )


def diffusion(n_agents: int, degree: int) -> dict[str, float]:
    """Measure learning one dictionary from data of 50 samples per agent."""
    rng = np.random.default_rng(0)
    data = rng.standard_normal((n_agents, 50, SHARED))
    learner = DataDiffusion(SHARED)
    return per_round(lambda n: learner.fit(list(data), Topology.k_regular(n_agents, degree), n))


MEASURES: dict[str, Callable[..., dict[str, float]]] = {
    "clients": perma,
    "sampled": partial(perma, fraction=FRACTION),
    "atoms": lambda x: perma(FEW, d=WIDE, r=x),
    "features": lambda x: perma(FEW, d=x),
    "consensus": lambda x: matching(x, "consensus"),
    "paths": lambda x: matching(x, "paths"),
    "aggregation": aggregation,
    "inference, agents": lambda x: inference(x, NEIGHBOURS),
    "inference, neighbours": lambda x: inference(MANY, x),
    "diffusion, agents": lambda x: diffusion(x, NEIGHBOURS),
    "diffusion, neighbours": lambda x: diffusion(MANY, x),
}
POINTS: dict[str, Sequence[int]] = {
    "clients": CLIENTS,
    "sampled": CLIENTS[-1:],
    "atoms": (8, 16, 32, 64, 128, 256),
    "features": (16, 64, 256, 1024),
    "consensus": CLIENTS,
    "paths": CLIENTS,
    "aggregation": CLIENTS,
    "inference, agents": AGENTS,
    "inference, neighbours": (4, 8, 16, 32, 64, 128),
    "diffusion, agents": AGENTS,
    "diffusion, neighbours": (4, 8, 16, 32, 64, 128),
}


def measure(kind: str, x: int) -> dict[str, float]:
    """Measure one point, in this process."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    with threadpool_limits(1):
        return {key: float(value) for key, value in MEASURES[kind](x).items()}


# The results


def curves() -> dict[str, list[dict[str, float]]]:
    """Measure all points, each in a process of its own."""
    found: dict[str, list[dict[str, float]]] = {}
    for kind, points in POINTS.items():
        for x in points:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                found.setdefault(kind, []).append({"x": x, **pool.submit(measure, kind, x).result()})
    return found


def exponent(rows: Sequence[Mapping[str, float]], key: str) -> float:
    """Return the slope of ``key`` between the last two points on logarithmic axes."""
    before, last = rows[-2:]
    if min(before[key], last[key]) <= 0:
        return float("nan")
    return float(np.log(last[key] / before[key]) / np.log(last["x"] / before["x"]))


def at(n: int, rows: Sequence[Mapping[str, float]], key: str) -> float:
    """Return ``key`` for ``n`` on the line through the last two points."""
    before, last = rows[-2:]
    each = (last[key] - before[key]) / (last["x"] - before["x"])
    return last[key] + each * (n - last["x"])


#: In which unit, and how the tables and the picture call it.
PARTS = {
    "seconds_update_clients": "update: clients and messages",
    "seconds_update_server": "update: server",
    "seconds_start_clients": "start: clients and messages",
    "seconds_start_server": "start: server",
}


def summary(found: Mapping[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return the growth exponents, and what a million clients would take."""
    exponents = {
        f"{kind}: {key}": exponent(rows, key)
        for kind, rows in found.items()
        if len(rows) > 1
        for key in rows[0]
        if key != "x" and not key.startswith("kb")
    }
    clients = found["clients"]
    million = {
        key: at(MILLION, clients, key) for key in (*PARTS, "mb_data", "mb_rest")
    } | {
        f"{kind}_{key}": at(MILLION, found[kind], key)
        for kind in ("consensus", "paths", "aggregation")
        for key in ("seconds", "mb")
    }
    million["mb_reports_per_round"] = (
        clients[-1]["kb_reports_per_client_and_round"] * MILLION / 2**10
    )
    return {"exponents": exponents, "million": million}


def ratios() -> dict[str, Any]:
    """Measure everything; the ratios say how much of linear growth is left at the last point."""
    found = curves()
    compared = {}
    for kind, key in {
        "clients": "seconds_update",
        "consensus": "seconds",
        "aggregation": "seconds",
        "inference, agents": "seconds",
        "diffusion, agents": "seconds",
    }.items():
        before, last = found[kind][-2:]
        name = f"per client or agent, {before['x']:,} / {last['x']:,}: {kind}"
        compared[name] = (before[key] / before["x"]) / (last[key] / last["x"])
    return {"ratios": compared, "curves": found, **summary(found)}
