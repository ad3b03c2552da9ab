"""Is `Diagnosis` right? What its recommendation costs, on federations of many kinds.

``python benchmarks/regret.py [--data FOLDER] [--candidate MODULE:FUNCTION] [FEDERATION ...]`` from
the repository's root; all but those of CIFAR-10, which take longer, if none is named. Every run is
stored when it ends, in ``benchmarks/results/regret.json``, and is not taken again: seed by seed.
The tables of all are ``benchmarks/results/regret.md`` and ``regret-losses.md``.

A method of your own joins by ``--candidate``, or by a line in `CANDIDATES`.

Rules, set before the runs. A client's data have three parts: to train with, to choose by
("validation"), to test with. Every candidate trains for 20 rounds, of ten gradient steps on all of
a client's data, at one learning rate per kind of loss; the network has 32 hidden units. Where it
predicts numbers, gradients are clipped at norm 1: added after the first run of "patients", where
one client diverged with the candidate that was recommended. The regret of a recommendation is
(L - L_best) / L_best, where L is the mean test loss over clients, averaged over seeds, and L_best
the least of the candidates' averages, also of those that the diagnosis stops after a third of the
rounds. A loss is that of the evaluation that counts for the diagnosis.

natural    Four hospitals (heart.npz, a disease or none), patients (parkinsons.npz, 10 of 42, total
           UPDRS), schools (school.npz, 12 of 139, exam scores), stations (beijing.npz, tomorrow's
           fine dust by today's means, a fifth of the days; 10 of 12), people (phones18.npz,
           activities; 12 of 18).
           Half of each client's rows to train with, a quarter each for the rest.
made       scikit-learn's digits, 10 clients of 40, 30 and 60 images: alike; turned by 0, 90, 180
           or 270 degrees; labels permuted; three labels each; brightness, contrast and blur of a
           camera each; shares of labels drawn from Dirichlet distributions. CIFAR-10 (cifar12k.npz)
           in gray, 16 x 16, Dirichlet(0.1) with 20 and 100 clients; two seeds.
planted    Linear regressions with 10 features, 10 clients of 20, 15 and 200 samples: one, two, or
           one for each client.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord
from scipy.ndimage import gaussian_filter, rotate

from flwr_perdl.clients import client_app
from flwr_perdl.core.threads import one_blas_thread
from flwr_perdl.protocol.records import EVALUATE
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import Diagnosed, Diagnosis
from perdl_experiments.render import markdown_table
from perdl_experiments.studies._network import NAMES, random_network

RESULTS = Path(__file__).parent / "results" / "regret.json"
#: What is tried. One line more tries a method of your own, `(initial, num_rounds, **options)`.
CANDIDATES: dict[str, Any] = {**Diagnosis.defaults}
SEEDS, ROUNDS, STEPS, HIDDEN = 5, 20, 10, 32
#: What tables call the candidates; one of your own has its name.
TITLES = {
    "fedavg": "FedAvg",
    "fine-tuned": "FedAvg-FT",
    "head": "`PersonalizedFedAvg`, head",
    "body": "`PersonalizedFedAvg`, body",
    "head-fine-tuned": "`PersonalizedFedAvg`-FT, head",
    "ditto": "`Ditto`",
    "clusters": "`ClusteredFedAvg`",
    "clusters-head": "`ClusteredFedAvg`, heads",
    "local": "local training",
}
#: Learning rates, by the kind of loss.
RATES = {"classes": 0.3, "numbers": 0.03}

Rows = tuple[Any, Any]


class Client:
    """A client with a network of two layers, and rows to train with, to choose by, to test with."""

    def __init__(self, train: Rows, choose: Rows, test: Rows, n_classes: int = 0) -> None:
        self.rows, self.n_classes = (train, choose, test), n_classes

    def error(self, model: list[Any], rows: Rows) -> tuple[Any, Any, float]:
        """Return the hidden units, the derivative by the network's output, and the loss."""
        (X, y), (W, b, V, c) = rows, model
        hidden = np.maximum(X @ W + b, 0)
        out = hidden @ V + c
        if not self.n_classes:
            return hidden, (out - y[:, None]) / len(X), float(np.mean((out[:, 0] - y) ** 2))
        out = np.exp(out - out.max(axis=1, keepdims=True))
        out /= out.sum(axis=1, keepdims=True)
        right = out[np.arange(len(y)), y]
        return (
            hidden,
            (out - np.eye(self.n_classes)[y]) / len(X),
            float(-np.log(right + 1e-9).mean()),
        )

    def fit(self, model: list[Any], config: Any) -> Any:
        """Take gradient steps on all rows."""
        rate, X = RATES["classes"], self.rows[0][0]
        for _ in range(STEPS):
            hidden, error, _loss = self.error(model, self.rows[0])
            V = model[2]
            back = (error @ V.T) * (hidden > 0)
            gradients = [X.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)]
            if not self.n_classes:
                rate = RATES["numbers"] / max(1, np.sqrt(sum(np.sum(own**2) for own in gradients)))
            model = [array - rate * own for array, own in zip(model, gradients, strict=True)]
        return model, len(X), {}

    def evaluate(self, model: list[Any], config: Any) -> Any:
        """Return the loss by which it is chosen, and on the test rows."""
        chosen, test = (self.error(model, rows)[2] for rows in self.rows[1:])
        return chosen, len(self.rows[1][1]), {"test": test}


class Complete(Diagnosis):
    """A diagnosis that stops nobody, but concludes as if it did; and the test losses."""

    def _going_on(self, judged: Any) -> list[str]:
        self.kept = super()._going_on(judged)
        return [run.name for run in judged.runs]

    def _concluded(self, stopped: Any, ended: Any) -> Any:
        self.test = dict[str, float]()
        for run in ended:
            numbers = [one.numbers for one in run.evaluations if one.step == EVALUATE]
            loss, test = (
                np.array([[own[p][key] for p in sorted(own)] for own in numbers])
                for key in ("loss", "test")
            )
            at = self._counts(-loss), np.arange(loss.shape[1])
            self.test[run.name] = float(test[at].mean())
        return super()._concluded(stopped, [r for r in ended if (r.origin or r).name in self.kept])


# Federations ----------------------------------------------------------------------------------


def split(X: Any, y: Any, shares: Sequence[float], rng: Any, n_classes: int = 0) -> Client:
    """Return a client of these rows, in three parts."""
    order = rng.permutation(len(y))
    cuts = (np.cumsum(shares[:2]) * (len(y) if shares[0] < 1 else 1)).astype(int)
    return Client(*[(X[own], y[own]) for own in np.split(order, cuts)], n_classes=n_classes)


def natural(file: str, n_clients: int, data: Path, rng: Any) -> list[Client]:
    """Return the clients of a file: some of them, half of their rows to train with."""
    stored = dict(np.load(data / f"{file}.npz"))
    if file == "beijing":
        X = stored["X"][:, : 24 * 1460].reshape(12, 1460, 24, -1)
        X = np.nan_to_num(np.nanmean(X, axis=2), nan=0.0)
        days = np.arange(0, 1459, 5)
        stored = {
            "X": X[:, days].reshape(-1, X.shape[2]),
            "y": X[:, days + 1, 0].ravel(),
            "client": np.repeat(np.arange(12), len(days)),
        }
    X, y, client = (np.asarray(stored[key]) for key in ("X", "y", "client"))
    X = np.where(np.isnan(X), np.nanmedian(X, axis=0), X).astype(float)
    X = (X - X.mean(axis=0)) / np.maximum(X.std(axis=0), 1e-9)
    n_classes = {"heart": 2, "phones18": 6}.get(file, 0)
    y = np.minimum(y, 1) if file == "heart" else y
    y = y.astype(int) if n_classes else (y - y.mean()) / y.std()
    chosen = rng.permutation(np.unique(client))[:n_clients]
    own = [client == one for one in chosen]
    return [split(X[rows], y[rows], (0.5, 0.25), rng, n_classes) for rows in own]


def pictures(data: Path, cifar: bool) -> tuple[Any, Any]:
    """Return images and labels."""
    if cifar:
        stored = np.load(data / "cifar12k.npz")
        gray = stored["X"].mean(axis=-1).reshape(-1, 16, 2, 16, 2).mean(axis=(2, 4)) / 255
        return gray, stored["y"].astype(int)
    from sklearn.datasets import load_digits

    found = load_digits()
    return found.images / 16, found.target


def made(kind: str, n_clients: int, data: Path, rng: Any, *, cifar: bool = False) -> list[Client]:
    """Return clients with images, which differ in a way."""
    images, labels = pictures(data, cifar)
    sizes = (120, 60, 60) if cifar and n_clients < 100 else (40, 30, 60)
    free, clients = rng.permutation(len(labels)), []
    for i in range(n_clients):
        shares = np.ones(10)
        if kind.startswith("Dirichlet"):
            shares = rng.dirichlet(np.full(10, float(kind.partition(" ")[2])))
        if kind == "three labels each":
            shares = np.isin(np.arange(10), rng.permutation(10)[:3]).astype(float)
        p = shares[labels[free]] / np.bincount(labels[free], minlength=10)[labels[free]] + 1e-12
        rows = rng.choice(len(free), size=sum(sizes), replace=False, p=p / p.sum())
        # The images of many clients are drawn anew for each.
        own, free = (
            free[rows],
            free if n_clients * sum(sizes) > len(labels) / 2 else np.delete(free, rows),
        )
        X, y = images[own], labels[own]
        if kind == "turned, four groups":
            X = rotate(X, 90 * (i % 4), axes=(1, 2), reshape=False, order=1)
        if kind == "labels permuted":
            y = rng.permutation(10)[y]
        if kind == "a camera each":
            X = gaussian_filter(X, (0, *[rng.uniform(0, 1)] * 2))
            X = rng.uniform(-0.5, 0.5) + rng.uniform(0.3, 1.5) * X
        clients.append(split(X.reshape(len(X), -1), y, sizes, rng, 10))
    return clients


def planted(kind: str, n_clients: int, _: Path, rng: Any) -> list[Client]:
    """Return clients with linear regressions: one, two, or one for each."""
    drawn = rng.standard_normal((n_clients, 10)) / np.sqrt(10)
    which = {"one": [0] * n_clients, "two": np.arange(n_clients) % 2}.get(kind, range(n_clients))
    clients = []
    for i in which:
        X = rng.standard_normal((235, 10))
        y = X @ drawn[i] + 0.3 * rng.standard_normal(235)
        clients.append(split(X, y, (20, 15), rng))
    return clients


class Federation(NamedTuple):
    """A way to make clients, and how many seeds it has."""

    make: Callable[..., list[Client]]
    what: str
    n_clients: int
    seeds: int = SEEDS


FEDERATIONS = {
    "hospitals": Federation(natural, "heart", 4),
    "patients": Federation(natural, "parkinsons", 10),
    "schools": Federation(natural, "school", 12),
    "stations": Federation(natural, "beijing", 10),
    "people": Federation(natural, "phones18", 12),
    **{
        f"digits, {kind}": Federation(made, kind, 10)
        for kind in (
            "alike",
            "turned, four groups",
            "labels permuted",
            "three labels each",
            "a camera each",
            "Dirichlet 0.1",
            "Dirichlet 0.5",
        )
    },
    **{f"regression, {kind}": Federation(planted, kind, 10) for kind in ("one", "two", "each")},
    **{
        f"CIFAR-10, Dirichlet 0.1, {n} clients": Federation(
            partial(made, cifar=True), "Dirichlet 0.1", n, 2
        )
        for n in (20, 100)
    },
}


def measured(name: str, seed: int, data: Path) -> dict[str, Any]:
    """Return what is recommended, and all candidates' losses."""
    federation = FEDERATIONS[name]
    rng = np.random.default_rng((seed, [*FEDERATIONS].index(name)))
    clients = federation.make(federation.what, federation.n_clients, data, rng)
    n_features, n_classes = clients[0].rows[0][0].shape[1], clients[0].n_classes
    arrays = zip(NAMES, random_network(n_features, HIDDEN, n_classes or 1, rng), strict=True)
    start = ArrayRecord({name: Array(np.asarray(array, dtype=float)) for name, array in arrays})
    app = client_app(lambda context: clients[int(context.node_config["partition-id"])])
    diagnosis = Complete(candidates=CANDIDATES, seed=seed)
    with one_blas_thread():
        diagnosis.start(InProcessGrid(app, len(clients)), start, ROUNDS, verbose="quiet")
    found: Diagnosed = diagnosis.result
    return {"choice": found.choice, "test": diagnosis.test, "tried": [*CANDIDATES]}


# Tables ---------------------------------------------------------------------------------------


def regret(runs: Sequence[dict[str, Any]]) -> float:
    """Return what recommendations cost, as a share of the least test loss."""
    least = min(losses(runs).values())
    return float(np.mean([run["test"][run["choice"]] for run in runs])) / least - 1


def losses(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the candidates' test losses, averaged over seeds."""
    names = [name for name in runs[0]["test"] if all(name in run["test"] for run in runs)]
    return {name: float(np.mean([run["test"][name] for run in runs])) for name in names}


def title(candidate: str) -> str:
    """Return what tables call a candidate."""
    return TITLES.get(candidate, candidate)


def tables(stored: dict[str, list[dict[str, Any]]]) -> tuple[str, str]:
    """Return the regrets, and every candidate's mean test loss, as Markdown."""
    names = [name for name in FEDERATIONS if name in stored]
    rows = []
    for name in names:
        runs = stored[name]
        mean = losses(runs)
        counts = Counter(run["choice"] for run in runs).most_common()
        said = "; ".join(f"{title(choice)} {n}" for choice, n in counts)
        best = title(min(mean, key=lambda one: mean[one]))
        rows.append([name, said, best, f"{regret(runs):.1%}"])
    regrets = [regret(stored[name]) for name in names]
    for what, of in (("mean", np.mean), ("largest", np.max)):
        rows.append([what, "", "", f"{of(regrets):.1%}"])
    columns = ["federation", "recommended, in how many runs", "best", "regret"]
    tried = list(dict.fromkeys(one for name in names for one in losses(stored[name])))
    found = [
        [
            name,
            *[
                f"{losses(stored[name])[one]:.3f}" if one in losses(stored[name]) else ""
                for one in tried
            ],
        ]
        for name in names
    ]
    return markdown_table(columns, rows), markdown_table(["federation", *map(title, tried)], found)


def write(stored: dict[str, list[dict[str, Any]]]) -> None:
    """Write both tables."""
    for name, table in zip(("regret.md", "regret-losses.md"), tables(stored), strict=True):
        RESULTS.with_name(name).write_text(table)


def main() -> None:
    """Take the federations that are named, and write all results."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--data", type=Path, help="folder of the natural federations' files")
    parser.add_argument("--candidate", help="one of your own, module:function")
    parser.add_argument("names", nargs="*", metavar="FEDERATION", help="default: all but CIFAR-10")
    given = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    if given.candidate:
        module, _, function = given.candidate.partition(":")
        CANDIDATES[function] = getattr(import_module(module), function)
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    named = given.names or [one for one in FEDERATIONS if not one.startswith("CIFAR")]
    for seed in range(SEEDS):
        for name in named:
            federation = FEDERATIONS[name]
            stores = federation.make is natural or name.startswith("CIFAR")
            runs = [one for one in stored.get(name, []) if {*CANDIDATES} <= {*one["tried"]}]
            if (stores and given.data is None) or not len(runs) <= seed < federation.seeds:
                continue
            stored[name] = [*runs, measured(name, seed, given.data or Path())]
            RESULTS.write_text(json.dumps(stored, indent=1) + "\n")
            write(stored)
            print(f"{name}, seed {seed}: {stored[name][-1]['choice']}", flush=True)
    print(*tables(stored), sep="\n")


if __name__ == "__main__":
    main()
