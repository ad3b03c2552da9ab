"""The gallery's data files, built from their originals: where these are is in ``fetch.toml``."""

from __future__ import annotations

import csv
import gzip
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from hashlib import file_digest
from http.client import HTTPException
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any
from urllib.request import urlopen
from zipfile import ZipFile

import numpy as np
import scipy.io
import scipy.sparse
from numpy.typing import NDArray

from flwr_perdl.core.files import replacing

Arrays = dict[str, NDArray[Any]]
Files = Mapping[str, Path]

#: Images of each label that a file keeps, and the seed that draws them.
EACH, SEED = 1200, 0
#: Seconds without an answer after which a download fails.
_PATIENCE = 60.0
#: What CDnet's masks say of a pixel of a moving object.
_MOVING = 255


def build(name: str, said: Mapping[str, Any], folder: Path | None = None) -> Arrays:
    """Return the arrays of a data file of the gallery.

    Parameters
    ----------
    name : str
        The file's name without its ending.
    said : mapping
        What ``fetch.toml`` says of it.
    folder : Path, optional
        Where the originals are; those that are missing are downloaded to it. By default all of them
        are downloaded, and not kept.

    Raises
    ------
    ValueError
        If an original cannot be downloaded, is not the published one, or not as expected.
    """
    if name not in _BUILDERS:
        raise ValueError(f"{name} can't be built here: get {said['source']} from {said['home']}.")
    with tempfile.TemporaryDirectory() as kept:
        place = Path(kept) if folder is None else folder
        files = {
            one["name"]: _original(name, one, said["home"], place) for one in said["originals"]
        }
        try:
            return _BUILDERS[name](files)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise ValueError(
                f"{name} can't be built from {', '.join(files)} ({reason})."
            ) from error


def _original(name: str, one: Mapping[str, Any], home: str, folder: Path) -> Path:
    """Return where an original is, after a download where it is missing."""
    path = folder / str(one["name"])
    by_hand = f"get it from {home} and run again with --folder FOLDER, the folder where it is"
    if not path.is_file():
        reason = ""
        for url in one.get("urls", ()):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with urlopen(url, timeout=_PATIENCE) as source, replacing(path) as stream:
                    shutil.copyfileobj(source, stream)
                break
            except (OSError, HTTPException) as error:
                reason = f" ({url}: {error})"
        else:
            raise ValueError(f"{name} needs {one['name']}{reason}: {by_hand}.")
    with path.open("rb") as stream:
        found = file_digest(stream, "sha256").hexdigest()
    if found != one.get("sha256", found):
        raise ValueError(
            f"{one['name']} must be the published file (SHA-256 {one['sha256']}), got {found}: "
            f"{by_hand}."
        )
    return path


# Images ---------------------------------------------------------------------------------------


def _drawn(X: NDArray[Any], y: NDArray[Any]) -> Arrays:
    """Return so many images of each label, drawn by the seed, in the order of the draw."""
    order = np.random.default_rng(SEED).permutation(len(y))
    kept = np.zeros(len(y), bool)
    for label in np.unique(y):
        of_label = np.flatnonzero(y[order] == label)
        if len(of_label) < EACH:
            raise ValueError(f"label {label} has {len(of_label)} images, fewer than {EACH}")
        kept[of_label[:EACH]] = True
    chosen = order[kept]
    return {"X": X[chosen], "y": y[chosen].astype(np.int64)}


def _mnist(files: Files) -> Arrays:
    images, labels = (gzip.decompress(path.read_bytes()) for path in files.values())
    shape = np.frombuffer(images, ">i4", 3, offset=4)
    X = np.frombuffer(images, np.uint8, offset=16).reshape(shape)
    found = _drawn(X, np.frombuffer(labels, np.uint8, offset=8))
    return {**found, "X": found["X"] / 255}


def _cifar(files: Files) -> Arrays:
    (path,) = files.values()
    with tarfile.open(path) as archive:
        parts = [_member(archive, f"cifar-10-batches-bin/data_batch_{k}.bin") for k in range(1, 6)]
    rows = np.frombuffer(b"".join(parts), np.uint8).reshape(-1, 1 + 3 * 32 * 32)
    return _drawn(rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), rows[:, 0])


def _highway(files: Files) -> Arrays:
    from PIL import Image

    def gray(name: str) -> NDArray[np.uint8]:
        with Image.open(BytesIO(archive.read(name))) as picture:
            return np.asarray(picture.convert("L"))

    (path,) = files.values()
    with ZipFile(path) as archive:
        X = [gray(f"highway/input/in{k:06}.jpg") for k in range(900, 940)]
        mask = [gray(f"highway/groundtruth/gt{k:06}.png") for k in range(900, 940)]
    return {"X": np.stack(X) / 255, "mask": np.stack(mask) == _MOVING}


def _samson(files: Files) -> Arrays:
    """Return the scene; MATLAB's pixels go down the columns, ours along the rows."""
    scene, truth = (scipy.io.loadmat(path) for path in files.values())
    shape = int(scene["nRow"].item()), int(scene["nCol"].item())
    along = np.arange(shape[0] * shape[1]).reshape(shape[::-1]).T.ravel()
    X = scene["V"].T[along]
    return {
        "X": (X / X.max()).astype(np.float32),
        "shape": np.array(shape),
        "endmembers": truth["M"].T.astype(np.float32),
        "abundances": truth["A"].T[along].astype(np.float32),
    }


# Tables ---------------------------------------------------------------------------------------


def _numbers(rows: Any) -> NDArray[np.float64]:
    """Return rows of text as numbers; NaN where one is missing."""
    return np.array([[float(x) if x not in ("?", "NA", "") else np.nan for x in r] for r in rows])


def _tdt2(files: Files) -> Arrays:
    (path,) = files.values()
    found = scipy.io.loadmat(path)
    counts = scipy.sparse.csr_matrix(found["fea"])
    counts.sort_indices()
    return {
        **{name: getattr(counts, name) for name in ("indices", "indptr", "data")},
        "format": np.array(b"csr"),
        "shape": np.array(counts.shape),
        "y": found["gnd"].ravel().astype(np.int64),
    }


def _school(files: Files) -> Arrays:
    (path,) = files.values()
    found = scipy.io.loadmat(path)
    X, y = ([np.asarray(one, float) for one in found[key].ravel()] for key in "XY")
    whose = np.repeat(np.arange(len(X)), list(map(len, X)))
    return {"X": np.concatenate(X), "y": np.concatenate(y).ravel(), "client": whose}


def _heart(files: Files) -> Arrays:
    (path,) = files.values()
    places = {
        "cleveland": "Cleveland",
        "hungarian": "Budapest",
        "switzerland": "Zurich and Basel",
        "va": "Long Beach",
    }
    columns = "age sex cp trestbps chol fbs restecg thalach exang oldpeak slope ca thal"
    with ZipFile(path) as archive:
        tables = [
            _numbers(csv.reader(StringIO(archive.read(f"processed.{place}.data").decode())))
            for place in places
        ]
    rows = np.concatenate(tables)
    return {
        "X": rows[:, :-1],
        "y": rows[:, -1].astype(np.int64),
        "client": np.repeat(np.arange(len(tables)), list(map(len, tables))),
        "hospital": np.array(list(places.values())),
        "features": np.array(columns.split()),
    }


def _parkinsons(files: Files) -> Arrays:
    (path,) = files.values()
    with ZipFile(path) as archive:
        head, *rows = csv.reader(StringIO(archive.read("parkinsons_updrs.data").decode()))
    table, at = _numbers(rows), {name: j for j, name in enumerate(head)}
    features = [one for one in head if one not in ("subject#", "motor_UPDRS", "total_UPDRS")]
    return {
        "X": table[:, [at[one] for one in features]],
        "y": table[:, at["total_UPDRS"]],
        "motor": table[:, at["motor_UPDRS"]],
        "client": np.unique(table[:, at["subject#"]], return_inverse=True)[1],
        "features": np.array(features),
    }


def _beijing(files: Files) -> Arrays:
    (path,) = files.values()
    columns = ["PM2.5", "PM10", "SO2", "NO2", "CO", "O3", "TEMP", "PRES", "DEWP", "RAIN", "WSPM"]
    X, stations = [], []
    with ZipFile(path) as outer:
        (inner,) = (
            one for one in outer.namelist() if one.startswith("PRSA") and one[-4:] == ".zip"
        )
        with ZipFile(BytesIO(outer.read(inner))) as archive:
            for name in sorted(one for one in archive.namelist() if one.endswith(".csv")):
                rows = list(csv.DictReader(StringIO(archive.read(name).decode())))
                X.append(_numbers([row[one] for one in columns] for row in rows))
                stations.append(rows[0]["station"])
    return {
        "X": np.stack(X).astype(np.float32),
        "columns": np.array(columns),
        "station": np.array(stations),
    }


def _phones(files: Files) -> Arrays:
    (path,) = files.values()
    with tarfile.open(path) as archive:
        text = _member(archive, "WISDM_ar_v1.1/WISDM_ar_v1.1_transformed.arff").decode()
    _, rows = text.split("@data", 1) if "@data" in text else text.split("@DATA", 1)
    table = [row for row in csv.reader(StringIO(rows.strip())) if 1 <= int(row[1]) <= 18]
    classes, y = np.unique([row[-1].strip() for row in table], return_inverse=True)
    return {
        "X": _numbers(row[2:-1] for row in table).astype(np.float32),
        "y": y.astype(np.int8),
        "client": np.array([int(row[1]) for row in table], np.int16),
        "classes": classes,
    }


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    stream = archive.extractfile(name)
    if stream is None:
        raise ValueError(f"{name} is no file")
    return stream.read()


_BUILDERS: dict[str, Callable[[Files], Arrays]] = {
    "mnist12k": _mnist,
    "cifar12k": _cifar,
    "highway40": _highway,
    "samson": _samson,
    "tdt2": _tdt2,
    "school": _school,
    "heart": _heart,
    "parkinsons": _parkinsons,
    "beijing": _beijing,
    "phones18": _phones,
}
