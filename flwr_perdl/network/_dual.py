"""What all methods of dual inference have in common: the state of the agents, and `DualInference`.

See `flwr_perdl.network.inference` for the problem, the methods, and what each party receives.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf, log
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.arrays import row_norms
from flwr_perdl.core.checks import Matrix, check_array, check_count, check_list, own_numbers
from flwr_perdl.network._minimize import correlate
from flwr_perdl.network.combine import Inbox
from flwr_perdl.network.objectives import WEIGHTS, Objective, check_agents
from flwr_perdl.network.topology import Topology

Nodes = NDArray[np.intp]
Dictionaries = Sequence[Matrix] | Mapping[int, Matrix]

#: Residuals are measured in every tenth round (and in few before): a measurement costs as much as
#: half a round.
_EVERY = 10
#: Communication rounds, at most, where their number is not given.
MOST_ROUNDS = 100_000
#: By how much a unit-norm atom may be longer than 1, for rounding.
_SLACK = 1e-3


class DualState(NamedTuple):
    """The state of m agents that infer the duals of n_samples samples.

    Arrays of m agents' rows are (m, n_samples, n_features), or (m, 0) where a method needs none.

    Attributes
    ----------
    nodes, batch : ndarrays of shape (m,)
        The agents' ids, and which batch of a stream each works on, from 1; 0: there is no stream.
    atoms : ndarray of shape (m, n_atoms, n_features)
        Each agent's atoms; agents with fewer have zeros at the end.
    linear : ndarray of m agents' rows
        The linear part of what an agent minimizes: ``theta_k x``. In ADMM it includes what the
        neighbors have sent, and is divided by the curvature: the minimum of the quadratic part.
    memory, excess : ndarrays of m agents' rows
        Further memory of a method, and what projections on V_f have removed.
    nu, sent : ndarrays of m agents' rows
        The estimates, and what the neighbors receive: nu itself, or a step from it.
    codes : ndarray of shape (m, n_samples, n_atoms)
        The agents' codes; a guess where a method does not need them.
    change, residual : ndarrays of shape (m, n_samples)
        Length of the last step of nu that was measured, if `adapt` takes it, and an estimate of
        nu's relative error from what an agent itself knows.
    """

    nodes: Nodes
    batch: NDArray[np.intp]
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

    The estimates start from 0. An agent's residual estimates its relative error from what the agent
    knows: the larger of its distance to its neighbors' mean and of its last step times
    `time_constant`, divided by the norm of its estimate. It is measured in rounds 1, 2, 4
    and 8, and then in every tenth.

    Parameters
    ----------
    objective : Objective
        Loss and regulariser.
    topology : Topology
        Which agents are neighbors; connected and undirected.
    dictionaries : sequence or mapping of int to ndarray of shape (n_atoms_k, n_features)
        Agents' atoms, of norm at most 1; in a mapping, those of the agents hosted here.
    X : ndarray of shape (n_samples, n_features)
        Samples; used by informed agents only.
    informed : sequence of int, optional
        The agents N_I that see the samples; all by default.
    n_atoms : int, optional
        The most atoms of any agent; by default the most in ``dictionaries``.

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
        check_agents(self.objective, self.topology.n_nodes, *WEIGHTS)
        atoms = self.dictionaries
        hosted = list(atoms.values()) if isinstance(atoms, Mapping) else list(atoms)
        if isinstance(atoms, Sequence) and len(atoms) != self.topology.n_nodes:
            raise ValueError(
                f"dictionaries must be one per node, {self.topology.n_nodes}, got {len(atoms)}."
            )
        X, hosted = check_inference(self.X, hosted)
        checked = dict(zip(atoms, hosted, strict=True)) if isinstance(atoms, Mapping) else hosted
        most = max(len(D) for D in hosted)
        for name, value in {
            "X": X,
            "dictionaries": checked,
            "informed": informed_agents(self.informed, self.topology.n_nodes),
            "n_atoms": check_count("n_atoms", self.n_atoms or most, most),
        }.items():
            object.__setattr__(self, name, value)

    @cached_property
    def curvature(self) -> float:
        """Every agent's share of f*'s curvature: ``strong_convexity / N``."""
        return self.objective.strong_convexity / self.topology.n_nodes

    @cached_property
    def steepness(self) -> float:
        """An agent's curvature along an atom, in the mean over all agents.

        ``strong_convexity / N`` and ``n_atoms / delta``, spread over the directions there are: as
        many as atoms in all, and no more than features.
        """
        most = self.n_atoms or 1
        directions = max(1, min(self.topology.n_nodes * most, self.X.shape[1]))
        share: float = most / directions / self.objective.modulus
        return self.curvature + share

    @property
    @abstractmethod
    def time_constant(self) -> float:
        """About how many rounds the slowest part of the error takes to shrink by a factor e."""

    def rounds(self, tolerance: float) -> int:
        """Return in how many rounds an error of 1 shrinks to ``tolerance``, by `time_constant`.

        At least 10, at most 100,000. If more are needed, a UserWarning gives the number.
        """
        needed = self.time_constant * log(1 / min(tolerance, 1))
        if needed > MOST_ROUNDS:
            warnings.warn(
                f"The tolerance {tolerance:g} may need {needed:.3g} communication rounds, of which "
                f"at most {MOST_ROUNDS} are run unless their number is given.",
                stacklevel=2,
            )
        return min(_EVERY * max(1, ceil(min(needed, MOST_ROUNDS) / _EVERY)), MOST_ROUNDS)

    def start(self, nodes: Nodes) -> DualState:
        """Return the state before the first round."""
        return self.begin(nodes, self.atoms(nodes), self.X)

    def atoms(self, nodes: Nodes) -> Matrix:
        """Return the nodes' atoms, as in `DualState`."""
        atoms = np.zeros((len(nodes), self.n_atoms or 0, self.X.shape[1]), dtype=self.X.dtype)
        for i, node in enumerate(nodes):
            own = self.dictionaries[int(node)]
            atoms[i, : len(own)] = own
        return atoms

    def begin(self, nodes: Nodes, atoms: Matrix, X: Matrix) -> DualState:
        """Return the state before the first round with other atoms, (m, ...), and samples."""
        m, (n_samples, n_features) = len(nodes), X.shape
        agents = list(self.informed or ())
        seeing = np.isin(nodes, agents)
        linear = np.zeros((m, n_samples, n_features), dtype=X.dtype)
        linear[seeing] = X / len(agents)  # theta_k x (29)
        none = np.zeros((m, 0), dtype=X.dtype)
        far = np.full((m, n_samples), inf, dtype=X.dtype)
        zeros = np.zeros_like(linear)
        codes = np.zeros((m, n_samples, atoms.shape[1]), dtype=X.dtype)
        first = np.zeros(m, dtype=np.intp)
        return DualState(nodes, first, atoms, linear, none, none, zeros, zeros, codes, far, far)

    @abstractmethod
    def adapt(self, state: DualState, round_: int) -> DualState:
        """Do the local work of a round."""

    def message(self, state: DualState) -> tuple[Matrix, ...]:
        """Return what every neighbor receives: one array of nu's shape."""
        return (state.sent,)

    @abstractmethod
    def combine(self, state: DualState, inbox: Inbox) -> DualState:
        """Take in the neighbors' messages."""

    def observe(self, state: DualState) -> dict[str, Matrix]:
        """Return codes (42), estimates and residuals."""
        S = correlate(state.nu, state.atoms)
        codes = self.objective.at(state.nodes).code(S)
        return {"codes": codes, "nu": state.nu, "residual": state.residual}

    def _residual(self, change: Matrix, apart: Matrix, nu: Matrix) -> Matrix:
        """Return the residuals from the lengths of the last steps and distances to neighbors."""
        # An error that shrinks by exp(-1/t) a round is t times as long as its last step. Errors are
        # relative to nu in the Euclidean norm: that is the paper's signal-to-noise ratio (IV-A).
        size = np.maximum(norms(nu), np.finfo(nu.dtype).tiny)
        with np.errstate(over="ignore"):  # where nothing has been received yet, nu is 0
            residual: Matrix = np.maximum(change * self.time_constant, apart) / size
        return residual


def is_check_round(round_: int) -> bool:
    """Whether residuals are measured in this round: 1, 2, 4, 8, and then every tenth."""
    return round_ % _EVERY == 0 or (round_ < _EVERY and round_.bit_count() == 1)


def check_inference(X: Matrix, dictionaries: Sequence[Matrix]) -> tuple[Matrix, list[Matrix]]:
    """Return samples and atoms, checked."""
    X = check_array("X", X, floor=0.8)
    if not len(check_list("dictionaries", dictionaries)):
        raise ValueError("dictionaries must have at least one, got none.")
    atoms = [check_array("dictionaries", D, columns=X.shape[1]) for D in dictionaries]
    mismatch = next((D for D in atoms if D.dtype != X.dtype), None)
    if mismatch is not None:
        raise ValueError(f"dictionaries must be {X.dtype} as X is, got {mismatch.dtype}.")
    with np.errstate(over="ignore"):
        longest = max(float(row_norms(D).max(initial=0)) for D in atoms)
    if longest > 1 + _SLACK:  # steps and their bounds hold for no other atoms
        raise ValueError(f"dictionaries must have atoms of norm at most 1, got {longest:g}.")
    return X, atoms


def norms(A: Matrix) -> Matrix:
    """Return the norms over the last axis, also where squares would underflow."""
    norms = row_norms(A)
    limits = np.finfo(A.dtype)
    faint = norms < np.sqrt(limits.tiny) / limits.eps
    if faint.any():
        size = np.abs(A[faint]).max(axis=-1, initial=0)
        norms[faint] = size * row_norms(A[faint] / np.where(size > 0, size, 1)[:, None])
    return norms


def informed_agents(informed: Sequence[int] | None, n_agents: int) -> tuple[int, ...]:
    if informed is None:
        return tuple(range(n_agents))
    named = check_list("informed", informed)
    if not len(named):
        raise ValueError("informed must name at least one agent, got none.")
    return tuple(sorted({check_count("informed", k, 0, n_agents - 1) for k in named}))


def column(values: NDArray[Any], like: Matrix) -> Matrix:
    """Return one number per node, shaped and typed to multiply stacked arrays."""
    column: Matrix = np.asarray(values, dtype=like.dtype)[:, None, None]
    return column
