"""A start is its learner's iterations with shrinking thresholds, the best of several."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flwr_perdl.dictionary import MODLearner, OrthogonalLearner, warm_start


@pytest.mark.parametrize("size", [(30, 6), (12, 6), (5, 40)])  # the last in the samples' row space
@pytest.mark.parametrize("learner", [OrthogonalLearner(4), MODLearner(4)])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_start_is_its_iterations_written_out(learner: Any, size: Any, dtype: Any) -> None:
    X = np.random.default_rng(3).standard_normal(size).astype(dtype)
    found = warm_start(X, learner, rng=np.random.default_rng(0), n_iter=12)
    D = learner.start(X, np.random.default_rng(0))
    for t in range(12):
        D = learner.update(X, learner.code(X, D, max(1.0, 8 * 0.97**t)), D)
    np.testing.assert_allclose(found.dictionary, D, atol=1e-4 if dtype == np.float32 else 1e-9)
