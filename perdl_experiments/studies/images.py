"""Label skew: PerMA, Section 5.2 and Fig. 3, on your own images.

90 % of a client's images have one label; if the data have an array ``client``, the clients are the
owners with the most images. The error is measured on held-out images of all labels, coded by
orthogonal matching pursuit (OMP) with k atoms of each dictionary. ``methods="all"`` adds Table 1:
the baselines, each tuned with the same budget on the clients' validation images (see
`perdl_experiments.studies._methods`).

``--data FILE.npz`` with ``X`` (n, h, w) or (n, n_features), real numbers, scaled to [0, 1], and
``y`` (n,), integer labels; optionally ``names``, a text per label. The experiment makes the clients
and the test part itself, by seed. With ``client`` (n,), the integer owner of each image, as from
``flwr-perdl fetch femnist``, the ``--clients`` owners with the most images take part, a tenth of
whose images is held out; "own" then refers to these.

Metrics, on held-out images with k atoms each ({k}: 5, 10, 20): ``mse_global_{k}``,
``psnr_global_{k}``, ``ssim_global_{k}`` (the global atoms alone), ``mse_full_{k}`` (with the local
ones, mean over clients), ``mse_local_{k}`` (local training),
``mse_average_{k}`` (their plain average), ``mse_pooled_{k}`` (one dictionary of n_global atoms of
all data, five times the iterations), ``mse_sklearn_{k}`` (scikit-learn's
MiniBatchDictionaryLearning of all data); ``mse_own_global_{k}``, ``mse_own_full_{k}`` and
``mse_own_local_{k}`` on images of the client's own label; ``perma_seconds`` (the federation alone).

With ``methods=all``, for METHOD ``perma``, ``half`` (half the rounds), ``parted`` (half of the
atoms global), ``orthogonal``, ``papers`` and ``papers_parted`` (the orthogonal learner, by the
defaults and as in the paper), ``averaging``, ``naive``, ``gkillas``, ``huang``, ``perpca``,
``local``, ``finetuned``, ``pooled``, ``sklearn``: ``mse_tuned_METHOD_{k}``,
``psnr_tuned_METHOD_{k}``, ``ssim_tuned_METHOD_{k}`` (with the local atoms
``mse_tuned_perma_full_{k}`` and so on; of images of the client's own label
``mse_own_tuned_METHOD_{k}``), ``seconds_tuned_METHOD``, ``rounds_tuned_METHOD``,
``floats_up_tuned_METHOD``, ``floats_down_tuned_METHOD``, ``setting_tuned_METHOD``. A setting that
fails is skipped; a method without a working setting is shown as "failed".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, Context, MetricRecord
from numpy.typing import NDArray

from flwr_perdl.clients import DictionaryClient
from flwr_perdl.clients.perma import CHOOSE, held_out_errors
from flwr_perdl.core.aggregate import OUTLIER
from flwr_perdl.core.checks import Matrix, check_count
from flwr_perdl.dictionary import reconstruct, sparse_code, warm_start
from flwr_perdl.protocol.records import PARTITION_ID, to_arrays
from flwr_perdl.protocol.request import FAILED as FAILED_REPLY
from flwr_perdl.protocol.request import REFUSED
from flwr_perdl.random import DATA, SERVER, spawn
from flwr_perdl.simulations import imbalanced_partition, natural_partition
from flwr_perdl.strategies import PerMA, RoundReport, client_report
from perdl_experiments.baselines import (
    GENEROSITY,
    PENALTIES,
    Start,
    learn_each,
    plain_average,
    sklearn_dictionary,
)
from perdl_experiments.data import cached_by_file, load_images
from perdl_experiments.engine import EvaluateFn, Federated
from perdl_experiments.measures import Quality, quality
from perdl_experiments.outcome import Outcome
from perdl_experiments.render import FAILED, Record
from perdl_experiments.studies import _methods
from perdl_experiments.studies._experiment import (
    GENERAL,
    Arrays,
    Federate,
    Keep,
    LearnerConfig,
    words,
)

ERROR = "mse_global_10"

#: Everybody's warm start. A threshold that shrinks faster than by default does as well on images:
#: PerMA's error (k = 10) on digits enlarged to 28x28 is 0.0062 after 60 iterations and after 100.
START = partial(warm_start, n_iter=60, decay=0.93)
#: The lasso needs few iterations, and larger penalties only make the first ones faster: the error
#: (k = 10) on MNIST is 0.0155 with them and 0.0154 without.
LASSO_START = partial(warm_start, n_iter=10, boost=4, decay=0.7)
#: Rows of Table 1 that are PerMA with other options than the run's: half the rounds; half of the
#: atoms global; the paper's learner; and its matching and averages too.
ORTHOGONAL = {"learner": "orthogonal"}
PAPERS = {**ORTHOGONAL, "matching": "paths", "aggregation": "mean", "min_support": 0}
VARIANTS: dict[str, dict[str, Any]] = {
    **{"half": {}, "parted": {}, "orthogonal": ORTHOGONAL},
    **{"papers": PAPERS, "papers_parted": PAPERS},
}
#: Rows whose atoms are orthogonal, whatever the run's learner.
ORTHONORMAL = ("orthogonal", "papers", "papers_parted", "perpca")

#: The rows of Table 1.
TUNED = {**_methods.METHODS, **{row: words("images")[f"tuned_{row}"] for row in VARIANTS}}

#: Numbers of atoms per image at which reconstructions are measured; the one in curves; in Fig. 3.
N_NONZERO = (5, 10, 20)
CURVE_N_NONZERO = 10
PICTURE_N_NONZERO = 5
FIELDS = Quality._fields
#: Clients whose own atoms are drawn, and how many of each.
DRAWN, SHOWN = 3, 12
#: What is measured, in the order of the tables.
ROWS = (
    *("global", "full", "local", "average", "pooled", "sklearn"),
    *("own_global", "own_full", "own_local"),
)


@dataclass(frozen=True, kw_only=True)
class Config(_methods.Config):
    """The options of images.toml."""

    samples_per_client: int
    methods: str

    def check(self) -> None:
        """Reject options that do not fit together."""
        if self.n_global != "auto":
            check_count("n_global", self.n_global, 1, self.n_atoms)

    @property
    def task(self) -> Task:
        """The clients' and the held-out images."""
        if self.options.get("data") == "":
            raise ValueError(
                "images must be given data: an .npz file with X and y (--data FILE.npz)."
            )
        return load_task(self.data, self.clients, self.samples_per_client, self.seed)


class Task(NamedTuple):
    """What a config makes of the images: clients' and held-out ones."""

    shape: tuple[int, int]
    clients: list[Matrix]
    kinds: list[int]
    test: Matrix
    test_kinds: NDArray[Any]
    natural: bool
    names: list[str] | None

    def own_test(self, partition: int) -> Matrix:
        """Return the held-out images of this client's own label; where it is natural, its own."""
        own: Matrix = self.test[self.test_kinds == self.kinds[partition]]
        return own


def start(config: LearnerConfig) -> Start:
    """Return the warm start of everybody's learner."""
    return LASSO_START if config.learner == "lasso" else START


def client(context: Context, config: Config) -> DictionaryClient:
    """Return the client of partition ``context.node_config["partition-id"]``."""
    task, partition = config.task, int(context.node_config[PARTITION_ID])
    return DictionaryClient(
        task.clients[partition],
        config.make_learner(),
        context,
        start=start(config),
        extra_metrics=partial(_quality, task, partition),
        **config.private,
    )


def strategy(config: Config, **options: Any) -> PerMA:
    """Return the strategy; ``options`` are the server's own."""
    return config.strategy(config.n_global, **{"evaluate_every": config.rounds, **options})


def federations(config: Config) -> list[Config]:
    """Return the config of the one federation."""
    return [config]


def _quality(
    task: Task, partition: int, global_atoms: Matrix, local_atoms: Matrix
) -> dict[str, float]:
    """Return the quality with global + local atoms: of all held-out images, and of the own kind.

    Nothing where all atoms are global: `run` measures these.
    """
    if not len(local_atoms):
        return {}
    D = np.vstack([global_atoms, local_atoms])
    held_out = {"full": task.test, "own_full": task.own_test(partition)}
    return {
        _reported(field, kind, k): float(measured[i, j])
        for kind, X in held_out.items()
        for measured in [_measured(X, [D], task.shape)]
        for j, k in enumerate(N_NONZERO)
        for i, field in enumerate(FIELDS)
    }


def _reported(field: str, kind: str, k: int) -> str:
    """Return the name under which a client reports a quality."""
    return f"{field}_{kind}_{k}"


def run(config: Config, federate: Federate, keep: Keep) -> Outcome:
    """Run the federation, and what it is compared with, and measure all of them alike."""
    task, clients = config.task, range(len(config.task.clients))
    federated = federate(config, evaluate_fn=_on_held_out(task))
    global_atoms, tried = federated.arrays[0], _tried(federated.history)
    seed, n_global = config.seed, max(len(global_atoms), 1)
    config = replace(config, n_global=n_global)
    pooled, *alone = learn_each(
        [np.vstack(task.clients), *task.clients],
        [config.make_learner(n_global)] + [config.make_learner()] * len(clients),
        [spawn(seed, SERVER, 1), *(spawn(seed, i) for i in clients)],
        config.rounds,
        start(config),
    )
    average = plain_average(alone)
    general = sklearn_dictionary(np.vstack(task.clients), n_global, seed)

    learned = {
        "global": [global_atoms],
        "local": alone,
        "average": [average],
        "pooled": [pooled],
        "sklearn": [general],
    }
    measured = {name: _measured(task.test, them, task.shape) for name, them in learned.items()}
    each: dict[str, dict[int, Matrix]] = {}
    for name, them in {"own_global": [global_atoms] * len(clients), "own_local": alone}.items():
        each[name] = {i: _measured(task.own_test(i), [them[i]], task.shape) for i in clients}
        measured[name] = _mean(list(each[name].values()))
    last = federated.history[-1].metrics
    for name in ("full", "own_full"):
        if len(global_atoms) == config.n_atoms:
            measured[name] = measured[name.replace("full", "global")]
            continue
        names = [[_reported(field, name, k) for k in N_NONZERO] for field in FIELDS]
        each[name] = {
            i: np.array([[metrics[one] for one in row] for row in names])
            for i, metrics in last.items()
        }
        measured[name] = _mean(list(each[name].values()))
    each.setdefault("own_full", each["own_global"])
    records = [record for name in ROWS for record in _records(name, measured[name])]
    records.append(Record("perma_seconds", federated.seconds, unit="s"))
    records += _by_client(task, each, client_report(federated.history))
    records.append(Record("samples_per_client", len(task.clients[0])))
    tuned: dict[str, Mapping[str, NDArray[Any]]] = {}
    if config.methods == "all":
        own, *others = _methods.compared(config)
        rows = {_variant(row, config): row for row in reversed(VARIANTS)}
        variants = [row for known, row in rows.items() if known != config]
        compared = [own, *reversed(variants), *others]
        for method in compared:
            compute = partial(_tuned, method, task, config)
            tuned[method] = keep(f"tuned-{method}", compute, of=len(compared))
    records += _tuned_records(tuned)
    evaluations = federated.result.evaluate_metrics_serverapp
    curve = [float(str(evaluations[r][ERROR])) for r in sorted(evaluations)]
    training = [report.aggregate for report in federated.history if report.step != "evaluate"]
    levels = {
        title: float(measured[name][0, N_NONZERO.index(CURVE_N_NONZERO)])
        for title, name in {"local training": "local", "pooled data": "pooled"}.items()
    }
    return Outcome(
        records=records,
        curves={ERROR: curve, "mse_full_training": [m["mse"] for m in training]},
        arrays={
            "global_atoms": global_atoms,
            "pooled_atoms": pooled,
            "average_atoms": average,
            "alone_atoms": np.stack(alone),
            "image_shape": np.array(task.shape),
        },
        figures=_figures(task, federated, alone[0], pooled, curve, levels)
        | _choice(tried, n_global),
        facts={**_facts(config, task, tuned), "n_global": n_global},
        **federated.cost,
    )


def _tried(history: Sequence[RoundReport]) -> dict[int, float]:
    """Return the clients' mean error with every number of global atoms that "auto" tried last."""
    rounds = [report.aggregate for report in history if report.step == CHOOSE]
    last = rounds[-1] if rounds else {}
    return dict(sorted(held_out_errors(last).items()))


def _choice(tried: Mapping[int, float], n_global: int) -> dict[str, Any]:
    from perdl_experiments import pictures  # an extra: clients must not need it

    if n_global not in tried:
        return {}
    curve = {"held out": np.array([list(tried.values())])}
    labels = {"x": "global atoms", "y": "mean squared error"}
    return {"choice": pictures.chosen(list(tried), curve, n_global, **labels)}


# Table 1 -------------------------------------------------------------------------------------


def _variant(row: str, config: Config) -> Config:
    """Return the config of a row of PerMA."""
    rounds = max(config.rounds // 2, 1) if row == "half" else config.rounds
    n_global = max(config.n_atoms // 2, 1) if row.endswith("parted") else config.n_global
    return replace(config, rounds=rounds, n_global=n_global, **VARIANTS[row])


def _tuned(method: str, task: Task, config: Config) -> Arrays:
    """Return what a method's best setting comes to on the held-out images, and what it costs."""
    if method in ORTHONORMAL:  # no more directions than pixels
        most = task.test.shape[1]
        few = min(config.n_atoms, most), min(config.n_shared, most)
        config = replace(config, n_atoms=few[0], n_global=few[1])
    if method in VARIANTS:
        method, config = "perma", _variant(method, config)
    learned, failures = _methods.learn_tuned(method, task.clients, config, start(config))
    if learned is None:
        learned = _methods.Learned([], [], *[0.0] * len(_methods.COSTS))

    def measured(dictionaries: Sequence[Matrix]) -> NDArray[Any]:
        return _measured(task.test, dictionaries, task.shape) if dictionaries else np.array([])

    def on_own(dictionaries: Sequence[Matrix]) -> NDArray[Any]:
        each = [_measured(task.own_test(i), [D], task.shape) for i, D in enumerate(dictionaries)]
        return _mean(each) if each else np.array([])

    return {
        "shared": measured(learned.shared),
        "full": measured(learned.full),
        "own_shared": on_own(learned.shared * len(task.clients)),
        "own_full": on_own(learned.full),
        "shared_atoms": np.array([len(D) for D in learned.shared]),
        "full_atoms": np.array([len(D) for D in learned.full]),
        "cost": np.array(learned[2:]),
        "failures": np.array(failures, str),
    }


def _tuned_records(tuned: Mapping[str, Mapping[str, NDArray[Any]]]) -> Iterator[Record]:
    """Yield the qualities of every method, with shared and with all atoms, and its costs."""
    for method, kept in tuned.items():
        name = f"tuned_{method}"
        for kind in ("shared", "full"):
            if kept[kind].size:
                both = kind == "full" and kept["shared"].size
                row = f"{name}_full" if both else name
                yield Record("n_atoms", int(kept[f"{kind}_atoms"].max()), row)
                yield from _records(row, kept[kind])
                yield from _records(f"own_{row}", kept[f"own_{kind}"])
        if not kept["shared"].size and not kept["full"].size:
            yield Record(FAILED, "no setting worked", name)
            continue
        for what, value in zip(_methods.COSTS, kept["cost"], strict=True):
            yield Record(what, float(value), name)


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
        images.names,
    )


def _rebuild(X: Matrix, D: Matrix, k: int) -> Matrix:
    return reconstruct(sparse_code(X, D, n_nonzero=min(k, len(D))), D)


def _measured(X: Matrix, dictionaries: Sequence[Matrix], shape: tuple[int, int]) -> Matrix:
    """Return MSE, PSNR and SSIM for every k, (n_fields, n_k); means over dictionaries."""

    def measure(D: Matrix) -> list[Quality]:
        return [quality(X, _rebuild(X, D, k), shape) for k in N_NONZERO]

    with ThreadPoolExecutor() as pool:
        means: Matrix = np.mean(list(pool.map(measure, dictionaries)), axis=0).T
    return means


def _mean(measured: Sequence[Matrix]) -> Matrix:
    """Return the mean of what was measured at every client."""
    return np.array([[np.mean(values) for values in row] for row in np.stack(measured, axis=2)])


def _records(method: str, measured: Matrix) -> Iterator[Record]:
    for i, field in enumerate(FIELDS):
        for j, k in enumerate(N_NONZERO):
            yield Record(field, float(measured[i, j]), method, {"k": k})


def _by_client(
    task: Task, each: Mapping[str, Mapping[int, Matrix]], counts: Mapping[int, Mapping[str, float]]
) -> Iterator[Record]:
    """Yield every client's errors, and how many of its replies were left out."""
    for i, happened in counts.items():
        at = {"client": _called(task, i)}
        for name, found in each.items():
            if i in found:
                error = found[i][0, N_NONZERO.index(CURVE_N_NONZERO)]
                yield Record("client_mse", float(error), name, at)
        out = sum(happened.get(what, 0) for what in (FAILED_REPLY, REFUSED, OUTLIER))
        yield Record("client_left_out", f"{out:.3g} of {happened['asked']:.0f}", "", at)


def _called(task: Task, i: int) -> str:
    """Return a client's number, and what most of its images show, or its name."""
    kind = f"label {task.kinds[i]}" if task.names is None else task.names[task.kinds[i]]
    return f"{i} ({kind})" if task.natural else f"{i} (mostly {kind})"


def _on_held_out(task: Task) -> EvaluateFn:
    """Return the server's evaluation: held-out images with the global atoms alone."""

    def evaluate(round_: int, arrays: ArrayRecord) -> MetricRecord | None:
        atoms = to_arrays(arrays)
        if round_ == 0 or not atoms:
            return None
        rebuilt = _rebuild(task.test, atoms[0], CURVE_N_NONZERO)
        return MetricRecord({ERROR: float(np.mean((task.test - rebuilt) ** 2))})

    return evaluate


def _facts(
    config: Config, task: Task, tuned: Mapping[str, Mapping[str, NDArray[Any]]]
) -> dict[str, Any]:
    given = len(task.clients[0])
    pursuit = config.learner in GENERAL
    parameter = "penalty" if config.learner == "lasso" else "threshold"
    return {
        "given": given,
        "fewer": given < config.samples_per_client,
        "more_atoms_than_pixels": config.n_atoms > task.test.shape[1],
        "n_clients": len(task.clients),
        "generosity": GENEROSITY,
        "n_test": len(task.test),
        "height": task.shape[0],
        "width": task.shape[1],
        "penalties": ", ".join(map(str, PENALTIES)),
        "parameter": "number of atoms per sample" if pursuit else parameter,
        "tries": _methods.TRIES,
        "coded": _methods.CODED,
        "shown": PICTURE_N_NONZERO,
        "failures": " ".join(str(f) for kept in tuned.values() for f in kept.get("failures", ())),
    }


def _figures(
    task: Task,
    federated: Federated,
    alone: Matrix,
    pooled: Matrix,
    curve: list[float],
    levels: dict[str, float],
) -> dict[str, Any]:
    from perdl_experiments import plots  # an extra: clients must not need it

    one_each = [int(np.argmax(task.test_kinds == kind)) for kind in np.unique(task.test_kinds)]
    global_atoms = federated.arrays[0]
    own_kind = f"local training,\nclient {_called(task, 0)}"
    shown = task.test[one_each[:10]]
    k = PICTURE_N_NONZERO
    rows = {
        "original": shown,
        own_kind: _rebuild(shown, alone, k),
        "PerMA,\nglobal atoms": _rebuild(shown, global_atoms, k),
        "pooled data": _rebuild(shown, pooled, k),
    }
    own = {
        f"client {_called(task, i)}: private": D
        for i, D in enumerate(federated.local_atoms[:DRAWN])
        if len(D)
    }
    dictionaries = {"shared by all": global_atoms, **own, "pooled data": pooled}
    by_use = {
        title: D[np.argsort(-np.sum((task.test @ D.T) ** 2, axis=0))]
        for title, D in dictionaries.items()
    }
    by_use |= {title: by_use[title][:SHOWN] for title in own}
    return {
        "reconstructions": plots.images(rows, task.shape),
        "error": plots.lines(
            {"PerMA, global atoms": curve},
            x="communication round",
            y="mean squared error",
            levels=levels,
        ),
        "atoms": plots.atoms(by_use, task.shape),
    }
