"""The arrays of a user's model: what of them is averaged, and what must stay as it was sent.

Every array keeps its dtype, on every wire and in every state; sums are formed in float64, one array
at a time. The same rules are those of all strategies for any model:

=============================  ===================================================================
floats                         averaged; robustly, or with an optimizer, where that is asked for
floats named `BATCH_NORM`      averaged; no optimizer and no correction extrapolates them
integers                       weighted mean, rounded half to even; no optimizer, no distance of a
                               robust rule sees them
booleans                       must stay as they were sent
entries that are not finite,   must stay as they were sent, bit for bit: -infinity in a mask, a
or too large to be averaged    buffer of NaN
=============================  ===================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import inf, isnan, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.aggregate import OUTLIER, RULES, mark_far, share_out
from flwr_perdl.core.arrays import Array
from flwr_perdl.core.npy import as_file

#: An array of the model that replies began from, and its `fixed_entries`.
Start = tuple[Array, NDArray[np.bool_] | None]

#: The dtypes of a model's arrays.
DTYPES = tuple(
    map(np.dtype, ("?", "b", "h", "i", "l", "q", "B", "H", "I", "L", "Q", "e", "f", "d"))
)
#: How the names end of a batch normalization's statistics: steps beyond their mean are no
#: statistics, and make a variance negative.
BATCH_NORM = ("running_mean", "running_var")
#: A float is far too large beyond so many times the lower median of an array's largest absolute
#: values, which counts as one at least.
FAR_TOO_LARGE = 100.0
#: So many numbers of an array are read at a time: they stay in the cache.
_BLOCK = 2**16


@lru_cache
def largest_averaged(dtype: np.dtype[Any]) -> float:
    """Return the largest absolute value that is averaged: its square is within the dtype's range.

    Integers are so up to where every one is a float64; sums of half floats are formed in others.
    """
    if dtype.kind != "f":
        return 2.0**53 if dtype.kind in "iu" else -inf
    largest = float(np.finfo(dtype).max)
    return largest if dtype.itemsize == 2 else largest**0.4


def check_dtypes(argument: str, names: Sequence[str], arrays: Sequence[Array]) -> None:
    """Raise a ValueError unless these are arrays that a model can have."""
    if not arrays:
        raise ValueError(f"{argument} must be the arrays of a model, got none.")
    if all(array.dtype.kind == "b" for array in arrays):
        raise ValueError(f"{argument} must have numbers, which are averaged, got booleans alone.")
    if all(a.dtype.kind in "SO" or (a.dtype == np.uint8 and a.ndim == 1) for a in arrays):
        raise ValueError(
            f"{argument} must have numbers, which are averaged, got bytes alone (XGBoost's trees?)."
        )
    for name, array in zip(names, arrays, strict=True):
        if array.dtype not in DTYPES:
            why = " (what becomes of bfloat16: send float32)" if array.dtype.kind == "V" else ""
            raise ValueError(
                f"{argument} must be booleans, integers, or float16, float32 or float64, got "
                f"{array.dtype}{why} as {name!r}."
            )


def is_float(array: Array) -> bool:
    """Whether robust rules, noise and optimizers see an array."""
    return array.dtype.kind == "f"


def is_plain(name: str, array: Array) -> bool:
    """Whether an array is averaged, if at all, in no other way than by its weighted mean."""
    return not is_float(array) or name.endswith(BATCH_NORM)


def blocks(size: int, step: int = _BLOCK) -> Iterator[slice]:
    """Return the parts of an array that are read at a time."""
    return (slice(at, at + step) for at in range(0, size, step))


def magnitude(array: Array) -> float:
    """Return the largest absolute value; NaN if there is one."""
    flat = array.ravel("K")
    parts = [flat[part] for part in blocks(flat.size)]
    ends = [float(end) for part in parts for end in (part.max(), -float(part.min()))]
    return nan if any(map(isnan, ends)) else max(ends, default=0.0)


def fixed_entries(array: Array) -> NDArray[np.bool_] | None:
    """Return which entries must stay as they are, None if there are none."""
    limit = largest_averaged(array.dtype)
    if array.dtype.kind == "b":
        return np.ones(array.shape, dtype=bool)
    if magnitude(array) <= limit:
        return None
    averaged: NDArray[np.bool_] = (array <= limit) & (array >= -limit)
    return ~averaged


def check_trained(name: str, array: Array, before: Array, fixed: NDArray[np.bool_] | None) -> float:
    """Return the largest absolute value that is averaged of an array that was trained.

    Parameters
    ----------
    name : str
        Its name, for the message.
    array, before : ndarray
        After training, and as it was sent.
    fixed : ndarray of bool or None
        The `fixed_entries` of ``before``.

    Raises
    ------
    ValueError
        If shape or dtype are others, or an entry is that had to stay, or had to be averaged.
    """
    if (array.shape, array.dtype) != (before.shape, before.dtype):
        raise ValueError(
            f"array {name!r} must have shape {before.shape} and dtype {before.dtype}, got "
            f"{array.shape} and {array.dtype}."
        )
    if fixed is None and (size := magnitude(array)) <= largest_averaged(array.dtype):
        return size
    own = fixed_entries(array)
    kept = np.zeros(array.shape, dtype=bool)
    for entries in (own, fixed):
        kept |= False if entries is None else entries
    if array[kept].tobytes() != before[kept].tobytes():
        limit = largest_averaged(array.dtype)
        rule = "stay as it was sent, as booleans do"
        if array.dtype.kind != "b":
            rule = f"be finite and at most {limit:.0e}, but for entries that stay as they were sent"
        raise ValueError(
            f"array {name!r} must {rule}, got {array[kept][:3]} where {before[kept][:3]} was sent."
        )
    return magnitude(array[~kept])


def far_too_large(magnitudes: Array) -> Array:
    """Return the bounds that follow from arrays' largest absolute values at several parties.

    ``magnitudes`` (n_arrays, n_parties).
    """
    lower = np.sort(magnitudes, axis=1)[:, (magnitudes.shape[1] - 1) // 2]
    bounds: Array = FAR_TOO_LARGE * np.maximum(lower, 1)
    return bounds


def mean_like(
    start: Array, fixed: NDArray[np.bool_] | None, weights: Array, arrays: Sequence[Array]
) -> Array:
    """Return the weighted sum of arrays, of weights that sum to one, as what replaces ``start``.

    It is the view of its ``.npy`` file: what is sent afterwards is not written again.
    """
    if start.dtype.kind == "b":
        return start
    from flwr_perdl.core._kernels import add_weighted

    mean, before = np.empty(start.size, start.dtype), start.ravel()
    terms = [(w, array.ravel()) for w, array in zip(weights.tolist(), arrays, strict=True) if w]
    for part in blocks(start.size):
        total = np.zeros(len(before[part]))
        for weight, array in terms:
            own = array[part]
            own = own if own.dtype == np.float32 else own.astype(np.float64, copy=False)
            add_weighted(total, weight, own)
        mean[part] = settled(total, before[part], None if fixed is None else fixed.ravel()[part])
    return as_file(mean.reshape(start.shape))


def settled(found: Array, start: Array, fixed: NDArray[np.bool_] | None) -> Array:
    """Return a mean with the dtype of ``start``, and with its entries where they are fixed."""
    if start.dtype.kind in "iu":
        found = np.rint(found)
    mean = np.asarray(found).astype(start.dtype, copy=False)
    return mean if fixed is None else np.where(fixed, start, mean)


def aggregate_models(
    rule: str, start: Sequence[Start], models: Sequence[Sequence[Array]], weights: Array
) -> tuple[list[Array], Array]:
    """Return the model that models come to, and their outlyingness.

    The rule sees the models' changes of all floats; integers are the weighted mean.

    Parameters
    ----------
    rule : str
        A name of `RULES`.
    start : sequence of (ndarray, ndarray of bool or None)
        The arrays of the model that all began from, with their `fixed_entries`.
    models : sequence of sequence of ndarray
        At least one.
    weights : ndarray of shape (n_models,)
        Positive.
    """
    shares: Array = weights / weights.sum()
    how, of_floats, outlyingness = RULES[rule], shares, 0 * shares
    average = None if how.shares else how.average  # by coordinate
    if rule != "mean" and average is None:
        points = _single(changes_of(start, models))
        of_floats, outlyingness = share_out(rule, points, weights)
        of_floats = np.append(of_floats, 1 - of_floats.sum())  # the start's
    if how.effect == OUTLIER:  # whoever is left out has no part in integers either
        counted = weights * (outlyingness < 1)
        shares = counted / counted.sum()
    found = []
    for i, one in enumerate(start):
        arrays = [model[i] for model in models]
        if not is_float(one[0]) or rule == "mean":
            found.append(mean_like(*one, shares, arrays))
        elif average is None:
            found.append(mean_like(*one, of_floats, [*arrays, one[0]]))
        else:
            found.append(_average_like(average, *one, arrays))
    if average is not None:
        *rows, middle = _single(changes_of(start, [*models, found]))
        outlyingness = mark_far(np.array(rows), middle)
    return found, outlyingness


def _average_like(
    average: Callable[[Array], Array],
    start: Array,
    fixed: NDArray[np.bool_] | None,
    arrays: Sequence[Array],
) -> Array:
    """Return an average by coordinate of arrays' changes as what replaces ``start``."""
    before = start.ravel()
    parts = _changes(start, fixed, arrays, np.float32)
    moved = [before[:0], *(before[part] + average(points) for part, points in parts)]
    return as_file(settled(np.concatenate(moved).reshape(start.shape), start, fixed))


def _changes(
    start: Array, fixed: NDArray[np.bool_] | None, arrays: Sequence[Array], least: type
) -> Iterator[tuple[slice, Array]]:
    """Return the changes of all arrays, (n_arrays, size), a part of them at a time."""
    before, rows = start.ravel(), [array.ravel() for array in arrays]
    stay = None if fixed is None else fixed.ravel()
    for part in blocks(start.size, max(16 * _BLOCK // len(arrays), _BLOCK // 16)):
        own = None if stay is None else stay[part]
        yield part, np.stack([change(row[part], before[part], own, least) for row in rows])


def changes_of(start: Sequence[Start], models: Sequence[Sequence[Array]]) -> Array:
    """Return each model's changes of all floats as a row, in coordinates of their own.

    The rows have the lengths and the distances of the changes, which is what rules and groups need,
    and as few numbers as there are models: they follow from the changes' inner products, which are
    summed over arrays. Distances below 1e-8 of the lengths are rounding. Where the changes are no
    more numbers than models, they are the rows.

    Returns
    -------
    ndarray of shape (n_models, at most n_models)
    """
    parts = (
        points
        for i, one in enumerate(start)
        if is_float(one[0])
        for _, points in _changes(*one, [model[i] for model in models], np.float64)
    )
    if sum(array.size for array, _ in start if is_float(array)) <= len(models):
        return np.concatenate([np.zeros((len(models), 0)), *parts], axis=1)
    products = np.zeros((len(models), len(models)))
    for points in parts:
        products += points @ points.T
    lengths = np.sqrt(products.diagonal())
    # Of directions, so that one that is long takes no digits from the others.
    scale = np.where(lengths > 0, lengths, 1)
    values, vectors = np.linalg.eigh(products / scale / scale[:, None])
    rows: Array = lengths[:, None] * vectors * np.sqrt(np.maximum(values, 0))
    return rows


def _single(points: Array) -> Array:
    """Return points in the precision of distances between them, at most 1 in size."""
    return (points / (np.abs(points).max(initial=0) or 1)).astype(np.float32)


def as_dtype(array: Array, dtype: np.dtype[Any]) -> Array:
    """Return a trained array with the dtype that it was sent with: training may promote it.

    Raises
    ------
    ValueError
        If integers were trained to what is none: they are counters; or reals to complex numbers.
    """
    if array.dtype == dtype:
        return array
    if array.dtype.kind == "c":
        raise ValueError(f"an array of {dtype} must be real after training, got {array.dtype}.")
    if dtype.kind in "iu" and is_float(array):
        reals = array[array != np.rint(array)]
        if reals.size:
            raise ValueError(
                f"an array of integers must be one after training, got {reals[0]:g}: send floats "
                "where training changes them."
            )
    with np.errstate(over="ignore"):  # what is infinite then is found later
        return array.astype(dtype)


def cleared(array: Array, fixed: NDArray[np.bool_] | None) -> Array:
    """Return an array with zeros where it is fixed."""
    return array if fixed is None else np.where(fixed, array.dtype.type(0), array)


def change(
    new: Array, old: Array, fixed: NDArray[np.bool_] | None, least: type = np.float32
) -> Array:
    """Return the change of an array of floats, at least in this dtype; zero where it is fixed."""
    sides = cleared(new, fixed), cleared(old, fixed)
    return np.asarray(np.subtract(*sides, dtype=np.result_type(old, least)))
