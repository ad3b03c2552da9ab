"""Files that are written whole or not at all, and the events of a run.

``replacing(path)`` opens a file that takes the earlier one's place when the block ends; ``save``
and ``load`` keep arrays with a description; ``EventLog`` writes the file ``EVENTS`` of a run line
by line, and ``read_events`` reads it while it grows.
"""

from flwr_perdl._events import EVENTS, Event, EventLog, read_events
from flwr_perdl._store import Saved, load, replacing, save

__all__ = ["EVENTS", "Event", "EventLog", "Saved", "load", "read_events", "replacing", "save"]
