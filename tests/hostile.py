"""Inputs that a function must either serve or refuse in one sentence, and what tells the two."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

#: What is done to the numbers of a good array.
KINDS = (
    "as they are",
    "zero",
    "negative",
    "NaN",
    "infinite",
    "huge",
    "very large",
    "small",
    "tiny",
    "float32",
    "integers",
    "booleans",
    "one axis less",
    "one axis more",
    "no rows",
    "one row",
    "fewer columns",
)
#: Numbers that take a count's or an option's place.
NUMBERS = (0, 1, 2, 3, 50, -1, True, 1.5, 0.5, 1e-300, float("nan"), float("inf"), "two", None)


def spoiled(array: np.ndarray, kind: str) -> np.ndarray:
    """Return a float array in which something is unusual or wrong."""
    changed = array.copy()
    if kind == "zero":
        return np.zeros_like(array)
    if kind in ("NaN", "infinite"):
        changed.flat[: 1 if array.size else 0] = np.nan if kind == "NaN" else -np.inf
        return changed
    scales = {"negative": -1.0, "huge": 1e300, "very large": 1e160, "small": 1e-170, "tiny": 1e-310}
    if kind == "negative":
        return -np.abs(array)
    if kind in scales:
        return array * scales[kind]
    types = {"float32": np.float32, "integers": np.int64, "booleans": np.bool_}
    if kind in types:
        return array.astype(types[kind])
    shapes: dict[str, Callable[[], np.ndarray]] = {
        "one axis less": lambda: array[0],
        "one axis more": lambda: array[None],
        "no rows": lambda: array[:0],
        "one row": lambda: array[:1],
        "fewer columns": lambda: array[..., :-1],
    }
    return shapes[kind]() if kind in shapes else changed


def arguments(good: Mapping[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw arguments of which one or two are spoiled; the others are as they should be."""

    def spoil(names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
        return st.fixed_dictionaries({name: _instead(good[name]) for name in names}).map(
            lambda bad: {**good, **bad}
        )

    names = [name for name, value in good.items() if _spoilable(value)]
    return st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True).flatmap(spoil)


def _spoilable(value: Any) -> bool:
    numbers = isinstance(value, (int, float)) and not isinstance(value, bool)
    return numbers or isinstance(value, np.ndarray) or _arrays(value)


def _arrays(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], np.ndarray)


def _instead(value: Any) -> st.SearchStrategy[Any]:
    if isinstance(value, np.ndarray):
        return st.sampled_from(KINDS).map(lambda kind: spoiled(value, kind))
    if not _arrays(value):
        return st.sampled_from(NUMBERS)
    each = st.sampled_from(KINDS)
    return st.one_of(
        each.map(lambda kind: [spoiled(array, kind) for array in value]),
        each.map(lambda kind: [spoiled(value[0], kind), *value[1:]]),
        st.sampled_from([[], value[:1], [*value, value[0]]]),
    )


def check_drawn(
    data: st.DataObject,
    call: Callable[..., Any],
    good: Mapping[str, Any],
    variants: Mapping[str, Sequence[Any]] = {},
) -> None:
    """Assert that a call in a drawn variant serves or refuses arguments, some of them spoiled."""
    chosen = {name: data.draw(st.sampled_from(values)) for name, values in variants.items()}
    bad = data.draw(arguments(good))
    right_or_refused(lambda: call(**chosen, **bad))


def right_or_refused(call: Callable[[], Any]) -> None:
    """Assert that a call returns finite numbers, or refuses in one sentence of the project."""
    try:
        result = call()
    except (TypeError, ValueError) as error:
        text = str(error)
        assert text.endswith("."), text
        assert "\n" not in text, text
        assert any(word in text for word in ("must", "needs", "has no anchors")), text
    else:
        _assert_finite(result)


def _assert_finite(result: Any) -> None:
    if isinstance(result, Mapping):
        result = list(result.values())
    if isinstance(result, (np.ndarray, float, np.floating)):
        assert np.isfinite(result).all(), result
    elif isinstance(result, Sequence) and not isinstance(result, str):
        for part in result:
            _assert_finite(part)
