r"""How new a sample is to a network: Section IV-B and Algorithm 2.

P1 = Chen, Towfic, Sayed, "Dictionary Learning over Distributed Models", IEEE TSP 2015. The
score of a sample is the least cost (64) of coding it, by strong duality ``-sum_k J_k(nu; x)``
(65): what the network cannot explain costs more. Each agent knows its own term; the agents find the
mean of all terms with messages of one number per sample.

========================================== ====================================================
paper                                      here
========================================== ====================================================
``J_k(nu_k; xi)`` (29), (60)               `local_costs`, (n_agents, n_samples)
``g_k``, scalar diffusion (66)-(68)        `Averaging` with ``step`` = ``mu_g``
threshold ``chi`` (69)                     the caller's; a score above it is called novel
========================================== ====================================================

There are two deviations; an argument selects the paper's own form of each.

*The mean.* (68) starts from ``g = 0``, and its fixed point is off the mean by O(mu_g), 7 % at
``mu_g = 0.1``. Plain averaging from ``g_k = -J_k`` (``step=None``) converges to the mean, at the
rate of the combination matrix.

*The score.* The cost grows with the sample. Under Huber's loss this holds even for samples of one
norm: a few large entries cost less than many small ones. The normalised score divides the cost by
``f(x)``, the cost of explaining nothing: it is 1 if no atom helps, and near 0 if all is explained.
The paper's figures come from inference that was stopped long before convergence, where the raw cost
does not have this fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl._checks import (
    FLOATS,
    Matrix,
    check_array,
    check_choice,
    check_count,
    check_magnitude,
    check_real,
)
from flwr_perdl.diffusion._dual import checked_samples, informed_agents
from flwr_perdl.diffusion.combine import Array, Inbox, rounds_in_memory
from flwr_perdl.diffusion.objectives import Objective
from flwr_perdl.diffusion.topology import CombinationMatrix, Topology, metropolis_weights

SCORES = ("normalised", "raw")
#: To what part of its start the error falls, where the number of rounds is not given.
_ACCURACY = 1e-6
_MAX_ROUNDS = 10_000


class AveragingState(NamedTuple):
    """State of `Averaging`; see `Program`.

    Attributes
    ----------
    nodes : ndarray of shape (m,)
        Ids.
    own : ndarray of shape (m, ...)
        What each node contributes.
    estimate : ndarray of shape (m, ...)
        Each node's estimate of the mean.
    """

    nodes: NDArray[np.intp]
    own: Array
    estimate: Array


class Averaging:
    """Every node finds the mean of all nodes' values: scalar diffusion (68), as a `Program`.

    The combination matrix must be doubly stochastic, which keeps the mean in every round. A node's
    first message is its own value: its neighbors learn it.

    Parameters
    ----------
    values : sequence of ndarray, or mapping of int to ndarray
        Each node's own, of one shape; only those of hosted nodes are read.
    step : float, optional
        ``mu_g`` of (68): the estimate starts from 0 and moves by this share towards the node's own
        value in every round; its limit is only near the mean. By default it starts at the node's
        own value and is averaged plainly.
    """

    def __init__(
        self, values: Array | Sequence[Array] | Mapping[int, Array], step: float | None = None
    ) -> None:
        self.values = values
        self.step = step if step is None else check_real("step", step, 0, 1, open_low=True)

    def start(self, nodes: NDArray[np.intp]) -> AveragingState:
        """Return the state before the first round.

        Raises
        ------
        ValueError
            If there are too few values, or they are not float64 or float32.
        """
        values = self.values
        if not isinstance(values, Mapping) and not len(values) > max(nodes):
            raise ValueError(f"values must be one per node, got {len(values)}.")
        own = np.stack([values[k] for k in nodes])
        if own.dtype not in FLOATS:
            raise ValueError(f"values must be float64 or float32, got {own.dtype}.")
        return AveragingState(nodes, own, own if self.step is None else np.zeros_like(own))

    def adapt(self, state: AveragingState, round_: int) -> AveragingState:
        """Move the estimate towards the node's own value (68), or keep it."""
        if self.step is None:
            return state
        estimate = state.estimate - self.step * (state.estimate - state.own)
        return state._replace(estimate=estimate)

    def message(self, state: AveragingState) -> tuple[Array, ...]:
        """Return the estimate."""
        return (state.estimate,)

    def combine(self, state: AveragingState, inbox: Inbox) -> AveragingState:
        """Average over the neighborhood."""
        return state._replace(estimate=inbox.mean())

    def observe(self, state: AveragingState) -> dict[str, Array]:
        """Return the estimates."""
        return {"estimate": state.estimate}


def local_costs(
    objective: Objective,
    X: Matrix,
    nu: Matrix,
    dictionaries: Matrix,
    informed: Sequence[int] | None = None,
) -> Matrix:
    """Return each agent's cost ``J_k(nu_k; x)`` (29) at its own dual variables.

    Parameters
    ----------
    objective : Objective
        f, h and V_f.
    X : ndarray of shape (n_samples, n_features)
        Samples; only informed agents look at them.
    nu : ndarray of shape (n_agents, n_samples, n_features)
        Every agent's dual variables, within V_f but for rounding.
    dictionaries : ndarray of shape (n_agents, n_atoms, n_features)
        Every agent's atoms, of norm at most 1.
    informed : sequence of int, optional
        The agents that see the samples (N_I); all by default.

    Returns
    -------
    ndarray of shape (n_agents, n_samples)
        At the optimum their sum is minus the least cost of coding the sample (65).
    """
    dictionaries = check_array("dictionaries", dictionaries, ndim=3, min_rows=1)
    X, _ = checked_samples(X, list(dictionaries))
    n_agents = len(dictionaries)
    nu = _check_nu(objective, nu, n_agents, X)
    costs = objective.conjugate(nu) / n_agents
    costs += objective.regulariser_conjugate(np.matmul(nu, dictionaries.swapaxes(1, 2)))
    seen = list(informed_agents(informed, n_agents))
    costs[seen] -= np.einsum("kim,im->ki", nu[seen], X) / len(seen)
    return costs


def novelty_scores(
    objective: Objective,
    X: Matrix,
    nu: Matrix,
    dictionaries: Matrix,
    topology: Topology,
    *,
    score: str = "normalised",
    n_rounds: int | None = None,
    step: float | None = None,
    informed: Sequence[int] | None = None,
    weights: CombinationMatrix | None = None,
) -> Matrix:
    """Return every agent's score of how new each sample is (Algorithm 2).

    In memory; on another transport run `Averaging` of minus the `local_costs`.

    Parameters
    ----------
    objective : Objective
        f, h and V_f.
    X : ndarray of shape (n_samples, n_features)
        Samples.
    nu : ndarray of shape (n_agents, n_samples, n_features)
        Every agent's dual variables, as `infer` returns them.
    dictionaries : ndarray of shape (n_agents, n_atoms, n_features)
        Every agent's atoms.
    topology : Topology
        Who hears whom.
    score : {"normalised", "raw"}, default "normalised"
        The cost of coding a sample, ``n_agents`` times the mean of ``-J_k``, over ``f(x)`` or as
        it is (the paper's, but for the factor ``n_agents``). Samples of zeros score 0.
    n_rounds : int, optional
        Rounds of averaging; by default `averaging_rounds`.
    step : float, optional
        ``mu_g`` of the paper's biased average (68), see `Averaging`.
    informed : sequence of int, optional
        The agents that see the samples; all by default. Where not all are, ``f(x)`` is averaged
        as well: a second number per sample and message.
    weights : CombinationMatrix, optional
        Doubly stochastic; Metropolis weights by default.

    Returns
    -------
    ndarray of shape (n_agents, n_samples)
        Every agent's own scores.

    Raises
    ------
    ValueError
        If an argument is out of range, shapes differ, or the weights are not doubly stochastic.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.diffusion import SparseSVD, Topology, infer, novelty_scores
    >>> objective, topology = SparseSVD(gamma=0.1, delta=0.1), Topology.ring(3)
    >>> D = np.eye(4)[:3, None]  # three agents with one atom each
    >>> X = np.array([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])  # the second has no atom
    >>> nu = infer(objective, X, list(D), topology).nu
    >>> scores = novelty_scores(objective, X, nu, D, topology)
    >>> bool(np.all(scores[:, 1] > scores[:, 0]))
    True
    """
    X = check_array("X", X)
    costs = local_costs(objective, X, nu, dictionaries, informed)
    return average_scores(
        costs,
        objective.loss(X),
        topology,
        score=score,
        n_rounds=n_rounds,
        step=step,
        informed=informed,
        weights=weights,
    )


def average_scores(
    costs: Matrix,
    loss: Matrix,
    topology: Topology,
    *,
    score: str = "normalised",
    n_rounds: int | None = None,
    step: float | None = None,
    informed: Sequence[int] | None = None,
    weights: CombinationMatrix | None = None,
) -> Matrix:
    """Return `novelty_scores` of known costs.

    Parameters
    ----------
    costs : ndarray of shape (n_agents, n_samples)
        What `local_costs` returns.
    loss : ndarray of shape (n_samples,)
        ``f(x)`` of every sample.
    topology, score, n_rounds, step, informed, weights
        See `novelty_scores`.

    Returns
    -------
    ndarray of shape (n_agents, n_samples)
    """
    check_choice("score", score, SCORES)
    costs = check_array("costs", costs, min_rows=1)
    loss = check_array("loss", loss, ndim=1, columns=costs.shape[1])
    check_magnitude("costs", costs, floor=0.8)
    if loss.min(initial=0) < 0:
        raise ValueError(f"loss must be at least 0, got {loss.min():g}.")
    n_agents = len(costs)
    if topology.n_nodes != n_agents:
        raise ValueError(f"topology must have {n_agents} nodes, got {topology.n_nodes}.")
    weights = metropolis_weights(topology) if weights is None else weights
    if not weights.doubly_stochastic:
        raise ValueError("weights must be doubly stochastic to average, got weights that are not.")
    if weights.topology.n_nodes != n_agents or not weights.is_connected:
        raise ValueError(f"weights must connect all {n_agents} agents, got {weights}.")
    seen = list(informed_agents(informed, n_agents))
    if n_rounds is None:
        n_rounds = averaging_rounds(weights, step)
    n_rounds = check_count("n_rounds", n_rounds)
    values = -n_agents * costs
    if score == "normalised" and len(seen) < n_agents:
        known = np.zeros_like(values)
        known[seen] = loss * (n_agents / len(seen))
        values, total = np.moveaxis(_averaged([values, known], weights, n_rounds, step), 1, 0)
    else:
        values, total = _averaged([values], weights, n_rounds, step)[:, 0], loss
    if score == "raw":
        return values
    known = total >= np.finfo(total.dtype).tiny
    scores: Matrix = np.divide(values, total, out=np.zeros_like(values), where=known)
    return scores


def averaging_rounds(weights: CombinationMatrix, step: float | None = None) -> int:
    """Return how many rounds of `Averaging` bring the error down to 1e-6 of its start.

    Parameters
    ----------
    weights : CombinationMatrix
        Its second largest absolute eigenvalue, 1 minus the spectral gap, is the rate per round.
    step : float, optional
        ``mu_g``; then the rate is ``1 - step``.

    Returns
    -------
    int
        At most 10,000.
    """
    if step is not None:
        check_real("step", step, 0, 1, open_low=True)
    rate = 1 - (weights.spectral_gap if step is None else step)
    if rate <= _ACCURACY:
        return 1
    if rate >= 1:
        return _MAX_ROUNDS
    return min(int(np.ceil(np.log(_ACCURACY) / np.log(rate))), _MAX_ROUNDS)


def _averaged(
    parts: Sequence[Matrix], weights: CombinationMatrix, n_rounds: int, step: float | None
) -> Matrix:
    """Run `Averaging` in memory: (n_agents, n_parts, n_samples)."""
    program = Averaging(np.stack(parts, axis=1), step)
    links = weights.topology.adjacency
    *_, ran = rounds_in_memory(program, len(parts[0]), n_rounds, weights.matrix, links)
    estimate: Matrix = ran.state.estimate
    return estimate


def _check_nu(objective: Objective, nu: Matrix, n_agents: int, X: Matrix) -> Matrix:
    """Return dual variables, projected on V_f if rounding has moved them out of it."""
    nu = check_magnitude("nu", check_array("nu", nu, ndim=3), floor=0.8)
    if nu.shape != (n_agents, *X.shape):
        raise ValueError(f"nu must have shape {(n_agents, *X.shape)}, got {nu.shape}.")
    if nu.dtype != X.dtype:
        raise ValueError(f"nu must be {X.dtype} as X is, got {nu.dtype}.")
    largest = float(np.abs(nu).max(initial=0))
    if largest > objective.bound * (1 + np.sqrt(np.finfo(nu.dtype).eps)):
        raise ValueError(f"nu must be within {objective.bound:g}, got {largest:g}.")
    return objective.project(nu)
