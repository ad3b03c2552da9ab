"""Aggregation of the clients' contributions at the server (Algorithm 1 line 13, and better).

======================================= ====================================================
paper (Liang et al., NeurIPS 2023)      here
======================================= ====================================================
``D_i^g``                               ``stack[i]`` of :func:`aggregate_atoms`
``D^g = (1/N) sum_i D_i^g`` (line 13)   ``method="mean"``
``(Y - D^l X^l) (X^g)'`` (not there)    ``stack[i]`` of :func:`aggregate_statistics`
======================================= ====================================================

Deviations: averages are not unit vectors; they are brought to the nearest orthonormal rows for
orthogonal learners, and to unit norm for others. Statistics are not in the paper: instead of its
updated atoms a client sends the sums that they are computed from, of the same size, and the server
solves for the atoms once, from all clients' sums. The true atoms are a fixed point of this, clients
count by how much they know, and a client that is entirely wrong is left out.

A zero row in a stack means that the client withholds this atom.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.aggregate import (
    OUTLIER,
    RULES,
    aggregate,
    clip_factors,
    geometric_median,
    reach,
)
from flwr_perdl.core.arrays import row_products
from flwr_perdl.core.checks import Matrix, check_array, check_choice, check_flag, check_mask
from flwr_perdl.core.threads import in_threads
from flwr_perdl.dictionary.atoms import (
    coordinate_atoms,
    descended_atoms,
    normalize_atoms,
    unit_atoms,
)
from flwr_perdl.dictionary.polar import polar_factor

#: Of directions; rules that compare lengths, or cap weights, are for changes of models.
ATOM_AVERAGES = ("mean", "weighted", *(name for name, rule in RULES.items() if rule.average))
#: A second moment's least eigenvalue may be this much of the largest below zero.
_NOISE = 0.1
#: Numbers in a client's atoms from which on threads solve for them faster than one.
_LONG = 2**13


class Aggregation(NamedTuple):
    """The new global atoms, who contributed, and who was an outlier.

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
    #: By what was done to them ("left out", "clipped", …): to which share of each client's
    #: contribution, (n_clients,).
    outlyingness: dict[str, Matrix]


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
        Aligned global atoms, which count as directions, whatever their lengths.
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
    check_choice("method", method, ATOM_AVERAGES)
    orthogonal = check_flag("orthogonal", orthogonal)
    current, _ = unit_atoms(check_array("current", current))
    r, d = current.shape
    stack = check_array("stack", stack, ndim=3, rows=r, columns=d)
    stack = unit_atoms(stack.reshape(len(stack) * r, d))[0].reshape(stack.shape)
    if weights is None and method == "weighted":
        raise ValueError('weights must be given for method="weighted", got None.')
    weights = np.ones(len(stack)) if weights is None else weights
    weights = check_array("weights", weights, ndim=1, columns=len(stack))
    if weights.min(initial=np.inf) <= 0:
        raise ValueError(f"weights must be positive, got {weights.min()}.")
    if method != "weighted":
        weights = np.ones(len(stack))
    sent = np.any(stack != 0, axis=2)
    # Atom by atom, since every client may withhold others.
    rule = "mean" if method == "weighted" else method
    average, outlyingness = np.zeros_like(current), np.zeros(len(stack))
    for j in range(r):
        mine = sent[:, j]
        if mine.any():
            average[j], far, _ = aggregate(rule, stack[mine, j], weights[mine])
            outlyingness[mine] += far
    atoms = finish_atoms(average, current, sent.any(axis=0), orthogonal=orthogonal)
    outlyingness /= np.maximum(sent.sum(axis=1), 1)
    return Aggregation(atoms, sent.any(axis=1), {RULES[rule].effect: outlyingness})


def finish_atoms(
    S: Matrix, current: Matrix, seen: NDArray[np.bool_], *, orthogonal: bool
) -> Matrix:
    """Make unit (or orthonormal) atoms of ``S``; those not ``seen`` stay exactly as they are."""
    if orthogonal:
        return polar_factor(S, current, ~seen).astype(current.dtype, copy=False)
    atoms = current.copy()
    atoms[seen] = normalize_atoms(S[seen], current[seen])
    return atoms


# Statistics


def local_statistics(
    X: Matrix, C: Matrix, D: Matrix, shared: NDArray[np.bool_], *, orthogonal: bool
) -> Matrix:
    """Return the statistics that a client sends instead of its global atoms.

    Parameters
    ----------
    X : ndarray of shape (n_samples, n_features)
    C : ndarray of shape (n_samples, n_atoms)
        Codes of ``X`` with ``D``.
    D : ndarray of shape (n_atoms, n_features)
        The current global atoms, then the client's local ones.
    shared : ndarray of bool of shape (n_global,)
        The global atoms whose statistics to return. The others count as local.
    orthogonal : bool
        Whether the learner's atoms are orthonormal.

    Returns
    -------
    ndarray of shape (n_global, n_features) or (n_global, n_global + n_features)
        ``C_g.T @ (X - C_l @ D_l)``; unless orthogonal, preceded by ``C_g.T @ C_g``. Rows of atoms
        that are not shared are zero.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import local_statistics
    >>> X = np.array([[1.0, 0.5]] * 4)
    >>> codes = np.array([[1.0, 0.0]] * 4)
    >>> local_statistics(X, codes, np.eye(2), np.array([True]), orthogonal=True)
    array([[4., 2.]])
    """
    orthogonal = check_flag("orthogonal", orthogonal)
    D = check_array("D", D)
    X = check_array("X", X, columns=D.shape[1], squares=True)
    C = check_array("C", C, rows=len(X), columns=len(D))
    shared = check_mask("shared", shared, 0, len(D))
    local = np.concatenate([~shared, np.ones(len(D) - len(shared), dtype=bool)])
    # A withheld atom still explains samples, and what it explains must not become another one.
    own = C[:, : len(shared)] * shared
    moments = own.T @ (X - C[:, local] @ D[local])
    return moments if orthogonal else np.hstack([own.T @ own, moments])


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
        Whether the learner's atoms are orthonormal. If not, they are updated as by `LassoLearner`
        from the pooled samples of the clients.

    Returns
    -------
    Aggregation
        A client is left out if the atoms of its own statistics are more than ``FAR`` median
        distances from the geometric median of all clients', or if its second moments are not valid;
        one whose statistics are larger than ``CAP`` times the median is scaled down to that.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary.aggregation import aggregate_statistics
    >>> stack = np.array([[[4.0, 2.0]], [[2.0, 4.0]]])  # from local_statistics of two clients
    >>> found = aggregate_statistics(stack, np.array([[1.0, 0.0]]), orthogonal=True)
    >>> found.global_atoms.round(3)
    array([[0.707, 0.707]])
    """
    orthogonal = check_flag("orthogonal", orthogonal)
    current, _ = unit_atoms(check_array("current", current))
    r, d = current.shape
    stack = check_array("stack", stack, ndim=3, rows=r, columns=d if orthogonal else r + d)
    sent = np.any(stack != 0, axis=2)
    present = sent.any(axis=1)
    possible = present if orthogonal or not r else present & _moments(stack[:, :, :r])
    # Sums of different clients differ in scale; the atoms that they lead to can be compared.
    own = _solve_each(stack, sent, current, orthogonal)
    kept = possible & ~_outliers(own, sent & possible[:, None])
    factors = np.zeros(len(stack), stack.dtype)
    if kept.any():
        factors[kept] = clip_factors(stack if kept.all() else stack[kept])
    # Line 13 on the pooled samples: their statistics are the sum of the clients'.
    total = np.tensordot(factors, stack, axes=1)
    if orthogonal:
        atoms = finish_atoms(total, current, np.any(total != 0, axis=1), orthogonal=True)
    else:
        atoms = descended_atoms(total[:, :r], total[:, r:], current)
    left_out, clipped = (present & ~kept).astype(float), np.where(kept, 1 - factors, 0)
    return Aggregation(atoms, kept, {OUTLIER: left_out, RULES["clip"].effect: clipped})


def _moments(grams: Matrix) -> NDArray[np.bool_]:
    """Tell which matrices can be second moments, but for some noise."""
    values = np.linalg.eigvalsh((grams + grams.swapaxes(1, 2)) / 2)
    # Noise makes small eigenvalues negative; a liar makes large ones so.
    possible: NDArray[np.bool_] = values[:, 0] >= -_NOISE * values[:, -1]
    return possible & (values[:, -1] > 0)


def _solve_each(
    stack: Matrix, sent: NDArray[np.bool_], current: Matrix, orthogonal: bool
) -> Matrix:
    """Return the atoms that each client's statistics give; rows without any stay as they are."""
    r = len(current)

    def solve(i: int) -> Matrix:
        S = stack[i]
        if orthogonal:
            return polar_factor(S, current, ~sent[i])
        # one sweep tells whose atoms go elsewhere
        return coordinate_atoms(S[:, :r], S[:, r:], current, n_sweeps=1)

    own = np.empty((len(stack), *current.shape), np.result_type(stack, current))
    n_threads = None if current.size >= _LONG else 1
    for i, atoms in enumerate(in_threads(solve, range(len(stack)), n=n_threads)):
        own[i] = atoms
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
