"""What all transports have in common: who hears whom in a round, and the inbox that results."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from flwr_perdl.diffusion.combine import Array, Csr, Inbox
from flwr_perdl.diffusion.topology import CombinationMatrix, Topology, metropolis_weights
from flwr_perdl.network.faults import Faults

State = TypeVar("State", bound=tuple[Any, ...])


class Run(NamedTuple):
    """How a distributed algorithm ended.

    Attributes
    ----------
    state : NamedTuple of arrays, or None
        The program's state of all nodes, in order; None where nodes keep it to themselves.
    observed : dict of str to ndarray
        What the nodes showed at the end (`Program.observe`), in order, shape (n_nodes, ...).
    rounds : int
        Communication rounds.
    floats_sent : float
        Floats that reached a neighbour, in all, counted once per link.
    traffic : sparse array of shape (n_nodes, n_nodes)
        Floats that node k heard from node j.
    unheard : dict of int to int
        Node -> in how many rounds its message was left out for NaN or infinite values.
    alive : ndarray of shape (n_nodes,)
        Which nodes took part in the last round.
    """

    state: Any
    observed: dict[str, Array]
    rounds: int
    floats_sent: float
    traffic: Csr
    unheard: dict[int, int]
    alive: NDArray[np.bool_]


@dataclass(frozen=True)
class Plan:
    """Who hears whom with which weight, in every round: the same in every process.

    Parameters
    ----------
    topology : Topology
        The graph, where ``weights`` does not say.
    weights : CombinationMatrix, sequence of them, or None
        Combination weights; a sequence is cycled through, round by round, each with its own
        topology. Metropolis weights by default.
    faults : Faults, optional
        What goes wrong; nothing by default.
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
        """Return the plan of a network's arguments, checked."""
        if weights is None:
            weights = metropolis_weights(topology)
        matrices = (weights,) if isinstance(weights, CombinationMatrix) else tuple(weights)
        if not matrices:
            raise ValueError("weights must have at least one matrix, got an empty sequence.")
        for matrix in matrices:
            if matrix.topology.n_nodes != topology.n_nodes:
                raise ValueError(
                    f"weights must be for {topology.n_nodes} nodes, got {matrix.topology!r}."
                )
        return cls(matrices, faults or Faults())

    @property
    def n_nodes(self) -> int:
        """Number of nodes."""
        return self.matrices[0].topology.n_nodes

    def matrix(self, round_: int) -> CombinationMatrix:
        """Return the combination matrix of a round."""
        return self.matrices[(round_ - 1) % len(self.matrices)]

    def links(self, round_: int) -> Csr:
        """Return who would be heard in a round if every message were in order."""
        return self.faults.links(self.matrix(round_).topology, round_)

    def hearing(self, round_: int) -> Csr:
        """Return who may hear a message of a round, now or late: non-zero at ``[k, j]``."""
        rounds = range(round_, round_ + self.faults.max_delay + 1)
        several = {(at - 1) % len(self.matrices): self.matrix(at).topology for at in rounds}
        return sum(topology.adjacency for topology in several.values())

    def heard_by(self, nodes: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return whom these nodes may ever hear, themselves included, ascending."""
        heard = [matrix.topology.adjacency[nodes].indices for matrix in self.matrices]
        return np.unique(np.concatenate([nodes, *heard])).astype(np.intp)


class Mailbox:
    """Messages of the last rounds, and the inboxes of the nodes that are hosted here.

    Parameters
    ----------
    plan : Plan
        Who hears whom.
    nodes : ndarray of shape (m,)
        The hosted nodes.
    senders : ndarray of shape (s,)
        Ids, ascending, of those whose messages are handed in every round; the hosted nodes and
        all whom they ever hear are among them.
    """

    def __init__(self, plan: Plan, nodes: NDArray[np.intp], senders: NDArray[np.intp]) -> None:
        self.plan = plan
        self.nodes = nodes
        self.senders = senders
        self.unheard: dict[int, int] = {}
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
    ) -> Inbox:
        """Return what the hosted nodes hear in a round.

        Parameters
        ----------
        round_ : int
            The round, from 1.
        arrays : tuple of ndarray of shape (s, ...)
            The messages of the round as they arrived, by sender.
        own : tuple of ndarray of shape (m, ...), optional
            The hosted nodes' own messages where they differ from what arrived.
        arrived : ndarray of shape (s,), optional
            Whose message arrived at all; everybody's by default. What the arrays hold of the others
            is not looked at.
        """
        finite = finite_rows(arrays)
        sent = np.ones(len(finite), dtype=bool) if arrived is None else arrived
        if self.plan.faults.any:  # who sleeps sends nothing, neither now nor late
            sent = sent & self.plan.faults.awake(self.plan.n_nodes, round_)[self.senders]
        if not finite.all():
            arrays = tuple(_cleared(array, ~finite) for array in arrays)
            for node in self.senders[~finite & sent]:
                self.unheard[int(node)] = self.unheard.get(int(node), 0) + 1
        heard = finite & sent
        self._last.appendleft((arrays, heard))
        senders, stacked = self.senders, arrays
        if len(self._last) > 1:
            senders = np.tile(senders, len(self._last))
            stacked = tuple(
                np.concatenate([old[i] for old, _ in self._last]) for i in range(len(arrays))
            )
        where, sound = self._own, np.ones(len(self.nodes), dtype=bool)
        if own is not None:  # a node knows its own estimate, whatever became of the message
            sound = finite_rows(own)
            where = len(senders) + np.arange(len(self.nodes))
            senders = np.concatenate([senders, self.nodes])
            stacked = tuple(
                np.concatenate([array, _cleared(mine, ~sound)])
                for array, mine in zip(stacked, own, strict=True)
            )
        elif not finite.all():
            sound = finite[self._own]
        simple = not self.plan.faults.any and bool(heard.all()) and own is None
        key = (round_ - 1) % len(self.plan.matrices)
        if simple and key in self._routes:
            weights, links = self._routes[key]
        else:
            weights, links = self._route(round_, len(senders), where, sound)
            if simple:
                self._routes[key] = weights, links
        self._count(links, senders, sum(array[0].size for array in arrays))
        return Inbox(round_, self.nodes, senders, stacked, weights, links, where)

    def _route(
        self, round_: int, n_columns: int, where: NDArray[np.intp], sound: NDArray[np.bool_]
    ) -> tuple[Csr, Csr]:
        """Return the round's weights and links over the stacked messages."""
        n, m, s = self.plan.n_nodes, len(self.nodes), len(self.senders)
        full = self.plan.links(round_)
        k, j = sparse.coo_array(full).coords
        late = self.plan.faults.delays(full, round_)
        receiver, sender = np.full(n, -1), np.full(n, -1)
        receiver[self.nodes], sender[self.senders] = np.arange(m), np.arange(s)
        here = (receiver[k] >= 0) & (late < len(self._last))
        k, j, late = k[here], j[here], late[here]
        good = np.stack([heard for _, heard in self._last])[late, sender[j]]
        k, j, late = k[good], j[good], late[good]
        rows, columns = receiver[k], late * s + sender[j]
        shape = (m, n_columns)
        links = sparse.csr_array((np.ones(len(k)), (rows, columns)), shape=shape)
        values = entries(self.plan.matrix(round_).matrix, k, j)
        weights = sparse.csr_array((values, (rows, columns)), shape=shape)
        scale, rest = _shares(np.asarray(weights.sum(axis=1)).ravel(), sound)
        own = sparse.csr_array((rest, (np.arange(m), where)), shape=shape)
        return sparse.csr_array(sparse.diags_array(scale) @ weights + own), links

    @property
    def traffic(self) -> Csr:
        """Floats that hosted node k has heard from node j so far, shape (n_nodes, n_nodes)."""
        if self._uncounted is not None:
            links, senders, floats, times = self._uncounted
            rows, columns = sparse.coo_array(links).coords
            heard = np.full(len(rows), float(floats * times))
            self._traffic = self._traffic + sparse.csr_array(
                (heard, (self.nodes[rows], senders[columns])), shape=self._traffic.shape
            )
            self._uncounted = None
        return self._traffic

    def _count(self, links: Csr, senders: NDArray[np.intp], floats: int) -> None:
        last = self._uncounted
        if last is not None and last[0] is links and last[2] == floats:
            self._uncounted = (*last[:3], last[3] + 1)
        else:
            _ = self.traffic
            self._uncounted = (links, senders, floats, 1)


def finite_rows(arrays: tuple[Array, ...]) -> NDArray[np.bool_]:
    """Return which rows are finite in all arrays, shape (n_rows,)."""
    finite = np.ones(len(arrays[0]), dtype=bool)
    for array in arrays:
        flat = array.reshape(len(array), -1)
        with np.errstate(over="ignore", invalid="ignore"):
            sums = flat.sum(axis=1)  # finite only if all terms are
        odd = ~np.isfinite(sums)
        if odd.any():
            odd[odd] = ~np.isfinite(flat[odd]).all(axis=1)
        finite &= ~odd
    return finite


class Letter(NamedTuple):
    """One neighbour's message to one node.

    Attributes
    ----------
    sender : int
        The neighbour.
    late : int
        How many rounds ago it was sent.
    weight : float
        The receiver's combination weight for the sender.
    arrays : tuple of ndarray of shape (1, ...)
        The message.
    """

    sender: int
    late: int
    weight: float
    arrays: tuple[Array, ...]


def inbox_of(
    node: int, round_: int, own: tuple[Array, ...], letters: Sequence[Letter]
) -> tuple[Inbox, list[Letter]]:
    """Return the inbox of a node that is alone with its letters, by a `Mailbox`'s rules.

    Parameters
    ----------
    node : int
        The receiver.
    round_ : int
        The round, from 1.
    own : tuple of ndarray of shape (1, ...)
        Its own message.
    letters : sequence of Letter
        What it received; what has not the form of its own message is left out.

    Returns
    -------
    inbox : Inbox
        What the node hears.
    left_out : list of Letter
        Letters of another form, or with NaN or infinite values.
    """
    form = [(array.shape, array.dtype) for array in own]
    good: list[Letter] = []
    left_out: list[Letter] = []
    for letter in letters:
        alike = [(array.shape, array.dtype) for array in letter.arrays] == form
        (good if alike and finite_rows(letter.arrays).all() else left_out).append(letter)
    sound = finite_rows(own)
    mine = Letter(node, 0, 0.0, tuple(_cleared(array, ~sound) for array in own))
    stack = sorted([*good, mine], key=lambda letter: (letter.late, letter.sender))
    others = np.array([i for i, letter in enumerate(stack) if letter is not mine], dtype=np.intp)
    where = np.delete(np.arange(len(stack)), others)
    weights = np.array([letter.weight for letter in stack])
    scale, rest = _shares(weights.sum(keepdims=True), sound)
    weights *= scale
    weights[where] = rest
    shape = (1, len(stack))
    inbox = Inbox(
        round_,
        np.array([node]),
        np.array([letter.sender for letter in stack]),
        tuple(map(np.concatenate, zip(*(letter.arrays for letter in stack), strict=True))),
        sparse.csr_array((weights, np.arange(len(stack)), [0, len(stack)]), shape=shape),
        sparse.csr_array((np.ones(len(others)), others, [0, len(others)]), shape=shape),
        where,
    )
    return inbox, left_out


def _shares(
    heard: NDArray[np.float64], sound: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return by what to scale the weights of those heard, and the weight of the node itself.

    What was not heard falls to the node itself; a node whose own estimate is broken takes its
    neighbours' alone.

    Parameters
    ----------
    heard : ndarray of shape (m,)
        Sum of the weights of those whom a node has heard.
    sound : ndarray of shape (m,)
        Whether its own estimate is finite.
    """
    lost = ~sound & (heard > 0)
    scale: NDArray[np.float64] = np.where(lost, 1.0 / np.where(lost, heard, 1.0), 1.0)
    return scale, np.where(lost, 0.0, 1.0 - heard)


def spread(rows: Array, there: NDArray[np.bool_]) -> Array:
    """Return the rows of the nodes that are there, with NaN for the others."""
    if there.all():
        return rows
    full = np.full((len(there), *rows.shape[1:]), np.nan, np.result_type(rows, np.float32))
    full[there] = rows
    return full


def entries(matrix: Csr, k: NDArray[np.intp], j: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return the entries at ``[k, j]`` of a sparse matrix, zeros where nothing is stored."""
    rows, columns = sparse.coo_array(matrix).coords
    stored = rows.astype(np.int64) * matrix.shape[1] + columns  # ascending: CSR, sorted indices
    wanted = k.astype(np.int64) * matrix.shape[1] + j
    at = np.minimum(np.searchsorted(stored, wanted), len(stored) - 1)
    entries: NDArray[np.float64] = np.where(stored[at] == wanted, matrix.data[at], 0.0)
    return entries


def _cleared(array: Array, rows: NDArray[np.bool_]) -> Array:
    if not rows.any():
        return array
    cleared = array.copy()
    cleared[rows] = 0.0
    return cleared
