"""What users of fluke, FedLab and GossipPy write; `rivals.py` runs it in the library's environment.

``python _rivals.py FUNCTION RUNS.json < INPUT.npz`` prints a line for each run.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import redirect_stdout
from importlib import import_module
from io import BytesIO
from typing import Any

import numpy as np
import torch

try:
    import_module("torchvision")
except RuntimeError:  # built for a PyTorch with CUDA: nothing here needs that
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor a, Tensor b, float c) -> Tensor")


sent = np.load(BytesIO(sys.stdin.buffer.read()))
n, loss = len(sent["graph"]), torch.nn.CrossEntropyLoss()
given: dict[str, Any] = {"graph": sent["graph"]}  # and what the run's seed has
#: Numbers that were sent, in all, and every client's model.
Trained = tuple[float, list[Any]]


def images(part: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return every client's images and labels."""
    pairs = [[torch.tensor(given[f"{part}-{what}-{i}"]) for what in "Xy"] for i in range(n)]
    return [(X.float(), y.long()) for X, y in pairs]


def layer(name: str, k: int = 0) -> torch.nn.Linear:
    """Return a layer with the first weights, of the k-th first model."""
    weight, bias = (torch.tensor(given[f"{name}.{part}-{k}"]) for part in ("weight", "bias"))
    linear = torch.nn.Linear(*weight.shape)
    linear.weight.data, linear.bias.data = weight.T.contiguous(), bias
    return linear


class Net(torch.nn.Sequential):
    """The network."""

    def __init__(self, k: int = 0) -> None:
        super().__init__(layer("body", k), torch.nn.ReLU(), layer("head", k))

    def init_weights(self) -> None:
        """Keep the first weights; GossipPy asks for this."""


class Watch:
    """What fluke tells of a run: numbers sent; all nodes have had their epochs."""

    def __init__(self, fits: int) -> None:
        self.floats, self.fits, self.most = 0, 0, fits

    def message_sent(self, to: Any, message: Any) -> None:
        self.floats += message.size

    def end_fit(self, **_: Any) -> None:
        self.fits += 1

    def end_round(self, round: int) -> None:
        from fluke.server import EarlyStopping

        if self.fits >= self.most:
            raise EarlyStopping(round)


def fluke_parts(sgd: Any, batch: int, seed: int) -> tuple[Any, Any]:
    """Return the images and a client's options for fluke."""
    from fluke import DDict, FlukeENV, data

    FlukeENV().set_seed(seed)
    FlukeENV().set_eval_cfg(server=False, locals=False, pre_fit=False, post_fit=False)
    options = {"num_labels": 10, "batch_size": batch, "shuffle": True}
    own = [data.FastDataLoader(*pair, **options) for pair in images("train")]
    split = data.DataSplitter(data.DummyDataContainer(own, [None] * n, None, num_classes=10))
    client = DDict(batch_size=batch, local_epochs=1, loss="CrossEntropyLoss", tau=1)
    client.update(optimizer=DDict(name="SGD", **sgd))
    client.update(scheduler=DDict(name="StepLR", step_size=1, gamma=1))
    return split, client


def two_parts() -> Any:
    """Return the network in fluke's parts; by its name, each client of FedRep has its own."""
    from fluke.nets import EncoderHeadNet

    return EncoderHeadNet(torch.nn.Sequential(layer("body"), torch.nn.ReLU()), layer("head"))


def fluke(method: str, sgd: Any, lam: float, rounds: int, batch: int, seed: int) -> Trained:
    """Train with fluke's algorithms with a server."""
    from fluke import DDict, algorithms

    split, client = fluke_parts(sgd, batch, seed)
    model: torch.nn.Module = Net()
    if method in ("fedper.FedPer", "fedrep.FedRep"):
        client.update(model="__main__.two_parts")
        model = two_parts().encoder
    elif method == "ditto.Ditto":
        client.update(model=model, lam=lam)
    module, name = method.split(".")
    kind = getattr(import_module(f"{algorithms.__name__}.{module}"), name)
    algorithm = kind(n, split, DDict(model=model, client=client, server=DDict(weighted=True)))
    algorithm.server.channel.attach(watch := Watch(0))
    algorithm.run(rounds, 1.0)
    return watch.floats, [getattr(c, "personalized_model", c.model) for c in algorithm.clients]


def fluke_gossip(sgd: Any, rounds: int, batch: int, seed: int, **_: Any) -> Trained:
    """Train with fluke's GossipDFL: a node takes the mean of its own model and those received."""
    import networkx
    from fluke import DDict
    from fluke.algorithms.decentralized import GossipDFL, Topology

    split, client = fluke_parts(sgd, batch, seed)
    client.update(policy="aggregate", eta=0.5)
    topology, watch = Topology(networkx.from_numpy_array(given["graph"])), Watch(n * rounds)
    learner = GossipDFL(n, split, DDict(model=Net(), client=client), topology)
    for one in (learner, learner.channel, *learner.clients):
        one.attach(watch)
    learner.run(10 * rounds)  # one of its rounds trains a few nodes only
    return averaged(watch.floats, [one.model for one in learner.clients])


def fedlab(sgd: Any, rounds: int, batch: int, seed: int, **parts: Any) -> Trained:
    """Train with FedLab's FedAvg, or with the server and the trainer that are given."""
    from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler
    from fedlab.contrib.dataset.basic_dataset import FedDataset
    from fedlab.core.standalone import StandalonePipeline
    from fedlab.utils.functional import setup_seed
    from torch.utils.data import DataLoader, TensorDataset

    class Data(FedDataset):
        def get_dataloader(self, id: int, batch_size: int, type: str = "train") -> DataLoader:
            return DataLoader(own[id], batch_size, shuffle=True)

    setup_seed(seed)
    own = [TensorDataset(*pair) for pair in images("train")]
    handler = parts.get("handler") or FedAvgServerHandler(Net(), rounds, 1.0)
    trainer = parts.get("trainer") or FedAvgSerialClientTrainer(Net(), n)
    trainer.setup_dataset(Data())
    trainer.setup_optim(1, batch, **sgd)
    StandalonePipeline(handler, trainer).main()
    size = handler.model_parameters.numel() + sum(x.numel() for x in handler.downlink_package)
    return rounds * n * size, [handler.model] * n


def fedlab_ifca(rounds: int, **more: Any) -> Trained:
    """Train with the server of FedLab's IFCA; its client in FedLab 1.3.0 stops with an error."""
    from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer
    from fedlab.contrib.algorithm.ifca import IFCAServerHander
    from fedlab.utils import SerializationTool

    class Chooser(FedAvgSerialClientTrainer):
        def choose(self, models: list[Any], id: int) -> int:
            losses = []
            for parameters in models:
                self.set_model(parameters)
                losses.append(loss(self.model(choice[id][0]), choice[id][1]).item())
            return int(np.argmin(losses))

        def local_process(self, payload: Any, id_list: list[int]) -> None:
            for id in id_list:
                best = self.choose(payload[1:], id)
                loader = self.dataset.get_dataloader(id, self.batch_size)
                self.cache.append([best, id, *self.train(payload[1 + best], loader)])

    choice, models = images("choose"), [Net() for _ in range(n)]
    handler, trainer = IFCAServerHander(Net(), rounds, 1.0), Chooser(Net(), n)
    handler.setup_optim(0, 4, [SerializationTool.serialize_model(Net(k)) for k in range(4)])
    floats, _ = fedlab(rounds=rounds, handler=handler, trainer=trainer, **more)
    for i, model in enumerate(models):
        best = trainer.choose(handler.global_models, i)
        SerializationTool.deserialize_model(model, handler.global_models[best])
    return floats, models


def gossipy(sgd: Any, rounds: int, batch: int, seed: int, **_: Any) -> Trained:
    """Train with GossipPy's simulator: a node pushes to one neighbor, which merges and trains."""
    from gossipy import core, data, model, node, set_seed, simul
    from gossipy.data.handler import ClassificationDataHandler
    from gossipy.model.handler import TorchModelHandler

    class Model(Net, model.TorchModel):
        """GossipPy's kind of network."""

    set_seed(seed)
    own = images("train")
    X, y = (torch.cat(parts) for parts in zip(*own, strict=True))
    ends = np.cumsum([0] + [len(labels) for _, labels in own])
    split = data.DataDispatcher(ClassificationDataHandler(X, y, test_size=0), n, False, False)
    split.set_assignments([list(range(*ends[i : i + 2])) for i in range(n)], None)
    handler = TorchModelHandler(Model(), torch.optim.SGD, sgd, loss, batch_size=batch)
    network = core.StaticP2PNetwork(n, given["graph"] > 0)
    made = node.GossipNode.generate(split, network, handler, 100, sync=True)
    simulator = simul.GossipSimulator(made, split, 100, core.AntiEntropyProtocol.PUSH)
    report = simul.SimulationReport()
    simulator.add_receiver(report)
    simulator.init_nodes(seed)  # which trains every node once
    simulator.start(rounds - 1)
    return averaged(
        report._total_size, [one.model_handler.model for one in simulator.nodes.values()]
    )


@torch.no_grad()
def averaged(floats: float, models: list[Any]) -> Trained:
    """Average every node's model with its neighbors' once more: our nodes, too, end with that."""
    convert, weights = torch.nn.utils, torch.eye(n) + torch.tensor(given["graph"])
    vectors = torch.stack([convert.parameters_to_vector(one.parameters()) for one in models])
    mixed = weights / weights.sum(dim=1, keepdim=True) @ vectors
    for model, vector in zip(models, mixed, strict=True):
        convert.vector_to_parameters(vector, model.parameters())
    return floats + given["graph"].sum() * vectors.shape[1], models


@torch.no_grad()
def accuracy(model: Any, X: torch.Tensor, y: torch.Tensor) -> float:
    """Return the share of images with the right label."""
    return float((model(X).argmax(1) == y).float().mean())


if __name__ == "__main__":
    torch.set_num_threads(1)
    runs = json.loads(sys.argv[2])
    for run in (runs[0] | {"rounds": 1}, *runs):  # the first imports the library
        seed = f"{run['seed']}/"
        given |= {name.removeprefix(seed): sent[name] for name in sent if name.startswith(seed)}
        start = time.process_time()
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            floats, models = globals()[sys.argv[1]](**run)
        seconds, table = time.process_time() - start, []
        for pairs in zip(models, images("choose"), images("test"), strict=True):
            table.append([accuracy(pairs[0], *one) for one in pairs[1:]])
        print(json.dumps([seconds, 4 * floats / n, table]), flush=True)
