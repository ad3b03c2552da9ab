"""What a run shows while it goes on: Flower's log, a progress bar, or nothing."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

from flwr_perdl.strategies._protocol import RoundReport

#: How much a run shows.
VERBOSE = ("log", "bar", "quiet")

Show = Callable[[RoundReport], None]


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
        yield lambda report: None
        return
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(max(level, logging.WARNING))
    try:
        if verbose == "quiet":
            yield lambda report: None
        else:
            with _bar(name, rounds) as show:
                yield show
    finally:
        logger.setLevel(level)


@contextmanager
def _bar(name: str, rounds: int) -> Iterator[Show]:
    """Yield what draws a bar: rounds that are over, and the first metric of each kind of step."""
    tqdm, found = _tqdm(), dict[str, str]()
    bar = None if tqdm is None else tqdm.tqdm(total=rounds, desc=name, unit="round")

    def show(report: RoundReport) -> None:
        found.update(_first_metric(report.aggregate))
        if report.dropped:
            found["left out"] = str(len(report.dropped))
        if bar is not None:
            bar.set_postfix(found, refresh=False)
            bar.n = report.round
            bar.refresh()
        else:
            said = ", ".join(f"{what} {value}" for what, value in found.items())
            print(f"{name}: round {report.round} of {rounds}: {said}", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()


def _tqdm() -> ModuleType | None:
    """Return tqdm in the form that suits a terminal or a notebook; None where it is missing."""
    try:
        return import_module("tqdm.auto")
    except ImportError:
        return None


def _first_metric(aggregate: Mapping[str, float]) -> dict[str, str]:
    """Return a report's first metric, which is the loss or error of its step."""
    return {name: f"{value:.4g}" for name, value in list(aggregate.items())[:1]}
