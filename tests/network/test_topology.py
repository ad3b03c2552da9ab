from __future__ import annotations

from collections.abc import Callable
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import sparse

from flwr_perdl.network.topology import (
    CombinationMatrix,
    Topology,
    averaging_weights,
    metropolis_weights,
    relative_degree_variance_weights,
)

MADE = {
    "ring": Topology.ring(7),
    "grid": Topology.grid(3, 4),
    "torus": Topology.torus(3, 4),
    "exponential": Topology.exponential(11),
    "k_regular": Topology.k_regular(12, 5, seed=1),
    "erdos_renyi": Topology.erdos_renyi(20, 0.2, seed=2),
    "small_world": Topology.small_world(16, 4, 0.3, seed=3),
    "star": Topology.star(6),
    "complete": Topology.complete(5),
}


@pytest.mark.parametrize("name", sorted(MADE))
def test_every_constructor_gives_a_connected_undirected_graph(name: str) -> None:
    topology = MADE[name]
    graph = nx.from_scipy_sparse_array(topology.adjacency)
    assert nx.is_connected(graph)
    assert topology.is_connected
    assert not topology.directed
    assert topology.n_edges == graph.number_of_edges()
    assert topology.diameter == nx.diameter(graph)
    assert topology.degrees.tolist() == [d for _, d in graph.degree()]
    np.testing.assert_array_equal(topology.neighbours(2), sorted(graph.neighbors(2)))


def test_the_regular_constructors_match_networkx() -> None:
    for ours, theirs in [
        (Topology.ring(7), nx.cycle_graph(7)),
        (Topology.grid(3, 4), nx.grid_2d_graph(3, 4)),
        (Topology.torus(3, 4), nx.grid_2d_graph(3, 4, periodic=True)),
        (Topology.exponential(11), nx.circulant_graph(11, [1, 2, 4, 8])),
        (Topology.star(6), nx.star_graph(5)),
        (Topology.complete(5), nx.complete_graph(5)),
        (Topology.small_world(10, 4, 0.0), nx.watts_strogatz_graph(10, 4, 0.0)),
    ]:
        expected = nx.to_numpy_array(theirs, nodelist=sorted(theirs))
        np.testing.assert_array_equal(ours.adjacency.toarray(), expected)


def test_rings_of_one_and_two_nodes_have_no_loop_and_no_double_edge() -> None:
    assert Topology.ring(1).is_connected
    small = [Topology.ring(1), Topology.ring(2), Topology.torus(1, 2), Topology.exponential(1)]
    assert [graph.n_edges for graph in small] == [0, 1, 1, 0]
    assert Topology.exponential(4).n_edges == 6  # two places before is two places after


def test_random_graphs_have_about_the_share_of_edges_and_differ_between_seeds() -> None:
    one, same, other = (Topology.erdos_renyi(200, 0.1, seed=s).adjacency for s in (0, 0, 1))
    assert (one != same).nnz == 0 < (one != other).nnz
    # 19,900 possible edges: the standard deviation is 42
    assert abs(one.nnz / 2 - 1990) < 5 * 43


@settings(max_examples=30, deadline=None)
@given(st.integers(3, 20), st.integers(2, 19), st.integers(0, 1000))
def test_k_regular_gives_every_node_the_degree(n: int, degree: int, seed: int) -> None:
    assume(degree < n and n * degree % 2 == 0)
    assert (Topology.k_regular(n, degree, seed=seed).degrees == degree).all()


def test_a_directed_graph_keeps_who_hears_whom() -> None:
    topology = Topology.from_edges(3, [(1, 0), (2, 1), (0, 2)], directed=True)
    assert topology.directed
    assert topology.n_edges == 3
    assert topology.neighbours(1).tolist() == [0]
    assert topology.is_connected
    with pytest.raises(ValueError, match=r"^topology"):
        metropolis_weights(topology)


def test_a_graph_in_two_parts_is_not_connected() -> None:
    topology = Topology.from_edges(4, [(0, 1), (2, 3)])
    assert not topology.is_connected
    assert metropolis_weights(topology).spectral_gap == pytest.approx(0.0, abs=1e-12)
    with pytest.raises(ValueError, match="connected"):
        _ = topology.diameter


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Topology(np.ones((2, 3))), "adjacency"),
        (lambda: Topology(np.eye(3)), "adjacency"),
        (lambda: Topology.from_edges(3, [(0, 3)]), "edges"),
        (lambda: Topology.from_edges(3, [(1, 1)]), "adjacency"),
        (lambda: Topology.erdos_renyi(9, 0.001), "connected"),
        (lambda: Topology.erdos_renyi(6, 1.5), r"^p\b"),
        (lambda: Topology.k_regular(5, 3), "n_nodes"),
        (lambda: Topology.small_world(8, 3, 0.1), "degree"),
        (lambda: Topology.k_regular(4, 1), "connected"),
        (lambda: Topology.k_regular(4, 4), "degree"),
        (lambda: Topology.ring(0), "n_nodes"),
    ],
)
def test_a_bad_graph_is_refused_in_one_sentence(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "expected", "gap"),
    [
        (metropolis_weights, [[2 / 3, 1 / 3, 0], [1 / 3] * 3, [0, 1 / 3, 2 / 3]], 1 / 3),
        (averaging_weights, [[1 / 2, 1 / 2, 0], [1 / 3] * 3, [0, 1 / 2, 1 / 2]], 1 / 2),
        (  # the quiet and well connected; neighborhood sizes 2, 3, 2
            lambda path: relative_degree_variance_weights(path, [1.0, 1.0, 4.0]),
            [[2 / 5, 3 / 5, 0], [2 / 5.5, 3 / 5.5, 0.5 / 5.5], [0, 3 / 3.5, 0.5 / 3.5]],
            None,
        ),
    ],
)
def test_weights_of_a_path_by_hand(make: Any, expected: Any, gap: float | None) -> None:
    weights = make(Topology.from_edges(3, [(0, 1), (1, 2)]))
    np.testing.assert_allclose(weights.matrix.toarray(), expected)
    assert weights.doubly_stochastic == (make is metropolis_weights)
    assert gap is None or weights.spectral_gap == pytest.approx(gap)


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 25), st.floats(0.3, 1.0), st.integers(0, 1000))
def test_metropolis_weights_are_doubly_stochastic_and_lead_to_the_mean(
    n: int, p: float, seed: int
) -> None:
    weights = metropolis_weights(Topology.erdos_renyi(n, p, seed=seed))
    dense = weights.matrix.toarray()
    assert weights.doubly_stochastic
    np.testing.assert_allclose(dense, dense.T)
    second = np.sort(np.abs(np.linalg.eigvals(dense)))[-2]
    assert weights.spectral_gap == pytest.approx(1 - second, abs=1e-9)
    values = np.random.default_rng(seed).standard_normal(n)
    start = np.linalg.norm(values - values.mean())
    for _ in range(30):
        values = weights.matrix @ values
    assert np.linalg.norm(values - values.mean()) <= start * second**30 + 1e-12


def test_the_gap_of_a_long_path_is_found() -> None:
    gap = 2 / 3 * (1 - np.cos(np.pi / 2000))
    assert metropolis_weights(Topology.grid(1, 2000)).spectral_gap == pytest.approx(gap, rel=1e-4)


def test_spectra_of_large_sparse_graphs_agree_with_dense_ones() -> None:
    topology = Topology.k_regular(700, 6, seed=0)
    for weights in (metropolis_weights(topology), averaging_weights(topology)):
        second = np.sort(np.abs(np.linalg.eigvals(weights.matrix.toarray())))[-2]
        assert weights.spectral_gap == pytest.approx(1 - second, rel=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w[:2],
        lambda w: w * 0.5,
        lambda w: np.array([[1.5, -0.5, 0], [0, 1, 0], [0, 0, 1]]),
        lambda w: np.array([[0.5, 0, 0.5], [0, 1, 0], [0, 0, 1]]),  # node 0 does not hear node 2
        lambda w: w * np.nan,
    ],
)
def test_a_bad_combination_matrix_is_refused_in_one_sentence(
    change: Callable[[np.ndarray], np.ndarray],
) -> None:
    topology = Topology.from_edges(3, [(0, 1), (1, 2)])
    weights = metropolis_weights(topology).matrix.toarray()
    with pytest.raises(ValueError, match=r"^weights"):
        CombinationMatrix(change(weights), topology)


def test_inputs_are_not_modified() -> None:
    adjacency = sparse.csr_array(np.array([[0, 2.0], [2.0, 0]]))
    assert Topology(adjacency).adjacency.toarray().max() == 1.0
    assert adjacency.toarray().max() == 2.0
    parts = np.array([1.0, 5, 2, 1, 1]), np.array([2, 1, 1, 0, 0]), np.array([0, 3, 4, 5])
    untidy = sparse.csr_array(parts, shape=(3, 3), copy=True)
    assert Topology(untidy).n_edges == 2
    for kept, part in zip((untidy.data, untidy.indices, untidy.indptr), parts, strict=True):
        np.testing.assert_array_equal(kept, part)
        kept.setflags(write=False)
    assert Topology(untidy).n_edges == 2
