"""Cohorts: clients of one type that take the same step in one go, where they are in one process.

A client type opts in with a second form of ``fit``, a class method::

    @classmethod
    def fit_cohort(cls, clients, parameters, config):
        ...

that yields, in their order, what ``fit(parameters, config)`` of each client would return, to the
bit. ``clients`` is an iterable that makes them one after the other: those whose results are out
need not be kept. ``parameters`` are shared and read-only.

It stands for the ``fit`` of the same class: a subclass with a ``fit`` of its own is called one by
one again, unless it has a ``fit_cohort`` too. If it raises, the clients' states are put back (they
are to be written by replacing records, not by changing what is in them), and the clients are called
one by one, so that the error names the client that causes it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
from flwr.client import NumPyClient

from flwr_perdl._checks import Matrix
from flwr_perdl._records import Scalar

#: What a client's ``fit`` returns.
Fitted = tuple[list[Matrix], int, dict[str, Scalar]]
FitCohort = Callable[[Iterable[Any], list[Matrix], dict[str, Scalar]], Iterator[Fitted]]

T = TypeVar("T")


def cohort_of(client: NumPyClient) -> FitCohort | None:
    """Return the ``fit_cohort`` that stands for this client's ``fit``, if there is one."""
    of_fit, of_cohort = (
        next((base for base in type(client).__mro__ if name in vars(base)), None)
        for name in ("fit", "fit_cohort")
    )
    if of_cohort is None or of_cohort is not of_fit or "fit" in vars(client):
        return None
    kind: Any = type(client)
    together: FitCohort = kind.fit_cohort
    return together


def windows(
    items: Iterable[T], size: Callable[[T], int], most: int, parts: int = 1
) -> Iterator[list[T]]:
    """Yield the items in lists whose sizes add up to no more than ``most``, or of one item.

    The last of them, as many for each of the ``parts``, are of about one size, but not smaller than
    a quarter of the others: few items make as many lists, too, one per thread.
    """
    held: list[T] = []
    sizes: list[int] = []
    total = 0

    def take(limit: int) -> list[T]:
        """Take the first item, and those after it that the limit leaves room for."""
        nonlocal total
        count = max(1, bisect_right(list(accumulate(sizes)), limit))
        window = held[:count]
        total -= sum(sizes[:count])
        del held[:count], sizes[:count]
        return window

    for item in items:
        own = size(item)
        held.append(item)
        sizes.append(own)
        total += own
        while total > 2 * parts * most and len(held) > 1:
            yield take(most)
    needed, filled = 0, most
    for own in sizes:
        if filled + own > most:
            needed, filled = needed + 1, 0
        filled += own
    left = parts * -(-needed // parts)
    while held:
        yield take(min(most, max(-(-total // max(left, 1)), most // 4)))
        left -= 1


def alike(kinds: Iterable[Hashable]) -> list[list[int]]:
    """Return the positions of what is of the same kind, kind by kind."""
    positions: dict[Hashable, list[int]] = {}
    for position, kind in enumerate(kinds):
        positions.setdefault(kind, []).append(position)
    return list(positions.values())


def stack(arrays: list[Matrix]) -> Matrix:
    """Return arrays of one shape as one; a single one, which may be large, without a copy."""
    return arrays[0][None] if len(arrays) == 1 else np.stack(arrays)
