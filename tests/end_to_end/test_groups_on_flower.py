"""Nodes that find their groups, and keep a part private, have the same bits on every engine.

Their app is one of the Message API with the mod `keep_private`; FedAvg trains it, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flwr_perdl.simulations import InProcessGrid
from tests.engines import killed_and_back, on_ray, project

N = 3
PROJECT = '''\
import json
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from flwr_perdl.clients import client_app, keep_private
from flwr_perdl.network import Topology
from flwr_perdl.strategies import DiffusionAveraging, ServerSettings

app = ClientApp(mods=[keep_private("head")])


def load(message, context):
    """Return the model, which node this is, and where its body goes."""
    node = int(context.node_config["partition-id"])
    own = {name: array.numpy() for name, array in message.content["arrays"].items()}
    return own, node, np.full(32, 5.0 * (-1) ** node)


@app.train()
def train(message, context):
    """Go halfway to the node's point, as noisy samples show it; the head is in the thousands."""
    own, node, target = load(message, context)
    round_ = message.content["config"]["server-round"]
    noise = np.random.default_rng([node, round_]).standard_normal(32)
    new = {"head": own["head"] + 1000 * (node + 1), "body": (own["body"] + target + noise) / 2}
    arrays = ArrayRecord({name: Array(array) for name, array in new.items()})
    content = {"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=message)


@app.evaluate()
def evaluate(message, context):
    """Report how often the head was trained."""
    own, node, target = load(message, context)
    numbers = {"num-examples": 3, "loss": float(np.sum((own["body"] - target) ** 2))}
    numbers["trained"] = float(own["head"][0]) / 1000 / (node + 1)
    return Message(RecordDict({"metrics": MetricRecord(numbers)}), reply_to=message)


client = client_app(app)
server = ServerApp()


def watched(grid, largest):
    """Note the largest number in each message."""
    receive = grid.send_and_receive

    def both(messages, *, timeout=None):
        asked = list(messages)
        replies = list(receive(asked, timeout=timeout))
        for message in asked + replies:
            for record in message.content.array_records.values() if message.has_content() else ():
                sizes = [np.abs(array.numpy()).max(initial=0) for array in record.values()]
                largest.extend(map(float, sizes))
        return replies

    grid.send_and_receive = both


def serve(grid, on_round=None):
    largest = []
    watched(grid, largest)
    start = ArrayRecord({name: Array(np.zeros(n)) for name, n in (("head", 4), ("body", 32))})
    settings = ServerSettings(node_timeout=20.0)
    own = {"groups": "auto", "local_rounds": 1, "on_round": on_round, "server": settings}
    strategy = DiffusionAveraging(Topology.complete(3), metrics=["trained"], **own)
    strategy.start(grid, start, num_rounds=4)
    found = strategy.averaged
    curves = {name: rows.tolist() for name, rows in found.curves.items() if "seconds" not in name}
    matrices = {name: getattr(found, name).tolist() for name in ("met", "accepted")}
    shared = FedAvg().start(grid, start, num_rounds=2)
    # FedAvg adds up as replies come.
    models = {name: array.numpy().round(9).tolist() for name, array in shared.arrays.items()}
    last = shared.evaluate_metrics_clientapp[2]["trained"]
    run = {"groups": found.groups, "fedavg": models, "last": last, "largest": max(largest)}
    return {**curves, **matrices, **run}


@server.main()
def main(grid, context):
    folder = Path(context.run_config["out"])

    def wait(report):
        if report.round == 3:
            (folder / "reached").touch()
            while not (folder / "restarted").exists():
                time.sleep(0.1)

    (folder / "found.json").write_text(json.dumps(serve(grid, wait)))
'''


def expected() -> dict[str, Any]:
    app = project(PROJECT)
    found: dict[str, Any] = app["serve"](InProcessGrid(app["client"], N))
    assert found["groups"] == [[0, 2], [1]]
    assert sum(map(sum, found["met"])) == 3 * N * (N - 1)
    assert found["evaluate-trained"][-1] == [4] * N
    assert (found["last"], found["fedavg"]["head"]) == (2, [0] * 4)
    assert found["largest"] < 1000
    return found


def test_in_process() -> None:
    expected()


@pytest.mark.slow
@pytest.mark.ray
def test_on_flowers_simulation() -> None:
    app = project(PROJECT)
    assert on_ray(app["client"], app["serve"], N) == expected()


@pytest.mark.slow
@pytest.mark.deployment
def test_on_supernodes_one_of_which_is_killed_and_back_with_its_state(tmp_path: Path) -> None:
    assert killed_and_back(tmp_path, PROJECT, N) == expected()
