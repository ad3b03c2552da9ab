"""The least cost of a sample: its terms at the agents, by strong duality, and their mean."""

from __future__ import annotations

import numpy as np
import pytest

from flwr_perdl.network import Averaging, InMemoryNetwork
from flwr_perdl.network.inference import exact_dual, infer, local_costs
from flwr_perdl.network.objectives import HuberNMF, NonnegativeMF, Objective
from flwr_perdl.network.topology import Topology, metropolis_weights
from tests.network.objectives import each_of, four

NETWORK = Topology.erdos_renyi(7, 0.4, seed=3)


@pytest.mark.parametrize("informed", [None, [2], [0, 5, 5]])
@each_of(four(0.05, 0.1, eta=0.2))
def test_local_costs_add_up_to_the_least_cost(
    objective: Objective, informed: list[int] | None
) -> None:
    rng = np.random.default_rng(1)
    X, W = rng.random((5, 15)) ** 2, rng.random((7, 2, 15)) ** 3
    W /= np.linalg.norm(W, axis=2, keepdims=True)
    exact = exact_dual(objective, X, list(W))
    costs = local_costs(objective, X, np.broadcast_to(exact.nu, (7, 5, 15)), W, informed)
    np.testing.assert_allclose(-costs.sum(axis=0), exact.cost, rtol=1e-10)
    run = InMemoryNetwork(NETWORK).run(Averaging(-7 * costs), 300)
    wanted = np.broadcast_to(exact.cost, costs.shape)
    np.testing.assert_allclose(run.observed["estimate"], wanted, rtol=1e-9)


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


def test_the_papers_mean_is_biased_as_its_fixed_point_says() -> None:
    """(68) ends at g = A (g - mu_g (J + g)): a linear system."""
    costs = np.random.default_rng(0).normal(size=(7, 4))
    weights = metropolis_weights(NETWORK).matrix.toarray()
    fixed = np.linalg.solve(np.eye(7) - 0.9 * weights, 0.1 * weights @ -costs)
    run = InMemoryNetwork(NETWORK).run(Averaging(-costs, 0.1), 150)
    np.testing.assert_allclose(run.observed["estimate"], fixed, atol=1e-5)
    assert np.abs(fixed - (-costs).mean(axis=0)).max() > 0.01


def test_dual_variables_may_leave_their_bounds_by_rounding_only() -> None:
    objective, ring = HuberNMF(0.05, 0.1, 0.5), Topology.ring(4)
    rng = np.random.default_rng(0)
    W = np.abs(rng.standard_normal((4, 1, 6)))
    W /= np.linalg.norm(W, axis=2, keepdims=True)
    X = 10 * np.abs(rng.standard_normal((3, 6)))
    nu = infer(objective, X, list(W), ring, tolerance=1e-8).nu
    assert np.abs(nu).max() == 1
    moved = local_costs(objective, X, nu * (1 + 1e-12), W)
    np.testing.assert_allclose(moved, local_costs(objective, X, nu, W), rtol=1e-9)
    with pytest.raises(ValueError, match=r"^nu"):
        local_costs(objective, X, 1.1 * nu, W)
