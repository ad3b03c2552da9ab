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

from flwr_perdl._checks import Matrix
from flwr_perdl.dictionary.atoms import match_stack, polar_factors
from flwr_perdl.dictionary.learners import OrthogonalLearner, atom_supports


class Updates(NamedTuple):
    """What one round comes to at every client."""

    #: Dictionaries, global atoms first, (n_clients, n_atoms, n_features).
    dictionaries: Matrix
    #: What is sent of the global atoms, (n_clients, n_global, ...); withheld rows are zero.
    sent: Matrix
    #: Mean squared errors of the clients' own samples with ``D``, before the steps, (n_clients,).
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
    energies = _products(X, X)
    levels = np.array([learner.level_of(energy, X.shape[1]) for energy in energies], X.dtype)
    levels, errors = levels[:, None, None], np.zeros(len(X), X.dtype)
    for step in range(n_steps):
        before, codes = D, _code(X, D, levels)
        moments, gram = codes.swapaxes(1, 2) @ X, codes.swapaxes(1, 2) @ codes
        fitted = gram @ D  # C' C D
        if not step:
            errors = _mean_squared_errors(X, codes, D, moments, fitted, energies)
        D = _align(polar_factors(moments, D), G)
    if statistics:
        sent = _statistics(codes, before, moments, gram, fitted, r, orthogonal, min_support)
    else:
        visible = atom_supports(_code(X, D, levels)[..., :r]) >= min_support
        sent = np.where(visible[..., None], D[:, :r], 0)
    return Updates(D, sent, errors)


def _code(X: Matrix, D: Matrix, levels: Matrix) -> Matrix:
    A = X @ D.swapaxes(1, 2)
    A *= np.abs(A) >= levels
    return A


def _products(A: Matrix, B: Matrix) -> Matrix:
    """Return the inner products of every client's two arrays, (n_clients,)."""
    n = len(A)
    found: Matrix = (A.reshape(n, 1, -1) @ B.reshape(n, -1, 1))[:, 0, 0]
    return found


def _mean_squared_errors(
    X: Matrix, C: Matrix, D: Matrix, moments: Matrix, fitted: Matrix, energies: Matrix
) -> Matrix:
    """Return the mean squares of ``X - C @ D`` of every client.

    Parameters
    ----------
    X : ndarray of shape (n_clients, n_samples, n_features)
        Samples.
    C : ndarray of shape (n_clients, n_samples, n_atoms)
        Codes.
    D : ndarray of shape (n_clients, n_atoms, n_features)
        Dictionaries.
    moments : ndarray of shape (n_clients, n_atoms, n_features)
        ``C' X``, which the update needs anyway.
    fitted : ndarray of shape (n_clients, n_atoms, n_features)
        ``C' C D``.
    energies : ndarray of shape (n_clients,)
        ``|X|^2``.

    Returns
    -------
    ndarray of shape (n_clients,)
        From ``|X|^2 - <2 C' X - C' C D, D>``, small arrays all; where that cancels, as for samples
        that the atoms represent exactly, from the differences.
    """
    errors = energies - _products(2 * moments - fitted, D)
    safe = errors > 10 * np.sqrt(np.finfo(X.dtype).eps) * energies
    errors /= X[0].size
    for i in np.flatnonzero(~safe):
        errors[i] = np.mean(np.square(X[i] - C[i] @ D[i]))
    return errors


def _align(D: Matrix, G: Matrix) -> Matrix:
    """Put the atoms that stand for the global ones first, with the global ones' signs, in ``D``."""
    indices, signs = match_stack(G, D)
    if (indices == np.arange(len(G))).all():
        D[:, : len(G)] *= signs[..., None]
        return D
    shared = signs[..., None] * np.take_along_axis(D, indices[..., None], axis=1)
    own = np.ones(D.shape[:2], dtype=bool)
    np.put_along_axis(own, indices, False, axis=1)
    return np.concatenate([shared, D[own].reshape(len(D), -1, D.shape[2])], axis=1)


def _statistics(
    C: Matrix,
    D: Matrix,
    moments: Matrix,
    gram: Matrix,
    fitted: Matrix,
    n_global: int,
    orthogonal: bool,
    min_support: float,
) -> Matrix:
    """Return what `local_statistics` does, of every client."""
    r = n_global
    shared = atom_supports(C[..., :r]) >= min_support
    own = gram[:, :r, :r] * shared[:, None]
    sent = moments[:, :r] - fitted[:, :r]  # C_g' (X - C D)
    sent += own @ D[:, :r]
    if not orthogonal:
        sent = np.concatenate([own, sent], axis=2)
    sent *= shared[..., None]
    return sent
