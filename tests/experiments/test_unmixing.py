"""The experiment on hyperspectral images: the drawn scene, a user's file, bad input, Samson."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perdl_experiments.unmixing import match_spectra
from tests.studies import Ran, config_of, run_study, save

SAMSON = Path(__file__).resolve().parents[3] / "shared" / "data" / "samson.npz"


def run(**options: Any) -> Ran:
    return run_study("unmixing", **options)


def small(side: int = 12, bands: int = 20) -> dict[str, np.ndarray]:
    """Three materials in bands of rows, mixed where they meet."""
    rng = np.random.default_rng(0)
    endmembers = rng.random((3, bands)) + 0.1
    row = np.indices((side, side))[0].ravel() / (side - 1)
    shares = np.maximum(1 - np.abs(2 * row[:, None] - [0, 1, 2]), 0)
    return {
        "X": shares @ endmembers,
        "shape": np.array([side, side]),
        "endmembers": endmembers,
    }


def test_the_drawn_scene() -> None:
    outcome = run(rounds=30, tiles=3)
    metrics = outcome.metrics
    assert metrics["sad_mean"] <= metrics["sad_worst"] < 0.05 < metrics["sad_isolated"]
    assert {"sad_vca", "sad_nmf", "sad_central", "error", "disagreement"} < set(metrics)
    assert outcome.figures == ["spectra.png", "abundances.png"]
    assert outcome.arrays["abundances"].shape == (60, 60, 3)
    np.testing.assert_allclose(outcome.arrays["abundances"].sum(axis=2), 1)
    truth = config_of("unmixing").scene.endmembers
    angles = [match_spectra(truth, D).angles.mean() for D in outcome.arrays["spectra_network"]]
    assert metrics["sad_worst"] == pytest.approx(max(angles))


def test_a_scene_of_ones_own_with_and_without_the_truth(tmp_path: Path) -> None:
    data = small()
    with_truth = run(data=save(tmp_path, **data), tiles=2, rounds=40)
    assert with_truth.metrics["sad_worst"] < with_truth.metrics["sad_isolated"]
    (tmp_path / "other").mkdir()
    data.pop("endmembers")
    without = run(data=save(tmp_path / "other", **data), tiles=2, rounds=40, n_endmembers=3)
    assert not [name for name in without.metrics if name.startswith("sad")]
    assert without.metrics["error"] == pytest.approx(with_truth.metrics["error"])
    np.testing.assert_array_equal(
        with_truth.arrays["spectra_network"], without.arrays["spectra_network"]
    )
    assert without.figures == ["spectra.png", "abundances.png"]
    two = run(data=save(tmp_path / "other", **data), tiles=2, rounds=3, n_endmembers=2)
    assert two.arrays["spectra_network"].shape == (4, 2, 20)


@pytest.mark.slow
@pytest.mark.skipif(not SAMSON.is_file(), reason="shared/data/samson.npz is not here")
def test_samson() -> None:
    metrics = run(data=str(SAMSON)).metrics
    assert metrics["sad_worst"] <= 0.10
    assert metrics["sad_worst"] < metrics["sad_isolated"]
