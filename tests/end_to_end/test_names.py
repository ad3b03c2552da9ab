"""Arrays keep the names of a `state_dict` on every engine, for clients of both kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flwr_perdl.simulations import InProcessGrid
from perdl_experiments.deployment import Deployment
from tests.engines import on_ray

NUMPY = """\
class Net:  # as strict about names and shapes as PyTorch; the names are not in order
    def __init__(self):
        self.state = {"norm.seen": np.array(0), "body.weight": np.zeros((1, 3)), "body.a": ZERO}

    def load_state_dict(self, state):
        if list(state) != list(self.state) or any(np.shape(state[n]) != self.state[n].shape
                                                  for n in state):
            raise RuntimeError(f"Error(s) in loading state_dict for Net: {list(state)}")
        self.state = {n: np.asarray(a).astype(self.state[n].dtype) for n, a in state.items()}

    def error(self, X, y):
        return X @ self.state["body.weight"][0] + self.state["body.a"][0] - y

    def train(self, X, y):
        self.state["norm.seen"] = self.state["norm.seen"] + 1
        for _ in range(5):
            step = 0.2 * self.error(X, y)
            self.state["body.weight"] = self.state["body.weight"] - step @ X / len(X)
            self.state["body.a"] = self.state["body.a"] - step.mean()

    def loss(self, X, y):
        return float(np.mean(self.error(X, y) ** 2))


ZERO = np.zeros(1, np.float32)
record_of = lambda net: ArrayRecord({n: Array(np.asarray(a)) for n, a in net.state.items()})
state_of = lambda record: {n: a.numpy() for n, a in record.items()}
state_of_list = lambda net, arrays: dict(zip(net.state, arrays, strict=True))
values_of = lambda net: list(net.state.values())
"""

TORCH = """\
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.body = torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)

    def error(self, X, y):
        X, y = (torch.tensor(a, dtype=torch.float32) for a in (X, y))
        return ((self.body(self.norm(X))[:, 0] - y) ** 2).mean()

    def train_once(self, X, y):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.train()
        for _ in range(5):
            optimizer.zero_grad()
            self.error(X, y).backward()
            optimizer.step()

    def loss(self, X, y):
        self.eval()
        with torch.no_grad():
            return float(self.error(X, y))


record_of = lambda net: ArrayRecord(net.state_dict())
state_of = lambda record: record.to_torch_state_dict()
state_of_list = lambda net, arrays: dict(
    zip(net.state_dict(), map(torch.as_tensor, arrays), strict=True)
)
values_of = lambda net: [tensor.numpy() for tensor in net.state_dict().values()]
"""

PROJECT = """\
import json
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from flwr_perdl.clients import client_app
from flwr_perdl.strategies import ClusteredFedAvg

{net}

def data(partition):
    X = np.random.default_rng(partition).standard_normal((40, 3))
    return X, X[:, 0] * (1 if partition % 2 else -1) + 0.5


def trained(net, context):
    getattr(net, "train_once", net.train)(*data(int(context.node_config["partition-id"])))
    return net


def loss(net, context):
    return net.loss(*data(int(context.node_config["partition-id"])))


app = ClientApp()


def loaded(message):
    net = Net()
    net.load_state_dict(state_of(message.content["arrays"]))
    return net


@app.train()
def train(message, context):
    net = trained(loaded(message), context)
    records = {{"arrays": record_of(net), "metrics": MetricRecord({{"num-examples": 40}})}}
    return Message(RecordDict(records), reply_to=message)


@app.evaluate()
def evaluate(message, context):
    metrics = {{"num-examples": 40, "eval_loss": loss(loaded(message), context)}}
    return Message(RecordDict({{"metrics": MetricRecord(metrics)}}), reply_to=message)


class Client(NumPyClient):
    def __init__(self, context):
        self.context = context

    def net(self, arrays):
        net = Net()
        net.load_state_dict(state_of_list(net, arrays))
        return net

    def fit(self, parameters, config):
        return values_of(trained(self.net(parameters), self.context)), 40, {{}}

    def evaluate(self, parameters, config):
        return loss(self.net(parameters), self.context), 40, {{}}


client = client_app({kind})
server = ServerApp()


def serve(grid):
    names, losses = [], []

    def evaluate_fn(server_round, record):
        names.append(list(record))
        models = [record] if server_round == 0 else [
            ArrayRecord({{n: Array(np.asarray(a.numpy()[j])) for n, a in record.items()}})
            for j in range(len(next(iter(record.values())).numpy()))
        ]
        for model in models:
            Net().load_state_dict(state_of(model))

    strategy = ClusteredFedAvg(2, num_clients=2)
    result = strategy.start(grid, record_of(Net()), num_rounds=2, evaluate_fn=evaluate_fn)
    for model in strategy.result.models:
        Net().load_state_dict(state_of(model))
    return {{
        "names": [*names, list(result.arrays), *map(list, strategy.result.models)],
        "wanted": list(record_of(Net())),
        "evaluations": {{
            t: [m["clients"], m["loss"]] for t, m in result.evaluate_metrics_clientapp.items()
        }},
    }}


@server.main()
def main(grid, context):
    Path(context.run_config["out"]).write_text(json.dumps(serve(grid)))
"""


@pytest.fixture(params=["numpy", "torch"])
def net(request: pytest.FixtureRequest) -> str:
    if request.param == "torch":
        pytest.importorskip("torch")
    return TORCH if request.param == "torch" else NUMPY


@pytest.fixture(params=["app", "Client"])
def source(net: str, request: pytest.FixtureRequest) -> str:
    return PROJECT.format(net=net, kind=request.param)


def check(found: Any) -> None:
    assert found["names"] == [found["wanted"]] * 6  # three rounds, the result, the two models
    first, last = found["evaluations"].values()
    assert (first[0], last[0]) == (2, 2)
    assert last[1] < first[1]


def project(source: str) -> dict[str, Any]:
    """Return the project's names; Ray pickles what is of ``__main__`` by value."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(source, names)
    return names


def test_in_process(source: str) -> None:
    app = project(source)
    check(app["serve"](InProcessGrid(app["client"], 2)))


@pytest.mark.slow
@pytest.mark.ray
def test_on_flowers_simulation(source: str) -> None:
    app = project(source)
    check(on_ray(app["client"], app["serve"], 2))


@pytest.mark.slow
@pytest.mark.deployment
def test_on_supernodes(source: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with Deployment(tmp_path / "deployment", 2, app=source) as deployment:
        deployment.run({"out": str(out)}, timeout=400)
    check(json.loads(out.read_text()))
