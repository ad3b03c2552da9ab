"""What users of fluke and GossipPy write for decentralized learning; `beside_gossip.py` runs it.

``python _gossip.py LIBRARY RUN < INPUT``, in the library's environment, prints `Log.rows`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import BytesIO
from typing import Any

import numpy as np
import torch

given = {
    name: torch.tensor(array) for name, array in np.load(BytesIO(sys.stdin.buffer.read())).items()
}
seed, n = int(given["seed"]), len(given["weights"])
graph = (given["weights"].numpy() > 0) & ~np.eye(n, dtype=bool)
nodes = [(given[f"X-{i}"], given[f"y-{i}"]) for i in range(n)]


class Net(torch.nn.Sequential):
    """The network, with the first weights."""

    def __init__(self) -> None:
        body, head = (torch.nn.Linear(*given[f"{name}.weight"].shape) for name in ("body", "head"))
        super().__init__(body, torch.nn.ReLU(), head)
        self.init_weights()

    def init_weights(self) -> None:
        """Set the first weights."""
        for layer, name in ((self[0], "body"), (self[2], "head")):
            layer.weight.data = given[f"{name}.weight"].T.clone()
            layer.bias.data = given[f"{name}.bias"].clone()


class Log:
    """After every so many epochs: epochs, bytes, the nodes' accuracies to choose and to test."""

    def __init__(self, every: int) -> None:
        self.every, self.fits, self.floats, self.rows = every, 0, 0, []

    @torch.no_grad()
    def add(self, models: Sequence[torch.nn.Module]) -> None:
        """Add a row if it is time for one."""
        if self.fits >= self.every * n * (len(self.rows) + 1):
            images = [(given[f"X-{part}"], given[f"y-{part}"]) for part in ("choose", "test")]
            right = [[(model(X).argmax(1) == y).float() for model in models] for X, y in images]
            scores = [[float(own.mean()) for own in part] for part in right]
            self.rows.append((self.fits / n, 4 * self.floats / n, *scores))


def fluke(step: float, epochs: int, batch: int, log: Log) -> None:
    """Train with fluke's GossipDFL: a node takes the mean of its own model and those received."""
    import networkx
    from fluke import DDict, FlukeENV
    from fluke.algorithms.decentralized import GossipDFL, Topology
    from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
    from fluke.server import EarlyStopping

    class Watch:
        def message_sent(self, to: Any, message: Any) -> None:
            log.floats += message.size

        def end_fit(self, **_: Any) -> None:
            log.fits += 1

        def end_round(self, round: int) -> None:
            log.add([client.model for client in federation.clients])
            if len(log.rows) == epochs // log.every:
                raise EarlyStopping(round)

    FlukeENV().set_seed(seed)
    FlukeENV().set_eval_cfg(server=False, locals=False, pre_fit=False, post_fit=False)
    own = [FastDataLoader(*p, num_labels=10, batch_size=batch, shuffle=True) for p in nodes]
    optimizer, scheduler = DDict(name="SGD", lr=step), DDict(name="StepLR", step_size=1, gamma=1)
    client = DDict(batch_size=batch, local_epochs=1, policy="aggregate", eta=0.5)
    client.update(loss="CrossEntropyLoss", optimizer=optimizer, scheduler=scheduler)
    splitter = DataSplitter(DummyDataContainer(own, [None] * n, None, num_classes=10))
    topology = Topology(networkx.from_numpy_array(graph))
    federation = GossipDFL(n, splitter, DDict(model=Net(), client=client), topology)
    for sender in (federation, federation.channel, *federation.clients):
        sender.attach(Watch())
    federation.run(10 * epochs)


def gossipy(step: float, epochs: int, batch: int, log: Log) -> None:
    """Train with GossipPy's simulator: a node pushes to one neighbor, which merges and trains."""
    from gossipy import set_seed
    from gossipy.core import AntiEntropyProtocol, StaticP2PNetwork
    from gossipy.data import DataDispatcher
    from gossipy.data.handler import ClassificationDataHandler
    from gossipy.model import TorchModel
    from gossipy.model.handler import TorchModelHandler
    from gossipy.node import GossipNode
    from gossipy.simul import GossipSimulator, SimulationReport

    class Model(Net, TorchModel):
        """GossipPy's kind of network."""

    class Watch(SimulationReport):
        def update_timestep(self, t: int) -> None:
            log.floats, log.fits = self._total_size, n + self._sent_messages  # receivers train
            log.add([node.model_handler.model for node in simulator.nodes.values()])

    set_seed(seed)
    X, y = (torch.cat(arrays) for arrays in zip(*nodes, strict=True))
    ends = np.cumsum([0] + [len(labels) for _, labels in nodes])
    data = DataDispatcher(ClassificationDataHandler(X, y, test_size=0), n, False, False)
    data.set_assignments([list(range(*ends[i : i + 2])) for i in range(n)], None)
    loss = torch.nn.CrossEntropyLoss()
    handler = TorchModelHandler(Model(), torch.optim.SGD, {"lr": step}, loss, batch_size=batch)
    made = GossipNode.generate(data, StaticP2PNetwork(n, graph), handler, 100, sync=True)
    simulator = GossipSimulator(made, data, 100, AntiEntropyProtocol.PUSH)
    simulator.add_receiver(Watch())
    simulator.init_nodes(seed)  # which trains every node once
    simulator.start(epochs)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run = json.loads(sys.argv[2])
    log = Log(run.pop("every"))
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        globals()[sys.argv[1]](**run, log=log)
    print(json.dumps(log.rows))
