"""The local updates of many clients at once, the same bits as one by one.

======================================= ====================================================
paper (Liang et al., NeurIPS 2023)      here
======================================= ====================================================
``Y_i``, i = 1, ..., N                  ``X[i]``, (n_samples, n_features)
``D_i``                                 ``D[i]``, global atoms first
``local_update`` (Algorithm 3)          one step of :func:`update_stack`
======================================= ====================================================

For clients with as many samples and atoms each, and `OrthogonalLearner` with a threshold: small
matrices are multiplied, and their polar factors found, many at a time. What else a client may be
asked, it does alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl._checks import Matrix
from flwr_perdl.dictionary.atoms import match_stack, polar_factors
from flwr_perdl.dictionary.learners import OrthogonalLearner


class Updates(NamedTuple):
    """What one round comes to at every client."""

    #: Dictionaries, global atoms first, (n_clients, n_atoms, n_features).
    dictionaries: Matrix
    #: What is sent of the global atoms, (n_clients, n_global, ...); withheld rows are zero.
    sent: Matrix
    #: Mean squared errors of the clients' own samples, (n_clients,).
    errors: Matrix


def update_stack(
    X: Matrix,
    D: Matrix,
    G: Matrix,
    learner: OrthogonalLearner,
    *,
    n_steps: int = 1,
    statistics: bool = True,
    orthogonal: bool = True,
    min_support: float = 3,
) -> Updates:
    """Take a round's steps at every client (Algorithm 3).

    Parameters
    ----------
    X : ndarray of shape (n_clients, n_samples, n_features)
        Finite samples.
    D : ndarray of shape (n_clients, n_atoms, n_features)
        The clients' dictionaries, in which ``G`` comes first.
    G : ndarray of shape (n_global, n_features)
        The global atoms.
    learner : OrthogonalLearner
        With a threshold, that is without ``n_nonzero``.
    n_steps : int, default 1
        Iterations of the learner.
    statistics : bool, default True
        Whether clients send `local_statistics` of the last iteration, or their updated atoms.
    orthogonal : bool, default True
        As in `local_statistics`.
    min_support : float, default 3
        Atoms with fewer samples behind them are withheld.

    Returns
    -------
    Updates
    """
    r = len(G)
    levels = np.array([learner.level(samples) for samples in X], X.dtype)[:, None, None]
    codes = _code(X, D, levels)
    for _ in range(n_steps):
        before, used = D, codes
        moments = codes.swapaxes(1, 2) @ X
        D = _align(polar_factors(moments, D), G)
        codes = _code(X, D, levels)
    if statistics:
        sent = _statistics(moments, used, before, r, orthogonal, min_support)
    else:
        visible = _supported(codes[..., :r], min_support)
        sent = np.where(visible[..., None], D[:, :r], 0)
    rest = codes @ D
    np.subtract(X, rest, out=rest)
    np.square(rest, out=rest)
    return Updates(D, sent, rest.reshape(len(X), -1).mean(axis=1))


def _code(X: Matrix, D: Matrix, levels: Matrix) -> Matrix:
    A = X @ D.swapaxes(1, 2)
    A *= np.abs(A) >= levels
    return A


def _align(D: Matrix, G: Matrix) -> Matrix:
    """Put the atoms that stand for the global ones first, with the global ones' signs."""
    indices, signs = match_stack(G, D)
    shared = signs[..., None] * np.take_along_axis(D, indices[..., None], axis=1)
    own = np.ones(D.shape[:2], dtype=bool)
    np.put_along_axis(own, indices, False, axis=1)
    return np.concatenate([shared, D[own].reshape(len(D), -1, D.shape[2])], axis=1)


def _supported(C: Matrix, least: float) -> NDArray[np.bool_]:
    """Tell which atoms have enough samples behind them, as `atom_support` counts."""
    shares, ones = np.abs(C), np.ones((1, C.shape[1]), C.dtype)
    largest = shares.max(axis=(1, 2), initial=0)
    shares /= np.where(largest == 0, 1, largest)[:, None, None]
    first = (ones @ shares)[:, 0]
    total = (ones @ np.square(shares, out=shares))[:, 0]
    enough: NDArray[np.bool_] = first**2 / np.where(total == 0, 1, total) >= least
    return enough


def _statistics(
    moments: Matrix, C: Matrix, D: Matrix, n_global: int, orthogonal: bool, min_support: float
) -> Matrix:
    own = C[..., :n_global]
    shared = _supported(own, min_support)
    across = own.swapaxes(1, 2) @ C
    gram = across[..., :n_global] * shared[:, None]
    across[..., :n_global] -= gram
    sent = moments[:, :n_global] - across @ D
    if not orthogonal:
        sent = np.concatenate([gram, sent], axis=2)
    return np.where(shared[..., None], sent, 0)
