from __future__ import annotations

import numpy as np

from perdl_experiments.measures import rounds_to
from perdl_experiments.studies import decentralized
from tests.studies import config_of, run_study


def test_learning_rates_are_chosen_on_held_out_training_images() -> None:
    config = config_of("decentralized", clients=4)
    whole, part = decentralized.Nodes(config, 0), decentralized.Nodes(config, 0, choose=True)
    for (X, _), (rest, _) in zip(whole.train, part.train, strict=True):
        assert len(rest) == round(0.8 * len(X))
        assert {image.tobytes() for image in rest} < {image.tobytes() for image in X}
    trained = {image.tobytes() for image in whole.pooled.X}
    assert all(image.tobytes() in trained for image in part.test[0])
    options = {"clients": 4, "rounds": 4, "seeds": 1, "shards": 0}
    found = run_study("decentralized", step=0.15, **options).metrics
    # 0.15 is too short a step for so few rounds; three times as long a one is chosen.
    longer = run_study("decentralized", step=0.45, tune=0, **options).metrics
    assert found["accuracy_tuned_fedavg"] == longer["accuracy_fedavg"] > found["accuracy_fedavg"]
    assert found["accuracy_tuned_exact_diffusion"] == longer["accuracy_worst_ring"]
    assert abs(found["accuracy_tuned_pooled"] - found["accuracy_tuned_fedavg"]) < 0.02


def test_from_which_round_on_a_target_is_reached() -> None:
    assert rounds_to(np.array([0.9, 0.5, 0.9, 0.9]), 0.8) == 3
    assert rounds_to(np.array([0.9, 0.5]), 0.8) == np.inf
