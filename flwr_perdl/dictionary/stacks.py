"""The local updates of many clients: a single client is a stack of one.

======================================= ====================================================
paper (Liang et al., NeurIPS 2023)      here
======================================= ====================================================
``Y_i``, i = 1, ..., N                  ``X[i]``, (n_samples, n_features)
``D_i``                                 ``D[i]``, global atoms first
``local_update`` (Algorithm 3)          one step of :func:`update_stack`
======================================= ====================================================

With `OrthogonalLearner` and a threshold small matrices are multiplied, and their polar factors
found, many at a time; other learners compute one client after the other (`updated_at_once`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from flwr_perdl._arrays import add_to_diagonals, row_norms, row_products, squared_norm
from flwr_perdl._checks import Matrix
from flwr_perdl.dictionary.aggregation import shared_rows, shared_sums, statistics_of
from flwr_perdl.dictionary.atoms import match_stack
from flwr_perdl.dictionary.coding import reconstruct
from flwr_perdl.dictionary.learners import (
    ALONE,
    Learner,
    OrthogonalLearner,
    atom_supports,
    code_sums,
    dominated,
    mixing,
    update_support,
)
from flwr_perdl.dictionary.matching import align_to_global
from flwr_perdl.dictionary.polar import polar_factors

#: Numbers of samples' features whose codes are computed at once: two megabytes.
_BLOCK = 2**18


#: Rows up to this length are summed faster by a product of all of them.
_SHORT = 16


class Updates(NamedTuple):
    """The result of one round at every client."""

    #: Dictionaries, global atoms first, (n_clients, n_atoms, n_features).
    dictionaries: Matrix
    #: What is sent of the global atoms, (n_clients, n_global, ...); withheld rows are zero.
    sent: Matrix
    #: Mean squared errors of the clients' own samples with ``D``, before the steps, (n_clients,).
    errors: Matrix


def updated_at_once(
    learner: Learner, statistics: bool, orthogonal: bool | None
) -> TypeGuard[OrthogonalLearner]:
    """Return whether `update_stack` multiplies the matrices of many clients at a time."""
    at_once = type(learner) is OrthogonalLearner and learner.n_nonzero is None
    return at_once and not (statistics and orthogonal is False)


def update_stack(
    X: Matrix,
    D: Matrix,
    G: Matrix,
    learner: Learner,
    *,
    n_steps: int = 1,
    statistics: bool = True,
    orthogonal: bool | None = None,
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
    learner : Learner
        The local algorithm of all clients.
    n_steps : int, default 1
        Iterations of the learner.
    statistics : bool, default True
        Whether clients send `local_statistics` of the last iteration, or their updated atoms.
    orthogonal : bool, optional
        Whether the statistics are those of orthonormal atoms; by default as the learner says.
    min_support : float, default 3
        Atoms with fewer samples behind them are withheld.

    Returns
    -------
    Updates
    """
    if updated_at_once(learner, statistics, orthogonal):
        return _update_at_once(X, D, G, learner, n_steps, statistics, min_support)
    orthogonal = learner.orthogonal if orthogonal is None else orthogonal
    each = [
        _update(own, atoms, G, learner, n_steps, statistics, orthogonal, min_support)
        for own, atoms in zip(X, D, strict=True)
    ]
    return Updates(*map(np.stack, zip(*each, strict=True)))


def _update(
    X: Matrix,
    D: Matrix,
    G: Matrix,
    learner: Learner,
    n_steps: int,
    statistics: bool,
    orthogonal: bool,
    min_support: float,
) -> tuple[Matrix, Matrix, float]:
    """Take one client's steps with any learner."""
    n_global = len(G)
    for step in range(n_steps):
        before, codes = D, learner.code(X, D)
        if not step or (statistics and step == n_steps - 1):
            rest = X - reconstruct(codes, D)
        if not step:
            error = squared_norm(rest) / X.size
        if statistics and len(D) == n_global and step == n_steps - 1:
            break  # of the last update only the local atoms are kept
        aligned = align_to_global(learner.update(X, codes, D), G)
        D = np.vstack([aligned.global_atoms, aligned.local_atoms])
    if statistics:
        sent = statistics_of(
            X, codes, before, rest, n_global, orthogonal=orthogonal, min_support=min_support
        )
        return D, sent, error
    order = [*aligned.indices, *np.delete(np.arange(len(D)), aligned.indices)]
    codes = codes[:, order]
    codes[:, :n_global] *= aligned.signs
    supported = update_support(X, codes, D, learner) >= min_support
    return D, np.where(supported[:n_global, None], D[:n_global], 0), error


def _update_at_once(
    X: Matrix,
    D: Matrix,
    G: Matrix,
    learner: OrthogonalLearner,
    n_steps: int,
    statistics: bool,
    min_support: float,
) -> Updates:
    """Take the steps of clients for which `updated_at_once` is true."""
    r, before = len(G), D
    begun = _by_blocks(partial(_begin, learner, r), X, D)
    energies, thresholds, lengths, moments, gram, sums, longest = begun
    errors = _mean_squared_errors(X, D, G, thresholds, moments, gram, energies)
    D = _align(polar_factors(moments, D), G)
    for _ in range(n_steps - 1):
        before = D
        moments, gram, sums, longest = _by_blocks(partial(_sums, r), X, D, thresholds, lengths)
        D = _align(polar_factors(moments, D), G)
    made_from, squares = before, _diagonals(gram)
    if not statistics:
        before, (sums, squares) = D, _by_blocks(_sizes, X, D[:, :r, :], thresholds)
    supports = atom_supports(
        sums, squares, lambda i: _code(X[i], before[i, :r, :], thresholds[i]).T
    )
    shared = supports >= min_support
    if not statistics:
        if min_support > 1:
            (one,) = _by_blocks(partial(_moved_by_one, r), X, D, moments, made_from, thresholds)
            shared &= ~one
        return Updates(D, np.where(shared[..., None], D[:, :r, :], 0), errors)
    sent = shared_sums(before, moments, gram, shared)
    scale = np.where(energies == 0, 1, energies)[:, None, None]
    rows = row_norms(sent / scale)
    near = shared & ((1 + ALONE) * longest > rows)  # else no term dominates
    for i in np.flatnonzero(near.any(axis=1)) if min_support > 1 else []:
        codes = _code(X[i], before[i], thresholds[i]).T
        own = X[i], codes, before[i], moments[i, :r, :], gram[i]
        _, sent[i] = shared_rows(*own, min_support)
    return Updates(D, sent, errors)


def _by_blocks(reduce: Callable[..., tuple[Matrix, ...]], X: Matrix, *more: Matrix) -> list[Any]:
    """Return ``reduce(X, *more)``, of as many clients at a time as a processor's cache holds."""
    n = X.shape[0]
    step = max(1, _BLOCK // max(prod(X.shape[1:]), 1))
    if n <= step:
        return list(reduce(X, *more))
    count = -(-n // step)
    blocks = [slice(i * n // count, (i + 1) * n // count) for i in range(count)]
    parts = [reduce(*(array[block] for array in (X, *more))) for block in blocks]
    return [np.concatenate(part) for part in zip(*parts, strict=True)]


def _begin(learner: OrthogonalLearner, r: int, X: Matrix, D: Matrix) -> tuple[Matrix, ...]:
    """Return ``|X|^2``, thresholds (n_clients, 1, 1), lengths (n_clients, 1, n_samples), `_sums`.

    The lengths are the samples', divided by ``|X|^2``: terms of codes are then at most 1.
    """
    energies, d = _products(X, X), X.shape[-1]
    squares = row_products(X, X) if d > _SHORT else (X * X) @ np.ones(d, X.dtype)
    lengths = (np.sqrt(squares) / np.where(energies == 0, 1, energies)[:, None])[:, None, :]
    levels = learner.levels_of(energies.astype(np.float64), X.shape[1])
    thresholds = levels.astype(X.dtype)[:, None, None]
    return energies, thresholds, lengths, *_sums(r, X, D, thresholds, lengths)


def _sums(r: int, X: Matrix, D: Matrix, levels: Matrix, lengths: Matrix) -> tuple[Matrix, ...]:
    """Return ``C' X``, and of ``C_g``: ``C_g' C``, sums of sizes, the longest terms' lengths."""
    across = _code(X, D, levels)
    own = across[:, :r]
    sizes = np.abs(own)
    longest = (sizes * lengths).max(axis=2)
    return across @ X, own @ across.swapaxes(-1, -2), sizes.sum(axis=2), longest


def _moved_by_one(
    r: int, X: Matrix, D: Matrix, moments: Matrix, before: Matrix, levels: Matrix
) -> tuple[Matrix]:
    """Return which of the first ``r`` atoms one sample dominates; ``before`` gave their codes."""
    weights = mixing(D, moments)[..., :r].swapaxes(-1, -2) @ _code(X, before, levels)
    return (dominated(X, weights, D[:, :r, :]),)


def _sizes(X: Matrix, D: Matrix, levels: Matrix) -> tuple[Matrix, Matrix]:
    """Return the sums of ``|C|`` and of its squares over the samples."""
    return code_sums(_code(X, D, levels).swapaxes(-1, -2))


def _code(X: Matrix, D: Matrix, levels: Matrix) -> Matrix:
    """Return ``C'``, an atom's codes side by side, (n_clients, n_atoms, n_samples)."""
    across = D @ X.swapaxes(-1, -2)
    across *= np.abs(across) >= levels
    return across


def _products(A: Matrix, B: Matrix) -> Matrix:
    """Return the inner products of every client's two arrays, (n_clients,)."""
    n = A.shape[0]
    return row_products(A.reshape(n, -1), B.reshape(n, -1))


def _diagonals(gram: Matrix) -> Matrix:
    """Return the sums of the codes' squares, which ``C_g' C`` holds, (n_clients, n_global)."""
    n, r, n_atoms = gram.shape
    return gram.reshape(n, r * n_atoms)[:, :: n_atoms + 1]


def _mean_squared_errors(
    X: Matrix, D: Matrix, G: Matrix, levels: Matrix, moments: Matrix, gram: Matrix, energies: Matrix
) -> Matrix:
    """Return the mean squares of ``X - C @ D`` of every client.

    Parameters
    ----------
    X : ndarray of shape (n_clients, n_samples, n_features)
        Samples.
    D : ndarray of shape (n_clients, n_atoms, n_features)
        Dictionaries, in which ``G`` comes first, then the local atoms, ``L``.
    G : ndarray of shape (n_global, n_features)
        The global atoms.
    levels : ndarray of shape (n_clients, 1, 1)
        Thresholds: the codes C are entries of ``X @ D'``, or zero.
    moments : ndarray of shape (n_clients, n_atoms, n_features)
        ``C' X``.
    gram : ndarray of shape (n_clients, n_global, n_atoms)
        ``C_g' C``.
    energies : ndarray of shape (n_clients,)
        ``|X|^2``.

    Returns
    -------
    ndarray of shape (n_clients,)
        From ``|X|^2 - 2 <X, C D> + |C D|^2``, small arrays all: ``<X, C D> = <C' X, D>`` is
        ``|C|^2``, and with orthonormal local atoms ``|C D|^2`` is ``|C_l|^2 + <C_g' C, G K'>``,
        ``K`` being ``D`` with its local atoms doubled. Where that cancels, as for samples that the
        atoms represent exactly, or the local atoms are not orthonormal, from the differences.
    """
    n, r, n_atoms = gram.shape
    eps = float(np.finfo(X.dtype).eps)
    angles = (D.reshape(n * n_atoms, -1) @ G.T).reshape(n, n_atoms, r)
    angles[:, r:, :] *= 2
    errors: Matrix = energies - _products(moments, D) - _diagonals(gram).sum(axis=1)
    errors += (gram * angles.swapaxes(-1, -2)).sum(axis=(1, 2))
    apart = add_to_diagonals(D[:, r:, :] @ D[:, r:, :].swapaxes(-1, -2), -1)
    safe = errors > 10 * float(np.sqrt(eps)) * energies
    safe &= ~(np.abs(apart) > 100 * eps).any(axis=(1, 2))
    errors /= prod(X.shape[1:])
    for i in np.flatnonzero(~safe):
        errors[i] = np.mean((X[i] - _code(X[i], D[i], levels[i]).T @ D[i]) ** 2)
    return errors


def _align(D: Matrix, G: Matrix) -> Matrix:
    """Put the atoms that stand for the global ones first, with their signs, all others behind.

    ``D`` is written to.
    """
    r, (n, n_atoms, _) = len(G), D.shape
    indices, signs = match_stack(G, D)
    places, rows = np.arange(r), np.arange(n_atoms)
    if (indices != places).any():
        taken = indices[:, :, None] == rows  # (n_clients, n_global, n_atoms)
        ranks = np.where(taken, places[:, None] - r, 0).sum(axis=1)  # below 0: stands for one
        order = np.argsort(np.where(ranks < 0, ranks, rows), axis=1)
        D = D[np.arange(n)[:, None], order]
    D[:, :r] *= signs[..., None]
    return D
