"""Dual inference: rounds to 40 dB of all methods, and time against a loop over the agents.

Run from the repository's root: ``python benchmarks/inference.py``; it writes
``benchmarks/results/inference.json`` and the tables of it, ``inference.md`` (``--out`` names
another folder). Under three minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from _measure import CORES, cell, in_turn, main, on, timed, wall

from flwr_perdl.network import Topology, metropolis_weights
from flwr_perdl.network.inference import ConsensusADMM, Inference, infer
from flwr_perdl.network.objectives import SparseSVD
from perdl_experiments.measures import rounds_to
from perdl_experiments.render import markdown_table
from perdl_experiments.studies.inference import FOUND, METHODS, draw, trace

GRAPHS, LIMIT = 10, 1200
#: Loss, share of impulses, connectivity.
CASES = [
    ("squared", 0.0, 0.5),
    ("squared", 0.0, 0.15),
    ("huber", 0.0, 0.5),
    ("huber", 0.0, 0.15),
    ("huber", 0.05, 0.5),
    ("huber", 0.05, 0.15),
]
AGENTS, FEATURES = 50, 1000
#: Samples that are inferred at once, and in the span, where a block holds twenty times as many.
SAMPLES, IN_SPAN = 16, 64
#: A round's time is the difference of a long and a short run of the same turn. The long one is as
#: long as an inference, whose first rounds measure residuals more often.
SHORT, LONG, TURNS = 4, 104, 7
LOOPED = (1, 41)
OBJECTIVE = SparseSVD(0.05, 0.1)


def rounds() -> list[dict[str, Any]]:
    """Count the rounds to 40 dB on the worst agent's nu, per case and method."""
    rows = []
    for loss, impulses, p in CASES:
        counts: dict[str, list[float]] = {name: [] for name in METHODS}
        for seed in range(GRAPHS):
            case = draw(loss, AGENTS, 300, p, np.random.default_rng(seed), impulses)
            for name, method in METHODS.items():
                counts[name].append(
                    rounds_to(trace(case, case.program(method), LIMIT, top=60)[1], FOUND)
                )
        row: dict[str, Any] = {"loss": loss, "impulses": impulses, "connectivity": p}
        for name, found in counts.items():
            ends = {"median": float(np.median(found)), "worst": max(found)}
            row[name] = {end: n if np.isfinite(n) else -1 for end, n in ends.items()}
        rows.append(row)
    return rows


def atc_loop(x: np.ndarray, W: np.ndarray, A: np.ndarray, n_rounds: int) -> list[np.ndarray]:
    """Run (31) as the paper lists it: agent by agent, neighbour by neighbour."""
    o, N = OBJECTIVE, len(W)
    mu = 0.9 * o.step_bound(1)
    heard = [np.flatnonzero(row) for row in A]
    nu = [np.zeros_like(x) for _ in range(N)]
    for _ in range(n_rounds):
        psi = []
        for k in range(N):
            s = W[k] @ nu[k]
            y = (s - max(-o.gamma, min(o.gamma, s))) / o.delta
            psi.append(nu[k] - mu * ((nu[k] - x) / N + y * W[k]))
        for k in range(N):
            total = np.zeros_like(x)
            for j in heard[k]:
                total += A[k, j] * psi[j]
            nu[k] = total
    return nu


def admm_loop(x: np.ndarray, W: np.ndarray, admm: ConsensusADMM, n_rounds: int) -> list[np.ndarray]:
    """Run the over-relaxed consensus ADMM agent by agent, neighbour by neighbour."""
    o, N, r = OBJECTIVE, len(W), admm.relaxation
    D, roots = admm.degrees, admm.roots
    heard = [admm.topology.neighbours(k) for k in range(N)]
    linear = [x / N for _ in range(N)]
    belief = [np.zeros_like(x) for _ in range(N)]
    square = [float(w @ w) for w in W]
    for _ in range(n_rounds):
        nu = []
        for k in range(N):
            a = 1 / N + D[k]
            s = (W[k] @ linear[k]) / a
            y = (s - max(-o.gamma, min(o.gamma, s))) / (o.delta + square[k] / a)
            nu.append((linear[k] - y * W[k]) / a)
        for k in range(N):
            around = np.zeros_like(x)
            for j in heard[k]:
                around += roots[k] * roots[j] * nu[j]
            linear[k] = linear[k] - r * belief[k] + 2 * r * around
            belief[k] = (1 - 2 * r) * belief[k] + 2 * r * (D[k] * nu[k] + around)
    return nu


def speed() -> list[dict[str, Any]]:
    """Time the loop and `infer`, per round and sample, and the set-up of all samples."""
    rng = np.random.default_rng(0)
    W = rng.standard_normal((AGENTS, FEATURES))
    W /= np.linalg.norm(W, axis=1, keepdims=True)
    X = rng.standard_normal((IN_SPAN, FEATURES)) / 10
    rows = []
    for p in (0.5, 0.1):
        topology = Topology.erdos_renyi(AGENTS, p, seed=0)
        A = metropolis_weights(topology).matrix.toarray()
        admm = ConsensusADMM(OBJECTIVE, topology, list(W[:, None]), X)
        loops: dict[str, Callable[[int], list[np.ndarray]]] = {
            "atc": lambda n, A=A: atc_loop(X[0], W, A, n),
            "admm": lambda n, admm=admm: admm_loop(X[0], W, admm, n),
        }
        for method, loop in loops.items():

            def stacked(
                n: int,
                dtype: type,
                compress: bool,
                *,
                method: str = method,
                topology: Topology = topology,
            ) -> Inference:
                return infer(
                    OBJECTIVE,
                    X[: IN_SPAN if compress else SAMPLES].astype(dtype),
                    list(W[:, None].astype(dtype)),
                    topology,
                    method=method,
                    n_rounds=n,
                    tolerance=0,
                    compress=compress,
                )

            kinds = {
                "float64": (1, np.float64, False),
                "float32": (1, np.float32, False),
                "float64, all cores": (CORES, np.float64, False),
                "float32, all cores": (CORES, np.float32, False),
                "span": (1, np.float64, True),
                "span32": (1, np.float32, True),
            }
            truth = np.array(loop(SHORT))
            differences = {
                name: float(np.abs(stacked(SHORT, *kind).nu[:, 0] - truth).max())
                for name, (_, *kind) in kinds.items()
            }
            runs = {("loop", i): partial(timed, partial(loop, n)) for i, n in enumerate(LOOPED)}
            for name, (cores, *kind) in kinds.items():
                for i, n in enumerate((SHORT, LONG)):
                    run = partial(on(cores, stacked), n, *kind)
                    runs[name, i] = partial(wall if "cores" in name else timed, run)
            took = in_turn(runs, TURNS, lambda run: run())
            samples = {name: IN_SPAN if kind[-1] else SAMPLES for name, kind in kinds.items()}
            scale = {name: 1000 / (LONG - SHORT) / n for name, n in samples.items()}
            scale["loop"] = 1000 / (LOOPED[1] - LOOPED[0])
            ms = {name: (took[name, 1] - took[name, 0]) * scale[name] for name in scale}
            rows.append(
                {
                    "method": method,
                    "connectivity": p,
                    "cores": CORES,
                    "ms_per_round_and_sample": ms,
                    "times_faster": {name: ms["loop"] / ms[name] for name in kinds},
                    "ms_set_up": {
                        name: 1000 * took[name, 0] - SHORT * n * ms[name]
                        for name, n in samples.items()
                    },
                    "largest_difference": differences,
                }
            )
    return rows


def tables(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""

    def count(n: float) -> str:
        return f"{n:.0f}" if n >= 0 else f"> {LIMIT:,}"

    counted, timed = [], []
    for row in results["rounds"]:
        name = row["loss"] + (", impulses" if row["impulses"] else "")
        cells = [f"{count(row[m]['median'])} ({count(row[m]['worst'])})" for m in METHODS]
        counted.append([f"{name}, p = {row['connectivity']}", *cells])
    for row in results["speed"]:
        loop, ms, first = (
            row["ms_per_round_and_sample"]["loop"],
            *(
                {name: float(np.median(turns)) for name, turns in row[of].items()}
                for of in ("ms_per_round_and_sample", "ms_set_up")
            ),
        )
        cells = [
            f"{ms[name]:.3f} [{first[name]:.0f}]: {cell(turns)}"
            for name, turns in row["times_faster"].items()
        ]
        timed.append([f"{row['method']}, p = {row['connectivity']}", cell(loop), *cells])
    return (
        f"Rounds to {FOUND:.0f} dB on the worst agent's nu, median (worst) of {GRAPHS} graphs that "
        f"are not fully connected, default parameters; N = {AGENTS}, M = 300, one atom each:\n\n"
        f"{markdown_table(['', *(method.words for method in METHODS.values())], counted)}\n"
        f"Milliseconds per round and sample, N = {AGENTS}, M = {FEATURES}, {SAMPLES} samples, "
        f"{IN_SPAN} in the span; in brackets what setting up all samples takes, once; then how "
        f"many times faster that is than the loop over agents. Medians of {TURNS} turns, and the "
        f"ratios' range. On one core by the processor's time, and on all "
        f"{results['speed'][0]['cores']} by the clock on the wall:\n\n"
        + markdown_table(["", "loop", *results["speed"][0]["times_faster"]], timed)
    )


def ratios() -> dict[str, Any]:
    """Measure times."""
    found = speed()
    return {
        "ratios": {
            f"loop / {kind}, {row['method']}, p = {row['connectivity']}": ratio
            for row in found
            for kind, ratio in row["times_faster"].items()
        },
        "speed": found,
    }


if __name__ == "__main__":
    about = (__doc__ or "").splitlines()[0]
    main("inference", about, ratios, lambda: {"rounds": rounds()}, tables)
