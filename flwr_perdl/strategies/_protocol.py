"""What a protocol is: a generator whose every ``yield`` is one communication round.

A protocol reads like the paper's listing. It yields a `Request`, gets the good replies by
partition, computes, and yields the next one; it ends by returning the final model, or runs until
the rounds are over::

    def protocol(self, initial, state):
        if state is None:
            replies = yield Request("start")
            state = {"model": first_guess(replies)}
        while True:
            replies = yield Request("update", [state["model"]], state=state)
            state = {"model": average(replies)}

Nothing may be kept outside ``state``: every request names the state from which the generator,
started afresh, yields that same request again. That is all a checkpoint needs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from flwr_perdl._checks import Matrix
from flwr_perdl._records import Reply, Scalar

#: Named arrays from which a protocol continues.
State = Mapping[str, NDArray[Any]]

#: The good replies of a round, by partition, in ascending order.
Replies = dict[int, Reply]


def accept(reply: Reply) -> None:
    """Accept every reply (the default check of a request)."""


class Request(NamedTuple):
    """One round's question to every participating client.

    Attributes
    ----------
    step : str
        Which step of the protocol the client is to take.
    arrays : sequence of ndarray
        What every client receives.
    config : mapping
        Further scalars for the client.
    state : mapping of str to ndarray, or None
        The state from which the protocol asks this request again; None for a fresh start.
    check : callable
        Raises a ValueError that says what is wrong with a reply, which is then left out.
    own : callable, optional
        ``partition -> arrays``: what each client receives instead of ``arrays``.
    model : sequence of ndarray, optional
        The model that evaluations and the result see; by default ``arrays``.
    """

    step: str
    arrays: Sequence[Matrix] = ()
    config: Mapping[str, Scalar] = {}
    state: State | None = None
    check: Callable[[Reply], None] = accept
    own: Callable[[int], Sequence[Matrix]] | None = None
    model: Sequence[Matrix] | None = None


Protocol = Generator[Request, Replies, list[Matrix]]


class RoundReport(NamedTuple):
    """What happened in one exchange.

    Attributes
    ----------
    round : int
        Communication round, from 1.
    step : str
        The protocol's step, or ``"evaluate"``.
    metrics : dict of int to dict
        Every good reply's metrics, by partition.
    aggregate : dict of str to float
        Their means, weighted by numbers of examples, and ``"clients"`` and ``"dropped"``.
    dropped : dict of str to str
        Who was left out, and why.
    floats_down, floats_up : float
        Floats sent to, and received from, a client; the mean over the good replies.
    """

    round: int
    step: str
    metrics: dict[int, dict[str, float]]
    aggregate: dict[str, float]
    dropped: dict[str, str]
    floats_down: float
    floats_up: float
