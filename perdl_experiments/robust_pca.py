"""Robust PCA: a low-rank matrix and a sparse one, by principal component pursuit.

Candès, Li, Ma, Wright, "Robust principal component analysis?", Journal of the ACM 2011. What
federated separations of background and objects are held against: it sees all frames in one place.

======================================= ====================================================
paper                                   here
======================================= ====================================================
``M``, ``L``, ``S``                     ``X`` (rows are frames), ``low_rank``, ``sparse``
``lambda = 1 / sqrt(max(n_1, n_2))``    the weight of ``sum |S|``; nothing is tuned
``mu = n_1 n_2 / (4 sum |M|)``          the augmented Lagrangian's penalty (Section 5)
Algorithm 1                             :func:`principal_component_pursuit`
======================================= ====================================================
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flwr_perdl.core.checks import Matrix


class Separated(NamedTuple):
    """A matrix taken apart.

    Attributes
    ----------
    low_rank, sparse : ndarray of shape (n_rows, n_columns)
        Their sum is the matrix, up to the tolerance.
    n_iter : int
        Iterations.
    converged : bool
        Whether the tolerance was reached.
    """

    low_rank: Matrix
    sparse: Matrix
    n_iter: int
    converged: bool


def principal_component_pursuit(X: Matrix, *, tol: float = 1e-5, max_iter: int = 500) -> Separated:
    """Minimise the nuclear norm of L plus lambda times the sum of |S|, with L + S = X.

    Parameters
    ----------
    X : ndarray of shape (n_rows, n_columns)
        Few rows, many columns: singular values come from ``X @ X.T``.
    tol : float, default 1e-5
        It ends when the norm of X - L - S is so much of that of X. The paper's is 1e-7.
    max_iter : int, default 500
        Most iterations.

    Returns
    -------
    Separated

    Examples
    --------
    >>> X = np.outer(np.ones(20), np.arange(1.0, 31))
    >>> X[3, 7] += 50
    >>> found = principal_component_pursuit(X)
    >>> np.argwhere(np.abs(found.sparse) > 1).tolist()
    [[3, 7]]
    """
    size, total = float(np.linalg.norm(X)), float(np.abs(X).sum())
    L, S, Y = np.zeros_like(X), np.zeros_like(X), np.zeros_like(X)
    if not total:
        return Separated(L, S, 0, True)
    penalty, weight = X.size / (4 * total), 1 / np.sqrt(max(X.shape))
    for n_iter in range(1, max_iter + 1):
        L = _shrunk_singular_values(X - S + Y / penalty, 1 / penalty)
        left = X - L + Y / penalty
        S = left - np.clip(left, -weight / penalty, weight / penalty)
        gap = X - L - S
        Y += penalty * gap
        if np.linalg.norm(gap) <= tol * size:
            return Separated(L, S, n_iter, True)
    return Separated(L, S, max_iter, False)


def _shrunk_singular_values(X: Matrix, by: float) -> Matrix:
    """Return ``X`` with every singular value lowered by ``by``, to 0 at least."""
    squares, U = np.linalg.eigh(X @ X.T)
    values = np.sqrt(np.maximum(squares, 0))
    kept = values > by
    U, shares = U[:, kept], 1 - by / values[kept]
    shrunk: Matrix = (U * shares.astype(X.dtype)) @ (U.T @ X)
    return shrunk
