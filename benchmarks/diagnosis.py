"""What `Diagnosis` costs: its choice after a few rounds, beside the best strategy after all.

Run from the repository's root: ``python benchmarks/diagnosis.py [SEEDS]``; it writes
``benchmarks/results/diagnosis.md``. About 25 minutes for ten seeds on two cores. The clients are
those of the experiment ``personal``; all candidates have the same length of a step. The choice is
made on images that clients neither train nor are judged on, by their loss, as by default.
"""

from __future__ import annotations

import logging
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from joblib import Parallel, delayed

from flwr_perdl.clients import client_app
from flwr_perdl.core.threads import n_threads, one_blas_thread
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import Diagnosis, Ditto, ServerSettings
from perdl_experiments.studies import configure, find, personal

#: Rounds of the diagnosis, and of the run that is judged; the length of a step.
FEW, ROUNDS, STEP = 40, 60, 0.3
#: What is judged, by the candidate's name.
CANDIDATES = {"fedavg": "fedavg", "head": "fedper", "body": "lg-fedavg", "clusters": "clustered"}
#: Accuracy that a choice may cost.
POINT = 0.01
KINDS = (*personal.KINDS, "none")


def one(kind: str, seed: int) -> tuple[str, dict[str, float]]:
    """Return the choice, and the mean accuracy of every candidate after all rounds."""
    config = configure(find("personal"))
    own = personal.splits(config, kind, seed)
    model = personal.first_model(config, own, seed)
    clients = [personal.Client(each, seed, i, STEP) for i, each in enumerate(own)]

    def make_client(context: Any) -> personal.Client:
        return clients[int(context.node_config["partition-id"])]

    start = ArrayRecord({n: Array(a) for n, a in zip(personal.NAMES, model, strict=True)})
    diagnosis, n = Diagnosis(seed=seed), len(clients)
    with one_blas_thread():
        diagnosis.start(InProcessGrid(client_app(make_client), n), start, FEW, verbose="quiet")
        strategies = {
            name: personal.strategies(ROUNDS)[method][""] for name, method in CANDIDATES.items()
        }
        strategies["ditto"] = Ditto(server=ServerSettings(evaluate_every=ROUNDS))
        found = {}
        for name, strategy in strategies.items():
            method = CANDIDATES.get(name, "ditto")
            measured, shared = personal.federated(clients, model, method, strategy, ROUNDS)
            found[name] = float(np.mean([each["accuracy"] for each in measured.values()]))
            if name == "fedavg":
                found["fine-tuned"] = personal.stopped(clients, shared, ROUNDS).accuracy.mean()
        found["local"] = personal.stopped(clients, model, ROUNDS).accuracy.mean()
    return diagnosis.result.choice, found


def quietly(kind: str, seed: int) -> tuple[str, dict[str, float]]:
    """Return the same, in a process that logs errors only."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    return one(kind, seed)


def table(seeds: int) -> str:
    """Return the results as Markdown."""
    pairs = list(product(KINDS, range(seeds)))
    computed = Parallel(n_threads())(delayed(quietly)(*pair) for pair in pairs)
    results = dict(zip(pairs, computed, strict=True))
    lines = [
        f"Choices of Diagnosis after {FEW} rounds, and what they cost of the accuracy on clients' "
        f"own test images that the best candidate has after {ROUNDS} rounds, over {seeds} seeds:",
        "",
        "| clients differ in | choices | cost, mean | cost, largest | at most a point |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for kind in KINDS:
        own = [results[kind, seed] for seed in range(seeds)]
        costs = np.array([max(found.values()) - found[choice] for choice, found in own])
        counts = {name: sum(choice == name for choice, _ in own) for name in found_in(own)}
        said = ", ".join(f"{name} {count}" for name, count in counts.items())
        lines.append(
            f"| {personal.KINDS.get(kind, 'nothing')} | {said} | {costs.mean():.4f} | "
            f"{costs.max():.4f} | {int((costs <= POINT).sum())} of {seeds} |"
        )
    return "\n".join(lines) + "\n"


def found_in(own: list[tuple[str, dict[str, float]]]) -> list[str]:
    """Return the choices that were made, the most frequent first."""
    choices = [choice for choice, _ in own]
    return sorted(set(choices), key=choices.count, reverse=True)


if __name__ == "__main__":
    text = table(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
    (Path(__file__).parent / "results" / "diagnosis.md").write_text(text)
    print(text)
