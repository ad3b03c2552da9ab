"""The client alone: what it is asked, what it replies, what it keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flwr_perdl.clients import DictionaryClient
from flwr_perdl.dictionary import (
    LassoLearner,
    OrthogonalLearner,
    align_to_global,
    normalize_atoms,
    warm_start,
)
from flwr_perdl.privacy.noised_client import SAMPLE_BOUND
from flwr_perdl.random import spawn
from tests.grids import context_of

LEARNER = OrthogonalLearner(4)


def samples(n: int = 120, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.standard_normal((5, 5)))[0][:4]
    return np.asarray((rng.standard_normal((n, 4)) * (rng.random((n, 4)) < 0.4)) @ basis)


def asks(step: str, round_: int, **more: Any) -> dict[str, Any]:
    config = {"perdl.protocol": "perma", "perdl.step": step, "server-round": round_}
    return {**config, "perdl.seed": 0, "perdl.run": "r", **more}


def test_the_start_is_the_warm_start_of_seed_and_partition() -> None:
    X = samples()
    (sent,), n, metrics = DictionaryClient(X, LEARNER, context_of(3)).fit([], asks("start", 1))
    expected = warm_start(X, LEARNER, rng=spawn(0, 3)).dictionary
    np.testing.assert_array_equal(sent, expected)
    assert (n, metrics["n_atoms"], metrics["orthogonal"]) == (120, 4, 1)


def test_an_update_is_algorithm_3_by_hand() -> None:
    X, node = samples(), context_of(3)
    (D,), _, _ = DictionaryClient(X, LEARNER, node).fit([], asks("start", 1))
    G = D[[2, 0]]
    client = DictionaryClient(X, LEARNER, node)
    (sent,), _, metrics = client.fit([G], asks("update", 2, **{"perdl.sends": "atoms"}))
    whole = np.vstack([G, align_to_global(D, G).local_atoms])
    aligned = align_to_global(LEARNER.step(X, whole), G)
    np.testing.assert_array_equal(sent, aligned.global_atoms)
    (private,) = node.state.array_records.values()
    np.testing.assert_array_equal(private["2/local_atoms"].numpy(), aligned.local_atoms)
    residual = X - LEARNER.code(X, whole) @ whole
    assert metrics["mse"] == float(f"{np.mean(residual**2):.6g}")


def test_the_statistics_are_those_of_the_codes_by_hand() -> None:
    X, node = samples(), context_of(3)
    (D,), _, _ = DictionaryClient(X, LEARNER, node).fit([], asks("start", 1))
    G = D[:2]
    config = asks("update", 2, **{"perdl.sends": "statistics"})
    (sent,), _, _ = DictionaryClient(X, LEARNER, node).fit([G], config)
    whole = np.vstack([G, align_to_global(D, G).local_atoms])
    C = LEARNER.code(X, whole)
    np.testing.assert_allclose(sent, C[:, :2].T @ (X - C[:, 2:] @ whole[2:]), atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_sample_moves_bounded_statistics_by_no_more_than_the_bound(dtype: str) -> None:
    G, X = np.eye(2, 5), 1000 * samples(400).astype(dtype)
    config = asks("update", 2, **{"perdl.sends": "statistics", "perdl.bound": 2.0})
    sent = []
    token = SAMPLE_BOUND.set(1.0)  # which no request can
    for part in (X, X[1:]):  # rounding to two digits must not come between
        client = DictionaryClient(part, LEARNER, context_of(3), digits=2, min_support=0)
        sent += client.fit([G.astype(dtype)], config)[0]
    SAMPLE_BOUND.reset(token)
    assert np.linalg.norm(sent[1] - sent[0]) == pytest.approx(1.0, abs=1e-7)


def test_no_request_lifts_what_is_withheld() -> None:
    config = asks("update", 2, **{"perdl.sends": "statistics"})
    replies = [
        DictionaryClient(samples(4), LEARNER, context_of(3), min_support=100).fit(
            [np.eye(2, 5)], asked
        )
        for asked in (config, {**config, "perdl.bound": 1.0, "perdl.promise": "{}"})
    ]
    for (sent,), _, metrics in replies:
        assert not sent.any()
        assert "perdl.bound" not in metrics


def test_atoms_with_too_few_samples_behind_them_are_withheld() -> None:
    X = samples(3)
    client = DictionaryClient(X, LEARNER, context_of(3), min_support=5)
    (sent,), _, _ = client.fit([], asks("start", 1))
    assert sent.shape == (0, 5)
    open_client = DictionaryClient(X, LEARNER, context_of(3), min_support=0)
    (everything,), _, _ = open_client.fit([], asks("start", 1))
    for round_, sends in enumerate(("atoms", "statistics"), 2):
        config = asks("update", round_, **{"perdl.sends": sends})
        (rows,), _, _ = client.fit([everything[:2]], config)
        np.testing.assert_array_equal(rows, np.zeros((2, 5)))


def test_evaluation_measures_global_and_full() -> None:
    X, node = samples(), context_of(3)
    held_out = samples(50, seed=1)
    client = DictionaryClient(X, LEARNER, node, evaluation={"test": held_out, "own": X})
    (D,), _, _ = client.fit([], asks("start", 1))
    G = D[:2]
    client.fit([G], asks("update", 2))
    loss, n, metrics = client.evaluate([G], asks("evaluate", 2, **{"perdl.n-nonzero": "1,2"}))
    assert n == 50
    assert set(metrics) == {
        f"mse_{part}_{k}_{name}"
        for part in ("global", "full")
        for k in (1, 2)
        for name in ("test", "own")
    }
    # Two orthonormal atoms, both allowed: the projection on their span.
    expected = np.mean((held_out - held_out @ G.T @ G) ** 2)
    assert metrics["mse_global_2_test"] == pytest.approx(expected)
    assert loss == metrics["mse_full_2_test"] < metrics["mse_full_1_test"]


def gaps() -> np.ndarray:
    """Samples with missing entries: two have feature 1, and feature 4 is in none."""
    X = samples(60)
    X[np.random.default_rng(1).random(X.shape) < 0.2] = np.nan
    X[2:, 1], X[:2, 1], X[:, 4] = np.nan, 1.0, np.nan
    return X


def test_sums_of_samples_with_missing_entries_are_those_of_completed_ones() -> None:
    """An entry in which fewer than three observed values have a part says nothing of them."""
    learner, X = LassoLearner(4), gaps()
    client = DictionaryClient(X, learner, context_of(3))
    (D,), _, _ = client.fit([], asks("start", 1))
    assert not D[:, [1, 4]].any()
    G = normalize_atoms(np.random.default_rng(0).standard_normal((3, 5)))
    config = asks("update", 2, **{"perdl.sends": "statistics"})
    (sent,), _, metrics = client.fit([G], config)
    whole = np.vstack([G, align_to_global(warm_start(X, learner, rng=spawn(0, 3))[0], G)[1]])
    C = learner.code(X, whole)
    own, full = C[:, :3], np.where(np.isnan(X), C @ whole, X)
    np.testing.assert_allclose(sent[:, :3], own.T @ own)
    sums, neutral = own.T @ (full - C[:, 3:] @ whole[3:]), own.T @ own @ G
    lengths, n_sums = np.sqrt(np.nansum(X**2, axis=1)), 0
    for j, f in np.ndindex(3, 5):
        terms = (own[:, j] * lengths)[~np.isnan(X[:, f])] ** 2
        enough = np.count_nonzero(terms) >= 3 and terms.max() < 2 / 3 * terms.sum()
        n_sums += enough
        assert sent[j, 3 + f] == pytest.approx((sums if enough else neutral)[j, f])
    assert 6 < n_sums < 10  # none of two features
    assert metrics["mse"] == pytest.approx(np.nanmean((X - C @ whole) ** 2), rel=1e-5)
    loss, _, _ = client.evaluate([G], asks("evaluate", 3))
    assert np.isfinite(loss)


def test_samples_with_missing_entries_that_do_not_serve_are_named() -> None:
    X, learner = gaps(), LassoLearner(4)
    for given in ({"X": X * np.nan}, {"evaluation": {"new": X * np.nan}}):
        with pytest.raises(ValueError, match=r"^(X|evaluation\['new'\])"):
            DictionaryClient(given.pop("X", X), learner, context_of(3), **given)
    client = DictionaryClient(X, learner, context_of(3))
    client.fit([], asks("start", 1))
    with pytest.raises(ValueError, match=r"^aggregation"):
        client.fit([np.eye(5)[:2]], asks("update", 2, **{"perdl.sends": "atoms"}))


@pytest.mark.parametrize(
    ("X", "n_logged"),
    [
        (samples(), 0),
        (samples(1), 1),
        (samples(3), 1),
        (np.vstack([samples(20), np.zeros((21, 5))]), 1),
    ],
)
def test_odd_samples_are_logged_once(
    X: np.ndarray, n_logged: int, warned: pytest.LogCaptureFixture
) -> None:
    client = DictionaryClient(X, LEARNER, context_of(3), min_support=0)
    (D,), _, _ = client.fit([], asks("start", 1))
    client.fit([D[:2]], asks("update", 2))
    assert len(warned.records) == n_logged
