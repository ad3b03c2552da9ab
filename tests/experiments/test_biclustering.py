"""The experiment of Fig. 8: what it clusters by, what it may not look at, and bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import make_biclusters
from sklearn.metrics import adjusted_rand_score

from perdl_experiments.studies import biclustering
from tests.studies import Ran, run_study, save

LUNG = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "lung200.npz"


def run(**options: Any) -> Ran:
    return run_study("biclustering", **options)


def small(noise: float = 0.6) -> dict[str, np.ndarray]:
    """Return 24 subjects of three types in 45 genes, each gene with a level of its own."""
    rng = np.random.default_rng(3)
    X, rows, _ = make_biclusters((24, 45), 3, minval=1, maxval=2, random_state=1)
    X = X + noise * rng.standard_normal(X.shape) + rng.uniform(5, 9, 45)
    return {"X": X, "y": rows.argmax(axis=0)}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    data = save(tmp_path_factory.mktemp("bi"), **small())
    return run(data=data, seeds=2, atoms=2, rounds=2)


@pytest.mark.slow
def test_planted_types_are_told_apart(outcome: Ran) -> None:
    assert outcome.metrics["ari_ssvd"] > 0.95
    assert outcome.metrics["ari_diffusion"] > 0.6
    assert outcome.metrics["k"] == 3


def test_figures_are_those_of_the_clusters_that_are_kept(outcome: Ran) -> None:
    y = small()["y"]
    for name in biclustering.METHODS:
        scores = outcome.curves[f"ari_{name}"]
        assert len(scores) == 2
        assert scores[0] == adjusted_rand_score(y, outcome.arrays[f"clusters_{name}"])
        assert outcome.metrics[f"ari_{name}"] == pytest.approx(np.mean(scores))
    assert outcome.arrays["atoms_diffusion"].shape == (2, 24)
    table, schedules, ssvd, _ = outcome.tables
    assert [len(row) for row in table.rows] == [5] * 5
    assert [len(row) for row in schedules.rows] == [4] * 3
    assert sum(int(cell) for row in ssvd.rows for cell in row[1:]) == 24
    assert outcome.figures == ["loadings.png"]


def test_labels_are_looked_at_only_afterwards(outcome: Ran, tmp_path: Path) -> None:
    data = small()
    wrong = np.random.default_rng(0).permutation(data["y"]).astype(str)
    blind = run(data=save(tmp_path, X=data["X"], y=wrong), seeds=1, atoms=2, rounds=2)
    for name in biclustering.METHODS:
        np.testing.assert_array_equal(
            blind.arrays[f"clusters_{name}"], outcome.arrays[f"clusters_{name}"]
        )
    assert blind.metrics["ari_ssvd"] < 0.3


def test_the_schedule_with_the_least_cost_is_taken(outcome: Ran) -> None:
    """The cost is that of (7), computed from the atoms and codes that are kept."""
    X, codes = (small()["X"] - small()["X"].mean(axis=0)).T, outcome.arrays["codes_diffusion"]
    residual = X / np.sqrt(np.square(X).mean()) - codes @ outcome.arrays["atoms_diffusion"]
    gamma, delta = biclustering.GAMMA, biclustering.DELTA
    penalty = gamma * np.abs(codes).sum(axis=1) + delta / 2 * np.square(codes).sum(axis=1)
    cost = np.mean(np.square(residual).sum(axis=1) / 2 + penalty)
    least = min(outcome.curves[f"cost_{name}"][0] for name in biclustering.SCHEDULES)
    assert cost == pytest.approx(least)


def test_without_labels_it_compares_the_two_algorithms(tmp_path: Path) -> None:
    unlabelled = run(data=save(tmp_path, X=small()["X"]), seeds=1, atoms=2, rounds=2)
    assert not [name for name in unlabelled.metrics if name in ("ari_ssvd", "ari_diffusion")]
    expected = adjusted_rand_score(
        unlabelled.arrays["clusters_ssvd"], unlabelled.arrays["clusters_diffusion"]
    )
    assert unlabelled.metrics["ari_between"] == expected
    assert unlabelled.metrics["k"] == 3
    assert [table.columns[1:] for table in unlabelled.tables] == [["mean cost", "chosen"]]
    given = run(data=save(tmp_path, X=small()["X"]), seeds=1, atoms=2, rounds=2, k="5")
    assert len(set(given.arrays["clusters_ssvd"])) == 5


@pytest.mark.slow
@pytest.mark.skipif(not LUNG.is_file(), reason="../shared/data/lung200.npz is not here")
def test_lungs() -> None:
    lungs = run(data=str(LUNG), seeds=5)
    assert lungs.metrics["ari_ssvd"] >= lungs.metrics["ari_svd"]
    assert lungs.metrics["ari_ssvd_rows"] >= lungs.metrics["ari_svd_rows"]
    assert lungs.metrics["ari_ssvd"] >= 0.74
    assert lungs.metrics["ari_diffusion"] >= 0.74
    assert lungs.metrics["cost_falling"] < lungs.metrics["cost_paper"]


def test_units_and_levels_of_genes_do_not_matter(outcome: Ran, tmp_path: Path) -> None:
    data = small()
    X = 1e-200 * (data["X"] + np.arange(45))
    other = run(data=save(tmp_path, X=X, y=data["y"]), seeds=1, atoms=2, rounds=2)
    np.testing.assert_allclose(other.arrays["atoms_ssvd"], outcome.arrays["atoms_ssvd"], atol=1e-9)
    for name in biclustering.METHODS:
        np.testing.assert_array_equal(
            other.arrays[f"clusters_{name}"], outcome.arrays[f"clusters_{name}"]
        )
