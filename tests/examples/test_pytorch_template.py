"""An app in the form of Flower's PyTorch template keeps its last layer; end_to_end has engines."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg
from sklearn.datasets import load_digits

from flwr_perdl.clients import client_app, keep_private
from flwr_perdl.strategies import PersonalizedFedAvg
from tests.clients.test_keep_private import Tapped, arrays_in, private_values

torch = pytest.importorskip("torch")

STRATEGIES: dict[str, Any] = {
    "FedAvg": lambda: FedAvg(fraction_train=1.0),
    "FedAdam": lambda: FedAdam(fraction_train=1.0),
    "PersonalizedFedAvg": lambda: PersonalizedFedAvg(["fc3.*"], fraction_train=1.0, num_clients=2),
}


def network() -> Any:
    first, last = torch.nn.Linear(64, 16), torch.nn.Linear(16, 10)
    layers = (("fc1", first), ("relu", torch.nn.ReLU()), ("fc3", last))
    return torch.nn.Sequential(OrderedDict(layers))


def received(message: Message, context: Context) -> tuple[Any, Any, Any]:
    """Return the model that came, and digits under names of the client's own."""
    model, partition = network(), int(context.node_config["partition-id"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    images, labels = load_digits(return_X_y=True)
    own = slice(100 * partition, 100 * partition + 100)
    names = np.random.default_rng(partition).permutation(10)
    X = torch.tensor(images[own] / 16, dtype=torch.float32)
    return model, X, torch.tensor(names[labels[own]])


def watch(message: Message, context: Context, call_next: Any) -> Message:
    """Report the private layer's size, as received and as trained: an inner mod."""
    arrays = message.content["arrays"]
    reply: Message = call_next(message, context)
    own = {"received": arrays, "kept": reply.content.get("arrays", arrays)}
    sizes = {name: float(record["fc3.weight"].numpy().std()) for name, record in own.items()}
    reply.content["metrics"].update({"partition": context.node_config["partition-id"], **sizes})
    return reply


app = ClientApp(mods=[keep_private("fc3.*"), watch])


@app.train()
def train(message: Message, context: Context) -> Message:
    model, X, y = received(message, context)
    optimizer = torch.optim.Adam(model.parameters(), lr=message.content["config"]["lr"])
    for _ in range(3):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(X), y)
        loss.backward()
        optimizer.step()
    metrics = MetricRecord({"train_loss": loss.item(), "num-examples": len(X)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    model, X, y = received(message, context)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(X), y).item()
    metrics = MetricRecord({"eval_loss": loss, "num-examples": len(X)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=message)


@pytest.mark.parametrize("name", STRATEGIES)
def test_heads_go_on_from_message_to_message_differ_and_do_not_leave(name: str) -> None:
    torch.manual_seed(0)
    start, grid = ArrayRecord(network().state_dict()), Tapped(client_app(app), 2)
    config = ConfigRecord({"lr": 0.01})
    result = STRATEGIES[name]().start(grid, start, train_config=config, num_rounds=2)
    network().load_state_dict(result.arrays.to_torch_state_dict())
    reports: dict[int, list[Any]] = {0: [], 1: []}
    for message in grid.replies:
        if "metrics" in message.content:
            own = message.content["metrics"]
            reports[own["partition"]].append((own["received"], own["kept"]))
    for own in reports.values():
        assert len(own) == 4  # two trainings, an evaluation after each
        assert all(before[1] == after[0] for before, after in pairwise(own))
        assert own[0][1] != own[2][1]
    assert all(a[1] != b[1] for a, b in zip(*reports.values(), strict=True))
    private = private_values(grid, "fc3")
    assert len(private) >= 4
    for key, array in arrays_in(grid.asked + grid.replies):
        if key in ("fc3.weight", "fc3.bias"):
            np.testing.assert_allclose(array, start[key].numpy(), atol=1e-5)
        assert not any(one.astype(array.dtype).tobytes() in array.tobytes() for one in private)
