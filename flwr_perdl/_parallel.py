"""A few threads for work that NumPy does: it lets go of Python's lock in products and factors."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
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

    Items are taken one after the other in the caller's thread, and only two for each thread ahead,
    so that no more of them are held than that. The caller's thread computes as well, what no other
    has begun: it would wait for Python's lock to hand out what another thread is to do. An
    exception is raised where its result would have come.

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
    waiting: deque[tuple[Item, Future[Result]]] = deque()
    with short_turns(), ThreadPoolExecutor(n - 1) as pool:
        for item in left:
            waiting.append((item, pool.submit(copy_context().run, function, item)))
            if len(waiting) == 2 * n:
                yield _first(function, waiting)
        while waiting:
            yield _first(function, waiting)


def _first(
    function: Callable[[Item], Result], waiting: deque[tuple[Item, Future[Result]]]
) -> Result:
    """Take the first result; until it is there, compute in this thread what no other has begun."""
    while not waiting[0][1].done():
        ours = next((i for i, (_, future) in enumerate(waiting) if future.cancel()), None)
        if ours is None:
            break
        item = waiting[ours][0]
        waiting[ours] = item, _computed(function, item)
    return waiting.popleft()[1].result()


def _computed(function: Callable[[Item], Result], item: Item) -> Future[Result]:
    """Return what a thread would have come to, computed in this one."""
    future: Future[Result] = Future()
    try:
        future.set_result(function(item))
    except Exception as error:
        future.set_exception(error)
    return future
