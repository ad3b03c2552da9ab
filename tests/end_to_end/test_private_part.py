"""An app of the Message API keeps its head, on every engine.

With FedAvg and PersonalizedFedAvg, and with DiffusionAveraging.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flwr_perdl.simulations import InProcessGrid
from tests.engines import killed_and_back, on_ray, project

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
from flwr_perdl.strategies import DiffusionAveraging, PersonalizedFedAvg, ServerSettings

app = ClientApp(mods=[keep_private("head.*")])


@app.train()
def train(message, context):
    """Add 1, 2, ... to the body, and thousands of it to the head."""
    own, step = message.content["arrays"], int(context.node_config["partition-id"]) + 1
    new = {
        name: Array(array.numpy() + step * (1000 if "head" in name else 1))
        for name, array in own.items()
    }
    numbers = MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": ArrayRecord(new), "metrics": numbers}), reply_to=message)


@app.evaluate()
def evaluate(message, context):
    """Report how often the head was trained."""
    step = int(context.node_config["partition-id"]) + 1
    head = float(message.content["arrays"]["head.weight"].numpy()[0]) / 1000 / step
    body = float(message.content["arrays"]["body.weight"].numpy().mean())
    numbers = MetricRecord({"num-examples": 1, "trained": head, "body": body})
    return Message(RecordDict({"metrics": numbers}), reply_to=message)


client = client_app(app)
server = ServerApp()


def watched(grid, largest):
    """Note the largest number in each message: what is private is in the thousands."""
    receive = grid.send_and_receive

    def both(messages, *, timeout=None):
        asked = list(messages)
        replies = list(receive(asked, timeout=timeout))
        for message in asked + replies:
            if message.has_content():
                for record in message.content.array_records.values():
                    for array in record.values():
                        largest.append(float(np.abs(array.numpy()).max(initial=0)))
        return replies

    grid.send_and_receive = both


start = ArrayRecord({n: Array(np.zeros(4)) for n in ("head.weight", "body.weight")})


def serve_ring(grid, on_round=None):
    """Return the nodes' own models after three rounds."""
    largest, names = [], ["trained", "body"]
    watched(grid, largest)
    settings = ServerSettings(node_timeout=20.0)
    own = {"metrics": names, "evaluate_every": 3, "on_round": on_round, "server": settings}
    strategy = DiffusionAveraging(Topology.ring(3), method="atc", **own)
    strategy.start(grid, start, num_rounds=3)
    curves = strategy.averaged.curves
    found = {name: curves[f"evaluate-{name}"][-1].tolist() for name in names}
    floats = [[report.floats_down, report.floats_up] for report in strategy.history]
    return {**found, "largest": max(largest), "floats": floats}


def serve(grid, on_round=None, both=True):
    largest, found = [], {}
    watched(grid, largest)
    settings = ServerSettings(evaluate_every=3, node_timeout=20.0)
    strategy = PersonalizedFedAvg(["head.*"], num_clients=2, on_round=on_round, server=settings)
    strategies = {"ours": strategy, **({"FedAvg": FedAvg()} if both else {})}
    for name, one in strategies.items():
        arrays = one.start(grid, start, num_rounds=3).arrays
        found[name] = [[key, array.numpy().tolist()] for key, array in arrays.items()]
    history = [report for report in strategy.history if report.step != "evaluate"]
    return {
        "models": found,
        "largest": max(largest),
        "trained": [m["trained"] for m in strategy.history[-1].metrics.values()],
        "state-lost": [report.aggregate["state-lost"] for report in history],
        "floats": [[report.floats_down, report.floats_up] for report in history],
    }


@server.main()
def main(grid, context):
    folder = Path(context.run_config["out"])

    def wait(report):
        if report.round == 2:
            (folder / "reached").touch()
            while not (folder / "restarted").exists():
                time.sleep(0.1)

    ring = (folder / "ring").exists()
    found = serve_ring(grid, wait) if ring else serve(grid, wait, both=False)
    (folder / "found.json").write_text(json.dumps(found))
'''

#: In the order of the first model, which is not the alphabet's.
MODEL = [["head.weight", [0.0] * 4], ["body.weight", [4.5] * 4]]


def check(found: dict[str, Any]) -> None:
    assert all(model == MODEL for model in found["models"].values())
    assert found["largest"] < 10
    assert found["trained"] == [3, 3]
    assert found["state-lost"] == [0, 0, 0]


def check_ring(found: dict[str, Any]) -> None:
    assert found["trained"] == [3, 3, 3]
    assert found["body"] == pytest.approx([6, 6, 6])  # 1, 2 and 3 in every round
    assert found["largest"] < 10
    # The first model once; then of each neighbor a message, and its row in the table.
    assert found["floats"] == [[8, 4], [16, 4], [16, 4], [16, 0]]


def test_in_process() -> None:
    app = project(PROJECT)
    found = app["serve"](InProcessGrid(app["client"], 2))
    check(found)
    assert found["floats"] == [[8, 4], [4, 4], [4, 4]]
    check_ring(app["serve_ring"](InProcessGrid(app["client"], 3)))


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize(("nodes", "serve"), [(2, "serve"), (3, "serve_ring")])
def test_on_flowers_simulation(nodes: int, serve: str) -> None:
    app = project(PROJECT)
    (check if nodes == 2 else check_ring)(on_ray(app["client"], app[serve], nodes))


@pytest.mark.slow
@pytest.mark.deployment
@pytest.mark.parametrize("nodes", [2, 3])
def test_a_killed_node_is_back_with_its_head(nodes: int, tmp_path: Path) -> None:
    """Node 1 dies after round 2 (SIGKILL) and is started again, with its `state-dir`."""
    if nodes == 3:
        (tmp_path / "ring").touch()
    found = killed_and_back(tmp_path, PROJECT, nodes)
    if nodes == 3:
        check_ring(found)
        return
    check(found)
    assert found["floats"] == [[8, 4], [4, 4], [4, 4]]
