"""What a round of PerMA costs in process, and a message.

Run from the repository's root: ``python benchmarks/rounds.py``; it writes
``benchmarks/results/rounds.json`` and the tables of it, ``rounds.md``. Some three minutes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from _measure import CORES, cell, in_turn, main, on, timed, wall
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.client import NumPyClient

from flwr_perdl.clients import DictionaryClient, client_app
from flwr_perdl.dictionary import (
    OrthogonalLearner,
    align_to_global,
    local_statistics,
    polar_factor,
    warm_start,
)
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import PerMA
from perdl_experiments.render import markdown_table

CLIENTS = 1000
#: Features, atoms, samples of a client.
SIZES = [(64, 32, 200), (6, 6, 200)]
#: A client's features, atoms and samples in the paper's Section 5.2, its clients and rounds, and
#: the iterations of a client's own start.
IMAGES, IMAGE_CLIENTS, ROUNDS, STARTING = (784, 100, 500), 10, 20, 100
#: What the paper's run of that size took in seconds (its Table 1), on its own machine.
PAPER = 40.8
#: A round's time is the median of so many rounds after the first; turns of the runs.
ROUNDS_TIMED, TURNS = 5, 3
#: Clients begin with an untrained dictionary: what is timed is a round.
START = partial(warm_start, n_iter=0)
#: Noise on the samples, so that the atoms do not represent them exactly.
NOISE = 0.01


class Echo(NumPyClient):
    """Returns what it is sent."""

    def fit(self, parameters: Any, config: Any) -> Any:
        """Return the request's arrays."""
        return parameters, 1, {}


def draw(d: int, r: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return samples of all clients, and orthonormal atoms."""
    rng = np.random.default_rng(0)
    atoms = np.linalg.qr(rng.standard_normal((d, d)))[0][:r]
    codes = rng.standard_normal((CLIENTS, n, r)) * (rng.random((CLIENTS, n, r)) < 0.2)
    return codes @ atoms + NOISE * rng.standard_normal((CLIENTS, n, d)), atoms


def perma() -> list[dict[str, Any]]:
    """Time a round of PerMA, the clients' maths alone, and their arithmetic alone."""
    rows = []
    for d, r, n in SIZES:
        X, atoms = draw(d, r, n)
        G, learner = atoms[: r // 2], OrthogonalLearner(r)

        def arithmetic(X: np.ndarray = X, D: np.ndarray = atoms) -> None:
            for samples in X:
                polar_factor((samples @ D.T).T @ samples, D)

        def maths(
            X: np.ndarray = X,
            D: np.ndarray = atoms,
            G: np.ndarray = G,
            learner: OrthogonalLearner = learner,
        ) -> None:
            shared = np.ones(len(G), dtype=bool)
            for samples in X:
                codes = learner.code(samples, D)
                align_to_global(learner.update(samples, codes, D), G)
                local_statistics(samples, codes, D, shared, orthogonal=True)

        def make_client(
            context: Context, X: np.ndarray = X, learner: OrthogonalLearner = learner
        ) -> DictionaryClient:
            own = X[int(context.node_config["partition-id"])]
            return DictionaryClient(own, learner, context, start=START)

        def federation(make: Any = make_client, G: Any = G) -> float:
            grid, ends = InProcessGrid(client_app(make), CLIENTS), list[float]()
            strategy = PerMA(
                fraction_evaluate=0.0,
                on_round=lambda report: ends.append(time.process_time()),
            )
            strategy.start(grid, ArrayRecord([G]), num_rounds=ROUNDS_TIMED + 1)
            return float(np.median(np.diff(ends)))

        runs: dict[str, Callable[[], float]] = {
            "arithmetic": partial(timed, arithmetic),
            "maths": partial(timed, maths),
            "round": on(1, federation),
        }
        seconds = in_turn(runs, TURNS, lambda run: run())
        rows.append({"features": d, "atoms": r, "samples": n, "seconds": seconds})
    return rows


def images() -> dict[str, np.ndarray]:
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
    return in_turn(runs, TURNS, wall)


def messages() -> np.ndarray:
    """Time a message there and back, of clients that only answer: milliseconds per client."""
    grid = InProcessGrid(client_app(lambda context: Echo()), CLIENTS)

    def exchange() -> None:
        """Ask every node, and read all replies."""
        arrays, config = ArrayRecord([np.zeros((16, 64))]), ConfigRecord({"server-round": 1})
        content = RecordDict({"arrays": arrays, "config": config})
        asked = [Message(content, node, MessageType.TRAIN) for node in grid.get_node_ids()]
        for reply in grid.send_and_receive(asked):
            reply.content["arrays"].to_numpy_ndarrays()

    return 1000 * in_turn({"message": exchange}, 5 * TURNS)["message"] / CLIENTS


def tables(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    rows = [
        [", ".join(str(row[key]) for key in ("features", "atoms", "samples"))]
        + [cell(row["seconds"][way]) for way in ("arithmetic", "maths", "round")]
        for row in results["perma"]
    ]
    heads, whole = ["features, atoms, samples", "arithmetic", "maths", "round"], results["images"]
    return (
        f"A round of PerMA, {CLIENTS:,} clients in process, in seconds of processor time. "
        "Arithmetic is two products and a polar factor per client, maths all that clients compute, "
        "a round that and the messages, the checks and the server. Medians of "
        f"{TURNS} turns, and their range:\n\n{markdown_table(heads, rows)}\n"
        f"A message there and back, of 16 x 64 numbers, {5 * TURNS} turns: "
        f"{cell(results['messages'])} ms."
        f"\n\nA run of the size of the paper's Table 1 ({IMAGE_CLIENTS} clients of {IMAGES[2]} "
        f"samples, {IMAGES[0]} features, {IMAGES[1]} atoms, {ROUNDS} rounds, the clients' own "
        f"starts among them): {cell(whole['run'])} s on one core, "
        f"{cell(whole['run'] / whole['products'])} times its products with the samples, and "
        f"{cell(whole['run_all'])} s on {CORES}, where the paper took {PAPER} s.\n"
    )


def ratios() -> dict[str, Any]:
    """Measure times."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    found, whole = perma(), images()
    compared = {
        f"{way} / round, d = {row['features']}, r = {row['atoms']}": row["seconds"][way]
        / row["seconds"]["round"]
        for row in found
        for way in ("arithmetic", "maths")
    }
    compared["products / run, the size of the paper's images"] = whole["products"] / whole["run"]
    return {"ratios": compared, "perma": found, "messages": messages(), "images": whole}


if __name__ == "__main__":
    main("rounds", (__doc__ or "").splitlines()[0], ratios, dict, tables)
