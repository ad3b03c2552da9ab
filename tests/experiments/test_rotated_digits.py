from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from perdl_experiments import run_experiment
from perdl_experiments.studies import rotated_digits
from tests.studies import Ran, config_of, run_study


@pytest.fixture(scope="module")
def small() -> Ran:
    return run_study(
        "rotated-digits", clients=12, rounds=6, seeds=1, hidden=16, starts="one-shot,given"
    )


def test_one_shot_finds_the_angles_and_is_then_fedavg_per_angle(small: Ran) -> None:
    assert small.metrics["right_one-shot"] == 1
    np.testing.assert_allclose(
        small.curves["accuracy_one-shot"], small.curves["accuracy_oracle"], atol=1e-12
    )
    assert small.metrics["accuracy_fedavg"] < small.metrics["accuracy_oracle"] - 0.1


def test_the_table_has_a_row_per_method_and_the_figures_are_drawn(small: Ran) -> None:
    names = [row[0] for row in small.tables[0].rows]
    assert names[:2] == ["one-shot", "four random networks (IFCA)"]
    assert names[2:] == [
        rotated_digits.METHODS[name] for name in ("oracle", "fedavg", "tuned", "alone")
    ]
    assert small.figures == ["curves.png", "seeds.png"]


def test_clients_of_an_angle_share_all_images_and_see_them_rotated() -> None:
    clients = rotated_digits._clients(config_of("rotated-digits", clients=9))
    for kind in range(4):
        mine = [one for i, one in enumerate(clients) if i % 4 == kind]
        assert sum(len(one.y) for one in mine) in (1797, 1797 // 3 * 2)
    upright = {image.tobytes() for one in clients[::4] for image in one.X}
    turned = np.rot90(clients[1].X.reshape(-1, 8, 8), -1, axes=(1, 2)).reshape(-1, 64)
    assert all(image.tobytes() in upright for image in turned)
    parts = clients[0].train, clients[0].choice, clients[0].test
    assert sorted(np.concatenate(parts)) == list(range(len(clients[0].y)))


def test_the_share_of_clients_in_the_right_cluster_by_hand() -> None:
    assert rotated_digits.share_right({0: 3, 1: 2, 2: 0, 3: 1, 4: 3}) == 1
    assert rotated_digits.share_right({0: 0, 1: 0, 2: 1, 3: 2}) == 0.75  # two kinds in a cluster
    assert rotated_digits.share_right({0: 0, 4: 4, 1: 1, 5: 1}) == 0.75  # a kind in two clusters


def test_images_and_clients_that_do_not_fit_get_one_sentence(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=r"clients must be at most 716, .* got 720"):
        run_experiment("rotated-digits", clients=720)
    np.savez(tmp_path / "wide.npz", X=np.zeros((90, 4, 6)), y=np.zeros(90, dtype=int))
    with pytest.raises(ValueError, match=r"X in .* must be square images, got 4x6"):
        run_experiment("rotated-digits", clients=8, data=tmp_path / "wide.npz")
