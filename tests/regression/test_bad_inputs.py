"""Whole runs, and what sums over points or clients, serve an input or refuse it in one sentence."""

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
    aggregate,
    choose_mixture,
    fit_mixture,
    local_change,
    orthonormal,
    residual_moment,
    simulate,
    sufficient_statistics,
)
from tests.hostile import arguments, right_or_refused

RNG = np.random.default_rng(0)
THETA = RNG.standard_normal((2, 3))
X = RNG.standard_normal((8, 3))
MANY = [RNG.standard_normal((8, 3)) for _ in range(6)]
Y = [A @ THETA[i % 2] + 0.1 * RNG.standard_normal(8) for i, A in enumerate(MANY)]
SIGNS = np.sign(X @ THETA[0])
FOLDS = np.stack([sufficient_statistics(A, b, 2, rng=RNG) for A, b in zip(MANY, Y, strict=True)])
PACKED = np.concatenate([np.arange(6)[:, None] % 2, RNG.standard_normal((6, 3))], axis=1)[:, None]
Q = orthonormal(RNG.standard_normal((1, 3, 2)))
LOSSES = {"squared": SQUARED, "logistic": LogisticLoss()}


def rng() -> np.random.Generator:
    return np.random.default_rng(1)


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


def changed(loss: str, **given: Any) -> Any:
    return local_change(loss=LOSSES[loss], **given)


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
    "local_change": (
        changed,
        {"X": X, "y": SIGNS, "theta": THETA[0], "step": 0.1, "n_steps": 2, "weight": 1.0},
    ),
    "aggregate": (
        aggregate,
        {"packed": PACKED, "n_samples": np.full(6, 8.0), "n_clusters": 2},
    ),
    "residual_moment": (
        residual_moment,
        {"X": X, "y": SIGNS, "thetas": np.zeros((2, 1, 3)), "Q": Q},
    ),
    "fit_mixture": (
        lambda **given: fit_mixture(rng=rng(), **given),
        {
            "statistics": FOLDS.sum(axis=1),
            "n_clusters": 2,
            "softness": 2.0,
            "shrinkage": 1.0,
            "restarts": 2,
        },
    ),
    "choose_mixture": (
        lambda **given: choose_mixture(candidates=(1, 2), rng=rng(), **given).mixture,
        {"statistics": FOLDS, "softness": 2.0, "shrinkage": 1.0, "restarts": 1},
    ),
}
VARIANTS: dict[str, dict[str, tuple[Any, ...]]] = {
    "simulate": {"local": ("fedavg", "fedprox"), "robust": ("mean", "filtered", "median")},
    "answer": {"step": ("describe", "update"), "loss": tuple(LOSSES)},
    "local_change": {"local": ("fedavg", "fedprox"), "loss": tuple(LOSSES)},
    "aggregate": {"robust": ("mean", "filtered", "clip", "trimmed", "geometric-median")},
    "residual_moment": {"estimate": ("u-statistic", "halves", "pair")},
}


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=12)
@given(data=st.data())
def test_bad_input_is_served_or_refused_in_a_sentence(name: str, data: st.DataObject) -> None:
    call, good = CALLS[name]
    options = VARIANTS.get(name, {})
    chosen = {option: data.draw(st.sampled_from(values)) for option, values in options.items()}
    bad = data.draw(arguments(good))
    right_or_refused(lambda: call(**chosen, **bad))
