"""Features phi(x), losses of Phase 2, and errors of models.

======================================= ====================================================
paper (Su, Xu, Yang, NeurIPS 2022)      here
======================================= ====================================================
``phi(x)`` (equation 1)                 any callable from (n, p) to (n, d); None: the identity
``L(theta, lambda; D_i)`` (equation 7)  ``weights @ loss.values(X, y, centers)``
``1/(2 n_i) ||y - phi theta_j||^2``     :class:`SquaredLoss`
equation 6                              :func:`model_error`
======================================= ====================================================

A loss is anything with values, a gradient and a bound on its curvature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Protocol

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.special import expit

from flwr_perdl.core.checks import (
    Matrix,
    brief_repr,
    check_array,
    check_count,
    check_flag,
    check_magnitude,
    check_members,
    own_numbers,
)

#: Takes inputs (n, p) to features (n, d), row by row.
FeatureMap = Callable[[Matrix], Matrix]


class Loss(Protocol):
    """A client's mean loss of a linear predictor.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.regression import LogisticLoss, Loss
    >>> loss: Loss = LogisticLoss()
    >>> loss.gradient(np.eye(2), np.array([1.0, -1.0]), np.zeros(2))
    array([-0.25,  0.25])
    """

    def values(self, X: Matrix, y: Matrix, centers: Matrix) -> Matrix:
        """Return the mean loss of every model.

        Parameters
        ----------
        X : ndarray of shape (n, d)
        y : ndarray of shape (n,)
        centers : ndarray of shape (k, d)

        Returns
        -------
        ndarray of shape (k,)
        """

    def gradient(self, X: Matrix, y: Matrix, theta: Matrix) -> Matrix:
        """Return the gradient of the mean loss of one model.

        Parameters
        ----------
        X : ndarray of shape (n, d)
        y : ndarray of shape (n,)
        theta : ndarray of shape (d,)

        Returns
        -------
        ndarray of shape (d,)
        """

    def curvature(self, X: Matrix) -> float:
        """Return a bound on the largest eigenvalue of the mean loss's Hessian.

        Parameters
        ----------
        X : ndarray of shape (n, d)

        Returns
        -------
        float
        """


class SquaredLoss:
    """Half the mean squared residual: ``||y - X @ theta||^2 / (2 n)``.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.regression import SquaredLoss
    >>> SquaredLoss().values(np.eye(2), np.array([1.0, 3.0]), np.zeros((1, 2)))
    array([2.5])
    """

    def values(self, X: Matrix, y: Matrix, centers: Matrix) -> Matrix:
        """Return half the mean squared residual of every model.

        Parameters
        ----------
        X : ndarray of shape (n, d)
        y : ndarray of shape (n,)
        centers : ndarray of shape (k, d)

        Returns
        -------
        ndarray of shape (k,)
        """
        residuals = y[:, None] - X @ centers.T
        loss: Matrix = np.einsum("nk,nk->k", residuals, residuals) / (2 * len(X))
        return loss

    def gradient(self, X: Matrix, y: Matrix, theta: Matrix) -> Matrix:
        """Return ``X.T @ (X @ theta - y) / n``.

        Parameters
        ----------
        X : ndarray of shape (n, d)
        y : ndarray of shape (n,)
        theta : ndarray of shape (d,)

        Returns
        -------
        ndarray of shape (d,)
        """
        slope: Matrix = X.T @ (X @ theta - y) / len(X)
        return slope

    def curvature(self, X: Matrix) -> float:
        """Return the largest eigenvalue of ``X.T @ X / n``.

        Parameters
        ----------
        X : ndarray of shape (n, d)

        Returns
        -------
        float
        """
        n, d = X.shape
        gram = X @ X.T if n <= d else X.T @ X
        largest: float = np.maximum(np.linalg.eigvalsh(gram)[-1], 0) / n
        return largest


class LogisticLoss:
    """Mean logistic loss ``log(1 + exp(-y * (X @ theta)))`` of labels -1 and 1.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.regression import LogisticLoss
    >>> LogisticLoss().values(np.eye(2), np.array([1.0, -1.0]), np.zeros((1, 2))).round(3)
    array([0.693])
    """

    def values(self, X: Matrix, y: Matrix, centers: Matrix) -> Matrix:
        """Return the mean logistic loss of every model.

        Parameters
        ----------
        X : ndarray of shape (n, d)
        y : ndarray of shape (n,)
        centers : ndarray of shape (k, d)

        Returns
        -------
        ndarray of shape (k,)
        """
        loss: Matrix = np.logaddexp(0, -y[:, None] * (X @ centers.T)).mean(axis=0)
        return loss

    def gradient(self, X: Matrix, y: Matrix, theta: Matrix) -> Matrix:
        """Return the gradient of the mean logistic loss.

        Parameters
        ----------
        X : ndarray of shape (n, d)
        y : ndarray of shape (n,)
        theta : ndarray of shape (d,)

        Returns
        -------
        ndarray of shape (d,)
        """
        slope: Matrix = X.T @ (-y * expit(-y * (X @ theta))) / len(X)
        return slope

    def curvature(self, X: Matrix) -> float:
        """Return a quarter of the largest eigenvalue of ``X.T @ X / n``.

        Parameters
        ----------
        X : ndarray of shape (n, d)

        Returns
        -------
        float
        """
        return SquaredLoss().curvature(X) / 4


def check_points(X: Matrix, y: Matrix) -> tuple[Matrix, Matrix]:
    """Return a client's features and responses, or raise a ValueError unless they are usable.

    At least one point, a response for each, and squares within the dtype's range, which is that of
    ``X`` for both.
    """
    X = check_array("X", X, min_rows=1)
    y = check_array("y", y, ndim=1)
    if len(y) != len(X):
        raise ValueError(f"y must have shape {X.shape[:-1]}, one per row of X, got {y.shape}.")
    with np.errstate(over="ignore"):  # infinite in float32: rejected
        y = y.astype(X.dtype, copy=False)
    return check_magnitude("X", X), check_magnitude("y", y)


def check_loss(loss: Loss) -> None:
    """Raise a TypeError unless this is a loss."""
    check_members("loss", loss, "Loss", "values", "gradient", "curvature")


def check_labels(name: str, y: Matrix, loss: Loss) -> None:
    """Raise a ValueError if the loss is of labels -1 and 1, and a response is neither."""
    if isinstance(loss, LogisticLoss) and not (np.abs(y) == 1).all():
        other = float(y[np.abs(y) != 1][0])
        raise ValueError(f"{name} must be -1 or 1 for the logistic loss, got {other:g}.")


#: The paper's loss.
SQUARED = SquaredLoss()


@dataclass(frozen=True)
class Polynomial:
    """All monomials of the inputs up to a degree.

    Parameters
    ----------
    degree : int, default 2
        Largest total degree, at least 1.
    intercept : bool, default True
        Whether the first feature is the constant 1.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.regression import Polynomial
    >>> Polynomial(2)(np.array([[2.0, 3.0]]))
    array([[1., 2., 3., 4., 6., 9.]])
    """

    degree: int = 2
    intercept: bool = True

    def __post_init__(self) -> None:
        """Check the degree."""
        own_numbers(self)
        check_count("degree", self.degree, 1)
        check_flag("intercept", self.intercept)

    def __call__(self, X: Matrix) -> Matrix:
        """Return the monomials, by degree and then in the order of the inputs."""
        X = check_array("X", X)
        highest = float(np.abs(X).max(initial=0))
        if highest > float(np.finfo(X.dtype).max) ** (0.4 / self.degree):
            raise ValueError(
                f"X must have values whose power {self.degree} fits into {X.dtype}, got "
                f"{highest:.3g}."
            )
        columns = [np.ones(len(X), X.dtype)] if self.intercept else []
        for degree in range(1, self.degree + 1):
            for chosen in combinations_with_replacement(range(X.shape[1]), degree):
                columns.append(X[:, chosen].prod(axis=1))
        return np.stack(columns, axis=1)


def apply_features(X: Matrix, features: FeatureMap | None = None) -> Matrix:
    """Return the features of ``X``, one finite row per sample, or raise a ValueError."""
    X = check_array("X", X)
    if features is None:
        return X
    if isinstance(features, type) or not callable(features):
        raise TypeError(f"features must be a function, not a class, got {brief_repr(features)}.")
    mapped = check_array("features(X)", features(X))
    if len(mapped) != len(X):
        raise ValueError(f"features(X) must have {len(X)} rows, got shape {mapped.shape}.")
    return mapped


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
