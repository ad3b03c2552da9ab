"""Twenty clients of 40 digits each, which differ, and what they train: for several benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.clientapp import ClientApp

from flwr_perdl.clients import client_app
from perdl_experiments.studies._network import NAMES
from perdl_experiments.studies.personal import Client, Config, first_model, splits

CLIENTS, ROUNDS, STEP = 20, 40, 0.3


def digits(kind: str, seed: int, dtype: Any = np.float64) -> tuple[ClientApp, ArrayRecord]:
    """Return the app of clients that differ in a way of the study `personal`, and the first model.

    The network has 32 hidden units.
    """
    config = Config(
        clients=CLIENTS,
        rounds=ROUNDS,
        seed=seed,
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
