"""Sums of squares and inner products, by BLAS, sizes, and what is observed where NaN is missing."""

from __future__ import annotations

from math import isnan
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def squared_norm(A: Array) -> float:
    """Return the sum of all squares; no warning where it leaves the range."""
    return float(np.vdot(A, A))


def row_products(A: Array, B: Array) -> Array:
    """Return the inner products of two arrays over their last axis."""
    return (A[..., None, :] @ B[..., :, None])[..., 0, 0]  # einsum is slower


def row_norms(A: Array) -> Array:
    """Return the Euclidean norms over the last axis."""
    return np.sqrt(row_products(A, A))


def count_values(*arrays: Array) -> float:
    """Return how many values arrays have; of packed bytes, eight are one."""
    return sum(array.nbytes / 8 if array.dtype == np.uint8 else array.size for array in arrays)


def has_missing(A: Array) -> bool:
    """Return whether an array without infinite values has NaN, which stands for a missing entry."""
    return isnan(squared_norm(A))


def observed(A: Array) -> Array:
    """Return an array with zeros in place of missing entries."""
    return np.where(np.isnan(A), A.dtype.type(0), A) if has_missing(A) else A
