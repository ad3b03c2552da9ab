"""What users of fluke and GossipPy write for decentralized learning; `beside_gossip.py` runs it.

``python _gossip.py LIBRARY RUN < INPUT``, in the library's environment, prints ``rows``.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stdout
from io import BytesIO
from typing import Any

import numpy as np
import torch

arrays = np.load(BytesIO(sys.stdin.buffer.read()))
given = {name: torch.tensor(array) for name, array in arrays.items()}
seed, n = int(given["seed"]), len(given["weights"])
graph = (given["weights"].numpy() > 0) & ~np.eye(n, dtype=bool)
nodes = [(given[f"X-{i}"], given[f"y-{i}"]) for i in range(n)]
#: After every so many epochs: epochs, bytes, the nodes' accuracies to choose by and in the test.
rows: list[Any] = []


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


@torch.no_grad()
def keep_row(every: int, fits: int, floats: int, models: list[Any]) -> None:
    """Keep a row if it is time for one."""
    if fits >= every * n * (len(rows) + 1):
        images = [(given[f"X-{part}"], given[f"y-{part}"]) for part in ("choose", "test")]
        right = [[(model(X).argmax(1) == y).float() for model in models] for X, y in images]
        rows.append((fits / n, 4 * floats / n, *([float(own.mean()) for own in r] for r in right)))


def fluke(step: float, epochs: int, batch: int, every: int) -> None:
    """Train with fluke's GossipDFL: a node takes the mean of its own model and those received."""
    import networkx
    from fluke import DDict, FlukeENV, data, server
    from fluke.algorithms.decentralized import GossipDFL, Topology

    class Watch:
        fits = floats = 0

        def message_sent(self, to: Any, message: Any) -> None:
            self.floats += message.size

        def end_fit(self, **_: Any) -> None:
            self.fits += 1

        def end_round(self, round: int) -> None:
            keep_row(every, self.fits, self.floats, [one.model for one in federation.clients])
            if len(rows) == epochs // every:
                raise server.EarlyStopping(round)

    FlukeENV().set_seed(seed)
    FlukeENV().set_eval_cfg(server=False, locals=False, pre_fit=False, post_fit=False)
    own = [data.FastDataLoader(*p, num_labels=10, batch_size=batch, shuffle=True) for p in nodes]
    optimizer, scheduler = DDict(name="SGD", lr=step), DDict(name="StepLR", step_size=1, gamma=1)
    client = DDict(batch_size=batch, local_epochs=1, policy="aggregate", eta=0.5)
    client.update(loss="CrossEntropyLoss", optimizer=optimizer, scheduler=scheduler)
    splitter = data.DataSplitter(data.DummyDataContainer(own, [None] * n, None, num_classes=10))
    topology, watch = Topology(networkx.from_numpy_array(graph)), Watch()
    federation = GossipDFL(n, splitter, DDict(model=Net(), client=client), topology)
    for one in (federation, federation.channel, *federation.clients):
        one.attach(watch)
    federation.run(10 * epochs)


def gossipy(step: float, epochs: int, batch: int, every: int) -> None:
    """Train with GossipPy's simulator: a node pushes to one neighbor, which merges and trains."""
    from gossipy import core, data, model, node, set_seed, simul
    from gossipy.data.handler import ClassificationDataHandler
    from gossipy.model.handler import TorchModelHandler

    class Model(Net, model.TorchModel):
        """GossipPy's kind of network."""

    class Watch(simul.SimulationReport):
        def update_timestep(self, t: int) -> None:
            fits = n + self._sent_messages  # its receiver trains at once
            models = [one.model_handler.model for one in simulator.nodes.values()]
            keep_row(every, fits, self._total_size, models)

    set_seed(seed)
    X, y = (torch.cat(parts) for parts in zip(*nodes, strict=True))
    ends = np.cumsum([0] + [len(labels) for _, labels in nodes])
    split = data.DataDispatcher(ClassificationDataHandler(X, y, test_size=0), n, False, False)
    split.set_assignments([list(range(*ends[i : i + 2])) for i in range(n)], None)
    loss = torch.nn.CrossEntropyLoss()
    handler = TorchModelHandler(Model(), torch.optim.SGD, {"lr": step}, loss, batch_size=batch)
    network = core.StaticP2PNetwork(n, graph)
    made = node.GossipNode.generate(split, network, handler, 100, sync=True)
    simulator = simul.GossipSimulator(made, split, 100, core.AntiEntropyProtocol.PUSH)
    simulator.add_receiver(Watch())
    simulator.init_nodes(seed)  # which trains every node once
    simulator.start(epochs)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        globals()[sys.argv[1]](**json.loads(sys.argv[2]))
    print(json.dumps(rows))
