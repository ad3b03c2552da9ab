"""Model and data: logistic regression; the clients are of two kinds, whose labels are opposite."""

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import numpy as np


def get_weights() -> list[np.ndarray]:
    """Return the model to start from: ten weights and an intercept."""
    return [np.zeros(10), np.zeros(1)]


def partition_of(node_config: Mapping[str, Any]) -> int:
    """Return which part of the data a node has; a SuperNode may have a name alone."""
    if "partition-id" in node_config:
        return int(node_config["partition-id"])
    if "name" in node_config:
        return crc32(str(node_config["name"]).encode())
    raise ValueError(f"node_config must have 'partition-id' or 'name', got {dict(node_config)}.")


def load_data(
    node_config: Mapping[str, Any],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return a client's samples and labels, to train with and to test with."""
    partition = partition_of(node_config)
    rule = np.random.default_rng(0).standard_normal(10)
    rng = np.random.default_rng([1, partition])
    X = rng.standard_normal((160, 10))
    y = (X @ rule > 0) ^ (partition % 2 == 1)  # what is 1 for even clients is 0 for odd ones
    return X[:80], y[:80], X[80:], y[80:]


def predict(weights: list[np.ndarray], X: np.ndarray) -> np.ndarray:
    """Return each sample's probability of label 1."""
    return 1 / (1 + np.exp(-(X @ weights[0] + weights[1])))


def train(
    weights: list[np.ndarray], X: np.ndarray, y: np.ndarray, epochs: int, rate: float
) -> list[np.ndarray]:
    """Return the weights after gradient descent."""
    for _ in range(epochs):
        residual = (predict(weights, X) - y) / len(y)
        weights = [weights[0] - rate * X.T @ residual, weights[1] - rate * residual.sum()]
    return weights


def test(weights: list[np.ndarray], X: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return loss and accuracy."""
    p = predict(weights, X)
    loss = -np.mean(np.log(np.where(y, p, 1 - p)))
    return float(loss), float(np.mean((p > 0.5) == y))
