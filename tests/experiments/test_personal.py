"""The experiment personal: its clients, and what is known of its results."""

from __future__ import annotations

import numpy as np
import pytest

from perdl_experiments.studies import personal
from tests.studies import config_of


@pytest.mark.parametrize("kind", personal.KINDS)
def test_clients_differ_as_their_kind_says(kind: str) -> None:
    config = config_of("personal", clients=8, images=20)
    own = personal.splits(config, kind, 0)
    assert {len(one.train[1]) for one in own} == {20}
    assert {len(one.choose[1]) for one in own} == {10}
    classes = [set(np.concatenate([y for _, y in one]).tolist()) for one in own]
    assert {len(labels) for labels in classes} == ({3} if kind == "missing" else {10})
    again = personal.splits(config, kind, 0)
    np.testing.assert_array_equal(own[3].test[0], again[3].test[0])


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
