"""The heavy parts on arrays of other libraries: PyTorch's beside NumPy's.

Run from the repository's root: ``python benchmarks/arrays.py``; it writes
``benchmarks/results/arrays.json`` and the table of it, ``arrays.md``. Under a minute. PyTorch is no
dependency of anything here: where it is not installed, or sees no GPU, the table says so. Its times
say something about PyTorch and the machine, so `benchmarks/_check.py` does not compare them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from _measure import fastest, main

from flwr_perdl._arrays import on_cpu, on_host
from flwr_perdl.dictionary import OrthogonalLearner, normalize_atoms, omp
from flwr_perdl.dictionary.polar import polar_factors
from flwr_perdl.dictionary.stacks import update_stack

try:
    import torch
except ImportError:
    torch = None

TIMES = 5
#: Clients, samples, features, atoms of the cohort; as many clients are a window of a CPU's cache.
COHORT, WINDOW = (256, 200, 64, 32), 16
#: Samples, features, atoms, atoms per sample of the pursuit.
PURSUIT = (2000, 64, 256, 10)
#: Samples, features, atoms of the single learner.
STEP = (20000, 256, 128)
#: Matrices, rows, columns.
FACTORS = (512, 64, 128)

Array = Any


def places() -> dict[str, Callable[[np.ndarray], Array]]:
    """Return where to measure, and what puts an array there."""
    found: dict[str, Callable[[np.ndarray], Array]] = {"NumPy": np.asarray}
    if torch is not None:
        torch.set_num_threads(1)
        found["PyTorch, CPU"] = torch.asarray
        if torch.cuda.is_available():
            found["PyTorch, GPU"] = lambda array: torch.asarray(array, device="cuda")
    return found


def works(dtype: type) -> dict[str, tuple[Callable[..., Array], list[np.ndarray]]]:
    """Return what is measured: functions, and their arrays."""
    rng = np.random.default_rng(0)

    def dictionaries(*shape: int) -> np.ndarray:
        *stack, r, d = shape
        return np.linalg.qr(rng.standard_normal((*stack, d, r)))[0].swapaxes(-1, -2)

    def codes(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape) * (rng.random(shape) < 0.2)

    def cohort(X: Array, D: Array, G: Array) -> Array:
        size = WINDOW if on_cpu(X) else len(X)
        windows = [slice(at, at + size) for at in range(0, len(X), size)]
        return [update_stack(X[own], D[own], G, learner).dictionaries for own in windows][-1]

    n, m, d, r = COHORT
    atoms = dictionaries(r, d)
    learner = OrthogonalLearner(r)
    X = codes(n, m, r) @ atoms + 0.01 * rng.standard_normal((n, m, d))
    p, e, q, k = PURSUIT
    a, b, c = STEP
    own = dictionaries(c, b)
    many = {
        f"cohort step: {n} clients of {m} x {d}, {r} atoms": (
            cohort,
            [X, np.broadcast_to(atoms, (n, r, d)), atoms[: r // 2]],
        ),
        f"learner's step: {a:,} x {b}, {c} atoms": (
            OrthogonalLearner(c).step,
            [codes(a, c) @ own + 0.01 * rng.standard_normal((a, b)), own],
        ),
        f"matching pursuit: {p:,} x {e}, {q} atoms, {k} per sample": (
            lambda X, D: omp(X, D, k),
            [rng.standard_normal((p, e)), normalize_atoms(rng.standard_normal((q, e)))],
        ),
        f"polar factors: {FACTORS[0]} of {FACTORS[1]} x {FACTORS[2]}": (
            polar_factors,
            [dictionaries(*FACTORS) + 0.02 * rng.standard_normal(FACTORS), dictionaries(*FACTORS)],
        ),
    }
    return {
        name: (function, [np.array(array, dtype) for array in arrays])
        for name, (function, arrays) in many.items()
    }


def finished(function: Callable[..., Array], arrays: list[Array]) -> Array:
    """Return what ``function`` does, when it is there."""
    result = function(*arrays)
    if not on_cpu(result):
        torch.cuda.synchronize()
    return result


def measured() -> dict[str, Any]:
    """Time everything everywhere, in turn."""
    rows = []
    for dtype in (np.float64, np.float32):
        for name, (function, arrays) in works(dtype).items():
            runs, found = {}, {}
            for place, put in places().items():
                there = [put(array) for array in arrays]

                runs[place] = partial(finished, function, there)
                found[place] = on_host(runs[place]())
            apart = [float(np.abs(other - found["NumPy"]).max()) for other in found.values()]
            rows.append(
                {
                    "what": name,
                    "dtype": np.dtype(dtype).name,
                    "seconds": fastest(runs, TIMES, clock=time.perf_counter),
                    "largest_difference": max(apart),
                }
            )
    gpu = torch.cuda.get_device_name() if torch is not None and torch.cuda.is_available() else None
    return {"torch": getattr(torch, "__version__", None), "gpu": gpu, "rows": rows}


def table(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    others = list(results["rows"][0]["seconds"])[1:]
    numpy, torch_ = results["versions"]["numpy"], results["torch"]
    if torch_ is None:
        where = "PyTorch is not installed on this machine: NumPy alone."
    else:
        where = f"PyTorch {torch_}; GPU: {results['gpu'] or 'none at hand'}."
    lines = [
        f"Milliseconds with NumPy {numpy}, one thread each, and how many times as fast the same "
        f"function is on other arrays (below 1: slower). {where}",
        "",
        "| | | NumPy (ms) | " + "".join(f"{name} | " for name in [*others, "differ by"]).rstrip(),
        "| --- | --- | ---: |" + " ---: |" * (1 + len(others)),
    ]
    for row in results["rows"]:
        took = row["seconds"]
        ratios = [f"{took['NumPy'] / took[name]:.2f}" for name in others]
        cells = [
            row["what"],
            row["dtype"],
            f"{1000 * took['NumPy']:.1f}",
            *ratios,
            f"{row['largest_difference']:.0e}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main("arrays", (__doc__ or "").splitlines()[0], dict, measured, table)
