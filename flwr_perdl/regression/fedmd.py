"""Phase 1, federated moment descent: what server and clients do, in the order of the listing.

======================================= ====================================================
paper (Su, Xu, Yang, NeurIPS 2022)      here
======================================= ====================================================
lines 3-5: anchors H, ``theta_0``       :func:`start_descent`, :func:`_choose_anchors`
line 6: ``t = 0, ..., T - 1``           the loop of :func:`fedmd`; ``n_iterations``
line 7: ``S_t``, m fresh clients        not here: all that are asked, anchors too (Appendix C)
line 9: Algorithm 3, ``T_1`` products   client: :func:`moment`; server: :func:`_add_products`
line 12: ``sigma > epsilon Delta``      not here: every anchor moves
lines 10-15: ``theta_{i,t+1}``          client: :func:`anchor`; server: :func:`_take_estimates`
line 16: ``theta_hat_1, ...``           :func:`_find_models`, by :func:`cluster_anchors`
======================================= ====================================================

Not in the paper: clients that fit one of the models already there take no part. Line 16 joins
anchors closer than Delta/2; without Delta (the default) the estimates are joined by average linkage
until k clusters are left, or, without k, until the merge height that exceeds the one before it by
the largest factor; groups of less than 2 % of the anchors are left out and the rest is grouped
again, so that a few wild estimates stand for no cluster.

Also here, as it takes the place of Phase 1: one-shot clustering (:func:`one_shot`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage

from flwr_perdl.core.aggregate import clip_factors, keep_consistent, keep_supported
from flwr_perdl.core.checks import LARGE, Matrix, check_array, check_count, check_real
from flwr_perdl.regression import moments
from flwr_perdl.regression.losses import SQUARED
from flwr_perdl.regression.phases import Answers, Ask, Descent, Exchanges, Refining, Stage, TwoPhase

# What was tuned on settings C.1-C.3. A sketch has so many columns beyond twice the number of
# models, which makes two products as good as an eigendecomposition; an anchor has so many points
# per dimension of its subspace, fewer where fewer than so many clients per dimension have them.
_OVERSAMPLING, _POINTS_PER_DIMENSION, _ANCHORS_PER_DIMENSION = 4, 4, 3
#: Most anchors: the distances of all pairs are computed (line 16).
_MOST_ANCHORS = 1000
#: Merge heights that grow by less than this never part clusters.
_LEAST_RATIO = 1.5
#: A group with less than this share of the anchors is none.
_RARE = 0.02


# Clients -----------------------------------------------------------------------------------------


def misfit_bound(n_samples: Matrix) -> Matrix:
    """Return above how many noise variances a mean of ``n_samples`` squares is no noise."""
    return 4 + 12 / n_samples  # beyond chi-squared's 99.9 % point, for any n


def _misfits(X: Matrix, y: Matrix, ask: Ask) -> bool:
    """Tell whether the residuals of whichever model fits best are no noise."""
    centers, bound = ask.arrays[2], float(misfit_bound(np.array(len(X))))
    if not len(centers):
        return True
    square = 2 * float(SQUARED.values(X, y, centers).min())
    return square > bound * float(ask.options["variance"])


def moment(X: Matrix, y: Matrix, ask: Ask) -> Matrix:
    """Line 9, Algorithm 3: the client's part of the products ``Y_{i,t} Q``, (h, d, width)."""
    thetas, Q = ask.arrays[:2]
    if not _misfits(X, y, ask):
        return np.zeros_like(Q)
    estimate, turn = str(ask.options["estimate"]), bool(ask.options["transpose"])
    return moments.residual_moment(X, y, thetas, Q, estimate=estimate, transpose=turn)


def anchor(X: Matrix, y: Matrix, ask: Ask) -> Matrix:
    """Lines 11-15: 1 and ``theta_{i,t+1}``, or zeros from who is no anchor, (1 + d,)."""
    few = not ask.arrays or len(X) < int(ask.options["min_points"])
    if few or not _misfits(X, y, ask):
        return np.zeros(1 + X.shape[1], X.dtype)
    theta, U, step = ask.arrays[0][0], ask.arrays[1][0], str(ask.options["anchor_step"])
    moved = moments.moment_step(X, y, theta, U, step=step)
    return np.append(X.dtype.type(1), moved)  # an estimate of zeros is an estimate


# Server -------------------------------------------------------------------------------------------


def start_descent(settings: TwoPhase, known: Stage, rng: np.random.Generator) -> Descent:
    """Lines 3-5: where all anchors start, for the clients that no model fits."""
    d, groups = known.centers.shape[1], settings.most_clusters
    if settings.robust == "filtered":  # liars' groups too are to be found
        groups = max(groups, settings.max_clusters)
    # From one point all anchors share one subspace, and from zero none is broadcast.
    start = moments.random_models(1, d, rng) if settings.phase_1.random_start else np.zeros((1, d))
    columns = moments.sketch(1, d, 2 * groups + _OVERSAMPLING, rng)
    return known.to(Descent, thetas=start, columns=columns)


def fedmd(settings: TwoPhase, state: Descent) -> Exchanges[Refining]:
    """Phase 1: from any start to coarse models of all clusters."""
    how = settings.phase_1
    while True:  # line 6
        while state.products < how.n_products:
            answers, rng = yield _ask_products(settings, state)  # line 8
            state = _add_products(settings, state, answers, rng)  # line 9
        answers, rng = yield _ask_estimates(settings, state)  # line 10
        state = _take_estimates(state, answers)  # lines 11-15
        if state.iteration == how.n_iterations or not len(state.thetas):
            return _find_models(settings, state)  # line 16
        h, d, width = len(state.thetas), state.thetas.shape[1], state.columns.shape[2]
        state = replace(state, products=0, columns=moments.sketch(h, d, width + _OVERSAMPLING, rng))


def _ask_products(settings: TwoPhase, state: Descent) -> Ask:
    """Line 8: the anchors' estimates, without names, and the columns to multiply with."""
    arrays = state.thetas, state.columns, state.centers
    # By turns, for an estimate that is not symmetric: Algorithm 3 has the transpose first, we last.
    turn = {"variance": state.variance, "transpose": state.products % 2}
    options = settings.sent_options("moment") | turn
    return Ask("moment", arrays, options, shape=state.columns.shape, state=state)


def _add_products(
    settings: TwoPhase, state: Descent, answers: Answers, rng: np.random.Generator
) -> Descent:
    """Line 9: add up the products; after the last one take the subspaces (Algorithm 3)."""
    # Parts are weighted by their points already, so that sums, not means, are added up.
    stack, outliers, how = answers.stack, state.outliers[:0], settings.phase_1
    if settings.robust != "mean":
        factors = (keep_consistent if settings.robust == "filtered" else clip_factors)(stack)
        stack, outliers = stack * factors[:, None, None, None], answers.outliers(1 - factors)
    product = stack.sum(axis=0) / answers.n_samples.sum()
    state = replace(state, outliers=outliers, products=state.products + 1)
    if state.products < how.n_products:
        return replace(state, columns=np.linalg.qr(product)[0])
    if how.estimate == "u-statistic":
        unknown = settings.n_clusters == "auto" or settings.robust == "filtered"
        k = None if unknown else int(settings.n_clusters)
        U = moments.symmetric_subspace(state.columns, product, k)
    else:
        U = moments.left_subspace(state.columns, product, int(settings.n_clusters))
    return _choose_anchors(settings, replace(state, columns=U), answers, rng)


def _choose_anchors(
    settings: TwoPhase, state: Descent, answers: Answers, rng: np.random.Generator
) -> Descent:
    """Line 3: who has points enough for its subspace; drawn among these where asked for.

    The paper draws before line 6, when it is not known yet how many points are enough.
    """
    involved = answers.n_samples[answers.stack.any(axis=(1, 2, 3))]  # whom no model fits
    points = np.sort(involved if len(involved) else answers.n_samples)[::-1]
    dimensions = state.columns.shape[2]
    enough = points[min(_ANCHORS_PER_DIMENSION * dimensions, len(points)) - 1]
    state = replace(state, min_points=int(min(_POINTS_PER_DIMENSION * dimensions, enough)))
    wanted = settings.phase_1.n_anchors
    if wanted is None or state.iteration > 0:
        return state
    able = answers.partitions[answers.n_samples >= state.min_points]
    chosen = rng.choice(able, min(wanted, len(able)), replace=False)
    return replace(state, anchors=chosen, moved=np.zeros(len(chosen), dtype=bool))


def _ask_estimates(settings: TwoPhase, state: Descent) -> Ask:
    """Line 10: each anchor its subspace and last estimate, others nothing."""
    arrays = state.thetas, state.columns, state.centers
    who = {"variance": state.variance, "min_points": state.min_points}
    options = settings.sent_options("anchors") | who
    ask = Ask("anchors", arrays, options, shape=(state.thetas.shape[1] + 1,), state=state)
    if not len(state.anchors):  # all start from one point: anybody with points enough is an anchor
        return ask
    rows = [[min(h, len(state.thetas) - 1)] for h in range(len(state.anchors))]
    own = [(state.thetas[row], state.columns[row], state.centers) for row in rows]
    return ask._replace(arrays=(), per_client=dict(zip(state.anchors.tolist(), own, strict=True)))


def _take_estimates(state: Descent, answers: Answers) -> Descent:
    """Lines 11-15: the anchors' new estimates; an absent anchor keeps its last one."""
    able = np.flatnonzero(answers.stack[:, 0] > 0)
    most = np.argsort(-answers.n_samples[able], kind="stable")[:_MOST_ANCHORS]
    chosen = able[np.sort(most)]
    absent = np.flatnonzero(~np.isin(state.anchors, answers.partitions))
    last = state.thetas[np.minimum(absent, len(state.thetas) - 1)]
    return replace(
        state,
        outliers=state.outliers[:0],
        thetas=np.vstack([answers.stack[chosen, 1:], last]),
        anchors=np.concatenate([answers.partitions[chosen], state.anchors[absent]]),
        moved=np.concatenate([np.ones(len(chosen), dtype=bool), state.moved[absent]]),
        iteration=state.iteration + 1,
    )


def _find_models(settings: TwoPhase, state: Descent) -> Refining:
    """Line 16: the means of like estimates are models, the largest groups first."""
    estimates = state.thetas[state.moved]  # where an anchor started says nothing of its cluster
    if not len(estimates) and not len(state.centers):
        raise ValueError("Phase 1 has no anchors: no client with enough points sent its estimate.")
    if not len(estimates):
        return Refining.start(state, state.centers)
    if settings.robust != "mean":
        estimates = estimates[keep_supported(estimates)]
    delta, most = settings.phase_1.separation, settings.max_clusters
    group = partial(cluster_anchors, estimates, separation=delta, max_clusters=most)
    k = None if settings.n_clusters == "auto" or len(state.centers) else int(settings.n_clusters)
    # Liars' groups are not to be joined with honest clients'.
    found = group(None if settings.robust == "filtered" else k).centers
    if k is not None and len(found) < k:
        found = group(k).centers
    if settings.n_clusters == "auto" and not len(state.centers) and len(found) == 1:
        # No merge stands out: too many models, which Phase 2 merges, are better than too few.
        found = group(min(state.columns.shape[2], most)).centers
    room = settings.most_clusters - len(state.centers)  # those already there stay
    return Refining.start(state, np.vstack([state.centers, found[:room]]))


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
    """Cluster anchors by their estimates.

    Parameters
    ----------
    estimates : ndarray of shape (n_anchors, d)
        At least one.
    n_clusters : int, optional
        Number of groups; by default found.
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


def one_shot(settings: TwoPhase, state: Descent) -> Exchanges[Refining]:
    """Instead of Phase 1: k-means of what all clients estimate alone (Ghosh et al., 2019)."""
    k = int(settings.n_clusters)
    answers, rng = yield _ask_estimates(settings, state)
    estimates = answers.stack[answers.stack[:, 0] > 0, 1:]

    def group(own: Matrix) -> NDArray[np.intp]:
        return nearest_group(own, kmeans(own, k, rng.spawn(1)[0]))  # leaves the draws of rng

    if settings.robust != "mean":
        estimates = estimates[keep_supported(estimates, k, group)]
    groups = kmeans(estimates, k, rng)
    return Refining.start(state, groups, groups)


def nearest_group(points: Matrix, groups: Matrix) -> NDArray[np.intp]:
    """Return the group nearest to each point: (n, d), (k, d) -> (n,)."""
    nearest: NDArray[np.intp] = np.linalg.norm(points[:, None] - groups, axis=2).argmin(axis=1)
    return nearest


def kmeans(points: Matrix, n_clusters: int, rng: np.random.Generator) -> Matrix:
    """Return the centers of the best of ten runs of Lloyd's algorithm from k-means++'s starts.

    Where there are fewer points than centers, some centers are alike.
    """
    best, least = points[:1], np.inf
    for _ in range(10):
        centers = _draw_centers(points, n_clusters, rng)
        for _ in range(100):
            members, before = np.eye(n_clusters)[nearest_group(points, centers)], centers
            counts = members.sum(axis=0)[:, None]
            centers = np.where(counts > 0, members.T @ points / np.maximum(counts, 1), centers)
            if np.array_equal(centers, before):
                break
        spread = float(np.sum((points - centers[nearest_group(points, centers)]) ** 2))
        if spread < least:
            best, least = centers, spread
    return best


def _draw_centers(points: Matrix, n_clusters: int, rng: np.random.Generator) -> Matrix:
    """Draw each center with a probability that grows with the distance to those before."""
    rows = [int(rng.integers(len(points)))]
    for _ in range(n_clusters - 1):
        squares = ((points[:, None] - points[rows]) ** 2).sum(axis=2).min(axis=1)
        total = squares.sum()
        rows.append(int(rng.choice(len(points), p=squares / total if total > 0 else None)))
    return points[rows]
