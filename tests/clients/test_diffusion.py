from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from flwr.app import Context
from numpy.typing import NDArray

from flwr_perdl.clients import DiffusionClient, PrivateState
from flwr_perdl.core.npy import unpack_arrays
from flwr_perdl.privacy.sealed import Keys
from tests.grids import context_of, partition_of
from tests.network import programs

Array = NDArray[Any]


class Held(NamedTuple):
    nodes: NDArray[np.intp]
    value: Array
    worked: NDArray[np.int64]


class Consensus(programs.Consensus):
    """Notes the rounds that it has worked in."""

    def start(self, nodes: NDArray[np.intp]) -> Any:
        held = super().start(nodes)
        return Held(held.nodes, held.value, np.zeros(len(nodes), int))

    def adapt(self, state: Any, round_: int) -> Any:
        return state._replace(worked=state.worked + round_)

    def observe(self, state: Any) -> dict[str, Array]:
        return {"value": state.value, "worked": state.worked}


def context(node: int = 2, **node_config: Any) -> Context:
    return context_of(node, **node_config)


def client(where: Context, value: Any = (6.0, 0.0), **options: Any) -> DiffusionClient:
    node = partition_of(where)
    return DiffusionClient(Consensus({node: np.array(value)}), where, **options)


def asked(at: int, step: str = "exchange", **more: Any) -> dict[str, Any]:
    """The config of an open exchange; rounds of server and algorithm are the same."""
    config = {"perdl.step": step, "perdl.at": at, "server-round": at, "perdl.run": "run"}
    config |= {"perdl.protocol": "neighbor_relay", "perdl.seed": 0}
    return {**config, "perdl.asleep": "", "perdl.sealed": False, **more}


def delivery(*entries: tuple[float, ...], arrays: list[Any]) -> list[Array]:
    table = np.array(entries, dtype=float).reshape(-1, 4)
    return [table, *(np.array(array, dtype=float) for array in arrays)]


NOTHING = delivery(arrays=[])


@pytest.mark.parametrize("after_another", [False, True])
def test_two_rounds_by_hand(after_another: bool) -> None:
    where = context()
    if after_another:  # a protocol whose run has the same token
        PrivateState(where, "run").save(3, {"head": np.ones(2)})
    reply, examples, metrics = client(where).fit(NOTHING, asked(1))
    np.testing.assert_array_equal(reply, [[6.0, 0.0]])
    assert (examples, metrics) == (1, {"perdl.floats": 2})
    request = delivery((0, 0, 0.25, 1), (5, 0, 0.5, 1), arrays=[[2.0, 4.0], [1.0, 2.0]])
    reply, _, metrics = client(where).fit(request, asked(2))
    # 1/4 (2, 4) + 1/2 (1, 2) + 1/4 (6, 0)
    np.testing.assert_allclose(reply, [[2.5, 2.0]])
    assert metrics == {"perdl.floats": 2}
    shown, _, metrics = client(where).fit(NOTHING, asked(3, "show"))
    assert metrics == {}
    shown = unpack_arrays(*shown)
    np.testing.assert_allclose(shown["value"], [[2.5, 2.0]])
    assert shown["worked"].tolist() == [3]  # rounds 1 and 2


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ((0, 0, 0.5, 1), [2.0, 4.0, 1.0]),
        ((0, 0, 0.5, 1), [np.nan, 4.0]),
        ((0, 0, 0.5, 1), [[2.0, 4.0]]),
        ((0, 1, 0.5, 1), [2.0, 4.0]),
        ((0, -1, 0.5, 1), [2.0, 4.0]),
        ((2, 0, 0.5, 1), [2.0, 4.0]),
        ((5, 0, 0.5, 1), [2.0, 4.0]),
    ],
    ids=["shape", "nan", "nested", "late", "early", "own", "again"],
)
def test_a_bad_message_is_left_out_and_its_sender_named(
    entry: tuple[float, ...], text: list[Any]
) -> None:
    where = context()
    client(where).fit(NOTHING, asked(1))
    request = delivery((5, 0, 0.25, 1), entry, arrays=[[2.0, 4.0], text])
    reply, _, metrics = client(where).fit(request, asked(2))
    np.testing.assert_allclose(reply, [[5.0, 1.0]])  # 1/4 (2, 4) + 3/4 (6, 0)
    assert metrics == {"perdl.floats": 2, f"perdl.rejected-{entry[0]}": 1}


@pytest.mark.parametrize("weights", [(-0.1, 0.5), (0.6, 0.6), (np.nan, 0.1)])
def test_weights_that_are_none_are_refused(weights: tuple[float, float]) -> None:
    where = context()
    client(where).fit(NOTHING, asked(1))
    entries = [(sender, 0, weight, 1) for sender, weight in enumerate(weights)]
    request = delivery(*entries, arrays=[[1.0, 1.0], [1.0, 1.0]])
    with pytest.raises(ValueError, match=r"^(weights|messages)"):
        client(where).fit(request, asked(2))


def test_a_broken_estimate_stays_at_home() -> None:
    reply, _, metrics = client(context(), (np.inf, 0.0)).fit(NOTHING, asked(1))
    assert (reply, metrics) == ([], {"perdl.floats": 2, "perdl.broken": 1})


# Sealed ------------------------------------------------------------------------------------------


def sealed(at: int, step: str = "exchange") -> dict[str, Any]:
    return asked(at, step, **{"perdl.sealed": True, "server-round": at + 1})


def to(*neighbours: Keys) -> list[Array]:
    cards = [keys.card for keys in neighbours]
    ids = np.array([float(keys.node) for keys in neighbours])
    return [ids, np.stack(cards) if cards else np.zeros((0, 1))]


def test_what_the_program_reports_comes_with_the_next_reply_and_again_after_the_end() -> None:
    class Telling(Consensus):
        def report(self, state: Held) -> dict[str, Array]:
            return {"first": state.value[:, 0], "second": np.full(1, np.nan)}

    where, other = context(), Keys(5, "run")

    def ask(request: list[Array], config: dict[str, Any]) -> Any:
        return DiffusionClient(Telling({2: np.array([6.0, 0.0])}), where).fit(request, config)

    (card, _), _, metrics = ask([*NOTHING, *to(other)], sealed(1))
    assert metrics == {"perdl.floats": 2}  # no round is over
    mine = other.seal((np.array([2.0, 4.0]),), 2, 1, card)
    request = [*delivery((5, 0, 0.5, 1), arrays=[]), *to(other), mine]
    last = ask(request, sealed(2, "show"))
    assert last[2] == {"first": 4.0}
    again = ask([*NOTHING, *to(other)], sealed(3, "show"))  # the key is gone, the end is not
    np.testing.assert_array_equal(again[0], last[0])
    assert again[1:] == last[1:]


def test_a_sealed_message_of_several_arrays_does_not_spoil_the_others() -> None:
    """Before, the whole request was refused with a sentence about unpacking."""
    where, other = context(), Keys(5, "run")
    ((card, *_), _, _) = client(where).fit([*NOTHING, *to(other)], sealed(1))
    mine = other.seal((np.array([2.0, 4.0]),), 2, 1, card)
    request = [*delivery((6, 0, 0.25, 2), (5, 0, 0.5, 1), arrays=[]), *to(other), mine, mine, mine]
    (_, message), _, metrics = client(where).fit(request, sealed(2))
    np.testing.assert_allclose(other.open(message, 2, 2), [[4.0, 2.0]])
    assert metrics == {"perdl.floats": 2, "perdl.rejected-6": 1}


def test_a_server_cannot_talk_a_node_out_of_sealing() -> None:
    with pytest.raises(ValueError, match="sealed"):
        client(context(), sealed=True).fit(NOTHING, asked(1))
