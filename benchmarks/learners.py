"""Local learners against scikit-learn's: time to the same error.

Run from the repository's root: ``python benchmarks/learners.py``; it writes
``benchmarks/results/learners.json`` and the table of it, ``learners.md``. Some two minutes.

*Time to the same error*: two learners start from the same dictionary on the same samples; after
every iteration (scikit-learn's `DictionaryLearning`: every fifth, `MiniBatchDictionaryLearning`:
every eighth batch, where their callbacks allow it) the clock stands still while the samples are
coded by the same orthogonal matching pursuit. The error that both are to reach is 1.02 times the
least error of whichever does worse; the times are those of the first iterations that are there.
scikit-learn's learners have the best of several penalties, separately in each comparison.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from time import process_time
from typing import Any, NamedTuple

import numpy as np
from _measure import cell, in_turn, main
from sklearn.datasets import load_digits
from sklearn.decomposition import DictionaryLearning, MiniBatchDictionaryLearning
from sklearn.exceptions import ConvergenceWarning

from flwr_perdl.dictionary import (
    GradientLearner,
    KSVDLearner,
    MODLearner,
    OrthogonalLearner,
    normalize_atoms,
    sparse_code,
)
from perdl_experiments.render import markdown_table

#: Starts per comparison, and turns of an iteration; medians are reported.
STARTS, TURNS = 5, 11
#: Iterations of ours; of scikit-learn's, over all samples.
OURS, BATCH, MINI = 80, 26, 16
#: scikit-learn's penalties, in units of the root mean square norm of the samples.
PENALTIES = (0.1, 0.2)
#: What both are to reach, as a multiple of the worse one's least error.
SLACK = 1.02


class Curve(NamedTuple):
    """A learner on its way: seconds so far, and the error there."""

    seconds: list[float]
    errors: list[float]

    def reaches(self, error: float) -> float:
        """Return the seconds until the error is no larger than this."""
        return next(
            (s for s, e in zip(self.seconds, self.errors, strict=True) if e <= error), np.inf
        )


def planted(seed: int, n: int, d: int, r: int, k: int, *, orthonormal: bool) -> np.ndarray:
    """Return samples of ``k`` atoms each, with a noise of 0.05."""
    rng = np.random.default_rng(seed)
    atoms = rng.standard_normal((d if orthonormal else r, d))
    atoms = np.linalg.qr(atoms)[0][:r] if orthonormal else normalize_atoms(atoms)
    codes = np.zeros((n, r))
    for row in codes:
        row[rng.choice(r, k, replace=False)] = rng.choice([-1, 1], k) * (0.5 + rng.random(k))
    samples: np.ndarray = codes @ atoms + 0.05 * rng.standard_normal((n, d))
    return samples


#: Samples, atoms, atoms per sample.
DATA: dict[str, Callable[[], tuple[np.ndarray, int, int]]] = {
    "planted, orthonormal": lambda: (planted(0, 2000, 64, 32, 4, orthonormal=True), 32, 4),
    "planted, overcomplete": lambda: (planted(0, 2000, 64, 96, 4, orthonormal=False), 96, 4),
    "digits": lambda: (load_digits().data / 16, 48, 5),
}
LEARNERS = {
    "orthogonal": OrthogonalLearner,
    "MOD": MODLearner,
    "K-SVD": KSVDLearner,
    "gradient": GradientLearner,
}
PEERS = ("DictionaryLearning", "MiniBatchDictionaryLearning")


def error_of(X: np.ndarray, D: np.ndarray, k: int) -> float:
    """Return the share of the samples' energy that ``k`` atoms each leave."""
    atoms = normalize_atoms(np.ascontiguousarray(D))
    return float(np.sum((X - sparse_code(X, atoms, n_nonzero=k) @ atoms) ** 2) / np.sum(X**2))


def ours(X: np.ndarray, D: np.ndarray, k: int, learner: Any) -> Curve:
    """Let one of our learners run."""
    curve, used = Curve([0.0], [error_of(X, D, k)]), 0.0
    learner.step(X, D)  # compiled, and not counted
    for _ in range(OURS):
        since = process_time()
        D = learner.step(X, D)
        used += process_time() - since
        curve.seconds.append(used)
        curve.errors.append(error_of(X, D, k))
    return curve


def peer(name: str, X: np.ndarray, D: np.ndarray, k: int, alpha: float, callback: Any) -> Any:
    """Return scikit-learn's learner, coordinate descent from the same start."""
    common = {"alpha": alpha, "fit_algorithm": "cd", "tol": 0.0, "dict_init": D.copy()}
    if name == "DictionaryLearning":
        start = sparse_code(X, D, n_nonzero=k)
        return DictionaryLearning(
            len(D), max_iter=BATCH, code_init=start, callback=callback, **common
        )
    return MiniBatchDictionaryLearning(
        len(D),
        max_iter=MINI,
        max_no_improvement=None,
        random_state=0,
        callback=callback,
        **common,
    )


def theirs(name: str, X: np.ndarray, D: np.ndarray, k: int, alpha: float) -> Curve:
    """Let one of scikit-learn's learners run."""
    curve, used, calls, since = Curve([0.0], [error_of(X, D, k)]), 0.0, 0, process_time()

    def look(state: Mapping[str, Any]) -> None:
        nonlocal used, calls, since
        calls += 1
        if name == "DictionaryLearning" or calls % 8 == 0:
            used += process_time() - since
            curve.seconds.append(used)
            curve.errors.append(error_of(X, state["dictionary"], k))
            since = process_time()

    peer(name, X, D, k, alpha, look).fit(X)
    return curve


def fitting(r: int, d: int, k: int) -> Iterator[tuple[str, Any]]:
    """Yield our learners that can have ``r`` atoms of ``d`` features, with their names."""
    for name, kind in LEARNERS.items():
        if r <= d or not kind.orthogonal:
            yield name, kind(r, n_nonzero=k)


def same_error() -> list[dict[str, Any]]:
    """Time ours and scikit-learn's to the same error."""
    rows = []
    for data, make in DATA.items():
        X, r, k = make()
        scale = float(np.sqrt(np.sum(X**2) / len(X)))
        curves: dict[tuple[str, float], list[Curve]] = {}
        for seed in range(STARTS):
            start = MODLearner(r).start(X, np.random.default_rng(seed))
            for name, learner in fitting(r, X.shape[1], k):
                curves.setdefault((name, 0.0), []).append(ours(X, start, k, learner))
            for name in PEERS:
                for penalty in PENALTIES:
                    found = theirs(name, X, start, k, penalty * scale)
                    curves.setdefault((name, penalty), []).append(found)
        for name, learner in fitting(r, X.shape[1], k):
            row: dict[str, Any] = {"data": data, "learner": name, **alone(X, start, learner)}
            mine = curves[name, 0.0]
            row["error"] = median(min(curve.errors) for curve in mine)
            for other in PEERS:
                rivals = [curves[other, penalty] for penalty in PENALTIES]
                least = [min(min(c.errors) for c in of) for of in zip(*rivals, strict=True)]
                pairs = []
                for i, curve in enumerate(mine):
                    goal = SLACK * max(min(curve.errors), least[i])
                    pairs.append((curve.reaches(goal), min(c[i].reaches(goal) for c in rivals)))
                row[other] = {
                    "error": median(least),
                    "seconds": [b for _, b in pairs],
                    "seconds_ours": [a for a, _ in pairs],
                    "ratio": [b / a for a, b in pairs],
                }
            rows.append(row)
    return rows


def alone(X: np.ndarray, D: np.ndarray, learner: Any) -> dict[str, np.ndarray]:
    """Time an iteration, and the products that it cannot do without."""
    C = learner.code(X, D)

    def products() -> None:
        X @ D.T
        C.T @ X

    took = in_turn({"step": lambda: learner.step(X, D), "products": products}, TURNS)
    return {"ms_step": 1000 * took["step"], "ms_products": 1000 * took["products"]}


def tables(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    rows, learned = [], results["same_error"]
    for row in sorted(learned, key=lambda row: min(median(row[name]["ratio"]) for name in PEERS)):
        cells = [
            f"{median(row[name]['seconds_ours']):.2f} : {median(row[name]['seconds']):.2f}, "
            f"**{cell(row[name]['ratio'], '.1f')}** [{row[name]['error']:.4f}]"
            for name in PEERS
        ]
        products = np.median(row["ms_step"] / row["ms_products"])
        step = f"{cell(row['ms_step'], '.1f')}, {products:.1f} times"
        rows.append([f"{row['data']}: {row['learner']}", f"{row['error']:.4f}", step, *cells])
    heads = ["", "error", "an iteration (ms)", *(f"`{name}`" for name in PEERS)]
    return (
        f"Seconds to the same error, ours and scikit-learn's, and how many times faster ours is; "
        f"medians of {STARTS} starts, and the ratios' range. In brackets the least error that each "
        "reaches, as a share of the samples' energy. An iteration: all samples coded and the "
        f"dictionary updated, in {TURNS} turns, and how many times as long as the two products "
        f"with all samples that takes.\n\n{markdown_table(heads, rows)}"
    )


def ratios() -> dict[str, Any]:
    """Measure times."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    warnings.simplefilter("ignore", ConvergenceWarning)
    learned = same_error()
    compared = {
        f"{name} / {row['learner']}, {row['data']}": row[name]["ratio"]
        for row in learned
        for name in PEERS
    }
    return {"ratios": compared, "same_error": learned}


if __name__ == "__main__":
    about = (__doc__ or "").splitlines()[0]
    main("learners", about, ratios, dict, tables)
