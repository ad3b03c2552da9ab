"""Events of a run, as they happen: one JSON object per line (format: docs/faults.md)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib import import_module
from importlib.util import find_spec
from logging import WARNING
from math import isfinite
from pathlib import Path
from typing import Any
from weakref import finalize

from flwr_perdl.core.files import private
from flwr_perdl.protocol.compat import log

__all__ = ["EVENTS", "Event", "EventLog", "has_writer", "read_events"]

#: Locks of files. Windows has none: there a reader does not learn that the writer is gone.
_LOCKS: Any = import_module("fcntl") if find_spec("fcntl") else None
#: Maximum number of bytes of a line that is read.
_LONGEST_LINE = 2**24
#: A run's events, in its folder.
EVENTS = "events.jsonl"

#: A line of the events' file; its fields are in docs/faults.md.
Event = dict[str, Any]


class EventLog:
    """Appends events to a file; every line is flushed to disk before the run goes on.

    If a run is killed in the middle of a line, only that line is lost: `read_events` skips it.

    Parameters
    ----------
    path : str or Path
        The file; its folder is created if missing.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from flwr_perdl.protocol.events import EventLog, read_events
    >>> with TemporaryDirectory() as folder:
    ...     EventLog(Path(folder, "events.jsonl")).write("round", round=1)
    ...     events, end = read_events(Path(folder, "events.jsonl"))
    >>> events[0]["event"], events[0]["round"]
    ('round', 1)
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._lock: int | None = None

    def write(self, event: str, **fields: Any) -> None:
        """Append one event; a full disk is logged and does not stop the run.

        Parameters
        ----------
        event : str
            Its name.
        **fields
            Its JSON values.
        """
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps(_to_json({"time": now, "event": event, **fields}), allow_nan=False)
        try:
            with private(self._path) as stream:
                if stream.seek(0, os.SEEK_END):
                    stream.seek(-1, os.SEEK_END)
                    if stream.read(1) != b"\n":
                        stream.write(b"\n")
                stream.write(line.encode() + b"\n")
            self._hold()
        except (OSError, ValueError) as error:
            log(WARNING, "The event %r could not be written to %s: %s", event, self._path, error)

    def _hold(self) -> None:
        """Lock the file for as long as this log lives: `has_writer` sees that it does."""
        if _LOCKS is None:
            return
        if self._lock is None:
            self._lock = os.open(self._path, os.O_RDONLY)
            finalize(self, os.close, self._lock)
        with suppress(OSError):  # no locks here, or a reader looks just now: the next event tries
            _LOCKS.flock(self._lock, _LOCKS.LOCK_SH | _LOCKS.LOCK_NB)


def has_writer(path: Path) -> bool:
    """Return whether a process on this machine has an `EventLog` of an existing file open.

    The system releases the lock when the process ends, however it ends. Without file locks the
    answer is True. For a network folder that does not share locks, ask on the server's machine.

    Parameters
    ----------
    path : str or Path

    Returns
    -------
    bool

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from flwr_perdl.protocol.events import EventLog, has_writer
    >>> with TemporaryDirectory() as folder:
    ...     log = EventLog(Path(folder, "events.jsonl"))
    ...     log.write("round", round=1)
    ...     has_writer(Path(folder, "events.jsonl"))
    True
    """
    if _LOCKS is None:
        return True
    with path.open("rb") as stream:
        try:
            _LOCKS.flock(stream, _LOCKS.LOCK_EX | _LOCKS.LOCK_NB)
        except OSError:
            return True
    return False


def read_events(path: Path, start: int = 0) -> tuple[list[Event], int]:
    """Return the events of a file from byte ``start`` on, and where the next one begins.

    An unfinished last line is left for the next call; a line that is no event is skipped.

    Parameters
    ----------
    path : str or Path
    start : int, default 0
        Offset in bytes.

    Returns
    -------
    events : list of dict
    next : int
        The offset for the next call.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from flwr_perdl.protocol.events import EventLog, read_events
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "events.jsonl")
    ...     EventLog(path).write("round", round=1)
    ...     events, end = read_events(path)
    >>> [event["event"] for event in events]
    ['round']
    """
    events, end = [], start
    with path.open("rb") as stream:
        stream.seek(start)
        while True:
            line = stream.readline(_LONGEST_LINE)
            if not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
                break
            end += len(line)
            if event := _parse(line):  # of a longer line no part is one
                events.append(event)
    return events, end


def _parse(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def _to_json(value: Any) -> Any:
    """Return what JSON can say: numbers that are not finite become null."""
    if isinstance(value, Mapping):
        return {str(name): _to_json(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(entry) for entry in value]
    if isinstance(value, float) and not isfinite(value):
        return None
    return value if isinstance(value, bool | int | float | str | None) else str(value)
