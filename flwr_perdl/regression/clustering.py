"""Phase 2, line 8: the server's average of the clients' updates, which can be made robust.

``normalise="cluster"`` (the default) divides a cluster's sum by the cluster's number of points; the
paper's ``w_i = n_i / N`` (``"all"``) makes a cluster's step as small as its share of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.checks import Matrix
from flwr_perdl.core.robust import average_of, capped, consistent, far, shortening

ROBUST = ("mean", "filtered", "clip", "trimmed", "median", "geometric-median")


class Average(NamedTuple):
    """What the clients' updates come to."""

    #: Change of every model, zero for one without clients, (k, d).
    change: Matrix
    #: Points in every cluster, (k,).
    counts: Matrix
    #: Share of each client's update to which the rule did what `core.robust.EFFECTS` says,
    #: (n_clients,).
    odd: Matrix


def average_updates(
    packed: Matrix,
    n_samples: Matrix,
    n_clusters: int,
    *,
    normalise: str = "cluster",
    robust: str = "mean",
) -> Average:
    """Average the clients' updates, in the order given (Phase 2, line 8).

    Parameters
    ----------
    packed : ndarray of shape (n_clients, 1, d + 1)
        Each client's cluster and its change of that model.
    n_samples : ndarray of shape (n_clients,)
        Number of points of each client.
    n_clusters : int
        Number of models.
    normalise : {"cluster", "all"}, default "cluster"
        Divide by the cluster's points, or (the paper) by all points.
    robust : str, default "mean"
        "filtered": the mean of the cluster's updates that are consistent with the others
        (`core.robust.consistent`), of clients that count for no more than three times the
        median size. "clip": of all updates, those longer than three times the median length
        shortened to it. "trimmed", "median" and "geometric-median" count clients alike; on clients
        with fewer points than features they are biased.

    Returns
    -------
    Average
        ``change`` of every model (k, d), zero for one without clients; ``counts``, the clusters'
        points; ``odd``, to which share of each client's update the rule did something.

    Raises
    ------
    ValueError
        If an update names a cluster that there is not.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.regression.clustering import average_updates
    >>> packed = np.array([[[0.0, 1.0]], [[0.0, 4.0]], [[1.0, 5.0]]])  # per client: cluster, change
    >>> found = average_updates(packed, np.array([1.0, 2.0, 7.0]), 2)
    >>> found.change
    array([[3.],
           [5.]])
    """
    labels = packed[:, 0, 0]
    if not ((labels >= 0) & (labels < n_clusters) & (labels % 1 == 0)).all():
        raise ValueError(f"packed must name clusters below {n_clusters}, got {labels.max()}.")
    members = labels == np.arange(n_clusters)[:, None]
    if robust == "mean":
        found = _mean(packed, n_samples, members)
    else:
        found = _robust(packed, n_samples, members, robust)
    if normalise == "all":
        found.change[:] *= (found.counts / max(found.counts.sum(), 1e-300))[:, None]
    return found


def _mean(packed: Matrix, n_samples: Matrix, members: NDArray[np.bool_]) -> Average:
    """Return the means of the clusters' updates, and who is far from its own cluster's."""
    moves, weights = packed[:, 0, 1:], n_samples * members
    counts = weights.sum(axis=1)
    shares = weights / np.where(counts > 0, counts, 1)[:, None]
    change = (shares @ moves).astype(packed.dtype, copy=False)
    odd = np.zeros(len(packed))
    for j, own in enumerate(members):
        if own.any() and counts[j] > 0:
            odd[own] = far(moves[own], change[j])
    return Average(change, counts, odd)


def _robust(packed: Matrix, n_samples: Matrix, members: NDArray[np.bool_], rule: str) -> Average:
    """Return what a rule other than the mean makes of the clusters' updates."""
    change = np.zeros((len(members), packed.shape[2] - 1), packed.dtype)
    counts, odd = np.zeros(len(members)), np.zeros(len(packed))
    multiplies = rule in ("filtered", "clip")
    for j, own in enumerate(members):
        moves, weights = packed[own, 0, 1:], n_samples[own]
        if own.any() and multiplies:
            factors = factors_of(moves, rule)
            moves, weights = moves * factors[:, None], capped(weights) * (factors > 0)
        if not weights.any():
            continue
        counts[j] = weights.sum()
        change[j] = average_of(moves, rule, weights)
        odd[own] = 1 - factors if multiplies else far(moves, change[j])
    return Average(change, counts, odd)


def factors_of(stack: Matrix, robust: str) -> Matrix:
    """Return by how much the robust rule multiplies each contribution, (n_clients, ...).

    "filtered": by 0 one that is not consistent with the others; "clip": by what brings it down to
    three times the median length.
    """
    return consistent(stack).astype(stack.dtype) if robust == "filtered" else shortening(stack)
