"""Starts of several clients at once are those of each client alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flwr_perdl.dictionary import MODLearner, OrthogonalLearner, warm_start, warm_starts


@pytest.mark.parametrize("restarts", [1, 2])
@pytest.mark.parametrize("learner", [OrthogonalLearner(4), MODLearner(4)])
def test_clients_that_start_together_start_as_each_alone(learner: Any, restarts: int) -> None:
    sizes = [(30, 6), (30, 6), (12, 6), (30, 6), (30, 6), (5, 40), (5, 40)]
    draw = np.random.default_rng(3)
    samples = [draw.standard_normal(size) for size in sizes]
    samples[3:5] = [X.astype(np.float32) for X in samples[3:5]]
    options: dict[str, Any] = {"restarts": restarts, "n_iter": 12}
    rngs = [np.random.default_rng(i) for i in range(7)]
    together = warm_starts(samples, learner, rngs=rngs, **options)
    for i, (X, found) in enumerate(zip(samples, together, strict=True)):
        D, rng = learner.start(X, np.random.default_rng(i)), np.random.default_rng(i)
        alone = warm_start(X, learner, rng=rng, **options)
        np.testing.assert_array_equal(found.dictionary, alone.dictionary)
        assert found.objectives == alone.objectives
        if restarts == 1:  # the iterations, written out
            for t in range(12):
                D = learner.update(X, learner.code(X, D, max(1.0, 8 * 0.97**t)), D)
            np.testing.assert_allclose(found.dictionary, D, atol=1e-4 if i in (3, 4) else 1e-9)
