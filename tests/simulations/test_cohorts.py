"""Many clients at once in process: who is, who is not, and that nobody can tell the difference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client import NumPyClient

from flwr_perdl.clients import client_app
from flwr_perdl.simulations import InProcessGrid

#: What was called: partitions of one ``fit``, or of a whole cohort.
Calls = list[tuple[int, ...]]


class Counting(NumPyClient):
    """Adds its partition to what it receives, and counts its calls in its state."""

    calls: Calls

    def __init__(self, context: Context) -> None:
        self.context = context
        self.partition = int(context.node_config["partition-id"])

    def _reply(self, parameters: list[Any], config: Any) -> tuple[list[Any], int, dict[str, Any]]:
        count = int(self.context.state.get("n", ConfigRecord({"n": 0}))["n"]) + 1
        self.context.state["n"] = ConfigRecord({"n": count})
        if self.partition == config.get("fails"):
            raise RuntimeError("as asked")
        return [parameters[0] + self.partition], 1, {"count": count}

    def fit(self, parameters: Any, config: Any) -> Any:
        self.calls.append((self.partition,))
        return self._reply(parameters, config)

    @classmethod
    def fit_cohort(
        cls, clients: Iterable[Counting], parameters: Any, config: Any
    ) -> Iterator[tuple[list[Any], int, dict[str, Any]]]:
        assert not parameters[0].flags.writeable
        members = list(clients)
        cls.calls.append(tuple(client.partition for client in members))
        for client in members:
            yield client._reply(parameters, config)


class Changed(Counting):
    """Has a ``fit`` of its own, so that its parent's ``fit_cohort`` does not stand for it."""

    def fit(self, parameters: Any, config: Any) -> Any:
        updated, n, metrics = super().fit(parameters, config)
        return [-updated[0]], n, metrics


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    made: Calls = []
    monkeypatch.setattr(Counting, "calls", made, raising=False)
    return made


def ask(grid: InProcessGrid, kinds: str = "train", **config: Any) -> list[Message]:
    """Ask the same of all nodes and return their replies."""
    array = ArrayRecord([np.zeros(2)])
    messages = [
        Message(
            RecordDict({"arrays": array.copy(), "config": ConfigRecord(config)}),
            dst_node_id=node,
            message_type=kinds,
        )
        for node in grid.get_node_ids()
    ]
    return list(grid.send_and_receive(messages))


def values(replies: list[Message]) -> list[float | str]:
    """Return what each reply holds, or why it holds nothing."""
    return [
        reply.error.reason
        if reply.has_error()
        else float(reply.content["arrays"].to_numpy_ndarrays()[0][0])
        for reply in replies
    ]


def counts(replies: list[Message]) -> list[float]:
    return [reply.content["metrics"]["count"] for reply in replies if reply.has_content()]


def test_clients_that_are_asked_the_same_are_called_at_once(calls: Calls) -> None:
    grid = InProcessGrid(client_app(Counting), 4)
    assert values(ask(grid)) == [0, 1, 2, 3]
    replies = ask(grid)
    assert calls == [(0, 1, 2, 3)] * 2
    assert counts(replies) == [2, 2, 2, 2]
    assert [reply.metadata.src_node_id for reply in replies] == list(grid.get_node_ids())
    assert [reply.content["metrics"]["num-examples"] for reply in replies] == [1] * 4


def test_a_change_of_the_request_ends_a_cohort(calls: Calls) -> None:
    grid = InProcessGrid(client_app(Counting), 5)
    contents = [{"a": 1}, {"a": 1}, {"a": 2}, {"a": 2}, {"a": 1}]
    arrays = [0.0, 0.0, 0.0, 5.0, 5.0]
    messages = [
        Message(
            RecordDict({"arrays": ArrayRecord([np.full(2, x)]), "config": ConfigRecord(c)}),
            dst_node_id=node,
            message_type="train",
        )
        for node, c, x in zip(grid.get_node_ids(), contents, arrays, strict=True)
    ]
    assert values(list(grid.send_and_receive(messages))) == [0, 1, 2, 8, 9]
    assert calls == [(0, 1), (2,), (3,), (4,)]


def test_a_client_that_is_asked_twice_answers_twice(calls: Calls) -> None:
    grid = InProcessGrid(client_app(Counting), 2)
    array, nodes = ArrayRecord([np.zeros(2)]), list(grid.get_node_ids())
    messages = [
        Message(
            RecordDict({"arrays": array.copy(), "config": ConfigRecord()}),
            dst_node_id=node,
            message_type="train",
        )
        for node in nodes + nodes
    ]
    assert counts(list(grid.send_and_receive(messages))) == [1, 1, 2, 2]
    assert calls == [(0, 1), (0, 1)]


def test_one_fault_is_one_clients_and_states_are_as_before(calls: Calls) -> None:
    grid = InProcessGrid(client_app(Counting), 3)
    ask(grid)
    assert values(ask(grid, fails=1)) == [0, "RuntimeError: as asked", 2]
    assert calls == [(0, 1, 2), (0, 1, 2), (0,), (1,), (2,)]
    assert counts(ask(grid)) == [3, 2, 3]


def test_injected_faults_reach_their_clients_alone(calls: Calls) -> None:
    faults = {1: "error", 2: "silence"}
    grid = InProcessGrid(client_app(Counting), 5, faults=lambda who, message: faults.get(who))
    found = values(ask(grid))
    assert found == [0, "RuntimeError: a fault was injected", 3, 4]
    assert calls == [(0,), (3, 4)]


def unchanged(message: Message, context: Context, call: Any) -> Message:
    """Do nothing; a mod."""
    return call(message, context)


def with_a_lifespan() -> Any:
    app = client_app(Counting)

    @app.lifespan()
    def lifespan(context: Context) -> Iterator[None]:
        yield

    return app


def with_a_fit_of_its_own(context: Context) -> Counting:
    client = Counting(context)
    client.fit = lambda parameters, config: Counting.fit(client, parameters, config)
    return client


@pytest.mark.parametrize(
    ("app", "sign"),
    [
        (lambda: client_app(Counting, train_mods=[unchanged]), 1),
        (with_a_lifespan, 1),
        (lambda: client_app(Changed), -1),
        (lambda: client_app(with_a_fit_of_its_own), 1),
    ],
    ids=["mods", "a lifespan", "another fit", "a client's own fit"],
)
def test_otherwise_clients_are_called_one_by_one(app: Any, sign: int, calls: Calls) -> None:
    grid = InProcessGrid(app(), 3)
    for count in (1, 2):
        replies = ask(grid)
        assert values(replies) == [0, sign * 1, sign * 2]
        assert counts(replies) == [count] * 3
    assert calls == [(0,), (1,), (2,)] * 2


def test_clients_of_different_types_are_called_one_by_one(calls: Calls) -> None:
    def make(context: Context) -> Counting:
        return (Changed if context.node_config["partition-id"] == 2 else Counting)(context)

    replies = ask(InProcessGrid(client_app(make), 3))
    assert values(replies) == [0, 1, -2]
    assert counts(replies) == [1, 1, 1]


def test_a_single_client_is_no_cohort(calls: Calls) -> None:
    assert values(ask(InProcessGrid(client_app(Counting), 1))) == [0]
    assert calls == [(0,)]
