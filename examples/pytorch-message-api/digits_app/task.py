"""Network and data: digits, which clients hold turned by 0, 90, 180 or 270 degrees."""

from functools import lru_cache

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
digits = lru_cache(load_digits)  # read once per process


class Net(nn.Module):
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Linear(72, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a score for each digit."""
        x = nn.functional.max_pool2d(torch.relu(self.norm(self.conv(x))), 2)
        return self.fc(x.flatten(1))


def load_data(partition: int, num_partitions: int) -> tuple[DataLoader, DataLoader]:
    """Return a client's images and labels, to train with and to test with."""
    images, labels = digits(return_X_y=True)
    mine = np.random.default_rng(0).permutation(len(labels))[partition::num_partitions]
    turned = np.rot90(images[mine].reshape(-1, 1, 8, 8) / 16, k=partition % 4, axes=(2, 3))
    X, y = torch.tensor(turned.copy(), dtype=torch.float32), torch.tensor(labels[mine])
    return (
        DataLoader(TensorDataset(X[:80], y[:80]), batch_size=20),
        DataLoader(TensorDataset(X[80:], y[80:]), batch_size=20),
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
