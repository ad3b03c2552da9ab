"""How client and server maths run: in one BLAS thread, on every engine, and keeping their memory.

The order in which a threaded BLAS sums depends on its number of threads, so that the same product
has other last bits on another engine. threadpoolctl (an extra of this package) limits BLAS to one
thread while our maths runs; without it the environment variables ``OPENBLAS_NUM_THREADS=1`` and
``MKL_NUM_THREADS=1``, set before Python starts, do the same.
"""

from __future__ import annotations

import os
from contextlib import ContextDecorator
from functools import lru_cache
from logging import getLogger
from threading import Lock
from typing import Any

import numpy.linalg
import scipy.linalg

from flwr_perdl._memory import keep_freed_memory


@lru_cache(maxsize=1)
def _libraries() -> list[Any]:
    """Return threadpoolctl's hold on each BLAS library that NumPy and SciPy have loaded."""
    _ = numpy.linalg, scipy.linalg  # loaded before the libraries are looked up
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError:
        if not {"OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"} & set(os.environ):
            getLogger("flwr").warning(
                "threadpoolctl is not installed: set OPENBLAS_NUM_THREADS=1 (or MKL_NUM_THREADS=1) "
                "for results that are the same to the bit on every engine.",
            )
        return []
    libraries: list[Any] = ThreadpoolController().select(user_api="blas").lib_controllers
    return libraries


class _Limit(ContextDecorator):
    """The limit and how many blocks are inside it: BLAS has one number of threads per process.

    A library that has one thread already, as in Ray's workers, is only looked at.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._inside = 0
        self._before: list[tuple[Any, int]] = []

    def __enter__(self) -> None:
        keep_freed_memory()
        with self._lock:
            self._inside += 1
            for library in _libraries() if self._inside == 1 else ():
                threads = library.get_num_threads()
                if threads is not None and threads != 1:
                    library.set_num_threads(1)
                    self._before.append((library, threads))

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            while self._before and not self._inside:
                library, threads = self._before.pop()
                library.set_num_threads(threads)


_LIMIT = _Limit()


def one_blas_thread() -> _Limit:
    """Run the block (or, as a decorator, the function) with one BLAS thread.

    From the first block on the process keeps the memory of freed arrays (`keep_freed_memory`).

    A block inside another costs nothing: the limit is set by the first and lifted by the last.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.threads import one_blas_thread
    >>> with one_blas_thread():
    ...     product = np.eye(2) @ np.eye(2)
    """
    return _LIMIT
