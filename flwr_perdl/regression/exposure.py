"""Which answers would show one of a client's points, and are withheld for it.

Every answer but ``local="exact"`` is made of rows that are sums over the client's points. One point
can decide a sum where it is much longer than the others, or where the server chooses models that
make its residual dwarf the others.
"""

from __future__ import annotations

import numpy as np

from flwr_perdl._checks import Matrix
from flwr_perdl._exposure import SHOWS, cosines, shown
from flwr_perdl.regression.answers import ANCHORS, DESCRIBE, EXACT, MOMENT, UPDATE, Ask, answered
from flwr_perdl.regression.losses import Loss


def withheld(
    X: Matrix, y: Matrix, ask: Ask, loss: Loss, answers: Matrix, min_support: int
) -> Matrix:
    """Return the answers of a stack of clients, with zeros in those that would show a point.

    Parameters
    ----------
    X : ndarray of shape (n_clients, n_samples, d)
        Features.
    y : ndarray of shape (n_clients, n_samples)
        Responses.
    ask : Ask
        The request, as these clients receive it.
    loss : Loss
        The loss of Phase 2.
    answers : ndarray of shape (n_clients, ...)
        Their answers, from `answer`.
    min_support : int
        A row that is near so many points shows none of them; below 2 nothing is withheld.

    Returns
    -------
    ndarray of shape (n_clients, ...)
        ``answers``, where none of them shows a point. Else zeros stand for the change of a model,
        for a column of the moment, or for all mean squares; an estimate that would show a point is
        not sent, as if the client were no anchor.
    """
    if min_support < 2 or ask.options.get("local") == EXACT:
        return answers
    points = X * X if ask.step == DESCRIBE else X
    largest = cosines(_rows(ask.step, answers), points[:, None]).max(axis=(1, 2, 3))
    found = answers.copy()
    for i in np.flatnonzero(largest >= SHOWS):

        def without(p: int, i: int = int(i)) -> Matrix:
            others = np.delete(X[i], p, axis=0)[None], np.delete(y[i], p)[None]
            rows: Matrix = _rows(ask.step, answered(*others, ask, loss))[0]
            return rows

        rows = _rows(ask.step, found[i : i + 1])[0]
        shows = shown(rows, points[i], without, min_support)
        if ask.step == ANCHORS:
            found[i] *= not shows.any()
        else:
            rows[shows] = 0
    return found


def _rows(step: str, answers: Matrix) -> Matrix:
    """Return a view of the sums over points that answers are made of, (n_clients, ..., d)."""
    if step == MOMENT:
        return answers.swapaxes(2, 3)
    return answers[:, None, :, 2:] if step == UPDATE else answers[:, None, None, 1:]
