"""What the tests of the maths share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

Draw = Callable[[int, int], np.ndarray]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def orthonormal(rng: np.random.Generator) -> Draw:
    """Return ``draw(n_atoms, n_features)``: random orthonormal rows."""
    return lambda r, d: np.linalg.qr(rng.standard_normal((d, d)))[0][:r]


@pytest.fixture
def unit(rng: np.random.Generator) -> Draw:
    """Return ``draw(n_atoms, n_features)``: random unit rows."""

    def draw(r: int, d: int) -> np.ndarray:
        rows = rng.standard_normal((r, d))
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    return draw


@pytest.fixture
def sparse(rng: np.random.Generator) -> Draw:
    """Return ``draw(n_samples, n_atoms)``: codes as in Appendix A.1, with a floor of 0.3."""

    def draw(n: int, r: int) -> np.ndarray:
        values = rng.standard_normal((n, r))
        floored = np.where(np.abs(values) < 0.3, np.copysign(0.3, values), values)
        return floored * (rng.random((n, r)) < 0.2)

    return draw
