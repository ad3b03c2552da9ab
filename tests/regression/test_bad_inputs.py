"""Whole runs and clients' answers serve an input or reject it in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_perdl.regression import (
    SQUARED,
    Ask,
    Clients,
    LogisticLoss,
    MomentDescent,
    Refinement,
    TwoPhase,
    simulate,
)
from tests.hostile import check_drawn

RNG = np.random.default_rng(0)
THETA = RNG.standard_normal((2, 3))
X = RNG.standard_normal((8, 3))
MANY = [RNG.standard_normal((8, 3)) for _ in range(6)]
Y = [A @ THETA[i % 2] + 0.1 * RNG.standard_normal(8) for i, A in enumerate(MANY)]
SIGNS = np.sign(X @ THETA[0])
LOSSES = {"squared": SQUARED, "logistic": LogisticLoss()}


def simulated(X: Any, y: Any, n_rounds: Any, dropout: Any, seed: Any, **options: Any) -> Any:
    phase_1, phase_2 = (
        kind(**{own.name: options.pop(own.name) for own in fields(kind) if own.name in options})
        for kind in (MomentDescent, Refinement)
    )
    settings = TwoPhase(phase_1=phase_1, phase_2=phase_2, **options)
    run = simulate(Clients(X, y), settings, n_rounds, dropout=dropout, seed=seed)
    return run.state.centers, [centers for _, centers in run.history]


def answered(step: str, X: np.ndarray, y: np.ndarray, centers: np.ndarray, loss: str) -> Any:
    options = {"local": "fedavg", "n_steps": 2, "step_size": 0.1}
    ask = Ask("describe") if step == "describe" else Ask("update", (centers,), options)
    return Clients([X], [y], LOSSES[loss]).answer(ask).stack


CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "simulate": (
        simulated,
        {
            "X": MANY,
            "y": Y,
            "n_rounds": 8,
            "dropout": 0.1,
            "seed": 0,
            "n_clusters": 2,
            "work": 1.0,
            "check_every": 2,
            "n_products": 2,
            "n_iterations": 1,
            "max_clusters": 3,
            "perturbation": 0.0,
        },
    ),
    "answer": (answered, {"X": X, "y": SIGNS, "centers": THETA}),
}
VARIANTS: dict[str, dict[str, tuple[Any, ...]]] = {
    "simulate": {"local": ("fedavg", "fedprox"), "robust": ("mean", "filtered", "median")},
    "answer": {"step": ("describe", "update"), "loss": tuple(LOSSES)},
}


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=12)
@given(data=st.data())
def test_bad_input_is_served_or_refused_in_a_sentence(name: str, data: st.DataObject) -> None:
    check_drawn(data, *CALLS[name], VARIANTS.get(name, {}))
