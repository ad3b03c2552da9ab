"""An update of `DictionaryClient` from samples on disk against the same samples in memory.

Run from the repository's root: ``python benchmarks/large.py``; it writes
``benchmarks/results/large.json`` and its table, ``large.md``. Some two minutes, and 0.7 GB in the
folder for temporary files. Each row is a process of its own, the median of its updates but the
first. Time is the processor's: waiting for a disk is not in it, and the file is in the system's
cache. Memory is what the process allocated at most (a mapped file's pages in that cache are not).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from _measure import cell, main
from flwr.app import Context, RecordDict
from threadpoolctl import threadpool_limits

from flwr_perdl.clients import DictionaryClient
from flwr_perdl.dictionary import LassoLearner, OrthogonalLearner, WarmStart, normalize_atoms
from perdl_experiments.render import markdown_table

FEATURES, N_ATOMS, N_GLOBAL, TURNS, AT_ONCE = 784, 64, 32, 3, 10_000
SIZES = (20_000, 200_000)
LEARNERS = {"orthogonal": OrthogonalLearner(N_ATOMS), "lasso": LassoLearner(N_ATOMS)}
KINDS = ("array", "memmap", "iterator")


def atoms() -> Any:
    """Return the dictionary that samples are made of: orthonormal atoms."""
    rows = np.random.default_rng(0).standard_normal((FEATURES, N_ATOMS))
    return np.linalg.qr(rows)[0].T.astype(np.float32)


def write(path: Path, n_samples: int) -> None:
    """Write noisy samples of five atoms each."""
    D, rng = atoms(), np.random.default_rng(1)
    file = np.lib.format.open_memmap(path, "w+", np.float32, (n_samples, FEATURES))
    for start in range(0, n_samples, AT_ONCE):
        C = rng.standard_normal((AT_ONCE, N_ATOMS)) * (rng.random((AT_ONCE, N_ATOMS)) < 0.08)
        noise = 0.02 * rng.standard_normal((AT_ONCE, FEATURES))
        file[start : start + AT_ONCE] = C @ D + noise


def allocated() -> float:
    """Return the MB that this process has allocated and uses."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def update(kind: str, learner: str, path: Path) -> dict[str, Any]:
    """Return the seconds and the memory of a client's update, of samples of this kind."""
    mapped = np.load(path, mmap_mode="r")
    parts = range(0, len(mapped), AT_ONCE)
    X: Any = {
        "array": lambda: np.array(mapped),
        "memmap": lambda: mapped,
        "iterator": lambda: lambda: (np.array(mapped[i : i + AT_ONCE]) for i in parts),
    }[kind]()
    D, most, done = atoms(), [allocated()], threading.Event()
    if learner == "lasso":  # atoms that are not orthogonal any more
        D = normalize_atoms(D + 0.02 * np.roll(D, 1, axis=1))

    def watch() -> None:
        while not done.wait(0.01):
            most.append(allocated())

    threading.Thread(target=watch, daemon=True).start()
    seconds = []
    for round_ in range(2, 3 + TURNS):
        context = Context(1, 1, {"partition-id": 0}, RecordDict(), {})
        config = {"perdl.step": "update", "server-round": round_, "perdl.sends": "statistics"}
        start = time.process_time()
        client = DictionaryClient(
            X, LEARNERS[learner], context, start=lambda *_, rng: WarmStart(D, 0.0, ())
        )
        client.fit([D[:N_GLOBAL]], {**config, "perdl.seed": 0, "perdl.run": "r"})
        seconds.append(time.process_time() - start)
    done.set()
    return {"seconds": seconds[1:], "mb": max(most)}


def measured() -> dict[str, Any]:
    """Return time and memory of each kind, learner and size."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for n_samples in SIZES:
            path = Path(folder, "X.npy")
            write(path, n_samples)
            for learner in LEARNERS:
                for kind in KINDS:
                    command = [sys.executable, __file__, kind, learner, str(path)]
                    done = subprocess.run(command, capture_output=True, text=True, check=True)
                    found[f"{learner} {n_samples} {kind}"] = json.loads(done.stdout)
    # Of medians: each has a process of its own, whose turns are nobody else's.
    typical = {name: float(np.median(one["seconds"])) for name, one in found.items()}
    ratios = {
        f"array / {name}": typical[name.rsplit(" ", 1)[0] + " array"] / typical[name]
        for name in found
        if not name.endswith("array")
    }
    return {"updates": found, "ratios": ratios}


def tables(results: dict[str, Any]) -> str:
    """Return the results in Markdown."""
    rows = []
    for name, one in results["updates"].items():
        learner, n_samples, kind = name.split()
        whole = results["updates"][f"{learner} {n_samples} array"]["seconds"]
        share = np.median(one["seconds"]) / np.median(whole)
        times = [cell(one["seconds"]), f"{share:.2f}"]
        rows.append([learner, f"{int(n_samples):,}", kind, *times, f"{one['mb']:,.0f}"])
    heads = ["learner", "samples", "X", "processor seconds", "of an array's", "MB"]
    said = f"Medians of {TURNS} updates, and their range.\n\n"
    return said + markdown_table(heads, rows)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        with threadpool_limits(1):
            print(json.dumps(update(sys.argv[1], sys.argv[2], Path(sys.argv[3]))))
    else:
        main("large", "Samples on disk against samples in memory.", measured, dict, tables)
