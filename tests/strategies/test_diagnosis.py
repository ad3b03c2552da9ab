"""Diagnosis: the right strategy for clients whose difference is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
    angles = 2 * np.pi * {"fedavg": 0, "head": 1, "clusters": 5}[kind] * np.arange(N) / N
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


@pytest.mark.parametrize(("kind", "seed"), [("fedavg", 0), ("head", 0), ("clusters", 1)])
def test_the_known_difference_is_found(kind: str, seed: int) -> None:
    found = diagnosed(kind, seed).result
    assert found.choice == kind
    best = min(values.mean() for values in found.values.values())
    assert found.values[found.choice].mean() <= 1.1 * best
    assert len(found.clients) == N
    mean, low, high = found.lead
    leads = found.values[found.over] - found.values[found.best]
    assert kind in (found.best, found.over)
    assert low < mean < high
    assert leads.min() <= mean <= leads.max()
    assert ("not significant" in found.sentence) == (low <= 0)
    if kind == "clusters":
        assert len({found.groups[p] for p in range(0, N, 2)}) == 1


def test_a_metric_to_maximize_leads_to_the_same_choice() -> None:
    by_score = diagnosed("head", 0, metric="score", higher_is_better=True).result
    assert by_score.choice == "head"  # as by the loss, above
    rows = by_score.table().splitlines()
    assert [row.split()[0] for row in rows[1:]] == list(by_score.values)


def test_a_given_part_stays_private() -> None:
    found = diagnosed("head", 0, private=("head.*",)).result
    assert "body" not in found.values
    assert {"head", "head-fine-tuned"} <= found.values.keys()
    assert "head" in found.sentence


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"private": ("tail.*",)}, "private"),
        ({"metric": "accuracy"}, "metric"),
        ({"metric": "score"}, "higher_is_better"),
        ({"fraction_evaluate": 0.5}, "fraction_evaluate"),
        ({"checkpoint_dir": "here"}, "checkpoint_dir"),
        ({"fraction_train": 0.5}, "fraction_train"),
        ({"num_clinets": 3}, "num_clinets"),
    ],
)
def test_what_it_cannot_do_is_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises((ValueError, TypeError), match=named):
        diagnosed("fedavg", 0, **options)


@dataclass
class Mean:
    """A client that learns a number twice, and between them counts how often it has trained."""

    own: float
    noise: Callable[[], float] = lambda: 0.0
    reports: Callable[[float], float] = lambda loss: loss

    def fit(self, model: list[np.ndarray], config: Any) -> Any:
        first, n_fits, second = model
        moved = [mean + 0.5 * (self.own - mean) for mean in (first, second)]
        return [moved[0], n_fits + 1, moved[1]], 1, {}

    def evaluate(self, model: list[np.ndarray], config: Any) -> Any:
        first, n_fits, second = model
        loss = float(np.mean((np.stack([first, second]) - self.own) ** 2)) + self.noise()
        n = float(n_fits.mean())
        return self.reports(loss), 1, {"rmse": loss, "fits_acc": n, "late_error": max(n - 5, 0)}


def diagnosed_means(clients: list[Mean], num_rounds: int = 8, **options: Any) -> Diagnosis:
    """Return the diagnosis of these clients, which start at the number 0."""
    diagnosis = Diagnosis(**options)
    app = client_app(lambda context: clients[int(context.node_config["partition-id"])])
    # The two numbers are never equal: a private array that is, bit for bit, is refused as tied.
    start = ArrayRecord([np.full((1, 1), number) for number in (0.0, 0.0, 1e-3)])
    diagnosis.start(InProcessGrid(app, len(clients)), start, num_rounds, verbose="quiet")
    return diagnosis


def test_no_single_client_decides_by_a_huge_loss() -> None:
    clients = [Mean(i % 2) for i in range(N)]
    clients[3].reports = lambda loss: 1e6 * loss
    found = diagnosed_means(clients).result
    assert found.choice == "clusters"
    assert 3 in found.clients


def test_less_of_an_error_is_better() -> None:
    found = diagnosed_means([Mean(i % 2) for i in range(N)], metric="rmse").result
    assert (found.choice, found.higher_is_better) == ("clusters", False)


def test_the_direction_follows_from_the_name_of_the_metric() -> None:
    for metric in ("eval_loss", "mse", "eval_rmse", "MAE", "perplexity", "val-nll"):
        assert Diagnosis(metric=metric).higher_is_better is False, metric
    for metric in ("accuracy", "eval_acc", "test.auc", "f1"):
        assert Diagnosis(metric=metric).higher_is_better is True, metric
    assert Diagnosis(metric="mse", higher_is_better=True).higher_is_better is True


def test_each_candidate_trains_a_model_equally_often() -> None:
    clients = [Mean(i % 2) for i in range(6)]
    found = diagnosed_means(clients, 5, metric="fits_acc").result
    assert set(found.values) == {
        "fedavg",
        "fine-tuned",
        "head",
        "body",
        "head-fine-tuned",
        "ditto",
        "clusters",
        "clusters-head",
        "local",
    }
    for name, values in found.values.items():
        # Ditto's own model is pulled towards a shared one, which is a training behind.
        assert np.allclose(values, 5, atol=name == "ditto"), name


def test_of_each_candidate_the_training_may_stop_early() -> None:
    found = diagnosed_means([Mean(i % 2) for i in range(6)], metric="late_error").result
    assert all(not values.any() for values in found.values.values())


def test_noise_makes_no_candidate_look_better() -> None:
    for seed in range(3):
        rngs = [np.random.default_rng((seed, i)) for i in range(N)]
        noisy = [Mean(1.0, noise=lambda rng=rng: 0.1 * rng.standard_normal()) for rng in rngs]
        assert diagnosed_means(noisy, 12, seed=seed).result.choice == "fedavg"


def test_before_start_there_is_no_result() -> None:
    with pytest.raises(RuntimeError, match="start"):
        _ = Diagnosis().result
