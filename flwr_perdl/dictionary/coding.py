"""Sparse coding: codes ``C`` with ``X ≈ C @ D``.

======================================= ====================================================
paper (Liang et al., NeurIPS 2023)      here
======================================= ====================================================
data ``Y`` (d x n), codes ``X`` (r x n) ``X`` (n_samples, n_features), ``C`` (n_samples, n_atoms)
``HT_zeta(D' Y)`` (Algorithms 4 and 5)  ``hard_threshold(X @ D.T, zeta)``
"top k" of A.2                          :func:`omp`, with atoms that are orthonormal
======================================= ====================================================

The lasso (:func:`lasso`; for orthonormal atoms :func:`soft_threshold` of ``X @ D.T``), FOCUSS
(:func:`focuss`), which penalizes nonzero codes less than the lasso, and nonnegative least squares
(:func:`nonnegative_from_gram`), which has no penalty, are not in the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from flwr_perdl.core.arrays import has_missing, observed, row_norms, squared_norm
from flwr_perdl.core.checks import (
    Matrix,
    check_array,
    check_choice,
    check_count,
    check_magnitude,
    check_real,
)
from flwr_perdl.core.threads import in_threads, n_kernel_threads
from flwr_perdl.dictionary.atoms import unit_atoms

_Result = TypeVar("_Result")
#: How :func:`omp` chooses an atom.
Selection = Literal["correlation", "residual"]

#: The largest share of a sample's norm that counts as rounding.
_FEW = 1e-4
#: Products of samples and atoms that a thread holds at once: they stay in its cache.
_BLOCK = 2**16
#: Numbers held at once by :func:`focuss`.
_WORKSPACE = 2**24
#: Its most iterations.
_REWEIGHTINGS = 200
#: Exchanges of many variables in a row that :func:`nonnegative_from_gram` allows without gain.
_PATIENCE = 3
#: Exchanges in all that it makes; where the atoms are not nearly dependent a dozen will do.
_EXCHANGES = 200


class Lasso(NamedTuple):
    """Result of :func:`lasso`.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import lasso
    >>> found = lasso(np.array([[2.0, 0.5]]), np.eye(2), alpha=1.0)
    >>> found.codes.round(6) + 0.0, found.converged
    (array([[1., 0.]]), True)
    """

    #: Codes, (n_samples, n_atoms).
    codes: Matrix
    #: Sweeps over the active atoms of the sample that took most.
    n_iter: int
    #: The largest duality gap of a sample, relative to the objective of zeros.
    gap: float
    #: Whether ``gap`` is within the tolerance.
    converged: bool


def hard_threshold(A: Matrix, threshold: float) -> Matrix:
    """Keep the entries with ``|a| >= threshold``, set the others to zero.

    Parameters
    ----------
    A : ndarray
    threshold : float
        Not negative.

    Returns
    -------
    ndarray

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import hard_threshold
    >>> hard_threshold(np.array([[0.2, -1.0, 3.0]]), 1.0)
    array([[ 0., -1.,  3.]])
    """
    A, threshold = _check_threshold(A, threshold)
    return A * (np.abs(A) >= threshold)


def soft_threshold(A: Matrix, threshold: float) -> Matrix:
    """Move every entry toward zero by ``threshold``, and no further than zero.

    Parameters
    ----------
    A : ndarray
    threshold : float
        Not negative.

    Returns
    -------
    ndarray

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import soft_threshold
    >>> soft_threshold(np.array([[0.5, -2.0, 3.0]]), 1.0)
    array([[ 0., -1.,  2.]])
    """
    A, threshold = _check_threshold(A, threshold)
    return A - np.clip(A, -threshold, threshold)


def _check_threshold(A: Matrix, threshold: float) -> tuple[Matrix, float]:
    """Return an array of 1 dimension or more and its threshold, at most the largest number."""
    A = check_array("A", A, ndim=max(getattr(A, "ndim", 2), 1))
    return A, min(check_real("threshold", threshold, 0), float(np.finfo(A.dtype).max))


def by_direction(code: Callable[[Matrix], Matrix], D: Matrix) -> Matrix:
    """Return the codes of atoms of any length: those of unit atoms, divided by the lengths."""
    unit, lengths = unit_atoms(D)
    C = code(unit)
    return C if unit is D else C / lengths.T


def omp(X: Matrix, D: Matrix, n_nonzero: int, *, selection: Selection = "correlation") -> Matrix:
    """Code by orthogonal matching pursuit (OMP).

    A sample takes one atom after another (the first of those equal up to rounding), and refits all
    of its atoms by least squares.

    Parameters
    ----------
    X : ndarray of shape (n_samples, n_features)
        NaN is a missing entry: sample and atoms are restricted to the others.
    D : ndarray of shape (n_atoms, n_features)
        Atoms. Their lengths do not matter: codes are those of unit atoms divided by them.
    n_nonzero : int
        Largest number of atoms per sample; a sample that is fitted exactly takes no more.
    selection : {"correlation", "residual"}, default "correlation"
        Take the atom that correlates most with the residual, or the one that minimizes the next
        residual (orthogonal least squares: Chen, Billings and Luo 1989), which takes as long and
        often fits better.

    Returns
    -------
    ndarray of shape (n_samples, n_atoms)

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import omp
    >>> omp(np.array([[3.0, 1.0]]), np.eye(2), 1)
    array([[3., 0.]])
    """
    check_choice("selection", selection, get_args(Selection))
    X = check_array("X", X, missing=True)
    D = check_array("D", D, columns=X.shape[1], squares=True)
    k = min(check_count("n_nonzero", n_nonzero), *D.shape)
    return by_direction(lambda unit: pursue(X, unit, k, selection=selection), D)


def pursue(
    X: Matrix, D: Matrix, k: int, level: float = 0.0, selection: Selection = "correlation"
) -> Matrix:
    """Return :func:`omp`'s codes of checked samples with unit atoms, ``k`` of them at most.

    A sample takes no atom whose product with what is left of it is below ``level``: for orthonormal
    atoms these are the codes of :func:`hard_threshold`, of as many atoms as it leaves.
    """
    (n, d), r = X.shape, len(D)
    dtype, by_residual = np.result_type(X, D), selection == "residual"
    eps = float(np.finfo(dtype).eps)
    # What an atom leaves of the sample is a ratio: both of its terms need digits.
    tiny, least = 100 * eps, eps**0.5 if by_residual else 100 * eps
    X, D = X.astype(dtype, copy=False), D.astype(dtype, copy=False)
    C: Matrix = np.zeros((n, r), dtype=dtype)
    if not k or not n:
        return C
    from flwr_perdl.dictionary import _kernels  # compiled: Numba is imported where it is needed

    def code(X: Matrix, D: Matrix, C: Matrix) -> None:
        lengths = None
        if D.shape[1] < d:  # parts of unit atoms
            lengths = row_norms(D)[:, None]
            lengths[lengths == 0] = 1
            D = D / lengths
        gram, most = D @ D.T, min(k, D.shape[1])

        def block(rows: slice) -> None:
            peaks = np.maximum(X[rows].max(axis=1, initial=0), -X[rows].min(axis=1, initial=0))
            given = X[rows] @ D.T, peaks, gram, most, level, by_residual, tiny, least
            _kernels.matching_pursuit(*given, C[rows])

        _in_threads(block, len(X), r)
        if lengths is not None:
            C /= lengths.T

    _each_observed(code, X, D, C)
    return C


def _each_observed(
    code: Callable[[Matrix, Matrix, Matrix], _Result], X: Matrix, D: Matrix, C: Matrix
) -> list[_Result]:
    """Have ``code(X, D, C)`` write codes to ``C``, for all samples, and return what it returns.

    Those with missing entries are coded together with all that miss the same, by what is left of
    samples and atoms without these.
    """
    if not has_missing(X):
        return [code(X, D, C)]
    found = []
    for seen, rows in _alike(~np.isnan(X)):
        own = C[rows]
        found.append(code(X[rows].take(seen, axis=1), D.take(seen, axis=1), own))
        C[rows] = own
    return found


def _in_threads(code: Callable[[slice], None], n: int, r: int) -> None:
    """Code all samples in blocks; which one a thread takes changes no bit of the codes."""
    size = max(1, _BLOCK // max(1, r))
    blocks = [slice(at, min(at + size, n)) for at in range(0, n, size)]
    if len(blocks) == 1:
        code(blocks[0])
    else:
        for _ in in_threads(code, blocks, n=n_kernel_threads()):
            pass


def lasso(
    X: Matrix,
    D: Matrix,
    alpha: float,
    *,
    start: Matrix | None = None,
    tol: float = 1e-8,
    max_iter: int = 1000,
) -> Lasso:
    """Minimise ``0.5 * ||x - c @ D||^2 + alpha * ||c||_1`` for every sample ``x``.

    On most data the codes are exact up to rounding.

    Parameters
    ----------
    X : ndarray of shape (n_samples, n_features)
        NaN is a missing entry, which does not count in ``||x - c @ D||``.
    D : ndarray of shape (n_atoms, n_features)
    alpha : float
        Weight of the penalty, positive: ``n_features`` times that of scikit-learn's ``Lasso``.
    start : ndarray of shape (n_samples, n_atoms), optional
        Codes to start from, such as those of nearly the same atoms; by default zeros.
    tol : float, default 1e-8
        Duality gap, the most that the objective can still lose, that is small enough, relative to
        the objective of zeros, ``0.5 * ||x||^2``.
    max_iter : int, default 1000
        Largest number of sweeps over a sample's active atoms.

    Returns
    -------
    Lasso

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import lasso
    >>> lasso(np.array([[3.0, 1.0]]), np.eye(2), 2.0).codes
    array([[1., 0.]])
    """
    X = check_array("X", X, squares=True, missing=True)
    D = check_array("D", D, columns=X.shape[1], squares=True)
    alpha = check_real("alpha", alpha, 0, open_low=True)
    tol = max(check_real("tol", tol, 0), 100 * float(np.finfo(np.float64).eps))
    max_iter = min(check_count("max_iter", max_iter), 2**31)  # the kernel counts no further
    if start is not None:
        start = check_array("start", start, rows=len(X), columns=D.shape[0], squares=True)
    from flwr_perdl.dictionary import _kernels  # compiled: Numba is imported where it is needed

    n, r = len(X), len(D)
    dtype, wide = np.result_type(X, D), D.astype(np.float64, copy=False)
    C = np.zeros((n, r), dtype) if start is None else np.array(start, dtype)

    def code(X: Matrix, D: Matrix, C: Matrix) -> tuple[int, float]:
        gram, sweeps, gaps = D @ D.T, np.zeros(len(X), np.intp), np.zeros(len(X))

        def block(rows: slice) -> None:
            squares = np.einsum("ij,ij->i", X[rows], X[rows], dtype=np.float64)
            # In single precision the gap would be wrong.
            products = X[rows].astype(np.float64, copy=False) @ D.T
            given = products, squares, gram, alpha, tol, max_iter
            _kernels.coordinate_descent(*given, C[rows], sweeps[rows], gaps[rows])

        _in_threads(block, len(X), r)
        return int(sweeps.max(initial=0)), float(gaps.max(initial=0))

    found = _each_observed(code, X.astype(dtype, copy=False), wide, C)
    n_iter, gap = (max(values) for values in zip((0, 0.0), *found, strict=True))
    return Lasso(C, n_iter, gap, gap <= tol)


def focuss(X: Matrix, D: Matrix, alpha: float, *, tol: float) -> Matrix:
    """Lower ``0.5 * ||x - c @ D||^2 + 2 * alpha * sum sqrt(|c|)`` for every sample ``x``.

    Regularised FOCUSS (Gorodnitsky and Rao 1997; Rao et al. 2003): every iteration is a ridge
    regression, its penalty on a code divided by ``|c|^1.5`` of the iteration before, and lowers the
    objective, to one of many local minima. It starts as if all codes of a sample were as large as
    its largest product with an atom.

    ``alpha`` is in units of ``X^1.5``: for samples ``s`` times as large, ``s^1.5`` times as much
    gives the same codes, ``s`` times as large. A sample is done when no code changes by more than
    ``tol`` times its largest one; codes smaller than that end up as zeros.
    """
    X = check_array("X", X, squares=True)
    D = check_array("D", D, columns=X.shape[1])
    C = np.zeros((len(X), len(D)), dtype=np.result_type(X, D))
    if C.size:
        held = len(D) * (X.shape[1] + len(D)) if len(D) < X.shape[1] else X.shape[1] ** 2
        for rows in np.array_split(np.arange(len(X)), len(X) * held // _WORKSPACE + 1):
            C[rows] = _code_block(X[rows], D, alpha, tol)
    return C


def _code_block(X: Matrix, D: Matrix, alpha: float, tol: float) -> Matrix:
    """Return :func:`focuss`'s codes of some samples."""
    peaks = np.abs(X @ D.T).max(axis=1, keepdims=True) / (np.square(D).sum(axis=1).max() or 1)
    C = _ridge(X, D, np.repeat(peaks**1.5, len(D), axis=1), alpha)
    todo = np.arange(len(X))
    for _ in range(_REWEIGHTINGS):
        if not len(todo):
            break
        old = C[todo]
        new = _ridge(X[todo], D, np.abs(old) ** 1.5, alpha)
        largest = np.abs(new).max(axis=1)
        changes = np.abs(new - old).max(axis=1) / np.where(largest > 0, largest, 1)
        C[todo] = new
        todo = todo[changes > tol]
    C[np.abs(C) <= tol * np.abs(C).max(axis=1, keepdims=True)] = 0
    return C


def _ridge(X: Matrix, D: Matrix, weights: Matrix, alpha: float) -> Matrix:
    """Minimise ``||x - c @ D||^2 + alpha * sum c^2 / weight``, with weights per sample and atom."""
    r, d = D.shape
    if r < d:  # c = s * ((s D) (s D)' + alpha I)^-1 (s D) x with s^2 = weights
        scale = np.sqrt(weights)
        gram = scale[:, :, None] * (D @ D.T) * scale[:, None] + alpha * np.eye(r, dtype=D.dtype)
        small = np.linalg.solve(gram, (scale * (X @ D.T))[..., None])[..., 0]
        return np.asarray(scale * small)
    outer = (D[:, :, None] * D[:, None, :]).reshape(r, d * d)
    system = (weights @ outer).reshape(-1, d, d) + alpha * np.eye(d, dtype=D.dtype)
    return np.asarray(weights * (np.linalg.solve(system, X[..., None])[..., 0] @ D.T))


def nonnegative_from_gram(products: Matrix, gram: Matrix) -> Matrix:
    """Minimize ``||x - c @ D||`` over ``c >= 0``, given ``X @ D.T`` and ``D @ D.T``.

    Block principal pivoting (Kim and Park 2011): guess which codes are positive, solve for them,
    move every code that turns out on the wrong side, all samples with the same guess at once.
    The result is exact up to rounding. Of atoms that are too nearly dependent for that, SciPy's
    ``nnls`` finds the codes, sample by sample.
    """
    n, r = products.shape
    C = np.zeros_like(products)
    if not n or not r:
        return C
    try:
        todo = _exchange(C, products, gram)
    except np.linalg.LinAlgError:
        todo = np.arange(n)
    if len(todo):  # |c L - b|^2 with L L' = gram and b L' = products, but for what is rounding
        w, U = np.linalg.eigh(gram.astype(np.float64))
        known = w > r * np.finfo(gram.dtype).eps * w[-1]
        L, b = np.sqrt(w[known]) * U[:, known], products[todo] @ (U[:, known] / np.sqrt(w[known]))
        C[todo] = [nnls(L.T, one)[0] for one in b]
    return np.maximum(C, 0)


def _exchange(C: Matrix, products: Matrix, gram: Matrix) -> NDArray[np.intp]:
    """Write codes to ``C``, and return which samples' are not found after many exchanges."""
    n, r = products.shape
    slack = 100 * np.finfo(products.dtype).eps * np.abs(products).max(axis=1, keepdims=True)
    positive = products > 0
    fewest, patience = np.full(n, r + 1), np.full(n, _PATIENCE)
    todo = np.arange(n)
    for _ in range(_EXCHANGES):
        for own, rows in _alike(positive[todo]):
            at = todo[rows]
            C[at] = 0
            C[np.ix_(at, own)] = np.linalg.solve(gram[np.ix_(own, own)], products[at][:, own].T).T
        slope = C[todo] @ gram - products[todo]
        wrong = np.where(positive[todo], C[todo], slope) < -slack[todo]
        count = wrong.sum(axis=1)
        todo, wrong, count = todo[count > 0], wrong[count > 0], count[count > 0]
        if not len(todo):
            break
        gained = count < fewest[todo]
        fewest[todo] = np.minimum(count, fewest[todo])
        patience[todo] = np.where(gained, _PATIENCE, patience[todo] - 1)
        # Out of patience, only the last wrong code moves: slow, but sure to end.
        last = r - 1 - wrong[:, ::-1].argmax(axis=1)
        moving = wrong & ((patience[todo] >= 0)[:, None] | (np.arange(r) == last[:, None]))
        positive[todo] ^= moving
    return todo


def _alike(sets: NDArray[np.bool_]) -> Iterator[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """Yield every different row, as indices, with the numbers of the rows that are the same."""
    different, of, counts = np.unique(sets, axis=0, return_inverse=True, return_counts=True)
    rows = np.split(np.argsort(of.ravel(), kind="stable"), np.cumsum(counts)[:-1])
    for members, own in zip(different, rows, strict=True):
        yield np.flatnonzero(members), own


def sparse_code(
    X: Matrix,
    D: Matrix,
    *,
    n_nonzero: int | None = None,
    threshold: float | None = None,
    alpha: float | None = None,
) -> Matrix:
    """Code ``X`` with the atoms of ``D``, by exactly one of three methods.

    Parameters
    ----------
    X : ndarray of shape (n_samples, n_features)
        NaN is a missing entry, which codes ignore (not with ``threshold``). A sample without
        observed entries has a code of zeros.
    D : ndarray of shape (n_atoms, n_features)
        Atoms; their lengths matter only to the lasso.
    n_nonzero : int, optional
        Orthogonal matching pursuit (OMP) with this many atoms per sample, see :func:`omp`.
    threshold : float, optional
        Hard thresholding of ``X @ D.T`` (Algorithms 4 and 5), with unit atoms.
    alpha : float, optional
        The lasso with this penalty, see :func:`lasso`.

    Returns
    -------
    ndarray of shape (n_samples, n_atoms)

    Raises
    ------
    ValueError
        If not exactly one of ``n_nonzero``, ``threshold`` and ``alpha`` is given.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import sparse_code
    >>> sparse_code(np.array([[3.0, 1.0]]), np.eye(2), n_nonzero=1)
    array([[3., 0.]])
    """
    given = sum(option is not None for option in (n_nonzero, threshold, alpha))
    if given != 1:
        raise ValueError(f"one of n_nonzero, threshold and alpha must be given, got {given}.")
    if n_nonzero is not None:
        return omp(X, D, n_nonzero)
    if alpha is not None:
        return lasso(X, D, alpha).codes
    X = check_array("X", X, missing=True)
    if has_missing(X):
        raise ValueError(
            f"X must have no NaN for threshold, got {np.isnan(X).sum()}: give n_nonzero or alpha."
        )
    D = check_array("D", D, columns=X.shape[1], squares=True)
    least = check_real("threshold", threshold, 0)
    return by_direction(lambda unit: hard_threshold(X @ unit.T, least), D)


def fill_missing(X: Matrix, C: Matrix, D: Matrix) -> Matrix:
    """Return samples whose missing entries, NaN, are those of their reconstruction ``C @ D``.

    ``||X - C @ D'||^2`` of completed samples is, for every dictionary ``D'``, at least that of the
    observed entries, and equal to it for ``D``: an update that lowers it lowers both.
    """
    return np.where(np.isnan(X), C @ D, X) if has_missing(X) else X


def remainder(X: Matrix, fitted: Matrix) -> Matrix:
    """Return ``X - fitted``, with zeros for samples that are fitted up to rounding.

    Rounding errors have directions of their own, mostly those of the samples: an atom learned from
    them is meaningless, or duplicates another.

    Parameters
    ----------
    X, fitted : ndarray of shape (n_samples, n_features)

    Returns
    -------
    ndarray of shape (n_samples, n_features)

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import remainder
    >>> remainder(np.array([[0.1, 1.0], [0.1, 2.0]]), np.array([[0.1, 1 - 1e-16], [0.0, 2.0]]))
    array([[0. , 0. ],
           [0.1, 0. ]])
    """
    X = check_array("X", X, missing=True)
    fitted = check_array("fitted", fitted, rows=len(X), columns=X.shape[1], floor=np.inf)
    check_magnitude("X", observed(X), floor=np.inf)
    rest, limits = X - fitted, np.finfo(X.dtype)
    rounding = min(X.shape[1] * float(limits.eps), _FEW)
    rest[row_norms(observed(rest)) <= rounding * row_norms(observed(X))] = 0
    if squared_norm(observed(rest)) < limits.smallest_normal / limits.eps:
        rest[:] = 0  # too small to learn from
    return rest


def reconstruct(C: Matrix, D: Matrix) -> Matrix:
    """Return ``C @ D``, the samples of these codes.

    Parameters
    ----------
    C : ndarray of shape (n_samples, n_atoms)
    D : ndarray of shape (n_atoms, n_features)

    Returns
    -------
    ndarray of shape (n_samples, n_features)

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import reconstruct
    >>> reconstruct(np.array([[2.0, 0.0]]), np.eye(2))
    array([[2., 0.]])
    """
    D = check_array("D", D)
    return check_array("C", C, columns=D.shape[0]) @ D
