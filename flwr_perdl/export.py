"""Export of results, arrays and checkpoints to files for other programs (extra ``safetensors``)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from logging import WARNING
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from flwr_perdl import __version__
from flwr_perdl.core import files
from flwr_perdl.core.checks import as_array, brief_repr, check_kind
from flwr_perdl.core.extras import load_extra
from flwr_perdl.protocol.checkpoint import part
from flwr_perdl.protocol.compat import log

__all__ = ["load", "save"]

#: Files that `save` makes of a result, and what its card begins with.
_MADE = re.compile(r"(shared|(cluster|client)-\d+)\.(safetensors|npz)")
_TITLE = "# Models of a federated run\n"
#: The file of a client whose own model this process cannot read.
_ABSENT = "not at hand"


def save(path: str | Path, source: Any, *, state_dir: str | Path | None = None) -> None:
    """Write arrays to a safetensors file, or a run's models to a folder.

    A file is replaced atomically. A folder gets:

    - ``shared``, or ``cluster-0``, ``cluster-1``, …: the models that a new client starts from;
    - ``client-3``: the own model of client 3, for every client that has one and whose model this
      process can read; a warning counts the others. Clients without a model of their own have the
      shared one, or that of their cluster;
    - ``README.md``, a model card: the run, and which file is whose.

    The files are .safetensors where that library is installed, else .npz. They replace those of an
    earlier result. A client's own model may reveal its data: protect it as you protect the data.

    Parameters
    ----------
    path : str or Path
        The file or folder, created if missing, with its parent folders.
    source : ArrayRecord, mapping of str to ndarray, str, Path, or a strategy's ``result``
        What to write: ``result.arrays`` of a run, arrays by name, or the model in an ``.npz`` file,
        such as arrays.npz of a finished run or a checkpoint. ``strategy.result`` with a method
        ``model_of`` is written to a folder.
    state_dir : str or Path, optional
        Where the clients keep their state, see `flwr_perdl.strategies.Learned.model_of`.

    Raises
    ------
    ValueError, TypeError
        If ``source`` is none of these, or has arrays of an unsupported dtype, or the folder has
        another README.md.
    ImportError
        If safetensors is not installed, for a file.

    Examples
    --------
    >>> from flwr_perdl.export import load, save
    >>> save("model.safetensors", "runs/digits/arrays.npz")  # doctest: +SKIP
    >>> load("model.safetensors")["global_atoms"].shape  # doctest: +SKIP
    (24, 64)
    >>> save("models", strategy.result)  # doctest: +SKIP
    >>> load("models/client-3.safetensors")["head.weight"].shape  # doctest: +SKIP
    (10, 32)
    """
    path = Path(check_kind("path", path, (str, Path), "a path"))
    if hasattr(source, "model_of"):
        _save_result(path, source, state_dir)
        return
    kinds = (ArrayRecord, Mapping, str, Path)
    check_kind("source", source, kinds, "an ArrayRecord, arrays by name, a path, or a result")
    if isinstance(source, str | Path):
        named: dict[str, Any] = _members(Path(source), "source")
    else:
        named = dict(source)
    _write(path, named)


def load(path: str | Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of a safetensors or .npz file by name.

    Parameters
    ----------
    path : str or Path

    Returns
    -------
    dict of str to ndarray

    Raises
    ------
    ValueError
        If it is no such file, or has arrays of a dtype that NumPy lacks, such as bfloat16.
    ImportError
        If safetensors is not installed, for such a file.

    Examples
    --------
    >>> from flwr_perdl.export import load
    >>> arrays = load("model.safetensors")  # doctest: +SKIP
    """
    path = Path(check_kind("path", path, (str, Path), "a path"))
    if path.suffix == ".npz":
        return _members(path, "path")
    library = _library()
    try:
        if not path.is_file():
            raise ValueError("it is no regular file")
        return dict(library.load_file(path))
    except Exception as error:
        raise ValueError(
            "path must be a safetensors file with arrays of dtypes that NumPy has, got "
            f"{str(path)!r}: {error}."
        ) from error


def _save_result(folder: Path, result: Any, state_dir: str | Path | None) -> None:
    """Write a file per model of a result, and the card."""
    if getattr(result, "own", None) is None:
        raise TypeError(f"source must be a strategy's result, got {type(result).__name__}.")
    card = folder / "README.md"
    ours = not card.exists() or card.read_text("utf-8", "replace").startswith(_TITLE)
    if not ours or (folder.exists() and not folder.is_dir()):
        raise ValueError(
            f"path must be a folder, new or without a README.md of its own, got {str(folder)!r}."
        )
    suffix = ".npz" if find_spec("safetensors") is None else ".safetensors"
    models = getattr(result, "shared", [])  # none where models stay at the nodes
    shared = {"shared": models} if isinstance(models, ArrayRecord) else {}
    shared = shared or {f"cluster-{j}": model for j, model in enumerate(models)}
    made, whose = [], []
    for name, model in shared.items():
        _write(folder / f"{name}{suffix}", model)
        made.append(
            (f"{name}{suffix}", "what clients share" + ", of a cluster" * (name != "shared"))
        )
    for client, name in result.own.names.items():
        try:
            own = result.model_of(client, state_dir)
        except ValueError:
            whose.append((client, name, _ABSENT))
            continue
        same = [one for one, model in shared.items() if _same(own, model)]
        file = f"{same[0] if same else f'client-{client}'}{suffix}"
        if not same:
            _write(folder / file, own)
            made.append((file, f"the own model of client {name}"))
        whose.append((client, name, file))
    if n_absent := sum(file == _ABSENT for *_, file in whose):
        log(
            WARNING,
            "The own models of %d of %d clients are not saved, since this process can't read them: "
            "pass state_dir, the folder where clients keep their state, not %r.",
            *(n_absent, len(whose), state_dir),
        )
    for old in folder.iterdir():
        if _MADE.fullmatch(old.name) and old.name not in dict(made):
            old.unlink()
    parts = [
        f"{_TITLE}\n{result.own.run}. Written by flwr-perdl {__version__}.\n",
        _table(("file", "what it is"), made),
        _table(("client", "name", "its own model"), whose),
    ]
    with files.replacing(card) as stream:
        stream.write("\n".join(parts).encode())


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    cells = [heads, ["---"] * len(heads), *rows]
    return "".join(
        "| " + " | ".join(" ".join(str(one).replace("|", "\\|").split()) for one in row) + " |\n"
        for row in cells
    )


def _same(one: ArrayRecord, other: ArrayRecord) -> bool:
    """Return whether two models have the same arrays."""
    return [*one] == [*other] and all(one[name].data == other[name].data for name in one)


def _write(path: Path, named: Mapping[str, Any]) -> None:
    """Write arrays to a file: afterwards it holds all of them, or what it held."""
    arrays = {}
    for name, one in named.items():
        array = as_array("source", one.numpy() if isinstance(one, Array) else one)
        if array.dtype.hasobject or not isinstance(name, str):
            raise ValueError(f"source must have arrays by name, got {name!r}: {brief_repr(one)}.")
        arrays[name] = np.asarray(array, order="C")
    if path.suffix == ".npz":
        with files.replacing(path) as stream, ZipFile(stream, "w") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
        return
    library = _library()
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


def _members(path: Path, argument: str) -> dict[str, NDArray[Any]]:
    """Return the arrays of an .npz file; of a checkpoint, its model's."""
    try:
        named = files.members(path, compressed=True)
    except Exception as error:
        raise ValueError(f"{argument} must be an .npz file, got {str(path)!r}: {error}.") from error
    return part(files.load(path).arrays, "model") if {"meta", "checksum"} <= {*named} else named


def _library() -> Any:
    return load_extra("safetensors.numpy", "safetensors files", "safetensors")
