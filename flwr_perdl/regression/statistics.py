"""One exchange: mixed regression from the clients' sufficient statistics, and the choice of k.

======================================= ====================================================
paper (Su, Xu, Yang, NeurIPS 2022)      here
======================================= ====================================================
``L(theta, lambda; D_i)`` (equation 7)  a function of ``X' X``, ``X' y``, ``y' y`` and ``n``
``lambda_i``                            ``Mixture.weights[i]``
``theta_1, ..., theta_k``               ``Mixture.centers``
======================================= ====================================================

Not in the paper. Where clients may send their ``(d + 1)^2 + 1`` second moments, the server
alternates assignments and least squares from as many starts as it likes. If clients send them by
fold, it also chooses k by cross-validation: what a fold holds out is predicted by the models of the
other folds, weighted by how well they fit the client there.

What each party learns: the server every client's second moments, per fold (of few points these can
give single points away); a client the models.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp, softmax

from flwr_perdl.core.checks import (
    LARGE,
    MOST_CLUSTERS,
    MOST_ITERATIONS,
    Matrix,
    as_array,
    check_array,
    check_count,
    check_list,
    check_magnitude,
    check_real,
    check_rng,
)

#: The alternation ends where the weights change by less, or the log-likelihood, per point, rises by
#: less than this: with too many models, clients move between them for hundreds of iterations.
_SETTLED, _GAIN = 1e-3, 1e-5
_MOST_ITERATIONS = 200
#: Iterations after which only the likeliest start goes on.
_TRIAL = 10
#: Share of the least error by which that of fewer models may always exceed it.
_SLACK = 0.001
#: The temperature of `choose_mixture`'s assignments, in units of the noise's variance: 1 is the
#: posterior of a Gaussian mixture, but real clients are rarely in one cluster exactly.
_SOFTNESS = 2.0
#: Directions of the features, of length one each, along which all points vary less do not count.
_COLLINEAR = 1e-12


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
    X, y : ndarray of shape (n_samples, d) and (n_samples,)
        Features and responses.
    n_folds : int, default 1
        Into how many folds to part the points at random.
    rng : numpy.random.Generator, optional
        Source of the folds; needed for more than one.

    Returns
    -------
    ndarray of shape (n_folds, (d + 1)^2 + 1)
        Number of points, and ``[X y]' [X y]``.

    Raises
    ------
    ValueError
        If the data are not finite or not of like lengths, or there is no ``rng`` for several folds.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.regression import sufficient_statistics
    >>> sufficient_statistics(np.array([[1.0], [2.0]]), np.array([3.0, 4.0]))
    array([[ 2.,  5., 11., 11., 25.]])
    """
    X = check_array("X", X, floor=np.inf)
    y = check_array("y", y, ndim=1, columns=len(X), floor=np.inf)
    check_count("n_folds", n_folds, 1, 10_000)
    if n_folds > 1 and rng is None:
        raise ValueError("rng must be given for more than one fold, got None.")
    if rng is not None:
        check_rng(rng)
    order = np.arange(len(X)) if rng is None else rng.permutation(len(X))
    joined = np.column_stack([X, y])[order]
    folds = (joined[fold::n_folds] for fold in range(n_folds))
    return np.stack([np.concatenate([[len(F)], (F.T @ F).ravel()]) for F in folds])


def check_statistics(statistics: Matrix, ndim: int) -> Matrix:
    """Return the clients' statistics, if there are any and their width is that of some d."""
    statistics = check_array("statistics", statistics, ndim=ndim, min_rows=1).astype(float)
    check_magnitude("statistics", statistics, floor=np.inf)
    width = statistics.shape[-1]
    if width < 5 or width != isqrt(width - 1) ** 2 + 1:
        raise ValueError(f"statistics must have (d + 1)^2 + 1 columns, got {width}.")
    diagonal = statistics[..., 1 :: isqrt(width - 1) + 1]
    if min(statistics[..., 0].min(), diagonal.min()) < 0 or not statistics[..., 0].any():
        raise ValueError("statistics must have no negative count or square, and a point at least.")
    return statistics


def _starts(n_clients: int, n_clusters: int, restarts: int, rng: np.random.Generator) -> Matrix:
    """Draw the weights to start from, (restarts, n_clients, n_clusters)."""
    check_count("n_clusters", n_clusters, 1, MOST_CLUSTERS)
    check_count("restarts", restarts, 1, MOST_ITERATIONS)
    check_rng(rng)
    size = (restarts if n_clusters > 1 else 1, n_clients)
    return rng.dirichlet(np.full(n_clusters, 0.3), size=size)


class _Sums(NamedTuple):
    """All clients' second moments, with residuals of the pooled model instead of responses.

    The origin of the responses is then of no consequence.
    """

    #: Number of points, (n_clients,).
    n: Matrix
    #: Upper triangles of ``[X r]' [X r]``, (n_clients, (d + 1) (d + 2) / 2).
    packed: Matrix
    #: The pooled model, (d,).
    pooled: Matrix


def _add_sums(statistics: Matrix) -> _Sums:
    moments = _moments(statistics)
    pooled = _fit_pooled(moments.sum(axis=0))
    packed = moments[:, *np.triu_indices(len(pooled) + 1)]
    turn = np.append(-pooled, 1.0)
    last = moments @ turn
    last[:, -1] = last @ turn
    packed[:, np.cumsum(np.arange(len(turn), 0, -1)) - 1] = last
    return _Sums(statistics[:, 0], packed, pooled)


def _moments(statistics: Matrix) -> Matrix:
    """Return every client's ``[X y]' [X y]``, (n_clients, d + 1, d + 1)."""
    d = isqrt(statistics.shape[1] - 1) - 1
    return statistics[:, 1:].reshape(-1, d + 1, d + 1)


def _fit_pooled(total: Matrix) -> Matrix:
    """Return least squares on the points of all clients, whatever their features' scales."""
    scale = np.sqrt(np.maximum(np.diag(total)[:-1], np.finfo(float).tiny))
    gram = total[:-1, :-1] / np.outer(scale, scale)
    theta: Matrix = np.linalg.lstsq(gram, total[:-1, -1] / scale, rcond=_COLLINEAR)[0] / scale
    return theta


def _fit(sums: _Sums, starts: Matrix, strengths: Sequence[float]) -> list[Mixture]:
    """Return the best mixture of all starts for every shrinkage, the largest cluster first."""
    runs = _alternate(sums, starts, np.asarray(strengths))
    orders = [np.argsort(-run.weights.sum(axis=0), kind="stable") for run in runs]
    return [
        run._replace(centers=sums.pooled + run.centers[order], weights=run.weights[:, order])
        for run, order in zip(runs, orders, strict=True)
    ]


def _alternate(sums: _Sums, starts: Matrix, strengths: Matrix) -> list[Mixture]:
    """Run EM with assignments at a higher temperature; return the best run for every shrinkage.

    All runs go at once: both steps are products with all clients' moments, which are so read once.
    After ``_TRIAL`` iterations the likeliest start goes on alone.
    """
    (n_starts, m, k), d = starts.shape, len(sums.pooled)
    n, packed, points = sums.n, sums.packed, max(float(sums.n.sum()), 1)
    rows, columns = np.triu_indices(d + 1)
    times = np.where(rows == columns, 1.0, 2.0)
    square = np.zeros((d + 1, d + 1), np.intp)
    square[rows, columns] = square[columns, rows] = np.arange(len(rows))
    tiny = np.finfo(float).tiny
    rounding = np.finfo(float).eps ** 2 * packed.sum(axis=0)[square[d, d]] / points
    prior = strengths[:, None, None] * packed.sum(axis=0)[square][:d, :d] / points
    prior += 1e-9 * np.maximum(np.einsum("sdd->sd", prior), tiny)[..., None] * np.eye(d)
    group = np.repeat(np.arange(len(strengths)), n_starts)
    weights = np.tile(starts.swapaxes(1, 2), (len(strengths), 1, 1))  # (n_runs, k, m)
    gained, best = np.full(len(group), -np.inf), dict[int, Mixture]()
    for iteration in range(1, _MOST_ITERATIONS + 1):
        own = (weights.reshape(-1, m) @ packed)[:, square].reshape(-1, k, d + 1, d + 1)
        centers = _solve(own[..., :d, :d] + prior[group][:, None], own[..., :d, d])
        signed = np.concatenate([-centers, np.ones((*centers.shape[:2], 1))], axis=2)
        outer = (times * signed[..., rows] * signed[..., columns]).reshape(-1, len(rows))
        squares = np.maximum(outer @ packed.T, 0).reshape(-1, k, m)
        variance = (weights * squares).sum(axis=(1, 2)) / points
        variance = np.maximum(variance, max(rounding, tiny))  # 0 for data without noise
        shares = np.log(np.maximum(weights.mean(axis=2), tiny))[..., None]
        scores = shares - squares / (2 * _SOFTNESS * variance)[:, None, None]
        fits = logsumexp(scores, axis=1).sum(axis=1) - n.sum() / (2 * _SOFTNESS) * np.log(variance)
        last, weights = weights, softmax(scores, axis=1)
        settled = np.abs(weights - last).max(axis=(1, 2)) <= _SETTLED
        settled |= (fits - gained <= _GAIN * n.sum()) | (iteration == _MOST_ITERATIONS)
        for i in np.flatnonzero(settled):
            known = best.get(int(group[i]))
            if known is None or fits[i] > known.objective:
                run = Mixture(centers[i], weights[i].T, float(variance[i]), float(fits[i]))
                best[int(group[i])] = run
        going = ~settled
        if iteration == _TRIAL:
            for j in range(len(strengths)):
                mine = np.flatnonzero(going & (group == j))
                leader = mine[fits[mine].argmax()] if len(mine) else -1
                if j in best and best[j].objective >= fits[leader]:
                    leader = -1
                going[mine[mine != leader]] = False
        group, weights, gained = group[going], weights[going], fits[going]
        if not len(group):
            break
    return [best[j] for j in range(len(strengths))]


def _solve(A: Matrix, b: Matrix) -> Matrix:
    """Least squares by normal equations, (..., d, d) and (..., d), of any rank."""
    try:
        return np.linalg.solve(A, b[..., None])[..., 0]
    except np.linalg.LinAlgError:
        pairs = zip(A.reshape(-1, *A.shape[-2:]), b.reshape(-1, b.shape[-1]), strict=True)
        solved = [np.linalg.lstsq(S, c, rcond=None)[0] for S, c in pairs]
        return np.stack(solved).reshape(b.shape)


def choose_mixture(
    statistics: Matrix,
    candidates: Sequence[int] = (1, 2, 3, 4, 5, 6),
    *,
    rng: np.random.Generator,
    shrinkage: float | Sequence[float] = (1.0, 10.0, 100.0),
    restarts: int = 4,
) -> Choice:
    """Fit mixtures of every candidate size, and keep the smallest that predicts as well as any.

    A mixture alternates soft assignments and least squares on the clients' second moments. The
    choice is the smallest whose error exceeds the lowest by at most one standard error, of the
    clients' differences, and a thousandth. A model that is no client's likeliest is left out, if
    ``candidates`` allows fewer. Assignments are softer than a Gaussian mixture's posterior: real
    clients are rarely in exactly one cluster.

    Parameters
    ----------
    statistics : ndarray of shape (n_clients, n_folds, (d + 1)^2 + 1)
        From :func:`sufficient_statistics`, at least two folds.
    candidates : sequence of int, default (1, 2, 3, 4, 5, 6)
        Numbers of clusters.
    rng : numpy.random.Generator
        Source of the starts.
    shrinkage : float or sequence of float, default (1, 10, 100)
        How many points the model of all clients together, their least squares, counts for in
        every cluster. 0: the least squares of the cluster's own points. Of several, the one with
        which the least error is reached.
    restarts : int, default 4
        Starts; after ten iterations the one with the largest likelihood goes on.

    Returns
    -------
    Choice
        ``mixture``, fitted to all folds: ``centers`` (k, d), the largest cluster's first;
        ``weights`` (n_clients, k), how likely each client is in each; ``variance`` of the noise;
        ``objective``, the tempered log-likelihood. ``candidates``, and in ``errors`` for each the
        mean squared error of what was held out.

    Raises
    ------
    ValueError
        If the statistics have no two folds or no width that there is, there is nothing to choose
        from, or an option breaks its rule.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.regression import choose_mixture, sufficient_statistics
    >>> rng = np.random.default_rng(0)
    >>> X = rng.standard_normal((12, 20, 1))
    >>> y = X[..., 0] * np.where(np.arange(12) % 2, 2, -1)[:, None] + rng.normal(0, 0.1, (12, 20))
    >>> folds = np.stack([sufficient_statistics(X[i], y[i], 4, rng=rng) for i in range(12)])
    >>> choose_mixture(folds, (1, 2, 3), rng=rng).mixture.centers.shape
    (2, 1)
    """
    statistics = check_statistics(statistics, 3)
    if statistics.shape[1] < 2:
        raise ValueError(f"statistics must have at least 2 folds, got {statistics.shape[1]}.")
    if not len(check_list("candidates", candidates)):
        raise ValueError("candidates must have at least one number, got none.")
    given = np.atleast_1d(as_array("shrinkage", shrinkage)).tolist()
    strengths = [float(check_real("shrinkage", strength, 0, LARGE)) for strength in given]
    if not len(strengths):
        raise ValueError("shrinkage must have at least one number, got none.")
    for k in candidates:
        check_count("candidates", k, 1, MOST_CLUSTERS)
    whole = statistics.sum(axis=1)
    tried = np.zeros((len(strengths), len(candidates), len(whole)))
    for fold in np.moveaxis(statistics, 1, 0):
        sums, moments = _add_sums(whole - fold), _moments(fold)
        for i, k in enumerate(candidates):
            mixtures = _fit(sums, _starts(len(whole), k, restarts, rng), strengths)
            for squares, mixture in zip(tried[:, i], mixtures, strict=True):
                own = mixture.weights @ mixture.centers
                signed = np.column_stack([-own, np.ones(len(own))])
                squares += ((moments @ signed[..., None])[..., 0] * signed).sum(axis=1)
    chosen = tried.sum(axis=2).min(axis=1).argmin()
    squares = tried[chosen]
    errors = squares.sum(axis=1) / max(float(whole[:, 0].sum()), 1)
    best = min(k for k, good in zip(candidates, _find_as_good(squares), strict=True) if good)
    starts = _starts(len(whole), best, restarts, rng)
    (mixture,) = _fit(_add_sums(whole), starts, strengths[chosen : chosen + 1])
    used = np.unique(mixture.weights.argmax(axis=1))
    if len(used) >= min(candidates):
        weights = mixture.weights[:, used]
        weights = weights / weights.sum(axis=1, keepdims=True)
        mixture = mixture._replace(centers=mixture.centers[used], weights=weights)
    return Choice(mixture, tuple(candidates), tuple(errors.tolist()))


def _find_as_good(squares: Matrix) -> NDArray[np.bool_]:
    """Tell which rows of sums per client exceed the least by a standard error at most."""
    excess = squares - squares[squares.sum(axis=1).argmin()]
    error = np.sqrt(squares.shape[1] * excess.var(axis=1))
    slack = _SLACK * max(squares.sum(axis=1).min(), 0)  # of no second moments it may be negative
    good: NDArray[np.bool_] = excess.sum(axis=1) <= error + slack
    return good
