"""What a federation is compared with: local training, pooled data, averages without matching.

*Alone* and *pooled* have PerMA's learner, start and coder, and five times its iterations; *pooled*
has n_global atoms and all clients' data. *Plain averaging* takes the mean of the clients' own
dictionaries atom by atom, without matching: what matching is for. *scikit-learn* is its own pooled
dictionary, whose atoms need not be orthogonal.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from flwr_perdl.core.checks import Matrix
from flwr_perdl.dictionary import (
    Learner,
    WarmStart,
    iterate,
    normalize_atoms,
    sparse_code,
    warm_start,
)

#: ``start(X, learner, rng=rng)``: how a client makes its first dictionary.
Start = Callable[..., WarmStart]

#: Iterations of a baseline per iteration of PerMA.
GENEROSITY = 5
#: scikit-learn's penalties, and with how many atoms the best of them is judged.
PENALTIES = (0.3, 1.0)
_CODED = 10


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
    return iterate(learner, X, D, [1.0] * GENEROSITY * n_rounds)


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


def sklearn_dictionary(
    X: Matrix, n_atoms: int, seed: int, penalties: Sequence[float] = PENALTIES
) -> Matrix:
    """Learn a dictionary from ``X`` with scikit-learn's MiniBatchDictionaryLearning.

    Its penalty is chosen among ``penalties``: the least squared error of ``X`` itself, coded by
    orthogonal matching pursuit with ``_CODED`` atoms.

    Parameters
    ----------
    X : ndarray of shape (n_samples, n_features)
        Samples, of all clients.
    n_atoms : int
        Atoms.
    seed : int
        Of its random numbers.
    penalties : sequence of float, default (0.3, 1.0)
        To choose from.

    Returns
    -------
    ndarray of shape (n_atoms, n_features)
        Unit atoms; one that it never used is a random direction.
    """
    from sklearn.decomposition import MiniBatchDictionaryLearning  # an extra
    from sklearn.exceptions import ConvergenceWarning

    fallback = normalize_atoms(np.random.default_rng(seed).standard_normal((n_atoms, X.shape[1])))
    tried = []
    for penalty in penalties:
        learner = MiniBatchDictionaryLearning(
            n_atoms, alpha=penalty, fit_algorithm="cd", random_state=sklearn_seed(seed)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            atoms = np.asarray(learner.fit(X).components_, X.dtype)
        D = normalize_atoms(atoms, fallback.astype(X.dtype))
        codes = sparse_code(X, D, n_nonzero=min(_CODED, n_atoms))
        tried.append((float(((X - codes @ D) ** 2).sum()), D))
    return min(tried, key=lambda one: one[0])[1]


def sklearn_seed(seed: int) -> int:
    """Return the seed for scikit-learn, which takes those below 2**32 only."""
    return seed % 2**32


def plain_average(dictionaries: Sequence[Matrix]) -> Matrix:
    """Return the mean of dictionaries, atom by atom in the order they are in, with unit atoms.

    Parameters
    ----------
    dictionaries : sequence of ndarray of shape (n_atoms, n_features)
        One per client.
    """
    return normalize_atoms(np.mean(dictionaries, axis=0))
