"""ClusteredFedAvg on rotated digits (IFCA's experiment): accuracy by start, over five seeds.

Run from the repository's root: ``python benchmarks/rotated_digits.py``; it writes the table
``benchmarks/results/rotated_digits.md``. Under a minute. Forty clients have scikit-learn's digits,
rotated by 0, 90, 180 or 270 degrees: ten clients share all images at each angle, a fifth of each
client's is held out. The model is a network with 32 hidden units, trained by one epoch per round,
20 rounds in all.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.client import NumPyClient
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_limits

from flwr_perdl.clients import client_app
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import ClusteredFedAvg, ServerSettings

CLIENTS, KINDS, HIDDEN, ROUNDS, SEEDS = 40, 4, 32, 20, 5
SERVER = ServerSettings(evaluate_every=ROUNDS)


def clients_data(seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return each client's images and labels; client i has angle i % 4."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8) / 16
    rng = np.random.default_rng(seed)
    shares = [np.array_split(rng.permutation(len(labels)), CLIENTS // KINDS) for _ in range(KINDS)]
    own = [shares[i % KINDS][i // KINDS] for i in range(CLIENTS)]
    return [
        (np.rot90(images[rows], i % KINDS, axes=(1, 2)).reshape(len(rows), -1), labels[rows])
        for i, rows in enumerate(own)
    ]


def first_model(rng: np.random.Generator) -> list[np.ndarray]:
    """Return a random network."""
    W = rng.standard_normal((64, HIDDEN)) / 8
    V = rng.standard_normal((HIDDEN, 10)) / np.sqrt(HIDDEN)
    return [W, np.zeros(HIDDEN), V, np.zeros(10)]


def predicted(model: list[np.ndarray], X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the hidden layer and the probabilities of the digits."""
    W, b, V, c = model
    hidden = np.maximum(X @ W + b, 0)
    scores = np.exp(hidden @ V + c)
    return hidden, scores / scores.sum(axis=1, keepdims=True)


class Digits(NumPyClient):
    """A network, trained by stochastic gradient steps of 16 images."""

    def __init__(self, X: np.ndarray, y: np.ndarray, partition: int) -> None:
        self.X, self.y, self.partition, self.cut = X, y, partition, int(0.8 * len(y))

    def fit(self, parameters: Any, config: Any) -> Any:
        """Train for one epoch."""
        W, b, V, c = model = parameters
        X, y = self.X[: self.cut], self.y[: self.cut]
        rng = np.random.default_rng([config["server-round"], self.partition])
        for rows in np.array_split(rng.permutation(len(y)), len(y) // 16):
            hidden, error = predicted(model, X[rows])
            error[np.arange(len(rows)), y[rows]] -= 1
            back, step = error @ V.T * (hidden > 0), 0.2 / len(rows)
            for array, gradient in zip(
                (W, b, V, c),
                (X[rows].T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)),
                strict=True,
            ):
                array -= step * gradient
        return model, len(y), {}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        """Measure on the held-out images."""
        X, y = self.X[self.cut :], self.y[self.cut :]
        p = predicted(parameters, X)[1]
        loss = -np.log(p[np.arange(len(y)), y] + 1e-12).mean()
        return float(loss), len(y), {"accuracy": float((p.argmax(axis=1) == y).mean())}


def learned(seed: int, k: int | str, kinds: tuple[int, ...] = (0, 1, 2, 3), **options: Any) -> Any:
    """Return accuracy, whether all kinds were found, models, and floats down and up per client."""
    data = [(*own, i) for i, own in enumerate(clients_data(seed)) if i % KINDS in kinds]

    def make(context: Context) -> Digits:
        return Digits(*data[int(context.node_config["partition-id"])])

    strategy = ClusteredFedAvg(k, num_clients=len(data), seed=seed, server=SERVER, **options)
    grid = InProcessGrid(client_app(make), len(data))
    start = ArrayRecord(first_model(np.random.default_rng(100 + seed)))
    strategy.start(grid, start, num_rounds=ROUNDS)
    result, last = strategy.result, strategy.history[-1].aggregate
    there = {(j, data[partition][2] % KINDS) for partition, j in result.members.items()}
    found = len(there) == KINDS == len({j for j, _ in there})
    training = [report for report in strategy.history if report.step != "evaluate"]
    floats = sum(report.floats_down + report.floats_up for report in training)
    return last["accuracy"], found, len(result.models), floats


def oracle(seed: int) -> Any:
    """Return the same of FedAvg in each kind by itself."""
    runs = [learned(seed, 1, (kind,)) for kind in range(KINDS)]
    return np.mean([run[0] for run in runs]), True, KINDS, runs[0][3]


METHODS = {
    "FedAvg (k = 1)": lambda seed: learned(seed, 1),
    'k = 4, "one-shot"': lambda seed: learned(seed, 4),
    'k = 4, "one-shot", a choice every 5 rounds': lambda seed: learned(seed, 4, choose_every=5),
    'k = 4, "anchors"': lambda seed: learned(seed, 4, start="anchors"),
    'k = 4, "random" (IFCA)': lambda seed: learned(seed, 4, start="random"),
    'k = "auto", start_rounds=5': lambda seed: learned(seed, "auto", start_rounds=5),
    "oracle: FedAvg in each kind": oracle,
}


def table() -> str:
    """Return the table of all methods."""
    lines = [
        f"Accuracy on held-out images after {ROUNDS} rounds, {SEEDS} seeds:",
        "",
        "| method | mean | least | all kinds found | models | thousands of floats per client |",
        "|---|---:|---:|---:|---|---:|",
    ]
    for name, method in METHODS.items():
        runs = [method(seed) for seed in range(SEEDS)]
        accuracies, found, models, floats = zip(*runs, strict=True)
        counts = ", ".join(str(k) for k in sorted(set(models)))
        lines.append(
            f"| {name} | {np.mean(accuracies):.3f} | {min(accuracies):.3f} "
            f"| {sum(found)} of {SEEDS} | {counts} | {np.mean(floats) / 1e3:.0f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    logging.getLogger("flwr").setLevel(logging.ERROR)
    with threadpool_limits(1):
        text = table()
    (Path(__file__).parent / "results" / "rotated_digits.md").write_text(text)
    print(text)
