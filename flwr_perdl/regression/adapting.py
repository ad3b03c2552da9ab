"""The number of models follows from the clients, in Phase 2; not in the paper.

Whenever the models have settled, and every ``check_every`` rounds, models without clients are
dropped, models that are too alike merge, and if clients fit none, Phase 1 is run on those to find
what they need. Without noise, residuals show only how far the models still have to go: the models'
last movement, and rounding, count as noise here. This is for the squared loss, and takes the
features to be alike in scale.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from scipy.special import gammaincinv

from flwr_perdl.core.checks import Matrix
from flwr_perdl.regression.exchange import Answers, Descent, Refining
from flwr_perdl.regression.fedmd import misfit_bound, start_descent
from flwr_perdl.regression.phases import TwoPhase

# What was tuned on settings C.1-C.3, noise from 0 to 1, clusters of 5 %, and 10 points per client:
# relative movement below which the models have settled, and the rounds before a check that does not
# wait; the share of clients that fit no model above which models are added; the quantile of the
# clients' mean squares that tells the noise, as most clients fit; standard errors that make two
# models.
_SETTLED, _LEAST_WAIT, _MISFITS, _QUANTILE, _SAME = 0.01, 5, 0.02, 0.2, 4.0


def adapted(
    settings: TwoPhase,
    state: Refining,
    answers: Answers,
    points: Matrix,
    rng: np.random.Generator,
) -> Refining | Descent:
    """Drop, merge and add models as the clients need them; a Descent is to find further ones.

    ``points`` says who answered, and its points in every cluster, (n_clients, 1 + k).
    """
    centers, k = state.centers, len(state.centers)
    state = replace(state, since=state.since + 1)
    if not settings.adapts(k):
        return state
    absent = state.checked[~np.isin(state.checked[:, 0], points[:, 0])]
    counts = state.counts + absent[:, 1:].sum(axis=0)
    state = replace(state, counts=counts, checked=np.vstack([absent, points]))
    length = float(np.linalg.norm(centers, axis=1).max())
    movement = float(np.linalg.norm(centers - state.previous, axis=1).max())
    early = movement <= _SETTLED * length and state.patience > 0 and state.since >= _LEAST_WAIT
    if not (early or state.since >= settings.phase_2.check_every):
        return state
    squares, n = 2 * answers.stack[:, 0, 0], answers.n_samples
    if settings.robust == "filtered":
        honest = ~np.isin(answers.partitions, state.odd[state.odd[:, 1] == 1, 0])
        if not honest.any():  # noise can turn everyone's steps round
            return state
        squares, n = squares[honest], n[honest]
    chi2 = 2 * gammaincinv(n / 2, _QUANTILE)  # the quantile; scipy.stats takes long to import
    variance = float(np.quantile(n * squares / chi2, _QUANTILE))
    variance = max(variance, float(np.finfo(float).eps * state.power * length**2))
    noise = max(variance, float(state.power * movement**2))
    patience = max(state.patience - 1, 0)
    state = replace(state, variance=noise, since=0, patience=patience, checked=state.checked[:0])
    misfits = bool((squares > noise * misfit_bound(n)).mean() > _MISFITS)
    if misfits or settings.n_clusters == "auto":
        keep = state.counts > 0
        centers = _merged(centers[keep], state.counts[keep], variance / state.power)
    if misfits and len(centers) < settings.most_clusters:
        return start_descent(settings, replace(state, centers=centers), rng)
    if len(centers) < k and settings.n_clusters == "auto":
        return Refining.start(state, centers)
    return state


def _merged(centers: Matrix, counts: Matrix, ratio: float) -> Matrix:
    """Join models that are closer than their standard errors allow to tell.

    ``ratio`` is the noise's variance over the features', so that ``ratio * d / n`` is the squared
    error of a model from n points.
    """
    centers, counts = centers.copy(), counts.copy()
    d = centers.shape[1]
    while len(centers) > 1:
        distance = np.linalg.norm(centers[:, None] - centers, axis=2)
        error = np.sqrt(ratio * d * (1 / counts[:, None] + 1 / counts))
        excess = distance / np.maximum(error, 1e-300)
        np.fill_diagonal(excess, np.inf)
        a, b = sorted(np.unravel_index(int(excess.argmin()), excess.shape))
        if excess[a, b] >= _SAME:
            break
        total = counts[a] + counts[b]
        centers[a] = (counts[a] * centers[a] + counts[b] * centers[b]) / total
        counts[a] = total
        centers, counts = np.delete(centers, b, axis=0), np.delete(counts, b)
    return centers
