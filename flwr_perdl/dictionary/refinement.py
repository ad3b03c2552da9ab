"""Local refinement (Algorithm 6): local atoms learned from the residual of the global ones.

======================================= ====================================================
paper (Liang et al., NeurIPS 2023)      here
======================================= ====================================================
``D = [D^g D^l]``                       ``D``, its first ``n_global`` rows global
``Y^l = Y - D^g X^g`` (line 3)          ``X - C[:, :n_global] @ D[:n_global]``
``T_refine`` (line 5)                   ``n_iter``
======================================= ====================================================

Line 2 does not say how ``X^g`` is found. For general learners it is the learner's own code; for
orthonormal ones the projection ``X @ D_g.T``, so that the refined atoms stay orthogonal to the
global ones.
"""

from __future__ import annotations

import numpy as np

from flwr_perdl.core.checks import MOST_ITERATIONS, Matrix, check_array, check_count, check_members
from flwr_perdl.dictionary.atoms import unit_atoms
from flwr_perdl.dictionary.coding import remainder
from flwr_perdl.dictionary.learners import Learner, check_samples


def refine_local(
    X: Matrix, D: Matrix, n_global: int, learner: Learner, *, n_iter: int = 5
) -> Matrix:
    """Run a few iterations of the learner on the local atoms alone.

    Parameters
    ----------
    X : ndarray of shape (n_samples, n_features)
    D : ndarray of shape (n_atoms, n_features)
        The global atoms, then the local ones.
    n_global : int
    learner : Learner
    n_iter : int, default 5

    Returns
    -------
    ndarray of shape (n_atoms, n_features)
        The same global atoms, then the refined local ones.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import OrthogonalLearner, refine_local
    >>> X = np.random.default_rng(0).standard_normal((30, 4))
    >>> D = refine_local(X, np.eye(4), 2, OrthogonalLearner(4))
    >>> np.abs(D[:, :2].round(6))
    array([[1., 0.],
           [0., 1.],
           [0., 0.],
           [0., 0.]])
    """
    check_members("learner", learner, "Learner", "orthogonal", "step")
    X = check_samples("X", X, learner)
    D, _ = unit_atoms(check_array("D", D, columns=X.shape[1]))
    check_count("n_global", n_global, 0, len(D))
    check_count("n_iter", n_iter, 0, MOST_ITERATIONS)
    shared, local = D[:n_global], D[n_global:]
    C = X @ shared.T if learner.orthogonal else learner.code(X, D)[:, :n_global]
    rest = remainder(X, C @ shared)
    if len(local):
        for _ in range(n_iter):
            local = learner.step(rest, local)
    return np.vstack([shared, local])
