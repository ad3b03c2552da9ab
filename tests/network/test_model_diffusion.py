"""Learning over distributed models: its gradient, its limit, and the same numbers on a network."""

from __future__ import annotations

import pickle
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize

from flwr_perdl.network import InMemoryNetwork
from flwr_perdl.network.inference import exact_dual, infer, local_costs
from flwr_perdl.network.model_diffusion import ModelDiffusion, update_dictionary
from flwr_perdl.network.objectives import HuberNMF, NonnegativeMF, Objective, SparseSVD
from flwr_perdl.network.topology import Topology
from tests.network.objectives import each_of, four
from tests.network.programs import noted

OBJECTIVES = four(0.05, 0.1, eta=0.1)
METHODS = ("admm", "exact_diffusion", "atc")
NETWORK = Topology.erdos_renyi(6, 0.5, seed=1)


def samples(n: int = 13, n_features: int = 20, seed: int = 0) -> Any:
    X = np.random.default_rng(seed).random((n, n_features)) ** 3
    return X / np.linalg.norm(X, axis=1, keepdims=True)


# The update ---------------------------------------------------------------------------------


@each_of(OBJECTIVES)
def test_the_update_descends_the_loss_at_the_optimal_codes(objective: Objective) -> None:
    """(53)-(56): nu' y is minus the gradient of f(x - y W) in W."""
    rng = np.random.default_rng(3)
    X, W = samples(4, 7), 0.3 * rng.random((3, 2, 7)) + 0.05
    found = exact_dual(objective, X, list(W))
    codes, nu = np.stack(found.codes), np.broadcast_to(found.nu, (3, *X.shape))

    def loss(atoms: Any) -> float:
        return float(objective.loss(X - np.einsum("kia,kam->im", codes, atoms)).sum())

    gradient = np.zeros_like(W)
    for index in np.ndindex(W.shape):
        shift = np.zeros_like(W)
        shift[index] = 1e-6
        gradient[index] = (loss(W + shift) - loss(W - shift)) / 2e-6
    step = 1e-2
    moved = objective.prox_dictionary(W - step * gradient, step * len(X))
    assert (np.linalg.norm(moved, axis=2) < 1).all()
    assert (moved > 0).all()
    updated = update_dictionary(objective, W, nu, codes, step)
    np.testing.assert_allclose(updated, moved, atol=1e-9)
    assert np.abs(updated - W).max() > 1e-4


# In memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n_atoms", [1, 2])
@each_of(OBJECTIVES)
def test_the_network_learns_what_one_place_would(objective: Objective, n_atoms: int) -> None:
    X = samples(5, 10)
    learner = ModelDiffusion(
        objective, n_atoms, step=0.3, decay=0.5, batch_size=3, n_iterations=2000, tolerance=1e-9
    )
    model = learner.fit(X, NETWORK)
    W = learner.start(6, 10).dictionaries
    for t, batch in enumerate((X[:3], X[3:]), 1):
        found = exact_dual(objective, batch, list(W))
        nu = np.broadcast_to(found.nu, (6, *found.nu.shape))
        W = update_dictionary(objective, W, nu, np.stack(found.codes), 0.3 / np.sqrt(t))
    np.testing.assert_allclose(model.dictionaries, W, atol=1e-7)
    exact = replace(learner, method="exact").fit(X, NETWORK)
    np.testing.assert_allclose(exact.dictionaries, W, atol=1e-13)
    assert (exact.rounds, exact.residual) == (0, 0.0)
    assert (model.n_samples, model.n_updates) == (5, 2)
    assert 0 < model.residual <= 1e-9
    assert 20 < model.rounds < 2 * 2000


def test_planted_parts_are_found() -> None:
    """Samples are sums of two of six parts that do not overlap: each becomes an agent's atom."""
    rng = np.random.default_rng(0)
    parts = np.kron(np.eye(6), np.ones(5)) / np.sqrt(5)
    which = np.argsort(rng.random((400, 6)), axis=1)[:, :2]
    codes = np.zeros((400, 6))
    np.put_along_axis(codes, which, rng.uniform(0.5, 1.5, (400, 2)), axis=1)
    X = codes @ parts + 0.01 * rng.random((400, 30))
    learner = ModelDiffusion(NonnegativeMF(0.02, 0.05), step=0.5, decay=0.3, n_iterations=60)
    model = learner.fit(X, NETWORK)
    atoms = model.dictionaries[:, 0]
    likeness = (atoms / np.linalg.norm(atoms, axis=1, keepdims=True)) @ parts.T
    assert sorted(likeness.argmax(axis=1)) == list(range(6))
    assert likeness.max(axis=1).min() > 0.99
    start = learner.start(6, 30).dictionaries[:, 0]
    assert (start @ parts.T).max() < 0.8


def test_learning_goes_on_where_it_was_left() -> None:
    X = samples(20)
    learner = ModelDiffusion(OBJECTIVES[0], 2, decay=0.7, batch_size=5, n_iterations=30)
    at_once = learner.fit(X, NETWORK)
    first = learner.fit(X[:10], NETWORK)
    kept = first.dictionaries.copy()
    second = learner.partial_fit(first, X[10:], NETWORK)
    np.testing.assert_allclose(second.dictionaries, at_once.dictionaries, atol=1e-13)
    assert second[1:4] == at_once[1:4]
    np.testing.assert_array_equal(first.dictionaries, kept)
    nothing = learner.partial_fit(first, X[:0], NETWORK)
    np.testing.assert_array_equal(nothing.dictionaries, kept)
    assert not np.shares_memory(nothing.dictionaries, first.dictionaries)


def test_a_network_that_grows_keeps_its_atoms() -> None:
    learner = ModelDiffusion(OBJECTIVES[2], 2, n_iterations=20, seed=5)
    small = learner.fit(samples(), NETWORK)
    grown = learner.grow(small, 3)
    np.testing.assert_array_equal(grown.dictionaries[:6], small.dictionaries)
    np.testing.assert_array_equal(grown.dictionaries[6:], learner.start(9, 20).dictionaries[6:])
    np.testing.assert_allclose(np.linalg.norm(grown.dictionaries[6:], axis=2), 1)
    assert (grown.dictionaries[6:] >= 0).all()
    later = learner.partial_fit(grown, samples(), Topology.ring(9))
    assert np.abs(later.dictionaries[6:] - grown.dictionaries[6:]).max() > 1e-3
    with pytest.raises(ValueError, match=r"^network"):
        learner.partial_fit(grown, samples(), NETWORK)


def test_the_default_rounds_reach_40_db() -> None:
    X, learner = samples(8), ModelDiffusion(OBJECTIVES[2])
    model = learner.start(6, 20)
    found = learner.infer(model, X, NETWORK)
    exact = exact_dual(OBJECTIVES[2], X, list(model.dictionaries))
    error = np.linalg.norm(found.nu - exact.nu, axis=2) / np.linalg.norm(exact.nu, axis=1)
    assert error.max() < 1e-2


# Bounded dual variables in fewer coordinates ------------------------------------------------


@pytest.mark.parametrize("method", ["atc", "exact_diffusion"])
def test_fewer_coordinates_change_nothing(method: str) -> None:
    X = samples(12, 60)
    assert (X > 0.2).any()  # some residuals exceed eta

    options = {"method": method, "n_iterations": 60, "options": {"step": 0.04}}
    learner = ModelDiffusion(HuberNMF(0.05, 0.1, 0.1), 2, informed=[1, 3], **options)
    short, plain = (replace(learner, compress=how).fit(X, NETWORK) for how in (True, None))
    np.testing.assert_allclose(short.dictionaries, plain.dictionaries, atol=1e-12)


def test_an_entry_that_leaves_its_bounds_comes_back() -> None:
    """An atom with much where the sample has nothing drives nu below -1 there."""
    atoms = np.zeros((4, 1, 30))
    atoms[0, 0, :2] = 0.8, 0.6
    atoms[1:, 0, 5:] = 0.2
    X = np.zeros((2, 30))
    X[0, 0], X[1, 7] = 1.0, 0.5
    objective, network = HuberNMF(0.01, 0.02, 0.1), Topology.ring(4)
    learner = ModelDiffusion(
        objective, method="exact_diffusion", n_iterations=40_000, tolerance=1e-9, compress=True
    )
    found = learner.infer(learner.start(4, 30)._replace(dictionaries=atoms), X, network)
    exact = exact_dual(objective, X, list(atoms))
    assert exact.nu[0, 1] == -1
    np.testing.assert_allclose(found.nu, np.broadcast_to(exact.nu, found.nu.shape), atol=1e-5)
    np.testing.assert_allclose(found.codes, exact.codes, atol=1e-4)


# Agents that differ ---------------------------------------------------------------------------

N_K = (2, 1, 3)


def own(kind: type[Objective], repeats: Any = 1, *more: float) -> Objective:
    """Return the objective of three agents with an h of their own, or of their atoms."""
    gamma, delta = np.repeat([0.02, 0.3, 0.1], repeats), np.repeat([0.1, 0.4, 0.2], repeats)
    return kind(gamma, delta, *more)


@pytest.mark.parametrize(("kind", "more"), [(SparseSVD, ()), (HuberNMF, (0.1,))])
def test_an_agent_with_several_atoms_learns_as_several_agents_with_one(
    kind: Any, more: Any
) -> None:
    """(10), N_k: the same atoms with the same h, however they are spread over agents."""
    X, options = samples(4), {"step": 0.5, "batch_size": 2, "tolerance": 1e-6}
    few = ModelDiffusion(own(kind, 1, *more), N_K, **options)
    many = ModelDiffusion(own(kind, N_K, *more), **options)
    start = few.start(3, 20)
    assert (np.linalg.norm(start.dictionaries, axis=2) > 0).sum(axis=1).tolist() == list(N_K)
    cells = [(k, j) for k, n in enumerate(N_K) for j in range(n)]
    apart = np.stack([start.dictionaries[cell] for cell in cells])[:, None]
    alone = start._replace(dictionaries=apart)
    expected = replace(many, method="exact").partial_fit(alone, X, NETWORK).dictionaries[:, 0]
    ring, short = Topology.ring(3), replace(few, n_iterations=20, tolerance=0)
    for learner, model, network, atol in (
        (replace(few, method="exact"), start, ring, 1e-12),
        (few, start, ring, 1e-4),
        (many, alone, NETWORK, 1e-4),
    ):
        W = learner.partial_fit(model, X, network).dictionaries
        np.testing.assert_allclose(W[np.linalg.norm(W, axis=2) > 0], expected, atol=atol)
    carried = [short.partial_fit(start, X, by) for by in (ring, InMemoryNetwork(ring))]
    np.testing.assert_allclose(carried[0].dictionaries, carried[1].dictionaries, atol=1e-12)
    assert [C.shape for C in short.infer(start, X, ring).codes] == [(4, n) for n in N_K]


@pytest.mark.parametrize("objective", [own(SparseSVD), own(NonnegativeMF), own(HuberNMF, 1, 1.0)])
def test_agents_may_have_an_h_of_their_own(objective: Any) -> None:
    """Problem (7) with the sum (10), solved by SciPy; all methods but those with a bias find it."""
    start = ModelDiffusion(objective, 3, seed=1).start(3, 6).dictionaries
    X, D = 4 * samples(3, 6), [W[:n] for W, n in zip(start, N_K, strict=True)]
    gamma, delta = (np.repeat(weights, N_K) for weights in (objective.gamma, objective.delta))
    W, eta = np.concatenate(D), objective.strong_convexity
    found = exact_dual(objective, X, D)

    def cost(parts: Any, x: Any) -> tuple[float, Any]:
        y = parts[:6] - parts[6:]
        u = x - y @ W
        value = objective.loss(u) + gamma @ parts.reshape(2, 6).sum(0) + delta @ y**2 / 2
        slope = delta * y - W @ np.clip(u / eta, -objective.bound, objective.bound)
        return float(value), np.concatenate([slope + gamma, -slope + gamma])

    below = 0.0 if objective.nonnegative else None
    options = {"bounds": [(0, None)] * 6 + [(0, below)] * 6, "method": "L-BFGS-B", "tol": 1e-15}
    for i, x in enumerate(X):
        best = minimize(cost, np.zeros(12), (x,), jac=True, **options)
        codes = np.concatenate([C[i] for C in found.codes])
        np.testing.assert_allclose(codes, best.x[:6] - best.x[6:], atol=1e-5)
        assert found.cost[i] == pytest.approx(best.fun, rel=1e-8)
    for method in ("admm", "exact_diffusion"):
        by = infer(objective, X, D, Topology.ring(3), method=method, tolerance=1e-6)
        np.testing.assert_allclose(np.hstack(by.codes), np.hstack(found.codes), atol=1e-4)
    stack = start * (np.arange(3) < np.array(N_K)[:, None])[..., None]
    nu = np.broadcast_to(found.nu, (3, *X.shape))
    np.testing.assert_allclose(-local_costs(objective, X, nu, stack).sum(0), found.cost, rtol=1e-9)
    if objective.bound == np.inf:
        close = exact_dual(objective, X, D, tolerance=1e-6)
        np.testing.assert_allclose(close.nu, found.nu, atol=1e-5)


def test_new_agents_bring_an_h_and_a_number_of_atoms_of_their_own() -> None:
    first = ModelDiffusion(SparseSVD([0.1, 0.2], 0.1), [2, 1], n_iterations=20)
    model = first.fit(samples(4), Topology.star(2))
    more = replace(first, objective=SparseSVD([0.1, 0.2, 0.3], 0.1), n_atoms_per_agent=[2, 1, 3])
    grown = more.grow(model, 1)
    np.testing.assert_array_equal(grown.dictionaries[:2, :2], model.dictionaries)
    assert grown.dictionaries.shape == (3, 3, 20)
    assert not grown.dictionaries[:2, 2].any()
    assert more.partial_fit(grown, samples(4), Topology.star(3)).n_samples == 8
    with pytest.raises(ValueError, match=r"^n_atoms_per_agent"):
        first.grow(model, 1)
    for bad, argument in (
        ({"objective": SparseSVD([0.1, 0.2], 0.1)}, "gamma"),
        ({"objective": SparseSVD(0.1, [0.1] * 4)}, "delta"),
        ({"n_atoms_per_agent": (1, 2)}, "n_atoms_per_agent"),
    ):
        for network in (Topology.star(3), InMemoryNetwork(Topology.star(3))):
            with pytest.raises(ValueError, match=f"^{argument} "):
                replace(ModelDiffusion(SparseSVD(0.1, 0.1)), **bad).fit(samples(4), network)


# On a network -------------------------------------------------------------------------------


@pytest.mark.parametrize(("objective", "method"), [*zip(OBJECTIVES, METHODS, strict=False)])
@pytest.mark.parametrize(("n_atoms", "dtype"), [(1, np.float32), (3, np.float64)])
def test_a_network_learns_the_same_as_memory(
    objective: Objective, method: str, n_atoms: int, dtype: Any
) -> None:
    options = {"step": 0.3, "decay": 0.5, "batch_size": 5, "n_iterations": 25}
    X, rounding = samples().astype(dtype), 1e3 * np.finfo(dtype).eps
    learner = ModelDiffusion(objective, n_atoms, method=method, informed=[0, 2], **options)
    model = learner.fit(X, NETWORK)
    by_messages = learner.fit(X, InMemoryNetwork(NETWORK))
    assert by_messages.dictionaries.dtype == model.dictionaries.dtype == dtype
    np.testing.assert_allclose(by_messages.dictionaries, model.dictionaries, atol=rounding)
    assert np.abs(model.dictionaries - learner.start(6, 20).dictionaries).max() > 1e-3
    assert by_messages[1:4] == model[1:4] == (13, 3, 75)


def test_a_program_goes_on_from_a_model() -> None:
    X = samples(20)
    learner = ModelDiffusion(OBJECTIVES[2], decay=0.4, batch_size=5, n_iterations=20)
    first = learner.fit(X[:10], NETWORK)
    model = learner.partial_fit(first, X[10:], NETWORK)
    program = learner.program(X[10:], NETWORK, model=first, show=True)
    copy = pickle.loads(pickle.dumps(program))
    run = InMemoryNetwork(NETWORK).run(copy, copy.n_rounds + 3)  # idle rounds change nothing
    np.testing.assert_allclose(run.observed["dictionary"], model.dictionaries, atol=1e-12)
    carried = learner.partial_fit(first, X[10:], InMemoryNetwork(NETWORK))
    assert carried.rounds == model.rounds


@pytest.mark.parametrize("network", [NETWORK, InMemoryNetwork(NETWORK)], ids=["memory", "messages"])
def test_only_batches_whose_rounds_fit_are_learned(network: Any) -> None:
    X = samples(13)
    learner = ModelDiffusion(OBJECTIVES[0], 2, batch_size=5, n_iterations=20)
    two = learner.fit(X[:10], NETWORK)
    model = learner.fit(X, network, 59)
    np.testing.assert_allclose(model.dictionaries, two.dictionaries, atol=1e-12)
    assert model[1:3] == (10, 2)
    assert learner.fit(X, network, 60)[1:4] == learner.fit(X, network, 600)[1:4] == (13, 3, 60)
    first = learner.fit(X, network, 0)
    np.testing.assert_array_equal(first.dictionaries, learner.start(6, 20).dictionaries)
    assert first[1:] == (0, 0, 0, 0.0)
    with pytest.raises(ValueError, match=r"^n_rounds"):
        learner.fit(X, network, -1)
    with pytest.raises(ValueError, match=r"^network"):
        replace(learner, method="exact").fit(X, InMemoryNetwork(NETWORK))


def test_only_dual_variables_travel_and_nothing_private_is_shown() -> None:
    X = samples(10)
    learner = ModelDiffusion(OBJECTIVES[0], 2, batch_size=5, n_iterations=7, informed=[0])
    program, heard = noted(learner.program({0: X}, NETWORK))
    run = InMemoryNetwork(NETWORK).run(program, program.n_rounds)
    assert len(heard) == 14
    assert all(len(arrays) == 1 and arrays[0].shape == (6, 5, 20) for arrays in heard)
    assert set(run.observed) == {"batch", "residual"}
    # A host of agents that are not informed needs no samples, only their shape.
    alone = learner.program({}, NETWORK, shape=X.shape)
    state = alone.adapt(alone.start(np.array([3, 5])), 1)
    np.testing.assert_array_equal(state.linear, 0)
    with pytest.raises(ValueError, match=r"^X"):
        alone.start(np.array([0, 3]))


def test_an_agent_that_wakes_up_in_the_second_batch_begins_with_it() -> None:
    learner = ModelDiffusion(OBJECTIVES[2], batch_size=5, n_iterations=80)
    program = learner.program(samples(15), NETWORK)
    state = program.start(np.arange(6))
    for round_ in (1, 81):
        state = program.adapt(state, round_)
    late = state._replace(batch=np.array([2, 2, 1, 2, 2, 2]))
    awake = program.adapt(late, 85)
    np.testing.assert_array_equal(awake.batch, 2)
    np.testing.assert_allclose(awake.nu[2], program.adapt(program.start(np.arange(6)), 81).nu[2])


# Size ---------------------------------------------------------------------------------------


def test_two_thousand_agents_learn_in_memory_in_proportion_to_the_edges() -> None:
    learner = ModelDiffusion(SparseSVD(0.1, 0.5), batch_size=2, n_iterations=2)
    tracemalloc.start()
    model = learner.fit(samples(4, 8), Topology.small_world(2000, 6, 0.2))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not np.array_equal(model.dictionaries, learner.start(2000, 8).dictionaries)
    assert peak < 8 * 2000**2 / 2  # half of a number per pair of agents


@pytest.mark.parametrize("objective", [NonnegativeMF(0.05, 0.1), HuberNMF(0.05, 0.1, 0.5)])
def test_nonnegative_atoms_cannot_be_learned_from_negative_data(objective: Objective) -> None:
    learner, ring = ModelDiffusion(objective, n_iterations=2), Topology.ring(4)
    X = -np.ones((3, 5))
    for learn in (learner.fit, learner.program):
        with pytest.raises(ValueError, match=r"^X "):
            learn(X, ring)
    first = learner.start(4, 5)
    np.testing.assert_array_equal(learner.fit(0 * X, ring).dictionaries, first.dictionaries)
    assert not any(codes.any() for codes in learner.infer(first, X, ring).codes)
