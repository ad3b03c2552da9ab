"""ADMM: every agent minimizes its own cost and a penalty for differing from its neighbors.

=========================================== ===================================================
paper (P1), Section III-C                   here
=========================================== ===================================================
Jacobian ADMM (39)                          :class:`JacobianADMM`
=========================================== ===================================================

:class:`ConsensusADMM`, the default, is not in the paper: the edge-based ADMM (Shi, Ling, Yuan, Wu,
Yin, "On the linear convergence of the ADMM in decentralized consensus optimization", IEEE TSP
2014), over-relaxed (as in Eckstein and Bertsekas, 1992), with a penalty of its own for every edge.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.linalg import LinearOperator, eigsh

from flwr_perdl._checks import LARGE, Matrix, check_real
from flwr_perdl._random import spawn
from flwr_perdl.diffusion._dual import (
    DualInference,
    DualState,
    Nodes,
    column,
    due,
    edges_of,
    heard,
    measures_of,
    norms,
)
from flwr_perdl.diffusion._minimise import cost_of, minimise
from flwr_perdl.diffusion.combine import Csr, Inbox
from flwr_perdl.diffusion.topology import Topology

#: Up to this many nodes the spectral gap comes from a dense eigenvalue routine.
_DENSE = 600


@dataclass(frozen=True, eq=False)
class ADMM(DualInference):
    """What both ADMMs share: agents minimize J_k plus a quadratic exactly."""

    penalty: float | None = None

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
        steep = 0.36 / self.objective.delta + self.objective.strong_convexity / 2
        return float(np.sqrt(self.curvature * steep) / gap**0.25)

    @cached_property
    def spectrum(self) -> tuple[float, float]:
        """The second least and the greatest eigenvalue of the graph's normalized Laplacian."""
        return _spectrum(self.topology) if self.topology.n_nodes > 1 else (1.0, 1.0)

    @cached_property
    def time_constant(self) -> float:
        """``2 c / sigma``: weakly curved directions settle in about half of that."""
        return max(1.0, 2 * self.strength / self.curvature)

    @property
    @abstractmethod
    def curvatures(self) -> NDArray[np.float64]:
        """The curvature a_k of what each agent minimises, but for its atoms: (n_nodes,)."""

    @property
    @abstractmethod
    def pull(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Factors u, v of the weights ``u_k v_l`` with which k hears l: (n_nodes,) each."""

    @property
    @abstractmethod
    def factors(self) -> NDArray[np.float64]:
        """Each agent's factors in the recursion of ``linear`` and ``memory``: (n_nodes, 6).

        See `flwr_perdl.diffusion._kernels.recur`.
        """

    @cached_property
    def edges(self) -> Csr:
        """The weights where all are heard: sparse, (n_nodes, n_nodes)."""
        everyone = np.arange(self.topology.n_nodes)
        return self._edges(self.topology.adjacency, everyone, everyone)

    def _edges(self, links: Csr, nodes: Nodes, senders: Nodes) -> Csr:
        rows, columns = self.pull
        return _scaled(links, rows[nodes], columns[senders]).astype(self.X.dtype, copy=False)

    def begin(self, nodes: Nodes, atoms: Matrix, X: Matrix) -> DualState:
        """Return the state before the first round; ``linear`` is ``theta_k x / a_k``."""
        state = super().begin(nodes, atoms, X)
        linear = state.linear / column(self.curvatures[nodes], state.linear)
        return state._replace(linear=linear)

    def adapt(self, state: DualState, round_: int) -> DualState:
        """Minimize the agent's cost and the penalties exactly, (39a)."""
        a = self.curvatures[state.nodes]
        nu, codes = minimise(self.objective, state.atoms, state.linear, a, state.codes)
        change = norms(nu - state.nu) if due(round_) else state.change
        return state._replace(nu=nu, sent=nu, codes=codes, change=change)

    def combine(self, state: DualState, inbox: Inbox) -> DualState:
        """Update multipliers and estimates in the form of ``linear`` and ``memory``."""
        messages, links = heard(inbox, state.nu), inbox.links
        known = links is self.topology.adjacency  # in memory, all heard: the same every round
        weights = self.edges if known else self._edges(links, state.nodes, inbox.senders)
        sums = np.asarray(weights.sum(axis=1), dtype=np.float64)
        whole = np.asarray(self.edges.sum(axis=1), dtype=np.float64)[state.nodes]
        factors = self.factors[state.nodes]
        # A missing message is replaced by the node's own estimate.
        factors[:, 1] += np.where(np.isclose(sums, whole, rtol=1e-6, atol=0), 0, whole - sums)
        after = state._replace(linear=state.linear.copy(), memory=state.memory.copy())
        measures = measures_of(state, inbox.round)
        measures[:1] = state.change
        self._continue(after, weights, factors, measures, received=messages)
        return self._measured(after, measures)

    def advance(self, state: DualState, round_: int, n_rounds: int, weights: Csr) -> DualState:
        """Make rounds with all agents here; the weights are not used."""
        linear, memory, nu = state.linear.copy(), state.memory.copy(), state.nu.copy()
        after = state._replace(
            linear=linear, memory=memory, codes=state.codes.copy(), nu=nu, sent=nu
        )
        measures = measures_of(state, round_)
        self._continue(after, self.edges, self.factors, measures, n_rounds=n_rounds)
        return self._measured(after, measures)

    def _continue(
        self,
        state: DualState,
        weights: Csr,
        factors: NDArray[np.float64],
        measures: Matrix,
        *,
        received: Matrix | None = None,
        n_rounds: int = 0,
    ) -> None:
        """Update linear, memory, codes and nu of a state in place, see the kernel."""
        from flwr_perdl.diffusion import _kernels  # compiled: Numba is imported where it is needed

        nu, sums = state.nu, np.asarray(weights.sum(axis=1), dtype=np.float64)
        shares = np.where(sums > 0, 1 / np.where(sums > 0, sums, 1), 0)
        _kernels.admm(
            nu[:0] if received is None else received,
            n_rounds,
            nu[:0],
            *edges_of(weights, nu),
            state.atoms,
            1 / self.curvatures[state.nodes],
            factors.astype(nu.dtype),
            state.linear,
            state.memory,
            *cost_of(self.objective, nu),
            state.codes,
            nu,
            shares.astype(nu.dtype),
            measures,
        )


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
    round: in float32 results may be no better than 60 dB after 5,000 rounds.

    To save one pass over memory, the implementation stores, with ``a = strong_convexity / N + D``,
    ``linear = (theta x + p / 2 - q) / a`` and ``memory = (linear - r p / a) / (1 - r)``. Then

        linear' = (1 - r) memory + 2r A nu / a
        memory' = (1 - r) memory + linear' + ((2r - 1) linear - 2 r^2 D nu / a) / (1 - r)

    Parameters
    ----------
    objective, topology, dictionaries, X, informed, n_atoms
        As in `DualInference`.
    penalty : float, optional
        c; by default chosen from the topology and the objective, see `strength`.
    relaxation : float, default 0.9
        r, in [0.5, 1).
    """

    relaxation: float = 0.9

    def __post_init__(self) -> None:
        """Check the relaxation, too."""
        super().__post_init__()
        if not 0.5 <= check_real("relaxation", self.relaxation, 0, 1) < 1:
            raise ValueError(f"relaxation must be in [0.5, 1), got {self.relaxation:g}.")

    @cached_property
    def roots(self) -> NDArray[np.float64]:
        """``1 / sqrt(d_k)``, times what makes the weighted degrees c in the mean, per node."""
        if self.topology.n_nodes == 1:
            return np.zeros(1)
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
    def pull(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Factors of the weights ``2 r c_kl / a_k``."""
        return 2 * self.relaxation * self.roots / self.curvatures, self.roots

    @cached_property
    def factors(self) -> NDArray[np.float64]:
        """Each agent's factors in the recursion of ``linear`` and ``memory``: (n_nodes, 6)."""
        r, own = self.relaxation, self.degrees / self.curvatures
        return _columns(1 - r, 0, 1 - r, 1, (2 * r - 1) / (1 - r), -2 * r**2 / (1 - r) * own)

    @cached_property
    def curvatures(self) -> NDArray[np.float64]:
        """``a_k = strong_convexity / N + D_k``: (n_nodes,)."""
        return self.curvature + self.degrees

    def begin(self, nodes: Nodes, atoms: Matrix, X: Matrix) -> DualState:
        """Return the state before the first round: p and q are 0."""
        state = super().begin(nodes, atoms, X)
        return state._replace(memory=state.linear / (1 - self.relaxation))


@dataclass(frozen=True, eq=False)
class JacobianADMM(ADMM):
    r"""The paper's Jacobian ADMM, (39a)-(39b), with its signs made to agree.

    With adjacency B, degrees d and Laplacian L of the network,

        nu_k = argmin over V_f of J_k(nu) - lambda_k'nu + c sum_l ||nu - nu_l||^2
        lambda <- lambda - mu L nu

    where ``lambda_k`` is the sum of the paper's ``lambda_kl`` and the paper has c = 1. Stored are
    ``memory = (theta_k x + lambda_k) / a_k`` and ``linear``, the minimum of the quadratic part.
    With ``a_k = strong_convexity / N + 2 c d_k`` and ``t = mu / (2 + mu)``:

        linear' = memory - mu c d_k nu / a_k + (2 + mu) c B nu / a_k
        memory' = (1 - t) (memory - mu c d_k nu / a_k) + t linear'

    Deviations:
    (39b) has the wrong sign (as printed the recursion diverges), and (39a) should not sum over k.
    Combination weights are not used.

    Parameters
    ----------
    objective, topology, dictionaries, X, informed, n_atoms
        As in `DualInference`.
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
        most = (4 * (2 - top) + 2 * self.curvature / (self.edge * degree)) / top
        return min(1.0, most / 2)

    @cached_property
    def edge(self) -> float:
        """The penalty c of every edge."""
        return self.strength / max(1.0, float(self.topology.degrees.mean()))

    @cached_property
    def curvatures(self) -> NDArray[np.float64]:
        """``a_k = strong_convexity / N + 2 c d_k``: (n_nodes,)."""
        return self.curvature + 2 * self.edge * self.topology.degrees.astype(np.float64)

    @cached_property
    def pull(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Factors of the weights ``(2 + mu) c / a_k``."""
        return (2 + self.mu) * self.edge / self.curvatures, np.ones(self.topology.n_nodes)

    @cached_property
    def factors(self) -> NDArray[np.float64]:
        """Each agent's factors in the recursion of ``linear`` and ``memory``: (n_nodes, 6)."""
        own = self.mu * self.edge * self.topology.degrees / self.curvatures
        share = self.mu / (2 + self.mu)
        return _columns(1, -own, 1 - share, share, 0, -(1 - share) * own)

    def begin(self, nodes: Nodes, atoms: Matrix, X: Matrix) -> DualState:
        """Return the state before the first round."""
        state = super().begin(nodes, atoms, X)
        return state._replace(memory=state.linear)


def _columns(*values: float | NDArray[np.float64]) -> NDArray[np.float64]:
    """Return one column for each value."""
    return np.column_stack(np.broadcast_arrays(*values))


def _spectrum(topology: Topology) -> tuple[float, float]:
    """Return the second least and the greatest eigenvalue of ``I - D^(-1/2) A D^(-1/2)``."""
    roots = sparse.diags_array(1 / np.sqrt(topology.degrees))
    matrix = roots @ topology.adjacency @ roots
    if topology.n_nodes <= _DENSE:
        values = np.linalg.eigvalsh(matrix.toarray())
        return float(1 - values[-2]), float(1 - values[0])
    # The greatest eigenvalue, 1, and its vector are known. The operator moves it to the other end
    # of the spectrum, since the second may be too close to it for Lanczos iterations.
    known = np.sqrt(topology.degrees / topology.degrees.sum())

    def without(x: NDArray[Any]) -> NDArray[Any]:
        rest: NDArray[Any] = matrix @ x - 2 * (known @ x) * known
        return rest

    operator = LinearOperator(matrix.shape, matvec=without, dtype=np.float64)
    start = spawn(0).standard_normal(topology.n_nodes)
    second, least = (
        eigsh(of, k=1, which=end, v0=start, ncv=40, tol=1e-8, return_eigenvectors=False)[0]
        for of, end in ((operator, "LA"), (matrix, "SA"))
    )
    return float(1 - second), float(1 - least)


def _scaled(links: Csr, rows: NDArray[np.float64], columns: NDArray[np.float64]) -> Csr:
    """Return ``rows[k] * links[k, l] * columns[l]``."""
    data = links.data * np.repeat(rows, np.diff(links.indptr)) * columns[links.indices]
    return sparse.csr_array((data, links.indices, links.indptr), shape=links.shape)
