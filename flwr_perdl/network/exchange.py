"""One executor for distributed algorithms: rounds of a `Program` on a network.

`Network.run` runs the rounds; what differs is who delivers: `InMemoryNetwork` here, `RayNetwork`
between actors (``ray.py``), and a Flower server between SuperNodes
(`flwr_perdl.strategies.FlowerNetwork`), where Flower itself runs the rounds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from flwr_perdl.core.checks import check_count, check_function, check_members
from flwr_perdl.core.repr import ShownAsCalled
from flwr_perdl.network.combine import (
    Array,
    Program,
    Run,
    State,
    begin_round,
    check_state,
    curves,
    end_round,
    reported,
    silent_nodes,
    spread,
    step_back,
    tally,
)
from flwr_perdl.network.messages import Mailbox
from flwr_perdl.network.schedule import Faults, LinkPlan, Schedule, schedule_of
from flwr_perdl.network.topology import CombinationMatrix, Csr, Topology, metropolis_weights


class Ended(NamedTuple):
    """The result of some nodes, ``nodes``: see `Run`; ``left_out`` is for `tally`."""

    nodes: NDArray[np.intp]
    state: Any
    observed: dict[str, Array]
    traffic: Csr
    left_out: set[tuple[int, int, int]]


@dataclass(eq=False, repr=False)
class Network(ABC, ShownAsCalled):
    """Nodes that send messages to their neighbors only; parameters: see `InMemoryNetwork`."""

    topology: Topology | Schedule
    weights: CombinationMatrix | Sequence[CombinationMatrix] | None = None
    faults: Faults | None = None
    staleness: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        """Check the arguments."""
        self.plan = LinkPlan.make(self.topology, self.weights, self.faults, self.staleness)

    @abstractmethod
    def _workers(self, program: Program[State], state: State | None) -> AbstractContextManager[Any]:
        """Return what hosts the nodes, with a state or the program's start.

        ``step(round_, last)`` begins a round and returns what all nodes reported after rounds that
        are done meanwhile; ``drain()`` waits for the others. ``state`` is that of all nodes, and
        ``ended()`` returns the results, by nodes.
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
            Largest number of rounds; each is one exchange with all neighbors.
        state : NamedTuple of arrays, optional
            The state to continue from; by default the program's start.
        callback : callable, optional
            Called with round and state after every round.
        stop : callable, optional
            Ends the run when it returns True for the state.
        on_report : callable, optional
            Called after every round with the round and the nodes' reports: a dict of arrays of
            shape (n_nodes,), NaN for a node without a report.

        Returns
        -------
        Run
            With the state of all nodes. For lost Ray actors there is none (its ``nodes`` are those
            that are left), what they observed is NaN, and ``alive`` is False.

        Raises
        ------
        ValueError
            If a method of the program does not return what `Program` says.
        """
        check_count("n_rounds", n_rounds)
        rows: list[dict[str, Array]] = []

        def note(reports: Iterable[dict[str, Array]]) -> None:
            for row in reports:
                rows.append(row)
                if on_report is not None:
                    on_report(len(rows), row)

        with self._workers(program, state) as workers:
            for round_ in range(1, n_rounds + 1):
                note(workers.step(round_, round_ == n_rounds))
                now: Any = None if callback is None and stop is None else workers.state
                if callback is not None:
                    callback(round_, now)
                if stop is not None and stop(now):
                    break
            note(workers.drain())
            return self._result(workers.ended(), rows)

    def _result(self, ends: Sequence[Ended], rows: Sequence[dict[str, Array]]) -> Run:
        n = self.plan.n_nodes
        there = np.zeros(n, dtype=bool)
        there[np.concatenate([end.nodes for end in ends])] = True
        traffic = sum((end.traffic for end in ends), sparse.csr_array((n, n)))
        dropped_messages, dropped_by = tally(set().union(*(end.left_out for end in ends)))
        return Run(
            state=joined([end.state for end in ends]),
            observed={
                name: spread(_stacked([end.observed[name] for end in ends]), there)
                for name in ends[0].observed
            },
            rounds=len(rows),
            floats_sent=float(traffic.sum()),
            traffic=traffic,
            dropped_messages=dropped_messages,
            alive=self.plan.awake(max(len(rows), 1)) & there,
            curves=curves(rows, n),
            dropped_by=dropped_by,
        )


def joined(states: Sequence[Any]) -> Any:
    """Return the state of all nodes of states that follow each other."""
    return type(states[0])(*map(_stacked, zip(*states, strict=True)))


def _stacked(parts: Sequence[Array]) -> Array:
    """Return the rows of all parts; no copy where there is one."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class InMemoryNetwork(Network):
    """Nodes of one process that send messages to their neighbors only.

    Parameters
    ----------
    topology : Topology or Schedule
        Which nodes are neighbors, in all rounds or in each.
    weights : CombinationMatrix, or sequence of them, optional
        Combination weights of a topology; Metropolis weights by default. A sequence is used in a
        cycle, each matrix with its own topology.
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

    @contextmanager
    def _workers(self, program: Program[State], state: State | None) -> Iterator[Host]:
        everyone = np.arange(self.plan.n_nodes)
        yield Host(program, self.plan, everyone, everyone, state)


class Host:
    """Nodes of a program that are hosted in one process: all of them, or those of a Ray actor.

    ``nodes`` and ``senders`` are those of `Mailbox`.
    """

    def __init__(
        self,
        program: Program[State],
        plan: LinkPlan,
        nodes: NDArray[np.intp],
        senders: NDArray[np.intp],
        state: State | None = None,
    ) -> None:
        self.mailbox = Mailbox(plan, nodes, senders)
        begun = program.start(nodes) if state is None else state
        self.state: Any = check_state("start", begun, len(nodes))
        self._program = program

    def send(self, round_: int) -> tuple[Array, ...]:
        """Do the work before the exchange of a round.

        Return the messages as they arrive, and last which nodes send theirs.
        """
        self._adapted, sent = begin_round(self._program, self.state, round_)
        speak = ~silent_nodes(self._program, self._adapted)
        plan, nodes = self.mailbox.plan, self.mailbox.nodes
        self._awake = plan.awake(round_)[nodes]
        broken = plan.faults.broken(plan.n_nodes, round_)[nodes]
        # A node's own message is passed separately only if it differs from what arrives.
        self._own = sent if broken.any() else None
        if broken.any():
            sent = tuple(array.copy() for array in sent)
            for array in sent:
                if array.dtype.kind == "f":
                    array[broken] = np.nan
        return *sent, speak

    def receive(
        self, round_: int, arrays: tuple[Array, ...], arrived: NDArray[np.bool_] | None = None
    ) -> dict[str, Array]:
        """Take in the messages of a round, see `Mailbox.inbox`; return what the nodes report."""
        *sent, speak = arrays
        arrived = speak if arrived is None else speak & arrived
        inbox = self.mailbox.inbox(round_, tuple(sent), self._own, arrived)
        after, inbox, left_out = end_round(self._program, self._adapted, inbox)
        self.mailbox.count(inbox, left_out)
        self.state = step_back(after, self.state, ~self._awake)  # who is asleep takes in nothing
        return reported(self._program, self.state, self._awake)

    def step(self, round_: int, last: bool) -> list[dict[str, Array]]:
        """Make a round of all nodes."""
        return [self.receive(round_, self.send(round_))]

    def drain(self) -> list[dict[str, Array]]:
        """Return nothing: all rounds are done."""
        return []

    def ended(self) -> list[Ended]:
        """Return the nodes' result."""
        observed, mailbox = self._program.observe(self.state), self.mailbox
        return [Ended(mailbox.nodes, self.state, observed, mailbox.traffic, mailbox.left_out)]


def resolve_weights(network: Any) -> Any:
    """Return what carries messages: a topology's Metropolis weights, or the network itself."""
    if isinstance(network, Topology):
        if network.directed:
            raise ValueError(f"network must be undirected, or have weights, got {network!r}.")
        return metropolis_weights(network)
    if isinstance(network, CombinationMatrix | Schedule):
        return network
    return check_members("network", network, "Topology, weights or a network", "run", "topology")


def run_program(
    program: Program[Any] | None,
    network: Any,
    n_rounds: int,
    callback: Callable[[int, Any], Any] | None = None,
    on_report: Callable[[int, dict[str, Array]], Any] | None = None,
) -> Run:
    """Run a program: the one way in which the learners of this package do.

    Parameters
    ----------
    program : Program or None
        With the data of all nodes; None where the network's nodes have programs of their own.
    network : Topology, CombinationMatrix, Schedule, or a network of `flwr_perdl.network`
        The first three stand for all nodes in this process, without faults.
    n_rounds, callback, on_report
        As in the networks' ``run``.
    """
    check_function("callback", callback)
    network = resolve_weights(network)
    if not hasattr(network, "run") and (schedule := schedule_of(network)):
        network = InMemoryNetwork(schedule)
    asked = {"callback": callback, "on_report": on_report}
    given = {name: function for name, function in asked.items() if function is not None}
    run: Run = network.run(program, n_rounds, **given)
    return run
