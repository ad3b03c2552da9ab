"""All nodes in one process: the combination step is one product over stacked arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flwr_perdl._checks import check_count
from flwr_perdl.diffusion.combine import Array, Program, State, step_back
from flwr_perdl.diffusion.topology import CombinationMatrix, Topology
from flwr_perdl.network._exchange import Mailbox, Plan, Run, finite_rows
from flwr_perdl.network.faults import Faults


class InMemoryNetwork:
    """Nodes of one process that talk to their neighbours only.

    Parameters
    ----------
    topology : Topology
        Who hears whom.
    weights : CombinationMatrix, or sequence of them, optional
        Combination weights; Metropolis weights by default. A sequence is cycled through round by
        round, each matrix with its own topology: a network that changes in time.
    faults : Faults, optional
        What goes wrong; nothing by default.

    Raises
    ------
    ValueError
        If weights and topology have different numbers of nodes.
    """

    def __init__(
        self,
        topology: Topology,
        weights: CombinationMatrix | Sequence[CombinationMatrix] | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.topology = topology
        self.plan = Plan.make(topology, weights, faults)

    def run(
        self,
        program: Program[State],
        n_rounds: int,
        *,
        state: State | None = None,
        callback: Callable[[int, State], Any] | None = None,
        stop: Callable[[State], bool] | None = None,
    ) -> Run:
        """Run a distributed algorithm for some rounds.

        Parameters
        ----------
        program : Program
            The algorithm, with the data of all nodes.
        n_rounds : int
            Rounds at most, at least 0; one exchange with all neighbours each.
        state : NamedTuple of arrays, optional
            Where to go on from; the program's start by default.
        callback : callable, optional
            Called with round and state after every round.
        stop : callable, optional
            Ends the run when it returns True for the state.

        Returns
        -------
        Run
            With the state of all nodes.
        """
        check_count("n_rounds", n_rounds)
        faults, n = self.plan.faults, self.plan.n_nodes
        nodes = np.arange(n)
        mailbox = Mailbox(self.plan, nodes, nodes)
        current: State = program.start(nodes) if state is None else state
        done = 0
        for round_ in range(1, n_rounds + 1):
            current = advance(program, current, mailbox, round_)
            done = round_
            if callback is not None:
                callback(round_, current)
            if stop is not None and stop(current):
                break
        return Run(
            state=current,
            observed=program.observe(current),
            rounds=done,
            floats_sent=float(mailbox.traffic.sum()),
            traffic=mailbox.traffic,
            unheard=dict(sorted(mailbox.unheard.items())),
            alive=faults.awake(n, max(done, 1)),
        )


def advance(program: Program[State], before: State, mailbox: Mailbox, round_: int) -> State:
    """Return the state after one round of nodes that are all hosted here."""
    adapted = program.adapt(before, round_)
    sent, own = broken_on_the_way(program.message(adapted), mailbox, round_)
    after = program.combine(adapted, mailbox.inbox(round_, sent, own))
    awake = mailbox.plan.faults.awake(mailbox.plan.n_nodes, round_)[mailbox.nodes]
    return step_back(after, before, ~awake)


def broken_on_the_way(
    own: tuple[Array, ...], mailbox: Mailbox, round_: int
) -> tuple[tuple[Array, ...], tuple[Array, ...] | None]:
    """Return the hosted nodes' messages as they arrive and, if that differs, as they left."""
    broken = mailbox.plan.faults.broken(mailbox.plan.n_nodes, round_)[mailbox.nodes]
    if not broken.any():
        return own, None if finite_rows(own).all() else own
    sent = tuple(array.copy() for array in own)
    for array in sent:
        array[broken] = np.nan
    return sent, own
