"""Memory that NumPy's temporary arrays and loops would fetch anew, or copy, without need.

Both are settings of the process or thread; no result depends on them but for the order in which
NumPy before 2.3 sums arrays that are not contiguous. What the first saves:
``python benchmarks/shortcuts.py``; without the second, dual inference takes a tenth longer or more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np

#: Just below the largest array after which a GNU C library keeps what is freed.
_LARGEST_KEPT = 2**25 - 2**20
#: Numbers in a buffer; rows at least as long are not copied. NumPy's default is 8192.
_BUFFER = 512


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
