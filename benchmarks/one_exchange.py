"""`FederatedRidge` on data of real clients, beside what federated learning iterates for.

``python benchmarks/one_exchange.py FOLDER [PART ...]`` with the folder of the data files; without a
part all of them. Writes results/one_exchange.json and results/one_exchange.md. Networks, IFCA and
trees on the phones: the study `people`.

Rules, set before the runs. Everything is at its default but for what is said here.

phones     18 people's activities (6 classes) from windows of a phone's accelerometer; of each
           person and activity one half of the windows, contiguous in time from a drawn one on (it
           may wrap around), is for training, the other half for testing; five draws. Accuracy,
           mean over people. ``drawn``: the half is drawn at random.
liar       The first ten people, five draws: accuracy at nine of them, where the tenth trains with
           labels shifted by one and columns negated, with and without robust=True.
turned     MNIST turned by 0, 90, 180 or 270 degrees, 20 clients of 80 images, 400 features, three
           draws; accuracy on 2,000 other images, turned as the client's.
schools    The study `regression` (school.npz): its 20 splits, explained variance of all pupils
           held out. No random features.
patients   The study `patients` (parkinsons.npz, as its page has it): root mean squared error, ten
           splits. No random features, the constant deviates, penalties of deviations as everywhere;
           "validated": the rows by which others choose are used for training, since there is
           nothing to choose. "newest" (added after the first run): trained as without; then each
           client solves its part by `adapt` on those rows, which are its newest; so was
           random="columns".
heart      The same study (heart.npz, as its page has it): share of wrong classes.
beijing    The study `forecast` (beijing.npz), ten seeds: mean squared error, paired with the stored
           errors of exact diffusion. Four scales (0.03, 0.1, 0.3, 1) and six penalties (0.3, 1, 3,
           10, 30, 100), chosen by folds of the training days. In the study itself validation days
           choose.
noise      phones (300 features) and schools, three draws, at epsilon 8, 2 and 0.5, delta 1e-5:
           columns' means and deviations given as if they were public (those of all rows), or
           learned from noised moments within bounds (the least and the largest value of a column).
memory     100 clients of 40 samples with 2,000 random features in this process: peak of what
           NumPy holds during "shared", beside a client's sums.
"""

from __future__ import annotations

import json
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, RecordDict
from numpy.typing import NDArray
from scipy.special import stdtrit

from flwr_perdl.clients import RidgeClient, adapt, client_app
from flwr_perdl.core.checks import Matrix
from flwr_perdl.privacy import Noise
from flwr_perdl.regression import RidgeModel
from flwr_perdl.regression.ridge import (
    RandomFeatures,
    column_moments,
    fit_deviation,
    standardize,
)
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import FederatedRidge
from perdl_experiments.render import markdown_table
from perdl_experiments.studies import configure, find, forecast, patients, regression
from perdl_experiments.studies._ridge import one_exchange

RESULTS = Path(__file__).parent / "results" / "one_exchange.json"
GALLERY = Path(__file__).parent.parent / "docs" / "gallery" / "results.json"
DRAWS, SPLITS, SEEDS = range(5), range(20), range(3)
SCALES, PENALTIES = (0.03, 0.1, 0.3, 1.0), (0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
EPSILONS, FEATURES = (8.0, 2.0, 0.5), 300
#: Of each person: features, labels, and which windows are for training.
Part = tuple[Matrix, NDArray[Any], NDArray[np.bool_]]


def run(own: Sequence[Part], level: str, **options: Any) -> tuple[FederatedRidge, list[RidgeModel]]:
    """Return a strategy after its run, and every client's model."""
    return one_exchange([(X[train], y[train]) for X, y, train in own], level, **options)


def alone(own: Sequence[Part], **options: Any) -> list[RidgeModel]:
    """Return models by the same closed form of each client's rows, in the columns of all."""
    total = np.sum([column_moments(X[train]) for X, _, train in own], axis=0)
    columns = options.get("columns") or standardize(total)
    how: Any = {"scale": 2.0, "seed": options.get("seed", 0)}
    features = RandomFeatures.draw(*columns, options.get("features", 600), **how)
    classes, found = options.get("classes", 0), []
    for X, y, train in own:
        Y = np.eye(classes)[y[train]] if classes else y[train][:, None]
        found.append(
            RidgeModel(features, fit_deviation(features(X[train]), Y).coefficients, classes)
        )
    return found


def accuracy(own: Sequence[Part], models: Sequence[RidgeModel]) -> float:
    """Return the mean over clients of the accuracy on their test rows."""
    each = zip(own, models, strict=True)
    return float(np.mean([np.mean(w.predict(X[~train]) == y[~train]) for (X, y, train), w in each]))


# Phones ------------------------------------------------------------------------------------------


def people(folder: Path, seed: int, *, contiguous: bool = True) -> list[Part]:
    """Return every person's windows."""
    with np.load(folder / "phones18.npz") as data:
        X, y, client = data["X"], data["y"], data["client"]
    rng, train = np.random.default_rng(seed), np.zeros(len(y), bool)
    for person in np.unique(client):
        for activity in np.unique(y):
            rows = np.flatnonzero((client == person) & (y == activity))
            order = np.roll(rows, -rng.integers(len(rows))) if len(rows) else rows
            order = order if contiguous else rng.permutation(rows)
            train[order[: round(len(rows) / 2)]] = True
    return [(X[own], y[own], train[own]) for own in (client == c for c in np.unique(client))]


def phones(folder: Path) -> dict[str, list[float]]:
    """Return accuracies by level; those of local training by the same closed form."""
    found: dict[str, list[float]] = {}
    for seed in DRAWS:
        for drawn in (False, True):
            own, end = people(folder, seed, contiguous=not drawn), ", drawn" * drawn
            options: Any = {"classes": 6, "seed": seed}
            for level in ("shared", "personal", "auto"):
                strategy, models = run(own, level, **options)
                found.setdefault(level + end, []).append(accuracy(own, models))
                if level == "auto":
                    chosen = float(strategy.chosen_level == "personal")
                    found.setdefault("auto takes personal" + end, []).append(chosen)
            found.setdefault("local" + end, []).append(accuracy(own, alone(own, **options)))
    return found


def liar(folder: Path) -> dict[str, list[float]]:
    """Return accuracies of honest people, with and without one who lies."""
    found: dict[str, list[float]] = {}
    for seed in DRAWS:
        *honest, (X, y, train) = people(folder, seed)[:10]
        for end, last in (("", (X, y, train)), (", lied to", (-X, (y + 1) % 6, train))):
            for level, robust in product(("shared", "personal"), (False, True)):
                how: Any = {"classes": 6, "seed": seed, "robust": robust}
                models = run([*honest, last], level, **how)[1][:-1]
                name = f"{level}{', robust' * robust}{end}"
                found.setdefault(name, []).append(accuracy(honest, models))
    return found


# Images ------------------------------------------------------------------------------------------


def turned(folder: Path) -> dict[str, list[float]]:
    """Return accuracies of four groups that nobody is told, and the server's seconds."""
    with np.load(folder / "mnist12k.npz") as data:
        images, labels = data["X"], data["y"]
    found: dict[str, list[float]] = {}
    for seed in SEEDS:
        order = np.random.default_rng(seed).permutation(len(labels))
        tests = order[1600:3600]

        def rows(i: int, order: Any = order, tests: Any = tests) -> Part:
            both = np.concatenate([order[80 * i : 80 * (i + 1)], tests])
            X = np.rot90(images[both], i % 4, (1, 2)).reshape(len(both), -1)
            return X, labels[both], np.arange(len(both)) < 80

        own, options = [rows(i) for i in range(20)], {"classes": 10, "features": 400, "seed": seed}
        began = time.process_time()
        groups, models = run(own, "groups", **options)
        found.setdefault("seconds", []).append(time.process_time() - began)
        found.setdefault("groups", []).append(accuracy(own, models))
        found.setdefault("number of groups", []).append(len(groups.result.models))
        right = groups.result.members == {i: i % 4 for i in range(20)}
        found.setdefault("all 20 in their group", []).append(float(right))
        models = run(own, "shared", **options)[1]
        found.setdefault("shared", []).append(accuracy(own, models))
        known = [run(own[k::4], "shared", **options)[1] for k in range(4)]
        oracle = [known[i % 4][i // 4] for i in range(20)]
        found.setdefault("oracle groups", []).append(accuracy(own, oracle))
    return found


# Tables ------------------------------------------------------------------------------------------


def pupils(folder: Path, seed: int) -> list[Part]:
    """Return every school's pupils, by the study's split."""
    table = regression._load(str(folder / "school.npz"), "tumors")
    split = regression._split(table, seed)
    origin = np.concatenate([y[rows] for y, rows in zip(table.y, split.train, strict=True)]).mean()
    each = zip(table.X, table.y, split.train, strict=True)
    return [(X, y - origin, np.isin(np.arange(len(y)), rows)) for X, y, rows in each]


def explained(own: Sequence[Part], models: Sequence[RidgeModel]) -> float:
    """Return the explained variance of all test rows."""
    truth = np.concatenate([y[~train] for _, y, train in own])
    each = zip(own, models, strict=True)
    said = np.concatenate([w.predict(X[~train]) for (X, _, train), w in each])
    return float(1 - np.mean((truth - said) ** 2) / np.var(truth))


def schools(folder: Path) -> dict[str, list[float]]:
    """Return explained variances by level, and by what deviates at a school."""
    found: dict[str, list[float]] = {}
    for seed in SPLITS:
        own, options = pupils(folder, seed), {"features": 0, "seed": seed}
        for level, more in {
            "shared": {},
            "personal": {},
            "personal, intercept": {"random": "intercept"},
            "personal, columns": {"random": "columns"},
            "auto": {},
        }.items():
            models = run(own, level.partition(",")[0], **more, **options)[1]
            found.setdefault(level, []).append(explained(own, models))
        found.setdefault("local", []).append(explained(own, alone(own, **options)))
    return found


def natural(
    folder: Path, file: str, error: Callable[..., float], **options: Any
) -> dict[str, list[float]]:
    """Return errors of a random intercept on the rows of the study `patients`."""
    found: dict[str, list[float]] = {}
    config = configure(find("patients"), data=str(folder / file), options=options)
    classes: Any = {"classes": 2} if config.task == "class" else {}
    for seed in range(10):
        own, unit = patients.splits(config, seed)
        for validated in (False, True):
            parts = [[one.train, one.choose][: 1 + validated] for one in own]
            rows = [[*part, one.test] for part, one in zip(parts, own, strict=True)]
            clients = []
            for part in rows:
                X, y = (np.concatenate([getattr(r, n) for r in part]) for n in ("X", "y"))
                y = y.astype(int) if classes else y
                clients.append((X, y, np.arange(len(y)) < len(y) - len(part[-1].y)))
            for random in ("intercept", "all", "columns"):
                how: Any = {"random": random, "features": 0, "seed": seed, **classes}
                strategy, models = run(clients, "personal", **how)
                each = zip(clients, models, strict=True)
                value = np.mean([error(w, X[~t], y[~t]) for (X, y, t), w in each])
                name = f"{random}{', validated' * validated}"
                found.setdefault(name, []).append(float(value * unit))
                if not validated:
                    models = [at_site(strategy, one.choose, bool(classes)) for one in own]
                    pairs = zip(own, models, strict=True)
                    value = np.mean([error(w, one.test.X, one.test.y) for one, w in pairs])
                    found.setdefault(f"{random}, newest", []).append(float(value * unit))
    return found


def at_site(strategy: FederatedRidge, rows: Any, classes: bool) -> RidgeModel:
    """Return a client's model, with a part that it solves of these rows."""
    context = Context(1, 1, {"partition-id": 0}, RecordDict(), {})
    y = rows.y.astype(int) if classes else rows.y
    app = client_app(lambda context: RidgeClient(rows.X, y, context))
    return RidgeModel.of(adapt(app, strategy.result, context))


def rmse(model: RidgeModel, X: Matrix, y: NDArray[Any]) -> float:
    """Return the root mean squared error."""
    return float(np.sqrt(np.mean((model.predict(X) - y) ** 2)))


def wrong(model: RidgeModel, X: Matrix, y: NDArray[Any]) -> float:
    """Return the share of wrong classes."""
    return float(np.mean(model.predict(X) != y))


def beijing(folder: Path) -> dict[str, list[float]]:
    """Return squared errors of the next day's forecast."""
    config = configure(find("forecast"), data=str(folder / "beijing.npz"))
    found: dict[str, list[float]] = {}
    for seed in range(10):
        days = forecast.splits(config, seed)
        own = [
            (
                np.concatenate([one.train.X, one.test.X]),
                np.concatenate([one.train.y, one.test.y]),
                np.arange(len(one.train.y) + len(one.test.y)) < len(one.train.y),
            )
            for one in days
        ]
        for level in ("shared", "personal"):
            models = run(own, level, scale=SCALES, penalty=PENALTIES, seed=seed)[1]
            each = zip(own, models, strict=True)
            errors = [np.mean((w.predict(X[~t]) - y[~t]) ** 2) for (X, y, t), w in each]
            found.setdefault(level, []).append(float(np.mean(errors)))
    stored = json.loads(GALLERY.read_text())["forecast"]["defaults"]["metrics"]
    for name in ("exact", "fedavg", "tuned", "forest", "alone"):
        found[f"stored, {name}"] = stored[f"error_{name}"]["values"]
    return found


# Noise and memory --------------------------------------------------------------------------------


def noise(folder: Path) -> dict[str, list[float]]:
    """Return accuracies, and explained variances, at three budgets."""
    found: dict[str, list[float]] = {}
    for seed in SEEDS:
        for data, own, measure, options in (
            ("phones", people(folder, seed), accuracy, {"classes": 6, "features": FEATURES}),
            ("schools", pupils(folder, seed), explained, {"features": 0}),
        ):
            X, y = (np.concatenate([one[j] for one in own]) for j in (0, 1))
            bounds = np.stack([np.nanmin(X, axis=0), np.nanmax(X, axis=0)], axis=1)
            bounds += np.where(bounds[:, :1] == bounds[:, 1:], [-1.0, 1.0], 0.0)
            deviation = np.nanstd(X, axis=0)
            columns = np.nanmean(X, axis=0), np.where(deviation > 0, deviation, 1.0)
            if "classes" not in options:
                bounds = np.vstack([bounds, [[y.min(), y.max()]]])
            options = {**options, "seed": seed}
            models = alone(own, columns=columns, **options)
            found.setdefault(f"{data}, local", []).append(measure(own, models))
            models = run(own, "personal", columns=columns, **options)[1]
            found.setdefault(f"{data}, no noise", []).append(measure(own, models))
            for epsilon in EPSILONS:
                for given in (True, False):
                    rng = np.random.default_rng([seed, int(10 * epsilon)])
                    privacy = Noise(epsilon=epsilon, trust="central", rng=lambda rng=rng: rng)
                    more = {"columns": columns} if given else {}
                    for level in ("shared", "personal"):
                        models = run(own, level, privacy=privacy, bounds=bounds, **more, **options)[
                            1
                        ]
                        name = f"{data}, {level}, epsilon {epsilon:g}{', given' * given}"
                        found.setdefault(name, []).append(measure(own, models))
    return found


def memory(folder: Path) -> dict[str, list[float]]:
    """Return megabytes of the peak in this process, and of one client's sums."""
    n, d, q, own = 100, 10, 6, list[Part]()
    for i in range(n):
        rng = np.random.default_rng(i)
        own.append((rng.standard_normal((40, d)), rng.integers(q, size=40), np.ones(40, bool)))
    features, began = 2000, time.process_time()
    p = 1 + d + features

    def make_client(context: Context) -> RidgeClient:
        X, y, _ = own[int(context.node_config["partition-id"])]
        return RidgeClient(X, y, context)

    strategy = FederatedRidge("shared", classes=q, features=features, fraction_evaluate=0.0)
    grid = InProcessGrid(client_app(make_client), n)
    tracemalloc.start()
    strategy.start(grid, verbose="quiet")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    size = 8 * 3 * (p * (p + 1) // 2 + (p + 1) * q)
    found = {"peak": peak / 1e6, "a client's sums": size / 1e6}
    found |= {"peak in sums of a client": peak / size, "seconds": time.process_time() - began}
    return {name: [value] for name, value in found.items()}


PARTS: dict[str, Callable[[Path], dict[str, list[float]]]] = {
    "phones": phones,
    "liar": liar,
    "turned": turned,
    "schools": schools,
    "patients": lambda folder: natural(folder, "parkinsons.npz", rmse, order=2, n_train=30),
    "heart": lambda folder: natural(folder, "heart.npz", wrong, task="class"),
    "beijing": beijing,
    "noise": noise,
    "memory": memory,
}


def table(found: dict[str, dict[str, list[float]]]) -> str:
    """Tabulate means and ranges."""
    parts = []
    for part, rows in found.items():
        cells = [
            [name, f"{np.mean(own):.4g}", f"{min(own):.4g} to {max(own):.4g}", str(len(own))]
            for name, own in rows.items()
        ]
        titles = [part, "mean", "range", "draws"]
        parts.append(markdown_table(titles, cells))
        pairs: list[tuple[str, str]] = []
        if part == "beijing":
            others = [name for name in rows if name.startswith("stored")]
            pairs = [*product([name for name in rows if "shared" in name], others)]
        for one, other in pairs:
            gains = np.array(rows[one]) - rows[other]
            half = stdtrit(len(gains) - 1, 0.975) * gains.std(ddof=1) / np.sqrt(len(gains))
            parts.append(f"{one} minus {other}: {gains.mean():.4f} ± {half:.4f}\n")
    return "\n".join(parts)


def main() -> None:
    """Run the parts that are named, and write all results."""
    folder, names = Path(sys.argv[1]), sys.argv[2:] or [*PARTS]
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in names:
        found[name] = PARTS[name](folder)
        found = {part: found[part] for part in PARTS if part in found}
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        RESULTS.with_suffix(".md").write_text(table(found))
        print(table({name: found[name]}))


if __name__ == "__main__":
    main()
