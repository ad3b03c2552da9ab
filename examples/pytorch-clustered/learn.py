"""Digits that clients hold turned by 0, 90, 180 or 270 degrees: a network in PyTorch."""

import numpy as np
import torch
from flwr.app import ArrayRecord, Context
from flwr.client import NumPyClient
from sklearn.datasets import load_digits
from torch import nn

from flwr_perdl.clients import client_app
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import ClusteredFedAvg

N_CLIENTS = 16
IMAGES, LABELS = load_digits(return_X_y=True)
torch.set_num_threads(1)


def network() -> nn.Sequential:
    """Return the network, from the same start at every client."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10)
    )


def weights_of(net: nn.Module) -> list[np.ndarray]:
    """Return a network's weights, as Flower sends them."""
    return [value.cpu().numpy() for value in net.state_dict().values()]


class DigitsClient(NumPyClient):
    """A PyTorch client, as it would be for FedAvg."""

    def __init__(self, context: Context) -> None:
        partition = int(context.node_config["partition-id"])
        mine = np.random.default_rng(0).permutation(len(LABELS))[partition::N_CLIENTS]
        turned = np.rot90(IMAGES[mine].reshape(-1, 1, 8, 8) / 16, k=partition % 4, axes=(2, 3))
        X, y = torch.tensor(turned.copy(), dtype=torch.float32), torch.tensor(LABELS[mine])
        self.train, self.test = (X[:80], y[:80]), (X[80:], y[80:])
        self.net = network()

    def _load(self, parameters):
        names = self.net.state_dict()
        arrays = (torch.tensor(array) for array in parameters)
        self.net.load_state_dict(dict(zip(names, arrays, strict=True)))

    def fit(self, parameters, config):
        """Train ten epochs from the weights that came."""
        self._load(parameters)
        X, y = self.train
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.3)
        for _ in range(10):
            optimizer.zero_grad()
            nn.functional.cross_entropy(self.net(X), y).backward()
            optimizer.step()
        return weights_of(self.net), len(y), {}

    def evaluate(self, parameters, config):
        """Return the loss, by which the client chooses its cluster, and the accuracy."""
        self._load(parameters)
        X, y = self.test
        with torch.no_grad():
            scores = self.net(X)
        accuracy = (scores.argmax(dim=1) == y).float().mean().item()
        return nn.functional.cross_entropy(scores, y).item(), len(y), {"accuracy": accuracy}


def learn(k: int) -> None:
    """Learn k models, and print how well they do on the clients' test images."""
    strategy = ClusteredFedAvg(k, start="one-shot", num_clients=N_CLIENTS, seed=1)
    grid = InProcessGrid(client_app(DigitsClient), N_CLIENTS)
    result = strategy.start(grid, ArrayRecord(weights_of(network())), num_rounds=10)
    accuracy = result.evaluate_metrics_clientapp[10]["accuracy"]
    print(f"{k} models: accuracy {accuracy:.1f}, clients per cluster {strategy.result.sizes}")


learn(1)  # FedAvg
learn(4)
