"""One exchange: mixed regression from the clients' sufficient statistics, and the choice of k.

======================================= ====================================================
paper (Su, Xu, Yang, NeurIPS 2022)      here
======================================= ====================================================
``L(theta, lambda; D_i)`` (equation 7)  a function of ``X' X``, ``X' y``, ``y' y`` and ``n``
``lambda_i``                            ``Mixture.weights[i]``
``theta_1, ..., theta_k``               ``Mixture.centers``
======================================= ====================================================

Not in the paper. Where clients may send their ``(d + 1)^2 + 1`` second moments, Phase 2 needs no
further exchange: the server alternates assignments and least squares from as many starts as it
likes. If clients send them by fold, it can also choose k by cross-validation: what a fold holds out
is predicted by the models of the other folds, weighted by how well they fit the client there.

What each party learns: the server every client's second moments, per fold (with few points or a
constant feature these can give single points away: clients with few points should take no part); a
client the models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp, softmax

from flwr_perdl._checks import Matrix, check_array, check_count, check_real

#: Relative change of the weights at which the alternation ends.
_SETTLED = 1e-3
_MOST_ITERATIONS = 200


class Mixture(NamedTuple):
    """Regression models, and whose they are."""

    #: Models, (k, d).
    centers: Matrix
    #: How likely each client is in each cluster, rows sum to one, (n_clients, k).
    weights: Matrix
    #: Variance of the noise.
    variance: float
    #: Log-likelihood, tempered; the largest of all starts.
    objective: float


class Choice(NamedTuple):
    """The mixture with the fewest clusters that predicts as well as any."""

    mixture: Mixture
    #: Numbers of clusters tried.
    candidates: tuple[int, ...]
    #: Mean squared error of what was held out, per candidate.
    errors: tuple[float, ...]


def sufficient_statistics(
    X: Matrix, y: Matrix, n_folds: int = 1, *, rng: np.random.Generator | None = None
) -> Matrix:
    """Return a client's second moments, by fold.

    Parameters
    ----------
    X : ndarray of shape (n_samples, d)
        Features.
    y : ndarray of shape (n_samples,)
        Responses.
    n_folds : int, default 1
        Into how many folds to part the points at random.
    rng : numpy.random.Generator, optional
        Source of the folds; needed for more than one.

    Returns
    -------
    ndarray of shape (n_folds, (d + 1)^2 + 1)
        Number of points, and ``[X y]' [X y]``.
    """
    X = check_array("X", X)
    y = check_array("y", y, ndim=1)
    check_count("n_folds", n_folds, 1)
    if n_folds > 1 and rng is None:
        raise ValueError("rng must be given for more than one fold, got None.")
    order = np.arange(len(X)) if rng is None else rng.permutation(len(X))
    joined = np.column_stack([X, y])[order]
    folds = (joined[fold::n_folds] for fold in range(n_folds))
    return np.stack([np.concatenate([[len(F)], (F.T @ F).ravel()]) for F in folds])


def fit_mixture(
    statistics: Matrix,
    n_clusters: int,
    *,
    rng: np.random.Generator,
    softness: float = 2.0,
    shrinkage: float = 100.0,
    restarts: int = 4,
) -> Mixture:
    """Alternate soft assignments and least squares on the clients' second moments.

    Parameters
    ----------
    statistics : ndarray of shape (n_clients, (d + 1)^2 + 1)
        Sums over folds of :func:`sufficient_statistics`.
    n_clusters : int
        Number of models k.
    rng : numpy.random.Generator
        Source of the starts.
    softness : float, default 2
        The assignment's temperature in units of the noise's variance: 1 is the posterior of a
        Gaussian mixture; more allows for clients that are in no cluster exactly.
    shrinkage : float, default 100
        How many points the model of all clients together counts for in every cluster.
    restarts : int, default 4
        Starts; the largest likelihood wins.

    Returns
    -------
    Mixture
        The largest cluster first.
    """
    statistics = check_array("statistics", statistics, min_rows=1)
    check_count("n_clusters", n_clusters, 1)
    check_real("softness", softness, 0, open_low=True)
    check_real("shrinkage", shrinkage, 0)
    check_count("restarts", restarts, 1)
    starts = (
        rng.dirichlet(np.full(n_clusters, 0.3), size=len(statistics))
        for _ in range(restarts if n_clusters > 1 else 1)
    )
    runs = [_alternate(statistics, start, softness, shrinkage) for start in starts]
    best = max(runs, key=lambda run: run.objective)
    order = np.argsort(-best.weights.sum(axis=0), kind="stable")
    return best._replace(centers=best.centers[order], weights=best.weights[:, order])


def _alternate(statistics: Matrix, weights: Matrix, softness: float, shrinkage: float) -> Mixture:
    """Run EM with assignments at a higher temperature, from given assignments."""
    n, d = statistics[:, 0], round(np.sqrt(statistics.shape[1] - 1)) - 1
    moments = statistics[:, 1:].reshape(len(n), d + 1, d + 1)
    total = moments.sum(axis=0)
    tiny = np.finfo(float).tiny
    prior = np.diag(np.maximum(np.diag(total)[:d], tiny)) / max(n.sum(), 1)
    pooled = _solve((total[:d, :d] + prior)[None], total[None, :d, d])[0]
    for _ in range(_MOST_ITERATIONS):
        sums = np.tensordot(weights, moments, axes=(0, 0))
        centers = _solve(
            sums[:, :d, :d] + (shrinkage + 1e-9) * prior,
            sums[:, :d, d] + shrinkage * prior @ pooled,
        )
        squares = _squares(moments, centers)
        variance = max(float((weights * squares).sum() / max(n.sum(), 1)), tiny)
        shares = np.log(np.maximum(weights.mean(axis=0), tiny))
        scores = shares - squares / (2 * softness * variance)
        last, weights = weights, softmax(scores, axis=1)
        if np.abs(weights - last).max() <= _SETTLED:
            break
    fit = logsumexp(scores, axis=1).sum() - n.sum() / (2 * softness) * np.log(variance)
    return Mixture(centers, weights, variance, float(fit))


def _solve(A: Matrix, b: Matrix) -> Matrix:
    """Least squares by normal equations, (k, d, d) and (k, d), of any rank."""
    try:
        return np.linalg.solve(A, b[..., None])[..., 0]
    except np.linalg.LinAlgError:
        return np.stack([np.linalg.lstsq(S, c, rcond=None)[0] for S, c in zip(A, b, strict=True)])


def _squares(moments: Matrix, centers: Matrix) -> Matrix:
    """Return sums of squared residuals, (n_clients, k)."""
    signed = np.column_stack([-centers, np.ones(len(centers))])
    products = moments @ signed.T
    squares: Matrix = np.maximum(np.einsum("idk,kd->ik", products, signed), 0)
    return squares


def choose_mixture(
    statistics: Matrix,
    candidates: Sequence[int] = (1, 2, 3, 4, 5, 6),
    *,
    rng: np.random.Generator,
    softness: float = 2.0,
    shrinkage: float = 100.0,
    restarts: int = 4,
) -> Choice:
    """Fit mixtures of every candidate size, and keep the smallest that predicts as well as any.

    That is the smallest whose error exceeds the least by no more than one standard error; the error
    is of the difference between the two, over the clients.

    Parameters
    ----------
    statistics : ndarray of shape (n_clients, n_folds, (d + 1)^2 + 1)
        From :func:`sufficient_statistics`, at least two folds.
    candidates : sequence of int, default (1, 2, 3, 4, 5, 6)
        Numbers of clusters.
    rng : numpy.random.Generator
        Source of the starts.
    softness, shrinkage, restarts
        As in :func:`fit_mixture`.

    Returns
    -------
    Choice
        The mixture is fitted to all folds.
    """
    statistics = check_array("statistics", statistics, ndim=3, min_rows=1)
    if statistics.shape[1] < 2:
        raise ValueError(f"statistics must have at least 2 folds, got {statistics.shape[1]}.")
    options = {"softness": softness, "shrinkage": shrinkage}
    whole = statistics.sum(axis=1)
    d = round(np.sqrt(whole.shape[1] - 1)) - 1
    squares = np.zeros((len(candidates), len(whole)))
    for own_squares, k in zip(squares, candidates, strict=True):
        for fold in np.moveaxis(statistics, 1, 0):
            mixture = fit_mixture(whole - fold, k, rng=rng, restarts=restarts, **options)
            own = mixture.weights @ mixture.centers
            moments = fold[:, 1:].reshape(len(fold), d + 1, d + 1)
            signed = np.column_stack([-own, np.ones(len(own))])
            own_squares += np.einsum("id,ide,ie->i", signed, moments, signed)
    errors = squares.sum(axis=1) / max(float(whole[:, 0].sum()), 1)
    best = min(k for k, good in zip(candidates, _as_good(squares), strict=True) if good)
    mixture = fit_mixture(whole, best, rng=rng, restarts=restarts, **options)
    return Choice(mixture, tuple(candidates), tuple(errors.tolist()))


def _as_good(squares: Matrix) -> NDArray[np.bool_]:
    """Tell which rows of sums per client exceed the least by a standard error at most."""
    excess = squares - squares[squares.sum(axis=1).argmin()]
    error = np.sqrt(squares.shape[1] * excess.var(axis=1))
    good: NDArray[np.bool_] = excess.sum(axis=1) <= error
    return good
