"""Arrays on disk that survive a crash: atomic, versioned ``.npz`` files without pickle.

Each file has a checksum of its contents, and only its owner may read it. Arrays are stored
uncompressed: reading takes as much memory as the file has bytes, and a file whose header announces
more is rejected before it is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.checks import check_count
from flwr_perdl.core.npy import view_file

__all__ = ["Saved", "load", "replacing", "save"]

FORMAT = 4
_META, _CHECKSUM = "meta", "checksum"
_NAME = re.compile(r"round-(\d{6})\.npz")
#: The largest round that a file can be of.
LAST_ROUND = 999_999
#: How files are called until they are complete, and after how many seconds one that nobody has
#: written to is what a process that died has left.
_PREFIX, _SUFFIX = ".flwr-perdl-", ".tmp"
_STALE = 3600.0
#: What a compressed archive may unpack to: so many times its own bytes, or so many bytes.
_TIMES, _BYTES = 20, 2**24


class OtherFormatError(ValueError):
    """A file is whole, and of another version of this library."""


class Saved(NamedTuple):
    """Contents of a file: named arrays and a JSON-like record.

    Examples
    --------
    >>> from flwr_perdl.core.files import Saved
    >>> Saved({}, {"round": 3}).meta["round"]
    3
    """

    arrays: dict[str, NDArray[Any]]
    meta: dict[str, Any]


def save(path: Path, arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]) -> None:
    """Write ``arrays`` and ``meta`` to ``path``, atomically.

    Parameters
    ----------
    path : Path
        The file; its folder is created if missing.
    arrays : mapping of str to ndarray
        Arrays of numbers.
    meta : mapping
        Anything that JSON can represent.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> import numpy as np
    >>> from flwr_perdl.core.files import load, save
    >>> with TemporaryDirectory() as folder:
    ...     save(Path(folder, "state.npz"), {"atoms": np.eye(2)}, {"round": 3})
    ...     print(load(Path(folder, "state.npz")).meta)
    {'format': 4, 'round': 3}
    """
    named: dict[str, Any] = {f"a/{name}": np.asarray(array) for name, array in arrays.items()}
    named[_META] = np.array(json.dumps({"format": FORMAT, **meta}))
    named[_CHECKSUM] = np.array(_checksum(named))
    with replacing(path) as stream:
        np.savez(stream, **named)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Let the block write a file that replaces ``path`` atomically, or leaves it unchanged.

    Parameters
    ----------
    path : Path

    Returns
    -------
    context manager
        Of the open binary file.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from flwr_perdl.core.files import replacing
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "note.txt")
    ...     with replacing(path) as file:
    ...         written = file.write(b"whole")
    ...     print(path.read_text())
    whole
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(path.parent)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=_PREFIX, suffix=_SUFFIX)
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    """Wait until the names of a folder's files are on the disk."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows has no sync of folders
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_stale(folder: Path) -> None:
    """Delete the unfinished files that processes which died have left in a folder."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if not (entry.name.startswith(_PREFIX) and entry.name.endswith(_SUFFIX)):
                continue
            with suppress(FileNotFoundError):  # somebody else was faster
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > _STALE:
                    os.unlink(entry.path)


def load(path: Path) -> Saved:
    """Read a file of `save`.

    Parameters
    ----------
    path : Path

    Returns
    -------
    Saved

    Raises
    ------
    ValueError
        If the file cannot be read, is not ours, has another version, or was changed.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> import numpy as np
    >>> from flwr_perdl.core.files import load, save
    >>> with TemporaryDirectory() as folder:
    ...     save(Path(folder, "state.npz"), {"atoms": np.eye(2)}, {"round": 3})
    ...     print(load(Path(folder, "state.npz")).arrays["atoms"])
    [[1. 0.]
     [0. 1.]]
    """
    try:
        named = members(path)
        meta = json.loads(str(named[_META]))
        version, checksum = meta["format"], str(named.pop(_CHECKSUM, ""))
    except Exception as error:
        raise ValueError(f"{path} is not a readable file of this library: {error}") from error
    if version != FORMAT:
        raise OtherFormatError(f"{path} must have format {FORMAT}, got {version!r}.")
    if checksum != _checksum(named):
        raise ValueError(f"{path} must have the checksum it was written with, got another one.")
    del named[_META]
    return Saved({name.removeprefix("a/"): array for name, array in named.items()}, meta)


def members(path: Path, *, compressed: bool = False) -> dict[str, NDArray[Any]]:
    """Return the arrays of an .npz file by name; its size bounds the memory that this takes.

    An archive may only be ``compressed`` if the caller says so, and then 20 times, or to 16 MiB.
    """
    if not path.is_file():  # to open a pipe waits for ever
        raise ValueError("it is no regular file")
    with path.open("rb") as stream, ZipFile(stream) as archive:
        found, size = archive.infolist(), os.fstat(stream.fileno()).st_size
        most = max(_TIMES * size, _BYTES) if compressed else size
        # Other methods unpack more than is announced before they stop.
        methods = {ZIP_STORED, ZIP_DEFLATED} if compressed else {ZIP_STORED}
        announced = sum(member.file_size for member in found)
        if announced > most or not {member.compress_type for member in found} <= methods:
            raise ValueError(
                f"its {size} bytes are said to hold {announced}, or are compressed in another way "
                "than is allowed"
            )
        named = {}
        for member in found:
            data = archive.read(member)
            view, end = view_file(data)
            if end != len(data):
                raise ValueError(f"{member.filename} has more bytes than its shape says")
            named[member.filename.removesuffix(".npy")] = view.copy("A")
    return named


@contextmanager
def private(path: Path) -> Iterator[BinaryIO]:
    """Open a file to read and write that only its owner may read, and make it when missing.

    A symbolic link is not followed, and an OSError in the block names the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    refuse_link(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} must be a regular file, got something else.")
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    try:
        with os.fdopen(os.open(path, flags, 0o600), "r+b") as stream:
            yield stream
    except OSError as error:
        error.filename = str(path)  # one of a full disk has none
        raise


@contextmanager
def locking(path: Path) -> Iterator[None]:
    """Let one process or thread at a time into the block; the lock goes with who holds it."""
    with private(path) as stream:
        if os.name == "nt":
            import_module("msvcrt").locking(stream.fileno(), 1, 1)
        else:
            import_module("fcntl").flock(stream, 2)  # LOCK_EX
        yield


class Journal:
    """A file of JSON lines that only grows, and of which a checkpoint knows how far it went.

    Each entry is written once, so that what a round costs does not grow with the rounds before.
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
        with private(self.path) as stream:
            stream.truncate(self._size)
            stream.seek(self._size)
            stream.write(lines)
            stream.flush()
            os.fsync(stream.fileno())
        self._size += len(lines)
        self._digest.update(lines)

    @classmethod
    def read(cls, folder: Path, mark: Mapping[str, Any]) -> tuple[Journal, list[Any]]:
        """Return the journal as far as ``mark`` says, and its entries; or raise a ValueError."""
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
    """Return the file of ``round_``, at most 999,999, in ``folder``."""
    check_count("round", round_, 0, LAST_ROUND)
    return folder / f"round-{round_:06d}.npz"


def save_round(
    folder: Path,
    round_: int,
    arrays: Mapping[str, NDArray[Any]],
    meta: Mapping[str, Any],
    *,
    kept: int = 2,
) -> None:
    """Save one round; keep the last ``kept`` up to it, and nothing of an abandoned future."""
    save(round_path(folder, round_), arrays, meta)
    rounds = rounds_in(folder)
    for stale in set(rounds) - set([r for r in rounds if r <= round_][-kept:]):
        round_path(folder, stale).unlink(missing_ok=True)


def refuse_link(path: Path) -> None:
    """Raise a ValueError if there is a symbolic link at ``path``.

    Whoever put it there would have a file or folder elsewhere changed, or read as this one.
    """
    if path.is_symlink():
        raise ValueError(f"{path} must not be a symbolic link, got one to {os.readlink(path)!r}.")
