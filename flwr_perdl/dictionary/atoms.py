"""Atoms: unit norm, orthonormality, and the distances of PerMA's Definition 1.

======================================= ====================================================
paper (Liang et al., NeurIPS 2023)      here
======================================= ====================================================
``D`` (d x r), an atom is a column      ``D`` (n_atoms, n_features), an atom is a row
signed permutation ``Pi``               ``Alignment.indices`` and ``Alignment.signs``
``d_2(a, b)`` of two atoms              :func:`atom_distances`, ``min(|a - b|, |a + b|)``
``d_{1,2}``, eq. 3                      :func:`dictionary_distance`
======================================= ====================================================

Deviations: distances come from differences of atoms, never from ``sqrt(2 - 2|c|)``, whose floor
is 1.5e-8; ``sign(0) = 1``, also where only rounding makes it non-zero.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from flwr_perdl.core.arrays import row_products
from flwr_perdl.core.checks import Matrix, check_array, check_count
from flwr_perdl.dictionary.polar import SAFE_GRAM, orthonormal, thin_svd

#: Squared distances below this are recomputed from the differences of the atoms.
_CLOSE = 1e-2
#: Cosines up to this, of atoms in float32 too, are nothing but rounding.
_ORTHOGONAL = 1e-6
#: Squared norms this near to 1 are those of unit atoms.
_UNIT = 1e-5
#: Atoms with a larger cosine than this are copies of each other; clients refuse those above .99.
COPY = 0.98


def normalize_atoms(D: Matrix, fallback: Matrix | None = None) -> Matrix:
    """Scale every atom to unit norm.

    Parameters
    ----------
    D : ndarray of shape (n_atoms, n_features)
        Rows of any length.
    fallback : ndarray of shape (n_atoms, n_features) or None, default None
        Unit atoms to put where a row of ``D`` is zero.

    Returns
    -------
    ndarray of shape (n_atoms, n_features)

    Raises
    ------
    ValueError
        If a row is zero and there is no ``fallback``, or if its shape is another.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import normalize_atoms
    >>> normalize_atoms(np.array([[3.0, 4.0], [0.0, 2.0]]))
    array([[0.6, 0.8],
           [0. , 1. ]])
    """
    D = check_array("D", D)
    if fallback is not None:
        fallback = check_array("fallback", fallback, rows=len(D), columns=D.shape[1])
    D, norms = _measure_rows(D)
    zero = norms == 0
    if not zero.any():
        return D / norms
    if fallback is None:
        raise ValueError(f"D must have no zero row, got one at {zero.argmax()}.")
    return np.where(zero, fallback.astype(D.dtype, copy=False), D / np.where(zero, 1, norms))


def _measure_rows(D: Matrix) -> tuple[Matrix, Matrix]:
    """Return rows and their norms, (n_atoms, 1); rows whose squares are out of range are scaled."""
    with np.errstate(over="ignore", under="ignore"):
        squares = np.sum(D * D, axis=1, keepdims=True)
    info = np.finfo(D.dtype)
    tiny = float(info.smallest_normal) / float(info.eps)
    extreme = ~((squares > tiny) & (squares < 1 / tiny))
    if extreme.any() and D.shape[1]:
        peaks = np.abs(D).max(axis=1, keepdims=True)
        D = np.where(extreme & (peaks > 0), D / np.where(peaks > 0, peaks, 1), D)
        squares = np.sum(D * D, axis=1, keepdims=True)
    return D, np.sqrt(squares)


def unit_atoms(D: Matrix) -> tuple[Matrix, Matrix]:
    """Return the atoms at unit norm, and what their norms were, (n_atoms, 1).

    Rows that are unit up to rounding stay as they are, and so do zero rows: withheld atoms. Their
    norms are 1. Where there are no others, the atoms are ``D`` itself.
    """
    with np.errstate(over="ignore", under="ignore"):
        squares = row_products(D, D)[:, None]
    fine = (np.abs(squares - 1) <= _UNIT) | ~D.any(axis=1, keepdims=True)
    if not D.shape[1] or fine.all():
        return D, np.ones_like(squares)
    scaled, norms = _measure_rows(D)
    largest = np.abs(D).max(axis=1, keepdims=True)
    largest_scaled = np.abs(np.where(fine, 1, scaled)).max(axis=1, keepdims=True)
    atoms = np.where(fine, D, scaled / np.where(fine, 1, norms))
    return atoms, np.where(fine, 1, norms * (largest / largest_scaled))


def signs_of(cosines: Matrix) -> Matrix:
    """Return the signs of the cosines of two atoms, 1 for atoms that are orthogonal.

    Cosines as near to zero as ``_ORTHOGONAL`` are zeros up to rounding, which must not decide.
    """
    return 1 - 2 * (cosines < -_ORTHOGONAL).astype(cosines.dtype)


def principal_directions(X: Matrix, n_components: int) -> Matrix:
    """Return the first right singular vectors of ``X``, whose rows are not centered.

    Parameters
    ----------
    X : ndarray of shape (n_samples, n_features)
    n_components : int

    Returns
    -------
    ndarray of shape (n_components, n_features)
        Orthonormal rows; fewer if the rank of ``X`` is lower.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import principal_directions
    >>> np.abs(principal_directions(np.diag([1.0, 3.0, 2.0]), 2))
    array([[0., 1., 0.],
           [0., 0., 1.]])
    """
    X = check_array("X", X, min_rows=1)
    check_count("n_components", n_components, 0, X.shape[1])
    n, d = X.shape
    # Of fewer samples than features the Gram matrix is the smaller problem: (S S') u = w u gives
    # the direction S' u / sqrt(w). Small w would lose half of the digits.
    if 0 < n_components < n < d:
        S = X.astype(np.float64, copy=False)
        w, U = eigh(S @ S.T, subset_by_index=(n - n_components, n - 1))
        if w[0] > SAFE_GRAM * w[-1]:
            return orthonormal((U / np.sqrt(w)).T[::-1] @ S).astype(X.dtype)
    _, s, Vt = thin_svd(X)
    rank = int((s > s.max(initial=0) * max(X.shape) * np.finfo(X.dtype).eps).sum())
    return Vt[: min(rank, n_components)].copy()


def least_squares_atoms(gram: Matrix, moment: Matrix, current: Matrix) -> Matrix:
    """Solve ``gram @ D = moment`` for unit atoms, with ``gram = C.T @ C``, ``moment = C.T @ X``.

    What the equations leave open, such as an atom that no sample uses, stays as in ``current``.
    """
    # The equations of the used atoms alone: the others' rows and columns are zero.
    used = gram.any(axis=1)
    atoms, before = current.copy(), current[used]
    if used.any():
        step = symmetric_inverse(gram[np.ix_(used, used)]) @ (moment - gram @ current)[used]
        atoms[used] = normalize_atoms(before + step, before)
    return atoms


def symmetric_inverse(A: Matrix) -> Matrix:
    """Return the pseudo-inverse of a symmetric matrix.

    As `numpy.linalg.pinv` does, with eigenvalues below 1e-10 of the largest as zeros.
    """
    w, U = np.linalg.eigh(A)
    order = np.flip(np.argsort(np.abs(w)))
    w, U = w[order], np.take(U, order, axis=1)
    known = np.abs(w) > 1e-10 * np.abs(w[0])
    inverse: Matrix = U @ (np.where(known, 1 / np.where(known, w, 1), 0)[:, None] * U.T)
    return inverse


def descended_atoms(gram: Matrix, moment: Matrix, current: Matrix) -> Matrix:
    """Return the unit atoms after one update of online dictionary learning.

    Mairal, Bach, Ponce and Sapiro, "Online Dictionary Learning for Sparse Coding", ICML 2009:
    block-coordinate descent on ``gram = C.T @ C`` and ``moment = C.T @ X``, then new atoms in place
    of those that no sample uses.
    """
    return merge_atoms(gram, coordinate_atoms(gram, moment, current))


def coordinate_atoms(gram: Matrix, moment: Matrix, current: Matrix, n_sweeps: int = 5) -> Matrix:
    """Lower ``||X - C @ D||^2`` over unit atoms, one after the other.

    A step is exact: with the other atoms fixed, the best unit vector for atom ``j`` has the
    direction of ``sum_i c_ij (x_i - what the others make of it)``. An atom that no sample uses
    stays exactly as it is.
    """
    from flwr_perdl.dictionary import _kernels  # compiled: Numba is imported where it is needed

    used = np.flatnonzero(np.diagonal(gram) > 0)
    scale = np.maximum(*(np.abs(A).max(axis=1, initial=0) for A in (gram, moment)))
    scale = np.where(scale > 0, scale, 1)[:, None]  # an atom's row may have any length
    others, sums = (np.ascontiguousarray(A / scale) for A in (gram, moment))
    np.fill_diagonal(others, 0)
    atoms = np.array(current, sums.dtype, order="C")
    _kernels.descend_atoms(others, sums, used, n_sweeps, atoms)
    return atoms.astype(current.dtype, copy=False)


def merge_atoms(gram: Matrix, D: Matrix) -> Matrix:
    """Replace atoms that no sample uses, and copies, by sums of two that are used together.

    Samples that use two atoms together can have the normalized sum of both instead: the penalty on
    ``c`` and ``s * c`` is ``2 |c|``, and on the code of the sum ``|c|`` times its norm. The pairs
    for which this saves most, by ``gram``, are taken, each atom once. Without such a pair an unused
    atom stays, and a copy becomes a random direction, the same in every call: which of two equal
    atoms a sample uses would be decided by rounding. No rule looks at a sample.
    """
    cosines = D @ D.T
    copies = np.any(np.triu(np.abs(cosines) > COPY, 1), axis=0)  # of two the first stays
    good = ~copies & (np.diagonal(gram) > 0)
    if good.all():
        return D
    signs = np.where(gram < 0, -1, 1)
    lengths = np.sqrt(np.maximum(2 + 2 * signs * cosines, 0))
    savings = np.triu(np.abs(gram) * (2 - lengths), 1) * good * good[:, None]
    order = np.argsort(-savings, axis=None, kind="stable")[: np.count_nonzero(savings > 0)]
    atoms, free, spare = D.copy(), good.copy(), list(np.flatnonzero(~good))
    for i, j in zip(*np.unravel_index(order, gram.shape), strict=True):
        if not spare:
            break
        if not (free[i] and free[j]):
            continue
        merged = D[i] + signs[i, j] * D[j]  # longer than 0: neither is a copy of the other
        merged /= np.sqrt(np.sum(merged * merged))
        if np.abs(atoms[good] @ merged).max() <= COPY:
            atoms[spare[0]], good[spare.pop(0)] = merged, True
            free[[i, j]] = False
    if left := [j for j in spare if copies[j]]:
        atoms[left] = normalize_atoms(np.random.default_rng(0).standard_normal(D.shape))[left]
    return atoms


def atom_distances(A: Matrix, B: Matrix) -> Matrix:
    """Return ``min(|a - b|, |a + b|)`` for every atom ``a`` of ``A`` and ``b`` of ``B``.

    Small distances are exact up to rounding of the atoms, not of their products.

    Parameters
    ----------
    A : ndarray of shape (n_a, n_features)
    B : ndarray of shape (n_b, n_features)

    Returns
    -------
    ndarray of shape (n_a, n_b)
        float64.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary.atoms import atom_distances
    >>> atom_distances(np.eye(2), -np.eye(2)).round(3)  # signs do not matter
    array([[0.   , 1.414],
           [1.414, 0.   ]])
    """
    A = check_array("A", A, squares=True).astype(np.float64, copy=False)
    B = check_array("B", B, columns=A.shape[1], squares=True).astype(np.float64, copy=False)
    products = A @ B.T
    squares = row_products(A, A)[:, None] - 2 * np.abs(products) + row_products(B, B)
    row, column = np.nonzero(squares < _CLOSE)  # nearly equal numbers: their difference is exact
    most = 2**24 // max(A.shape[1], 1) + 1
    for at in range(0, len(row), most):
        i, j = row[at : at + most], column[at : at + most]
        nearer = signs_of(products[i, j])[:, None] * B[j]
        squares[i, j] = ((A[i] - nearer) ** 2).sum(axis=-1)
    distances: Matrix = np.sqrt(squares)
    return distances


def dictionary_distance(A: Matrix, B: Matrix) -> float:
    """Return the distance of two dictionaries up to order and signs of their atoms (eq. 3).

    The largest distance within a pair of atoms, minimized over all pairings. Lengths count, see
    `normalize_atoms`.

    Parameters
    ----------
    A : ndarray of shape (n_a, n_features)
        A dictionary; each of its atoms is paired with a different atom of ``B``.
    B : ndarray of shape (n_b, n_features)
        Another, ``n_b >= n_a``; Definition 1 has ``n_b = n_a``.

    Returns
    -------
    float

    Raises
    ------
    ValueError
        If a shape does not match.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import dictionary_distance
    >>> dictionary_distance(np.eye(3), -np.eye(3)[::-1])
    0.0
    """
    A = check_array("A", A, squares=True)
    B = check_array("B", B, columns=A.shape[1], squares=True)
    if len(A) > len(B):
        raise ValueError(f"A must not have more atoms than B, got {len(A)} and {len(B)}.")
    distances = atom_distances(A, B)
    if 0 in distances.shape:
        return 0.0
    chosen = B[_bottleneck_assignment(distances)]
    apart = A - signs_of(row_products(A, chosen))[:, None] * chosen
    return float(np.sqrt((apart**2).sum(axis=1)).max())


def _bottleneck_assignment(costs: Matrix) -> NDArray[np.intp]:
    """Columns for all rows with the least largest cost, and of these the least sum."""
    nearest: NDArray[np.intp] = costs.argmin(axis=1)
    if len(set(nearest.tolist())) == len(costs):  # every row has its least cost, in a column alone
        return nearest
    indices = linear_sum_assignment(costs)[1]
    high = costs[np.arange(len(costs)), indices].max()
    low = costs.min(axis=1).max()
    levels = np.unique(costs[(costs >= low) & (costs <= high)])

    def enough(level: float) -> bool:
        pairs = maximum_bipartite_matching(csr_array(costs <= level), perm_type="column")
        return bool((pairs >= 0).all())

    level = levels[bisect_left(levels, True, hi=len(levels) - 1, key=enough)]
    forbidden = 2 * len(costs) * levels[-1] + 1
    best: NDArray[np.intp] = linear_sum_assignment(np.where(costs <= level, costs, forbidden))[1]
    return best
