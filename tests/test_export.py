"""safetensors files of results and checkpoints."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from flwr_perdl.core.files import round_path
from flwr_perdl.export import load, save
from flwr_perdl.strategies import PerMA
from tests.strategies.test_after_training import N_CLIENTS, run

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


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_nobody_waits_at_a_pipe(suffix: str, tmp_path: Path) -> None:
    if suffix == ".safetensors":
        pytest.importorskip("safetensors.numpy")
    path = tmp_path / f"pipe{suffix}"
    os.mkfifo(path)
    with pytest.raises(ValueError, match=r"^path"):
        load(path)


def test_a_compressed_file_is_read(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", **ARRAYS)
    assert as_lists(load(tmp_path / "x.npz")) == as_lists(ARRAYS)


KINDS = {
    "clustered": (["cluster-0", "cluster-1"], []),
    "clustered, private": (["cluster-0", "cluster-1"], range(N_CLIENTS)),
    "personalized": (["shared"], range(N_CLIENTS)),
    "ditto": (["shared"], range(N_CLIENTS)),
    "averaging": ([], range(N_CLIENTS)),
}


def as_lists(arrays: Any) -> dict[str, Any]:
    return {name: np.asarray(array).tolist() for name, array in arrays.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_of_a_result_there_is_a_file_per_model_and_a_card(
    kind: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if suffix == ".npz":
        monkeypatch.setitem(sys.modules, "safetensors", None)
    else:
        pytest.importorskip("safetensors.numpy")
    strategy, _ = run(kind, 3)
    for file in ("cluster-7.npz", "notes.txt"):  # of an earlier result, and another's
        (tmp_path / file).touch()
    save(tmp_path, strategy.result)
    shared, clients = KINDS[kind]
    wanted = {f"{name}{suffix}" for name in [*shared, *(f"client-{one}" for one in clients)]}
    assert {one.name for one in tmp_path.iterdir()} == {*wanted, "README.md", "notes.txt"}
    models = strategy.result.shared
    for name, model in zip(
        shared, [models] if isinstance(models, ArrayRecord) else models, strict=True
    ):
        found = load(tmp_path / f"{name}{suffix}")
        assert as_lists(found) == as_lists({key: one.numpy() for key, one in model.items()})
    card = (tmp_path / "README.md").read_text()
    assert re.search(rf"^{type(strategy).__name__}, rounds: 3\.", card, re.MULTILINE)
    rows = dict(re.findall(r"^\| (\d+) \| \1 \| (\S+) \|$", card, re.MULTILINE))
    assert len(rows) == N_CLIENTS
    for client, file in rows.items():
        own = strategy.result.model_of(int(client))
        found = load(tmp_path / file)
        assert as_lists(found) == as_lists({key: one.numpy() for key, one in own.items()})


def test_of_perma_clients_have_files_with_their_local_atoms(
    federation: Any, tmp_path: Path
) -> None:
    strategy = PerMA(3)
    learned = federation().learn(strategy, 2)
    save(tmp_path, strategy.result)
    (file,) = tmp_path.glob("client-0.*")
    found = load(file)
    np.testing.assert_array_equal(found["global_atoms"], learned)
    own = strategy.result.model_of(0)["local_atoms"].numpy()
    np.testing.assert_array_equal(found["local_atoms"], own)
    assert "PerMA, rounds: 2." in (tmp_path / "README.md").read_text()


def test_what_is_not_at_hand_is_on_the_card_and_in_a_warning(tmp_path: Path, warned: Any) -> None:
    strategy, _ = run("personalized", 2)
    made = tmp_path / "made"
    save(made, strategy.result, state_dir=tmp_path / "elsewhere")
    assert [one.stem for one in made.iterdir() if one.stem != "README"] == ["shared"]
    assert (made / "README.md").read_text().count("not at hand") == N_CLIENTS
    (warning,) = warned.messages
    assert f"{N_CLIENTS} of {N_CLIENTS}" in warning
    assert "state_dir" in warning


def test_nobodys_readme_is_replaced(tmp_path: Path) -> None:
    strategy, _ = run("personalized", 1)
    (tmp_path / "README.md").write_text("mine")
    for path in (tmp_path, tmp_path / "README.md"):
        with pytest.raises(ValueError, match="path"):
            save(path, strategy.result)
    assert [one.read_text() for one in tmp_path.iterdir()] == ["mine"]


def test_without_the_library_a_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(ImportError, match=r"^safetensors"):
        save(tmp_path / "x.safetensors", ARRAYS)
