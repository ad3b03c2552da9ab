"""Nodes that find their groups have the same bits on every engine of Flower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flwr_perdl.simulations import InProcessGrid
from tests.engines import killed_and_back, on_ray, project

N = 3
PROJECT = """\
import json
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord
from flwr.client import NumPyClient
from flwr.serverapp import ServerApp

from flwr_perdl.clients import client_app
from flwr_perdl.network import Topology
from flwr_perdl.strategies import DiffusionAveraging, ServerSettings


class Pulled(NumPyClient):
    def __init__(self, context):
        self.node = int(context.node_config["partition-id"])
        self.target = np.full(32, 5.0 * (-1) ** self.node)

    def fit(self, parameters, config):
        noise = np.random.default_rng([self.node, config["server-round"]]).standard_normal(32)
        return [(parameters[0] + self.target + noise) / 2], 1, {}

    def evaluate(self, parameters, config):
        return float(np.sum((parameters[0] - self.target) ** 2)), 3, {}


client = client_app(Pulled)
server = ServerApp()


def serve(grid, on_round=None):
    settings = ServerSettings(node_timeout=20.0)
    own = {"groups": "auto", "local_rounds": 1, "on_round": on_round, "server": settings}
    strategy = DiffusionAveraging(Topology.complete(3), **own)
    strategy.start(grid, ArrayRecord([np.zeros(32)]), num_rounds=4)
    found = strategy.averaged
    curves = {name: rows.tolist() for name, rows in found.curves.items() if "seconds" not in name}
    matrices = {name: getattr(found, name).tolist() for name in ("met", "accepted")}
    return {**curves, **matrices, "groups": found.groups}


@server.main()
def main(grid, context):
    folder = Path(context.run_config["out"])

    def wait(report):
        if report.round == 3:
            (folder / "reached").touch()
            while not (folder / "restarted").exists():
                time.sleep(0.1)

    (folder / "found.json").write_text(json.dumps(serve(grid, wait)))
"""


def expected() -> dict[str, Any]:
    app = project(PROJECT)
    found: dict[str, Any] = app["serve"](InProcessGrid(app["client"], N))
    assert found["groups"] == [[0, 2], [1]]
    assert sum(map(sum, found["met"])) == 3 * N * (N - 1)
    return found


@pytest.mark.slow
@pytest.mark.ray
def test_on_flowers_simulation() -> None:
    app = project(PROJECT)
    assert on_ray(app["client"], app["serve"], N) == expected()


@pytest.mark.slow
@pytest.mark.deployment
def test_on_supernodes_one_of_which_is_killed_and_back_with_its_state(tmp_path: Path) -> None:
    assert killed_and_back(tmp_path, PROJECT, N) == expected()
