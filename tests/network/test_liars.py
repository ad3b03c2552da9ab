from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks._liars import among_liars
from flwr_perdl.network import InMemoryNetwork, Schedule, diffusion_averaging
from flwr_perdl.network.topology import Topology, metropolis_weights
from tests.studies import config_of

RULES = ("clip", "trimmed")
#: What five nodes have. The others' distances from the first are 5, 1, 10 and 20.
MODELS = np.array([[1.0, 1.0], [4.0, 5.0], [1.0, 2.0], [7.0, 9.0], [1.0, -19.0]])


class Still:
    """A client whose model stays as it is."""

    def __init__(self, node: int) -> None:
        self.model = [MODELS[node]]

    def get_parameters(self, config: Any) -> Any:
        return self.model

    def fit(self, parameters: Any, config: Any) -> Any:
        return parameters, 1, {}


@pytest.mark.parametrize(
    ("robust", "expected"),
    [
        # The farthest counts as if it were at a distance of 10: (0, -10) from the own.
        ("clip", [1 + (3 + 0 + 6 + 0) / 5, 1 + (4 + 1 + 8 - 10) / 5]),
        # Of the others' numbers are left 1 and 4, then 2 and 5.
        ("trimmed", [(1 + 1 + 4) / 3, (1 + 2 + 5) / 3]),
    ],
)
def test_a_round_by_hand(robust: str, expected: list[float]) -> None:
    options: dict[str, Any] = {"method": "atc", "robust": robust, "evaluate_every": 0}
    learned = diffusion_averaging(Still, Topology.complete(5), 1, n_liars=1, **options)
    np.testing.assert_allclose(learned.models[0][0], expected)


ROUNDS, SEED = 30, 1


def worst(robust: bool | str, attack: str | None) -> float:
    """Digits at random: the worst of the nodes that do not lie."""
    config = config_of("decentralized", rounds=ROUNDS, shards=0, method="atc")
    return among_liars(config, SEED, robust, attack)


@pytest.mark.parametrize("robust", RULES)
def test_two_liars_in_sixteen_cost_at_most_a_point_where_the_mean_is_lost(robust: str) -> None:
    honest = worst(False, None)
    assert worst(robust, "flip") >= honest - 0.01
    assert worst(False, "flip") < honest - 0.5


def test_what_is_rejected() -> None:
    for options, name in (
        ({"robust": "filtered"}, "robust"),
        ({"robust": "clip", "n_liars": 0}, "n_liars"),
        ({"robust": "clip", "method": "exact_diffusion"}, "method"),
        ({"robust": "trimmed", "method": "gradient_tracking"}, "method"),
    ):
        with pytest.raises(ValueError, match=rf"^{name}"):
            diffusion_averaging(Still, Topology.complete(5), 1, **{"method": "atc", **options})

    def client(node: int) -> Any:
        raise AssertionError("nothing runs before the check")

    ring, complete = Topology.ring(6), Topology.complete(6)
    changing = Schedule.of(metropolis_weights(complete), metropolis_weights(ring))
    for network in (ring, InMemoryNetwork(ring), changing):
        for robust in RULES:
            with pytest.raises(ValueError, match=r"^n_liars"):
                diffusion_averaging(
                    client, network, 1, initial=[np.zeros(1)], method="atc", robust=robust
                )
