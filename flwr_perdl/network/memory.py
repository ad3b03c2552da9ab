"""All nodes in one process: the combination step is one product over stacked arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.checks import check_count
from flwr_perdl.diffusion.combine import (
    Array,
    Program,
    State,
    check_message,
    check_state,
    curves,
    reported,
    step_back,
    within_limits,
)
from flwr_perdl.network.exchange import Mailbox, Network, Plan, Run, unheard_of
from flwr_perdl.network.messages import finite_rows


class InMemoryNetwork(Network):
    """Nodes of one process that send messages to their neighbors only: see `Network`.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.diffusion import Averaging, Topology
    >>> from flwr_perdl.network import InMemoryNetwork
    >>> run = InMemoryNetwork(Topology.ring(4)).run(Averaging(np.arange(4.0)[:, None]), 30)
    >>> run.state.estimate.ravel().round(6)
    array([1.5, 1.5, 1.5, 1.5])
    """

    def run(
        self,
        program: Program[State],
        n_rounds: int,
        *,
        state: State | None = None,
        callback: Callable[[int, State], Any] | None = None,
        stop: Callable[[State], bool] | None = None,
        on_report: Callable[[int, dict[str, Array]], Any] | None = None,
    ) -> Run:
        """Run a distributed algorithm for some rounds.

        Parameters
        ----------
        program : Program
            The algorithm, with the data of all nodes.
        n_rounds : int
            Rounds at most; each is one exchange with all neighbors.
        state : NamedTuple of arrays, optional
            The state to continue from; the program's start by default.
        callback : callable, optional
            Called with round and state after every round.
        stop : callable, optional
            Ends the run when it returns True for the state.
        on_report : callable, optional
            Called after every round with the round and what the nodes report: a dict of arrays of
            shape (n_nodes,), NaN for a node that reports nothing.

        Returns
        -------
        Run
            With the state of all nodes.
        """
        check_count("n_rounds", n_rounds)
        everyone = np.arange(self.plan.n_nodes)
        host = Host(program, self.plan, everyone, everyone, state)
        done, rows = 0, []
        for round_ in range(1, n_rounds + 1):
            host.receive(round_, host.send(round_))
            done = round_
            rows.append(host.reported(round_))
            if on_report is not None:
                on_report(round_, rows[-1])
            if callback is not None:
                callback(round_, host.state)
            if stop is not None and stop(host.state):
                break
        traffic = host.mailbox.traffic
        return Run(
            state=host.state,
            observed=program.observe(host.state),
            rounds=done,
            floats_sent=float(traffic.sum()),
            traffic=traffic,
            unheard=unheard_of(host.mailbox.left_out),
            alive=self.plan.faults.awake(self.plan.n_nodes, max(done, 1)),
            curves=curves(rows, self.plan.n_nodes),
        )


class Host:
    """Nodes of a program that are hosted in one process: all of them, or those of a Ray actor.

    Parameters
    ----------
    program : Program
        The algorithm, with at least these nodes' data.
    plan : Plan
        Who hears whom.
    nodes, senders : ndarray
        See `Mailbox`.
    state : NamedTuple of arrays, optional
        Where to go on from; the program's start by default.
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
                array[broken] = np.nan
        return sent

    def receive(
        self, round_: int, arrays: tuple[Array, ...], arrived: NDArray[np.bool_] | None = None
    ) -> None:
        """Take in the messages of a round, see `Mailbox.inbox`; a node that is asleep does not."""
        screen = partial(within_limits, self._program, self._adapted)
        inbox = self.mailbox.inbox(round_, arrays, self._own, arrived, screen)
        after = self._program.combine(self._adapted, inbox)
        after = check_state("combine", after, len(self.mailbox.nodes))
        self.state = step_back(after, self.state, ~self._awake(round_))

    def reported(self, round_: int) -> dict[str, Array]:
        """Return what the nodes report after a round."""
        return reported(self._program, self.state, self._awake(round_))

    def _awake(self, round_: int) -> NDArray[np.bool_]:
        plan = self.mailbox.plan
        return plan.faults.awake(plan.n_nodes, round_)[self.mailbox.nodes]
