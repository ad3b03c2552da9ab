"""Secure rounds of a protocol of one's own: `Request(secure=SecureMean(...))`.

Those of `PerMA`, and attacks on them, are in ``tests/attacks/test_secure.py``.
"""

from __future__ import annotations

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
    TooFewReplies,
)
from tests.grids import Tapped, partition_of

VALUES = np.array([[1.0, -2.0], [0.5, 4.0], [-3.0, 0.25]])
SIZES = (2, 4, 30)


class Mean(ProtocolStrategy):
    """One mean of the clients' vectors."""

    def __init__(self, asked: SecureMean | None, **options: Any) -> None:
        super().__init__(fraction_evaluate=0.0, **options)
        self.asked = asked
        self.heard = Replies({})

    def protocol(self, initial: list[Any], state: Any) -> Protocol:
        self.heard = yield Request("mean", [np.ones(1)], {}, {}, secure=self.asked)
        return [np.mean([reply.arrays[0] for reply in self.heard.values()], axis=0)]


class Client(NumPyClient):
    def __init__(self, context: Context) -> None:
        self.i = partition_of(context)

    def fit(self, parameters: Any, config: Any) -> Any:
        return [VALUES[self.i]], SIZES[self.i], {"size": SIZES[self.i]}


def mean(asked: SecureMean | None, **options: Any) -> tuple[Any, Mean, Tapped]:
    grid, strategy = Tapped(client_app(Client), 3), Mean(asked, **options)
    (found,) = strategy.start(grid, num_rounds=1).arrays.to_numpy_ndarrays()
    return found, strategy, grid


@pytest.mark.parametrize(
    ("max_weight", "weights"), [(1, (1, 1, 1)), (4, (2, 4, 4)), (10**6, SIZES)]
)
def test_a_secure_mean_is_the_weighted_mean_and_no_array_travels_in_the_clear(
    max_weight: int, weights: tuple[int, ...]
) -> None:
    found, strategy, grid = mean(SecureMean((2,), norm=10.0, max_weight=max_weight))
    # A number is rounded to 2**-30 of twice the norm, of a weight to as much of the largest one.
    np.testing.assert_allclose(
        found, np.average(VALUES, axis=0, weights=weights), atol=1e-7 * max(1, max_weight / 30)
    )
    assert grid.shown == 0
    assert [reply.metrics["size"] for reply in strategy.heard.values()] == list(SIZES)
    assert [reply.num_examples for reply in strategy.heard.values()] == list(SIZES)


def test_without_it_the_same_protocol_runs_in_the_clear() -> None:
    found, _, grid = mean(None)
    np.testing.assert_allclose(found, VALUES.mean(axis=0))
    assert grid.shown == 3


def test_a_reply_longer_than_the_norm_is_scaled_down_to_it() -> None:
    found, _, _ = mean(SecureMean((2,), norm=1.0))
    lengths = np.linalg.norm(VALUES, axis=1, keepdims=True)
    np.testing.assert_allclose(found, (VALUES / lengths).mean(axis=0), atol=1e-7)


def test_another_shape_is_refused_and_named() -> None:
    with pytest.raises(TooFewReplies):
        mean(SecureMean((3,), norm=10.0))
