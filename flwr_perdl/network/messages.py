"""Messages between neighbors: their records, and the lists of arrays in which they cross Flower.

=================  ==============================================================================
`Message`          what one node hears from one neighbor
`Delivery`         a request of the server to a node: the messages that it hears, and whose public
                   keys it needs for its own next one
`Sent`             the node's reply: its message
=================  ==============================================================================

In a *sealed* message the arrays are encrypted for one receiver (see `flwr_perdl.network.sealed`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from flwr_perdl._checks import Matrix, check_array
from flwr_perdl.diffusion.combine import Array

#: Up to here every whole number is a float.
_LARGEST = 2**53


class Rejected(ValueError):
    """A message, or a card, that is not what it claims to be."""


class Message(NamedTuple):
    """One neighbor's message to one node.

    Attributes
    ----------
    sender : int
        The neighbor.
    late : int
        How many rounds ago it was sent.
    weight : float
        The receiver's combination weight for the sender.
    arrays : sequence of ndarray of shape (1, ...)
        The message; sealed, one array of numbers that carry its bytes.
    """

    sender: int
    late: int
    weight: float
    arrays: Sequence[Array]


class Delivery(NamedTuple):
    """What the server hands to a node in an exchange.

    On the wire: a table with a row (sender, rounds late, weight, number of arrays) per message;
    where messages are sealed, the receivers and their cards; then the arrays of all messages.

    Attributes
    ----------
    messages : sequence of Message
        Of the neighbors that the node hears.
    cards : mapping of int to ndarray, or None
        Public keys of those who may hear the node's next message; None where messages are open.
    """

    messages: Sequence[Message] = ()
    cards: Mapping[int, Matrix] | None = None

    def to_arrays(self) -> list[Matrix]:
        """Return the arrays of the request."""
        rows = [[m.sender, m.late, m.weight, len(m.arrays)] for m in self.messages]
        arrays: list[Matrix] = [np.array(rows, dtype=np.float64).reshape(-1, 4)]
        if self.cards is not None:
            cards = np.stack([*self.cards.values()]) if self.cards else np.zeros((0, 1))
            arrays += [np.array([*self.cards], dtype=np.float64), cards]
        return arrays + [array for message in self.messages for array in message.arrays]

    @classmethod
    def from_arrays(cls, arrays: Sequence[Matrix], sealed: bool) -> Delivery:
        """Return what the arrays of a request mean.

        Raises
        ------
        ValueError
            If ids or counts are not whole numbers, weights are negative or sum to more than one,
            or the cards are not one per receiver.
        """
        fewest = 3 if sealed else 1
        if len(arrays) < fewest:
            raise ValueError(f"parameters must have {fewest} arrays or more, got {len(arrays)}.")
        table = check_array("messages", arrays[0], columns=4)
        _check_whole("messages", table[:, [0, 3]])
        _check_whole("rounds late", np.abs(table[:, 1]))
        weights = table[:, 2]
        if (weights < 0).any() or weights.sum() > 1 + 1e-9:
            raise ValueError(f"weights must be at least 0, at most 1 in all, got {weights}.")
        cards = None
        if sealed:
            receivers = check_array("receivers", arrays[1], ndim=1)
            _check_whole("receivers", receivers)
            keys = check_array("cards", arrays[2])
            if len(keys) != len(receivers):
                raise ValueError(f"cards must be of {len(receivers)} receivers, got {len(keys)}.")
            cards = dict(zip(receivers.astype(int).tolist(), keys, strict=True))
        messages, at = [], fewest
        for sender, late, weight, n_arrays in table.tolist():
            end = at + int(n_arrays)
            messages.append(Message(int(sender), int(late), weight, arrays[at:end]))
            at = end
        return cls(messages, cards)


class Sent(NamedTuple):
    """What a node sends in an exchange: one message for all neighbors, or sealed, one for each.

    Attributes
    ----------
    card : ndarray or None
        Public keys of the node where messages are sealed.
    arrays : sequence of ndarray
        The open message; sealed, a message for each receiver in the order of `Delivery.cards`,
        of size 0 where the receiver's card was rejected. Empty if the node is asleep or its message
        is not finite.
    """

    card: Matrix | None = None
    arrays: Sequence[Matrix] = ()

    def to_arrays(self) -> list[Matrix]:
        """Return the arrays of the reply."""
        return [*([] if self.card is None else [self.card]), *self.arrays]

    @classmethod
    def from_arrays(cls, arrays: Sequence[Matrix], sealed: bool) -> Sent:
        """Return what the arrays of a reply mean."""
        return cls(arrays[0], arrays[1:]) if sealed and len(arrays) else cls(None, arrays)


def _check_whole(name: str, numbers: Matrix) -> None:
    """Raise a ValueError if numbers that travel as floats are no ids or counts."""
    odd = (numbers != np.rint(numbers)) | (numbers < 0) | (numbers > _LARGEST)
    if odd.any():
        raise ValueError(f"{name} must have whole numbers from 0 on, got {numbers[odd][0]:g}.")
