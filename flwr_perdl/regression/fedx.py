"""Phase 2, FedX + clustering: what server and clients do, in the order of the listing.

======================================= ====================================================
paper (Su, Xu, Yang, NeurIPS 2022)      here
======================================= ====================================================
line 4: ``t = T + 1, ...``              the loop of :func:`fedx`
line 5: ``theta_{t-1}`` to all          server: :func:`_broadcast`
line 6: ``lambda_{i,t}``                client: :func:`update`, by `assign`
line 7: ``theta_{i.,t}``                client: :func:`update`, by `moved`
line 8: ``sum_i w_i theta_{i.,t}``      server: :func:`_averaged`, :func:`_moved`
======================================= ====================================================

The formulas, and what differs from the paper's, are in ``clustering.py``. Not in the paper: the
server accelerates (:func:`_moved`, ``acceleration.py``), tells liars by how their updates follow
the models (:func:`track_slopes`), and adapts the number of models (``adapting.py``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.checks import Matrix, check_array
from flwr_perdl.regression.acceleration import accelerated, replaced_points
from flwr_perdl.regression.adapting import adapted
from flwr_perdl.regression.anchors import nearest_group
from flwr_perdl.regression.clustering import assign, average_updates, moved
from flwr_perdl.regression.exchange import Answers, Ask, Descent, Exchanges, Refining
from flwr_perdl.regression.losses import Loss, of_stacks
from flwr_perdl.regression.moments import anchor_moved
from flwr_perdl.regression.phases import EXACT, Refinement, TwoPhase

# What was tuned on settings C.1-C.3 and on features with condition number 1e4: rounds that the
# acceleration remembers, the current one included, and the share of a cluster's points that may
# come or go between two rounds that it compares.
_MEMORY, _REPLACED = 11, 0.02
#: Movement of a model, relative to its length, from which on it shows how clients follow it.
_TELLING = 1e-4


# Clients, many of one size at once ---------------------------------------------------------------


def update(X: Matrix, y: Matrix, ask: Ask, loss: Loss, alone: Matrix | None = None) -> Matrix:
    """Lines 6-7: per client and model, loss, cluster or weight, and change, (m, 1 or k, d + 2).

    ``alone`` is what `estimate_alone` returns, where that is known: only one-shot clustering, which
    sends groups to belong to for good, asks for it.
    """
    (m, n, d), options, stacked = X.shape, ask.options, of_stacks(loss)
    centers = check_array("centers", ask.arrays[0], min_rows=1, columns=d)
    losses = stacked.values(X, y, centers)
    if len(ask.arrays) > 1 and len(ask.arrays[1]):
        weights = nearest_group(estimate_alone(X, y) if alone is None else alone, ask.arrays[1])
    else:
        weights = assign(losses, n, float(options["temperature"]))  # line 6

    def change(theta: Matrix, weight: Matrix) -> Matrix:  # line 7
        step, n_steps, local = options["step_size"], options["n_steps"], str(options["local"])
        how: dict[str, Any] = {"step": float(step), "n_steps": int(n_steps), "local": local}
        return moved(X, y, np.broadcast_to(theta, (m, d)), weight=weight, loss=loss, **how)

    if options["soft"]:
        expected = np.einsum("mk,mk->m", weights, losses)  # L(theta, lambda; D_i)
        heads = np.stack([np.broadcast_to(expected[:, None], losses.shape), weights], axis=-1)
        changes = [change(theta, weights[:, j]) for j, theta in enumerate(centers)]
        return np.concatenate([heads, np.stack(changes, axis=1)], axis=-1)
    labels = weights.argmax(axis=1)  # z_{i,t}, equation 8
    heads = np.stack([losses[np.arange(m), labels], labels], axis=1)
    if options["local"] == EXACT:
        gram = (X.swapaxes(1, 2) @ X / n).reshape(m, d * d)
        tail = np.concatenate([-stacked.gradient(X, y, centers[labels]), gram], axis=1)
    else:
        tail = change(centers[labels], np.ones(m))
    return np.concatenate([heads, tail], axis=1)[:, None]


def estimate_alone(X: Matrix, y: Matrix) -> Matrix:
    """Return what every client of a stack estimates from its own points, (m, d)."""
    d = X.shape[2]
    zero, whole = np.zeros(d, X.dtype), np.eye(d, dtype=X.dtype)
    each = zip(X, y, strict=True)
    return np.stack([anchor_moved(A, b, zero, whole, "least-squares") for A, b in each])


# Server -------------------------------------------------------------------------------------------


def fedx(settings: TwoPhase, state: Refining) -> Exchanges[Descent]:
    """Phase 2, until there are clients that no model fits, for which Phase 1 is to find models."""
    while True:  # line 4
        ahead = _ahead(settings.phase_2, state)
        answers, rng = yield _broadcast(settings.phase_2, state, ahead)  # line 5
        change, counts, state = _averaged(settings, state, ahead, answers)  # lines 6-8
        answered = _points_by_client(settings.phase_2, answers, len(ahead))
        state = _moved(settings, state, ahead, change, counts, answered)  # line 8
        state = _counted(settings, state, counts, answered)
        then = adapted(settings, state, answers, rng)
        if isinstance(then, Descent):
            return then
        state = then


def _ahead(phase: Refinement, state: Refining) -> Matrix:
    """Return Nesterov's point: the models, carried on along their last movement."""
    if not phase.momentum:
        return state.centers
    # The weights of Nesterov's method for convex functions: no constant of the data is needed.
    beta = state.tempo / (state.tempo + 3)
    return state.centers + beta[:, None] * (state.centers - state.previous)


def _broadcast(phase: Refinement, state: Refining, ahead: Matrix) -> Ask:
    """Line 5: the models to all clients, and the work of lines 6-7."""
    k, d = ahead.shape
    options = {name: getattr(phase, name) for name in ("local", "n_steps")}
    # At the noise's variance, soft weights are the posterior of a Gaussian mixture.
    weights = {"soft": int(phase.softness > 0), "temperature": phase.softness * state.variance}
    arrays = (ahead, state.groups) if len(state.groups) else (ahead,)
    shape = (k if phase.softness else 1, d + 2 + (d * d if phase.local == EXACT else 0))
    options |= {"step_size": state.step_size, **weights}
    return Ask("update", arrays, options, shape=shape, state=state)


def _averaged(
    settings: TwoPhase, state: Refining, ahead: Matrix, answers: Answers
) -> tuple[Matrix, Matrix, Refining]:
    """Line 8: the mean change of every model, (k, d), its points, (k,), and who stands out."""
    phase, n, k = settings.phase_2, answers.n_samples, len(ahead)
    packed = answers.stack[:, :, 1:]
    if phase.local == EXACT:
        return (*_solved(packed[:, 0], n, k), replace(state, odd=state.odd[:0]))
    # Clients whose curvature no common step suits would make the average diverge.
    trusted = ~np.isin(answers.partitions, state.steep)
    if settings.robust == "filtered" and not phase.softness:
        state = track_slopes(state, answers.partitions, packed[:, 0], ahead)
        trusted = state.slopes <= 0  # down a convex loss
    chosen = slice(None) if trusted.all() else trusted  # where all count, nothing is copied
    odd = np.ones(len(n))
    change, counts, odd[chosen] = average_updates(
        packed[chosen], n[chosen], k, phase.softness > 0, phase.normalise, settings.robust
    )
    state = replace(state, odd=answers.odd(odd))
    if phase.softness:  # the mean loss is half the noise's variance
        state = replace(state, variance=float(2 * (n @ answers.stack[:, 0, 0]) / n.sum()))
    return change, counts, state


def _points_by_client(phase: Refinement, answers: Answers, k: int) -> Matrix:
    """Return who answered, and its points in every cluster, (m, 1 + k)."""
    claimed = answers.stack[:, :, 1]
    shares = claimed if phase.softness else claimed[:, :1] == np.arange(k)
    found = np.empty((len(shares), 1 + k))
    found[:, 0] = answers.partitions
    np.multiply(answers.n_samples[:, None], shares, out=found[:, 1:])
    return found


def _moved(
    settings: TwoPhase,
    state: Refining,
    ahead: Matrix,
    change: Matrix,
    counts: Matrix,
    answered: Matrix,
) -> Refining:
    """Line 8: move the models, accelerated: by Anderson's method, otherwise by Nesterov's."""
    # A model that nobody chose stays: its change would be a division by zero points.
    centers = np.where(counts[:, None] > 0, ahead + change, state.centers)
    after = replace(state, centers=centers, previous=state.centers)
    if settings.phase_2.local == EXACT or not settings.phase_2.momentum:
        return after
    # Gradient restart: a model that has moved against its change has overshot.
    uphill = np.einsum("kd,kd->k", change, centers - state.centers) < 0
    tempo = np.where(uphill, 0, state.tempo + 1)
    if settings.robust != "mean":  # not linear in the models, as Anderson's method has it
        return replace(after, tempo=tempo)
    # Differences between rounds say how the changes depend on the model only where the same
    # clients made them.
    same = replaced_points(state.answered, answered) <= _REPLACED * counts
    memory = np.where(counts > 0, np.where(same, state.memory + 1, 1), 0)
    points = np.concatenate([state.points, ahead[None]])[-_MEMORY:]
    changes = np.concatenate([state.changes, change[None]])[-_MEMORY:]
    return replace(
        after,
        centers=np.where(memory[:, None] > 1, accelerated(points, changes, memory), centers),
        tempo=np.where(memory > 1, 0, tempo),
        points=points,
        changes=changes,
        memory=memory,
        answered=answered,
    )


def _counted(settings: TwoPhase, state: Refining, counts: Matrix, answered: Matrix) -> Refining:
    """Note the clusters' points, of clients too that have answered since the last check only."""
    if settings.adapts(len(state.centers)):
        if len(state.checked) and not np.array_equal(state.checked[:, 0], answered[:, 0]):
            absent = state.checked[~np.isin(state.checked[:, 0], answered[:, 0])]
            answered = np.vstack([absent, answered])
            counts = counts + absent[:, 1:].sum(axis=0)
        state = replace(state, checked=answered)
    return replace(state, counts=counts, since=state.since + 1)


def track_slopes(
    state: Refining, partitions: NDArray[np.intp], packed: Matrix, sent: Matrix
) -> Refining:
    """Note who sent what, and how it changed with the models since the client's last update.

    Between two models a client's step down a convex loss changes against the way from one to the
    other, whatever its data and their noise; one that turns its steps round, or always sends the
    same, shows by this where no distance would. Absent clients are forgotten.
    """
    known = np.isin(partitions, state.senders) & (state.sent.shape == sent.shape)
    slopes = np.full(len(partitions), -np.inf)
    if known.any():
        before = np.minimum(np.searchsorted(state.senders, partitions), len(state.senders) - 1)
        known &= state.received[before, 0] == packed[:, 0]  # of the same cluster
        mine, then = packed[known], before[known]
        labels = mine[:, 0].astype(int)
        way = (sent - state.sent)[labels]
        squares = (way**2).sum(axis=1)
        turn = ((mine[:, 1:] - state.received[then, 1:]) * way).sum(axis=1)
        old = np.where(np.isfinite(state.slopes[then]), state.slopes[then] / 2, 0)
        telling = squares > (_TELLING * np.linalg.norm(sent, axis=1)[labels]) ** 2
        now = old + turn / np.maximum(squares, 1e-300)
        slopes[known] = np.where(telling, now, state.slopes[then])
    return replace(state, senders=partitions, received=packed, sent=sent, slopes=slopes)


def _solved(packed: Matrix, n_samples: Matrix, n_clusters: int) -> tuple[Matrix, Matrix]:
    """Return the change to every cluster's least squares from its clients' sums, and its points."""
    d = int(np.sqrt(packed.shape[1] - 0.75) - 0.5)  # of 1 + d + d * d columns
    change, counts = np.zeros((n_clusters, d)), np.zeros(n_clusters)
    for j in range(n_clusters):
        mine = packed[:, 0] == j
        counts[j] = n_samples[mine].sum()
        if counts[j]:
            sums = n_samples[mine] @ packed[mine, 1:]
            change[j] = np.linalg.lstsq(sums[d:].reshape(d, d), sums[:d], rcond=None)[0]
    return change, counts
