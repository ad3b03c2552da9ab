"""PerPCA: a round beside its authors' arithmetic in a plain loop, and the two-shot form.

Run from the repository's root: ``python benchmarks/perpca.py``; it writes
``benchmarks/results/perpca.json`` and the table of it, ``perpca.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from _measure import cell, in_turn, main
from sklearn.datasets import load_digits

from perdl_experiments.perpca import personalized_pca
from perdl_experiments.render import markdown_table

ROUNDS, TURNS = 20, 11


def digits() -> list[np.ndarray]:
    """Return ten clients of 100 images each."""
    return list(np.array_split(load_digits().data[:1000] / 16, 10))


def planted() -> list[np.ndarray]:
    """Return 30 clients of 300 samples: 10 shared directions, 5 of each one's own, and noise."""
    rng = np.random.default_rng(0)

    def directions(count: int) -> np.ndarray:
        return np.linalg.qr(rng.standard_normal((60, count)))[0].T

    shared = directions(10)
    return [
        rng.standard_normal((300, 10)) @ shared
        + 2 * rng.standard_normal((300, 5)) @ directions(5)
        + 0.1 * rng.standard_normal((300, 60))
        for _ in range(30)
    ]


#: Clients' samples, shared components, and components of each client.
SETS = {"digits": (digits(), 12, 12), "planted": (planted(), 10, 5)}


def polar(A: np.ndarray) -> np.ndarray:
    """Return the matrix with orthonormal columns that is nearest to ``A``."""
    left, _, right = np.linalg.svd(A, full_matrices=False)
    return left @ right


def plain(samples: Sequence[np.ndarray], n_global: int, n_local: int, n_rounds: int) -> float:
    """Run PerPCA as its authors write it, client by client; return the last loss.

    The start and the step are this library's: without rounds it is the two-shot form.
    """
    start = personalized_pca(samples, n_global, n_local, n_rounds=0)
    U, own = start.global_components.T, [V.T for V in start.local_components]
    step, losses = 1.0, [np.inf]
    for _ in range(n_rounds):
        shared, loss = [], 0.0
        for i, X in enumerate(samples):
            S = X.T @ X
            W = np.hstack([U, polar(own[i] - U @ (U.T @ own[i]))])
            product = S @ W
            loss += np.trace(S) - np.sum(W * product)
            curvature = np.linalg.eigvalsh(W.T @ product)[-1]
            W = polar(W + step / curvature * product)
            shared.append(W[:, :n_global])
            own[i] = W[:, n_global:]
        U = np.linalg.qr(np.mean(shared, axis=0))[0]
        step = step / 2 if loss > losses[-1] else step
        losses.append(loss)
    return losses[-1]


def error(samples: Sequence[np.ndarray], n_global: int, n_local: int, n_rounds: int) -> float:
    """Return the share of the samples' squares that all components leave."""
    found = personalized_pca(samples, n_global, n_local, n_rounds=n_rounds)
    left = 0.0
    for X, V in zip(samples, found.local_components, strict=True):
        W = polar(np.vstack([found.global_components, V]).T).T
        left += float(np.sum((X - X @ W.T @ W) ** 2))
    return left / sum(float(np.sum(X**2)) for X in samples)


def ratios() -> dict[str, Any]:
    """Measure times, and check that both compute the same."""
    rows = []
    for name, (samples, n_global, n_local) in SETS.items():
        runs = {
            "plain": partial(plain, samples, n_global, n_local, ROUNDS),
            "ours": partial(personalized_pca, samples, n_global, n_local, n_rounds=ROUNDS),
            "two-shot": partial(personalized_pca, samples, n_global, n_local, n_rounds=0),
        }
        took = {name: 1000 * turns for name, turns in in_turn(runs, TURNS).items()}
        last = personalized_pca(samples, n_global, n_local, n_rounds=ROUNDS).losses[-1]
        rows.append(
            {
                "name": name,
                "ms_plain": (took["plain"] - took["two-shot"]) / ROUNDS,
                "ms_ours": (took["ours"] - took["two-shot"]) / ROUNDS,
                "ms_all_rounds": took["ours"],
                "ms_two_shot": took["two-shot"],
                "difference": abs(plain(samples, n_global, n_local, ROUNDS) - last) / last,
            }
        )
    return {
        "ratios": {f"plain loop / PerPCA, {r['name']}": r["ms_plain"] / r["ms_ours"] for r in rows},
        "speed": rows,
    }


def rest() -> dict[str, Any]:
    """Measure errors."""
    return {
        "errors": {
            name: {str(n): error(*given, n) for n in (0, ROUNDS)} for name, given in SETS.items()
        }
    }


def tables(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    rows = [
        [
            row["name"],
            *(cell(row[name]) for name in ("ms_plain", "ms_ours")),
            *(cell(row["ms_plain"] / row["ms_ours"]), f"{row['difference']:.0e}"),
            *(cell(row["ms_all_rounds"]), f"{results['errors'][row['name']][str(ROUNDS)]:.4f}"),
            *(cell(row["ms_two_shot"]), f"{results['errors'][row['name']]['0']:.4f}"),
        ]
        for row in results["speed"]
    ]
    heads = ["", "plain round", "round", "ratio", "difference of loss"]
    heads += ["all", "error", "two-shot", "error"]
    return (
        "A round of PerPCA by its authors' arithmetic in a plain loop, and this library's, in "
        f"milliseconds; {ROUNDS} rounds and the two-shot form, the start included: time, and the "
        "share of the samples' squares that shared and own components leave. Times are medians of "
        f"{TURNS} turns, and their range:\n\n" + markdown_table(heads, rows)
    )


if __name__ == "__main__":
    main("perpca", (__doc__ or "").splitlines()[0], ratios, rest, tables)
