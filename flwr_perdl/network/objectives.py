r"""The objectives of dictionary learning over distributed models: Tables I, II and III.

Chen, Towfic, Sayed, "Dictionary Learning over Distributed Models", IEEE TSP 2015. A sample
``x`` is coded by the atoms of all agents together, problem (7), and inferred through its dual (28):

    min_y  f(x - sum_k y_k W_k) + sum_k h(y_k)
    min_nu f*(nu) - nu'x + sum_k h*(W_k nu)  over nu in V_f

========================================== ====================================================
paper (columns)                            here (rows)
========================================== ====================================================
sample ``x_t``, dual ``nu`` (M)            rows of ``X`` and ``NU``, (..., n_features)
agent k's sub-dictionary ``W_k`` (M, N_k)  ``W``, (n_atoms, n_features)
coefficients ``y_k``                       rows of ``Y``, (..., n_atoms)
``W_k' nu``                                correlations ``S = NU @ W.T``, (..., n_atoms)
``f(u)``, ``f*(nu)``, ``V_f``              ``loss``, ``conjugate``, the box ``|nu_m| <= bound``
``h_y(y)``, ``h_y*(s)`` (Table II)         ``regulariser``, ``regulariser_conjugate``
(42): argmax over y of ``s'y - h_y(y)``    ``code``
(41): argmax over u of ``nu'u - f(u)``     ``conjugate_gradient``
``h_W``, its prox (48); W's set (50), (52) ``prox_dictionary``; ``project_dictionary``
``T_lambda``, its one-sided form           :func:`soft_threshold`, ``Objective.code``
``h_{y_k}`` of (10), agent k's own         ``gamma[k]``, ``delta[k]``; `Objective.at`
========================================== ====================================================

All four objectives of Table I share ``f*(nu) = strong_convexity / 2 ||nu||^2`` on a box, and an
elastic net ``h``; they differ in three properties (``strong_convexity``, ``bound``,
``nonnegative``) and in what they ask of the atoms. (71) of Appendix A should read
``eta / 2 ||nu||^2``, as Table II has it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.checks import LARGE, Matrix, check_count, check_kind, check_real, own_numbers
from flwr_perdl.dictionary.coding import soft_threshold

#: A weight of h: the same for all agents, or one of each agent's own.
Weight = float | Sequence[float]
WEIGHTS = ("gamma", "delta")


def check_objective(objective: Objective, n_agents: int) -> None:
    """Raise a TypeError unless this is an objective, a ValueError unless it is of these agents."""
    check_kind("objective", objective, Objective, "an Objective")
    check_agents(objective, n_agents, *WEIGHTS)


def check_field(record: Any, name: str, check: Callable[[Any], float]) -> None:
    """Check a field that is a number, or make it a tuple of the agents' own numbers, checked."""
    value = getattr(record, name)
    own = isinstance(value, list | tuple) or getattr(value, "ndim", 0) == 1
    object.__setattr__(record, name, tuple(map(check, value)) if own else check(value))


def check_agents(record: Any, n_agents: int, *names: str) -> None:
    """Raise a ValueError unless fields that have the agents' own numbers have one per agent."""
    for name in names:
        own = getattr(record, name)
        if isinstance(own, tuple) and len(own) != n_agents:
            raise ValueError(
                f"{name} must be one number, or one per agent, {n_agents}, got {len(own)}."
            )


def broadcast(weight: Weight, like: Matrix) -> Any:
    """Return a weight to multiply ``like`` with, whose first axis is that of the agents."""
    if not isinstance(weight, tuple):
        return weight
    return np.asarray(weight, dtype=like.dtype).reshape(-1, *[1] * (like.ndim - 1))


def check_closed_forms(objective: Objective) -> None:
    """Raise a ValueError if an objective has formulas that a closed form would not know."""
    if objective.own_forms:
        raise ValueError(
            "objective must keep the code, the regularizer and the conjugates of Objective for an "
            f"ADMM or an exact solution, got {type(objective).__name__}: infer with method "
            '"exact_diffusion" or "atc" instead.'
        )


def check_positive(name: str, X: Matrix) -> None:
    """Raise a ValueError if nonnegative codes and atoms cannot explain anything of X but zeros."""
    if X.size and X.max() <= 0 and X.any():
        raise ValueError(
            f"{name} must have a positive value to learn nonnegative atoms and codes from, got "
            f"none, and {float(X.min()):g} as the least."
        )


@dataclass(frozen=True)
class Objective(ABC):
    r"""A residual loss f, an elastic net h, and a constraint set for the atoms.

    All methods take any number of leading axes and keep the dtype. If agents have weights of their
    own, the first axis is that of the agents (of those whom `at` has chosen).

    A subclass may have another h, such as one that bounds the codes, (5)-(6): it overrides `code`,
    `regulariser` and `regulariser_conjugate`. h must stay strongly convex with modulus ``delta``.
    Only diffusions infer with it, see `own_forms`.

    Parameters
    ----------
    gamma : float, or sequence of float
        Weight of the codes' l1 norm in ``h(y) = gamma ||y||_1 + delta / 2 ||y||^2``, at least 0; in
        a sequence every agent's own, in order.
    delta : float, or sequence of float
        Weight of their squared l2 norm, at least 1e-30: it makes h strongly convex (Assumption 1).

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.network import Objective, SparseSVD
    >>> objective: Objective = SparseSVD(gamma=1.0, delta=1.0)
    >>> print(objective.loss(np.array([3.0, 4.0])), objective.regulariser(np.array([2.0])))
    12.5 4.0
    """

    gamma: Weight
    delta: Weight

    def __post_init__(self) -> None:
        """Check the parameters."""
        own_numbers(self)
        check_field(self, "gamma", partial(check_real, "gamma", low=0, high=LARGE))
        check_field(self, "delta", partial(check_real, "delta", low=1 / LARGE, high=LARGE))

    @property
    def modulus(self) -> float:
        """The least modulus of strong convexity of any agent's h."""
        return float(np.min(self.delta))

    @property
    def own_weights(self) -> bool:
        """Whether agents have weights of their own."""
        return any(isinstance(getattr(self, name), tuple) for name in WEIGHTS)

    def at(self, agents: Sequence[int] | NDArray[np.intp]) -> Objective:
        """Return the objective of these agents, in the order of the first axis."""
        return self._weighing(lambda own: tuple(own[agents].tolist()))

    def per_atom(self, counts: Sequence[int], dtype: Any) -> Objective:
        """Return the objective of one agent that has the atoms of all, ``counts[k]`` of agent k."""
        return self._weighing(lambda own: np.repeat(own, counts).astype(dtype))

    def _weighing(self, chosen: Callable[[Matrix], Any]) -> Objective:
        """Return the objective with other weights in the place of the agents' own."""
        other = copy(self)
        for name in WEIGHTS:
            if isinstance(own := getattr(self, name), tuple):
                object.__setattr__(other, name, chosen(np.asarray(own)))
        return other

    @property
    @abstractmethod
    def strong_convexity(self) -> float:
        """Modulus of f*: ``f*(nu) = strong_convexity / 2 ||nu||^2`` on its domain."""

    @property
    @abstractmethod
    def bound(self) -> float:
        """V_f is ``|nu_m| <= bound`` for every m; infinite: all of the space."""

    @property
    @abstractmethod
    def nonnegative(self) -> bool:
        """Whether codes and atoms must be nonnegative."""

    @property
    def own_forms(self) -> bool:
        """Whether a subclass has formulas of its own for h or f*.

        ADMM and `exact_dual` reject such an objective: their closed forms do not hold for it.
        """
        h = ("_threshold", "code", "regulariser", "regulariser_conjugate")
        conjugate = ("conjugate", "conjugate_gradient", "project")
        kind = type(self)
        return any(getattr(kind, name) is not getattr(Objective, name) for name in h + conjugate)

    @abstractmethod
    def loss(self, U: Matrix) -> Matrix:
        """Return f of every row, (...,).

        Parameters
        ----------
        U : ndarray of shape (..., n_features)
            Residuals.

        Returns
        -------
        ndarray of shape (...,)
        """

    def conjugate(self, NU: Matrix) -> Matrix:
        """Return f* of every row, (...,): infinite where a row leaves V_f (Table II).

        Parameters
        ----------
        NU : ndarray of shape (..., n_features)

        Returns
        -------
        ndarray of shape (...,)
        """
        values: Matrix = self.strong_convexity / 2 * np.square(NU).sum(axis=-1)
        if np.isfinite(self.bound):
            values = np.where((np.abs(NU) <= self.bound).all(axis=-1), values, np.inf)
        return values.astype(NU.dtype, copy=False)

    def conjugate_gradient(self, NU: Matrix) -> Matrix:
        """Return the gradient of f* at rows of V_f, (..., n_features): (41)'s residual u.

        What the atoms explain of a sample x is then ``x - u``. For the squared loss u is nu itself.
        For the Huber loss any ``|u_m| >= eta`` of nu's sign is a maximizer at a bound; the least is
        returned (Table II: "nothing").

        Parameters
        ----------
        NU : ndarray of shape (..., n_features)

        Returns
        -------
        ndarray of shape (..., n_features)
        """
        return self.strong_convexity * NU

    def project(self, NU: Matrix) -> Matrix:
        """Return the nearest points of V_f (36), (..., n_features).

        Parameters
        ----------
        NU : ndarray of shape (..., n_features)

        Returns
        -------
        ndarray of shape (..., n_features)
        """
        return np.clip(NU, -self.bound, self.bound) if np.isfinite(self.bound) else NU

    def regulariser(self, Y: Matrix) -> Matrix:
        """Return h of every row, (...,): infinite where a code may not be negative but is.

        Parameters
        ----------
        Y : ndarray of shape (..., n_atoms)
            Codes.

        Returns
        -------
        ndarray of shape (...,)
        """
        penalty = broadcast(self.gamma, Y) * np.abs(Y) + broadcast(self.delta, Y) / 2 * np.square(Y)
        values: Matrix = penalty.sum(axis=-1)
        if self.nonnegative:
            values = np.where((Y >= 0).all(axis=-1), values, np.inf)
        return values.astype(Y.dtype, copy=False)

    def regulariser_conjugate(self, S: Matrix) -> Matrix:
        """Return h* of every row of correlations, (...,).

        Table II's ``S(s / delta)``, (77) and (82), is ``||T_gamma(s)||^2 / (2 delta)``.

        Parameters
        ----------
        S : ndarray of shape (..., n_atoms)
            Correlations.

        Returns
        -------
        ndarray of shape (...,)
        """
        squares = np.square(self._threshold(S))
        values: Matrix = (squares / (2 * broadcast(self.delta, S))).sum(axis=-1)
        return values

    def code(self, S: Matrix) -> Matrix:
        """Return the codes (42) of correlations, ``T_gamma(s) / delta``, (..., n_atoms).

        They are the gradient of h*.

        Parameters
        ----------
        S : ndarray of shape (..., n_atoms)
            Correlations.

        Returns
        -------
        ndarray of shape (..., n_atoms)
        """
        codes: Matrix = self._threshold(S) / broadcast(self.delta, S)
        return codes

    def _threshold(self, S: Matrix) -> Matrix:
        gamma = broadcast(self.gamma, S)
        if self.nonnegative:
            return np.asarray(np.maximum(S - gamma, 0))  # the paper's one-sided T
        return np.asarray(S - np.clip(S, -gamma, gamma))

    def prox_dictionary(self, W: Matrix, step: float) -> Matrix:
        """Return the proximal point of ``step * h_W``: the atoms themselves where h_W is 0 (47).

        Parameters
        ----------
        W : ndarray of shape (n_atoms, n_features)
        step : float

        Returns
        -------
        ndarray of shape (n_atoms, n_features)
        """
        check_real("step", step, 0, LARGE)
        return W

    def project_dictionary(self, W: Matrix) -> Matrix:
        """Return the nearest atoms of norm at most 1 (50), where asked nonnegative ones (52).

        Parameters
        ----------
        W : ndarray of shape (n_atoms, n_features)

        Returns
        -------
        ndarray of shape (n_atoms, n_features)
        """
        if self.nonnegative:
            W = np.maximum(W, 0)
        projected: Matrix = W / np.maximum(np.linalg.norm(W, axis=-1, keepdims=True), 1)
        return projected

    def step_bound(self, n_atoms: int, n_agents: int = 1) -> float:
        """Return the bound below which ATC's step must stay, ``n_atoms`` the most of an agent.

        One agent gives Table III's ``1 / (eta + n_atoms / delta)``; the number of agents the
        somewhat greater bound of (33) itself, since an agent's cost (29) has its share of f* only.

        Parameters
        ----------
        n_atoms : int
            Largest number of atoms of an agent.
        n_agents : int, default 1

        Returns
        -------
        float
        """
        n_atoms, n_agents = check_count("n_atoms", n_atoms, 1), check_count("n_agents", n_agents, 1)
        return 1 / (self.strong_convexity / n_agents + n_atoms / self.modulus)


@dataclass(frozen=True)
class SparseSVD(Objective):
    """Sparse SVD: squared loss ``||u||^2 / 2``, elastic net, atoms in the unit ball.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.network import SparseSVD
    >>> SparseSVD(gamma=0.5, delta=1.0).code(np.array([2.0, -0.1]))
    array([1.5, 0. ])
    """

    strong_convexity = 1.0
    bound = np.inf
    nonnegative = False

    def loss(self, U: Matrix) -> Matrix:
        """Return ``||u||^2 / 2`` of every row, (...,)."""
        values: Matrix = np.square(U).sum(axis=-1) / 2
        return values


@dataclass(frozen=True)
class Biclustering(SparseSVD):
    """Bi-clustering: `SparseSVD` with ``h_W = beta * (sum of |atoms' entries|)``.

    Parameters
    ----------
    beta : float
        Weight of h_W, at least 0.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.network import Biclustering
    >>> Biclustering(gamma=0.5, delta=1.0, beta=1.0).prox_dictionary(np.array([[0.5, 0.05]]), 0.1)
    array([[0.4, 0. ]])
    """

    beta: float

    def __post_init__(self) -> None:
        """Check the parameters."""
        super().__post_init__()
        check_real("beta", self.beta, 0, LARGE)

    def prox_dictionary(self, W: Matrix, step: float) -> Matrix:
        """Return the atoms, soft-thresholded (48) by ``step * beta``; Algorithm 4 prints beta."""
        return soft_threshold(W, check_real("step", step, 0, LARGE) * self.beta)


@dataclass(frozen=True)
class NonnegativeMF(SparseSVD):
    """Nonnegative matrix factorization: squared loss, codes and atoms nonnegative.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.network import NonnegativeMF
    >>> NonnegativeMF(gamma=0.5, delta=1.0).code(np.array([2.0, -3.0]))
    array([1.5, 0. ])
    """

    nonnegative = True


@dataclass(frozen=True)
class HuberNMF(Objective):
    r"""Nonnegative factorization under Huber's loss, which is linear in large residuals.

    ``L(u) = u^2 / (2 eta)`` where ``|u| < eta``, else ``|u| - eta / 2``.

    Parameters
    ----------
    eta : float
        Where the loss turns linear, at least 1e-30; in the units of the data.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.network import HuberNMF
    >>> HuberNMF(gamma=0.5, delta=1.0, eta=0.5).loss(np.array([[0.1], [10.0]])).round(3)
    array([0.01, 9.75])
    """

    eta: float
    bound = 1.0  # (35)
    nonnegative = True

    def __post_init__(self) -> None:
        """Check the parameters."""
        super().__post_init__()
        check_real("eta", self.eta, 1 / LARGE, LARGE)

    @property
    def strong_convexity(self) -> float:
        """Modulus of f*: eta."""
        return self.eta

    def loss(self, U: Matrix) -> Matrix:
        """Return the sum of Huber's losses of every row, (...,)."""
        size = np.abs(U)
        values: Matrix = np.where(
            size < self.eta, np.square(U) / (2 * self.eta), size - self.eta / 2
        ).sum(axis=-1)
        return values.astype(U.dtype, copy=False)
