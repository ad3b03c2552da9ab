from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.cluster.hierarchy import cut_tree, linkage

from flwr_perdl.regression import cluster_anchors


def blobs(rng: np.random.Generator, sizes: tuple[int, ...], spread: float = 0.1) -> np.ndarray:
    centers = 3 * np.eye(6)[: len(sizes)]
    return np.repeat(centers, sizes, axis=0) + spread * rng.standard_normal((sum(sizes), 6))


def same_partition(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.array_equal(a[:, None] == a, b[:, None] == b))


@given(st.integers(0, 10**6), st.lists(st.integers(4, 9), min_size=2, max_size=5))
def test_the_number_of_clusters_is_found(seed: int, sizes: list[int]) -> None:
    points = blobs(np.random.default_rng(seed), tuple(sizes))
    found = cluster_anchors(points)
    assert same_partition(found.labels, np.repeat(np.arange(len(sizes)), sizes))
    for j, center in enumerate(found.centers):
        np.testing.assert_allclose(center, points[found.labels == j].mean(axis=0))


def test_one_blob_is_one_cluster() -> None:
    for seed in range(8):
        assert len(cluster_anchors(blobs(np.random.default_rng(seed), (40,))).centers) == 1


def test_given_k_it_is_scipys_average_linkage() -> None:
    points = np.random.default_rng(0).standard_normal((25, 3))
    theirs = cut_tree(linkage(points, "average"), 4)[:, 0]
    assert same_partition(cluster_anchors(points, 4).labels, theirs)


def test_clusters_closer_than_half_the_separation_are_joined() -> None:
    points = np.array([[0.0], [0.9], [1.8], [5.0], [7.5], [8.5]])  # half of it is not closer
    found = cluster_anchors(points, separation=2.0)
    assert same_partition(found.labels, np.array([0, 0, 0, 1, 2, 3]))
    largest = cluster_anchors(points, 1, separation=2.0)
    np.testing.assert_allclose(largest.centers, [[0.9]])
    np.testing.assert_array_equal(largest.labels, [0, 0, 0, -1, -1, -1])


def test_wild_estimates_are_no_cluster() -> None:
    points = np.vstack([blobs(np.random.default_rng(0), (60, 50, 40)), 1e6 * np.ones((1, 6))])
    for n_clusters in (3, None):
        found = cluster_anchors(points, n_clusters)
        assert len(found.centers) == 3
        assert np.abs(found.centers).max() < 4
        assert found.labels[-1] == -1


@pytest.mark.parametrize("n_clusters", [1, 2, 3, None])
def test_equal_and_single_estimates(n_clusters: int | None) -> None:
    assert np.isfinite(cluster_anchors(np.ones((3, 2)), n_clusters).centers).all()
    np.testing.assert_array_equal(cluster_anchors(np.ones((1, 2)), n_clusters).centers, [[1, 1]])
