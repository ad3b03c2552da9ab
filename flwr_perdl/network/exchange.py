"""What all transports share: who hears whom in a round, and the inbox that results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from flwr_perdl.core.checks import check_count, check_kind, check_list
from flwr_perdl.core.files import LAST_ROUND
from flwr_perdl.core.repr import ShownAsCalled
from flwr_perdl.network.combine import (
    Array,
    Inbox,
    LeftOut,
    Program,
    Run,
    State,
    curves,
    tally,
)
from flwr_perdl.network.faults import Faults
from flwr_perdl.network.messages import cleared, finite_rows, shared_weights
from flwr_perdl.network.schedule import Schedule
from flwr_perdl.network.topology import (
    CombinationMatrix,
    Csr,
    Topology,
    check_topology,
    kept_totals,
    metropolis_weights,
)


class Links(NamedTuple):
    """The links on which something may be heard in a round, by receiver, then by sender.

    ``late`` says how many rounds ago the message that arrives now was sent; the weights are the
    receivers'.
    """

    receivers: NDArray[np.intp]
    senders: NDArray[np.intp]
    late: NDArray[np.intp]
    weights: NDArray[np.float64]


@dataclass(frozen=True)
class Plan:
    """Who hears whom with which weight, in every round: the same in every process."""

    schedule: Schedule
    faults: Faults
    staleness: int = 0

    def __post_init__(self) -> None:
        """Check that stale messages have weights that sum to one."""
        check_count("staleness", self.staleness, 0, LAST_ROUND)
        if self.staleness and not all(m.row_stochastic for m in self.schedule.matrices):
            raise ValueError(
                "staleness must be 0 where the weights of a node do not sum to one, got "
                f"{self.staleness}."
            )

    @classmethod
    def make(
        cls,
        topology: Topology | Schedule,
        weights: CombinationMatrix | Sequence[CombinationMatrix] | None,
        faults: Faults | None,
        staleness: int = 0,
    ) -> Plan:
        """Return the plan of the arguments of `Network`, checked."""
        if faults is not None:
            check_kind("faults", faults, Faults, "Faults")
        if isinstance(topology, Schedule):
            if weights is not None:
                raise ValueError(f"weights must be left out with a Schedule, got {weights!r}.")
            return cls(topology, faults or Faults(), staleness)
        check_topology(topology)
        if weights is None:
            weights = metropolis_weights(topology)
        given = [weights] if isinstance(weights, CombinationMatrix) else weights
        matrices = tuple(check_list("weights", given))
        if not matrices:
            raise ValueError("weights must have at least one matrix, got an empty sequence.")
        for matrix in matrices:
            check_kind("weights", matrix, CombinationMatrix, "CombinationMatrix")
            if matrix.topology.n_nodes != topology.n_nodes:
                raise ValueError(
                    f"weights must be for {topology.n_nodes} nodes, got {matrix.topology!r}."
                )
        return cls(Schedule.of(*matrices), faults or Faults(), staleness)

    @property
    def oldest(self) -> int:
        """How many rounds old a message that counts can be."""
        return max(self.faults.max_delay, self.staleness)

    @property
    def n_nodes(self) -> int:
        """Number of nodes."""
        return self.schedule.n_nodes

    def awake(self, round_: int) -> NDArray[np.bool_]:
        """Return which nodes take part in a round, shape (n_nodes,)."""
        return self.schedule.awake(round_) & self.faults.awake(self.n_nodes, round_)

    def totals(self, round_: int) -> NDArray[np.float64]:
        """Return the sum of each node's weights, its own included, shape (n_nodes,).

        Where only columns sum to one, a node keeps the weight of those who do not hear it.
        """
        if self.schedule.matrix(round_).row_stochastic:
            return np.ones(self.n_nodes)
        links = self.links(round_)
        return kept_totals(links.receivers, links.senders, links.weights, self.n_nodes)

    def links(self, round_: int) -> Links:
        """Return who is heard in a round if every message counts."""
        matrix = self.schedule.matrix(round_)
        up = self.faults.links(matrix.topology, round_)
        k, j = sparse.coo_array(up).coords
        return Links(k, j, self.faults.delays(up, round_), _entries(matrix.matrix, k, j))

    def sources(self, round_: int) -> Links:
        """Return which messages may count in a round: for each link the first that was sent.

        First comes the one that arrives in the round, then the last ones, up to ``staleness``
        rounds old. A node that was asleep receives what was sent to it meanwhile; what a link that
        was down has lost stays lost.
        """
        fresh, matrix = self.links(round_), self.schedule.matrix(round_)
        if not self.staleness:
            return fresh
        k, j = sparse.coo_array(matrix.topology.adjacency).coords
        awake = self.awake(round_)[k]
        k, j = k[awake], j[awake]
        weights, candidates = _entries(matrix.matrix, k, j), [fresh]
        for age in range(1, min(self.staleness, round_ - 1) + 1):
            before = self.schedule.matrix(round_ - age).topology
            receivers, senders = self.faults.passable(before, round_ - age)
            sent = np.isin(k * self.n_nodes + j, receivers * self.n_nodes + senders)
            ages = np.full(int(sent.sum()), age)
            candidates.append(Links(k[sent], j[sent], ages, weights[sent]))
        k, j, late, weights = map(np.concatenate, zip(*candidates, strict=True))
        order = np.lexsort((j, k))  # stable
        return Links(k[order], j[order], late[order], weights[order])

    def hearing(self, round_: int) -> Csr:
        """Return who may hear a message of a round, now or late: non-zero at ``[k, j]``."""
        rounds = range(round_, round_ + self.faults.max_delay + 1)
        several = {self.schedule.turn(at): self.schedule.matrix(at).topology for at in rounds}
        return sum(topology.adjacency for topology in several.values())

    def senders_to(self, nodes: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return whom these nodes may ever hear, themselves included, ascending."""
        if not self.schedule.repeats:
            return np.arange(self.n_nodes)
        senders = [matrix.topology.adjacency[nodes].indices for matrix in self.schedule.matrices]
        return np.unique(np.concatenate([nodes, *senders])).astype(np.intp)


class Ended(NamedTuple):
    """The result of some nodes, ``nodes``: see `Run`; ``left_out`` is for `tally`."""

    nodes: NDArray[np.intp]
    state: Any
    observed: dict[str, Array]
    traffic: Csr
    left_out: set[tuple[int, int, int]]


@dataclass(eq=False, repr=False)
class Network(ABC, ShownAsCalled):
    """Nodes that send messages to their neighbors only.

    Parameters
    ----------
    topology : Topology or Schedule
        Who hears whom, in all rounds or in each.
    weights : CombinationMatrix, or sequence of them, optional
        Combination weights of a topology; Metropolis weights by default. A sequence is cycled
        through round by round, each matrix with its own topology.
    faults : Faults, optional
        Faults to simulate; none by default.
    staleness : int, default 0
        Where a neighbor sends nothing in a round, the last message that it has sent to a node
        counts again if it is at most so many rounds old. 0: its weight falls to the node. For
        programs that forget an old message, as ``DiffusionAveraging(method="atc")`` does.

    Raises
    ------
    ValueError
        If weights and topology have different numbers of nodes, or ``staleness`` is not 0 where a
        node's weights do not sum to one.
    """

    topology: Topology | Schedule
    weights: CombinationMatrix | Sequence[CombinationMatrix] | None = None
    faults: Faults | None = None
    staleness: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        """Check the arguments."""
        self.plan = Plan.make(self.topology, self.weights, self.faults, self.staleness)

    @abstractmethod
    def _crew(self, program: Program[State], state: State | None) -> AbstractContextManager[Any]:
        """Return the nodes, wherever they are hosted, with a state or the program's start.

        ``step(round_, last)`` begins a round and returns what all nodes reported after rounds that
        are done meanwhile; ``rest()`` waits for the others. ``state`` is that of all nodes, and
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
            With the state of all nodes. Of lost Ray actors there is none (its ``nodes`` are those
            that are left), what they observed is NaN, and ``alive`` is False.

        Raises
        ------
        ValueError
            If a method of the program returns something else than a `Program` does.
        """
        check_count("n_rounds", n_rounds)
        rows: list[dict[str, Array]] = []

        def note(reports: Iterable[dict[str, Array]]) -> None:
            for row in reports:
                rows.append(row)
                if on_report is not None:
                    on_report(len(rows), row)

        with self._crew(program, state) as crew:
            for round_ in range(1, n_rounds + 1):
                note(crew.step(round_, round_ == n_rounds))
                now: Any = None if callback is None and stop is None else crew.state
                if callback is not None:
                    callback(round_, now)
                if stop is not None and stop(now):
                    break
            note(crew.rest())
            return self._run(crew.ended(), rows)

    def _run(self, ends: Sequence[Ended], rows: Sequence[dict[str, Array]]) -> Run:
        n = self.plan.n_nodes
        there = np.zeros(n, dtype=bool)
        there[np.concatenate([end.nodes for end in ends])] = True
        traffic = sum((end.traffic for end in ends), sparse.csr_array((n, n)))
        unheard, unheard_by = tally(set().union(*(end.left_out for end in ends)))
        return Run(
            state=joined([end.state for end in ends]),
            observed={
                name: spread(np.concatenate([end.observed[name] for end in ends]), there)
                for name in ends[0].observed
            },
            rounds=len(rows),
            floats_sent=float(traffic.sum()),
            traffic=traffic,
            unheard=unheard,
            alive=self.plan.awake(max(len(rows), 1)) & there,
            curves=curves(rows, n),
            unheard_by=unheard_by,
        )


class Mailbox:
    """Messages of the last rounds, and the inboxes of the nodes that are hosted here.

    ``senders`` are the ids, ascending, of the nodes whose messages `inbox` gets in every round: at
    least the hosted nodes and all whom they ever hear.
    """

    def __init__(self, plan: Plan, nodes: NDArray[np.intp], senders: NDArray[np.intp]) -> None:
        self.plan = plan
        self.nodes = nodes
        self.senders = senders
        #: In which round whose message was left out, and by whom (see `tally`).
        self.left_out: set[tuple[int, int, int]] = set()
        self._traffic: Csr = sparse.csr_array((plan.n_nodes, plan.n_nodes))
        self._uncounted: tuple[Csr, NDArray[np.intp], int, int] | None = None
        self._own = np.searchsorted(senders, nodes)
        self._last: deque[tuple[tuple[Array, ...], NDArray[np.bool_]]] = deque(
            maxlen=plan.oldest + 1
        )  # messages, and which of them can be heard
        self._routes: dict[int, tuple[Csr, Csr]] = {}

    def inbox(
        self,
        round_: int,
        arrays: tuple[Array, ...],
        own: tuple[Array, ...] | None = None,
        arrived: NDArray[np.bool_] | None = None,
        screen: Callable[[Inbox], tuple[Inbox, list[LeftOut]]] = lambda inbox: (inbox, []),
    ) -> Inbox:
        """Return what the hosted nodes hear in a round.

        Parameters
        ----------
        round_ : int
            The round, from 1.
        arrays : tuple of ndarray of shape (s, ...)
            The messages of the round as they arrived, by sender.
        own : tuple of ndarray of shape (m, ...), optional
            The hosted nodes' own messages, if they differ from what arrived.
        arrived : ndarray of shape (s,), optional
            Whose message arrived, everybody's by default; the rows of the others are ignored.
        screen : callable, optional
            Returns the inbox without what the nodes leave out, and what that is.
        """
        finite = finite_rows(arrays)
        sent = np.ones(len(finite), dtype=bool) if arrived is None else arrived
        if self.plan.faults.any:  # a node that is asleep sends nothing
            sent = sent & self.plan.awake(round_)[self.senders]
        if not finite.all():
            arrays = tuple(cleared(array, ~finite) for array in arrays)
            broken = self.senders[~finite & sent].tolist()
            self.left_out |= {(round_, node, node) for node in broken}
        received = finite & sent
        # As many rounds are held as a message can be old; the newest stands first, at late = 0.
        self._last.appendleft((arrays, received))
        senders, stacked = self.senders, arrays
        if len(self._last) > 1:
            senders = np.tile(senders, len(self._last))
            stacked = tuple(
                np.concatenate([old[i] for old, _ in self._last]) for i in range(len(arrays))
            )
        where, sound = self._own, finite[self._own]
        if own is not None:  # a node uses its own message as it was sent
            sound = finite_rows(own)
            # Its own message has columns of its own, behind those of the others.
            where = len(senders) + np.arange(len(self.nodes))
            senders = np.concatenate([senders, self.nodes])
            stacked = tuple(
                np.concatenate([array, cleared(mine, ~sound)])
                for array, mine in zip(stacked, own, strict=True)
            )
        # Without faults the routes of a round are those of any other with its matrix: kept.
        faulty, schedule = self.plan.faults.any or self.plan.staleness, self.plan.schedule
        simple = schedule.repeats and not faulty and bool(received.all()) and own is None
        key, routes = schedule.turn(round_), self._routes if simple else {}
        if key not in routes:
            routes[key] = self._route(round_, len(senders), where, sound)
        weights, links = routes[key]
        inbox, rejected = screen(Inbox(round_, self.nodes, senders, stacked, weights, links, where))
        self.left_out |= {(round_, one.sender, one.receiver) for one in rejected}
        self._count(inbox.links, senders, sum(array[0].size for array in arrays))
        return inbox

    def _route(
        self, round_: int, n_columns: int, own: NDArray[np.intp], sound: NDArray[np.bool_]
    ) -> tuple[Csr, Csr]:
        """Return the round's weights and links over the stacked messages."""
        n, m, s = self.plan.n_nodes, len(self.nodes), len(self.senders)
        links = self.plan.sources(round_)
        receiver, sender = np.full(n, -1), np.full(n, -1)
        receiver[self.nodes], sender[self.senders] = np.arange(m), np.arange(s)
        rows, columns, late = receiver[links.receivers], sender[links.senders], links.late
        received = np.stack([received for _, received in self._last])
        # A delayed message can be from before the first round: it was never sent.
        good = np.flatnonzero((rows >= 0) & (late < len(received)))
        good = good[received[late[good], columns[good]]]
        good = good[np.unique(rows[good] * s + columns[good], return_index=True)[1]]
        places = rows[good], late[good] * s + columns[good]
        totals = self.plan.totals(round_)[self.nodes]
        return shared_weights(links.weights[good], places, (m, n_columns), own, sound, totals)

    @property
    def traffic(self) -> Csr:
        """Floats that hosted node k has heard from node j so far, shape (n_nodes, n_nodes)."""
        if self._uncounted is not None:
            links, senders, floats, times = self._uncounted
            rows, columns = sparse.coo_array(links).coords
            received = np.full(len(rows), float(floats * times))
            self._traffic = self._traffic + sparse.csr_array(
                (received, (self.nodes[rows], senders[columns])), shape=self._traffic.shape
            )
            self._uncounted = None
        return self._traffic

    def _count(self, links: Csr, senders: NDArray[np.intp], floats: int) -> None:
        last = self._uncounted
        # Sparse sums cost more than a round of small messages: equal rounds are counted first.
        if last is not None and last[0] is links and last[2] == floats:
            self._uncounted = (*last[:3], last[3] + 1)
        else:
            _ = self.traffic
            self._uncounted = (links, senders, floats, 1)


def spread(rows: Array, there: NDArray[np.bool_]) -> Array:
    """Return the rows of the nodes that are there, with NaN for the others."""
    if there.all():
        return rows
    full = np.full((len(there), *rows.shape[1:]), np.nan, np.result_type(rows, np.float32))
    full[there] = rows
    return full


def joined(states: Sequence[Any]) -> Any:
    """Return the state of all nodes of states that follow each other."""
    if len(states) == 1:
        return states[0]
    return type(states[0])(*(np.concatenate(leaves) for leaves in zip(*states, strict=True)))


def _entries(matrix: Csr, k: NDArray[np.intp], j: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return the entries at ``[k, j]`` of a sparse matrix, zeros where nothing is stored."""
    rows, columns = sparse.coo_array(matrix).coords
    stored = rows.astype(np.int64) * matrix.shape[1] + columns  # ascending: CSR, sorted indices
    wanted = k.astype(np.int64) * matrix.shape[1] + j
    at = np.minimum(np.searchsorted(stored, wanted), len(stored) - 1)
    entries: NDArray[np.float64] = np.where(stored[at] == wanted, matrix.data[at], 0.0)
    return entries
