"""Clients and nodes that send what takes a user's model along, and what is said of them.

Each attack has its control: without the guard it works.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.client import NumPyClient

from flwr_perdl.clients import DiffusionClient, client_app
from flwr_perdl.core.npy import pack_arrays, unpack_arrays
from flwr_perdl.network import Averaging, InMemoryNetwork, Topology, diffusion_averaging
from flwr_perdl.network.averaging import AveragingNode, NodeState
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import (
    ClusteredFedAvg,
    Ditto,
    PersonalizedFedAvg,
    ServerSettings,
)
from flwr_perdl.strategies import DiffusionAveraging as Decentralized
from tests.grids import grid_of, partition_of, relayed

NAMES = ("body", "head")


class Half(NumPyClient):
    """Goes halfway to its node's number, which is one of four."""

    def __init__(self, node: int) -> None:
        self.target = float(node % 4)

    def fit(self, parameters: Any, config: Any) -> Any:
        return [w + (self.target - w) / 2 for w in parameters], 1, {}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        largest = max(float(np.abs(w).max()) for w in parameters)
        return 0.0, 1, {"largest": largest}


class Huge(Half):
    """Sends one number that is far too large, in the first array."""

    def __init__(self, node: int, value: float) -> None:
        super().__init__(node)
        self.value = value

    def fit(self, parameters: Any, config: Any) -> Any:
        (first, *rest), n, metrics = super().fit(parameters, config)
        first.flat[0] = self.value
        return [first, *rest], n, metrics


MODEL = {name: np.full(3, 0.5 * (name == "head")) for name in NAMES}
START = ArrayRecord({name: Array(array) for name, array in MODEL.items()})


# Far too large, at a server ----------------------------------------------------------------------


SERVERS: dict[str, Callable[..., Any]] = {
    "personal": lambda **o: PersonalizedFedAvg(["head"], **o),
    "ditto": lambda **o: Ditto(**o),
    "one cluster": lambda **o: ClusteredFedAvg(1, **o),
    "clusters": lambda **o: ClusteredFedAvg(2, **o),
}


@pytest.mark.parametrize("value", [1e99, -2e3])
@pytest.mark.parametrize("name", SERVERS)
def test_one_client_takes_no_model_along(name: str, value: float) -> None:
    def largest(settings: ServerSettings) -> tuple[float, Any]:
        strategy = SERVERS[name](server=settings)
        grid = grid_of(lambda _, p: Huge(p, value) if p == 3 else Half(p), 8)
        result = strategy.start(grid, START, num_rounds=3)
        return max(np.abs(array.numpy()).max() for array in result.arrays.values()), strategy

    guarded, strategy = largest(ServerSettings())
    assert guarded < 4
    for report in strategy.history:
        if report.step != "evaluate":
            assert list(report.dropped) == ["client 3"]
            assert "'body'" in report.dropped["client 3"]
    assert largest(ServerSettings(max_magnitude=inf))[0] > 100


@pytest.mark.parametrize("name", ["personal", "ditto", "one cluster"])
def test_a_robust_rule_bounds_what_one_client_does_to_a_model(name: str) -> None:
    def largest(rule: str) -> float:
        grid = grid_of(lambda _, p: Huge(p, 90.0) if p == 3 else Half(p), 8)
        arrays = SERVERS[name](robust=rule).start(grid, START, num_rounds=3).arrays
        return float(max(np.abs(array.numpy()).max() for array in arrays.values()))

    assert largest("median") < 4
    assert largest("mean") > 10


# Far too large, among nodes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "value"),
    [("atc", 9.9e4), ("exact_diffusion", 9.9e4), ("gradient_tracking", 9.9e4), ("atc", 500.0)],
)
def test_two_nodes_of_sixteen_take_no_honest_node_along(method: str, value: float) -> None:
    liars = (3, 9)

    def largest(**options: Any) -> tuple[float, Any]:
        strategy = Decentralized(
            Topology.exponential(16), method=method, metrics=["largest"], **options
        )
        grid = grid_of(lambda _, p: Huge(p, value) if p in liars else Half(p), 16)
        strategy.start(grid, START, num_rounds=6)
        shown = strategy.averaged.curves["evaluate-largest"][-1]
        return float(np.nanmax(np.delete(shown, liars))), strategy.averaged

    guarded, result = largest()
    assert guarded < 10
    assert set(result.dropped_messages) == set(liars)
    assert largest(server=ServerSettings(max_magnitude=inf))[0] > 50


# Push-sum weights --------------------------------------------------------------------------------


@pytest.mark.parametrize("believed", [False, True])
def test_a_negative_weight_is_refused_by_the_name_of_its_sender(
    believed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = AveragingNode.message

    def message(node: AveragingNode, state: NodeState) -> list[Any]:
        """Node 2 sends a weight that its neighbors' sum to almost nothing with."""
        *model, weight = honest(node, state)
        return [*model, 1e-9 - 1.5 * weight if node.node == 2 else weight]

    monkeypatch.setattr(AveragingNode, "message", message)
    if believed:
        monkeypatch.setattr(AveragingNode, "rejects", lambda *_: {})
    net = InMemoryNetwork(Topology.exponential(6))
    learned = diffusion_averaging(
        Half, net, 30, initial=[np.zeros(3)], method="push_sum", evaluate_every=0
    )
    largest = max(np.abs(w).max() for node, (w,) in learned.models.items() if node != 2)
    assert largest > 100 if believed else largest < 4
    assert learned.dropped_messages == ({} if believed else {2: 30})
    assert believed or 2 not in learned.dropped_by[2]


# What nodes say at the end -----------------------------------------------------------------------


def shown_with(own: Mapping[str, Any] = {}, **metrics: int) -> Any:
    """Run four nodes, of which node 1 shows further fields, or says more."""

    def lying(message: Message, context: Context, call: Any) -> Message:
        reply = call(message, context)
        if partition_of(context) == 1:
            reply.content["metrics"].update(metrics)
            if message.content["config"]["perdl.step"] == "show":
                (packed,) = reply.content["arrays"].to_numpy_ndarrays()
                fields = pack_arrays({**unpack_arrays(packed), **own})
                reply.content["arrays"] = ArrayRecord([fields])
        return reply

    values = {node: np.array([float(node)]) for node in range(4)}
    app = client_app(
        lambda context: DiffusionClient(Averaging(values), context, shows="state"),
        train_mods=[lying],
    )
    return relayed(InProcessGrid(app, 4), Topology.ring(4), 3)


FIELDS: list[dict[str, Any]] = [
    *({f"state.{name}": np.ones((1, 2))} for name in ("more", "no-name", "_more", "def")),
    {"more": np.ones((1, 2))},
    {"two\nlines": np.ones((1, 2)), "": np.ones((1, 2))},
    {"estimate": np.ones((1, 3, 4)), "count": np.ones(1)},
    {"estimate": np.zeros((1, 3), dtype="M8[s]")},
    {"estimate": np.zeros(1, dtype=[("a", "f8")])},
]


@pytest.mark.parametrize("own", FIELDS, ids=lambda own: repr([*own]))
def test_what_one_node_shows_hides_and_spoils_nothing_of_the_others(
    own: dict[str, Any], warned: pytest.LogCaptureFixture
) -> None:
    honest, run = shown_with(), shown_with(own)
    assert run.state._fields == honest.state._fields
    others = [0, 2, 3]
    assert set(others) <= set(run.state.nodes.tolist())
    rows = [run.state.nodes.tolist().index(node) for node in others]
    np.testing.assert_array_equal(run.state.estimate[rows], honest.state.estimate[others])
    assert set(run.observed) == set(honest.observed)
    for name, values in honest.observed.items():
        np.testing.assert_array_equal(run.observed[name][others], values[others])
    assert "1" in warned.text


def test_who_has_rejected_whom_is_said() -> None:
    run = shown_with(**{"perdl.rejected-2": 1})
    assert run.dropped_by == {2: [1]}
    assert shown_with().dropped_by == {}
