"""Networks that change from round to round, and simulated faults.

=============================================  ====================================================
network                                        here
=============================================  ====================================================
random pairs (gossip; Boyd et al. 2006)        `Schedule.random_pairs`
one-peer exponential graph (Assran et al.      `Schedule.one_peer_exponential`
2019; Ying et al. 2021)
nodes that join or leave for good              `Schedule.members`
edges that fail with a probability             ``Faults(drop=...)``
any other                                      `Schedule`, of a function of the round
=============================================  ====================================================

`LinkPlan` says which messages arrive in a round, and with which weights: the same in
memory and on a relay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.csgraph import connected_components

from flwr_perdl.core.checks import (
    check_count,
    check_flag,
    check_function,
    check_kind,
    check_real,
)
from flwr_perdl.core.files import LAST_ROUND
from flwr_perdl.network.topology import (
    MOST_NODES,
    CombinationMatrix,
    Csr,
    Topology,
    check_topology,
    kept_totals,
    metropolis_weights,
    weights_of,
)
from flwr_perdl.random import PAIRS, spawn

#: How many rounds' matrices are kept, where they do not repeat.
CACHED_ROUNDS = 64


@dataclass(frozen=True, eq=False)
class Schedule:
    """A network that changes from round to round, usable in place of a `Topology`.

    Parameters
    ----------
    n_nodes : int
        Number of nodes.
    at : callable
        ``round -> edges``, rounds from 1: undirected pairs of nodes, a `Topology`, or a
        `CombinationMatrix`. Edges have Metropolis weights, a directed topology `push_weights`. It
        must return the same for the same round, in every process.
    window : int, default 1
        Rounds whose links together connect the network.
    repeats : bool, default False
        Whether the network of round ``t + window`` is that of round t.
    present : callable, optional
        ``round -> ndarray of bool (n_nodes,)``: which nodes take part; all by default. The edges of
        those that do not are left out; where ``at`` returns a `CombinationMatrix`, the weight of an
        absent neighbor falls to the node itself.

    Raises
    ------
    ValueError
        If an argument breaks its rule; of ``at``, as soon as the round is needed.

    Examples
    --------
    >>> from flwr_perdl.network import Schedule
    >>> turns = Schedule(4, lambda round_: [(round_ % 4, (round_ + 1) % 4)], window=4)
    >>> turns.matrix(1).topology.neighbours(1).tolist()
    [2]
    """

    n_nodes: int
    at: Callable[[int], Any]
    window: int = 1
    repeats: bool = False
    present: Callable[[int], NDArray[np.bool_]] | None = None
    name: str = field(default="", kw_only=True)
    _made: dict[int, CombinationMatrix] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the arguments."""
        check_count("n_nodes", self.n_nodes, 1, MOST_NODES)
        check_count("window", self.window, 1)
        check_flag("repeats", self.repeats)
        check_kind("name", self.name, str, "a text")
        check_function("present", self.present)
        if not callable(self.at):
            raise TypeError(f"at must be a function of the round, got {self.at!r}.")

    @classmethod
    def of(cls, *matrices: CombinationMatrix) -> Schedule:
        """Return the network that cycles through these weights, one matrix per round.

        Parameters
        ----------
        matrices : sequence of CombinationMatrix

        Returns
        -------
        Schedule
        """
        n_nodes = matrices[0].topology.n_nodes
        return cls(n_nodes, lambda round_: matrices[round_ - 1], len(matrices), repeats=True)

    @classmethod
    def random_pairs(cls, n_nodes: int, pairings: int = 1, *, seed: int = 0) -> Schedule:
        """Return gossip: in every round all nodes are paired at random; one may be left over.

        The pairs of a round depend on the seed and the round only.

        Parameters
        ----------
        n_nodes : int
        pairings : int, default 1
            Independent pairings per round: a node has at most that many neighbors.
        seed : int, default 0

        Returns
        -------
        Schedule

        Examples
        --------
        >>> from flwr_perdl.network import Schedule
        >>> Schedule.random_pairs(4, seed=1).matrix(7).topology.degrees
        array([1, 1, 1, 1])
        """
        check_count("n_nodes", n_nodes, 2, MOST_NODES)
        check_count("pairings", pairings, 1, n_nodes)
        check_count("seed", seed)

        def pairs(round_: int) -> list[list[int]]:
            rng = spawn(seed, PAIRS, round_)
            orders = [rng.permutation(n_nodes)[: n_nodes // 2 * 2] for _ in range(pairings)]
            drawn: list[list[int]] = np.concatenate(orders).reshape(-1, 2).tolist()
            return drawn

        window = -(-4 * (n_nodes - 1).bit_length() // pairings)  # nearly always connects them
        return cls(n_nodes, pairs, window, name=f"random_pairs({n_nodes}, {pairings}, seed={seed})")

    @classmethod
    def one_peer_exponential(cls, n_nodes: int) -> Schedule:
        """Return directed graphs: a node receives from the one 1, 2, 4, … places on, in turn.

        Each has weight 1/2. If the number of nodes is a power of two, the mean of all is found in
        ``log2(n_nodes)`` rounds.

        Parameters
        ----------
        n_nodes : int

        Returns
        -------
        Schedule
        """
        check_count("n_nodes", n_nodes, 2, MOST_NODES)
        window = (n_nodes - 1).bit_length()

        def peers(round_: int) -> Topology:
            links = [(k, (k + 2 ** (round_ - 1)) % n_nodes) for k in range(n_nodes)]
            return Topology.from_edges(n_nodes, links, directed=True)

        return cls(n_nodes, peers, window, repeats=True, name=f"one_peer_exponential({n_nodes})")

    @classmethod
    def members(
        cls,
        topology: Topology,
        *,
        joins: Mapping[int, int] | None = None,
        leaves: Mapping[int, int] | None = None,
    ) -> Schedule:
        """Return a topology that nodes join or leave for good, with Metropolis weights.

        Parameters
        ----------
        topology : Topology
            Which nodes are neighbors, undirected, if all are present.
        joins, leaves : mapping of int to int
            Node -> the first round in which it takes part, and the first in which it does not.

        Returns
        -------
        Schedule

        Examples
        --------
        >>> from flwr_perdl.network import Schedule, Topology
        >>> Schedule.members(Topology.ring(4), joins={1: 5}).matrix(4).topology.n_edges
        2
        """
        check_topology(topology)
        n_nodes = topology.n_nodes
        first, last = np.zeros(n_nodes), np.full(n_nodes, np.inf)
        for name, given, rounds in (("joins", joins, first), ("leaves", leaves, last)):
            for node, round_ in node_rounds(
                name, {} if given is None else given, n_nodes - 1
            ).items():
                rounds[node] = round_

        def present(round_: int) -> NDArray[np.bool_]:
            there: NDArray[np.bool_] = (first <= round_) & (round_ < last)
            return there

        name = f"members({topology!r}, joins={joins or {}}, leaves={leaves or {}})"
        return cls(n_nodes, lambda round_: topology, present=present, name=name)

    def turn(self, round_: int) -> int:
        """Return the first round whose network is that of a round."""
        repeats = self.repeats and self.present is None
        return (round_ - 1) % self.window + 1 if repeats else round_

    def matrix(self, round_: int) -> CombinationMatrix:
        """Return the combination matrix of a round.

        Parameters
        ----------
        round_ : int
            From 1.

        Returns
        -------
        CombinationMatrix
        """
        turn = self.turn(round_)
        if turn not in self._made:
            if len(self._made) >= max(self.window, CACHED_ROUNDS):
                self._made.clear()
            self._made[turn] = self._weigh(turn)
        return self._made[turn]

    def _weigh(self, round_: int) -> CombinationMatrix:
        """Return the weights of what ``at`` returns, checked."""
        own = self.at(round_)
        if not isinstance(own, CombinationMatrix):
            if not isinstance(own, Topology):
                own = Topology.from_edges(self.n_nodes, check_kind("at", own, Iterable, "edges"))
            if self.present is not None:  # who is absent is no neighbor
                there = sparse.diags_array(self.awake(round_).astype(float))
                own = Topology(there @ own.adjacency @ there)
            own = weights_of(own)
        if own.topology.n_nodes != self.n_nodes:
            raise ValueError(f"at must return {self.n_nodes} nodes, got {own!r} in round {round_}.")
        return own

    def awake(self, round_: int) -> NDArray[np.bool_]:
        """Return which nodes take part in a round, shape (n_nodes,)."""
        return np.ones(self.n_nodes, dtype=bool) if self.present is None else self.present(round_)

    @property
    def matrices(self) -> tuple[CombinationMatrix, ...]:
        """The combination matrices of the first window."""
        return tuple(map(self.matrix, range(1, self.window + 1)))

    @cached_property
    def topology(self) -> Topology:
        """All links of the first window."""
        return Topology(sum(matrix.topology.adjacency for matrix in self.matrices))

    def check_connected(self, n_rounds: int) -> None:
        """Raise a ValueError unless some window of that many rounds connects the present nodes.

        A network without any link is allowed: local training, as a baseline.

        Parameters
        ----------
        n_rounds : int
        """
        linked = False
        once = self.repeats and self.present is None
        for first in range(1, 2 if once else max(n_rounds, 1) + 1, self.window):
            rounds = range(first, first + self.window)
            there = np.any([self.awake(round_) for round_ in rounds], axis=0)
            links = sum(self.matrix(round_).matrix for round_ in rounds)[there][:, there]
            count, _ = connected_components(links, connection="strong")
            if count <= 1:
                return
            linked = linked or links.nnz > len(links.diagonal())
        if linked:
            raise ValueError(
                f"network must be connected in some window of {self.window} round(s), got {self!r} "
                f"in {count} separate parts."
            )

    def check_linked(self, n_rounds: int) -> None:
        """Raise a ValueError unless every node has a neighbor in some of so many rounds."""
        last = self.window if self.repeats else max(n_rounds, self.window)
        heard = sum(self.matrix(round_).topology.degrees for round_ in range(1, last + 1))
        if not np.all(heard):
            node = int(np.argmin(heard))
            raise ValueError(
                f"network must give every node a neighbor in some round with groups, got {self!r} "
                f"in which node {node} has no neighbor."
            )

    def __repr__(self) -> str:
        """Return what was called."""
        if self.window == 1 and self.repeats:
            return repr(self.matrix(1))
        return f"Schedule.{self.name}" if self.name else f"Schedule({self.n_nodes} nodes)"


def schedule_of(network: Any) -> Schedule:
    """Return weights, a schedule, or the plan of a network, as a schedule."""
    if isinstance(network, CombinationMatrix):
        return Schedule.of(network)
    found: Schedule = network if isinstance(network, Schedule) else network.plan.schedule
    return found


def links_of(network: Any) -> Topology:
    """Return the links of weights or a network, in all rounds of its first window."""
    links: Topology | Schedule = network.topology
    return links.topology if isinstance(links, Schedule) else links


def rounds_to_all(network: Any) -> int:
    """Return the rounds that a value of any node takes to reach every other node.

    If links change from round to round, the links of all rounds count together. Without any link
    nodes only train locally: a baseline, which takes no rounds. A network in several parts that do
    not hear each other is rejected.
    """
    schedule = schedule_of(network)
    if not schedule.topology.n_edges:
        return 0
    weights = sum(matrix.matrix for matrix in schedule.matrices)
    count, _ = connected_components(weights, connection="strong")
    if count > 1:
        raise ValueError(
            f"network must be connected, got {network.topology!r} in {count} separate parts."
        )
    return schedule.window * schedule.topology.diameter


def node_rounds(name: str, value: Any, most: int | None = None) -> dict[int, int]:
    """Return a mapping of nodes, up to node ``most``, to rounds: checked, in order of the nodes."""
    given = check_kind(name, value, Mapping, "a mapping of nodes to rounds")
    rounds = {
        check_count(f"{name}: node", node, 0, most): check_count(f"{name}: round", at, 1)
        for node, at in given.items()
    }
    return dict(sorted(rounds.items()))


@dataclass(frozen=True)
class Faults:
    """Simulated faults: failing links. Nodes that are absent for some rounds: see `Schedule`.

    Parameters
    ----------
    drop : float, default 0.0
        Probability that a link is down in a round, in both directions at once.
    seed : int, default 0
        Seed of all draws. A draw depends on the round and the link only.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.network import Averaging, Topology
    >>> from flwr_perdl.network import Faults, InMemoryNetwork
    >>> network = InMemoryNetwork(Topology.ring(4), faults=Faults(drop=0.5))
    >>> run = network.run(Averaging(np.arange(4.0)[:, None]), 30)
    >>> run.floats_sent < 240, run.state.estimate.ravel().round(2)
    (True, array([1.5, 1.5, 1.5, 1.5]))
    """

    drop: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the parameters; equal ones get one form, so that their texts are equal."""
        object.__setattr__(self, "drop", check_real("drop", self.drop, 0.0, 1.0))
        object.__setattr__(self, "seed", check_count("seed", self.seed))

    def links(self, topology: Topology, round_: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return receivers and senders of the links that are not down in a round."""
        k, j = sparse.coo_array(topology.adjacency).coords
        if not self.drop:
            return k, j
        up = _per_link(k, j, spawn(self.seed, _DROP, round_)) >= self.drop
        return k[up], j[up]


#: Faults have a stream of random numbers of their own, apart from those of the nodes.
_DROP = 2**31


def _per_link(
    k: NDArray[np.intp], j: NDArray[np.intp], rng: np.random.Generator
) -> NDArray[np.float64]:
    """Draw one uniform number per undirected link, the same for both directions."""
    low, high = np.minimum(k, j).astype(np.int64), np.maximum(k, j).astype(np.int64)
    _, link = np.unique(low * (2**31) + high, return_inverse=True)
    draws: NDArray[np.float64] = rng.random(int(link.max(initial=-1)) + 1)
    return draws[link]


class Links(NamedTuple):
    """The links on which something may be heard in a round, by receiver, then by sender.

    ``late`` says how many rounds ago the message was sent; the weights are the receivers'.
    """

    receivers: NDArray[np.intp]
    senders: NDArray[np.intp]
    late: NDArray[np.intp]
    weights: NDArray[np.float64]

    def first(self, there: NDArray[np.bool_]) -> Links:
        """Return, of each link, the first of its messages that is there: the one that counts."""
        kept = self._at(there)
        pairs = np.stack([kept.receivers, kept.senders])  # those of a link stand side by side
        new = np.ones(pairs.shape[1], dtype=bool)
        new[1:] = (pairs[:, 1:] != pairs[:, :-1]).any(axis=0)
        return kept._at(new)

    def _at(self, which: NDArray[np.bool_]) -> Links:
        return Links._make(array[which] for array in self)


@dataclass(frozen=True)
class LinkPlan:
    """Links and weights of every round: the same in every process."""

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
        weights: CombinationMatrix | None,
        faults: Faults | None = None,
        staleness: int = 0,
    ) -> LinkPlan:
        """Return the plan of the arguments of `InMemoryNetwork`, checked."""
        faults = Faults() if faults is None else check_kind("faults", faults, Faults, "Faults")
        if isinstance(topology, Schedule):
            if weights is not None:
                raise ValueError(f"weights must be left out with a Schedule, got {weights!r}.")
            return cls(topology, faults, staleness)
        check_topology(topology)
        if weights is None:
            weights = metropolis_weights(topology)
        check_kind("weights", weights, CombinationMatrix, "a CombinationMatrix")
        if weights.topology.n_nodes != topology.n_nodes:
            raise ValueError(f"weights must be for {topology.n_nodes} nodes, got {weights!r}.")
        return cls(Schedule.of(weights), faults, staleness)

    @property
    def n_nodes(self) -> int:
        """Number of nodes."""
        return self.schedule.n_nodes

    def awake(self, round_: int) -> NDArray[np.bool_]:
        """Return which nodes take part in a round, shape (n_nodes,)."""
        return self.schedule.awake(round_)

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
        matrix, awake = self.schedule.matrix(round_), self.awake(round_)
        k, j = self.faults.links(matrix.topology, round_)
        up = awake[k] & awake[j]
        k, j = k[up], j[up]
        return Links(k, j, np.zeros_like(k), _entries(matrix.matrix, k, j))

    def sources(self, round_: int) -> Links:
        """Return which messages may count in a round: for each link the first that was sent.

        First comes that of the round, then the last ones, up to ``staleness`` rounds old. A node
        that was absent receives what was sent to it meanwhile; what a link that was down has lost
        stays lost.
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
            receivers, senders = self.faults.links(before, round_ - age)
            sent = np.isin(k * self.n_nodes + j, receivers * self.n_nodes + senders)
            ages = np.full(int(sent.sum()), age)
            candidates.append(Links(k[sent], j[sent], ages, weights[sent]))
        k, j, late, weights = map(np.concatenate, zip(*candidates, strict=True))
        order = np.lexsort((j, k))  # stable
        return Links(k[order], j[order], late[order], weights[order])


def _entries(matrix: Csr, k: NDArray[np.intp], j: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return the entries at ``[k, j]`` of a sparse matrix, zeros where nothing is stored."""
    rows, columns = sparse.coo_array(matrix).coords
    stored = rows.astype(np.int64) * matrix.shape[1] + columns  # ascending: CSR, sorted indices
    wanted = k.astype(np.int64) * matrix.shape[1] + j
    at = np.minimum(np.searchsorted(stored, wanted), len(stored) - 1)
    entries: NDArray[np.float64] = np.where(stored[at] == wanted, matrix.data[at], 0.0)
    return entries
