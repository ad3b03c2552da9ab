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

from flwr_perdl.core.arrays import has_missing
from flwr_perdl.core.checks import (
    MOST_ITERATIONS,
    Matrix,
    check_array,
    check_count,
    check_list,
    check_members,
    check_real,
    check_rng,
)
from flwr_perdl.dictionary.learners import (
    LEARNERS,
    AlternatingLearner,
    LassoLearner,
    Learner,
    check_samples,
)

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
    learner : Learner
    rng : numpy.random.Generator
    n_iter : int, default 100
    restarts : int, default 1
        Starts; the one with the least loss wins.
    boost : float, default 8
        The first threshold, as a multiple of the learner's own.
    decay : float, default 0.97
        The threshold's factor from one iteration to the next, until it is the learner's own.

    Returns
    -------
    WarmStart

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
    check_members("learner", learner, "Learner", "start", "code", "update", "loss")
    check_rng(rng)
    X = check_samples("X", X, learner, min_rows=1)
    check_count("n_iter", n_iter, 0, MOST_ITERATIONS)
    check_count("restarts", restarts, 1, MOST_ITERATIONS)
    check_real("boost", boost, 1)
    check_real("decay", decay, 0, 1)
    # A high threshold first: few and large codes find the strong atoms, as annealing does.
    scales = [max(1.0, boost * decay**t) for t in range(n_iter)]
    # Atoms stay in the span of the samples, where there are fewer coordinates than features.
    basis = _row_space(X, learner, n_iter * restarts)
    runs = []
    for _ in range(restarts):
        D = learner.start(X, rng)
        if basis is not None and _spans(basis, D):
            D = iterate(learner, X @ basis.T, D @ basis.T, scales) @ basis
        else:
            D = iterate(learner, X, D, scales)
        runs.append((learner.loss(X, learner.code(X, D), D), D))
    objectives = tuple(objective for objective, _ in runs)
    objective, dictionary = runs[int(np.argmin(objectives))]
    return WarmStart(dictionary, objective, objectives)


def pooled_start(dictionaries: Sequence[Matrix], atoms: Matrix, *, n_iter: int = 10) -> Matrix:
    """Learn one dictionary from the atoms of several, where all atoms are to be shared.

    Matching brings together atoms that are alike. Where clients describe the same samples by
    different atoms, a dictionary in which all their atoms are sparse is a better start. It begins
    at ``atoms``, the matched ones.
    """
    learner, X = LassoLearner(max(len(atoms), 1)), np.vstack(dictionaries)
    return iterate(learner, X, atoms, [1.0] * n_iter)


def iterate(learner: Learner, X: Matrix, D: Matrix, scales: Sequence[float]) -> Matrix:
    """Return a learner's dictionary after an iteration for each of ``scales``.

    Parameters
    ----------
    learner : Learner
    X : ndarray of shape (n_samples, n_features)
    D : ndarray of shape (n_atoms, n_features)
        Unit atoms to start from; orthonormal ones for `OrthogonalLearner`.
    scales : sequence of float
        The threshold of each iteration, as a multiple of the learner's own.

    Returns
    -------
    ndarray of shape (n_atoms, n_features)

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import OrthogonalLearner, iterate
    >>> X = np.random.default_rng(0).standard_normal((30, 4))
    >>> iterate(OrthogonalLearner(4), X, np.eye(4), scales=[2.0, 1.0]).shape
    (4, 4)
    """
    check_members("learner", learner, "Learner", "code", "update")
    X = check_samples("X", X, learner)
    D = check_array("D", D, columns=X.shape[1], squares=True)
    scales = [check_real("scales", s, 0, open_low=True) for s in check_list("scales", scales)]
    kind = type(learner)
    # this library's learners need not check the samples in every iteration
    if isinstance(learner, AlternatingLearner) and (kind.code, kind.update) == _OURS:
        return learner.steps(X, D, scales)
    for scale in scales:
        D = learner.update(X, learner.code(X, D, scale), D)
    return D


def _row_space(X: Matrix, learner: Learner, n_iter: int) -> Matrix | None:
    """Return an orthonormal basis of the samples' span, if so many iterations in it save time.

    To this library's learners all orthonormal coordinates are the same.
    """
    n, d = map(int, X.shape)
    if (
        type(learner) not in LEARNERS
        or has_missing(X)
        or n_iter * learner.n_atoms * (d - n) <= 2 * d * n
    ):
        return None
    return np.linalg.qr(X.T)[0].T


def _spans(basis: Matrix, D: Matrix) -> bool:
    """Whether all atoms lie in the span of a basis, up to rounding."""
    rounding = 10 * float(np.finfo(D.dtype).eps)
    return bool(np.abs(D @ basis.T @ basis - D).max(initial=0) <= rounding)
