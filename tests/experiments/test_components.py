"""HMF and TCMF: planted parts come back, corrections change no product, the schedule by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from perdl_experiments.components import (
    Factors,
    hmf,
    hmf_step,
    perpca_factors,
    robust_components,
)


def planted(seed: int, *, noise: float = 0.0) -> tuple[list[np.ndarray], list[list[np.ndarray]]]:
    """Return three clients' samples and the common, unique and sparse parts of each."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.standard_normal((30, 30)))[0].T
    clients = []
    for _ in range(3):
        own = np.linalg.qr(rng.standard_normal((28, 1)))[0].T @ basis[2:]
        size = 10 * rng.uniform(0.2, 1, (50, 30)) * rng.choice([-1, 1], (50, 30))
        clients.append(
            [
                rng.standard_normal((50, 2)) @ basis[:2],
                rng.standard_normal((50, 1)) @ own,
                np.where(rng.random((50, 30)) < 0.03, size, 0),
            ]
        )
    return [sum(parts) + noise * rng.standard_normal((50, 30)) for parts in clients], clients


def worst(found: list[np.ndarray], clients: list[list[np.ndarray]], part: int) -> float:
    return max(
        float(np.abs(one - parts[part]).max()) for one, parts in zip(found, clients, strict=True)
    )


@pytest.mark.parametrize("method", ["perpca", "hmf"])
def test_planted_common_unique_and_sparse_parts_come_back(method: str) -> None:
    samples, clients = planted(0)
    given = [X.copy() for X in samples]
    found = robust_components(samples, 2, 1, method=method, n_iter=30, decay=0.8, n_rounds=1)
    for X, before in zip(samples, given, strict=True):
        np.testing.assert_array_equal(X, before)
    for one in found.factors:
        cross = one.global_components @ one.local_components.T
        np.testing.assert_allclose(cross, 0, atol=1e-9)
    assert worst([one.common for one in found.factors], clients, 0) < 1e-8
    assert worst([one.unique for one in found.factors], clients, 1) < 1e-8
    assert worst(found.sparse, clients, 2) < 1e-8


def test_without_the_sparse_part_outliers_spoil_the_common_one() -> None:
    samples, clients = planted(0)
    assert worst([one.common for one in hmf(samples, 2, 1)], clients, 0) > 1


def test_a_floor_keeps_noise_out_of_the_sparse_part() -> None:
    samples, clients = planted(1, noise=0.05)
    found = robust_components(samples, 2, 1, floor=0.2, n_rounds=0)
    for sparse, (_, _, truth) in zip(found.sparse, clients, strict=True):
        assert np.mean((sparse != 0) == (truth != 0)) > 0.999
    assert worst([one.common for one in found.factors], clients, 0) < 0.15
    assert found.thresholds[-1] == pytest.approx(0.2, abs=0.01)


def test_the_threshold_falls_as_computed_by_hand() -> None:
    samples = [np.array([[8.0, 0.0], [0.0, 1.0]])]
    given: dict[str, Any] = {"threshold": 5.0, "decay": 0.5, "floor": 1.0, "n_iter": 3}
    found = robust_components(samples, 1, 0, **given)
    assert found.thresholds == [5, 3, 2]
    # 8 is an outlier at 5: the one component is the second axis, and stays it
    np.testing.assert_allclose(found.sparse[0], [[8, 0], [0, 0]])
    np.testing.assert_allclose(found.factors[0].common, [[0, 0], [0, 1]], atol=1e-12)
    # at 9 it is none, and is the component
    none = robust_components(samples, 1, 0, **{**given, "threshold": 9.0})
    np.testing.assert_allclose(none.factors[0].common, [[8, 0], [0, 0]], atol=1e-12)
    # five robust standard deviations of the entries 1, 2, 3; the largest where the median is 0
    row = [np.array([[1.0, -2.0, 3.0]])]
    assert robust_components(row, 0, 0).thresholds[0] == pytest.approx(10 / 0.6745)
    assert robust_components([np.array([[0.0, 0, 4]])], 0, 0).thresholds[0] == 4


def test_hmf_ends_at_a_minimum_below_its_start_and_below_perpca() -> None:
    """Shi and Kontar's step, which is relative to each client here, ends near that minimum."""
    samples = [X - S for X, (_, _, S) in zip(*planted(2, noise=0.3), strict=True)]

    def loss(found: list[Factors]) -> float:
        pairs = zip(samples, found, strict=True)
        return sum(float(np.sum((X - one.common - one.unique) ** 2)) for X, one in pairs)

    start, some, most = (loss(hmf(samples, 2, 1, n_rounds=rounds)) for rounds in (0, 100, 400))
    perpca = loss(perpca_factors(samples, 2, 1, n_rounds=100))
    assert most == pytest.approx(some, rel=1e-6)
    assert most < perpca < start
    assert perpca < most + 0.5 * (start - most)


def test_a_step_is_the_gradient_of_the_penalized_error() -> None:
    rng = np.random.default_rng(0)
    X, sizes = rng.standard_normal((5, 6)), ((5, 2), (2, 6), (5, 1), (1, 6))
    factors = Factors(*(rng.standard_normal(size) for size in sizes))

    def loss(one: Factors) -> float:
        grams = [W @ W.T - np.eye(len(W)) for W in (one.global_components, one.local_components)]
        error = np.sum((X - one.common - one.unique) ** 2)
        return float(error + 0.3 * sum(np.sum(gram**2) for gram in grams))

    stepped = hmf_step(X, factors, 1.0, 0.3)
    for position in range(4):
        moved = list(factors)
        moved[position] = factors[position] + 1e-6 * (
            pushed := rng.standard_normal(sizes[position])
        )
        slope = (loss(Factors(*moved)) - loss(factors)) / 1e-6
        assert slope == pytest.approx(
            np.sum((factors[position] - stepped[position]) * pushed), rel=1e-3
        )
