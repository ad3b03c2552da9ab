"""Every client's own linear model from sums over its points: a mixed model."""

from __future__ import annotations

from math import isqrt
from typing import NamedTuple

import numpy as np

from flwr_perdl.core.checks import Matrix, check_flag
from flwr_perdl.regression.statistics import check_statistics

#: Iterations end where the log-likelihood per point rises by less, or after so many.
GAIN, ITERATIONS = 1e-6, 1000
#: Directions along which points vary less do not count; nor does less noise. Shares of the most.
_TINY = 1e-10


class MixedModel(NamedTuple):
    """A linear model whose coefficients are normally distributed over clients.

    Attributes
    ----------
    common : ndarray of shape (d,)
        The mean coefficients.
    models : ndarray of shape (n_clients, d)
        The clients' own: conditional means given their points.
    between : ndarray of shape (d, d)
        Covariance of the coefficients over clients.
    noise : float
        Variance of the noise.
    history : list of float
        Log-likelihood by iteration.
    """

    common: Matrix
    models: Matrix
    between: Matrix
    noise: float
    history: list[float]


def _solve(A: Matrix, b: Matrix) -> Matrix:
    return np.asarray(np.linalg.lstsq(A, b, rcond=_TINY)[0])


def fit_mixed_model(statistics: Matrix, *, correlated: bool) -> MixedModel:
    """Fit random coefficients by expectation-maximization of the likelihood.

    Laird and Ware, "Random-effects models for longitudinal data", Biometrics 1982. The common
    coefficients are the generalized least squares of each iteration's variances.

    Parameters
    ----------
    statistics : ndarray of shape (n_clients, (d + 1)^2 + 1)
        Every client's sums; of a feature of ones the random coefficient is an intercept.
    correlated : bool
        Whether coefficients have covariances too, or a variance each.

    Returns
    -------
    MixedModel

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.regression import fit_mixed_model, sufficient_statistics
    >>> rng = np.random.default_rng(0)
    >>> slopes = rng.normal(1.0, 0.5, 40)
    >>> X = rng.standard_normal((40, 20, 1))
    >>> sums = [sufficient_statistics(x, s * x[:, 0])[0] for x, s in zip(X, slopes, strict=True)]
    >>> found = fit_mixed_model(np.stack(sums), correlated=False)
    >>> bool(np.allclose(found.models[:, 0], slopes))
    True
    """
    check_flag("correlated", correlated)
    statistics, history = check_statistics(statistics, 2), list[float]()
    d, n = isqrt(statistics.shape[1] - 1) - 1, statistics[:, 0].sum()
    moments = statistics[:, 1:].reshape(-1, d + 1, d + 1)
    XX, Xy, yy = moments[:, :d, :d], moments[:, :d, d], moments[:, d, d].sum()

    def squares(models: Matrix) -> float:
        """Return the sum of squared residuals; ``models`` are (d,), or each client's."""
        fitted = np.einsum("mij,mj->mi", XX, np.broadcast_to(models, Xy.shape))
        return float(yy + np.sum(models * (fitted - 2 * Xy)))

    sizes, floor = np.einsum("mii->i", XX), _TINY * (yy / n or 1.0)
    noise = max(squares(_solve(XX.sum(axis=0), Xy.sum(axis=0))) / n, floor)
    between = np.diag(np.divide(noise * n / d, sizes, np.zeros(d), where=sizes > 0))
    while True:
        values, vectors = np.linalg.eigh(between)
        root = vectors * np.sqrt(np.maximum(values, 0))
        inner = np.eye(d) + root.T @ XX @ root / noise
        spread = root @ np.linalg.inv(inner) @ root.T  # of coefficients, given the points
        gain = XX @ spread / noise
        left = Xy - np.einsum("mij,mj->mi", gain, Xy)
        common = _solve((XX - gain @ XX).sum(axis=0), left.sum(axis=0))
        rest = Xy - XX @ common
        own = np.einsum("mij,mj->mi", spread, rest) / noise
        fit = (squares(common) - np.sum(rest * own)) / noise
        fit += n * np.log(2 * np.pi * noise) + np.linalg.slogdet(inner)[1].sum()
        history.append(float(-fit / 2))
        if len(history) == ITERATIONS or (history[1:] and history[-1] < history[-2] + GAIN * n):
            return MixedModel(common, common + own, between, noise, history)
        between = (own.T @ own + spread.sum(axis=0)) / len(own)
        if not correlated:
            between *= np.eye(d)
        total = squares(common + own) + noise * np.einsum("mii->", gain)
        noise = max(float(total / n), floor)
