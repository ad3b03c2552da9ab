from __future__ import annotations

import numpy as np
import pytest

from perdl_experiments.mixed_regression_data import setting


@pytest.mark.parametrize(
    ("name", "sizes", "shares"),
    [
        ("C1", {50: 200}, (1 / 3, 1 / 3, 1 / 3)),
        ("C2", {10: 900, 50: 20}, (1 / 3, 1 / 3, 1 / 3)),
        ("C3", {10: 900, 50: 20}, (0.2, 0.3, 0.5)),
    ],
)
def test_the_papers_settings(name: str, sizes: dict[int, int], shares: tuple[float, ...]) -> None:
    data = setting(name, np.random.default_rng(0))
    numbers, counts = np.unique([len(y) for y in data.y], return_counts=True)
    assert dict(zip(numbers.tolist(), counts.tolist(), strict=True)) == sizes
    found = np.bincount(data.labels) / len(data.labels)
    np.testing.assert_allclose(found, shares, atol=0.08)
    assert data.theta.std() == pytest.approx(0.1, rel=0.1)
    X = np.vstack(data.X)
    assert X.shape == (10_000, 100)
    assert X.std() == pytest.approx(1, rel=0.01)
    noise = np.concatenate(
        [b - A @ data.theta[j] for A, b, j in zip(data.X, data.y, data.labels, strict=True)]
    )
    assert noise.std() == pytest.approx(0.2, rel=0.03)
