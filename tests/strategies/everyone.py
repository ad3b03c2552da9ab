"""The clients of every protocol, whose data the tests know nothing of, and one app of them all.

Flower starts a process per message on a SuperNode: it loads its own client alone, and no strategy.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
from flwr.app import Context, Message
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from flwr_perdl import clients

N = 6
SLOPES = np.array([[2.0, 0.0], [-2.0, 1.0]])
X = np.random.default_rng(0).standard_normal((N, 12, 2))
ATOMS = np.random.default_rng(1).standard_normal((N, 30, 5))
VALUES = {node: np.array([float(node)]) for node in range(N)}


class Model(NumPyClient):
    """Goes half of the way to its own model, of which the head is in the thousands.

    All else that leaves it is small.
    """

    def __init__(self, partition: int) -> None:
        own = X[partition] @ SLOPES[partition % 2]
        self.own = [np.full(2, 1000.0 * (1 + partition % 2)), own]

    def fit(self, parameters: Any, config: Any) -> Any:
        return [(a + b) / 2 for a, b in zip(parameters, self.own, strict=True)], 1, {}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        head, body = (a - b for a, b in zip(parameters, self.own, strict=True))
        return float(np.sum(body**2) + np.sum((head / 1000) ** 2)), 1, {}


def dictionaries(context: Context, i: int) -> Any:
    from flwr_perdl.dictionary import OrthogonalLearner

    return clients.DictionaryClient(ATOMS[i], OrthogonalLearner(4), context)


def regressions(context: Context, i: int) -> Any:
    return clients.RegressionClient(X[i], X[i] @ SLOPES[i % 2], context)


def ridges(context: Context, i: int) -> Any:
    held_out = X[i], X[i] @ SLOPES[i % 2]
    return clients.RidgeClient(*held_out, context, held_out=held_out)


def models(context: Context, i: int) -> Any:
    return Model(i)


def nodes(context: Context, i: int) -> Any:
    from flwr_perdl.network import Averaging

    return clients.DiffusionClient(Averaging(VALUES), context)


def owners(context: Context, i: int) -> Any:
    from tests.strategies.own_protocol import OwnClient

    return OwnClient(X[i])


MAKERS = {one.__name__: one for one in (dictionaries, regressions, ridges, models, nodes, owners)}


class Everyone(ClientApp):
    """One app for a federation of all protocols: it reads in a request which client is asked."""

    def __call__(self, message: Message, context: Context) -> Message:
        maker = MAKERS[str(message.content.get("config", {}).get("client", "models"))]

        def make(context: Context) -> Any:
            return maker(context, int(context.node_config["partition-id"]))

        own = [import_module("tests.strategies.own_protocol")] if maker is owners else ()
        return clients.client_app(make, protocols=own)(message, context)
