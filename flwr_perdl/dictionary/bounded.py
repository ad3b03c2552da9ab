"""Statistics of an update (see `local_statistics`) to which no sample adds more than a bound."""

from __future__ import annotations

from math import sqrt

import numpy as np

from flwr_perdl.core.checks import Matrix

#: The weight of C'C in a sum of bounded statistics: of noise on that, C'X gets less.
BALANCE = 7**-0.5


def bounded_statistics(X: Matrix, C: Matrix, bound: float, *, orthogonal: bool) -> Matrix:
    """Return the statistics of samples, each of which adds ``bound`` at most to their norm.

    Parameters
    ----------
    X, C : ndarray
        Samples, and their codes with the global atoms alone.
    bound : float
        The largest norm of a sample's term; a longer one is scaled down.
    orthogonal : bool
        Whether the atoms are orthonormal.

    Returns
    -------
    ndarray of shape (n_global, n_features) or (n_global, n_global + n_features)
        ``C.T @ X``; unless orthogonal, `BALANCE` times ``C.T @ C`` comes before it.
    """
    rows = X if orthogonal else np.hstack([BALANCE * C, X])
    norms = np.linalg.norm(C, axis=1) * np.linalg.norm(rows, axis=1)
    statistics: Matrix = (C * (bound / np.maximum(norms, bound))[:, None]).T @ rows
    return statistics


def denoise_moments(statistics: Matrix, deviation: float, *, weight: float) -> Matrix:
    """Return statistics with noise whose second moments, ``C.T @ C`` times ``weight``, are some.

    Symmetric noise whose off-diagonal entries have standard deviation s has a largest eigenvalue of
    2 sqrt(n) s; eigenvalues below twice that, where noise decides, are raised to it.

    Parameters
    ----------
    statistics : ndarray of shape (n_global, n_global + n_features)
        ``C.T @ C`` and ``C.T @ X``, with noise.
    deviation : float
        The standard deviation of an entry's noise.
    weight : float
        That of ``C.T @ C``, such as `BALANCE`.
    """
    n = len(statistics)
    A = statistics[:, :n] / weight
    values, vectors = np.linalg.eigh((A + A.T) / 2)
    values = np.maximum(values, 2 * sqrt(2 * n) * deviation / weight)
    return np.hstack([(vectors * values) @ vectors.T, statistics[:, n:]])
