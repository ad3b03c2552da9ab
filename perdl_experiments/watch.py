"""A live view of a run from its events: ``flwr-perdl watch DIR``."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from flwr_perdl.protocol.events import EVENTS, Event, has_writer, read_events
from perdl_experiments.outcome import NEXT
from perdl_experiments.report import fits, is_number
from perdl_experiments.terminal import Rows, printable_lines
from perdl_experiments.words import megabytes, plural

#: Exchanges, clients and reasons that are shown.
_EXCHANGES, _CLIENTS, _REASONS = 10, 8, 4
#: Characters of a name, of a reason and of the first line that are shown.
_NAME, _REASON, _LINE = 100, 300, 1000


def _is_number_or_null(value: object) -> bool:
    return value is None or is_number(value)


#: What events say that is shown.
_NUMBERS = ("round", "rounds", "done", "of", "asked", "good", "seconds", "floats_up", "floats_down")
_FORMS: dict[str, Any] = {
    **dict.fromkeys(_NUMBERS, _is_number_or_null),
    **dict.fromkeys(("metrics", "failed"), dict),
    "anomalies": {"*": {"*": is_number}},
}


class View:
    """What a run's events say so far."""

    def __init__(self) -> None:
        self.run: Event = {}
        self.federation: Event = {}
        self.asked: Event | None = None
        self.over: Event | None = None
        self.part: Event = {}
        self.last: Any = None
        self.running = True
        self.round = 0
        self.server: dict[int, Mapping[str, Any]] = {}
        self.exchanges: deque[Event] = deque(maxlen=_EXCHANGES)
        self.clients: dict[str, dict[str, float]] = {}
        self.reasons: deque[str] = deque(maxlen=_REASONS)

    def take(self, events: Iterable[Event]) -> None:
        """Take in further events; one of a kind or form that is not known here is passed over."""
        for event in filter(_well_formed, events):
            self._take(event)

    def _take(self, event: Event) -> None:
        self.last = event.get("time")
        match event["event"]:
            case "run":
                self.run, self.over = event, None
            case "begin":
                self.federation, self.asked, self.over = event, None, None
                self.round = event.get("done", 0)
                self.server.clear()
            case "ask":
                self.asked = event
            case "round":
                self.asked, self.round = None, event.get("round", 0)
                self.exchanges.append(event)
                for client, odd in event.get("anomalies", {}).items():
                    total = self.clients.setdefault(client, {})
                    for what, share in odd.items():
                        total[what] = total.get(what, 0.0) + share
                for client, reason in event.get("failed", {}).items():
                    said = f"{client[:_NAME]}: {str(reason)[:_REASON]}"
                    self.reasons.append(f"round {event.get('round')}, {said}")
            case "server":
                self.server[event.get("round") or 0] = event.get("metrics", {})
            case "part":
                self.part = event
            case "end":
                self.asked = None
                if not self.run or event.get("stopped"):
                    self.over = event
            case "done":
                self.over = event

    # As text ---------------------------------------------------------------------------------

    def headline(self) -> str:
        """Return how far the run is, in a line."""
        parts = [str(self.run.get("experiment") or self.federation.get("protocol") or "run")]
        if self.federation:
            parts.append(f"seed {self.federation.get('seed')}")
            parts.append(f"round {self.round} of {self.federation.get('rounds') or '?'}")
        if self.part.get("of"):
            parts.append(f"part {self.part.get('done')} of {self.part['of']}")
        if self.over is not None:
            stopped = self.over.get("stopped")
            parts.append(f"stopped: {stopped}" if stopped else "finished")
        elif not self.running:
            how = "--resume (flwr run: resume=true)" if self.run else "ServerSettings(resume=True)"
            parts.append(
                f"interrupted: since {self.last} the server writes nothing, and no process on this "
                f"machine has the file open. To go on: the same command with {how}"
            )
        elif self.asked is not None:
            clients = plural(self.asked.get("asked"), "client")
            words = f"waiting for {clients} since {self.asked.get('time')}"
            parts.append(f"{self.asked.get('step')} of round {self.asked.get('round')}: {words}")
        return ", ".join(parts)

    def render(self) -> Group:
        """Return headline and tables."""
        parts: list[Any] = [Text(printable_lines(self.headline()[:_LINE]))]
        if self.exchanges:
            parts.append(self._exchange_table())
        odd = sorted(self.clients.items(), key=lambda item: -sum(item[1].values()))[:_CLIENTS]
        if odd:
            parts.append(_client_table(dict(odd)))
        parts += [Text(printable_lines(reason)) for reason in self.reasons]
        return Group(*parts)

    def _exchange_table(self) -> Rows:
        heads = ["step", "round", "asked", "good", "seconds", "MB up", "MB down", "metrics"]
        rows = []
        for event in self.exchanges:
            known = {**self.server.get(event.get("round") or -1, {}), **event.get("metrics", {})}
            numbers = {
                name: value
                for name, value in known.items()
                if name not in ("clients", "dropped") and is_number(value)
            }
            row = [
                *(str(event.get(key, "-"))[:_NAME] for key in ("step", "round", "asked", "good")),
                f"{event.get('seconds') or 0:.2f}",
                *(f"{megabytes(event.get(key) or 0):.3g}" for key in ("floats_up", "floats_down")),
                ", ".join(f"{k[:_NAME]} {v:.4g}" for k, v in list(numbers.items())[:4]),
            ]
            rows.append(row)
        return Rows(heads, rows)


def _well_formed(event: Event) -> bool:
    """Whether what is shown of an event has the types that it should have."""
    return all(fits(event[name], form) for name, form in _FORMS.items() if name in event)


def _client_table(clients: Mapping[str, Mapping[str, float]]) -> Rows:
    """Return the table of clients whose replies failed or stood out, the oddest first."""
    rows = [
        [client[:_NAME], ", ".join(f"{what[:_NAME]} {n:.3g}" for what, n in list(odd.items())[:8])]
        for client, odd in clients.items()
    ]
    return Rows(["client", "exchanges in which it"], rows)


def _events_in(folder: Path) -> Path:
    """Return the events of a folder's run; of the one that replaces it, where there is one."""
    following = folder / NEXT / EVENTS
    return following if following.is_file() else folder / EVENTS


def watch(
    folder: Path,
    console: Console,
    *,
    once: bool = False,
    poll: float = 0.5,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show a run's events until it is over.

    Parameters
    ----------
    folder : Path
        The run's folder; its events may not be there yet.
    console : Console
        Where to show them.
    once : bool, default False
        Show what there is now, as plain text, and return.
    poll : float, default 0.5
        Seconds between two looks at the file.
    sleep : callable
        How to wait.

    Raises
    ------
    ValueError
        If ``once`` and there are no events.
    """
    view, read = View(), 0
    path = _events_in(folder)
    if once:
        if not path.is_file():
            raise ValueError(
                f"{str(folder)!r} must be a run's folder, but has no {EVENTS}: the run has not "
                "begun yet, or this is another folder."
            )
        view.running = has_writer(path)  # first: it may end meanwhile
        view.take(read_events(path)[0])
        console.print(view.render())
        return
    with Live(console=console, auto_refresh=False) as live:
        while view.over is None:
            path = _events_in(folder)
            if path.is_file():
                if path.stat().st_size < read:  # a new run was begun in the folder
                    view, read = View(), 0
                view.running = has_writer(path)
                events, read = read_events(path, read)
                view.take(events)
            live.update(view.render() if read else Text(f"Waiting for {path} …"), refresh=True)
            if view.over is None:
                sleep(poll)
