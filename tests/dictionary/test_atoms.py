from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.linalg import polar
from scipy.optimize import linear_sum_assignment

from flwr_perdl.dictionary import dictionary_distance, normalize_atoms, polar_factor
from flwr_perdl.dictionary.atoms import atom_distances

numbers = st.floats(-10, 10).map(lambda x: round(x, 3))


def test_normalize_puts_the_fallback_where_a_row_is_zero():
    D = np.array([[0.0, 0.0], [2.0, 0.0]])
    assert np.array_equal(normalize_atoms(D, np.eye(2)[::-1]), [[0.0, 1.0], [1.0, 0.0]])
    with pytest.raises(ValueError, match="D"):
        normalize_atoms(D)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_rows_of_any_length_have_norm_one(rng, scale):
    D = rng.standard_normal((4, 6))
    for kind, unit in ((np.float32, scale), (np.float64, scale**10)):
        atoms = normalize_atoms((D * unit).astype(kind))
        np.testing.assert_allclose(atoms, D / np.linalg.norm(D, axis=1)[:, None], rtol=1e-5)
        np.testing.assert_allclose(np.linalg.norm(atoms, axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("atom", "expected"),
    [
        ([0.6, 0.8], np.hypot(0.4, 0.8)),
        ([-1.0, 0.0], 0.0),
        ([0.0, 1.0], np.sqrt(2)),
        *(([-1.0, tiny], tiny) for tiny in (1e-4, 1e-9, 1e-13)),  # no floor
    ],
)
def test_distances_by_hand(atom, expected):
    found = atom_distances(np.array([[1.0, 0.0]]), np.array([atom]))
    assert found == pytest.approx(np.array([[expected]]), rel=1e-12)


@pytest.mark.parametrize("shape", [(4, 4), (3, 5), (1, 1), (5, 5)])
def test_the_distance_is_the_least_largest_of_all_signed_permutations(rng, unit, shape):
    for _ in range(20):
        A, B = unit(shape[0], 3), unit(shape[1], 3)
        costs = np.minimum(
            np.linalg.norm(A[:, None] - B, axis=2), np.linalg.norm(A[:, None] + B, axis=2)
        )
        rows = np.arange(shape[0])
        brute = min(costs[rows, list(p)].max() for p in permutations(range(shape[1]), shape[0]))
        assert dictionary_distance(A, B) == pytest.approx(brute, rel=1e-12)


def test_the_least_sum_is_not_the_least_largest():
    angle = np.deg2rad(20)
    A = np.array([[10.0, 0.0], [10.3 + 0.7 * np.cos(angle), 0.7 * np.sin(angle)]])
    B = np.array([[10.3, 0.0], [10.0, 0.7]])
    distances = atom_distances(A, B)
    least = distances[linear_sum_assignment(distances)]
    assert least == pytest.approx([0.3, 1.0628], abs=1e-4)  # sum 1.363
    assert dictionary_distance(A, B) == pytest.approx(0.7)  # the exchange: sum 1.4


@settings(max_examples=50)
@given(arrays(float, (4, 3), elements=numbers), arrays(float, (4, 3), elements=numbers), st.data())
def test_the_distance_is_a_metric_on_classes_of_dictionaries(A, B, data):
    order = data.draw(st.permutations(range(4)))
    signs = np.array(data.draw(st.lists(st.sampled_from([-1.0, 1.0]), min_size=4, max_size=4)))
    d = dictionary_distance(A, B)
    assert d == pytest.approx(dictionary_distance(B, A), abs=1e-12)
    assert d == pytest.approx(dictionary_distance((signs[:, None] * A)[order], B), abs=1e-12)
    C = np.roll(A, 1, axis=1) + 0.5
    assert d <= dictionary_distance(A, C) + dictionary_distance(C, B) + 1e-9


@pytest.mark.parametrize("shape", [(3, 3), (3, 8), (1, 4), (12, 40)])
def test_polar_factor_is_scipys(rng, orthonormal, shape):
    S = rng.standard_normal(shape)
    assert np.allclose(polar_factor(S, orthonormal(*shape)), polar(S)[0], atol=1e-12)


def test_polar_factor_of_an_ill_conditioned_matrix(rng, orthonormal):
    for power in (2, 4, 8):
        s = np.logspace(0, -power, 5)
        U, V = orthonormal(5, 5), orthonormal(5, 9)
        Q = polar_factor((U * s) @ V, orthonormal(5, 9))
        assert np.allclose(Q, U @ V, atol=1e-15 * 10**power * 100)
        assert np.allclose(Q @ Q.T, np.eye(5), atol=1e-12)


@pytest.mark.parametrize("zero_rows", [False, True])
@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("n_features", [4, 7])
def test_the_null_space_is_filled_in_nearest_to_the_fallback(
    rng, orthonormal, n_features, rank, zero_rows
):
    fallback = orthonormal(4, n_features)
    S = rng.standard_normal((4, rank)) @ rng.standard_normal((rank, n_features))
    if zero_rows:
        S[rank:] = 0
    Q = polar_factor(S, fallback)
    assert np.allclose(Q @ Q.T, np.eye(4), atol=1e-13)
    assert np.sum(Q * S) == pytest.approx(np.linalg.svd(S, compute_uv=False).sum(), rel=1e-12)
    # Any other filling, W @ (what Q has in the null space), is further from the fallback.
    U = np.linalg.svd(S)[0][:, rank:]
    distance = np.linalg.norm(Q - fallback)
    for _ in range(20):
        turn = np.linalg.qr(np.eye(4 - rank) + 0.1 * rng.standard_normal((4 - rank, 4 - rank)))[0]
        other = Q + U @ (turn - np.eye(4 - rank)) @ U.T @ Q
        assert np.allclose(other @ other.T, np.eye(4), atol=1e-12)
        assert np.linalg.norm(other - fallback) >= distance - 1e-12


def test_polar_factor_does_not_depend_on_scale_and_keeps_float32(rng, orthonormal):
    S, fallback = rng.standard_normal((3, 5)), orthonormal(3, 5)
    for scale in (1e-150, 1e150):
        assert np.allclose(polar_factor(scale * S, fallback), polar_factor(S, fallback))
    single = polar_factor(S.astype(np.float32), fallback.astype(np.float32))
    assert single.dtype == np.float32
    assert np.allclose(single, polar_factor(S, fallback), atol=1e-6)
