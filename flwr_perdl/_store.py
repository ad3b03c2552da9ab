"""Arrays on disk that survive a crash: atomic, versioned ``.npz`` files without pickle.

Each file has a checksum of all that it says, and only its owner may read it. Files of format 1,
which had no checksum, are still read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

FORMAT = 2
_META, _CHECKSUM = "meta", "checksum"
_NAME = re.compile(r"round-(\d{6})\.npz")


class Saved(NamedTuple):
    """What a file holds: named arrays and a JSON-like record."""

    arrays: dict[str, NDArray[Any]]
    meta: dict[str, Any]


def save(path: Path, arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]) -> None:
    """Write ``arrays`` and ``meta`` to ``path``: afterwards it holds all of them, or what it held.

    Parameters
    ----------
    path : Path
        The file; its folder is made when missing.
    arrays : mapping of str to ndarray
        Arrays of numbers.
    meta : mapping
        Anything that JSON can say.
    """
    named: dict[str, Any] = {f"a/{name}": np.asarray(array) for name, array in arrays.items()}
    named[_META] = np.array(json.dumps({"format": FORMAT, **meta}))
    named[_CHECKSUM] = np.array(_checksum(named))
    with replacing(path) as stream:
        np.savez(stream, **named)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Let the block write a file; afterwards ``path`` holds all of it, or what it held.

    Inside `together` that is so when its block ends.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    waiting = _WAITING.get()
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            if waiting is None:
                stream.flush()
                os.fsync(stream.fileno())
        if waiting is None:
            os.replace(temporary, path)
        else:
            waiting.append((temporary, path))
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


#: Files, complete but perhaps not on the disk yet, and the paths that they are to have.
_Waiting = list[tuple[str, Path]]
_WAITING: ContextVar[_Waiting | None] = ContextVar("waiting", default=None)


@contextmanager
def together() -> Iterator[None]:
    """Bring all files that the block saves to the disk at its end, with one sync for all of them.

    Each path then holds all of the new file, or, where the block or the process does not come to
    its end, what it held. One sync per file would take longer than everything else that hundreds of
    clients in one process do in a round.
    """
    waiting: _Waiting = []
    token = _WAITING.set(waiting)
    try:
        yield
        if waiting:
            _sync([temporary for temporary, _ in waiting])
        for temporary, path in waiting:
            os.replace(temporary, path)
            if _NAME.fullmatch(path.name):
                _forget(path)
    except BaseException:
        for temporary, _ in waiting:
            Path(temporary).unlink(missing_ok=True)
        raise
    finally:
        _WAITING.reset(token)


def _sync(files: Iterable[str]) -> None:
    """Wait until these files are on the disk."""
    if hasattr(os, "sync"):
        os.sync()
        return
    for file in files:  # Windows has no sync of all files
        with open(file, "rb+") as stream:
            os.fsync(stream.fileno())


def load(path: Path) -> Saved:
    """Read what `save` wrote.

    Raises
    ------
    ValueError
        If the file cannot be read, is not ours, has another version, or was changed.
    """
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            named = {name: stored[name] for name in stored.files}
        meta = json.loads(str(named[_META]))
        version = meta["format"]
        checksum = str(named.pop(_CHECKSUM)) if version == FORMAT else None
    except Exception as error:
        raise ValueError(f"{path} is not a readable file of this library: {error}") from error
    if version not in (1, FORMAT):
        raise ValueError(f"{path} must have format 1 or {FORMAT}, got {version!r}.")
    if checksum is not None and checksum != _checksum(named):
        raise ValueError(f"{path} must have the checksum it was written with, got another one.")
    del named[_META]
    return Saved({name.removeprefix("a/"): array for name, array in named.items()}, meta)


class Journal:
    """A file of JSON lines that only grows, and of which a checkpoint knows how far it went.

    Each entry is written once, so that what a round costs does not grow with the rounds before.

    Parameters
    ----------
    path : Path
        The file; its folder is made when missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size, self._digest = 0, hashlib.sha256()

    @property
    def mark(self) -> dict[str, Any]:
        """Where the journal ends, to be kept with a checkpoint."""
        return {"file": self.path.name, "bytes": self._size, "sha256": self._digest.hexdigest()}

    def append(self, entries: Iterable[Any]) -> None:
        """Write entries after the last one; what a run that was given up wrote there is lost."""
        lines = b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT
        with os.fdopen(os.open(self.path, flags, 0o600), "r+b") as stream:
            stream.truncate(self._size)
            stream.seek(self._size)
            stream.write(lines)
            stream.flush()
            os.fsync(stream.fileno())
        self._size += len(lines)
        self._digest.update(lines)

    @classmethod
    def read(cls, folder: Path, mark: Mapping[str, Any]) -> tuple[Journal, list[Any]]:
        """Return the journal as far as ``mark`` says, and its entries.

        Raises
        ------
        ValueError
            If the file is not there, is shorter, or says something else.
        """
        journal, size = cls(folder / Path(str(mark["file"])).name), mark["bytes"]
        try:
            if not isinstance(size, int) or not 0 <= size <= journal.path.stat().st_size:
                raise ValueError(f"{journal.path} must have {size} bytes or more.")
            with journal.path.open("rb") as stream:
                lines = stream.read(size)
        except OSError as error:
            raise ValueError(f"{journal.path} cannot be read: {error}.") from error
        journal._size = len(lines)
        journal._digest.update(lines)
        if journal.mark != dict(mark):
            raise ValueError(f"{journal.path} must have the checksum it was written with.")
        return journal, [json.loads(line) for line in lines.splitlines()]


def _checksum(named: Mapping[str, NDArray[Any]]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and numbers."""
    digest = hashlib.sha256()
    for name in sorted(named):
        array = named[name]
        digest.update(f"{name}:{array.dtype.str}{array.shape}:".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def rounds_in(folder: Path) -> list[int]:
    """Return the rounds that `folder` holds files of, ascending."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = map(_NAME.fullmatch, names)
    return sorted(int(match[1]) for match in found if match)


def round_path(folder: Path, round_: int) -> Path:
    """Return the file of ``round_`` in ``folder``."""
    return folder / f"round-{round_:06d}.npz"


def save_round(
    folder: Path, round_: int, arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]
) -> None:
    """Save one round; keep it and the round before it, and nothing of an abandoned future."""
    path = round_path(folder, round_)
    save(path, arrays, meta)
    if _WAITING.get() is None:
        _forget(path)


def _forget(path: Path) -> None:
    """Delete the files of all rounds in the folder but this one and the one before it."""
    rounds, round_ = rounds_in(path.parent), int(path.stem.removeprefix("round-"))
    kept = [r for r in rounds if r <= round_][-2:]
    for stale in set(rounds) - set(kept):
        round_path(path.parent, stale).unlink(missing_ok=True)
