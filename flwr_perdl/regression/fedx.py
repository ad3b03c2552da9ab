"""Phase 2, FedX + clustering: what server and clients do, in the order of the listing.

======================================= ====================================================
paper (Su, Xu, Yang, NeurIPS 2022)      here
======================================= ====================================================
line 4: ``t = T + 1, ...``              the loop of :func:`fedx`
line 5: ``theta_{t-1}`` to all          the request of :func:`fedx`; ``centers`` (k, d)
line 6: ``lambda_{i,t}``, ``z_{i,t}``   client: :func:`update`, the model of least loss
line 7: ``theta_{i.,t}``                client: :func:`local_change`, less ``theta_{t-1}``
``eta``, ``s``                          ``step``, ``n_steps``
line 8: ``sum_i w_i theta_{i.,t}``      server: :func:`_average_changes`, :func:`_move_models`
======================================= ====================================================

Not in the paper:

- ``normalise="cluster"`` (the default) divides a cluster's sum by the cluster's number of points;
  the paper's ``w_i = n_i / N`` (``"all"``) makes a cluster's step as small as its share of them;
- the server accelerates (:func:`accelerate`), by Anderson's method (type II of H. F. Walker and
  P. Ni, "Anderson acceleration for fixed-point iterations", SIAM J. Numer. Anal. 2011): where the
  clients of a cluster stay the same, the squared loss makes the changes linear in the model, and
  the iteration is GMRES restricted to the last rounds: it needs no bound on the curvature to
  converge in few rounds, also where the features are ill-conditioned;
- it detects malicious clients by how their updates follow the models (:func:`track_slopes`);
- the number of models follows from the clients (:func:`revise_models`): when models have settled,
  and every ``check_every`` rounds, models without clients are dropped, models that are too alike
  merge, and if clients fit none, Phase 1 is run on those to find what they need. Without noise,
  residuals show only how far the models still have to go: the models' last movement, and rounding,
  count as noise here. This is for the squared loss, and takes the features to be alike in scale.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import minimize
from scipy.special import gammaincinv

from flwr_perdl.core.aggregate import Aggregate, aggregate
from flwr_perdl.core.checks import Matrix, check_array
from flwr_perdl.regression.fedmd import misfit_bound, nearest_group, start_descent
from flwr_perdl.regression.losses import Loss, SquaredLoss
from flwr_perdl.regression.moments import moment_step
from flwr_perdl.regression.phases import Answers, Ask, Descent, Exchanges, Refining, TwoPhase

# What was tuned on settings C.1-C.3, and for the acceleration on features with condition number
# 1e4; for the checks of the models also with noise from 0 to 1, clusters of 5 %, and 10 points per
# client.
#: Rounds that the acceleration remembers, the current one included.
_MEMORY = 11
#: Share of a cluster's points that may come or go between two rounds that it compares.
_REPLACED = 0.02
#: Directions in which the changes differ by less than this, over the most, do not count for it.
_DIFFERS = 1e-10
#: Movement of a model, relative to its length, from which on it shows how clients follow it.
_TELLING = 1e-4
#: Movement of the models, relative to the longest, below which they have settled.
_SETTLED = 0.01
#: Fewest rounds from one check of the models to the next.
_LEAST_WAIT = 5
#: Share of clients that fit no model above which models are added.
_MISFITS = 0.02
#: Quantile of the clients' mean squares that tells the noise, as most clients fit.
_QUANTILE = 0.2
#: Standard errors within which two models are one.
_SAME = 4.0


# Clients -----------------------------------------------------------------------------------------


def update(X: Matrix, y: Matrix, ask: Ask, loss: Loss) -> Matrix:
    """Lines 6-7: the client's loss, cluster and change of its model, (1, d + 2)."""
    options = ask.options
    centers = check_array("centers", ask.arrays[0], min_rows=1, columns=X.shape[1])
    losses = loss.values(X, y, centers)
    if not np.isfinite(losses.min()):
        raise ValueError("losses must be finite for at least one model and have no NaN.")
    label = int(losses.argmin())  # line 6: z_{i,t}, equations 7 and 8
    if len(ask.arrays) > 1 and len(ask.arrays[1]):
        (label,) = nearest_group(local_estimate(X, y)[None], ask.arrays[1]).tolist()
    change = local_change(  # line 7
        *(X, y, centers[label]),
        step=float(options["step_size"]),
        n_steps=int(options["n_steps"]),
        local=str(options["local"]),
        loss=loss,
    )
    return np.concatenate([[losses[label], label], change])[None]


def local_change(
    X: Matrix, y: Matrix, theta: Matrix, *, step: float, n_steps: int, local: str, loss: Loss
) -> Matrix:
    """Return how a client's local work moves its model (Phase 2, line 7).

    Parameters
    ----------
    X, y, theta : ndarray of shape (n_samples, d), (n_samples,) and (d,)
        Features, responses and model.
    step : float
        The step ``eta``.
    n_steps : int
        Gradient steps ``s`` of ``local="fedavg"``.
    local : {"fedavg", "fedprox"}
        Gradient steps, or the minimum of ``loss + ||. - theta||^2 / (2 step)``.
    loss : Loss
        The loss.

    Returns
    -------
    ndarray of shape (d,)
        The new model minus the old one.
    """
    size = X.dtype.type(step)
    if local == "fedavg":
        ahead = theta
        for _ in range(n_steps):
            ahead = ahead - size * loss.gradient(X, y, ahead)
        return ahead - theta
    if not isinstance(loss, SquaredLoss):
        return _proximal(X, y, theta, float(size), loss)
    (n, d), scale = X.shape, size / X.dtype.type(len(X))
    if n <= d:
        kernel = np.eye(n, dtype=X.dtype) + scale * (X @ X.T)
        moved: Matrix = scale * (X.T @ np.linalg.solve(kernel, y - X @ theta))
        return moved
    kernel = np.eye(d, dtype=X.dtype) + scale * (X.T @ X)
    return np.linalg.solve(kernel, -size * loss.gradient(X, y, theta))


def _proximal(X: Matrix, y: Matrix, theta: Matrix, step: float, loss: Loss) -> Matrix:
    """FedProx for a loss without a closed form."""

    def objective(change: Matrix) -> tuple[float, Matrix]:
        ahead = theta + change
        value = step * float(loss.values(X, y, ahead[None])[0]) + float(change @ change) / 2
        return value, step * loss.gradient(X, y, ahead) + change

    options = {"ftol": 0.0, "gtol": 1e-10, "maxiter": 500}
    solved = minimize(objective, np.zeros_like(theta), jac=True, method="L-BFGS-B", options=options)
    change: Matrix = solved.x
    return change


def local_estimate(X: Matrix, y: Matrix) -> Matrix:
    """Return the client's local least-squares estimate, (d,)."""
    d = X.shape[1]
    return moment_step(X, y, np.zeros(d, X.dtype), np.eye(d, dtype=X.dtype))


# Server -------------------------------------------------------------------------------------------


def fedx(settings: TwoPhase, state: Refining) -> Exchanges[Descent]:
    """Phase 2, until there are clients that no model fits, for which Phase 1 is to find models."""
    phase = settings.phase_2
    work = settings.sent_options("update") | {"step_size": state.step_size}
    while True:  # line 4
        ahead = state.centers
        if phase.momentum:  # Nesterov's point: the models, carried on along their last movement
            # His weights for convex functions: no constant of the data is needed.
            beta = state.tempo / (state.tempo + 3)
            ahead = ahead + beta[:, None] * (ahead - state.previous)
        sent = (ahead, state.groups) if len(state.groups) else (ahead,)
        shape = 1, ahead.shape[1] + 2
        answers, rng = yield Ask("update", sent, work, shape=shape, state=state)  # lines 5-7
        change, counts, state = _average_changes(settings, state, ahead, answers)  # line 8
        # Who answered, and its points in every cluster.
        labels, n = answers.stack[:, 0, 1:2], answers.n_samples[:, None]
        points = np.column_stack([answers.partitions, n * (labels == np.arange(len(ahead)))])
        state = _move_models(settings, state, ahead, change, counts, points)  # line 8
        then = revise_models(settings, state, answers, points, rng)
        if isinstance(then, Descent):
            return then
        state = then


def _average_changes(
    settings: TwoPhase, state: Refining, ahead: Matrix, answers: Answers
) -> tuple[Matrix, Matrix, Refining]:
    """Line 8: the mean change of every model, (k, d), its points, (k,), and who stands out."""
    # Clients whose curvature no common step suits would make the average diverge.
    trusted = ~np.isin(answers.partitions, state.steep)
    if settings.robust == "filtered":
        state = track_slopes(state, answers, ahead)
        trusted = state.received[:, 1] <= 0  # down a convex loss
    chosen = slice(None) if trusted.all() else trusted  # where all count, nothing is copied
    packed, n = answers.stack[chosen, :, 1:], answers.n_samples[chosen]
    shares = np.ones(len(trusted))
    how = {"normalise": settings.phase_2.normalise, "robust": str(settings.robust)}
    change, shares[chosen], counts = average_updates(packed, n, len(ahead), **how)
    return change, counts, replace(state, outliers=answers.outliers(shares))


def average_updates(
    packed: Matrix,
    n_samples: Matrix,
    n_clusters: int,
    *,
    normalise: str = "cluster",
    robust: str = "mean",
) -> Aggregate:
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
        A rule of `flwr_perdl.core.aggregate`. "filtered": the mean of the cluster's updates that
        are consistent with the others, of clients that count for no more than three times the
        median size. "clip": of all updates, those longer than three times the median length
        shortened to it. "trimmed", "median" and "geometric-median" count clients alike; on clients
        with fewer points than features they are biased.

    Returns
    -------
    Aggregate
        ``value``, the change of every model (k, d), zero for one without clients; ``weight``, the
        clusters' points (k,); ``outlyingness``, to which share of each client's update the rule did
        what its effect says.

    Raises
    ------
    ValueError
        If an update names a cluster that there is not.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.regression.fedx import average_updates
    >>> packed = np.array([[[0.0, 1.0]], [[0.0, 4.0]], [[1.0, 5.0]]])  # per client: cluster, change
    >>> found = average_updates(packed, np.array([1.0, 2.0, 7.0]), 2)
    >>> found.value
    array([[3.],
           [5.]])
    """
    labels = packed[:, 0, 0]
    if not ((labels >= 0) & (labels < n_clusters) & (labels % 1 == 0)).all():
        raise ValueError(f"packed must name clusters below {n_clusters}, got {labels.max()}.")
    change = np.zeros((n_clusters, packed.shape[2] - 1), packed.dtype)
    counts, outlyingness = np.zeros(n_clusters), np.zeros(len(packed))
    for j in np.unique(labels).astype(int):
        own = labels == j
        found = aggregate(robust, packed[own, 0, 1:], n_samples[own])
        change[j], outlyingness[own], counts[j] = found
    if normalise == "all":
        change *= (counts / max(counts.sum(), 1e-300))[:, None]
    return Aggregate(change, outlyingness, counts)


def _move_models(
    settings: TwoPhase,
    state: Refining,
    ahead: Matrix,
    change: Matrix,
    counts: Matrix,
    answered: Matrix,
) -> Refining:
    """Line 8: move the models, accelerated: by Anderson's method, otherwise by Nesterov's."""
    moved: Matrix = ahead + change
    known: dict[str, Any] = {}
    if settings.phase_2.momentum:
        # Gradient restart: a model that has moved against its change has overshot.
        uphill = np.einsum("kd,kd->k", change, moved - state.centers) < 0
        known["tempo"] = np.where(uphill, 0, state.tempo + 1)
    # Anderson's method has the changes linear in the models, which a robust average is not.
    if settings.phase_2.momentum and settings.robust == "mean":
        # Differences between rounds say how the changes depend on the model only where the same
        # clients made them.
        same = count_replaced(state.answered, answered) <= _REPLACED * counts
        memory = np.where(counts > 0, np.where(same, state.memory + 1, 1), 0)
        points = np.concatenate([state.points, ahead[None]])[-_MEMORY:]
        changes = np.concatenate([state.changes, change[None]])[-_MEMORY:]
        moved = accelerate(points, changes, memory)
        known["tempo"] = np.where(memory > 1, 0, known["tempo"])
        known |= {"points": points, "changes": changes, "memory": memory, "answered": answered}
    # A model that nobody chose stays: its change would be a division by zero points.
    centers = np.where(counts[:, None] > 0, moved, state.centers)
    return replace(state, centers=centers, previous=state.centers, counts=counts, **known)


def track_slopes(state: Refining, answers: Answers, sent: Matrix) -> Refining:
    """Note who sent what, and how it changed with the models since the client's last update.

    Between two models a client's step down a convex loss changes against the way from one to the
    other, whatever its data and their noise; one that turns its steps round, or always sends the
    same, shows by this where no distance would. Absent clients are forgotten.
    """
    packed, senders = answers.stack[:, 0, 1:], state.received[:, 0]
    known = np.isin(answers.partitions, senders) & (state.sent.shape == sent.shape)
    slopes = np.full(len(packed), -np.inf)
    if known.any():
        before = np.minimum(np.searchsorted(senders, answers.partitions), len(senders) - 1)
        known &= state.received[before, 2] == packed[:, 0]  # of the same cluster
        mine, then = packed[known], state.received[before[known]]
        labels = mine[:, 0].astype(int)
        way = (sent - state.sent)[labels]
        squares = (way**2).sum(axis=1)
        turn = ((mine[:, 1:] - then[:, 3:]) * way).sum(axis=1)
        old = np.where(np.isfinite(then[:, 1]), then[:, 1] / 2, 0)
        telling = squares > (_TELLING * np.linalg.norm(sent, axis=1)[labels]) ** 2
        slopes[known] = np.where(telling, old + turn / np.maximum(squares, 1e-300), then[:, 1])
    return replace(state, received=np.column_stack([answers.partitions, slopes, packed]), sent=sent)


def accelerate(points: Matrix, changes: Matrix, rounds: Matrix) -> Matrix:
    """Return the models of the next round, (k, d), each from its own last ``rounds``, (k,).

    The affine combination of the models ``points`` whose mean ``changes`` by the clients, combined
    alike, are shortest, plus these changes. Both are (n_rounds, k, d), the current round last.
    """
    centers: Matrix = points[-1] + changes[-1]
    for j, remembered in enumerate(np.minimum(rounds, len(points)).astype(int)):
        if remembered > 1:
            past = slice(-remembered, -1)
            moves, differences = points[past, j] - points[-1, j], changes[past, j] - changes[-1, j]
            weights = np.linalg.lstsq(differences.T, -changes[-1, j], rcond=_DIFFERS)[0]
            centers[j] += weights @ (moves + differences)
    return centers


def count_replaced(before: Matrix, now: Matrix) -> Matrix:
    """Return how many points each cluster won or lost between two rounds, (k,).

    ``before`` and ``now`` say who answered, and its points in every cluster, (n_clients, 1 + k).
    """
    clients = np.union1d(before[:, 0], now[:, 0])
    points = np.zeros((2, len(clients), now.shape[1] - 1))
    for own, rows in zip(points, (before, now), strict=True):
        own[np.searchsorted(clients, rows[:, 0])] = rows[:, 1:]
    replaced: Matrix = np.abs(points[1] - points[0]).sum(axis=0)
    return replaced


def revise_models(
    settings: TwoPhase, state: Refining, answers: Answers, points: Matrix, rng: np.random.Generator
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
        honest = ~np.isin(answers.partitions, state.outliers[state.outliers[:, 1] == 1, 0])
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
        centers = _merge(centers[keep], state.counts[keep], variance / state.power)
    if misfits and len(centers) < settings.most_clusters:
        return start_descent(settings, replace(state, centers=centers), rng)
    if len(centers) < k and settings.n_clusters == "auto":
        return Refining.start(state, centers)
    return state


def _merge(centers: Matrix, counts: Matrix, ratio: float) -> Matrix:
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
