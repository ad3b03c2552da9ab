"""Bytes as finite floats: the only numbers that pass the checks of Flower replies."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.npy import read_files, write_files

Array = NDArray[Any]

#: The highest byte of every number that carries bytes: it makes the number finite.
_MARK = 0x3F


def pack(data: bytes) -> NDArray[np.float64]:
    """Return bytes as an array of finite numbers, seven bytes in each; the first says how many."""
    rows = -(-len(data) // 7) + 1
    padded = struct.pack("<Q", len(data))[:7] + data.ljust(7 * (rows - 1), b"\0")
    buffer = np.full((rows, 8), _MARK, dtype=np.uint8)
    buffer[:, :7] = np.frombuffer(padded, dtype=np.uint8).reshape(rows, 7)
    return buffer.view("<f8")[:, 0].astype(np.float64, copy=True)


def unpack(array: Array) -> bytes:
    """Return the bytes that `pack` was given, or raise a ValueError."""
    numbers = np.ascontiguousarray(array, dtype="<f8")
    if numbers.ndim == 1 and len(numbers):
        buffer = numbers.view(np.uint8).reshape(-1, 8)
        length = int.from_bytes(buffer[0, :7].tobytes(), "little")
        if (buffer[:, 7] == _MARK).all() and 0 <= 7 * (len(buffer) - 1) - length < 7:
            return buffer[1:, :7].tobytes()[:length]
    raise ValueError("these numbers hold no bytes")


def pack_arrays(arrays: Mapping[str, Array]) -> NDArray[np.float64]:
    """Return named arrays of any numbers, NaN among them, as one array of finite ones."""
    return pack(write_files([text_array(list(arrays)), *arrays.values()]))


def unpack_arrays(array: Array) -> dict[str, Array]:
    """Return what `pack_arrays` was given, or raise a ValueError; nothing larger is allocated."""
    try:
        names, *arrays = read_files(unpack(array))
        return dict(zip(texts_of(names), arrays, strict=True))
    except ValueError as error:
        raise ValueError(f"these numbers hold no arrays: {error}") from error


def text_array(texts: Sequence[str]) -> NDArray[np.uint8]:
    """Return several texts as one array of bytes."""
    return np.frombuffer(json.dumps(list(texts)).encode(), dtype=np.uint8)


def texts_of(array: Array) -> list[str]:
    """Return what `text_array` was given, or raise a ValueError."""
    try:
        texts = json.loads(array.tobytes() if array.dtype == np.uint8 else "null")
    except (RecursionError, ValueError):
        texts = None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("these bytes hold no texts")
    return texts
