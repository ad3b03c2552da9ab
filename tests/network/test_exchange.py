from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_perdl._network._exchange import Mailbox, Plan, spread
from flwr_perdl._network.messages import Delivery, Message, Rejected, inbox_of
from flwr_perdl.diffusion import Topology, averaging_weights


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 7), st.integers(0, 99), st.data())
def test_a_node_alone_with_its_messages_hears_what_a_mailbox_hears(
    n: int, seed: int, draw: st.DataObject
) -> None:
    weights = averaging_weights(Topology.erdos_renyi(n, 0.6, seed=seed))
    plan = Plan.make(weights.topology, weights, None)
    rng = np.random.default_rng(seed)
    arrays = (rng.standard_normal((n, 2)), rng.standard_normal(n))
    broken = draw.draw(st.sets(st.integers(0, n - 1), max_size=2))
    gone = draw.draw(st.sets(st.integers(0, n - 1), max_size=2))
    arrays[0][list(broken)] = np.nan
    for k in range(n):
        senders = plan.heard_by(np.array([k]))
        arrived = np.array([j == k or j not in gone for j in senders])
        whole = Mailbox(plan, np.array([k]), senders).inbox(
            1, tuple(array[senders] for array in arrays), None, arrived
        )
        messages = [
            Message(int(j), 0, weights.matrix[k, j], tuple(array[[j]] for array in arrays))
            for j in senders
            if j != k and j not in gone
        ]
        own, left_out = inbox_of(k, 1, tuple(array[[k]] for array in arrays), messages)
        assert sorted(left_out) == sorted((broken - gone - {k}) & {*senders})
        np.testing.assert_allclose(own.mean(), whole.mean(), atol=1e-15)
        np.testing.assert_allclose(own.mean(1), whole.mean(1), atol=1e-15)
        np.testing.assert_allclose(own.total(), whole.total(), atol=1e-15)
        np.testing.assert_array_equal(own.degrees, whole.degrees)
        np.testing.assert_allclose(own.weights.sum(), 1)
        best = own.senders[own.argmax(own.arrays[1][:, None])]
        np.testing.assert_array_equal(best, whole.senders[whole.argmax(whole.arrays[1][:, None])])


def test_a_message_that_did_not_arrive_is_not_heard_nor_counted_as_broken() -> None:
    # A path 0 - 1 - 2: node 1 gives each a third. Node 2's message did not arrive.
    plan = Plan.make(Topology.from_edges(3, [(0, 1), (1, 2)]), None, None)
    mailbox = Mailbox(plan, np.array([1]), np.arange(3))
    values = np.array([[3.0], [6.0], [np.nan]])
    inbox = mailbox.inbox(1, (values,), None, np.array([True, True, False]))
    np.testing.assert_allclose(inbox.mean(), [[5.0]])
    assert mailbox.left_out == set()
    assert mailbox.traffic.toarray()[1].tolist() == [1, 0, 0]
    np.testing.assert_allclose(mailbox.inbox(2, (values,)).mean(), [[5.0]])
    assert mailbox.left_out == {(2, 2)}


def test_rows_of_some_nodes() -> None:
    there = np.array([True, False, True])
    rows = np.array([[1, 2], [3, 4]])
    np.testing.assert_array_equal(spread(rows, there), [[1, 2], [np.nan] * 2, [3, 4]])
    assert spread(rows.astype(np.float32), there).dtype == np.float32
    assert spread(rows, np.ones(2, dtype=bool)) is rows


def test_messages_of_another_dtype_are_left_out() -> None:
    own = (np.ones((1, 2)),)
    message = Message(3, 0, 0.5, (np.ones((1, 2), dtype=np.float32),))
    inbox, left_out = inbox_of(1, 1, own, [message])
    assert list(left_out) == [3]
    assert inbox.weights.toarray() == pytest.approx(1.0)


def test_which_messages_count() -> None:
    own = (np.array([[1.0, 1.0]]),)

    def message(sender: int, late: int, *arrays: np.ndarray) -> Message:
        return Message(sender, late, 0.1, arrays or (np.array([[2.0, 4.0]]),))

    inbox, left_out = inbox_of(
        1,
        3,
        own,
        [
            message(0, 0),
            message(0, 0),  # a second one of that round
            message(0, 1),
            message(1, 0),  # its own
            message(2, 2),  # too late
            message(3, -1),
            message(4, 0, np.array([[2.0, np.inf]])),
            message(5, 0, np.array([[2.0, 4.0]]), np.ones(1)),
        ],
        max_delay=1,
    )
    assert sorted(left_out) == [0, 1, 2, 3, 4, 5]
    assert inbox.senders.tolist() == [0, 1, 0]  # in the order of delay, then of sender
    np.testing.assert_allclose(inbox.weights.toarray(), [[0.1, 0.8, 0.1]])
    np.testing.assert_array_equal(inbox.links.toarray(), [[1.0, 0.0, 1.0]])
    np.testing.assert_allclose(inbox.mean(), [[1.2, 1.6]])


def test_a_message_that_cannot_be_unsealed_is_left_out() -> None:
    def unseal(array: np.ndarray, sender: int, round_: int) -> list[np.ndarray]:
        if sender == 2:
            raise Rejected("it was changed")
        return [array + round_]

    sealed = [Message(k, k % 2, 0.25, [np.zeros((1, 2))]) for k in (2, 3)]
    two = Message(4, 0, 0.25, [np.zeros((1, 2))] * 2)
    inbox, left_out = inbox_of(1, 5, (np.ones((1, 2)),), [*sealed, two], max_delay=1, unseal=unseal)
    assert left_out == {2: "it was changed", 4: "it has 2 arrays, and is not sealed"}
    np.testing.assert_allclose(inbox.mean(), [[1.75, 1.75]])  # 1/4 of 4 (round 4), 3/4 of 1


@pytest.mark.parametrize("sealed", [False, True])
def test_records_of_messages_are_what_their_arrays_mean(sealed: bool) -> None:
    messages = [
        Message(3, 0, 0.25, [np.ones((1, 2)), np.zeros(1)]),
        Message(0, 2, 0.5, []),
    ]
    cards = {7: np.arange(3.0), 9: np.ones(3)} if sealed else None
    for delivery in (Delivery(messages, cards), Delivery((), {} if sealed else None)):
        again = Delivery.from_arrays(delivery.to_arrays(), sealed)
        assert [message[:3] for message in again.messages] == [m[:3] for m in delivery.messages]
        for one, other in zip(again.messages, delivery.messages, strict=True):
            for array, wanted in zip(one.arrays, other.arrays, strict=True):
                np.testing.assert_array_equal(array, wanted)
        assert (again.cards is None) == (not sealed)
        assert list(again.cards or {}) == list(delivery.cards or {})
