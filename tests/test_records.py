"""Records: the bytes are Flower's own, and what is read belongs to the reader."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from flwr_perdl.protocol.records import decode, encode, read_parts, reply_to
from tests.grids import asks

FLOATS = arrays.arrays(
    st.sampled_from([np.float64, np.float32]),
    arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)


@given(FLOATS)
def test_arrays_have_flowers_own_bytes(array: np.ndarray) -> None:
    ours, theirs = encode(array), Array(array)
    assert (ours.dtype, ours.shape, ours.stype) == (theirs.dtype, theirs.shape, theirs.stype)
    assert ours.data == theirs.data
    np.testing.assert_array_equal(decode(ours), theirs.numpy())


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(12.0).reshape(3, 4)[:, ::2],
        np.arange(3),
        np.array([True, False]),
        np.arange(3.0).astype(">f8"),
        np.array(["a", "bc"]),
        np.zeros((0, 4)),
        np.float32(2.5),
    ],
)
def test_any_array_is_read_as_numpy_would(array: np.ndarray) -> None:
    sent = Array(np.asarray(array))
    read, expected = decode(sent), sent.numpy()
    np.testing.assert_array_equal(read, expected)
    assert read.dtype == expected.dtype
    assert read.flags.f_contiguous == expected.flags.f_contiguous


def test_broken_bytes_are_refused() -> None:
    whole = encode(np.ones(3))
    for data in (whole.data[:-1], b"", whole.data[:9], b"\x93NUMPY\x01\x00\x05\x00what?"):
        with pytest.raises((ValueError, EOFError)):
            decode(Array("float64", (3,), "numpy.ndarray", data))
    with pytest.raises(TypeError):
        decode(Array("float64", (3,), "torch", whole.data))


def test_objects_are_neither_sent_nor_read() -> None:
    with pytest.raises(ValueError, match="allow_pickle"):
        encode(np.array([object()]))
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(8)
    with pytest.raises(ValueError, match="allow_pickle"):
        decode(Array("object", (1,), "numpy.ndarray", data))


def request(value: float = 1.0, step: str = "go", kind: str = "train") -> Message:
    content = RecordDict(
        {"arrays": ArrayRecord([np.full(2, value)]), "config": ConfigRecord({"step": step})}
    )
    return asks(content, 3, kind)


@pytest.mark.parametrize("metrics", [{"list": ["x"]}, {"bytes": b"x"}, {3: 1.0}, {3: "x"}])
def test_metrics_that_are_no_numbers_with_names_are_refused(metrics: dict[Any, Any]) -> None:
    with pytest.raises(TypeError, match=r"^metrics"):
        reply_to(request(), None, 1, metrics)


def test_large_numbers_are_finite_and_infinite_ones_are_not() -> None:
    def read(*arrays: Any) -> None:
        read_parts([encode(array).data for array in arrays], {"num-examples": 1})

    read(np.array([1e300, -1e300]))
    read(np.array([1e38], np.float32))
    for bad in (np.inf, -np.inf, np.nan):
        with pytest.raises(ValueError, match="array 1"):
            read(np.ones(1), np.array([1.0, bad]))
    with pytest.raises(ValueError, match="array 0"):
        read(np.arange(2))
