"""FedMD and FedX + clustering as one protocol, and a client's part in it; no messages here.

======================================= ====================================================
paper (Su, Xu, Yang, NeurIPS 2022)      here
======================================= ====================================================
Phase 1, FedMD                          ``fedmd.py``
Phase 2, FedX + clustering              ``fedx.py``
``T``, ``T_1``, ``n_H``, ``eta``, …     options of the phases (``phases.py``)
======================================= ====================================================

Not in the paper: a first exchange, which finds the dimension and the step size. What each party
learns: `flwr_perdl.strategies.FedX`'s module.
"""

from __future__ import annotations

import numpy as np

from flwr_perdl.core.aggregate import CAP, cap_sizes
from flwr_perdl.core.checks import Matrix
from flwr_perdl.regression.fedmd import anchor, fedmd, moment, one_shot, start_descent
from flwr_perdl.regression.fedx import fedx, update
from flwr_perdl.regression.losses import SQUARED, Loss
from flwr_perdl.regression.moments import random_models
from flwr_perdl.regression.phases import Answers, Ask, Descent, Exchanges, Refining, Stage, TwoPhase

#: Clients whose curvature is above this many times the median do not count for the step size.
_STEEP = 10
#: Share of the points whose clients decide about it: the largest curvatures are mostly those of
#: clients with very few points, and would slow down all.
_TYPICAL = 0.9


def two_phases(settings: TwoPhase, state: Stage) -> Exchanges[None]:
    """Run both phases, from a state on: yield what to ask, receive the answers.

    Parameters
    ----------
    settings : TwoPhase
        How they are done.
    state : Stage
        ``settings.begin()``, or that of a request of an earlier run, which is yielded again.

    Yields
    ------
    Ask
        The next request; ``Ask.state`` is what the server knows by then. `send` the answers to it
        and the round's own generator, ``(Answers, numpy.random.Generator)``. There is no end.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.regression import TwoPhase, answer, two_phases
    >>> from flwr_perdl.regression.phases import Answers
    >>> settings = TwoPhase(2)
    >>> X = np.random.default_rng(0).standard_normal((20, 8, 2))
    >>> run = two_phases(settings, settings.begin())
    >>> ask = next(run)
    >>> sent = np.stack([answer(own, own[:, 0], ask) for own in X])
    >>> answers = Answers(np.arange(20), np.full(20, 8.0), sent)
    >>> ask = run.send((answers, np.random.default_rng(1)))
    >>> ask.step, ask.arrays[1].shape
    ('moment', (1, 2, 2))
    """
    if not isinstance(state, Descent | Refining):
        shape = (state.centers.shape[1] + 1,) if len(state.centers) else None
        answers, rng = yield Ask("describe", shape=shape, state=state)
        state = _prepare(settings, state, answers, rng)
    while True:
        if isinstance(state, Descent):
            phase_1 = one_shot if settings.start == "one-shot" else fedmd
            state = yield from phase_1(settings, state)
        if isinstance(state, Refining):
            state = yield from fedx(settings, state)


def answer(X: Matrix, y: Matrix, ask: Ask, loss: Loss = SQUARED) -> Matrix:
    """Return a client's answer.

    Parameters
    ----------
    X, y : ndarray of shape (n, d) and (n,)
        Its features and responses.
    ask : Ask
        A request of `two_phases`.
    loss : Loss, default SQUARED
        The loss of Phase 2.

    Returns
    -------
    ndarray
        "describe": the loss's curvature and the features' mean squares, (d + 1,); "moment": the
        parts of the products, (h, d, width); "anchors": 1 and the estimate, or zeros from who is no
        anchor, (1 + d,); "update": the loss, the cluster and the change of its model, (1, d + 2).

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.regression import answer
    >>> from flwr_perdl.regression.phases import Ask
    >>> X = np.random.default_rng(0).standard_normal((10, 2))
    >>> answer(X, X[:, 0], Ask("describe")).shape
    (3,)
    """
    ask = ask._replace(arrays=tuple(array.astype(X.dtype, copy=False) for array in ask.arrays))
    if ask.step == "update":
        found = update(X, y, ask, loss)
    elif ask.step == "describe":
        found = np.append(loss.curvature(X), np.mean(X**2, axis=0))
    else:
        found = (moment if ask.step == "moment" else anchor)(X, y, ask)
    return found.astype(X.dtype, copy=False)


def _prepare(
    settings: TwoPhase, state: Stage, answers: Answers, rng: np.random.Generator
) -> Descent | Refining:
    """Take the step size and the features' scale from the clients' descriptions, and go on."""
    curvature, squares, d = answers.stack[:, 0], answers.stack[:, 1:], answers.stack.shape[1] - 1
    n, phase, squares = answers.n_samples, settings.phase_2, squares.mean(axis=1)
    power = float(n @ squares / n.sum())
    middle = float(np.median(curvature[curvature > 0])) if (curvature > 0).any() else 0.0
    likely = curvature <= _STEEP * middle
    if settings.robust != "mean":  # one client decides neither by its numbers nor by their weight
        power = float(np.median(squares))
        curvature, n = np.minimum(curvature, CAP * middle), cap_sizes(n)
    # A gradient step that is too long for a client ruins a mean; a proximal one is never too long.
    ruins = settings.robust == "mean" and phase.local == "fedavg" and phase.step_size is None
    centers = state.centers if len(state.centers) else np.zeros((0, d))
    if settings.start == "random" and not len(centers):
        centers = random_models(int(settings.n_clusters), d, rng)
    known = Stage(
        centers=centers,
        step_size=phase.step_size or _find_step_size(settings, curvature[likely], n[likely]),
        power=max(power, 1e-300),
        steep=answers.partitions[~likely & ruins],
    )
    if len(centers):
        return Refining.start(known, centers)
    if settings.start == "one-shot":  # an estimate in all dimensions
        return known.to(Descent, thetas=np.zeros((1, d)), columns=np.eye(d)[None])
    return start_descent(settings, known, rng)


def _find_step_size(settings: TwoPhase, curvature: Matrix, n_samples: Matrix) -> float:
    """Return the step size of which all local steps together come to ``work`` over the curvature.

    It is that of any client but those that hold the last tenth of the points; gradient steps are
    stable at all clients.
    """
    phase, order = settings.phase_2, np.argsort(curvature, kind="stable")
    held = np.cumsum(n_samples[order]) / n_samples.sum()
    typical = float(curvature[order][np.argmax(held >= _TYPICAL)])
    if typical <= 0:
        return 1.0
    if phase.local != "fedavg":
        return phase.work / typical
    return min(phase.work / (phase.n_steps * typical), 1 / float(curvature.max()))
