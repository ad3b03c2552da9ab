"""Comparing results to the bit, where this machine's BLAS keeps its own bits."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray


@cache
def depend_on_addresses() -> bool:
    """Return whether BLAS rounds the same numbers differently at another address in memory.

    OpenBLAS's kernels for processors older than Nehalem do (``OPENBLAS_CORETYPE=Prescott``): they
    begin where an array is aligned to 16 bytes. NumPy no longer runs on such processors.
    """
    rng = np.random.default_rng(0)
    for n in range(2, 40):
        a, b = rng.standard_normal((2, n))
        shifted = np.empty((2, n + 1))[:, 1:]
        shifted[:] = a, b
        if np.dot(a, b) != np.dot(*shifted) or np.dot(a, a) != np.dot(shifted[0], shifted[0]):
            return True
    return False


def assert_same_bits(actual: NDArray[np.floating], desired: NDArray[np.floating]) -> None:
    """Assert that two results are equal: to the bit, or but for rounding where BLAS's bits vary."""
    if not depend_on_addresses():
        np.testing.assert_array_equal(actual, desired)
        return
    rounding = 1e3 * float(np.finfo(np.asarray(actual).dtype).eps)
    np.testing.assert_allclose(actual, desired, rtol=rounding, atol=rounding)
