"""Whole runs and methods of `flwr_perdl.diffusion` serve an input or reject it in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_perdl.diffusion import (
    Biclustering,
    DataDiffusion,
    HuberNMF,
    ModelDiffusion,
    NonnegativeMF,
    SparseSVD,
    Topology,
)
from tests.hostile import check_drawn

RNG = np.random.default_rng(0)
RING = Topology.ring(4)
X = np.abs(RNG.standard_normal((6, 5)))
DATA = [RNG.standard_normal((12, 5)) for _ in range(4)]
OBJECTIVES = (
    SparseSVD(0.05, 0.1),
    Biclustering(0.05, 0.1, 0.01),
    NonnegativeMF(0.05, 0.1),
    HuberNMF(0.05, 0.1, 0.5),
)


def learned(objective: int, X: np.ndarray, **given: Any) -> Any:
    learner = ModelDiffusion(OBJECTIVES[objective], n_iterations=3, **given)
    return learner.fit(X, RING).dictionaries


def diffused(update: str, coder: str, data: Any, n_rounds: Any, **given: Any) -> Any:
    return DataDiffusion(coder=coder, update=update, **given).fit(data, RING, n_rounds)


CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "ModelDiffusion": (
        learned,
        {"X": X, "n_atoms_per_agent": 2, "step": 0.1, "decay": 0.5, "batch_size": 3, "seed": 0},
    ),
    "DataDiffusion": (
        diffused,
        {
            "data": DATA,
            "n_atoms": 4,
            "n_rounds": 3,
            "n_nonzero": 2,
            "alpha": 0.1,
            "step": 0.1,
            "replace_every": 2,
        },
    ),
}
VARIANTS: dict[str, dict[str, tuple[Any, ...]]] = {
    "ModelDiffusion": {"objective": (0, 1, 2, 3), "method": ("admm", "atc", "exact")},
    "DataDiffusion": {
        "update": ("mod", "ksvd", "gradient"),
        "coder": ("omp", "lasso", "focuss", "nonnegative"),
    },
}


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=12)
@given(data=st.data())
def test_bad_input_is_served_or_refused_in_a_sentence(name: str, data: st.DataObject) -> None:
    check_drawn(data, *CALLS[name], VARIANTS.get(name, {}))
