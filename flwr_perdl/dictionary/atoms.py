"""Atoms: unit norm, orthonormality, and the distances of PerMA's Definition 1.

======================================= ====================================================
paper (Liang et al., NeurIPS 2023)      here
======================================= ====================================================
``D`` (d x r), an atom is a column      ``D`` (n_atoms, n_features), an atom is a row
signed permutation ``Pi``               ``AtomMatch.indices`` and ``AtomMatch.signs``
``d_2(a, b)`` of two atoms              :func:`atom_distances`, ``min(|a - b|, |a + b|)``
``d_{1,2}``, eq. 3; ``d_2``, eq. 4      :func:`dictionary_distance`, norms "1,2" and "2"
``Polar(A) = U V'`` (Algorithm 4)       :func:`polar_factor`
======================================= ====================================================

Deviations: distances come from differences of atoms, never from ``sqrt(2 - 2|c|)``, whose floor
is 1.5e-8; the polar factor of a rank-deficient matrix, which the paper leaves open, is completed
as near as possible to a given dictionary; ``sign(0) = 1``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh, svd
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from flwr_perdl._checks import Matrix, check_array, check_choice, check_count

#: Squared distances below this are recomputed from the differences of the atoms.
_CLOSE = 1e-2
#: Least ratio of the Gram matrix' extreme eigenvalues at which it stands in for an SVD; right
#: there the factor is off by less than 1e-9, at 1e-4 by 1e-13.
_SAFE_GRAM = 1e-8
#: Least eigenvalue, relative to the norm, down to which products alone find inverse roots.
_PLAIN_GRAM = 1e-3
#: Eigenvalues of so many atoms' Gram matrix take no longer than products, called for one matrix.
_SMALL = 8
#: Numbers in the matrices whose polar factors are computed at once; half a megabyte.
_WINDOW = 2**16


class AtomMatch(NamedTuple):
    """Each atom's partner in another dictionary."""

    #: ``indices[j]``: the row of ``B`` that atom ``j`` of ``A`` is matched with.
    indices: NDArray[np.intp]
    #: ``signs[j]`` is 1 or -1: ``A[j]`` is near ``signs[j] * B[indices[j]]``.
    signs: Matrix
    #: The distances of the pairs.
    distances: Matrix


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
        If a row is zero and there is no ``fallback``.
    """
    D = check_array("D", D)
    norms = np.linalg.norm(D, axis=1, keepdims=True)
    zero = norms[:, 0] == 0
    if zero.any() and fallback is None:
        raise ValueError(f"D must have no zero row, got one at {int(np.flatnonzero(zero)[0])}.")
    unit = D / np.where(norms == 0, 1, norms)
    if fallback is not None:
        unit[zero] = fallback[zero]
    return unit


def signs_of(values: Matrix) -> Matrix:
    """Return the signs of ``values``, with ``sign(0) = 1``."""
    return np.where(values < 0, -1, 1).astype(values.dtype)


def thin_svd(X: Matrix) -> tuple[Matrix, Matrix, Matrix]:
    """Return ``U, s, Vt`` with ``X = U * s @ Vt``, also where the divide-and-conquer SVD gives up.

    LAPACK's fast routine does not converge on some finite matrices of low rank; its slow one does.
    """
    try:
        return np.linalg.svd(X, full_matrices=False)
    except np.linalg.LinAlgError:
        U, s, Vt = svd(X, full_matrices=False, lapack_driver="gesvd")
        return U, s, Vt


def principal_directions(X: Matrix, n_components: int) -> Matrix:
    """Return the first right singular vectors of ``X``, whose rows are not centred.

    Parameters
    ----------
    X : ndarray of shape (n_samples, n_features)
        Samples.
    n_components : int
        At most ``n_features``.

    Returns
    -------
    ndarray of shape (n_components, n_features)
        Orthonormal rows; fewer where the rank of ``X`` is less.

    Notes
    -----
    Of fewer samples than features the Gram matrix is the smaller problem, where the directions
    asked for are not too weak for it.
    """
    X = check_array("X", X, min_rows=1)
    check_count("n_components", n_components, 0, X.shape[1])
    n, d = X.shape
    if 0 < n_components < n < d:
        S = X.astype(np.float64, copy=False)
        w, U = eigh(S @ S.T, subset_by_index=(n - n_components, n - 1))
        if w[0] > _SAFE_GRAM * w[-1]:
            return _orthonormal((U / np.sqrt(w)).T[::-1] @ S).astype(X.dtype)
    _, s, Vt = thin_svd(X)
    rank = int((s > s[0] * max(X.shape) * np.finfo(X.dtype).eps).sum())
    return Vt[: min(rank, n_components)].copy()


def polar_factor(S: Matrix, fallback: Matrix) -> Matrix:
    """Return the matrix with orthonormal rows that is nearest to ``S``.

    With ``S = U diag(s) V'`` this is ``U V'``. Directions in which ``S`` is zero are filled in
    as near as possible to ``fallback``; if ``S`` is zero altogether, that is ``fallback``.

    Parameters
    ----------
    S : ndarray of shape (n_atoms, n_features)
        Any matrix that is not taller than wide.
    fallback : ndarray of shape (n_atoms, n_features)
        A dictionary with orthonormal rows.

    Returns
    -------
    ndarray of shape (n_atoms, n_features)
        Orthonormal rows, in the dtype of ``S``; computed in float64.

    Raises
    ------
    ValueError
        If the shapes differ or there are more rows than columns.

    Notes
    -----
    Where the Gram matrix is well conditioned a few products, else its eigenvalues, do the work of
    the SVD at a fraction of the time. The filled-in part minimises the distance to ``fallback``
    among all that make the rows orthonormal.
    """
    S = check_array("S", S)
    if S.shape[0] > S.shape[1]:
        raise ValueError(f"S must not have more rows than columns, got shape {S.shape}.")
    if fallback.shape != S.shape:
        raise ValueError(f"fallback must have S's shape {S.shape}, got {fallback.shape}.")
    if not S.any():
        return fallback.astype(S.dtype)
    M = (S / max(S.max(), -S.min())).astype(np.float64, copy=False)
    used = M.any(axis=1)
    V = _gram_polar(M if used.all() else M[used])
    if V is not None and used.all():
        Q = V
    elif V is not None:
        Q = np.empty_like(M)
        Q[used], Q[~used] = V, _polar_in_complement(fallback[~used].astype(np.float64), V)
    else:
        Q, V, rest = _polar_by_levels(M)
        if rest.shape[1]:
            Q += rest @ _polar_in_complement(rest.T @ fallback.astype(np.float64), V)
    return _orthonormal(Q).astype(S.dtype)


def polar_factors(S: Matrix, fallback: Matrix) -> Matrix:
    """Return :func:`polar_factor` of every matrix of a stack, the same bits.

    Parameters
    ----------
    S : ndarray of shape (n, n_atoms, n_features)
        Finite matrices.
    fallback : ndarray of shape (n, n_atoms, n_features)
        A dictionary with orthonormal rows for each.

    Returns
    -------
    ndarray of shape (n, n_atoms, n_features)
        Those of matrices with a zero row, or too badly conditioned for the Gram matrix, are
        computed one by one.
    """
    if len(S) == 1:
        return polar_factor(S[0], fallback[0])[None]
    factors, step = np.empty_like(S), max(1, _WINDOW // max(S[:1].size, 1))
    for at in range(0, len(S), step):
        _polar_window(S[at : at + step], fallback[at : at + step], factors[at : at + step])
    return factors


def _polar_window(S: Matrix, fallback: Matrix, factors: Matrix) -> None:
    """Write the polar factors of as many matrices as the processor's cache holds."""
    largest = np.abs(S).max(axis=(1, 2), keepdims=True)
    M = (S / np.where(largest == 0, 1, largest)).astype(np.float64, copy=False)
    roots, safe = _inverse_roots(M @ M.swapaxes(1, 2))
    factors[:] = _orthonormal(roots @ M)
    for i in np.flatnonzero(~safe):
        factors[i] = polar_factor(S[i], fallback[i])


def _orthonormal(Q: Matrix) -> Matrix:
    """Take a Newton-Schulz step: rows that are nearly orthonormal become so to rounding."""
    nearest: Matrix = (-0.5 * (Q @ Q.swapaxes(-1, -2))) @ Q
    nearest += 1.5 * Q
    return nearest


def _gram_polar(M: Matrix) -> Matrix | None:
    """Nearly the polar factor of ``M`` by its Gram matrix, None if that is too badly conditioned.

    What is left is a step of :func:`_orthonormal`.
    """
    roots, safe = _inverse_roots((M @ M.T)[None])
    return roots[0] @ M if safe[0] else None


def _inverse_roots(grams: Matrix) -> tuple[Matrix, NDArray[np.bool_]]:
    """Return the inverse square roots of Gram matrices, to eight digits, and which have one.

    Newton-Schulz steps take products alone, and half the time of eigenvalues, which serve matrices
    too small for that, and those that the steps do not bring to the identity.
    """
    n = grams.shape[1]
    if n <= _SMALL:
        return _inverse_roots_by_eigenvalues(grams)
    scale = np.sqrt(np.einsum("nij,nij->n", grams, grams))[:, None, None]
    scale = np.where(scale == 0, 1, scale)
    left, roots = grams / scale, 1 / np.sqrt(scale)
    if not (left.reshape(len(left), -1)[:, :: n + 1].min(axis=1) > _PLAIN_GRAM).any():
        return _inverse_roots_by_eigenvalues(grams)
    for stretch in _STRETCHES:  # q = 1.5 a I - 0.5 a^3 A, then A^(-1/2) <- A^(-1/2) q, A <- q A q
        q = (-0.5 * stretch**3) * left
        q.reshape(len(q), -1)[:, :: n + 1] += 1.5 * stretch
        roots = roots @ q if roots.shape == q.shape else roots * q
        left = q @ left @ q
    left.reshape(len(left), -1)[:, :: n + 1] -= 1
    safe = np.abs(left).max(axis=(1, 2)) < 1e-7
    if not safe.all():
        rest = np.flatnonzero(~safe)
        roots[rest], safe[rest] = _inverse_roots_by_eigenvalues(grams[rest])
    return roots, safe


def _inverse_roots_by_eigenvalues(grams: Matrix) -> tuple[Matrix, NDArray[np.bool_]]:
    w, U = np.linalg.eigh(grams)
    safe: NDArray[np.bool_] = w[:, 0] > _SAFE_GRAM * np.maximum(w[:, -1], 1)
    w = np.where(safe[:, None], w, 1)
    return (U / np.sqrt(w)[:, None]) @ U.swapaxes(1, 2), safe


def _stretches(least: float) -> tuple[float, ...]:
    """Return by how much to scale before each Newton-Schulz step.

    With eigenvalues of a Gram matrix in ``[least, 1]``, singular values ``s`` in ``[l, 1]``, a step
    ``1.5 a s - 0.5 (a s)^3`` leaves the narrowest range about 1 with ``a^2 = 3 / (1 + l + l^2)``
    (Chen and Chow, "A Stable Scaling of Newton-Schulz", 2014).
    """
    found, low = [], np.sqrt(least)
    while 1 - low > 1e-8:
        found.append(float(np.sqrt(3 / (1 + low + low**2))))
        low = 1.5 * found[-1] * low - 0.5 * (found[-1] * low) ** 3
    return tuple(found)


_STRETCHES = _stretches(_PLAIN_GRAM)


def _polar_by_levels(M: Matrix) -> tuple[Matrix, Matrix, Matrix]:
    """Polar factor of a badly conditioned matrix, its row space, and the left null space.

    The eigenvalues of a Gram matrix are good for some orders of magnitude of the singular values:
    three are taken, to ten digits.
    What lies below is taken out, ``rest' M``, and has a Gram matrix of its own, until nothing
    but rounding is left.
    """
    Q, V, rest, rows = np.zeros_like(M), np.empty((0, M.shape[1])), np.eye(len(M)), M
    least = np.linalg.norm(M) * max(M.shape) * np.finfo(M.dtype).eps
    while rest.shape[1]:
        w, U = np.linalg.eigh(rows @ rows.T)
        if w[-1] <= least**2:
            break
        known, directions = w > 1e-6 * w[-1], rest @ U
        found = (U[:, known] / np.sqrt(w[known])).T @ rows
        Q += directions[:, known] @ found
        V, rest = np.vstack([V, found]), directions[:, ~known]
        rows = rest.T @ M
        rows -= (rows @ V.T) @ V
    return Q, V, rest


def _polar_in_complement(M: Matrix, V: Matrix) -> Matrix:
    """Rows orthonormal and orthogonal to those of ``V``, as near as possible to ``M``."""
    M = M - (M @ V.T) @ V
    Q = _gram_polar(M)
    if Q is not None:
        return Q
    basis = np.linalg.svd(V, full_matrices=True)[2][len(V) :]
    U, _, Wt = thin_svd(M @ basis.T)
    filled: Matrix = U @ Wt @ basis
    return filled


def least_squares_atoms(gram: Matrix, moment: Matrix, current: Matrix) -> Matrix:
    """Solve ``gram @ D = moment`` for unit atoms, moving ``current`` no more than needed.

    Parameters
    ----------
    gram : ndarray of shape (n_atoms, n_atoms)
        ``C.T @ C``, or a sum of such.
    moment : ndarray of shape (n_atoms, n_features)
        ``C.T @ X``, or a sum of such.
    current : ndarray of shape (n_atoms, n_features)
        The dictionary to start from: what the equations leave open (an atom that no sample
        uses, a combination that none needs) stays as it is here, an unused atom exactly.

    Returns
    -------
    ndarray of shape (n_atoms, n_features)
        Unit atoms.
    """
    used = gram.any(axis=1)
    inverse = np.linalg.pinv(gram[np.ix_(used, used)], rcond=1e-10, hermitian=True)
    atoms = current.copy()
    step = inverse @ (moment - gram @ current)[used]
    atoms[used] = normalize_atoms((current[used] + step).astype(current.dtype), current[used])
    return atoms


def atom_distances(A: Matrix, B: Matrix) -> Matrix:
    """Return ``min(|a - b|, |a + b|)`` for every atom ``a`` of ``A`` and ``b`` of ``B``.

    Parameters
    ----------
    A : ndarray of shape (n_a, n_features)
        A dictionary.
    B : ndarray of shape (n_b, n_features)
        Another.

    Returns
    -------
    ndarray of shape (n_a, n_b)
        float64; small distances are exact to rounding of the atoms, not of their products.
    """
    A = check_array("A", A)
    return _distances(A, check_array("B", B, columns=A.shape[1]))


def _distances(A: Matrix, B: Matrix) -> Matrix:
    """Distances of the atoms of ``A`` and of ``B``."""
    A, B = A.astype(np.float64, copy=False), B.astype(np.float64, copy=False)
    products, squares = _squares(A, B)
    close = np.nonzero(squares < _CLOSE)
    most = 2**24 // max(A.shape[1], 1) + 1
    for begin in range(0, len(close[0]), most):
        row, column = (indices[begin : begin + most] for indices in close)
        signs = signs_of(products[row, column])
        difference = A[row] - signs[:, None] * B[column]
        squares[row, column] = (difference**2).sum(-1)
    distances: Matrix = np.sqrt(squares)
    return distances


def _squares(A: Matrix, B: Matrix) -> tuple[Matrix, Matrix]:
    """Products, and squared distances up to rounding, of atoms; ``B`` may be a stack."""
    products = A @ B.swapaxes(-1, -2)
    squares = np.abs(products)
    squares *= -2
    squares += np.einsum("ij,ij->i", A, A)[:, None]
    squares += np.einsum("...ij,...ij->...i", B, B)[..., None, :]
    return products, squares


def match_stack(A: Matrix, B: Matrix) -> tuple[NDArray[np.intp], Matrix]:
    """Return the indices and signs of :func:`match_atoms` for a stack of ``B``, the same bits.

    Where every atom's nearest is nobody else's, that is the best pairing; only where two want the
    same one is an assignment solved.

    Parameters
    ----------
    A : ndarray of shape (n_a, n_features)
        The atoms that choose.
    B : ndarray of shape (n, n_b, n_features)
        The dictionaries to choose from, ``n_b >= n_a``.

    Returns
    -------
    indices, signs : ndarray of shape (n, n_a)
    """
    products, squares = _squares(A.astype(np.float64, copy=False), B.astype(np.float64, copy=False))
    indices: NDArray[np.intp] = squares.argmin(axis=2)
    taken = np.sort(indices, axis=1)
    for i in np.flatnonzero((taken[:, 1:] == taken[:, :-1]).any(axis=1)):
        indices[i] = linear_sum_assignment(_distances(A, B[i]))[1]
    chosen = products[np.arange(len(B))[:, None], np.arange(len(A)), indices]
    return indices, signs_of(chosen).astype(np.result_type(A, B), copy=False)


def match_atoms(A: Matrix, B: Matrix) -> AtomMatch:
    """Give every atom of ``A`` its own atom of ``B``, with the least sum of distances.

    Parameters
    ----------
    A : ndarray of shape (n_a, n_features)
        The atoms that choose.
    B : ndarray of shape (n_b, n_features)
        The atoms to choose from, ``n_b >= n_a``.

    Returns
    -------
    AtomMatch
        Indices, signs and distances, each of shape (n_a,).

    Raises
    ------
    ValueError
        If ``A`` has more atoms than ``B``.
    """
    A, B = _fewer_and_more(A, B)
    return _match(A, B, match_stack(A, B[None])[0][0])


def dictionary_distance(A: Matrix, B: Matrix, norm: str = "1,2") -> float:
    """Return the distance of two dictionaries up to order and signs of their atoms.

    Parameters
    ----------
    A : ndarray of shape (n_a, n_features)
        A dictionary; each of its atoms takes an atom of ``B`` of its own.
    B : ndarray of shape (n_b, n_features)
        Another, ``n_b >= n_a``; Definition 1 has ``n_b = n_a``.
    norm : {"1,2", "2"}, default "1,2"
        "1,2": the largest distance within a pair, least over all ways to pair (eq. 3; exact, a
        bottleneck assignment). "2": the largest singular value of the difference, at the
        pairing that "1,2" chooses (of several, the one with the least sum of distances); the
        paper's eq. 4 minimises over pairings, which is out of reach, so this bounds it from
        above.

    Returns
    -------
    float

    Raises
    ------
    ValueError
        If ``A`` has more atoms than ``B`` or ``norm`` is neither.
    """
    check_choice("norm", norm, ("1,2", "2"))
    A, B = _fewer_and_more(A, B)
    distances = _distances(A, B)
    if not distances.size:
        return 0.0
    match = _match(A, B, _bottleneck_assignment(distances))
    if norm == "1,2":
        return float(match.distances.max())
    return float(np.linalg.norm(A - match.signs[:, None] * B[match.indices], 2))


def _fewer_and_more(A: Matrix, B: Matrix) -> tuple[Matrix, Matrix]:
    """Check two dictionaries, of which the first takes its atoms' partners from the second."""
    A = check_array("A", A)
    B = check_array("B", B, columns=A.shape[1])
    if len(A) > len(B):
        raise ValueError(f"A must not have more atoms than B, got {len(A)} and {len(B)}.")
    return A, B


def _match(A: Matrix, B: Matrix, indices: NDArray[np.intp]) -> AtomMatch:
    signs = signs_of(np.einsum("ij,ij->i", A, B[indices]))
    distances = np.linalg.norm(A - signs[:, None] * B[indices], axis=1)
    return AtomMatch(indices, signs, distances)


def _bottleneck_assignment(costs: Matrix) -> NDArray[np.intp]:
    """Columns for all rows with the least largest cost, and of these the least sum."""
    indices = linear_sum_assignment(costs)[1]
    high = costs[np.arange(len(costs)), indices].max()
    low = costs.min(axis=1).max()
    levels = np.unique(costs[(costs >= low) & (costs <= high)])
    first, last = 0, levels.size - 1
    while first < last:
        middle = (first + last) // 2
        allowed = csr_array(costs <= levels[middle])
        if (maximum_bipartite_matching(allowed, perm_type="column") >= 0).all():
            last = middle
        else:
            first = middle + 1
    forbidden = 2 * len(costs) * levels[-1] + 1
    best: NDArray[np.intp] = linear_sum_assignment(
        np.where(costs <= levels[first], costs, forbidden)
    )[1]
    return best
