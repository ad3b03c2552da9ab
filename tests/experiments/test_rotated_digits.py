from __future__ import annotations

import numpy as np

from perdl_experiments.studies import rotated_digits
from tests.studies import Kept, run_study


def test_the_best_of_five_starts_has_the_lowest_validation_loss_and_costs_all_five() -> None:
    kept = Kept()
    options = {"clients": 8, "rounds": 2, "seeds": 1, "hidden": 8, "starts": "best"}
    found = run_study("rotated-digits", kept, **options)
    tries = [kept[f"best-{draw}-seed-0"] for draw in range(5)]
    losses = [float(one["loss"]) for one in tries]
    assert len(set(losses)) == 5
    assert found.metrics["accuracy_best"] == tries[int(np.argmin(losses))]["accuracy"][-1]
    assert found.outcome.floats_up == sum(float(one["up"]) for one in tries)


def test_the_share_of_clients_in_the_right_cluster_by_hand() -> None:
    assert rotated_digits.share_right({0: 3, 1: 2, 2: 0, 3: 1, 4: 3}) == 1
    assert rotated_digits.share_right({0: 0, 1: 0, 2: 1, 3: 2}) == 0.75  # two kinds in a cluster
    assert rotated_digits.share_right({0: 0, 4: 4, 1: 1, 5: 1}) == 0.75  # a kind in two clusters
