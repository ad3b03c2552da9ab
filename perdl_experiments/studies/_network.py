"""A small network on a client's images: the model of the studies of any model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from numpy.typing import NDArray
from scipy.special import log_softmax, softmax

from flwr_perdl.clients import client_app
from flwr_perdl.core.checks import Matrix
from flwr_perdl.protocol.records import PARTITION_ID, ROUND, Scalar
from flwr_perdl.random import spawn
from flwr_perdl.simulations import InProcessGrid

#: The arrays of a model: a hidden layer, the body, and an output layer, the head.
NAMES = ("body.weight", "body.bias", "head.weight", "head.bias")

Model = list[Matrix]
Evaluated = tuple[float, int, dict[str, Scalar]]


class Network:
    """A network with one hidden layer, on a client's images.

    Parameters
    ----------
    X : ndarray of shape (n_images, n_features)
        For training, then for the choice of a model, then for the accuracy.
    y : ndarray of shape (n_images,)
        Labels from 0.
    ends : pair of int
        Where the images for training end, and those for the choice.
    seed, partition : int
        The run's seed and the client's number: what the order of the images is drawn by.
    step : float
        Length of a gradient step.
    batch : int
        Images of a step.
    """

    #: Of the arrays of a model.
    names: tuple[str, ...] = NAMES

    def __init__(
        self,
        X: Matrix,
        y: NDArray[np.intp],
        ends: tuple[int, int],
        *,
        seed: int,
        partition: int,
        step: float,
        batch: int,
    ) -> None:
        self.X, self.y = X, y
        self.seed, self.partition, self.step, self.batch = seed, partition, step, batch
        self.train, self.choice, self.test = np.split(np.arange(len(y)), ends)

    def fit(
        self, parameters: Model, config: Mapping[str, Scalar]
    ) -> tuple[Model, int, dict[str, Scalar]]:
        """Train for one epoch, all arrays or those that the config names."""
        model = [array.copy() for array in parameters]
        trained = json.loads(str(config.get("train-names", "null"))) or NAMES
        for rows in self.batches(int(config[ROUND])):
            X, step = self.X[rows], self.step / len(rows)
            hidden, scores = layers(model, X)
            error = softmax(scores, axis=1)
            error[np.arange(len(rows)), self.y[rows]] -= 1
            back = error @ model[2].T * (hidden > 0)
            body = step * X.T @ back, step * back.sum(axis=0)
            head = step * hidden.T @ error, step * error.sum(axis=0)
            for name, array, move in zip(NAMES, model, (*body, *head), strict=True):
                if name in trained:
                    array -= move
        return model, len(self.train), {}

    def batches(self, server_round: int) -> list[NDArray[np.intp]]:
        """Return the rows of each step of a round."""
        rng = spawn(self.seed, self.partition, server_round)
        batches = max(1, len(self.train) // self.batch)
        return np.array_split(rng.permutation(self.train), batches)

    def scores(self, model: Model, rows: NDArray[np.intp]) -> Matrix:
        """Return the scores of the labels of some images."""
        return layers(model, self.X[rows])[1]

    def evaluate(self, parameters: Model, config: Mapping[str, Scalar]) -> Evaluated:
        """Return the loss that a choice is made by, and the accuracy on other images."""
        scores = self.scores(parameters, self.choice)
        losses = -log_softmax(scores, axis=1)[np.arange(len(scores)), self.y[self.choice]]
        return float(losses.mean()), len(self.choice), {"accuracy": self.accuracy(parameters)}

    def accuracy(self, model: Model, rows: NDArray[np.intp] | None = None) -> float:
        """Return the accuracy on some images, by default those that only it has seen."""
        own = self.test if rows is None else rows
        return float(np.mean(self.scores(model, own).argmax(axis=1) == self.y[own]))


def layers(model: Model, X: Matrix) -> tuple[Matrix, Matrix]:
    """Return the hidden layer and the scores of the labels."""
    W, b, V, c = model
    hidden = np.maximum(X @ W + b, 0)
    return hidden, hidden @ V + c


def accuracy(model: Model, X: Matrix, y: NDArray[np.intp]) -> float:
    """Return the share of images with the right label."""
    return float(np.mean(layers(model, X)[1].argmax(axis=1) == y))


def random_network(
    n_features: int, n_hidden: int, n_labels: int, rng: np.random.Generator
) -> Model:
    """Return random weights, and biases of zero."""
    shapes = [(n_features, n_hidden), (n_hidden,), (n_hidden, n_labels), (n_labels,)]
    drawn = [rng.standard_normal(shape) / np.sqrt(shape[0]) for shape in shapes]
    return [x if x.ndim == 2 else np.zeros_like(x) for x in drawn]


def federated(
    clients: Sequence[Any],
    model: Model,
    strategy: Any,
    rounds: int,
    private: Sequence[str] = (),
) -> list[Model]:
    """Return the clients' own models after a strategy's rounds, in this process.

    Parameters
    ----------
    clients : sequence of Network
        By partition; others have ``names`` of their arrays, too.
    model : list of ndarray
        The first model, or several, stacked.
    strategy : ProtocolStrategy
        What trains it; its result has ``model_of``.
    rounds : int
        Communication rounds.
    private : sequence of str
        Patterns of the arrays that a client keeps.
    """

    def make_client(context: Context) -> Any:
        return clients[int(context.node_config[PARTITION_ID])]

    names = clients[0].names
    app = client_app(make_client, private=private, names=names if private else ())
    record = ArrayRecord({name: Array(a) for name, a in zip(names, model, strict=True)})
    strategy.start(InProcessGrid(app, len(clients)), record, num_rounds=rounds, verbose="quiet")
    return [strategy.result.model_of(i).to_numpy_ndarrays() for i in range(len(clients))]


def stopped_each(clients: Sequence[Any], models: Sequence[Model], fits: int) -> list[Model]:
    """Return each client's model at the lowest loss of its ``evaluate`` in so many more fits."""
    found = []
    for client, model in zip(clients, models, strict=True):
        tried = [model]
        for _ in range(fits):
            tried.append(client.fit(tried[-1], {})[0])
        found.append(min(tried, key=lambda one: float(client.evaluate(one, {})[0])))
    return found


def by_epoch(
    clients: Sequence[Network], models: Sequence[Model], epochs: int
) -> Iterator[list[Model]]:
    """Yield all clients' models after each epoch of local training, from none on."""
    own = list(models)
    for t in range(epochs + 1):
        yield own
        own = [one.fit(model, {ROUND: t + 1})[0] for one, model in zip(clients, own, strict=True)]
