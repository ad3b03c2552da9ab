"""Every client's own linear model from sums over its points: a mixed model, and shrinkage.

Both take what clients of `flwr_perdl.regression.choose_mixture` send, the second moments of their
points by fold (`flwr_perdl.regression.sufficient_statistics`), and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

import numpy as np

from flwr_perdl.core.checks import Matrix
from flwr_perdl.regression import fit_mixed_model

__all__ = ["fit_mixed_model", "shrink_to_pooled"]

#: Directions along which points vary less do not count. A share of the most.
_TINY = 1e-10


def shrink_to_pooled(statistics: Matrix, penalties: Sequence[float]) -> Matrix:
    """Return a ridge regression per client, shrunk to the least squares of all clients' points.

    Parameters
    ----------
    statistics : ndarray of shape (n_clients, n_folds, (d + 1)^2 + 1)
        Every client's sums by fold.
    penalties : sequence of float
        Of the squared distance from the pooled model; the best for all clients on left-out folds.
    """
    size = isqrt(statistics.shape[-1] - 1)
    moments = statistics[..., 1:].reshape(*statistics.shape[:2], size, size)
    whole, errors = moments.sum(axis=1), np.zeros(len(penalties))
    for fold in np.moveaxis(moments, 1, 0):
        for i, penalty in enumerate(penalties):
            turn = np.pad(-_shrunk(whole - fold, penalty), ((0, 0), (0, 1)), constant_values=1)
            errors[i] += np.einsum("mi,mij,mj->", turn, fold, turn)
    return _shrunk(whole, penalties[int(errors.argmin())])


def _shrunk(moments: Matrix, penalty: float) -> Matrix:
    XX, Xy, total = moments[:, :-1, :-1], moments[:, :-1, -1], moments.sum(axis=0)
    pooled = np.linalg.lstsq(total[:-1, :-1], total[:-1, -1], rcond=_TINY)[0]
    own = (Xy + penalty * pooled)[..., None]
    return np.asarray(np.linalg.solve(XX + penalty * np.eye(len(pooled)), own)[..., 0])
