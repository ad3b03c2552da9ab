"""The clients' side in PyTorch: digits, upright or rotated by 90 degrees."""

import numpy as np
import torch
from flwr.app import ArrayRecord
from flwr.client import NumPyClient
from sklearn.datasets import load_digits
from torch import nn

from flwr_perdl.clients import client_app
from flwr_perdl.simulations import InProcessGrid
from ifca import IFCA

N_CLIENTS = 10
IMAGES, LABELS = load_digits(return_X_y=True)
torch.set_num_threads(1)


def network(seed: int) -> nn.Sequential:
    """Return a network with random weights."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))


def weights_of(net: nn.Module) -> list[np.ndarray]:
    """Return a network's weights, as Flower sends them."""
    return [value.cpu().numpy() for value in net.state_dict().values()]


class DigitsClient(NumPyClient):
    """Answers IFCA: each array that comes has the k models along its first axis."""

    def __init__(self, context):
        partition = int(context.node_config["partition-id"])
        mine = np.random.default_rng(0).permutation(len(LABELS))[partition::N_CLIENTS]
        turned = np.rot90(IMAGES[mine].reshape(-1, 8, 8) / 16, k=partition % 2, axes=(1, 2))
        X, y = torch.tensor(turned.copy(), dtype=torch.float32), torch.tensor(LABELS[mine])
        self.train, self.test = (X[:120], y[:120]), (X[120:], y[120:])

    def choose(self, stacks):
        """Return the model with the lowest loss on the client's training images, and its number."""
        X, y = self.train
        nets, losses = [], []
        for model in zip(*stacks, strict=True):
            net = network(0)
            names, arrays = net.state_dict(), map(torch.tensor, model)
            net.load_state_dict(dict(zip(names, arrays, strict=True)))
            nets.append(net)
            losses.append(nn.functional.cross_entropy(net(X), y).item())
        chosen = int(np.argmin(losses))
        return nets[chosen], chosen

    def fit(self, parameters, config):
        """Train the chosen model ten epochs, and say which one it was."""
        (net, chosen), (X, y) = self.choose(parameters), self.train
        optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
        for _ in range(10):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(X), y).backward()
            optimizer.step()
        return weights_of(net), len(y), {"cluster": chosen}

    def evaluate(self, parameters, config):
        """Return the loss and the accuracy of the chosen model on the test images."""
        (net, _), (X, y) = self.choose(parameters), self.test
        with torch.no_grad():
            scores = net(X)
        metrics = {"accuracy": (scores.argmax(dim=1) == y).float().mean().item()}
        return nn.functional.cross_entropy(scores, y).item(), len(y), metrics


for k in (1, 2):
    models = zip(*(weights_of(network(seed)) for seed in range(k)), strict=True)
    strategy = IFCA(num_clients=N_CLIENTS)
    grid = InProcessGrid(client_app(DigitsClient), N_CLIENTS)
    result = strategy.start(grid, ArrayRecord([np.stack(one) for one in models]), num_rounds=15)
    accuracy = result.evaluate_metrics_clientapp[15]["accuracy"]
    last = [report for report in strategy.history if report.step == "train"][-1]
    chosen = [int(metrics["cluster"]) for metrics in last.metrics.values()]
    print(f"{k} models: accuracy {accuracy:.1f}, clusters {chosen}")
