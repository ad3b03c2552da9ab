"""Matching pursuit and the lasso beside SPAMS (C++) and scikit-learn: time, threads, memory.

Run from the repository's root: ``python benchmarks/coding.py``; it writes
``benchmarks/results/coding.json`` and the table of it, ``coding.md``. Some two minutes.

All code the same samples with the same atoms. SPAMS takes the atom that lowers the residual most
(``selection="residual"``), scikit-learn the one that correlates most. One thread is measured in the
processor's time; ours in two threads beside ours in one by the clock on the wall, for which the
machine must be idle. Memory is what a process of its own holds at most beyond what it held before
the call, without the codes: a dense array of ours, a sparse one of SPAMS's.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import spams
from _measure import CORES, cell, in_turn, main, on, wall
from scipy.ndimage import zoom
from sklearn.datasets import load_digits
from sklearn.decomposition import sparse_encode
from threadpoolctl import threadpool_limits

from flwr_perdl.dictionary import lasso, normalize_atoms, omp
from perdl_experiments.render import markdown_table

#: Kind of samples, their number, features, atoms; atoms per sample of the pursuit.
CASES = {
    "random, 2,000 x 64, 256 atoms": ("random", 2000, 64, 256, 10),
    "images, 5,000 x 784, 100 atoms": ("images", 5000, 784, 100, 20),
    "random, 20,000 x 64, 256 atoms": ("random", 20_000, 64, 256, 10),
}
PENALTIES = (2.0, 1.0)
TURNS = 5
RIVALS = ("SPAMS", "scikit-learn")

Data = tuple[np.ndarray, np.ndarray, int]
Coder = Callable[[], Any]


def drawn(kind: str, n: int, d: int, r: int, k: int) -> Data:
    """Return samples, atoms, and atoms per sample.

    Random ones are normal. Images are digits, enlarged and moved; their atoms are some of them.
    """
    rng = np.random.default_rng(0)
    if kind == "random":
        return rng.standard_normal((n, d)), normalize_atoms(rng.standard_normal((r, d))), k
    side = round(d**0.5)
    small = load_digits().images[rng.integers(0, 1797, n)] / 16
    large = zoom(small, (1, side / 8, side / 8), order=1)
    moves = rng.integers(-2, 3, (n, 2))
    X = np.stack([np.roll(x, move, (0, 1)).ravel() for x, move in zip(large, moves, strict=True)])
    return X, normalize_atoms(X[rng.choice(n, r, replace=False)]), k


def coders(data: Data, penalty: float | None, threads: int) -> dict[str, Coder]:
    """Return who codes, by matching pursuit if there is no penalty."""
    X, D, k = data
    samples, atoms = np.asfortranarray(X.T), np.asfortranarray(D.T)
    if penalty is None:
        found = {
            "ours": partial(omp, X, D, k, selection="residual"),
            "SPAMS": partial(spams.omp, samples, atoms, L=k, numThreads=threads),
            "scikit-learn": partial(sparse_encode, X, D, algorithm="omp", n_nonzero_coefs=k),
        }
    else:
        found = {
            "ours": lambda: lasso(X, D, penalty).codes,
            "SPAMS": partial(spams.lasso, samples, atoms, lambda1=penalty, numThreads=threads),
            "scikit-learn": partial(
                sparse_encode, X, D, algorithm="lasso_cd", alpha=penalty, max_iter=10_000
            ),
        }
    return {name: on(threads, code) for name, code in found.items()}


def objective(data: Data, penalty: float | None, codes: Any) -> float:
    """Return half of the squares that are left of the samples, and the penalty."""
    X, D, _ = data
    C = codes if isinstance(codes, np.ndarray) else codes.toarray().T
    return float(0.5 * ((X - C @ D) ** 2).sum() + (penalty or 0) * np.abs(C).sum())


def held(field: str) -> float:
    """Return megabytes that this process holds (``VmRSS``), or has held at most (``VmHWM``)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 2**10


def extra_memory(case: tuple[str, int, int, int, int], penalty: float | None, name: str) -> float:
    """Return the megabytes beyond its codes that a call needs, in a process of its own."""
    with threadpool_limits(1):
        data = drawn(*case)
        coders((data[0][:10], data[1], data[2]), penalty, 1)[name]()  # compiled, and loaded
        code = coders(data, penalty, CORES)[name]
        Path("/proc/self/clear_refs").write_text("5")  # the most held is counted from here
        before = held("VmRSS")
        codes = code()
        size = codes.nbytes if isinstance(codes, np.ndarray) else codes.data.nbytes * 1.5
        return held("VmHWM") - before - size / 2**20


def timed_cases() -> dict[str, Any]:
    """Measure times and objectives of all."""
    rows, ratios = [], {}
    for what, case in CASES.items():
        data = drawn(*case)
        for penalty in (None, *PENALTIES):
            how = f"pursuit, k = {case[-1]}" if penalty is None else f"lasso, penalty {penalty:g}"
            one = coders(data, penalty, 1)
            reached = {name: objective(data, penalty, code()) for name, code in one.items()}
            seconds = in_turn(one, TURNS)
            shared = {n: coders(data, penalty, n)["ours"] for n in (1, 2)[:CORES]}
            waited = in_turn(shared, TURNS, wall)
            faster = {rival: seconds[rival] / seconds["ours"] for rival in RIVALS}
            rows.append({"what": what, "how": how, "seconds": seconds, "faster": faster})
            rows[-1]["objectives"] = reached
            rows[-1]["two_threads"] = waited[1] / waited[2] if CORES > 1 else None
            for rival, turns in faster.items():
                ratios[f"{rival} / ours, {what}: {how}"] = turns
    return {"ratios": ratios, "rows": rows}


def memories() -> dict[str, Any]:
    """Measure the memory of ours and SPAMS's."""
    case = CASES["random, 20,000 x 64, 256 atoms"]
    found = {}
    for penalty in (None, 1.0):
        for name in ("ours", "SPAMS"):
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                how = "pursuit" if penalty is None else "lasso"
                found[f"{how}, {name}"] = pool.submit(extra_memory, case, penalty, name).result()
    return {"extra_megabytes": found}


def table(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    cells = []
    for row in sorted(results["rows"], key=lambda row: np.median(row["faster"]["SPAMS"])):
        ours, more = cell(1000 * row["seconds"]["ours"], ".0f"), row["two_threads"]
        faster = [cell(row["faster"][rival]) for rival in RIVALS]
        apart = row["objectives"]["ours"] / row["objectives"]["SPAMS"] - 1
        cells.append([row["what"], row["how"], ours, *faster])
        cells[-1] += ["-" if more is None else cell(more), f"{apart:+.0e}"]
    heads = ["", "", "ours (ms)", *(f"{rival} / ours" for rival in RIVALS)]
    heads += ["two threads", "objective"]
    first = (
        "Our milliseconds in one thread, and how many times as long the others take; how many "
        "times as fast ours is in two threads; how far its objective (the pursuit's error) is "
        f"above SPAMS's. Medians of {TURNS} turns, and their range."
    )
    held = ", ".join(f"{name} {mb:.0f} MB" for name, mb in results["extra_megabytes"].items())
    last = f"Memory beside the codes, 20,000 samples, {CORES} thread(s): {held}."
    return f"{first}\n\n{markdown_table(heads, cells)}\n{last}\n"


if __name__ == "__main__":
    main("coding", (__doc__ or "").splitlines()[0], timed_cases, memories, table)
