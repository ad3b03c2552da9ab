"""One BLAS thread for client and server maths, on every engine.

The order in which a threaded BLAS sums depends on its number of threads, so that the same product
has other last bits on another engine. threadpoolctl (an extra of this package) limits BLAS to one
thread while our maths runs; without it the environment variables ``OPENBLAS_NUM_THREADS=1`` and
``MKL_NUM_THREADS=1``, set before Python starts, do the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from logging import WARNING
from typing import Any

import numpy.linalg
import scipy.linalg
from flwr.common import log


@lru_cache(maxsize=1)
def _controller() -> Any:
    """Return the pools of the BLAS libraries loaded by NumPy and SciPy, or None."""
    _ = numpy.linalg, scipy.linalg  # loaded before the pools are looked up
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError:
        if not {"OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"} & set(os.environ):
            log(
                WARNING,
                "threadpoolctl is not installed: set OPENBLAS_NUM_THREADS=1 (or MKL_NUM_THREADS=1) "
                "for results that are the same to the bit on every engine.",
            )
        return None
    return ThreadpoolController()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Run the block (or, as a decorator, the function) with one BLAS thread."""
    controller = _controller()
    if controller is None:
        yield
        return
    with controller.limit(limits=1, user_api="blas"):
        yield
