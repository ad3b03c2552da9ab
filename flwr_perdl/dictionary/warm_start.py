"""Warm start: a learner run from random starts with shrinking thresholds.

======================================= ====================================================
paper (Liang et al., NeurIPS 2023)      here
======================================= ====================================================
``D_i^(0)`` (Algorithm 1 line 3)        ``WarmStart.dictionary``
shrinking ``zeta`` (A.1)                ``scale``, multiplying the learner's own threshold
======================================= ====================================================

The paper refers to another paper for the schedule and gives none. Here iteration ``t`` codes with
the learner's threshold times ``max(1, boost * decay**t)``.

Where there are fewer samples than features, the iterations of this library's learners run on
coordinates in the samples' row space: an isometry, which changes nothing but rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flwr_perdl._checks import Matrix, check_array, check_count, check_real
from flwr_perdl.dictionary.coding import kept_above
from flwr_perdl.dictionary.learners import (
    LEARNERS,
    AlternatingLearner,
    LassoLearner,
    Learner,
    OrthogonalLearner,
)
from flwr_perdl.dictionary.polar import polar_factors

#: Numbers of samples' features that are multiplied at once: a quarter of a megabyte.
_TOGETHER = 2**15
_OURS = AlternatingLearner.code, AlternatingLearner.update


class WarmStart(NamedTuple):
    """A dictionary learned from scratch.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import OrthogonalLearner, warm_start
    >>> rng = np.random.default_rng(0)
    >>> found = warm_start(rng.standard_normal((50, 4)), OrthogonalLearner(3), rng=rng, restarts=2)
    >>> found.objective == min(found.objectives)
    True
    """

    #: Unit atoms, (n_atoms, n_features).
    dictionary: Matrix
    #: The learner's loss, the least of all restarts.
    objective: float
    #: The losses of all restarts.
    objectives: tuple[float, ...]


def warm_start(
    X: Matrix,
    learner: Learner,
    *,
    rng: np.random.Generator,
    n_iter: int = 100,
    restarts: int = 1,
    boost: float = 8.0,
    decay: float = 0.97,
) -> WarmStart:
    """Learn a dictionary from ``X`` alone, and keep the best of several starts.

    Parameters
    ----------
    X : ndarray of shape (n_samples, n_features)
        Data.
    learner : Learner
        The local algorithm.
    rng : numpy.random.Generator
        Source of the starts.
    n_iter : int, default 100
        Iterations per start.
    restarts : int, default 1
        Starts; the one with the least loss wins.
    boost : float, default 8
        The first threshold, as a multiple of the learner's own.
    decay : float, default 0.97
        The threshold's factor from one iteration to the next, until it is the learner's own.

    Returns
    -------
    WarmStart
        Dictionary, its loss, and the losses of all starts.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import LassoLearner, warm_start
    >>> rng = np.random.default_rng(0)
    >>> X = rng.standard_normal((50, 4))
    >>> found = warm_start(X, LassoLearner(3), rng=rng, n_iter=10, restarts=2)
    >>> found.dictionary.shape, len(found.objectives)
    ((3, 4), 2)
    """
    (found,) = warm_starts(
        [X], learner, rngs=[rng], n_iter=n_iter, restarts=restarts, boost=boost, decay=decay
    )
    return found


def warm_starts(
    samples: Sequence[Matrix],
    learner: Learner,
    *,
    rngs: Sequence[np.random.Generator],
    n_iter: int = 100,
    restarts: int = 1,
    boost: float = 8.0,
    decay: float = 0.97,
) -> list[WarmStart]:
    """Return :func:`warm_start` of several clients, the same bits in less time.

    Parameters
    ----------
    samples : sequence of ndarray of shape (n_samples, n_features)
        Each client's data.
    learner : Learner
        The local algorithm of all clients.
    rngs : sequence of numpy.random.Generator
        Source of each client's starts.
    n_iter, restarts, boost, decay
        As in :func:`warm_start`.

    Returns
    -------
    list of WarmStart

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import OrthogonalLearner, warm_starts
    >>> rng = np.random.default_rng(0)
    >>> samples = [rng.standard_normal((30, 4)), rng.standard_normal((50, 4))]
    >>> rngs = [np.random.default_rng(1), np.random.default_rng(2)]
    >>> [one.dictionary.shape for one in warm_starts(samples, OrthogonalLearner(3), rngs=rngs)]
    [(3, 4), (3, 4)]
    """
    samples = [check_array("X", X, min_rows=1, squares=True) for X in samples]
    check_count("n_iter", n_iter)
    check_count("restarts", restarts, 1)
    check_real("boost", boost, 1)
    check_real("decay", decay, 0, 1)
    scales = [max(1.0, boost * decay**t) for t in range(n_iter)]
    worth = [_worth(X, learner, n_iter * restarts) for X in samples]
    bases = [_row_space(X) if own else None for X, own in zip(samples, worth, strict=True)]
    found: list[list[tuple[float, Matrix]]] = [[] for _ in samples]
    for _ in range(restarts):
        data = list(samples)
        starts = [learner.start(X, rng) for X, rng in zip(samples, rngs, strict=True)]
        within = [
            None if basis is None else _within(D, basis)
            for D, basis in zip(starts, bases, strict=True)
        ]
        for i, (inner, basis) in enumerate(zip(within, bases, strict=True)):
            if inner is not None and basis is not None:
                data[i], starts[i] = samples[i] @ basis.T, inner
        learned = iterate(learner, data, starts, scales)
        for runs, X, D, inner, basis in zip(found, samples, learned, within, bases, strict=True):
            whole = D if inner is None or basis is None else D @ basis
            runs.append((learner.loss(X, learner.code(X, whole), whole), whole))
    results = []
    for runs in found:
        objectives = tuple(objective for objective, _ in runs)
        objective, dictionary = runs[int(np.argmin(objectives))]
        results.append(WarmStart(dictionary, objective, objectives))
    return results


def pooled_start(dictionaries: Sequence[Matrix], atoms: Matrix, *, n_iter: int = 10) -> Matrix:
    """Learn one dictionary from the atoms of several, where all atoms are to be shared.

    Matching brings together atoms that are alike. Where clients describe the same samples by
    different atoms, a dictionary in which all their atoms are sparse is a better start.

    Parameters
    ----------
    dictionaries : sequence of ndarray of shape (n_atoms, n_features)
        The clients' own: their atoms are the samples here.
    atoms : ndarray of shape (n_global, n_features)
        The matched atoms, which it starts from.
    n_iter : int, default 10
        Iterations of `LassoLearner`.

    Returns
    -------
    ndarray of shape (n_global, n_features)
        Unit atoms.
    """
    learner, X = LassoLearner(max(len(atoms), 1)), np.vstack(dictionaries)
    return _iterate(learner, X, atoms, [1.0] * n_iter)


def iterate(
    learner: Learner, samples: Sequence[Matrix], starts: Sequence[Matrix], scales: Sequence[float]
) -> list[Matrix]:
    """Take a learner's iterations at several clients, the same bits as at each of them alone.

    Parameters
    ----------
    learner : Learner
        The local algorithm of all clients.
    samples : sequence of ndarray of shape (n_samples, n_features)
        Each client's data, checked.
    starts : sequence of ndarray of shape (n_atoms, n_features)
        Each client's unit atoms; orthonormal ones for `OrthogonalLearner`.
    scales : sequence of float
        The threshold of each iteration, as a multiple of the learner's own.

    Returns
    -------
    list of ndarray of shape (n_atoms, n_features)
        For `OrthogonalLearner` with a threshold, small clients of one size are multiplied many at
        a time.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import OrthogonalLearner, iterate
    >>> samples = np.random.default_rng(0).standard_normal((2, 30, 4))
    >>> starts = [np.eye(4), np.eye(4)]
    >>> [D.shape for D in iterate(OrthogonalLearner(4), samples, starts, scales=[2.0, 1.0])]
    [(4, 4), (4, 4)]
    """
    if type(learner) is not OrthogonalLearner or learner.n_nonzero is not None:
        return [_iterate(learner, X, D, scales) for X, D in zip(samples, starts, strict=True)]
    learned: list[Matrix] = []
    kinds = [(X.shape, X.dtype, D.dtype) for X, D in zip(samples, starts, strict=True)]
    while len(learned) < len(samples):
        at = len(learned)
        most = at + max(1, _TOGETHER // max(samples[at].size, 1))
        end = next((i for i in range(at, len(samples)) if i == most or kinds[i] != kinds[at]), None)
        if len(samples[at:end]) == 1:
            learned.append(_iterate(learner, samples[at], starts[at], scales))
            continue
        X, D = np.stack(samples[at:end]), np.stack(starts[at:end])
        levels = np.array([learner.level(own) for own in samples[at:end]])[:, None, None]
        for scale in scales:
            products = X @ D.swapaxes(1, 2)
            bounds = np.minimum(scale * levels, np.finfo(products.dtype).max)
            codes = kept_above(products, bounds.astype(products.dtype))
            D = polar_factors(codes.swapaxes(1, 2) @ X, D)
        learned += list(D)
    return learned


def _iterate(learner: Learner, X: Matrix, D: Matrix, scales: Sequence[float]) -> Matrix:
    """Take the iterations; this library's learners need not check the samples every time."""
    kind = type(learner)
    if isinstance(learner, AlternatingLearner) and (kind.code, kind.update) == _OURS:
        return learner.steps(X, D, scales)
    for scale in scales:
        D = learner.update(X, learner.code(X, D, scale), D)
    return D


def _worth(X: Matrix, learner: Learner, n_iter: int) -> bool:
    """Whether so many iterations in the row space save more than finding it takes.

    To this library's learners all orthonormal coordinates are the same.
    """
    if not isinstance(learner, AlternatingLearner) or type(learner) not in LEARNERS:
        return False
    n, d = map(int, X.shape)
    return n_iter * learner.n_atoms * (d - n) > 2 * d * n


def _row_space(X: Matrix) -> Matrix:
    """Return as many orthonormal rows as ``X`` has, which span its own."""
    basis: Matrix = np.linalg.qr(X.T)[0].T
    return basis


def _within(D: Matrix, basis: Matrix) -> Matrix | None:
    """Return the coordinates of the atoms in a basis; None if one is not in its span."""
    inner: Matrix = D @ basis.T
    rounding = 10 * float(np.finfo(D.dtype).eps)
    return inner if np.abs(inner @ basis - D).max(initial=0) <= rounding else None
