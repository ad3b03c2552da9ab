"""Arrays of other libraries beside NumPy's, by the Python array API standard (2024.12).

What calls :func:`namespace` works on NumPy's arrays with NumPy itself, and on others (PyTorch's,
CuPy's) with their library, where they are. The functions here are what NumPy 1.26 and the standard
do not have under one name, and the few for which NumPy has something faster.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def namespace(*arrays: object) -> Any:
    """Return the module that computes with ``arrays``.

    Parameters
    ----------
    *arrays : array_like
        What is no array of another library (has no ``__dlpack__``) counts as NumPy's.

    Returns
    -------
    module
        `numpy` itself, or `array_api_compat`'s module for the arrays' library.

    Raises
    ------
    ValueError
        If the arrays are of several libraries or on several devices.
    ImportError
        If arrays are not NumPy's and `array_api_compat` is not installed.
    """
    for array in arrays:
        if type(array) is not np.ndarray and _foreign(array):
            return _other_namespace(arrays)
    return np


def _foreign(array: object) -> bool:
    return hasattr(array, "__dlpack__") and not isinstance(array, np.ndarray | np.generic)


def _other_namespace(arrays: tuple[object, ...]) -> Any:
    places = dict.fromkeys(map(place, arrays))
    if len(places) > 1:
        raise ValueError(
            f"Arrays must be of one library and on one device, got {' and '.join(places)}."
        )
    return _compat(arrays[0]).array_namespace(arrays[0])


def place(array: object) -> str:
    """Return in words which library's array it is, and on which device."""
    if not _foreign(array):
        return "numpy"
    return f"{type(array).__module__.partition('.')[0]} on {_compat(array).device(array)}"


def _compat(array: object) -> Any:
    try:
        import array_api_compat
    except ImportError:
        raise ImportError(
            "Arrays other than NumPy's need the extra 'arrays' (pip install array-api-compat), "
            f"got {type(array).__module__}.{type(array).__qualname__}."
        ) from None
    return array_api_compat


def beside(A: Array) -> dict[str, Any]:
    """Return the keyword arguments with which a new array is made on the device of ``A``."""
    return {} if isinstance(A, np.ndarray) else {"device": _compat(A).device(A)}


def on_cpu(A: Array) -> bool:
    """Whether ``A`` is in a CPU's memory, and pieces of it fit into its cache."""
    return A.__dlpack_device__()[0] == 1


def on_host(A: Array) -> Array:
    """Return ``A`` as a NumPy array, copied from its device where it has another."""
    if isinstance(A, np.ndarray):
        return A
    compat = _compat(A)
    host: Any = "cpu"  # the standard has no name for it: PyTorch's, and array_api_compat's for CuPy
    if not (compat.is_torch_array(A) or compat.is_cupy_array(A)):
        host = namespace(A).__array_namespace_info__().default_device()
    return np.asarray(compat.to_device(A, host))


def like(array: Array, A: Array) -> Array:
    """Return a NumPy array as one of the library of ``A``, on its device."""
    if isinstance(A, np.ndarray):
        return array
    moved: Array = namespace(A).asarray(array, **beside(A))
    return moved


def cast(A: Array, dtype: Any) -> Array:
    """Return ``A`` with that dtype, without a copy where it has it."""
    if isinstance(A, np.ndarray):
        return A.astype(dtype, copy=False)
    same: Array = namespace(A).astype(A, dtype, copy=False)
    return same


def copied(A: Array) -> Array:
    """Return a copy."""
    if isinstance(A, np.ndarray):
        return A.copy()
    copy: Array = namespace(A).asarray(A, copy=True)
    return copy


def transposed(A: Array) -> Array:
    """Exchange the last two axes."""
    if isinstance(A, np.ndarray):
        return A.swapaxes(-1, -2)
    return A.mT


def reshaped(A: Array, shape: tuple[int, ...]) -> Array:
    """Return ``A`` with another shape, a view where that goes."""
    if isinstance(A, np.ndarray):
        return A.reshape(shape)
    view: Array = namespace(A).reshape(A, shape)
    return view


def joined(arrays: list[Array], axis: int) -> Array:
    """Put arrays one after the other."""
    xp = namespace(*arrays)
    together: Array = (np.concatenate if xp is np else xp.concat)(arrays, axis=axis)
    return together


def squared_norm(A: Array) -> float:
    """Return the sum of all squares, of NumPy's arrays in one pass of BLAS.

    No warning where it leaves the range: `numpy.vdot` gives none, what other libraries call may.
    """
    if isinstance(A, np.ndarray):
        return float(np.vdot(A, A))
    flat = reshaped(A, (-1,))
    with np.errstate(over="ignore", under="ignore"):
        return float(namespace(A).vecdot(flat, flat))


def row_products(A: Array, B: Array) -> Array:
    """Return the inner products of two arrays over their last axis."""
    if isinstance(A, np.ndarray):
        products: Array = (A[..., None, :] @ B[..., :, None])[..., 0, 0]  # BLAS; einsum is slower
    else:
        products = namespace(A, B).vecdot(A, B)
    return products


def row_norms(A: Array) -> Array:
    """Return the Euclidean norms over the last axis."""
    norms: Array = namespace(A).sqrt(row_products(A, A))
    return norms


def spectral_norm(A: Array) -> float:
    """Return the largest singular value."""
    xp = namespace(A)
    return float(np.linalg.norm(A, 2) if xp is np else xp.linalg.matrix_norm(A, ord=2))


def where_true(mask: Array) -> Array:
    """Return where a vector is true, as a NumPy array."""
    return np.flatnonzero(on_host(mask))


def largest(A: Array, k: int) -> Array:
    """Return the columns of the ``k`` largest entries of each row, ``0 < k < n_columns``."""
    xp = namespace(A)
    if xp is np:
        return np.argpartition(A, -k, axis=1)[:, -k:]
    columns: Array = xp.argsort(A, axis=1, descending=True)[:, :k]
    return columns


def put(A: Array, columns: Array, values: Array | bool) -> None:
    """Write ``values[i, s]`` (or one value) to ``A[i, columns[i, s]]``; a row's columns differ."""
    xp = namespace(A, columns)
    if xp is np:
        np.put_along_axis(A, columns, values, axis=1)
        return
    numbers = xp.arange(A.shape[1], **beside(A))
    for s in range(columns.shape[1]):  # the standard reads with arrays of indices, but only reads
        new = values if isinstance(values, bool) else values[:, s : s + 1]
        A[...] = xp.where(numbers == columns[:, s : s + 1], new, A)


def mask_in_place(A: Array, mask: Array) -> None:
    """Set ``A`` to zero where ``mask`` is false."""
    A *= mask if isinstance(A, np.ndarray) else cast(mask, A.dtype)


def add_to_diagonals(A: Array, value: float) -> Array:
    """Add a number to the diagonals of a stack of square matrices, NumPy's in place."""
    n = A.shape[-1]
    if isinstance(A, np.ndarray):
        A.reshape(*A.shape[:-2], n * n)[..., :: n + 1] += value
        return A
    added: Array = A + value * namespace(A).eye(n, dtype=A.dtype, **beside(A))
    return added
