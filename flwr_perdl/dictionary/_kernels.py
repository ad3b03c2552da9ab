"""The inner loops of sparse coding, compiled: one sample after the other.

With the Gram matrix ``D @ D.T`` of the atoms, what a sample ``x`` still has to do with them follows
from its products ``D @ x`` alone; no loop here runs over features. The functions of
:mod:`flwr_perdl.dictionary.coding` check the arguments, bring all arrays to one dtype, and share
blocks of samples among threads.
"""

from __future__ import annotations

import numpy as np

from flwr_perdl._checks import Matrix
from flwr_perdl._compiled import compiled


@compiled
def pursue(
    products: Matrix,
    peaks: Matrix,
    gram: Matrix,
    k: int,
    level: float,
    by_residual: bool,
    tiny: float,
    C: Matrix,
) -> None:
    """Write the codes of orthogonal matching pursuit to ``C``.

    A sample's steps are those of a Cholesky factorization of the Gram matrix that chooses its
    pivots: ``basis[s]`` holds the products of all atoms with the ``s``-th orthonormal direction of
    the atoms taken, ``factor`` is the triangle that leads from these directions to the atoms, and
    ``rest`` the products of all atoms with what is left of the sample.

    Parameters
    ----------
    products : ndarray of shape (n_samples, n_atoms)
        ``X @ D.T``, of unit atoms.
    peaks : ndarray of shape (n_samples,)
        The samples' largest magnitudes: samples may be orthogonal to all atoms but for rounding.
    gram : ndarray of shape (n_atoms, n_atoms)
        ``D @ D.T``.
    k : int
        Steps per sample, at most.
    level : float
        No atom is taken whose product with what is left is below this.
    by_residual : bool
        Whether the atom is taken after which least is left, or the one with the largest product.
    tiny : float
        What counts as rounding.
    C : ndarray of shape (n_samples, n_atoms)
        Zeros.
    """
    n, r = products.shape
    basis = np.empty((k, r), gram.dtype)
    factor = np.empty((k, k), gram.dtype)
    along = np.empty(k, gram.dtype)
    taken = np.empty(k, np.intp)
    rest, left, weight, score = (
        np.empty(r, gram.dtype),
        np.empty(r, gram.dtype),
        np.empty(r, gram.dtype),
        np.empty(r, gram.dtype),
    )
    for i in range(n):
        peak = peaks[i]
        for j in range(r):
            rest[j] = products[i, j]
            peak = max(peak, abs(rest[j]))
            left[j] = gram[j, j]  # squared norms of the atoms beside the directions
            weight[j] = 1  # 1 / sqrt(left) if `by_residual`; 0 of what is taken
        s = 0
        for _ in range(k):
            for j in range(r):
                score[j] = weight[j] * abs(rest[j])
            best = 0.0
            for j in range(r):
                if score[j] > best:
                    best = score[j]
            new = 0
            while score[new] < (1 - tiny) * best:
                new += 1
            product = abs(rest[new])
            if product <= tiny * peak or product < level:
                break
            weight[new] = 0
            for t in range(s):
                factor[t, s] = basis[t, new]
            square = gram[new, new]
            for t in range(s):
                square -= factor[t, s] ** 2
            if square <= tiny:  # the atoms taken span it
                continue
            pivot = np.sqrt(square)
            taken[s] = new
            factor[s, s] = pivot
            along[s] = rest[new] / pivot
            for j in range(r):
                basis[s, j] = gram[new, j]
            for t in range(s):
                for j in range(r):
                    basis[s, j] -= factor[t, s] * basis[t, j]
            for j in range(r):
                basis[s, j] /= pivot
                rest[j] -= along[s] * basis[s, j]
            if by_residual:
                for j in range(r):
                    left[j] -= basis[s, j] ** 2
                    if weight[j] > 0:
                        weight[j] = 1 / np.sqrt(left[j]) if left[j] > tiny else 0
            s += 1
        for t in range(s - 1, -1, -1):
            code = along[t]
            for u in range(t + 1, s):
                code -= factor[t, u] * C[i, taken[u]]
            C[i, taken[t]] = code / factor[t, t]
