"""Arrays in NumPy's ``.npy`` format, read where their bytes lie: nothing that has not arrived.

`numpy.load` takes archives and pickles too, and allocates what a header says before it looks for
the numbers; what comes from others is read here.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from io import BytesIO
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

Array = NDArray[Any]

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
def _layout(
    header: bytes,
) -> tuple[np.dtype[np.generic], tuple[int, ...], Literal["C", "F"], int]:
    """Return dtype, shape, order and bytes (-1: of a negative shape) of an array by its header."""
    read, fortran, dtype = npy.read_array_header_1_0(BytesIO(header))
    shape = tuple(map(int, read))  # True is an integer to NumPy's reader, and not to its arrays
    np.broadcast_to(np.empty((), dtype), [max(n, 0) for n in shape])
    size = -1 if min(shape, default=0) < 0 else max(dtype.itemsize, 1) * prod(shape)
    return dtype, shape, "F" if fortran else "C", size
