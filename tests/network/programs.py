"""Small distributed algorithms whose results are known, for the tests of networks."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import numpy as np
from flwr.client import NumPyClient
from numpy.typing import NDArray

from flwr_perdl.network import CombinationMatrix, Inbox, Run, Schedule
from flwr_perdl.random import spawn


class Held(NamedTuple):
    nodes: NDArray[np.intp]
    value: NDArray[np.float64]


class Consensus:
    """Every node replaces its row by the weighted mean of its neighbourhood's."""

    def __init__(self, data: NDArray[np.float64] | dict[int, NDArray[np.float64]]) -> None:
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
        return {"norm": np.linalg.norm(state.value, axis=1)}


class Drifted(NamedTuple):
    nodes: NDArray[np.intp]
    value: NDArray[np.float64]
    count: NDArray[np.int64]


class Drift:
    """Uses all that an inbox has, two arrays per message, and draws of the node and the round."""

    def __init__(self, data: dict[int, NDArray[np.float64]]) -> None:
        self.data = data

    def start(self, nodes: NDArray[np.intp]) -> Drifted:
        assert set(self.data) >= set(nodes.tolist())
        return Drifted(
            nodes, np.stack([self.data[int(k)] for k in nodes]), np.zeros(len(nodes), int)
        )

    def adapt(self, state: Drifted, round_: int) -> Drifted:
        noise = [spawn(7, int(k), round_).standard_normal(2) for k in state.nodes]
        return state._replace(value=state.value + 0.01 * np.stack(noise))

    def message(self, state: Drifted) -> tuple[NDArray[np.float64], ...]:
        return state.value, np.abs(state.value).sum(axis=1)

    def combine(self, state: Drifted, inbox: Inbox) -> Drifted:
        best = inbox.argmax(inbox.arrays[1][:, None])[:, 0]
        value = inbox.mean() + 0.1 * inbox.total() + 0.01 * inbox.arrays[0][best]
        value = value / (1 + inbox.degrees[:, None])
        return state._replace(value=value, count=state.count + inbox.degrees)

    def observe(self, state: Drifted) -> dict[str, NDArray[Any]]:
        return {"count": state.count, "norm": np.linalg.norm(state.value, axis=1)}


class Quadratic(NumPyClient):
    """One gradient step on a (w - target)^2 / 2; with a = 0 the model stays as it is."""

    def __init__(self, node: int, a: Any, targets: NDArray[Any]) -> None:
        self.a, self.target = a, targets[node]

    def get_parameters(self, config: Any) -> list[NDArray[Any]]:
        return [np.array([self.target, 1.0])]

    def fit(self, parameters: list[NDArray[Any]], config: Any) -> Any:
        (w,) = parameters
        return [w - self.a * (w - self.target)], 1, {}


def noted(program: Any) -> tuple[Any, list[tuple[NDArray[Any], ...]]]:
    """Return a program, and a list of which it makes copies of its messages."""
    message, sent = program.message, list[tuple[NDArray[Any], ...]]()

    def note(state: Any) -> Any:
        sent.append(tuple(array.copy() for array in message(state)))
        return sent[-1]

    program.message = note
    return program, sent


def sleeping(
    weights: CombinationMatrix,
    sleep: float = 0.0,
    away: Mapping[int, Container[int]] | None = None,
    seed: int = 0,
) -> Schedule:
    """A network whose nodes are asleep with a probability, or in these rounds; links stay."""
    n, never = weights.topology.n_nodes, away or {}

    def present(round_: int) -> NDArray[np.bool_]:
        there = spawn(seed, 1, round_).random(n) >= sleep
        return there & [round_ not in never.get(node, ()) for node in range(n)]

    return Schedule(n, lambda _: weights, repeats=True, present=present)


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
