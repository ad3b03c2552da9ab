"""Rounds of a `Program` in memory; on Flower they are `flwr_perdl.strategies.NeighborRelay`'s."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flwr_perdl.core.arrays import Array
from flwr_perdl.core.checks import check_count, check_function, check_kind
from flwr_perdl.core.repr import ShownAsCalled
from flwr_perdl.network.combine import (
    Program,
    Run,
    StateT,
    begin_round,
    check_state,
    reported,
    step_back,
)
from flwr_perdl.network.messages import Mailbox, curves, tally
from flwr_perdl.network.schedule import Faults, LinkPlan, Schedule, schedule_of
from flwr_perdl.network.topology import CombinationMatrix, Topology, metropolis_weights


@dataclass(eq=False, repr=False)
class InMemoryNetwork(ShownAsCalled):
    """Nodes of one process that send messages to their neighbors only.

    Parameters
    ----------
    topology : Topology or Schedule
        Which nodes are neighbors, in all rounds or in each.
    weights : CombinationMatrix, optional
        Combination weights of a topology; Metropolis weights by default.
    faults : Faults, optional
        Faults to simulate; none by default.
    staleness : int, default 0
        If a neighbor sends nothing in a round, its last message counts again, up to this many
        rounds. 0: its weight goes to the node itself. For programs that forget an old message, such
        as ``diffusion_averaging(method="atc")``.

    Raises
    ------
    ValueError
        If weights and topology have different numbers of nodes, or ``staleness`` is not 0 where a
        node's weights do not sum to one.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.network import Averaging, Topology
    >>> from flwr_perdl.network import InMemoryNetwork
    >>> run = InMemoryNetwork(Topology.ring(4)).run(Averaging(np.arange(4.0)[:, None]), 30)
    >>> run.state.estimate.ravel().round(6)
    array([1.5, 1.5, 1.5, 1.5])
    """

    topology: Topology | Schedule
    weights: CombinationMatrix | None = None
    faults: Faults | None = None
    staleness: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        """Check the arguments."""
        self.plan = LinkPlan.make(self.topology, self.weights, self.faults, self.staleness)

    def run(
        self,
        program: Program[StateT],
        n_rounds: int,
        *,
        callback: Callable[[int, StateT], Any] | None = None,
        stop: Callable[[StateT], bool] | None = None,
    ) -> Run:
        """Run a distributed algorithm for some rounds.

        Parameters
        ----------
        program : Program
            The algorithm, with the data of all nodes.
        n_rounds : int
            Largest number of rounds; each is one exchange with all neighbors.
        callback : callable, optional
            Called with round and state after every round.
        stop : callable, optional
            Ends the run when it returns True for the state.

        Returns
        -------
        Run
            With the state of all nodes.

        Raises
        ------
        ValueError
            If a method of the program does not return what `Program` says.
        """
        check_count("n_rounds", n_rounds)
        plan, n, mailbox = self.plan, self.plan.n_nodes, Mailbox(self.plan)
        rows: list[dict[str, Array]] = []
        now = check_state("start", program.start(np.arange(n)), n)
        for round_ in range(1, n_rounds + 1):
            adapted, sent = begin_round(program, now, round_)
            inbox = mailbox.inbox(round_, sent)
            after = check_state("combine", program.combine(adapted, inbox), n)
            mailbox.count(inbox)
            awake = plan.awake(round_)
            now = step_back(after, now, ~awake)  # who is asleep takes in nothing
            rows.append(reported(program, now, awake))
            if callback is not None:
                callback(round_, now)
            if stop is not None and stop(now):
                break
        dropped_messages, dropped_by = tally(mailbox.left_out)
        traffic = mailbox.traffic
        return Run(
            state=now,
            observed=program.observe(now),
            rounds=len(rows),
            floats_sent=float(traffic.sum()),
            traffic=traffic,
            dropped_messages=dropped_messages,
            alive=plan.awake(max(len(rows), 1)),
            curves=curves(rows, n),
            dropped_by=dropped_by,
        )


def resolve_weights(network: Any) -> Any:
    """Return what carries messages: a topology's Metropolis weights, or the network itself."""
    if isinstance(network, Topology):
        if network.directed:
            raise ValueError(f"network must be undirected, or have weights, got {network!r}.")
        return metropolis_weights(network)
    if isinstance(network, CombinationMatrix | Schedule):
        return network
    return check_kind("network", network, InMemoryNetwork, "a Topology, weights or a network")


def run_program(
    program: Program[Any],
    network: Any,
    n_rounds: int,
    callback: Callable[[int, Any], Any] | None = None,
) -> Run:
    """Run a program: the one way in which the learners of this package do.

    Parameters
    ----------
    program : Program
        With the data of all nodes.
    network : Topology, CombinationMatrix, Schedule or InMemoryNetwork
        The first three have no faults.
    n_rounds, callback
        As in `InMemoryNetwork.run`.
    """
    check_function("callback", callback)
    network = resolve_weights(network)
    if not isinstance(network, InMemoryNetwork):
        network = InMemoryNetwork(schedule_of(network))
    run: Run = network.run(program, n_rounds, callback=callback)
    return run
