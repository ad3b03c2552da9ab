"""safetensors files of results and checkpoints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from flwr_perdl.core.files import round_path
from flwr_perdl.export import load, save
from flwr_perdl.strategies import PerMA

ARRAYS = {"w": np.arange(6.0).reshape(2, 3).T, "b": np.float32([1, 2]), "n": np.array(3)}


@pytest.fixture
def safetensors() -> Any:
    return pytest.importorskip("safetensors.numpy")


def test_arrays_come_back_as_they_were(safetensors: Any, tmp_path: Path) -> None:
    """Of a record, by name, and of a run's arrays.npz; the library's own reader finds them."""
    np.savez(tmp_path / "arrays.npz", **ARRAYS)
    record = ArrayRecord({name: Array(array) for name, array in ARRAYS.items()})
    sources = {"npz": tmp_path / "arrays.npz", "named": ARRAYS, "record": record}
    for name, source in sources.items():
        path = tmp_path / "made" / f"{name}.safetensors"
        save(path, source)
        for found in (load(path), safetensors.load_file(path)):
            assert found.keys() == ARRAYS.keys()
            for key, array in ARRAYS.items():
                np.testing.assert_array_equal(found[key], array, strict=True)


def test_of_a_checkpoint_it_is_the_model(safetensors: Any, federation: Any, tmp_path: Path) -> None:
    learned = federation().learn(PerMA(3, checkpoint_dir=tmp_path), 2)
    save(tmp_path / "model.safetensors", round_path(tmp_path, 2))
    (atoms,) = load(tmp_path / "model.safetensors").values()
    np.testing.assert_array_equal(atoms, learned)


def test_a_foreign_file_is_a_sentence(safetensors: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for data in (None, b"", b"no tensors at all", b"\xff" * 100):
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(ValueError, match=r"^path"):
            load(path)
        with pytest.raises(ValueError, match=r"^source"):
            save(tmp_path / "y.safetensors", path)
    for wrong in ({"a": np.array(["text"])}, {"a": np.array([1j])}, {1: np.ones(2)}):
        with pytest.raises(ValueError, match=r"^source"):
            save(tmp_path / "y.safetensors", wrong)
    with pytest.raises(TypeError, match=r"^source"):
        save(path, 3)
    assert not (tmp_path / "y.safetensors").exists()


def test_without_the_library_a_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(ImportError, match=r"^safetensors"):
        save(tmp_path / "x.safetensors", ARRAYS)
