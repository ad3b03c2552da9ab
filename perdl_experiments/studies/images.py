"""Training with imbalanced data: Section 5.2 and Fig. 3, on the user's own images.

Nine tenths of a client's images carry one label; where the data say whose an image is, clients are
those with the most images. The error is measured on held-out images of all
labels, coded by orthogonal matching pursuit with k atoms of each dictionary. With ``methods="all"``
Table 1 is added: the baselines' strategies beside PerMA, each tuned by the same budget, which
`perdl_experiments.studies._methods` states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
from flwr.app import ArrayRecord, Context, MetricRecord
from numpy.typing import NDArray

from flwr_perdl._checks import Matrix, check_choice, check_count
from flwr_perdl._random import DATA, SERVER, spawn
from flwr_perdl._records import PARTITION_ID, to_arrays
from flwr_perdl.clients import DictionaryClient
from flwr_perdl.dictionary import reconstruct, sparse_code, warm_start
from flwr_perdl.simulations.partition import imbalanced_partition, natural_partition
from flwr_perdl.strategies import PerMA
from perdl_experiments.baselines import (
    GENEROSITY,
    PENALTIES,
    learn_each,
    plain_average,
    sklearn_dictionary,
)
from perdl_experiments.data import (
    cached_by_file,
    load_images,
)
from perdl_experiments.engine import Config, EvaluateFn
from perdl_experiments.measures import Quality, quality
from perdl_experiments.outcome import Outcome, Picture, Table
from perdl_experiments.studies import _methods
from perdl_experiments.studies._experiment import (
    MIN_SUPPORT,
    Federate,
    Keep,
    Value,
    make_learner,
    make_strategy,
    private,
)
from perdl_experiments.words import plural

NAME = "images"
ABOUT = "PerMA on your own images and labels (--data), every client with one label in the majority"
SOURCE = "Liang et al., NeurIPS 2023, Section 5.2 and Fig. 3"
DEFAULTS: dict[str, Value] = {
    "clients": 10,
    "rounds": 20,
    "seed": 0,
    "data": "",
    "samples_per_client": 500,
    "n_atoms": 100,
    "n_global": 100,
    "local_steps": 1,
    "aggregation": "statistics",
    "matching": "consensus",
    "learner": "orthogonal",
    "min_support": MIN_SUPPORT,
    "methods": "all",
}
HELP: dict[str, str] = {
    "data": "your images: `.npz` with `X` and `y`",
}
FIGURES: tuple[str, ...] = ("reconstructions.png", "error.png", "atoms.png")
ERROR = "mse_global_10"

#: Everybody's warm start. A threshold that shrinks faster than by default does as well on images:
#: PerMA's error (k = 10) on digits enlarged to 28x28 is 0.0062 after 60 iterations and after 100.
START = partial(warm_start, n_iter=60, decay=0.93)

#: Numbers of atoms per image at which reconstructions are measured; the one in curves; in Fig. 3.
N_NONZERO = (5, 10, 20)
CURVE_N_NONZERO = 10
TABLE_N_NONZERO = (10, 20)
PICTURE_N_NONZERO = 5
FIELDS = Quality._fields


class Task(NamedTuple):
    """What a config makes of the images: clients' and held-out ones."""

    shape: tuple[int, int]
    clients: list[Matrix]
    kinds: list[int]
    test: Matrix
    test_kinds: NDArray[Any]
    natural: bool

    def own_test(self, partition: int) -> Matrix:
        """Return the held-out images of this client's own label; where it is natural, its own."""
        own: Matrix = self.test[self.test_kinds == self.kinds[partition]]
        return own


def client(context: Context, config: Config) -> ImageClient:
    """Return the client of partition ``context.node_config["partition-id"]``."""
    return ImageClient.of(_task(config), context, config)


def strategy(config: Config, **options: Any) -> PerMA:
    """Return the strategy; ``options`` are the server's own."""
    last_only = {"evaluate_every": int(config["rounds"])}
    return make_strategy(config, _n_global(config), {**last_only, **options})


def federations(config: Config) -> list[Config]:
    """Return the config of the one federation."""
    return [config]


class ImageClient(DictionaryClient):
    """A client that measures held-out images with its whole dictionary."""

    def __init__(self, *args: Any, task: Task, **options: Any) -> None:
        super().__init__(*args, **options)
        self.task = task

    @classmethod
    def of(cls, task: Task, context: Context, config: Config) -> Self:
        """Return the task's client of partition ``context.node_config["partition-id"]``."""
        return cls(
            task.clients[int(context.node_config[PARTITION_ID])],
            make_learner(config, int(config["n_atoms"])),
            context,
            task=task,
            start=START,
            **private(config),
        )

    def extra_metrics(self, global_atoms: Matrix, local_atoms: Matrix) -> dict[str, float]:
        """Return the quality with global + local atoms: of all images, and of the own kind."""
        D = np.vstack([global_atoms, local_atoms])
        own = self.task.own_test(self.partition)
        return {
            **_metrics("full", self.task.test, [D], self.task.shape),
            **_metrics("own_full", own, [D], self.task.shape),
        }


def run(config: Config, federate: Federate, keep: Keep) -> Outcome:
    """Run the federation, and what it is compared with, and measure all of them alike."""
    task = _task(config)
    methods = check_choice("methods", config["methods"], ("main", "all"))
    n_atoms, n_global = int(config["n_atoms"]), _n_global(config)
    seed, rounds = int(config["seed"]), int(config["rounds"])
    local_learner, pooled_learner = make_learner(config, n_atoms), make_learner(config, n_global)

    federated = federate(config, evaluate_fn=_on_held_out(task))
    global_atoms = federated.arrays[0]
    pooled, *alone = learn_each(
        [np.vstack(task.clients), *task.clients],
        [pooled_learner] + [local_learner] * len(task.clients),
        [spawn(seed, SERVER, 1), *(spawn(seed, i) for i in range(len(task.clients)))],
        rounds,
        START,
    )
    average = plain_average(alone)
    general = sklearn_dictionary(np.vstack(task.clients), n_global, seed)

    metrics = {"perma_seconds": federated.seconds, "samples_per_client": len(task.clients[0])}
    for name, dictionaries in {
        "global": [global_atoms],
        "local": alone,
        "average": [average],
        "pooled": [pooled],
        "sklearn": [general],
    }.items():
        metrics |= _metrics(name, task.test, dictionaries, task.shape)
    own = [task.own_test(i) for i in range(len(task.clients))]
    for name, dictionaries in {"global": [global_atoms] * len(own), "local": alone}.items():
        metrics |= _means(
            [
                _metrics(f"own_{name}", X, [D], task.shape)
                for X, D in zip(own, dictionaries, strict=True)
            ]
        )
    last = federated.history[-1].metrics.values()
    metrics |= _means([{n: v for n, v in m.items() if "full_" in n} for m in last])

    tuned: dict[str, Mapping[str, NDArray[Any]]] = {}
    if methods == "all":
        for method in _methods.METHODS:
            compute = partial(_tuned, method, task, config)
            tuned[method] = keep(f"tuned-{method}", compute, of=len(_methods.METHODS))
    evaluations = federated.result.evaluate_metrics_serverapp
    curve = [float(str(evaluations[r][ERROR])) for r in sorted(evaluations)]
    training = [report.aggregate for report in federated.history if report.step != "evaluate"]
    return Outcome(
        metrics=metrics | _tuned_metrics(tuned),
        curves={ERROR: curve, "mse_full_training": [m["mse"] for m in training]},
        arrays={
            "global_atoms": global_atoms,
            "pooled_atoms": pooled,
            "average_atoms": average,
            "alone_atoms": np.stack(alone),
            "image_shape": np.array(task.shape),
        },
        tables=[*_tables(metrics, n_atoms, n_global), *(_tables_1(tuned, config) if tuned else [])],
        pictures=_pictures(task, global_atoms, alone[0], pooled, curve, metrics),
        notes=[
            *_notes(config, task),
            *(str(failure) for kept in tuned.values() for failure in kept.get("failures", ())),
        ],
        rounds=federated.rounds,
        floats_up=federated.floats_up,
        floats_down=federated.floats_down,
    )


# Table 1 -------------------------------------------------------------------------------------


def _tuned(method: str, task: Task, config: Config) -> dict[str, NDArray[Any]]:
    """Return what a method's best setting comes to on the held-out images, and what it costs."""
    learned, failures = _methods.learn_tuned(method, task.clients, config, START)
    if learned is None:
        learned = _methods.Learned([], [], *[0.0] * len(_methods.COSTS))

    def measured(dictionaries: Sequence[Matrix]) -> NDArray[Any]:
        found = _metrics("", task.test, dictionaries, task.shape) if dictionaries else {}
        return np.array([[found[f"{f}__{k}"] for k in N_NONZERO] for f in FIELDS if found])

    return {
        "shared": measured(learned.shared),
        "full": measured(learned.full),
        "shared_atoms": np.array([len(D) for D in learned.shared]),
        "full_atoms": np.array([len(D) for D in learned.full]),
        "cost": np.array(learned[2:]),
        "failures": np.array(failures, str),
    }


def _failed(kept: Mapping[str, NDArray[Any]]) -> bool:
    """Return whether a method has no dictionary, as every setting of it failed."""
    return not kept["shared"].size and not kept["full"].size


def _tuned_rows(tuned: Mapping[str, Mapping[str, NDArray[Any]]]) -> Iterator[tuple[str, str, str]]:
    """Yield method, kind of atoms and metric name of every row of the table."""
    for method, kept in tuned.items():
        for kind in ("shared", "full"):
            if kept[kind].size:
                own = kind == "full" and method not in _methods.ALONE
                yield method, kind, f"tuned_{method}" + "_full" * own


def _tuned_metrics(tuned: Mapping[str, Mapping[str, NDArray[Any]]]) -> dict[str, float]:
    metrics = {
        f"{field}_{name}_{k}": float(tuned[method][kind][i, j])
        for method, kind, name in _tuned_rows(tuned)
        for i, field in enumerate(FIELDS)
        for j, k in enumerate(N_NONZERO)
    }
    for method, kept in tuned.items():
        if _failed(kept):
            continue
        for what, value in zip(_methods.COSTS, kept["cost"], strict=True):
            metrics[f"{what}_tuned_{method}"] = float(value)
    return metrics


def _tables_1(tuned: Mapping[str, Mapping[str, NDArray[Any]]], config: Config) -> Iterator[Table]:
    """Yield the tables of all methods: quality, with who wins in the caption, and cost."""
    chosen = [N_NONZERO.index(k) for k in TABLE_N_NONZERO]
    rows, errors = [], {}
    for method, kind, name in _tuned_rows(tuned):
        with_own = ", global + local" if name.endswith("_full") else ""
        n_atoms = int(tuned[method][f"{kind}_atoms"].max())
        title = f"{_methods.METHODS[method]}{with_own} ({n_atoms})"
        measured = tuned[method][kind]
        errors[title] = measured[0, chosen]
        digits = enumerate((4, 2, 3))
        rows.append([title, *(f"{measured[i, j]:.{d}f}" for i, d in digits for j in chosen)])
    failed = [method for method in tuned if _failed(tuned[method])]
    for method in failed:
        rows.append([_methods.METHODS[method], "failed", *["-"] * (len(FIELDS) * len(chosen) - 1)])
    yield Table(
        "Table 1: all methods, tuned alike",
        f"All held-out images with k = {' and '.join(map(str, TABLE_N_NONZERO))} atoms "
        "per image, out of as many as the brackets say; means over clients where they have atoms "
        "of their own. " + " ".join(_verdict(errors, i) for i in range(len(TABLE_N_NONZERO))),
        ["", *(f"{field.upper()} {k}" for field in FIELDS for k in TABLE_N_NONZERO)],
        rows,
    )
    costs = {
        method: _methods.Learned([], [], *map(float, kept["cost"]))
        for method, kept in tuned.items()
        if method not in failed
    }
    yield Table(
        "What Table 1 costs",
        f"The same budget for all: {plural(config['rounds'], 'round')} (without a server, "
        f"{GENEROSITY} "
        f"times the iterations), and {_methods.TRIES} values of one parameter, of which the one "
        f"is kept that codes the clients' own images best with {_methods.CODED} atoms: PerPCA's "
        "step, scikit-learn's penalty, for all others the learner's "
        + ("threshold" if config["learner"] == "orthogonal" else "number of atoms per sample")
        + ". Seconds: learning with the value that was kept. Floats of one client; where data are "
        "pooled, its images.",
        ["", "seconds", "rounds", "floats up", "floats down", "tuned to"],
        [
            [
                _methods.METHODS[method],
                f"{cost.seconds:.1f}",
                f"{cost.rounds:.0f}",
                f"{cost.floats_up:,.0f}",
                f"{cost.floats_down:,.0f}",
                f"{cost.setting:.3g}",
            ]
            for method, cost in costs.items()
        ]
        + [[_methods.METHODS[method], "failed", *["-"] * 4] for method in failed],
    )


def _verdict(errors: Mapping[str, NDArray[Any]], i: int) -> str:
    """Return a sentence about who does better than PerMA with the i-th number of atoms."""
    if not any(one.startswith("PerMA") for one in errors):
        return ""
    ours = min((one for one in errors if one.startswith("PerMA")), key=lambda one: errors[one][i])
    better = [title for title in errors if errors[title][i] < errors[ours][i]]
    words = f"better than {ours}: {', '.join(better)}" if better else f"{ours} has the least error"
    return f"With k = {TABLE_N_NONZERO[i]}, {words}."


def _n_global(config: Config) -> int:
    n_atoms = check_count("n_atoms", config["n_atoms"], 1)
    return check_count("n_global", config["n_global"], 1, n_atoms)


def _task(config: Config) -> Task:
    if config["experiment"] == NAME and not config["data"]:
        raise ValueError("images must be given data: an .npz file with X and y (--data FILE.npz).")
    samples = check_count("samples_per_client", config["samples_per_client"], 1)
    seed, clients = int(config["seed"]), int(config["clients"])
    return load_task(str(config.get("data", "")), clients, samples, seed)


@cached_by_file(maxsize=2)
def load_task(data: str, n_clients: int, n_samples: int, seed: int) -> Task:
    """Return the data's own clients, or some with one label each in the majority; held-out images.

    The kind of an image is whose it is, or its label.
    """
    images, rng = load_images(data), spawn(seed, DATA)
    if images.client is None:
        kinds, parts = images.y, imbalanced_partition(images.y, n_clients, n_samples, rng)
    else:
        kinds = images.client
        parts = natural_partition(kinds, n_clients, n_samples, rng)
    return Task(
        images.shape,
        [images.X[indices] for indices in parts.clients],
        parts.labels,
        images.X[parts.test],
        kinds[parts.test],
        images.client is not None,
    )


def _rebuild(X: Matrix, D: Matrix, k: int) -> Matrix:
    return reconstruct(sparse_code(X, D, n_nonzero=min(k, len(D))), D)


def _metrics(
    name: str, X: Matrix, dictionaries: Sequence[Matrix], shape: tuple[int, int]
) -> dict[str, float]:
    """Return MSE, PSNR and SSIM for every k; means over dictionaries."""

    def measure(D: Matrix) -> list[Quality]:
        return [quality(X, _rebuild(X, D, k), shape) for k in N_NONZERO]

    with ThreadPoolExecutor() as pool:
        means = np.mean(list(pool.map(measure, dictionaries)), axis=0)
    return {
        f"{field}_{name}_{k}": float(value)
        for k, row in zip(N_NONZERO, means, strict=True)
        for field, value in zip(Quality._fields, row, strict=True)
    }


def _means(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([m[name] for m in metrics])) for name in metrics[0]}


def _on_held_out(task: Task) -> EvaluateFn:
    """Return the server's evaluation: held-out images with the global atoms alone."""

    def evaluate(round_: int, arrays: ArrayRecord) -> MetricRecord | None:
        atoms = to_arrays(arrays)
        if round_ == 0 or not atoms:
            return None
        rebuilt = _rebuild(task.test, atoms[0], CURVE_N_NONZERO)
        return MetricRecord({ERROR: float(np.mean((task.test - rebuilt) ** 2))})

    return evaluate


def _tables(metrics: dict[str, float], n_atoms: int, n_global: int) -> list[Table]:
    """Return the two tables: all held-out images, and each client's own kind."""
    methods = {
        "global": f"PerMA, global ({n_global})",
        "full": f"PerMA, global + local ({n_atoms})",
        "local": f"Clients alone ({n_atoms})",
        "average": f"Plain average ({n_atoms})",
        "pooled": f"Pooled data ({n_global})",
        "sklearn": f"Pooled data, scikit-learn ({n_global})",
    }
    digits = {"mse": 4, "psnr": 2, "ssim": 3}
    columns = [f"{field.upper()} {k}" for field in digits for k in N_NONZERO]

    def row(name: str, title: str, fields: Sequence[str]) -> list[str]:
        cells = [f"{metrics[f'{f}_{name}_{k}']:.{digits[f]}f}" for f in fields for k in N_NONZERO]
        return [title, *cells]

    everything = Table(
        "All held-out images",
        "Mean squared error per pixel, PSNR (dB) and SSIM with k = 5, 10, 20 atoms per image, out "
        "of as many as the brackets say. Global + local and clients alone: means over clients. "
        "Plain average: of the clients' own dictionaries, atom by atom, without matching. Pooled "
        "data: one dictionary of all clients' images, the mark to reach; scikit-learn's has "
        "atoms that need not be orthogonal.",
        ["", *columns],
        [row(name, title, list(digits)) for name, title in methods.items()],
    )
    own = Table(
        "Held-out images of each client's own kind",
        "Mean squared error, means over clients. A client alone is best on the label that it has "
        "nine tenths of; the table above shows what that costs on all others.",
        ["", *(f"MSE {k}" for k in N_NONZERO)],
        [row(f"own_{name}", methods[name], ["mse"]) for name in ("global", "full", "local")],
    )
    return [everything, own]


def _pictures(
    task: Task,
    global_atoms: Matrix,
    alone: Matrix,
    pooled: Matrix,
    curve: list[float],
    metrics: dict[str, float],
) -> list[Picture]:
    from perdl_experiments import plots  # an extra: clients must not need it

    one_each = [int(np.argmax(task.test_kinds == kind)) for kind in np.unique(task.test_kinds)]
    own = "" if task.natural else f"\n(mostly label {task.kinds[0]})"
    shown = task.test[one_each[:10]]
    k = PICTURE_N_NONZERO
    rows = {
        "original": shown,
        f"client 0 alone{own}": _rebuild(shown, alone, k),
        "PerMA,\nglobal atoms": _rebuild(shown, global_atoms, k),
        "pooled data": _rebuild(shown, pooled, k),
    }
    levels = {
        name: metrics[f"mse_{key}_{CURVE_N_NONZERO}"]
        for name, key in {"clients alone": "local", "pooled data": "pooled"}.items()
    }
    atoms = {
        title: D[np.argsort(-np.sum((task.test @ D.T) ** 2, axis=0))]
        for title, D in {
            "PerMA's global atoms": global_atoms,
            "Client 0 alone": alone,
            "Pooled data": pooled,
        }.items()
    }
    return [
        Picture(
            "reconstructions",
            f"Held-out images rebuilt from {k} atoms",
            "One image per kind. A client alone knows its own kind and draws the others with its "
            "strokes; the global atoms draw all of them (the paper's Fig. 3).",
            plots.images(rows, task.shape),
        ),
        Picture(
            "error",
            "Error against rounds",
            f"All held-out images, {CURVE_N_NONZERO} of the global atoms per image. "
            "Round 1 is the matching round.",
            plots.lines(
                {"PerMA, global atoms": curve},
                x="communication round",
                y="mean squared error",
                levels=levels,
            ),
        ),
        Picture(
            "atoms",
            "The atoms",
            "Most used on held-out images first; each to its own scale, zero in the middle grey.",
            plots.atoms(atoms, task.shape),
        ),
    ]


def _notes(config: Config, task: Task) -> Iterator[str]:
    given, wanted = len(task.clients[0]), int(config["samples_per_client"])
    if given < wanted:
        yield (
            f"Every client has {plural(given, 'image')} instead of {wanted}: the data, a tenth "
            "of it and of "
            "each label held out, has no more."
        )
    yield (
        f"{len(task.clients)} clients with {plural(given, 'image')} each, "
        f"{plural(len(task.test), 'held-out image')} "
        f"of {task.shape[0]}x{task.shape[1]} pixels in [0, 1]. Codes: orthogonal matching pursuit "
        "for every dictionary. PSNR is the mean over images; SSIM has a Gaussian window (sigma "
        "1.5) and is taken of images clipped to [0, 1]."
    )
    yield (
        f"Clients alone and the pooled dictionary have the same learner and start as PerMA and "
        f"{GENEROSITY} times its iterations. The plain average is of the clients' own "
        "dictionaries, once, atom by atom in whatever order they are in. scikit-learn's is its "
        "MiniBatchDictionaryLearning, with that of the penalties "
        f"{', '.join(map(str, PENALTIES))} which codes the clients' images best."
    )
