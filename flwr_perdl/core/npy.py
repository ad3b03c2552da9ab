"""Arrays in NumPy's ``.npy`` format, read where their bytes lie: nothing that has not arrived.

`numpy.load` takes archives and pickles too, and allocates what a header says before it looks for
the numbers; what comes from others is read here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from io import BytesIO
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from flwr_perdl.core.arrays import Array

#: How an ``.npy`` file of version 1.0 begins; two bytes with the header's length come next.
_MAGIC = npy.magic(1, 0)
_PREFIX = len(_MAGIC) + 2
#: Kinds of dtypes of numbers: booleans, integers, reals, complex ones.
_NUMBERS = "biufc"


def write_files(arrays: Iterable[Array]) -> bytes:
    """Return the files of several arrays, one after the other."""
    stream = BytesIO()
    for array in arrays:
        npy.write_array(stream, np.asarray(array), version=(1, 0), allow_pickle=False)
    return stream.getvalue()


@lru_cache(maxsize=256)
def file_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return how the file of an array in the order of its rows begins."""
    stream = BytesIO()
    layout = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(stream, layout)
    return stream.getvalue()


def read_files(data: bytes) -> list[Array]:
    """Return the arrays of numbers that `write_files` was given: copies; or raise a ValueError."""
    arrays, at = [], 0
    while at < len(data):
        view, at = view_file(data, at)
        if view.dtype.kind not in _NUMBERS:
            raise ValueError(f"an array holds no numbers, but {view.dtype}")
        arrays.append(view.copy("A"))
    return arrays


def view_file(data: bytes, at: int = 0) -> tuple[Array, int]:
    """Return the array of a file where it lies, which cannot be written to, and where it ends.

    A ValueError says that it cannot be read, holds objects, or is shorter than its header says.
    """
    if not data.startswith(_MAGIC, at):
        raise ValueError("an array is no .npy file of version 1.0")
    start = at + _PREFIX + int.from_bytes(data[at + len(_MAGIC) : at + _PREFIX], "little")
    try:
        dtype, shape, order, size = _layout(data[at + len(_MAGIC) : start])
    except Exception as error:  # NumPy reads the header as Python's own syntax
        raise ValueError(f"an array has an unreadable header: {error}") from None
    if dtype.hasobject:
        raise ValueError("an array holds objects: they need allow_pickle, which is never given")
    if size < 0 or len(data) - start < size:
        raise ValueError(f"an array has fewer bytes than its shape {shape} says")
    view: Array = np.ndarray(shape, dtype, data, start, order=order)
    return view, start + size


@lru_cache(maxsize=256)
def _layout(header: bytes) -> tuple[np.dtype[np.generic], tuple[int, ...], Literal["C", "F"], int]:
    """Return dtype, shape, order and bytes (-1: of a negative shape) of an array by its header."""
    read, fortran, dtype = npy.read_array_header_1_0(BytesIO(header))
    shape = tuple(map(int, read))  # True is an integer to NumPy's reader, and not to its arrays
    np.broadcast_to(np.empty((), dtype), [max(n, 0) for n in shape])
    size = -1 if min(shape, default=0) < 0 else max(dtype.itemsize, 1) * prod(shape)
    return dtype, shape, "F" if fortran else "C", size


def whole_file(array: Array) -> bytes | None:
    """Return the bytes of the file that an array is the view of, None if it is of none."""
    data = array.base
    while isinstance(data, np.ndarray):  # of a view, as one with another first axis
        data = data.base
    if not isinstance(data, bytes) or not array.flags.c_contiguous:
        return None
    header = file_header(array.dtype, array.shape)
    whole = len(data) == len(header) + array.nbytes and data.startswith(header)
    return data if whole else None


def file_of(array: Array) -> bytes:
    """Return an array's file; that of one which is the view of its file is not written again."""
    array = np.asarray(array, order="C")  # ascontiguousarray would make a row of one number
    if (whole := whole_file(array)) is not None:
        return whole
    # Joined, since a large array's bytes would be copied once more by a sum.
    return b"".join((file_header(array.dtype, array.shape), array.reshape(-1).view(np.uint8).data))


def as_file(array: Array) -> Array:
    """Return an array as the view of its file, which it is written to here or was before."""
    return view_file(file_of(array))[0]


def pack(data: bytes) -> NDArray[np.uint8]:
    """Return bytes as an array."""
    return np.frombuffer(data, dtype=np.uint8)


def unpack(array: Array) -> bytes:
    """Return the bytes that `pack` was given, or raise a ValueError."""
    if array.dtype != np.uint8 or array.ndim != 1:
        raise ValueError("these numbers are no bytes")
    return array.tobytes()


def pack_arrays(arrays: Mapping[str, Array]) -> Array:
    """Return named arrays of any numbers, NaN among them, as one array of bytes."""
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
    return pack(json.dumps(list(texts)).encode())


def texts_of(array: Array) -> list[str]:
    """Return what `text_array` was given, or raise a ValueError."""
    try:
        texts = json.loads(array.tobytes() if array.dtype == np.uint8 else "null")
    except (RecursionError, ValueError):
        texts = None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("these bytes hold no texts")
    return texts
