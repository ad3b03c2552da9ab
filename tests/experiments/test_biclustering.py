"""The experiment of Fig. 8: what it clusters by, what it may not look at, and bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

from perdl_experiments.studies import biclustering
from tests.studies import Ran, run_study, save, subjects


def run(**options: Any) -> Ran:
    return run_study("biclustering", **options)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    data = save(tmp_path_factory.mktemp("bi"), **subjects())
    return run(data=data, seeds=2, atoms=2, rounds=2)


def test_labels_are_looked_at_only_afterwards(outcome: Ran, tmp_path: Path) -> None:
    data = subjects()
    wrong = np.random.default_rng(0).permutation(data["y"]).astype(str)
    blind = run(data=save(tmp_path, X=data["X"], y=wrong), seeds=1, atoms=2, rounds=2)
    for name in biclustering.METHODS:
        np.testing.assert_array_equal(
            blind.arrays[f"clusters_{name}"], outcome.arrays[f"clusters_{name}"]
        )
    assert blind.metrics["ari_ssvd"] < 0.3


def test_the_schedule_with_the_least_cost_is_taken(outcome: Ran) -> None:
    """The cost is that of (7), computed from the atoms and codes that are kept."""
    X, codes = (subjects()["X"] - subjects()["X"].mean(axis=0)).T, outcome.arrays["codes_diffusion"]
    residual = X / np.sqrt(np.square(X).mean()) - codes @ outcome.arrays["atoms_diffusion"]
    gamma, delta = biclustering.GAMMA, biclustering.DELTA
    penalty = gamma * np.abs(codes).sum(axis=1) + delta / 2 * np.square(codes).sum(axis=1)
    cost = np.mean(np.square(residual).sum(axis=1) / 2 + penalty)
    least = min(outcome.curves[f"cost_{name}"][0] for name in biclustering.SCHEDULES)
    assert cost == pytest.approx(least)


def test_without_labels_it_compares_the_two_algorithms(tmp_path: Path) -> None:
    unlabelled = run(data=save(tmp_path, X=subjects()["X"]), seeds=1, atoms=2, rounds=2)
    assert not [name for name in unlabelled.metrics if name in ("ari_ssvd", "ari_diffusion")]
    expected = adjusted_rand_score(
        unlabelled.arrays["clusters_ssvd"], unlabelled.arrays["clusters_diffusion"]
    )
    assert unlabelled.metrics["ari_between"] == expected
    assert unlabelled.metrics["k"] == 3


def test_units_and_levels_of_genes_do_not_matter(outcome: Ran, tmp_path: Path) -> None:
    data = subjects()
    X = 1e-200 * (data["X"] + np.arange(45))
    other = run(data=save(tmp_path, X=X, y=data["y"]), seeds=1, atoms=2, rounds=2)
    np.testing.assert_allclose(other.arrays["atoms_ssvd"], outcome.arrays["atoms_ssvd"], atol=1e-9)
    for name in biclustering.METHODS:
        np.testing.assert_array_equal(
            other.arrays[f"clusters_{name}"], outcome.arrays[f"clusters_{name}"]
        )
