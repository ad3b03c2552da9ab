"""Networks, faults and graphs serve an input or refuse it in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_perdl.diffusion import CombinationMatrix, Topology, metropolis_weights
from flwr_perdl.diffusion.combine import Averaging
from flwr_perdl.network import Faults, InMemoryNetwork
from tests.hostile import arguments, right_or_refused

RING = Topology.ring(4)
VALUES = np.arange(8.0).reshape(4, 2)


def averaged(network: InMemoryNetwork, values: Any = VALUES, n_rounds: Any = 5) -> Any:
    return network.run(Averaging(values), n_rounds).observed


def faulty(**given: Any) -> Any:
    return averaged(InMemoryNetwork(RING, faults=Faults(**given)))


CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "run": (
        lambda values, n_rounds, step: (
            InMemoryNetwork(RING).run(Averaging(values, step), n_rounds).observed
        ),
        {"values": VALUES, "n_rounds": 3, "step": 0.5},
    ),
    "Faults": (faulty, {"drop": 0.1, "sleep": 0.1, "max_delay": 1, "seed": 0}),
    "staleness": (
        lambda staleness: averaged(InMemoryNetwork(RING, staleness=staleness)),
        {"staleness": 1},
    ),
    "Faults at nodes": (
        lambda node, at: faulty(dead={node: at}, corrupt={0: at}),
        {"node": 1, "at": 2},
    ),
    "Topology": (
        lambda adjacency: averaged(InMemoryNetwork(Topology(adjacency)), VALUES),
        {"adjacency": RING.adjacency.toarray()},
    ),
    "Topology.from_edges": (
        lambda n_nodes, k, j: Topology.from_edges(n_nodes, [(0, 1), (k, j)]).adjacency.toarray(),
        {"n_nodes": 4, "k": 1, "j": 2},
    ),
    "CombinationMatrix": (
        lambda matrix: averaged(InMemoryNetwork(RING, CombinationMatrix(matrix, RING))),
        {"matrix": metropolis_weights(RING).matrix.toarray()},
    ),
    "weights of another graph": (
        lambda n: averaged(InMemoryNetwork(RING, metropolis_weights(Topology.ring(n)))),
        {"n": 4},
    ),
}


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=12)
@given(data=st.data())
def test_bad_input_is_served_or_refused_in_a_sentence(name: str, data: st.DataObject) -> None:
    call, good = CALLS[name]
    bad = data.draw(arguments(good))
    right_or_refused(lambda: call(**bad))
