"""The gallery's data files, built from small originals that the tests make."""

from __future__ import annotations

import copy
import gzip
import io
import tarfile
import zipfile
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import scipy.io
import scipy.sparse
from PIL import Image
from typer.testing import CliRunner

from perdl_experiments import originals
from perdl_experiments.cli import app
from perdl_experiments.data import load_images
from perdl_experiments.fetch import PAPERS, fetch, save

Arrays = dict[str, Any]
rng = np.random.default_rng(0)


def zipped(**files: bytes | str) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return held.getvalue()


def tarred(**files: bytes) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as archive:
        for name, content in files.items():
            (info := tarfile.TarInfo(name)).size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return held.getvalue()


def matlab(**arrays: Any) -> bytes:
    held = io.BytesIO()
    scipy.io.savemat(held, arrays)
    return held.getvalue()


def picture(pixels: Any, form: str) -> bytes:
    held = io.BytesIO()
    Image.fromarray(pixels).save(held, form)
    return held.getvalue()


def csv(rows: Any) -> str:
    return "".join(",".join(map(str, row)) + "\n" for row in rows)


def mnist() -> tuple[list[bytes], Arrays]:
    y = np.repeat(np.arange(3, dtype=np.uint8), 4)
    X = np.arange(12 * 9, dtype=np.uint8).reshape(12, 3, 3)
    images = b"\0\0\x08\x03" + np.array(X.shape, ">i4").tobytes() + X.tobytes()
    labels = b"\0\0\x08\x01" + np.array(y.shape, ">i4").tobytes() + y.tobytes()
    return [gzip.compress(images), gzip.compress(labels)], {"X": X / 255, "y": y}


def cifar() -> tuple[list[bytes], Arrays]:
    y = np.tile(np.arange(2, dtype=np.uint8), 5)
    X = rng.integers(256, size=(10, 32, 32, 3), dtype=np.uint8)
    rows = np.column_stack([y, X.transpose(0, 3, 1, 2).reshape(10, -1)])
    parts = {
        f"cifar-10-batches-bin/data_batch_{k + 1}.bin": rows[2 * k : 2 * k + 2].tobytes()
        for k in range(5)
    }
    return [tarred(**parts)], {"X": X, "y": y}


def highway() -> tuple[list[bytes], Arrays]:
    gray = (10 * np.arange(40)[:, None, None] % 250 + np.zeros((16, 16))).astype(np.uint8)
    mask = rng.choice(np.array([0, 50, 170, 255], np.uint8), size=gray.shape)
    shots = {f"highway/input/in{900 + k:06}.jpg": picture(x, "JPEG") for k, x in enumerate(gray)}
    truth = {
        f"highway/groundtruth/gt{900 + k:06}.png": picture(x, "PNG") for k, x in enumerate(mask)
    }
    return [zipped(**shots, **truth)], {"X": gray / 255, "mask": mask == 255}


def samson() -> tuple[list[bytes], Arrays]:
    scene, shares = rng.uniform(size=(2, 3, 5)), rng.uniform(size=(2, 3, 2))
    scene[0, 0, 0] = 1.0
    M = rng.uniform(size=(5, 2))
    V, A = (one.reshape(6, -1, order="F").T for one in (scene, shares))  # down the columns
    first, truth = matlab(V=V, nRow=2.0, nCol=3.0), matlab(M=M, A=A)
    rows = {"X": scene.reshape(6, 5), "abundances": shares.reshape(6, 2)}
    return [first, truth], {**rows, "shape": [2, 3], "endmembers": M.T}


def tdt2() -> tuple[list[bytes], Arrays]:
    counts = scipy.sparse.random(6, 9, 0.4, "csc", rng=rng)
    y = np.array([[1], [1], [2], [2], [3], [3]])
    rows = counts.tocsr()
    rows.sort_indices()
    made = {"data": rows.data, "indices": rows.indices, "indptr": rows.indptr, "y": y.ravel()}
    return [matlab(fea=counts, gnd=y)], {**made, "shape": [6, 9], "format": np.array(b"csr")}


def school() -> tuple[list[bytes], Arrays]:
    X, y = ([rng.uniform(size=(n, d)) for n in (2, 3)] for d in (4, 1))
    cells = []
    for one in (X, y):
        cells.append(np.empty((1, 2), object))
        cells[-1][0] = one
    made = {"X": np.vstack(X), "y": np.vstack(y).ravel(), "client": [0, 0, 1, 1, 1]}
    return [matlab(X=cells[0], Y=cells[1])], made


def heart() -> tuple[list[bytes], Arrays]:
    X, y = rng.integers(100, size=(8, 13)).astype(float), np.arange(8) % 5
    X[3, 12] = np.nan
    rows = [["?" if np.isnan(x) else x for x in row] for row in np.column_stack([X, y])]
    places = ("cleveland", "hungarian", "switzerland", "va")
    tables = {f"processed.{one}.data": csv(rows[2 * k : 2 * k + 2]) for k, one in enumerate(places)}
    hospital = ["Cleveland", "Budapest", "Zurich and Basel", "Long Beach"]
    return [zipped(**tables)], {"X": X, "y": y, "client": np.arange(8) // 2, "hospital": hospital}


def parkinsons() -> tuple[list[bytes], Arrays]:
    head = ["subject#", "age", "sex", "test_time", "motor_UPDRS", "total_UPDRS", "NHR"]
    rows = np.column_stack([[1, 1, 7], rng.uniform(size=(3, 6))])
    made = {"y": rows[:, 5], "motor": rows[:, 4], "client": [0, 0, 1]}
    features = {"X": rows[:, [1, 2, 3, 6]], "features": ["age", "sex", "test_time", "NHR"]}
    return [zipped(**{"parkinsons_updrs.data": csv([head, *rows])})], {**made, **features}


def beijing() -> tuple[list[bytes], Arrays]:
    columns = ["PM2.5", "PM10", "SO2", "NO2", "CO", "O3", "TEMP", "PRES", "DEWP", "RAIN", "WSPM"]
    X = rng.uniform(size=(2, 3, 11)).astype(np.float32)
    X[1, 2, 4] = np.nan
    files = {}
    for name, table in zip(("Wanliu", "Aotizhongxin"), X[::-1], strict=True):
        shown = [["NA" if np.isnan(x) else x for x in row] for row in table]
        rows = [[k, *row[:10], "NNW", row[10], name] for k, row in enumerate(shown)]
        files[f"PRSA_Data_{name}.csv"] = csv(
            [["No", *columns[:10], "wd", "WSPM", "station"], *rows]
        )
    whole = {"PRSA2017_Data.zip": zipped(**files), "data.csv": "another"}
    return [zipped(**whole)], {"X": X, "station": ["Aotizhongxin", "Wanliu"], "columns": columns}


def phones() -> tuple[list[bytes], Arrays]:
    X = rng.uniform(size=(5, 43)).astype(np.float32)
    X[1, 30] = np.nan
    users, did = [17, 33, 2, 2, 18], ["Walking", "Sitting", "Jogging", "Walking", "Sitting"]
    shown = [["?" if np.isnan(x) else x for x in row] for row in X]
    rows = [[k, users[k], *row, did[k]] for k, row in enumerate(shown)]
    text = "@relation r\n@attribute user numeric\n@data\n" + csv(rows)
    kept = [0, 2, 3, 4]
    made = {"X": X[kept], "client": [17, 2, 2, 18], "y": [2, 0, 2, 1]}
    name = "WISDM_ar_v1.1/WISDM_ar_v1.1_transformed.arff"
    return [tarred(**{name: text.encode()})], {**made, "classes": ["Jogging", "Sitting", "Walking"]}


MADE: dict[str, Callable[[], tuple[list[bytes], Arrays]]] = {
    "mnist12k": mnist,
    "cifar12k": cifar,
    "highway40": highway,
    "samson": samson,
    "tdt2": tdt2,
    "school": school,
    "heart": heart,
    "parkinsons": parkinsons,
    "beijing": beijing,
    "phones18": phones,
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Arrays]:
    """Return a function that writes a file's originals to ``tmp_path`` as if they were published.

    It returns what is to be built.
    """
    monkeypatch.setattr(originals, "EACH", 3)

    def write(name: str) -> Arrays:
        contents, made = MADE[name]()
        said = copy.deepcopy(PAPERS[name])
        for one, content in zip(said["originals"], contents, strict=True):
            (tmp_path / one["name"]).write_bytes(content)
            if "sha256" in one:
                one["sha256"] = sha256(content).hexdigest()
        monkeypatch.setitem(PAPERS, name, said)
        return made

    return write


def test_every_file_has_a_builder_or_says_that_it_has_none() -> None:
    assert {name for name, said in PAPERS.items() if said["originals"]} == {*MADE}
    for name in PAPERS.keys() - MADE.keys():
        with pytest.raises(ValueError, match=f"^{name} can't be built here: get .* from https:"):
            fetch(name)


@pytest.mark.parametrize("name", MADE)
def test_a_file_is_built_from_its_originals(
    name: str, place: Callable[[str], Arrays], tmp_path: Path
) -> None:
    made = place(name)
    found = fetch(name, folder=str(tmp_path))
    if name in ("mnist12k", "cifar12k"):  # a draw: three of each label
        rows = {row.tobytes(): label for row, label in zip(made["X"], made["y"], strict=True)}
        assert len({row.tobytes() for row in found["X"]}) == len(found["X"])
        assert [rows[row.tobytes()] for row in found["X"]] == found["y"].tolist()
        assert np.unique(found["y"], return_counts=True)[1].tolist() == [3] * len({*made["y"]})
    else:
        assert found.keys() >= made.keys()
        close = 0 if name not in ("highway40", "samson") else 1e-6
        for key, value in made.items():
            if np.asarray(value).dtype.kind == "f":
                np.testing.assert_allclose(found[key], value, rtol=0, atol=close)
            else:
                np.testing.assert_array_equal(found[key], value)
    save(tmp_path / "made.npz", found)
    if name == "tdt2":
        assert scipy.sparse.load_npz(tmp_path / "made.npz").shape == (6, 9)
    if name == "mnist12k":
        assert load_images(str(tmp_path / "made.npz")).shape == (3, 3)


def test_originals_are_downloaded_once_and_from_the_next_address_where_one_fails(
    place: Callable[[str], Arrays], tmp_path: Path
) -> None:
    place("mnist12k")
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    )
    Thread(target=server.serve_forever, daemon=True).start()
    here = f"http://127.0.0.1:{server.server_port}"
    for one in PAPERS["mnist12k"]["originals"]:
        one["urls"] = [f"{here}/nowhere", f"{here}/{one['name']}"]
    given = ["fetch", "mnist12k", "--folder", str(tmp_path / "kept"), "--out"]
    done = CliRunner().invoke(app, [*given, str(tmp_path / "first.npz")])
    server.shutdown()
    server.server_close()
    assert done.exit_code == 0, done.output
    assert "X (9, 3, 3), y (9,); the same construction, another draw" in done.output
    done = CliRunner().invoke(app, [*given, str(tmp_path / "second.npz")])
    assert done.exit_code == 0, done.output
    first, second = (np.load(tmp_path / f"{one}.npz")["X"] for one in ("first", "second"))
    np.testing.assert_array_equal(first, second)


def test_what_hinders_a_build_is_said_in_a_sentence(
    place: Callable[[str], Arrays], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def invoke(name: str, *more: str) -> str:
        given = ["fetch", name, "--out", str(tmp_path / "out.npz"), *more]
        done = CliRunner().invoke(app, given)
        assert done.exit_code == 2
        assert not (tmp_path / "out.npz").exists()
        (line,) = done.stderr.splitlines()
        return line

    def offline(*_: object, **__: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(originals, "urlopen", offline)
    line = invoke("heart")
    assert line.startswith(
        "flwr-perdl: heart needs heart+disease.zip (https://archive.ics.uci.edu/"
    )
    assert line.endswith("with --folder FOLDER, the folder where it is.")
    assert "get it from https://rslab.ut.ac.ir/data" in invoke("samson")
    place("mnist12k")
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(b"another")
    line = invoke("mnist12k", "--folder", str(tmp_path))
    assert "train-labels-idx1-ubyte.gz must be the published file (SHA-256 " in line
    (tmp_path / "heart+disease.zip").write_bytes(zipped(another="file"))
    line = invoke("heart", "--folder", str(tmp_path))
    assert "heart can't be built from heart+disease.zip (KeyError" in line
    assert "limit must not be given for 'heart'" in invoke("heart", "--limit", "3")
