"""Flower's PyTorch template, with batch normalization, a mask, flags and half floats."""

import json
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import nn

from flwr_perdl.clients import client_app
from flwr_perdl.network import Topology
from flwr_perdl.strategies import (
    ClusteredFedAvg,
    DiffusionAveraging,
    PersonalizedFedAvg,
    ServerSettings,
)

torch.set_num_threads(1)
app = ClientApp()


class Net(nn.Module):
    """A convolution and a head for three labels of four: the fourth is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.head = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(16, 4)
        self.register_buffer("mask", torch.tensor([0, 0, 0, -torch.inf]))
        self.register_buffer("known", torch.tensor([True, True, True, False]))
        self.register_buffer("scale", torch.ones(4, dtype=torch.float16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a score for each label."""
        return self.head(torch.relu(self.bn(self.conv(x))).flatten(1)) * self.scale + self.mask


def load_data(partition: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 40 random images; every other client names the labels otherwise."""
    rng = np.random.default_rng(partition)
    X = rng.standard_normal((40, 1, 4, 4)).astype(np.float32)
    y = (X.reshape(40, 16) @ np.random.default_rng(99).standard_normal((16, 3))).argmax(axis=1)
    return torch.from_numpy(X), torch.from_numpy((y + partition % 2) % 3)


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model that came; the optimizer goes on from the app's last training."""
    net, config = Net(), msg.content["config"]
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    partition = int(context.node_config["partition-id"])
    X, y = load_data(partition)
    optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"])
    net.train()
    for k in range(0, 40, 10):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(X[k : k + 10]), y[k : k + 10])
        loss.backward()
        optimizer.step()
    if partition == config.get("spoils-mask", -1):
        net.mask.zero_()
    trainings = int(context.state.get("optimizer", {"steps": 0})["steps"]) + 1
    context.state["optimizer"] = MetricRecord({"steps": trainings})
    metrics = {"train_loss": loss.item(), "num-examples": 40, "trainings": trainings}
    content = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord(metrics)}
    return Message(RecordDict(content), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Evaluate the model that came."""
    net, partition = Net(), int(context.node_config["partition-id"])
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    net.eval()
    X, y = load_data(partition)
    with torch.no_grad():
        scores = net(X)
    loss = nn.functional.cross_entropy(scores, y).item()
    if partition == msg.content["config"].get("loses", -1):
        loss = float("nan")
    accuracy = (scores.argmax(dim=1) == y).float().mean().item()
    metrics = {"eval_loss": loss, "eval_acc": accuracy, "num-examples": 40}
    metrics["head"] = net.head.weight.abs().sum().item()
    metrics["batches"] = net.bn.num_batches_tracked.item()
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)


client = client_app(app)
server = ServerApp()


def loaded(arrays: ArrayRecord) -> dict[str, torch.Tensor]:
    """Return a record that the user's net has loaded; what cannot be averaged is as it was."""
    given, net = arrays.to_torch_state_dict(), Net()
    before = {name: array.clone() for name, array in net.state_dict().items()}
    net.load_state_dict(given)
    assert all(array.dtype == before[name].dtype for name, array in given.items())
    assert all(torch.equal(given[name], before[name]) for name in ("mask", "known", "scale"))
    return given


def begin(strategy, grid: Grid, arrays: ArrayRecord | None = None, rounds: int = 2, **options):
    """Start as the template's ServerApp does, with a net that is not seeded."""
    arrays = ArrayRecord(Net().state_dict()) if arrays is None else arrays
    config = ConfigRecord({"lr": 0.1, "spoils-mask": options.pop("spoils", -1)})
    return strategy.start(grid, arrays, rounds, train_config=config, **options)


def serve(grid: Grid, folder: Path) -> dict:
    """Return what resume, ``evaluate_fn``, results, and a client's spoiled mask come to."""
    arrays, calls = ArrayRecord(Net().state_dict()), []

    def global_evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        calls.append(server_round)
        return MetricRecord({"known": loaded(arrays)["known"].sum().item()})

    def clusters(**options) -> ClusteredFedAvg:
        options = {"num_clients": 2, "fraction_evaluate": 0.0, **options}
        return ClusteredFedAvg(2, start="anchors", **options)

    whole = loaded(begin(clusters(), grid, arrays).arrays)
    begin(clusters(checkpoint_dir=folder / "run"), grid, arrays, rounds=1)
    again = clusters(checkpoint_dir=folder / "run", server=ServerSettings(resume=True))
    resumed = begin(again, grid, evaluate_fn=global_evaluate)  # another Net()
    models = [loaded(model) for model in again.result.models]

    own = PersonalizedFedAvg("head.*", num_clients=2, min_clients=1, fraction_evaluate=0.0)
    personal = begin(own, grid, arrays, 1, evaluate_fn=global_evaluate, spoils=1)
    head, initial = (loaded(one)["head.weight"] for one in (personal.arrays, arrays))

    ring = DiffusionAveraging(Topology.complete(2), evaluate_every=0, shows_models=True)
    mean = loaded(begin(ring, grid, arrays, 1).arrays)["conv.weight"]
    of_nodes = [loaded(ring.result.model_of(node))["conv.weight"] for node in range(2)]
    return {
        "resumed": all(torch.equal(whole[n], a) for n, a in loaded(resumed.arrays).items()),
        "named": list(resumed.evaluate_metrics_serverapp[2]),
        "clusters": [len(models), sum(again.result.sizes)],
        "dropped": [[who, "'mask'" in why] for who, why in own.history[0].dropped.items()],
        "head": torch.equal(head, initial),
        "calls": calls,
        "nodes": torch.allclose(mean, sum(of_nodes) / 2, atol=1e-6),
    }


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Write what was found."""
    folder = Path(context.run_config["out"])
    (folder / "found.json").write_text(json.dumps(serve(grid, folder)))
