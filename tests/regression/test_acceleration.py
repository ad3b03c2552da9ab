"""Anderson acceleration against Krylov's bound and an independent solver; points by hand."""

from __future__ import annotations

import numpy as np
import pytest

from flwr_perdl.regression.acceleration import accelerated, replaced_points


def iterate(change: np.ndarray, goal: np.ndarray, n_rounds: int, memory: int) -> np.ndarray:
    """Solve ``theta = goal`` for models whose change is ``change @ (goal - theta)``."""
    points, changes = np.zeros((1, *goal.shape)), (goal @ change.T)[None]
    for rounds in range(1, n_rounds + 1):
        counted = np.full(len(goal), min(rounds, memory))
        theta = accelerated(points, changes, counted)
        points = np.concatenate([points, theta[None]])
        changes = np.concatenate([changes, ((goal - theta) @ change.T)[None]])
    return points[-1]


@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_as_many_rounds_as_eigenvalues_solve_a_linear_problem_whatever_the_step(
    scale: float,
) -> None:
    rng = np.random.default_rng(0)
    turn = np.linalg.qr(rng.standard_normal((9, 9)))[0]
    change = scale * turn * np.repeat([1.0, 0.3, 0.1], 3) @ turn.T
    goal = rng.standard_normal((2, 9))
    np.testing.assert_allclose(iterate(change, goal, 4, 4), goal, atol=1e-8)
    plain = iterate(change, goal, 4, 1)
    assert np.abs(plain - goal).max() > 0.1


def test_each_model_counts_its_own_rounds_and_inputs_stay() -> None:
    rng = np.random.default_rng(1)
    points, changes = rng.standard_normal((2, 4, 3, 6))
    kept = points.copy(), changes.copy()
    found = accelerated(points, changes, np.array([0, 1, 3]))
    np.testing.assert_array_equal(found[:2], (points[-1] + changes[-1])[:2])
    shortest = np.linalg.lstsq((changes[1:3, 2] - changes[3, 2]).T, -changes[3, 2], rcond=None)[0]
    weights = np.array([*shortest, 1 - shortest.sum()])
    np.testing.assert_allclose(found[2], weights @ (points + changes)[1:, 2])
    np.testing.assert_array_equal(points, kept[0])
    np.testing.assert_array_equal(changes, kept[1])


def test_models_that_rest_stay() -> None:
    points = np.ones((4, 2, 3))
    still = accelerated(points, np.zeros((4, 2, 3)), np.full(2, 4))
    np.testing.assert_array_equal(still, points[-1])


def test_replaced_points_count_who_comes_goes_and_changes_cluster() -> None:
    before = np.array([[0, 10, 0], [1, 0, 7], [4, 3, 0.0]])
    np.testing.assert_array_equal(replaced_points(before, before), [0, 0])
    moved = np.array([[0, 0, 10], [1, 0, 7], [4, 3, 0.0]])
    np.testing.assert_array_equal(replaced_points(before, moved), [10, 10])
    others = np.array([[1, 0, 7], [2, 5, 0], [4, 3, 0.0]])
    np.testing.assert_array_equal(replaced_points(before, others), [15, 0])
    np.testing.assert_array_equal(replaced_points(np.zeros((0, 3)), before), [13, 7])
