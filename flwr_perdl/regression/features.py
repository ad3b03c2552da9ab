"""Feature maps phi: what a client's inputs become before any model sees them.

======================================= ====================================================
paper (Su, Xu, Yang, NeurIPS 2022)      here
======================================= ====================================================
``phi(x)`` (equation 1)                 any callable from (n, p) to (n, d)
======================================= ====================================================

The identity is ``None`` wherever a feature map is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np

from flwr_perdl.core.checks import (
    Matrix,
    brief_repr,
    check_array,
    check_count,
    check_flag,
    own_numbers,
)

#: Takes inputs (n, p) to features (n, d), row by row.
FeatureMap = Callable[[Matrix], Matrix]


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
