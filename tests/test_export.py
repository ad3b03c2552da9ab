"""safetensors files of results and checkpoints."""

from __future__ import annotations

import html
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, MetricRecord

from flwr_perdl.core.files import round_path
from flwr_perdl.export import load, save, save_best
from flwr_perdl.strategies import ClusteredFedAvg, Learned, PerMA, ServerSettings
from tests.grids import Trains, grid_of
from tests.strategies.test_after_training import N_CLIENTS, run

ONE = np.ones(1)
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


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ""])
def test_nobody_waits_at_a_pipe(suffix: str, tmp_path: Path) -> None:
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


def by_name(record: ArrayRecord) -> dict[str, Any]:
    return {name: array.numpy() for name, array in record.items()}


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
    other = ArrayRecord({"x": Array(ONE)})
    save(tmp_path, Learned(ArrayRecord(), names={77: "77"}, saved=lambda _: other))
    assert (tmp_path / f"client-77{suffix}").exists()
    foreign = ("client-99.npz", "notes.txt")
    for file in foreign:  # not on the list
        (tmp_path / file).touch()
    save(tmp_path, strategy.result)
    shared, clients = KINDS[kind]
    wanted = {f"{name}{suffix}" for name in [*shared, *(f"client-{one}" for one in clients)]}
    wanted |= {"README.md", "models.json", *foreign}
    assert {one.name for one in tmp_path.iterdir()} == wanted
    models = strategy.result.shared
    for name, model in zip(
        shared, [models] if isinstance(models, ArrayRecord) else models, strict=True
    ):
        found = load(tmp_path / f"{name}{suffix}")
        assert as_lists(found) == as_lists(by_name(model))
    card = (tmp_path / "README.md").read_text()
    assert re.search(rf"^{type(strategy).__name__}, rounds: 3\.", card, re.MULTILINE)
    rows = dict(re.findall(r"^\| (\d+) \| \1 \| (\S+) \|$", card, re.MULTILINE))
    assert len(rows) == N_CLIENTS
    for client, file in rows.items():
        own = strategy.result.model_of(int(client))
        for found in (load(tmp_path / file), by_name(load(tmp_path).model_of(int(client)))):
            assert as_lists(found) == as_lists(by_name(own))
    again = load(tmp_path).shared
    for one, file in zip([again] if isinstance(again, ArrayRecord) else again, shared, strict=True):
        assert as_lists(by_name(one)) == as_lists(load(tmp_path / f"{file}{suffix}"))


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
    assert {one.stem for one in made.iterdir()} == {"README", "models", "shared"}
    assert (made / "README.md").read_text().count("not at hand") == N_CLIENTS
    (warning,) = warned.messages
    assert f"{N_CLIENTS} of {N_CLIENTS}" in warning
    assert "state_dir" in warning


OWN = ArrayRecord({"a": Array(2 * ONE)})
RESULT = Learned(ArrayRecord({"a": Array(ONE)}), names={0: "0"}, saved=lambda _: OWN)
MINE = ["README.md", "models.json", "shared.npz", "cluster-7.npz", "client-99.safetensors"]


@pytest.mark.parametrize("mine", MINE)
def test_nobodys_files_are_replaced(mine: str, tmp_path: Path) -> None:
    (tmp_path / mine).write_text("mine")
    for path in (tmp_path, tmp_path / mine):
        with pytest.raises(ValueError, match=r"^path"):
            save(path, RESULT)
    with pytest.raises(ValueError, match=r"^path"):
        save_best(tmp_path, print)
    assert [one.read_text() for one in tmp_path.iterdir()] == ["mine"]


def test_what_the_list_lacks_is_not_replaced(tmp_path: Path) -> None:
    save(tmp_path, Learned(RESULT.shared))
    (tmp_path / f"client-0{suffix_of(tmp_path)}").write_text("mine")
    before = {one.name: one.read_bytes() for one in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="client-0"):
        save(tmp_path, RESULT)
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == before


def test_a_folder_in_place_of_a_model_is_left_as_it_is(tmp_path: Path) -> None:
    save(tmp_path, RESULT)
    shared = tmp_path / f"shared{suffix_of(tmp_path)}"
    shared.unlink()
    shared.mkdir()
    with pytest.raises(ValueError, match=r"^path .*shared"):
        save(tmp_path, RESULT)
    assert shared.is_dir()


def suffix_of(folder: Path) -> str:
    (file,) = folder.glob("shared.*")
    return file.suffix


def test_a_save_that_fails_changes_nothing(tmp_path: Path) -> None:
    save(tmp_path, RESULT)
    before = {one.name: one.read_bytes() for one in tmp_path.iterdir()}
    broken = ArrayRecord({"a": Array("float64", (9,), "numpy.ndarray", b"?")})
    with pytest.raises(ValueError, match="allow_pickle"):
        save(tmp_path, replace(RESULT, shared=OWN, saved=lambda _: broken))
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == before


def test_a_name_is_no_markup(tmp_path: Path) -> None:
    name = "a | b <img src=x> [c](d) `e` __f__ www.g.org https://h.org i@j.org &lt; \\"
    save(tmp_path, replace(RESULT, names={0: f"{name}\n# k"}))
    card = (tmp_path / "README.md").read_text()
    row = card.splitlines()[-1]
    assert html.unescape(row.split(" | ")[1]) == f"{name} # k"
    assert not set("<>[]`*\\_&@") & set(re.sub(r"&#\d+;", "", row))
    assert not re.search(r"://|www\.", row)
    assert load(tmp_path).model_of(f"{name}\n# k")["a"].numpy().tolist() == [2]


def test_a_prepared_folder_is_refused(tmp_path: Path) -> None:
    save(tmp_path, RESULT)
    about = json.loads((tmp_path / "models.json").read_text())
    row = about["clients"]["0"]
    for changed in (
        "[" * 10**5,
        "no",
        {**about, "format": 99},
        {**about, "files": ["../x.npz"]},
        {**about, "files": 5},
        {**about, "clients": []},
        {**about, "clients": {"a": row}},
        {**about, "clients": {"0": {}}},
        {**about, "clients": {"0": {**row, "file": "client-5.npz"}}},
        {**about, "clients": {"0": {**row, "file": []}}},
        {**about, "arrays": 5},
        {**about, "files": ["shared.npz", "client-5.npz"]},
        json.dumps(about) + " " * 2**26,
    ):
        text = changed if isinstance(changed, str) else json.dumps(changed)
        (tmp_path / "models.json").write_text(text)
        with pytest.raises(ValueError, match=r"^path"):
            load(tmp_path).model_of(0)


def slope(_: Any, i: int) -> Trains:
    """Return a client that trains towards one of two slopes."""
    own = (5.0, -5.0)[i % 2]
    return Trains(lambda w: (w + own) / 2, lambda w: np.abs(w - own).sum())


@pytest.mark.parametrize("stop", [2, 6])
def test_the_best_model_of_each_cluster_is_kept(stop: int, tmp_path: Path) -> None:
    """Of two runs the second one's, which stops once and goes on in another process."""
    seen: dict[int, list[Any]] = {}

    def evaluate(round_: int, arrays: ArrayRecord, cluster: int) -> MetricRecord | None:
        (w,) = arrays.to_numpy_ndarrays()
        score = -float((abs(w[0]) - 4) ** 2)  # best before the end
        if round_:
            seen.setdefault(cluster, []).append((score, w.tolist()))
        return MetricRecord({"good score": score}) if round_ else None

    with pytest.raises(ValueError, match="higher_is_better"):
        save_best(tmp_path / "best", evaluate, metric="good score")
    for name, rounds in (("first", (4,)), ("second", (stop, 6))):
        seen.clear()
        for upto in rounds:
            best = save_best(
                tmp_path / "best", evaluate, metric="good score", higher_is_better=True
            )
            server = ServerSettings(resume=True)
            strategy = ClusteredFedAvg(2, checkpoint_dir=tmp_path / name, server=server)
            grid, first = grid_of(slope, 4), ArrayRecord([np.zeros(1)])
            strategy.start(grid, first, num_rounds=upto, evaluate_fn=best)
    models = load(tmp_path / "best").shared
    assert [one.to_numpy_ndarrays()[0].tolist() for one in models] == [
        max(seen[cluster])[1] for cluster in (0, 1)
    ]
    assert max(seen[0])[1] != seen[0][-1][1]


def test_a_metric_that_is_not_measured_is_named(tmp_path: Path) -> None:
    keeping = save_best(tmp_path, lambda *_: MetricRecord({"loss": float("nan"), "l": [1, 2]}))
    keeping(0, RESULT.shared)
    assert [*tmp_path.iterdir()] == []
    for metric in ("accuracy", "l"):
        keeping = save_best(tmp_path, keeping, metric=metric, higher_is_better=True)
        with pytest.raises(ValueError, match=r"^metric"):
            keeping(1, RESULT.shared)


def test_without_the_library_a_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(ImportError, match=r"^safetensors"):
        save(tmp_path / "x.safetensors", ARRAYS)
