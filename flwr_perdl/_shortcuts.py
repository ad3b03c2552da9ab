"""Shortcuts past the usual ways of Flower and of Python's garbage collector, and what each saves.

Everything here could go, and no result would change. Each stays because without it a PerMA round of
4,000 clients in process takes more than a tenth more processor time: ``python
benchmarks/shortcuts.py`` measures that, and benchmarks/results/shortcuts.md has its table.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import lru_cache
from io import BytesIO
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, Message, RecordDict
from numpy.lib import format as npy

from flwr_perdl._checks import FLOATS, Matrix

Record = TypeVar("Record", bound=MutableMapping[str, Any])
Entry = TypeVar("Entry")

#: What Flower calls an array in NumPy's ``.npy`` format.
NPY = "numpy.ndarray"
#: New objects after which garbage is searched for; Python's own figure is 700.
_RARE = 100_000


def filled(record: Record, entries: Mapping[str, Any]) -> Record:
    """Return ``record`` after ``record.update(entries)``, for entries of the kind it takes.

    Flower's records make two type aliases for every entry that they check, which takes longer
    than all else: most of a small message's time.
    """
    held = record.__dict__.get("_data")
    if isinstance(held, dict):
        held.update(entries)
    else:
        record.update(entries)
    return record


def entries(record: Mapping[str, Entry]) -> Mapping[str, Entry]:
    """Return what a record holds, not copied, as a mapping that is read faster than the record."""
    held = record.__dict__.get("_data")
    return held if isinstance(held, dict) else record


def encode(array: Matrix) -> Array:
    """Return what Flower's ``Array(array)`` is."""
    array = np.asarray(array, order="C")  # ascontiguousarray would make a row of one number
    if array.dtype not in FLOATS:
        return Array(array)
    empty = _empty(array.dtype, array.shape)
    full = Array.__new__(Array)  # its constructor takes longer than all else here
    full.__dict__.update(empty.__dict__, data=empty.data + array.tobytes())
    return full


@lru_cache(maxsize=256)
def _empty(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Return the Array of a C-contiguous array, with a header and no numbers yet."""
    stream = BytesIO()
    layout = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(stream, layout)
    return Array(str(dtype), shape, NPY, stream.getvalue())


def alike(message: Message, content: RecordDict, **changed: Any) -> Message | None:
    """Return a copy of ``message`` with this content and these fields of its metadata.

    The constructor checks and stamps each of a thousand messages that are alike, which takes longer
    than what else is done for them. None where Flower keeps its fields under other names.
    """
    parts, fields = vars(message), vars(message.metadata)
    if not ({"_metadata", "_content"} <= parts.keys() and changed.keys() <= fields.keys()):
        return None
    metadata: Any = object.__new__(type(message.metadata))
    metadata.__dict__.update(fields, **changed)
    copied: Message = object.__new__(type(message))
    copied.__dict__.update(parts, _metadata=metadata, _content=content)
    return copied


@contextmanager
def rare_collections() -> Iterator[None]:
    """Have the search for cyclic garbage wait for a hundred thousand new objects instead of 700.

    The records of a round, tens of thousands with a thousand clients, live until the next. Python
    takes them for garbage to come, and goes through them several times a round.
    """
    thresholds = gc.get_threshold()
    if thresholds[0]:  # 0: never
        gc.set_threshold(max(thresholds[0], _RARE), *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
