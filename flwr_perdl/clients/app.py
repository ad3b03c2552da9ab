"""From a ``NumPyClient`` to a Message-API ``ClientApp``."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from flwr_perdl._records import CONFIG, NAME, PARTITION_ID, Scalar, read_request, reply_to

Factory = Callable[[Context], NumPyClient]


def client_app(
    factory: Factory, *, train_mods: Sequence[Any] = (), evaluate_mods: Sequence[Any] = ()
) -> ClientApp:
    """Return the ClientApp whose train and evaluate handlers call a NumPyClient.

    The same client runs in older projects as ``ClientApp(lambda context:
    factory(context).to_client())``.

    Parameters
    ----------
    factory : callable
        ``Context -> NumPyClient``; called for every message. Under Ray the app is pickled with
        every message: close over no data, read it in the factory.
    train_mods, evaluate_mods : sequence of Flower mods
        Mods around training and around evaluation, outermost first. Requests and replies carry one
        ArrayRecord each way, so that Flower's differential-privacy mods compose.

    Returns
    -------
    ClientApp
        Training replies carry ``"arrays"`` and ``"metrics"``, evaluation replies ``"metrics"``
        with the loss as ``"loss"``; a query is answered with the client's properties.
    """
    app = ClientApp()

    @app.train(mods=list(train_mods))
    def train(message: Message, context: Context) -> Message:
        arrays, config = read_request(message)
        updated, num_examples, metrics = factory(context).fit(arrays, config)
        return reply_to(message, updated, num_examples, metrics)

    @app.evaluate(mods=list(evaluate_mods))
    def evaluate(message: Message, context: Context) -> Message:
        arrays, config = read_request(message)
        loss, num_examples, metrics = factory(context).evaluate(arrays, config)
        return reply_to(message, None, num_examples, {"loss": loss, **metrics})

    @app.query()
    def query(message: Message, context: Context) -> Message:
        properties = factory(context).get_properties({})
        return Message(RecordDict({CONFIG: ConfigRecord(dict(properties))}), reply_to=message)

    return app


def identify(context: Context) -> dict[str, Scalar]:
    """Return who a client is: its partition id, and its name where the node config gives one.

    Flower's node ids are random in every run; ``partition-id`` (set by the simulation, or by
    ``--node-config``) is not. A node with a ``name`` alone gets its partition id from the name.

    Raises
    ------
    ValueError
        If the node config has neither.
    """
    config = context.node_config
    name = str(config.get(NAME, ""))
    partition = config.get(PARTITION_ID)
    if partition is None:
        if not name:
            raise ValueError(
                f"node_config must have {PARTITION_ID!r} or {NAME!r}, got {dict(config)}."
            )
        partition = zlib.crc32(name.encode())
    properties: dict[str, Scalar] = {PARTITION_ID: int(partition)}
    return {**properties, NAME: name} if name else properties
