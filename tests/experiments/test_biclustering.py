"""The experiment of Fig. 8: what it clusters by, what it may not look at, and bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import make_biclusters
from sklearn.metrics import adjusted_rand_score

from flwr_perdl.diffusion.model_diffusion import Model, ModelDiffusion
from flwr_perdl.diffusion.topology import Topology
from perdl_experiments import run_experiment
from perdl_experiments.studies import biclustering
from tests.studies import Ran, config_of, run_study

LUNG = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "lung200.npz"


def run(**options: Any) -> Ran:
    return run_study("biclustering", **options)


def save(folder: Path, name: str = "data", **arrays: np.ndarray) -> str:
    path = folder / f"{name}.npz"
    np.savez(path, **arrays)
    return str(path)


def small(noise: float = 0.6) -> dict[str, np.ndarray]:
    """Return 24 subjects of three types in 45 genes, each gene with a level of its own."""
    rng = np.random.default_rng(3)
    X, rows, _ = make_biclusters((24, 45), 3, minval=1, maxval=2, random_state=1)
    X = X + noise * rng.standard_normal(X.shape) + rng.uniform(5, 9, 45)
    return {"X": X, "y": rows.argmax(axis=0)}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run(data=save(tmp_path_factory.mktemp("bi"), **small()), seeds=2, atoms=2)


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
        assert outcome.arrays[f"atoms_{name}"].shape == (2, 24)
    table, ssvd, _ = outcome.tables
    assert [len(row) for row in table.rows] == [5] * 3
    assert sum(int(cell) for row in ssvd.rows for cell in row[1:]) == 24
    assert outcome.figures == ["layers.png", "loadings.png"]


def test_every_gene_is_learned_from_once(
    outcome: Ran, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[np.ndarray] = []
    fit = ModelDiffusion.fit

    def spy(self: ModelDiffusion, X: np.ndarray, topology: Topology) -> Model:
        seen.append(X)
        return fit(self, X, topology)

    monkeypatch.setattr(ModelDiffusion, "fit", spy)
    again = run(data=save(tmp_path, **small()), seeds=1, atoms=2)
    genes = config_of("biclustering", data=str(tmp_path / "data.npz")).data_of(0).X
    np.testing.assert_array_equal(np.unique(seen[0], axis=0), np.unique(genes, axis=0))
    assert len(seen[0]) == 45
    assert again.outcome.floats_up == again.metrics["rounds"] * 24  # to the one other agent
    assert "sees every gene 1 time" in outcome.notes[3]


def test_labels_are_looked_at_only_afterwards(outcome: Ran, tmp_path: Path) -> None:
    data = small()
    wrong = np.random.default_rng(0).permutation(data["y"]).astype(str)
    blind = run(data=save(tmp_path, X=data["X"], y=wrong), seeds=1, atoms=2)
    for name in biclustering.METHODS:
        np.testing.assert_array_equal(
            blind.arrays[f"clusters_{name}"], outcome.arrays[f"clusters_{name}"]
        )
    assert blind.metrics["ari_ssvd"] < 0.3


def test_levels_of_genes_and_units_do_not_matter(outcome: Ran, tmp_path: Path) -> None:
    data = small()
    data["X"] = 1000 * (data["X"] + np.arange(45))
    other = run(data=save(tmp_path, **data), seeds=2, atoms=2)
    for name in ("ari_svd", "ari_ssvd", "ari_diffusion"):
        assert other.metrics[name] == pytest.approx(outcome.metrics[name])


def test_without_labels_it_compares_the_two_algorithms(tmp_path: Path) -> None:
    unlabelled = run(data=save(tmp_path, X=small()["X"]), seeds=1, atoms=2)
    assert not [name for name in unlabelled.metrics if name in ("ari_ssvd", "ari_diffusion")]
    expected = adjusted_rand_score(
        unlabelled.arrays["clusters_ssvd"], unlabelled.arrays["clusters_diffusion"]
    )
    assert unlabelled.metrics["ari_between"] == expected
    assert unlabelled.metrics["k"] == 3
    assert unlabelled.tables == []
    assert "the number of atoms plus one" in unlabelled.notes[1]
    given = run(data=save(tmp_path, X=small()["X"]), seeds=1, atoms=2, k="5")
    assert len(set(given.arrays["clusters_ssvd"])) == 5


def test_the_bundled_data_are_planted_anew_for_every_seed() -> None:
    one, other = (config_of("biclustering").data_of(seed) for seed in (0, 1))
    assert one.X.shape == other.X.shape == (400, 60)
    assert np.abs(one.X - other.X).max() > 1
    assert one.labels is not None
    assert len(set(one.labels)) == 4
    np.testing.assert_allclose(one.X.mean(axis=1), 0, atol=1e-12)
    assert np.square(one.X).mean() == pytest.approx(1)


def test_layers_of_one_subject_give_fewer_clusters() -> None:
    places = np.array([[1.0, 0], [0, 0], [0, 0], [0, 0]])
    clusters = biclustering._clusters(places, 4, 0)
    assert len(set(clusters)) == 2
    assert len(set(clusters[1:])) == 1


@pytest.mark.slow
def test_the_default_run() -> None:
    default = run(seeds=2)
    assert default.metrics["ari_ssvd"] > 0.9
    assert default.metrics["ari_diffusion"] > 0.6
    assert "planted biclusters" in default.notes[0]


@pytest.mark.slow
@pytest.mark.skipif(not LUNG.is_file(), reason="../shared/data/lung200.npz is not here")
def test_lungs() -> None:
    lungs = run(data=str(LUNG), seeds=5)
    assert lungs.metrics["ari_ssvd"] >= lungs.metrics["ari_svd"]
    assert lungs.metrics["ari_ssvd_rows"] >= lungs.metrics["ari_svd_rows"]
    assert lungs.metrics["ari_ssvd"] >= 0.74
    assert lungs.metrics["ari_diffusion"] >= 0.6


def test_it_runs_in_process_only() -> None:
    with pytest.raises(ValueError, match="biclustering must run in process"):
        run_experiment("biclustering", engine="ray")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"X": np.ones(4)}, r"X in .* must be numbers of shape \(n_subjects, n_genes\)"),
        ({"X": np.array([["a", "b"]] * 4)}, "X in .* must be numbers"),
        ({"X": np.full((4, 3), np.nan)}, "X in .* must be finite, got 12 NaN"),
        ({"X": np.ones((4, 3))}, "X in .* must have a gene that varies"),
        ({"y": np.ones(3, dtype=int)}, r"y in .* must be 4 integers or texts, got int64 \(3,\)"),
        ({"y": np.ones(4)}, "y in .* must be 4 integers or texts, got float64"),
        ({"y": np.array([None] * 4)}, "data must be a readable .npz file"),
    ],
)
def test_a_bad_file_gets_one_sentence(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    good = {"X": np.random.default_rng(0).standard_normal((4, 3)), "y": np.array([0, 0, 1, 1])}
    with pytest.raises(ValueError, match=message):
        run(data=save(tmp_path, **{**good, **change}), seeds=1, atoms=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": "61"}, "k must be between 1 and 60, got 61"),
        ({"k": "0"}, "k must be 'auto' or an integer of at least 1, got '0'"),
        ({"k": "many"}, "k must be 'auto' or an integer of at least 1, got 'many'"),
        ({"atoms": 1}, "atoms must be at least 2, got 1"),
        ({"clients": 5}, "clients must be 3, one per atom, got 5"),
        ({"thresholds": "aic"}, "thresholds must be one of 'sure', 'bic', got 'aic'"),
        ({"noise": -1.0}, r"noise must be in \[0, inf\], got -1"),
        ({"informative": 500}, "informative must be between 4 and 400, got 500"),
        ({"seeds": 0}, "seeds must be at least 1, got 0"),
        ({"data": "nowhere.npz"}, "data must be a file, got 'nowhere.npz'"),
    ],
)
def test_bad_options_get_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(**options)


@pytest.mark.parametrize("unit", [pytest.param(1e200, marks=pytest.mark.slow), 1e-200])
def test_the_unit_of_the_expressions_does_not_matter(
    outcome: Ran, unit: float, tmp_path: Path
) -> None:
    data = small()
    other = run(data=save(tmp_path, X=unit * data["X"], y=data["y"]), seeds=2, atoms=2)
    assert other.metrics["ari_ssvd"] == outcome.metrics["ari_ssvd"]
    np.testing.assert_allclose(other.arrays["atoms_ssvd"], outcome.arrays["atoms_ssvd"], atol=1e-9)


def test_a_seed_may_be_larger_than_scikit_learn_takes() -> None:
    assert run(seed=2**32, seeds=1).metrics["k"] == biclustering.TYPES
