from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flwr_perdl.regression import (
    LogisticLoss,
    Refinement,
    TwoPhase,
    model_error,
    two_phases,
)
from flwr_perdl.regression.phases import Answers, Ask
from perdl_experiments.batched_regression import Clients, simulate
from perdl_experiments.mixed_regression_data import Mixed, mixed_regression, oracle, setting

THIRDS = np.full(3, 1 / 3)


def small(seed: int = 0, n_clients: int = 60, d: int = 20) -> Mixed:
    """Clients of 1 to 59 points, fewer and more than there are features."""
    rng = np.random.default_rng(seed)
    return mixed_regression(rng.integers(1, 60, n_clients), THIRDS, rng, d=d)


def paper_with(**options: float) -> TwoPhase:
    """Return the paper's variant with another Phase 2."""
    paper = TwoPhase.paper(3)
    return replace(paper, phase_2=replace(paper.phase_2, **options))


def plain_round(
    data: Mixed, centers: np.ndarray, step: float, n_steps: int, *, by_cluster: bool
) -> np.ndarray:
    """One round of Phase 2 as the paper writes it, client by client."""
    total, counts = np.zeros_like(centers), np.zeros(len(centers))
    for A, b in zip(data.X, data.y, strict=True):
        j = int(np.argmin([np.sum((b - A @ theta) ** 2) for theta in centers]))
        theta = centers[j]
        for _ in range(n_steps):
            theta = theta - step * A.T @ (A @ theta - b) / len(b)
        total[j] += len(b) * (theta - centers[j])
        counts[j] += len(b)
    weights = np.maximum(counts, 1)[:, None] if by_cluster else counts.sum()
    return centers + total / weights


@pytest.mark.parametrize("n_steps", [1, 5])
@pytest.mark.parametrize("normalise", ["cluster", "all"])
def test_phase_2_is_the_plain_loop(n_steps: int, normalise: str) -> None:
    data = small()
    centers = start = np.random.default_rng(1).standard_normal((3, 20)) / 4
    plain = Refinement(
        n_steps=n_steps, step_size=0.02, normalise=normalise, momentum=False, check_every=0
    )
    for _ in range(30):
        centers = plain_round(data, centers, 0.02, n_steps, by_cluster=normalise == "cluster")
    settings = TwoPhase(3, phase_2=plain)
    found = simulate(Clients(data.X, data.y), settings, 30, centers=start).state.centers
    np.testing.assert_allclose(found, centers, atol=1e-10)


def test_a_cluster_without_anchors_is_found_later() -> None:
    data = setting("C3", np.random.default_rng(8))
    assert 0 not in data.labels[900:]
    run = simulate(Clients(data.X, data.y), TwoPhase(), 60, seed=8)
    numbers = [len(centers) for _, centers in run.history]
    assert numbers[0] == 2
    assert numbers[-1] == 3


@pytest.mark.parametrize("n_clusters", ["auto", "given"])
@pytest.mark.parametrize(
    ("sizes", "shares", "noise"),
    [
        ([50] * 60, [1.0], 0.2),
        ([50] * 80, [0.5, 0.5], 0.2),
        ([50] * 150, [0.2] * 5, 0.2),
        ([10] * 300, [1 / 3] * 3, 0.2),
        ([50] * 200, [1 / 3] * 3, 1.0),
        ([50] * 200, [0.05, 0.35, 0.6], 0.2),
    ],
    ids=["one", "two", "five", "no anchors", "noise", "a rare one"],
)
def test_other_mixtures(
    sizes: list[int], shares: list[float], noise: float, n_clusters: str
) -> None:
    rng = np.random.default_rng(0)
    data = mixed_regression(np.array(sizes), np.array(shares), rng, d=40, noise=noise)
    settings = TwoPhase() if n_clusters == "auto" else TwoPhase(n_clusters=len(shares))
    run = simulate(Clients(data.X, data.y), settings, 100)
    assert len(run.state.centers) == len(shares)
    assert model_error(run.state.centers, data.theta) <= 1.08 * model_error(
        oracle(data), data.theta
    )


def test_estimates_that_show_no_groups_are_found_too_many_models_for_phase_2_to_merge() -> None:
    """Noise of 0.5 with 20 points for 100 features: no merge of the anchors stands out."""
    data = mixed_regression(np.full(500, 20), THIRDS, np.random.default_rng(0), d=100, noise=0.5)
    run = simulate(Clients(data.X, data.y), TwoPhase(), 60)
    assert len(run.history[0][1]) > 3 == len(run.state.centers)
    bound = 1.05 * model_error(oracle(data), data.theta)
    assert model_error(run.state.centers, data.theta) <= bound


def test_the_papers_variant_works_where_every_cluster_has_an_anchor() -> None:
    data = setting("C1", np.random.default_rng(0))
    run = simulate(Clients(data.X, data.y), paper_with(work=1.0), 160)
    assert model_error(run.state.centers, data.theta) < 1.1 * model_error(oracle(data), data.theta)


def test_one_cluster_is_fedavg_with_least_squares_as_its_limit() -> None:
    data = small()
    found = simulate(Clients(data.X, data.y), TwoPhase(1), 150).state.centers[0]
    pooled = np.linalg.lstsq(np.vstack(data.X), np.concatenate(data.y), rcond=None)[0]
    np.testing.assert_allclose(found, pooled, atol=1e-6)


@pytest.mark.parametrize(("name", "rounds"), [("C1", 8), ("C2", 10), ("C3", 12)])
@pytest.mark.parametrize("n_clusters", [3, "auto"])
def test_the_defaults_are_the_oracle_in_a_few_rounds(
    name: str, rounds: int, n_clusters: int | str
) -> None:
    data = setting(name, np.random.default_rng(1))
    run = simulate(Clients(data.X, data.y), TwoPhase(n_clusters), 20)
    errors = {at: model_error(centers, data.theta) for at, centers in run.history}
    best = model_error(oracle(data), data.theta)
    assert run.state.centers.shape == (3, 100)
    assert max(errors[at] for at in range(rounds, 21)) < 1.05 * best
    assert errors[20] == pytest.approx(best, rel=1e-3)


def test_logistic_models_are_clustered() -> None:
    rng = np.random.default_rng(0)
    theta = np.array([[3.0, 0.0], [-3.0, 1.0]])
    labels = np.repeat([0, 1], 15)
    X = [rng.standard_normal((40, 2)) for _ in labels]
    y = [
        np.where(rng.random(40) < 1 / (1 + np.exp(-A @ theta[j])), 1.0, -1.0)
        for A, j in zip(X, labels, strict=True)
    ]
    settings = TwoPhase(n_clusters=2, phase_2=Refinement(check_every=0))
    clients = Clients(X, y, LogisticLoss())
    state = simulate(clients, settings, 80, centers=np.array([[1.0, 0.0], [0.0, 1.0]])).state
    ask = next(two_phases(settings, state))
    found = clients.answer(ask).stack[:, 0, 1]
    assert np.array_equal(found, labels) or np.array_equal(found, 1 - labels)
    assert model_error(state.centers, theta) < 0.8


class Recording(Clients):
    """Clients that remember what they were asked, and answered."""

    def answer(self, ask: Ask) -> Answers:
        answers = super().answer(ask)
        vars(self).setdefault("seen", []).append((ask, answers))
        return answers


def recorded(settings: TwoPhase, n_rounds: int, data: Mixed) -> list[tuple[Ask, Answers]]:
    clients: Any = Recording(data.X, data.y)
    simulate(clients, settings, n_rounds)
    return clients.seen


def test_the_request_holds_nothing_of_an_anchor_by_default() -> None:
    """All start from zero, so that estimates go up and only cluster means come down."""
    asked = [ask for ask, _ in recorded(TwoPhase(3), 5, small())]
    assert [ask.step for ask in asked] == ["describe", "moment", "moment", "anchors", "update"]
    assert not any(ask.per_client for ask in asked)
    assert not any(ask.arrays[0].any() for ask in asked[1:4])


def ill_conditioned(seed: int, n_clients: int, size: int) -> Mixed:
    """Clients whose features' covariance has condition number 1e4, and no axis is special."""
    rng = np.random.default_rng(seed)
    d, turn = 20, np.linalg.qr(rng.standard_normal((20, 20)))[0]
    theta = rng.standard_normal((3, d)) / np.sqrt(d)
    labels = np.arange(n_clients) % 3
    spread = np.geomspace(1, 1e-2, d)[:, None] * turn
    X = [rng.standard_normal((size, d)) @ spread for _ in labels]
    y = [A @ theta[j] + 0.2 * rng.standard_normal(size) for A, j in zip(X, labels, strict=True)]
    return Mixed(X, y, labels, theta)


@pytest.mark.parametrize(("n_clients", "size"), [(200, 50), (400, 10)])
def test_ill_conditioned_features_are_predicted_as_by_the_oracle(n_clients: int, size: int) -> None:
    data = ill_conditioned(0, n_clients, size)
    run = simulate(Clients(data.X, data.y), TwoPhase(3), 100)

    def excess(centers: np.ndarray) -> float:
        """Largest error of a cluster's predictions, beyond its noise, on the clients' points."""
        points = np.vstack(data.X)
        return max(
            min(float(np.sum((points @ (model - theta)) ** 2)) for model in centers)
            for theta in data.theta
        )

    assert excess(run.state.centers) <= 1.05 * excess(oracle(data))
