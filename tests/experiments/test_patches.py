"""The experiment on planted atoms: its data, its figures, its goal, bad options."""

from __future__ import annotations

import numpy as np
import pytest

from perdl_experiments.studies import patches


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
