"""All nodes' states in one file: what a later grid finds there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.app import RecordDict as Records
from flwr.clientapp import ClientApp

from flwr_perdl.simulations import InProcessGrid

NODES = 3


def summing() -> ClientApp:
    """Return an app whose nodes add 1, and their number, to an array that each of them keeps."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Any) -> Message:
        before = context.state.array_records.get("own", ArrayRecord([np.zeros((2, 2))]))
        (own,) = before.to_numpy_ndarrays()
        own = own + 1 + int(context.node_config["partition-id"])
        context.state["own"] = ArrayRecord([own])
        context.state["count"] = ConfigRecord({"asked": 1})
        return Message(Records({"arrays": ArrayRecord([own])}), reply_to=message)

    return app


def ask(grid: InProcessGrid) -> list[float]:
    """Ask every node, and return what it has then."""
    messages = [grid.create_message(Records(), "train", n, "1") for n in grid.get_node_ids()]
    replies = grid.send_and_receive(messages)
    return [reply.content["arrays"].to_numpy_ndarrays()[0][0, 0] for reply in replies]


@pytest.mark.parametrize("key", ["", "ab" * 32])
def test_a_later_grid_goes_on_where_the_last_one_ended(
    tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLWR_PERDL_STATE_KEY", key)
    first = InProcessGrid(summing(), NODES, state_dir=tmp_path / "all")
    assert ask(first) == [1, 2, 3]
    assert ask(first) == [2, 4, 6]
    again = InProcessGrid(summing(), NODES, state_dir=tmp_path / "all")
    assert all(list(context.state) == ["own"] for context in again.contexts.values())
    assert ask(again) == [3, 6, 9]
    (file,) = (tmp_path / "all" / "nodes").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_a_damaged_file_is_left_out(tmp_path: Path) -> None:
    ask(InProcessGrid(summing(), NODES, state_dir=tmp_path))
    (file,) = (tmp_path / "nodes").iterdir()
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    file.write_bytes(content)
    assert ask(InProcessGrid(summing(), NODES, state_dir=tmp_path)) == [1, 2, 3]


def test_other_nodes_states_are_left_out(tmp_path: Path) -> None:
    ask(InProcessGrid(summing(), NODES, state_dir=tmp_path))
    assert ask(InProcessGrid(summing(), NODES + 1, state_dir=tmp_path)) == [1, 2, 3, 4]


def test_another_key_stops_the_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_PERDL_STATE_KEY", "ab" * 32)
    ask(InProcessGrid(summing(), NODES, state_dir=tmp_path))
    monkeypatch.delenv("FLWR_PERDL_STATE_KEY")
    with pytest.raises(ValueError, match=r"nodes\.npz"):
        InProcessGrid(summing(), NODES, state_dir=tmp_path)


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "nodes").symlink_to(tmp_path / "elsewhere")
    for folder in ("link", "own"):
        grid = InProcessGrid(summing(), NODES, state_dir=tmp_path / folder)
        with pytest.raises(ValueError, match="link"):
            ask(grid)
    assert not [*(tmp_path / "elsewhere").iterdir()]


def test_the_folder_keeps_its_rights(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "beside").touch()
    ask(InProcessGrid(summing(), NODES, state_dir=tmp_path))
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert {path.name for path in tmp_path.iterdir()} == {"beside", "nodes"}
