"""Bytes as numbers: Flower's replies carry finite floats, and nothing else passes their checks."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from io import BytesIO
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

#: The highest byte of every number that carries bytes: it is finite whatever they are.
_MARK = 0x3F


def pack(data: bytes) -> NDArray[np.float64]:
    """Return bytes as an array of finite numbers, seven bytes in each; the first says how many."""
    rows = -(-len(data) // 7) + 1
    padded = struct.pack("<Q", len(data))[:7] + data.ljust(7 * (rows - 1), b"\0")
    buffer = np.full((rows, 8), _MARK, dtype=np.uint8)
    buffer[:, :7] = np.frombuffer(padded, dtype=np.uint8).reshape(rows, 7)
    return buffer.view("<f8")[:, 0].astype(np.float64, copy=True)


def unpack(array: Array) -> bytes:
    """Return the bytes that `pack` made an array of.

    Raises
    ------
    ValueError
        If it did not.
    """
    numbers = np.ascontiguousarray(array, dtype="<f8")
    if numbers.ndim == 1 and len(numbers):
        buffer = numbers.view(np.uint8).reshape(-1, 8)
        length = int.from_bytes(buffer[0, :7].tobytes(), "little")
        if (buffer[:, 7] == _MARK).all() and 0 <= 7 * (len(buffer) - 1) - length < 7:
            return buffer[1:, :7].tobytes()[:length]
    raise ValueError("these numbers hold no bytes")


def pack_arrays(arrays: Mapping[str, Array]) -> NDArray[np.float64]:
    """Return named arrays of any numbers, NaN among them, as one array of finite ones."""
    stream = BytesIO()
    named: dict[str, Any] = dict(arrays)
    np.savez(stream, **named)
    return pack(stream.getvalue())


def unpack_arrays(array: Array) -> dict[str, Array]:
    """Return what `pack_arrays` was given.

    Raises
    ------
    ValueError
        If the array does not come from there.
    """
    try:
        with np.load(BytesIO(unpack(array)), allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except (AttributeError, BadZipFile, EOFError, KeyError, OSError, TypeError) as error:
        raise ValueError("these numbers hold no arrays") from error
