"""Grids in this process: clients by partition, faults on schedule, and what crosses a grid."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from flwr_perdl.clients import client_app
from flwr_perdl.network import Run
from flwr_perdl.protocol.compat import become_server
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import NeighborRelay


def partition_of(context: Context) -> int:
    """Return which client a node is."""
    return int(context.node_config["partition-id"])


def context_of(partition: Any = 0, **node_config: Any) -> Context:
    """Return a node's context, with nothing in its state."""
    return Context(1, 2, {"partition-id": partition, **node_config}, RecordDict(), {})


def asks(content: RecordDict, node: int = 1, kind: str = "train") -> Message:
    """Return a request of a server outside of a Flower run."""
    become_server(1)
    return Message(content, dst_node_id=node, message_type=kind)


def promise(**said: Any) -> str:
    """Return what a request says of the noise on a sum, by default of one client's two changes."""
    budget = {"epsilon": 2.0, "delta": 1e-5, "trust": "central", "level": "client", "clip": 1.0}
    of = {"rounds": 1, "clients": 1, "limit": 2**40, "size": 2, "of": "changes"}
    return json.dumps({**budget, **of, **said})


class Trains(NumPyClient):
    """Changes each array of its model by a function; its loss is another one, or 0."""

    def __init__(
        self, change: Callable[[Any], Any], loss: Callable[..., Any] = lambda *_: 0.0
    ) -> None:
        self.change, self.loss = change, loss

    def fit(self, parameters: Any, config: Any) -> Any:
        return [self.change(array) for array in parameters], 1, {}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        return float(self.loss(*parameters)), 1, {}


def grid_of(
    make: Callable[[Context, int], Any],
    n: int,
    kind: type[InProcessGrid] = InProcessGrid,
    mods: Sequence[Any] = (),
    **options: Any,
) -> Any:
    """Return a grid of ``n`` clients, made of a node's context and its partition."""
    app = client_app(lambda context: make(context, partition_of(context)), train_mods=mods)
    return kind(app, n, **options)


def failing(
    fault: str, who: Collection[int], rounds: Collection[int] | None = None
) -> Callable[[int, Message], str | None]:
    """Return faults: these clients' training fails so, in these rounds or in all."""

    def faults(partition: int, message: Message) -> str | None:
        round_ = message.content.get("config", {}).get("server-round", 0)
        trains = message.metadata.message_type == "train" and partition in who
        return fault if trains and (rounds is None or round_ in rounds) else None

    return faults


def relayed(grid: Any, topology: Any, n_rounds: int, **options: Any) -> Run:
    """Return what so many rounds of the nodes' program come to."""
    relay = NeighborRelay(topology, n_rounds, **options)
    relay.start(grid)
    return relay.outcome


class Tapped(InProcessGrid):
    """A grid that keeps all messages, and what clients report."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.asked: list[Message] = []
        self.replies: list[Message] = []

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        sent = list(messages)
        replies = list(super().send_and_receive(sent, timeout=timeout))
        self.asked += sent
        self.replies += replies
        return replies

    @property
    def errors(self) -> list[str]:
        return [str(reply.error.reason) for reply in self.replies if reply.has_error()]

    @property
    def shown(self) -> int:
        """How many arrays clients have replied in the clear."""
        return len([*arrays_in(self.replies)])

    def exchanges(self) -> list[tuple[str, RecordDict, RecordDict]]:
        """Return the step, the request and the reply of every message, where none was lost."""
        return [
            (str(q.content.get("config", {}).get("perdl.step", "query")), q.content, r.content)
            for q, r in zip(self.asked, self.replies, strict=True)
        ]

    def measured(self, name: str) -> dict[int, float]:
        """Return each client's last report of a metric, by partition."""
        found = {}
        for reply in self.replies:
            if not reply.has_error() and name in reply.content.get("metrics", ()):
                found[reply.metadata.src_node_id - 1000] = reply.content["metrics"][name]
        return found


class Dying(Tapped):
    """A grid whose server dies when a round's replies are in, or before; node 4 lies in round 2."""

    dies, early = 0, False
    spoil: Callable[[RecordDict], object] | None = None
    how = ""
    late: Sequence[Message] = ()

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        sent = list(messages)
        rounds = {m.content.get("config", {}).get("server-round") for m in sent}
        dies = self.dies in rounds
        replies = [] if dies and self.early else super().send_and_receive(sent, timeout=timeout)
        if dies:
            raise KeyboardInterrupt
        liars = [reply for reply in replies if 2 in rounds and reply.metadata.src_node_id == 1004]
        replies, self.late = [*self.late, *replies], ()
        for reply in liars:
            if self.how in ("lost", "late"):
                replies.remove(reply)
                self.late = [reply] * (self.how == "late")
            elif self.how == "twice":
                replies.append(reply)
            elif self.spoil:
                self.spoil(reply.content)
        return replies


class Forgetting(Tapped):
    """A grid whose node 0 loses what is in its memory before a round's training."""

    forgets = 2

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        sent = list(messages)
        trained = [m.content["config"] for m in sent if m.metadata.message_type == "train"]
        if self.forgets in (config["server-round"] for config in trained):
            self.contexts[1000].state = RecordDict()
        return super().send_and_receive(sent, timeout=timeout)


def stage(message: Message) -> str:
    """Return which step of a secure aggregation a message asks for."""
    configs = message.content.config_records.values()
    return str(next((c["stage"] for c in configs if "stage" in c), ""))


def arrays_in(messages: list[Message]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the names and arrays of messages."""
    for message in messages:
        if not message.has_error():
            for record in message.content.array_records.values():
                yield from ((name, array.numpy()) for name, array in record.items())


def as_app(make: Callable[[Context], Any], *, evaluates: bool = True) -> ClientApp:
    """Return a NumPyClient as an app of messages, whose replies have arrays in another order."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        record = message.content["arrays"]
        config = dict(message.content["config"])
        fitted, n, metrics = make(context).fit(record.to_numpy_ndarrays(), config)
        names = list(record) if len(record) == len(fitted) else list(map(str, range(len(fitted))))
        arrays = {k: Array(np.asarray(a)) for k, a in zip(names, fitted, strict=True)}
        content = {
            "arrays": ArrayRecord(dict(reversed(arrays.items()))),
            "metrics": MetricRecord({"num-examples": n, **metrics}),
        }
        return Message(RecordDict(content), reply_to=message)

    def evaluate(message: Message, context: Context) -> Message:
        arrays = message.content["arrays"].to_numpy_ndarrays()
        loss, n, metrics = make(context).evaluate(arrays, dict(message.content["config"]))
        content = {"metrics": MetricRecord({"num-examples": n, "eval_loss": loss, **metrics})}
        return Message(RecordDict(content), reply_to=message)

    if evaluates:
        app.evaluate()(evaluate)
    return app
