"""Polar factors: the nearest matrix with orthonormal rows (PerMA, Algorithm 4).

======================================= ====================================================
paper (Liang et al., NeurIPS 2023)      here
======================================= ====================================================
``Polar(A) = U V'`` of an SVD           :func:`polar_factor`
======================================= ====================================================

``U V' = (A A')^(-1/2) A``: the eigenvalues of a Gram matrix of ``n_atoms`` rows do the work of the
SVD in half its time. A matrix that is too badly conditioned for that gets an SVD.

Deviation: the polar factor of a rank-deficient matrix, which the paper leaves open, is completed as
near as possible to a given dictionary.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import svd

from flwr_perdl.core.checks import Matrix, check_array, check_mask

#: Least ratio of the Gram matrix' extreme eigenvalues at which it stands in for an SVD; right
#: there the factor is off by less than 1e-9, at 1e-4 by 1e-13.
SAFE_GRAM = 1e-8
#: The largest share of a matrix' norm that counts as rounding.
_FEW = 1e-6


def polar_factor(S: Matrix, fallback: Matrix, fixed: NDArray[np.bool_] | None = None) -> Matrix:
    """Return the matrix with orthonormal rows that is nearest to ``S``.

    With ``S = U diag(s) V'`` this is ``U V'``. Directions in which ``S`` is zero, but for the
    rounding of its dtype, are filled in as near as possible to ``fallback``.

    Parameters
    ----------
    S : ndarray of shape (n_atoms, n_features)
        Any matrix that is not taller than wide.
    fallback : ndarray of shape (n_atoms, n_features)
        A dictionary with orthonormal rows.
    fixed : ndarray of bool of shape (n_atoms,), optional
        Rows that stay exactly as ``fallback`` has them; the others become orthogonal to them.

    Returns
    -------
    ndarray of shape (n_atoms, n_features)
        Orthonormal rows, in the dtype of ``S``; computed in float64.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import polar_factor
    >>> polar_factor(np.diag([3.0, 0.5]), np.eye(2)).round(3)
    array([[1., 0.],
           [0., 1.]])
    """
    S = check_array("S", S)
    n, d = S.shape
    fallback = check_array("fallback", fallback, rows=n, columns=d, squares=True)
    if n > d:
        raise ValueError(f"S must not have more rows than columns, got shape {S.shape}.")
    if fixed is None or not check_mask("fixed", fixed, n, n).any():
        return _nearest(S, fallback[:0], fallback)
    factor = fallback.astype(S.dtype)
    if not fixed.all():
        factor[~fixed] = _nearest(S[~fixed], fallback[fixed], fallback[~fixed])
    return factor


def _nearest(S: Matrix, fixed: Matrix, fallback: Matrix) -> Matrix:
    """Return the polar factor of what ``fixed``, orthonormal rows, leaves of ``S``."""
    largest = np.abs(S).max(initial=0)
    if not largest:
        return fallback.astype(S.dtype)
    M: Matrix = (S / largest).astype(np.float64, copy=False)
    share = rounding_share(S)
    Q = None if len(fixed) else _by_gram(M, fallback, max(SAFE_GRAM, len(S) * share**2))
    if Q is None:
        F: Matrix = fixed.astype(np.float64)
        if S.dtype != F.dtype:
            F = orthonormal(F)
        # Measured before the fixed rows are taken off: what remains of a row may be rounding alone.
        rounding = float(np.linalg.norm(M)) * share
        M = M - (M @ F.T) @ F
        Q = _by_svd(M, F, fallback.astype(np.float64, copy=False), rounding)
    return Q.astype(S.dtype, copy=False)


def rounding_share(S: Matrix) -> float:
    """Return which share of a matrix' norm is nothing but rounding.

    As in `numpy.linalg`, but no more than that of a few numbers of float32: rows of atoms that few
    samples use are as small beside others, and right.
    """
    return float(min(max(S.shape[-2:]) * np.finfo(S.dtype).eps, _FEW))


def orthonormal(Q: Matrix) -> Matrix:
    """Take a Newton-Schulz step: rows that are nearly orthonormal become so to rounding."""
    return (1.5 * np.eye(len(Q)) - 0.5 * (Q @ Q.T)) @ Q


def thin_svd(X: Matrix) -> tuple[Matrix, Matrix, Matrix]:
    """Return ``U, s, Vt`` with ``X = U * s @ Vt``."""
    try:
        return np.linalg.svd(X, full_matrices=False)
    except np.linalg.LinAlgError:  # of some finite matrices of low rank; the slower routine works
        U, s, Vt = svd(X, full_matrices=False, lapack_driver="gesvd")
        return U, s, Vt


def _by_gram(M: Matrix, fallback: Matrix, least: float) -> Matrix | None:
    """Return the polar factor by Gram matrices, None if one is too badly conditioned.

    A row of zeros, as of an atom that no sample uses, changes no other row of the factor.
    """
    used = M.any(axis=1)
    Q = _inverse_root(M[used], least)
    if Q is None or used.all():
        return Q
    factor = np.empty_like(M)
    factor[used], factor[~used] = Q, _in_complement(fallback[~used].astype(M.dtype), Q)
    return factor


def _inverse_root(M: Matrix, least: float = SAFE_GRAM) -> Matrix | None:
    """Return ``(M M')^(-1/2) M``, None if ``M M'`` is too badly conditioned."""
    squares, U = np.linalg.eigh(M @ M.T)
    if not len(squares) or squares[0] <= least * max(squares[-1], 1.0):
        return None
    # The Newton-Schulz step repairs what the squared condition cost.
    return orthonormal((U / np.sqrt(squares)) @ U.T @ M)


def _by_svd(M: Matrix, V: Matrix, fallback: Matrix, least: float) -> Matrix:
    """Return the polar factor of a matrix whose rows are orthogonal to those of ``V``.

    In place of singular values up to ``least`` comes ``fallback``.
    """
    U, s, Wt = thin_svd(M)
    known = s > least
    found = orthonormal(Wt[known] - (Wt[known] @ V.T) @ V)  # rounding is not orthogonal to V
    Q, rest = U[:, known] @ found, U[:, ~known]
    if rest.shape[1]:
        Q += rest @ _in_complement(rest.T @ fallback, np.vstack([V, found]))
    return orthonormal(Q)


def _in_complement(M: Matrix, V: Matrix) -> Matrix:
    """Return rows orthonormal and orthogonal to those of ``V``, as near as possible to ``M``."""
    M = M - (M @ V.T) @ V
    Q = _inverse_root(M)
    if Q is not None:
        return Q
    # Where too little of M is left, an orthonormal basis of the whole complement is needed.
    basis = np.linalg.svd(V, full_matrices=True)[2][len(V) :]
    U, _, Wt = thin_svd(M @ basis.T)
    filled: Matrix = U @ Wt @ basis
    return filled
