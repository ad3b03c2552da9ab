from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_perdl.diffusion import Topology, averaging_weights
from flwr_perdl.network._exchange import Mailbox, Plan, spread
from flwr_perdl.network.messages import Message, inbox_of


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 7), st.integers(0, 99), st.data())
def test_a_node_alone_with_its_letters_hears_what_a_mailbox_hears(
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
        letters = [
            Message(int(j), 0, weights.matrix[k, j], tuple(array[[j]] for array in arrays))
            for j in senders
            if j != k and j not in gone
        ]
        own, left_out = inbox_of(k, 1, tuple(array[[k]] for array in arrays), letters)
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
    assert mailbox.unheard == {}
    assert mailbox.traffic.toarray()[1].tolist() == [1, 0, 0]
    np.testing.assert_allclose(mailbox.inbox(2, (values,)).mean(), [[5.0]])
    assert mailbox.unheard == {2: 1}


def test_rows_of_some_nodes() -> None:
    there = np.array([True, False, True])
    rows = np.array([[1, 2], [3, 4]])
    np.testing.assert_array_equal(spread(rows, there), [[1, 2], [np.nan] * 2, [3, 4]])
    assert spread(rows.astype(np.float32), there).dtype == np.float32
    assert spread(rows, np.ones(2, dtype=bool)) is rows


def test_letters_of_another_dtype_are_left_out() -> None:
    own = (np.ones((1, 2)),)
    letter = Message(3, 0, 0.5, (np.ones((1, 2), dtype=np.float32),))
    inbox, left_out = inbox_of(1, 1, own, [letter])
    assert list(left_out) == [3]
    assert inbox.weights.toarray() == pytest.approx(1.0)
