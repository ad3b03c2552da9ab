"""Is `Diagnosis` right? On clients whose difference is planted, and on digits.

Run from the repository's root: ``python benchmarks/diagnosis.py [planted|costs [SEEDS]]``. The
first table is ``benchmarks/results/diagnosis-planted.md``, about ten minutes for ten seeds on two
cores, the second one ``benchmarks/results/diagnosis.md``, about forty.

The planted clients have linear networks of two layers on normally distributed samples, and differ
in one of five ways, of which each has one right answer (`PLANTED`). Unrelated clients have half the
learning rate: once all have converged, it makes no difference where they began.

What a choice costs is measured with the clients of the experiment ``personal``; all candidates have
the same learning rate. The choice is made on images that clients neither train nor are judged on,
by their loss, as by default.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from joblib import Parallel, delayed

from flwr_perdl.clients import client_app
from flwr_perdl.core.threads import n_threads, one_blas_thread
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import Diagnosed, Diagnosis, Ditto, ServerSettings
from flwr_perdl.strategies.diagnosis import _FineTunedPart
from perdl_experiments.studies import configure, find, personal
from perdl_experiments.studies._network import NAMES, random_network

#: Rounds of the diagnosis, and of the run that is judged; the length of a step.
FEW, ROUNDS, STEP = 40, 60, 0.3
#: What is judged, by the candidate's name.
CANDIDATES = {"fedavg": "fedavg", "head": "fedper", "body": "lg-fedavg", "clusters": "clustered"}
#: Accuracy that a choice may cost.
POINT = 0.01
KINDS = (*personal.KINDS, "none")
#: Kinds of planted clients, and the right candidate.
PLANTED = {
    "all alike": "fedavg",
    "labels permuted": "head",
    "turned, two groups": "clusters",
    "turned, two groups, and an intercept each": "clusters-head",
    "unrelated": "local",
}


class Planted:
    """A client with a linear network of two layers, and what it is trained and measured on."""

    def __init__(self, X: Any, Y: Any, step: float) -> None:
        self.X, self.X_test = np.split(X, [40])
        self.Y, self.Y_test = np.split(Y, [40])
        self.step = step

    def fit(self, model: list[Any], config: Any) -> Any:
        """Take five gradient steps."""
        W, b, V, c = model
        for _ in range(5):
            hidden = self.X @ W + b
            error = self.step * (hidden @ V + c - self.Y) / len(self.X)
            back = error @ V.T
            V, c = V - hidden.T @ error, c - error.sum(axis=0)
            W, b = W - self.X.T @ back, b - back.sum(axis=0)
        return [W, b, V, c], len(self.X), {}

    def evaluate(self, model: list[Any], config: Any) -> Any:
        """Return the mean squared error on the samples that it does not train on."""
        W, b, V, c = model
        error = (self.X_test @ W + b) @ V + c - self.Y_test
        return float(np.mean(error**2)), len(error), {}


def planted(kind: str, seed: int) -> Diagnosed:
    """Return what is found of twenty clients whose difference is of this kind."""
    rng = np.random.default_rng((seed, [*PLANTED].index(kind)))
    n, n_features, n_labels, rank = 20, 20, 5, 3

    def basis(size: int, rank: int = rank) -> Any:
        return np.linalg.qr(rng.standard_normal((size, rank)))[0]

    maps = basis(n_features) @ basis(n_labels).T, basis(n_features, n_features)
    clients = []
    for i in range(n):
        own, intercept = maps[0], np.zeros(n_labels)
        if kind.startswith("turned") and i % 2:
            own = maps[1] @ own
        if kind.endswith("intercept each"):
            intercept = rng.standard_normal(n_labels)
        if kind == "labels permuted":
            own = own[:, rng.permutation(n_labels)]
        if kind == "unrelated":
            own = basis(n_features) @ basis(n_labels).T
        X = rng.standard_normal((100, n_features))
        Y = X @ own + intercept + 0.3 * rng.standard_normal((100, n_labels))
        clients.append(Planted(X, Y, 0.05 if kind == "unrelated" else 0.1))
    start = random_network(n_features, 8, n_labels, rng)
    diagnosis = Diagnosis(seed=seed)
    app = client_app(lambda context: clients[int(context.node_config["partition-id"])])
    record = ArrayRecord({name: Array(a) for name, a in zip(NAMES, start, strict=True)})
    with one_blas_thread():
        diagnosis.start(InProcessGrid(app, n), record, 20, verbose="quiet")
    return diagnosis.result


def one(kind: str, seed: int) -> tuple[str, dict[str, float]]:
    """Return the choice, and the mean accuracy of every candidate after all rounds."""
    config = configure(find("personal"))
    own = personal.splits(config, kind, seed)
    model = personal.first_model(config, own, seed)
    clients = [personal.Client(each, seed, i, STEP) for i, each in enumerate(own)]

    def make_client(context: Any) -> personal.Client:
        return clients[int(context.node_config["partition-id"])]

    start = ArrayRecord({n: Array(a) for n, a in zip(NAMES, model, strict=True)})
    diagnosis, n = Diagnosis(seed=seed), len(clients)
    with one_blas_thread():
        diagnosis.start(InProcessGrid(client_app(make_client), n), start, FEW, verbose="quiet")
        strategies = {
            name: personal.strategies(ROUNDS)[method][""] for name, method in CANDIDATES.items()
        }
        last = ServerSettings(evaluate_every=ROUNDS)
        strategies["ditto"] = Ditto(server=last)
        strategies["head-fine-tuned"] = _FineTunedPart(["head.*"], ROUNDS // 2, server=last)
        strategies["clusters-head"] = personal.strategies(ROUNDS)["clustered"][""]
        found = {}
        for name, strategy in strategies.items():
            method = "fedper" if name == "clusters-head" else CANDIDATES.get(name, "ditto")
            measured, models = personal.federated(clients, model, method, strategy, ROUNDS)
            found[name] = float(measured[:, 1].mean())
            if name == "fedavg":
                found["fine-tuned"] = personal.stopped(clients, models, ROUNDS).accuracy.mean()
        found["local"] = personal.stopped(clients, [model] * n, ROUNDS).accuracy.mean()
    return diagnosis.result.choice, found


def quietly(compute: Callable[[str, int], Any], kind: str, seed: int) -> Any:
    """Return what is computed, in a process that logs errors only."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    return compute(kind, seed)


def results_of(
    compute: Callable[[str, int], Any], kinds: Iterable[str], seeds: int
) -> dict[tuple[str, int], Any]:
    """Return what is computed by kind and seed."""
    pairs = list(product(kinds, range(seeds)))
    computed = Parallel(n_threads())(delayed(quietly)(compute, *pair) for pair in pairs)
    return dict(zip(pairs, computed, strict=True))


def planted_table(seeds: int) -> str:
    """Return how often the choice is right, as Markdown."""
    results = results_of(planted, PLANTED, seeds)
    lines = [
        f"What Diagnosis recommends in {seeds} runs on twenty clients each, and by how much the "
        "right candidate is ahead of the next (share of the next one's loss, mean over the runs in "
        "which it is recommended, and the narrowest lower end of an interval):",
        "",
        "| clients | right | recommended | ahead | at least |",
        "| --- | --- | --- | ---: | ---: |",
    ]
    for kind, right in PLANTED.items():
        own = [results[kind, seed] for seed in range(seeds)]
        choices = [found.choice for found in own]
        leads = [
            np.array(found.lead[:2]) / found.values[found.over].mean()
            for found in own
            if found.choice == found.best == right
        ]
        ahead, least = np.mean([one[0] for one in leads]), min(one[1] for one in leads)
        lines.append(f"| {kind} | {right} | {counted(choices)} | {ahead:.0%} | {least:.1%} |")
    return "\n".join(lines) + "\n"


def cost_table(seeds: int) -> str:
    """Return what choices cost, as Markdown."""
    results = results_of(one, KINDS, seeds)
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
        said = counted([choice for choice, _ in own])
        lines.append(
            f"| {personal.KINDS.get(kind, 'nothing')} | {said} | {costs.mean():.4f} | "
            f"{costs.max():.4f} | {int((costs <= POINT).sum())} of {seeds} |"
        )
    return "\n".join(lines) + "\n"


def counted(choices: Sequence[str]) -> str:
    """Return how often each choice was made, the most frequent first."""
    return ", ".join(f"{name} {count}" for name, count in Counter(choices).most_common())


#: By what the command calls it: the table, and its file.
TABLES = {"planted": (planted_table, "diagnosis-planted"), "costs": (cost_table, "diagnosis")}

if __name__ == "__main__":
    for name in sys.argv[1:2] or TABLES:
        make, file = TABLES[name]
        text = make(int(sys.argv[2]) if len(sys.argv) > 2 else 10)
        (Path(__file__).parent / "results" / f"{file}.md").write_text(text)
        print(text)
