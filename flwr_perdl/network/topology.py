"""Graphs over nodes, and combination matrices with weights.

A topology says which node receives from which; a combination matrix W has the weights with which a
node combines its own estimate with those of its neighbors (the "combine" step of Chen, Towfic,
Sayed 2015, eq. 31b, and Chainais and Richard 2014, Algorithm 1).

===========================  ==========================================================
paper                        here
===========================  ==========================================================
neighborhood N_k (with k)    ``topology.neighbours(k)`` (without k)
a_{lk} (k combines from l)   ``W[k, l]``: the papers' A, transposed; its rows sum to one
A 1 = 1 as well              ``CombinationMatrix.doubly_stochastic``; required for a plain average
A 1 = 1 alone                column-stochastic, `push_weights`: push-sum on directed graphs
degree nu_l (eq. 5)          ``topology.degrees[l] + 1``: the neighborhood counts the node itself
===========================  ==========================================================
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse
from scipy.sparse.csgraph import connected_components, shortest_path
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigs, eigsh

from flwr_perdl.core.checks import (
    as_array,
    brief_repr,
    check_count,
    check_flag,
    check_kind,
    check_numbers,
    check_real,
)
from flwr_perdl.random import spawn

#: Up to this many nodes spectra come from dense LAPACK routines, beyond it from Lanczos iterations.
DENSE = 600
#: The most nodes, and links, of a graph that is made here: memory and time grow with them. A sparse
#: matrix of one's own may have more.
MOST_NODES, MOST_LINKS = 100_000, 10**7
#: How often a random graph is drawn again until it is connected.
DRAWS = 1000

Csr = Any  # scipy.sparse.csr_array; SciPy ships no types


@dataclass(frozen=True, eq=False)
class Topology:
    """A graph over nodes ``0 .. n - 1``, sparse, undirected or directed.

    Parameters
    ----------
    adjacency : sparse array or array_like of shape (n_nodes, n_nodes)
        Nonzero at ``[k, l]`` if node k receives from node l. The diagonal must be zero.

    Examples
    --------
    >>> from flwr_perdl.network import Topology
    >>> topology = Topology.grid(2, 3)
    >>> topology.n_edges, topology.diameter, topology.neighbours(0).tolist()
    (7, 3, [1, 3])
    """

    adjacency: Csr

    def __post_init__(self) -> None:
        """Check the matrix and keep it as ones in CSR form."""
        links = _matrix("adjacency", self.adjacency)
        if not np.isfinite(links.data).all():
            raise ValueError("adjacency must be finite, got a NaN or infinite value.")
        if links.shape[0] != links.shape[1] or links.shape[0] < 1:
            raise ValueError(f"adjacency must be square, at least 1 x 1, got {links.shape}.")
        links.sum_duplicates()
        links = sparse.csr_array(links != 0, dtype=np.float64)
        if links.diagonal().any():
            node = int(np.flatnonzero(links.diagonal())[0])
            raise ValueError(f"adjacency must have an empty diagonal, got a link {node} - {node}.")
        links.sort_indices()
        object.__setattr__(self, "adjacency", links)

    @classmethod
    def from_edges(
        cls, n_nodes: int, edges: Iterable[tuple[int, int]], *, directed: bool = False
    ) -> Topology:
        """Return the graph with these edges.

        Parameters
        ----------
        n_nodes : int
        edges : sequence of (int, int)
            A directed edge ``(k, l)``: k receives from l.
        directed : bool, default False

        Returns
        -------
        Topology
        """
        check_count("n_nodes", n_nodes, 1, MOST_NODES)
        check_flag("directed", directed)
        try:
            given = [tuple(edge) for edge in edges]
        except TypeError:
            raise TypeError(f"edges must be pairs of nodes, got {brief_repr(edges)}.") from None
        invalid = next((edge for edge in given if len(edge) != 2), None)
        if invalid is not None:
            raise ValueError(f"edges must be pairs of nodes, got {invalid}.")
        pairs = as_array("edges", given if given else np.zeros((0, 2), int))
        if pairs.ndim != 2 or pairs.dtype.kind not in "iu":
            raise ValueError(f"edges must be pairs of integers, got {brief_repr(given[0])}.")
        pairs = pairs.astype(np.intp)
        outside = (pairs < 0) | (pairs >= n_nodes)
        if outside.any():
            edge = tuple(map(int, pairs[outside.any(axis=1)][0]))
            raise ValueError(f"edges must join nodes 0 to {n_nodes - 1}, got {edge}.")
        if not directed:
            pairs = np.vstack([pairs, pairs[:, ::-1]])
        ones = np.ones(len(pairs))
        return cls(sparse.csr_array((ones, (pairs[:, 0], pairs[:, 1])), shape=(n_nodes, n_nodes)))

    @classmethod
    def ring(cls, n_nodes: int) -> Topology:
        """Return a ring: neighbors are the node before and the node after.

        Parameters
        ----------
        n_nodes : int

        Returns
        -------
        Topology
        """
        return cls._in_steps(n_nodes, [1])

    @classmethod
    def grid(cls, rows: int, columns: int) -> Topology:
        """Return a grid, row by row; neighbors are above, below, left and right.

        Parameters
        ----------
        rows, columns : int

        Returns
        -------
        Topology
        """
        node = _lattice(rows, columns)
        across = np.stack([node[:, :-1].ravel(), node[:, 1:].ravel()], axis=1)
        down = np.stack([node[:-1].ravel(), node[1:].ravel()], axis=1)
        return cls.from_edges(rows * columns, np.vstack([across, down]).tolist())

    @classmethod
    def torus(cls, rows: int, columns: int) -> Topology:
        """Return a torus: a grid whose opposite edges are joined.

        Parameters
        ----------
        rows, columns : int

        Returns
        -------
        Topology
        """
        node = _lattice(rows, columns)
        ends = [np.roll(node, -1, axis) for axis in (0, 1)]
        edges = np.concatenate([np.stack([node.ravel(), end.ravel()], axis=1) for end in ends])
        return cls.from_edges(rows * columns, edges[edges[:, 0] != edges[:, 1]].tolist())

    @classmethod
    def exponential(cls, n_nodes: int) -> Topology:
        """Return an exponential graph: neighbors are 1, 2, 4, 8, … places before and after.

        Each node has about ``2 * log2(n_nodes)`` neighbors; the spectral gap shrinks only as
        ``1 / log2(n_nodes)``.

        Parameters
        ----------
        n_nodes : int

        Returns
        -------
        Topology
        """
        _check_size(n_nodes, 1)
        return cls._in_steps(n_nodes, [2**power for power in range(n_nodes.bit_length())])

    @classmethod
    def _in_steps(cls, n_nodes: int, steps: list[int]) -> Topology:
        """Return the graph in which a node hears those so many places before and after."""
        _check_size(n_nodes, 1)
        nodes = range(n_nodes)
        return cls.from_edges(
            n_nodes, [(k, (k + step) % n_nodes) for step in steps if step < n_nodes for k in nodes]
        )

    @classmethod
    def k_regular(cls, n_nodes: int, degree: int, *, seed: int = 0) -> Topology:
        """Return a random connected graph in which every node has ``degree`` neighbors.

        Half-edges are paired at random; the ends of loops and double edges are swapped with those
        of random edges until none is left; all is redrawn until connected.

        Parameters
        ----------
        n_nodes : int
        degree : int
        seed : int, default 0

        Returns
        -------
        Topology
        """
        _check_size(n_nodes, 2)
        check_count("degree", degree, 1, n_nodes - 1)
        _check_size(n_nodes, 2, degree)
        if n_nodes * degree % 2:
            raise ValueError(f"n_nodes * degree must be even, got {n_nodes} * {degree}.")
        draw = partial(_pair_half_edges, n_nodes, degree)
        return _until_connected(draw, f"k_regular({n_nodes}, {degree})", seed)

    @classmethod
    def erdos_renyi(cls, n_nodes: int, p: float, *, seed: int = 0) -> Topology:
        """Return a connected random graph.

        Parameters
        ----------
        n_nodes : int
        p : float
            Probability of every edge.
        seed : int, default 0

        Returns
        -------
        Topology
        """
        _check_size(n_nodes, 1)
        check_real("p", p, 0.0, 1.0)
        _check_size(n_nodes, 1, p * n_nodes)

        def draw(rng: np.random.Generator) -> Topology:
            upper = []
            for k in range(n_nodes - 1):  # row by row: memory in proportion to the edges
                others = np.flatnonzero(rng.random(n_nodes - 1 - k) < p) + k + 1
                upper.append(np.stack([np.full_like(others, k), others], axis=1))
            return cls.from_edges(n_nodes, np.vstack(upper) if upper else [])

        return _until_connected(draw, f"erdos_renyi({n_nodes}, p={p:g})", seed)

    @classmethod
    def small_world(cls, n_nodes: int, degree: int, p: float, *, seed: int = 0) -> Topology:
        """Return a small world (Watts and Strogatz): a ring with randomly rewired edges.

        Redrawn until connected.

        Parameters
        ----------
        n_nodes : int
        degree : int
            Even number of nearest neighbors in the ring.
        p : float
            Probability that one end of an edge moves to a random node.
        seed : int, default 0

        Returns
        -------
        Topology
        """
        _check_size(n_nodes, 3)
        check_count("degree", degree, 2, n_nodes - 1)
        _check_size(n_nodes, 3, degree)
        if degree % 2:
            raise ValueError(f"degree must be even, got {degree}.")
        check_real("p", p, 0.0, 1.0)

        def draw(rng: np.random.Generator) -> Topology:
            near, nodes = range(1, degree // 2 + 1), range(n_nodes)
            pairs = [(k, (k + step) % n_nodes) for step in near for k in nodes]
            edges = {(min(pair), max(pair)) for pair in pairs}
            for k, far in sorted(edges):
                if rng.random() >= p:
                    continue
                other = int(rng.integers(n_nodes))
                moved = (min(k, other), max(k, other))
                if other != k and moved not in edges:
                    edges.remove((k, far))
                    edges.add(moved)
            return cls.from_edges(n_nodes, sorted(edges))

        return _until_connected(draw, f"small_world({n_nodes}, {degree}, {p:g})", seed)

    @classmethod
    def star(cls, n_nodes: int) -> Topology:
        """Return a star: node 0 is the neighbor of all others.

        Parameters
        ----------
        n_nodes : int

        Returns
        -------
        Topology
        """
        _check_size(n_nodes, 1)
        return cls.from_edges(n_nodes, [(0, k) for k in range(1, n_nodes)])

    @classmethod
    def complete(cls, n_nodes: int) -> Topology:
        """Return the graph in which all nodes are neighbors.

        Parameters
        ----------
        n_nodes : int

        Returns
        -------
        Topology
        """
        _check_size(n_nodes, 1)
        _check_size(n_nodes, 1, n_nodes)
        return cls(np.ones((n_nodes, n_nodes)) - np.eye(n_nodes))

    @property
    def n_nodes(self) -> int:
        """Number of nodes."""
        return int(self.adjacency.shape[0])

    @cached_property
    def directed(self) -> bool:
        """Whether some node hears one that does not hear it."""
        return bool((self.adjacency != self.adjacency.T).nnz)

    @property
    def n_edges(self) -> int:
        """Number of edges; in a directed graph each direction counts."""
        return int(self.adjacency.nnz) if self.directed else int(self.adjacency.nnz) // 2

    @property
    def degrees(self) -> NDArray[np.intp]:
        """Number of neighbors of each node, shape (n_nodes,)."""
        degrees: NDArray[np.intp] = np.diff(self.adjacency.indptr).astype(np.intp)
        return degrees

    def neighbours(self, node: int) -> NDArray[np.intp]:
        """Return the ids of a node's neighbors, ascending.

        Parameters
        ----------
        node : int

        Returns
        -------
        ndarray of int
        """
        check_count("node", node, 0, self.n_nodes - 1)
        row = slice(self.adjacency.indptr[node], self.adjacency.indptr[node + 1])
        ids: NDArray[np.intp] = self.adjacency.indices[row].astype(np.intp)
        return ids

    @cached_property
    def is_connected(self) -> bool:
        """Whether a value of any node reaches every other node."""
        count, _ = connected_components(self.adjacency, connection="strong")
        return bool(count == 1)

    @cached_property
    def diameter(self) -> int:
        """Rounds that a value takes at most to reach another node; the graph must be connected."""
        if not self.is_connected:
            raise ValueError(f"diameter needs a connected topology, got {self}.")
        return int(shortest_path(self.adjacency, unweighted=True).max())

    def __repr__(self) -> str:
        """Return the numbers of nodes and edges."""
        kind = "directed" if self.directed else "undirected"
        return f"Topology({self.n_nodes} nodes, {self.n_edges} edges, {kind})"


def _matrix(name: str, values: Any) -> Csr:
    """Return a sparse copy of a matrix, checked."""
    if not sparse.issparse(values):
        values = as_array(name, values)
    if values.ndim != 2 or values.dtype.kind not in "biuf":
        raise ValueError(
            f"{name} must be a matrix of numbers, got shape {values.shape} and {values.dtype}."
        )
    if values.dtype == np.float16:  # SciPy knows no half floats
        values = values.astype(np.float32)
    return sparse.csr_array(values, copy=True)


def _check_size(n_nodes: int, least: int, degree: float = 1) -> None:
    """Raise a ValueError unless a graph of so many nodes, and links of each, can be made."""
    check_count("n_nodes", n_nodes, least, MOST_NODES)
    if n_nodes * degree > MOST_LINKS:
        raise ValueError(
            f"n_nodes must be at most {int(MOST_LINKS / degree)} with {degree:g} neighbors each, "
            "got "
            f"{n_nodes}: a graph has at most {MOST_LINKS} links."
        )


def _lattice(rows: int, columns: int) -> NDArray[np.intp]:
    check_count("rows", rows, 1, MOST_NODES)
    check_count("columns", columns, 1, MOST_NODES // rows)
    return np.arange(rows * columns).reshape(rows, columns)


def _pair_half_edges(n_nodes: int, degree: int, rng: np.random.Generator) -> Topology:
    if degree > (n_nodes - 1) // 2:  # crowded: draw who does *not* hear whom
        others = _pair_half_edges(n_nodes, n_nodes - 1 - degree, rng).adjacency.toarray()
        return Topology(1.0 - others - np.eye(n_nodes))
    while True:
        ends = rng.permutation(np.repeat(np.arange(n_nodes), degree)).reshape(-1, 2)
        for _ in range(DRAWS):
            low, high = ends.min(axis=1), ends.max(axis=1)
            _, first = np.unique(low * n_nodes + high, return_index=True)
            bad = low == high
            bad[np.setdiff1d(np.arange(len(ends)), first)] = True
            if not bad.any():
                return Topology.from_edges(n_nodes, map(tuple, ends.tolist()))
            for edge in np.flatnonzero(bad):
                other = rng.integers(len(ends))
                ends[edge, 1], ends[other, 1] = ends[other, 1], ends[edge, 1]


def _until_connected(draw: Any, what: str, seed: int) -> Topology:
    check_count("seed", seed, 0)
    for attempt in range(DRAWS):
        topology: Topology = draw(spawn(seed, round_=attempt))
        if topology.is_connected:
            return topology
    raise ValueError(f"{what} must be connected, but none of {DRAWS} draws was.")


@dataclass(frozen=True, eq=False)
class CombinationMatrix:
    """Weights with which nodes combine what they receive.

    Parameters
    ----------
    matrix : sparse array or array_like of shape (n_nodes, n_nodes)
        ``[k, l]``: the weight that node k gives to node l, its own on the diagonal.
    topology : Topology
        A weight is allowed only where k receives from l, and on the diagonal.

    Examples
    --------
    >>> from flwr_perdl.network import Topology, metropolis_weights
    >>> weights = metropolis_weights(Topology.ring(4))
    >>> weights.doubly_stochastic, round(weights.spectral_gap, 3)
    (True, 0.667)
    """

    matrix: Csr
    topology: Topology

    def __post_init__(self) -> None:
        """Check the weights and keep them in CSR form."""
        check_topology(self.topology)
        weights = _matrix("weights", self.matrix).astype(np.float64)
        weights.sum_duplicates()
        n = self.topology.n_nodes
        if weights.shape != (n, n):
            raise ValueError(f"weights must have shape {(n, n)}, got {weights.shape}.")
        if not np.isfinite(weights.data).all() or (weights.data < 0).any():
            raise ValueError("weights must be finite and at least 0, got one that is not.")
        sums = np.asarray(weights.sum(axis=1)).ravel()
        if not (_are_one(sums) or _are_one(weights.sum(axis=0))):
            worst = int(np.abs(sums - 1).argmax())
            raise ValueError(
                f"weights must sum to one in every row (or column), got {sums[worst]:g} in {worst}."
            )
        weights.eliminate_zeros()
        alone = sparse.coo_array(weights - weights.multiply(_with_themselves(self.topology)))
        alone.eliminate_zeros()
        if alone.nnz:
            k, j = int(alone.coords[0][0]), int(alone.coords[1][0])
            raise ValueError(
                f"weights must follow the topology, but node {k} does not receive from {j}."
            )
        weights.sort_indices()
        object.__setattr__(self, "matrix", weights)

    @cached_property
    def is_connected(self) -> bool:
        """Whether news of any node reaches every other over weights that are not zero."""
        count, _ = connected_components(self.matrix, connection="strong")
        return bool(count == 1)

    @cached_property
    def doubly_stochastic(self) -> bool:
        """Whether rows and columns sum to one: repeated combination leads to the plain mean."""
        return self.row_stochastic and self.column_stochastic

    @cached_property
    def row_stochastic(self) -> bool:
        """Whether rows sum to one: a combination is a mean of what a node receives."""
        return _are_one(self.matrix.sum(axis=1))

    @cached_property
    def column_stochastic(self) -> bool:
        """Whether columns sum to one: a combination keeps the sum over all nodes."""
        return _are_one(self.matrix.sum(axis=0))

    @cached_property
    def symmetric(self) -> bool:
        """Whether both ends of every link give the same weight to each other."""
        return not (self.matrix != self.matrix.T).nnz

    @cached_property
    def spectral_gap(self) -> float:
        """One minus the second largest eigenvalue in absolute value.

        The distance to consensus shrinks by about ``1 - spectral_gap`` in every combination.
        """
        n = self.topology.n_nodes
        if n == 1 or not self.is_connected:
            return float(n == 1)
        if self.symmetric:
            return max(0.0, 1.0 - max(self.second, -least(self.matrix)))
        if n <= DENSE:
            values = np.linalg.eigvals(self.matrix.toarray())
        else:
            start = spawn(0).standard_normal(n)
            try:
                values = eigs(self.matrix, k=2, which="LM", v0=start, return_eigenvectors=False)
            except ArpackNoConvergence as none:
                values = np.concatenate([none.eigenvalues, np.ones(2)])
        return max(0.0, 1.0 - float(np.sort(np.abs(values))[-2]))

    @cached_property
    def second(self) -> float:
        """The second greatest eigenvalue of symmetric weights; 0 where there is one node."""
        n = self.topology.n_nodes
        return greatest_but(self.matrix, np.ones(n)) if n > 1 else 0.0

    def __repr__(self) -> str:
        """Say what the weights are like."""
        kind = "row stochastic" if self.row_stochastic else "column stochastic"
        kind = "doubly stochastic" if self.doubly_stochastic else kind
        return f"CombinationMatrix({self.topology!r}, {kind}, spectral gap {self.spectral_gap:.3g})"


def _are_one(sums: Any) -> bool:
    """Whether all sums are one up to rounding."""
    return bool(np.abs(np.asarray(sums) - 1).max() <= 1e-10)


def greatest_but(matrix: Csr, known: NDArray[np.float64]) -> float:
    """Return the second greatest eigenvalue of a symmetric matrix.

    ``known`` is an eigenvector of the greatest eigenvalue, which is positive, of any length.
    """
    known = known / np.linalg.norm(known)
    shift = 2 * float(known @ (matrix @ known))
    if len(known) <= DENSE:
        moved = matrix.toarray() - shift * np.outer(known, known)
        return float(np.linalg.eigvalsh(moved)[-1])

    # Moved to the other end of the spectrum, since the second may be too close to it for Lanczos.
    def without(x: NDArray[Any]) -> NDArray[Any]:
        rest: NDArray[Any] = matrix @ x - shift * (known @ x) * known
        return rest

    return _lanczos(LinearOperator(matrix.shape, matvec=without, dtype=np.float64), "LA")


def least(matrix: Csr) -> float:
    """Return the least eigenvalue of a symmetric matrix."""
    if matrix.shape[0] <= DENSE:
        return float(np.linalg.eigvalsh(matrix.toarray())[0])
    return _lanczos(matrix, "SA")


def _lanczos(operator: Any, end: str) -> float:
    start = spawn(0).standard_normal(operator.shape[0])
    options = {"k": 1, "v0": start, "ncv": 40, "tol": 1e-8, "return_eigenvectors": False}
    return float(eigsh(operator, which=end, **options)[0])


def check_topology(topology: Topology) -> None:
    """Raise a TypeError unless this is a topology."""
    check_kind("topology", topology, Topology, "a Topology")


def metropolis_weights(topology: Topology) -> CombinationMatrix:
    """Return Metropolis weights: 1 / (1 + max(degree_k, degree_l)) for neighbors k, l.

    They are symmetric, hence doubly stochastic: the choice for the plain mean of the nodes.

    Parameters
    ----------
    topology : Topology
        Undirected.

    Returns
    -------
    CombinationMatrix

    Examples
    --------
    >>> from flwr_perdl.network import Topology, metropolis_weights
    >>> metropolis_weights(Topology.star(3)).matrix.toarray().round(3)
    array([[0.333, 0.333, 0.333],
           [0.333, 0.667, 0.   ],
           [0.333, 0.   , 0.667]])
    """
    check_topology(topology)
    if topology.directed:
        raise ValueError(f"topology must be undirected, got {topology!r}: or take push_weights.")
    links = sparse.coo_array(topology.adjacency)
    k, j = links.coords
    degrees = topology.degrees
    values = 1.0 / (1.0 + np.maximum(degrees[k], degrees[j]))
    own = 1.0 - np.bincount(k, values, minlength=topology.n_nodes)  # in order, as networks
    weights = sparse.csr_array((values, (k, j)), shape=links.shape)
    return CombinationMatrix(weights + sparse.diags_array(own), topology)


def averaging_weights(topology: Topology) -> CombinationMatrix:
    """Return uniform weights over a node and its neighbors.

    Rows sum to one; columns only if all degrees are equal.

    Parameters
    ----------
    topology : Topology

    Returns
    -------
    CombinationMatrix

    Examples
    --------
    >>> from flwr_perdl.network.topology import Topology, averaging_weights
    >>> averaging_weights(Topology.star(3)).matrix.toarray().round(3)
    array([[0.333, 0.333, 0.333],
           [0.5  , 0.5  , 0.   ],
           [0.5  , 0.   , 0.5  ]])
    """
    check_topology(topology)
    scale = sparse.diags_array(1.0 / (1.0 + topology.degrees))
    return CombinationMatrix(scale @ _with_themselves(topology), topology)


def push_weights(topology: Topology) -> CombinationMatrix:
    """Return weights for push-sum: node l sends with weight 1 / (1 + out-degree of l).

    Columns sum to one on any topology, directed or not; rows only if all degrees are equal.

    Parameters
    ----------
    topology : Topology

    Returns
    -------
    CombinationMatrix

    Examples
    --------
    >>> from flwr_perdl.network import Topology, push_weights
    >>> topology = Topology.from_edges(3, [(1, 0), (2, 0), (0, 2), (2, 1)], directed=True)
    >>> push_weights(topology).matrix.toarray().round(3)  # two nodes hear node 0
    array([[0.333, 0.   , 0.5  ],
           [0.333, 0.5  , 0.   ],
           [0.333, 0.5  , 0.5  ]])
    """
    check_topology(topology)
    shares = 1.0 / (1.0 + np.asarray(topology.adjacency.sum(axis=0)).ravel())
    weights = sparse.coo_array(topology.adjacency @ sparse.diags_array(shares))
    (k, j), n = weights.coords, topology.n_nodes
    own = kept_totals(k, j, weights.data, n) - np.bincount(k, weights.data, minlength=n)
    return CombinationMatrix(weights + sparse.diags_array(own), topology)


def weights_of(topology: Topology) -> CombinationMatrix:
    """Return the weights of a topology by default: for push-sum if directed, else Metropolis."""
    return push_weights(topology) if topology.directed else metropolis_weights(topology)


def kept_totals(
    receivers: NDArray[np.intp], senders: NDArray[np.intp], weights: NDArray[np.float64], n: int
) -> NDArray[np.float64]:
    """Return the sums of the nodes' weights if each keeps what it does not send, shape (n,).

    Rounded as networks do, which hand these sums to the nodes.
    """
    received = np.bincount(receivers, weights, minlength=n)
    totals: NDArray[np.float64] = received + (1.0 - np.bincount(senders, weights, minlength=n))
    return totals


def relative_degree_variance_weights(topology: Topology, variances: ArrayLike) -> CombinationMatrix:
    """Return weights by relative degree and noise: degree_l / variance_l, normalized (eq. 5).

    As printed, the paper's equation multiplies by the variance, so the noisiest node counts most
    and one noisy node prevents any recovery. This is the inverse, as in the adaptive-networks
    literature.

    Parameters
    ----------
    topology : Topology
    variances : ndarray of shape (n_nodes,)
        Every node's noise variance, within [1e-100, 1e100].

    Returns
    -------
    CombinationMatrix

    Examples
    --------
    >>> from flwr_perdl.network import Topology, relative_degree_variance_weights
    >>> weights = relative_degree_variance_weights(Topology.complete(3), [1.0, 1.0, 8.0])
    >>> weights.matrix.toarray()[0].round(3)  # the noisy node counts least
    array([0.471, 0.471, 0.059])
    """
    check_topology(topology)
    variance = check_numbers("variances", variances).astype(np.float64)
    if variance.shape != (topology.n_nodes,):
        raise ValueError(f"variances must have shape ({topology.n_nodes},), got {variance.shape}.")
    wrong = variance[~((variance >= 1e-100) & (variance <= 1e100))]
    if len(wrong):
        raise ValueError(f"variances must be above 0, within [1e-100, 1e+100], got {wrong[0]:g}.")
    merit = (1.0 + topology.degrees) / variance
    weights = _with_themselves(topology) @ sparse.diags_array(merit)
    sums = np.asarray(weights.sum(axis=1)).ravel()
    return CombinationMatrix(sparse.diags_array(1.0 / sums) @ weights, topology)


def _with_themselves(topology: Topology) -> Csr:
    return topology.adjacency + sparse.eye_array(topology.n_nodes)
