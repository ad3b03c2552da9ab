"""What secure rounds cost PerMA, and which samples replies in the clear show.

Handwritten digits (scikit-learn's, 8 x 8), nine tenths of a client's images of one digit. Run from
the repository's root: ``python benchmarks/secure.py``; it writes ``benchmarks/results/secure.json``
and three tables: ``secure.md`` (cost), ``differences.md`` (samples that differences between rounds
of an honest run show), and ``attackers.md`` (rows that show a sample to a server that sends what it
likes, by the rule of withholding).
"""

from __future__ import annotations

import logging
import time
from itertools import pairwise, product
from typing import Any

import numpy as np
from _measure import main
from flwr.app import Context, RecordDict
from sklearn.datasets import load_digits

from flwr_perdl.clients import DictionaryClient, client_app
from flwr_perdl.core.checks import Matrix
from flwr_perdl.dictionary import (
    LassoLearner,
    MODLearner,
    OrthogonalLearner,
    WarmStart,
    normalize_atoms,
    reconstruct,
    sparse_code,
)
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import PerMA
from perdl_experiments.render import markdown_table

SEEDS = 1
GLOBAL, ATOMS = 20, 32
HELD_OUT = 300
#: Clients, samples of each, rounds.
COST = ((4, 120, 3), (10, 120, 3))
SHOWN = (36, 40, 8)
#: What a client may send: options of the strategy, and the client's ``digits``.
SENT: dict[str, tuple[dict[str, Any], int | None]] = {
    "statistics (default)": ({}, None),
    "statistics, 5 local steps": ({"local_steps": 5}, None),
    "statistics, `digits=3`": ({}, 3),
    "statistics, `digits=2`": ({}, 2),
    'atoms (`aggregation="mean"`)': ({"aggregation": "mean"}, None),
}


class Noting(DictionaryClient):
    """A client that notes what it sends in update rounds."""

    sent: dict[int, list[Matrix]]

    def fit(self, parameters: list[Matrix], config: dict[str, Any]) -> Any:
        """Take a step, and note what an update sends."""
        fitted = super().fit(parameters, config)
        if parameters:
            self.sent.setdefault(self.partition, []).append(fitted[0][0])
        return fitted


def images(n_clients: int, n_samples: int, seed: int) -> tuple[list[Matrix], Matrix]:
    """Return the clients' images, no image at two clients, and held-out ones."""
    X, y = load_digits(return_X_y=True)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(X))
    X, y = X[order] / 16, y[order]
    left = list(range(HELD_OUT, len(X)))
    parts = []
    for k in range(n_clients):
        own = [i for i in left if y[i] == k % 10][: 9 * n_samples // 10]
        own += [i for i in left if i not in own][: n_samples - len(own)]
        left = [i for i in left if i not in own]
        parts.append(X[own])
    return parts, X[:HELD_OUT]


def learn(
    parts: list[Matrix], rounds: int, digits: int | None = None, **options: Any
) -> tuple[Matrix, dict[int, list[Matrix]], float]:
    """Return the global atoms, what the clients sent, and the seconds of an update round."""
    sent: dict[int, list[Matrix]] = {}
    ends: list[float] = []

    def make_client(context: Context) -> DictionaryClient:
        X = parts[int(context.node_config["partition-id"])]
        client = Noting(X, OrthogonalLearner(ATOMS), context, digits=digits)
        client.sent = sent
        return client

    strategy = PerMA(
        GLOBAL,
        fraction_evaluate=0.0,
        on_round=lambda report: ends.append(time.perf_counter()),
        **options,
    )
    result = strategy.start(InProcessGrid(client_app(make_client), len(parts)), num_rounds=rounds)
    seconds = float(np.median(np.diff(ends)))
    return result.arrays.to_numpy_ndarrays()[0], sent, seconds


def error(atoms: Matrix, held_out: Matrix) -> float:
    """Return the error of held-out images with ten of the atoms each."""
    codes = sparse_code(held_out, atoms, n_nonzero=10)
    return float(np.mean((held_out - reconstruct(codes, atoms)) ** 2))


def shown(parts: list[Matrix], sent: dict[int, list[Matrix]], cosine: float) -> int:
    """Return how many samples lie so near to a row of a difference of two rounds' replies."""

    def unit(rows: Matrix) -> Matrix:
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        return rows / np.where(lengths > 1e-12, lengths, 1)

    count = 0
    for k, X in enumerate(parts):
        rounds = sent[k]
        rows = np.vstack([later - one for one, later in pairwise(rounds)])
        count += int((np.abs(unit(rows) @ unit(X).T).max(axis=0) > cosine).sum())
    return count


def costs() -> list[dict[str, float]]:
    """Measure error and time with secure rounds and without."""
    found = []
    for n_clients, n_samples, rounds in COST:
        rows = []
        for seed in range(SEEDS):
            parts, held_out = images(n_clients, n_samples, seed)
            plain, _, usual = learn(parts, rounds)
            secure, _, longer = learn(parts, rounds, secure=True)
            rows.append([error(plain, held_out), error(secure, held_out), usual, longer])
        names = ("error_clear", "error_secure", "seconds_clear", "seconds_secure")
        medians = dict(zip(names, np.median(rows, axis=0).tolist(), strict=True))
        found.append({"clients": n_clients, "samples": n_samples, **medians})
    return found


def differences() -> list[dict[str, Any]]:
    """Measure what differences between rounds show, by what the clients send."""
    n_clients, n_samples, rounds = SHOWN
    found = []
    for name, (options, digits) in SENT.items():
        rows = []
        for seed in range(SEEDS):
            parts, held_out = images(n_clients, n_samples, seed)
            atoms, sent, _ = learn(parts, rounds, digits, **options)
            rows.append(
                [shown(parts, sent, 0.99), shown(parts, sent, 0.95), error(atoms, held_out)]
            )
        near, nearby, median = np.median(rows, axis=0).tolist()
        found.append({"sent": name, "above_99": near, "above_95": nearby, "error": median})
    return found


def draws() -> dict[str, Matrix]:
    """Return 40 samples of each kind."""
    rng = np.random.default_rng(0)
    sparse = rng.standard_normal((40, 16)) * (rng.random((40, 16)) < 0.15)
    sparse[~sparse.any(axis=1), 0] = 1
    centers = 3 * rng.standard_normal((12, 16))
    return {
        "digits": load_digits().data[rng.choice(1797, 40, replace=False)] / 16,
        "normal": rng.standard_normal((40, 16)),
        "Student t(2)": rng.standard_t(2, (40, 16)),
        "sparse": sparse,
        "clustered": centers[rng.integers(12, size=40)] + 0.5 * rng.standard_normal((40, 16)),
    }


def answer(X: Matrix, G: Matrix, learner: Any, min_support: int) -> Matrix:
    """Return the rows of statistics that a client without local atoms answers with."""
    client = DictionaryClient(
        X,
        learner,
        Context(1, 1, {"partition-id": 0}, RecordDict(), {}),
        start=lambda X, learner, *, rng: WarmStart(G, 0.0, (0.0,)),
        min_support=min_support,
    )
    asked = {"perdl.step": "update", "server-round": 1, "perdl.seed": 0, "perdl.run": "r"}
    asked |= {"perdl.sends": "statistics", "perdl.orthogonal": int(learner.orthogonal)}
    return client.fit([G], asked)[0][0][:, -X.shape[1] :]


def attackers(n_requests: int = 100, n_atoms: int = 12) -> list[dict[str, Any]]:
    """Count rows that show a sample: a cosine above .95, and below .7 without the sample."""

    def near(rows: Matrix, x: Matrix) -> Matrix:
        lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(x)
        return np.abs(rows @ x) / np.where(lengths > 1e-12, lengths, np.inf)

    learners = {
        "MOD, k = 2": MODLearner(n_atoms, n_nonzero=2),
        "orthogonal, k = 2": OrthogonalLearner(n_atoms, n_nonzero=2),
        "lasso": LassoLearner(n_atoms),
    }
    found = []
    for (kind, X), (name, learner) in product(draws().items(), learners.items()):
        row: dict[str, Any] = {"samples": kind, "learner": name}
        for least in (0, 3):
            rng, left, shows = np.random.default_rng(5), 0, 0
            for attempt in range(n_requests):
                G = rng.standard_normal((n_atoms, X.shape[1]))
                if learner.orthogonal:
                    G = np.linalg.qr(G.T)[0].T
                elif attempt % 2:  # samples with noise
                    G = normalize_atoms(X[rng.choice(len(X), n_atoms, replace=False)]) + 0.1 * G
                rows = answer(X, normalize_atoms(G), learner, least)
                left += int(rows.any(axis=1).sum())
                for i, x in enumerate(X):
                    close = near(rows, x) > 0.95
                    if close.any():
                        others = answer(np.delete(X, i, axis=0), normalize_atoms(G), learner, 0)
                        shows += int((near(others, x)[close] < 0.7).sum())
            row |= {f"left_{least}": left, f"shown_{least}": shows}
        found.append(row)
    total = {key: sum(row[key] for row in found) for key in found[0] if "_" in key}
    return [*found, {"samples": "all", "learner": "", **total}]


def rest() -> dict[str, Any]:
    """Measure everything."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    return {
        "seeds": SEEDS,
        "cost": costs(),
        "differences": differences(),
        "attackers": attackers(),
    }


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Return the results as Markdown."""
    cost = [
        [
            *(f"{row[key]}" for key in ("clients", "samples")),
            *(f"{row[f'error_{how}']:.4f}" for how in ("clear", "secure")),
            *(f"{row[f'seconds_{how}']:.2f}" for how in ("clear", "secure")),
        ]
        for row in results["cost"]
    ]
    differ = [
        [row["sent"], f"{row['above_99']:.0f}", f"{row['above_95']:.0f}", f"{row['error']:.4f}"]
        for row in results["differences"]
    ]
    attacked = [
        [
            ", ".join(filter(None, (row["samples"], row["learner"]))),
            *(f"{row[f'shown_{least}']} of {row[f'left_{least}']:,}" for least in (0, 3)),
        ]
        for row in results["attackers"]
    ]
    sizes = ["clients", "samples of each", "error in the clear", "secure"]
    clocks = ["seconds of an update round in the clear", "secure"]
    at = f"of {SHOWN[0] * SHOWN[1]} samples, at a cosine above 0.99"
    rows = "nothing withheld: rows that show a sample"
    return {
        "secure": markdown_table([*sizes, *clocks], cost),
        "differences": markdown_table(["a client sends", at, "above 0.95", "error"], differ),
        "attackers": markdown_table(["samples, learner", rows, "the rule"], attacked),
    }


if __name__ == "__main__":
    main("secure", (__doc__ or "").splitlines()[0], dict, rest, tables)
