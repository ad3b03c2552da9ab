from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from flwr_perdl.dictionary import (
    LassoLearner,
    aggregate_atoms,
    dictionary_distance,
    local_statistics,
    normalize_atoms,
    polar_factor,
)
from flwr_perdl.dictionary.aggregation import aggregate_statistics

ALL = np.ones(3, dtype=bool)

ROBUST = ["median", "geometric-median", "trimmed"]


def aggregate(stack, current, method, orthogonal=False, weights=None):
    weights = np.ones(len(stack)) if method == "weighted" and weights is None else weights
    return aggregate_atoms(stack, current, method=method, weights=weights, orthogonal=orthogonal)


@pytest.fixture(params=["mean", "weighted", *ROBUST])
def method(request):
    return request.param


@pytest.fixture(params=[True, False], ids=["orthogonal", "general"])
def orthogonal(request):
    return request.param


# Averages of atoms


def test_averages_by_hand():
    current = np.array([[1.0, 0.0]])
    stack = np.array([[[1.0, 0.0]], [[1.0, 0.0]], [[0.0, 1.0]], [[1.0, 0.0]], [[0.6, 0.8]]])
    for method, expected in {
        "mean": [3.6, 1.8],
        "median": [1.0, 0.0],
        "trimmed": [2.6, 0.8],
    }.items():
        found = aggregate(stack, current, method).global_atoms
        assert np.allclose(found, normalize_atoms(np.array([expected]))), method
    weights = np.array([1.0, 1.0, 6.0, 1.0, 2.0])
    found = aggregate(stack, current, "weighted", weights=weights).global_atoms
    assert np.allclose(found, normalize_atoms(np.array([[4.2, 7.6]])))


def test_agreement_is_kept(method, orthogonal, orthonormal):
    D = orthonormal(3, 5)
    found = aggregate(np.stack([D] * 4), orthonormal(3, 5), method, orthogonal)
    assert np.allclose(found.global_atoms, D, atol=1e-12)
    assert found.kept.all()


def test_unit_atoms_come_out(method, orthogonal, rng, orthonormal, unit):
    stack = np.stack([unit(3, 5) for _ in range(6)])
    D = aggregate(stack, orthonormal(3, 5), method, orthogonal).global_atoms
    assert np.allclose(np.linalg.norm(D, axis=1), 1)
    if orthogonal:
        assert np.allclose(D @ D.T, np.eye(3), atol=1e-12)


@pytest.mark.parametrize("method", ROBUST)
def test_robust_averages_survive_a_bad_client(rng, orthonormal, unit, method):
    D = orthonormal(3, 5)
    stack = np.stack([D] * 5 + [unit(3, 5)])
    assert np.allclose(aggregate(stack, D, method).global_atoms, D, atol=1e-6)
    assert not np.allclose(aggregate(stack, D, "mean").global_atoms, D, atol=1e-2)


def test_withheld_atoms_take_no_part(method, orthogonal, orthonormal, unit):
    D, current = orthonormal(3, 5), orthonormal(3, 5)
    current[2] = D[2]  # withheld by all: orthogonal to what comes in
    stack = np.stack([D] * 4)
    stack[0] = 0
    stack[1, 0] = 0
    stack[:, 2] = 0
    found = aggregate(stack, current, method, orthogonal)
    assert np.allclose(found.global_atoms[:2], D[:2], atol=1e-12)
    assert np.array_equal(found.global_atoms[2], current[2])
    assert list(found.kept) == [False, True, True, True]
    everyone = aggregate(np.zeros_like(stack), current, method, orthogonal)
    assert np.array_equal(everyone.global_atoms, current)
    assert not everyone.kept.any()


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("left", [0.0, 1e-5, 1e-9, 1.0])
def test_what_a_withheld_atom_leaves_of_the_others_is_orthogonal_to_it(orthonormal, dtype, left):
    basis = orthonormal(8, 8)
    current = basis[:4].astype(dtype)
    S = np.zeros((4, 8))
    S[1:] = np.array([[1.0], [2.0], [-0.3]]) * basis[0]
    S[1:] += left * np.array([[1.0, 0.0], [2.0, 0.0], [0.5, 0.3]]) @ basis[5:7]
    found = aggregate_statistics(S[None].astype(dtype), current, orthogonal=True).global_atoms
    assert found.dtype == dtype
    assert np.array_equal(found[0], current[0])
    assert np.allclose(found @ found.T, np.eye(4), atol=100 * np.finfo(dtype).eps)
    if left == 0:
        assert np.allclose(found, current, atol=100 * np.finfo(dtype).eps)


# Statistics


def federation(rng, orthonormal, sparse, orthogonal, n_clients=6):
    """Return codes and dictionaries of clients who share three of five atoms, and the shared."""
    shared = orthonormal(3, 8)
    clients = []
    for _ in range(n_clients):
        local = rng.standard_normal((2, 8))
        if orthogonal:
            local = polar_factor(local - local @ shared.T @ shared, orthonormal(2, 8))
        clients.append((sparse(150, 5), np.vstack([shared, normalize_atoms(local)])))
    return clients, shared


def test_the_truth_is_a_fixed_point_with_rows_withheld(rng, orthonormal, sparse, orthogonal):
    clients, shared = federation(rng, orthonormal, sparse, orthogonal)
    stack = np.stack(
        [
            local_statistics(C @ D, C, D, np.arange(3) != i, orthogonal=orthogonal)
            for i, (C, D) in enumerate(clients)
        ]
    )
    assert (stack == 0).all(axis=2).any()
    found = aggregate_statistics(stack, shared, orthogonal=orthogonal)
    assert found.kept.sum() >= 5
    assert np.allclose(found.global_atoms, shared, atol=1e-12)


def test_statistics_by_hand():
    C = np.array([[2.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
    X = np.array([[3.0, 1.0, 0.0], [0.0, 2.0, 1.0]])
    D = np.eye(3)
    rest = [[3.0, 1.0, -1.0], [0.0, 2.0, 0.0]]  # X without the local atom
    moment = np.array([[6.0, 2.0, -2.0], [0.0, 2.0, 0.0]])
    assert np.array_equal(C[:, :2].T @ rest, moment)
    found = local_statistics(X, C, D, np.ones(2, bool), orthogonal=True)
    assert np.array_equal(found, moment)
    found = local_statistics(X, C, D, np.ones(2, bool), orthogonal=False)
    assert np.array_equal(found, np.hstack([[[4.0, 0.0], [0.0, 1.0]], moment]))


def test_a_withheld_atom_counts_as_local():
    C = np.array([[1.0, 1.0, 0.0]] * 3 + [[1.0, 0.0, 1.0]] * 3)
    D = np.eye(3)
    X = C @ D + 0.5
    S = local_statistics(X, C, D, np.array([True, False]), orthogonal=False)
    kept = C * [1, 0, 0]
    assert np.array_equal(S[1], np.zeros(5))
    assert np.array_equal(S[:, 1], np.zeros(2))
    assert np.allclose(S[0, 2:], (kept.T @ (X - (C - kept) @ D))[0])


@pytest.mark.parametrize("sizes", [[300], [80, 100, 120], [20] * 5 + [40] * 5])
def test_rounds_over_clients_are_iterations_over_their_pooled_samples(sizes, rng, unit):
    X = rng.standard_normal((300, 16)) * (rng.random((300, 16)) < 0.3) @ unit(16, 10)
    learner, clients = LassoLearner(12), np.split(X, np.cumsum(sizes)[:-1])
    pooled = federated = learner.start(X, rng)
    for _ in range(10):
        pooled = learner.step(X, pooled)
        stack = [
            local_statistics(
                Y, learner.code(Y, federated), federated, np.ones(12, bool), orthogonal=False
            )
            for Y in clients
        ]
        found = aggregate_statistics(np.stack(stack), federated, orthogonal=False)
        assert found.kept.all()
        federated = found.global_atoms
    assert np.allclose(federated, pooled, rtol=0, atol=1e-8)


def test_a_wrong_client_is_left_out(rng, orthonormal, sparse, orthogonal):
    clients, shared = federation(rng, orthonormal, sparse, orthogonal)
    stack = [
        local_statistics(
            C @ D + 0.01 * rng.standard_normal((150, 8)), C, D, ALL, orthogonal=orthogonal
        )
        for C, D in clients
    ]
    wrong = 100 * rng.standard_normal(stack[0].shape)
    found = aggregate_statistics(np.stack([*stack, wrong]), shared, orthogonal=orthogonal)
    assert list(found.kept) == [True] * 6 + [False]
    assert dictionary_distance(found.global_atoms, shared) < 0.02


def test_nothing_sent_changes_nothing(orthonormal, orthogonal):
    D = orthonormal(3, 8)
    width = 8 if orthogonal else 11
    for n in (0, 2):
        found = aggregate_statistics(np.zeros((n, 3, width)), D, orthogonal=orthogonal)
        assert np.array_equal(found.global_atoms, D)
        assert list(found.kept) == [False] * n


def test_the_memory_of_statistics_is_a_few_times_that_of_the_replies(rng, orthonormal):
    current = orthonormal(8, 32)
    stack = 20 * current + rng.standard_normal((3000, 8, 32))
    tracemalloc.start()
    aggregate_statistics(stack, current, orthogonal=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 * stack.nbytes
