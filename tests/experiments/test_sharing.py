from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flwr_perdl._random import spawn
from flwr_perdl.dictionary import OrthogonalLearner, reconstruct, sparse_code
from perdl_experiments import run_experiment
from perdl_experiments.engine import federate
from perdl_experiments.studies import configure, find, images, sharing

SMALL: dict[str, Any] = {
    "learner": "orthogonal",
    "seeds": 1,
    "n_atoms": 16,
    "n_global": "16,0,8",
    "refine_steps": "0,2",
}


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    return run_experiment("sharing", clients=4, rounds=6, options=SMALL)


def test_sharing_helps_on_all_labels_and_hurts_on_the_own(small: dict[str, Any]) -> None:
    metrics = small["metrics"]
    assert metrics["error_all_16_refine_0"] < metrics["error_all_0_refine_0"]
    assert metrics["error_own_16_refine_0"] > metrics["error_own_0_refine_0"]
    assert metrics["best_own"] == 0
    notes = " ".join(small["notes"])
    assert "On images of the own kind sharing all hurts" in notes
    assert "On images of all kinds sharing all helps" in notes


def test_the_least_errors_are_those_of_the_table(small: dict[str, Any]) -> None:
    metrics, rows = small["metrics"], small["tables"][0]["rows"]
    assert [row[0] for row in rows] == ["0", "8", "16"]
    errors = {g: metrics[f"error_all_{g}_refine_0"] for g in (0, 8, 16)}
    assert min(errors, key=errors.__getitem__) == metrics["best_all"]
    assert rows[1][2].startswith(f"{errors[8]:.4f}")


def test_refinement_changes_nothing_where_all_atoms_are_global(small: dict[str, Any]) -> None:
    metrics = small["metrics"]
    assert metrics["error_all_16_refine_2"] == metrics["error_all_16_refine_0"]
    assert metrics["error_all_8_refine_2"] != metrics["error_all_8_refine_0"]


def test_pooled_data_are_the_best_that_sharing_all_can_reach(small: dict[str, Any]) -> None:
    metrics = small["metrics"]
    assert metrics["error_all_pooled"] < metrics["error_all_8_refine_0"]
    assert metrics["error_all_pooled"] == pytest.approx(metrics["error_all_16_refine_0"], rel=0.1)
    assert f"{metrics['error_own_pooled']:.4f} on the own kind" in " ".join(small["notes"])


def test_without_global_atoms_clients_are_alone() -> None:
    config = configure(find("sharing"), clients=2, rounds=4, options=SMALL)
    point = sharing._points(config, 0)[0, 0]
    federated = federate(sharing, point)
    assert federated.arrays[0].shape == (0, 64)
    task, learner = config.task, OrthogonalLearner(16)
    D = images.START(task.clients[1], learner, rng=spawn(0, 1)).dictionary
    for _ in range(3):
        D = learner.step(task.clients[1], D)
    rebuilt = reconstruct(sparse_code(task.test, D, n_nonzero=10), D)
    expected = np.mean((task.test - rebuilt) ** 2)
    # Six significant digits leave a client.
    assert federated.history[-1].metrics[1]["error_all"] == pytest.approx(expected, rel=5e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_global": "49"}, "n_global must be between 0 and 48, got 49"),
        ({"refine_steps": "-1"}, "refine_steps must be between 0 and"),
        ({"seeds": 0}, "seeds must be at least 1"),
    ],
)
def test_bad_options_get_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_experiment("sharing", options=options)
