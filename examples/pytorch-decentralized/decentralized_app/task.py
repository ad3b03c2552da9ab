"""Network and data: digits, of which a node has a few kinds only."""

from functools import lru_cache

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
digits = lru_cache(load_digits)  # read once per process
#: The last 400 images are the test of all nodes.
N_TEST = 400


class Net(nn.Module):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a score for each digit."""
        return self.fc2(torch.relu(self.fc1(x)))


def load_data(partition: int, num_partitions: int) -> tuple[DataLoader, DataLoader]:
    """Return a node's images of three digits (five of three nodes), and test images of all."""
    images, labels = digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.float32)
    width = max(3, 10 // num_partitions + 2)
    own = (np.arange(width) + partition * 10 // num_partitions) % 10
    mine = np.flatnonzero(np.isin(labels[:-N_TEST], own))[partition % 3 :: 3]
    y = torch.tensor(labels)
    torch.manual_seed(partition)
    return (
        DataLoader(TensorDataset(images[mine], y[mine]), batch_size=32, shuffle=True),
        DataLoader(TensorDataset(images[-N_TEST:], y[-N_TEST:]), batch_size=N_TEST),
    )


def train(net: nn.Module, loader: DataLoader, epochs: int, lr: float) -> float:
    """Train the network, and return the mean loss."""
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=lr), []
    net.train()
    for _ in range(epochs):
        for X, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(X), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return float(np.mean(losses))


def test(net: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Return the mean loss and the accuracy."""
    net.eval()
    X, y = loader.dataset.tensors
    with torch.no_grad():
        scores = net(X)
    accuracy = (scores.argmax(dim=1) == y).float().mean().item()
    return nn.functional.cross_entropy(scores, y).item(), accuracy
