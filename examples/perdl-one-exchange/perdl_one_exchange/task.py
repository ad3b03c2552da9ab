"""Network and data: digits, of which every client swaps the labels of two."""

from functools import lru_cache

import numpy as np
import torch
from flwr.app import Context
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_perdl.clients import Member

torch.set_num_threads(1)
digits = lru_cache(load_digits)  # read once per process


class Net(nn.Module):
    """A small network; clients learn heads of their own for its frozen body."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a score for each label."""
        return self.head(self.body(x))


def swapped_digits(partition: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images and labels; each client swaps two labels."""
    images, labels = digits(return_X_y=True)
    mine = np.random.default_rng(0).permutation(len(labels))[partition % 16 :: 16]
    names, pair = np.arange(10), np.random.default_rng(partition).permutation(10)[:2]
    names[pair] = pair[::-1]
    return images[mine] / 16, names[labels[mine]]


def load_data(context: Context) -> tuple[DataLoader, DataLoader]:
    """Return a node's data, to train with and to test with. For data of your own, change this."""
    if path := context.node_config.get("data"):
        with np.load(str(path)) as file:
            images, labels = file["X"], file["y"]
    else:
        images, labels = swapped_digits(Member(context).partition)
    X, y = torch.tensor(images, dtype=torch.float32), torch.tensor(labels)
    n = len(y) * 7 // 10
    train, test = TensorDataset(X[:n], y[:n]), TensorDataset(X[n:], y[n:])
    return DataLoader(train, batch_size=20), DataLoader(test, batch_size=len(test))


def train(net: nn.Module, loader: DataLoader, epochs: int, lr: float) -> None:
    """Train the network."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for _ in range(epochs):
        for X, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(X), y).backward()
            optimizer.step()


def test(net: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Return the loss and the accuracy."""
    X, y = loader.dataset.tensors
    with torch.no_grad():
        scores = net(X)
    accuracy = (scores.argmax(dim=1) == y).float().mean().item()
    return nn.functional.cross_entropy(scores, y).item(), accuracy
