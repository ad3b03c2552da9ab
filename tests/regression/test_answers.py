"""Many clients' answers at once, as the studies compute them: those of one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_perdl.regression import LogisticLoss, answer
from flwr_perdl.regression.phases import Ask
from perdl_experiments.batched_regression import Clients

UPDATE: dict[str, Any] = {"local": "fedavg", "n_steps": 5, "step_size": 0.1}


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    d=st.integers(1, 40),
    k=st.integers(1, 5),
    options=st.sampled_from([{}, {"n_steps": 1}, {"local": "fedprox"}]),
    grouped=st.booleans(),
    loss=st.sampled_from([{}, {"loss": LogisticLoss()}]),
    seed=st.integers(0, 2**16),
)
def test_updates_of_many_are_those_of_one(
    sizes: list[int],
    d: int,
    k: int,
    options: dict[str, Any],
    grouped: bool,
    loss: dict[str, Any],
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    X, y = [rng.standard_normal((n, d)) for n in sizes], [rng.choice([-1.0, 1], n) for n in sizes]
    centers = rng.standard_normal((k, d))
    ask = Ask("update", (centers, centers[::-1]) if grouped else (centers,), UPDATE | options)
    together = Clients(X, y, **loss).answer(ask).stack
    each = [answer(A, b, ask, **loss) for A, b in zip(X, y, strict=True)]
    np.testing.assert_allclose(together, each, rtol=1e-9, atol=1e-9)


def test_a_loss_that_is_no_number_is_rejected() -> None:
    class Broken(LogisticLoss):
        def values(self, X: np.ndarray, y: np.ndarray, centers: np.ndarray) -> np.ndarray:
            return np.full(len(centers), np.nan)

    ask = Ask("update", (np.eye(2),), UPDATE)
    with pytest.raises(ValueError, match="losses"):
        answer(np.ones((3, 2)), np.ones(3), ask, Broken())
