"""An app in the form of Flower's PyTorch template keeps its last layer, on every engine."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.clients.test_keep_private import private_values
from tests.engines import killed_and_back, on_ray, project
from tests.grids import Tapped, arrays_in

pytest.importorskip("torch")

#: The template's network, handlers and server, with digits for CIFAR-10 and one epoch; the inner
#: mod ``watch`` reports the private layer's size, as received and as trained.
PROJECT = '''\
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAdam, FedAvg
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader

from flwr_perdl.clients import client_app, keep_private
from flwr_perdl.strategies import PersonalizedFedAvg

torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.conv2(self.pool(F.relu(self.conv1(x))))))
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1))))))


def load_data(partition_id):
    """Return digits as images of 3 x 32 x 32; each client has labels of its own."""
    images, labels = load_digits(return_X_y=True)
    images = np.kron(images.reshape(-1, 1, 8, 8) / 8 - 1, np.ones((1, 3, 4, 4))).astype("float32")
    own = slice(100 * partition_id, 100 * partition_id + 100)
    labels = np.random.default_rng(partition_id).permutation(10)[labels]
    rows = [{"img": x, "label": y} for x, y in zip(images[own], labels[own])]
    return DataLoader(rows[:80], batch_size=32, shuffle=True), DataLoader(rows[80:], batch_size=32)


def watch(message, context, call_next):
    size = lambda content: float(content["arrays"]["fc3.weight"].numpy().std())
    own = {"partition": context.node_config["partition-id"], "received": size(message.content)}
    reply = call_next(message, context)
    own["kept"] = size(reply.content) if "arrays" in reply.content else own["received"]
    reply.content["metrics"].update(own)
    return reply


app = ClientApp(mods=[keep_private("fc3.*"), watch])


def received(msg, context):
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    return model, load_data(context.node_config["partition-id"])


@app.train()
def train(msg, context):
    model, (loader, _) = received(msg, context)
    optimizer = torch.optim.Adam(model.parameters(), lr=msg.content["config"]["lr"])
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch["img"]), batch["label"])
        loss.backward()
        optimizer.step()
    metrics = MetricRecord({"train_loss": loss.item(), "num-examples": len(loader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg, context):
    model, (_, loader) = received(msg, context)
    with torch.no_grad():
        loss = sum(F.cross_entropy(model(b["img"]), b["label"]).item() for b in loader)
    metrics = MetricRecord({"eval_loss": loss, "num-examples": len(loader.dataset)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)


client = client_app(app)
server = ServerApp()
STRATEGIES = {
    "FedAvg": lambda: FedAvg(fraction_train=1.0),
    "FedAdam": lambda: FedAdam(fraction_train=1.0),
    "PersonalizedFedAvg": lambda: PersonalizedFedAvg(["fc3.*"], fraction_train=1.0, num_clients=2),
}


def serve(grid, name, after_training=lambda: None):
    """Return what clients report, and how far any private array in any message is off its start."""
    torch.manual_seed(0)
    arrays, reports, off, receive = ArrayRecord(Net().state_dict()), {}, [], grid.send_and_receive

    def tapped(messages, *, timeout=None):
        asked = list(messages)
        replies = list(receive(asked, timeout=timeout))
        for content in (message.content for message in asked + replies if message.has_content()):
            for found in content.array_records.values():
                for head in found.keys() & {"fc3.weight", "fc3.bias"}:
                    off.append(float(abs(found[head].numpy() - arrays[head].numpy()).max()))
            if "metrics" in content:
                own = content["metrics"]
                reports.setdefault(str(own["partition"]), []).append([own["received"], own["kept"]])
        if asked[0].metadata.message_type == "train":
            after_training()
        return replies

    grid.send_and_receive = tapped
    result = STRATEGIES[name]().start(
        grid=grid, initial_arrays=arrays, train_config=ConfigRecord({"lr": 0.01}), num_rounds=2
    )
    grid.send_and_receive = receive
    Net().load_state_dict(result.arrays.to_torch_state_dict())
    return {"off": max(off), "reports": reports}


@server.main()
def main(grid, context):
    folder = Path(context.run_config["out"])

    def wait():
        (folder / "reached").touch()
        while not (folder / "restarted").exists() or len(list(grid.get_node_ids())) > 2:
            time.sleep(0.1)

    found = serve(grid, "PersonalizedFedAvg", wait)
    (folder / "found.json").write_text(json.dumps(found))
'''
OURS = "PersonalizedFedAvg"


def check(found: dict[str, Any]) -> None:
    """Heads go on from message to message, differ from client to client, and do not leave."""
    assert found["off"] < 1e-5
    assert sorted(found["reports"]) == ["0", "1"]
    for own in found["reports"].values():
        assert len(own) == 4  # two trainings, an evaluation after each
        assert all(before[1] == after[0] for before, after in pairwise(own))
        assert own[0][1] != own[2][1]
    first, second = ([kept for _, kept in own] for own in found["reports"].values())
    assert all(a != b for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ["FedAvg", "FedAdam", OURS])
def test_in_process(name: str) -> None:
    app = project(PROJECT)
    grid = Tapped(app["client"], 2)
    check(app["serve"](grid, name))
    kept = private_values(grid, "fc3")
    assert len(kept) >= 4
    for _, array in arrays_in(grid.asked + grid.replies):
        assert not any(own.astype(array.dtype).tobytes() in array.tobytes() for own in kept)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.tour
def test_on_flowers_simulation() -> None:
    app = project(PROJECT)
    for found in on_ray(app["client"], lambda g: [app["serve"](g, n) for n in ("FedAvg", OURS)], 2):
        check(found)


@pytest.mark.slow
@pytest.mark.deployment
@pytest.mark.tour
def test_a_killed_node_is_back_with_its_head(tmp_path: Path) -> None:
    check(killed_and_back(tmp_path, PROJECT))
