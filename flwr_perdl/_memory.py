"""Memory that NumPy's temporary arrays would fetch anew; no result depends on this setting.

What it saves: ``python benchmarks/shortcuts.py``.
"""

from __future__ import annotations

from functools import cache

import numpy as np

#: Just below the largest array after which a GNU C library keeps what is freed.
_LARGEST_KEPT = 2**25 - 2**20


@cache
def keep_freed_memory() -> None:
    """Let the C library keep freed arrays, where its threshold for that follows the largest freed.

    A GNU C library gives the memory of a freed array back to the system, page by page, unless it
    has seen a larger one freed: a round's temporary arrays would cost more than their arithmetic.
    """
    np.empty(_LARGEST_KEPT, dtype=np.uint8)
