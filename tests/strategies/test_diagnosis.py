"""Diagnosis: the right strategy for clients whose difference is known."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context

from flwr_perdl.clients import client_app
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import Diagnosis

N = 10
NAMES = ("body.weight", "body.bias", "head.weight", "head.bias")


def linear(kind: str, seed: int) -> Callable[[Context], Any]:
    """Return a maker of clients with two linear layers, whose difference is of this kind."""
    rng = np.random.default_rng(seed)
    # A body of two orthonormal directions, and heads that are rotations: their mean is zero.
    body = np.linalg.qr(rng.standard_normal((12, 2)))[0]
    angles = 2 * np.pi * {"shared": 0, "head": 1, "clusters": 5}[kind] * np.arange(N) / N
    cosines, sines = np.cos(angles), np.sin(angles)
    heads = np.array([[cosines, sines], [-sines, cosines]]).transpose(2, 0, 1)
    X = rng.standard_normal((N, 60, 12))
    Y = X @ body @ heads + 0.3 * rng.standard_normal((N, 60, 2))

    class Client:
        def __init__(self, context: Context) -> None:
            self.own = int(context.node_config["partition-id"])

        def fit(self, model: list[np.ndarray], config: Any) -> Any:
            W, b, V, c = model
            X_own, Y_own = X[self.own, :12], Y[self.own, :12]
            for _ in range(20):
                hidden = X_own @ W + b
                error = (hidden @ V + c - Y_own) / len(X_own)
                back = error @ V.T
                V, c = V - 0.3 * hidden.T @ error, c - 0.3 * error.sum(axis=0)
                W, b = W - 0.3 * X_own.T @ back, b - 0.3 * back.sum(axis=0)
            return [W, b, V, c], len(X_own), {}

        def evaluate(self, model: list[np.ndarray], config: Any) -> Any:
            W, b, V, c = model
            error = (X[self.own, 12:] @ W + b) @ V + c - Y[self.own, 12:]
            return float(np.mean(error**2)), len(error), {"score": -float(np.mean(error**2))}

    return Client


def start() -> ArrayRecord:
    rng = np.random.default_rng(0)
    shapes = ((12, 2), (2,), (2, 2), (2,))
    arrays = [
        rng.standard_normal(shape) / 2 if len(shape) == 2 else np.zeros(shape) for shape in shapes
    ]
    return ArrayRecord({name: Array(a) for name, a in zip(NAMES, arrays, strict=True)})


@cache
def diagnosed(kind: str, seed: int, **options: Any) -> Diagnosis:
    diagnosis = Diagnosis(**options)
    grid = InProcessGrid(client_app(linear(kind, seed)), N)
    diagnosis.start(grid, start(), num_rounds=12, verbose="quiet")
    return diagnosis


@pytest.mark.parametrize(("kind", "seed"), [("shared", 0), ("head", 0), ("clusters", 1)])
def test_the_known_difference_is_found(kind: str, seed: int) -> None:
    found = diagnosed(kind, seed).result
    assert found.choice == kind
    best = min(values.mean() for values in found.values.values())
    assert found.values[found.choice].mean() <= 1.1 * best
    assert len(found.clients) == N
    if kind == "clusters":
        assert len({found.groups[p] for p in range(0, N, 2)}) == 1


def test_a_metric_to_maximize_leads_to_the_same_choice() -> None:
    by_score = diagnosed("head", 0, metric="score").result
    assert by_score.choice == "head"  # as by the loss, above
    rows = by_score.table().splitlines()
    assert [row.split()[0] for row in rows[1:]] == list(by_score.values)


def test_a_given_part_stays_private() -> None:
    found = diagnosed("head", 0, private=("head.*",)).result
    assert "body" not in found.values
    assert "head" in found.sentence


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"private": ("tail.*",)}, "private"),
        ({"metric": "accuracy"}, "metric"),
        ({"checkpoint_dir": "here"}, "checkpoint_dir"),
        ({"fraction_train": 0.5}, "fraction_train"),
        ({"num_clinets": 3}, "num_clinets"),
    ],
)
def test_what_it_cannot_do_is_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises((ValueError, TypeError), match=named):
        diagnosed("shared", 0, **options)


def test_before_start_there_is_no_result() -> None:
    with pytest.raises(RuntimeError, match="start"):
        _ = Diagnosis().result
