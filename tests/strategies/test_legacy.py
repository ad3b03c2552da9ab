"""The older strategy interface, driven as Flower's older server drives it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context
from flwr.client import NumPyClient
from flwr.common import (
    Code,
    EvaluateIns,
    FitIns,
    FitRes,
    GetPropertiesIns,
    Parameters,
    Status,
    parameters_to_ndarrays,
)
from flwr.server import Server, SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import Strategy
from numpy.testing import assert_array_equal as assert_same_bits

from flwr_perdl.clients.app import AnyClient
from flwr_perdl.protocol.events import read_events
from flwr_perdl.strategies import (
    ClusteredFedAvg,
    PerMA,
    ServerSettings,
    TooFewReplies,
    as_legacy,
)

MakeFederation = Callable[..., Any]

RESUME = ServerSettings(resume=True)


class LocalProxy(ClientProxy):
    """A proxy that calls the client in this process."""

    def __init__(self, cid: str, make_client: Callable[[Any], Any], context: Any) -> None:
        super().__init__(cid)
        self.make_client, self.context = make_client, context

    def get_properties(self, ins: GetPropertiesIns, timeout: Any, group_id: Any) -> Any:
        return self.make_client(self.context).to_client().get_properties(ins)

    def get_parameters(self, ins: Any, timeout: Any, group_id: Any) -> Any:
        raise AssertionError("the strategy gives the initial parameters")

    def fit(self, ins: FitIns, timeout: Any, group_id: Any) -> Any:
        return self.make_client(self.context).to_client().fit(ins)

    def evaluate(self, ins: EvaluateIns, timeout: Any, group_id: Any) -> Any:
        return self.make_client(self.context).to_client().evaluate(ins)

    def reconnect(self, ins: Any, timeout: Any, group_id: Any) -> Any:
        raise AssertionError("nobody is sent away")


def serve(
    make_client: Any, contexts: Iterable[Context], strategy: Any, rounds: int, kind: Any = None
) -> Any:
    """Run Flower's older server; client 3 is of another kind, where one is given."""
    manager = SimpleClientManager()
    for i, context in enumerate(contexts):
        proxy = kind if kind and i == 3 else LocalProxy
        manager.register(proxy(f"{7919 * (i + 3) % 101}", make_client, context))
    server = Server(client_manager=manager, strategy=strategy)
    history, _ = server.fit(rounds, timeout=None)
    arrays = parameters_to_ndarrays(server.parameters)
    return arrays[0] if arrays else None, history


def serve_all(planted: Any, strategy: Any, rounds: int, kind: Any = None) -> Any:
    contexts = planted.grid().contexts.values()
    return serve(planted.make_client, contexts, strategy, rounds, kind)


def test_the_servers_evaluation_takes_flowers_three_arguments(federation: MakeFederation) -> None:
    def evaluate(server_round: int, parameters: Any, config: dict[str, Any]) -> Any:
        assert config == {}
        return None if server_round == 1 else (float(server_round), {"arrays": len(parameters)})

    strategy = as_legacy(PerMA(3, num_clients=5), evaluate_fn=evaluate)
    assert isinstance(strategy, Strategy)
    _, history = serve_all(federation(), strategy, 2)
    assert history.losses_centralized == [(2, 2.0)]


@pytest.mark.parametrize("strategy", ["PerMA", "ClusteredFedAvg"])
def test_configs_change_by_round(federation: MakeFederation, strategy: str) -> None:
    seen: list[tuple[str, Any]] = []

    class Client(NumPyClient):
        def fit(self, parameters: Any, config: dict[str, Any]) -> Any:
            seen.append(("fit", config["lr"]))
            return parameters or [np.eye(4, 6)], 10, {}

        def evaluate(self, parameters: Any, config: dict[str, Any]) -> Any:
            seen.append(("evaluate", config["steps"]))
            return 0.0, 10, {}

    planted = federation(2)._replace(make_client=lambda context: AnyClient(Client(), context))
    perma = strategy == "PerMA"
    adapted = as_legacy(
        PerMA(2, aggregation="mean") if perma else ClusteredFedAvg(2, start="given"),
        initial=[np.eye(2, 6)] if perma else [np.ones((2, 3))],
        on_fit_config_fn=lambda server_round: {"lr": np.float64(0.1 / server_round)},
        on_evaluate_config_fn=lambda server_round: {"steps": server_round},
    )
    serve_all(planted, adapted, 2)
    assert {what for what in seen if what[0] == "fit"} == {("fit", 0.1), ("fit", 0.05)}
    assert {what for what in seen if what[0] == "evaluate"} == {("evaluate", 1), ("evaluate", 2)}


def test_configs_by_round_are_functions_that_return_mappings(federation: MakeFederation) -> None:
    for wrong in (None, {1: 0.1}):
        adapted = as_legacy(PerMA(3, num_clients=5), on_fit_config_fn=lambda _, wrong=wrong: wrong)
        with pytest.raises(TypeError, match="on_fit_config_fn"):
            serve_all(federation(), adapted, 1)


def test_a_resumed_run_remembers_what_the_server_measured(
    federation: MakeFederation, tmp_path: Path
) -> None:
    def evaluate(round_: int, arrays: list[Any], _: Any) -> tuple[float, dict[str, Any]]:
        return float(np.abs(arrays[0]).sum()), {"size": np.float32(arrays[0][0, 0])}

    def run(rounds: int, **options: Any) -> Any:
        strategy = PerMA(3, num_clients=5, **options)
        return serve_all(planted, as_legacy(strategy, evaluate_fn=evaluate), rounds)[1]

    planted = federation()
    whole = run(3)
    run(2, checkpoint_dir=tmp_path)
    again = run(3, checkpoint_dir=tmp_path, server=RESUME)
    # the clients have lost their states: the same, but for rounding
    np.testing.assert_allclose(again.losses_centralized, whole.losses_centralized, rtol=1e-12)
    assert again.metrics_centralized.keys() == whole.metrics_centralized.keys() == {"size"}
    sizes = (np.array(found.metrics_centralized["size"]) for found in (again, whole))
    assert_same_bits(*sizes)


class Liar(LocalProxy):
    """Replies with bytes that are no array."""

    def fit(self, ins: FitIns, timeout: Any, group_id: Any) -> FitRes:
        garbage = Parameters([b"garbage"], "numpy.ndarray")
        return FitRes(Status(Code.OK, ""), garbage, num_examples=10, metrics={})


class Dead(LocalProxy):
    """Never replies."""

    def fit(self, ins: FitIns, timeout: Any, group_id: Any) -> Any:
        raise RuntimeError("the node is gone")


@pytest.mark.parametrize("kind", [Liar, Dead])
def test_a_bad_client_is_left_out(
    federation: MakeFederation, tmp_path: Path, kind: type[LocalProxy]
) -> None:
    strategy = PerMA(3, num_clients=5, server=ServerSettings(events=tmp_path / "events.jsonl"))
    serve_all(federation(), as_legacy(strategy), 3, kind)
    training = [report for report in strategy.history if report.step != "evaluate"]
    assert [list(report.dropped) for report in training] == [["client 3"]] * 3
    what = "failed" if kind is Dead else "refused"
    assert [report.anomalies for report in training] == [{3: {what: 1.0}}] * 3
    events = read_events(tmp_path / "events.jsonl")[0]
    assert events[0] == {**events[0], "event": "begin", "rounds": None}
    rounds = [event for event in events if event["event"] == "round"]
    assert [event["good"] for event in rounds if event["step"] != "evaluate"] == [4, 4, 4]


def test_events_say_how_a_run_ended_when_the_next_one_begins(
    federation: MakeFederation, tmp_path: Path
) -> None:
    class Failing(LocalProxy):
        def fit(self, ins: FitIns, timeout: Any, group_id: Any) -> Any:
            raise RuntimeError("broken")

    events = tmp_path / "events.jsonl"
    server = ServerSettings(events=events)
    strategy = as_legacy(PerMA(3, min_clients=4, num_clients=4, server=server))
    with pytest.raises(TooFewReplies):
        serve_all(federation(n_clients=4), strategy, 2, Failing)
    strategy.initialize_parameters(SimpleClientManager())
    ends = [event["stopped"] for event in read_events(events)[0] if event["event"] == "end"]
    assert len(ends) == 1
    assert "min_clients" in ends[0]
