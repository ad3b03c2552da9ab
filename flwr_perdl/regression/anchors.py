"""Clusters of the anchors' estimates: the end of Phase 1 (line 16).

======================================= ====================================================
paper (Su, Xu, Yang, NeurIPS 2022)      here
======================================= ====================================================
``theta_{i,T}``, i in H                 ``estimates[i]``
``Delta``                               ``separation``
``theta_hat_1, ..., theta_hat_k``       ``AnchorClusters.centers``
======================================= ====================================================

Deviation: the paper joins anchors closer than Delta/2. Without Delta (the default) the estimates
are joined by average linkage until k clusters are left, or, without k, until the merge height that
exceeds the one before it by the largest factor; groups of less than 2 % of the anchors are set
aside and the rest is grouped again, so that a few wild estimates stand for no cluster.

Also here: k-means, for one-shot clustering.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage

from flwr_perdl.core.checks import (
    LARGE,
    Matrix,
    check_array,
    check_count,
    check_real,
)

#: Merge heights that grow by less than this never part clusters.
_LEAST_RATIO = 1.5
#: A group with less than this share of the anchors is none.
_RARE = 0.02


class AnchorClusters(NamedTuple):
    """Groups of like estimates, the largest first."""

    #: Means of the groups, (n_clusters, d).
    centers: Matrix
    #: The group of each estimate; -1: in none.
    labels: NDArray[np.intp]


def cluster_anchors(
    estimates: Matrix,
    n_clusters: int | None = None,
    *,
    separation: float | None = None,
    max_clusters: int = 8,
) -> AnchorClusters:
    """Group anchors whose estimates are alike.

    Parameters
    ----------
    estimates : ndarray of shape (n_anchors, d)
        At least one.
    n_clusters : int, optional
        How many groups; by default found.
    separation : float, optional
        The paper's Delta: groups are what is connected by distances below half of it, and with
        ``n_clusters`` only the largest groups count.
    max_clusters : int, default 8
        Most groups, where neither is given.

    Returns
    -------
    AnchorClusters
        ``centers``, means of one to ``n_clusters`` groups, the largest first; ``labels``, the group
        of each estimate, -1: in none.

    Raises
    ------
    ValueError
        If there is no estimate, or a number is not positive.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.regression import cluster_anchors
    >>> estimates = np.array([[0.0], [0.1], [0.05], [5.0], [5.1]])
    >>> found = cluster_anchors(estimates, 2)
    >>> found.centers.round(2)
    array([[0.05],
           [5.05]])
    """
    estimates = check_array("estimates", estimates, min_rows=1, floor=np.inf)
    if n_clusters is not None:
        check_count("n_clusters", n_clusters, 1)
    if separation is not None:
        separation = check_real("separation", separation, 0, LARGE, open_low=True)
    check_count("max_clusters", max_clusters, 1)
    kept = np.arange(len(estimates))
    while True:
        found = _group(estimates[kept], n_clusters, separation, max_clusters)
        sizes = np.bincount(found)
        rare = sizes[found] < _RARE * len(kept)
        if separation is not None or not rare.any() or rare.all():
            break
        kept = kept[~rare]
    order = np.argsort(-sizes, kind="stable")[: n_clusters or max_clusters]
    labels = np.full(len(estimates), -1, dtype=np.intp)
    for j, group in enumerate(order):
        labels[kept[found == group]] = j
    centers = np.stack([estimates[labels == j].mean(axis=0) for j in range(len(order))])
    return AnchorClusters(centers, labels)


def _group(
    estimates: Matrix, n_clusters: int | None, separation: float | None, max_clusters: int
) -> NDArray[np.intp]:
    """Return the group of each estimate."""
    if len(estimates) == 1:
        return np.zeros(1, dtype=np.intp)
    if separation is not None:
        tree = linkage(estimates, "single")
        groups = fcluster(tree, np.nextafter(separation / 2, 0), "distance")
    else:
        tree = linkage(estimates, "average")
        most = n_clusters or _largest_ratio(tree[:, 2], max_clusters)
        groups = fcluster(tree, min(most, len(estimates)), "maxclust")
    found: NDArray[np.intp] = groups.astype(np.intp) - 1
    return found


def _largest_ratio(heights: Matrix, most: int) -> int:
    """Return how many groups there are before the merge that stands out among the last ones."""
    floor = max(float(heights[-1]), 1e-300) * 1e-6
    heights = np.maximum(heights[-most:], floor)
    ratios = heights[1:] / heights[:-1]
    if not len(ratios) or ratios.max() < _LEAST_RATIO:
        return 1
    return len(ratios) - int(ratios.argmax()) + 1


def nearest_group(points: Matrix, groups: Matrix) -> Matrix:
    """Return one-hot rows: the group nearest to each point, (n, d), (k, d) -> (n, k)."""
    distances = np.linalg.norm(points[:, None] - groups, axis=2)
    members: Matrix = np.eye(len(groups))[distances.argmin(axis=1)]
    return members


def kmeans(points: Matrix, n_clusters: int, rng: np.random.Generator) -> Matrix:
    """Return the centers of the best of ten runs of Lloyd's algorithm from k-means++'s starts.

    Where there are fewer points than centers, some centers are alike.
    """
    best, least = points[:1], np.inf
    for _ in range(10):
        centers = _spread(points, n_clusters, rng)
        for _ in range(100):
            members, before = nearest_group(points, centers), centers
            counts = members.sum(axis=0)[:, None]
            centers = np.where(counts > 0, members.T @ points / np.maximum(counts, 1), centers)
            if np.array_equal(centers, before):
                break
        spread = float(np.sum((points - nearest_group(points, centers) @ centers) ** 2))
        if spread < least:
            best, least = centers, spread
    return best


def _spread(points: Matrix, n_clusters: int, rng: np.random.Generator) -> Matrix:
    """Draw each center with a probability that grows with the distance to those before."""
    rows = [int(rng.integers(len(points)))]
    for _ in range(n_clusters - 1):
        squares = ((points[:, None] - points[rows]) ** 2).sum(axis=2).min(axis=1)
        total = squares.sum()
        rows.append(int(rng.choice(len(points), p=squares / total if total > 0 else None)))
    return points[rows]
