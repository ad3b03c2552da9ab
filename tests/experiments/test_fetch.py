"""Public image sets: from folders that the tests make, and from scikit-learn's own store."""

from __future__ import annotations

import io
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits
from typer.testing import CliRunner

from flwr_perdl.simulations import imbalanced_partition
from perdl_experiments.cli import app
from perdl_experiments.data import load_images
from perdl_experiments.fetch import Source, columns, fetch, save

if find_spec("flwr_datasets") is None:
    pytest.skip("the extra 'datasets' is not installed", allow_module_level=True)

import datasets
import joblib
from flwr_datasets import FederatedDataset
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from flwr_perdl.random import DATA, spawn
from flwr_perdl.simulations.partitioner import MajorityLabelPartitioner


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of 60 digits as PNG files, a folder per label; nothing kept elsewhere."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    digits = load_digits()
    for i in range(60):
        folder = tmp_path / "pictures" / str(digits.target[i])
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[i] * 15.9).astype(np.uint8)).save(folder / f"{i}.png")
    return tmp_path / "pictures"


def table(**more: list[Any]) -> datasets.Dataset:
    """Return two 3x4 images in colour."""
    red = Image.fromarray(np.full((3, 4, 3), (255, 0, 0), np.uint8))
    white = Image.fromarray(np.full((3, 4, 3), 255, np.uint8))
    kinds = {"image": datasets.Image(), "label": datasets.Value("int64")}
    features = {**kinds, **{key: datasets.Value("string") for key in more}}
    return datasets.Dataset.from_dict(
        {"image": [red, white], "label": [3, 5], **more}, features=datasets.Features(features)
    )


def test_images_of_a_folder_become_data_for_run(pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "made" / "digits.npz"
    done = CliRunner().invoke(
        app, ["fetch", "imagefolder", "--folder", str(pictures), "--out", str(out)]
    )
    assert done.exit_code == 0, done.output
    assert "60 images, 8x8, 10 labels" in done.output
    images = load_images(str(out))
    digits = load_digits()
    rows = {tuple(row): label for row, label in zip(images.X, images.y, strict=True)}
    for i in range(60):
        row = (digits.images[i] * 15.9).astype(np.uint8).reshape(-1) / 255
        assert rows[tuple(row)] == digits.target[i]
    half = fetch("imagefolder", folder=str(pictures), limit=30)
    assert half["X"].shape == (30, 8, 8)
    assert half["X"].dtype == np.uint8


def test_the_partitioner_splits_as_the_experiment_does(pictures: Path) -> None:
    parts = MajorityLabelPartitioner(4, size=6, seed=2)
    source = FederatedDataset(
        dataset="imagefolder",
        partitioners={"train": parts},
        shuffle=False,
        data_dir=str(pictures),
    )
    own = [source.load_partition(i) for i in range(4)]
    arrays = fetch("imagefolder", folder=str(pictures))
    split = imbalanced_partition(arrays["y"], 4, 6, spawn(2, DATA))
    assert parts.num_partitions == 4
    assert parts.labels == split.labels
    for got, indices in zip([*own, parts.load_test()], [*split.clients, split.test], strict=True):
        same = columns(got, Source("imagefolder"))
        np.testing.assert_array_equal(same["X"], arrays["X"][indices])
        np.testing.assert_array_equal(same["y"], arrays["y"][indices])
    for label, client in zip(parts.labels, own, strict=True):
        assert np.mean(np.array(client["label"][:]) == label) >= 0.8
    with pytest.raises(ValueError, match=r"^partition_id"):
        parts.load_partition(4)


def test_colours_become_grey_and_clients_get_numbers() -> None:
    arrays = columns(table(writer=["b", "a"]), Source("ours", client="writer"))
    np.testing.assert_array_equal(
        arrays["X"], np.stack([np.full((3, 4), 76), np.full((3, 4), 255)])
    )
    np.testing.assert_array_equal(arrays["y"], [3, 5])
    np.testing.assert_array_equal(arrays["client"], [1, 0])


def pictures_of(*files: bytes, **columns: list[Any]) -> datasets.Dataset:
    """Return a set whose images are these files, and other columns as they are."""
    shown = {"image": [{"bytes": file, "path": None} for file in files]}
    rows = datasets.Dataset.from_dict({**shown, "label": list(range(len(files))), **columns})
    return rows.cast_column("image", datasets.Image())


def png(width: int, height: int) -> bytes:
    stream = io.BytesIO()
    Image.new("L", (width, height)).save(stream, "PNG")
    return stream.getvalue()


def test_an_image_of_another_size_than_the_first_is_not_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before: eight at once were; sixteen files of one megabyte together took 1.5 gigabytes."""
    decoded = set()
    load = PngImageFile.load

    def counting(picture: PngImageFile) -> Any:
        decoded.add(picture.size)
        return load(picture)

    monkeypatch.setattr(PngImageFile, "load", counting)
    rows = pictures_of(png(1, 1), *[png(9, 9)] * 60)
    with pytest.raises(ValueError, match=r"^images"):
        columns(rows, Source("ours"))
    assert decoded == {(1, 1)}


def test_no_script_of_the_hub_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The versions of `datasets` before 4 ran it, the first of them without a question."""

    def refuse(**options: Any) -> None:
        raise ValueError(f"trust_remote_code={options['trust_remote_code']}")

    monkeypatch.setattr("flwr_datasets.FederatedDataset", refuse)
    with pytest.raises(ValueError, match="trust_remote_code=False"):
        fetch("somebody/pictures")


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ({"files": [b"no image"]}, "images"),
        ({"files": []}, "images"),
        ({"label": [[1], [2]]}, "'label'"),
        ({"label": [1, None]}, "'label'"),
        ({"writer": ["a", None]}, "'writer'"),
        ({"writer": [[1], [1, 2]]}, "'writer'"),
    ],
)
def test_a_hostile_set_is_refused_in_a_sentence(rows: dict[str, Any], sentence: str) -> None:
    files = rows.pop("files", [png(1, 1)] * 2)
    source = Source("ours", client="writer" if "writer" in rows else None)
    with pytest.raises(ValueError, match=sentence):
        columns(pictures_of(*files, **rows), source)


def test_scikit_learns_faces_from_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCIKIT_LEARN_DATA", str(tmp_path))
    faces = np.random.default_rng(0).random((400, 64 * 64), dtype=np.float32)
    faces[-1, :2] = 0, 1  # scikit-learn brings the least and the greatest value there
    joblib.dump(faces, tmp_path / "olivetti_py3.pkz")
    arrays = fetch("olivetti", limit=20)
    np.testing.assert_array_equal(arrays["X"], faces[:20].reshape(-1, 64, 64).swapaxes(1, 2))
    np.testing.assert_array_equal(arrays["y"], np.repeat([0, 1], 10))
    save(tmp_path / "faces.npz", arrays)
    assert load_images(str(tmp_path / "faces.npz")).shape == (64, 64)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["faces.npz", "olivetti_py3.pkz"]


def test_what_cannot_be_fetched_is_said_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="imagefolder"):
        fetch("imagefolder", folder=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="client, split"):
        fetch("olivetti", client="id", split="test")
    with pytest.raises(ValueError, match=r"^limit"):
        fetch("mnist", limit=0)
    with pytest.raises(ValueError, match=r"^out"):
        save(tmp_path / "data.txt", {})
    done = CliRunner().invoke(app, ["fetch", "olivetti", "--label", "y"])
    assert done.exit_code == 2
    assert "flwr-perdl: label" in done.output
