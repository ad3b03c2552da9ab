"""ADMM: every agent minimizes its own cost and a penalty for differing from its neighbors.

:class:`JacobianADMM` is the paper's (Section III-C), :class:`ConsensusADMM`, the default, is
not: see `flwr_perdl.network.inference`.
"""

from __future__ import annotations

from abc import abstractmethod
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
from flwr_perdl.network.topology import Csr, Topology, greatest_but, least


@dataclass(frozen=True, eq=False)
class ADMM(DualInference):
    """What both ADMMs share: agents minimize J_k plus a quadratic exactly."""

    penalty: float | None = None

    def __post_init__(self) -> None:
        """Check that the agents' minima have the closed form."""
        super().__post_init__()
        check_closed_forms(self.objective)

    @cached_property
    def strength(self) -> float:
        r"""The penalty c, in the units of J_k's curvature.

        ``sqrt(sigma (0.36 / delta + strong_convexity / 2)) / gap^(1/4)``, where
        ``sigma = strong_convexity / N`` is the least curvature of an agent's cost, ``1 / delta``
        what an atom of norm 1 adds to it, and ``gap`` the second least eigenvalue of the graph's
        normalized Laplacian. The geometric mean balances the directions of the atoms with all
        others. The constants were measured; half or twice the value costs few rounds.
        """
        if self.penalty is not None:
            return check_real("penalty", self.penalty, 0, LARGE, open_low=True)
        gap, _ = self.spectrum
        steep = 0.36 / self.objective.modulus + self.objective.strong_convexity / 2
        return float(np.sqrt(self.curvature * steep) / gap**0.25)

    @cached_property
    def spectrum(self) -> tuple[float, float]:
        """The second least and the greatest eigenvalue of the graph's normalized Laplacian."""
        return _spectrum(self.topology) if self.topology.n_nodes > 1 else (1.0, 1.0)

    @cached_property
    def time_constant(self) -> float:
        """``2 c / sigma``, or ``steepness / (gap s c)`` if that is longer.

        In half of the first, weakly curved directions settle; in the second, the multipliers, with
        s the relaxation or mu.
        """
        settling = self.steepness / (self.spectrum[0] * self.pace * self.strength)
        return max(1.0, 2 * self.strength / self.curvature, settling)

    @property
    @abstractmethod
    def pace(self) -> float:
        """The share of c by which the multipliers move."""

    @property
    @abstractmethod
    def curvatures(self) -> NDArray[np.float64]:
        """The curvature a_k of what each agent minimizes, but for its atoms: (n_nodes,)."""

    def begin(self, nodes: Nodes, atoms: Matrix, X: Matrix) -> DualState:
        """Return the state before the first round; ``linear`` is ``theta_k x / a_k``."""
        state = super().begin(nodes, atoms, X)
        linear = state.linear / column(self.curvatures[nodes], state.linear)
        return state._replace(linear=linear)

    def adapt(self, state: DualState, round_: int) -> DualState:
        """Minimize the agent's cost and the penalties exactly, (39a)."""
        a = self.curvatures[state.nodes]
        objective = self.objective.at(state.nodes)
        nu, codes = minimize(objective, state.atoms, state.linear, a, state.codes)
        change = norms(nu - state.nu) if is_check_round(round_) else state.change
        return state._replace(nu=nu, sent=nu, codes=codes, change=change)


@dataclass(frozen=True, eq=False)
class ConsensusADMM(ADMM):
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

    relaxation: float = 0.9

    def __post_init__(self) -> None:
        """Check the relaxation, too."""
        super().__post_init__()
        if check_real("relaxation", self.relaxation, 0.5, 1) == 1:
            raise ValueError("relaxation must be in [0.5, 1), got 1.")

    @property
    def pace(self) -> float:
        """The relaxation."""
        return self.relaxation

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
        """Return the state before the first round: p and q are 0."""
        state = super().begin(nodes, atoms, X)
        return state._replace(memory=np.zeros_like(state.linear))

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


@dataclass(frozen=True, eq=False)
class JacobianADMM(ADMM):
    r"""The paper's Jacobian ADMM, (39a)-(39b), with its signs made to agree.

    With adjacency B, degrees d and Laplacian L of the network,

        nu_k = argmin over V_f of J_k(nu) - lambda_k'nu + c sum_l ||nu - nu_l||^2
        lambda <- lambda - mu L nu

    where ``lambda_k`` is the sum of the paper's ``lambda_kl`` and the paper has c = 1. Deviations:
    (39b) has the wrong sign (as printed the recursion diverges), and (39a) should not sum over k.
    Combination weights are not used.

    Parameters
    ----------
    penalty : float, optional
        c, times the mean degree; by default that of `ConsensusADMM`.
    step : float, optional
        mu, in units of c; by default half of what keeps the recursion stable, and at most 1.
    """

    step: float | None = None

    @cached_property
    def mu(self) -> float:
        """The step, in units of c.

        On quadratic costs the recursion is stable while ``2 Sigma + 4 c (D + B) - mu c L`` is
        positive definite, Sigma the costs' curvatures: nearly bipartite graphs allow small steps.
        """
        if self.step is not None:
            return check_real("step", self.step, 0, LARGE, open_low=True)
        top, degree = self.spectrum[1], max(1.0, float(self.topology.degrees.max()))
        # top is the largest eigenvalue of L, relative to D; 2 is that of bipartite graphs, on which
        # D + B is singular, and only the costs' own curvature is left to stabilize the step.
        most = (4 * (2 - top) + 2 * self.curvature / (self.edge * degree)) / top
        return min(1.0, most / 2)

    @property
    def pace(self) -> float:
        """The step."""
        return self.mu

    @cached_property
    def edge(self) -> float:
        """The penalty c of every edge."""
        return self.strength / max(1.0, float(self.topology.degrees.mean()))

    @cached_property
    def curvatures(self) -> NDArray[np.float64]:
        """``a_k = strong_convexity / N + 2 c d_k``: (n_nodes,)."""
        return self.curvature + 2 * self.edge * self.topology.degrees.astype(np.float64)

    def begin(self, nodes: Nodes, atoms: Matrix, X: Matrix) -> DualState:
        """Return the state before the first round."""
        state = super().begin(nodes, atoms, X)
        return state._replace(memory=state.linear)

    def combine(self, state: DualState, inbox: Inbox) -> DualState:
        """Update the multipliers (39b); ``memory`` is ``(theta_k x + lambda_k) / a_k``."""
        nu, degree = state.nu, self.topology.degrees[state.nodes]
        edge = self.edge / self.curvatures[state.nodes]
        around = inbox.total()
        # A missing neighbor counts as one that agrees: it moves neither estimate nor multiplier.
        missing = degree - inbox.degrees
        if missing.any():
            around += nu * column(missing, nu)
        apart = nu * column(degree, nu) - around
        memory = state.memory - apart * column(self.mu * edge, nu)
        after = state._replace(memory=memory, linear=memory + around * column(2 * edge, nu))
        if not is_check_round(inbox.round):
            return after
        far = norms(apart / column(np.maximum(degree, 1), nu))
        return after._replace(residual=self._residual(state.change, far, nu))


@lru_cache(maxsize=8)  # every block of samples has a program of its own
def _spectrum(topology: Topology) -> tuple[float, float]:
    """Return the second least and the greatest eigenvalue of ``I - D^(-1/2) A D^(-1/2)``."""
    roots = sparse.diags_array(1 / np.sqrt(topology.degrees))
    matrix = sparse.csr_array(roots @ topology.adjacency @ roots)
    return 1 - greatest_but(matrix, np.sqrt(topology.degrees)), 1 - least(matrix)
