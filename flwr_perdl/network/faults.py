"""Simulated faults between nodes, drawn from a seed: the same on every transport."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from flwr_perdl.core.checks import check_count, check_real
from flwr_perdl.network.schedule import node_rounds
from flwr_perdl.network.topology import Csr, Topology
from flwr_perdl.random import spawn


@dataclass(frozen=True)
class Faults:
    """Links that fail, nodes that sleep or die, messages that are late or broken.

    Parameters
    ----------
    drop : float, default 0.0
        Probability that a link is down in a round, in both directions at once.
    sleep : float, default 0.0
        Probability that a node is asleep in a round: it does not compute, send or hear.
    dead : mapping of int to int
        Node -> the round from which on it is silent.
    corrupt : mapping of int to int
        Node -> the round from which on its messages are NaN.
    max_delay : int, default 0
        A message arrives 0 to ``max_delay`` rounds late, each with the same probability.
    seed : int, default 0
        Seed of all draws. A draw depends on the round and the link only.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.network import Averaging, Topology
    >>> from flwr_perdl.network import Faults, InMemoryNetwork
    >>> faults = Faults(dead={3: 5})  # node 3 dies in round 5
    >>> network = InMemoryNetwork(Topology.ring(4), faults=faults)
    >>> network.run(Averaging(np.arange(4.0)[:, None]), 30).alive
    array([ True,  True,  True, False])
    """

    drop: float = 0.0
    sleep: float = 0.0
    dead: Mapping[int, int] = field(default_factory=dict)
    corrupt: Mapping[int, int] = field(default_factory=dict)
    max_delay: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the parameters; equal ones get one form, so that their texts are equal."""
        for name in ("drop", "sleep"):
            object.__setattr__(self, name, check_real(name, getattr(self, name), 0.0, 1.0))
        object.__setattr__(self, "max_delay", check_count("max_delay", self.max_delay, 0, 10**6))
        object.__setattr__(self, "seed", check_count("seed", self.seed))
        for name in ("dead", "corrupt"):
            object.__setattr__(self, name, node_rounds(name, getattr(self, name)))

    @property
    def any(self) -> bool:
        """Whether anything can go wrong at all."""
        return bool(self.drop or self.sleep or self.dead or self.corrupt or self.max_delay)

    def awake(self, n_nodes: int, round_: int) -> NDArray[np.bool_]:
        """Return which nodes take part in a round, shape (n_nodes,)."""
        awake = ~_begun(self.dead, n_nodes, round_)
        if self.sleep:
            awake &= spawn(self.seed, _SLEEP, round_).random(n_nodes) >= self.sleep
        return awake

    def broken(self, n_nodes: int, round_: int) -> NDArray[np.bool_]:
        """Return which nodes send NaN in a round, shape (n_nodes,)."""
        return _begun(self.corrupt, n_nodes, round_)

    def links(self, topology: Topology, round_: int) -> Csr:
        """Return who is heard in a round: one at ``[k, j]`` if k hears j."""
        if not self.any:
            return topology.adjacency
        k, j = self.passable(topology, round_)
        awake = self.awake(topology.n_nodes, round_)
        up = awake[k] & awake[j]
        shape = topology.adjacency.shape
        return sparse.csr_array((np.ones(int(up.sum())), (k[up], j[up])), shape=shape)

    def passable(
        self, topology: Topology, round_: int
    ) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return receivers and senders of the links that are not down in a round, asleep or not."""
        k, j = sparse.coo_array(topology.adjacency).coords
        up = _per_link(k, j, spawn(self.seed, _DROP, round_)) >= self.drop
        return k[up], j[up]

    def delays(self, links: Csr, round_: int) -> NDArray[np.intp]:
        """Return how many rounds late the message on each link of ``links`` is, in CSR order."""
        if not self.max_delay:
            return np.zeros(links.nnz, dtype=np.intp)
        k, j = sparse.coo_array(links).coords
        late = _per_link(k, j, spawn(self.seed, _DELAY, round_)) * (self.max_delay + 1)
        return late.astype(np.intp)


# Faults have their own streams of random numbers, apart from those of the nodes.
_DROP, _SLEEP, _DELAY = 2**31, 2**31 + 1, 2**31 + 2


def _begun(first: Mapping[int, int], n_nodes: int, round_: int) -> NDArray[np.bool_]:
    """Return which nodes' round has come."""
    nodes = [node for node, at in first.items() if node < n_nodes and round_ >= at]
    begun: NDArray[np.bool_] = np.isin(np.arange(n_nodes), nodes)
    return begun


def _per_link(
    k: NDArray[np.intp], j: NDArray[np.intp], rng: np.random.Generator
) -> NDArray[np.float64]:
    """Draw one uniform number per undirected link, the same for both directions."""
    low, high = np.minimum(k, j).astype(np.int64), np.maximum(k, j).astype(np.int64)
    _, link = np.unique(low * (2**31) + high, return_inverse=True)
    draws: NDArray[np.float64] = rng.random(int(link.max(initial=-1)) + 1)
    return draws[link]
