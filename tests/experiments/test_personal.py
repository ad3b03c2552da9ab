"""The experiment personal: its clients, and what is known of its results."""

from __future__ import annotations

import numpy as np

from perdl_experiments.studies import personal
from tests.studies import config_of


def test_a_step_moves_the_named_arrays_and_descends() -> None:
    config = config_of("personal", clients=8, images=20)
    own = personal.splits(config, "labels", 0)
    model = personal.first_model(config, own, 0)
    client = personal.Client(own[0], 0, 0, 0.5)
    names = {"server-round": 1, "train-names": '["head.weight", "head.bias"]'}
    moved = client.fit(model, names)[0]
    same = [np.array_equal(*pair) for pair in zip(model, moved, strict=True)]
    assert same == [True, True, False, False]
    trained = model
    for round_ in range(30):
        trained = client.fit(trained, {"server-round": round_ + 1})[0]
    assert client.accuracy(trained, client.train) > 0.9
