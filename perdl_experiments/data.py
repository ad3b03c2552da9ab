"""The experiments' data: handwritten digits, the user's own images, and planted dictionaries."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, wraps
from hashlib import file_digest, sha256
from inspect import signature
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar
from zipfile import BadZipFile, ZipFile, ZipInfo

import numpy as np
from numpy.typing import NDArray
from scipy.stats import ortho_group

from flwr_perdl.core.checks import Matrix, check_array
from flwr_perdl.core.npy import view_file

Given = ParamSpec("Given")
Loaded = TypeVar("Loaded")

#: Arrays of a file of regressions.
NAMES = ("X", "y", "client")
#: Hours of a day.
HOURS = 24
#: The most numbers that an experiment draws: eight gigabytes.
MOST_NUMBERS = 2**30

#: Characters of a label's name that are shown.
_LONGEST = 80

#: Files that a folder of frames may hold.
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".pgm", ".ppm")


class Images(NamedTuple):
    """Labeled images.

    Attributes
    ----------
    X : ndarray of shape (n_images, height * width)
        Pixels in [0, 1].
    y : ndarray of shape (n_images,)
        Integer labels.
    shape : tuple of int
        Height and width.
    client : ndarray of shape (n_images,), optional
        Whose each image is, where the federation has natural clients; integers.
    names : list of str, optional
        The labels' names, by label.
    """

    X: Matrix
    y: NDArray[np.integer[Any]]
    shape: tuple[int, int]
    client: NDArray[np.integer[Any]] | None = None
    names: list[str] | None = None


class Planted(NamedTuple):
    """Clients' data made from known dictionaries (equation 1 of the paper).

    Attributes
    ----------
    global_atoms : ndarray of shape (n_global, n_features)
        The planted atoms that all clients share.
    local_atoms : list of ndarray
        Each client's planted atoms of its own.
    samples : list of ndarray
        Each client's data.
    """

    global_atoms: Matrix
    local_atoms: list[Matrix]
    samples: list[Matrix]


def cached_by_file(maxsize: int) -> Callable[[Callable[Given, Loaded]], Callable[Given, Loaded]]:
    """Keep what a loader returns, as `functools.lru_cache` does, until its files change.

    The loader's first argument is the path of a file, of a folder of files, or neither.
    """

    def decorate(load: Callable[Given, Loaded]) -> Callable[Given, Loaded]:
        first = next(iter(signature(load).parameters))
        kept: Any = lru_cache(maxsize)(lambda files, *args, **options: load(*args, **options))

        @wraps(load)
        def cached(*args: Given.args, **options: Given.kwargs) -> Loaded:
            files = _seen(str(args[0] if args else options[first]))
            found: Loaded = kept(files, *args, **options)
            return found

        vars(cached).update(cache_info=kept.cache_info, cache_clear=kept.cache_clear)
        return cached

    return decorate


def _seen(path: str) -> Hashable:
    """Return what tells whether a file, or a folder's files, have changed."""
    seen = [(one.name, one.stat()) for one in files_at(path)]
    return os.path.abspath(path), *((name, at.st_mtime_ns, at.st_size) for name, at in seen)


def files_at(path: str) -> list[Path]:
    """Return the file at ``path``, or those of a folder that loaders read, by name; maybe none."""
    place = Path(path)
    if path and place.is_dir():
        files = (one for one in place.iterdir() if one.suffix.lower() in (".npz", *IMAGES))
        return sorted(one for one in files if one.is_file() and not one.name.startswith("."))
    return [place] if place.is_file() else []


def digest(path: str) -> str:
    """Return a SHA-256 of what `files_at` finds, their names and contents; "" where it is none."""
    files, whole = files_at(path), sha256()
    for one in files:
        with one.open("rb") as stream:
            whole.update(os.fsencode(one.name) + file_digest(stream, "sha256").digest())
    return whole.hexdigest() if files else ""


@cached_by_file(maxsize=2)
def load_images(path: str, labeled: bool = True) -> Images:
    """Load labeled images and bring them to [0, 1].

    Bytes are divided by 255; other values outside [0, 1] are divided by the greatest one, after a
    shift of the least one to 0 where it is negative.

    Parameters
    ----------
    path : str
        An ``.npz`` file with ``X`` (n, height, width) or (n, n_features), n_features a square
        number, ``y`` (n,) integer labels, ``names`` (n_labels,) where labels from 0 on have names,
        and ``client`` (n,) integers where clients are natural; ``""`` for scikit-learn's
        handwritten digits.
    labeled : bool, default True
        Whether the file must have ``y``; if not, it and ``names`` are not read, and labels are 0.

    Returns
    -------
    Images
        The images as rows; float32 stays float32.

    Raises
    ------
    ValueError
        If the file cannot be read, a key is missing, or an array is not as described.
    """
    if path and Path(path).is_dir():
        raise ValueError(
            f"data must be an .npz file of images, got {path!r}, which is a folder: "
            f"`flwr-perdl fetch imagefolder --folder {shlex.quote(path)}` makes one of it."
        )
    X, *given = _bundled_digits() if not path else read_arrays(path, *("X", "y")[: 1 + labeled])
    y = given[0] if given else np.zeros(X.shape[:1], np.intp)
    more = read_npz(path, "client", "names") if path and labeled else {}
    client, names = more.get("client"), more.get("names")
    if X.ndim not in (2, 3) or not len(X):
        raise ValueError(f"X in {path} must be (n, h, w) or (n, n_features), got shape {X.shape}.")
    check_pixels(X, path)
    for name, values in {"y": y, "client": y if client is None else client}.items():
        check_kind(name, path, values, "iu", f"{len(X)} integers", X.shape[:1])
    side = isqrt(X[0].size)
    if X.ndim == 2 and side * side != X.shape[1]:
        raise ValueError(
            f"X in {path} must have a square number of features or be (n, h, w), got {X.shape}."
        )
    shape = (side, side) if X.ndim == 2 else (X.shape[1], X.shape[2])
    if min(shape) < 3:
        raise ValueError(f"X in {path} must be images of at least 3x3 pixels, got {shape}.")
    if names is not None and (names.dtype.kind != "U" or not 0 <= y.min() <= y.max() < names.size):
        raise ValueError(
            f"names in {path} must be a text for each label from 0 to {y.max()}, got {names.size} "
            f"of {names.dtype}."
        )
    called = None
    if names is not None:
        called = [
            "".join(filter(str.isprintable, name[:_LONGEST])) for name in names.ravel().tolist()
        ]
    return Images(to_unit_range(X).reshape(len(X), -1), y, shape, client, called)


def _bundled_digits() -> tuple[NDArray[Any], NDArray[Any]]:
    from sklearn.datasets import load_digits  # an extra: not needed to import this module

    digits = load_digits()
    return digits.images / 16, digits.target


def read_npz(path: str, *keys: str) -> dict[str, NDArray[Any]]:
    """Return the arrays of an ``.npz`` file by name: those named ``keys``, or all.

    An array is read only where its header says as many bytes as the file has for it, so that no
    header makes room for what is not there.

    Raises
    ------
    ValueError
        If the file is not there, or cannot be read.
    """
    if not Path(path).exists():
        raise ValueError(f"data must be a file, got {path!r}, which does not exist.")
    if not Path(path).is_file():
        raise ValueError(f"data must be a file, got {path!r}, which is a folder.")
    try:
        with ZipFile(path) as archive:
            entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
            wanted = {key: entries[key] for key in keys if key in entries} if keys else entries
            return {key: _entry(archive, entry) for key, entry in wanted.items()}
    except BadZipFile:
        raise ValueError(
            f"data must be a whole .npz file, as numpy.savez({'data.npz'!r}, X=X) writes it, got "
            f"{path!r}, which is text, truncated or of another format."
        ) from None
    except Exception as error:
        raise ValueError(f"data must be a readable .npz file, got {path!r}: {error}") from error


def check_kind(
    name: str,
    path: str,
    array: NDArray[Any],
    kinds: str,
    what: str,
    shape: tuple[int, ...] | None = None,
) -> None:
    """Reject an array of a file that is of another kind or shape, or is no matrix by default.

    Parameters
    ----------
    name, path : str
        Which array of which file.
    array : ndarray
        The array.
    kinds : str
        NumPy's letters of the kinds that it may have.
    what : str
        What it must be, in words.
    shape : tuple of int, optional
        By default any of two dimensions.
    """
    fits = array.ndim == 2 if shape is None else array.shape == shape
    if not fits or array.dtype.kind not in kinds:
        raise ValueError(f"{name} in {path} must be {what}, got {array.dtype} {array.shape}.")


def check_pixels(X: NDArray[Any], path: str) -> None:
    """Reject images that `to_unit_range` does not take."""
    if X.dtype.kind not in "biu" and X.dtype not in (np.float64, np.float32):
        raise ValueError(f"X in {path} must be integers, float64 or float32, got {X.dtype}.")
    if not np.isfinite(X).all():
        raise ValueError(f"X in {path} must be finite, got NaN or infinite values.")


def _entry(archive: ZipFile, entry: ZipInfo) -> NDArray[Any]:
    """Return one array of an ``.npz`` file."""
    try:
        array, end = view_file(archive.read(entry))
    except ValueError as error:
        raise ValueError(f"{entry.filename}: {error}") from error
    if end != entry.file_size:
        raise ValueError(f"{entry.filename} has not as many bytes as its shape {array.shape} says")
    if array.dtype.kind == "U":
        code = np.dtype(np.uint32).newbyteorder(array.dtype.byteorder)
        if np.frombuffer(array.tobytes(), code).max(initial=0) > sys.maxunicode:
            raise ValueError(f"{entry.filename} has text that is no Unicode")
    return array.copy("A")


def read_arrays(path: str, *keys: str) -> list[NDArray[Any]]:
    """Return the arrays named ``keys`` of an ``.npz`` file, in this order.

    Raises
    ------
    ValueError
        If the file is not there or cannot be read, or a key is missing.
    """
    arrays = read_npz(path, *keys)
    missing = [key for key in keys if key not in arrays]
    if missing:
        raise ValueError(
            f"data must hold arrays named {', '.join(keys)}: {path!r} lacks {missing}."
        )
    return [arrays[key] for key in keys]


def by_client(
    path: str,
    X: NDArray[Any],
    y: NDArray[Any],
    client: NDArray[Any],
    *,
    missing: bool = False,
) -> tuple[list[Matrix], list[Matrix], list[str]]:
    """Return each client's rows and responses, and the clients' names.

    Parameters
    ----------
    path : str
        The file that they are from.
    X : ndarray of shape (n, n_features)
        Numbers.
    y : ndarray of shape (n,)
        Numbers.
    client : ndarray of shape (n,)
        Integers or texts: whose each row is.
    missing : bool, default False
        Whether ``X`` may have NaN.
    """
    check_kind("X", path, X, "fiub", "numbers of shape (n, n_features)")
    check_kind("y", path, y, "fiub", f"{len(X)} numbers", X.shape[:1])
    check_kind("client", path, client, "iuU", f"{len(X)} integers or texts", X.shape[:1])
    X = check_array(f"X in {path}", X.astype(float), min_rows=1, missing=missing)
    y = check_array(f"y in {path}", y.astype(float), ndim=1)
    names, own = np.unique(client, return_inverse=True)
    if len(names) < 2:
        raise ValueError(f"client in {path} must name at least 2 clients, got {len(names)}.")
    rows_of = [np.flatnonzero(own == i) for i in range(len(names))]
    return [X[rows] for rows in rows_of], [y[rows] for rows in rows_of], list(map(str, names))


def hourly_days(path: str) -> Matrix:
    """Return hourly signals as days, (n_sites, n_days, 24, n_quantities), NaN where missing.

    Parameters
    ----------
    path : str
        An ``.npz`` file with ``X`` (n_sites, n_hours, n_quantities), from midnight on.
    """
    (X,) = read_arrays(path, "X")
    if X.ndim != 3 or X.dtype.kind != "f" or X.shape[1] < HOURS:
        raise ValueError(
            f"X in {path} must be numbers (n_sites, n_hours, n_quantities), got {X.dtype} "
            f"{X.shape}."
        )
    n_days = X.shape[1] // HOURS
    return X[:, : n_days * HOURS].reshape(len(X), n_days, HOURS, -1).astype(float)


def to_unit_range(X: NDArray[Any]) -> Matrix:
    """Return images in [0, 1]; see `load_images` for how."""
    values = X if X.dtype in (np.float64, np.float32) else X.astype(np.float64)
    if X.dtype == np.uint8:
        return values / 255
    low, high = min(0.0, float(values.min())), float(values.max())
    if low == 0 and high <= 1:
        return values
    if high - low > float(np.finfo(values.dtype).max):
        values, low, high = values / 2, low / 2, high / 2
    scaled: Matrix = (values - values.dtype.type(low)) / values.dtype.type(high - low or 1)
    return scaled


def planted_clients(
    rng: np.random.Generator,
    n_atoms: Sequence[int],
    n_samples: Sequence[int],
    n_global: int,
    *,
    n_features: int,
    density: float = 0.2,
    floor: float = 0.3,
    noise: float = 0.0,
) -> Planted:
    """Make clients' data from orthonormal dictionaries that share atoms (Appendix A.1).

    A code is 0 with probability 1 - ``density``, else standard normal with its size raised to at
    least ``floor`` ("truncated" in the paper: a floor on the non-zeros).

    Parameters
    ----------
    rng : Generator
        Draws everything.
    n_atoms, n_samples : sequence of int
        Atoms and samples of each client.
    n_global : int
        Atoms shared by all clients: the first rows of every planted dictionary.
    n_features : int
        Dimension, at least the greatest number of atoms.
    density, floor : float
        The codes' share of non-zeros and their least size.
    noise : float, default 0
        Standard deviation of normal noise on the data.

    Returns
    -------
    Planted
        The atoms and the data.
    """
    check_size(sum(n_samples) * n_features)
    basis = ortho_group.rvs(n_features, random_state=rng)
    shared, rest = basis[:n_global], basis[n_global:]
    local_atoms, samples = [], []
    for r, n in zip(n_atoms, n_samples, strict=True):
        local = _random_rotation(rest.shape[0], rng)[: r - n_global] @ rest
        atoms = np.vstack([shared, local])
        values = rng.standard_normal((n, r))
        floored = np.where(np.abs(values) < floor, np.copysign(floor, values), values)
        codes = floored * (rng.random((n, r)) < density)
        samples.append(codes @ atoms + noise * rng.standard_normal((n, n_features)))
        local_atoms.append(local)
    return Planted(shared, local_atoms, samples)


def check_size(n_numbers: int) -> None:
    """Refuse options that make more numbers of data than fit in a machine's memory."""
    if n_numbers > MOST_NUMBERS:
        raise ValueError(
            f"clients and their samples must make at most {MOST_NUMBERS} numbers, got {n_numbers}."
        )


def _random_rotation(size: int, rng: np.random.Generator) -> Matrix:
    if size < 2:  # scipy's ortho_group starts at 2
        return np.full((size, size), rng.choice([-1.0, 1.0]))
    rotation: Matrix = ortho_group.rvs(size, random_state=rng)
    return rotation
