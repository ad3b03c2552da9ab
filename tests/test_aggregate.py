from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import minimize

from flwr_perdl.core.aggregate import geometric_median, keep_consistent, mark_far


@settings(max_examples=40)
@given(arrays(float, (5, 3), elements=st.floats(-3, 3).map(lambda x: round(x, 2))))
def test_the_geometric_median_minimizes_the_sum_of_distances(points):
    def total(x):
        return np.linalg.norm(points - x, axis=1).sum()

    ours = total(geometric_median(points))
    best = min(
        [total(p) for p in points]
        + [minimize(total, points.mean(axis=0), method="Nelder-Mead").fun]
    )
    assert ours <= best + 1e-3


def test_points_that_pull_together_are_found_though_none_is_farther_out():
    """Fifty honest points in a hundred dimensions, twenty on one spot, at the honest distance."""
    rng = np.random.default_rng(0)
    points = rng.standard_normal((70, 100)) / 10
    points[:20] = 0
    points[:20, 0] = 1.0
    distances = np.linalg.norm(points - geometric_median(points), axis=1)
    assert distances[:20].max() < 1.1 * np.median(distances)
    np.testing.assert_array_equal(np.flatnonzero(~keep_consistent(points)), np.arange(20))


@pytest.mark.parametrize("n", [1, 2, 5, 40, 200])
def test_honest_points_are_kept(n):
    kept = [
        keep_consistent(np.random.default_rng(s).standard_normal((n, 30))).mean() for s in range(10)
    ]
    assert np.mean(kept) > 0.95


@settings(max_examples=60)
@given(
    arrays(
        float,
        st.tuples(st.integers(1, 12), st.integers(1, 4)),
        elements=st.floats(-1e100, 1e100),
    )
)
def test_whatever_comes_at_least_half_are_kept(points):
    assert 2 * keep_consistent(points).sum() >= len(points)
    assert len(mark_far(points, points.mean(axis=0))) == len(points)


@pytest.mark.parametrize("unit", [1e-12, 1.0, 1e12])
def test_what_is_far_does_not_depend_on_the_unit(unit):
    rng = np.random.default_rng(0)
    points = rng.standard_normal((30, 4))
    points[:5] *= -50
    np.testing.assert_array_equal(keep_consistent(unit * points), keep_consistent(points))
    average = points.mean(axis=0)
    np.testing.assert_array_equal(
        mark_far(unit * points, unit * average), mark_far(points, average)
    )
