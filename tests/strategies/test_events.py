"""The events of a run: written as it goes, whole after a crash, and continued by a resumed run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from flwr_perdl.clients import client_app
from flwr_perdl.protocol.events import read_events
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import PerMA, ServerSettings, TooFewReplies, client_report
from tests.grids import failing

RESUME = ServerSettings(resume=True)


def kinds(path: Path) -> list[str]:
    return [event["event"] for event in read_events(path)[0]]


def test_every_exchange_is_an_event_with_its_figures(federation: Any, tmp_path: Path) -> None:
    def faults(partition: int, message: Message) -> str | None:
        config = message.content.get("config", {})
        if message.metadata.message_type == "train" and config["server-round"] == 2:
            return {1: "nan", 3: "silence"}.get(partition)
        return None

    path = tmp_path / "events.jsonl"
    strategy = PerMA(3, server=ServerSettings(events=path, evaluate_every=2))
    federation().learn(strategy, 2, faults=faults)
    events, end = read_events(path)
    assert end == path.stat().st_size
    assert kinds(path) == ["begin", "ask", "round", "ask", "round", "ask", "round", "end"]
    assert events[0]["rounds"] == 2
    assert events[-1] == {**events[-1], "done": 2, "stopped": None}
    update = events[4]
    assert (update["step"], update["asked"], update["good"]) == ("update", 5, 3)
    assert update["failed"] == {
        "client 1": "array 0 has NaN or infinite values",
        "client 3": "no reply in time",
    }
    assert update["anomalies"] == {"1": {"refused": 1.0}, "3": {"failed": 1.0}}
    assert (update["floats_down"], update["floats_up"]) == (18.0, 18.0)
    report = next(r for r in strategy.history if r.step == "update")
    assert update["metrics"] == report.aggregate
    assert update["clients"] == {str(p): metrics for p, metrics in report.metrics.items()}
    assert update["seconds"] >= 0
    assert client_report(strategy.history)[1] == {"asked": 3.0, "refused": 1.0}
    assert client_report(strategy.history)[0] == {"asked": 3.0}


def test_what_stops_a_run_is_its_last_event(federation: Any, tmp_path: Path) -> None:
    faults = failing("error", range(5))
    path = tmp_path / "events.jsonl"
    with pytest.raises(TooFewReplies):
        federation().learn(PerMA(3, server=ServerSettings(events=path)), faults=faults)
    *_, last, end = read_events(path)[0]
    assert (last["event"], last["good"], len(last["failed"])) == ("round", 0, 5)
    assert end["stopped"].startswith("Round 1 has 0 good replies, fewer than min_clients=2")


def test_a_resumed_run_appends(federation: Any, tmp_path: Path) -> None:
    planted, path = federation(), tmp_path / "events.jsonl"
    options: dict[str, Any] = {"checkpoint_dir": tmp_path, "fraction_evaluate": 0.0}
    planted.learn(PerMA(3, server=ServerSettings(events=path), **options), 2)
    with path.open("ab") as stream:
        stream.write(b'{"event": "round", "rou')  # killed in the middle of a line
    planted.learn(PerMA(3, server=replace(RESUME, events=path), **options), 3)
    events = read_events(path)[0]
    assert [e["round"] for e in events if e["event"] == "round"] == [1, 2, 3]
    assert [e["done"] for e in events if e["event"] == "begin"] == [0, 2]


def test_history_with_anomalies_survives_a_checkpoint(federation: Any, tmp_path: Path) -> None:
    faults = failing("nan", [2])
    planted, first = federation(), PerMA(3, checkpoint_dir=tmp_path)
    planted.learn(first, 2, faults=faults)
    again = PerMA(3, checkpoint_dir=tmp_path, server=RESUME)
    planted.learn(again, 2, faults=faults)
    assert again.history == first.history
    assert client_report(again.history)[2]["refused"] == 2


class Sender:
    """Makes clients that send arrays of their own in one round."""

    def __init__(self, planted: Any, round_: int, *arrays: np.ndarray) -> None:
        self.planted, self.round, self.arrays = planted, round_, list(arrays)

    def __call__(self, context: Any) -> Any:
        client = self.planted.make_client(context)
        fit = client.fit
        if client.partition == 0:
            client.fit = lambda arrays, config: (
                (self.arrays, 200, {})
                if config["server-round"] == self.round
                else fit(arrays, config)
            )
        return client


@pytest.mark.parametrize(
    ("round_", "arrays", "options", "reason"),
    [
        (1, [np.eye(9)], {"max_reply_bytes": 500}, "too large: 776 bytes of arrays, at most 500"),
        (2, [np.ones((1000, 1000))], {}, "too large: 8000128 bytes"),
        (2, [np.ones((100, 100))], {}, "too many numbers"),
        (2, [np.full((3, 6), 1e101)], {}, "array 0 has numbers beyond 1e+100"),
        (2, [np.full((3, 6), 9.0)], {"max_magnitude": 8.0}, "array 0 has numbers beyond 8"),
    ],
    ids=["bytes", "bytes asked for", "shape", "magnitude", "own limit"],
)
def test_the_server_says_what_a_reply_may_be(
    federation: Any, round_: int, arrays: list[Any], options: Any, reason: str
) -> None:
    planted = federation()
    strategy = PerMA(3, fraction_evaluate=0.0, server=ServerSettings(**options))
    grid = InProcessGrid(client_app(Sender(planted, round_, *arrays)), 5)
    if "max_magnitude" in options:
        for X in planted.planted.samples:
            X /= 100  # so that the honest ones are within the limit
    strategy.start(grid, num_rounds=2)
    report = strategy.history[round_ - 1]
    assert report.anomalies[0] == {"refused": 1.0}
    assert reason in report.dropped["client 0"]
