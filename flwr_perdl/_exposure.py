"""Which rows of an answer show one of a client's samples.

A row of numbers that is made of a client's samples shows one of them where it has nearly that
sample's direction *because of* it: where the same computation without the sample gives a row that
points elsewhere. A direction that several samples share shows none of them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from flwr_perdl._checks import Matrix

#: Cosines of a row and a sample: from the first on the row may show it, from the second on it is
#: also near this sample, and the third it must keep without the sample.
SHOWS, NEAR, STILL = 0.94, 0.9, 0.7


def shown(
    rows: Matrix, X: Matrix, without: Callable[[int], Matrix] | None, min_support: float
) -> NDArray[np.bool_]:
    """Return which rows show a sample.

    Parameters
    ----------
    rows : ndarray of shape (..., n_features)
        What is to leave the client.
    X : ndarray of shape (n_samples, n_features)
        Its samples.
    without : callable or None
        Returns the same rows, computed without the sample of an index. It is called for samples
        that a row is near to, mostly none. None, where that takes too long: such rows are taken to
        be elsewhere then.
    min_support : float
        Rows that are near so many samples show none; below 2, no row does.

    Returns
    -------
    ndarray of shape (...,)
    """
    shows = np.zeros(rows.shape[:-1], dtype=bool)
    if min_support < 2:
        return shows
    found = cosines(rows, X)
    few = (found >= SHOWS) & ((found >= NEAR).sum(axis=-1, keepdims=True) < min_support)
    if without is None:
        shows |= few.any(axis=-1)
        return shows
    for i in np.flatnonzero(few.any(axis=tuple(range(few.ndim - 1)))):
        shows |= few[..., i] & (cosines(without(int(i)), X[i : i + 1])[..., 0] < STILL)
    return shows


def cosines(rows: Matrix, X: Matrix) -> Matrix:
    """Return the sizes of the cosines of rows and samples; 0 where one of them is zero.

    ``rows``, (..., n_rows, n_features), and ``X``, (..., n_samples, n_features), may have further
    axes in front. Returns (..., n_rows, n_samples).
    """
    lengths = np.linalg.norm(rows, axis=-1)[..., None] * np.linalg.norm(X, axis=-1)[..., None, :]
    found: Matrix = np.abs(rows @ X.swapaxes(-1, -2)) / np.where(lengths > 0, lengths, 1)
    return found
