from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flwr_perdl import _checks


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.ones((2, 2), dtype=np.float16), "X must be float64 or float32, got float16."),
        (np.ones((2, 2), dtype=int), "X must be float64 or float32, got int64."),
        (np.ones(3), r"X must have 2 dimensions, got shape \(3,\)."),
        (np.ones((0, 4)), r"X must have at least 1 row\(s\), got shape \(0, 4\)."),
        (np.ones((2, 3)), r"X must have 4 columns, got shape \(2, 3\)."),
        (np.array([[1, np.nan, np.inf, 0]]), "X must be finite, got 2 NaN or infinite value"),
    ],
)
def test_a_bad_array_is_named_with_rule_and_value(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _checks.check_array("X", value, min_rows=1, columns=4)


def test_a_good_array_keeps_its_dtype_and_is_not_modified() -> None:
    X = np.ones((4, 3), dtype=np.float32).T
    checked = _checks.check_array("X", X)
    assert checked.dtype == np.float32
    assert checked.flags.c_contiguous
    assert X.flags.f_contiguous


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1.0, "k must be an integer, got 1.0."),
        (True, "k must be an integer, got True."),
        (0, "k must be between 1 and 5, got 0."),
        (6, "k must be between 1 and 5, got 6."),
    ],
)
def test_counts(value: Any, message: str) -> None:
    assert _checks.check_count("k", np.int64(5), 1, 5) == 5
    with pytest.raises(ValueError, match=message):
        _checks.check_count("k", value, 1, 5)
    with pytest.raises(ValueError, match="k must be at least 0, got -1"):
        _checks.check_count("k", -1)


def test_reals_and_choices() -> None:
    assert _checks.check_real("f", 1, 0, 1, open_low=True) == 1.0
    with pytest.raises(ValueError, match=r"f must be in \(0, 1\], got 0."):
        _checks.check_real("f", 0, 0, 1, open_low=True)
    with pytest.raises(ValueError, match=r"f must be in \[0, inf\], got nan."):
        _checks.check_real("f", float("nan"), 0)
    with pytest.raises(ValueError, match=r"f must be a number, got 'x'."):
        _checks.check_real("f", "x", 0)
    with pytest.raises(ValueError, match=r"m must be one of 'a', 'b', got 'c'."):
        _checks.check_choice("m", "c", ["a", "b"])
