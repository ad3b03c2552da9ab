"""Sums of squares and inner products, by BLAS."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def squared_norm(A: Array) -> float:
    """Return the sum of all squares; no warning where it leaves the range."""
    return float(np.vdot(A, A))


def row_products(A: Array, B: Array) -> Array:
    """Return the inner products of two arrays over their last axis."""
    products: Array = (A[..., None, :] @ B[..., :, None])[..., 0, 0]  # einsum is slower
    return products


def row_norms(A: Array) -> Array:
    """Return the Euclidean norms over the last axis."""
    return np.sqrt(row_products(A, A))
