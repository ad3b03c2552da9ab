"""Sparse rank-one layers: fixed points, the plain SVD, brute force, planted biclusters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.cluster import KMeans
from sklearn.datasets import make_biclusters
from sklearn.metrics import adjusted_rand_score

from flwr_perdl.dictionary.coding import soft_threshold
from perdl_experiments.biclustering import choose_threshold, profiles, ssvd


def planted(seed: int, *, noise: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Return 60 subjects of four types in 80 of 400 genes, centered: (genes, subjects), types."""
    X, rows, _ = make_biclusters((60, 80), 4, minval=1, maxval=2, random_state=seed)
    X = np.hstack([X, np.zeros((60, 320))])
    X += noise * np.random.default_rng(seed).standard_normal(X.shape)
    return (X - X.mean(axis=0)).T, rows.argmax(axis=0)


def rand_index(atoms: np.ndarray, strengths: np.ndarray, truth: np.ndarray) -> float:
    k = len(np.unique(truth))
    found = KMeans(k, n_init=10, random_state=0).fit_predict(profiles(atoms, strengths))
    return float(adjusted_rand_score(truth, found))


def plain_svd(X: np.ndarray, r: int) -> tuple[np.ndarray, np.ndarray]:
    _, s, Vt = np.linalg.svd(X, full_matrices=False)
    return Vt[:r], s[:r]


def test_a_sparse_rank_one_matrix_is_found_exactly() -> None:
    u, v = np.array([3.0, 0, 0, -1, 0]), np.array([0.6, 0, 0.8, 0])
    layers = ssvd(np.outer(u, v), 2)
    np.testing.assert_allclose(layers.codes @ layers.atoms, np.outer(u, v), atol=1e-14)
    np.testing.assert_array_equal(layers.thresholds, np.zeros((2, 2)))
    np.testing.assert_allclose(np.linalg.norm(layers.codes, axis=0), [np.sqrt(10), 0])
    np.testing.assert_array_equal(layers.atoms[1], np.zeros(4))


def test_without_thresholds_layers_are_singular_vectors() -> None:
    X = np.random.default_rng(0).standard_normal((20, 7))
    layers = ssvd(X, 4, thresholds=(0, 0), max_iter=10_000)
    atoms, strengths = plain_svd(X, 4)
    assert layers.converged.all()
    np.testing.assert_allclose(np.linalg.norm(layers.codes, axis=0), strengths, rtol=1e-9)
    np.testing.assert_allclose(np.abs((layers.atoms * atoms).sum(axis=1)), 1, atol=1e-12)


@pytest.mark.parametrize("thresholds", ["sure", "bic", (1.0, 2.0)])
def test_every_layer_is_a_fixed_point_of_algorithm_3(thresholds: Any) -> None:
    left, _ = planted(1)
    layers = ssvd(left, 3, thresholds=thresholds)
    assert layers.converged.all()
    for atom, code, (lam, beta) in zip(
        layers.atoms, layers.codes.T, layers.thresholds, strict=True
    ):
        y = soft_threshold(left @ atom, lam)
        w = soft_threshold(y / np.linalg.norm(y) @ left, beta)
        np.testing.assert_allclose(w / np.linalg.norm(w), atom, atol=1e-8)
        unit = y / np.linalg.norm(y)
        np.testing.assert_allclose((unit @ left @ atom) * unit, code, atol=1e-7)
        left = left - np.outer(code, atom)
    if not isinstance(thresholds, str):
        np.testing.assert_array_equal(layers.thresholds, [thresholds] * 3)


@given(
    arrays(np.float64, st.integers(1, 12), elements=st.floats(-5, 5)),
    st.floats(0.5, 20),
    st.sampled_from(["sure", "bic"]),
)
def test_no_threshold_has_a_lower_criterion(a: np.ndarray, residual: float, rule: str) -> None:
    size = 5 * len(a)
    variance = residual / (size - len(a))
    penalty = 2 if rule == "sure" else np.log(size)

    def criterion(threshold: float) -> float:
        v = soft_threshold(a, threshold)
        return float(np.square(v - a).sum() / variance + penalty * np.count_nonzero(v))

    chosen = choose_threshold(a, residual, size, rule)
    top = np.abs(a).max()
    if top > 0:
        assert soft_threshold(a, chosen).any()
        tried = np.linspace(0, top, 200, endpoint=False)
        tried = tried[tried < top]  # of the smallest numbers, some are rounded up to it
        assert criterion(chosen) <= min(map(criterion, tried)) + 1e-9


def test_planted_types_are_found_and_their_genes() -> None:
    for seed in range(2):
        X, types = planted(seed)
        layers = ssvd(X, 3)
        assert rand_index(layers.atoms, np.linalg.norm(layers.codes, axis=0), types) > 0.95
        plain = X @ plain_svd(X, 3)[0].T
        sparse_share, plain_share = (
            np.square(codes[:80]).sum() / np.square(codes).sum() for codes in (layers.codes, plain)
        )
        assert 1 - sparse_share < 0.8 * (1 - plain_share)  # less goes to genes that say nothing
