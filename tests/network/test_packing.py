from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_perdl.core.packing import pack, pack_arrays, unpack, unpack_arrays


@given(st.binary(max_size=100))
def test_bytes_travel_as_finite_numbers(data: bytes) -> None:
    numbers = pack(data)
    assert numbers.dtype == np.float64
    assert np.isfinite(numbers).all()
    assert len(numbers) == 1 + -(-len(data) // 7)
    assert unpack(numbers) == data


@pytest.mark.parametrize(
    "numbers",
    [np.zeros(0), np.zeros(3), np.ones((2, 2)), pack(b"abc")[:1], np.append(pack(b"abc"), 0.0)],
)
def test_other_numbers_hold_no_bytes(numbers: np.ndarray) -> None:
    with pytest.raises(ValueError, match="hold no bytes"):
        unpack(numbers)


def test_arrays_travel_as_they_are() -> None:
    arrays = {
        "odd": np.array([[np.nan, -np.inf]], dtype=np.float32),
        "count": np.arange(3),
        "flag": np.array(True),
        "two\nlines": np.ones(1),
        "": np.ones((2, 3), order="F"),
        "none": np.zeros((1, 0)),
    }
    packed = pack_arrays(arrays)
    assert np.isfinite(packed).all()
    opened = unpack_arrays(packed)
    assert list(opened) == list(arrays)
    for name, array in arrays.items():
        assert opened[name].dtype == array.dtype
        np.testing.assert_array_equal(opened[name], array)


def test_objects_do_not_travel() -> None:
    with pytest.raises(ValueError, match="Object arrays"):
        unpack_arrays(pack_arrays({"code": np.array([print], dtype=object)}))
