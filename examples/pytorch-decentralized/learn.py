"""Eight nodes in a ring learn a network in PyTorch: models go to neighbors, and to no server."""

import numpy as np
import torch
from flwr.client import NumPyClient
from sklearn.datasets import load_digits
from torch import nn

from flwr_perdl.diffusion import DiffusionAveraging, Topology

N_NODES = 8
IMAGES, LABELS = load_digits(return_X_y=True)
#: The last 400 images are the test; a node has the others of three digits.
TEST = torch.tensor(IMAGES[-400:] / 16, dtype=torch.float32), torch.tensor(LABELS[-400:])
torch.set_num_threads(1)


def network() -> nn.Sequential:
    """Return the network, from the same start at every node."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def weights_of(net: nn.Module) -> list[np.ndarray]:
    """Return a network's weights, as Flower sends them."""
    return [value.cpu().numpy() for value in net.state_dict().values()]


class DigitsClient(NumPyClient):
    """A PyTorch client, as it would be for FedAvg."""

    def __init__(self, node: int) -> None:
        own = (np.arange(3) + node) % 10  # digits
        mine = np.flatnonzero(np.isin(LABELS[:-400], own))[node % 3 :: 3]
        self.X = torch.tensor(IMAGES[mine] / 16, dtype=torch.float32)
        self.y = torch.tensor(LABELS[mine])
        self.net = network()

    def _load(self, parameters):
        names = self.net.state_dict()
        arrays = (torch.tensor(array) for array in parameters)
        self.net.load_state_dict(dict(zip(names, arrays, strict=True)))

    def fit(self, parameters, config):
        """Train five epochs from the weights that came."""
        self._load(parameters)
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.5)
        for _ in range(5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(self.net(self.X), self.y).backward()
            optimizer.step()
        return weights_of(self.net), len(self.y), {}

    def evaluate(self, parameters, config):
        """Return the loss and the accuracy on test images of all ten digits."""
        self._load(parameters)
        X, y = TEST
        with torch.no_grad():
            scores = self.net(X)
        accuracy = (scores.argmax(dim=1) == y).float().mean().item()
        return nn.functional.cross_entropy(scores, y).item(), len(y), {"accuracy": accuracy}


learner = DiffusionAveraging(method="exact_diffusion", evaluate_every=20, metrics=["accuracy"])
learned = learner.fit(DigitsClient, Topology.ring(N_NODES), 100, initial=weights_of(network()))
for round_ in (20, 100):
    accuracies = learned.curves["evaluate-accuracy"][round_ - 1]
    print(
        f"round {round_}: accuracy {np.min(accuracies):.1f} at the worst node, "
        f"{np.max(accuracies):.1f} at the best"
    )
