"""What a server asks in either phase, and what a client answers.

======================================= ====================================================
paper (Su, Xu, Yang, NeurIPS 2022)      here
======================================= ====================================================
Phase 1, lines 7-9 (Algorithm 3)        ``step="moment"``, one exchange per product
Phase 1, lines 10-15                    ``step="anchors"``
Phase 2, lines 5-7                      ``step="update"``
======================================= ====================================================

Not in the paper: a first exchange, ``step="describe"``, and that clients which fit one of the
models already there take no part in a later Phase 1.

What each party learns: see ``moments.py`` and ``clustering.py``; further, in the first exchange,
the server learns the curvature of a client's loss and its features' mean squares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl._checks import Matrix, check_array, check_choice
from flwr_perdl._random import spawn
from flwr_perdl.regression.anchors import nearest_group
from flwr_perdl.regression.clustering import assign, local_change, pack
from flwr_perdl.regression.losses import SQUARED, Loss
from flwr_perdl.regression.moments import moment_step, residual_moment

DESCRIBE = "describe"
MOMENT = "moment"
ANCHORS = "anchors"
UPDATE = "update"


class Ask(NamedTuple):
    """One request to every client.

    Attributes
    ----------
    step : str
        "describe", "moment", "anchors" or "update".
    arrays : tuple of ndarray
        What every client receives.
    options : mapping
        Scalars.
    own : mapping of int to tuple of ndarray
        What these clients receive instead of ``arrays``; only where anchors have estimates of
        their own (``n_anchors`` or ``n_iterations``).
    noise, seed : float, int
        Remark 2: the first array is followed by a second copy, and this noise, a client's own, is
        added to both.
    """

    step: str
    arrays: tuple[Matrix, ...] = ()
    options: Mapping[str, float | int | str] = {}
    own: Mapping[int, tuple[Matrix, ...]] = {}
    noise: float = 0.0
    seed: int = 0

    def to(self, partition: int) -> Ask:
        """Return the request as this client receives it."""
        arrays = self.own.get(partition, self.arrays)
        if self.noise:
            rng = spawn(self.seed, partition)
            copies = np.concatenate([arrays[0], arrays[0]])
            copies += self.noise * rng.standard_normal(copies.shape)
            arrays = (copies, *arrays[1:])
        return Ask(self.step, arrays, self.options)


class Answers(NamedTuple):
    """The clients' answers, in ascending order of partition."""

    #: Who answered, (n_clients,).
    partitions: NDArray[np.intp]
    #: Their numbers of points, (n_clients,).
    n_samples: Matrix
    #: Their answers, (n_clients, ...).
    stack: Matrix

    @classmethod
    def collect(cls, replies: Mapping[int, tuple[Matrix, int]]) -> Answers:
        """Return answers and numbers of points by partition as one.

        Raises
        ------
        ValueError
            If there are none, or not all have one shape.
        """
        partitions = sorted(replies)
        shapes = {replies[partition][0].shape for partition in partitions}
        if len(shapes) != 1:
            raise ValueError(f"all answers must have one shape, got {sorted(shapes)}.")
        return cls(
            np.array(partitions, dtype=np.intp),
            np.array([float(replies[partition][1]) for partition in partitions]),
            np.stack([replies[partition][0] for partition in partitions]),
        )


def answer(X: Matrix, y: Matrix, ask: Ask, loss: Loss = SQUARED) -> Matrix:
    """Return a client's answer.

    Parameters
    ----------
    X : ndarray of shape (n_samples, d)
        Features.
    y : ndarray of shape (n_samples,)
        Responses.
    ask : Ask
        The request, as this client receives it.
    loss : Loss, default SQUARED
        The loss of Phase 2.

    Returns
    -------
    ndarray
        "describe": (d + 1,), curvature and the features' mean squares. "moment": (h, d, width), the
        client's part of the products. "anchors": (d + 1,), one and the estimate, or zeros from
        a client that is no anchor. "update": (1, d + 2), loss, cluster and change; soft:
        (k, d + 2), loss, weight and change; exact: (1, d^2 + d + 2), loss, cluster, ``X' r / n``
        and ``X' X / n``.

    Raises
    ------
    ValueError
        If the data or the request are not as they should be.
    """
    X = check_array("X", X, min_rows=1)
    y = check_array("y", y, ndim=1)
    if len(y) != len(X):
        raise ValueError(f"y must have {len(X)} entries, got {len(y)}.")
    steps = {DESCRIBE: _describe, MOMENT: _moment, ANCHORS: _anchor, UPDATE: _update}
    check_choice("step", ask.step, steps)
    ask = ask._replace(arrays=tuple(array.astype(X.dtype) for array in ask.arrays))
    return steps[ask.step](X, y, ask, loss).astype(X.dtype, copy=False)


def _describe(X: Matrix, y: Matrix, ask: Ask, loss: Loss) -> Matrix:
    return np.concatenate([[loss.curvature(X)], np.mean(X**2, axis=0)])


def _fits(X: Matrix, y: Matrix, centers: Matrix, variance: float) -> bool:
    """Whether some model leaves residuals that noise explains."""
    if not len(centers):
        return False
    squares = 2 * SQUARED.values(X, y, centers).min()
    return bool(squares <= misfit_bound(np.array([len(X)]))[0] * variance)


def misfit_bound(n_samples: Matrix) -> Matrix:
    """Return above how many noise variances a mean of ``n_samples`` squares is no noise."""
    bound: Matrix = 4 + 12 / n_samples
    return bound


def _moment(X: Matrix, y: Matrix, ask: Ask, loss: Loss) -> Matrix:
    thetas, Q, centers = ask.arrays
    if _fits(X, y, centers, float(ask.options["variance"])):
        return np.zeros_like(Q)
    return residual_moment(
        X,
        y,
        thetas,
        Q,
        estimate=str(ask.options["estimate"]),
        transpose=bool(ask.options["transpose"]),
    )


def _anchor(X: Matrix, y: Matrix, ask: Ask, loss: Loss) -> Matrix:
    nothing = np.zeros(X.shape[1] + 1, X.dtype)
    if not ask.arrays or len(X) < int(ask.options["min_points"]):
        return nothing
    thetas, U, centers = ask.arrays
    if _fits(X, y, centers, float(ask.options["variance"])):
        return nothing
    moved = moment_step(X, y, thetas[0], U[0], step=str(ask.options["anchor_step"]))
    return np.concatenate([[1.0], moved])


def _update(X: Matrix, y: Matrix, ask: Ask, loss: Loss) -> Matrix:
    centers, groups = ask.arrays
    centers = check_array("centers", centers, min_rows=1, columns=X.shape[1])
    temperature = float(ask.options["temperature"])
    losses = loss.values(X, y, centers)
    if len(groups):
        own = moment_step(X, y, np.zeros_like(centers[0]), np.eye(len(groups[0])))
        weights = nearest_group(own[None], groups)[0]
    else:
        weights = assign(losses[None], np.array([len(X)]), temperature)[0]
    if ask.options["local"] == "exact":
        j = int(weights.argmax())
        residual = y - X @ centers[j]
        head, slope = [losses[j], j], X.T @ residual / len(X)
        return np.concatenate([head, slope, (X.T @ X / len(X)).ravel()])[None]
    change = np.zeros_like(centers)
    for j in map(int, np.flatnonzero(weights)):
        change[j] = local_change(
            X,
            y,
            centers[j],
            step=float(ask.options["step_size"]),
            n_steps=int(ask.options["n_steps"]),
            local=str(ask.options["local"]),
            weight=float(weights[j]),
            loss=loss,
        )
    packed = pack(change, weights, soft=bool(ask.options["soft"]))
    return np.column_stack([np.full(len(packed), weights @ losses), packed])
