"""FedPer, FedRep and Ditto beside those of fluke, a library of federated learning in PyTorch.

Run from the repository's root: ``python benchmarks/beside_fluke.py [SEEDS]``; it writes
``benchmarks/results/beside_fluke.md``, in six minutes for five seeds on two cores. The first run
makes fluke's environment, ``.venv-fluke``, of some gigabytes (PyTorch).

Clients, images and network are those of the experiment ``personal``, kind ``labels``. Both
libraries have the same first weights, batches of the same size in an order drawn anew in every
epoch, plain gradient steps (no momentum, weight decay or schedule), all clients in every round, and
one epoch of each array per round (fluke's defaults are three). Ours computes in float64, fluke in
float32, and each draws the orders by its own generator. Accuracies are those of the clients' own
models after the last averaging. For each library, method and seed the length of a step is the best
of the same grid by the accuracy on the images to choose by, and so is Ditto's pull. fluke's ``lam``
is a term of each gradient step: it is set so that its pull in all steps of a round is ours.
"""

from __future__ import annotations

import ast
import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from _measure import CORES, RESULTS
from joblib import Parallel, delayed
from scipy import stats

from flwr_perdl.core.threads import one_blas_thread
from perdl_experiments.studies import _network, configure, find, personal

ROOT, SCRIPT = RESULTS.parent.parent, RESULTS.parent / "_fluke.py"
FLUKE, PLACE, CONFIG = "fluke-fl==0.8.1", ROOT / ".venv-fluke", configure(find("personal"))
#: Method, length of a step, and pull: what is tried.
RUNS = [
    *product(("fedper", "fedrep"), personal.STEPS, (0.0,)),
    *product(("ditto",), personal.STEPS, personal.PULLS),
]
#: What a user writes: classes and functions, by file.
OURS = {
    _network.__file__: ("Network", "layers", "accuracy", "random_network"),
    personal.__file__: ("Client", "federated"),
}
FLUKES = {str(SCRIPT): ("layer", "Body", "Net", "loaders", "train")}
#: Processor seconds; each client's accuracy on the images to choose by, and on its test images.
Run = tuple[float, list[list[float]]]


def ours(own: Sequence[Any], model: _network.Model, seed: int) -> Iterator[Run]:
    """Yield this library's runs."""
    for method, step, pull in RUNS:
        start = time.process_time()
        clients = [personal.Client(one, seed, i, step) for i, one in enumerate(own)]
        strategy = personal.strategies(CONFIG.rounds)[method][f"{pull:g}" if pull else ""]
        found, _ = personal.federated(clients, model, method, strategy, CONFIG.rounds)
        table = [[m["chosen-by"], m["accuracy"]] for m in found.values()]
        yield time.process_time() - start, table


def flukes(own: Sequence[Any], model: _network.Model, seed: int) -> Iterator[Run]:
    """Yield fluke's runs."""
    arrays: dict[str, Any] = dict(zip(_network.NAMES, model, strict=True))
    for (i, one), part in product(enumerate(own), personal.Split._fields):
        arrays[f"{part}-X-{i}"], arrays[f"{part}-y-{i}"] = getattr(one, part)
    same = {"rounds": CONFIG.rounds, "batch": personal.BATCH, "seed": seed}
    n = len(own[0].train[1]) / personal.BATCH
    runs = [dict(method=m, step=s, lam=c / (1 - c) / (n * s), **same) for m, s, c in RUNS]
    with TemporaryDirectory() as folder:
        path = Path(folder, "given.npz")
        np.savez(path, clients=len(own), **arrays)
        command = [str(PLACE / "bin" / "python"), str(SCRIPT), str(path), json.dumps(runs)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    yield from (tuple(json.loads(line)) for line in done.stdout.splitlines())


def measured(seed: int) -> list[list[Run]]:
    """Return all runs of both libraries with one seed."""
    os.environ["OMP_NUM_THREADS"] = "1"
    logging.getLogger("flwr").setLevel(logging.ERROR)
    own = personal.splits(CONFIG, "labels", seed)
    model = personal.first_model(CONFIG, own, seed)
    with one_blas_thread():
        return [list(side(own, model, seed)) for side in (ours, flukes)]


def best(runs: Sequence[Run], method: str) -> tuple[float, float, str]:
    """Return the test accuracy and the seconds of a method's best run, and what it is."""
    pairs = [pair for pair in zip(runs, RUNS, strict=True) if pair[1][0] == method]
    (seconds, table), (_, step, pull) = max(pairs, key=lambda pair: np.mean(pair[0][1], axis=0)[0])
    which = f"{step:g}" + f", {pull:g}" * (pull > 0)
    return float(np.mean(table, axis=0)[1]), seconds, which


def code_lines(pieces: Mapping[str, Sequence[str]]) -> int:
    """Return how many lines of definitions are code: no docstrings, comments or blank lines."""
    found = 0
    for file, names in pieces.items():
        text = Path(file).read_text()
        for node in (node for node in ast.parse(text).body if getattr(node, "name", "") in names):
            source = re.sub(r'(?s)""".*?"""', "", ast.get_source_segment(text, node) or "")
            found += len(re.findall(r"(?m)^ *[^\s#]", source))
    return found


def interval(values: Any, form: str = ".3f") -> str:
    """Return the mean and half the width of its 95 % interval."""
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return f"{np.mean(values):{form}} ± {half:.3f}"


def text(found: Sequence[Sequence[Sequence[Run]]]) -> str:
    """Return the results as Markdown."""
    lines = f"{code_lines(OURS)} | {code_lines(FLUKES)}"
    head = "accuracy, ours | fluke | difference | seconds, ours | fluke | lines, ours | fluke"
    rows, chosen = [f"| | {head} |", f"| --- |{' ---: |' * 7}"], []
    for method in dict.fromkeys(method for method, *_ in RUNS):
        sides = [[best(of_seed[side], method) for of_seed in found] for side in (0, 1)]
        (a, time_a, best_a), (b, time_b, best_b) = (zip(*side, strict=True) for side in sides)
        name, gain = personal.METHODS[method], interval(np.subtract(a, b), "+.3f")
        rows.append(
            f"| {name} | {interval(a)} | {interval(b)} | {gain} | {np.mean(time_a):.1f} | "
            f"{np.mean(time_b):.1f} | {lines} |"
        )
        chosen.append(f"{name} {'; '.join(best_a)} (fluke {'; '.join(best_b)})")
    about = f"""
Means over {len(found)} seeds, with 95 % intervals; processor seconds of a run, in one thread; lines
of code that a user writes, without imports. Best of the grid, by seed (the length of a step, and
Ditto's pull): {", ".join(chosen)}.
"""
    return "\n".join(rows) + "\n" + about


if __name__ == "__main__":
    if not PLACE.exists():
        subprocess.run([ROOT / ".ci" / "venv", PLACE, FLUKE], check=True)
    seeds = range(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
    result = text(Parallel(CORES)(delayed(measured)(seed) for seed in seeds))
    (RESULTS / "beside_fluke.md").write_text(result)
    print(result)
