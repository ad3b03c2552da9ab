"""Planted dictionaries (PerMA, A.1): shared by four studies.

Liang, Shi, Al Kontar, Fattahi, "Personalized Dictionary Learning for Heterogeneous Datasets",
NeurIPS 2023. Every client's data is made of orthonormal atoms, some of which all clients share.
Errors are distances d_{1,2} (Definition 1) to the planted atoms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from flwr_perdl.core.checks import Matrix, check_count
from flwr_perdl.dictionary import Learner, iterate
from flwr_perdl.random import DATA, spawn
from perdl_experiments.data import Planted, planted_clients
from perdl_experiments.engine import Federated
from perdl_experiments.studies._experiment import PermaConfig

#: Atoms that all clients share, and the learner's threshold, unless a study varies them.
N_GLOBAL = 3
THRESHOLD = 0.15
#: Figures draw smaller errors there: they are rounding.
EXACT = 1e-8
#: "good" is the library's warm start; "poor" begins with too small a threshold and ends early, so
#: that about one client in five fails by itself; "short" leaves most of the work to the rounds.
STARTS: dict[str, dict[str, Any]] = {
    "good": {},
    "poor": {"boost": 0.5 / THRESHOLD, "decay": 0.97, "n_iter": 100, "restarts": 1},
    "short": {"n_iter": 5},
}


@lru_cache(maxsize=4)
def plant(
    seed: int,
    n_atoms: tuple[int, ...],
    n_samples: tuple[int, ...],
    n_global: int = N_GLOBAL,
    **options: float,
) -> Planted:
    """Return the clients of these sizes; a process that hosts many of them plants them once."""
    rng = spawn(seed, DATA)
    return planted_clients(rng, n_atoms, n_samples, n_global, n_features=max(n_atoms), **options)


def sizes(clients: int, samples: int, weak: int, weak_samples: int) -> tuple[int, ...]:
    """Return each client's number of samples; the last ``weak`` clients have fewer."""
    return (samples,) * (clients - weak) + (weak_samples,) * weak


@dataclass(frozen=True, kw_only=True)
class Config(PermaConfig):
    """Options of a study whose last clients may have fewer samples than the others."""

    samples: int
    weak: int
    weak_samples: int

    def check(self) -> None:
        """Reject options that do not fit together."""
        check_count("weak", self.weak, 0, self.clients)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Each client's number of samples."""
        return sizes(self.clients, self.samples, self.weak, self.weak_samples)


def learn_alone(X: Matrix, learner: Learner, D: Matrix, rounds: int) -> Matrix:
    """Return a dictionary of ``X`` alone: the start ``D``, and an iteration per later round."""
    return iterate(learner, X, D, [1.0] * (rounds - 1))


def cost(federated: Federated) -> Matrix:
    """Return rounds, and values sent and received, of a federation."""
    return np.array([federated.rounds, federated.floats_up, federated.floats_down])


def mean_cost(costs: Sequence[Matrix]) -> dict[str, Any]:
    """Return the mean of what several federations cost, as an `Outcome` has it."""
    rounds, floats_up, floats_down = np.mean(costs, axis=0)
    return {"rounds": int(rounds), "floats_up": floats_up, "floats_down": floats_down}
