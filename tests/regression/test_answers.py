"""Many clients' answers at once: the bits of one by one, whatever the shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_perdl.regression import SQUARED, Ask, LogisticLoss, answer

UPDATE: dict[str, Any] = {"local": "fedavg", "n_steps": 5, "step_size": 0.1}


# OpenBLAS's AVX-512 kernel for five float32 features may warn by what is left on the stack; its
# results, which have the same bits one by one, are right.
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
@given(
    m=st.integers(1, 6),
    n=st.integers(1, 40),
    d=st.integers(1, 40),
    k=st.integers(1, 5),
    dtype=st.sampled_from([np.float64, np.float32]),
    options=st.sampled_from([{}, {"n_steps": 1}, {"local": "fedprox"}]),
    grouped=st.booleans(),
    loss=st.sampled_from([SQUARED, LogisticLoss()]),
    seed=st.integers(0, 2**16),
)
def test_updates_of_many_are_those_of_one(
    m: int,
    n: int,
    d: int,
    k: int,
    dtype: type,
    options: dict[str, Any],
    grouped: bool,
    loss: Any,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    X, y = rng.standard_normal((m, n, d)).astype(dtype), rng.choice([-1, 1], (m, n)).astype(dtype)
    centers = rng.standard_normal((k, d))
    ask = Ask("update", (centers, centers[::-1]) if grouped else (centers,), UPDATE | options)
    together = answer(X, y, ask, loss)
    assert np.isfinite(together).all()
    for A, b, found in zip(X, y, together, strict=True):
        np.testing.assert_array_equal(found, answer(A[None].copy(), b[None].copy(), ask, loss)[0])


@given(
    m=st.integers(1, 5),
    n=st.integers(1, 30),
    d=st.integers(1, 30),
    h=st.integers(1, 3),
    width=st.integers(1, 8),
    step=st.sampled_from(["describe", "moment", "anchors"]),
    estimate=st.sampled_from(["u-statistic", "halves", "pair"]),
    anchor_step=st.sampled_from(["least-squares", "paper"]),
    known=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_phase_1_of_many_is_that_of_one(
    m: int,
    n: int,
    d: int,
    h: int,
    width: int,
    step: str,
    estimate: str,
    anchor_step: str,
    known: bool,
    seed: int,
) -> None:
    """With models already, too, which some of the clients fit."""
    rng = np.random.default_rng(seed)
    X, centers = rng.standard_normal((m, n, d)), rng.standard_normal((2 * known, d))
    y = rng.standard_normal((m, n))
    if known:
        y[0] = X[0] @ centers[0]
    thetas, Q = rng.standard_normal((h, d)), rng.standard_normal((h, d, min(width, d)))
    options = {"estimate": estimate, "transpose": seed % 2, "variance": 1e-9}
    options |= {"anchor_step": anchor_step, "min_points": 3}
    ask = Ask(step, (thetas[None] if step == "moment" else thetas, Q, centers), options)
    together = answer(X, y, ask)
    for A, b, found in zip(X, y, together, strict=True):
        np.testing.assert_array_equal(found, answer(A[None].copy(), b[None].copy(), ask)[0])


def test_a_loss_that_is_no_number_is_rejected() -> None:
    class Broken(LogisticLoss):
        def values(self, X: np.ndarray, y: np.ndarray, centers: np.ndarray) -> np.ndarray:
            return np.full(len(centers), np.nan)

    ask = Ask("update", (np.eye(2),), UPDATE)
    with pytest.raises(ValueError, match="losses"):
        answer(np.ones((1, 3, 2)), np.ones((1, 3)), ask, Broken())
