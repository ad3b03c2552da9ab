"""What may go wrong at clients: the run ends well, and nothing becomes NaN."""

from __future__ import annotations

import numpy as np
import pytest

from flwr_perdl._random import SERVER, spawn
from flwr_perdl.regression import (
    Answers,
    Clients,
    OneShot,
    Refinement,
    State,
    TwoPhase,
    model_error,
    simulate,
)
from perdl_experiments.mixed_regression_data import Mixed, mixed_regression

THIRDS = np.full(3, 1 / 3)


def planted(seed: int = 0) -> Mixed:
    rng = np.random.default_rng(seed)
    return mixed_regression(np.where(np.arange(90) < 60, 10, 40), THIRDS, rng, d=20)


def run_on(X: list[np.ndarray], y: list[np.ndarray], rounds: int = 90) -> State:
    robust = [TwoPhase(n_clusters=3, robust=rule) for rule in ("clip", "filtered")]
    for settings in (TwoPhase(), *robust, TwoPhase.paper(3)):
        state = simulate(Clients(X, y), settings, rounds).state
        assert len(state.centers)
        assert np.isfinite(state.centers).all()
    return simulate(Clients(X, y), TwoPhase(n_clusters=3), rounds).state


def anchors_of(state: State) -> np.ndarray:
    """Return the anchors of a state of Phase 1; nobody in any other."""
    return getattr(state, "anchors", np.zeros(0))


def test_without_faults() -> None:
    data = planted()
    assert model_error(run_on(data.X, data.y).centers, data.theta) < 0.1


def test_duplicated_rows() -> None:
    data = planted()
    X, y = [np.vstack([A, A]) for A in data.X], [np.concatenate([b, b]) for b in data.y]
    assert model_error(run_on(X, y).centers, data.theta) < 0.1


def test_collinear_features() -> None:
    data = planted()
    X = [np.hstack([A, A[:, :3]]) for A in data.X]
    found = run_on(X, data.y).centers
    folded = found[:, :20].copy()
    folded[:, :3] += found[:, 20:]
    assert model_error(folded, data.theta) < 0.1


def test_nearly_collinear_features_at_some_clients_make_no_wild_models() -> None:
    """Every client has a model of its own, so that the subspace is the whole space."""
    rng = np.random.default_rng(1)
    thetas = rng.standard_normal((60, 5))
    X = [rng.standard_normal((40, 5)) for _ in thetas]
    for A in X[:10]:
        A[:, 0] = A[:, 1] + 1e-3 * rng.standard_normal(40)
    y = [A @ theta + rng.standard_normal(40) for A, theta in zip(X, thetas, strict=True)]
    clients, settings, state = Clients(X, y), TwoPhase(), TwoPhase().begin()
    longest = np.linalg.norm(thetas, axis=1).max()
    for round_ in range(1, 41):
        answers = clients.answer(settings.ask(state, spawn(0, SERVER, round_)))
        state = settings.advance(state, answers, spawn(0, SERVER, round_))
        assert np.linalg.norm(state.centers, axis=1).max(initial=0) < longest
    assert len(state.centers) > 1


def test_clients_of_one_point() -> None:
    data = planted()
    X = [A[:1] if i % 2 else A for i, A in enumerate(data.X)]
    y = [b[:1] if i % 2 else b for i, b in enumerate(data.y)]
    assert model_error(run_on(X, y, 150).centers, data.theta) < 0.2


def test_only_clients_of_one_point() -> None:
    data = planted()
    run_on([A[:1] for A in data.X], [b[:1] for b in data.y])


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_constant_responses(value: float) -> None:
    data = planted()
    run_on(data.X, [np.full_like(b, value) for b in data.y])


def test_zero_features() -> None:
    data = planted()
    run_on([np.zeros_like(A) for A in data.X], data.y)


def test_a_single_client() -> None:
    data = planted()
    run_on(data.X[-1:], data.y[-1:])


@pytest.mark.parametrize("robust", ["mean", "filtered"])
def test_clients_drop_out_at_random(robust: str) -> None:
    data = planted()
    state = simulate(Clients(data.X, data.y), TwoPhase(robust=robust), 90, dropout=0.2).state
    assert state.centers.shape == data.theta.shape
    assert model_error(state.centers, data.theta) < 0.1


@pytest.mark.parametrize("n_clusters", [3, "auto"])
def test_all_clients_of_a_cluster_vanish_and_return(n_clusters: int | str) -> None:
    data, settings = planted(), TwoPhase(n_clusters=n_clusters, phase_2=Refinement(check_every=20))
    clients, state = Clients(data.X, data.y), settings.begin()
    for round_ in range(1, 161):
        rng = spawn(0, SERVER, round_)
        gone = 30 <= round_ < 80
        present = data.labels != 1 if gone else np.full(len(clients), True)
        state = settings.advance(state, clients.answer(settings.ask(state, rng), present), rng)
        assert np.isfinite(state.centers).all()
        if round_ == 79:
            others = np.delete(data.theta, 1, axis=0)
            assert model_error(state.centers, others) < 0.1
            assert len(state.centers) == (2 if n_clusters == "auto" else 3)
    assert state.centers.shape == data.theta.shape
    assert model_error(state.centers, data.theta) < 0.1


def test_an_anchor_that_never_answers_is_left_out() -> None:
    data, settings = planted(), TwoPhase.paper(3)
    clients, state, lost = Clients(data.X, data.y), settings.begin(), None
    for round_ in range(1, 80):
        rng = spawn(0, SERVER, round_)
        present = np.full(len(clients), True)
        if lost is None and len(anchors_of(state)):
            lost = int(anchors_of(state)[0])
        if lost is not None:
            present[lost] = False
        state = settings.advance(state, clients.answer(settings.ask(state, rng), present), rng)
        if len(anchors_of(state)):
            assert not state.moved[state.anchors == lost].any()
    assert lost is not None
    assert state.step == "update"
    assert np.isfinite(state.centers).all()


def test_without_any_anchor_phase_1_says_so() -> None:
    data, settings = planted(), TwoPhase.paper(3)

    def phase_1() -> None:
        clients, state, rng = Clients(data.X, data.y), settings.begin(), spawn(0)
        while state.step != "update":
            present = ~np.isin(np.arange(len(clients)), anchors_of(state))
            state = settings.advance(state, clients.answer(settings.ask(state, rng), present), rng)

    with pytest.raises(ValueError, match=r"no client with enough points answered that was asked"):
        phase_1()


@pytest.mark.parametrize("seed", range(3))
def test_an_anchor_that_is_absent_keeps_its_estimate(seed: int) -> None:
    data = mixed_regression(np.full(60, 40), THIRDS, np.random.default_rng(4), d=5)
    run = simulate(Clients(data.X, data.y), TwoPhase.paper(3), 90, seed=seed, dropout=0.5)
    assert model_error(run.state.centers, data.theta) < 0.1


@pytest.mark.parametrize("seed", range(3))
def test_a_cluster_whose_clients_are_not_drawn_in_a_check_is_kept(seed: int) -> None:
    """Six of sixty clients are in the smallest cluster, and nine answer per round."""
    data = mixed_regression(
        np.full(60, 40), np.array([0.6, 0.3, 0.1]), np.random.default_rng(0), d=5
    )
    clients, settings = Clients(data.X, data.y), TwoPhase()
    run = simulate(clients, settings, 200, centers=data.theta, seed=seed, dropout=0.85)
    assert {len(centers) for _, centers in run.history} == {3}


@pytest.mark.parametrize("robust", ["clip", "filtered"])
@pytest.mark.parametrize("n_clusters", [3, "auto"])
@pytest.mark.parametrize("size", [1e6, 1e100])
def test_one_adversary_with_huge_values(n_clusters: int | str, size: float, robust: str) -> None:
    data, settings = planted(), TwoPhase(n_clusters=n_clusters, robust=robust)
    clients, state = Clients(data.X, data.y), settings.begin()
    coarse = None
    for round_ in range(1, 121):
        rng = spawn(0, SERVER, round_)
        partitions, n, stack = clients.answer(settings.ask(state, rng))
        stack, n = stack.copy(), n.copy()
        n[-1] = 1e9
        first = 2 if state.step == "update" else 0
        stack[-1, ..., first:] = size * rng.standard_normal(stack[-1, ..., first:].shape)
        if state.step == "describe":
            stack[-1] = np.abs(stack[-1])
        state = settings.advance(state, Answers(partitions, n, stack), rng)
        if coarse is None and state.step == "update":
            coarse = model_error(state.centers, data.theta)
            assert state.step_size > 0.01
    assert coarse is not None
    assert coarse < 0.6
    assert model_error(state.centers, data.theta) < 0.2


def two_kinds(sizes: tuple[int, int]) -> Mixed:
    theta, labels = np.array([[2.0, 0.0, 1.0], [0.0, 2.0, -1.0]]), np.repeat([0, 1], sizes)
    rng = np.random.default_rng(0)
    X = [rng.standard_normal((40, 3)) for _ in labels]
    y = [A @ theta[j] + 0.3 * rng.standard_normal(40) for A, j in zip(X, labels, strict=True)]
    return Mixed(X, y, labels, theta)


@pytest.mark.parametrize("robust", ["filtered", "geometric-median"])
@pytest.mark.parametrize("softness", [1.0, 30.0])
@pytest.mark.parametrize("sizes", [(4, 8), (6, 6), (8, 4), (10, 20)])
def test_with_soft_clusters_honest_clients_are_not_taken_for_liars(
    sizes: tuple[int, int], softness: float, robust: str
) -> None:
    data = two_kinds(sizes)
    for n_clusters in (2, "auto"):
        settings = TwoPhase(n_clusters, phase_2=Refinement(softness=softness), robust=robust)
        found = simulate(Clients(data.X, data.y), settings, 70).state.centers
        assert model_error(found, data.theta) < 0.1


def test_one_shot_clustering_starts_no_model_from_an_outlier() -> None:
    data, settings = two_kinds((4, 8)), TwoPhase(2, OneShot(), robust="filtered")
    clients, state = Clients(data.X, data.y), settings.begin()
    for round_ in range(1, 31):
        rng = spawn(0, SERVER, round_)
        answers = clients.answer(settings.ask(state, rng))
        first = 2 if state.step == "update" else 1
        answers.stack[-1, ..., first:] *= -8.0 if state.step != "describe" else 1.0
        state = settings.advance(state, answers, rng)
    assert model_error(state.centers, data.theta) < 0.1


def test_a_robust_run_goes_on_where_noise_makes_every_client_look_like_a_liar() -> None:
    data, check = two_kinds((1, 2)), Refinement(check_every=5)
    clients, settings = Clients(data.X, data.y), TwoPhase(2, robust="filtered", phase_2=check)
    for seed in range(5):
        state = settings.begin()
        for round_ in range(1, 41):
            rng = spawn(seed, SERVER, round_)
            answers = clients.answer(settings.ask(state, rng))
            if state.step == "update":
                noise = rng.choice([0.5, 5, 50]) * rng.standard_normal(answers.stack[..., 2:].shape)
                answers.stack[..., 2:] += noise
            state = settings.advance(state, answers, rng)
        assert state.centers.shape == data.theta.shape


def test_a_round_without_any_answer_changes_nothing() -> None:
    data = mixed_regression(np.full(4, 40), np.array([0.5, 0.5]), np.random.default_rng(0), d=3)
    clients = Clients(data.X, data.y)
    for seed in range(4):
        run = simulate(clients, TwoPhase(2), 40, centers=data.theta, seed=seed, dropout=0.7)
        assert np.isfinite(run.state.centers).all()
    with pytest.raises(ValueError, match=r"dropout must be in \[0, 1\], got 2"):
        simulate(clients, TwoPhase(2), 1, dropout=2)
