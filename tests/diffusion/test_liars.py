from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flwr_perdl.diffusion import DiffusionAveraging, Topology, metropolis_weights
from flwr_perdl.diffusion.robust import RULES, clipped, trimmed
from flwr_perdl.network import InMemoryNetwork
from perdl_experiments.studies.decentralized import among_liars
from tests.studies import config_of

OWN = np.array([1.0, 1.0])
#: Of distances 5, 1, 10 and 10 from it.
RECEIVED = np.array([[4.0, 5.0], [1.0, 2.0], [7.0, 9.0], [1.0, -9.0]])
WEIGHTS = np.array([0.1, 0.2, 0.2, 0.1])


def test_clipping_by_hand() -> None:
    # The two farthest count as if they were at a distance of 5: (3, 4) and (0, -5) from the own.
    change = [0.1 * 3 + 0.2 * 0 + 0.2 * 3 + 0.1 * 0, 0.1 * 4 + 0.2 * 1 + 0.2 * 4 - 0.1 * 5]
    np.testing.assert_allclose(clipped(OWN, RECEIVED, WEIGHTS, 2), OWN + change)
    # None is left to compare with, or none is received: the own model.
    for few in (RECEIVED[2:], RECEIVED[:0]):
        np.testing.assert_array_equal(clipped(OWN, few, WEIGHTS[: len(few)], 2), OWN)
    # Neighbors that agree with the node move nothing, and divide by nothing.
    np.testing.assert_array_equal(clipped(OWN, np.tile(OWN, (4, 1)), WEIGHTS, 1), OWN)


def test_trimmed_mean_by_hand() -> None:
    # Left are 1 (the later of the equal ones) and 4, then 2 and 5, with the own of weight .4.
    expected = [
        (0.4 * 1 + 0.1 * 1 + 0.1 * 4) / 0.6,
        (0.4 * 1 + 0.2 * 2 + 0.1 * 5) / 0.7,
    ]
    np.testing.assert_allclose(trimmed(OWN, RECEIVED, WEIGHTS, 1), expected)
    for few in (RECEIVED[:2], RECEIVED[:0]):
        np.testing.assert_array_equal(trimmed(OWN, few, WEIGHTS[: len(few)], 1), OWN)


ROUNDS, SEED = 30, 1


def worst(robust: str | None, attack: str | None) -> float:
    """Digits at random: the worst of the nodes that do not lie."""
    config = config_of("decentralized", rounds=ROUNDS, shards=0, method="atc")
    return among_liars(config, SEED, robust, attack)


@pytest.mark.parametrize("robust", RULES)
def test_two_liars_in_sixteen_cost_at_most_a_point_where_the_mean_is_lost(robust: str) -> None:
    honest = worst(None, None)
    assert worst(robust, "flip") >= honest - 0.01
    assert worst(None, "flip") < honest - 0.5


def test_what_is_rejected() -> None:
    for options, name in (
        ({"robust": "mean"}, "robust"),
        ({"robust": "clip", "n_liars": 0}, "n_liars"),
        ({"robust": "clip", "method": "exact_diffusion"}, "method"),
        ({"robust": "trimmed", "method": "gradient_tracking"}, "method"),
    ):
        with pytest.raises(ValueError, match=rf"^{name} must"):
            DiffusionAveraging(**{"method": "atc", **options})

    def client(node: int) -> Any:
        raise AssertionError("nothing runs before the check")

    ring, complete = Topology.ring(6), Topology.complete(6)
    changing = [metropolis_weights(complete), metropolis_weights(ring)]
    for network in (ring, InMemoryNetwork(ring), InMemoryNetwork(complete, changing)):
        for robust in RULES:
            learner = DiffusionAveraging(method="atc", robust=robust)
            with pytest.raises(ValueError, match=r"^n_liars must"):
                learner.fit(client, network, 1, initial=[np.zeros(1)])
