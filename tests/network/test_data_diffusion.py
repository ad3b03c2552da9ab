"""Diffusion over data: one round by hand, planted atoms, replacement by neighbours' messages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flwr_perdl.dictionary import KSVDLearner, MODLearner, dictionary_distance, normalize_atoms, omp
from flwr_perdl.network import DataDiffusion, Faults, InMemoryNetwork, Schedule
from flwr_perdl.network.topology import (
    CombinationMatrix,
    Topology,
    averaging_weights,
    metropolis_weights,
    relative_degree_variance_weights,
)
from flwr_perdl.random import spawn
from tests.network.programs import noted


def draw(
    nodes: int = 4, samples: int = 200, n_atoms: int = 12, n_features: int = 8, noise: float = 0.0
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return planted atoms, cosines up to 0.67 by default, and every node's samples, of two."""
    rng = np.random.default_rng(5)
    atoms = normalize_atoms(rng.standard_normal((n_atoms, n_features)))
    codes = np.zeros((nodes * samples, n_atoms))
    used = rng.random(codes.shape).argsort(axis=1)[:, :2]
    np.put_along_axis(codes, used, rng.uniform(-1, 1, used.shape), axis=1)
    X = codes @ atoms
    return atoms, np.split(X + noise * rng.standard_normal(X.shape), nodes)


def found(dictionaries: np.ndarray, atoms: np.ndarray) -> list[int]:
    """Return how many atoms each node has found."""
    return [int((np.abs(atoms @ D.T).max(axis=1) > 0.99).sum()) for D in dictionaries]


def states(
    learner: DataDiffusion, data: list[Any], network: Any, rounds: int, **options: Any
) -> list[Any]:
    """Return the state after every round."""
    after: list[Any] = []
    learner.fit(data, network, rounds, callback=lambda _, state: after.append(state), **options)
    return after


# Algorithm 1 ----------------------------------------------------------------------------------


def test_two_rounds_of_algorithm_1_by_hand() -> None:
    _, data = draw(nodes=3)
    rng = np.random.default_rng(1)
    start = normalize_atoms(rng.standard_normal((12, 8)))
    weights = averaging_weights(Topology.from_edges(3, [(0, 1), (1, 2)]))
    learner = DataDiffusion(12, n_nonzero=2, update="gradient", step=0.01, replacement=None)
    A = weights.matrix.toarray()
    assert A[0].tolist() == [0.5, 0.5, 0.0]
    D = [start] * 3
    for state in states(learner, data, weights, 2, start=start):
        psi = []
        for X, own in zip(data, D, strict=True):
            C = omp(X, own, 2)
            psi.append(own + 0.01 * C.T @ (X - C @ own))
        D = [sum(A[k, j] * psi[j] for j in range(3)) for k in range(3)]
        D = [own / np.linalg.norm(own, axis=1, keepdims=True) for own in D]
        np.testing.assert_allclose(state.dictionaries, D, atol=1e-14)


@pytest.mark.parametrize(("update", "local"), [("mod", MODLearner), ("ksvd", KSVDLearner)])
def test_one_node_alone_is_the_local_learner(update: str, local: Any) -> None:
    _, (X,) = draw(nodes=1)
    D = normalize_atoms(np.random.default_rng(1).standard_normal((12, 8)))
    learner = DataDiffusion(12, n_nonzero=2, update=update, replacement=None)
    ended = learner.fit([X], Topology.complete(1), 5, start=D)
    for _ in range(5):
        D = local(12, n_nonzero=2).step(X, D)
    np.testing.assert_allclose(ended.dictionaries[0], D, atol=1e-12)
    assert ended.disagreement == 0
    assert ended.floats_sent == 0


@pytest.mark.parametrize("update", ["mod", "ksvd", "gradient"])
def test_nodes_find_planted_atoms_together_but_not_alone(update: str) -> None:
    atoms, data = draw(samples=100)
    learner = DataDiffusion(12, n_nonzero=2, update=update)
    together = learner.fit(data, Topology.ring(4), 100)
    alone = learner.fit([X[:25] for X in data], Topology.from_edges(4, []), 100)
    assert min(found(together.dictionaries, atoms)) >= 11
    assert max(found(alone.dictionaries, atoms)) < 11
    assert together.disagreement < 0.1 < alone.disagreement


# 16 features are more than the atoms.
@pytest.mark.parametrize(
    ("n_features", "coder", "alpha"), [(8, "lasso", 0.1), (8, "focuss", 0.02), (16, "focuss", 0.02)]
)
def test_the_other_coders_find_planted_atoms_too(n_features: int, coder: str, alpha: float) -> None:
    atoms, data = draw(nodes=2, samples=150, n_features=n_features)
    ended = DataDiffusion(12, coder=coder, alpha=alpha).fit(data, Topology.ring(2), 60)
    assert min(found(ended.dictionaries, atoms)) >= 11


def test_a_coder_of_ones_own_and_atoms_without_negative_entries() -> None:
    rng = np.random.default_rng(0)
    D = normalize_atoms(rng.random((3, 10)) ** 6)
    X = rng.dirichlet([0.3] * 3, 300) @ D

    options: dict[str, Any] = {"update": "gradient", "nonnegative": True}
    learner = DataDiffusion(3, coder=lambda X, D: np.maximum(X @ D.T, 0), **options)
    for state in states(learner, np.split(X, 3), Topology.ring(3), 25, start="samples"):
        assert (state.dictionaries >= 0).all()
        np.testing.assert_allclose(np.linalg.norm(state.dictionaries, axis=2), 1)
    own = DataDiffusion(3, coder="nonnegative", **options)
    ended = own.fit(np.split(X, 3), Topology.ring(3), 200, start="samples")
    assert ended.error.max() < 0.02


def test_atoms_that_clipping_makes_equal_do_not_end_the_run() -> None:
    rng = np.random.default_rng(8)
    P = normalize_atoms(rng.random((3, 4)))
    data = np.split((rng.random((400, 3)) * (rng.random((400, 3)) < 0.5)) @ P, 4)
    learner = DataDiffusion(3, coder="nonnegative", nonnegative=True)
    ended = learner.fit(data, Topology.ring(4), 30, seed=8)
    assert (ended.error < 0.1).all()
    with pytest.raises(ValueError, match=r"^n_atoms"):
        DataDiffusion(5, coder="nonnegative").fit(data, Topology.ring(4), 1)


def test_a_good_weight_keeps_one_noisy_node_from_spoiling_all() -> None:
    atoms, data = draw(samples=150)
    rng = np.random.default_rng(1)
    data[3] = data[3] + rng.standard_normal(data[3].shape)
    ring, learner, noise = Topology.ring(4), DataDiffusion(12, n_nonzero=2), [1e-4, 1e-4, 1e-4, 1.0]

    def at_worst(network: Topology | CombinationMatrix) -> int:
        return min(found(learner.fit(data, network, 50).dictionaries, atoms))

    good = relative_degree_variance_weights(ring, noise)
    printed = relative_degree_variance_weights(ring, 1 / np.array(noise))  # (5) as printed
    assert at_worst(printed) < at_worst(ring) < at_worst(good) == 12


# Data -----------------------------------------------------------------------------------------


def test_nodes_may_have_few_samples_or_none_at_all() -> None:
    atoms, data = draw(samples=120)
    data = [data[0], data[1][:5], data[2][:0], np.concatenate(data[1:])]
    before = [X.copy() for X in data]
    ended = DataDiffusion(12, n_nonzero=2).fit(data, Topology.complete(4), 60)
    assert min(found(ended.dictionaries, atoms)) >= 11
    for X, same in zip(data, before, strict=True):
        np.testing.assert_array_equal(X, same)


def test_batches_that_stream_in() -> None:
    atoms, _ = draw()

    def stream(node: int) -> Any:
        def batch(round_: int) -> np.ndarray:
            rng = spawn(7, node, round_)
            codes = rng.uniform(-1, 1, (60, 12)) * (rng.random((60, 12)) < 1 / 6)
            return codes @ atoms

        return batch

    learner = DataDiffusion(12, n_nonzero=2, update="gradient")
    ended = learner.fit([stream(k) for k in range(4)], Topology.ring(4), 200)
    assert min(found(ended.dictionaries, atoms)) >= 10
    fixed = [stream(k)(1) for k in range(4)]
    steady = [lambda _, X=X: X for X in fixed]
    both = [learner.fit(X, Topology.ring(4), 15).dictionaries for X in (steady, fixed)]
    np.testing.assert_array_equal(*both)


@pytest.mark.parametrize("update", ["mod", "ksvd", "gradient"])
def test_float32_stays_float32(update: str) -> None:
    data = [X.astype(np.float32) for X in draw(samples=60)[1]]
    learner = DataDiffusion(14, n_nonzero=2, update=update)
    after = states(learner, data, Topology.ring(4), 25)[-1]
    assert after.dictionaries.dtype == after.candidates.dtype == np.float32


# Replacement ------------------------------------------------------------------------------------

FLAT = 6  # data of these tests have no energy beyond this many features


def flat_data(nodes: int, seed: int = 0) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return a dictionary whose last two atoms nobody can use, and data."""
    rng = np.random.default_rng(seed)
    atoms = np.zeros((8, 8))
    atoms[:FLAT, :FLAT] = np.linalg.qr(rng.standard_normal((FLAT, FLAT)))[0]
    atoms[FLAT:, FLAT:] = np.eye(2)
    data = [rng.standard_normal((50, FLAT)) for _ in range(nodes)]
    return atoms, [np.pad(X, ((0, 0), (0, 2))) for X in data]


@pytest.mark.parametrize("topology", [Topology.ring(7), Topology.star(5), Topology.grid(3, 3)])
@pytest.mark.parametrize("replacement", ["private", "samples"])
def test_all_nodes_replace_the_same_atoms_by_the_same_vectors_in_the_same_round(
    topology: Topology, replacement: str
) -> None:
    atoms, data = flat_data(topology.n_nodes)
    learner = DataDiffusion(8, n_nonzero=2, replacement=replacement)
    after = states(learner, data, topology, 10 + topology.diameter - 1, start=atoms)
    unmoved, replaced = after[-2].dictionaries, after[-1].dictionaries
    np.testing.assert_array_equal(unmoved[:, FLAT:, FLAT:], np.tile(np.eye(2), (len(data), 1, 1)))
    assert not replaced[:, FLAT:, FLAT:].any()
    for D in replaced:
        np.testing.assert_array_equal(D[FLAT:], replaced[0, FLAT:])
    np.testing.assert_allclose(np.linalg.norm(replaced, axis=2), 1)
    assert not after[-1].use.any()


def test_the_worst_samples_of_the_whole_network_come_in() -> None:
    atoms, data = flat_data(6)
    topology = Topology.ring(6)
    learner = DataDiffusion(8, n_nonzero=1, update="gradient", step=1e-12, replacement="samples")
    after = states(learner, data, topology, 12, start=atoms)[-1]
    scores = []
    for X in data:
        left = ((X - omp(X, atoms, 1) @ atoms) ** 2).sum(axis=1)
        scores.append(left / (left + left.mean()))
    ranked = [np.argsort(-own) for own in scores]
    for slot in range(2):
        node = int(np.argmax([own[rank[slot]] for own, rank in zip(scores, ranked, strict=True)]))
        worst = normalize_atoms(data[node][ranked[node][slot]][None])[0]
        np.testing.assert_allclose(after.dictionaries[:, FLAT + slot], np.tile(worst, (6, 1)))


def test_an_atom_that_one_node_needs_stays() -> None:
    atoms, data = flat_data(3)
    data[2][:10, FLAT] = 5.0
    learner = DataDiffusion(8, n_nonzero=2)
    after = states(learner, data, Topology.ring(3), 10, start=atoms)[-1]
    assert np.abs(after.dictionaries[:, FLAT] @ np.eye(8)[FLAT]).min() > 0.5
    assert not after.dictionaries[:, FLAT + 1, FLAT + 1].any()


def test_the_private_candidate_parts_an_atom_that_stands_for_two() -> None:
    """Two true atoms with a cosine of 0.7, and one learned atom between them."""
    rng = np.random.default_rng(0)
    a, b = np.zeros((2, 6))
    a[0], b[0], b[1] = 1.0, 0.7, np.sqrt(1 - 0.49)
    between = normalize_atoms((a + b)[None])[0]
    values = rng.uniform(0.5, 1, 60) * rng.choice([-1.0, 1.0], 60)
    X = values[:, None] * np.where(np.arange(60)[:, None] < 40, a, b)
    start = np.stack([between, np.eye(6)[5]])
    learner = DataDiffusion(2, n_nonzero=1, update="gradient", step=1e-12)
    after = states(learner, [X], Topology.complete(1), 10, start=start)[-1]
    assert abs(after.dictionaries[0, 1] @ a) > 1 - 1e-6  # the larger group's


def test_only_lost_news_keeps_a_node_from_replacing() -> None:
    atoms, data = flat_data(4)
    learner = DataDiffusion(8, n_nonzero=2)
    network = InMemoryNetwork(Topology.grid(1, 4), faults=Faults(drop=0.4, seed=1))
    ended = learner.fit(data, network, 120, start=atoms)
    assert not ended.dictionaries[:, :, FLAT:].any()
    np.testing.assert_allclose(np.linalg.norm(ended.dictionaries, axis=2), 1)


# Privacy --------------------------------------------------------------------------------------


def closeness(sent: list[tuple[np.ndarray, ...]], data: list[np.ndarray]) -> float:
    """Return the largest |cosine| of a sample with a vector that some node has sent."""
    X = normalize_atoms(np.concatenate(data))
    arrays = [array for message in sent for array in message if array.ndim == 3]
    V = np.concatenate([array.reshape(-1, X.shape[1]) for array in arrays])
    V = V[np.linalg.norm(V, axis=1) > 0]
    return float(np.abs(X @ normalize_atoms(V).T).max())


@pytest.mark.parametrize("update", ["mod", "ksvd", "gradient"])
def test_by_default_no_message_shows_a_sample(update: str) -> None:
    _, data = draw(n_features=30, n_atoms=20, samples=40, noise=0.1)

    def shown(start: str, replacement: str, rounds: int) -> float:
        learner = DataDiffusion(20, n_nonzero=2, update=update, replacement=replacement)
        program, sent = noted(learner.program(dict(enumerate(data)), agreement=2, start=start))
        InMemoryNetwork(Topology.ring(4)).run(program, rounds)
        return closeness(sent, data)

    assert shown("common", "private", 40) < 0.995
    assert shown("common", "samples", 12) > 1 - 1e-12
    assert shown("samples", "private", 1) > 1 - 1e-12


def test_messages_are_dictionaries_use_and_candidates_and_are_counted() -> None:
    _, data = draw(samples=30)
    ring = Topology.ring(4)
    with_news = DataDiffusion(12).fit(data, ring, 7)
    assert with_news.floats_sent == 8 * 7 * (12 * 8 + 12 + 8 + 8 * 8)
    bare = DataDiffusion(12, replacement=None).fit(data, ring, 7)
    assert bare.floats_sent == 8 * 7 * 12 * 8
    program = DataDiffusion(12).program(dict(enumerate(data)), agreement=2)
    shown = program.observe(program.start(np.arange(4)))
    assert set(shown) == {"dictionaries", "error"}


# Shared observations --------------------------------------------------------------------------


@pytest.mark.parametrize("replacement", [None, "private", "samples"])
def test_where_all_share_all_everyone_learns_as_one_place_would(replacement: str | None) -> None:
    """A round later: in the first, only samples travel."""
    _, data = draw(samples=50)
    options = {"n_nonzero": 2, "step": 0.02, "replacement": replacement}
    learner = DataDiffusion(12, update="gradient", shared=60, **options)
    shared = states(learner, data, Topology.complete(4), 13)[-1].dictionaries
    if replacement is None:
        pooled = replace(learner, shared=0).fit([np.concatenate(data)], Topology.complete(1), 12)
        np.testing.assert_allclose(shared, np.stack([pooled.dictionaries[0]] * 4), atol=1e-10)
    np.testing.assert_allclose(shared, np.stack([shared[0]] * 4), atol=1e-10)


def test_three_rounds_with_shared_observations_by_hand() -> None:
    """The middle of a path receives from both ends; of 12 samples 8 travel per round, in turn."""
    _, data = draw(nodes=3, samples=12)
    data[2] = data[2][:6]  # fewer than a node may send
    weights = averaging_weights(Topology.star(3))
    options = {"update": "gradient", "step": 0.1, "replacement": None, "shared": 8}
    learner = DataDiffusion(4, coder=lambda X, D: X @ D.T, **options)
    start = np.random.default_rng(1).standard_normal((3, 4, 8))
    start /= np.linalg.norm(start, axis=2, keepdims=True)
    A, psi, near = weights.matrix.toarray(), start, [(1, 2), (0,), (0,)]
    for i, state in enumerate(states(learner, data, weights, 3, start=start)):
        D = np.einsum("kl,lam->kam", A, psi)
        D /= np.linalg.norm(D, axis=2, keepdims=True)
        np.testing.assert_allclose(state.dictionaries, D, atol=1e-13)
        sent = [*(X[(8 * i + np.arange(8)) % 12] for X in data[:2]), data[2]]
        seen = [np.concatenate([data[k], *(sent[j] for j in near[k])]) for k in range(3)]
        steps = [(X @ E.T).T @ (X - X @ E.T @ E) for X, E in zip(seen, D, strict=True)]
        psi = D + 0.1 * np.stack(steps)
    assert learner.fit(data, weights, 3).floats_sent == 4 * 3 * (4 * 8 + 8 * 8)


# Alignment ------------------------------------------------------------------------------------


def test_what_is_the_same_is_combined_whatever_the_order_or_the_signs() -> None:
    atoms, data = draw(samples=100, noise=0.02)
    rng = np.random.default_rng(3)
    rough = normalize_atoms(atoms + 0.1 * rng.standard_normal(atoms.shape))
    moved = rng.choice([-1.0, 1.0], (4, 12, 1)) * rough
    moved = np.stack([D[rng.permutation(12)] for D in moved])
    ring, plain = Topology.ring(4), DataDiffusion(12, n_nonzero=2, replacement=None)
    together = plain.fit(data, ring, 10, start=rough)
    apart = replace(plain, alignment="assignment").fit(data, ring, 10, start=moved)
    for pair in zip(together.dictionaries, apart.dictionaries, strict=True):
        assert dictionary_distance(*pair) < 1e-10
    assert apart.disagreement == pytest.approx(together.disagreement, rel=1e-6)
    assert min(found(plain.fit(data, ring, 10, start=moved).dictionaries, atoms)) < 12


def test_separate_parts_of_a_network_are_refused_unless_they_meet_in_time() -> None:
    _, data = draw()
    pairs = [[(0, 1), (2, 3)], [(1, 2), (3, 0)]]
    islands, others = (Topology.from_edges(4, edges) for edges in pairs)
    learner = DataDiffusion(12, n_nonzero=2)
    for network in (islands, metropolis_weights(islands), InMemoryNetwork(islands)):
        with pytest.raises(ValueError, match=r"^network"):
            learner.fit(data, network, 2)
    turns = Schedule.of(metropolis_weights(islands), metropolis_weights(others))
    network = InMemoryNetwork(turns, faults=Faults(drop=0.1))
    assert learner.fit(data, network, 40).disagreement < 0.2
    alone = learner.fit(data, Topology.from_edges(4, []), 2)
    assert alone.floats_sent == 0


# What is wrong ----------------------------------------------------------------------------------


GOOD = [np.ones((3, 4))] * 4
NONNEGATIVE = DataDiffusion(4, coder="nonnegative", nonnegative=True)


@pytest.mark.parametrize(
    ("data", "options", "name"),
    [
        (GOOD[:3], {}, "data"),
        ([*GOOD[:3], np.ones((3, 5))], {}, "data of node 3"),
        ([*GOOD[:3], np.full((3, 4), np.nan)], {}, "data of node 3"),
        ([np.ones((3, 4), dtype=int)] * 4, {}, "data of node 0"),
        ([1e160 * X for X in GOOD], {}, "data of node 0"),
        ([1e-170 * X for X in GOOD], {}, "data of node 0"),
        ([-X for X in GOOD], {"learner": NONNEGATIVE}, "data of node 0"),
        (GOOD, {"start": "nothing"}, "start"),
        (GOOD, {"start": np.ones((3, 4))}, "start of node 0"),
        (GOOD, {"start": np.ones((4, 3))}, "start of node 0"),
        (GOOD, {"n_rounds": -1}, "n_rounds"),
        (GOOD, {"seed": -1}, "seed"),
    ],
)
def test_bad_data_are_named(data: Any, options: dict[str, Any], name: str) -> None:
    learner = options.pop("learner", DataDiffusion(4))
    with pytest.raises(ValueError, match=f"^{name} "):
        learner.fit(data, Topology.ring(4), **options)


def test_atoms_that_are_matched_are_not_replaced() -> None:
    with pytest.raises(ValueError, match=r"^replacement"):
        DataDiffusion(5, alignment="assignment")
