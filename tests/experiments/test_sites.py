"""Every node on a file of its own, and what a report says of nodes that were lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message

from flwr_perdl.clients import client_app
from flwr_perdl.simulations import InProcessGrid
from perdl_experiments import run_experiment
from perdl_experiments.client_app import make_client
from perdl_experiments.data import Planted, planted_clients

OPTIONS = {"n_atoms": 6, "n_global": 3}


@pytest.fixture
def planted(tmp_path: Path) -> Planted:
    """Three sites' files in a folder, with three planted atoms in common."""
    made = planted_clients(np.random.default_rng(0), [6] * 3, [200] * 3, 3, n_features=8)
    for i, X in enumerate(made.samples):
        np.savez(tmp_path / f"site-{i}.npz", X=X)
    return made


def test_nodes_know_their_own_files_and_the_app_does_not(tmp_path: Path, planted: Planted) -> None:
    """As SuperNodes: the node config names the file and the node, the run config neither."""

    def node_config(partition: int) -> dict[str, Any]:
        return {"data": str(tmp_path / f"site-{partition}.npz"), "name": f"ward-{partition}"}

    grid = InProcessGrid(
        client_app(make_client),
        3,
        node_config=node_config,
        run_config={"experiment": "sites", "n_atoms": 6},
    )
    for context in grid.contexts.values():
        del context.node_config["partition-id"], context.node_config["num-partitions"]
    results = run_experiment("sites", engine=grid, clients=3, rounds=8, options=OPTIONS)
    from_folder = run_experiment("sites", data=tmp_path, rounds=8, options=OPTIONS)
    assert results["metrics"]["mse_full"] < 1e-12
    assert from_folder["metrics"]["n_global"] == results["metrics"]["n_global"] == 3


def test_a_client_is_called_by_its_name_wherever_a_person_reads(
    tmp_path: Path, planted: Planted, warned: pytest.LogCaptureFixture
) -> None:
    names, shown = (
        ["ward-0", "<b>ward</b>\x1b[2J", "w" * 500],
        {"ward-0", "<b>ward</b>[2J", "w" * 80},
    )

    def broken(message: Message, context: Context, call: Any) -> Message:
        reply: Message = call(message, context)
        if context.node_config["name"] == names[1]:
            reply.content["arrays"] = ArrayRecord([np.full((2, 8), np.nan)])
        return reply

    grid = InProcessGrid(
        client_app(make_client, train_mods=[broken]),
        3,
        node_config=lambda i: {"data": str(tmp_path / f"site-{i}.npz"), "name": names[i]},
        run_config={"experiment": "sites", "n_atoms": 6},
    )
    for context in grid.contexts.values():
        del context.node_config["partition-id"]
    out = tmp_path / "out"
    results = run_experiment("sites", engine=grid, clients=3, rounds=3, options=OPTIONS, out=out)
    assert set(results["clients"]) == shown
    assert {row[0] for row in results["tables"][0]["rows"]} == shown
    assert "left out client <b>ward</b>[2J: " in warned.text
    page = (out / "report.html").read_text()
    assert "<td>&lt;b&gt;ward&lt;/b&gt;[2J</td>" in page
    everything = page + warned.text + json.dumps(results)
    assert not any(str(crc32(name.encode())) in everything for name in names[:2])
    assert "\x1b" not in everything
