"""Averages of what clients send, the plain one and those that a few bad clients do not move."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.arrays import row_norms
from flwr_perdl.core.checks import Matrix

#: Share of the clients that the trimmed mean leaves out at either end.
TRIM = 0.2
#: A client counts for at most this many times the median.
CAP = 3.0
#: Points this many median distances from the geometric median are outliers.
FAR = 5.0
#: Points this many times as long as the median start no model.
LONG = 10
#: Points this many standard deviations from the median, in the direction of most spread, are too.
SPREAD = 4.0
#: Fewer points than this have no direction of most spread.
_FEWEST = 6
#: About so many points have their coordinates' medians taken, where the geometric median's search
#: begins if it does not begin at the mean.
_START = 64
#: Distances below this (in float32: below 1.2e-5), in units of the points' own size, are rounding,
#: not disagreement.
SAME = 1e-9


def consistent(points: Matrix) -> NDArray[np.bool_]:
    """Return which points are consistent with the others, as long as most of them are.

    First, points far from the geometric median of all are outliers. Then, again and again, those
    that lie apart in the direction in which the rest spreads most: many dimensions hide a group
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


def supported(
    points: Matrix, n_groups: int = 1, group: Callable[[Matrix], NDArray[np.intp]] | None = None
) -> NDArray[np.intp]:
    """Return the points that models may start from.

    Set aside are those more than ``LONG`` times as long as the median, and those that are alone in
    their group, as long as half of all are left and can be grouped so that none is alone. ``group``
    returns the group of each of at least ``n_groups`` points, as a count from 0; without it all are
    of one. The rows of ``points`` are returned in ascending order.
    """
    lengths = row_norms(points)
    kept = near = np.flatnonzero(lengths <= LONG * np.median(lengths))
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


def capped(sizes: Matrix, bound: float = CAP) -> Matrix:
    """Return the sizes, those above ``bound`` times the median brought down to it."""
    return np.minimum(sizes, bound * np.median(sizes)) if len(sizes) else sizes


#: What a rule does to contributions that stand out, in reports.
EFFECTS = {
    "filtered": "left out",
    "clip": "clipped",
    "trimmed": "trimmed",
    "median": "down-weighted",
    "geometric-median": "down-weighted",
    "mean": "far",
    "weighted": "far",
}


def far(points: Matrix, average: Matrix) -> Matrix:
    """Return 1.0 for points farther than ``FAR`` median distances from their average, else 0.0."""
    distances = row_norms((points - average).reshape(len(points), -1))
    return (distances > reach(distances, float(np.linalg.norm(average)))).astype(float)


def shortening(stack: Matrix) -> Matrix:
    """Return the factors, at most 1, that bring contributions down to ``CAP`` medians of length.

    A contribution's length is the norm over all axes but the first, the median that of those that
    are not zero.
    """
    flat = stack.reshape(len(stack), -1)
    with np.errstate(over="ignore"):
        lengths = row_norms(flat)
    tiny = np.sqrt(np.finfo(lengths.dtype).smallest_normal) / np.finfo(lengths.dtype).eps
    odd = ~((lengths > tiny) & (lengths < 1 / tiny))  # the squares are out of range
    if odd.any():
        scale = np.abs(flat[odd]).max(axis=1, initial=0)
        lengths[odd] = scale * row_norms(flat[odd] / np.where(scale > 0, scale, 1)[:, None])
    bound = CAP * np.median(lengths[lengths > 0]) if lengths.any() else 0.0
    long = lengths > bound
    return np.where(long, bound / np.where(long, lengths, 1), 1)


def average_of(points: Matrix, method: str, weights: Matrix) -> Matrix:
    """Return the average of ``points``, at least one, over their first axis.

    "geometric-median"; "median", per coordinate; "trimmed", the mean per coordinate without a fifth
    of the points at either end; any other method is the mean, weighted.
    """
    if method == "geometric-median":
        return geometric_median(points)
    if method == "median":
        return np.median(points, axis=0)
    if method == "trimmed":
        # Rounded down: of fewer than five points none is cut, and the mean is what is left.
        cut = int(TRIM * len(points))
        trimmed: Matrix = np.sort(points, axis=0)[cut : len(points) - cut].mean(axis=0)
        return trimmed
    return np.tensordot(weights / weights.sum(), points, axes=1)


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
