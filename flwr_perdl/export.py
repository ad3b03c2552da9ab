"""Export of results, arrays and checkpoints to files for other programs (extra ``safetensors``)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from logging import WARNING
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord
from numpy.typing import NDArray

from flwr_perdl import __version__
from flwr_perdl.core import files
from flwr_perdl.core.checks import as_array, brief_repr, check_kind
from flwr_perdl.core.extras import load_extra
from flwr_perdl.protocol.checkpoint import part
from flwr_perdl.protocol.compat import log
from flwr_perdl.protocol.records import to_record
from flwr_perdl.protocol.report import is_higher_better
from flwr_perdl.protocol.strategy import evaluate_model
from flwr_perdl.strategies._own_models import Learned

__all__ = ["load", "save", "save_best"]

#: Files that `save` makes of a result; the list of them, its format and most bytes; the card and
#: what it begins with.
_MADE = re.compile(r"(shared|(cluster|client)-\d+)\.(safetensors|npz)")
_LIST, _FORMAT, _MOST_BYTES = "models.json", 1, 2**26
_CARD, _TITLE = "README.md", "# Models of a federated run\n"


def save(path: str | Path, source: Any, *, state_dir: str | Path | None = None) -> None:
    """Write arrays to a safetensors file, or a run's models to a folder.

    A file is replaced atomically. A folder gets:

    - ``shared``, or ``cluster-0``, ``cluster-1``, …: the models that a new client starts from;
    - ``client-3``: the own model of client 3, for every client that has one and whose model this
      process can read; a warning counts the others. Clients without a model of their own have the
      shared one, or that of their cluster;
    - ``README.md``, a model card: the run, and which file is whose; and ``models.json``, the same
      for `load`, with the run's token and the clients' names.

    The files are .safetensors where that library is installed, else .npz. They replace those that
    models.json of an earlier result lists, and no others. A client's own model may reveal its data:
    protect it as you protect the data.

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
        files of these names that are not of an earlier result; nothing is written then.
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


def load(path: str | Path) -> Any:
    """Return the arrays of a safetensors or .npz file by name, or the result saved in a folder.

    Parameters
    ----------
    path : str or Path

    Returns
    -------
    dict of str to ndarray, or Learned
        Of a folder the result: ``model_of`` returns a client's own model that is in the folder, or,
        on the client's machine, what its ``state_dir`` has of it; ``shared`` is the shared model,
        or a list of those of the clusters.

    Raises
    ------
    ValueError
        If it is no such file or folder, or has arrays of a dtype that NumPy lacks, such as
        bfloat16.
    ImportError
        If safetensors is not installed, for such a file.

    Examples
    --------
    >>> from flwr_perdl.export import load
    >>> arrays = load("model.safetensors")  # doctest: +SKIP
    """
    path = Path(check_kind("path", path, (str, Path), "a path"))
    if path.is_dir():
        return _load_result(path)
    if path.suffix == ".npz":
        return _members(path, "path")
    if not path.is_file():  # to open a pipe waits for ever
        raise ValueError(f"path must be a file or a folder, got {str(path)!r}, which is neither.")
    library = _library()
    try:
        return dict(library.load_file(path))
    except Exception as error:
        raise ValueError(
            "path must be a safetensors file with arrays of dtypes that NumPy has, got "
            f"{str(path)!r}: {error}."
        ) from error


def save_best(
    folder: str | Path,
    evaluate_fn: Callable[..., MetricRecord | None],
    *,
    metric: str = "loss",
    higher_is_better: bool | None = None,
) -> Callable[[int, ArrayRecord, int | None], MetricRecord | None]:
    """Return an ``evaluate_fn`` that also keeps the best model, or each cluster's, in a folder.

    The folder gets ``shared``, or ``cluster-0``, ``cluster-1``, …, as `save` writes them, with a
    card that says of which rounds they are. A resumed run goes on with them.

    Parameters
    ----------
    folder : str or Path
        Created if missing, with its parent folders.
    evaluate_fn : callable
        As for ``strategy.start``.
    metric : str, default "loss"
        Which of its metrics decides. A round in which it returns None, or a NaN, is left out.
    higher_is_better : bool, optional
        By default decided by the words of the metric's name, such as loss or accuracy.

    Returns
    -------
    callable
        To be given to ``strategy.start`` as ``evaluate_fn``.

    Raises
    ------
    ValueError, TypeError
        If an argument breaks its rule, or the folder has other files of these names; in a round, if
        ``evaluate_fn`` does not return the metric.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> import numpy as np
    >>> from flwr.app import ArrayRecord, MetricRecord
    >>> from flwr_perdl.export import load, save_best
    >>> def evaluate(server_round, arrays):
    ...     return MetricRecord({"loss": float(arrays.to_numpy_ndarrays()[0][0] ** 2)})
    >>> with TemporaryDirectory() as folder:
    ...     keeping = save_best(folder, evaluate)  # strategy.start(..., evaluate_fn=keeping)
    ...     for round_, weight in enumerate((2.0, 1.0, 3.0)):
    ...         metrics = keeping(round_, ArrayRecord([np.array([weight])]))
    ...     load(folder).shared.to_numpy_ndarrays()
    [array([1.])]
    """
    path = Path(check_kind("folder", folder, (str, Path), "a path"))
    if not callable(evaluate_fn):
        raise TypeError(f"evaluate_fn must be a function, got {brief_repr(evaluate_fn)}.")
    higher = is_higher_better(check_kind("metric", metric, str, "a name"), higher_is_better)
    _replaceable(path)
    by: list[Any] = [metric, higher]
    best: dict[str, Any] | None = None

    def evaluate(
        server_round: int, arrays: ArrayRecord, cluster: int | None = None
    ) -> MetricRecord | None:
        nonlocal best
        if best is None:  # another run's are replaced
            best = _best_before(path, server_round, by)
        metrics = evaluate_model(evaluate_fn, server_round, arrays, cluster)
        if metrics is None:
            return None
        if not isinstance(value := metrics.get(metric), int | float):
            raise ValueError(
                f"metric must be a number that evaluate_fn returns, got {metric!r} of {[*metrics]}."
            )
        name = ("shared" if cluster is None else f"cluster-{cluster}") + _suffix()
        earlier = best.get(name, {}).get("value", -inf if higher else inf)
        if value > earlier if higher else value < earlier:
            best[name] = {"round": server_round, "value": value}
            about = {"run": f"The best by {metric}", "files": [*best], "clients": {}}
            about |= {"best": best, "metric": by}
            rows = [(file, one["round"], f"{one['value']:.6g}") for file, one in best.items()]
            card = _table(("file", "round", _escape(metric)), rows)
            _publish(path, _replaceable(path), [(name, arrays)], lambda: (about, [card]))
        return metrics

    return evaluate


def _best_before(folder: Path, round_: int, metric: list[Any]) -> dict[str, Any]:
    """Return the best models in a folder, if a run that is resumed may go on with them."""
    try:
        about = _read_list(folder)
        best = dict(about["best"])
        # A run that begins evaluates round 0 or 1 first, one that goes on its last round again.
        goes_on = round_ > 1 and max(one["round"] for one in best.values()) <= round_
        return best if goes_on and about["metric"] == metric else {}
    except (KeyError, TypeError, ValueError):
        return {}


def _save_result(folder: Path, result: Any, state_dir: str | Path | None) -> None:
    """Write a file per model of a result, the list and the card."""
    check_kind("source", result, Learned, "a strategy's result")
    shared = {f"cluster-{j}": model for j, model in enumerate(result.models)}
    if isinstance(result.shared, ArrayRecord):
        shared = {"shared": result.shared}
    shared = {f"{name}{_suffix()}": model for name, model in shared.items()}
    private = {client: f"client-{client}{_suffix()}" for client in result.names}
    listed = _replaceable(folder, {*shared, *private.values()})
    made = {name: "what clients share" + ", of a cluster" * (len(shared) > 1) for name in shared}
    clients: dict[int, dict[str, Any]] = {}

    def written() -> Iterator[tuple[str, Mapping[str, Any]]]:
        yield from shared.items()
        for client, name in result.names.items():
            model, whole = _model_of(result, client, state_dir)
            same = [file for file, one in shared.items() if model and _same(model, one)]
            if whole and not same and model:
                same = [private[client]]
                yield private[client], model
                made[private[client]] = f"the own model of client {_escape(name)}"
            clients[client] = {"name": name, "file": [*same, None][0], "whole": whole}
            clients[client]["model"] = result.members.get(client)

    def describe() -> tuple[dict[str, Any], list[str]]:
        about = {name: getattr(result, name) for name in ("run", "token", "protocol")}
        about |= {"arrays": [*result.arrays], "files": [*made], "clients": clients}
        whose = [
            (client, _escape(one["name"]), one["file"] if one["whole"] else "not at hand")
            for client, one in clients.items()
        ]
        whose_heads = ("client", "name", "its own model")
        return about, [_table(("file", "what it is"), made.items()), _table(whose_heads, whose)]

    _publish(folder, listed, written(), describe)
    if n_absent := sum(not one["whole"] for one in clients.values()):
        log(
            WARNING,
            "The own models of %d of %d clients are not saved, since this process can't read them: "
            "pass state_dir, the folder where clients keep their state, not %r; or load this "
            "folder on the clients' machines (docs/use-a-clients-model.md).",
            *(n_absent, len(clients), state_dir),
        )


def _model_of(
    result: Any, client: int, state_dir: str | Path | None
) -> tuple[Mapping[str, Array] | None, bool]:
    """Return a client's own model, and True; or the shared one that it takes, if any, and False."""
    try:
        return result.model_of(client, state_dir), True
    except ValueError:
        with suppress(ValueError):
            return result.shared_of(client), False
        return None, False


def _load_result(folder: Path) -> Learned:
    """Return what the list in a folder says, and its models."""
    try:
        about = _read_list(folder)
        run, token, protocol = (str(about.get(name, "")) for name in ("run", "token", "protocol"))
        arrays = [str(name) for name in about.get("arrays", [])]
        rows = {int(client): dict(row) for client, row in about["clients"].items()}
        names = {client: str(row["name"]) for client, row in rows.items()}
        apart = {client for client, row in rows.items() if not row["whole"]}
        members = {p: int(j) for p, row in rows.items() if (j := row.get("model")) is not None}
        if not {row["file"] for row in rows.values()} <= {None, *about["files"]}:
            raise ValueError("clients have files that are not listed")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"path must be a folder that save has written, got {str(folder)!r}: {error}."
        ) from error

    def read(file: str) -> ArrayRecord:
        found = load(folder / file)
        return to_record([*found.values()], [*found])

    def saved(client: int) -> ArrayRecord | None:
        row = rows[client]
        return read(row["file"]) if row["whole"] else None

    shared: Any = [read(file) for file in about["files"] if file.startswith("shared")]
    clusters = [file for file in about["files"] if file.startswith("cluster")]
    clusters.sort(key=lambda file: int(re.findall(r"\d+", file)[0]))
    shared = shared[0] if shared else [read(file) for file in clusters]
    given: Any = {"names": names, "run": run, "token": token, "protocol": protocol}
    return Learned(shared, members, **given, arrays=arrays, apart=apart, saved=saved)


def _publish(
    folder: Path,
    listed: Collection[str],
    models: Iterable[tuple[str, Mapping[str, Any]]],
    describe: Callable[[], tuple[dict[str, Any], list[str]]],
) -> None:
    """Put models into a folder in place of the listed ones, then what describes them.

    Nothing of it changes before all is written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = [_LIST]
    with TemporaryDirectory(dir=folder, prefix=".flwr-perdl-") as place:
        for name, model in models:
            _write(Path(place, name), model)
            names.append(name)
        about, tables = describe()
        said = f"{_TITLE}\n{_escape(about['run'])}. Written by flwr-perdl {__version__}.\n"
        texts = {_LIST: json.dumps({"format": _FORMAT, **about}), _CARD: "\n".join((said, *tables))}
        for name, text in texts.items():
            with files.replacing(Path(place, name)) as stream:
                stream.write(text.encode())
        for name in (*names, _CARD):
            Path(place, name).replace(folder / name)
    for old in {*listed} - {*about["files"]}:
        (folder / old).unlink(missing_ok=True)


def _replaceable(folder: Path, planned: set[str] | None = None) -> set[str]:
    """Return the files of a folder that may be replaced: those on its list.

    Raises
    ------
    ValueError
        If the folder has others of the names that are written: without a list, or if nobody says
        which are ``planned``, of any name that may be.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"path must be a folder, got {str(folder)!r}, which is none.")
    present = {one.name for one in folder.iterdir()} if folder.exists() else set()
    own, listed, card = {_CARD, _LIST}, set[str](), folder / _CARD
    try:
        listed = {one for one in _read_list(folder)["files"] if not (folder / one).is_dir()}
        own.discard(_LIST)
    except ValueError:
        planned = None
    if card.is_file():
        with card.open("rb") as stream:
            own -= {_CARD} if stream.read(len(_TITLE)) == _TITLE.encode() else set()
    taken = present & planned if planned is not None else set(filter(_MADE.fullmatch, present))
    if others := (taken - listed) | (present & own):
        raise ValueError(
            "path must be a folder without other files of the names that are written, got "
            f"{str(folder)!r} with {', '.join(sorted(others)[:3])}."
        )
    return listed


def _read_list(folder: Path) -> dict[str, Any]:
    """Return what the list in a folder says; its files have names that `save` gives."""
    path = folder / _LIST
    try:
        small = path.is_file() and path.stat().st_size <= _MOST_BYTES
        about = json.loads(path.read_bytes()) if small else None
    except (RecursionError, ValueError):
        about = None
    if not isinstance(about, dict) or about.get("format") != _FORMAT:
        raise ValueError(f"it has no {_LIST} of format {_FORMAT}")
    names = about.get("files")
    if not isinstance(names, list) or not all(_MADE.fullmatch(str(name)) for name in names):
        raise ValueError(f"its {_LIST} must list files of models, got {brief_repr(names)}")
    return about


def _suffix() -> str:
    return ".npz" if find_spec("safetensors") is None else ".safetensors"


def _escape(text: str) -> str:
    """Return a text in one line of which neither Markdown nor HTML makes anything else."""
    return re.sub(r"[^\w ,:-]|_", lambda one: f"&#{ord(one[0])};", " ".join(text.split()))


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table of cells that need no escape."""
    cells = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(map(str, row)) + " |\n" for row in cells)


def _same(one: Mapping[str, Array], other: Mapping[str, Array]) -> bool:
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
