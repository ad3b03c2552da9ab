"""The convolutional network of the study `personal`, and what only a run with PyTorch shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import softmax

pytest.importorskip("torch")

from flwr_perdl.protocol.records import ROUND
from perdl_experiments import run_experiment
from perdl_experiments.studies._convolutional import (
    Convolutional,
    random_network,
)

N, LABELS, STEP = 12, 4, 0.5


@pytest.fixture(name="client")
def _client() -> Convolutional:
    rng = np.random.default_rng(0)
    X, y = rng.random((N, 16, 16, 3)), rng.integers(LABELS, size=N)
    return Convolutional(X, y, (N - 4, N - 2), seed=0, partition=0, step=STEP, batch=N)


def test_a_step_of_the_output_layer_is_by_hand(client: Convolutional) -> None:
    model = random_network(3, 5, LABELS, seed=1)
    before = [array.copy() for array in model]
    config: dict[str, Any] = {ROUND: 1, "train-names": json.dumps(["head.weight", "head.bias"])}

    after, n, _ = client.fit(model, config)

    wrong = softmax(client.scores(model, client.train), axis=1)
    wrong[np.arange(n), client.y[client.train]] -= 1
    np.testing.assert_allclose(after[-1], model[-1] - STEP * wrong.mean(axis=0), rtol=1e-4)
    for old, given, new in zip(before[:-2], model, after, strict=False):
        assert np.array_equal(old, given)
        assert np.array_equal(old, new)
    assert all(array.dtype == np.float32 for array in after)


def test_all_arrays_are_trained_without_names(client: Convolutional) -> None:
    model = random_network(3, 5, LABELS, seed=1)
    after, n, _ = client.fit(model, {ROUND: 1})
    assert n == N - 4
    assert not any(np.array_equal(a, b) for a, b in zip(model, after, strict=True))
    again, *_ = client.fit(model, {ROUND: 1})
    assert all(np.array_equal(a, b) for a, b in zip(again, after, strict=True))


@pytest.mark.parametrize("kind", ["turned", "labels"])
def test_color_images_are_learned_by_every_method(kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(3), 40)
    X = np.clip(y[:, None, None, None] / 4 + 0.2 * rng.random((120, 16, 16, 3)), 0, 1)
    np.savez(tmp_path / "color.npz", X=X, y=y)
    given = {"network": "convolutional", "kinds": kind, "images": 10, "hidden": 8}
    found = run_experiment(
        "personal",
        data=str(tmp_path / "color.npz"),
        clients=4,
        rounds=2,
        options=given,
        out=tmp_path / "out",
    )
    groups = {"known", "ifca", "ifca-best"} if kind == "turned" else set()
    for method in {"alone", "fedavg", "tuned", "apfl", "apfl-tuned", "ensemble"} | groups:
        assert 0 <= found["metrics"][f"accuracy_{kind}_{method}"] <= 1
