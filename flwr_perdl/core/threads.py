"""Threads: one for BLAS, so that results are bitwise reproducible, and several for parts.

A threaded BLAS sums in an order that depends on its number of threads, so the last bits of a
product differ between engines. threadpoolctl (an extra of this package) limits BLAS to one thread
while this library computes; without it set the environment variables ``OPENBLAS_NUM_THREADS=1`` and
``MKL_NUM_THREADS=1`` before Python starts.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ContextDecorator
from contextvars import ContextVar, copy_context
from functools import cache, lru_cache
from importlib import import_module
from itertools import chain, islice
from logging import getLogger
from threading import Lock
from typing import Any, TypeVar

import numpy as np

__all__ = ["in_threads", "n_threads", "one_blas_thread"]


@lru_cache(maxsize=1)
def _libraries() -> list[Any]:
    """Return threadpoolctl's hold on each BLAS library that NumPy and SciPy have loaded."""
    for package in ("numpy.linalg", "scipy.linalg"):  # loaded before their libraries are looked up
        import_module(package)
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError:
        if not {"OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"} & set(os.environ):
            getLogger("flwr").warning(
                "threadpoolctl is not installed: set OPENBLAS_NUM_THREADS=1 (or MKL_NUM_THREADS=1) "
                "for results that are the same to the bit on every engine."
            )
        return []
    libraries: list[Any] = ThreadpoolController().select(user_api="blas").lib_controllers
    return libraries


@cache
def _keep_freed_memory() -> None:
    """Let the C library keep freed arrays, where its threshold for that follows the largest freed.

    A GNU C library gives the memory of a freed array back to the system, page by page, unless it
    has seen a larger one freed (up to 32 MB): dual inference takes half as long again so.
    """
    np.empty(2**25 - 2**20, dtype=np.uint8)


class _Limit(ContextDecorator):
    """The limit and how many blocks are inside it: BLAS has one number of threads per process.

    A library that has one thread already, as in Ray's workers, is only looked at.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._inside = 0
        self._before: list[tuple[Any, int]] = []

    def __enter__(self) -> None:
        _keep_freed_memory()
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

    A nested block costs nothing: the outermost sets and lifts the limit.

    Returns
    -------
    context manager

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.core.threads import one_blas_thread
    >>> with one_blas_thread():
    ...     product = np.eye(2) @ np.eye(2)
    """
    return _LIMIT


#: Whether this is one of the threads that :func:`in_threads` computes in.
_SHARED: ContextVar[bool] = ContextVar("_SHARED", default=False)

Item = TypeVar("Item")
Result = TypeVar("Result")


def n_threads() -> int:
    """Return how many threads this process may compute in.

    The number of cores, or ``OMP_NUM_THREADS`` if that is less: what limits the threads of BLAS,
    such as Flower's Ray workers and cluster schedulers, limits these too.

    Returns
    -------
    int

    Examples
    --------
    >>> from flwr_perdl.core.threads import n_threads
    >>> n_threads() >= 1
    True
    """
    return _at_most("OMP_NUM_THREADS")


def n_kernel_threads() -> int:
    """Return how many threads share the samples of one call of a compiled kernel.

    Those of :func:`n_threads`; where ``OMP_NUM_THREADS`` says nothing, no more than
    ``OPENBLAS_NUM_THREADS`` or ``MKL_NUM_THREADS`` allows BLAS.
    """
    return _at_most("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def _at_most(*variables: str) -> int:
    """Return the number of cores, or fewer where the first of the variables that is set says so."""
    available = getattr(os, "sched_getaffinity", None)
    cores = len(available(0)) if available else os.cpu_count() or 1
    values = (os.environ.get(variable, "") for variable in variables)
    asked = next(filter(str.isdigit, values), cores)
    return max(1, min(cores, int(asked)))


def in_threads(
    function: Callable[[Item], Result], items: Iterable[Item], *, n: int | None = None
) -> Iterator[Result]:
    """Yield ``function(item)`` for all items in their order, computing several at once.

    At most two items per thread are held ahead. An exception is raised where its result would have
    come.

    Parameters
    ----------
    function : callable
        Must not depend on its calls for other items; the results are then the same bits for any
        number of threads.
    items : iterable
    n : int, optional
        Number of threads; by default :func:`n_threads`, and 1 inside a call of this function.

    Returns
    -------
    iterator

    Examples
    --------
    >>> from flwr_perdl.core.threads import in_threads
    >>> list(in_threads(abs, [-1, 2, -3]))
    [1, 2, 3]
    """
    n, left = 1 if _SHARED.get() else n or n_threads(), iter(items)
    first = list(islice(left, min(n, 2)))
    left = chain(first, left)
    if len(first) < 2:  # one core, or one item
        yield from map(function, left)
        return
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(n) as pool:
        for item in left:
            waiting.append(pool.submit(copy_context().run, _share, function, item))
            if len(waiting) == 2 * n:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _share(function: Callable[[Item], Result], item: Item) -> Result:
    """Compute beside other threads, in a context of its own."""
    _SHARED.set(True)
    return function(item)
