"""Phase 2, FedX + clustering: a client's assignment and local update, the server's average.

======================================= ====================================================
paper (Su, Xu, Yang, NeurIPS 2022)      here
======================================= ====================================================
``theta_{t-1}`` (k models)              ``centers`` (k, d)
``lambda_{i,t}`` (equation 7)           :func:`assign`
``z_{i,t}`` (equation 8)                ``assign(...).argmax()``
``theta_{i.,t} - theta_{t-1}``          :func:`local_changes`, rows as the centers
``eta``, ``s``                          ``step``, ``n_steps``
``theta_t = sum_i w_i theta_{i.,t}``    :func:`average_updates`
======================================= ====================================================

Deviations, and why:

- ``normalise="cluster"`` (the default) divides a cluster's sum by the cluster's number of points;
  the paper's ``w_i = n_i / N`` (``"all"``) makes a cluster's step as small as its share of them.
- :func:`assign` at a ``temperature`` is soft: ``L`` of (7) plus an entropy, whose minimum is
  ``lambda_j ~ exp(-n_i loss_j / temperature)``; at the noise's variance it is the posterior of a
  Gaussian mixture.
- The average can be made robust; the paper's is a mean.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linear_sum_assignment, minimize
from scipy.special import softmax

from flwr_perdl.core.aggregate import Aggregate, aggregate
from flwr_perdl.core.checks import (
    LARGE,
    Matrix,
    check_array,
    check_numbers,
    check_real,
)
from flwr_perdl.regression.losses import (
    Loss,
    SquaredLoss,
    of_stacks,
)

LOCALS = ("fedavg", "fedprox")


def assign(losses: Matrix, n_samples: Matrix | int, temperature: float = 0.0) -> Matrix:
    """Return how likely each client is in each cluster (equation 7).

    Parameters
    ----------
    losses : ndarray of shape (n_clients, k)
        Mean loss of every model at every client; infinite where a model is out of the question.
    n_samples : ndarray of shape (n_clients,), or int
        Points behind each mean, at least 0.
    temperature : float, default 0
        At least 0. 0: all weight on the least loss, the first of equals.

    Returns
    -------
    ndarray of shape (n_clients, k)
        Weights that sum to one.

    Raises
    ------
    ValueError
        If a client has no finite loss, a loss is NaN, or a number is negative.
    """
    temperature = check_real("temperature", temperature, 0, LARGE)
    losses = check_numbers("losses", losses)
    if losses.ndim == 0 or not losses.shape[-1] or not np.isfinite(losses.min(axis=-1)).all():
        raise ValueError("losses must have a finite least loss for each client and no NaN.")
    sizes = _checked_sizes(n_samples, losses.shape[:-1])
    if temperature == 0:
        hard: Matrix = np.eye(losses.shape[-1])[losses.argmin(axis=-1)]
        return hard
    weights: Matrix = softmax(-losses * sizes[..., None] / temperature, axis=-1)
    return weights


def _checked_sizes(n_samples: Matrix | int, shape: tuple[int, ...]) -> Matrix:
    """Return the clients' numbers of points, or one number for all where that is given."""
    sizes = check_numbers("n_samples", n_samples).astype(float, copy=False)
    if sizes.ndim and sizes.shape != shape:
        raise ValueError(f"n_samples must have shape {shape}, got {sizes.shape}.")
    if not ((sizes >= 0) & (sizes <= LARGE)).all():
        raise ValueError(f"n_samples must be within [0, {LARGE:g}], got one that is not.")
    return sizes


def local_changes(
    X: Matrix, y: Matrix, theta: Matrix, *, step: float, n_steps: int, local: str, loss: Loss
) -> Matrix:
    """Return how the local work of clients of one size moves their models (Phase 2, line 7).

    Parameters
    ----------
    X, y, theta : ndarray of shape (m, n_samples, d), (m, n_samples) and (m, d)
        Every client's features, responses and model.
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
    ndarray of shape (m, d)
        New models minus old models.
    """
    size = X.dtype.type(step)
    if local == "fedavg":
        ahead, stacked = theta, of_stacks(loss)
        for _ in range(n_steps):
            ahead = ahead - size * stacked.gradient(X, y, ahead)
        return ahead - theta
    if not isinstance(loss, SquaredLoss):
        return np.stack(
            [_proximal(*own, float(size), loss) for own in zip(X, y, theta, strict=True)]
        )
    n, d = X.shape[1:]
    across, scale = X.swapaxes(1, 2), size / X.dtype.type(n)
    if n <= d:
        kernel = np.eye(n, dtype=X.dtype) + scale * (X @ across)
        residual = y[..., None] - X @ theta[..., None]
        change: Matrix = (scale * (across @ np.linalg.solve(kernel, residual)))[..., 0]
        return change
    slope = -size * loss.gradient(X, y, theta)
    kernel = np.eye(d, dtype=X.dtype) + scale * (across @ X)
    return np.linalg.solve(kernel, slope[..., None])[..., 0]


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
    >>> from flwr_perdl.regression.clustering import average_updates
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


def model_error(centers: Matrix, theta: Matrix) -> float:
    """Return ``max_j ||centers_j - theta_j||`` after the best matching (equation 6).

    Parameters
    ----------
    centers : ndarray of shape (k', d)
        Models found.
    theta : ndarray of shape (k, d)
        True models; where they are more than those found, several share one.

    Returns
    -------
    float

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.regression import model_error
    >>> model_error(np.array([[0.0, 1.0], [1.0, 0.0]]), np.array([[1.0, 0.0], [0.0, 0.5]]))
    0.5
    """
    centers = check_array("centers", centers, min_rows=1, floor=np.inf)
    theta = check_array("theta", theta, min_rows=1, columns=centers.shape[1], floor=np.inf)
    distances = np.linalg.norm(theta[:, None] - centers, axis=2)
    nearest = set(distances.argmin(axis=1).tolist())
    if len(centers) < len(theta) or len(nearest) == len(theta):
        return float(distances.min(axis=1).max())
    for bound in np.unique(distances):
        rows, columns = linear_sum_assignment(distances > bound)
        if not (distances[rows, columns] > bound).any():
            return float(bound)
    raise AssertionError("the largest distance bounds every matching.")
