"""Decentralized learning beside fluke, GossipPy and plain D-PSGD: accuracy by epochs and by bytes.

``python benchmarks/beside_gossip.py SEEDS IMAGES``, IMAGES as for ``--data``, by default digits,
writes results/beside_gossip.md and .png. The first run makes ``.venv-fluke`` and ``.venv-gossipy``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from io import BytesIO
from typing import Any

import numpy as np
from _measure import CORES, RESULTS
from beside_fluke import interval
from joblib import Parallel, delayed
from scipy import stats

from flwr_perdl.diffusion import DiffusionAveraging, Schedule, TopK, Topology, metropolis_weights
from flwr_perdl.protocol.records import ROUND
from flwr_perdl.random import DATA, spawn
from perdl_experiments.data import load_images
from perdl_experiments.plots import panel_grid, share_legend, style
from perdl_experiments.studies._network import NAMES, Model, Network, accuracy, random_network

ROOT, PARTS = RESULTS.parent.parent, ("choose", "test")
EPOCHS, EVERY, BATCH, HIDDEN, STEPS = 40, 4, 16, 32, (0.03, 0.1, 0.3, 1.0)
TASKS, SIZES = ("Rotated digits", "Two shards of sorted images per node"), (16, 64)
OURS: dict[str, Any] = {
    "ours, ring": (Topology.ring, None),
    "ours, exponential": (Topology.exponential, None),
    "ours, random pairs": (Schedule.random_pairs, None),
    "ours, exponential, top 10 %": (Topology.exponential, TopK(0.1)),
    "ours, exponential, top 1 %": (Topology.exponential, TopK(0.01)),
}
RIVALS = {"fluke": ["fluke-fl==0.8.1"], "gossipy": ["gossipy-dfl==0.0.1", "torchvision"]}
METHODS = ("FedAvg", *OURS, "D-PSGD, exponential", *RIVALS)  # the last on the same graph


def dealt(name: str, n: int, seed: int, data: str) -> dict[str, Any]:
    """Return graph, first weights and images: 7 tenths the nodes', 1 to choose by, 2 to test."""
    turns, rng = 4 if name == TASKS[0] else 1, spawn(seed, DATA)
    images = load_images("" if turns > 1 else data)
    stack, y = images.X.reshape(-1, *images.shape).astype(np.float32), images.y
    X = [np.rot90(stack, k, axes=(1, 2)).reshape(len(y), -1) for k in range(turns)]
    test, choose, train = np.split(rng.permutation(len(y)), [len(y) // 5, 3 * len(y) // 10])
    if turns > 1:  # the nodes of one angle share all images
        shares = [np.array_split(rng.permutation(train), n // turns) for _ in X]
        own = [shares[i % turns][i // turns] for i in range(n)]
    else:
        shards = np.array_split(train[np.argsort(y[train], kind="stable")], 2 * n)
        order = rng.permutation(2 * n)
        own = [np.concatenate([shards[i] for i in order[2 * k : 2 * k + 2]]) for k in range(n)]
    weights = metropolis_weights(Topology.exponential(n)).matrix.toarray().astype(np.float32)
    found = {"seed": seed, "weights": weights}
    first = random_network(X[0].shape[1], HIDDEN, 10, spawn(seed, DATA, 1))
    found |= {key: array.astype(np.float32) for key, array in zip(NAMES, first, strict=True)}
    for i, rows in enumerate(own):
        found[f"X-{i}"], found[f"y-{i}"] = X[i % turns][rows], y[rows]
    for part, rows in zip(PARTS, (choose, test), strict=True):  # at every angle
        found[f"X-{part}"] = np.concatenate([one[rows] for one in X])
        found[f"y-{part}"] = np.tile(y[rows], turns)
    return found


class Client(Network):
    """A node's network; any client of Flower's is like it."""

    def __init__(self, given: dict[str, Any], step: float, node: int) -> None:
        self.given, (X, y) = given, (given[f"{what}-{node}"] for what in "Xy")
        same = {"seed": given["seed"], "partition": node, "step": step, "batch": BATCH}
        super().__init__(X, y, (len(y), len(y)), **same)

    def evaluate(self, parameters: Model, config: Any) -> Any:
        """Return the accuracies on the common images."""
        images = {part: (self.given[f"X-{part}"], self.given[f"y-{part}"]) for part in PARTS}
        return 0.0, len(self.y), {part: accuracy(parameters, *images[part]) for part in PARTS}


def ours(given: dict[str, Any], method: str, step: float) -> Any:
    """Run this library."""
    make, compression = OURS[method]
    network = make(len(given["weights"]), **{"seed": given["seed"]} if "pairs" in method else {})
    learner = DiffusionAveraging(compression=compression, metrics=PARTS, evaluate_every=EVERY)
    first = [given[name] for name in NAMES]
    run = learner.fit(lambda node: Client(given, step, node), network, EPOCHS, initial=first)
    kept = [run.curves[name] for name in ("evaluate-choose", "evaluate-test")]
    sent = np.cumsum(run.curves["bytes-received"].mean(axis=1))  # as much as is sent
    return [(t + 1, sent[t], *(one[t] for one in kept)) for t in range(EVERY - 1, EPOCHS, EVERY)]


def loop(given: dict[str, Any], method: str, step: float) -> Any:
    """Run FedAvg, or D-PSGD (Lian et al., 2017) with an epoch for its gradient step."""
    weights, n, curve = given["weights"], len(given["weights"]), []
    sends = 1 if method == "FedAvg" else np.count_nonzero(weights[0]) - 1
    weights = np.full_like(weights, 1 / n) if method == "FedAvg" else weights
    clients = [Client(given, step, node) for node in range(n)]
    models = [np.stack([given[name]] * n) for name in NAMES]
    for t in range(1, EPOCHS + 1):
        fitted = [clients[k].fit([array[k] for array in models], {ROUND: t})[0] for k in range(n)]
        models = [np.tensordot(weights, arrays, 1) for arrays in zip(*fitted, strict=True)]
        if t % EVERY == 0:
            scores = [clients[0].evaluate(own, {})[2] for own in zip(*models, strict=True)]
            sent = sends * t * sum(array[0].nbytes for array in models)
            curve.append((t, sent, *([one[part] for one in scores] for part in PARTS)))
    return curve


def rival(given: dict[str, Any], method: str, step: float) -> Any:
    """Run another library in its environment."""
    np.savez(sent := BytesIO(), **given)
    run = json.dumps({"step": step, "epochs": EPOCHS, "batch": BATCH, "every": EVERY})
    command = [ROOT / f".venv-{method}/bin/python", RESULTS.parent / "_gossip.py", method, run]
    return json.loads(subprocess.check_output(command, input=sent.getvalue()))


def measured(data: str, seeds: int, name: str, n: int, method: str) -> tuple[float, Any]:
    """Return the step, the best with the first seed, and curves: epochs, bytes, mean, worst."""
    run = rival if method in RIVALS else ours if method in OURS else loop
    first = {step: run(dealt(name, n, 0, data), method, step) for step in STEPS}
    step = max(STEPS, key=lambda step: np.mean(first[step][-1][2]))
    rest = [run(dealt(name, n, seed, data), method, step) for seed in range(1, seeds)]
    every = first[step], *rest
    return step, np.array([[(*x, np.mean(z), min(z)) for *x, _, z in one] for one in every])


def text(found: dict[Any, tuple[float, Any]], seeds: int) -> str:
    """Return the results as Markdown."""
    lines, head = [], " | ".join(f"{n} nodes: accuracy | worst node | MB | step" for n in SIZES)
    for name in TASKS:
        lines += [f"\n{name}:\n", f"| | {head} |", f"| --- |{' ---: |' * 4 * len(SIZES)}"]
        for method in METHODS:
            cells = [method]
            for step, curves in (found[name, n, method] for n in SIZES):
                cells += [interval(curves[:, -1, 2]), interval(curves[:, -1, 3])]
                cells += [f"{curves[:, -1, 1].mean() / 1e6:.2f}", f"{step:g}"]
            lines.append(f"| {' | '.join(cells)} |")
    about = f"Means over {seeds} seeds after {EPOCHS} epochs, 95 % intervals; MB: sent by a node."
    return "\n".join([*lines, f"\n{about}\n"]).lstrip()


def draw(found: dict[Any, tuple[float, Any]]) -> None:
    """Draw the last data and size: means over the seeds, with 95 % intervals."""
    figure, grid = panel_grid(3, columns=3, height=4)
    for axes, at, of in zip(grid, (0, 1, 0), (2, 2, 3), strict=True):
        axes.grid(alpha=0.25)
        for index, method in enumerate(METHODS):
            curves, look = found[TASKS[-1], SIZES[-1], method][1], style(index)
            x, y = curves[..., at].mean(axis=0), curves[..., of].mean(axis=0)
            half = stats.t.ppf(0.975, len(curves) - 1) * stats.sem(curves[..., of])
            axes.plot(x, y, label=method, **look)
            axes.fill_between(x, y - half, y + half, color=look["color"], alpha=0.12, lw=0)
        axes.set(xlabel=("epochs", "bytes sent")[at] + " per node", xscale=("linear", "log")[at])
        axes.set(ylabel=f"accuracy, {('mean of the nodes', 'worst node')[of - 2]}", ylim=(0, 1))
    share_legend(figure, grid)
    figure.savefig(RESULTS / "beside_gossip.png", dpi=100)


if __name__ == "__main__":
    for library, needs in RIVALS.items():
        if not (place := ROOT / f".venv-{library}").exists():
            subprocess.run([ROOT / ".ci" / "venv", place, *needs], check=True)
    seeds, data = int((sys.argv[1:] or "5")[0]), "".join(sys.argv[2:])
    keys = [(name, n, method) for name in TASKS for n in SIZES for method in METHODS]
    runs = Parallel(CORES)(delayed(measured)(data, seeds, *key) for key in keys)
    found = dict(zip(keys, runs, strict=True))
    (RESULTS / "beside_gossip.md").write_text(text(found, seeds))
    draw(found)
