"""What all transports share: who hears whom in a round, and the inbox that results."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from flwr_perdl.core.checks import check_kind, check_list
from flwr_perdl.core.repr import ShownAsCalled, short_repr
from flwr_perdl.diffusion.combine import Array, Csr, Inbox
from flwr_perdl.diffusion.topology import (
    CombinationMatrix,
    Topology,
    check_topology,
    metropolis_weights,
)
from flwr_perdl.network.faults import Faults
from flwr_perdl.network.messages import cleared, finite_rows, shared_weights

State = TypeVar("State", bound=tuple[Any, ...])


class Run(NamedTuple):
    """How a distributed algorithm ended.

    Attributes
    ----------
    state : NamedTuple of arrays, or None
        The program's state of all nodes, in order; None if the nodes do not show it.
    observed : dict of str to ndarray
        What the nodes showed at the end (`Program.observe`), in order, shape (n_nodes, ...).
    rounds : int
        Communication rounds.
    floats_sent : float
        Floats that reached a neighbor, in all, counted once per link.
    traffic : sparse array of shape (n_nodes, n_nodes)
        Floats that node k heard from node j.
    unheard : dict of int to int
        Node -> in how many rounds its message was left out: for NaN or infinite values, or beyond
        a receiver's limit (`Program`).
    alive : ndarray of shape (n_nodes,)
        Which nodes took part in the last round.
    curves : dict of str to ndarray of shape (rounds, n_nodes)
        What the nodes reported after every round (``report`` of a `Program`); NaN where a node has
        reported nothing.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.diffusion import Averaging, Topology
    >>> from flwr_perdl.network import InMemoryNetwork
    >>> run = InMemoryNetwork(Topology.ring(4)).run(Averaging(np.arange(4.0)[:, None]), 30)
    >>> run.rounds, run.floats_sent
    (30, 240.0)
    """

    state: Any
    observed: dict[str, Array]
    rounds: int
    floats_sent: float
    traffic: Csr
    unheard: dict[int, int]
    alive: NDArray[np.bool_]
    curves: dict[str, Array]

    def __repr__(self) -> str:
        """Return the fields in one line; what is large is only described."""
        return short_repr(self)


class Links(NamedTuple):
    """The links on which something may be heard in a round, an entry each.

    Attributes
    ----------
    receivers, senders : ndarray of shape (n_links,)
        Ids, ascending by receiver, then by sender.
    late : ndarray of shape (n_links,)
        How many rounds ago the message that arrives now was sent.
    weights : ndarray of shape (n_links,)
        The receivers' combination weights.
    """

    receivers: NDArray[np.intp]
    senders: NDArray[np.intp]
    late: NDArray[np.intp]
    weights: NDArray[np.float64]


@dataclass(frozen=True)
class Plan:
    """Who hears whom with which weight, in every round: the same in every process.

    Attributes
    ----------
    matrices : tuple of CombinationMatrix
        One per round, cycled through.
    faults : Faults
        Faults to simulate.
    """

    matrices: tuple[CombinationMatrix, ...]
    faults: Faults

    @classmethod
    def make(
        cls,
        topology: Topology,
        weights: CombinationMatrix | Sequence[CombinationMatrix] | None,
        faults: Faults | None,
    ) -> Plan:
        """Return the plan of the arguments of `Network`, checked."""
        check_topology(topology)
        if weights is None:
            weights = metropolis_weights(topology)
        matrices = (
            (weights,)
            if isinstance(weights, CombinationMatrix)
            else tuple(check_list("weights", weights))
        )
        if not matrices:
            raise ValueError("weights must have at least one matrix, got an empty sequence.")
        for matrix in matrices:
            check_kind("weights", matrix, CombinationMatrix, "CombinationMatrix")
            if matrix.topology.n_nodes != topology.n_nodes:
                raise ValueError(
                    f"weights must be for {topology.n_nodes} nodes, got {matrix.topology!r}."
                )
        if faults is not None:
            check_kind("faults", faults, Faults, "Faults")
        return cls(matrices, faults or Faults())

    @property
    def n_nodes(self) -> int:
        """Number of nodes."""
        return self.matrices[0].topology.n_nodes

    def matrix(self, round_: int) -> CombinationMatrix:
        """Return the combination matrix of a round."""
        return self.matrices[(round_ - 1) % len(self.matrices)]

    def links(self, round_: int) -> Links:
        """Return who is heard in a round if every message counts."""
        matrix = self.matrix(round_)
        up = self.faults.links(matrix.topology, round_)
        k, j = sparse.coo_array(up).coords
        return Links(k, j, self.faults.delays(up, round_), _entries(matrix.matrix, k, j))

    def hearing(self, round_: int) -> Csr:
        """Return who may hear a message of a round, now or late: non-zero at ``[k, j]``."""
        rounds = range(round_, round_ + self.faults.max_delay + 1)
        several = {(at - 1) % len(self.matrices): self.matrix(at).topology for at in rounds}
        return sum(topology.adjacency for topology in several.values())

    def senders_to(self, nodes: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return whom these nodes may ever hear, themselves included, ascending."""
        senders = [matrix.topology.adjacency[nodes].indices for matrix in self.matrices]
        return np.unique(np.concatenate([nodes, *senders])).astype(np.intp)


class Network(ShownAsCalled):
    """Nodes that send messages to their neighbors only.

    Parameters
    ----------
    topology : Topology
        Who hears whom.
    weights : CombinationMatrix, or sequence of them, optional
        Combination weights; Metropolis weights by default. A sequence is cycled through round by
        round, each matrix with its own topology: a network that changes in time.
    faults : Faults, optional
        Faults to simulate; none by default.

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


class Mailbox:
    """Messages of the last rounds, and the inboxes of the nodes that are hosted here.

    Parameters
    ----------
    plan : Plan
        Who hears whom.
    nodes : ndarray of shape (m,)
        The hosted nodes.
    senders : ndarray of shape (s,)
        Ids, ascending, of the nodes whose messages `inbox` gets in every round: at least the hosted
        nodes and all whom they ever hear.
    """

    def __init__(self, plan: Plan, nodes: NDArray[np.intp], senders: NDArray[np.intp]) -> None:
        self.plan = plan
        self.nodes = nodes
        self.senders = senders
        #: In which round whose message was left out.
        self.left_out: set[tuple[int, int]] = set()
        self._traffic: Csr = sparse.csr_array((plan.n_nodes, plan.n_nodes))
        self._uncounted: tuple[Csr, NDArray[np.intp], int, int] | None = None
        self._own = np.searchsorted(senders, nodes)
        self._last: deque[tuple[tuple[Array, ...], NDArray[np.bool_]]] = deque(
            maxlen=plan.faults.max_delay + 1
        )  # messages, and which of them can be heard
        self._routes: dict[int, tuple[Csr, Csr]] = {}

    def inbox(
        self,
        round_: int,
        arrays: tuple[Array, ...],
        own: tuple[Array, ...] | None = None,
        arrived: NDArray[np.bool_] | None = None,
        screen: Callable[[Inbox], tuple[Inbox, list[int]]] = lambda inbox: (inbox, []),
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
            Whose message arrived; by default everybody's. The arrays' rows of the others are
            ignored.
        screen : callable, optional
            Returns the inbox without what the nodes leave out, and who has sent that.
        """
        finite = finite_rows(arrays)
        sent = np.ones(len(finite), dtype=bool) if arrived is None else arrived
        if self.plan.faults.any:  # a node that is asleep sends nothing
            sent = sent & self.plan.faults.awake(self.plan.n_nodes, round_)[self.senders]
        if not finite.all():
            arrays = tuple(cleared(array, ~finite) for array in arrays)
            self.left_out |= {(round_, int(node)) for node in self.senders[~finite & sent]}
        received = finite & sent
        # As many rounds are held as a message can be late; the newest stands first, at late = 0.
        self._last.appendleft((arrays, received))
        senders, stacked = self.senders, arrays
        if len(self._last) > 1:
            senders = np.tile(senders, len(self._last))
            stacked = tuple(
                np.concatenate([old[i] for old, _ in self._last]) for i in range(len(arrays))
            )
        where, sound = self._own, np.ones(len(self.nodes), dtype=bool)
        if own is not None:  # a node uses its own message as it was sent
            sound = finite_rows(own)
            # Its own message has columns of its own, behind those of the others.
            where = len(senders) + np.arange(len(self.nodes))
            senders = np.concatenate([senders, self.nodes])
            stacked = tuple(
                np.concatenate([array, cleared(mine, ~sound)])
                for array, mine in zip(stacked, own, strict=True)
            )
        elif not finite.all():
            sound = finite[self._own]
        # Without faults the routes of a round are those of any other with its matrix: kept.
        simple = not self.plan.faults.any and bool(received.all()) and own is None
        key = (round_ - 1) % len(self.plan.matrices)
        if simple and key in self._routes:
            weights, links = self._routes[key]
        else:
            weights, links = self._route(round_, len(senders), where, sound)
            if simple:
                self._routes[key] = weights, links
        inbox, left_out = screen(Inbox(round_, self.nodes, senders, stacked, weights, links, where))
        self.left_out |= {(round_, node) for node in left_out}
        self._count(inbox.links, senders, sum(array[0].size for array in arrays))
        return inbox

    def _route(
        self, round_: int, n_columns: int, own: NDArray[np.intp], sound: NDArray[np.bool_]
    ) -> tuple[Csr, Csr]:
        """Return the round's weights and links over the stacked messages."""
        n, m, s = self.plan.n_nodes, len(self.nodes), len(self.senders)
        links = self.plan.links(round_)
        receiver, sender = np.full(n, -1), np.full(n, -1)
        receiver[self.nodes], sender[self.senders] = np.arange(m), np.arange(s)
        rows, columns, late = receiver[links.receivers], sender[links.senders], links.late
        received = np.stack([received for _, received in self._last])
        # A delayed message can be from before the first round: it was never sent.
        good = np.flatnonzero((rows >= 0) & (late < len(received)))
        good = good[received[late[good], columns[good]]]
        places = rows[good], late[good] * s + columns[good]
        return shared_weights(links.weights[good], places, (m, n_columns), own, sound)

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


def unheard_of(left_out: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Return in how many rounds each node's message was left out, of (round, node)."""
    return dict(sorted(Counter(node for _, node in left_out).items()))


def spread(rows: Array, there: NDArray[np.bool_]) -> Array:
    """Return the rows of the nodes that are there, with NaN for the others."""
    if there.all():
        return rows
    full = np.full((len(there), *rows.shape[1:]), np.nan, np.result_type(rows, np.float32))
    full[there] = rows
    return full


def _entries(matrix: Csr, k: NDArray[np.intp], j: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return the entries at ``[k, j]`` of a sparse matrix, zeros where nothing is stored."""
    rows, columns = sparse.coo_array(matrix).coords
    stored = rows.astype(np.int64) * matrix.shape[1] + columns  # ascending: CSR, sorted indices
    wanted = k.astype(np.int64) * matrix.shape[1] + j
    at = np.minimum(np.searchsorted(stored, wanted), len(stored) - 1)
    entries: NDArray[np.float64] = np.where(stored[at] == wanted, matrix.data[at], 0.0)
    return entries
