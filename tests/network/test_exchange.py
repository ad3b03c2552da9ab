from __future__ import annotations

import numpy as np

from flwr_perdl.network.messages import Message, Rejected, inbox_of


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
