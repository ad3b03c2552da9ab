"""Mixed regression: what each change to the paper is worth, where it ends, and how fast it is.

Run from the repository's root: ``python benchmarks/regression.py``; it writes
``benchmarks/results/regression.json`` and the tables of it, ``regression.md``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from _measure import cell, in_turn, main, timed
from flwr.app import ArrayRecord, Context

from flwr_perdl.clients import RegressionClient, client_app
from flwr_perdl.regression import Refinement, TwoPhase, model_error
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies.mixed_regression import FedX
from perdl_experiments.batched_regression import Clients, simulate
from perdl_experiments.mixed_regression_data import (
    SETTINGS,
    Mixed,
    mixed_regression,
    oracle,
    setting,
)
from perdl_experiments.render import markdown_table

SEEDS = 4
#: Rounds of the paper's Phase 2, and of one that divides by the cluster's points.
ROUNDS, FEWER = 400, 100
#: Rounds by plain loops and through messages, and batched ones, that are timed in a turn.
PLAIN, SENT, BATCHED, TURNS = 5, 20, 100, 7
#: Draws for the times until close to the oracle.
DRAWS = 3
#: Within so much of the oracle's error a run counts as good.
CLOSE = 1.05
PAPER = TwoPhase.paper(3)


def changed(**options: Any) -> TwoPhase:
    """Return the paper's variant with another Phase 1."""
    return replace(PAPER, phase_1=replace(PAPER.phase_1, **options))


#: One change to the paper's variant each, then all of them.
CHANGES: dict[str, TwoPhase] = {
    "the paper's": PAPER,
    "U-statistic": changed(estimate="u-statistic"),
    "U-statistic, least squares, one iteration": changed(
        estimate="u-statistic", anchor_step="least-squares", n_iterations=1
    ),
    "all able clients are anchors": TwoPhase(3, phase_2=PAPER.phase_2),
    "… and division by the cluster's points": TwoPhase(
        3, phase_2=Refinement(n_steps=5, work=3.0, momentum=False, check_every=0)
    ),
    "… and acceleration": TwoPhase(3, phase_2=Refinement(n_steps=5, work=3.0, check_every=0)),
    "… and a third of the step": TwoPhase(3, phase_2=Refinement(n_steps=5, check_every=0)),
    "… and one local step": TwoPhase(3, phase_2=Refinement(check_every=0)),
    "defaults (… and checks)": TwoPhase(3),
    "defaults, k unknown": TwoPhase(),
}
NOISES = (0.2, 0.5, 1.0, 2.0)
SIZES = (50, 20, 10, 5)


def over_oracle(
    data: Mixed, clients: Clients, settings: TwoPhase, n_rounds: int, seed: int
) -> np.ndarray:
    """Return the errors over the oracle's, per round, infinite before there are models."""
    ran = simulate(clients, settings, n_rounds, seed=seed)
    best, found = model_error(oracle(data), data.theta), np.full(n_rounds, np.inf)
    for round_, centers in ran.history:
        if len(centers) == len(data.theta):
            found[round_ - 1] = model_error(centers, data.theta) / best
    return found


def settled(found: np.ndarray) -> float:
    """Return the round from which a run stays close to the oracle; infinite: never."""
    far = np.flatnonzero(found > CLOSE)
    last = int(far[-1]) + 1 if len(far) else 0
    return float(last + 1) if last < len(found) else np.inf


def changes() -> list[dict[str, Any]]:
    """Measure every change in every setting."""
    rows: list[dict[str, Any]] = [{"change": name} for name in CHANGES]
    for where in SETTINGS:
        drawn = [setting(where, np.random.default_rng(seed)) for seed in range(SEEDS)]
        clients = [Clients(data.X, data.y) for data in drawn]
        for row, settings in zip(rows, CHANGES.values(), strict=True):
            n_rounds = ROUNDS if settings.phase_2.normalise == "all" else FEWER
            runs = [
                over_oracle(data, own, settings, n_rounds, seed)
                for seed, (data, own) in enumerate(zip(drawn, clients, strict=True))
            ]
            rounds = [settled(found) for found in runs]
            row[where] = {
                "good": int(np.isfinite(rounds).sum()),
                "rounds": _number(float(np.median(rounds))),
                "ratio": _number(float(np.median([found[-1] for found in runs]))),
            }
    return rows


def limits() -> list[dict[str, Any]]:
    """Measure the defaults with k unknown: 10,000 points, more noise, smaller clients."""
    rows = []
    for size in SIZES:
        row: dict[str, Any] = {"points": size}
        for noise in NOISES:
            good = 0
            for seed in range(SEEDS):
                rng = np.random.default_rng(seed)
                sizes, shares = np.full(10_000 // size, size), np.full(3, 1 / 3)
                data = mixed_regression(sizes, shares, rng, noise=noise)
                clients = Clients(data.X, data.y)
                good += bool(over_oracle(data, clients, TwoPhase(), FEWER, seed)[-1] <= CLOSE)
            row[str(noise)] = good
        rows.append(row)
    return rows


def plain_rounds(data: Mixed, centers: np.ndarray, step: float, n_rounds: int) -> np.ndarray:
    """Run Phase 2 as the paper writes it, client by client, five local steps."""
    for _ in range(n_rounds):
        total, counts = np.zeros_like(centers), np.zeros(len(centers))
        for X, y in zip(data.X, data.y, strict=True):
            j = int(np.argmin([np.sum((y - X @ theta) ** 2) for theta in centers]))
            theta = centers[j]
            for _ in range(5):
                theta = theta - step * X.T @ (X @ theta - y) / len(y)
            total[j] += len(y) * (theta - centers[j])
            counts[j] += len(y)
        centers = centers + total / np.maximum(counts, 1)[:, None]
    return centers


def speed() -> dict[str, Any]:
    """Time a round of Phase 2: plain per-client loops, batched, and through Flower's messages."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    phase_2 = Refinement(n_steps=5, step_size=0.01, momentum=False, check_every=0)
    settings = TwoPhase(3, phase_2=phase_2)

    def measured(data: Mixed) -> dict[str, Any]:
        start = data.theta + 0.1 * np.random.default_rng(1).standard_normal(data.theta.shape)
        plain = partial(plain_rounds, data, start, 0.01)
        batched = partial(simulate, Clients(data.X, data.y), settings, centers=start)
        sent = partial(messages, data, start, settings)
        runs: dict[str, Callable[[], float]] = {
            "plain": lambda: timed(partial(plain, PLAIN)) / PLAIN,
            "batched": lambda: timed(partial(batched, BATCHED)) / BATCHED,
            "messages": lambda: sent()[1],
        }
        took = in_turn(runs, TURNS, lambda run: run())
        models, others = batched(SENT).state.centers, {"plain": plain(SENT), "messages": sent()[0]}
        return {
            "clients": len(data.X),
            "ms": {name: 1000 * turns for name, turns in took.items()},
            "largest_difference": {name: np.abs(of - models).max() for name, of in others.items()},
        }

    return {where: measured(setting(where, np.random.default_rng(0))) for where in ("C1", "C2")}


def ifca(data: Mixed, centers: np.ndarray, n_rounds: int) -> list[np.ndarray]:
    """Run IFCA as a plain loop: one local step of length 1, divided by the cluster's points."""
    history = []
    for _ in range(n_rounds):
        total, counts = np.zeros_like(centers), np.zeros(len(centers))
        for X, y in zip(data.X, data.y, strict=True):
            residuals = y[:, None] - X @ centers.T
            j = int(np.argmin((residuals**2).sum(axis=0)))
            total[j] += X.T @ residuals[:, j]
            counts[j] += len(y)
        centers = centers + total / np.maximum(counts, 1)[:, None]
        history.append(centers)
    return history


def peers() -> dict[str, Any]:
    """Time the defaults, batched, and IFCA's plain loop until within 5 % of the oracle."""
    found: dict[str, Any] = {}
    for where in ("C1", "C2"):
        rows = []
        for seed in range(DRAWS):
            data = setting(where, np.random.default_rng(seed))
            clients, best = Clients(data.X, data.y), model_error(oracle(data), data.theta)
            rng = np.random.default_rng([seed, 1])  # not the one that draws the true models
            start = rng.standard_normal(data.theta.shape) / np.sqrt(data.theta.shape[1])
            errors = [model_error(theta, data.theta) / best for theta in ifca(data, start, FEWER)]
            plain = settled(np.array(errors))
            if not np.isfinite(plain):
                continue  # a start from which IFCA does not find the clusters
            ours = settled(over_oracle(data, clients, TwoPhase(3), FEWER, seed))
            runs = {
                "plain": partial(ifca, data, start, int(plain)),
                "batched": partial(simulate, clients, TwoPhase(3), int(ours), seed=seed),
            }
            took = in_turn(runs, TURNS)
            rows.append([plain, ours, 1000 * took["plain"], 1000 * took["batched"]])
        rounds_plain, rounds_batched, *ms = (np.hstack(of) for of in zip(*rows, strict=True))
        found[where] = {
            "draws": len(rows),
            "rounds": {"plain": np.median(rounds_plain), "batched": np.median(rounds_batched)},
            "ms": dict(zip(("plain", "batched"), ms, strict=True)),
        }
    return found


def messages(data: Mixed, start: np.ndarray, settings: TwoPhase) -> tuple[np.ndarray, float]:
    """Return the models after rounds through Flower's messages, in process, and a round's time."""

    def make_client(context: Context) -> RegressionClient:
        i = int(context.node_config["partition-id"])
        return RegressionClient(data.X[i], data.y[i], context, min_support=0)  # as batched

    ends: list[float] = []
    strategy = FedX(
        **vars(settings),
        fraction_evaluate=0.0,
        on_round=lambda report: ends.append(time.process_time()),
    )
    grid = InProcessGrid(client_app(make_client), len(data.X))
    result = strategy.start(grid, ArrayRecord([start]), num_rounds=SENT)
    return result.arrays.to_numpy_ndarrays()[0], float(np.median(np.diff(ends)))


def _number(value: float) -> float | None:
    """Return what JSON can say of a number: null where it is infinite."""
    return value if np.isfinite(value) else None


def _cell(cell: dict[str, Any]) -> str:
    rounds = "-" if cell["rounds"] is None else f"{cell['rounds']:.0f}"
    ratio = "wrong k" if cell["ratio"] is None else f"{cell['ratio']:.2f}"
    return f"{cell['good']} of {SEEDS}, {rounds}, {ratio}"


def tables(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = [
        f"Seeds within 5 % of the oracle after {ROUNDS} rounds ({FEWER} from the division by the "
        "cluster's points on), the median round from which they stay there, the median final error "
        "over the oracle's:",
        "",
        markdown_table(
            ["", *SETTINGS],
            [[row["change"], *(_cell(row[s]) for s in SETTINGS)] for row in results["changes"]],
        ),
        f"Defaults, k unknown, 10,000 points in all: seeds of {SEEDS} within 5 % of the oracle and "
        f"with k = 3 after {FEWER} rounds, by points per client and the noise's standard deviation "
        "(the models are √2 apart):",
        "",
        markdown_table(
            ["points", *map(str, NOISES)],
            [[str(r["points"]), *(str(r[str(n)]) for n in NOISES)] for r in results["limits"]],
        ),
        "Milliseconds of a round of Phase 2, s = 5, on one core: through Flower's messages in "
        "process, by plain loops, and batched; how many times the plain loops' time that is; and "
        f"how far models are from the batched ones after {SENT} rounds. Medians of {TURNS} turns, "
        "and their range:",
        "",
        markdown_table(
            ["", "clients", "", "ms", "plain loops / this", "largest difference"],
            [
                [
                    *(where, str(of["clients"]), words, cell(of["ms"][way])),
                    cell(of["ms"]["plain"] / of["ms"][way]),
                    f"{of['largest_difference'].get(way, 0.0):.0e}",
                ]
                for where, of in results["speed"].items()
                for way, words in {
                    "messages": "through messages",
                    "plain": "plain loops",
                    "batched": "batched",
                }.items()
            ],
        ),
        "Until within 5 % of the oracle: the defaults (Phase 1 included), batched, and IFCA as a "
        f"plain loop with one local step of length 1. Medians of {TURNS} turns of each of the "
        f"draws, of {DRAWS}, in which IFCA finds the clusters from its one random start, and their "
        "range:",
        "",
        markdown_table(
            ["", "draws", "IFCA: rounds", "ms", "batched: rounds", "ms", "IFCA / batched"],
            [
                [
                    where,
                    str(own["draws"]),
                    *(f"{own['rounds']['plain']:.0f}", cell(own["ms"]["plain"])),
                    *(f"{own['rounds']['batched']:.0f}", cell(own["ms"]["batched"])),
                    cell(own["ms"]["plain"] / own["ms"]["batched"]),
                ]
                for where, own in results["peers"].items()
            ],
        ),
    ]
    return "\n".join(lines) + "\n"


def ratios() -> dict[str, Any]:
    """Measure times."""
    found, beside = speed(), peers()
    compared = {
        f"plain loops / {words}, {where}": of["ms"]["plain"] / of["ms"][way]
        for where, of in found.items()
        for way, words in {"batched": "batched", "messages": "through messages"}.items()
    }
    for where, own in beside.items():
        name = f"IFCA's plain loop / batched defaults, to 5 %, {where}"
        compared[name] = own["ms"]["plain"] / own["ms"]["batched"]
    return {"ratios": compared, "speed": found, "peers": beside}


def rest() -> dict[str, Any]:
    """Measure errors and rounds."""
    return {
        "seeds": SEEDS,
        "changes": changes(),
        "limits": limits(),
    }


if __name__ == "__main__":
    main("regression", (__doc__ or "").splitlines()[0], ratios, rest, tables)
