"""A few threads for work that NumPy does: it lets go of Python's lock in products and factors."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, islice
from threading import Lock
from typing import TypeVar

#: Seconds after which a thread that wants Python's lock is given it: products take less.
_TURN = 5e-4

Item = TypeVar("Item")
Result = TypeVar("Result")


def n_threads() -> int:
    """Return how many threads this process may compute in.

    As many as it has cores, or ``OMP_NUM_THREADS`` where that says fewer: who limits the threads of
    BLAS, as Flower's Ray workers and cluster schedulers do, limits these too.
    """
    available = getattr(os, "sched_getaffinity", None)
    cores = len(available(0)) if available else os.cpu_count() or 1
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, min(cores, int(asked) if asked.isdigit() else cores))


class _Turns:
    """How long turns are, and how many blocks want them short: a process has one interval."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._inside = 0
        self._before = 0.0

    @contextmanager
    def short(self) -> Iterator[None]:
        """Let threads that wait for Python's lock have it after half a millisecond, not after 5."""
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, _TURN))
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    sys.setswitchinterval(self._before)


short_turns = _Turns().short


def in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield ``function(item)`` for all items, in their order, some of them computed at once.

    Items are taken one after the other in the caller's thread, and only as far ahead as there are
    threads, so that no more of them are held than that. An exception is raised where its result
    would have come.

    Parameters
    ----------
    function : callable
        Must not depend on what it does for other items; the results are then the same bits however
        many threads there are.
    items : iterable
        Such as windows of clients.
    """
    n, left = n_threads(), iter(items)
    first = list(islice(left, min(n, 2)))
    left = chain(first, left)
    if len(first) < 2:  # one core, or one item
        yield from map(function, left)
        return
    waiting: deque[Future[Result]] = deque()
    with short_turns(), ThreadPoolExecutor(n) as pool:
        for item in left:
            waiting.append(pool.submit(function, item))
            if len(waiting) > n:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
