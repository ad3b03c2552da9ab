"""What may go wrong at clients: the run ends well, and nothing becomes NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flwr_perdl.random import SERVER, spawn
from flwr_perdl.regression import Refinement, TwoPhase, model_error
from flwr_perdl.regression.phases import Answers, Ask, Descent, Stage
from perdl_experiments.batched_regression import Clients, simulate, simulate_rounds
from perdl_experiments.mixed_regression_data import Mixed, mixed_regression, oracle

THIRDS = np.full(3, 1 / 3)


def planted(seed: int = 0) -> Mixed:
    rng = np.random.default_rng(seed)
    return mixed_regression(np.where(np.arange(90) < 60, 10, 40), THIRDS, rng, d=20)


def run_on(X: list[np.ndarray], y: list[np.ndarray], rounds: int = 40) -> Stage:
    return simulate(Clients(X, y), TwoPhase(3), rounds).state


class Faulty(Clients):
    """Clients whose answers a test changes: ``fault(round, ask, answers) -> answers``."""

    asked = 0

    def __init__(self, data: Mixed, fault: Callable[[int, Ask, Answers], Answers]) -> None:
        super().__init__(data.X, data.y)
        self.fault = fault

    def answer(self, ask: Ask) -> Answers:
        self.asked += 1
        return self.fault(self.asked, ask, super().answer(ask))


def of(answers: Answers, present: np.ndarray) -> Answers:
    """Return the answers of who is present."""
    return Answers(*(part[present] for part in answers))


def absent(data: Mixed, share: float, seed: int = 0) -> Faulty:
    """Return clients of whom so many do not answer, others in every round."""

    def fault(round_: int, ask: Ask, answers: Answers) -> Answers:
        return of(answers, spawn(seed, 0, round_).random(len(data.y)) >= share)

    return Faulty(data, fault)


@pytest.mark.parametrize(
    ("change", "rounds", "most"),
    [
        (lambda i, A: A, 40, 0.1),
        (lambda i, A: np.concatenate([A, A]), 40, 0.1),
        (lambda i, A: A[:1] if i % 2 else A, 150, 0.2),
    ],
    ids=["as they are", "rows twice", "one point each at half of the clients"],
)
def test_models_are_found(change: Callable[..., Any], rounds: int, most: float) -> None:
    data = planted()
    X, y = ([change(i, A) for i, A in enumerate(own)] for own in (data.X, data.y))
    assert model_error(run_on(X, y, rounds).centers, data.theta) < most


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
    longest = np.linalg.norm(thetas, axis=1).max()
    for state in simulate_rounds(Clients(X, y), TwoPhase(), 40):
        assert np.linalg.norm(state.centers, axis=1).max(initial=0) < longest
    assert len(state.centers) > 1


@pytest.mark.parametrize(
    "change",
    [
        lambda X, y: ([A[:1] for A in X], [b[:1] for b in y]),
        lambda X, y: (X, [np.zeros_like(b) for b in y]),
        lambda X, y: (X, [np.full_like(b, 3.0) for b in y]),
        lambda X, y: ([np.zeros_like(A) for A in X], y),
        lambda X, y: (X[-1:], y[-1:]),
    ],
    ids=["one point each", "zero responses", "constant responses", "zero features", "one client"],
)
def test_models_of_degenerate_data_are_finite(change: Callable[..., tuple[Any, Any]]) -> None:
    data, robust = planted(), [TwoPhase(3, robust=rule) for rule in ("clip", "filtered")]
    clients = Clients(*change(data.X, data.y))
    for settings in (TwoPhase(), TwoPhase(3), *robust, TwoPhase.paper(3)):
        centers = simulate(clients, settings, 80).state.centers
        assert len(centers)
        assert np.isfinite(centers).all()


@pytest.mark.parametrize("n_clusters", [3, "auto"])
def test_all_clients_of_a_cluster_vanish_and_return(n_clusters: int | str) -> None:
    data, settings = planted(), TwoPhase(n_clusters, phase_2=Refinement(check_every=20))

    def fault(round_: int, ask: Ask, answers: Answers) -> Answers:
        return of(answers, data.labels != 1) if 30 <= round_ < 80 else answers

    states = list(simulate_rounds(Faulty(data, fault), settings, 160))
    assert all(np.isfinite(state.centers).all() for state in states)
    gone, back = states[78].centers, states[-1].centers
    assert model_error(gone, np.delete(data.theta, 1, axis=0)) < 0.1
    assert len(gone) == (2 if n_clusters == "auto" else 3)
    assert back.shape == data.theta.shape
    assert model_error(back, data.theta) < 0.1


def test_an_anchor_that_never_answers_is_left_out() -> None:
    data, lost = planted(), list[int]()

    def fault(round_: int, ask: Ask, answers: Answers) -> Answers:
        if ask.per_client and not lost:
            lost.append(next(iter(ask.per_client)))
        return of(answers, ~np.isin(answers.partitions, lost))

    states = list(simulate_rounds(Faulty(data, fault), TwoPhase.paper(3), 79))
    assert lost
    for state in states:
        if isinstance(state, Descent):
            assert not state.moved[np.isin(state.anchors, lost)].any()
    assert states[-1].step == "update"
    assert np.isfinite(states[-1].centers).all()


def test_without_any_anchor_phase_1_says_so() -> None:
    def fault(round_: int, ask: Ask, answers: Answers) -> Answers:
        return of(answers, ~np.isin(answers.partitions, list(ask.per_client)))

    with pytest.raises(ValueError, match="anchors"):
        simulate(Faulty(planted(), fault), TwoPhase.paper(3), 60)


def test_an_anchor_that_is_absent_keeps_its_estimate() -> None:
    data = mixed_regression(np.full(60, 40), THIRDS, np.random.default_rng(4), d=5)
    run = simulate(absent(data, 0.5), TwoPhase.paper(3), 90)
    assert model_error(run.state.centers, data.theta) < 0.1


@pytest.mark.parametrize("seed", range(3))
def test_a_cluster_whose_clients_are_not_drawn_in_a_check_is_kept(seed: int) -> None:
    """Six of sixty clients are in the smallest cluster, and nine answer per round."""
    data = mixed_regression(
        np.full(60, 40), np.array([0.6, 0.3, 0.1]), np.random.default_rng(0), d=5
    )
    run = simulate(absent(data, 0.85, seed), TwoPhase(), 200, centers=data.theta)
    assert {len(centers) for _, centers in run.history} == {3}


@pytest.mark.parametrize(
    ("n_clusters", "size", "robust"),
    [(3, 1e6, "clip"), ("auto", 1e6, "filtered"), ("auto", 1e100, "clip"), (3, 1e100, "filtered")],
)
def test_one_adversary_with_huge_values(n_clusters: int | str, size: float, robust: str) -> None:
    data, settings = planted(), TwoPhase(n_clusters, robust=robust)

    def fault(round_: int, ask: Ask, answers: Answers) -> Answers:
        partitions, n, stack = answers[0], answers[1].copy(), answers[2].copy()
        first = 2 if ask.step == "update" else 0
        lies = size * spawn(0, round_).standard_normal(stack[-1, ..., first:].shape)
        n[-1], stack[-1, ..., first:] = 1e9, np.abs(lies) if ask.step == "describe" else lies
        return Answers(partitions, n, stack)

    states = list(simulate_rounds(Faulty(data, fault), settings, 120))
    coarse = next(state for state in states if state.step == "update")
    assert model_error(coarse.centers, data.theta) < 0.6
    assert coarse.step_size > 0.01
    assert model_error(states[-1].centers, data.theta) < 0.2


def two_kinds(sizes: tuple[int, int]) -> Mixed:
    theta, labels = np.array([[2.0, 0.0, 1.0], [0.0, 2.0, -1.0]]), np.repeat([0, 1], sizes)
    rng = np.random.default_rng(0)
    X = [rng.standard_normal((40, 3)) for _ in labels]
    y = [A @ theta[j] + 0.3 * rng.standard_normal(40) for A, j in zip(X, labels, strict=True)]
    return Mixed(X, y, labels, theta)


def test_momentum_takes_over_where_clients_come_and_go() -> None:
    data = mixed_regression(np.full(40, 40), THIRDS, np.random.default_rng(0), d=5)
    best = model_error(oracle(data), data.theta)
    for share, remembered in ((0.0, 11), (0.3, 1)):
        run = simulate(absent(data, share), TwoPhase(3), 30)
        assert np.array_equal(run.state.memory.clip(max=11), np.full(3, remembered))
        assert model_error(run.state.centers, data.theta) <= 2 * best


def test_one_shot_clustering_starts_no_model_from_an_outlier() -> None:
    data, settings = two_kinds((4, 8)), TwoPhase(2, robust="filtered", start="one-shot")

    def fault(round_: int, ask: Ask, answers: Answers) -> Answers:
        if ask.step != "describe":
            answers.stack[-1, ..., 2 if ask.step == "update" else 1 :] *= -8.0
        return answers

    found = simulate(Faulty(data, fault), settings, 30).state.centers
    assert model_error(found, data.theta) < 0.1


@pytest.mark.parametrize("seed", range(3))
def test_a_robust_run_goes_on_where_noise_makes_every_client_look_like_a_liar(seed: int) -> None:
    data, check = two_kinds((1, 2)), Refinement(check_every=5)

    def fault(round_: int, ask: Ask, answers: Answers) -> Answers:
        if ask.step == "update":
            rng = spawn(seed, SERVER, round_)
            noise = rng.choice([0.5, 5, 50]) * rng.standard_normal(answers.stack[..., 2:].shape)
            answers.stack[..., 2:] += noise
        return answers

    settings = TwoPhase(2, robust="filtered", phase_2=check)
    found = simulate(Faulty(data, fault), settings, 40, seed=seed).state.centers
    assert found.shape == data.theta.shape
