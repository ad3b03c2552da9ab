r"""Dual inference over a network: every agent finds nu by talking to its neighbours (Section III).

P1 = Chen, Towfic, Sayed, "Dictionary Learning over Distributed Models", IEEE TSP 2015. The dual
(28) of coding a sample x is a sum of costs (29), each of which one agent knows:

    J_k(nu; x) = -theta_k nu'x + f*(nu) / N + h*(W_k nu),   nu in V_f

with ``theta_k = 1 / |N_I|`` at the agents N_I that see the sample and 0 at the others. Its
minimiser gives every agent its own codes (42), and the residual, with which it updates its atoms
(56).

=========================================== ===================================================
paper                                       here
=========================================== ===================================================
``nu_{k,i}``                                ``state.nu``, (m, n_samples, n_features)
``theta_k x``                               ``state.linear`` at the start
``W_k``                                     ``state.atoms``, (m, n_atoms, n_features)
ATC diffusion (31), projected (37)          :class:`ATC`
Jacobian ADMM (39)                          :class:`JacobianADMM`
(41), (42)                                  ``objective.residual(nu)``, ``objective.code(S)``
CVX in Section IV-A                         :func:`exact_dual`
=========================================== ===================================================

Not in the paper, because (31) ends O(mu) away from nu and gets there slowly:

- :class:`ExactDiffusion` (Yuan, Ying, Zhao, Sayed, "Exact diffusion for distributed optimization
  and learning", IEEE TSP 2019; with V_f as in NIDS: Li, Shi, Yan, IEEE TSP 2019): ATC without its
  bias.
- :class:`ConsensusADMM`, the default: the edge-based ADMM (Shi, Ling, Yuan, Wu, Yin, "On the linear
  convergence of the ADMM in decentralized consensus optimization", IEEE TSP 2014), over-relaxed
  (as in Eckstein and Bertsekas, 1992), with a penalty of its own for every edge.

**What each party receives.** In every round an agent sends its neighbours its current estimate of
nu (or of a gradient step from it), n_features floats per sample. No atom and no code ever travels;
but nu *is* the residual of the sample (58): neighbours of an agent learn the sample up to what the
atoms explain, whether they are informed or not.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf, log, sqrt
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.linalg import LinearOperator, eigsh

from flwr_perdl._arrays import row_norms
from flwr_perdl._checks import (
    LARGE,
    Matrix,
    check_array,
    check_choice,
    check_count,
    check_magnitude,
    check_real,
    own_numbers,
)
from flwr_perdl._memory import short_buffers
from flwr_perdl._parallel import in_threads
from flwr_perdl._random import spawn
from flwr_perdl._threads import one_blas_thread
from flwr_perdl.diffusion._minimise import correlate, minimise, reconstruct
from flwr_perdl.diffusion.combine import Csr, Inbox, hear_all, product, shown
from flwr_perdl.diffusion.objectives import Objective
from flwr_perdl.diffusion.topology import CombinationMatrix, Topology, metropolis_weights

Nodes = NDArray[np.intp]
Dictionaries = Sequence[Matrix] | Mapping[int, Matrix]

#: Up to the tenth, every round's residual is measured; then every tenth round's.
_EVERY = 10
#: Bytes of a stacked array of one block of samples: a few of them fit into a processor's cache.
_BLOCK = 2**21
#: Up to this many nodes the gap comes from a dense eigenvalue routine.
_DENSE = 600
#: Communication rounds, at most, where their number is not given.
MOST_ROUNDS = 100_000
#: By how much a unit-norm atom may be longer than 1, for rounding.
_SLACK = 1e-3


class ExactDual(NamedTuple):
    """The solution of one agent that holds all atoms.

    Attributes
    ----------
    codes : tuple of ndarray of shape (n_samples, n_atoms_k)
        Agent by agent.
    nu : ndarray of shape (n_samples, n_features)
        The dual variables.
    cost : ndarray of shape (n_samples,)
        The least cost (7), which is the dual's greatest value.
    gap : ndarray of shape (n_samples,)
        Primal less dual value: 0 but for rounding.
    """

    codes: tuple[Matrix, ...]
    nu: Matrix
    cost: Matrix
    gap: Matrix


def exact_dual(objective: Objective, X: Matrix, dictionaries: Sequence[Matrix]) -> ExactDual:
    """Solve the inference problem (7) and its dual (28) in one place, to machine precision.

    The reference for all methods, and what a network without limits would find. Which agents are
    informed does not matter to it. Computed in float64 and returned in the dtype of X.

    Parameters
    ----------
    objective : Objective
        Loss and regulariser.
    X : ndarray of shape (n_samples, n_features)
        Samples.
    dictionaries : sequence of ndarray of shape (n_atoms_k, n_features)
        The agents' atoms.

    Returns
    -------
    ExactDual

    Raises
    ------
    ValueError
        If shapes do not fit or values are not finite.
    """
    X, atoms = checked_samples(X, dictionaries)
    dtype, W = X.dtype, np.concatenate(atoms)[None].astype(np.float64)
    X = X.astype(np.float64, copy=False)
    a = objective.strong_convexity
    found = minimise(objective, W, X[None] / a, np.array([a]))
    codes, nu = found.codes[0], found.nu[0]
    cost = objective.loss(X - codes @ W[0]) + objective.regulariser(codes)
    value = (
        np.einsum("sm,sm->s", nu, X)
        - objective.conjugate(nu)
        - objective.regulariser_conjugate(nu @ W[0].T)
    )
    ends = np.cumsum([len(D) for D in atoms])[:-1]
    kept = [array.astype(dtype, copy=False) for array in (codes, nu, cost, cost - value)]
    return ExactDual(tuple(np.split(kept[0], ends, axis=1)), *kept[1:])


class DualState(NamedTuple):
    """The state of m agents that infer the duals of n_samples samples.

    Attributes
    ----------
    nodes : ndarray of shape (m,)
        The agents' ids.
    atoms : ndarray of shape (m, n_atoms, n_features)
        Each agent's atoms; agents with fewer have zeros at the end.
    linear : ndarray of shape (m, n_samples, n_features)
        The linear part of what an agent minimises: ``theta_k x``; in the ADMMs with what it has
        from its neighbours, and over the curvature: where the quadratic part is least.
    memory : ndarray of shape (m, n_samples, n_features)
        What a method remembers beside that; (m, 0) where it needs nothing.
    excess : ndarray of shape (m, n_samples, n_features)
        What a projection on V_f took off; (m, 0) where a method has no use for it.
    nu : ndarray of shape (m, n_samples, n_features)
        The estimates.
    sent : ndarray of shape (m, n_samples, n_features)
        What the neighbours get to hear: nu itself, or a step from it.
    codes : ndarray of shape (m, n_samples, n_atoms)
        The agents' codes, a guess where a method does not need them.
    change : ndarray of shape (m, n_samples)
        How far nu went in the last step that was measured.
    residual : ndarray of shape (m, n_samples)
        An estimate of nu's relative error, from what an agent itself knows.
    """

    nodes: Nodes
    atoms: Matrix
    linear: Matrix
    memory: Matrix
    excess: Matrix
    nu: Matrix
    sent: Matrix
    codes: Matrix
    change: Matrix
    residual: Matrix


@dataclass(frozen=True, eq=False)
class DualInference(ABC):
    """What all methods have in common: a `Program` for the duals of a batch of samples.

    The estimates start from 0. An agent's residual, measured in the first ten rounds and then in
    every tenth, is the larger of its distance to its neighbours' mean and of its last step times
    `time_constant`, over the norm of its estimate: an estimate of the relative error that needs no
    more than an agent knows.

    Parameters
    ----------
    objective : Objective
        Loss and regulariser.
    topology : Topology
        Who hears whom; connected and undirected.
    dictionaries : sequence or mapping of int to ndarray of shape (n_atoms_k, n_features)
        Agents' atoms, of norm at most 1; in a mapping, those of the agents hosted here.
    X : ndarray of shape (n_samples, n_features)
        Samples; used by informed agents only.
    informed : sequence of int, optional
        The agents N_I that see the samples; all by default.
    n_atoms : int, optional
        The most atoms of any agent; by default the most in ``dictionaries``.

    Raises
    ------
    ValueError
        If a graph is directed or not connected, or an argument is not as it must be.
    """

    objective: Objective
    topology: Topology
    dictionaries: Dictionaries
    X: Matrix
    informed: Sequence[int] | None = None
    n_atoms: int | None = None

    def __post_init__(self) -> None:
        """Check the graph, the data and the informed agents."""
        own_numbers(self)
        if self.topology.directed or not self.topology.is_connected:
            raise ValueError(f"topology must be connected and undirected, got {self.topology!r}.")
        atoms = self.dictionaries
        hosted = list(atoms.values()) if isinstance(atoms, Mapping) else list(atoms)
        if isinstance(atoms, Sequence) and len(atoms) != self.topology.n_nodes:
            raise ValueError(
                f"dictionaries must be one per node, {self.topology.n_nodes}, got {len(atoms)}."
            )
        checked_samples(self.X, hosted)
        object.__setattr__(self, "informed", _informed(self.informed, self.topology.n_nodes))
        most = max(len(D) for D in hosted)
        object.__setattr__(self, "n_atoms", check_count("n_atoms", self.n_atoms or most, most))

    @cached_property
    def curvature(self) -> float:
        """Every agent's share of f*'s curvature: ``strong_convexity / N``."""
        return self.objective.strong_convexity / self.topology.n_nodes

    @property
    @abstractmethod
    def time_constant(self) -> float:
        """Rounds in which the slowest part of the error shrinks by a factor e, about."""

    def rounds(self, tolerance: float) -> int:
        """Return in how many rounds an error of 1 shrinks to ``tolerance``, by `time_constant`.

        Ten at least, however large the tolerance; 100,000 at most. Where that is too few, a
        UserWarning gives the number.
        """
        needed = self.time_constant * log(1 / min(tolerance, 1))
        if needed > MOST_ROUNDS:
            warnings.warn(
                f"The tolerance {tolerance:g} may need {needed:.3g} communication rounds, and only "
                f"{MOST_ROUNDS} are run unless their number is given.",
                stacklevel=2,
            )
        return min(_EVERY * max(1, ceil(min(needed, MOST_ROUNDS) / _EVERY)), MOST_ROUNDS)

    def start(self, nodes: Nodes) -> DualState:
        """Return the state before the first round."""
        n_features, dtype = self.X.shape[1], self.X.dtype
        atoms = np.zeros((len(nodes), self.n_atoms or 0, n_features), dtype=dtype)
        for i, node in enumerate(nodes):
            own = self.dictionaries[int(node)]
            atoms[i, : len(own)] = own
        return self.begin(nodes, atoms, self.X)

    def begin(self, nodes: Nodes, atoms: Matrix, X: Matrix) -> DualState:
        """Return the state before the first round with other atoms and samples.

        Parameters
        ----------
        nodes : ndarray of shape (m,)
            The agents' ids.
        atoms : ndarray of shape (m, n_atoms, n_features)
            Their atoms.
        X : ndarray of shape (n_samples, n_features)
            Samples; used at informed agents only.
        """
        m, (n_samples, n_features) = len(nodes), X.shape
        agents = list(self.informed or ())
        seeing = np.isin(nodes, agents)
        linear = np.zeros((m, n_samples, n_features), dtype=X.dtype)
        linear[seeing] = X / len(agents)
        none = np.zeros((m, 0), dtype=X.dtype)
        far = np.full((m, n_samples), inf, dtype=X.dtype)
        zeros = np.zeros_like(linear)
        codes = np.zeros((m, n_samples, atoms.shape[1]), dtype=X.dtype)
        return DualState(nodes, atoms, linear, none, none, zeros, zeros, codes, far, far)

    @abstractmethod
    def adapt(self, state: DualState, round_: int) -> DualState:
        """Do the local work of a round."""

    def message(self, state: DualState) -> tuple[Matrix, ...]:
        """Return what every neighbour receives: one array of nu's shape."""
        return (state.sent,)

    @abstractmethod
    def combine(self, state: DualState, inbox: Inbox) -> DualState:
        """Take in what the neighbours said."""

    def observe(self, state: DualState) -> dict[str, Matrix]:
        """Return codes (42), estimates and residuals."""
        S = correlate(state.nu, state.atoms)
        return {"codes": self.objective.code(S), "nu": state.nu, "residual": state.residual}

    def _residual(self, change: Matrix, apart: Matrix, nu: Matrix) -> Matrix:
        """Return the residuals from the last steps' lengths and the distances to the neighbours."""
        size = np.maximum(_norms(nu), np.finfo(nu.dtype).tiny)
        residual: Matrix = np.maximum(change * self.time_constant, _norms(apart)) / size
        return residual


@dataclass(frozen=True, eq=False)
class ATC(DualInference):
    """Adapt-then-combine diffusion, (31a)-(31b); with a bounded V_f the projected form (37).

    The paper's method. It ends O(mu) away from nu, and its slowest part shrinks by
    ``1 - mu * strong_convexity / N`` a round. The combination weights must be doubly stochastic.

    What neighbors send differs even at the end, by mu times the differences of their gradients.
    The combination shrinks these differences: for its residual an agent multiplies its distance
    to the neighbors' mean by ``contraction``.

    Parameters
    ----------
    objective, topology, dictionaries, X, informed, n_atoms
        As in `DualInference`.
    step : float, optional
        mu; 0.9 of Table III's bound by default.
    contraction : float, optional
        A bound of the second largest absolute eigenvalue of the combination weights; by default
        the distance of Metropolis weights from uniform ones in the Frobenius norm, and at most 1:
        0 on complete graphs, 1 on graphs of few links.
    """

    step: float | None = None
    contraction: float | None = None

    @cached_property
    def mu(self) -> float:
        """The step."""
        if self.step is not None:
            return check_real("step", self.step, 0, LARGE, open_low=True)
        return 0.9 * self.objective.step_bound(self.n_atoms or 1)

    @cached_property
    def time_constant(self) -> float:
        """``1 / (mu * strong_convexity / N)``."""
        return 1 / (self.mu * self.curvature)

    @cached_property
    def shrinking(self) -> float:
        """By how much a combination shrinks what the agents disagree about."""
        if self.contraction is not None:
            return check_real("contraction", self.contraction, 0, 1)
        return _contraction(metropolis_weights(self.topology))

    def begin(self, nodes: Nodes, atoms: Matrix, X: Matrix) -> DualState:
        """Return the state before the first round; ``linear`` is ``mu theta_k x``."""
        state = super().begin(nodes, atoms, X)
        return state._replace(linear=self.mu * state.linear)

    def adapt(self, state: DualState, round_: int) -> DualState:
        """Take a gradient step (31a), with the gradient (62)."""
        return state._replace(sent=self._descended(state))

    def _descended(self, state: DualState) -> Matrix:
        codes = self.objective.code(correlate(state.nu, state.atoms))
        psi = reconstruct(-self.mu * codes, state.atoms)
        psi += state.linear
        psi += (1 - self.mu * self.curvature) * state.nu
        return psi

    def combine(self, state: DualState, inbox: Inbox) -> DualState:
        """Average with the neighbours (31b) and project on V_f (37b)."""
        nu = self.objective.project(inbox.mean())
        if not _due(inbox.round):
            return state._replace(nu=nu)
        change = _norms(nu - state.nu)
        apart = self.objective.project(state.sent) - nu
        apart *= self.shrinking
        residual = self._residual(change, apart, nu)
        return state._replace(nu=nu, change=change, residual=residual)


@dataclass(frozen=True, eq=False)
class ExactDiffusion(ATC):
    """Diffusion without ATC's bias: adapt, correct, combine.

    With ``psi_i = nu_{i-1} - mu grad J_k(nu_{i-1})``, neighbours hear
    ``phi_i = psi_i + nu_{i-1} - psi_{i-1}``, and nu is the projection of ``phi_i``, averaged with
    weights ``(I + A) / 2``, plus what the last projection took off. The combination weights must be
    symmetric. The larger step that this allows, 1.8 of the bound (33), is the default.

    Parameters
    ----------
    objective, topology, dictionaries, X, informed, n_atoms
        As in `DualInference`.
    step : float, optional
        mu; below twice `Objective.step_bound`.
    """

    @cached_property
    def mu(self) -> float:
        """The step."""
        if self.step is not None:
            return check_real("step", self.step, 0, LARGE, open_low=True)
        return 1.8 * self.objective.step_bound(self.n_atoms or 1, self.topology.n_nodes)

    def begin(self, nodes: Nodes, atoms: Matrix, X: Matrix) -> DualState:
        """Return the state before the first round."""
        state = super().begin(nodes, atoms, X)
        return state._replace(memory=state.nu, excess=state.nu)

    def adapt(self, state: DualState, round_: int) -> DualState:
        """Take a gradient step and correct it by the last one."""
        psi = self._descended(state)
        sent = psi + state.nu
        sent -= state.memory
        return state._replace(sent=sent, memory=psi)

    def combine(self, state: DualState, inbox: Inbox) -> DualState:
        """Average half-way with the neighbours, and project on V_f."""
        mean = inbox.mean()
        nu = state.sent + mean
        nu /= 2
        excess = state.excess
        if np.isfinite(self.objective.bound):
            full = nu + excess
            nu = self.objective.project(full)
            excess = full - nu
        after = state._replace(nu=nu, excess=excess)
        if not _due(inbox.round):
            return after
        change = _norms(nu - state.nu)
        residual = self._residual(change, state.sent - mean, nu)
        return after._replace(change=change, residual=residual)


@dataclass(frozen=True, eq=False)
class _ADMM(DualInference):
    """What both ADMMs share: agents that minimise J_k plus a quadratic exactly."""

    penalty: float | None = None

    @cached_property
    def strength(self) -> float:
        r"""The penalty c, in the units of J_k's curvature.

        ``sqrt(sigma (0.36 / delta + strong_convexity / 2)) / gap^(1/4)``, where
        ``sigma = strong_convexity / N`` is the least curvature of an agent's cost, ``1 / delta``
        what an atom of norm 1 adds to it, and ``gap`` the graph's: the second least eigenvalue of
        its normalised Laplacian. The geometric mean balances the directions of the atoms with all
        others; the numbers were measured, and half to twice as much costs little.
        """
        if self.penalty is not None:
            return check_real("penalty", self.penalty, 0, LARGE, open_low=True)
        gap, _ = self.spectrum
        steep = 0.36 / self.objective.delta + self.objective.strong_convexity / 2
        return float(np.sqrt(self.curvature * steep) / gap**0.25)

    @cached_property
    def spectrum(self) -> tuple[float, float]:
        """The second least and the greatest eigenvalue of the graph's normalised Laplacian."""
        return _spectrum(self.topology) if self.topology.n_nodes > 1 else (1.0, 1.0)

    @cached_property
    def time_constant(self) -> float:
        """``2 c / sigma``: weakly curved directions settle in about half of that."""
        return max(1.0, 2 * self.strength / self.curvature)

    @property
    @abstractmethod
    def curvatures(self) -> NDArray[np.float64]:
        """The curvature a_k of what each agent minimises, but for its atoms: (n_nodes,)."""

    def begin(self, nodes: Nodes, atoms: Matrix, X: Matrix) -> DualState:
        """Return the state before the first round; ``linear`` is ``theta_k x / a_k``."""
        state = super().begin(nodes, atoms, X)
        linear = state.linear / _column(self.curvatures[nodes], state.linear)
        return state._replace(linear=linear)

    def adapt(self, state: DualState, round_: int) -> DualState:
        """Minimise the agent's cost and the penalties exactly, (39a)."""
        a = self.curvatures[state.nodes]
        nu, codes = minimise(self.objective, state.atoms, state.linear, a, state.codes)
        change = _norms(nu - state.nu) if _due(round_) else state.change
        return state._replace(nu=nu, sent=nu, codes=codes, change=change)


@dataclass(frozen=True, eq=False)
class ConsensusADMM(_ADMM):
    r"""Consensus ADMM on the edges of the network, over-relaxed: the library's default.

    With penalties ``c_kl = c / sqrt(d_k d_l)`` on the edges (scaled so that an agent's sum to c in
    the mean), weighted degrees ``D``, adjacency ``A`` and Laplacian ``L = D - A``, a round is

        nu_k = argmin over V_f of J_k(nu) + D_k / 2 ||nu||^2 - (p_k / 2 - q_k)' nu
        q   <- q + r L nu,    p <- (1 - 2r) p + 2r (D + A) nu

    q holds the multipliers, p what a node believes of its neighbourhood. The relaxation r = 1/2 is
    the plain method. The fixed point is the optimum whatever c and r. The weights 1 / sqrt(d_k d_l)
    help nodes of few neighbours, the last to hear. What a neighbour did not send counts as the
    node's own estimate, so that links that drop both ways leave the sum of all q at zero.
    Combination weights are not used. Rounding moves that sum by up to about the dtype's eps a
    round: in float32 answers may be no better than 60 dB after 5,000 rounds.

    Computed are, for one pass over memory less, with ``a = strong_convexity / N + D``,
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
    def edges(self) -> Csr:
        """``2 r c_kl / a_k`` where k hears l: sparse, (n_nodes, n_nodes)."""
        everyone = np.arange(self.topology.n_nodes)
        return self._edges(self.topology.adjacency, everyone, everyone)

    def _edges(self, links: Csr, nodes: Nodes, senders: Nodes) -> Csr:
        rows = 2 * self.relaxation * self.roots[nodes] / self.curvatures[nodes]
        return _scaled(links, rows, self.roots[senders]).astype(self.X.dtype, copy=False)

    @cached_property
    def curvatures(self) -> NDArray[np.float64]:
        """``a_k = strong_convexity / N + D_k``: (n_nodes,)."""
        return self.curvature + self.degrees

    @cached_property
    def _whole(self) -> NDArray[np.float64]:
        """What each node's row of `edges` sums to, ``2 r D_k / a_k``: (n_nodes,)."""
        return 2 * self.relaxation * self.degrees / self.curvatures

    def begin(self, nodes: Nodes, atoms: Matrix, X: Matrix) -> DualState:
        """Return the state before the first round: p and q are 0."""
        state = super().begin(nodes, atoms, X)
        return state._replace(memory=state.linear / (1 - self.relaxation))

    def combine(self, state: DualState, inbox: Inbox) -> DualState:
        """Update multipliers and beliefs, as they are in ``linear`` and ``memory``."""
        r, nu, whole = self.relaxation, state.nu, self._whole[state.nodes]
        if inbox.links is self.topology.adjacency:  # in memory, all heard: the same every round
            edges, heard = self.edges, whole
        else:
            edges = self._edges(inbox.links, state.nodes, inbox.senders)
            heard = np.asarray(edges.sum(axis=1), dtype=np.float64)
        linear = product(edges, inbox.arrays[0])
        after = state
        if _due(inbox.round):
            share = np.where(heard > 0, 1 / np.where(heard > 0, heard, 1), 0)
            apart = nu * _column(heard > 0, nu) - linear * _column(share, nu)
            after = state._replace(residual=self._residual(state.change, apart, nu))
        if heard is not whole and not np.allclose(heard, whole, rtol=1e-6):
            linear += nu * _column(whole - heard, nu)
        memory = (1 - r) * state.memory
        linear += memory
        memory += linear
        term = (2 * r - 1) / (1 - r) * state.linear
        memory += term
        np.multiply(nu, _column(r / (1 - r) * whole, nu), out=term)
        memory -= term
        return after._replace(linear=linear, memory=memory)


@dataclass(frozen=True, eq=False)
class JacobianADMM(_ADMM):
    r"""The paper's Jacobian ADMM, (39a)-(39b), with its signs made to agree.

    With adjacency B, degrees d and Laplacian L of the network,

        nu_k = argmin over V_f of J_k(nu) - lambda_k'nu + c sum_l ||nu - nu_l||^2
        lambda <- lambda - mu L nu

    where ``lambda_k`` is the sum of the paper's ``lambda_kl`` and the paper has c = 1. Deviations:
    (39b) adds what must be taken away, as printed the recursion diverges, and (39a) should not sum
    over k. Combination weights are not used.

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

    def begin(self, nodes: Nodes, atoms: Matrix, X: Matrix) -> DualState:
        """Return the state before the first round."""
        state = super().begin(nodes, atoms, X)
        return state._replace(memory=state.linear)

    def combine(self, state: DualState, inbox: Inbox) -> DualState:
        """Update the multipliers (39b); ``memory`` is ``(theta_k x + lambda_k) / a_k``."""
        nu, degree = state.nu, self.topology.degrees[state.nodes]
        edge = self.edge / self.curvatures[state.nodes]
        around = inbox.total()
        missing = degree - inbox.degrees
        if missing.any():
            around += nu * _column(missing, nu)
        apart = nu * _column(degree, nu) - around
        memory = state.memory - apart * _column(self.mu * edge, nu)
        after = state._replace(memory=memory, linear=memory + around * _column(2 * edge, nu))
        if not _due(inbox.round):
            return after
        apart = apart / _column(np.maximum(degree, 1), nu)
        return after._replace(residual=self._residual(state.change, apart, nu))


METHODS: dict[str, type[DualInference]] = {
    "admm": ConsensusADMM,
    "atc": ATC,
    "exact_diffusion": ExactDiffusion,
    "jacobian_admm": JacobianADMM,
}


class Inference(NamedTuple):
    """What `infer` found.

    Attributes
    ----------
    codes : tuple of ndarray of shape (n_samples, n_atoms_k)
        Each agent's codes (42).
    nu : ndarray of shape (n_agents, n_samples, n_features), or None
        Each agent's estimate of the dual variables; None where it was not asked for.
    rounds : int
        Communication rounds; where samples went in blocks, the most of any block.
    residual : ndarray of shape (n_agents, n_samples)
        Each agent's own estimate of its relative error, see `DualInference`.
    converged : bool
        Whether all residuals are within the tolerance.
    """

    codes: tuple[Matrix, ...]
    nu: Matrix | None
    rounds: int
    residual: Matrix
    converged: bool


class Network(Protocol):
    """Whatever runs programs, such as ``flwr_perdl.network.InMemoryNetwork``."""

    def run(self, program: Any, n_rounds: int) -> Any:
        """Return an object with ``observed`` and ``rounds``."""
        ...


def infer(
    objective: Objective,
    X: Matrix,
    dictionaries: Sequence[Matrix],
    topology: Topology,
    *,
    method: str = "admm",
    n_rounds: int | None = None,
    tolerance: float = 1e-3,
    informed: Sequence[int] | None = None,
    weights: CombinationMatrix | None = None,
    network: Network | None = None,
    return_nu: bool = True,
    compress: bool | None = None,
    **options: Any,
) -> Inference:
    """Infer the duals and codes of samples, every agent with its own atoms and its neighbours.

    In memory, a block of samples stops when every agent's residual is within the tolerance, which
    no agent of a real network knows of all others; given a ``network``, all ``n_rounds`` are run.

    Blocks of samples are computed on as many cores as there are.

    Under the squared loss, nu stays in the span of a sample and the atoms. In memory, where that
    span is much smaller than the space, the iteration runs on coordinates in it: an isometry, which
    changes nothing but rounding.

    Parameters
    ----------
    objective : Objective
        Loss and regulariser.
    X : ndarray of shape (n_samples, n_features)
        Samples.
    dictionaries : sequence of ndarray of shape (n_atoms_k, n_features)
        The agents' atoms, of norm at most 1.
    topology : Topology
        Who hears whom; connected and undirected.
    method : {"admm", "atc", "exact_diffusion", "jacobian_admm"}, default "admm"
        `ConsensusADMM`, `ATC`, `ExactDiffusion` or `JacobianADMM`.
    n_rounds : int, optional
        Communication rounds, at most; by default `DualInference.rounds` of the tolerance, which
        knows the topology and the objective, and in memory, where they end by themselves, four
        times that; never more than 100,000.
    tolerance : float, default 1e-3
        Residual at which to stop; 0: never.
    informed : sequence of int, optional
        The agents that see the samples; all by default.
    weights : CombinationMatrix, optional
        Combination weights of the diffusions, Metropolis' by default; symmetric, hence doubly
        stochastic.
    network : Network, optional
        Carries the messages; in memory, and without faults, by default. Its topology, where it has
        one, has as many nodes; for the ADMMs, which keep a multiplier per link, it has no links but
        those of ``topology``, and may lack some.
    return_nu : bool, default True
        Whether to return the estimates, too.
    compress : bool, optional
        Whether to iterate in the span of sample and atoms; by default where that is exact and
        cheaper.
    **options : float
        Options of the method: ``step``, ``penalty``, ``relaxation``.

    Returns
    -------
    Inference

    Raises
    ------
    ValueError
        If an argument is not as it must be, or the topology is directed or not connected.
    """
    X, atoms = checked_samples(X, dictionaries)
    kind = METHODS[check_choice("method", method, METHODS)]
    tolerance = check_real("tolerance", tolerance, 0)
    agents = _informed(informed, topology.n_nodes)
    exact = not np.isfinite(objective.bound)
    n_total = sum(len(D) for D in atoms)
    if compress is None:
        compress = exact and network is None and 2 * (n_total + 1) <= X.shape[1]
    elif compress and not (exact and network is None):
        raise ValueError(
            "compress must be False with a network or a bounded V_f, got True: the span of sample "
            "and atoms is known in memory only, and kept only without bounds."
        )

    def program(Y: Matrix, W: Sequence[Matrix]) -> DualInference:
        return kind(objective, topology, W, Y, agents, **options)

    first = program(X, atoms)
    if n_rounds is None:
        n_rounds = first.rounds(tolerance or float(np.finfo(X.dtype).eps))
        n_rounds = min(n_rounds * (1 if network is not None else 4), MOST_ROUNDS)
    check_count("n_rounds", n_rounds)
    if network is not None:
        _check_network(network, first)
        run = network.run(first, n_rounds)
        return _inference(run.observed, atoms, run.rounds, tolerance, return_nu)
    matrix = metropolis_weights(topology) if weights is None else weights
    if matrix.topology.n_nodes != topology.n_nodes or (matrix.matrix != matrix.matrix.T).nnz:
        raise ValueError(f"weights must be symmetric, for {topology.n_nodes} nodes, got {matrix}.")
    if not matrix.is_connected:
        raise ValueError(f"weights must connect all nodes, got {matrix}.")
    if kind is ATC:
        options.setdefault("contraction", _contraction(matrix))
    span = Span(np.concatenate(atoms)) if compress else None
    inner = atoms if span is None else [span.atoms(D) for D in atoms]
    most = max(1, _BLOCK // max(1, topology.n_nodes * inner[0].shape[1] * X.itemsize))

    @short_buffers()
    def block(Y: Matrix) -> tuple[int, dict[str, Matrix]]:
        if span is None:
            return _in_memory(program(Y, atoms), matrix, n_rounds, tolerance)
        turned, across = span.samples(Y)
        rounds, seen = _in_memory(program(turned, inner), matrix, n_rounds, tolerance)
        if return_nu:
            seen = {**seen, "nu": span.back(seen["nu"], turned, across)}
        return rounds, seen

    blocks = np.array_split(X, max(1, ceil(len(X) / most)))
    with one_blas_thread():
        parts = list(in_threads(block, blocks))
    joined = {
        name: np.concatenate([seen[name] for _, seen in parts], axis=1) for name in parts[0][1]
    }
    return _inference(joined, atoms, max(rounds for rounds, _ in parts), tolerance, return_nu)


class Span:
    """Coordinates in the span of all atoms and a sample; the last is the sample's own: an isometry.

    Parameters
    ----------
    atoms : ndarray of shape (n_atoms, n_features)
        All agents' atoms.
    """

    def __init__(self, atoms: Matrix) -> None:
        self._basis = np.linalg.qr(atoms.T)[0]

    def atoms(self, D: Matrix) -> Matrix:
        """Return an agent's atoms in these coordinates."""
        return np.pad(D @ self._basis, ((0, 0), (0, 1)))

    def samples(self, X: Matrix) -> tuple[Matrix, Matrix]:
        """Return samples in these coordinates, and what is across the atoms' span of each."""
        along = X @ self._basis
        across = X - along @ self._basis.T
        return np.hstack([along, _norms(across)[:, None]]), across

    def back(self, nu: Matrix, turned: Matrix, across: Matrix) -> Matrix:
        """Return estimates (..., n_samples, n_coordinates) in the original coordinates."""
        unit = across / np.maximum(turned[:, -1:], np.finfo(across.dtype).tiny)
        original: Matrix = nu[..., :-1] @ self._basis.T + nu[..., -1:] * unit
        return original


def _inference(
    seen: Mapping[str, Matrix], atoms: Sequence[Matrix], rounds: int, tolerance: float, nu: bool
) -> Inference:
    found, estimates, residual = shown(seen, "codes", "nu", "residual")
    return Inference(
        codes=tuple(codes[:, : len(D)] for codes, D in zip(found, atoms, strict=True)),
        nu=estimates if nu else None,
        rounds=rounds,
        residual=residual,
        converged=bool((residual <= tolerance).all()),
    )


def _in_memory(
    program: DualInference, weights: CombinationMatrix, n_rounds: int, tolerance: float
) -> tuple[int, dict[str, Matrix]]:
    """Run a program with all agents hosted here, and every message heard."""
    nodes = np.arange(program.topology.n_nodes)
    state, round_ = program.start(nodes), 0
    links = program.topology.adjacency
    means = weights.matrix.astype(program.X.dtype, copy=False)
    for round_ in range(1, n_rounds + 1):
        state, _ = hear_all(program, state, round_, means, links)
        if _due(round_) and state.residual.max(initial=0) <= tolerance:
            break
    return round_, program.observe(state)


def _due(round_: int) -> bool:
    """Whether residuals are measured in this round."""
    return round_ <= _EVERY or round_ % _EVERY == 0


def checked_samples(X: Matrix, dictionaries: Sequence[Matrix]) -> tuple[Matrix, list[Matrix]]:
    """Return samples and atoms, or raise a ValueError that says what is wrong with them."""
    X = check_magnitude("X", check_array("X", X), floor=0.8)
    if not len(dictionaries):
        raise ValueError("dictionaries must have at least one, got none.")
    atoms = [check_array("dictionaries", D, columns=X.shape[1]) for D in dictionaries]
    odd = next((D for D in atoms if D.dtype != X.dtype), None)
    if odd is not None:
        raise ValueError(f"dictionaries must be {X.dtype} as X is, got {odd.dtype}.")
    with np.errstate(over="ignore"):
        longest = max(float(row_norms(D).max(initial=0)) for D in atoms)
    if longest > 1 + _SLACK:  # steps and their bounds hold for no other atoms
        raise ValueError(f"dictionaries must have atoms of norm at most 1, got {longest:g}.")
    return X, atoms


def _norms(A: Matrix) -> Matrix:
    """Return the norms over the last axis, also where squares would underflow."""
    norms = row_norms(A)
    limits = np.finfo(A.dtype)
    faint = norms < np.sqrt(limits.tiny) / limits.eps
    if faint.any():
        size = np.abs(A[faint]).max(axis=-1, initial=0)
        norms[faint] = size * row_norms(A[faint] / np.where(size > 0, size, 1)[:, None])
    return norms


def _informed(informed: Sequence[int] | None, n_agents: int) -> tuple[int, ...]:
    if informed is None:
        return tuple(range(n_agents))
    agents = sorted({check_count("informed", k, 0, n_agents - 1) for k in informed})
    if not agents:
        raise ValueError("informed must name at least one agent, got none.")
    return tuple(agents)


def _check_network(network: Network, program: DualInference) -> None:
    """Refuse a network on which the program does not find the duals."""
    ours, theirs = program.topology, getattr(network, "topology", program.topology)
    if theirs.n_nodes != ours.n_nodes:
        raise ValueError(f"network must have {ours.n_nodes} nodes as topology, got {theirs!r}.")
    more = sparse.coo_array(theirs.adjacency > ours.adjacency)
    if isinstance(program, _ADMM) and more.nnz:
        k, j = (int(nodes[0]) for nodes in more.coords)
        raise ValueError(f"network must have no links that topology lacks, got {k} - {j}.")


def _contraction(weights: CombinationMatrix) -> float:
    """Return a bound of what doubly stochastic weights leave of a disagreement, at most 1."""
    excess = float(np.square(weights.matrix.data).sum()) - 1  # squared distance from 1 / N
    rounding = 4 * weights.topology.n_nodes * float(np.finfo(np.float64).eps)
    return min(1.0, sqrt(excess)) if excess > rounding else 0.0


def _spectrum(topology: Topology) -> tuple[float, float]:
    """Return the second least and the greatest eigenvalue of ``I - D^(-1/2) A D^(-1/2)``."""
    roots = sparse.diags_array(1 / np.sqrt(topology.degrees))
    matrix = roots @ topology.adjacency @ roots
    if topology.n_nodes <= _DENSE:
        values = np.linalg.eigvalsh(matrix.toarray())
        return float(1 - values[-2]), float(1 - values[0])
    # The greatest eigenvalue, 1, is known, and so is its vector: moved to the other end it is out
    # of the way of the second, which may be nearer to it than Lanczos iterations could tell.
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


def _column(values: NDArray[Any], like: Matrix) -> Matrix:
    """Return one number per node, shaped and typed to multiply stacked arrays."""
    column: Matrix = np.asarray(values, dtype=like.dtype)[:, None, None]
    return column
