"""The states of all nodes of one process, in one file.

Thousands of files, one per node, take longer than all else that small nodes do in a round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, RecordDict

from flwr_perdl.core import files
from flwr_perdl.protocol.at_rest import locked, read
from flwr_perdl.protocol.records import PARTITION_ID

#: The folder of the file, with no rights but the owner's: the user's own keeps its rights.
_FOLDER, _FILE, _BYTES = "nodes", "nodes.npz", "bytes"


class NodeStates:
    """The arrays in the states of a grid's nodes, as they were after its last training messages.

    Other records stay in memory: they count what a client has answered in one run of Flower. With a
    key in the environment the arrays are encrypted, as in the files of single clients.

    Parameters
    ----------
    folder : Path
        In whose folder ``nodes`` the file is.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / _FOLDER
        self._path = self._folder / _FILE

    def save(self, contexts: Sequence[Context]) -> None:
        """Replace the file; afterwards it holds all of these states, or what it held."""
        parts: list[bytes] = []
        nodes = [_describe(context, parts) for context in contexts]
        named = {_BYTES: np.frombuffer(b"".join(parts), dtype=np.uint8)}
        self._refuse_links()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._folder.chmod(0o700)
        files.save(self._path, *locked(named, {"nodes": nodes}))

    def _refuse_links(self) -> None:
        for own in (self._folder.parent, self._folder):
            files.refuse_link(own)

    def contexts(self) -> list[Context]:
        """Return contexts of their own for all nodes of the file, with these states; or none."""
        if not self._path.exists():
            return []
        nodes = files.load(self._path).meta.get("nodes")
        contexts = [
            Context(0, 0, {PARTITION_ID: node}, RecordDict(), {})
            for node in range(len(nodes) if isinstance(nodes, list) else 0)
        ]
        self.restore(contexts)
        return contexts

    def restore(self, contexts: Sequence[Context]) -> None:
        """Put the arrays of the file, if there is one, into these states.

        A file that is damaged, or of another number of nodes, is named in the log and left out.

        Raises
        ------
        ValueError
            If the file is of another version of this library, or locked, and the key in the
            environment is not its own.
        """
        if not self._path.exists():
            return

        def check(about: Mapping[str, Any]) -> None:
            self._refuse_links()
            nodes = about["nodes"]
            n_nodes = len(nodes) if isinstance(nodes, list) else 0
            if n_nodes != len(contexts):
                raise ValueError(f"{self._path} must be of {len(contexts)} nodes, got {n_nodes}.")

        saved = read(self._path, ["nodes"], check)
        if saved is None:
            return
        at = 0
        try:
            whole = saved.arrays[_BYTES].tobytes()
            for context, node in zip(contexts, saved.meta["nodes"], strict=True):
                for name, described in node.items():
                    arrays = {}
                    for key_, dtype, shape, stype, size in described:
                        arrays[key_] = Array(dtype, tuple(shape), stype, whole[at : at + size])
                        at += size
                    context.state[name] = ArrayRecord(arrays)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{self._path} must say what its arrays are, got {error}.") from error


def _describe(context: Context, parts: list[bytes]) -> dict[str, list[list[Any]]]:
    """Return what a state's arrays are called and how they are stored; append their bytes."""
    found: dict[str, list[list[Any]]] = {}
    for name, record in context.state.items():
        if isinstance(record, ArrayRecord):
            found[name] = [
                [key, one.dtype, one.shape, one.stype, len(one.data)] for key, one in record.items()
            ]
            parts += [one.data for one in record.values()]
    return found
