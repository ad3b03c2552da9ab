"""Replacement of dead and double atoms: not in the paper, see `DataDiffusion`.

Every so often each node says what it finds each of its atoms worth, and proposes candidates with a
score. The largest values spread through the network in as many rounds as its diameter; then all
nodes hold the same numbers and replace the same atoms by the same candidates.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.checks import Matrix

#: Atoms that can be replaced at a time.
SLOTS = 8
#: Two atoms with a cosine above this count as one.
COHERENT = 0.95
#: Members of a group whose common direction may become an atom.
LEAST_GROUP = 5
#: An atom is dead if its worth is below this share of the mean worth.
LEAST_USE = 0.5
#: Makes equal scores of different nodes unequal.
TIE = 1e-9


def propose(
    kind: str, X: Matrix, C: Matrix, D: Matrix, n: int, nonnegative: bool
) -> tuple[Matrix, Matrix]:
    """Return a node's candidates: scores (n,) and unit vectors (n, n_features).

    ``kind`` is "private" or "samples", see `DataDiffusion`.
    """
    score, vectors = (_bad_halves if kind == "private" else _worst_samples)(X, C, D, n)
    if nonnegative:
        turned = np.where(vectors.sum(axis=1, keepdims=True) < 0, -vectors, vectors)
        vectors = unit_rows(np.maximum(turned, 0))
    return score, vectors


def replace(D: Matrix, worth: Matrix, score: Matrix, candidates: Matrix) -> Matrix:
    """Return the dictionary with its dead atoms, the least used first, replaced by candidates."""
    D = D.copy()
    dead = np.flatnonzero(worth < LEAST_USE * worth.mean())
    dead = dead[np.argsort(worth[dead], kind="stable")]
    offered = np.flatnonzero(score > 0)
    n = min(len(dead), len(offered))
    D[dead[:n]] = candidates[offered[:n]]
    return D


def shares_of(C: Matrix) -> Matrix:
    """Return every atom's share ``|c_j| / sum |c|`` of a sample's code, mean over samples."""
    sizes = np.abs(C).astype(np.float64)
    total = sizes.sum(axis=1, keepdims=True)
    shares: Matrix = (sizes / np.where(total == 0, 1, total)).mean(axis=0)
    return shares


def is_double(D: Matrix) -> NDArray[np.bool_]:
    """Return which atoms are nearly one of those before them."""
    doubled: NDArray[np.bool_] = np.tril(np.abs(D @ D.T), -1).max(axis=1) > COHERENT
    return doubled


def _worst_samples(X: Matrix, C: Matrix, D: Matrix, n: int) -> tuple[Matrix, Matrix]:
    """Return scores and directions of the ``n`` samples that are represented worst."""
    score, vectors = np.zeros(n), np.zeros((n, X.shape[1]), dtype=X.dtype)
    rest = _energies(X - C @ D)
    worst = np.argsort(-rest, kind="stable")[:n]
    worst = worst[rest[worst] > 0]
    score[: len(worst)] = rest[worst] / (rest[worst] + rest.mean())
    vectors[: len(worst)] = unit_rows(X[worst])
    return score, vectors


def _bad_halves(X: Matrix, C: Matrix, D: Matrix, n: int) -> tuple[Matrix, Matrix]:
    """Return scores and directions for the ``n`` atoms whose users are represented worst.

    An atom that stands for two true ones leaves their difference in its users' residuals, with
    opposite signs: the sign along the residuals' leading direction tells which of the two a user
    needs. For each user, its residual plus its part of the atom is what should stand there. In the
    larger of the two groups the leading direction of these is one of the true atoms.
    """
    score, vectors = np.zeros(n), np.zeros((n, X.shape[1]), dtype=X.dtype)
    rest = X - C @ D
    left = (C != 0).T.astype(np.float64) @ _energies(rest)
    for slot, j in enumerate(np.argsort(-left, kind="stable")[:n]):
        users = np.flatnonzero(C[:, j])
        residuals = np.sign(C[users, j])[:, None] * rest[users]
        wanted = residuals + np.abs(C[users, j])[:, None] * D[j]
        if not residuals.any():
            break
        side = wanted @ np.linalg.svd(residuals, full_matrices=False)[2][0] > 0
        group = wanted[side if 2 * side.sum() >= len(side) else ~side]
        if len(group) >= LEAST_GROUP:
            score[slot] = left[j] / left.sum()
            vectors[slot] = np.linalg.svd(group, full_matrices=False)[2][0]
    return score, vectors


def key_of(epoch: int, values: Matrix) -> Matrix:
    """Return keys for values in [0, 1]; those of a later decision exceed all earlier ones."""
    keys: Matrix = epoch + np.asarray(values, dtype=np.float64) / 2
    return keys


def value_of(epoch: int, keys: Matrix) -> Matrix:
    """Return the values of a decision, NaN where a key is from an earlier one."""
    values: Matrix = np.where(keys >= epoch, 2 * (keys - epoch), np.nan)
    return values


def _energies(X: Matrix) -> Matrix:
    energies: Matrix = np.einsum("ij,ij->i", X, X).astype(np.float64)
    return energies


def unit_rows(D: Matrix) -> Matrix:
    """Return rows of norm one; zeros stay zeros."""
    norms = np.linalg.norm(D, axis=-1, keepdims=True)
    unit: Matrix = D / np.where(norms == 0, 1, norms)
    return unit
