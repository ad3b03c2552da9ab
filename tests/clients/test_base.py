from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from flwr_perdl.core import files
from flwr_perdl.protocol.client_state import (
    PrivateState,
    private_store,
)
from tests.grids import context_of


def context() -> Context:
    return Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config={})


def store(folder: Path, client: str = "ward-7", algorithm: str = "dictionary") -> Any:
    own: Any = private_store(context_of("ward-7"), algorithm, folder)
    return own._replace(client=client)


def file(folder: Path, round_: int) -> Path:
    [found] = folder.glob(f"client-ward-7/run-*/round-{round_:06d}.npz")
    return found


def atoms(value: float) -> dict[str, np.ndarray]:
    return {"local_atoms": np.full((2, 3), value)}


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_newest_state_before_a_round_is_taken(tmp_path: Path, on_disk: bool) -> None:
    folder = store(tmp_path) if on_disk else None
    node = context()
    for round_ in (1, 2, 5):
        PrivateState(node, "run", folder).save(round_, atoms(round_))
    if on_disk:  # the node was restarted
        node = context()
    state = PrivateState(node, "run", folder)
    assert state.before(2) is None  # only the last two are kept
    for round_, saved in [(3, 2), (5, 2), (6, 5), (9, 5)]:
        found = state.before(round_)
        assert found is not None
        np.testing.assert_array_equal(found["local_atoms"], atoms(saved)["local_atoms"])
    found = state.after(5)
    assert found is not None
    assert found["local_atoms"][0, 0] == 5


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_round_asked_again_starts_from_the_state_before_it(tmp_path: Path, on_disk: bool) -> None:
    state = PrivateState(context(), "run", store(tmp_path) if on_disk else None)
    for round_ in (1, 2, 3):
        state.save(round_, atoms(round_))
    state.save(3, atoms(30))  # the server asked for round 3 again
    before, after = state.before(3), state.after(3)
    assert before is not None
    assert after is not None
    assert (before["local_atoms"][0, 0], after["local_atoms"][0, 0]) == (2, 30)


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_state_of_another_run_is_not_taken_up(tmp_path: Path, on_disk: bool) -> None:
    folder = store(tmp_path) if on_disk else None
    node = context()
    PrivateState(node, "first", folder).save(1, atoms(1))
    second = PrivateState(node, "second", folder)
    assert second.before(9) is None
    second.save(1, atoms(7))
    found = second.before(2)
    assert found is not None
    assert found["local_atoms"][0, 0] == 7


def test_what_others_keep_in_the_context_is_left_alone() -> None:
    from flwr.app import ConfigRecord

    node = context()
    node.state["theirs"] = ConfigRecord({"a": 1})
    for round_ in (1, 2, 3):
        PrivateState(node, "run").save(round_, atoms(round_))
    assert node.state["theirs"] == ConfigRecord({"a": 1})


def kept(folder: Path, **binding: str) -> Any:
    """Return what a restarted client finds in round 3."""
    return PrivateState(context(), "run", store(folder, **binding)).before(3)


@pytest.mark.parametrize(
    "binding",
    [{"client": "ward-8"}, {"algorithm": "diffusion"}],
)
def test_a_foreign_file_is_refused_by_name(
    tmp_path: Path, warned: Any, binding: dict[str, str]
) -> None:
    PrivateState(context(), "run", store(tmp_path)).save(2, atoms(2))
    assert kept(tmp_path, **binding) is None
    assert "round-000002.npz" in warned.text
    assert kept(tmp_path) is not None


def test_files_are_the_owners_alone(tmp_path: Path) -> None:
    node = context()
    node.node_config["state-dir"] = str(tmp_path / "all")
    node.node_config["name"] = "../ward 7"
    own = private_store(node, "dictionary")
    assert own is not None
    assert (own.client, own.folder) == ("../ward 7", tmp_path / "all" / "client-..%2Fward%207")
    PrivateState(node, "run", own).save(1, atoms(1))
    assert own.folder.stat().st_mode & 0o777 == 0o700
    (folder,) = own.folder.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    (saved,) = folder.iterdir()
    assert saved.stat().st_mode & 0o777 == 0o600


def test_a_servers_token_leads_nowhere_else(tmp_path: Path) -> None:
    PrivateState(context(), "..", store(tmp_path / "own")).save(1, atoms(1))
    assert [path.name for path in tmp_path.iterdir()] == ["own"]
    with pytest.raises(ValueError, match="run"):
        PrivateState(context(), "../../elsewhere", store(tmp_path / "own"))


def test_locked_files_say_nothing_and_open_with_their_key_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: Any
) -> None:
    secret = {"local_atoms": np.full((50, 4), np.pi)}
    monkeypatch.setenv("FLWR_PERDL_STATE_KEY", "0f" * 32)
    PrivateState(context(), "run", store(tmp_path)).save(2, secret)
    path = file(tmp_path, 2)
    assert np.full(2, np.pi).tobytes() not in path.read_bytes()
    found = kept(tmp_path)
    assert found is not None
    np.testing.assert_array_equal(found["local_atoms"], secret["local_atoms"])

    monkeypatch.setenv("FLWR_PERDL_STATE_KEY", "1f" * 32)
    with pytest.raises(ValueError, match="FLWR_PERDL_STATE_KEY"):
        kept(tmp_path)
    monkeypatch.delenv("FLWR_PERDL_STATE_KEY")
    with pytest.raises(ValueError, match="FLWR_PERDL_STATE_KEY"):
        kept(tmp_path)
    monkeypatch.setenv("FLWR_PERDL_STATE_KEY", "secret words")
    with pytest.raises(ValueError, match="FLWR_PERDL_STATE_KEY") as error:
        kept(tmp_path)
    assert "secret words" not in str(error.value)


def test_a_file_of_another_version_stops_the_client(tmp_path: Path) -> None:
    PrivateState(context(), "run", store(tmp_path)).save(1, atoms(1))
    path = file(tmp_path, 1)
    saved = files.load(path)
    files.save(path, saved.arrays, {**saved.meta, "format": 2})
    with pytest.raises(ValueError, match=rf"{path.name} .*format.*\b2\b"):
        kept(tmp_path)


@pytest.mark.parametrize("what", ["arrays", "about", "unlocked"])
def test_a_locked_file_that_somebody_changed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: Any, what: str
) -> None:
    """Whoever can write may also write the right checksum; without the key that is of no use."""
    monkeypatch.setenv("FLWR_PERDL_STATE_KEY", "0f" * 32)
    state = PrivateState(context(), "run", store(tmp_path))
    for round_ in (1, 2):
        state.save(round_, atoms(round_))
    path = file(tmp_path, 2)
    arrays, meta = files.load(path)
    del meta["format"]
    if what == "arrays":
        arrays["sealed"] = arrays["sealed"] ^ (np.arange(len(arrays["sealed"])) == 100)
    elif what == "about":
        arrays, earlier = files.load(file(tmp_path, 1))
        assert earlier["round"] == 1
    else:
        arrays, meta = atoms(9), {**meta, "key": None}
    files.save(path, arrays, meta)
    found = kept(tmp_path)
    assert found is not None
    assert found["local_atoms"][0, 0] == 1
    assert "round-000002.npz" in warned.text
