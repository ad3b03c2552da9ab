"""``flwr-perdl``, also as ``python -m perdl_experiments``: says at once that it is loading."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

_WAIT = 0.5  # seconds between two dots


def main() -> None:
    """Load the command line, which may take seconds, and run it."""
    with _dots():
        from perdl_experiments.cli import main as run
    run()


@contextmanager
def _dots() -> Iterator[None]:
    """Show on a terminal that the program is loading."""
    if not sys.stderr.isatty() or os.environ.get("NO_COLOR"):
        yield
        return
    loaded, shown = Event(), "flwr-perdl: loading "

    def show() -> None:
        nonlocal shown
        while not loaded.is_set():
            shown += "."
            print(shown, end="\r", file=sys.stderr, flush=True)
            loaded.wait(_WAIT)

    thread = Thread(target=show)
    thread.start()
    try:
        yield
    finally:
        loaded.set()
        thread.join()
        print(" " * len(shown), end="\r", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
