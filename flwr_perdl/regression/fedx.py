"""Phase 2, FedX + clustering: what server and clients do, in the order of the listing.

======================================= ====================================================
paper (Su, Xu, Yang, NeurIPS 2022)      here
======================================= ====================================================
line 4: ``t = T + 1, ...``              the loop of :func:`fedx`
line 5: ``theta_{t-1}`` to all          the request of :func:`fedx`
line 6: ``lambda_{i,t}``                client: :func:`update`, by `assign`
line 7: ``theta_{i.,t}``                client: :func:`update`, by `local_changes`
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

from flwr_perdl.core.checks import Matrix, check_array
from flwr_perdl.regression.acceleration import accelerated, replaced_points
from flwr_perdl.regression.adapting import adapted
from flwr_perdl.regression.anchors import nearest_group
from flwr_perdl.regression.clustering import assign, average_updates, local_changes
from flwr_perdl.regression.exchange import Answers, Ask, Descent, Exchanges, Refining
from flwr_perdl.regression.losses import Loss, check_points, of_stacks
from flwr_perdl.regression.moments import moment_step
from flwr_perdl.regression.phases import TwoPhase

# What was tuned on settings C.1-C.3 and on features with condition number 1e4: rounds that the
# acceleration remembers, the current one included, and the share of a cluster's points that may
# come or go between two rounds that it compares.
_MEMORY, _REPLACED = 11, 0.02
#: Movement of a model, relative to its length, from which on it shows how clients follow it.
_TELLING = 1e-4


# Clients, many of one size at once ---------------------------------------------------------------


def update(X: Matrix, y: Matrix, ask: Ask, loss: Loss, alone: Matrix | None = None) -> Matrix:
    """Lines 6-7: every client's loss, cluster and change of its model, (m, 1, d + 2).

    ``alone`` is what `estimate_alone` returns, where that is known.
    """
    (m, n, d), options, stacked = X.shape, ask.options, of_stacks(loss)
    centers = check_array("centers", ask.arrays[0], min_rows=1, columns=d)
    losses = stacked.values(X, y, centers)
    if len(ask.arrays) > 1 and len(ask.arrays[1]):
        weights = nearest_group(estimate_alone(X, y) if alone is None else alone, ask.arrays[1])
    else:
        weights = assign(losses, n)  # line 6
    labels = weights.argmax(axis=1)  # z_{i,t}, equation 8
    head = np.stack([losses[np.arange(m), labels], labels], axis=1)
    work: dict[str, Any] = {"n_steps": int(options["n_steps"]), "local": str(options["local"])}
    work["step"] = float(options["step_size"])
    change = local_changes(X, y, centers[labels], loss=loss, **work)  # line 7
    return np.concatenate([head, change], axis=1)[:, None]


def estimate_alone(X: Matrix, y: Matrix) -> Matrix:
    """Return every client's estimate from its own points alone, by least squares.

    Parameters
    ----------
    X, y : ndarray of shape (n_clients, n, d) and (n_clients, n)
        Features and responses of clients of one size.

    Returns
    -------
    ndarray of shape (n_clients, d)

    Raises
    ------
    ValueError
        If the data are not finite, or of other shapes.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.regression import estimate_alone
    >>> X = np.random.default_rng(0).standard_normal((2, 10, 2))
    >>> estimate_alone(X, X[..., 0]).round(6) + 0.0
    array([[1., 0.],
           [1., 0.]])
    """
    X, y = check_points(X, y, ndim=3)
    d = X.shape[2]
    zero, whole = np.zeros(d, X.dtype), np.eye(d, dtype=X.dtype)
    return np.stack([moment_step(A, b, zero, whole) for A, b in zip(X, y, strict=True)])


# Server -------------------------------------------------------------------------------------------


def fedx(settings: TwoPhase, state: Refining) -> Exchanges[Descent]:
    """Phase 2, until there are clients that no model fits, for which Phase 1 is to find models."""
    phase = settings.phase_2
    work: dict[str, Any] = {"local": phase.local, "n_steps": phase.n_steps}
    work["step_size"] = state.step_size
    while True:  # line 4
        ahead = state.centers
        if phase.momentum:  # Nesterov's point: the models, carried on along their last movement
            # His weights for convex functions: no constant of the data is needed.
            beta = state.tempo / (state.tempo + 3)
            ahead = ahead + beta[:, None] * (ahead - state.previous)
        sent = (ahead, state.groups) if len(state.groups) else (ahead,)
        shape = 1, ahead.shape[1] + 2
        answers, rng = yield Ask("update", sent, work, shape=shape, state=state)  # lines 5-7
        change, counts, state = _averaged(settings, state, ahead, answers)  # line 8
        # Who answered, and its points in every cluster.
        labels, n = answers.stack[:, 0, 1:2], answers.n_samples[:, None]
        points = np.column_stack([answers.partitions, n * (labels == np.arange(len(ahead)))])
        state = _moved(settings, state, ahead, change, counts, points)  # line 8
        then = adapted(settings, state, answers, points, rng)
        if isinstance(then, Descent):
            return then
        state = then


def _averaged(
    settings: TwoPhase, state: Refining, ahead: Matrix, answers: Answers
) -> tuple[Matrix, Matrix, Refining]:
    """Line 8: the mean change of every model, (k, d), its points, (k,), and who stands out."""
    # Clients whose curvature no common step suits would make the average diverge.
    trusted = ~np.isin(answers.partitions, state.steep)
    if settings.robust == "filtered":
        state = track_slopes(state, answers, ahead)
        trusted = state.received[:, 1] <= 0  # down a convex loss
    chosen = slice(None) if trusted.all() else trusted  # where all count, nothing is copied
    packed, n, odd = answers.stack[chosen, :, 1:], answers.n_samples[chosen], np.ones(len(trusted))
    how = {"normalise": settings.phase_2.normalise, "robust": str(settings.robust)}
    change, odd[chosen], counts = average_updates(packed, n, len(ahead), **how)
    return change, counts, replace(state, odd=answers.odd(odd))


def _moved(
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
        same = replaced_points(state.answered, answered) <= _REPLACED * counts
        memory = np.where(counts > 0, np.where(same, state.memory + 1, 1), 0)
        points = np.concatenate([state.points, ahead[None]])[-_MEMORY:]
        changes = np.concatenate([state.changes, change[None]])[-_MEMORY:]
        moved = accelerated(points, changes, memory)
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
