"""Memory that NumPy's temporary arrays and loops would fetch anew, or copy, without need.

Both are settings of the process or thread; no result depends on them but for the order in which
NumPy before 2.3 sums arrays that are not contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

#: Numbers in a buffer; rows at least as long are not copied. NumPy's default is 8192.
_BUFFER = 512


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
