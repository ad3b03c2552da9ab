"""One BLAS thread for client and server maths, on every engine.

The order in which a threaded BLAS sums depends on its number of threads, so that the same product
has other last bits on another engine. threadpoolctl (an extra of this package) limits BLAS to one
thread while our maths runs; without it the environment variables ``OPENBLAS_NUM_THREADS=1`` and
``MKL_NUM_THREADS=1``, set before Python starts, do the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from logging import getLogger
from threading import Lock
from typing import Any

import numpy.linalg
import scipy.linalg


@lru_cache(maxsize=1)
def _controller() -> Any:
    """Return the pools of the BLAS libraries loaded by NumPy and SciPy, or None."""
    _ = numpy.linalg, scipy.linalg  # loaded before the pools are looked up
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError:
        if not {"OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"} & set(os.environ):
            getLogger("flwr").warning(
                "threadpoolctl is not installed: set OPENBLAS_NUM_THREADS=1 (or MKL_NUM_THREADS=1) "
                "for results that are the same to the bit on every engine.",
            )
        return None
    return ThreadpoolController()


class _Limit:
    """The limit and how many blocks are inside it: BLAS has one number of threads per process."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._inside = 0
        self._held = ExitStack()

    def enter(self) -> None:
        with self._lock:
            self._inside += 1
            controller = _controller() if self._inside == 1 else None
            if controller is not None:
                self._held.enter_context(controller.limit(limits=1, user_api="blas"))

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._held.close()


_LIMIT = _Limit()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Run the block (or, as a decorator, the function) with one BLAS thread.

    A block inside another costs nothing: the limit is set by the first and lifted by the last.
    """
    _LIMIT.enter()
    try:
        yield
    finally:
        _LIMIT.leave()
