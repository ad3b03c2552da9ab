"""Unmixing: pure pixels, constrained least squares against solvers, angles and tiles by hand."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from flwr_perdl.network import Topology
from perdl_experiments.unmixing import (
    SharedCandidates,
    abundances,
    match_spectra,
    spectral_angles,
    tile_pixels,
    tile_topology,
    unmix,
    vca,
)


def scene(
    seed: int = 0, side: int = 16, bands: int = 30, p: int = 3, noise: float = 0.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return spectra, shares, and pixels row by row; the corners' shares are pure."""
    rng = np.random.default_rng(seed)
    spectra = rng.random((p, bands)) + 0.05
    i, j = np.indices((side, side)).reshape(2, -1) / (side - 1)
    centers = np.array([[0, 0], [0, 1], [1, 0], [1, 1]])[:p]
    near = np.exp(-8 * ((i[:, None] - centers[:, 0]) ** 2 + (j[:, None] - centers[:, 1]) ** 2))
    near[near < 0.05] = 0
    shares = (near + 1e-12) / (near + 1e-12).sum(axis=1, keepdims=True)
    X = shares @ spectra
    return spectra, shares, np.maximum(X + noise * rng.standard_normal(X.shape), 0)


# Vertex component analysis --------------------------------------------------------------------


@settings(max_examples=30)
@given(st.integers(0, 1000), st.integers(2, 6))
def test_vca_finds_the_pure_pixels_of_clean_mixtures(seed: int, p: int) -> None:
    rng = np.random.default_rng(seed)
    spectra = rng.random((p, 20)) + 0.1
    shares = rng.dirichlet(np.ones(p), 100)
    pure = rng.permutation(100)[:p]
    shares[pure] = np.eye(p)
    light = rng.uniform(0.5, 2, (100, 1))  # brightness of each pixel: divided out
    found = vca(light * (shares @ spectra), p, rng=rng)
    assert sorted(found.pixels) == sorted(pure)
    assert found.snr > 100
    np.testing.assert_allclose(match_spectra(spectra, found.spectra).angles, 0, atol=1e-6)


def test_vca_in_much_noise_projects_on_one_direction_less() -> None:
    rng = np.random.default_rng(0)
    spectra = rng.random((3, 200))
    shares = rng.dirichlet(np.ones(3) / 2, 2000)
    clean = shares @ spectra
    level = np.sqrt(np.mean(clean**2)) / 10**0.9
    X = clean + level * rng.standard_normal(clean.shape)
    found = vca(X, 3, rng=rng)
    assert found.snr == pytest.approx(18, abs=0.5)
    assert found.snr < 15 + 10 * np.log10(3)
    assert np.linalg.matrix_rank(found.spectra - X.mean(axis=0), tol=1e-8) == 2
    assert match_spectra(spectra, found.spectra).angles.max() < 0.12
    raw = match_spectra(spectra, X[found.pixels]).angles.mean()
    assert match_spectra(spectra, found.spectra).angles.mean() < raw  # less noise than a raw pixel


# Abundances -----------------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [1.0, 1e-9])
def test_abundances_are_non_negative_least_squares(apart: float) -> None:
    rng = np.random.default_rng(0)
    spectra, X = rng.random((4, 12)), rng.random((50, 12))
    spectra[3] = spectra[0] + apart * rng.random(12)
    found, rests = abundances(X, spectra), [nnls(spectra.T, x)[1] for x in X]
    assert (found >= 0).all()
    np.testing.assert_allclose(np.linalg.norm(X - found @ spectra, axis=1), rests, atol=1e-10)


# Angles ---------------------------------------------------------------------------------------


def test_angles_by_hand() -> None:
    A = np.array([[1.0, 0.0], [2.0, 2.0]])
    B = np.array([[3.0, 0.0], [0.0, 0.1], [-1.0, 0.0], [np.cos(1e-9), np.sin(1e-9)]])
    expected = np.pi * np.array([[0, 1 / 2, 1, 0], [1 / 4, 1 / 4, 3 / 4, 1 / 4]])
    expected[:, 3] += [1e-9, -1e-9]
    np.testing.assert_allclose(spectral_angles(A, B), expected, atol=1e-15)


def test_matching_by_hand() -> None:
    truth = np.eye(3)[:2]
    estimate = np.array([[0.0, 2.0, 0.0], [0.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
    match = match_spectra(truth, estimate)
    assert match.indices.tolist() == [2, 0]
    np.testing.assert_allclose(match.angles, [np.pi / 4, 0])
    with pytest.raises(ValueError, match=r"^estimate"):
        match_spectra(truth, estimate[:1])


# Tiles ----------------------------------------------------------------------------------------


def test_tiles_by_hand() -> None:
    tiles = tile_pixels((3, 4), 2)
    assert [tile.tolist() for tile in tiles] == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9], [10, 11]]
    with pytest.raises(ValueError, match=r"^tiles"):
        tile_pixels((3, 4), 4)


def test_the_graph_has_spatial_and_spectral_edges() -> None:
    means = np.eye(9) + 0.01
    means[0] += np.eye(9)[8]  # tiles 0 and 8, opposite corners, look alike
    means[8] += np.eye(9)[0]
    topology = tile_topology(means, 3, n_spectral=1)
    assert not topology.directed
    assert 8 in topology.neighbours(0)
    grid = {tuple(sorted(3 * a + b for a, b in edge)) for edge in nx.grid_2d_graph(3, 3).edges()}
    edges = {(k, int(j)) for k in range(9) for j in topology.neighbours(k) if j > k}
    assert grid <= edges
    assert tile_topology(means, 3, n_spectral=0).n_edges == len(grid) == 12
    assert tile_topology(np.vstack([means[:8], np.zeros((1, 9))]), 3).is_connected
    assert tile_topology(means[:1], 1).n_nodes == 1


# Together ---------------------------------------------------------------------------------------


def tiled(seed: int = 0) -> tuple[np.ndarray, list[np.ndarray], Topology]:
    """Return spectra and four tiles of their scene, none of which has all materials."""
    spectra, _, X = scene(seed, noise=0.005)
    parts = [X[pixels] for pixels in tile_pixels((16, 16), 2)]
    return spectra, parts, tile_topology(np.stack([part.mean(axis=0) for part in parts]), 2)


@pytest.mark.parametrize("start", ["pooled", "own"])
def test_tiles_find_together_what_none_of_them_sees_alone(start: str) -> None:
    spectra, parts, topology = tiled()

    def worst(network: Topology) -> float:
        ended = unmix(parts, network, 3, 150, start=start)
        assert (ended.dictionaries >= 0).all()
        return max(match_spectra(spectra, D).angles.mean() for D in ended.dictionaries)

    assert worst(topology) < 0.06
    assert worst(Topology.from_edges(4, [])) > 0.2


def test_a_node_with_fewer_pixels_than_materials_has_no_candidates() -> None:
    spectra, parts, topology = tiled()
    few = [*parts[:3], parts[3][:1]]
    ended = unmix(few, topology, 3, 100)
    assert max(match_spectra(spectra, D).angles.mean() for D in ended.dictionaries) < 0.1
    state = SharedCandidates(dict(enumerate(few)), 4, 3).start(np.arange(4))
    assert not state.spectra[3].any()  # not even the mean of its one pixel
    with pytest.raises(ValueError, match=r"^data"):
        unmix([own[:2] for own in parts], topology, 3, 5)
