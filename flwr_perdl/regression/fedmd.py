"""Phase 1, federated moment descent: what server and clients do, in the order of the listing.

======================================= ====================================================
paper (Su, Xu, Yang, NeurIPS 2022)      here
======================================= ====================================================
lines 3-5: anchors H, ``theta_0``       :func:`start_descent`, :func:`_anchors`
line 6: ``t = 0, ..., T - 1``           the loop of :func:`fedmd`; ``n_iterations``
line 7: ``S_t``, m fresh clients        not here: all that are asked, anchors too (Appendix C)
line 9: Algorithm 3, ``T_1`` products   client: :func:`moment`; server: :func:`_multiplied`
line 12: ``sigma > epsilon Delta``      not here: every anchor moves (``moments.py``)
lines 10-15: ``theta_{i,t+1}``          client: :func:`anchor`; server: :func:`_reported`
line 16: ``theta_hat_1, ...``           :func:`_grouped`
======================================= ====================================================

The formulas, and what differs from the paper's, are in ``moments.py`` and ``anchors.py``. Not in
the paper: clients that fit one of the models already there take no part.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.aggregate import clip_factors, keep_consistent, keep_supported
from flwr_perdl.core.checks import Matrix
from flwr_perdl.regression import moments
from flwr_perdl.regression.anchors import cluster_anchors, kmeans, nearest_group
from flwr_perdl.regression.exchange import Answers, Ask, Descent, Exchanges, Refining, State
from flwr_perdl.regression.losses import SQUARED
from flwr_perdl.regression.phases import MomentDescent, TwoPhase

# What was tuned on settings C.1-C.3. A sketch has so many columns beyond twice the number of
# models, which makes two products as good as an eigendecomposition; an anchor has so many points
# per dimension of its subspace, fewer where fewer than so many clients per dimension have them.
_OVERSAMPLING, _POINTS_PER_DIMENSION, _ANCHORS_PER_DIMENSION = 4, 4, 3
#: Most anchors: the distances of all pairs are looked at (line 16).
_MOST_ANCHORS = 1000


# Clients, many of one size at once ---------------------------------------------------------------


def misfit_bound(n_samples: Matrix) -> Matrix:
    """Return above how many noise variances a mean of ``n_samples`` squares is no noise."""
    bound: Matrix = 4 + 12 / n_samples  # beyond chi-squared's 99.9 % point, for any n
    return bound


def _misfits(X: Matrix, y: Matrix, ask: Ask) -> NDArray[np.bool_]:
    """Tell which clients have residuals, of whichever model fits best, that are no noise."""
    centers, bound = ask.arrays[2], misfit_bound(np.array(X.shape[1]))
    if not len(centers):
        return np.ones(len(X), dtype=bool)
    squares = 2 * SQUARED.values(X, y, centers).min(axis=1)
    misfits: NDArray[np.bool_] = squares > bound * float(ask.options["variance"])
    return misfits


def moment(X: Matrix, y: Matrix, ask: Ask) -> Matrix:
    """Line 9, Algorithm 3: the clients' parts of the products ``Y_{i,t} Q``, (m, h, d, width)."""
    thetas, Q = ask.arrays[:2]
    found, chosen = np.zeros((len(X), *Q.shape), Q.dtype), _misfits(X, y, ask)
    if chosen.any():
        estimate, transpose = str(ask.options["estimate"]), bool(ask.options["transpose"])
        mine = (X, y) if chosen.all() else (X[chosen], y[chosen])
        found[chosen] = moments.residual_moment(
            *mine, thetas, Q, estimate=estimate, transpose=transpose
        )
    return found


def anchor(X: Matrix, y: Matrix, ask: Ask) -> Matrix:
    """Lines 11-15: 1 and ``theta_{i,t+1}``, or zeros from who is no anchor, (m, 1 + d)."""
    found = np.zeros((len(X), X.shape[2] + 1), X.dtype)
    if not ask.arrays or X.shape[1] < int(ask.options["min_points"]):
        return found
    theta, U = ask.arrays[0][0], ask.arrays[1][0]
    for i in np.flatnonzero(_misfits(X, y, ask)):
        found[i, 0] = 1  # an estimate of zeros is an estimate
        step = str(ask.options["anchor_step"])
        found[i, 1:] = moments.moment_step(X[i], y[i], theta, U, step=step)
    return found


# Server -------------------------------------------------------------------------------------------


def start_descent(settings: TwoPhase, known: State, rng: np.random.Generator) -> Descent:
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
            answers, rng = yield _ask_products(how, state)  # line 8
            state = _multiplied(settings, state, answers, rng)  # line 9
        answers, rng = yield _ask_estimates(how, state)  # line 10
        state = _reported(state, answers)  # lines 11-15
        if state.iteration == how.n_iterations or not len(state.thetas):
            return _grouped(settings, state)  # line 16
        h, d, width = len(state.thetas), state.thetas.shape[1], state.columns.shape[2]
        state = replace(state, products=0, columns=moments.sketch(h, d, width + _OVERSAMPLING, rng))


def _ask_products(how: MomentDescent, state: Descent) -> Ask:
    """Line 8: the anchors' estimates, without names, and the columns to multiply with."""
    arrays = state.thetas[None], state.columns, state.centers
    options: dict[str, Any] = {"estimate": how.estimate, "variance": state.variance}
    # By turns, for an estimate that is not symmetric: Algorithm 3 has the transpose first, we last.
    options["transpose"] = state.products % 2
    noise = how.perturbation if len(state.anchors) else 0.0  # Remark 2
    return Ask("moment", arrays, options, noise=noise, shape=state.columns.shape, state=state)


def _multiplied(
    settings: TwoPhase, state: Descent, answers: Answers, rng: np.random.Generator
) -> Descent:
    """Line 9: add up the products; after the last one take the subspaces (Algorithm 3)."""
    # Parts are weighted by their points already, so that sums, not means, are added up.
    stack, odd, how = answers.stack, state.odd[:0], settings.phase_1
    if settings.robust != "mean":
        find: Any = keep_consistent if settings.robust == "filtered" else clip_factors
        factors = find(stack)
        stack, odd = stack * factors[:, None, None, None], answers.odd(1 - factors)
    product = stack.sum(axis=0) / answers.n_samples.sum()
    state = replace(state, odd=odd, products=state.products + 1)
    if state.products < how.n_products:
        return replace(state, columns=moments.orthonormal(product))
    if how.estimate == "u-statistic":
        unknown = settings.n_clusters == "auto" or settings.robust == "filtered"
        k = None if unknown else int(settings.n_clusters)
        U = moments.symmetric_subspace(state.columns, product, k)
    else:
        U = moments.left_subspace(state.columns, product, int(settings.n_clusters))
    return _anchors(how, replace(state, columns=U), answers, rng)


def _anchors(
    how: MomentDescent, state: Descent, answers: Answers, rng: np.random.Generator
) -> Descent:
    """Line 3: who has points enough for its subspace; drawn among these where asked for.

    The paper draws before line 6, when it is not known yet how many points are enough.
    """
    involved = answers.n_samples[answers.stack.any(axis=(1, 2, 3))]  # whom no model fits
    points = np.sort(involved if len(involved) else answers.n_samples)[::-1]
    dimensions = state.columns.shape[2]
    enough = points[min(_ANCHORS_PER_DIMENSION * dimensions, len(points)) - 1]
    state = replace(state, min_points=int(min(_POINTS_PER_DIMENSION * dimensions, enough)))
    if how.n_anchors is None or state.iteration > 0:
        return state
    able = answers.partitions[answers.n_samples >= state.min_points]
    chosen = rng.choice(able, min(how.n_anchors, len(able)), replace=False)
    return replace(state, anchors=chosen, moved=np.zeros(len(chosen), dtype=bool))


def _ask_estimates(how: MomentDescent, state: Descent) -> Ask:
    """Line 10: each anchor its subspace and last estimate, others nothing."""
    arrays = state.thetas, state.columns, state.centers
    options: dict[str, Any] = {"anchor_step": how.anchor_step, "min_points": state.min_points}
    options["variance"] = state.variance
    ask = Ask("anchors", arrays, options, shape=(state.thetas.shape[1] + 1,), state=state)
    if not len(state.anchors):  # all start from one point: anybody with points enough is an anchor
        return ask
    rows = [[min(h, len(state.thetas) - 1)] for h in range(len(state.anchors))]
    own = [(state.thetas[row], state.columns[row], state.centers) for row in rows]
    return ask._replace(arrays=(), own=dict(zip(state.anchors.tolist(), own, strict=True)))


def _reported(state: Descent, answers: Answers) -> Descent:
    """Lines 11-15: the anchors' new estimates; an absent anchor keeps its last one."""
    able = np.flatnonzero(answers.stack[:, 0] > 0)
    most = np.argsort(-answers.n_samples[able], kind="stable")[:_MOST_ANCHORS]
    chosen = able[np.sort(most)]
    absent = np.flatnonzero(~np.isin(state.anchors, answers.partitions))
    last = state.thetas[np.minimum(absent, len(state.thetas) - 1)]
    return replace(
        state,
        odd=state.odd[:0],
        thetas=np.vstack([answers.stack[chosen, 1:], last]),
        anchors=np.concatenate([answers.partitions[chosen], state.anchors[absent]]),
        moved=np.concatenate([np.ones(len(chosen), dtype=bool), state.moved[absent]]),
        iteration=state.iteration + 1,
    )


def _grouped(settings: TwoPhase, state: Descent) -> Refining:
    """Line 16: the means of like estimates are models, the largest groups first."""
    estimates = state.thetas[state.moved]  # where an anchor started says nothing of its cluster
    if not len(estimates) and not len(state.centers):
        raise ValueError(
            "Phase 1 has no anchors: no client with enough points answered that was asked for its "
            "estimate."
        )
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


def one_shot(settings: TwoPhase, state: Descent) -> Exchanges[Refining]:
    """Instead of Phase 1: k-means of what all clients estimate alone (Ghosh et al., 2019)."""
    k = int(settings.n_clusters)
    answers, rng = yield _ask_estimates(settings.phase_1, state)
    estimates = answers.stack[answers.stack[:, 0] > 0, 1:]

    def group(own: Matrix) -> NDArray[np.intp]:
        centers = kmeans(own, k, rng.spawn(1)[0])  # leaves the draws of rng
        labels: NDArray[np.intp] = nearest_group(own, centers).argmax(axis=1)
        return labels

    if settings.robust != "mean":
        estimates = estimates[keep_supported(estimates, k, group)]
    groups = kmeans(estimates, k, rng)
    return Refining.start(state, groups, groups)
