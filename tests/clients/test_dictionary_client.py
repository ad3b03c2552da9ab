"""The client alone: what it is asked, what it replies, what it keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from flwr_perdl.clients import DictionaryClient
from flwr_perdl.dictionary import OrthogonalLearner, align_to_global, warm_start
from flwr_perdl.privacy.noised_client import SAMPLE_BOUND
from tests.grids import context_of

LEARNER = OrthogonalLearner(4)


def samples(n: int = 120, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.standard_normal((5, 5)))[0][:4]
    return np.asarray((rng.standard_normal((n, 4)) * (rng.random((n, 4)) < 0.4)) @ basis)


def asks(step: str, round_: int, **more: Any) -> dict[str, Any]:
    return {"perdl.step": step, "server-round": round_, "perdl.seed": 0, "perdl.run": "r", **more}


def test_the_start_is_the_warm_start_of_seed_and_partition() -> None:
    from flwr_perdl.random import spawn

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


def test_the_private_state_survives_on_disk(tmp_path: Path) -> None:
    X = samples()
    node = context_of(3, **{"state-dir": str(tmp_path)})
    (D,), _, _ = DictionaryClient(X, LEARNER, node).fit([], asks("start", 1))
    (kept,), _, _ = DictionaryClient(X, LEARNER, node).fit([D[:2]], asks("update", 2))
    restarted = context_of(3, **{"state-dir": str(tmp_path)})
    (again,), _, _ = DictionaryClient(X, LEARNER, restarted).fit([D[:2]], asks("update", 2))
    np.testing.assert_array_equal(again, kept)
    assert sorted(p.name for p in (tmp_path / "client-3").glob("run-*/*")) == [
        "round-000001.npz",
        "round-000002.npz",
    ]


def test_a_client_must_know_who_it_is() -> None:
    def properties(**node_config: Any) -> Any:
        node = Context(1, 2, node_config, RecordDict(), {})
        return DictionaryClient(samples(), LEARNER, node).get_properties({})

    with pytest.raises(ValueError, match="node_config must"):
        properties()
    assert properties(name="north")["name"] == "north"
    assert properties(name="north") == properties(name="north")
