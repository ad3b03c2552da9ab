"""Memory that NumPy's temporary arrays and loops would fetch anew, or copy, without need.

No result depends on them but for the order in which NumPy before 2.3 sums arrays that are not
contiguous. Dual inference takes half as long again without the first; without the others a tenth.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from math import prod
from typing import Any

import numpy as np

from flwr_perdl.core.checks import Matrix

#: Just below the largest array after which a GNU C library keeps what is freed.
_LARGEST_KEPT = 2**25 - 2**20
#: Numbers in a buffer; rows at least as long are not copied. NumPy's default is 8192.
_BUFFER = 512
#: Bytes of a cache line.
_LINE = 64


@cache
def keep_freed_memory() -> None:
    """Let the C library keep freed arrays, where its threshold for that follows the largest freed.

    A GNU C library gives the memory of a freed array back to the system, page by page, unless it
    has seen a larger one freed: a round's temporary arrays would cost more than their arithmetic.
    """
    np.empty(_LARGEST_KEPT, dtype=np.uint8)


@contextmanager
def short_buffers() -> Iterator[None]:
    """Let NumPy compute on long rows where they lie, in this thread.

    What is broadcast along rows or not contiguous NumPy copies into buffers, row by row, unless a
    row is longer than a buffer: an addition then takes two to four times as long.
    """
    before = np.setbufsize(_BUFFER)
    try:
        yield
    finally:
        np.setbufsize(before)


def empty_aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Matrix:
    """Return an array of any values that begins at a cache line.

    NumPy's arrays begin between two lines, where every wide load of a compiled loop touches both.
    """
    n_bytes = prod(shape) * dtype.itemsize
    memory = np.empty(n_bytes + _LINE, dtype=np.uint8)
    first = -memory.ctypes.data % _LINE
    return memory[first : first + n_bytes].view(dtype).reshape(shape)


def aligned(array: Matrix) -> Matrix:
    """Return a contiguous array, or a copy of it, that begins at a cache line."""
    if array.ctypes.data % _LINE == 0:
        return array
    copy = empty_aligned(array.shape, array.dtype)
    copy[...] = array
    return copy
