"""Diffusion: every agent takes a gradient step and averages with its neighbors.

:class:`ATC` is the paper's (Section III-C), with Table III's step; :class:`ExactDiffusion` is not
in it: see `flwr_perdl.network.inference`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import sqrt

import numpy as np

from flwr_perdl.core.checks import LARGE, Matrix, check_real
from flwr_perdl.network._dual import DualInference, DualState, Nodes, is_check_round, norms
from flwr_perdl.network._minimize import combine_atoms, correlate
from flwr_perdl.network.combine import Inbox
from flwr_perdl.network.topology import CombinationMatrix, Topology, metropolis_weights


@dataclass(frozen=True, eq=False)
class ATC(DualInference):
    """Adapt-then-combine diffusion, (31a)-(31b); with a bounded V_f the projected form (37).

    The paper's method. It ends O(mu) away from nu, and the slowest part of the error shrinks by
    ``1 - mu * strong_convexity / N`` per round. The combination weights must be doubly stochastic.

    Even at the end, the messages of neighbors differ by mu times the differences of their
    gradients. The combination shrinks these differences: for its residual an agent multiplies its
    distance to the neighbors' mean by ``contraction``.

    Parameters
    ----------
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
        # The bound (33) holds strictly, and Table III's form of it for any number of agents.
        return 0.9 * self.objective.step_bound(self.n_atoms or 1)

    @cached_property
    def time_constant(self) -> float:
        """``1 / (mu * strong_convexity / N)``."""
        return 1 / (self.mu * self.curvature)

    @cached_property
    def shrinking(self) -> float:
        """The factor by which a combination shrinks the differences between agents."""
        if self.contraction is not None:
            return check_real("contraction", self.contraction, 0, 1)
        return contraction_bound(metropolis_weights(self.topology))

    def begin(self, nodes: Nodes, atoms: Matrix, X: Matrix) -> DualState:
        """Return the state before the first round; ``linear`` is ``mu theta_k x``."""
        state = super().begin(nodes, atoms, X)
        return state._replace(linear=self.mu * state.linear)

    def adapt(self, state: DualState, round_: int) -> DualState:
        """Take a gradient step (31a), with the gradient (62)."""
        return state._replace(sent=self._descend(state))

    def _descend(self, state: DualState) -> Matrix:
        codes = self.objective.at(state.nodes).code(correlate(state.nu, state.atoms))
        # In place, and the large arrays last: each of them is read once.
        psi = combine_atoms(-self.mu * codes, state.atoms)
        psi += state.linear
        psi += (1 - self.mu * self.curvature) * state.nu
        return psi

    def combine(self, state: DualState, inbox: Inbox) -> DualState:
        """Average with the neighbors (31b) and project on V_f (37b)."""
        # Messages are steps, which may leave V_f: (37b) projects their mean, which is used.
        nu = self.objective.project(inbox.mean())
        if not is_check_round(inbox.round):
            return state._replace(nu=nu)
        apart = norms(self.objective.project(state.sent) - nu)
        residual = self._residual(norms(nu - state.nu), self.shrinking * apart, nu)
        return state._replace(nu=nu, residual=residual)


@dataclass(frozen=True, eq=False)
class ExactDiffusion(ATC):
    """Diffusion without ATC's bias: adapt, correct, combine.

    With ``psi_i = nu_{i-1} - mu grad J_k(nu_{i-1})``, neighbors hear
    ``phi_i = psi_i + nu_{i-1} - psi_{i-1}``, and nu is the projection of ``phi_i``, averaged with
    weights ``(I + A) / 2``, plus what the last projection removed. The combination weights must be
    symmetric. The larger step that this allows, 1.8 of the bound (33), is the default.

    Parameters
    ----------
    step : float, optional
        mu; below twice `Objective.step_bound`.
    contraction : float, optional
        The second greatest eigenvalue of the combination weights; by default of Metropolis weights.
    """

    @cached_property
    def mu(self) -> float:
        """The step."""
        if self.step is not None:
            return check_real("step", self.step, 0, LARGE, open_low=True)
        # With (I + A) / 2, which has no negative eigenvalue, twice ATC's steps are stable.
        return 1.8 * self.objective.step_bound(self.n_atoms or 1, self.topology.n_nodes)

    @cached_property
    def shrinking(self) -> float:
        """The second greatest eigenvalue of the combination weights."""
        if self.contraction is not None:
            return check_real("contraction", self.contraction, 0, 1)
        return _second(self.topology)

    @cached_property
    def time_constant(self) -> float:
        """ATC's, or ``2 mu steepness / (1 - shrinking)``, in which the corrections settle."""
        gap = max(1 - self.shrinking, float(np.finfo(np.float64).eps))
        return max(super().time_constant, 2 * self.mu * self.steepness / gap)

    def begin(self, nodes: Nodes, atoms: Matrix, X: Matrix) -> DualState:
        """Return the state before the first round."""
        state = super().begin(nodes, atoms, X)
        return state._replace(memory=state.nu, excess=state.nu)

    def adapt(self, state: DualState, round_: int) -> DualState:
        """Take a gradient step and correct it by the last one."""
        psi = self._descend(state)
        sent = psi + state.nu
        sent -= state.memory
        return state._replace(sent=sent, memory=psi)

    def combine(self, state: DualState, inbox: Inbox) -> DualState:
        """Average half-way with the neighbors, and project on V_f."""
        mean = inbox.mean()
        nu = state.sent + mean
        nu /= 2
        excess = state.excess
        if np.isfinite(self.objective.bound):
            full = nu + excess
            nu = self.objective.project(full)
            excess = full - nu  # NIDS: kept, so that the fixed point meets (28)'s conditions
        after = state._replace(nu=nu, excess=excess)
        if not is_check_round(inbox.round):
            return after
        residual = self._residual(norms(nu - state.nu), norms(state.sent - mean), nu)
        return after._replace(residual=residual)


@lru_cache(maxsize=8)  # every block of samples has a program of its own
def _second(topology: Topology) -> float:
    """Return the second greatest eigenvalue of Metropolis weights."""
    return metropolis_weights(topology).second


def contraction_bound(weights: CombinationMatrix) -> float:
    """Return a bound, at most 1, of the factor by which weights shrink differences."""
    # The Frobenius norm bounds the spectral norm, and needs no eigenvalue of many nodes.
    excess = float(np.square(weights.matrix.data).sum()) - 1  # squared distance from 1 / N
    rounding = 4 * weights.topology.n_nodes * float(np.finfo(np.float64).eps)
    return min(1.0, sqrt(excess)) if excess > rounding else 0.0
