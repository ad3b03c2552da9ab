"""`Request.reuse_last_reply` in a protocol of one's own: an absent client's last reply counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context
from flwr.client import NumPyClient

from flwr_perdl.clients import client_app
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import (
    Protocol,
    ProtocolStrategy,
    Replies,
    Request,
    ServerSettings,
)
from tests.grids import partition_of


class Rounds(ProtocolStrategy):
    """Every round's mean of what the clients send, one after the other."""

    def __init__(self, reuse_last_reply: int, limit: float = 100.0, **options: Any) -> None:
        super().__init__(fraction_evaluate=0.0, **options)
        self.reuse_last_reply, self.limit = reuse_last_reply, limit

    def protocol(self, initial: list[Any], state: Any) -> Protocol:
        state = {"means": np.zeros(0)} if state is None else state
        while True:
            means = state["means"]
            # The limit falls from round to round: what was a good reply may be none later.
            limit = self.limit - len(means)

            def check(reply: Any, limit: float = limit) -> None:
                if reply.arrays[0].max() > limit:
                    raise ValueError("too large")

            replies = yield Request(
                "mean", [means], {}, state, check, reuse_last_reply=self.reuse_last_reply
            )
            state = {"means": np.append(means, _mean(replies))}


def _mean(replies: Replies) -> float:
    return float(np.mean([reply.arrays[0] for reply in replies.values()]))


class Client(NumPyClient):
    """Sends ten times its partition and the round; client 2 fails after the first round."""

    def __init__(self, context: Context) -> None:
        self.i = partition_of(context)

    def fit(self, parameters: Any, config: Any) -> Any:
        if self.i == 2 and config["server-round"] > 1:
            raise ValueError("gone")
        return [np.array([10.0 * self.i + config["server-round"]])], 1, {}


def means(strategy: Rounds, n_rounds: int = 4) -> list[float]:
    result = strategy.start(InProcessGrid(client_app(Client), 3), num_rounds=n_rounds)
    found: list[float] = result.arrays.to_numpy_ndarrays()[0].tolist()
    return found


def test_the_last_reply_of_an_absent_client_counts_for_so_many_rounds() -> None:
    # Clients 0 and 1 send t and 10 + t; client 2 sent 21 in round 1.
    assert means(Rounds(0)) == [11.0, 7.0, 8.0, 9.0]
    strategy = Rounds(2)
    assert means(strategy) == [11.0, (2 + 12 + 21) / 3, (3 + 13 + 21) / 3, 9.0]
    noted = [report.anomalies.get(2, {}).get("remembered", 0) for report in strategy.history]
    assert noted == [0, 1, 1, 0]
    # It has no good reply all the same: the report counts two.
    assert [report.aggregate["clients"] for report in strategy.history] == [3, 2, 2, 2]


def test_a_remembered_reply_is_checked_again() -> None:
    """21 passes the limit of round 1, 21.5, and not that of round 2, 20.5."""
    assert means(Rounds(3, limit=21.5)) == means(Rounds(0, limit=21.5))


def test_a_resumed_run_remembers_what_the_first_one_did(tmp_path: Path) -> None:
    means(Rounds(2, checkpoint_dir=tmp_path), 2)
    resumed = Rounds(2, checkpoint_dir=tmp_path, server=ServerSettings(resume=True))
    assert means(resumed) == means(Rounds(2))
