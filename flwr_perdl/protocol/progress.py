"""What a run shows, and whom it tells, while it goes on: a log, a bar, the user's functions."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from logging import WARNING
from types import ModuleType
from typing import Any

from flwr_perdl.core.checks import brief_repr, check_choice
from flwr_perdl.protocol.compat import log
from flwr_perdl.protocol.records import brief
from flwr_perdl.protocol.report import RoundReport

#: What is called with each report.
OnRound = Callable[[RoundReport], object] | Sequence[Callable[[RoundReport], object]] | None
#: How much a run shows; the first three by number, too.
VERBOSE = ("quiet", "lines", "log", "bar")
#: Seconds between two drawings of a bar within a round.
_EVERY = 0.3


def observers(on_round: OnRound) -> list[Any]:
    """Return the callables of ``on_round``; a TypeError if there is anything else in it."""
    if on_round is None:
        return []
    given = list(on_round) if isinstance(on_round, list | tuple) else [on_round]
    if not given or not all(map(callable, given)):
        wrong = brief_repr(on_round)
        raise TypeError(f"on_round must be a function, a list of some, or None, got {wrong}.")
    return given


class Observers:
    """Tells observers of a run; an error in one is logged once, and the run goes on.

    All are called with each report. Those with the methods of a `flwr_perdl.trackers.Tracker` are
    told of the begin and the end, too; after an error they are left out, since each further try
    may wait for a server that is gone.
    """

    def __init__(self, on_round: OnRound) -> None:
        self._all = observers(on_round)
        self._failed: set[int] = set()

    def begin(self, options: Mapping[str, Any]) -> None:
        """Tell that the run begins, with these options."""
        self._tell("begin", options)

    def __call__(self, report: RoundReport) -> None:
        """Tell what happened in an exchange."""
        self._tell("__call__", report)

    def end(self, result: Any) -> None:
        """Tell that the run is over: arrays by name, the folder with its files, None: it failed."""
        self._tell("end", result)

    def _tell(self, method: str, what: Any) -> None:
        for i, one in enumerate(self._all):
            call, tracks = getattr(one, method, None), hasattr(one, "begin")
            if call is None or (tracks and i in self._failed):
                continue
            try:
                call(what)
            except Exception as error:
                if i not in self._failed:
                    without = " without it" if tracks else ""
                    name = getattr(one, "__name__", type(one).__name__)
                    why = brief(f"{type(error).__name__}: {error}").rstrip(".")
                    log(WARNING, "%s failed: %s. The run goes on%s.", name, why, without)
                self._failed.add(i)


class Show:
    """Takes what happens in a run; this one shows nothing."""

    def __call__(self, report: RoundReport, round_: int, words: Sequence[str]) -> None:
        """Take an exchange's report, the round that it is of, and what to say of it."""

    def replies(self, done: int, asked: int) -> None:
        """Take the numbers of nodes that have replied in an exchange, and that are asked."""

    def end_round(self) -> None:
        """Take note that a round is over, its evaluation included."""


def check_verbose(verbose: object, *, local: bool) -> str:
    """Return one of `VERBOSE`; by default lines where all clients are in this process."""
    if verbose is None:
        verbose = 1 if local else 2
    if isinstance(verbose, int) and verbose in (0, 1, 2):
        verbose = VERBOSE[verbose]
    return check_choice("verbose", verbose, VERBOSE)


@contextmanager
def shown(verbose: str, name: str, rounds: int) -> Iterator[Show]:
    """Yield what takes a run's reports; Flower's lines are kept out of the log but for warnings.

    Parameters
    ----------
    verbose : {"quiet", "lines", "log", "bar"}
        Warnings alone; a line per round on stderr, unless the level of Flower's log is above INFO;
        Flower's lines, as its own strategies write them; or a progress bar of the rounds, by tqdm
        where that is installed, else lines.
    name : str
        The strategy's name, before the bar.
    rounds : int
        Communication rounds in all.
    """
    logger = logging.getLogger("flwr")
    if verbose == "log" or (verbose == "lines" and not logger.isEnabledFor(logging.INFO)):
        yield Show()
        return
    level = logger.level
    logger.setLevel(max(level, logging.WARNING))
    try:
        if verbose == "quiet":
            yield Show()
        else:
            show = _Bar(name, rounds, _tqdm() if verbose == "bar" else None)
            try:
                yield show
            finally:
                show.close()
    finally:
        logger.setLevel(level)


class _Bar(Show):
    """A bar of rounds that are over, with the first metric of each step, or lines with all."""

    def __init__(self, name: str, rounds: int, tqdm: ModuleType | None) -> None:
        self._name, self._rounds, self._found = name, rounds, dict[str, str]()
        self._words: dict[str, None] = {}  # what training and evaluation both say is said once
        self._bar: Any = None
        self._round = self._printed = 0
        if tqdm is not None:
            self._bar = tqdm.tqdm(total=rounds, desc=name, unit="round")
        self._drawn = time.monotonic()

    def __call__(self, report: RoundReport, round_: int, words: Sequence[str]) -> None:
        """Draw the bar, or note what a line will say."""
        self._round = round_
        self._words.update(dict.fromkeys(words))
        self._found.pop("replies", None)
        for name, value in list(report.aggregate.items())[:1]:  # the loss or error of the step
            self._found[name] = f"{value:.4g}"
        if report.dropped:
            self._found["left out"] = str(len(report.dropped))
        if self._bar is not None:
            self._bar.n = max(round_, 0)
            self._draw()

    def end_round(self) -> None:
        """Print a line where there is no bar."""
        if self._bar is None and self._round > self._printed:
            self._printed = self._round
            text = ", ".join(self._words)
            line = f"{self._name}: round {self._round} of {self._rounds}: {text}"
            print(line, file=sys.stderr, flush=True)
        self._words = {}

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
