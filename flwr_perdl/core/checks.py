"""Argument checks for your own code: the value, or a ValueError of one sentence.

The sentence names the argument, the rule and the value. ``Matrix`` is the type of all arrays of
real numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from functools import lru_cache
from math import isfinite
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.arrays import observed, squared_norm

__all__ = ["Matrix", "check_array", "check_choice", "check_count", "check_real"]

#: An array of float64 or float32.
Matrix = NDArray[np.floating[Any]]

#: The dtypes of arrays that are computed with.
FLOATS = (np.dtype(np.float64), np.dtype(np.float32))
#: The most that a step or a weight may be: products with data stay in float32's range.
LARGE = 1e30
#: The most clusters that are looked for: work and memory grow with them before there is an answer.
MOST_CLUSTERS = 10_000
#: The most iterations, and repetitions, of what ends only when all are done.
MOST_ITERATIONS = 10**6


def check_array(
    name: str,
    value: object,
    *,
    ndim: int = 2,
    min_rows: int = 0,
    rows: int | None = None,
    columns: int | None = None,
    squares: bool = False,
    missing: bool = False,
    floor: float | None = None,
) -> Matrix:
    """Return ``value`` as a C-contiguous float array, or raise a ValueError.

    Parameters
    ----------
    name : str
        The argument's name, for the message.
    value : array_like
        The array to check; never modified.
    ndim, min_rows : int
        Required number of dimensions, and minimum length of the first axis.
    rows, columns : int or None
        Required length of the last axis but one, and of the last; None accepts any.
    squares : bool
        Whether the sum of squares must be within the dtype's range too, with room for sums of
        products. An array of zeros is allowed.
    missing : bool
        Whether NaN is allowed, as a missing entry.
    floor : float or None
        The rule of `check_magnitude` for its largest entry; None: no rule.

    Returns
    -------
    ndarray
        float64, or float32 where float32 was given.

    Raises
    ------
    ValueError
        If dtype, number of dimensions, shape or a value is not as required.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.core.checks import check_array
    >>> check_array("X", [[1.0, 2.0]], columns=2)
    array([[1., 2.]])
    """
    array = as_array(name, value)
    if array.dtype not in FLOATS:
        raise ValueError(f"{name} must be float64 or float32, got {array.dtype}.")
    shape = array.shape
    if len(shape) != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions, got shape {shape}.")
    if shape[0] < min_rows:
        raise ValueError(f"{name} must have at least {min_rows} row(s), got shape {shape}.")
    if rows is not None and shape[-2] != rows:
        raise ValueError(f"{name} must have {rows} row(s), got shape {shape}.")
    if columns is not None and shape[-1] != columns:
        raise ValueError(f"{name} must have {columns} columns, got shape {shape}.")
    checked: Matrix = np.ascontiguousarray(array)
    energy = squared_norm(checked)
    if not isfinite(energy):
        wrong = np.isinf(checked) if missing else ~np.isfinite(checked)
        if bad := np.count_nonzero(wrong):
            rule, found = ("finite or NaN", "") if missing else ("finite", "NaN or ")
            raise ValueError(f"{name} must be {rule}, got {bad} {found}infinite value(s).")
        energy = squared_norm(observed(checked))
    if squares:
        least = _least_square(checked.dtype)
        if not least <= energy <= 1 / least and observed(checked).any():
            raise ValueError(
                f"{name} must be rescaled, as the squares of its values leave the range of "
                f"{checked.dtype}, got values up to {np.abs(observed(checked)).max():.3g}."
            )
    return checked if floor is None else check_magnitude(name, checked, floor=floor)


def as_array(name: str, value: object) -> NDArray[Any]:
    """Return NumPy's array of a value, or raise a ValueError if it has none of one shape."""
    try:
        return np.asarray(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be an array, got {brief_repr(value)}.") from None


def check_each(name: str, values: Any, what: str = "array", **rules: Any) -> list[Matrix]:
    """Return one checked array per client or node, all with as many columns, at least one.

    ``rules`` are those of `check_array`; ``what`` says in the message what there is none of.
    """
    if not len(check_list(name, values)):
        raise ValueError(f"{name} must hold at least one {what}, got none.")
    checked = [check_array(f"{name}[0]", values[0], **rules)]
    columns = checked[0].shape[-1]
    for i, value in enumerate(values[1:], start=1):
        checked.append(check_array(f"{name}[{i}]", value, columns=columns, **rules))
    return checked


def check_numbers(name: str, value: object) -> NDArray[Any]:
    """Return an array of integers or floats, of any shape; or raise a ValueError."""
    array = as_array(name, value)
    if array.dtype.kind not in "fiu":
        raise ValueError(f"{name} must be numbers, got {brief_repr(value)}.")
    return array


def check_mask(name: str, value: object, least: int, most: int) -> NDArray[np.bool_]:
    """Return an array of so many bools, or raise a ValueError."""
    array = as_array(name, value)
    if array.dtype != bool or array.ndim != 1 or not least <= len(array) <= most:
        wanted = f"{most}" if least == most else f"{least} to {most}"
        raise ValueError(
            f"{name} must be {wanted} bools, got dtype {array.dtype} and shape {array.shape}."
        )
    return array


@lru_cache  # NumPy takes longer to say its limits than to check a small array
def _least_square(dtype: np.dtype[Any]) -> float:
    """Return the least sum of squares that has room for sums of products."""
    limits = np.finfo(dtype)
    return float(limits.smallest_normal) / float(limits.eps)


def check_magnitude(name: str, array: Matrix, *, floor: float = 0.4) -> Matrix:
    """Return ``array``, or raise a ValueError if sums of its squares may leave its dtype's range.

    The largest entry is 0, or between 1e-123 and 2e123 in float64, 6e-16 and 3e15 in float32. The
    lower limits are the smallest number to the power ``floor``: 0.8 is for code that takes care of
    squares that underflow, infinity for code that they do not harm.
    """
    low = float(np.finfo(array.dtype).tiny) ** floor
    high = float(np.finfo(array.dtype).max) ** 0.4
    largest = max(float(array.max(initial=0)), -float(array.min(initial=0)))
    if largest and not low <= largest <= high:
        raise ValueError(
            f"{name} must have a largest entry of size between {low:.0e} and {high:.0e} in "
            f"{array.dtype}, or 0, got {largest:.3g}: choose another unit."
        )
    return array


def check_count(name: str, value: object, low: int = 0, high: int | None = None) -> int:
    """Return ``value`` as an int within ``[low, high]``, or raise a ValueError.

    Parameters
    ----------
    name : str
        The argument's name, for the message.
    value : object
        The value to check.
    low, high : int, optional
        Its bounds.

    Returns
    -------
    int

    Examples
    --------
    >>> from flwr_perdl.core.checks import check_count
    >>> check_count("n_atoms", 5, low=1)
    5
    """
    if type(value) is int:  # an abstract class takes longer to recognize it
        count = value
    elif isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be an integer, got {value!r}.")
    else:
        count = int(value)
    if count < low or (high is not None and count > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} must be {bounds}, got {count}.")
    return count


def is_auto(name: str, value: object) -> bool:
    """Whether ``value`` is "auto"; any other text is refused, and numbers are the caller's."""
    if isinstance(value, str) and value != "auto":
        raise ValueError(f"{name} must be a number or 'auto', got {value!r}.")
    return isinstance(value, str)


def check_real(
    name: str, value: object, low: float, high: float = np.inf, *, open_low: bool = False
) -> float:
    """Return ``value`` as a float within ``[low, high]``, or raise a ValueError.

    Parameters
    ----------
    name : str
        The argument's name, for the message.
    value : object
        The value to check.
    low, high : float, optional
        Its bounds.
    open_low : bool, default False
        Whether ``low`` itself is excluded.

    Returns
    -------
    float

    Examples
    --------
    >>> from flwr_perdl.core.checks import check_real
    >>> check_real("step", 1, 0.0, 2.0)
    1.0
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number, got {value!r}.")
    number = float(value)
    inside = low < number <= high if open_low else low <= number <= high
    if not inside:
        left = "(" if open_low else "["
        raise ValueError(f"{name} must be in {left}{low:g}, {high:g}], got {number:g}.")
    return number


def check_flag(name: str, value: object) -> bool:
    """Return ``value`` as a bool if it is one, or 0 or 1; or raise a ValueError that says so."""
    if isinstance(value, bool) or (isinstance(value, Integral | np.bool_) and value in (0, 1)):
        return bool(value)
    raise ValueError(f"{name} must be True or False, got {value!r}.")


def check_kind(name: str, value: Any, kinds: type | tuple[type, ...], wanted: str) -> Any:
    """Return ``value`` if it is of one of these types, or raise a TypeError."""
    if not isinstance(value, kinds):
        raise TypeError(f"{name} must be {wanted}, got {brief_repr(value)}.")
    return value


def check_function(name: str, value: Any, wanted: str = "a function or None") -> Any:
    """Return ``value`` if it can be called or is None, or raise a TypeError."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be {wanted}, got {brief_repr(value)}.")
    return value


def check_list(name: str, value: Any) -> Any:
    """Return ``value`` if it holds one thing after the other, or raise a TypeError."""
    if (
        isinstance(value, str | bytes | Mapping)
        or not isinstance(value, Collection)
        or getattr(value, "ndim", 1) == 0
    ):
        raise TypeError(f"{name} must be a sequence, got {brief_repr(value)}.")
    return value


def check_rng(value: Any) -> np.random.Generator:
    """Return the argument ``rng`` if it is a generator of NumPy's, or raise a TypeError."""
    generator: np.random.Generator = check_kind(
        "rng", value, np.random.Generator, "a numpy.random.Generator"
    )
    return generator


def check_members(name: str, value: Any, kind: str, *members: str) -> Any:
    """Return ``value`` if it has these members, those of a protocol that are used, or raise.

    A class is none: of a learner, say, its instances are wanted.
    """
    if isinstance(value, type) or not all(hasattr(value, member) for member in members):
        raise TypeError(
            f"{name} must be a {kind} with {' and '.join(members)}, got {brief_repr(value)}."
        )
    return value


def brief_repr(value: object) -> str:
    """Return what a value is, in one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"a {type(value).__name__}"


def plain(value: Any) -> Any:
    """Return a number of NumPy's as Python's own, and anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def own_numbers(record: Any) -> None:
    """Have the fields of a frozen dataclass that are NumPy's numbers be Python's own.

    NumPy's change the dtype of what they are multiplied with, and no record of Flower takes them.
    """
    for field in fields(record):
        object.__setattr__(record, field.name, plain(getattr(record, field.name)))


def check_robust(
    robust: object, rules: Iterable[str], best: str = "filtered", plain: str = "mean"
) -> str:
    """Return the name of the rule that an argument ``robust`` asks for.

    False is the ``plain`` one, True the ``best`` one; a text is the rule's name.
    """
    if robust is False:
        return plain
    return check_choice("robust", best if robust is True else robust, rules)


def check_choice(name: str, value: object, choices: Iterable[str]) -> str:
    """Return ``value`` if it is one of ``choices``, or raise a ValueError that lists them.

    Parameters
    ----------
    name : str
        The argument's name, for the message.
    value : object
        The value to check.
    choices : sequence of str
        The allowed values.

    Returns
    -------
    str

    Examples
    --------
    >>> from flwr_perdl.core.checks import check_choice
    >>> check_choice("method", "mean", ("mean", "median"))
    'mean'
    """
    names = tuple(choices)
    if not isinstance(value, str) or value not in names:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, names))}, got {value!r}.")
    return value
