"""Aggregation: the mean, or a rule that withstands a few malicious (Byzantine) clients.

`aggregate` applies a rule of `RULES`, and says of each point how far the rule took it for an
outlier: the atoms of PerMA, the models of FedX and the changes of any model
(`flwr_perdl.core.models.aggregate_models`). A rule is added to `RULES`, and every strategy takes
its name.

A node of a network trusts its own array ``psi_k``. `NEIGHBOR_RULES` replace the weighted mean of
its neighborhood: ``psi_l`` are the arrays that it received, ``a_kl`` their weights, which sum to
one with its own ``a_kk``, and ``n`` is ``n_liars``.

============================================  ===================================================
literature                                    here
============================================  ===================================================
self-centered clipping (ClippedGossip)        `clip_neighbors`
``w_k = psi_k + sum_l a_kl                    a neighbor farther than ``tau_k`` counts as if it
min(1, tau_k / |psi_l - psi_k|)               were at this distance
(psi_l - psi_k)``
``tau_k^2 = sum_l a_kl E|psi_l - psi_k|^2     ``tau_k`` is the distance of the farthest neighbor
/ delta``, honest ``l``, malicious weight delta  but ``n``: no node knows who is honest
trimmed mean (BRIDGE-T)                       `trim_neighbors`
``w_k = sum_l psi_l / (d_k - 2n + 1)`` over   ``sum_l a_kl psi_l / sum_l a_kl`` over the same,
``k`` and the neighbors, but the ``n``        which is the paper's where all weights are equal
largest and the ``n`` smallest of these,
by coordinate
============================================  ===================================================

Sources. He, Karimireddy, Jaggi, "Byzantine-robust decentralized learning via ClippedGossip"
(first "via self-centered clipping"), arXiv:2202.01545, 2022; its nodes send momentum steps, ours
what ``fit`` returns. Fang, Yang, Bajwa, "BRIDGE: Byzantine-resilient decentralized gradient
descent", IEEE Transactions on Signal and Information Processing over Networks 8, 2022; its nodes
combine before the step, ours also after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.arrays import row_norms
from flwr_perdl.core.checks import Matrix

#: Share of the points that the trimmed mean leaves out at either end: fewer than a fifth may lie.
TRIM = 0.2
#: A client counts for at most this many times the median, by its samples and by its length.
CAP = 3.0
#: Points this many median distances from the geometric median are outliers.
FAR = 5.0
#: Points this many times as long as the median start no model.
MAX_LENGTH = 10
#: Points this many standard deviations from the median, in the direction of most spread, are
#: outliers.
SPREAD = 4.0
#: Fewer points than this have no direction of most spread.
_FEWEST = 6
#: About so many points have their coordinates' medians taken, where the geometric median's search
#: begins if it does not begin at the mean.
_START = 64
#: Distances below this (in float32: below 1.2e-5), in units of the points' own size, are rounding,
#: not disagreement.
SAME = 1e-9
#: In reports: that a reply has no part in what the replies come to.
OUTLIER = "left out"


class Aggregate(NamedTuple):
    """What points come to."""

    #: Of the shape and dtype of a point; of several groups (k, d).
    value: Matrix
    #: To which share of each point the rule did what its effect says, (n,).
    outlyingness: Matrix
    #: The weight of the points that count; where it is 0 the value is 0. Of several groups (k,).
    weight: Any


class Rule(NamedTuple):
    """How points become one."""

    #: What it does to points that stand out, in reports.
    effect: str
    #: An average of (n, d) in which all points count alike; None: the mean by weights.
    average: Callable[[Matrix], Matrix] | None = None
    #: By how much each point is multiplied before, (n,), at most 1; None: by 1. Weights are then
    #: capped.
    factors: Callable[[Matrix], NDArray[Any]] | None = None
    #: The points' shares in an average that hangs on distances, (n,); None: it is by coordinate.
    shares: Callable[[Matrix], Matrix] | None = None


def aggregate(rule: str, points: Matrix, weights: Matrix) -> Aggregate:
    """Return what points come to by a rule.

    Parameters
    ----------
    rule : str
        A name of `RULES`.
    points : ndarray of shape (n, d)
        At least one.
    weights : ndarray of shape (n,)
        At least 0.
    """
    _, average, find_factors, _ = RULES[rule]
    factors = np.ones(1) if find_factors is None else find_factors(points)
    if find_factors is not None:
        points, weights = points * factors[:, None], cap_sizes(weights) * (factors > 0)
    total = float(weights.sum())
    if not total:
        return Aggregate(np.zeros_like(points[0]), np.zeros(len(points)), 0.0)
    found = np.tensordot(weights / total, points, axes=1) if average is None else average(points)
    value: Matrix = found.astype(points.dtype, copy=False)
    outlyingness = mark_far(points, value) if find_factors is None else 1 - factors
    return Aggregate(value, outlyingness, total)


def share_out(rule: str, points: Matrix, weights: Matrix) -> tuple[Matrix, Matrix]:
    """Return the shares of points in what they come to by a robust rule, and their outlyingness.

    The rule is none by coordinate: it asks for the points' lengths and distances alone.
    """
    _, _, find_factors, find_shares = RULES[rule]
    if find_shares is not None:
        shares = find_shares(points)
        return shares, mark_far(points, shares @ points)
    factors = np.ones(len(points)) if find_factors is None else find_factors(points)
    sizes = cap_sizes(weights)
    return sizes * factors / (sizes * (factors > 0)).sum(), 1 - factors


# Rules --------------------------------------------------------------------------------------------


def keep_consistent(points: Matrix) -> NDArray[np.bool_]:
    """Return which points are consistent with the others, as long as most of them are.

    First, points far from the geometric median of all are outliers. Then, again and again, those
    that are far apart in the direction in which the rest spreads most: many dimensions hide a group
    of points that pull together, each of them no farther out than the others, but not along their
    common direction (the filter of Diakonikolas et al., "Being Robust (in High Dimensions) Can Be
    Practical", ICML 2017, with robust scales in place of known ones). At least half are kept.
    """
    n = len(points)
    flat = points.reshape(n, -1)
    size = float(np.median(np.linalg.norm(flat, axis=1)))
    distances = np.linalg.norm(flat - geometric_median(flat, tol=1e-4, max_iter=50), axis=1)
    kept: NDArray[np.bool_] = distances <= reach(distances, size)
    while kept.sum() > max(_FEWEST, n / 2):
        rest = flat[kept] - flat[kept].mean(axis=0)
        along = rest @ _widest(rest)
        apart = np.abs(along - np.median(along))
        outlying = apart > SPREAD * max(1.4826 * float(np.median(apart)), _same(apart) * size)
        if not outlying.any() or (kept.sum() - outlying.sum()) < n / 2:
            break
        kept[np.flatnonzero(kept)[outlying]] = False
    return kept


def keep_supported(
    points: Matrix, n_groups: int = 1, group: Callable[[Matrix], NDArray[np.intp]] | None = None
) -> NDArray[np.intp]:
    """Return the points that models may start from.

    This leaves out points more than ``MAX_LENGTH`` times as long as the median, and those that are
    alone in their group, as long as half of all are left and can be grouped so that none is alone.
    ``group`` returns the group of each of at least ``n_groups`` points, as a count from 0; without
    it all are of one. The rows of ``points`` are returned in ascending order.
    """
    lengths = row_norms(points)
    kept = near = np.flatnonzero(lengths <= MAX_LENGTH * np.median(lengths))
    # Who stands alone has nobody who says the same; without it another one may stand alone.
    while group and n_groups > 1 and 2 * len(kept) >= max(len(points), 4 * n_groups):
        groups = group(points[kept])
        alone = np.bincount(groups)[groups] == 1
        if not alone.any():
            return kept
        kept = kept[~alone]
    return near


def reach(distances: Matrix, size: float) -> float:
    """Return the distance beyond which a point is far from the others, ``FAR`` medians.

    ``size`` is how long the points are: differences that are rounding beside it are none.
    """
    middle = [(len(distances) - 1) // 2, len(distances) // 2]
    median = float(np.partition(distances, middle)[middle].mean())  # np.median's checks take longer
    return FAR * max(median, _same(distances) * size)


def _same(distances: Matrix) -> float:
    """Return which distances are rounding in this dtype, in units of the points' own size."""
    return max(SAME, 100 * float(np.finfo(distances.dtype).eps))


def _widest(centered: Matrix, n_iter: int = 30) -> Matrix:
    """Return the direction in which centered points spread most, by power iteration."""
    lengths = np.linalg.norm(centered, axis=1)
    centered = centered / (lengths.max() or 1)
    direction: Matrix = centered[lengths.argmax()]
    for _ in range(n_iter):
        moved = (centered @ direction) @ centered
        length = np.linalg.norm(moved)
        if not length:
            break
        direction = moved / length
    return direction


def cap_sizes(sizes: Matrix) -> Matrix:
    """Return the sizes, those above ``CAP`` times the median brought down to it."""
    return np.minimum(sizes, CAP * np.median(sizes)) if len(sizes) else sizes


def mark_far(points: Matrix, average: Matrix) -> Matrix:
    """Return 1.0 for points farther than ``FAR`` median distances from their average, else 0.0."""
    distances = row_norms((points - average).reshape(len(points), -1))
    return (distances > reach(distances, float(np.linalg.norm(average)))).astype(float)


def clip_factors(stack: Matrix) -> Matrix:
    """Return the factors, at most 1, that bring contributions down to ``CAP`` medians of length.

    A contribution's length is the norm over all axes but the first, the median that of those that
    are not zero.
    """
    flat = stack.reshape(len(stack), -1)
    with np.errstate(over="ignore"):
        lengths = row_norms(flat)
    tiny = np.sqrt(np.finfo(lengths.dtype).smallest_normal) / np.finfo(lengths.dtype).eps
    extreme = ~((lengths > tiny) & (lengths < 1 / tiny))  # the squares are out of range
    if extreme.any():
        scale = np.abs(flat[extreme]).max(axis=1, initial=0)
        lengths[extreme] = scale * row_norms(flat[extreme] / np.where(scale > 0, scale, 1)[:, None])
    bound = CAP * np.median(lengths[lengths > 0]) if lengths.any() else 0.0
    long = lengths > bound
    return np.where(long, bound / np.where(long, lengths, 1), 1)


def trimmed_mean(points: Matrix) -> Matrix:
    """Return the mean per coordinate without the share ``TRIM`` of the points at either end."""
    # Rounded down: of fewer than five points none is cut, and the mean is what is left.
    cut = int(TRIM * len(points))
    trimmed: Matrix = np.sort(points, axis=0)[cut : len(points) - cut].mean(axis=0)
    return trimmed


def geometric_median(points: Matrix, *, tol: float = 1e-10, max_iter: int = 200) -> Matrix:
    """Return the point with the least sum of distances to ``points``.

    Weiszfeld's iteration, with Vardi and Zhang's step where it meets one of the points, until a
    step is ``tol`` times the largest coordinate.
    """
    flat = points.reshape(len(points), -1)
    scale = float(max(flat.max(initial=0), -flat.min(initial=0)))
    # The mean is near where nobody lies; else the median per coordinate is the better start.
    median, apart = flat.mean(axis=0), np.empty_like(flat)
    distances = row_norms(np.subtract(flat, median, out=apart))
    if not distances.max() <= reach(distances, scale):  # some pull the mean away
        median = np.median(flat[:: len(flat) // _START + 1], axis=0)
    for _ in range(max_iter if scale else 0):
        distances = row_norms(np.subtract(flat, median, out=apart))
        away = distances > np.finfo(flat.dtype).eps * scale
        weights = np.where(away, 1 / np.where(away, distances, 1), 0)
        towards = weights @ apart
        # At a point of the set the sum of distances has a kink: it is the minimum if the others
        # pull no harder than the points that lie here.
        pull = np.linalg.norm(towards)
        here = len(flat) - int(away.sum())
        if pull <= here:
            break
        step = (1 - here / pull) / weights.sum() * towards
        median = median + step
        if np.linalg.norm(step) <= tol * scale:
            break
    found: Matrix = median.reshape(points.shape[1:])
    return found


def nearness(points: Matrix) -> Matrix:
    """Return the shares of points in their geometric median: the nearer, the larger."""
    distances = row_norms(points - geometric_median(points)).astype(float)
    here = distances <= np.finfo(points.dtype).eps * np.abs(points).max(initial=0)
    weights = here.astype(float) if here.any() else 1 / distances
    shares: Matrix = weights / weights.sum()
    return shares


RULES: Mapping[str, Rule] = {
    "mean": Rule("far"),
    "filtered": Rule(OUTLIER, factors=keep_consistent),
    "clip": Rule("clipped", factors=clip_factors),
    "median": Rule("down-weighted", partial(np.median, axis=0)),
    "geometric-median": Rule("down-weighted", geometric_median, shares=nearness),
    "trimmed": Rule("trimmed", trimmed_mean),
}


# Neighborhoods ------------------------------------------------------------------------------------


def clip_neighbors(
    own: Matrix, received: Matrix, weights: Matrix, n_liars: int, distances: Matrix
) -> Matrix:
    """Return (p,) of a node's own (p,) and the received (s, p), of weights (s,), s >= 0.

    ``distances`` (s,) are those of the whole models, of which these are a part.
    """
    kept = np.sort(distances)[: max(len(distances) - n_liars, 0)]
    radius = kept.max(initial=0)
    far = distances > radius
    factors = np.where(far, radius / np.where(far, distances, 1), 1).astype(own.dtype)
    combined: Matrix = own + ((weights * factors)[:, None] * (received - own)).sum(axis=0)
    return combined


def trim_neighbors(
    own: Matrix, received: Matrix, weights: Matrix, n_liars: int, _distances: Matrix
) -> Matrix:
    """Return (p,) of a node's own (p,) and the received (s, p), of weights (s,), s >= 0."""
    order = np.argsort(received, axis=0, kind="stable")[n_liars : max(len(received) - n_liars, 0)]
    apart, shares = np.take_along_axis(received, order, axis=0) - own, weights[order]
    own_weight = 1 - weights.sum()
    total = own_weight + shares.sum(axis=0)
    combined: Matrix = own + (shares * apart).sum(axis=0) / np.where(total > 0, total, 1)
    return combined


NEIGHBOR_RULES: Mapping[str, Callable[..., Matrix]] = {
    "clip": clip_neighbors,
    "trimmed": trim_neighbors,
}
