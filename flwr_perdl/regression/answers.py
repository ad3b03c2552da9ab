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
the server learns the curvature of a client's loss and its features' mean squares. Of a client with
one point, these, its loss and its change of a model are its sample and its response.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl._checks import (
    LARGE,
    Matrix,
    check_array,
    check_choice,
    check_count,
    check_flag,
    check_real,
)
from flwr_perdl._random import spawn
from flwr_perdl.regression.anchors import nearest_group
from flwr_perdl.regression.clustering import LOCALS, assign, moved
from flwr_perdl.regression.losses import SQUARED, Loss, check_labels, check_points, of_stacks
from flwr_perdl.regression.moments import (
    ESTIMATES,
    STEPS,
    anchor_moved,
    check_subspace,
    residual_moment,
)

DESCRIBE = "describe"
MOMENT = "moment"
ANCHORS = "anchors"
UPDATE = "update"
#: Local work of an "update" that sends second moments, for the server to solve with.
EXACT = "exact"

#: A request's options.
Scalars = dict[str, float | int | str]

#: The most local steps that a request may ask for.
MOST_STEPS = 10_000


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
        What these clients receive instead of ``arrays``; only where anchors are named
        (``n_anchors`` or ``n_iterations``).
    noise, seed : float, int
        Remark 2: the first array is followed by a second copy, and this noise, a client's own, is
        added to both.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.regression import TwoPhase
    >>> settings = TwoPhase(2)
    >>> settings.ask(settings.begin(np.eye(2)), np.random.default_rng(0)).step
    'describe'
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
    """The clients' answers, in ascending order of partition.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.regression import Ask, Clients
    >>> X = np.random.default_rng(0).standard_normal((3, 10, 2))
    >>> Clients(X, X[..., 0]).answer(Ask("describe")).partitions
    array([0, 1, 2])
    """

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


def check_norms(name: str, models: Matrix, most: float) -> None:
    """Raise a ValueError if a model, along the last axis, has a norm above ``most``."""
    with np.errstate(over="ignore", invalid="ignore"):
        largest = float(np.linalg.norm(models, axis=-1).max(initial=0))
    if not largest <= most:
        raise ValueError(f"{name} must have norms of at most {most:g}, got {largest:g}.")


def check_ask(ask: Ask, *, max_norm: float) -> None:
    """Raise a ValueError unless a request is one that `TwoPhase` makes, whatever the data are.

    Parameters
    ----------
    ask : Ask
        The request, as a client receives it. What is missing is left for `answer` to name.
    max_norm : float
        Largest norm of a model.
    """
    check_choice("step", ask.step, (DESCRIBE, MOMENT, ANCHORS, UPDATE))
    for position, array in enumerate(ask.arrays):
        name = f"array {position}"
        if ask.step == UPDATE or position != 1:  # the others are models, these are directions
            check_norms(name, check_array(name, array, ndim=array.ndim), max_norm)
    checks: dict[str, Callable[[str, Any], Any]] = {
        "estimate": partial(check_choice, choices=ESTIMATES),
        "transpose": check_flag,
        "variance": partial(check_real, low=0),
        "min_points": partial(check_count, low=0),
        "local": partial(check_choice, choices=(*LOCALS, EXACT)),
        "n_steps": partial(check_count, low=1, high=MOST_STEPS),
        "step_size": partial(check_real, low=0, high=LARGE),
        "soft": check_flag,
        "temperature": partial(check_real, low=0, high=LARGE),
    }
    for name, value in ask.options.items():
        if name in checks:
            checks[name](name, value)


def points_of(ask: Ask, n_samples: int) -> int:
    """Return how many of a client's points the smallest sum in its answer goes over."""
    if ask.step == MOMENT and ask.options.get("estimate") != "u-statistic":
        return 1 if ask.options.get("estimate") == "pair" else n_samples // 2
    return n_samples


def answer(X: Matrix, y: Matrix, ask: Ask, loss: Loss = SQUARED) -> Matrix:
    """Return the answers of clients that have as many points each, and are asked the same.

    They are the same bits as one by one: a single client is a stack of one.

    Parameters
    ----------
    X : ndarray of shape (n_clients, n_samples, d), or (n_samples, d) of a single client
        Features.
    y : ndarray of shape (n_clients, n_samples), or (n_samples,)
        Responses.
    ask : Ask
        The request, as these clients receive it.
    loss : Loss, default SQUARED
        The loss of Phase 2.

    Returns
    -------
    ndarray
        One answer per client, or that of the single one. "describe": (d + 1,), curvature and the
        features' mean squares. "moment": (h, d, width), the client's part of the products.
        "anchors": (d + 1,), one and the estimate, or zeros from a client that is no anchor.
        "update": (1, d + 2), loss, cluster and change; soft: (k, d + 2), loss, weight and change;
        exact: (1, d^2 + d + 2), loss, cluster, ``X' r / n`` and ``X' X / n``.

    Raises
    ------
    ValueError
        If the data or the request are not as they should be.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.regression import Ask, answer
    >>> X, y = np.eye(2), np.array([1.0, 3.0])
    >>> answer(X, y, Ask("describe")).shape
    (3,)
    """
    X, y = check_points(X, y, ndim=3 if np.ndim(X) == 3 else 2)
    check_labels("y", y, loss)
    check_choice("step", ask.step, (DESCRIBE, MOMENT, ANCHORS, UPDATE))
    if X.ndim == 2:
        (found,) = answered(X[None], y[None], ask, loss)
        return np.asarray(found)
    return answered(X, y, ask, loss)


def answered(X: Matrix, y: Matrix, ask: Ask, loss: Loss, own: Matrix | None = None) -> Matrix:
    """Return :func:`answer` of arguments that are as they should be.

    ``own`` is what `estimate_alone` returns, where that is known: only groups ask for it.
    """
    ask = ask._replace(arrays=tuple(array.astype(X.dtype, copy=False) for array in ask.arrays))
    if ask.step == UPDATE:
        found = _update(X, y, ask, loss, own)
    elif ask.step == DESCRIBE:
        curvature = of_stacks(loss).curvature(X)
        found = np.concatenate([curvature[:, None], np.mean(X**2, axis=1)], axis=1)
    else:
        found = (_moment if ask.step == MOMENT else _anchor)(X, y, ask)
    return found.astype(X.dtype, copy=False)


def misfit_bound(n_samples: Matrix) -> Matrix:
    """Return above how many noise variances a mean of ``n_samples`` squares is no noise."""
    bound: Matrix = 4 + 12 / n_samples
    return bound


def _misfits(X: Matrix, y: Matrix, ask: Ask) -> NDArray[np.bool_]:
    """Tell which clients have residuals, of whichever model fits best, that are no noise."""
    centers, bound = ask.arrays[2], misfit_bound(np.array(X.shape[1]))
    if not len(centers):
        return np.ones(len(X), dtype=bool)
    squares = 2 * SQUARED.values(X, y, centers).min(axis=1)
    misfits: NDArray[np.bool_] = squares > bound * float(ask.options["variance"])
    return misfits


def _moment(X: Matrix, y: Matrix, ask: Ask) -> Matrix:
    thetas, Q = ask.arrays[0], ask.arrays[1]
    found, chosen = np.zeros((len(X), *Q.shape), Q.dtype), _misfits(X, y, ask)
    if chosen.any():
        estimate, transpose = str(ask.options["estimate"]), bool(ask.options["transpose"])
        mine = (X, y) if chosen.all() else (X[chosen], y[chosen])
        found[chosen] = residual_moment(*mine, thetas, Q, estimate=estimate, transpose=transpose)
    return found


def _anchor(X: Matrix, y: Matrix, ask: Ask) -> Matrix:
    found = np.zeros((len(X), X.shape[2] + 1), X.dtype)
    if not ask.arrays or X.shape[1] < int(ask.options["min_points"]):
        return found
    theta, U = ask.arrays[0][0], ask.arrays[1][0]
    step = check_choice("step", str(ask.options["anchor_step"]), STEPS)
    theta, U = check_subspace(theta, U, X.shape[2])
    for i in np.flatnonzero(_misfits(X, y, ask)):
        found[i, 0] = 1
        found[i, 1:] = anchor_moved(X[i], y[i], theta, U, step)
    return found


def _update(X: Matrix, y: Matrix, ask: Ask, loss: Loss, own: Matrix | None) -> Matrix:
    """Phase 2: assignment and local work."""
    m, n, d = X.shape
    centers = check_array("centers", ask.arrays[0], min_rows=1, columns=d)
    stacked = of_stacks(loss)
    losses = stacked.values(X, y, centers)
    groups = groups_of(ask)
    if len(groups):
        weights = nearest_group(estimate_alone(X, y) if own is None else own, groups)
    else:
        weights = assign(losses, n, float(ask.options["temperature"]))
    if ask.options["soft"]:
        expected = np.einsum("mk,mk->m", weights, losses)
        heads = np.stack([np.broadcast_to(expected[:, None], losses.shape), weights], axis=-1)
        moves = [_change(X, y, t, weights[:, j], ask, loss) for j, t in enumerate(centers)]
        return np.concatenate([heads, np.stack(moves, axis=1)], axis=-1)
    labels = weights.argmax(axis=1)
    heads = np.stack([losses[np.arange(m), labels], labels], axis=1)
    theta = centers[labels]
    if ask.options["local"] == EXACT:
        gram = (X.swapaxes(1, 2) @ X / n).reshape(m, d * d)
        tail = np.concatenate([-stacked.gradient(X, y, theta), gram], axis=1)
    else:
        tail = _change(X, y, theta, np.ones(m), ask, loss)
    return np.concatenate([heads, tail], axis=1)[:, None]


def groups_of(ask: Ask) -> Matrix:
    """Return the groups that clients of an "update" belong to for good, as rows; mostly none."""
    return ask.arrays[1] if len(ask.arrays) > 1 else ask.arrays[0][:0]


def estimate_alone(X: Matrix, y: Matrix) -> Matrix:
    """Return what every client of a stack estimates from its own points, (n_clients, d)."""
    d = X.shape[2]
    zero, whole = np.zeros(d, X.dtype), np.eye(d, dtype=X.dtype)
    each = zip(X, y, strict=True)
    return np.stack([anchor_moved(A, b, zero, whole, "least-squares") for A, b in each])


def _change(X: Matrix, y: Matrix, theta: Matrix, weight: Matrix, ask: Ask, loss: Loss) -> Matrix:
    """Return how the local work that is asked for moves one model."""
    return moved(
        X,
        y,
        np.broadcast_to(theta, (len(X), X.shape[2])),
        step=float(ask.options["step_size"]),
        n_steps=int(ask.options["n_steps"]),
        local=str(ask.options["local"]),
        weight=weight,
        loss=loss,
    )
