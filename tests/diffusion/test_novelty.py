"""Novelty scores: the cost by strong duality, its mean over a network, what normalising mends."""

from __future__ import annotations

import numpy as np
import pytest

from flwr_perdl.diffusion.combine import product
from flwr_perdl.diffusion.inference import exact_dual, infer
from flwr_perdl.diffusion.novelty import (
    Averaging,
    average_scores,
    averaging_rounds,
    local_costs,
    novelty_scores,
)
from flwr_perdl.diffusion.objectives import (
    Biclustering,
    HuberNMF,
    NonnegativeMF,
    Objective,
    SparseSVD,
)
from flwr_perdl.diffusion.topology import (
    Topology,
    averaging_weights,
    metropolis_weights,
)
from flwr_perdl.network import InMemoryNetwork

OBJECTIVES: list[Objective] = [
    SparseSVD(0.05, 0.1),
    Biclustering(0.05, 0.1, 0.01),
    NonnegativeMF(0.05, 0.1),
    HuberNMF(0.05, 0.1, 0.2),
]
NETWORK = Topology.erdos_renyi(7, 0.4, seed=3)
WEIGHTS = metropolis_weights(NETWORK)


class Case:
    """Samples, atoms, and the exact duals as if every agent had them."""

    def __init__(self, objective: Objective, n_atoms: int = 2) -> None:
        rng = np.random.default_rng(1)
        self.X = rng.random((5, 15)) ** 2
        W = rng.random((7, n_atoms, 15)) ** 3
        self.W = W / np.linalg.norm(W, axis=2, keepdims=True)
        self.exact = exact_dual(objective, self.X, list(self.W))
        self.nu = np.broadcast_to(self.exact.nu, (7, *self.X.shape))


@pytest.mark.parametrize("informed", [None, [2], [0, 5, 5]])
@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: type(o).__name__)
def test_local_costs_add_up_to_the_least_cost(
    objective: Objective, informed: list[int] | None
) -> None:
    case = Case(objective)
    costs = local_costs(objective, case.X, case.nu, case.W, informed)
    np.testing.assert_allclose(-costs.sum(axis=0), case.exact.cost, rtol=1e-10)
    with_network = novelty_scores(
        objective, case.X, case.nu, case.W, NETWORK, score="raw", informed=informed, n_rounds=300
    )
    wanted = np.broadcast_to(case.exact.cost, with_network.shape)
    np.testing.assert_allclose(with_network, wanted, rtol=1e-9)


def test_a_local_cost_by_hand() -> None:
    objective = NonnegativeMF(0.5, 0.25)
    X, atoms = np.array([[2.0, 1.0]]), np.array([[[1.0, 0.0]], [[0.0, 1.0]]])
    nu = np.array([[[1.0, 0.5]], [[1.0, 0.0]]])
    # f*: 1.25 / 2 and 1 / 2, halved; h*: (1 - 0.5)^2 / (2 * 0.25), and 0 since 0 < gamma;
    # nu'x: 2.5 and 2, halved, or all of agent 1's
    costs = local_costs(objective, X, nu, atoms)
    np.testing.assert_allclose(costs, [[0.3125 + 0.5 - 1.25], [0.25 + 0.0 - 1.0]])
    costs = local_costs(objective, X, nu, atoms, informed=[1])
    np.testing.assert_allclose(costs, [[0.3125 + 0.5], [0.25 - 2.0]])


@pytest.mark.parametrize("informed", [None, [1, 4]])
def test_the_normalised_score_is_the_cost_over_that_of_explaining_nothing(
    informed: list[int] | None,
) -> None:
    objective = OBJECTIVES[3]
    case = Case(objective)
    X = np.vstack([case.X, np.zeros(15)])
    exact = exact_dual(objective, X, list(case.W))
    nu = np.broadcast_to(exact.nu, (7, *X.shape))
    scores = novelty_scores(objective, X, nu, case.W, NETWORK, informed=informed, n_rounds=300)
    wanted = np.append(exact.cost[:5] / objective.loss(case.X), 0.0)
    np.testing.assert_allclose(scores, np.broadcast_to(wanted, scores.shape), rtol=1e-9, atol=1e-12)
    assert ((wanted[:5] > 0) & (wanted[:5] < 1)).all()


def test_what_no_atom_explains_scores_one() -> None:
    objective = NonnegativeMF(0.01, 0.02)
    atoms = np.zeros((7, 1, 6))
    atoms[:, 0, :3] = 3**-0.5
    X = np.array([[0.0, 0, 0, 1, 2, 0], [1.0, 1, 1, 0, 0, 0]])
    found = infer(objective, X, list(atoms), NETWORK, tolerance=1e-8)
    scores = novelty_scores(objective, X, found.nu, atoms, NETWORK)
    np.testing.assert_allclose(scores[:, 0], 1, atol=1e-5)
    assert scores[:, 1].max() < 0.05


def test_normalising_mends_the_raw_cost_under_hubers_loss() -> None:
    """A known document of many small entries costs more than a new one of few large entries."""
    objective = HuberNMF(0.05, 0.1, 0.2)
    even = np.append(np.full(25, 0.2), np.zeros(26))
    known = 0.7 * even + np.sqrt(0.51) * np.roll(even, 25)  # half of it is known
    new = np.zeros(51)
    new[:4] = 0.02
    new[50] = np.sqrt(1 - 4 * 0.02**2)
    atoms = np.zeros((7, 1, 51))
    atoms[0, 0] = even
    X = np.stack([known, new])
    exact = exact_dual(objective, X, list(atoms))
    nu = np.broadcast_to(exact.nu, (7, *X.shape))
    raw = novelty_scores(objective, X, nu, atoms, NETWORK, score="raw")
    normalised = novelty_scores(objective, X, nu, atoms, NETWORK)
    assert (raw[:, 1] < raw[:, 0]).all()
    assert (normalised[:, 1] > 0.95).all()
    assert (normalised[:, 0] < 0.7).all()


# The mean -----------------------------------------------------------------------------------


def test_plain_averaging_has_the_mean_as_its_limit() -> None:
    values = np.random.default_rng(0).normal(size=(7, 3))
    rounds = averaging_rounds(WEIGHTS)
    run = InMemoryNetwork(NETWORK).run(Averaging(values), rounds)
    error = np.abs(run.observed["estimate"] - values.mean(axis=0)).max()
    assert error < 1e-5 * np.abs(values).max()
    assert rounds < 200


def test_the_papers_mean_is_biased_as_its_fixed_point_says() -> None:
    """(68) ends at g = A (g - mu_g (J + g)): a linear system."""
    costs = np.random.default_rng(0).normal(size=(7, 4))
    weights = WEIGHTS.matrix.toarray()
    fixed = np.linalg.solve(np.eye(7) - 0.9 * weights, 0.1 * weights @ -costs)
    scores = average_scores(costs, np.ones(4), NETWORK, score="raw", step=0.1)
    np.testing.assert_allclose(scores / 7, fixed, atol=1e-5)
    bias = np.abs(fixed - (-costs).mean(axis=0)).max()
    assert bias > 0.01
    run = InMemoryNetwork(NETWORK).run(Averaging(-7 * costs, 0.1), averaging_rounds(WEIGHTS, 0.1))
    np.testing.assert_allclose(run.observed["estimate"], scores, atol=1e-12)


def test_rounds_of_averaging() -> None:
    assert averaging_rounds(metropolis_weights(Topology.complete(5))) == 1
    assert averaging_rounds(WEIGHTS, 1.0) == 1
    assert averaging_rounds(WEIGHTS, 0.1) == 132  # 0.9^132 < 1e-6 < 0.9^131
    apart = metropolis_weights(Topology.from_edges(4, [(0, 1), (2, 3)]))
    assert averaging_rounds(apart) == 10_000


# Bad input ----------------------------------------------------------------------------------


def test_bad_arguments_get_one_sentence() -> None:
    objective = OBJECTIVES[0]
    case = Case(objective)
    arguments = (objective, case.X, case.nu, case.W)
    with pytest.raises(ValueError, match="score must be one of 'normalised', 'raw', got 'best'"):
        novelty_scores(*arguments, NETWORK, score="best")
    with pytest.raises(ValueError, match="topology must have 7 nodes, got 3"):
        novelty_scores(*arguments, Topology.ring(3))
    with pytest.raises(ValueError, match=r"nu must have shape \(7, 5, 15\), got \(7, 4, 15\)"):
        novelty_scores(objective, case.X, case.nu[:, 1:], case.W, NETWORK)
    with pytest.raises(ValueError, match="informed must be between 0 and 6, got 7"):
        novelty_scores(*arguments, NETWORK, informed=[7])
    with pytest.raises(ValueError, match="informed must name at least one agent, got none"):
        novelty_scores(*arguments, NETWORK, informed=[])
    with pytest.raises(ValueError, match="weights must be doubly stochastic"):
        novelty_scores(*arguments, NETWORK, weights=averaging_weights(NETWORK))
    with pytest.raises(ValueError, match=r"step must be in \(0, 1\], got 0"):
        Averaging(np.ones((3, 1)), 0.0)
    for values in (np.array([1, 2, 6]), np.ones(3, dtype=np.float16)):
        with pytest.raises(ValueError, match="values must be float64 or float32, got"):
            InMemoryNetwork(Topology.ring(3)).run(Averaging(values), 1)
    with pytest.raises(ValueError, match="messages must be arrays of floats, got int64"):
        product(WEIGHTS.matrix, np.arange(7))


def test_dual_variables_may_leave_their_bounds_by_rounding_only() -> None:
    objective, ring = HuberNMF(0.05, 0.1, 0.5), Topology.ring(4)
    rng = np.random.default_rng(0)
    W = np.abs(rng.standard_normal((4, 1, 6)))
    W /= np.linalg.norm(W, axis=2, keepdims=True)
    X = 10 * np.abs(rng.standard_normal((3, 6)))
    nu = infer(objective, X, list(W), ring, tolerance=1e-8).nu
    assert nu is not None
    assert np.abs(nu).max() == 1
    moved = novelty_scores(objective, X, nu * (1 + 1e-12), W, ring)
    np.testing.assert_allclose(moved, novelty_scores(objective, X, nu, W, ring), rtol=1e-9)
    with pytest.raises(ValueError, match=r"^nu must be within 1, got 1\.1\.$"):
        novelty_scores(objective, X, 1.1 * nu, W, ring)
    parts = Topology.from_edges(4, [(0, 1), (2, 3)])
    with pytest.raises(ValueError, match=r"^weights must connect all 4 agents"):
        novelty_scores(objective, X, nu, W, parts)
