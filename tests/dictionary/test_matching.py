from __future__ import annotations

import tracemalloc

import networkx as nx
import numpy as np
import pytest

from flwr_perdl.dictionary import (
    OrthogonalLearner,
    align_to_global,
    dictionary_distance,
    global_matching,
    normalize_atoms,
    warm_start,
)
from perdl_experiments.data import planted_clients

METHODS = ["consensus", "paths"]


@pytest.fixture(params=METHODS)
def method(request):
    return request.param


@pytest.fixture
def shared(rng, orthonormal, unit):
    """Return ``draw(n_clients, error, bad)``: dictionaries (12 of 16 dimensions, 4 shared)."""

    def draw(n_clients, error=0.0, bad=0.0, sizes=(12,)):
        truth = orthonormal(4, 16)
        dictionaries = []
        for i in range(n_clients):
            r = sizes[i % len(sizes)]
            D = np.linalg.qr(np.vstack([truth, unit(r - 4, 16)]).T)[0].T
            D[:4] = truth
            D = unit(r, 16) if i < bad * n_clients else normalize_atoms(D + error * unit(r, 16))
            dictionaries.append(D[rng.permutation(r)] * rng.choice([-1.0, 1.0], (r, 1)))
        return [dictionaries[i] for i in rng.permutation(n_clients)], truth

    return draw


def chain(dictionaries, n_global):
    """Algorithm 2 with networkx: path lengths and indices."""
    graph = nx.DiGraph()
    n = len(dictionaries)
    for i, D in enumerate(dictionaries):
        for a in range(len(D)):
            if i == 0:
                graph.add_edge("s", (0, a), weight=0.0)
            if i == n - 1:
                graph.add_edge((i, a), "t", weight=0.0)
                continue
            for b, atom in enumerate(dictionaries[i + 1]):
                length = min(np.linalg.norm(D[a] - atom), np.linalg.norm(D[a] + atom))
                graph.add_edge((i, a), (i + 1, b), weight=length)
    lengths, indices = [], []
    for _ in range(n_global):
        length, path = nx.single_source_dijkstra(graph, "s", "t")
        lengths.append(length)
        indices.append([node[1] for node in path[1:-1]])
        graph.remove_nodes_from(path[1:-1])
    return np.array(lengths), np.array(indices).T


@pytest.mark.parametrize("sizes", [(12,), (12, 9, 14)])
def test_paths_are_networkxs(shared, sizes):
    for error in (0.1, 0.6, 1.5):
        dictionaries, _ = shared(6, error, sizes=sizes)
        found = global_matching(dictionaries, 7, method="paths")
        lengths, indices = chain(dictionaries, 7)
        assert np.allclose(found.path_lengths, lengths, atol=1e-9)
        assert np.array_equal(found.indices, indices)


def test_the_planted_atoms_are_found(shared, method):
    dictionaries, truth = shared(8, sizes=(12, 6, 9))
    found = global_matching(dictionaries, 4, method=method)
    assert dictionary_distance(found.global_atoms, truth) < 1e-12
    assert (found.path_lengths < 1e-5).all()
    for D, rows, signs in zip(dictionaries, found.indices, found.signs, strict=True):
        assert np.allclose(signs[:, None] * D[rows], found.global_atoms, atol=1e-12)


def test_matching_is_well_formed(shared, method):
    dictionaries, _ = shared(7, 0.5, sizes=(12, 9))
    before = [D.copy() for D in dictionaries]
    found = global_matching(dictionaries, 6, method=method)
    assert found.global_atoms.shape == (6, 16)
    assert np.allclose(np.linalg.norm(found.global_atoms, axis=1), 1)
    assert found.indices.shape == found.signs.shape == (7, 6)
    assert set(np.unique(found.signs)) <= {-1.0, 1.0}
    assert (np.diff(found.path_lengths) >= 0).all()
    for D, rows in zip(dictionaries, found.indices, strict=True):
        assert len(set(rows)) == 6  # no atom twice
        assert 0 <= rows.min() <= rows.max() < len(D)
    for a, b in zip(dictionaries, before, strict=True):
        assert np.array_equal(a, b)


def test_consensus_survives_bad_clients_and_the_chain_does_not(shared):
    dictionaries, truth = shared(40, 0.3, bad=0.3)
    consensus = global_matching(dictionaries, 4)
    assert dictionary_distance(consensus.global_atoms, truth) < 0.2
    assert dictionary_distance(global_matching(dictionaries, 4, method="paths")[0], truth) > 0.2


def test_the_error_of_the_consensus_does_not_grow_with_the_clients(shared):
    errors = []
    for n in (10, 160):
        dictionaries, truth = shared(n, 0.4)
        errors.append(dictionary_distance(global_matching(dictionaries, 4).global_atoms, truth))
    assert errors[1] < errors[0] < 0.3


def test_the_memory_of_the_consensus_does_not_grow_with_the_pairs_of_clients(shared):
    dictionaries, _ = shared(800)
    tracemalloc.start()
    global_matching(dictionaries, 4)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * len(dictionaries) ** 2  # one matrix of all pairs


def test_clients_with_fewer_atoms(shared):
    dictionaries, truth = shared(8)
    dictionaries[2] = dictionaries[2][:3]
    dictionaries[5] = dictionaries[5][:0]
    for method in METHODS:
        found = global_matching(dictionaries, 4, method=method)
        assert dictionary_distance(found.global_atoms, truth) < 1e-12
        assert (found.indices[5] == -1).all()
    assert (found.indices[2] == -1).all()  # the chain leaves the client out
    rows = global_matching(dictionaries, 4).indices[2]
    assert sorted(rows[rows >= 0]) == [0, 1, 2]  # the consensus takes what there is


def test_more_global_atoms_than_any_client_has(orthonormal):
    basis = orthonormal(6, 6)
    dictionaries = [basis[:3], basis[3:], basis[1:4], basis[[0, 4, 5]]]
    found = global_matching(dictionaries, 6)
    assert dictionary_distance(found.global_atoms, basis) < 1e-12
    for rows in found.indices:
        assert sorted(rows) == [-1, -1, -1, 0, 1, 2]


def test_an_atom_that_fewer_than_two_clients_have_ranks_last(orthonormal):
    basis = orthonormal(4, 6)
    found = global_matching([basis[:2]] * 3, 3)
    assert np.array_equal(np.sort(found.indices, axis=1), [[-1, 0, 1]] * 3)
    assert (found.indices[:, 2] == -1).all()
    assert found.path_lengths == pytest.approx([0, 0, 2 * np.sqrt(2)], abs=1e-6)
    found = global_matching([basis[:2], basis[:3], basis[:2]], 3)
    assert [list(rows).count(-1) for rows in found.indices.T] == [0, 0, 2]


def test_one_client_and_no_atoms(orthonormal, method):
    D = orthonormal(4, 6)
    assert dictionary_distance(global_matching([D], 3, method=method).global_atoms, D) < 1e-12
    empty = global_matching([D, D], 0, method=method)
    assert empty.global_atoms.shape == (0, 6)
    assert empty.indices.shape == (2, 0)


# The number of global atoms


def learned(seed, n_global, noise=0.0, weak=0):
    """Learn the dictionaries of B.2: ten clients, ten atoms in ten dimensions."""
    rng = np.random.default_rng(seed)
    sizes = [60] * weak + [500] * (10 - weak)
    planted = planted_clients(rng, [10] * 10, sizes, n_global, n_features=10, noise=noise)
    return [warm_start(X, OrthogonalLearner(10), rng=rng).dictionary for X in planted.samples]


@pytest.mark.parametrize("n_global", [0, 4, 8, 10])
def test_the_number_of_global_atoms_is_found(n_global):
    for seed, noise, weak in ((0, 0.0, 0), (1, 0.05, 0), (2, 0.0, 3)):
        found = global_matching(learned(seed, n_global, noise, weak), "auto")
        assert len(found.global_atoms) == n_global
    chain = global_matching(learned(7, n_global), "auto", method="paths")
    assert len(chain.global_atoms) == n_global


@pytest.mark.parametrize("sizes", [(10, 10, 10, 10, 4, 4, 4), (10, 10, 10, 0, 0), (10, 4)])
def test_clients_with_few_atoms_do_not_make_others_agree(unit, method, sizes):
    for _ in range(5):
        dictionaries = [unit(size, 30) for size in sizes]
        assert len(global_matching(dictionaries, "auto", method=method).global_atoms) == 0


def test_two_clients_count_alike(rng):
    G = np.eye(12)[:1]
    A, B = (normalize_atoms(G + 0.05 * rng.standard_normal((1, 12))) for _ in range(2))
    B = -B.astype(np.float32)
    one, other = (global_matching(pair, 1).global_atoms for pair in ([A, B], [B, A]))
    assert one.dtype == other.dtype == np.float64
    np.testing.assert_allclose(np.abs(one @ other.T), 1)
    np.testing.assert_allclose(np.abs(one @ A.T), np.abs(one @ B.T), rtol=1e-6)


# Alignment


def test_alignment_parts_a_dictionary(rng, orthonormal):
    D = orthonormal(6, 8)
    signs = np.array([1.0, -1.0, -1.0])
    rows = np.array([4, 0, 2])
    noisy = normalize_atoms(signs[:, None] * D[rows] + 0.05 * rng.standard_normal((3, 8)))
    found = align_to_global(D, noisy)
    assert np.array_equal(found.indices, rows)
    assert np.array_equal(found.signs, signs)
    assert np.array_equal(found.global_atoms, signs[:, None] * D[rows])
    assert np.array_equal(found.local_atoms, D[[1, 3, 5]])


def test_no_two_global_atoms_take_the_same_local_one():
    # Both are nearest to the first atom; Algorithm 3 as printed would take it twice.
    D = np.eye(3)
    global_atoms = normalize_atoms(np.array([[1.0, 0.1, 0.0], [1.0, 0.9, 0.0]]))
    assert np.array_equal(align_to_global(D, global_atoms).indices, [0, 1])
