"""Public data as ``.npz`` files for ``--data``: image sets, and the gallery's files."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.checks import check_count
from flwr_perdl.core.files import replacing
from perdl_experiments import originals

#: The most pixels of a set, four gigabytes, and how many image files are read at a time.
_PIXELS, _AT_ONCE = 2**32, 100


class Source(NamedTuple):
    """Where an image set is on the Hugging Face Hub, and how its columns are called."""

    dataset: str
    image: str = "image"
    label: str = "label"
    #: Column that says whose an image is, where the federation has natural clients.
    client: str | None = None
    split: str = "train"


_SAID = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
#: Sets that Flower Datasets fetches, by short name. Any other name is looked up on the Hub.
HUB = {name: Source(**said) for name, said in _SAID["hub"].items()}
#: The gallery's data files, by their names without ending; the fields are in ``fetch.toml``.
PAPERS: dict[str, dict[str, Any]] = _SAID["papers"]


def fetch(
    name: str,
    *,
    image: str | None = None,
    label: str | None = None,
    client: str | None = None,
    split: str | None = None,
    limit: int | None = None,
    folder: str | None = None,
) -> dict[str, NDArray[Any]]:
    """Fetch labeled images, or build a data file of the gallery from its originals.

    Image sets are kept where Flower Datasets and scikit-learn keep them.

    Parameters
    ----------
    name : str
        A key of `HUB`, `SCIKIT_LEARN` or `PAPERS`, or a dataset's own name on the Hugging Face Hub
        (``"imagefolder"``: images that are already here, see ``folder``).
    image, label : str, optional
        Columns of a dataset of the Hub; by default ``"image"`` and ``"label"``.
    client : str, optional
        Column that says whose an image is.
    split : str, optional
        By default ``"train"``.
    limit : int, optional
        Keep the first so many images.
    folder : str, optional
        For ``"imagefolder"``: a folder with a folder of images per label. For a key of `PAPERS`:
        where its originals are, or are downloaded to.

    Returns
    -------
    dict
        ``X`` (n, height, width), gray, bytes or float32; ``y`` (n,), integers; where the labels
        have names (as folders have) ``names`` (n_labels,), by label; with natural clients
        ``client`` (n,), integers from 0 on in the order of the clients' names. For a key of
        `PAPERS` the arrays that it says.

    Raises
    ------
    ValueError
        If a library is missing, the data cannot be fetched, or they are no images of one size
        with integer labels.
    """
    if limit is not None:
        check_count("limit", limit, 1)
    given = {"image": image, "label": label, "client": client, "split": split}
    if name in PAPERS:
        _check_unused(name, {**given, "limit": limit})
        return originals.build(name, PAPERS[name], None if folder is None else Path(folder))
    if name in SCIKIT_LEARN:
        _check_unused(name, {**given, "folder": folder})
        X, y = _at_the_first_use(name, SCIKIT_LEARN[name])
        return {"X": X[:limit], "y": y[:limit]}
    known = HUB.get(name, Source(name))
    source = known._replace(
        image=image or known.image,
        label=label or known.label,
        client=client or known.client,
        split=split or known.split,
    )
    rows = _at_the_first_use(name, lambda: _from_the_hub(source, folder))
    return columns(rows if limit is None else rows.select(range(min(limit, len(rows)))), source)


def _check_unused(name: str, given: dict[str, Any]) -> None:
    odd = sorted(key for key, value in given.items() if value is not None)
    if odd:
        raise ValueError(f"{', '.join(odd)} must not be given for {name!r}.")


def columns(rows: Any, source: Source) -> dict[str, NDArray[Any]]:
    """Return a `datasets.Dataset` of images as `fetch` does.

    Parameters
    ----------
    rows : datasets.Dataset
        Its image column holds pictures.
    source : Source
        The columns' names.

    Returns
    -------
    dict

    Raises
    ------
    ValueError
        See `fetch`.
    """
    wanted = [source.image, source.label, *([] if source.client is None else [source.client])]
    missing = sorted(set(wanted) - set(rows.column_names))
    if missing:
        raise ValueError(f"{source.dataset} must have the columns {missing}: {rows.column_names}.")
    if not len(rows):
        raise ValueError(f"images of {source.dataset} must be at least one, got none.")
    y = _column(rows, source, source.label)
    if y.dtype.kind not in "iu":
        raise ValueError(
            f"column {source.label!r} of {source.dataset} must hold integers, got {y.dtype}."
        )
    arrays = {"X": _gray(rows, source), "y": y}
    names = getattr(rows.features[source.label], "names", None)
    if names:
        arrays["names"] = np.array(names)
    if source.client is not None:
        whose = _column(rows, source, source.client)
        if whose.dtype.kind not in "iuU":
            raise ValueError(
                f"column {source.client!r} of {source.dataset} must hold integers or texts, "
                f"got {whose.dtype}."
            )
        arrays["client"] = np.unique(whose, return_inverse=True)[1]
    return arrays


def _column(rows: Any, source: Source, name: str) -> NDArray[Any]:
    """Return a column with one value per image."""
    column = rows[name][:]
    if any(isinstance(value, list | dict) for value in column):
        raise ValueError(f"column {name!r} of {source.dataset} must hold one value per image.")
    return np.asarray(column)


def _gray(rows: Any, source: Source) -> NDArray[np.uint8]:
    """Return the images in gray, (n, height, width).

    A small file may hold a large image: images are decoded one by one, and none that has another
    number of pixels than the first.
    """
    X = np.empty((0, 0, 0), dtype=np.uint8)
    for at, picture in enumerate(_pictures(rows, source)):
        width, height = picture.size
        if not at:
            check_count(f"pixels of {source.dataset}", len(rows) * height * width, 1, _PIXELS)
        if not at or height * width == X[0].size:
            gray = _decoded(picture, source)
            height, width = gray.shape
            if not at:
                X = np.empty((len(rows), height, width), dtype=np.uint8)
        if X.shape[1:] != (height, width):
            raise ValueError(
                f"images of {source.dataset} must have one size, got "
                f"{X.shape[1]}x{X.shape[2]} and {height}x{width}."
            )
        X[at] = gray
    return X


def _pictures(rows: Any, source: Source) -> Iterator[Any]:
    """Yield the images, opened and not decoded."""
    from datasets import Image as Column
    from PIL import Image

    if not isinstance(rows.features[source.image], Column):
        raise ValueError(f"column {source.image!r} of {source.dataset} must hold images.")
    files = rows.select_columns([source.image]).cast_column(source.image, Column(decode=False))
    for batch in files.iter(_AT_ONCE):
        for file in batch[source.image]:
            try:
                data = file["bytes"]
                yield Image.open(file["path"] if data is None else BytesIO(data))
            except Exception as error:
                raise _unreadable(source, error) from error


def _decoded(picture: Any, source: Source) -> NDArray[np.uint8]:
    """Return an image in gray, turned as its file says."""
    from PIL import ImageOps

    try:
        return np.asarray(ImageOps.exif_transpose(picture).convert("L"))
    except Exception as error:
        raise _unreadable(source, error) from error


def _unreadable(source: Source, error: Exception) -> ValueError:
    return ValueError(f"images of {source.dataset} must be readable: {error}")


def check_target(path: Path, *, overwrite: bool, suffix: str = ".npz") -> None:
    """Refuse a file that `save` cannot write, or that must not be replaced.

    Parameters
    ----------
    path : Path
        The file.
    overwrite : bool
        Whether one that is there may be replaced.
    suffix : str, default ".npz"
        How its name ends.

    Raises
    ------
    ValueError
        If its name ends otherwise, it is a folder, or is there and must stay.
    """
    if path.suffix != suffix:
        raise ValueError(f"out must end in {suffix}, got {str(path)!r}.")
    if path.is_dir() or (path.exists() and not overwrite):
        raise ValueError(
            f"out must be a new file, got {str(path)!r}, which exists: replace it with --overwrite."
        )


def save(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    """Write ``arrays`` to ``path``, an ``.npz`` file, compressed.

    Raises
    ------
    ValueError
        If ``path`` does not end in ``.npz``, or an array holds Python objects.
    """
    check_target(path, overwrite=True)
    objects = sorted(name for name, array in arrays.items() if array.dtype.hasobject)
    if objects:
        raise ValueError(f"arrays must be numbers or text, got Python objects in {objects}.")
    named: dict[str, Any] = dict(arrays)
    with replacing(path) as stream:  # a crash leaves no half a file that looks whole
        np.savez_compressed(stream, **named)


def _at_the_first_use(name: str, get: Callable[[], Any]) -> Any:
    """Return ``get()``; whatever hinders it is said in one sentence."""
    try:
        return get()
    except ImportError as error:
        raise ValueError(
            f"{name!r} needs {error.name}: the extras 'datasets' and 'experiments' bring it "
            "(in a clone of flwr-perdl: pip install '.[datasets,experiments]')."
        ) from error
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{name!r} could not be fetched: {reason}") from error


def _from_the_hub(source: Source, folder: str | None) -> Any:
    from flwr_datasets import FederatedDataset

    kept = FederatedDataset(
        dataset=source.dataset,
        partitioners={source.split: 1},
        shuffle=False,
        trust_remote_code=False,  # before version 4, datasets may run a script of the Hub
        **({} if folder is None else {"data_dir": folder}),
    )
    return kept.load_split(source.split)


def _olivetti() -> tuple[NDArray[Any], NDArray[Any]]:
    from sklearn.datasets import fetch_olivetti_faces

    faces = fetch_olivetti_faces()
    return faces.images, faces.target


def _labeled_faces() -> tuple[NDArray[Any], NDArray[Any]]:
    from sklearn.datasets import fetch_lfw_people

    faces = fetch_lfw_people(min_faces_per_person=20)
    return faces.images, faces.target


#: Sets that scikit-learn fetches.
SCIKIT_LEARN: dict[str, Callable[[], tuple[NDArray[Any], NDArray[Any]]]] = {
    "olivetti": _olivetti,
    "lfw": _labeled_faces,
}
