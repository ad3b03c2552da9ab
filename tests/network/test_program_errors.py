"""A program of one's own that returns something else than arrays is told so with a sentence."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from flwr_perdl.clients import DiffusionClient, client_app
from flwr_perdl.diffusion import Topology
from flwr_perdl.network import InMemoryNetwork
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import NeighborRelay, TooFewReplies


class State(NamedTuple):
    x: Any


class Walk:
    def start(self, nodes: Any) -> Any:
        return State(np.zeros((len(nodes), 2)))

    def adapt(self, state: Any, round_: int) -> Any:
        return state

    def message(self, state: Any) -> Any:
        return (state.x,)

    def combine(self, state: Any, inbox: Any) -> Any:
        return State(inbox.mean())

    def observe(self, state: Any) -> Any:
        return {"x": state.x}


CASES = {
    "a nested list": ("message", [[1.0, 2.0]], "message must return arrays of numbers, got [1.0"),
    "an array": ("message", np.zeros((3, 2)), "message must return a tuple of arrays, (array,)"),
    "other rows": ("message", (np.zeros((7, 2)),), "message must return arrays whose first axis"),
    "nothing": ("combine", None, "combine must return a NamedTuple of arrays, got None."),
    "a list": ("adapt", [1], "adapt must return a NamedTuple of arrays, got [1]."),
    "a state of other rows": (
        "combine",
        State(np.zeros((7, 2))),
        "combine must return arrays whose first axis has the ",
    ),
    "a start of lists": ("start", State([0.0]), "start must return arrays of numbers, got [0.0]"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_return_value_is_named_in_memory_and_on_flower(case: str) -> None:
    method, value, said = CASES[case]
    program = type("Odd", (Walk,), {method: lambda self, *arguments: value})()
    with pytest.raises(ValueError, match="must return") as error:
        InMemoryNetwork(Topology.ring(3)).run(program, 2)
    assert str(error.value).startswith(said)
    app = client_app(lambda context: DiffusionClient(program, context))
    with pytest.raises(TooFewReplies) as refused:
        NeighborRelay(Topology.ring(3), 2).start(InProcessGrid(app, 3), num_rounds=4)
    assert said in str(refused.value)
