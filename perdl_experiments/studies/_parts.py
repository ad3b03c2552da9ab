"""Parts of a run that do not need each other, such as its seeds, on as many cores as there are."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from flwr_perdl.core.threads import n_threads
from perdl_experiments.studies._experiment import Arrays, Keep

#: Other processes are started where a part takes more seconds than this: they need about as many.
LONG = 2.0

Part = Callable[[], Arrays]
Result = TypeVar("Result")


def keep_all(keep: Keep, parts: Mapping[str, Part]) -> list[Arrays]:
    """Return what ``keep`` makes of every part, in their order.

    The first that has to be computed is computed in this process. If that takes long, those after
    it are computed in as many processes as this one may compute in threads (`n_threads`), with one
    thread each: the same bits.

    Parameters
    ----------
    keep : Keep
        The run's own.
    parts : mapping of str to callable
        By name, all that the run has. Functions that another process can import, or partials of
        them.

    Returns
    -------
    list of dict of str to ndarray
    """
    computed = _InOrder(parts)
    return [keep(name, partial(computed.take, name), of=len(parts)) for name in parts]


class _InOrder:
    """Parts that are asked for in their order, some of them computed before they are."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self._parts = parts
        self._ahead: Iterator[tuple[str, Arrays]] | None = None

    def take(self, name: str) -> Arrays:
        """Return what the part comes to."""
        for one, arrays in self._ahead or ():
            if one == name:
                return arrays
        started = time.perf_counter()
        arrays = self._parts[name]()
        if self._ahead is None and time.perf_counter() - started > LONG and n_threads() > 1:
            names = list(self._parts)
            self._ahead = self._elsewhere(names[names.index(name) + 1 :])
        return arrays

    def _elsewhere(self, names: list[str]) -> Iterator[tuple[str, Arrays]]:
        found = in_processes([self._parts[name] for name in names])
        yield from zip(names, found, strict=True)


def in_processes(calls: Sequence[Callable[[], Result]]) -> Iterator[Result]:
    """Return what each call returns, in order, from `n_threads` processes with one thread each."""
    from joblib import Parallel, delayed, parallel_config  # comes with scikit-learn, an extra

    level = logging.getLogger("flwr").level
    with parallel_config(backend="loky", inner_max_num_threads=1):
        found: Iterator[Result] = Parallel(n_threads(), return_as="generator")(
            delayed(_logged)(call, level) for call in calls
        )
    return found


def _logged(call: Callable[[], Result], level: int) -> Result:
    """Return what a call does, in a process that logs as the one that started it."""
    logging.getLogger("flwr").setLevel(level)
    return call()
