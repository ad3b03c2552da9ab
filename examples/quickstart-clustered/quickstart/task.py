"""Network and data: ten clients with images; the cameras of five are turned by 90 degrees."""

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Net(nn.Module):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a score for each label."""
        return self.head(torch.relu(self.body(x)))


def partition_of(node_config: Mapping[str, Any]) -> int:
    """Return which part of the data a node has; a SuperNode may have a name alone."""
    if "partition-id" in node_config:
        return int(node_config["partition-id"])
    if "name" in node_config:
        return crc32(str(node_config["name"]).encode())
    raise ValueError(f"node_config must have 'partition-id' or 'name', got {dict(node_config)}.")


def load_data(node_config: Mapping[str, Any]) -> tuple[DataLoader, DataLoader]:
    """Return a client's data, to train with and to test with."""
    partition = partition_of(node_config)
    rule = torch.randn(16, 2, generator=torch.Generator().manual_seed(0))
    X = torch.randn(160, 4, 4, generator=torch.Generator().manual_seed(1 + partition))
    y = (X.flatten(1) @ rule).argmax(dim=1)
    X = torch.rot90(X, partition % 2, dims=(1, 2)).flatten(1)  # odd clients: turned
    train, test = TensorDataset(X[:40], y[:40]), TensorDataset(X[40:], y[40:])
    return DataLoader(train, batch_size=20), DataLoader(test, batch_size=120)


def train(net: nn.Module, loader: DataLoader, epochs: int, lr: float) -> float:
    """Train the network, and return the last batch's loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    net.to(DEVICE).train()
    for _ in range(epochs):
        for X, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(X.to(DEVICE)), y.to(DEVICE))
            loss.backward()
            optimizer.step()
    return loss.item()


def test(net: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Return the loss and the accuracy."""
    net.to(DEVICE).eval()
    X, y = (one.to(DEVICE) for one in loader.dataset.tensors)
    with torch.no_grad():
        scores = net(X)
    accuracy = (scores.argmax(dim=1) == y).float().mean().item()
    return nn.functional.cross_entropy(scores, y).item(), accuracy
