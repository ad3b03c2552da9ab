"""A program of one's own that returns something else than arrays is told so with a sentence."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from flwr_perdl.clients import DiffusionClient, client_app
from flwr_perdl.network import InMemoryNetwork, Topology
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import NeighborRelay, TooFewReplies
from tests.network.programs import Consensus


class State(NamedTuple):
    nodes: Any


class Walk(Consensus):
    def __init__(self) -> None:
        super().__init__(np.zeros((3, 2)))


CASES: list[tuple[str, Any]] = [
    ("message", [[1.0, 2.0]]),
    ("message", np.zeros((3, 2))),
    ("message", (np.zeros((7, 2)),)),
    ("combine", None),
    ("adapt", [1]),
    ("combine", State(np.zeros((7, 2)))),
    ("start", State([0.0])),
]


@pytest.mark.parametrize(("method", "value"), CASES)
def test_a_wrong_return_value_is_named_in_memory_and_on_flower(method: str, value: Any) -> None:
    program = type("Odd", (Walk,), {method: lambda self, *arguments: value})()
    with pytest.raises(ValueError, match=f"^{method}"):
        InMemoryNetwork(Topology.ring(3)).run(program, 2)
    app = client_app(lambda context: DiffusionClient(program, context))
    with pytest.raises(TooFewReplies, match=f"{method}"):
        NeighborRelay(Topology.ring(3), 2).start(InProcessGrid(app, 3), num_rounds=4)
