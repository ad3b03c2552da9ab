"""A small convolutional network in PyTorch on a client's images, beside `Network`, a dense one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.checks import Matrix
from flwr_perdl.core.extras import load_extra
from flwr_perdl.protocol.records import ROUND, Scalar
from perdl_experiments.studies._network import Model, Network

torch = load_extra("torch", "network=convolutional", "pytorch")
nn = torch.nn


@cache  # there is one at a time, with the arrays of whoever uses it
def _layers(n_channels: int, n_hidden: int, n_labels: int) -> Any:
    """Return two convolutions and a hidden layer, the body, and an output layer, the head."""
    torch.set_num_threads(1)  # a small network gains nothing from more, and others need them
    body = nn.Sequential(
        nn.Conv2d(n_channels, 16, 5, stride=4, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(4),
        nn.Flatten(),
        nn.Linear(512, n_hidden),
        nn.ReLU(),
    )
    return nn.ModuleDict({"body": body, "head": nn.Linear(n_hidden, n_labels)})


def random_network(n_channels: int, n_hidden: int, n_labels: int, seed: int) -> Model:
    """Return random weights in PyTorch's way.

    Parameters
    ----------
    n_channels, n_hidden, n_labels : int
        Colors, hidden units and classes.
    seed : int
        What the weights are drawn by.
    """
    torch.manual_seed(seed)
    layers = _layers.__wrapped__(n_channels, n_hidden, n_labels)
    return [array.detach().numpy() for array in layers.parameters()]


class Convolutional(Network):
    """A convolutional network on a client's images; see `Network` for the parameters.

    ``X`` is (n_images, height, width, n_channels), in [0, 1].
    """

    names = (
        *(f"body.{layer}.{part}" for layer in (0, 2, 6) for part in ("weight", "bias")),
        *("head.weight", "head.bias"),
    )

    def __init__(
        self, X: Matrix, y: NDArray[np.intp], ends: tuple[int, int], **options: Any
    ) -> None:
        super().__init__(X, y, ends, **options)
        centered = 4 * X.transpose(0, 3, 1, 2) - 2  # as networks learn faster from
        self.X_torch = torch.from_numpy(np.ascontiguousarray(centered, np.float32))
        self.y_torch = torch.from_numpy(y)

    def _network(self, model: Model) -> tuple[Any, dict[str, Any]]:
        n_labels, n_hidden = model[-2].shape
        layers = _layers(self.X.shape[3], n_hidden, n_labels)
        own = dict(layers.named_parameters())
        with torch.no_grad():
            for name, array in zip(self.names, model, strict=True):
                own[name].copy_(torch.from_numpy(np.asarray(array)))
        return layers, own

    def fit(
        self, parameters: Model, config: Mapping[str, Scalar]
    ) -> tuple[Model, int, dict[str, Scalar]]:
        """Train for one epoch, all arrays or those that the config names."""
        layers, own = self._network(parameters)
        trained = [own[n] for n in json.loads(str(config.get("train-names", "null"))) or self.names]
        for rows in self.batches(int(config[ROUND])):
            scores = layers["head"](layers["body"](self.X_torch[rows]))
            gradients = torch.autograd.grad(
                nn.functional.cross_entropy(scores, self.y_torch[rows]), trained
            )
            with torch.no_grad():
                for array, gradient in zip(trained, gradients, strict=True):
                    array.sub_(gradient, alpha=self.step)
        return [own[n].detach().numpy().copy() for n in self.names], len(self.train), {}

    def scores(self, model: Model, rows: NDArray[np.intp]) -> Matrix:
        """Return the scores of the labels of some images."""
        layers, _ = self._network(model)
        with torch.no_grad():
            found: Matrix = layers["head"](layers["body"](self.X_torch[rows])).numpy()
        return found
