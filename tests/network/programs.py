"""Small distributed algorithms whose results are known, for the tests of networks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.network import Inbox, Run


class Held(NamedTuple):
    nodes: NDArray[np.intp]
    value: NDArray[np.float64]


class Consensus:
    """Every node replaces its row by the weighted mean of its neighbourhood's."""

    def __init__(self, data: NDArray[np.float64]) -> None:
        self.data = data

    def start(self, nodes: NDArray[np.intp]) -> Held:
        return Held(nodes, np.stack([self.data[k] for k in nodes]))

    def adapt(self, state: Held, round_: int) -> Held:
        return state

    def message(self, state: Held) -> tuple[NDArray[np.float64], ...]:
        return (state.value,)

    def combine(self, state: Held, inbox: Inbox) -> Held:
        return state._replace(value=inbox.mean())

    def observe(self, state: Held) -> dict[str, NDArray[np.float64]]:
        return {"value": state.value}


def assert_same(run: Run, here: Run, rtol: float = 0.0) -> None:
    """Assert that two runs of one program have the same states, observations and counts."""
    assert run.state._fields == here.state._fields
    for rows, expected in zip(run.state, here.state, strict=True):
        assert rows.dtype == expected.dtype
        np.testing.assert_allclose(rows, expected, rtol=rtol, atol=1e-12)
    assert run.observed.keys() == here.observed.keys()
    for name, rows in here.observed.items():
        np.testing.assert_allclose(run.observed[name], rows, rtol=rtol, atol=1e-12, err_msg=name)
    np.testing.assert_array_equal(run.traffic.toarray(), here.traffic.toarray())
    assert (run.floats_sent, run.rounds) == (here.floats_sent, here.rounds)
    assert run.dropped_messages == here.dropped_messages
    assert run.alive.tolist() == here.alive.tolist()
