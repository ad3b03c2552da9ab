"""One dictionary for all: averages by hand, what a client withholds, planted atoms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flwr_perdl.dictionary import (
    GradientLearner,
    KSVDLearner,
    MODLearner,
    OrthogonalLearner,
    dictionary_distance,
    normalize_atoms,
    warm_start,
)
from flwr_perdl.random import spawn
from perdl_experiments.averaging import average, combine, naive_average, send
from perdl_experiments.data import planted_clients

RNG = np.random.default_rng(0)


def unit(*shape: int) -> np.ndarray:
    return normalize_atoms(RNG.standard_normal(shape))


def sent(D: np.ndarray, spare: np.ndarray | None = None) -> np.ndarray:
    return np.vstack([D, np.zeros(D.shape[1]) if spare is None else spare])


def test_averages_by_hand() -> None:
    A, B = np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[0.0, 1.0], [0.0, 1.0]])
    stack = np.stack([sent(A), sent(B)])
    plain = combine(stack, A, None, orthogonal=False)
    np.testing.assert_allclose(plain, [[0.5**0.5, 0.5**0.5], [0, 1]])
    weighted = combine(stack, A, np.array([3.0, 1.0]), orthogonal=False)
    np.testing.assert_allclose(weighted, normalize_atoms(np.array([[3.0, 1.0], [0.0, 1.0]])))


@pytest.mark.parametrize("orthogonal", [False, True])
def test_an_atom_that_nobody_uses_becomes_what_is_missing(orthogonal: bool) -> None:
    basis = np.linalg.qr(np.random.default_rng(1).standard_normal((8, 8)))[0].T
    current, missing = basis[:3], basis[5]
    used = current.copy()
    used[2] = 0
    stack = np.stack([sent(used, missing), sent(used, -missing), sent(used)])
    found = combine(stack, current, None, orthogonal=orthogonal)
    np.testing.assert_allclose(found[:2], current[:2], atol=1e-12)
    assert abs(found[2] @ missing) == pytest.approx(1)
    np.testing.assert_allclose(found @ found.T, np.eye(3), atol=1e-12)


def test_unused_atoms_that_are_not_replaced_stay() -> None:
    basis = np.linalg.qr(np.random.default_rng(2).standard_normal((9, 9)))[0].T
    current, missing = basis[:5], normalize_atoms(basis[[3]] + basis[[6]])[0]
    used = current.copy()
    used[2:] = 0
    found = combine(np.stack([sent(used, missing)] * 2), current, None, orthogonal=True)
    np.testing.assert_array_equal(found[3:], current[3:])
    np.testing.assert_allclose(found[:2], current[:2], atol=1e-12)
    assert abs(found[2] @ basis[6]) == pytest.approx(1)
    np.testing.assert_allclose(found @ found.T, np.eye(5), atol=1e-12)


def test_an_unused_atom_is_withheld_with_the_residuals_direction() -> None:
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.standard_normal((6, 6)))[0].T
    X = np.hstack([rng.choice([-3.0, 3.0], (60, 2)), rng.choice([-1.0, 1.0], (60, 1))]) @ basis[:3]
    found = send(X, OrthogonalLearner(3, threshold=0.5), basis[[0, 1, 5]], 1, 3)
    np.testing.assert_allclose(found[:2] @ basis[:2].T, np.eye(2), atol=1e-2)
    assert not found[2].any()
    assert abs(found[3] @ basis[2]) == pytest.approx(1, abs=1e-2)


def test_the_common_start_is_the_largest_clients() -> None:
    rng, learner = np.random.default_rng(0), OrthogonalLearner(4)
    samples = [rng.standard_normal((n, 6)) for n in (20, 50, 50)]
    found = average(samples, learner, 1, seed=5)
    own = warm_start(samples[1], learner, rng=spawn(5, 1)).dictionary
    np.testing.assert_allclose(found.atoms, own, atol=1e-12)
    assert (found.floats_up, found.floats_down) == (5 * 6, 0)


def test_a_start_whose_atoms_are_withheld_is_drawn_and_orthonormal() -> None:
    samples = [np.random.default_rng(0).standard_normal((2, 6))] * 3
    one, other = (average(samples, OrthogonalLearner(4), 3, seed=seed) for seed in (0, 1))
    np.testing.assert_allclose(one.atoms @ one.atoms.T, np.eye(4), atol=1e-12)
    assert not np.allclose(one.atoms, other.atoms)
    assert (one.floats_up, one.floats_down) == (3 * 5 * 6, 2 * 4 * 6)


def planted() -> tuple[list[np.ndarray], np.ndarray]:
    """Return five clients' samples of these atoms, all of which they share."""
    made = planted_clients(np.random.default_rng(2), [6] * 5, [200] * 5, 6, n_features=6)
    return list(made.samples), made.global_atoms


@pytest.mark.parametrize(
    "learner",
    [
        OrthogonalLearner(6, threshold=0.15),
        # The planted atoms are orthogonal: Algorithm 5's own coder finds them from far away.
        GradientLearner(6, coding="threshold"),
        MODLearner(6, coding="threshold"),
        KSVDLearner(6),
    ],
)
def test_averaging_finds_a_dictionary_that_all_share(learner: Any) -> None:
    samples, atoms = planted()
    found = average(samples, learner, 8, seed=0, local_steps=2)
    assert dictionary_distance(found.atoms, atoms) < 1e-2


def test_the_naive_average_is_the_plain_mean() -> None:
    (samples, atoms), learner = planted(), OrthogonalLearner(6)
    found = naive_average(samples, learner, seed=0, weighted=False, min_support=0)
    own = [warm_start(X, learner, rng=spawn(0, i)).dictionary for i, X in enumerate(samples)]
    np.testing.assert_allclose(found.atoms, normalize_atoms(np.mean(own, axis=0)), atol=1e-12)
    assert dictionary_distance(found.atoms, atoms) > 0.3
    assert (found.floats_up, found.floats_down) == (7 * 6, 0)
