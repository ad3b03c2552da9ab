"""Denoising: patches by hand, whole runs in one place and by messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdl_experiments.patches import cut, join
from perdl_experiments.studies import denoise
from tests.studies import Ran, config_of, run_study, save


def run(**options: Any) -> Ran:
    return run_study("denoise", **options)


# Patches -------------------------------------------------------------------------------------


def test_patches_by_hand() -> None:
    patches = cut(np.arange(6.0).reshape(2, 3), 2)
    np.testing.assert_array_equal(patches.means, [[2], [3]])
    np.testing.assert_array_equal(patches.X, [[-2, -1, 1, 2], [-2, -1, 1, 2]])
    changed = patches._replace(X=np.array([[0.0, 0, 0, 0], [4, 0, 4, 0]]))
    np.testing.assert_array_equal(join(changed), [[2, 4.5, 3], [2, 4.5, 3]])


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.booleans())
def test_cut_and_join_are_inverse(height: int, width: int, side: int, single: bool) -> None:
    dtype = np.float32 if single else np.float64
    image = np.random.default_rng(0).random((height, width)).astype(dtype)
    side = min(side, height, width)
    patches = cut(image, side)
    assert patches.X.shape == ((height - side + 1) * (width - side + 1), side * side)
    assert patches.X.dtype == dtype
    np.testing.assert_allclose(patches.X.mean(axis=1), 0, atol=1e-6)
    again = join(patches)
    assert again.dtype == dtype
    np.testing.assert_allclose(again, image, atol=1e-6)


# The experiment ------------------------------------------------------------------------------


def test_the_users_images(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    stack = (255 * rng.random((5, 12, 14))).astype(np.uint8)
    task = config_of("denoise", data=save(tmp_path, X=stack), images=2, rounds=2).task
    assert task.clean.shape == task.noisy.shape == (2, 12, 14)
    kept = [i for i in range(5) if any(np.allclose(stack[i] / 255, image) for image in task.clean)]
    assert len(kept) == 2
    assert [one.shape for one in task.patches] == [(12, 14)] * 2
    assert task.order.shape == (2, denoise.BATCH)
    noise = task.noisy - task.clean
    assert noise.std() == pytest.approx(25 / 255, rel=0.15)
    np.testing.assert_allclose(task.rebuild(task.X), task.noisy, atol=1e-6)
