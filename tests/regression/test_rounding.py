"""Outcomes of kind do not depend on the last bits: inputs moved by an ulp, clients renumbered."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_perdl.regression import (
    TwoPhase,
    choose_mixture,
    model_error,
    sufficient_statistics,
)
from flwr_perdl.regression.phases import Ask
from perdl_experiments.batched_regression import Clients, simulate

N, D, K = 30, 5, 2


def planted(seed: int, noise: float) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    """Draw clients of two models in turn."""
    rng = np.random.default_rng(seed)
    theta = rng.standard_normal((K, D))
    X = [rng.standard_normal((20, D)) for _ in range(N)]
    y = [A @ theta[i % K] + noise * rng.standard_normal(20) for i, A in enumerate(X)]
    return X, y, theta


def ulp(arrays: list[np.ndarray], seed: int) -> list[np.ndarray]:
    """Move every number by an ulp, up or down."""
    rng = np.random.default_rng(seed)
    return [np.nextafter(A, rng.choice([-np.inf, np.inf], A.shape)) for A in arrays]


def labels(X: list[np.ndarray], y: list[np.ndarray], centers: np.ndarray) -> list[int]:
    options = {"local": "fedavg", "n_steps": 1, "step_size": 0.1}
    stack = Clients(X, y).answer(Ask("update", (centers,), options)).stack
    return stack[:, 0, 1].astype(int).tolist()


@pytest.mark.parametrize("seed", range(6))
def test_without_noise_there_are_as_many_models_as_planted(seed: int) -> None:
    X, y, theta = planted(seed, 0.0)
    run = simulate(Clients(X, y), TwoPhase(), 60, seed=seed)
    assert len(run.state.centers) == K
    assert model_error(run.state.centers, theta) < 1e-6
    if seed < 2:  # also where the features have another scale
        scaled = simulate(Clients([1e3 * A for A in X], y), TwoPhase(), 60, seed=seed)
        assert len(scaled.state.centers) == K


@pytest.mark.parametrize("noise", [0.0, 0.2])
@settings(max_examples=4)
@given(order=st.permutations(range(N)), seed=st.integers(0, 2**32 - 1))
def test_models_and_clusters_are_the_same_whatever_the_last_bits(
    noise: float, order: list[int], seed: int
) -> None:
    X, y, theta = planted(0, noise)
    moved_X, moved_y = ulp([X[i] for i in order], seed), ulp([y[i] for i in order], seed)
    run = simulate(Clients(moved_X, moved_y), TwoPhase(), 60)
    assert len(run.state.centers) == K
    assert model_error(run.state.centers, theta) < (0.1 if noise else 1e-6)
    found = labels(moved_X, moved_y, run.state.centers)
    pairs = {(mine, i % K) for mine, i in zip(found, order, strict=True)}
    assert len(pairs) == K  # one name for each cluster


@settings(max_examples=3)
@given(order=st.permutations(range(N)), seed=st.integers(0, 2**32 - 1))
def test_the_chosen_number_of_models_is_the_same_whatever_the_last_bits(
    order: list[int], seed: int
) -> None:
    X, y, _ = planted(1, 0.2)
    statistics = np.stack(
        [
            sufficient_statistics(A, b, 2, rng=np.random.default_rng(0))
            for A, b in zip(ulp(X, seed), ulp(y, seed), strict=True)
        ]
    )
    rng = np.random.default_rng(0)
    chosen = choose_mixture(statistics[order], (1, 2, 3), rng=rng, restarts=2)
    assert len(chosen.mixture.centers) == K
    found = chosen.mixture.weights.argmax(axis=1)
    assert len({(int(mine), i % K) for mine, i in zip(found, order, strict=True)}) == K
