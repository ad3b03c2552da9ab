"""What a `Request` of one's own protocol asks for: remembered replies, and secure means.

Secure rounds of `PerMA`, and attacks on them, are in ``tests/attacks/test_secure.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context
from flwr.client import NumPyClient

from flwr_perdl.clients import client_app
from flwr_perdl.strategies import (
    Protocol,
    ProtocolStrategy,
    Replies,
    Request,
    SecureMean,
    ServerSettings,
    TooFewReplies,
)
from tests.grids import Tapped, partition_of

VALUES = np.array([[1.0, -2.0], [11.0, 4.0], [21.0, 0.25]])
SIZES = (2, 4, 30)


class Rounds(ProtocolStrategy):
    """Every round's mean of what the clients send, one after the other."""

    def __init__(self, asked: dict[str, Any], limit: float = 100.0, **options: Any) -> None:
        super().__init__(fraction_evaluate=0.0, **options)
        self.asked, self.limit, self.heard = asked, limit, Replies({})

    def protocol(self, initial: list[Any], state: Any) -> Protocol:
        state = {"means": np.zeros((0, 2))} if state is None else state
        while True:
            means = state["means"]
            # The limit falls from round to round: what was a good reply may be none later.
            limit = self.limit - len(means)

            def check(reply: Any, limit: float = limit) -> None:
                if reply.arrays[0].max() > limit:
                    raise ValueError("too large")

            self.heard = yield Request("mean", [means], {}, state, check, **self.asked)
            mean = np.mean([reply.arrays[0] for reply in self.heard.values()], axis=0)
            state = {"means": np.vstack([means, mean])}


class Client(NumPyClient):
    """Sends its values, one more in each round; client 2 fails after the first round."""

    def __init__(self, context: Context) -> None:
        self.i = partition_of(context)

    def fit(self, parameters: Any, config: Any) -> Any:
        if self.i == 2 and config["server-round"] > 1:
            raise ValueError("gone")
        return [VALUES[self.i] + config["server-round"] - 1], SIZES[self.i], {"size": SIZES[self.i]}


def run(strategy: Rounds, n_rounds: int = 1) -> tuple[np.ndarray, Tapped]:
    grid = Tapped(client_app(Client), 3)
    result = strategy.start(grid, num_rounds=n_rounds)
    return result.arrays.to_numpy_ndarrays()[0], grid


# Remembered replies --------------------------------------------------------------------------


def means(strategy: Rounds, n_rounds: int = 4) -> list[float]:
    found: list[float] = run(strategy, n_rounds)[0][:, 0].tolist()
    return found


def remembers(rounds: int, **options: Any) -> Rounds:
    return Rounds({"reuse_last_reply": rounds}, **options)


def test_the_last_reply_of_an_absent_client_counts_for_so_many_rounds() -> None:
    # Clients 0 and 1 send t and 10 + t; client 2 sent 21 in round 1.
    assert means(remembers(0)) == [11.0, 7.0, 8.0, 9.0]
    strategy = remembers(2)
    assert means(strategy) == [11.0, (2 + 12 + 21) / 3, (3 + 13 + 21) / 3, 9.0]
    noted = [report.anomalies.get(2, {}).get("remembered", 0) for report in strategy.history]
    assert noted == [0, 1, 1, 0]
    # It has no good reply all the same: the report counts two.
    assert [report.aggregate["clients"] for report in strategy.history] == [3, 2, 2, 2]


def test_a_remembered_reply_is_checked_again() -> None:
    """21 passes the limit of round 1, 21.5, and not that of round 2, 20.5."""
    assert means(remembers(3, limit=21.5)) == means(remembers(0, limit=21.5))


def test_a_resumed_run_remembers_what_the_first_one_did(tmp_path: Path) -> None:
    means(remembers(2, checkpoint_dir=tmp_path), 2)
    resumed = remembers(2, checkpoint_dir=tmp_path, server=ServerSettings(resume=True))
    assert means(resumed) == means(remembers(2))


# Secure means --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_weight", "weights"), [(1, (1, 1, 1)), (4, (2, 4, 4)), (10**6, SIZES)]
)
def test_a_secure_mean_is_the_weighted_mean_and_no_array_travels_in_the_clear(
    max_weight: int, weights: tuple[int, ...]
) -> None:
    strategy = Rounds({"secure": SecureMean((2,), norm=30.0, max_weight=max_weight)})
    found, grid = run(strategy)
    # A number is rounded to 2**-30 of twice the norm, of a weight to as much of the largest one.
    wanted = [np.average(VALUES, axis=0, weights=weights)]
    np.testing.assert_allclose(found, wanted, atol=3e-7 * max(1, max_weight / 30))
    assert grid.shown == 0
    assert [reply.metrics["size"] for reply in strategy.heard.values()] == list(SIZES)
    assert [reply.num_examples for reply in strategy.heard.values()] == list(SIZES)


def test_without_it_the_same_protocol_runs_in_the_clear() -> None:
    assert run(Rounds({}))[1].shown == 3


def test_a_reply_longer_than_the_norm_is_scaled_down_to_it() -> None:
    found, _ = run(Rounds({"secure": SecureMean((2,), norm=1.0)}))
    lengths = np.linalg.norm(VALUES, axis=1, keepdims=True)
    np.testing.assert_allclose(found, [(VALUES / lengths).mean(axis=0)], atol=1e-7)


def test_another_shape_is_refused_and_named() -> None:
    with pytest.raises(TooFewReplies):
        run(Rounds({"secure": SecureMean((3,), norm=10.0)}))
