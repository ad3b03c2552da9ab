"""An app of the Message API keeps its head, on every engine, with FedAvg and PersonalizedFedAvg.

Nodes without a server that are killed and come back: ``test_groups_on_flower.py``.
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
from flwr_perdl.strategies import PersonalizedFedAvg, ServerSettings

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

    (folder / "found.json").write_text(json.dumps(serve(grid, wait, both=False)))
'''

#: In the order of the first model, which is not the alphabet's.
MODEL = [["head.weight", [0.0] * 4], ["body.weight", [4.5] * 4]]


def check(found: dict[str, Any]) -> None:
    assert all(model == MODEL for model in found["models"].values())
    assert found["largest"] < 10
    assert found["trained"] == [3, 3]
    assert found["state-lost"] == [0, 0, 0]


def test_in_process() -> None:
    app = project(PROJECT)
    found = app["serve"](InProcessGrid(app["client"], 2))
    check(found)
    assert found["floats"] == [[8, 4], [4, 4], [4, 4]]


@pytest.mark.slow
@pytest.mark.ray
def test_on_flowers_simulation() -> None:
    app = project(PROJECT)
    check(on_ray(app["client"], app["serve"], 2))


@pytest.mark.slow
@pytest.mark.deployment
def test_a_killed_node_is_back_with_its_head(tmp_path: Path) -> None:
    """Node 1 dies after round 2 (SIGKILL) and is started again, with its `state-dir`."""
    found = killed_and_back(tmp_path, PROJECT)
    check(found)
    assert found["floats"] == [[8, 4], [4, 4], [4, 4]]
