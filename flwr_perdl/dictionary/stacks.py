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

from flwr_perdl._arrays import (
    add_to_diagonals,
    beside,
    joined,
    like,
    mask_in_place,
    namespace,
    on_cpu,
    on_host,
    reshaped,
    row_products,
    squared_norm,
    transposed,
    where_true,
)
from flwr_perdl._checks import Matrix
from flwr_perdl.dictionary.aggregation import shared_rows, shared_sums, statistics_of
from flwr_perdl.dictionary.atoms import match_stack
from flwr_perdl.dictionary.coding import reconstruct
from flwr_perdl.dictionary.learners import (
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
        Arrays of another library than NumPy's (`OrthogonalLearner` with a threshold takes them)
        stay on their device, but for a number of each client, its threshold, and what
        `polar_factors` and `match_stack` compute on the host.
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
    xp, r, before = namespace(X, D, G), G.shape[0], D
    begun = _by_blocks(partial(_begin, learner, r), X, D)
    energies, thresholds, moments, gram, sums = begun
    errors = _mean_squared_errors(X, D, G, thresholds, moments, gram, energies)
    D = _align(polar_factors(moments, D), G)
    for _ in range(n_steps - 1):
        before = D
        moments, gram, sums = _by_blocks(partial(_sums, r), X, D, thresholds)
        D = _align(polar_factors(moments, D), G)
    made_from, squares = before, _diagonals(gram)
    if not statistics:
        before, (sums, squares) = D, _by_blocks(_sizes, X, D[:, :r, :], thresholds)
    supports = atom_supports(
        sums, squares, lambda i: _code(X[i, ...], before[i, :r, :], thresholds[i, ...]).T
    )
    shared = supports >= min_support
    if not statistics:
        if min_support > 1:
            (one,) = _by_blocks(partial(_moved_by_one, r), X, D, moments, made_from, thresholds)
            shared &= ~one
        return Updates(D, xp.where(shared[..., None], D[:, :r, :], 0), errors)
    sent = shared_sums(before, moments, gram, shared)
    for i in where_true(xp.any(shared, axis=1)).tolist() if min_support > 1 else []:
        codes = _code(X[i, ...], before[i, ...], thresholds[i, ...]).T
        own = X[i, ...], codes, before[i, ...], moments[i, :r, :], gram[i, ...]
        _, sent[i, ...] = shared_rows(*own, min_support)
    return Updates(D, sent, errors)


def _by_blocks(reduce: Callable[..., tuple[Matrix, ...]], X: Matrix, *more: Matrix) -> list[Any]:
    """Return ``reduce(X, *more)``, of as many clients at a time as a processor's cache holds."""
    n = X.shape[0]
    step = max(1, _BLOCK // max(prod(X.shape[1:]), 1)) if on_cpu(X) else n
    if n <= step:
        return list(reduce(X, *more))
    count = -(-n // step)
    blocks = [slice(i * n // count, (i + 1) * n // count) for i in range(count)]
    parts = [reduce(*(array[block, ...] for array in (X, *more))) for block in blocks]
    return [joined(list(part), 0) for part in zip(*parts, strict=True)]


def _begin(learner: OrthogonalLearner, r: int, X: Matrix, D: Matrix) -> tuple[Matrix, ...]:
    """Return ``|X|^2``, thresholds (n_clients, 1, 1), and `_sums`."""
    energies = _products(X, X)
    known = on_host(energies)
    levels = learner.levels_of(known.astype(np.float64), X.shape[1])
    thresholds = like(levels.astype(known.dtype, copy=False)[:, None, None], X)
    return energies, thresholds, *_sums(r, X, D, thresholds)


def _sums(r: int, X: Matrix, D: Matrix, levels: Matrix) -> tuple[Matrix, ...]:
    """Return ``C' X``, and of ``C_g``: ``C_g' C``, sums of sizes."""
    xp, across = namespace(X, D), _code(X, D, levels)
    own = across[:, :r, :]
    return across @ X, own @ transposed(across), xp.sum(xp.abs(own), axis=2)


def _moved_by_one(
    r: int, X: Matrix, D: Matrix, moments: Matrix, before: Matrix, levels: Matrix
) -> tuple[Matrix]:
    """Return which of the first ``r`` atoms one sample dominates; ``before`` gave their codes."""
    weights = transposed(mixing(D, moments)[..., :r]) @ _code(X, before, levels)
    return (dominated(X, weights, D[:, :r, :]),)


def _sizes(X: Matrix, D: Matrix, levels: Matrix) -> tuple[Matrix, Matrix]:
    """Return the sums of ``|C|`` and of its squares over the samples."""
    return code_sums(transposed(_code(X, D, levels)))


def _code(X: Matrix, D: Matrix, levels: Matrix) -> Matrix:
    """Return ``C'``, an atom's codes side by side, (n_clients, n_atoms, n_samples)."""
    across = D @ transposed(X)
    mask_in_place(across, namespace(across).abs(across) >= levels)
    return across


def _products(A: Matrix, B: Matrix) -> Matrix:
    """Return the inner products of every client's two arrays, (n_clients,)."""
    n = A.shape[0]
    return row_products(reshaped(A, (n, -1)), reshaped(B, (n, -1)))


def _diagonals(gram: Matrix) -> Matrix:
    """Return the sums of the codes' squares, which ``C_g' C`` holds, (n_clients, n_global)."""
    n, r, n_atoms = gram.shape
    return reshaped(gram, (n, r * n_atoms))[:, :: n_atoms + 1]


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
    xp, (n, r, n_atoms) = namespace(X, D, G), gram.shape
    eps = float(xp.finfo(X.dtype).eps)
    angles = reshaped(reshaped(D, (n * n_atoms, -1)) @ G.T, (n, n_atoms, r))
    angles[:, r:, :] *= 2
    errors: Matrix = energies - _products(moments, D) - xp.sum(_diagonals(gram), axis=1)
    errors += xp.sum(gram * transposed(angles), axis=(1, 2))
    apart = add_to_diagonals(D[:, r:, :] @ transposed(D[:, r:, :]), -1)
    safe = errors > 10 * float(np.sqrt(eps)) * energies
    safe &= ~xp.any(xp.abs(apart) > 100 * eps, axis=(1, 2))
    errors /= prod(X.shape[1:])
    if not xp.all(safe):
        for i in where_true(~safe).tolist():
            own = X[i, ...], D[i, ...]
            errors[i] = xp.mean((own[0] - _code(*own, levels[i, ...]).T @ own[1]) ** 2)
    return errors


def _align(D: Matrix, G: Matrix) -> Matrix:
    """Put the atoms that stand for the global ones first, with their signs, all others behind.

    ``D`` is written to.
    """
    xp, r, here = namespace(G, D), G.shape[0], beside(D)
    indices, signs = match_stack(G, D)
    places = xp.arange(r, **here)
    if not xp.all(indices == places):
        n, n_atoms, d = D.shape
        rows = xp.arange(n_atoms, **here)
        taken = indices[:, :, None] == rows  # (n_clients, n_global, n_atoms)
        ranks = xp.sum(xp.where(taken, places[:, None] - r, 0), axis=1)  # below 0: stands for one
        order = xp.argsort(xp.where(ranks < 0, ranks, rows), axis=1)
        order += n_atoms * xp.arange(n, **here)[:, None]
        atoms = xp.take(reshaped(D, (n * n_atoms, d)), reshaped(order, (n * n_atoms,)), axis=0)
        D = reshaped(atoms, (n, n_atoms, d))
    D[:, :r, :] *= signs[..., None]
    return D
