"""More work per round, fewer rounds: what a deployment, where messages take seconds, lives on."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, MetricRecord

from flwr_perdl.clients import RegressionClient, client_app
from flwr_perdl.regression import Refinement, model_error
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import FedX
from perdl_experiments import run_experiment
from perdl_experiments.mixed_regression_data import mixed_regression, oracle


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ten_local_steps_reach_permas_error_in_a_quarter_of_the_rounds(seed: int) -> None:
    """From a short start the rounds have the work to do; the matching round counts for both."""
    reached = {}
    for steps, rounds in [(1, 16), (10, 4)]:
        options = {"seeds": 1, "start": "short", "local_steps": steps}
        metrics = run_experiment("synthetic", seed=seed, rounds=rounds, options=options)["metrics"]
        reached[steps] = metrics["error_global_median"]
    assert reached[10] <= reached[1] < 1e-8


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_twenty_steps_and_momentum_reach_the_oracle_in_a_quarter_of_fedxs_rounds(seed: int) -> None:
    """Rounds until the models stay within 5 % of least squares with the true labels.

    Phase 1 counts on both sides; the step size is the same.
    """
    data = mixed_regression(
        np.array([100] * 30), np.full(3, 1 / 3), np.random.default_rng(seed), d=20
    )
    best = model_error(oracle(data), data.theta)

    def make_client(context: Context) -> RegressionClient:
        i = int(context.node_config["partition-id"])
        return RegressionClient(data.X[i], data.y[i], context)

    def rounds(strategy: FedX, most: int) -> int:
        errors: list[float] = []

        def evaluate(round_: int, arrays: ArrayRecord) -> MetricRecord | None:
            models = arrays.to_numpy_ndarrays()
            errors.append(model_error(models[0], data.theta) if models else np.inf)
            return None

        grid = InProcessGrid(client_app(make_client), len(data.X))
        strategy.start(grid, num_rounds=most, evaluate_fn=evaluate)
        far = np.flatnonzero(np.array(errors) > 1.05 * best)
        assert far[-1] < most, "it did not get there"
        return int(far[-1]) + 1

    plain = rounds(
        FedX(
            3, phase_2=Refinement(n_steps=5, step_size=0.01, momentum=False), fraction_evaluate=0.0
        ),
        100,
    )
    fast = rounds(
        FedX(3, phase_2=Refinement(n_steps=20, step_size=0.01), fraction_evaluate=0.0), 40
    )
    assert 4 * fast <= plain
