"""The experiment on planted atoms: its data, its figures, its goal, bad options."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from perdl_experiments.studies import patches
from tests.studies import Kept, Ran, compute_all, config_of, run_study


def run(keep: Any = compute_all, **options: Any) -> Ran:
    return run_study("patches", keep, **options)


def test_samples_mix_three_planted_atoms_and_noise_has_its_level() -> None:
    atoms, data = patches.draw(3, 4, 50)
    assert atoms.shape == (48, 16)
    np.testing.assert_allclose(np.linalg.norm(atoms, axis=1), 1)
    assert [X.shape for X in data] == [(50, 16)] * 4
    again, noisy = patches.draw(3, 4, 2000, (0.1, 1.0))
    _, clean = patches.draw(3, 4, 2000)
    np.testing.assert_array_equal(atoms, again)
    power = np.mean(np.square(clean))
    levels = [np.sqrt(np.mean((a - b) ** 2) / power) for a, b in zip(noisy, clean, strict=True)]
    np.testing.assert_allclose(levels, [0.1, 0.1, 0.1, 1.0], rtol=0.02)
    # A sample's energy: three coefficients of variance 1/12, on unit atoms in random directions.
    assert power * 16 == pytest.approx(3 / 12, rel=0.05)


def test_all_figures_and_pictures_of_a_short_run() -> None:
    kept = Kept()
    outcome = run(kept, seeds=2, rounds=12, samples=60, seed=5)
    assert len(kept) == 2 * 26
    assert {"recovered_min_median", "recovered_min_least", "share_at_least_45"} < set(
        outcome.metrics
    )
    ends = [int(kept[f"headline-seed-{seed}"]["found"][-1]) for seed in (5, 6)]
    assert outcome.metrics["recovered_min_median"] == np.median(ends)
    assert outcome.metrics["recovered_min_least"] == min(ends)
    assert len(outcome.curves["recovered_headline"]) == 12
    assert len(outcome.curves["recovered_paper"]) == 3 * 12  # until it has settled
    assert outcome.figures == ["recovery.png"]
    assert [len(table.rows) for table in outcome.tables] == [10, 8, 8]
    # A ring: everyone sends 48 atoms, their use, and eight candidates with scores, to two others.
    assert (
        outcome.outcome.floats_up
        == outcome.outcome.floats_down
        == 12 * 2 * (48 * 16 + 48 + 8 + 8 * 16)
    )
    assert outcome.outcome.rounds == 12
    kept.whole = True
    again = run(kept, seeds=2, rounds=12, samples=60, seed=5)
    assert again.metrics == outcome.metrics


@pytest.mark.slow
@pytest.mark.parametrize("update", ["mod", "ksvd", "gradient"])
def test_at_least_45_of_48_atoms_at_every_node(update: str) -> None:
    method = patches.methods(config_of("patches", update=update))["headline"]
    for seed in (11, 12):
        kept = patches._one(config_of("patches"), method, seed)
        assert kept["found"].shape == (100,)
        assert kept["found"][-1] >= 45
        counts = [patches.n_found(D, kept["planted"]) for D in kept["dictionaries"]]
        assert min(counts) == kept["found"][-1]
