from __future__ import annotations

import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from flwr_perdl.clients import client_app
from flwr_perdl.core.threads import n_threads
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import PerMA


def echo() -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        calls = int(context.state.get("calls", ConfigRecord({"n": 0}))["n"]) + 1
        context.state.setdefault("calls", ConfigRecord())["n"] = calls  # in place
        if message.content["config"].get("fail") == context.node_config["partition-id"]:
            raise RuntimeError("as asked")
        message.content["config"]["changed"] = True
        message.content["config"]["list"].append(1)
        message.content["arrays"]["0"].data = Array(np.eye(2)).data
        reply = RecordDict(
            {
                "arrays": message.content["arrays"],
                "metrics": MetricRecord({"calls": calls, "run": int(context.run_config["x"])}),
            }
        )
        return Message(reply, reply_to=message)

    return app


def ask(grid: InProcessGrid, **config: Any) -> list[Message]:
    config |= {"list": [0]}
    content = RecordDict({"arrays": ArrayRecord([np.ones((2, 2))]), "config": ConfigRecord(config)})
    messages = [grid.create_message(content, "train", node, "") for node in grid.get_node_ids()]
    replies = list(grid.send_and_receive(messages))
    assert content["config"] == config  # the client changed its own copy
    np.testing.assert_array_equal(content["arrays"].to_numpy_ndarrays()[0], 1)
    return replies


def test_every_node_keeps_its_own_state() -> None:
    grid = InProcessGrid(echo(), 3, run_config={"x": 5})
    ask(grid)
    replies = ask(grid)
    assert [reply.content["metrics"]["calls"] for reply in replies] == [2, 2, 2]
    assert replies[0].content["metrics"]["run"] == 5
    assert [reply.metadata.src_node_id for reply in replies] == list(grid.get_node_ids())
    np.testing.assert_array_equal(replies[1].content["arrays"].to_numpy_ndarrays()[0], np.eye(2))


def test_an_exception_is_an_error_reply_and_the_state_is_as_before() -> None:
    grid = InProcessGrid(echo(), 2, run_config={"x": 0})
    replies = ask(grid, fail=1)
    assert [reply.has_error() for reply in replies] == [False, True]
    assert replies[1].error.code == 2
    assert replies[1].error.reason == "RuntimeError: as asked"
    assert [reply.content["metrics"]["calls"] for reply in ask(grid)] == [2, 1]


def test_replies_are_pulled_once() -> None:
    grid = InProcessGrid(echo(), 1, run_config={"x": 0})
    content = RecordDict({"arrays": ArrayRecord(), "config": ConfigRecord()})
    ids = list(grid.push_messages([grid.create_message(content, "train", 1000, "")]))
    assert len(list(grid.pull_messages(ids))) == 1
    assert list(grid.pull_messages(ids)) == []


def test_unknown_faults_and_empty_grids_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^num_nodes"):
        InProcessGrid(echo(), 0)
    grid = InProcessGrid(echo(), 1, run_config={"x": 0}, faults=lambda partition, message: "boom")
    with pytest.raises(ValueError, match="fault"):
        ask(grid)


def answering(answer: Any) -> InProcessGrid:
    app = ClientApp()
    app.train()(lambda message, context: answer(message))
    return InProcessGrid(app, 1)


def test_an_error_that_the_app_replies_with_is_the_reply() -> None:
    """As on Flower's engines, where mods refuse messages in this way."""
    spent = Error(77, "the budget is spent")
    (reply,) = ask(answering(lambda message: Message(spent, reply_to=message)))
    assert (reply.error.code, reply.error.reason) == (77, "the budget is spent")


def test_no_reply_is_none_and_who_is_not_there_does_not_answer(warned: Any) -> None:
    grid = answering(lambda message: None)
    assert ask(grid) == []
    content = RecordDict({"arrays": ArrayRecord(), "config": ConfigRecord()})
    assert list(grid.send_and_receive([grid.create_message(content, "train", 5, "")])) == []
    assert "node 5" in warned.text


def test_the_reply_of_a_node_beyond_the_timeout_is_not_received_and_the_others_are() -> None:
    called = []

    def slow(message: Message) -> Message:
        called.append(message.metadata.dst_node_id)
        if len(called) == 2:
            time.sleep(1.1)
        return Message(RecordDict(), reply_to=message)

    app = ClientApp()
    app.train()(lambda message, context: slow(message))
    grid = InProcessGrid(app, 4)
    messages = [grid.create_message(RecordDict(), "train", node, "") for node in (1000, 1001, 1002)]
    replies = list(grid.send_and_receive(messages, timeout=1.0))
    assert [reply.metadata.src_node_id for reply in replies] == [1000, 1002]
    assert called == [1000, 1001, 1002]
    assert list(grid.send_and_receive(messages, timeout=0)) == []
    assert len(list(grid.send_and_receive(messages))) == 3


def test_an_app_that_exits_takes_nobody_with_it() -> None:
    (reply,) = ask(answering(lambda message: sys.exit(3)))
    assert reply.error.reason == "SystemExit: 3"


def test_many_strategies_start_on_one_grid(federation) -> None:
    """More than a client takes part in within one run of Flower (``max_runs``)."""
    planted = federation(3)
    grid = planted.grid()
    first, *others = [
        PerMA(3, seed=1).start(grid, num_rounds=2).arrays.to_numpy_ndarrays()[0] for _ in range(10)
    ]
    for other in others:
        np.testing.assert_array_equal(other, first)


def test_each_client_says_whether_threads_may_call_it_and_is_made_in_the_callers() -> None:
    here, made, called = threading.get_ident(), [], {}

    class Client(NumPyClient):
        def __init__(self, partition: int) -> None:
            made.append(threading.get_ident())
            self.partition, self.allows_threads = partition, partition != 2

        def fit(self, parameters: Any, config: Any) -> Any:
            called[self.partition] = threading.get_ident()
            return parameters, 1, {}

    app = client_app(lambda context: Client(int(context.node_config["partition-id"])))
    FedAvg(fraction_evaluate=0.0).start(
        InProcessGrid(app, 4), ArrayRecord([np.zeros(1)]), num_rounds=1
    )
    assert set(made) == {here}
    assert called[2] == here
    elsewhere = {called[0], called[1], called[3]} - {here}
    assert bool(elsewhere) == (n_threads() > 1)
