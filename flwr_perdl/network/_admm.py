"""ADMM: every agent minimizes its own cost and a penalty for differing from its neighbors.

:class:`ConsensusADMM` is not the paper's (Section III-C): see `flwr_perdl.network.inference`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from flwr_perdl.core.checks import LARGE, Matrix, check_real
from flwr_perdl.network._dual import DualInference, DualState, Nodes, column, is_check_round, norms
from flwr_perdl.network._minimize import minimize
from flwr_perdl.network.combine import Inbox, is_long, product
from flwr_perdl.network.objectives import check_closed_forms
from flwr_perdl.network.topology import Csr, Topology, greatest_but


@dataclass(frozen=True, eq=False)
class ConsensusADMM(DualInference):
    r"""Consensus ADMM on the edges of the network, over-relaxed: the library's default.

    With penalties ``c_kl = c / sqrt(d_k d_l)`` on the edges (scaled so that an agent's sum to c in
    the mean), weighted degrees ``D``, adjacency ``A`` and Laplacian ``L = D - A``, a round is

        nu_k = argmin over V_f of J_k(nu) + D_k / 2 ||nu||^2 - (p_k / 2 - q_k)' nu
        q   <- q + r L nu,    p <- (1 - 2r) p + 2r (D + A) nu

    q holds the multipliers, p an estimate of the neighborhood. The relaxation r = 1/2 is the plain
    method. The fixed point is the optimum for every c and r. The weights 1 / sqrt(d_k d_l) help
    nodes with few neighbors, which information reaches last. A missing message is replaced by the
    node's own estimate, so that links that fail in both directions keep the sum of all q at zero.
    Combination weights are not used. Rounding moves that sum by up to about the dtype's eps per
    round: in float32 results may be no better than 70 dB after 5,000 rounds.

    With ``a = strong_convexity / N + D`` the state has ``memory = r p / a`` and
    ``linear = (theta x + p / 2 - q) / a``, which change by ``2r A nu / a - memory`` and by
    ``r (2r (D + A) nu / a - 2 memory)``: where agents agree both stay, whatever is rounded.

    Parameters
    ----------
    penalty : float, optional
        c; by default chosen from the topology and the objective, see `strength`.
    relaxation : float, default 0.9
        r, in [0.5, 1).
    """

    penalty: float | None = None
    relaxation: float = 0.9

    def __post_init__(self) -> None:
        """Check the relaxation, too, and that the agents' minima have the closed form."""
        super().__post_init__()
        check_closed_forms(self.objective)
        if check_real("relaxation", self.relaxation, 0.5, 1) == 1:
            raise ValueError("relaxation must be in [0.5, 1), got 1.")

    @cached_property
    def strength(self) -> float:
        r"""The penalty c, in the units of J_k's curvature.

        ``sqrt(sigma (0.36 / delta + strong_convexity / 2)) / gap^(1/4)``, where
        ``sigma = strong_convexity / N`` is the least curvature of an agent's cost, and ``1 /
        delta`` what an atom of norm 1 adds to it. The geometric mean balances the directions of the
        atoms with all others. The constants were measured; half or twice the value costs few
        rounds.
        """
        if self.penalty is not None:
            return check_real("penalty", self.penalty, 0, LARGE, open_low=True)
        steep = 0.36 / self.objective.modulus + self.objective.strong_convexity / 2
        return float(np.sqrt(self.curvature * steep) / self.gap**0.25)

    @cached_property
    def gap(self) -> float:
        """The second least eigenvalue of the graph's normalized Laplacian."""
        return _gap(self.topology) if self.topology.n_nodes > 1 else 1.0

    @cached_property
    def time_constant(self) -> float:
        """``2 c / sigma``, or ``steepness / (gap r c)`` if that is longer.

        In half of the first, weakly curved directions settle; in the second, the multipliers.
        """
        settling = self.steepness / (self.gap * self.relaxation * self.strength)
        return max(1.0, 2 * self.strength / self.curvature, settling)

    @cached_property
    def roots(self) -> NDArray[np.float64]:
        """``1 / sqrt(d_k)``, times what makes the weighted degrees c in the mean, per node."""
        if self.topology.n_nodes == 1:
            return np.zeros(1)
        # In proportion to the normalized Laplacian, whose gap `strength` knows.
        roots = 1 / np.sqrt(self.topology.degrees)
        mean = float(np.mean(roots * (self.topology.adjacency @ roots)))
        scaled: NDArray[np.float64] = roots * np.sqrt(self.strength / mean)
        return scaled

    @cached_property
    def degrees(self) -> NDArray[np.float64]:
        """The weighted degrees, (n_nodes,)."""
        degrees: NDArray[np.float64] = self.roots * (self.topology.adjacency @ self.roots)
        return degrees

    @cached_property
    def edges(self) -> Csr:
        """``2 r c_kl / a_k`` where k receives from l: sparse, (n_nodes, n_nodes)."""
        everyone = np.arange(self.topology.n_nodes)
        return self._edges(self.topology.adjacency, everyone, everyone)

    def _edges(self, links: Csr, nodes: Nodes, senders: Nodes) -> Csr:
        rows = 2 * self.relaxation * self.roots[nodes] / self.curvatures[nodes]
        data = links.data * np.repeat(rows, np.diff(links.indptr))
        data = (data * self.roots[senders][links.indices]).astype(self.X.dtype)
        return sparse.csr_array((data, links.indices, links.indptr), shape=links.shape)

    @cached_property
    def curvatures(self) -> NDArray[np.float64]:
        """``a_k = strong_convexity / N + D_k``: (n_nodes,)."""
        return self.curvature + self.degrees

    @cached_property
    def _whole(self) -> NDArray[np.float64]:
        """What each node's row of `edges` sums to, ``2 r D_k / a_k`` as rounded: (n_nodes,)."""
        whole: NDArray[np.float64] = self.edges.sum(axis=1, dtype=np.float64)
        return whole

    def begin(self, nodes: Nodes, atoms: Matrix, X: Matrix) -> DualState:
        """Return the state before the first round: p and q are 0, ``linear`` is ``theta x / a``."""
        state = super().begin(nodes, atoms, X)
        linear = state.linear / column(self.curvatures[nodes], state.linear)
        return state._replace(linear=linear, memory=np.zeros_like(linear))

    def adapt(self, state: DualState, round_: int) -> DualState:
        """Minimize the agent's cost and the penalties exactly, (39a)."""
        a = self.curvatures[state.nodes]
        objective = self.objective.at(state.nodes)
        nu, codes = minimize(objective, state.atoms, state.linear, a, state.codes)
        change = norms(nu - state.nu) if is_check_round(round_) else state.change
        return state._replace(nu=nu, sent=nu, codes=codes, change=change)

    def combine(self, state: DualState, inbox: Inbox) -> DualState:
        """Update the multipliers and p, in the form of ``linear`` and ``memory``."""
        r, nu, whole = self.relaxation, state.nu, self._whole[state.nodes]
        if inbox.links is self.topology.adjacency:  # in memory: the same every round
            edges, received = self.edges, whole
        else:
            edges = self._edges(inbox.links, state.nodes, inbox.senders)
            received = np.asarray(edges.sum(axis=1), dtype=np.float64)
        around = product(edges, inbox.arrays[0])
        after = state
        if is_check_round(inbox.round):
            apart = norms(nu - around / column(np.where(received > 0, received, 1), nu))
            apart *= received[:, None] > 0
            after = state._replace(residual=self._residual(state.change, apart, nu))
        if received is not whole and not np.allclose(received, whole, rtol=1e-6):
            # A missing message counts as the own estimate, at both ends: the sum of q stays 0.
            around += nu * column(whole - received, nu)
        if is_long(nu):
            from flwr_perdl.network import _kernels  # compiled: Numba is imported where needed

            linear, memory = around, np.empty_like(nu)
            given = state.linear, state.memory, nu, whole.astype(nu.dtype), nu.dtype.type(r)
            _kernels.relax(linear, *given, memory)
        else:
            step = around - state.memory
            linear = state.linear + step
            memory = state.memory + r * (step + (nu * column(whole, nu) - state.memory))
        return after._replace(linear=linear, memory=memory)


@lru_cache(maxsize=8)  # every block of samples has a program of its own
def _gap(topology: Topology) -> float:
    """Return the second least eigenvalue of ``I - D^(-1/2) A D^(-1/2)``."""
    roots = sparse.diags_array(1 / np.sqrt(topology.degrees))
    matrix = sparse.csr_array(roots @ topology.adjacency @ roots)
    return 1 - greatest_but(matrix, np.sqrt(topology.degrees))
