"""What grows how: seconds and memory against clients, atoms, features, agents and neighbors.

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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import numpy as np
from _measure import in_turn, main
from flwr.app import Context, Message
from matplotlib.figure import Figure
from threadpoolctl import threadpool_limits

from flwr_perdl.clients import DictionaryClient, client_app
from flwr_perdl.dictionary import OrthogonalLearner, normalize_atoms, warm_start
from flwr_perdl.network import (
    DataDiffusion,
    SparseSVD,
    Topology,
    diffusion_averaging,
    infer,
)
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import PerMA
from perdl_experiments import run_experiment
from perdl_experiments.plots import COLORS
from perdl_experiments.render import markdown_table

#: Features, atoms, global atoms and samples of a client, where they are not what is varied.
FEATURES, ATOMS, GLOBAL, SAMPLES = 32, 16, 8, 100
CLIENTS = (10, 100, 1000, 3000, 10_000)
#: Of the last federation, this share is asked in a round.
FRACTION = 0.05
#: Clients where atoms and features are varied, and features where atoms are.
FEW, WIDE = 50, 256
#: Updates after the matching round, each of which is a turn.
UPDATES = 5
#: Iterations of a client's own start: enough for its cost, which every client bears by itself.
START = 10
AGENTS = (50, 200, 500, 1000, 2000)
#: Neighbors of an agent, and agents where neighbors are varied.
NEIGHBORS, MANY = 4, 500
#: Features and samples of an agent, and atoms of the dictionary that agents learn.
SMALL, FOUR, SHARED = 100, 4, 16
#: Numbers of the model that nodes average.
NUMBERS = 10_000
#: A round's time is the difference of a long and a short run, of inference and of learning.
SHORT, LONG = 1, {"inference": 41, "diffusion": 6, "averaging": 6}
#: Turns of each pair of runs.
TURNS = 3

#: Points of one curve: the number that is varied is ``"x"``; what was timed has all turns.
Point = dict[str, Any]
Curve = list[Point]


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
) -> Point:
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
    whole, clients = np.diff(np.array(times), axis=0).T
    server = whole - clients
    return {
        "seconds_start_clients": clients[0],
        "seconds_start_server": server[0],
        "seconds_update": whole[1:],
        "seconds_update_clients": clients[1:],
        "seconds_update_server": server[1:],
        "mb_data": data - imported,
        "mb_rest": held[-1] - data,
    }


def per_round(run: Callable[[int], Any], long: int) -> Point:
    """Time a round, what comes before the first, and the memory of all."""
    before = most_memory()
    seconds = in_turn({n: partial(run, n) for n in (SHORT, long)}, TURNS)
    each = (seconds[long] - seconds[SHORT]) / (long - SHORT)
    before_first = np.maximum(seconds[SHORT] - SHORT * each, 0.0)
    return {"seconds": each, "seconds_before": before_first, "mb": most_memory() - before}


def inference(n_agents: int, degree: int) -> Point:
    """Measure dual inference, an atom per agent."""
    rng = np.random.default_rng(0)
    atoms = normalize_atoms(rng.standard_normal((n_agents, SMALL)))[:, None]
    X = rng.standard_normal((FOUR, SMALL)) / 10
    # A topology keeps what it was once asked (its diameter, its spectrum): each run has its own.
    return per_round(
        lambda n: infer(
            SparseSVD(0.05, 0.1),
            X,
            list(atoms),
            Topology.k_regular(n_agents, degree),
            n_rounds=n,
            tolerance=0,
            compress=False,
        ),
        LONG["inference"],
    )


def diffusion(n_agents: int, degree: int) -> Point:
    """Measure learning one dictionary from data of 50 samples per agent."""
    rng = np.random.default_rng(0)
    data = rng.standard_normal((n_agents, 50, SHARED))
    learner = DataDiffusion(SHARED)
    return per_round(
        lambda n: learner.fit(list(data), Topology.k_regular(n_agents, degree), n),
        LONG["diffusion"],
    )


class Near:
    """Whose training costs next to nothing: a tenth of the way to a number of its own."""

    def __init__(self, node: int) -> None:
        self.own = float(node)

    def fit(self, parameters: list[np.ndarray], config: Any) -> Any:
        """Train."""
        return [w - 0.1 * (w - self.own) for w in parameters], 1, {}


def averaging(n_nodes: int) -> Point:
    """Measure the default method of any model, on an exponential graph."""
    learn, start = partial(diffusion_averaging, evaluate_every=0), [np.zeros(NUMBERS)]
    return per_round(
        lambda n: learn(Near, Topology.exponential(n_nodes), n, initial=start),
        LONG["averaging"],
    )


def files(n_clients: int) -> Point:
    """Measure what a run of two rounds leaves on the server's disk."""
    with TemporaryDirectory() as name:
        folder = Path(name) / "run"
        run_experiment("synthetic", clients=n_clients, rounds=2, out=folder, options={"seeds": 1})
        (checkpoint,) = folder.glob("checkpoints/round-000002.npz")
        (history,) = folder.glob("checkpoints/history-*.jsonl")
        kb = {path: path.stat().st_size / 2**10 for path in folder.rglob("*")}
    return {
        "kb_checkpoint": kb[checkpoint],
        "kb_history_per_round": kb[history] / 2,
        "kb_report": kb[folder / "report.html"],
    }


MEASURES: dict[str, Callable[..., Point]] = {
    "clients": perma,
    "sampled": partial(perma, fraction=FRACTION),
    "atoms": lambda x: perma(FEW, d=WIDE, r=x),
    "features": lambda x: perma(FEW, d=x),
    "inference, agents": lambda x: inference(x, NEIGHBORS),
    "inference, neighbors": lambda x: inference(MANY, x),
    "diffusion, agents": lambda x: diffusion(x, NEIGHBORS),
    "diffusion, neighbors": lambda x: diffusion(MANY, x),
    "averaging, nodes": averaging,
    "files": files,
}
POINTS: dict[str, Sequence[int]] = {
    "clients": CLIENTS,
    "sampled": CLIENTS[-1:],
    "atoms": (8, 16, 32, 64, 128, 256),
    "features": (16, 64, 256, 1024),
    "inference, agents": AGENTS,
    "inference, neighbors": (4, 8, 16, 32, 64, 128),
    "diffusion, agents": AGENTS,
    "diffusion, neighbors": (4, 8, 16, 32, 64, 128),
    "averaging, nodes": (100, 300, 1000, 3000),
    "files": (100, 1000, 3000),
}


#: What a curve is of, and against what.
KINDS = {
    "clients": "PerMA in process, by clients",
    "sampled": f"The same where {FRACTION:.0%} of the clients are asked",
    "atoms": f"PerMA with {FEW} clients of {WIDE} features, by atoms",
    "features": f"PerMA with {FEW} clients, by features",
    "inference, agents": f"A round of dual inference, {NEIGHBORS} neighbors, by agents",
    "inference, neighbors": f"A round of dual inference, {MANY} agents, by neighbors",
    "diffusion, agents": f"A round of learning over data, {NEIGHBORS} neighbors, by agents",
    "diffusion, neighbors": f"A round of learning over data, {MANY} agents, by neighbors",
    "averaging, nodes": "A round of averaging models on an exponential graph, by nodes",
    "files": "The server's files of a run of two rounds of `synthetic`, by clients",
}
ABOUT = (
    f"PerMA: {FEATURES} features, {ATOMS} atoms, of which {GLOBAL} global, {SAMPLES} samples of "
    "each client; seconds of one core, memory in MB. Clients: their arithmetic and the messages "
    f"there and back. The matching round has {START} iterations of every client's own start, of "
    "which a real run has 100. Data: the samples, which clients elsewhere would hold; rest: "
    "clients' states, messages, replies and what the server makes of them. Updates are medians of "
    f"{UPDATES}, what is between neighbors of {TURNS} turns, and their range. The exponent is the "
    "slope between the last two points on logarithmic axes: 1 is linear. Inference: "
    f"{SMALL} features, {FOUR} samples, an atom per agent; learning: {SHARED} features and atoms, "
    f"50 samples per agent; averaging: models of {NUMBERS:,} numbers, training that costs next to "
    "nothing."
)
#: Curves that are to be linear, and their number.
LINEAR = {
    "clients": "seconds_update",
    "inference, agents": "seconds",
    "diffusion, agents": "seconds",
    "averaging, nodes": "seconds",
}


def measure(kind: str, x: int) -> Point:
    """Measure one point, in this process."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    with threadpool_limits(1):
        return MEASURES[kind](x)


# The results


def add_curves(found: dict[str, Curve], kinds: Iterable[str]) -> None:
    """Measure the points of these curves, each in a process of its own."""
    for kind in kinds:
        for x in POINTS[kind]:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                point = pool.submit(measure, kind, x).result()
            found.setdefault(kind, []).append({"x": x, **point})


def exponent(rows: Curve, key: str) -> float | None:
    """Return the slope of ``key`` between the last two points on logarithmic axes."""
    before, last = (float(np.median(row[key])) for row in rows[-2:])
    if min(before, last) <= 0:
        return None
    return float(np.log(last / before) / np.log(rows[-1]["x"] / rows[-2]["x"]))


def tables(results: dict[str, Any]) -> str:
    """Return the results as Markdown: a table per curve, with the exponents below."""
    lines = [f"{ABOUT}\n"]
    for kind, rows in results["curves"].items():
        keys = [key for key in rows[0] if key != "x"]
        cells = [[f"{row['x']:,.0f}", *(number(row[key]) for key in keys)] for row in rows]
        if len(rows) > 1:
            slopes = [exponent(rows, key) for key in keys]
            cells.append(["exponent", *("-" if s is None else f"{s:.2f}" for s in slopes)])
        heads = [key.replace("_", " ") for key in keys]
        lines.append(f"{KINDS[kind]}:\n\n{markdown_table(['', *heads], cells)}")
    return "\n".join(lines)


def number(turns: Any) -> str:
    """Return three digits of a median, with commas, and the range of several turns."""

    def shown(value: float) -> str:
        if value >= 100:
            return f"{float(f'{value:.3g}'):,.0f}"
        return f"{value:.3g}" if value >= 1e-3 or not value else f"{value:.1e}"

    median, least, most = (shown(of(turns)) for of in (np.median, np.min, np.max))
    return f"{median} ({least} to {most})" if np.size(turns) > 1 else median


def picture(results: dict[str, Any]) -> Figure:
    """Draw all curves, with their exponents."""
    found = results["curves"]
    panels: dict[tuple[str, str, str], dict[str, tuple[str, str]]] = {
        ("an update of PerMA", "clients", "seconds"): {
            "clients and messages": ("clients", "seconds_update_clients"),
            "server": ("clients", "seconds_update_server"),
        },
        ("the matching round", "clients", "seconds"): {
            "clients and messages": ("clients", "seconds_start_clients"),
            "server": ("clients", "seconds_start_server"),
        },
        ("memory", "clients", "MB"): {
            "samples": ("clients", "mb_data"),
            "all else": ("clients", "mb_rest"),
        },
        (f"an update of PerMA, {FEW} clients", "atoms or features", "seconds"): {
            "atoms": ("atoms", "seconds_update"),
            "features": ("features", "seconds_update"),
        },
        ("a round between neighbors", "agents", "seconds"): {
            "dual inference": ("inference, agents", "seconds"),
            "learning over data": ("diffusion, agents", "seconds"),
            "averaging models": ("averaging, nodes", "seconds"),
        },
        (f"a round between {MANY} agents", "neighbors of each", "seconds"): {
            "dual inference": ("inference, neighbors", "seconds"),
            "learning over data": ("diffusion, neighbors", "seconds"),
        },
    }
    figure = Figure(figsize=(10, 6), layout="constrained")
    for axes, ((title, x, y), drawn) in zip(
        figure.subplots(2, 3).ravel(), panels.items(), strict=True
    ):
        for (label, (kind, key)), color in zip(drawn.items(), COLORS, strict=False):
            slope = exponent(found[kind], key)
            name = label if slope is None else f"{label} ({slope:.1f})"
            points = np.array([(row["x"], np.median(row[key])) for row in found[kind]])
            axes.plot(*points[points[:, 1] > 0].T, "o-", ms=3.5, color=color, label=name)
        axes.set(title=title, xlabel=x, ylabel=y, xscale="log", yscale="log")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        bottom, top = axes.get_ylim()
        axes.set_ylim(bottom, top * (top / bottom) ** (0.1 + 0.13 * len(drawn)))
        axes.legend(fontsize=8, frameon=False, loc="upper left")
    return figure


def ratios(found: dict[str, Curve]) -> dict[str, Any]:
    """Measure what should be linear: the ratios say how much of that is left at the last point."""
    compared = {}
    add_curves(found, LINEAR)
    for kind, key in LINEAR.items():
        before, last = found[kind][-2:]
        name = f"each of {before['x']:,} / each of {last['x']:,}: {kind}"
        # Of medians: each point has a process of its own, whose turns are nobody else's.
        compared[name] = np.median(before[key] / before["x"]) / np.median(last[key] / last["x"])
    return {"ratios": compared}


def rest(found: dict[str, Curve]) -> dict[str, Any]:
    """Measure everything else."""
    add_curves(found, [kind for kind in POINTS if kind not in found])
    return {"curves": found}


if __name__ == "__main__":
    about, curves = (__doc__ or "").splitlines()[0], dict[str, Curve]()
    main("scaling", about, lambda: ratios(curves), lambda: rest(curves), tables, picture)
