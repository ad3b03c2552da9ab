"""What the server makes of the clients' contributions (Algorithm 1 line 13, and better).

======================================= ====================================================
paper (Liang et al., NeurIPS 2023)      here
======================================= ====================================================
``D_i^g``                               ``stack[i]`` of :func:`aggregate_atoms`
``D^g = (1/N) sum_i D_i^g`` (line 13)   ``method="mean"``
``(Y - D^l X^l) (X^g)'`` (not there)    ``stack[i]`` of :func:`aggregate_statistics`
======================================= ====================================================

Deviations: averages are not unit vectors; they are brought to the nearest orthonormal rows for
orthogonal learners, and to unit norm for others. Statistics are not in the paper: instead of its
updated atoms a client sends what the update is computed from, as many numbers, and the server
solves for the atoms once, from all clients' sums. The truth is a fixed point of this, clients
count by what they know, and a client that is wrong altogether is left out.

A zero row in a stack means that the client withholds this atom.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl._arrays import row_products, squared_norm
from flwr_perdl._checks import Matrix, check_array, check_choice, check_count, check_real
from flwr_perdl._parallel import in_threads
from flwr_perdl._robust import DEEDS, average_of, far, geometric_median, reach, shortening
from flwr_perdl.dictionary.atoms import (
    coordinate_atoms,
    descended_atoms,
    normalize_atoms,
    unit_atoms,
)
from flwr_perdl.dictionary.learners import atom_support, dominated, made_by, made_by_one
from flwr_perdl.dictionary.polar import polar_factors

METHODS = ("mean", "weighted", "median", "geometric-median", "trimmed")
#: A second moment's least eigenvalue may be this much of the largest below zero.
_NOISE = 0.1
#: Numbers of clients' statistics that are solved at once: a megabyte.
_PIECE = 2**17


class Aggregation(NamedTuple):
    """The new global atoms, whose contributions they are made of, and which of them stood out.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import aggregate_atoms
    >>> stack = np.array([[[1.0, 0.0]], [[1.0, 0.0]], [[0.0, 1.0]]])
    >>> found = aggregate_atoms(stack, stack[0], method="median", orthogonal=True)
    >>> found.global_atoms, found.kept
    (array([[1., 0.]]), array([ True,  True,  True]))
    """

    #: Unit atoms (orthonormal for orthogonal learners), (n_global, n_features).
    global_atoms: Matrix
    #: Per client: whether it sent anything that was used.
    kept: NDArray[np.bool_]
    #: By what was done to them ("left out", "clipped", … as in ``_robust.DEEDS``): to which share
    #: of each client's contribution, (n_clients,).
    odd: dict[str, Matrix]


def aggregate_atoms(
    stack: Matrix,
    current: Matrix,
    *,
    method: str = "mean",
    weights: Matrix | None = None,
    orthogonal: bool,
) -> Aggregation:
    """Average the clients' global atoms.

    Parameters
    ----------
    stack : ndarray of shape (n_clients, n_global, n_features)
        Aligned global atoms, which count as directions, whatever their lengths; zero rows are
        withheld.
    current : ndarray of shape (n_global, n_features)
        The current global atoms; one that all clients withhold stays as it is.
    method : {"mean", "weighted", "median", "geometric-median", "trimmed"}, default "mean"
        "mean": the paper's. "weighted": by ``weights``. "median": per coordinate. "trimmed":
        mean per coordinate without a fifth of the clients at either end.
    weights : ndarray of shape (n_clients,), optional
        Positive; needed by "weighted", and used by no other method.
    orthogonal : bool
        Whether to return orthonormal atoms.

    Returns
    -------
    Aggregation
        Global atoms, and which clients sent at least one atom.

    Raises
    ------
    ValueError
        If shapes do not fit, ``method`` is unknown, or weights are missing or not positive.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import aggregate_atoms
    >>> stack = np.array([[[1.0, 0.0]], [[0.0, 1.0]]])  # one atom of each of two clients
    >>> found = aggregate_atoms(stack, np.array([[1.0, 0.0]]), orthogonal=True)
    >>> found.global_atoms.round(3)
    array([[0.707, 0.707]])
    """
    check_choice("method", method, METHODS)
    current, _ = unit_atoms(check_array("current", current))
    stack = check_array("stack", stack, ndim=3, columns=current.shape[1])
    check_count("rows of stack", stack.shape[1], len(current), len(current))
    flat = stack.reshape(len(stack) * len(current), current.shape[1])
    stack = unit_atoms(flat)[0].reshape(stack.shape)
    if method != "weighted":
        weights = np.ones(len(stack))
    elif weights is None:
        raise ValueError('weights must be given for method="weighted", got None.')
    weights = check_array("weights", weights, ndim=1, columns=len(stack))
    if weights.min(initial=np.inf) <= 0:
        raise ValueError(f"weights must be positive, got {weights.min()}.")
    sent = np.any(stack != 0, axis=2)
    average, odd = np.zeros_like(current), np.zeros(len(stack))
    for j in range(len(current)):
        mine = sent[:, j]
        if mine.any():
            average[j] = average_of(stack[mine, j], method, weights[mine])
            odd[mine] += far(stack[mine, j], average[j])
    atoms = finish_atoms(average, current, sent.any(axis=0), orthogonal=orthogonal)
    odd /= np.maximum(sent.sum(axis=1), 1)
    return Aggregation(atoms, sent.any(axis=1), {DEEDS[method]: odd})


def finish_atoms(
    S: Matrix, current: Matrix, seen: NDArray[np.bool_], *, orthogonal: bool
) -> Matrix:
    """Make unit (or orthonormal) atoms of ``S``; those not ``seen`` stay exactly as they are."""
    if orthogonal:
        (atoms,) = polar_factors(S[None], current[None], ~seen[None])
        return np.asarray(atoms, current.dtype)
    atoms = current.copy()
    atoms[seen] = normalize_atoms(S[seen], current[seen])
    return atoms


def local_statistics(
    X: Matrix,
    C: Matrix,
    D: Matrix,
    n_global: int,
    *,
    orthogonal: bool,
    min_support: float = 3,
) -> Matrix:
    """Return what a client sends instead of its global atoms.

    Parameters
    ----------
    X : ndarray of shape (n_samples, n_features)
        Data.
    C : ndarray of shape (n_samples, n_atoms)
        Codes of ``X`` with ``D``.
    D : ndarray of shape (n_atoms, n_features)
        The current global atoms, then the client's local ones.
    n_global : int
        Number of global atoms.
    orthogonal : bool
        Whether the learner's atoms are orthonormal.
    min_support : float, default 3
        Global atoms with fewer samples behind them (:func:`shared_rows`) are withheld: their
        rows are zero, and they count as local.

    Returns
    -------
    ndarray of shape (n_global, n_features) or (n_global, n_global + n_features)
        ``C_g.T @ (X - C_l @ D_l)``; unless orthogonal, ``C_g.T @ C_g`` comes before it.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import local_statistics
    >>> X = np.array([[1.0, 0.5]] * 4)
    >>> codes = np.array([[1.0, 0.0]] * 4)
    >>> local_statistics(X, codes, np.eye(2), 1, orthogonal=True)
    array([[4., 2.]])
    """
    D = check_array("D", D)
    X = check_array("X", X, columns=D.shape[1], squares=True)
    C = check_array("C", C, columns=len(D))
    check_count("n_global", n_global, 0, len(D))
    check_real("min_support", min_support, 0)
    return statistics_of(
        X, C, D, X - C @ D, n_global, orthogonal=orthogonal, min_support=min_support
    )


def statistics_of(
    X: Matrix,
    C: Matrix,
    D: Matrix,
    rest: Matrix,
    n_global: int,
    *,
    orthogonal: bool,
    min_support: float,
) -> Matrix:
    """Return :func:`local_statistics` of checked arguments; ``rest`` is ``X - C @ D``."""
    own = C[:, :n_global]
    moments, gram = own.T @ X, own.T @ C
    looks = len(X) > 0 and min_support > 1 and not orthogonal
    alone = made_by_one(rest, moments - gram @ D, own, D[:n_global]) if looks else None
    shared, sent = shared_rows(X, C, D, moments, gram, min_support, alone)
    if orthogonal:
        return np.asarray(sent)
    return np.hstack([np.where(np.outer(shared, shared), gram[:, :n_global], 0), sent])


def shared_sums(D: Matrix, moments: Matrix, gram: Matrix, shared: Any) -> Matrix:
    """Return ``C_g' (X - C_l D_l)`` of every client: ``C_g' X - (C_g' C_l) D_l``.

    Parameters
    ----------
    D : ndarray of shape (n_clients, n_atoms, n_features)
        Dictionaries, the global atoms first.
    moments : ndarray of shape (n_clients, m, n_features)
        ``C' X``, of the global atoms at least.
    gram : ndarray of shape (n_clients, n_global, n_atoms)
        ``C_g' C``.
    shared : ndarray of shape (n_clients, n_global)
        Which rows are sent; the others are zero, and their atoms count as local.
    """
    r, rest = shared.shape[1], gram.copy()
    rest[:, :, :r] -= rest[:, :, :r] * shared[:, None, :]
    sent: Matrix = (moments[:, :r] - rest @ D) * shared[..., None]
    return sent


def shared_rows(
    X: Matrix,
    C: Matrix,
    D: Matrix,
    moments: Matrix,
    gram: Matrix,
    min_support: float,
    alone: Any = None,
) -> tuple[Any, Matrix]:
    """Return which rows of its statistics a client sends, and these rows.

    Parameters
    ----------
    X, C, D, min_support
        As in :func:`local_statistics`, checked.
    moments : ndarray of shape (n_global, n_features)
        ``C_g' X``.
    gram : ndarray of shape (n_global, n_atoms)
        ``C_g' C``.
    alone : ndarray of shape (n_global,), optional
        Atoms that one sample dominates (`made_by_one`).

    Returns
    -------
    shared : ndarray of shape (n_global,)
        A row is withheld where fewer samples use its atom (:func:`atom_support`), or one sample
        dominates the atom or the row (`row_support`). As what is withheld counts as local, and is
        subtracted from the samples, the others are looked at again.
    sent : ndarray of shape (n_global, n_features)
        `shared_sums`.
    """
    scale, n_global = squared_norm(X) or 1.0, len(gram)
    across = C[:, :n_global].T
    shared = atom_support(C[:, :n_global]) >= min_support
    if alone is not None:
        shared = shared & ~alone
    while True:
        (sent,) = shared_sums(D[None], moments[None], gram[None], shared[None])
        if min_support <= 1 or not shared.any():
            return shared, sent
        keeps = np.append(~shared, np.ones(C.shape[1] - n_global, dtype=bool))
        rest = X - made_by(keeps, C, D) if keeps.any() else X
        found = dominated(rest, across[shared] / scale, sent[shared] / scale)
        if not found.any():
            return shared, sent
        shared[shared] = ~found


def aggregate_statistics(stack: Matrix, current: Matrix, *, orthogonal: bool) -> Aggregation:
    """Solve for the global atoms from the sum of the clients' statistics.

    Parameters
    ----------
    stack : ndarray of shape (n_clients, n_global, m)
        From :func:`local_statistics`; ``m`` is ``n_features`` if orthogonal, otherwise
        ``n_global + n_features``.
    current : ndarray of shape (n_global, n_features)
        The current global atoms. One that all clients withhold stays as it is if ``orthogonal``;
        otherwise it becomes the sum of two others that are used together.
    orthogonal : bool
        Whether the learner's atoms are orthonormal. If not, the atoms are updated as by
        `LassoLearner`: from the sum of the statistics of N clients that share all atoms comes what
        their pooled samples give.

    Returns
    -------
    Aggregation
        Global atoms, and which clients were used. A client is left out if the atoms that its own
        statistics give lie more than ``FAR`` median distances from the geometric median of all
        clients', or if what it says of its codes is no second moment; one whose statistics are
        larger than ``CAP`` times the median is scaled down to that.

    Raises
    ------
    ValueError
        If shapes do not fit.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import aggregate_statistics
    >>> stack = np.array([[[2.0, 0.0]], [[4.0, 0.0]]])  # from `local_statistics` of two clients
    >>> aggregate_statistics(stack, np.array([[1.0, 0.0]]), orthogonal=True).global_atoms
    array([[1., 0.]])
    """
    current, _ = unit_atoms(check_array("current", current))
    r, d = current.shape
    stack = check_array("stack", stack, ndim=3, columns=d if orthogonal else r + d)
    check_count("rows of stack", stack.shape[1], r, r)
    sent = np.any(stack != 0, axis=2)
    present = sent.any(axis=1)
    possible = present if orthogonal or not r else present & _moments(stack[:, :, :r])
    own = _solve_each(stack, sent, current, orthogonal)
    kept = possible & ~_outliers(own, sent & possible[:, None])
    factors = np.zeros(len(stack), stack.dtype)
    if kept.any():
        factors[kept] = shortening(stack if kept.all() else stack[kept])
    total = np.tensordot(factors, stack, axes=1)
    odd = {
        "left out": (present & ~kept).astype(float),
        "clipped": np.where(kept, 1 - factors, 0),
    }
    if orthogonal:
        withheld = ~np.any(total != 0, axis=1)
        (atoms,) = polar_factors(total[None], current[None], withheld[None])
        atoms = atoms.astype(current.dtype, copy=False)
    else:
        atoms = descended_atoms(total[:, :r], total[:, r:], current)
    return Aggregation(atoms, kept, odd)


def _moments(grams: Matrix) -> NDArray[np.bool_]:
    """Tell which matrices can be second moments, but for some noise."""
    values = np.linalg.eigvalsh((grams + grams.swapaxes(1, 2)) / 2)
    possible: NDArray[np.bool_] = values[:, 0] >= -_NOISE * values[:, -1]
    return possible & (values[:, -1] > 0)


def _solve_each(
    stack: Matrix, sent: NDArray[np.bool_], current: Matrix, orthogonal: bool
) -> Matrix:
    """Return the atoms that each client's statistics give; rows without any stay as they are."""
    own = np.empty((len(stack), *current.shape), np.result_type(stack, current))
    r, size = len(current), max(_PIECE // max(current.size, 1), 1) if orthogonal else 1
    pieces = [slice(at, at + size) for at in range(0, len(stack), size)]

    def polar(piece: slice) -> Matrix:
        S = stack[piece].astype(own.dtype, copy=False)
        return polar_factors(S, np.broadcast_to(current, S.shape), ~sent[piece])

    def sweep(one: slice) -> Matrix:  # one sweep tells whose atoms go elsewhere
        (S,) = stack[one]
        return coordinate_atoms(S[:, :r], S[:, r:], current, n_sweeps=1)

    for piece, atoms in zip(
        pieces, in_threads(polar if orthogonal else sweep, pieces), strict=True
    ):
        own[piece] = atoms
    return own


def _outliers(own: Matrix, sent: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Tell who is far from the others, by the root mean square distance of the atoms sent."""
    present: NDArray[np.bool_] = np.any(sent, axis=1)
    if not present.any():
        return present
    some = own if present.all() else own[present]
    apart = own - geometric_median(some, tol=1e-4, max_iter=50)
    squares = row_products(apart, apart) * sent
    means = squares.sum(axis=1) / np.maximum(sent.sum(axis=1), 1)
    distances = np.sqrt(means).astype(own.dtype, copy=False)  # their dtype says what is rounding
    outliers: NDArray[np.bool_] = distances > reach(distances[present], 1)
    return outliers
