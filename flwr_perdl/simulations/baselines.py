"""What a federation is compared with: clients alone, pooled data, averages without matching.

*Alone* and *pooled* have PerMA's learner, start and coder, and five times its iterations; *pooled*
has n_global atoms and all clients' data. *Plain averaging* takes the mean of the clients' own
dictionaries atom by atom, without matching: what matching is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from flwr_perdl._checks import Matrix
from flwr_perdl.clients.dictionary import Start
from flwr_perdl.dictionary import Learner, normalize_atoms, warm_start

#: Iterations of a baseline per iteration of PerMA.
GENEROSITY = 5


def learn(
    X: Matrix,
    learner: Learner,
    rng: np.random.Generator,
    n_rounds: int,
    start: Start = warm_start,
) -> Matrix:
    """Learn a dictionary from ``X`` alone.

    Parameters
    ----------
    X : ndarray of shape (n_samples, n_features)
        Samples.
    learner : Learner
        The local algorithm.
    rng : Generator
        The start's draws.
    n_rounds : int
        Rounds of the federation that it is compared with.
    start : callable, default `warm_start`
        What its clients start with.

    Returns
    -------
    ndarray of shape (n_atoms, n_features)
        Unit atoms.
    """
    D = start(X, learner, rng=rng).dictionary
    for _ in range(GENEROSITY * n_rounds):
        D = learner.step(X, D)
    return D


def learn_each(
    samples: Sequence[Matrix],
    learners: Sequence[Learner],
    rngs: Sequence[np.random.Generator],
    n_rounds: int,
    start: Start = warm_start,
) -> list[Matrix]:
    """Return what `learn` does for every set of samples; they share the cores of the machine."""
    with ThreadPoolExecutor() as pool:
        return list(
            pool.map(partial(learn, n_rounds=n_rounds, start=start), samples, learners, rngs)
        )


def plain_average(dictionaries: Sequence[Matrix]) -> Matrix:
    """Return the mean of dictionaries, atom by atom in the order they are in, with unit atoms.

    Parameters
    ----------
    dictionaries : sequence of ndarray of shape (n_atoms, n_features)
        One per client.
    """
    return normalize_atoms(np.mean(dictionaries, axis=0))
