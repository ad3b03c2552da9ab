"""Averages of what clients send, the plain one and those that a few bad clients do not move."""

from __future__ import annotations

import numpy as np

from flwr_perdl._checks import Matrix

#: Share of the clients that the trimmed mean leaves out at either end.
TRIM = 0.2


def average_of(points: Matrix, method: str, weights: Matrix) -> Matrix:
    """Return the average of ``points`` over their first axis.

    Parameters
    ----------
    points : ndarray of shape (n, ...)
        Points, at least one.
    method : str
        "geometric-median"; "median", per coordinate; "trimmed", the mean per coordinate without a
        fifth of the points at either end; any other is the mean, weighted.
    weights : ndarray of shape (n,)
        Positive; only the mean uses them.

    Returns
    -------
    ndarray of shape (...)
    """
    if method == "geometric-median":
        return geometric_median(points)
    if method == "median":
        return np.median(points, axis=0)
    if method == "trimmed":
        cut = int(TRIM * len(points))
        trimmed: Matrix = np.sort(points, axis=0)[cut : len(points) - cut].mean(axis=0)
        return trimmed
    return np.average(points, axis=0, weights=weights)


def geometric_median(points: Matrix, *, tol: float = 1e-10, max_iter: int = 200) -> Matrix:
    """Return the point with the least sum of distances to ``points``.

    Weiszfeld's iteration, with Vardi and Zhang's step where it meets one of the points.

    Parameters
    ----------
    points : ndarray of shape (n, ...)
        Points, at least one; all further axes together are their coordinates.
    tol : float, default 1e-10
        Step at which to stop, relative to the largest coordinate.
    max_iter : int, default 200
        Largest number of iterations.

    Returns
    -------
    ndarray of shape (...)
    """
    flat = points.reshape(len(points), -1)
    scale = float(np.abs(flat).max(initial=0))
    median = np.median(flat, axis=0)
    for _ in range(max_iter if scale else 0):
        distances = np.linalg.norm(flat - median, axis=1)
        away = distances > np.finfo(flat.dtype).eps * scale
        weights = np.where(away, 1 / np.where(away, distances, 1), 0)
        pull = np.linalg.norm(weights @ (flat - median))
        here = len(flat) - int(away.sum())
        if pull <= here:
            break
        step = (1 - here / pull) * (weights @ flat / weights.sum() - median)
        median = median + step
        if np.linalg.norm(step) <= tol * scale:
            break
    return median.reshape(points.shape[1:])
