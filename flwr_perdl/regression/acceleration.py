"""Anderson acceleration of Phase 2: the server's step from the clients' mean changes.

======================================= ====================================================
Walker and Ni (2011), type II           here
======================================= ====================================================
``x_{t-m}, ..., x_t``                   ``points`` (rounds, k, d), the models that clients had
``f_{t-m}, ..., f_t``                   ``changes`` (rounds, k, d), how clients changed them
``m_t``                                 ``rounds``, of each model, less the current round
======================================= ====================================================

H. F. Walker and P. Ni, "Anderson acceleration for fixed-point iterations", SIAM J. Numer. Anal.
2011. Where the clients of a cluster stay the same, the squared loss makes the changes linear in the
model, and the iteration is GMRES restricted to the last rounds: it needs no bound on the curvature
to converge in few rounds, also where the features are ill-conditioned.
"""

from __future__ import annotations

import numpy as np

from flwr_perdl.core.checks import Matrix

#: Directions in which the changes differ by less than this, over the most, do not count.
_DIFFERS = 1e-10


def accelerated(points: Matrix, changes: Matrix, rounds: Matrix) -> Matrix:
    """Return the models of the next round, (k, d), each from its own last ``rounds``, (k,).

    The affine combination of the models ``points`` whose mean ``changes`` by the clients, combined
    alike, are shortest, plus these changes. Both are (n_rounds, k, d), the current round last.
    """
    centers: Matrix = points[-1] + changes[-1]
    for j, remembered in enumerate(np.minimum(rounds, len(points)).astype(int)):
        if remembered > 1:
            past = slice(-remembered, -1)
            moves, differences = points[past, j] - points[-1, j], changes[past, j] - changes[-1, j]
            weights = np.linalg.lstsq(differences.T, -changes[-1, j], rcond=_DIFFERS)[0]
            centers[j] += weights @ (moves + differences)
    return centers


def replaced_points(before: Matrix, now: Matrix) -> Matrix:
    """Return how many points each cluster won or lost between two rounds, (k,).

    ``before`` and ``now`` say who answered, and its points in every cluster, (n_clients, 1 + k).
    """
    clients = np.union1d(before[:, 0], now[:, 0])
    points = np.zeros((2, len(clients), now.shape[1] - 1))
    for own, rows in zip(points, (before, now), strict=True):
        own[np.searchsorted(clients, rows[:, 0])] = rows[:, 1:]
    replaced: Matrix = np.abs(points[1] - points[0]).sum(axis=0)
    return replaced
