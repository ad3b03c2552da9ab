"""What noise costs a shared body with private heads, and a single shared model.

500 clients with 20 images each, whose labels each client permutes, and 2,000 other images to test,
by each client's labels. A network with a hidden layer is trained by FedAvg with noise
(``PersonalizedFedAvg(share="*")``) and with a private head, both with noise at client level and the
same clipping, and by each client alone. Run from the repository's root, about ten minutes:
``python benchmarks/private_head.py --data FILE.npz`` (``X``: images, ``y``: labels); it writes
``benchmarks/results/private_head.md``.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context

from flwr_perdl.clients import client_app
from flwr_perdl.privacy import Noise
from flwr_perdl.random import DATA, spawn
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import PersonalizedFedAvg
from perdl_experiments.data import load_images
from perdl_experiments.studies._network import NAMES, Network, random_network

CLIENTS, IMAGES, TEST, LABELS = 500, 20, 2000, 10
HIDDEN, ROUNDS, SEEDS = 32, 30, 3
#: The learning rate, and the largest norm of a client's change of the shared arrays.
STEP, CLIP = 0.3, 1.0
EPSILONS = (2.0, 8.0, np.inf)
#: What is private.
METHODS: dict[str, dict[str, Any]] = {
    "FedAvg": {"share": "*"},
    "private head": {"private": ["head.*"]},
}


def make_clients(data: str, seed: int) -> list[Network]:
    """Return the clients; all have the same images to test, with labels of their own."""
    images, rng = load_images(data), spawn(seed, DATA)
    order = rng.permutation(len(images.X))
    test, rest = order[:TEST], order[TEST : TEST + CLIENTS * IMAGES].reshape(CLIENTS, IMAGES)
    clients = []
    for i, own in enumerate(rest):
        rows, names = np.concatenate([own, test]), rng.permutation(LABELS)
        ends: tuple[int, int] = (IMAGES, IMAGES)
        how: dict[str, Any] = {"seed": seed, "partition": i, "step": STEP, "batch": 10}
        clients.append(Network(images.X[rows], names[images.y[rows]], ends, **how))
    return clients


def federated(
    clients: list[Network], first: list[Any], epsilon: float, part: dict[str, Any]
) -> float:
    """Return the mean accuracy of the clients' own models; without noise epsilon is infinite."""
    seed = clients[0].seed
    noise = None
    if np.isfinite(epsilon):
        rng = np.random.default_rng([seed, int(epsilon)])
        how: dict[str, Any] = {"trust": "central", "level": "client", "rng": lambda: rng}
        noise = Noise(epsilon=epsilon, delta=1e-5, clip=CLIP, **how)
    app = client_app(lambda context: clients[partition_of(context)])
    strategy = PersonalizedFedAvg(**part, privacy=noise, fraction_evaluate=0.0, seed=seed)
    start = ArrayRecord({n: Array(a) for n, a in zip(NAMES, first, strict=True)})
    strategy.start(InProcessGrid(app, CLIENTS), start, num_rounds=ROUNDS, verbose="quiet")
    models = (strategy.result.model_of(i).to_numpy_ndarrays() for i in range(CLIENTS))
    return float(np.mean([c.accuracy(model) for c, model in zip(clients, models, strict=True)]))


def partition_of(context: Context) -> int:
    """Return which client it is."""
    return int(context.node_config["partition-id"])


def alone(clients: list[Network], first: list[Any]) -> float:
    """Return the mean accuracy of as many epochs of local training."""
    found = []
    for client in clients:
        model = first
        for round_ in range(ROUNDS):
            model = client.fit(model, {"server-round": 1 + round_})[0]
        found.append(client.accuracy(model))
    return float(np.mean(found))


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="file with X (n, h, w) and y (n,)")
    data = parser.parse_args().data
    logging.getLogger("flwr").setLevel(logging.ERROR)
    found: dict[tuple[str, float], list[float]] = {}
    for seed in range(SEEDS):
        clients = make_clients(data, seed)
        n_features = clients[0].X.shape[1]
        first = random_network(n_features, HIDDEN, LABELS, spawn(seed, DATA, 1))
        found.setdefault(("local training", np.inf), []).append(alone(clients, first))
        for (method, part), epsilon in ((m, e) for m in METHODS.items() for e in EPSILONS):
            accuracy = federated(clients, first, epsilon, part)
            found.setdefault((method, epsilon), []).append(accuracy)
            print(seed, method, epsilon, round(accuracy, 4), file=sys.stderr, flush=True)
    columns = [f"epsilon {e:g}" if np.isfinite(e) else "no noise" for e in EPSILONS]
    lines = [f"| | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    for method in (*METHODS, "local training"):
        cells = [found.get((method, e)) for e in EPSILONS]
        words = ["" if c is None else f"{np.mean(c):.3f} ± {np.std(c, ddof=1):.3f}" for c in cells]
        lines.append(f"| {method} | {' | '.join(words)} |")
    table = "\n".join(lines) + "\n"
    (Path(__file__).parent / "results" / "private_head.md").write_text(table)
    sys.stdout.write(table)


if __name__ == "__main__":
    main()
