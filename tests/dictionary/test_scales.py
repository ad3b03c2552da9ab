"""Atoms of any length, samples of any scale: the right answer, or a sentence."""

from __future__ import annotations

import numpy as np
import pytest

from flwr_perdl.dictionary import (
    GradientLearner,
    KSVDLearner,
    LassoLearner,
    MODLearner,
    OrthogonalLearner,
    aggregate_atoms,
    align_to_global,
    global_matching,
    omp,
    reconstruct,
    sparse_code,
)
from flwr_perdl.dictionary.aggregation import aggregate_statistics

KINDS = OrthogonalLearner, GradientLearner, MODLearner, KSVDLearner, LassoLearner
LENGTHS = np.array([1e3, 10.0, 1e-3, 0.5])


@pytest.mark.parametrize("method", ["consensus", "paths"])
def test_lengths_of_atoms_make_no_agreement(method, rng, orthonormal):
    clients = [orthonormal(4, 20) for _ in range(5)]
    for scale in (1.0, 1e3, 1e-3):
        found = global_matching([scale * D for D in clients], "auto", method=method)
        assert len(found.global_atoms) == 0
    D = orthonormal(4, 20)
    long = global_matching([LENGTHS[:, None] * D] * 3, 4, method=method)
    assert np.allclose(np.linalg.norm(long.global_atoms, axis=1), 1, atol=1e-12)
    assert np.all(long.path_lengths < 1e-6)


def test_alignment_takes_the_nearest_direction(orthonormal):
    D = orthonormal(4, 6)
    found = align_to_global(LENGTHS[:, None] * D, -7 * D[[3, 2]])
    assert found.indices.tolist() == [3, 2]
    assert np.allclose(found.global_atoms, -D[[3, 2]], atol=1e-12)
    withheld = align_to_global(np.vstack([0 * D[:1], D[1:]]), D[[2]])
    assert withheld.indices.tolist() == [2]
    assert not withheld.local_atoms[0].any()


def test_codes_of_long_atoms_stand_for_the_same_samples(rng, unit):
    X, D = rng.standard_normal((30, 6)), unit(4, 6)
    long = LENGTHS[:, None] * D
    for code in (
        lambda D: omp(X, D, 2),
        lambda D: sparse_code(X, D, threshold=0.5),
        lambda D: MODLearner(4).code(X, D),
        lambda D: OrthogonalLearner(4).code(X, D),
    ):
        assert np.allclose(reconstruct(code(long), long), reconstruct(code(D), D), atol=1e-10)
    for learner in (kind(4) for kind in KINDS):
        assert np.allclose(learner.step(X, long), learner.step(X, D), atol=1e-10)


def test_a_client_with_long_atoms_counts_as_much_as_others(orthonormal):
    D, other = orthonormal(2, 6), orthonormal(2, 6)
    stack = np.stack([D, D, other])
    long = stack * np.array([1, 1, 1e3])[:, None, None]
    expected = aggregate_atoms(stack, D, orthogonal=True).global_atoms
    assert np.allclose(aggregate_atoms(long, D, orthogonal=True).global_atoms, expected, atol=1e-12)


def test_one_client_with_enormous_statistics_does_not_stop_the_server(rng, unit):
    D = unit(2, 6)
    codes = rng.standard_normal((5, 9, 2))
    stack = np.stack([np.hstack([C.T @ C, C.T @ C @ D]) for C in codes])
    stack[4] *= 1e200
    found = aggregate_statistics(stack, D, orthogonal=False)
    assert np.allclose(found.global_atoms, D, atol=1e-9)
