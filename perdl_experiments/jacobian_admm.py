"""The Jacobian ADMM of Chen, Towfic, Sayed (2015), Section III-C, which `inference` compares with.

With adjacency B, degrees d and Laplacian L of the network, (39a)-(39b) is

    nu_k = argmin over V_f of J_k(nu) - lambda_k'nu + c sum_l ||nu - nu_l||^2
    lambda <- lambda - mu L nu

where ``lambda_k`` is the sum of the paper's ``lambda_kl`` and the paper has c = 1. Deviations:
(39b) has the wrong sign (as printed the recursion diverges), and (39a) should not sum over k.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.linalg import eigsh

from flwr_perdl.core.checks import Matrix
from flwr_perdl.network import Inbox
from flwr_perdl.network.inference import ConsensusADMM, DualState
from flwr_perdl.random import spawn


@dataclass(frozen=True, eq=False)
class JacobianADMM(ConsensusADMM):
    """The paper's Jacobian ADMM, with its signs made to agree; without residuals.

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
            return self.step
        degrees, n = self.topology.degrees, self.topology.n_nodes
        roots = sparse.diags_array(1 / np.sqrt(degrees))
        normalized = sparse.csr_array(roots @ self.topology.adjacency @ roots)
        start = spawn(0).standard_normal(n)
        least = eigsh(normalized, k=1, which="SA", v0=start, return_eigenvectors=False)
        # top is the largest eigenvalue of L, relative to D; 2 is that of bipartite graphs, on which
        # D + B is singular, and only the costs' own curvature is left to stabilize the step.
        top = 1 - float(least[0])
        most = (4 * (2 - top) + 2 * self.curvature / (self.edge * float(degrees.max()))) / top
        return min(1.0, most / 2)

    @cached_property
    def edge(self) -> float:
        """The penalty c of every edge."""
        return self.strength / float(self.topology.degrees.mean())

    @cached_property
    def curvatures(self) -> NDArray[np.float64]:
        """``a_k = strong_convexity / N + 2 c d_k``: (n_nodes,)."""
        return self.curvature + 2 * self.edge * self.topology.degrees.astype(np.float64)

    def begin(self, nodes: NDArray[np.intp], atoms: Matrix, X: Matrix) -> DualState:
        """Return the state before the first round."""
        state = super().begin(nodes, atoms, X)
        return state._replace(memory=state.linear)

    def combine(self, state: DualState, inbox: Inbox) -> DualState:
        """Update the multipliers (39b); ``memory`` is ``(theta_k x + lambda_k) / a_k``."""
        nodes, around = state.nodes, inbox.total()
        degree = self.topology.degrees[nodes][:, None, None]
        edge = (self.edge / self.curvatures[nodes])[:, None, None]
        memory = state.memory - (degree * state.nu - around) * (self.mu * edge)
        return state._replace(memory=memory, linear=memory + around * (2 * edge))
