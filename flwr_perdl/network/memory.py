"""All nodes in one process: the combination step is one product over stacked arrays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.network.combine import (
    Array,
    Program,
    State,
    check_message,
    check_state,
    reported,
    screened,
    step_back,
)
from flwr_perdl.network.exchange import Ended, Mailbox, Network, Plan
from flwr_perdl.network.messages import finite_rows


class InMemoryNetwork(Network):
    """Nodes of one process that send messages to their neighbors only: see `Network`.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.network import Averaging, Topology
    >>> from flwr_perdl.network import InMemoryNetwork
    >>> run = InMemoryNetwork(Topology.ring(4)).run(Averaging(np.arange(4.0)[:, None]), 30)
    >>> run.state.estimate.ravel().round(6)
    array([1.5, 1.5, 1.5, 1.5])
    """

    @contextmanager
    def _crew(self, program: Program[State], state: State | None) -> Iterator[Host]:
        everyone = np.arange(self.plan.n_nodes)
        yield Host(program, self.plan, everyone, everyone, state)


class Host:
    """Nodes of a program that are hosted in one process: all of them, or those of a Ray actor.

    ``nodes`` and ``senders`` are those of `Mailbox`.
    """

    def __init__(
        self,
        program: Program[State],
        plan: Plan,
        nodes: NDArray[np.intp],
        senders: NDArray[np.intp],
        state: State | None = None,
    ) -> None:
        self.mailbox = Mailbox(plan, nodes, senders)
        begun = program.start(nodes) if state is None else state
        self.state: Any = check_state("start", begun, len(nodes))
        self._program = program

    def send(self, round_: int) -> tuple[Array, ...]:
        """Do the work before the exchange of a round; return the messages as they arrive."""
        n = len(self.mailbox.nodes)
        self._adapted = check_state("adapt", self._program.adapt(self.state, round_), n)
        sent = check_message(self._program.message(self._adapted), n)
        plan = self.mailbox.plan
        broken = plan.faults.broken(plan.n_nodes, round_)[self.mailbox.nodes]
        # A node's own message is passed separately only if it differs from what arrives.
        self._own = None if finite_rows(sent).all() and not broken.any() else sent
        if broken.any():
            sent = tuple(array.copy() for array in sent)
            for array in sent:
                if array.dtype.kind == "f":
                    array[broken] = np.nan
        return sent

    def receive(
        self, round_: int, arrays: tuple[Array, ...], arrived: NDArray[np.bool_] | None = None
    ) -> None:
        """Take in the messages of a round, see `Mailbox.inbox`; a node that is asleep does not."""
        screen = partial(screened, self._program, self._adapted)
        inbox = self.mailbox.inbox(round_, arrays, self._own, arrived, screen)
        after = self._program.combine(self._adapted, inbox)
        after = check_state("combine", after, len(self.mailbox.nodes))
        self.state = step_back(after, self.state, ~self._awake(round_))

    def reported(self, round_: int) -> dict[str, Array]:
        """Return what the nodes report after a round."""
        return reported(self._program, self.state, self._awake(round_))

    def step(self, round_: int, last: bool) -> list[dict[str, Array]]:
        """Make a round of all nodes."""
        self.receive(round_, self.send(round_))
        return [self.reported(round_)]

    def rest(self) -> list[dict[str, Array]]:
        """Return nothing: all rounds are done."""
        return []

    def ended(self) -> list[Ended]:
        """Return the nodes' result."""
        observed, mailbox = self._program.observe(self.state), self.mailbox
        return [Ended(mailbox.nodes, self.state, observed, mailbox.traffic, mailbox.left_out)]

    def _awake(self, round_: int) -> NDArray[np.bool_]:
        return self.mailbox.plan.awake(round_)[self.mailbox.nodes]
