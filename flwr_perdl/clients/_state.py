"""A client's private state: in Flower's ``context.state`` and, on request, on disk.

The states after the last two rounds are kept, each under its round. A server that crashed asks for
a round again; the client then takes the newest state from *before* that round, so that the same
request has the same reply.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from logging import WARNING
from pathlib import Path
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.common import log
from numpy.typing import NDArray

from flwr_perdl import _store
from flwr_perdl._records import decode, encode

PrivateArrays = dict[str, NDArray[Any]]

_RUN = "perdl.private.run"
_RECORD = re.compile(r"perdl\.private\.(\d+)")


def private_folder(
    context: Context, partition: int, state_dir: str | Path | None = None
) -> Path | None:
    """Return where a client keeps its private state on disk, None where it does not.

    Parameters
    ----------
    context : Context
        The client's Flower context.
    partition : int
        Its partition id.
    state_dir : str or Path, optional
        Folder of all clients; by default ``state-dir`` of the node config, then of the run config.
    """
    given = state_dir or context.node_config.get("state-dir") or context.run_config.get("state-dir")
    return Path(str(given)) / f"client-{partition}" if given else None


class PrivateState:
    """The private arrays of one client in one run, by round.

    Parameters
    ----------
    context : Context
        The client's Flower context; its ``state`` keeps the arrays between messages.
    run : str
        Token of the run; arrays of another run are not taken up.
    folder : Path or None
        Folder of this client's files; None keeps nothing on disk.
    """

    def __init__(self, context: Context, run: str, folder: Path | None = None) -> None:
        self._records = context.state
        self._run = run
        self._folder = folder

    def before(self, round_: int) -> PrivateArrays | None:
        """Return the newest arrays saved in a round before ``round_``, None if there are none.

        What ``context.state`` has is preferred; a restarted SuperNode has lost that, and reads its
        files.
        """
        return self._newest(round_ - 1)

    def after(self, round_: int) -> PrivateArrays | None:
        """Return the newest arrays saved in ``round_`` or before it, None if there are none."""
        return self._newest(round_)

    def _newest(self, last: int) -> PrivateArrays | None:
        in_memory = max((r for r in self._rounds() if r <= last), default=-1)
        if self._folder is not None:
            on_disk = [r for r in _store.rounds_in(self._folder) if in_memory < r <= last]
            for round_ in reversed(on_disk):
                try:
                    saved = _store.load(_store.round_path(self._folder, round_))
                except ValueError as error:
                    log(WARNING, "%s It is left out.", error)
                    continue
                if saved.meta.get("run") == self._run:
                    return saved.arrays
        if in_memory < 0:
            return None
        record = cast(ArrayRecord, self._records[f"perdl.private.{in_memory}"])
        return {name: decode(array) for name, array in record.items()}

    def save(self, round_: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Keep ``arrays`` as the state after ``round_``, and the state before it."""
        if self._folder is not None:
            _store.save_round(self._folder, round_, arrays, {"run": self._run})
        rounds = self._rounds()
        kept = [r for r in rounds if r < round_][-1:]
        for stale in set(rounds) - set(kept):
            del self._records[f"perdl.private.{stale}"]
        self._records[_RUN] = ConfigRecord({"run": self._run})
        record = ArrayRecord()
        for name, array in arrays.items():
            record[name] = encode(array)
        self._records[f"perdl.private.{round_}"] = record

    def _rounds(self) -> list[int]:
        """Return the rounds that ``context.state`` holds arrays of this run for, ascending."""
        token = self._records.get(_RUN)
        found = (_RECORD.fullmatch(name) for name in list(self._records))
        rounds = sorted(int(match[1]) for match in found if match)
        if rounds and not (isinstance(token, ConfigRecord) and token.get("run") == self._run):
            for stale in rounds:
                del self._records[f"perdl.private.{stale}"]
            return []
        return rounds
