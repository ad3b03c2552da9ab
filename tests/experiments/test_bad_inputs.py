"""Bad and edge inputs: exit status 2 with one sentence and nothing lost, or a right result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from perdl_experiments import run_experiment
from perdl_experiments.cli import app
from perdl_experiments.clips import load_clip
from perdl_experiments.data import load_images
from perdl_experiments.documents import read_documents
from perdl_experiments.studies import EXPERIMENTS

quick = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
#: No option of the type of the default takes these.
BAD: dict[type, list[str]] = {
    int: ["", "x", "2.5", "-1", "1e3", "nan", "1000000000000", "٣x"],
    float: ["", "x", "-1", "nan", "inf", "1,5"],
    str: ["", "-1", "nan", "ty po", "1e9x"],
}
TINY = ["--clients", "3", "--rounds", "1", "-o", "n_atoms=4", "-o", "n_global=2"]


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def assert_refused(result: Result) -> str:
    """Assert that a command ended with one sentence; return it."""
    assert result.exit_code == 2, (result.output, result.exception)
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("flwr-perdl: ")
    assert "Traceback" not in result.output
    assert result.stdout == ""
    return line


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, and the finished run of another experiment in `done`."""
    folder = tmp_path_factory.mktemp("place")
    rng = np.random.default_rng(0)
    np.savez(folder / "images.npz", X=rng.random((60, 6, 6)), y=np.arange(60) % 3)
    (folder / "sites").mkdir()
    for i in range(3):
        np.savez(folder / "sites" / f"{i}.npz", X=rng.random((30, 5)))
    run_experiment("synthetic", clients=2, rounds=1, options={"seeds": 1}, out=folder / "done")
    return folder


@st.composite
def bad_options(draw: st.DrawFn) -> tuple[str, str, str]:
    name = draw(st.sampled_from(sorted(EXPERIMENTS)))
    option, default = draw(st.sampled_from(sorted(EXPERIMENTS[name].defaults.items())))
    value = draw(st.sampled_from(BAD[type(default)]))
    if option == "data":
        value = "nowhere"
    if option == "seed" and value == "1000000000000":
        value = "-2"
    return name, option, value


def given_data(name: str, place: Path, but: str) -> Iterator[object]:
    """Yield what an experiment needs that has no data of its own, but one option."""
    data = {"images": "images.npz", "sites": "sites"}.get(name)
    if data is not None and but != "data":
        yield from ("--data", place / data)
        for option, value in (("n_atoms", 4), ("n_global", 2)):
            if option != but:
                yield from ("-o", f"{option}={value}")


@quick
@given(case=bad_options(), replace=st.booleans())
def test_a_bad_option_is_refused_in_a_sentence_and_changes_nothing(
    place: Path, case: tuple[str, str, str], replace: bool
) -> None:
    name, option, value = case
    out = ["--out", place / "done", "--overwrite"] if replace else ["--out", place / "new" / "er"]
    before = files(place)
    assert_refused(
        invoke("run", name, *out, *given_data(name, place, option), "-o", f"{option}={value}")
    )
    assert files(place) == before


FOREIGN = ["run.json", "run.json, deep", "results.json", "report.html", "arrays.npz"]
KINDS = [*FOREIGN, "checkpoints", "state", "kept", "next", "error.png"]
KINDS += ["a file", "under a file"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", [["--overwrite"], ["--resume"]])
def test_a_folder_that_is_no_runs_stays_as_it_is(tmp_path: Path, kind: str, how: list[str]) -> None:
    out = tmp_path / "out"
    if kind in ("a file", "under a file"):
        out.write_text("mine")
        out = out / "er" if kind == "under a file" else out
    else:
        out.mkdir()
        name, _, deep = kind.partition(", ")
        (out / name).write_text("[" * 10**5 if deep else "[1]")
    before = files(tmp_path)
    assert_refused(invoke("run", "digits", "--out", out, *TINY, *how))
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("digits", "clients", 10**9),
        ("synthetic", "clients", 100_000),
        ("synthetic", "seeds", 10**9),
        ("comparison", "samples", 10**6),
        ("inference", "agents", 10**6),
        ("sites", "clients", 4),
    ],
)
def test_what_no_machine_can_serve_is_refused_at_once(
    tmp_path: Path, place: Path, name: str, option: str, value: int
) -> None:
    more = ["-o", "samples=100000"] if option == "clients" and name == "synthetic" else []
    more += ["--clients", "100000"] if name == "comparison" else []
    given = ["-o", f"{option}={value}", *more, *given_data(name, place, option)]
    line = assert_refused(invoke("run", name, *given, "--out", tmp_path / "out"))
    assert "at most" in line or "more images" in line
    assert not (tmp_path / "out").exists()


IMAGES: dict[str, Any] = {"X": np.zeros((4, 3, 3)), "y": np.arange(4)}
#: As `scipy.sparse.save_npz` writes three documents of one term each.
COUNTS: dict[str, Any] = {
    "data": np.ones(3),
    "indices": np.arange(3),
    "indptr": np.arange(4),
    "shape": (3, 3),
    "format": b"csr",
    "y": [1, 2, 3],
}


@pytest.mark.parametrize(
    ("load", "arrays", "named"),
    [
        (load_images, {"X": IMAGES["X"]}, "y"),
        (load_images, {"X": np.zeros((0, 3, 3)), "y": np.arange(0)}, "X"),
        (load_images, IMAGES | {"X": np.zeros((4, 10))}, "X"),
        (load_images, IMAGES | {"X": np.zeros((4, 2, 9))}, "X"),
        (load_images, IMAGES | {"y": np.arange(3)}, "y"),
        (load_images, IMAGES | {"client": np.arange(3)}, "client"),
        (load_images, IMAGES | {"names": np.array(["brick", "sand"])}, "names"),
        (load_images, IMAGES | {"y": np.array([*"abcd"], object)}, "y"),
        (read_documents, {k: COUNTS[k] for k in COUNTS if k != "y"}, "y"),
        (read_documents, COUNTS | {"y": [1, 2]}, "y"),
        (read_documents, COUNTS | {"data": -np.ones(3)}, "data"),
        (read_documents, COUNTS | {"data": 1j * np.ones(3)}, "data"),
        (read_documents, COUNTS | {"indices": [0, 1, 9]}, "data"),
        (read_documents, COUNTS | {"format": b"csc"}, "data"),
        (read_documents, COUNTS | {"time": [1, 2]}, "time"),
        (read_documents, COUNTS | {"time": [1, np.nan, 2]}, "time"),
        (load_clip, {"X": np.zeros((5, 9))}, "X"),
        (load_clip, {"X": np.zeros((2, 9, 9))}, "X"),
        (load_clip, {"X": np.zeros((5, 9, 9)), "mask": np.zeros((5, 9))}, "mask"),
    ],
)
def test_a_bad_data_file_gets_one_sentence(
    load: Callable[..., Any], arrays: dict[str, Any], named: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(ValueError, match=rf"\b{named}\b") as caught:
        load(str(tmp_path / "bad.npz"), *[0] * (load is load_clip))
    assert "\n" not in str(caught.value)
