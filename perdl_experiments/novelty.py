r"""How new a sample is to a network: Section IV-B and Algorithm 2.

Chen, Towfic, Sayed, "Dictionary Learning over Distributed Models", IEEE TSP 2015. The
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

import numpy as np

from flwr_perdl.core.checks import Matrix
from flwr_perdl.network import (
    Averaging,
    CombinationMatrix,
    InMemoryNetwork,
    Objective,
    Topology,
    local_costs,
    metropolis_weights,
)

#: To what part of its start the error falls.
_ACCURACY = 1e-6
_MAX_ROUNDS = 10_000


def novelty_scores(
    objective: Objective,
    X: Matrix,
    nu: Matrix,
    dictionaries: Matrix,
    topology: Topology,
    *,
    score: str = "normalised",
    step: float | None = None,
) -> Matrix:
    """Return every agent's score of how new each sample is (Algorithm 2).

    Parameters
    ----------
    objective : Objective
        f, h and V_f.
    X : ndarray of shape (n_samples, n_features)
        Samples, which all agents see.
    nu : ndarray of shape (n_agents, n_samples, n_features)
        Every agent's dual variables, as `infer` returns them.
    dictionaries : ndarray of shape (n_agents, n_atoms, n_features)
        Every agent's atoms.
    topology : Topology
        Which agents exchange messages.
    score : {"normalised", "raw"}, default "normalised"
        The cost of coding a sample, ``n_agents`` times the mean of ``-J_k``, over ``f(x)`` or as
        it is (the paper's, but for the factor ``n_agents``). Samples of zeros score 0.
    step : float, optional
        ``mu_g`` of the paper's biased average (68), see `Averaging`.

    Returns
    -------
    ndarray of shape (n_agents, n_samples)
        Every agent's own scores.
    """
    costs = local_costs(objective, X, nu, dictionaries)
    n_agents, weights = len(costs), metropolis_weights(topology)
    program = Averaging(-n_agents * costs, step)
    network = InMemoryNetwork(weights.topology, weights)
    values = network.run(program, averaging_rounds(weights, step)).observed["estimate"]
    loss = objective.loss(X)
    if score == "raw":
        return values
    known = loss >= np.finfo(loss.dtype).tiny
    return np.divide(values, loss, out=np.zeros_like(values), where=known)


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
    rate = 1 - (weights.spectral_gap if step is None else step)
    if rate <= _ACCURACY:
        return 1
    if rate >= 1:
        return _MAX_ROUNDS
    return min(int(np.ceil(np.log(_ACCURACY) / np.log(rate))), _MAX_ROUNDS)
