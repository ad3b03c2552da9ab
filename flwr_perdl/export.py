"""Arrays of results and checkpoints as safetensors files (extra ``safetensors``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from flwr_perdl.core import files
from flwr_perdl.core.checks import check_kind
from flwr_perdl.core.extras import load_extra
from flwr_perdl.protocol.checkpoint import part

__all__ = ["load", "save"]

Arrays = Mapping[str, NDArray[Any]]


def save(path: str | Path, source: ArrayRecord | Arrays | str | Path) -> None:
    """Write arrays to a safetensors file: afterwards it holds all of them, or what it held.

    Parameters
    ----------
    path : str or Path
        The file; its folder is made when missing.
    source : ArrayRecord, mapping of str to ndarray, str or Path
        What to write: ``result.arrays`` of a run, arrays by name, or an ``.npz`` file such as
        arrays.npz of a finished run or a checkpoint, of which the model is written.

    Raises
    ------
    ValueError, TypeError
        If ``source`` is nothing of this, or has arrays of a dtype that such a file has not.
    ImportError
        If safetensors is not installed.

    Examples
    --------
    >>> from flwr_perdl.export import load, save
    >>> save("model.safetensors", "runs/digits/arrays.npz")  # doctest: +SKIP
    >>> load("model.safetensors")["global_atoms"].shape  # doctest: +SKIP
    (24, 64)
    """
    library = _library()
    path = Path(check_kind("path", path, (str, Path), "a path"))
    kinds = (ArrayRecord, Mapping, str, Path)
    check_kind("source", source, kinds, "an ArrayRecord, arrays by name, or a path")
    if isinstance(source, str | Path):
        named: dict[str, Any] = _members(Path(source))
    elif isinstance(source, ArrayRecord):
        named = {name: array.numpy() for name, array in source.items()}
    else:
        named = dict(source)
    arrays = {name: np.asarray(array, order="C") for name, array in named.items()}
    try:
        data = library.save(arrays)
    except MemoryError:
        raise
    except Exception as error:  # the library's own kind of errors has no public base
        said = str(error).rstrip(".")
        raise ValueError(
            f"source must have arrays by name, of dtypes that safetensors files have: {said}."
        ) from error
    with files.replacing(path) as stream:
        stream.write(data)


def load(path: str | Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of a safetensors file by name.

    Raises
    ------
    ValueError
        If it is no such file, or has arrays of a dtype that NumPy has not, such as bfloat16.
    ImportError
        If safetensors is not installed.

    Examples
    --------
    >>> from flwr_perdl.export import load
    >>> arrays = load("model.safetensors")  # doctest: +SKIP
    """
    library = _library()
    check_kind("path", path, (str, Path), "a path")
    try:
        return dict(library.load_file(path))
    except Exception as error:
        raise ValueError(
            "path must be a safetensors file with arrays of dtypes that NumPy has, got "
            f"{str(path)!r}: {error}."
        ) from error


def _members(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of an .npz file; of a checkpoint, its model's."""
    try:
        with np.load(path) as archive:
            if not isinstance(archive, Mapping):
                raise ValueError("it is one array")
            if "meta" not in archive or "checksum" not in archive:
                return dict(archive)
    except Exception as error:
        raise ValueError(f"source must be an .npz file, got {str(path)!r}: {error}.") from error
    return part(files.load(path).arrays, "model")


def _library() -> Any:
    return load_extra("safetensors.numpy", "safetensors files", "safetensors")
