"""Planted mixed regressions: settings C.1, C.2 and C.3 (Su, Xu, Yang, NeurIPS 2022).

"few" is not the paper's: as many points in all, five per client.

The paper's "N = 1000 data points" are 10,000: 200 x 50, and 900 x 10 + 20 x 50. Its models are
``N(0, I) / sqrt(d)`` and its noise 0.2 N(0, 1): 0.2 is a standard deviation.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.checks import Matrix, check_choice

SETTINGS = ("C1", "C2", "C3")
#: A setting that is not the paper's: five points per client.
FEW = "few"


class Mixed(NamedTuple):
    """Clients whose data come from one of several models each.

    Attributes
    ----------
    X : list of ndarray of shape (n_i, d)
        Each client's features.
    y : list of ndarray of shape (n_i,)
        Each client's responses.
    labels : ndarray of shape (n_clients,)
        Each client's true cluster.
    theta : ndarray of shape (n_clusters, d)
        The true models.
    """

    X: list[Matrix]
    y: list[Matrix]
    labels: NDArray[np.intp]
    theta: Matrix


def setting(name: str, rng: np.random.Generator) -> Mixed:
    """Draw setting ``"C1"``, ``"C2"`` or ``"C3"`` (Appendix C), or ``"few"``.

    Parameters
    ----------
    name : {"C1", "C2", "C3", "few"}
        C1: 200 clients of 50 points. C2: 900 clients of 10 and 20 of 50. C3: like C2, with
        clusters of 20, 30 and 50 % of the clients instead of a third each. few: 2,000 clients of
        five points.
    rng : numpy.random.Generator
        Source of the draw.

    Returns
    -------
    Mixed
    """
    check_choice("name", name, (*SETTINGS, FEW))
    sizes = np.array({"C1": [50] * 200, FEW: [5] * 2000}.get(name, [10] * 900 + [50] * 20))
    shares = np.array([0.2, 0.3, 0.5] if name == "C3" else [1 / 3] * 3)
    return mixed_regression(sizes, shares, rng)


def mixed_regression(
    sizes: NDArray[np.integer],
    shares: Matrix,
    rng: np.random.Generator,
    *,
    d: int = 100,
    noise: float = 0.2,
) -> Mixed:
    """Draw clients of given sizes from a mixture of linear regressions.

    Parameters
    ----------
    sizes : ndarray of shape (n_clients,)
        Points of each client.
    shares : ndarray of shape (n_clusters,)
        Probability of each cluster.
    rng : numpy.random.Generator
        Source of the draw.
    d : int, default 100
        Number of features, standard normal.
    noise : float, default 0.2
        Standard deviation of the noise.

    Returns
    -------
    Mixed
    """
    theta = rng.standard_normal((len(shares), d)) / np.sqrt(d)
    labels = rng.choice(len(shares), size=len(sizes), p=shares)
    X: list[Matrix] = [rng.standard_normal((n, d)) for n in sizes]
    y: list[Matrix] = [
        features @ theta[j] + noise * rng.standard_normal(len(features))
        for features, j in zip(X, labels, strict=True)
    ]
    return Mixed(X, y, labels, theta)


def oracle(data: Mixed) -> Matrix:
    """Return least squares per cluster with the true labels, models as rows."""
    models = []
    for j in range(len(data.theta)):
        mine = np.flatnonzero(data.labels == j)
        X, y = np.vstack([data.X[i] for i in mine]), np.concatenate([data.y[i] for i in mine])
        models.append(np.linalg.lstsq(X, y, rcond=None)[0])
    return np.stack(models)
