"""Rotated images: four unknown groups of clients, and a small network (IFCA's experiment).

The experiment is that of Ghosh et al., "An Efficient Framework for Clustered Federated Learning",
NeurIPS 2020, on scikit-learn's digits or the user's images: every client sees its images rotated by
0, 90, 180 or 270 degrees. The clients of one angle share all images among them. A client has
60 % of its images for training, 20 % to choose a model by its loss, and 20 % for the test.

================  ================================================================================
method            what it is
================  ================================================================================
``one-shot``      `ClusteredFedAvg` with k = 4: local training, then clustered by the server
``economical``    the same, a choice every five rounds
``anchors``       local training; four of these models are the start
``given``         IFCA's start: four random networks
``best``          the same from five such starts: that with the lowest mean validation loss in the
                  end; what it sends counts all five
``random``        one random network, perturbed four times
``auto``          ``k="auto"``, after five epochs of local training
``oracle``        FedAvg among the clients of each angle
``fedavg``        FedAvg among all clients
``tuned``         FedAvg's last model, fine-tuned by each client, for the number of epochs with the
                  lowest mean validation loss, at most one per round
``alone``         local training, one epoch per round
``svm``           a support vector machine at each client, with the best of three penalties
``svm-pooled``    one of all images in one place
================  ================================================================================

The last six are loops over the same clients, without messages.

A method has reached the oracle once its mean accuracy stays within 0.01 of the oracle's after the
last round.

``--data FILE.npz`` with ``X`` (n, h, h) and ``y`` (n,), as for ``images``; without it,
scikit-learn's digits. As it is many federations it runs inside one Flower run only with ``seeds=1``
and one of the ``starts`` but ``best``.

Metrics, over the seeds: ``accuracy_METHOD`` (mean), ``accuracy_least_METHOD``, ``close_METHOD``
(share of seeds that are at most 0.01 below the oracle) and ``rounds_METHOD`` (until then; median,
-1: never) for the starts, ``oracle``, ``fedavg``, ``tuned`` and ``alone``; for the starts
``right_METHOD`` (share of clients in the cluster of their angle), ``found_METHOD`` (share of seeds
in which all are) and ``models_METHOD``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from flwr.app import Context
from scipy.optimize import linear_sum_assignment

from flwr_perdl.core.checks import Matrix
from flwr_perdl.protocol.records import EVALUATE, PARTITION_ID, ROUND
from flwr_perdl.random import DATA, spawn
from flwr_perdl.strategies import ClusteredFedAvg
from perdl_experiments.data import cached_by_file, load_images
from perdl_experiments.engine import arranged
from perdl_experiments.measures import rounds_to
from perdl_experiments.outcome import Outcome
from perdl_experiments.render import Record
from perdl_experiments.studies._experiment import Arrays, Federate, Keep, words
from perdl_experiments.studies._experiment import Config as Common
from perdl_experiments.studies._network import Model, Network, by_epoch, random_network

#: Angles, in quarter turns; images of a step of training; the least number of a client's images.
KINDS, BATCH, LEAST = 4, 16, 10
#: What counts as the oracle's accuracy.
NEAR = 0.01
#: Random starts of the method "best".
DRAWS = 5
#: Support vector machines, at each client and of all images in one place, and their penalties.
SVMS, PENALTIES = ("svm", "svm-pooled"), (1.0, 10.0, 100.0)
#: `ClusteredFedAvg`'s arguments.
STARTS: dict[str, dict[str, Any]] = {
    "one-shot": {"k": KINDS},
    "economical": {"k": KINDS, "choose_every": 5},
    "anchors": {"k": KINDS, "start": "anchors"},
    "given": {"k": KINDS, "start": "given"},
    "best": {"k": KINDS, "start": "given"},
    "random": {"k": KINDS, "start": "random"},
    "auto": {"k": "auto", "start_rounds": 5},
}
METHODS = words("rotated_digits")
#: Starts that the curves leave out beside one-shot's, for legibility.
_NOT_DRAWN = ("economical", "anchors", "random")


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """The options of rotated_digits.toml; below them, what one federation adds."""

    hidden: int
    step: float
    starts: tuple[str, ...]

    method: str = ""
    draw: int = 0


# The clients ---------------------------------------------------------------------------------


@cached_by_file(maxsize=2)
def load_clients(data: str, n_clients: int, seed: int, step: float) -> list[Network]:
    """Return all clients; client i sees its images rotated by i % 4 quarter turns."""
    images, rng = load_images(data), spawn(seed, DATA)
    height, width = images.shape
    if height != width:
        raise ValueError(f"X in {data} must be square images, got {height}x{width}.")
    shares = -(-n_clients // KINDS)
    if len(images.X) < LEAST * shares:
        most = KINDS * (len(images.X) // LEAST)
        raise ValueError(
            f"clients must be at most {most}, with {LEAST} of the {len(images.X)} images each, "
            f"got {n_clients}."
        )
    stack, labels = images.X.reshape(-1, height, width), np.unique(images.y, return_inverse=True)[1]
    dealt = [np.array_split(rng.permutation(len(stack)), shares) for _ in range(KINDS)]
    clients = []
    for i in range(n_clients):
        rows = dealt[i % KINDS][i // KINDS]
        X = np.rot90(stack[rows], i % KINDS, axes=(1, 2)).reshape(len(rows), -1)
        ends = 6 * len(rows) // 10, 8 * len(rows) // 10
        clients.append(
            Network(X, labels[rows], ends, seed=seed, partition=i, step=step, batch=BATCH)
        )
    return clients


def _clients(config: Config) -> list[Network]:
    return load_clients(config.data, config.clients, config.seed, config.step)


def initial(config: Config) -> Model:
    """Return a random network; for IFCA's start four of them, stacked."""
    clients, rng = _clients(config), spawn(config.seed, DATA, 1 + config.draw)
    d, n_labels = clients[0].X.shape[1], 1 + max(int(one.y.max()) for one in clients)
    network = partial(random_network, d, config.hidden, n_labels, rng)
    if config.method in ("given", "best"):
        return [np.stack(arrays) for arrays in zip(*(network() for _ in range(KINDS)), strict=True)]
    return network()


# The federations -----------------------------------------------------------------------------


def client(context: Context, config: Config) -> Network:
    """Return the client of partition ``context.node_config["partition-id"]``."""
    return _clients(config)[int(context.node_config[PARTITION_ID])]


def strategy(config: Config, **options: Any) -> ClusteredFedAvg:
    """Return the strategy of ``config.method``; ``options`` are the server's own."""
    return ClusteredFedAvg(**STARTS[config.method], **arranged(options))


def federations(config: Config) -> list[Config]:
    """Return the config of every federation: all starts with every seed."""
    return [
        replace(config, seed=seed, seeds=1, method=method, draw=draw)
        for seed in config.each_seed
        for method in config.starts
        for draw in range(DRAWS if method == "best" else 1)
    ]


def run(config: Config, federate: Federate, keep: Keep) -> Outcome:
    """Run all starts, and what they are compared with, with every seed."""
    found: dict[str, list[Arrays]] = {name: [] for name in METHODS}
    for one in federations(config):
        name = f"{one.method}-{one.draw}" if one.method == "best" else one.method
        kept = keep(f"{name}-seed-{one.seed}", partial(_learned, one, federate))
        found[one.method].append(kept)
    tries = found["best"]
    found["best"] = [_best(tries[i : i + DRAWS]) for i in range(0, len(tries), DRAWS)]
    for seed in config.each_seed:
        one = replace(config, seed=seed)
        kept = keep(f"baselines-seed-{seed}", partial(_baselines, one), of=config.seeds)
        for name in ("oracle", "fedavg", "tuned", "alone", *SVMS):
            found[name].append({part: kept[f"{name}/{part}"] for part in ("accuracy", "floats")})
    curves = {
        name: np.stack([one["accuracy"] for one in runs]) for name, runs in found.items() if runs
    }
    costs = {name: np.stack([one["floats"] for one in found[name]]) for name in curves}
    last = {name: rows[:, -1] for name, rows in curves.items()}
    targets = last["oracle"] - NEAR
    reached = {
        name: np.array([rounds_to(*pair) for pair in zip(rows, targets, strict=True)])
        for name, rows in curves.items()
        if rows.shape[1] > 1
    }
    headline = config.starts[0]
    records = [Record("images", len(_clients(config)[0].y))]
    for name in curves:
        records.append(Record("accuracy", last[name], name))
        records.append(Record("close", last[name] >= targets, name))
        if name in reached:
            floats = [_until(*pair) for pair in zip(costs[name], reached[name], strict=True)]
            records.append(Record("rounds", reached[name], name, unit="rounds"))
            records.append(Record("floats", np.array(floats), name))
        if name in STARTS:
            right = np.array([one["right"] for one in found[name]])
            records.append(Record("right", right, name))
            records.append(Record("found", right == 1, name))
            records.append(Record("models", np.array([one["models"] for one in found[name]]), name))
    return Outcome(
        records=records,
        curves={
            f"accuracy_{name}": np.median(rows, axis=0).tolist() for name, rows in curves.items()
        },
        arrays={f"accuracy_{name}": rows for name, rows in curves.items()}
        | {f"right_{name}": np.array([one["right"] for one in found[name]]) for name in STARTS},
        figures=_figures(curves),
        rounds=config.rounds,
        floats_up=float(np.median([one["up"] for one in found[headline]])),
        floats_down=float(np.median([one["down"] for one in found[headline]])),
        facts={"headline": METHODS[headline]},
    )


def _learned(config: Config, federate: Federate) -> Arrays:
    """Return what a federation comes to: accuracy and floats by round, and who is where."""
    federated = federate(config)
    measured = [report.metrics for report in federated.history if report.step == EVALUATE]
    training = [report for report in federated.history if report.step != EVALUATE]
    members = {partition: int(own["cluster"]) for partition, own in measured[-1].items()}
    return {
        "accuracy": np.array(
            [np.mean([own["accuracy"] for own in one.values()]) for one in measured]
        ),
        "loss": np.array(np.mean([own["loss"] for own in measured[-1].values()])),
        "floats": np.cumsum([report.floats_down + report.floats_up for report in training]),
        "right": np.array(share_right(members)),
        "models": np.array(len(federated.learned.models)),
        "up": np.array(federated.floats_up),
        "down": np.array(federated.floats_down),
    }


def _best(tries: Sequence[Arrays]) -> Arrays:
    """Return the federation with the lowest validation loss, at the cost of all."""
    chosen = min(tries, key=lambda one: float(one["loss"]))
    return chosen | {n: np.sum([one[n] for one in tries], axis=0) for n in ("floats", "up", "down")}


def share_right(members: Mapping[int, int]) -> float:
    """Return the share of clients in their kind's cluster, clusters matched to kinds at best.

    Parameters
    ----------
    members : mapping of int to int
        Each client's cluster, by partition.
    """
    counts = np.zeros((1 + max(members.values()), KINDS))
    for partition, cluster in members.items():
        counts[cluster, partition % KINDS] += 1
    matched = linear_sum_assignment(counts, maximize=True)
    return float(counts[matched].sum() / len(members))


# What they are compared with -----------------------------------------------------------------


def _baselines(config: Config) -> Arrays:
    """Return accuracy and floats by round of the methods that need no clusters."""
    clients, first = _clients(config), initial(config)
    n, size = len(clients), sum(array.size for array in first)
    groups: dict[str, list[Sequence[int]]] = {
        "oracle": [range(kind, n, KINDS) for kind in range(min(KINDS, n))],
        "fedavg": [range(n)],
        "alone": [[i] for i in range(n)],
    }
    kept: Arrays = {}
    for name, of in groups.items():
        models, accuracies = _averaged(clients, of, first, config.rounds)
        kept[f"{name}/accuracy"] = accuracies
        sent = 0 if name == "alone" else 2 * size
        kept[f"{name}/floats"] = sent * np.arange(1.0, config.rounds + 1)
        if name == "fedavg":
            kept["tuned/accuracy"] = np.array([_tuned(clients, models[0], config.rounds)])
            kept["tuned/floats"] = kept["fedavg/floats"][-1:]
    for name, of in {"svm": groups["alone"], "svm-pooled": groups["fedavg"]}.items():
        kept[f"{name}/accuracy"] = np.array([_machines(clients, of)])
        kept[f"{name}/floats"] = np.zeros(1)
    return kept


def _machines(clients: Sequence[Network], groups: Sequence[Sequence[int]]) -> float:
    """Return the accuracy of a support vector machine per group, with the best penalty."""
    from sklearn.svm import SVC  # an extra

    found = []
    for C in PENALTIES:
        right = []
        for group in groups:
            own = [clients[i] for i in group]
            X, y = (np.concatenate([getattr(o, part)[o.train] for o in own]) for part in "Xy")
            model = SVC(C=C).fit(X, y)
            right += [
                [model.score(o.X[part], o.y[part]) for part in (o.choice, o.test)] for o in own
            ]
        found.append(tuple(np.mean(right, axis=0)))
    return float(max(found)[1])


def _averaged(
    clients: Sequence[Network], groups: Sequence[Sequence[int]], model: Model, rounds: int
) -> tuple[list[Model], Matrix]:
    """Run FedAvg in each group by itself; return its models, and the mean accuracy by round."""
    models, accuracies = [model] * len(groups), np.empty(rounds)
    for t in range(rounds):
        measured = []
        for j, group in enumerate(groups):
            fitted = [clients[i].fit(models[j], {ROUND: t + 1})[:2] for i in group]
            sizes = [n for _, n in fitted]
            arrays = zip(*(own for own, _ in fitted), strict=True)
            models[j] = [np.average(own, axis=0, weights=sizes) for own in arrays]
            measured += [clients[i].accuracy(models[j]) for i in group]
        accuracies[t] = np.mean(measured)
    return models, accuracies


def _tuned(clients: Sequence[Network], model: Model, epochs: int) -> float:
    """Return the accuracy of the model fine-tuned at each client, stopped in time."""
    found = []
    for models in by_epoch(clients, [model] * len(clients), epochs):
        measured = [one.evaluate(own, {}) for one, own in zip(clients, models, strict=True)]
        loss = float(np.mean([loss for loss, _, _ in measured]))
        found.append((loss, float(np.mean([own["accuracy"] for _, _, own in measured]))))
    return min(found)[1]


def _until(floats: Matrix, rounds: float) -> float:
    """Return the floats until a round; infinite where it never comes."""
    return float(floats[int(rounds) - 1]) if np.isfinite(rounds) else np.inf


def _figures(curves: Mapping[str, Matrix]) -> dict[str, Any]:
    from perdl_experiments import plots  # an extra: clients must not need it

    drawn = [n for n in curves if "one-shot" not in curves or n not in _NOT_DRAWN]
    by_round = {
        METHODS[name]: np.median(curves[name], axis=0)
        for name in drawn
        if curves[name].shape[1] > 1
    }
    return {
        "curves": plots.lines(by_round, x="communication round", y="accuracy"),
        "seeds": plots.dots(
            {"": {"": [rows[:, -1] for rows in curves.values()]}},
            [METHODS[name] for name in curves],
            x="accuracy",
        ),
    }
