"""Learners serve an input or reject it in one sentence; of functions, tests/fuzz holds the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_perdl.dictionary import (
    GradientLearner,
    KSVDLearner,
    LassoLearner,
    MODLearner,
    OrthogonalLearner,
    normalize_atoms,
    refine_local,
    warm_start,
)
from tests.hostile import check_drawn

KINDS = [OrthogonalLearner, GradientLearner, MODLearner, KSVDLearner, LassoLearner]
RNG = np.random.default_rng(0)
X, D = RNG.standard_normal((6, 5)), normalize_atoms(RNG.standard_normal((4, 5)))
C = RNG.standard_normal((6, 4))


def rng() -> np.random.Generator:
    return np.random.default_rng(1)


CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "start": (lambda kind, n_atoms, X: kind(n_atoms).start(X, rng()), {"n_atoms": 4, "X": X}),
    "step": (lambda kind, X, D: kind(4).step(X, D), {"X": X, "D": D}),
    "code": (lambda kind, scale, X, D: kind(4).code(X, D, scale), {"scale": 2.0, "X": X, "D": D}),
    "update": (lambda kind, X, C, D: kind(4).update(X, C, D), {"X": X, "C": C, "D": D}),
    "loss": (lambda kind, X, C, D: kind(4).loss(X, C, D), {"X": X, "C": C, "D": D}),
    "warm_start": (
        lambda kind, X, n_iter: warm_start(X, kind(4), rng=rng(), n_iter=n_iter).dictionary,
        {"X": X, "n_iter": 3},
    ),
    "refine_local": (
        lambda kind, X, D, n_global: refine_local(X, D, n_global, kind(4), n_iter=3),
        {"X": X, "D": D, "n_global": 2},
    ),
}


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=20)
@given(data=st.data())
def test_bad_input_is_served_or_rejected_in_a_sentence(name: str, data: st.DataObject) -> None:
    check_drawn(data, *CALLS[name], {"kind": KINDS})
