from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from flwr_perdl.clients._state import PrivateState


def context() -> Context:
    return Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config={})


def atoms(value: float) -> dict[str, np.ndarray]:
    return {"local_atoms": np.full((2, 3), value)}


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_newest_state_before_a_round_is_taken(tmp_path: Path, on_disk: bool) -> None:
    folder = tmp_path if on_disk else None
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
    state = PrivateState(context(), "run", tmp_path if on_disk else None)
    for round_ in (1, 2, 3):
        state.save(round_, atoms(round_))
    state.save(3, atoms(30))  # the server asked for round 3 again
    before, after = state.before(3), state.after(3)
    assert before is not None
    assert after is not None
    assert (before["local_atoms"][0, 0], after["local_atoms"][0, 0]) == (2, 30)


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_state_of_another_run_is_not_taken_up(tmp_path: Path, on_disk: bool) -> None:
    folder = tmp_path if on_disk else None
    node = context()
    PrivateState(node, "first", folder).save(1, atoms(1))
    second = PrivateState(node, "second", folder)
    assert second.before(9) is None
    second.save(1, atoms(7))
    found = second.before(2)
    assert found is not None
    assert found["local_atoms"][0, 0] == 7


def test_a_broken_file_is_left_out(tmp_path: Path) -> None:
    state = PrivateState(context(), "run", tmp_path)
    state.save(1, atoms(1))
    state.save(2, atoms(2))
    (tmp_path / "round-000002.npz").write_bytes(b"half a file")
    found = PrivateState(context(), "run", tmp_path).before(3)
    assert found is not None
    assert found["local_atoms"][0, 0] == 1


def test_what_others_keep_in_the_context_is_left_alone() -> None:
    from flwr.app import ConfigRecord

    node = context()
    node.state["theirs"] = ConfigRecord({"a": 1})
    for round_ in (1, 2, 3):
        PrivateState(node, "run").save(round_, atoms(round_))
    assert node.state["theirs"] == ConfigRecord({"a": 1})
