r"""Dual inference over a network: every agent finds nu from its neighbors' messages (Section III).

Chen, Towfic, Sayed, "Dictionary Learning over Distributed Models", IEEE TSP 2015. The dual
(28) of coding a sample x is a sum of costs (29), each of which one agent knows:

    J_k(nu; x) = -theta_k nu'x + f*(nu) / N + h*(W_k nu),   nu in V_f

with ``theta_k = 1 / |N_I|`` at the agents N_I that see the sample and 0 at the others. From
its minimizer every agent computes its own codes (42), and the residual, with which it updates its
atoms (56).

=========================================== ===================================================
paper                                       here
=========================================== ===================================================
``nu_{k,i}``                                ``state.nu``, (m, n_samples, n_features)
``theta_k x``                               ``state.linear`` at the start
``W_k``                                     ``state.atoms``, (m, n_atoms, n_features)
ATC diffusion (31), projected (37)          :class:`ATC`
(42)                                        ``objective.code(S)``
``J_k(nu_k; xi)`` (29), (60)                :func:`local_costs`
=========================================== ===================================================

Two methods are not in the paper, because (31) converges slowly, and only to a point O(mu) away:

- :class:`ExactDiffusion` (Yuan, Ying, Zhao, Sayed, "Exact diffusion for distributed optimization
  and learning", IEEE TSP 2019; with V_f as in NIDS: Li, Shi, Yan, IEEE TSP 2019): ATC without its
  bias.
- :class:`ConsensusADMM`, the default: the edge-based ADMM (Shi, Ling, Yuan, Wu, Yin, "On the linear
  convergence of the ADMM in decentralized consensus optimization", IEEE TSP 2014), over-relaxed
  (as in Eckstein and Bertsekas, 1992), with a penalty of its own for every edge.

**What each party receives.** In every round an agent sends its neighbors its estimate of nu (or of
a gradient step from it), n_features values per sample, and never an atom or a code. But nu *is* the
residual of the sample (58): an agent's neighbors learn the sample up to what the atoms explain,
whether they are informed or not.

The methods are in ``_atc.py`` and ``_admm.py``, what they share in ``_dual.py``, the exact solution
in ``_minimize.py``. Blocks of samples run in threads, in fewer coordinates where that is possible
(``_span.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

from flwr_perdl.core.checks import (
    Matrix,
    check_array,
    check_choice,
    check_count,
    check_flag,
    check_list,
    check_real,
)
from flwr_perdl.core.threads import in_threads, one_blas_thread
from flwr_perdl.network._admm import ConsensusADMM
from flwr_perdl.network._atc import ATC, ExactDiffusion, contraction_bound
from flwr_perdl.network._dual import (
    MOST_ROUNDS,
    DualInference,
    DualState,
    check_inference,
    informed_agents,
    is_check_round,
)
from flwr_perdl.network._minimize import costs, descend, minimize
from flwr_perdl.network._span import Found, in_span
from flwr_perdl.network.combine import run_round
from flwr_perdl.network.exchange import resolve_weights, run_program
from flwr_perdl.network.objectives import Objective, check_closed_forms, check_objective
from flwr_perdl.network.schedule import links_of, schedule_of
from flwr_perdl.network.topology import CombinationMatrix

__all__ = [
    "ATC",
    "DUAL_METHODS",
    "ConsensusADMM",
    "DualInference",
    "DualState",
    "ExactDiffusion",
    "ExactDual",
    "Inference",
    "exact_dual",
    "infer",
    "local_costs",
]

#: Bytes of one stacked array of a block of samples. A few such arrays fit into a CPU cache.
_BLOCK = 2**21


def local_costs(
    objective: Objective,
    X: Matrix,
    nu: Matrix,
    dictionaries: Matrix,
    informed: Sequence[int] | None = None,
) -> Matrix:
    """Return each agent's cost ``J_k(nu_k; x)`` (29) at its own dual variables.

    At the optimum their sum is minus the lowest cost of coding the sample (65): its novelty to the
    network. The agents find their mean by `Averaging`.

    Parameters
    ----------
    objective : Objective
        f, h and V_f.
    X : ndarray of shape (n_samples, n_features)
        Samples; only informed agents use them.
    nu : ndarray of shape (n_agents, n_samples, n_features)
        Every agent's dual variables, within V_f up to rounding.
    dictionaries : ndarray of shape (n_agents, n_atoms, n_features)
        Every agent's atoms, of norm at most 1.
    informed : sequence of int, optional
        The agents that see the samples (N_I); all by default.

    Returns
    -------
    ndarray of shape (n_agents, n_samples)

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.network import SparseSVD, Topology, infer, local_costs
    >>> objective, D = SparseSVD(gamma=0.1, delta=0.1), np.eye(4)[:3, None]  # three agents' atoms
    >>> X = np.array([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])  # the second has no atom
    >>> nu = infer(objective, X, list(D), Topology.ring(3)).nu
    >>> cost = -local_costs(objective, X, nu, D).sum(axis=0)
    >>> bool(cost[1] > cost[0])
    True
    """
    dictionaries = check_array("dictionaries", dictionaries, ndim=3, min_rows=1)
    X, _ = check_inference(X, list(dictionaries))
    n_agents = len(dictionaries)
    check_objective(objective, n_agents)
    nu = _check_nu(objective, nu, n_agents, X)
    # In the order of (29): f*'s share, h* of the own atoms, and the sample where it is known.
    costs = objective.conjugate(nu) / n_agents
    costs += objective.regulariser_conjugate(np.matmul(nu, dictionaries.swapaxes(1, 2)))
    seen = list(informed_agents(informed, n_agents))
    costs[seen] -= np.einsum("kim,im->ki", nu[seen], X) / len(seen)
    return costs


def _check_nu(objective: Objective, nu: Matrix, n_agents: int, X: Matrix) -> Matrix:
    """Return dual variables, projected on V_f if rounding has moved them out of it."""
    nu = check_array("nu", nu, ndim=3, floor=0.8)
    if nu.shape != (n_agents, *X.shape):
        raise ValueError(f"nu must have shape {(n_agents, *X.shape)}, got {nu.shape}.")
    if nu.dtype != X.dtype:
        raise ValueError(f"nu must be {X.dtype} as X is, got {nu.dtype}.")
    largest = float(np.abs(nu).max(initial=0))
    if largest > objective.bound * (1 + np.sqrt(np.finfo(nu.dtype).eps)):
        raise ValueError(f"nu must be within {objective.bound:g}, got {largest:g}.")
    return objective.project(nu)


class ExactDual(NamedTuple):
    """The solution of one agent that holds all atoms.

    Attributes
    ----------
    codes : tuple of ndarray of shape (n_samples, n_atoms_k)
        Agent by agent.
    nu : ndarray of shape (n_samples, n_features)
        The dual variables.
    cost : ndarray of shape (n_samples,)
        The least cost (7), which is the greatest value of the dual.
    gap : ndarray of shape (n_samples,)
        Primal minus dual value: 0 up to rounding and the tolerance.
    error : ndarray of shape (n_samples,)
        A bound of the relative error of ``nu`` that follows from the gap; 0 where the solution is
        exact up to rounding.
    """

    codes: tuple[Matrix, ...]
    nu: Matrix
    cost: Matrix
    gap: Matrix
    error: Matrix


def exact_dual(
    objective: Objective, X: Matrix, dictionaries: Sequence[Matrix], *, tolerance: float = 0.0
) -> ExactDual:
    """Solve the inference problem (7) and its dual (28) in one place.

    The reference for all methods, and the limit of all but ATC and consensus on any connected
    network, whichever agents are informed.

    Parameters
    ----------
    objective : Objective
        Loss and regularizer.
    X : ndarray of shape (n_samples, n_features)
        Samples.
    dictionaries : sequence of ndarray of shape (n_atoms_k, n_features)
        The agents' atoms, of norm at most 1.
    tolerance : float, default 0.0
        Relative error of the duals that is allowed, ``||nu - nu^o|| <= tolerance * ||x||``. With 0
        the solution is exact up to rounding, in the dtype of X, and computed in float64. With
        many atoms a positive tolerance saves time under the squared loss; under another loss the
        solution stays exact.

    Returns
    -------
    ExactDual

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.network import SparseSVD, exact_dual
    >>> X = np.array([[2.0, 0.0]])
    >>> found = exact_dual(SparseSVD(gamma=0.1, delta=0.1), X, [np.eye(2)])
    >>> np.concatenate(found.codes, axis=1).round(3) + 0.0
    array([[1.727, 0.   ]])
    """
    X, atoms = check_inference(X, dictionaries)
    check_objective(objective, len(atoms))
    check_closed_forms(objective)
    tolerance = check_real("tolerance", tolerance, 0)
    dtype, W = X.dtype, np.concatenate(atoms)
    exact = tolerance == 0 or bool(np.isfinite(objective.bound))
    objective = objective.per_atom([len(D) for D in atoms], np.float64 if exact else dtype)
    if exact:
        W, X = W.astype(np.float64), X.astype(np.float64, copy=False)
        a = objective.strong_convexity
        # (28) is an agent's problem (39a) with all atoms.
        (nu,), (codes,) = minimize(objective, W[None], X[None] / a, np.array([a]))
    else:
        codes = descend(objective, W, X, tolerance)
        nu = X - codes @ W  # (55): of the squared loss the dual is the residual
    cost, gap = costs(objective, W, X, codes, nu)
    size = np.maximum(np.linalg.norm(X, axis=1), np.finfo(X.dtype).tiny)
    # f* is strongly convex with modulus 1: half the squared distance to nu^o is at most the gap.
    error = np.zeros_like(size) if exact else np.sqrt(2 * np.maximum(gap, 0)) / size
    ends = np.cumsum([len(D) for D in atoms])[:-1]
    kept = [array.astype(dtype, copy=False) for array in (codes, nu, cost, gap, error)]
    return ExactDual(tuple(np.split(kept[0], ends, axis=1)), *kept[1:])


DUAL_METHODS: dict[str, type[DualInference]] = {
    "admm": ConsensusADMM,
    "atc": ATC,
    "exact_diffusion": ExactDiffusion,
}


class Inference(NamedTuple):
    """What `infer` found.

    Attributes
    ----------
    codes : tuple of ndarray of shape (n_samples, n_atoms_k)
        Each agent's codes (42).
    nu : ndarray of shape (n_agents, n_samples, n_features)
        Each agent's estimate of the dual variables.
    rounds : int
        Communication rounds; with several blocks of samples, the most of any block.
    residual : ndarray of shape (n_agents, n_samples)
        Each agent's own estimate of its relative error, see `DualInference`.
    converged : bool
        Whether all residuals are within the tolerance.
    """

    codes: tuple[Matrix, ...]
    nu: Matrix
    rounds: int
    residual: Matrix
    converged: bool


def infer(
    objective: Objective,
    X: Matrix,
    dictionaries: Sequence[Matrix],
    network: Any,
    *,
    method: str = "admm",
    n_rounds: int | None = None,
    tolerance: float = 1e-3,
    informed: Sequence[int] | None = None,
    compress: bool | None = None,
    **options: Any,
) -> Inference:
    """Infer the duals and codes of samples: every agent has its own atoms and its neighbors.

    On a topology or weights, a block of samples ends when every agent's residual is within the
    tolerance, and blocks run on all cores. On an `InMemoryNetwork`, as on a federation, where no
    agent knows the others' residuals, all ``n_rounds`` are run.

    Parameters
    ----------
    objective : Objective
        Loss and regularizer.
    X : ndarray of shape (n_samples, n_features)
        Samples.
    dictionaries : sequence of ndarray of shape (n_atoms_k, n_features)
        The agents' atoms, of norm at most 1.
    network : Topology, CombinationMatrix or InMemoryNetwork
        Which agents are neighbors: connected, undirected, with doubly stochastic weights
        (``"exact_diffusion"``: symmetric ones; ADMM uses none). A topology has Metropolis
        weights; the first two run without faults. With ADMM, which keeps a multiplier
        per link, a changing network may have no links that its ``topology`` lacks.
    method : {"admm", "atc", "exact_diffusion"}, default "admm"
        `ConsensusADMM`, `ATC` or `ExactDiffusion`.
    n_rounds : int, optional
        Largest number of communication rounds. By default `DualInference.rounds` of the tolerance,
        in memory, where the residuals end the run, four times that; never more than 100,000.
    tolerance : float, default 1e-3
        Residual at which to stop; 0: never.
    informed : sequence of int, optional
        The agents that see the samples; all by default.
    compress : bool, optional
        Whether to iterate in the span of sample and atoms, in memory. By default where that is
        cheaper and changes only rounding: nu stays in that span under the squared loss. With a
        bounded V_f the diffusions can do so as well, unless an entry meets a bound and leaves it.
    **options : float
        Options of the method: ``step``, ``penalty``, ``relaxation``.

    Returns
    -------
    Inference

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.network import SparseSVD, Topology, infer
    >>> D = np.eye(4)[:, None]  # four agents with one atom each
    >>> X = np.array([[2.0, 0.0, 0.0, -1.0]])
    >>> found = infer(SparseSVD(gamma=0.1, delta=0.1), X, list(D), Topology.ring(4), tolerance=1e-6)
    >>> np.concatenate(found.codes, axis=1).round(2) + 0.0
    array([[ 1.73,  0.  ,  0.  , -0.82]])
    """
    kind = DUAL_METHODS[check_choice("method", method, DUAL_METHODS)]
    tolerance = check_real("tolerance", tolerance, 0)
    check_objective(objective, len(check_list("dictionaries", dictionaries)))
    if isinstance(network, CombinationMatrix):  # of a topology, programs know the weights
        _check_sums(network, kind)
        options = {**_contraction(network, kind), **options}
    network = resolve_weights(network)
    in_memory = isinstance(network, CombinationMatrix)
    if in_memory and not network.is_connected:
        raise ValueError(f"network must be connected, got {network}.")
    topology = links_of(network)

    program = kind(objective, topology, dictionaries, X, informed, **options)
    X, atoms = program.X, [program.dictionaries[k] for k in range(topology.n_nodes)]
    compress = _compresses(compress, program, in_memory)
    if n_rounds is None:
        # The time constant is an estimate. In memory the residuals end the run: a limit of four
        # times as many rounds costs nothing where they are not needed.
        needed = program.rounds(tolerance or float(np.finfo(X.dtype).eps))
        n_rounds = min(needed * (4 if in_memory else 1), MOST_ROUNDS)
    check_count("n_rounds", n_rounds)
    if in_memory:

        def solve(objective: Objective, X: Matrix, W: Sequence[Matrix]) -> Found:
            turned = kind(objective, topology, W, X, informed, **options)
            return _in_blocks(turned, network, n_rounds, tolerance)

        with one_blas_thread():  # blocks run in threads, which BLAS threads would compete with
            if compress:
                rounds, seen = in_span(objective, X, atoms, _reach(program, n_rounds), solve)
            else:
                rounds, seen = _in_blocks(program, network, n_rounds, tolerance)
    else:
        check_carrier(network, program)
        run = run_program(program, network, n_rounds)
        rounds, seen = run.rounds, run.observed
    residual = seen["residual"]
    return Inference(
        # Agents with fewer atoms than others were filled up with zeros, see `DualState`.
        codes=tuple(C[:, : len(D)] for C, D in zip(seen["codes"], atoms, strict=True)),
        nu=seen["nu"],
        rounds=rounds,
        residual=residual,
        converged=bool((residual <= tolerance).all()),
    )


def _compresses(compress: bool | None, program: DualInference, in_memory: bool) -> bool:
    """Return whether to iterate in the span of sample and atoms."""
    exact = not np.isfinite(program.objective.bound)
    if compress is None:
        # The way to the span and back costs a few rounds; a round is cheaper by the ratio of the
        # dimensions. From one half on this pays.
        n_atoms = sum(len(program.dictionaries[k]) for k in range(program.topology.n_nodes))
        return exact and in_memory and 2 * (n_atoms + 1) <= program.X.shape[1]
    compress = check_flag("compress", compress)
    if compress and not (in_memory and (exact or isinstance(program, ATC))):
        raise ValueError(
            "compress must be False on a network, or with ADMM and a bounded V_f, got True: "
            "the span of sample and atoms is known in memory only, and ADMM leaves it at bounds."
        )
    return compress


def _contraction(weights: CombinationMatrix, kind: type[DualInference]) -> dict[str, float]:
    """Return the option of a diffusion that depends on the weights."""
    if not issubclass(kind, ATC):
        return {}
    # ATC's weights may be unsymmetric: their distance from 1/N bounds the second singular value,
    # without an eigenvalue. Exact diffusion averages with (I + A) / 2, where the sign matters.
    bound = contraction_bound(weights) if kind is ATC else weights.second
    return {"contraction": min(max(bound, 0.0), 1.0)}


def _reach(program: DualInference, n_rounds: int) -> float:
    """Return what share of ``x / strong_convexity`` an entry of nu can reach, see `in_span`."""
    o = program.objective
    if type(program) is not ATC or not o.nonnegative or o.own_forms:
        return 1.0  # corrections and multipliers overshoot: only (31) itself rises step by step
    return float(1 - (1 - program.mu * program.curvature) ** n_rounds)


def _in_blocks(
    program: DualInference, weights: CombinationMatrix, n_rounds: int, tolerance: float
) -> Found:
    """Run a program with all agents here, and every message received, block by block.

    Samples are independent, and a block stays in the cache.
    """
    X, everyone = program.X, np.arange(program.topology.n_nodes)
    most = max(1, _BLOCK // max(1, len(everyone) * X.shape[1] * X.itemsize))
    means, links = weights.matrix.astype(X.dtype, copy=False), program.topology.adjacency
    atoms = program.atoms(everyone)

    def block(Y: Matrix) -> Found:
        state, round_, found = program.begin(everyone, atoms, Y), 0, False
        while round_ < n_rounds and not found:
            round_ += 1
            state = run_round(program, state, round_, means, links)
            found = is_check_round(round_) and bool(state.residual.max(initial=0) <= tolerance)
        return round_, program.observe(state)

    parts = list(in_threads(block, np.array_split(X, max(1, ceil(len(X) / most)))))
    names = parts[0][1]
    joined = {name: np.concatenate([seen[name] for _, seen in parts], axis=1) for name in names}
    return max(rounds for rounds, _ in parts), joined


def _check_sums(weights: CombinationMatrix, kind: type[DualInference]) -> None:
    """Raise a ValueError if a diffusion with these weights does not lead to the optimum."""
    if not weights.doubly_stochastic:
        raise ValueError(f"network must have doubly stochastic weights, got {weights}.")
    if kind is ExactDiffusion and not weights.symmetric:
        raise ValueError(
            f'network must have symmetric weights with method "exact_diffusion", got {weights}: '
            '"atc" takes any doubly stochastic ones.'
        )


def check_carrier(network: Any, program: DualInference) -> None:
    """Raise a ValueError if the program cannot find the duals on this network of messages."""
    for matrix in schedule_of(network).matrices:
        if isinstance(program, ATC):
            _check_sums(matrix, type(program))
        # A multiplier belongs to a link: without the link at both ends their sum would not stay 0.
        more = sparse.coo_array(matrix.topology.adjacency > program.topology.adjacency)
        if isinstance(program, ConsensusADMM) and more.nnz:
            k, j = (int(nodes[0]) for nodes in more.coords)
            raise ValueError(f"network must have no links that its topology lacks, got {k} - {j}.")
