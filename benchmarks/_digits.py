"""Twenty clients of 40 digits each, which differ, and what they train: for several benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.clientapp import ClientApp

from flwr_perdl.clients import client_app
from flwr_perdl.protocol.records import Scalar
from perdl_experiments.studies._network import NAMES, Evaluated, Model
from perdl_experiments.studies.personal import Client, Config, first_model, splits

CLIENTS, ROUNDS, STEP = 20, 40, 0.3


class Measured(Client):
    """A client that evaluates the accuracy on the images to choose by, too."""

    def evaluate(self, parameters: Model, config: Mapping[str, Scalar]) -> Evaluated:
        """Return the loss to choose by, the number of images, and both accuracies."""
        loss, n, metrics = super().evaluate(parameters, config)
        return loss, n, {**metrics, "chosen-by": self.accuracy(parameters, self.choice)}


def digits(kind: str, seed: int, dtype: Any = np.float64) -> tuple[ClientApp, ArrayRecord]:
    """Return the app of clients that differ in a way of the study `personal`, and the first model.

    The network has 32 hidden units.
    """
    config = Config(
        clients=CLIENTS,
        rounds=ROUNDS,
        seed=seed,
        network="dense",
        images=40,
        hidden=32,
        kinds=(kind,),
        methods=(),
    )
    own = splits(config, kind, seed)
    clients: Sequence[Client] = [Client(one, seed, i, STEP) for i, one in enumerate(own)]

    def make_client(context: Context) -> Client:
        return clients[int(context.node_config["partition-id"])]

    arrays = zip(NAMES, first_model(config, own, seed), strict=True)
    start = ArrayRecord({name: Array(array.astype(dtype)) for name, array in arrays})
    return client_app(make_client), start
