"""Complete orthogonal dictionaries under label skew: PerMA's Table 1 in the paper's own setting.

Liang, Shi, Al Kontar, Fattahi, "Personalized Dictionary Learning for Heterogeneous Datasets",
NeurIPS 2023. The clients are those of ``images``: nine tenths of a client's images have one label.

======================================= ====================================================
paper (5.2, A.1, A.2, B.1)              here
======================================= ====================================================
``D_i`` is orthogonal, 784 x 784        as many atoms as pixels
Algorithm 4, ``zeta``                   `OrthogonalLearner`, ``--threshold``
``D_i^(0)``                             one random orthogonal matrix for all clients
Algorithm 1                             PerMA, ``matching="paths"``, ``aggregation="mean"``,
                                        ``min_support=0``, all atoms global
the code of an image, A.2               `largest`: the threshold, then the k largest products
======================================= ====================================================

The paper doesn't say its threshold, its rounds, or how many atoms are global. ``local`` is local
training with as many iterations from the same start; ``huang`` (K-SVD, weighted means) and
``gkillas`` (gradient steps, plain means) have ``--n-atoms`` atoms, since theirs are learned with
sparse codes; so has ``perpca``, half of them shared, on principal axes. ``zero`` is the image 0.

Every dictionary is coded as in A.2 and by orthogonal matching pursuit, which solves for the
coefficients. A.2's products are these only where atoms are orthonormal.

Metrics, on held-out images of all labels with k atoms each ({k}: 10, 20), means over clients where
each has its own dictionary: ``mse_METHOD_{k}`` (A.2) and ``mse_omp_METHOD_{k}``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from flwr.app import Context

from flwr_perdl.clients import DictionaryClient
from flwr_perdl.core.checks import Matrix
from flwr_perdl.dictionary import (
    GradientLearner,
    KSVDLearner,
    Learner,
    OrthogonalLearner,
    WarmStart,
    iterate,
    reconstruct,
    sparse_code,
)
from flwr_perdl.protocol.records import PARTITION_ID
from flwr_perdl.random import DATA, spawn
from flwr_perdl.strategies import PerMA
from perdl_experiments.averaging import average
from perdl_experiments.outcome import Outcome
from perdl_experiments.perpca import personalized_pca
from perdl_experiments.render import Record
from perdl_experiments.studies._experiment import (
    GENERAL_N_NONZERO,
    Arrays,
    Federate,
    Keep,
    PermaConfig,
    words,
)
from perdl_experiments.studies._methods import principal_axes
from perdl_experiments.studies.images import Task, load_task

METHODS = words("complete")
#: Atoms per image, as in the paper; communication rounds of the rivals, as on ``images``.
N_NONZERO = (10, 20)
RIVAL_ROUNDS = 20


@dataclass(frozen=True, kw_only=True)
class Config(PermaConfig):
    """The options of complete.toml."""

    samples_per_client: int
    n_atoms: int
    threshold: float

    @property
    def task(self) -> Task:
        """The clients' and the held-out images."""
        return load_task(self.data, self.clients, self.samples_per_client, self.seed)

    @property
    def learner(self) -> OrthogonalLearner:
        """Algorithm 4."""
        return OrthogonalLearner(self.task.test.shape[1], threshold=self.threshold)

    def start(self, *given: Any, **more: Any) -> WarmStart:
        """Return everybody's random orthogonal matrix."""
        d = self.task.test.shape[1]
        Q = np.linalg.qr(spawn(self.seed, DATA, 1).standard_normal((d, d)))[0]
        return WarmStart(Q, 0.0, (0.0,))


def client(context: Context, config: Config) -> DictionaryClient:
    """Return the client of partition ``context.node_config["partition-id"]``."""
    X = config.task.clients[int(context.node_config[PARTITION_ID])]
    return DictionaryClient(X, config.learner, context, start=config.start, **config.private)


def strategy(config: Config, **options: Any) -> PerMA:
    """Return the strategy; ``options`` are the server's own."""
    return config.strategy(config.learner.n_atoms, **{"evaluate_every": config.rounds, **options})


def federations(config: Config) -> list[Config]:
    """Return the config of the one federation."""
    return [config]


def largest(X: Matrix, D: Matrix, threshold: float, k: int) -> Matrix:
    """Return A.2's codes: products with the atoms above a threshold, of these the k largest.

    Parameters
    ----------
    X : ndarray of shape (n_samples, n_features)
        Images.
    D : ndarray of shape (n_atoms, n_features)
        Unit atoms.
    threshold : float
        Products below are zero.
    k : int
        Nonzero codes of an image, at most.
    """
    products = X @ D.T
    sizes = np.abs(products)
    ranks = np.argsort(np.argsort(-sizes, axis=1, kind="stable"), axis=1)
    return np.where((sizes >= threshold) & (ranks < k), products, 0)


def run(config: Config, federate: Federate, keep: Keep) -> Outcome:
    """Run the federation and its rivals, and code their dictionaries in both ways."""
    task, federated = config.task, federate(config)
    found = {"perma": _errors(config, [federated.arrays[0]])}
    for name in ("local", "huang", "gkillas", "perpca"):
        kept = keep(name, partial(_rival, config, name), of=4)
        found[name] = kept["errors"]
    found["zero"] = np.full((2, len(N_NONZERO)), np.mean(task.test**2))
    return Outcome(
        records=list(_records(found)),
        curves={},
        arrays={"global_atoms": federated.arrays[0], "image_shape": np.array(task.shape)},
        figures=_figures(found),
        facts={
            "n_test": len(task.test),
            "n_pixels": task.test.shape[1],
            "given": len(task.clients[0]),
        },
        **federated.cost,
    )


def _rival(config: Config, name: str) -> Arrays:
    """Return the errors of a method other than PerMA."""
    samples, start = config.task.clients, config.start().dictionary
    if name == "local":
        scales = [1.0] * config.rounds
        return {
            "errors": _errors(config, [iterate(config.learner, X, start, scales) for X in samples])
        }
    if name == "perpca":
        shared = config.n_atoms // 2
        pca = personalized_pca(samples, shared, config.n_atoms - shared, n_rounds=RIVAL_ROUNDS)
        common = principal_axes(np.vstack(samples), pca.global_components)
        each = zip(samples, pca.local_components, strict=True)
        return {
            "errors": _errors(config, [np.vstack([common, principal_axes(*one)]) for one in each])
        }
    kind: type[KSVDLearner | GradientLearner] = KSVDLearner if name == "huang" else GradientLearner
    learner: Learner = kind(config.n_atoms, n_nonzero=GENERAL_N_NONZERO)
    given: dict[str, Any] = {"seed": config.seed, "min_support": config.min_support}
    return {
        "errors": _errors(
            config,
            [average(samples, learner, RIVAL_ROUNDS, weighted=name == "huang", **given).atoms],
        )
    }


def _errors(config: Config, dictionaries: Sequence[Matrix]) -> Matrix:
    """Return mean squared errors (A.2, OMP) x (k), the mean over dictionaries."""
    X = config.task.test

    def error(C: Matrix, D: Matrix) -> float:
        return float(np.mean((X - reconstruct(C, D)) ** 2))

    found = [
        [
            [error(largest(X, D, config.threshold, k), D) for k in N_NONZERO],
            [error(sparse_code(X, D, n_nonzero=min(k, len(D))), D) for k in N_NONZERO],
        ]
        for D in dictionaries
    ]
    mean: Matrix = np.mean(found, axis=0)
    return mean


def _records(found: Mapping[str, Matrix]) -> Iterator[Record]:
    for name, errors in found.items():
        for coder, row in zip(("", "omp"), errors, strict=True):
            for k, value in zip(N_NONZERO, row, strict=True):
                yield Record("mse", float(value), name, {"coder": coder, "k": k})


def _figures(found: Mapping[str, Matrix]) -> dict[str, Any]:
    from perdl_experiments import pictures  # an extra: clients must not need it

    values = np.array([errors.ravel() for errors in found.values()])
    columns = [f"{coder}, k = {k}" for coder in ("A.2", "OMP") for k in N_NONZERO]
    names = [METHODS[name] for name in found]
    return {"errors": pictures.heat_map(values.T, columns, names, higher_is_better=False)}
