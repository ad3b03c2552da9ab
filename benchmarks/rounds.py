"""What a round costs in process: PerMA against its arithmetic alone, and a message.

Run from the repository's root: ``python benchmarks/rounds.py``; it writes
``benchmarks/results/rounds.json`` and the tables of it, ``rounds.md``. Under two minutes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from _measure import CORES, fastest, main, on
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.client import NumPyClient
from flwr_perdl.clients._cohort import windows
from flwr_perdl.dictionary.stacks import update_stack

from flwr_perdl._compat import addressed
from flwr_perdl._parallel import in_threads, n_threads
from flwr_perdl._records import ARRAYS, CONFIG, read_reply, to_record
from flwr_perdl._threads import one_blas_thread
from flwr_perdl.clients import DictionaryClient, client_app
from flwr_perdl.clients.dictionary import _WINDOW
from flwr_perdl.dictionary import warm_start
from flwr_perdl.dictionary.aggregation import aggregate_statistics
from flwr_perdl.dictionary.learners import OrthogonalLearner
from flwr_perdl.dictionary.polar import polar_factor, polar_factors
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import PerMA, ServerSettings

CLIENTS = 1000
#: Features, atoms, samples of a client.
SIZES = [(64, 32, 200), (6, 6, 200)]
#: A client's features, atoms and samples in the paper's Section 5.2, its clients and rounds, and
#: the iterations of a client's own start.
IMAGES, IMAGE_CLIENTS, ROUNDS, STARTING = (784, 100, 500), 10, 20, 100
#: What the paper's run of that size took in seconds (its Table 1), on its own machine.
PAPER = 40.8
#: A round's time is the least of so many rounds after the first, of so many runs in turn.
ROUNDS_TIMED, TIMES = 4, 2
#: Clients whose arrays are computed at once: the arithmetic takes the best of these.
BLOCKS = (16, 64, 256)
#: Clients begin with an untrained dictionary: what is timed is a round.
START = partial(warm_start, n_iter=0)
#: Noise on the samples, so that the atoms do not represent them exactly.
NOISE = 0.01


class Echo(NumPyClient):
    """Returns what it is sent."""

    def fit(self, parameters: Any, config: Any) -> Any:
        """Return the request's arrays."""
        return parameters, 1, {}


class Together(Echo):
    """The same, of many at once."""

    def fit(self, parameters: Any, config: Any) -> Any:
        """Return the request's arrays."""
        return super().fit(parameters, config)

    @classmethod
    def fit_cohort(cls, clients: Any, parameters: Any, config: Any) -> Any:
        """Return the request's arrays, for each client."""
        return ((parameters, 1, {}) for _ in clients)


def unchanged(message: Message, context: Context, call: Any) -> Message:
    """Return the reply as it is: a mod, so that clients are called one by one."""
    return call(message, context)


def draw(d: int, r: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return samples of all clients, and orthonormal atoms."""
    rng = np.random.default_rng(0)
    atoms = np.linalg.qr(rng.standard_normal((d, d)))[0][:r]
    codes = rng.standard_normal((CLIENTS, n, r)) * (rng.random((CLIENTS, n, r)) < 0.2)
    return codes @ atoms + NOISE * rng.standard_normal((CLIENTS, n, d)), atoms


def arithmetic(X: np.ndarray, D: np.ndarray) -> dict[Any, Callable[[], Any]]:
    """Return the two products and the polar factors of a round, client by client and stacked."""

    def looped() -> None:
        for samples, atoms in zip(X, D, strict=True):
            codes = samples @ atoms.T
            polar_factor(codes.T @ samples, atoms)

    def stacked(block: int) -> None:
        for at in range(0, CLIENTS, block):
            samples, atoms = X[at : at + block], D[at : at + block]
            codes = samples @ atoms.swapaxes(1, 2)
            polar_factors(codes.swapaxes(1, 2) @ samples, atoms)

    return {
        ("arithmetic", "looped"): looped,
        **{("arithmetic", block): partial(stacked, block) for block in BLOCKS},
    }


@one_blas_thread()
def maths(X: np.ndarray, D: np.ndarray, G: np.ndarray, learner: OrthogonalLearner) -> None:
    """Compute what clients and server compute in a round, without Flower."""
    own = X[0].size
    cut = windows(range(CLIENTS), lambda _: own, _WINDOW, n_threads())
    several = (slice(window[0], window[-1] + 1) for window in cut)
    found = in_threads(lambda some: update_stack(X[some], D[some], G, learner).sent, several)
    aggregate_statistics(np.concatenate(list(found)), G, orthogonal=True)


def perma() -> list[dict[str, Any]]:
    """Time a round of PerMA, its maths alone, and its arithmetic alone."""
    rows = []
    for d, r, n in SIZES:
        X, atoms = draw(d, r, n)
        D, G = np.broadcast_to(atoms, (CLIENTS, r, d)).copy(), atoms[: r // 2]
        learner = OrthogonalLearner(r)

        def make_client(
            context: Context, X: np.ndarray = X, learner: OrthogonalLearner = learner
        ) -> DictionaryClient:
            own = X[int(context.node_config["partition-id"])]
            return DictionaryClient(own, learner, context, start=START)

        def federation(mods: Sequence[Any], make: Any = make_client, G: Any = G) -> float:
            grid = InProcessGrid(client_app(make, train_mods=mods), CLIENTS)
            ends: list[float] = []
            strategy = PerMA(
                fraction_evaluate=0.0,
                server=ServerSettings(on_round=lambda report: ends.append(time.perf_counter())),
            )
            strategy.start(grid, ArrayRecord([G]), num_rounds=ROUNDS_TIMED + 1)
            return float(np.diff(ends).min())

        computed = partial(maths, X, D, G, learner)
        runs: dict[Any, Callable[[], Any]] = {
            **{name: on(1, run) for name, run in arithmetic(X, D).items()},
            "maths": on(1, computed),
            "maths_all": on(CORES, computed),
        }
        ways: dict[str, tuple[int, list[Any]]] = {
            "round": (1, []),
            "round_all": (CORES, []),
            "one_by_one": (1, [unchanged]),
        }
        least = fastest(runs, 5 * TIMES, clock=time.perf_counter)
        seconds = {way: least[way] for way in ("maths", "maths_all")}
        for _ in range(TIMES):
            for way, (threads, mods) in ways.items():
                seconds[way] = min(seconds.get(way, np.inf), on(threads, federation)(mods))
        seconds["arithmetic"] = min(least[key] for key in least if key[0] == "arithmetic")
        rows.append({"features": d, "atoms": r, "samples": n, "cores": CORES, "seconds": seconds})
    return rows


def images() -> dict[str, float]:
    """Time a whole run of the size of the paper's Section 5.2, and its products alone: seconds."""
    d, r, n = IMAGES
    rng = np.random.default_rng(0)
    atoms = np.linalg.qr(rng.standard_normal((d, r)))[0].T
    scales = np.exp(-np.arange(r) / (r / 4))  # as images, which few directions explain
    X = [rng.standard_normal((n, r)) * scales @ atoms for _ in range(IMAGE_CLIENTS)]
    X = [samples + NOISE * rng.standard_normal((n, d)) for samples in X]
    learner = OrthogonalLearner(r)

    def products() -> None:
        for _ in range(STARTING + ROUNDS - 1):
            for samples in X:
                (samples @ atoms.T).T @ samples

    def make_client(context: Context) -> DictionaryClient:
        own = X[int(context.node_config["partition-id"])]
        return DictionaryClient(own, learner, context)

    def federation() -> None:
        grid = InProcessGrid(client_app(make_client), IMAGE_CLIENTS)
        PerMA(r, fraction_evaluate=0.0).start(grid, num_rounds=ROUNDS)

    runs = {
        "products": on(1, products),
        "run": on(1, federation),
        "run_all": on(CORES, federation),
    }
    return fastest(runs, TIMES + 1, clock=time.perf_counter) | {"cores": CORES}


def messages() -> dict[str, float]:
    """Time a message there and back, of clients that only answer: milliseconds per client."""
    sent = [np.zeros((16, 64))]

    def exchange(grid: InProcessGrid) -> None:
        """Ask every node the same, as a strategy does, and read and check all replies."""
        config = ConfigRecord({"server-round": 1})
        content = RecordDict({ARRAYS: to_record(sent), CONFIG: config})
        node, *others = grid.get_node_ids()
        request = Message(content, node, MessageType.TRAIN)
        requests = [request, *(addressed(request, node) for node in others)]
        for reply in grid.send_and_receive(requests):
            read_reply(reply.content)

    kinds: dict[str, type[NumPyClient]] = {"cohort": Together, "one_by_one": Echo}
    runs = {}
    for name, kind in kinds.items():
        grid = InProcessGrid(client_app(lambda context, kind=kind: kind()), CLIENTS)
        runs[name] = lambda grid=grid: exchange(grid)
    least = fastest(runs, 5 * TIMES)
    return {name: 1000 * seconds / CLIENTS for name, seconds in least.items()}


def tables(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    cores = results["perma"][0]["cores"]
    ways = {
        "maths": "maths, one core",
        "maths_all": f"maths, {cores} cores",
        "round": "round, one core",
        "round_all": f"round, {cores} cores",
        "one_by_one": "one by one",
    }
    lines = [
        f"A round of PerMA, {CLIENTS:,} clients in process, in milliseconds (times the arithmetic: "
        "two products and the polar factor per client, looped or stacked, whichever is faster, on "
        "one core). Maths is what clients and server compute; a round is that and the messages:",
        "",
        f"| features, atoms, samples | arithmetic | {' | '.join(ways.values())} |",
        "| --- " + "| ---: " * (len(ways) + 1) + "|",
    ]
    for row in results["perma"]:
        took = row["seconds"]
        cells = [f"{1000 * took[way]:.0f} ({took[way] / took['arithmetic']:.1f})" for way in ways]
        sizes = ", ".join(str(row[key]) for key in ("features", "atoms", "samples"))
        lines.append(f"| {sizes} | {1000 * took['arithmetic']:.1f} | {' | '.join(cells)} |")
    sent, whole = results["messages"], results["images"]
    lines += [
        "",
        f"A message there and back, of 16 x 64 numbers: {sent['cohort']:.3f} ms per client; "
        f"{sent['one_by_one']:.3f} ms where clients are called one by one.",
        "",
        f"A run of the size of the paper's Table 1 ({IMAGE_CLIENTS} clients of {IMAGES[2]} "
        f"samples, {IMAGES[0]} features, {IMAGES[1]} atoms, {ROUNDS} rounds, the clients' own "
        f"starts among them): {whole['run']:.1f} s on one core, "
        f"{whole['run'] / whole['products']:.1f} times its products with the samples, and "
        f"{whole['run_all']:.1f} s on {whole['cores']}, where the paper took {PAPER} s.",
    ]
    return "\n".join(lines) + "\n"


def ratios() -> dict[str, Any]:
    """Measure times."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    found = perma()
    compared = {}
    for row in found:
        took, name = row["seconds"], f"d = {row['features']}, r = {row['atoms']}"
        compared[f"arithmetic / maths, {name}"] = took["arithmetic"] / took["maths"]
        compared[f"arithmetic / round, {name}"] = took["arithmetic"] / took["round"]
        compared[f"one by one / round, {name}"] = took["one_by_one"] / took["round"]
    whole = images()
    compared["products / run, the size of the paper's images"] = whole["products"] / whole["run"]
    return {"ratios": compared, "perma": found, "messages": messages(), "images": whole}


if __name__ == "__main__":
    main("rounds", (__doc__ or "").splitlines()[0], ratios, dict, tables)
