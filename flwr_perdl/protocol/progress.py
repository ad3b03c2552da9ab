"""What a run shows while it goes on: Flower's log, a progress bar, or nothing."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

from flwr_perdl.protocol.report import RoundReport

#: How much a run shows.
VERBOSE = ("log", "bar", "quiet")
#: Seconds between two drawings of a bar within a round.
_EVERY = 0.3


class Show:
    """Takes what happens in a run; this one shows nothing."""

    def __call__(self, report: RoundReport) -> None:
        """Take an exchange's report."""

    def replies(self, done: int, asked: int) -> None:
        """Take the numbers of nodes that have replied in an exchange, and that are asked."""


@contextmanager
def shown(verbose: str, name: str, rounds: int) -> Iterator[Show]:
    """Yield what takes a run's reports; Flower's lines are kept out of the log but for warnings.

    Parameters
    ----------
    verbose : {"log", "bar", "quiet"}
        Flower's lines, as its own strategies write them; a progress bar of the rounds, by tqdm
        where that is installed, else a line per round on stderr; or neither.
    name : str
        The strategy's name, before the bar.
    rounds : int
        Communication rounds in all.
    """
    if verbose == "log":
        yield Show()
        return
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(max(level, logging.WARNING))
    try:
        if verbose == "quiet":
            yield Show()
        else:
            show = _Bar(name, rounds)
            try:
                yield show
            finally:
                show.close()
    finally:
        logger.setLevel(level)


class _Bar(Show):
    """A bar: rounds that are over, and the first metric of each kind of step."""

    def __init__(self, name: str, rounds: int) -> None:
        tqdm = _tqdm()
        self._name, self._rounds, self._found = name, rounds, dict[str, str]()
        self._bar: Any = None
        if tqdm is not None:
            self._bar = tqdm.tqdm(total=rounds, desc=name, unit="round")
        self._drawn = time.monotonic()

    def __call__(self, report: RoundReport) -> None:
        """Draw the bar, or print a line."""
        self._found.pop("replies", None)
        self._found.update(_first_metric(report.aggregate))
        if report.dropped:
            self._found["left out"] = str(len(report.dropped))
        if self._bar is not None:
            self._bar.n = report.round
            self._draw()
        else:
            text = ", ".join(f"{what} {value}" for what, value in self._found.items())
            line = f"{self._name}: round {report.round} of {self._rounds}: {text}"
            print(line, file=sys.stderr, flush=True)

    def replies(self, done: int, asked: int) -> None:
        """Draw how many clients have replied, a few times a second."""
        if self._bar is not None and time.monotonic() > self._drawn + _EVERY:
            self._found["replies"] = f"{done}/{asked}"
            self._draw()

    def _draw(self) -> None:
        self._bar.set_postfix(self._found, refresh=False)
        self._bar.refresh()
        self._drawn = time.monotonic()

    def close(self) -> None:
        """End the bar; replies that come after the run draw nothing."""
        if self._bar is not None:
            self._bar.close()
        self._bar = None


def _tqdm() -> ModuleType | None:
    """Return tqdm in the form that suits a terminal or a notebook; None where it is missing."""
    try:
        return import_module("tqdm.auto")
    except ImportError:
        return None


def _first_metric(aggregate: Mapping[str, float]) -> dict[str, str]:
    """Return a report's first metric, which is the loss or error of its step."""
    return {name: f"{value:.4g}" for name, value in list(aggregate.items())[:1]}
