"""Phase 1, federated moment descent: the residuals' moments, their subspace, the anchors' step.

======================================= ====================================================
paper (Su, Xu, Yang, NeurIPS 2022)      here
======================================= ====================================================
``eps(x, y, theta)``                    ``(y - x @ theta) * x``
``theta_{i,t}``, i in H                 ``thetas[h]``, rows of (n_anchors, d)
``Y_{i,t}``                             the sum of :func:`residual_moment` over the clients
``Q_t`` (Algorithm 3)                   ``Q[h]`` (d, width)
``U_{i,t}``                             ``U[h]`` (d, k), orthonormal columns
``A_{i,t}`` (equation 2), ``beta``      inside :func:`moment_step`
``eta_{i,t} = alpha sigma / (2 beta^2)`` ``step="paper"`` with ``alpha = beta = 1``
======================================= ====================================================

Deviations, and why:

- The moment never travels: clients send its products with a few columns (Algorithm 3). With more
  columns than k, two exchanges are as good as an eigendecomposition, where the paper's form needs
  T_1.
- ``estimate="u-statistic"`` (the default) averages over all pairs of a client's points,
  ``[(sum eps)(sum eps)' - sum eps eps'] / (n - 1)``: as unbiased as the paper's one pair per client
  (``"pair"``) or two halves per client (``"halves"``), with the least variance.
- ``step="least-squares"`` (the default) fits the residuals inside the subspace, which is what
  moment descent converges to, along the directions in which the client's points vary: few points
  whose features are nearly collinear would send the estimate anywhere. The sign of the paper's
  direction is undetermined; here it is the one along which the anchor's mean ``eps`` points. Its
  stopping rule needs the separation Delta and is left out.
- Points are reused in every iteration, as in the paper's experiments.
"""

from __future__ import annotations

import numpy as np

from flwr_perdl.core.checks import Matrix, check_array, check_choice, check_flag
from flwr_perdl.regression.losses import check_points

#: Along directions in which a client's points vary less than this, over the most, nothing moves.
_VARIES = 0.1

ESTIMATES = ("u-statistic", "halves", "pair")
STEPS = ("least-squares", "paper")


def residual_moment(
    X: Matrix,
    y: Matrix,
    thetas: Matrix,
    Q: Matrix,
    *,
    estimate: str = "u-statistic",
    transpose: bool = False,
) -> Matrix:
    """Return a client's part of ``Y_h @ Q_h`` for every estimate ``h``, times its weight.

    Parameters
    ----------
    X, y : ndarray of shape (n_samples, d) and (n_samples,)
        Features and responses.
    thetas : ndarray of shape (n_estimates, d)
        The estimates.
    Q : ndarray of shape (n_estimates, d, width)
        Columns to multiply with.
    estimate : {"u-statistic", "halves", "pair"}, default "u-statistic"
        How pairs of points are used.
    transpose : bool, default False
        Multiply with the transpose of the moment (Algorithm 3, line 5: there at even t, here at odd
        ones); the U-statistic is symmetric.

    Returns
    -------
    ndarray of shape (n_estimates, d, width)
        Weighted by the number of points (``"pair"``: by 1); zero with fewer than two points.

    Raises
    ------
    ValueError
        If an argument is not finite or not of these shapes, or ``estimate`` is none of these.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.regression import residual_moment
    >>> X, y = np.eye(2), np.array([1.0, 2.0])
    >>> residual_moment(X, y, np.zeros((1, 2)), np.eye(2)[None])
    array([[[0., 2.],
            [2., 0.]]])
    """
    check_choice("estimate", estimate, ESTIMATES)
    X, y = check_points(X, y)
    thetas = check_array("thetas", thetas, min_rows=1, columns=X.shape[1], floor=np.inf)
    Q = check_array("Q", Q, ndim=3, floor=np.inf)
    if Q.shape[:2] != thetas.shape:
        raise ValueError(f"Q must have shape {(*thetas.shape, 'width')}, got {Q.shape}.")
    check_flag("transpose", transpose)
    if (n := len(X)) < 2:
        return np.zeros_like(Q)
    residuals: Matrix = y - thetas @ X.T
    if estimate == "u-statistic":
        # All pairs are the product of two sums, less the pairs of a point with itself.
        sums = residuals @ X
        pairs = sums[..., None] * (sums[:, None] @ Q)
        same: Matrix = X.T @ ((residuals**2)[..., None] * (X @ Q))
        return (pairs - same) / (n - 1)
    # Independent halves: the expectation of the product is that of its factors (the paper's).
    half, weight = (1, 1) if estimate == "pair" else (n // 2, n)
    a, b = (residuals[:, at] @ X[at] / half for at in (slice(half), slice(half, 2 * half)))
    if transpose:
        a, b = b, a
    return weight * a[..., None] * (b[:, None] @ Q)


def symmetric_subspace(Q: Matrix, product: Matrix, n_dimensions: int | None = None) -> Matrix:
    """Return the leading eigenspaces of the symmetric ``Y_h``, of which ``Y_h @ Q_h`` is known.

    Orthonormal columns, (n_estimates, d, n_dimensions).

    Rayleigh-Ritz on ``Q``, then one more multiplication. By default there are as many dimensions as
    have eigenvalues above 1.25 times the size of the most negative one (noise is as likely to be
    negative, and an over-estimate does no harm), and the same number for all estimates.
    """
    B = Q.swapaxes(1, 2) @ product
    values, vectors = np.linalg.eigh((B + B.swapaxes(1, 2)) / 2)
    values, vectors = values[:, ::-1], vectors[:, :, ::-1]
    if n_dimensions is None:
        noise = 1.25 * np.maximum(-values[:, -1:], 0)
        n_dimensions = max(int((values > noise).sum(axis=1).max()), 1)
    return np.linalg.qr(product @ vectors[:, :, :n_dimensions])[0]


def left_subspace(Q: Matrix, product: Matrix, n_dimensions: int) -> Matrix:
    """Return the leading left singular spaces of matrices known by their transposes' products.

    Parameters
    ----------
    Q, product : ndarray of shape (n_estimates, d, width)
        Orthonormal columns, and ``Y_h.T @ Q_h``.
    n_dimensions : int
        How many.

    Returns
    -------
    ndarray of shape (n_estimates, d, n_dimensions)
        Orthonormal columns.
    """
    rotations = np.linalg.svd(product, full_matrices=False)[2]
    U: Matrix = Q @ rotations[:, :n_dimensions].swapaxes(1, 2)
    return U


def moment_step(
    X: Matrix, y: Matrix, theta: Matrix, U: Matrix, *, step: str = "least-squares"
) -> Matrix:
    """Return an anchor's next estimate of its own model (Phase 1, lines 11-15).

    Parameters
    ----------
    X, y : ndarray of shape (n_samples, d) and (n_samples,)
        The anchor's features and responses.
    theta : ndarray of shape (d,)
        Its current estimate.
    U : ndarray of shape (d, n_dimensions)
        Orthonormal columns of the subspace for this estimate.
    step : {"least-squares", "paper"}, default "least-squares"
        See above. The paper's step wants features of covariance about the identity.

    Returns
    -------
    ndarray of shape (d,)

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.regression import moment_step
    >>> X, y = np.eye(2), np.array([1.0, 2.0])
    >>> moment_step(X, y, np.zeros(2), np.eye(2)[:, :1]).round(6)
    array([1., 0.])
    """
    check_choice("step", step, STEPS)
    X, y = check_points(X, y)
    d = X.shape[1]
    theta = check_array("theta", theta, ndim=1, columns=d, floor=np.inf)
    U = check_array("U", U, floor=0.4)
    if len(U) != d:
        raise ValueError(f"U must have {d} rows, as X has columns, got shape {U.shape}.")
    residual = y - X @ theta
    projected = X @ U
    if step == "least-squares":
        coefficients: Matrix = np.linalg.lstsq(projected, residual, rcond=_VARIES)[0]
        return theta + U @ coefficients
    eps = projected * residual[:, None]
    half = max(len(X) // 2, 1)
    A = eps[:half].T @ eps[-half:] / half
    # Line 11: beta, up to a sign that the residuals tell, and sigma^2. Line 12's stop is left out.
    left, squares, _ = np.linalg.svd(A)
    beta = left[:, 0] * (1 if left[:, 0] @ eps.sum(axis=0) >= 0 else -1)
    moved: Matrix = theta + np.sqrt(squares[0]) / 2 * (U @ beta)  # line 13, eta = sigma / 2
    return moved


def sketch(n_estimates: int, d: int, width: int, rng: np.random.Generator) -> Matrix:
    """Return random orthonormal columns, (n_estimates, d, min(width, d))."""
    return np.linalg.qr(rng.standard_normal((n_estimates, d, min(width, d))))[0]


def random_models(n_models: int, n_features: int, rng: np.random.Generator) -> Matrix:
    """Return models drawn from ``N(0, I) / sqrt(n_features)``, as rows: where IFCA starts."""
    models: Matrix = rng.standard_normal((n_models, n_features)) / np.sqrt(n_features)
    return models
