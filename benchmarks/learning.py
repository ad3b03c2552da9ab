"""Held-out error against seconds: PerMA with `LassoLearner`, and pooled learners.

Run from the repository's root: ``python benchmarks/learning.py``; it writes
``benchmarks/results/learning.json`` and the table of it, ``learning.md``. Images: scikit-learn's
digits, or a file with ``X`` and ``y`` (``DATA=FILE.npz python benchmarks/learning.py``).

Ten clients, nine tenths of each one's images with the same label; errors are those of images of all
labels that nobody learned from, coded by the same orthogonal matching pursuit with 10 and 20 atoms.
SPAMS and scikit-learn (``pip install spams-bin scikit-learn``) see all clients' images; their
penalty is that of `LassoLearner` for a sample of mean norm. Seconds are processor seconds of the
whole process: all threads together. Some four minutes.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import spams
from _measure import cell, in_turn, main
from sklearn.datasets import load_digits
from sklearn.decomposition import MiniBatchDictionaryLearning

from flwr_perdl.dictionary import AUTO_PENALTY, LassoLearner, normalize_atoms, sparse_code
from perdl_experiments.engine import federate
from perdl_experiments.render import markdown_table
from perdl_experiments.studies import configure, find, images

N_NONZERO = (10, 20)
ROUNDS = (2, 5, 10, 20)
ITERATIONS = (100, 500)
TURNS = 3


def rest() -> dict[str, Any]:
    """Measure errors and seconds."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        return measure(os.environ.get("DATA") or _digits(Path(folder)))


def measure(data: str) -> dict[str, Any]:
    """Return errors and seconds by method, in the order of the effort."""
    given = {"methods": "main", "samples_per_client": 500}
    config = configure(find("images"), data=data, options=given)
    task = config.task
    X, n_atoms = np.vstack(task.clients), config.n_atoms
    penalty = AUTO_PENALTY * float(np.linalg.norm(X, axis=1).mean())
    learner = LassoLearner(n_atoms)

    def ours(rounds: int) -> np.ndarray:
        own = configure(find("images"), data=data, rounds=rounds, options=given)
        return federate(images, own).arrays[0]

    def pooled(n_iter: int) -> np.ndarray:
        D = learner.start(X, np.random.default_rng(0))
        for _ in range(n_iter):
            D = learner.step(X, D)
        return D

    def by_spams(n_iter: int) -> np.ndarray:
        options = {"lambda1": penalty, "iter": n_iter, "numThreads": 1, "verbose": False}
        return spams.trainDL(np.asfortranarray(X.T), K=n_atoms, **options).T

    def by_sklearn(alpha: float) -> np.ndarray:
        options = {"alpha": alpha, "fit_algorithm": "cd", "random_state": 0}
        return MiniBatchDictionaryLearning(n_atoms, **options).fit(X).components_

    rows: list[tuple[str, Callable[[Any], np.ndarray], Any]] = [
        *(("PerMA, 10 clients, rounds", ours, rounds) for rounds in ROUNDS),
        *(("LassoLearner, pooled, iterations", pooled, n) for n in ROUNDS),
        *(("SPAMS trainDL, pooled, iterations", by_spams, n) for n in ITERATIONS),
        *(("scikit-learn, pooled, penalty", by_sklearn, alpha) for alpha in (penalty, 0.5, 1.0)),
    ]
    learned: dict[int, np.ndarray] = {}

    def learn(i: int) -> None:
        _, method, of = rows[i]
        learned[i] = method(of)

    seconds = in_turn({i: partial(learn, i) for i in range(len(rows))}, TURNS)
    return {
        "samples": list(X.shape),
        "penalty": penalty,
        "rows": [
            {"method": name, "of": of, "seconds": seconds[i], **_errors(learned[i], task.test)}
            for i, (name, _, of) in enumerate(rows)
        ],
    }


def _digits(folder: Path) -> str:
    digits = load_digits()
    np.savez(folder / "digits.npz", X=digits.images / 16, y=digits.target)
    return str(folder / "digits.npz")


def _errors(atoms: np.ndarray, test: np.ndarray) -> dict[str, float]:
    """Return what one method comes to on the held-out images."""
    rng = np.random.default_rng(0)  # atoms that were never used
    D = normalize_atoms(
        np.ascontiguousarray(atoms), normalize_atoms(rng.standard_normal(atoms.shape))
    )
    errors = [np.mean((test - sparse_code(test, D, n_nonzero=k) @ D) ** 2) for k in N_NONZERO]
    return {f"mse_{k}": float(e) for k, e in zip(N_NONZERO, errors, strict=True)}


def table(measured: dict[str, Any]) -> str:
    """Return the table."""
    rows = [
        [row["method"], f"{row['of']:.3g}", cell(row["seconds"], ".1f")]
        + [f"{row[f'mse_{k}']:.5f}" for k in N_NONZERO]
        for row in measured["rows"]
    ]
    heads = ["", "", "processor seconds", *(f"MSE, k = {k}" for k in N_NONZERO)]
    said = f"Medians of {TURNS} turns, and their range.\n\n"
    return said + markdown_table(heads, rows)


if __name__ == "__main__":
    main("learning", (__doc__ or "").splitlines()[0], dict, rest, table)
