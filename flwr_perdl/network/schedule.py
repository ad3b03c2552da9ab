"""Networks that change from round to round: who hears whom, as a function of the round.

=============================================  ====================================================
network                                        here
=============================================  ====================================================
random pairs (gossip; Boyd et al. 2006)        `Schedule.random_pairs`
one-peer exponential graph (Assran et al.      `Schedule.one_peer_exponential`
2019; Ying et al. 2021)
nodes that join or leave for good              `Schedule.members`
edges that fail with a probability             ``flwr_perdl.network.Faults(drop=...)``
any other                                      `Schedule`, of a function of the round
=============================================  ====================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.csgraph import connected_components

from flwr_perdl.core.checks import check_count, check_flag, check_function, check_kind
from flwr_perdl.network.topology import (
    MOST_NODES,
    CombinationMatrix,
    Topology,
    check_topology,
    weights_of,
)
from flwr_perdl.random import PAIRS, spawn

#: How many rounds' matrices are kept, where they do not repeat.
KEPT = 64


@dataclass(frozen=True, eq=False)
class Schedule:
    """A network that changes from round to round; it stands wherever a `Topology` does.

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
        ``round -> ndarray of bool (n_nodes,)``: which nodes take part; all by default.

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
        """Return the network that cycles through these weights, one matrix per round."""
        n_nodes = matrices[0].topology.n_nodes
        return cls(n_nodes, lambda round_: matrices[round_ - 1], len(matrices), repeats=True)

    @classmethod
    def random_pairs(cls, n_nodes: int, *, seed: int = 0) -> Schedule:
        """Return gossip: in every round all nodes are paired at random, one may be left over.

        The pairs of a round depend on the seed and the round only.

        Examples
        --------
        >>> from flwr_perdl.network import Schedule
        >>> Schedule.random_pairs(4, seed=1).matrix(7).topology.degrees
        array([1, 1, 1, 1])
        """
        check_count("n_nodes", n_nodes, 2, MOST_NODES)
        check_count("seed", seed)

        def pairs(round_: int) -> list[list[int]]:
            order = spawn(seed, PAIRS, round_).permutation(n_nodes)
            drawn: list[list[int]] = order[: n_nodes // 2 * 2].reshape(-1, 2).tolist()
            return drawn

        window = 4 * (n_nodes - 1).bit_length()  # nearly always enough to connect them
        return cls(n_nodes, pairs, window, name=f"random_pairs({n_nodes}, seed={seed})")

    @classmethod
    def one_peer_exponential(cls, n_nodes: int) -> Schedule:
        """Return the directed graphs in which a node hears the one 1, 2, 4, … places on, in turns.

        Each has weight 1/2. Where the number of nodes is a power of two, the mean of all is found
        in ``log2(n_nodes)`` rounds.
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
        """Return a topology of which nodes join or leave for good: Metropolis weights on the rest.

        Parameters
        ----------
        topology : Topology
            Who hears whom, undirected, where all are present.
        joins, leaves : mapping of int to int
            Node -> the first round in which it takes part, and the first in which it does not.

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

        def at(round_: int) -> Topology:
            there = sparse.diags_array(present(round_).astype(float))
            return Topology(there @ topology.adjacency @ there)

        name = f"members({topology!r}, joins={joins or {}}, leaves={leaves or {}})"
        return cls(n_nodes, at, present=present, name=name)

    def turn(self, round_: int) -> int:
        """Return the first round whose network is that of a round."""
        return (round_ - 1) % self.window + 1 if self.repeats else round_

    def matrix(self, round_: int) -> CombinationMatrix:
        """Return the combination matrix of a round."""
        turn = self.turn(round_)
        if turn not in self._made:
            if len(self._made) >= max(self.window, KEPT):
                self._made.clear()
            self._made[turn] = self._weighted(turn)
        return self._made[turn]

    def _weighted(self, round_: int) -> CombinationMatrix:
        """Return the weights of what ``at`` returns, checked."""
        own = self.at(round_)
        if not isinstance(own, CombinationMatrix):
            if not isinstance(own, Topology):
                own = Topology.from_edges(self.n_nodes, check_kind("at", own, Iterable, "edges"))
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
        """Raise a ValueError unless some window of so many rounds connects all who take part in it.

        Without any link every node learns alone: a baseline.
        """
        linked = False
        for first in range(1, 2 if self.repeats else max(n_rounds, 1) + 1, self.window):
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

    def __repr__(self) -> str:
        """Return what was called."""
        if self.window == 1 and self.repeats:
            return repr(self.matrix(1))
        return f"Schedule.{self.name}" if self.name else f"Schedule({self.n_nodes} nodes)"


def schedule_of(network: Any) -> Schedule | None:
    """Return weights, or a network, as a schedule; None if it is not known."""
    found = getattr(getattr(network, "plan", None), "schedule", network)
    found = Schedule.of(found) if isinstance(found, CombinationMatrix) else found
    return found if isinstance(found, Schedule) else None


def node_rounds(name: str, value: Any, most: int | None = None) -> dict[int, int]:
    """Return a mapping of nodes, up to node ``most``, to rounds: checked, in order of the nodes."""
    given = check_kind(name, value, Mapping, "a mapping of nodes to rounds")
    rounds = {
        check_count(f"{name}: node", node, 0, most): check_count(f"{name}: round", at, 1)
        for node, at in given.items()
    }
    return dict(sorted(rounds.items()))
