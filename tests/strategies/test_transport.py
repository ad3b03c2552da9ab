"""Models that travel in fewer bytes, and the arrays that travel at all."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MessageType
from flwr.client import NumPyClient

from flwr_perdl.clients import client_app, keep_private
from flwr_perdl.network import TopK, Topology
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import (
    ClusteredFedAvg,
    DiffusionAveraging,
    Ditto,
    PersonalizedFedAvg,
    TooFewReplies,
)
from tests.grids import Trains, grid_of

#: A model with a batch normalization: its floats, and the others.
FLOATS = {"body.weight": (30, 20), "norm.running_mean": (20,), "head.weight": (20, 10)}
STEP = 2.0**-12  # half floats near 1 are 2**-10 apart


def model() -> ArrayRecord:
    """Return the model."""
    arrays = {name: np.ones(shape, dtype=np.float32) for name, shape in FLOATS.items()}
    arrays |= {"norm.num_batches_tracked": np.array(3), "mask": np.array([True, False])}
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


class Adds(NumPyClient):
    """Adds a number of its own to all floats, one to counters."""

    def __init__(self, context: Any) -> None:
        self.own = STEP * (1 + int(context.node_config["partition-id"]) % 2)

    def fit(self, parameters: Any, config: Any) -> Any:
        """Train."""
        for array in parameters:
            if array.dtype.kind != "b":
                array += array.dtype.type(self.own if array.dtype.kind == "f" else 1)
        return parameters, 1, {}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        """Return a loss that tells clients apart."""
        assert parameters[0].dtype == np.float32
        return float(abs(parameters[0][0, 0] - 1 - self.own)), 1, {}


class CountingGrid(InProcessGrid):
    """Counts the bytes of training's arrays, without their headers."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.down = self.up = 0.0

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        """Push messages, and return the replies."""
        asked = list(messages)
        trains = any(one.metadata.message_type == MessageType.TRAIN for one in asked)
        down = sum(map(n_bytes, asked))
        replies = list(super().send_and_receive(asked, timeout=timeout))
        if trains:
            self.down, self.up = down / len(asked), sum(map(n_bytes, replies)) / len(asked)
        return replies


def n_bytes(message: Message) -> int:
    """Return the bytes of a message's numbers."""
    if message.has_error():
        return 0
    records = message.content.array_records.values()
    arrays = [array for record in records for array in record.values()]
    return sum(array.numpy().nbytes for array in arrays if array.numpy().dtype != np.float64)


N_FLOATS = sum(int(np.prod(shape)) for shape in FLOATS.values())
N_HEAD = int(np.prod(FLOATS["head.weight"]))
OTHERS = 8 + 2

STRATEGIES: dict[str, Callable[..., Any]] = {
    "ClusteredFedAvg(1)": lambda **options: ClusteredFedAvg(1, **options),
    "ClusteredFedAvg(2)": lambda **options: ClusteredFedAvg(2, choose_every=2, **options),
    "PersonalizedFedAvg": lambda **options: PersonalizedFedAvg(["head.*"], **options),
    "Ditto": Ditto,
}
#: Those of a single model: of two, half floats do not tell which is the nearer here.
SINGLE = [name for name in STRATEGIES if name != "ClusteredFedAvg(2)"]


def run(name: str, n_rounds: int = 3, **options: Any) -> tuple[list[np.ndarray], CountingGrid]:
    """Return the model after some rounds, and the grid of the run."""
    grid = CountingGrid(client_app(Adds), 4)
    result = STRATEGIES[name](**options).start(grid, model(), num_rounds=n_rounds)
    return result.arrays.to_numpy_ndarrays(), grid


@pytest.mark.parametrize("name", STRATEGIES)
def test_float32_models_travel_in_four_bytes_a_number_and_half_floats_in_two(name: str) -> None:
    shared = N_FLOATS - N_HEAD * (name == "PersonalizedFedAvg")
    for options, size in (({}, 4), ({"transport": "float16"}, 2)):
        arrays, grid = run(name, **options)
        assert grid.down == grid.up == size * shared + OTHERS
        assert [array.dtype for array in arrays] == [np.float32] * 3 + [np.int64, bool]


@pytest.mark.parametrize("method", ["atc", "exact_diffusion", "gradient_tracking", "push_sum"])
@pytest.mark.parametrize("sealed", [False, True])
def test_nodes_send_half_floats(method: str, sealed: bool) -> None:
    found = {}
    for transport in (None, "float16"):
        grid = CountingGrid(client_app(Adds), 4)
        strategy = DiffusionAveraging(
            Topology.ring(4),
            method=method,
            sealed=sealed,
            transport=transport,
            shows_models=not sealed,
        )
        result = strategy.start(grid, model(), num_rounds=3)
        found[transport] = result.arrays.to_numpy_ndarrays(), strategy.averaged.bytes_sent
    (whole, most), (half, least) = found[None], found["float16"]
    assert least < 0.51 * most + 4 * 3 * 2 * 8
    for one, other in zip(whole, half, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(other, one, atol=2.0**-9)
    with pytest.raises(ValueError, match="compression"):
        DiffusionAveraging(Topology.ring(4), transport="float16", compression=TopK(0.1))


@pytest.mark.parametrize("name", SINGLE)
def test_small_steps_add_up_in_half_floats(name: str) -> None:
    """Each step is smaller than half the distance of half floats: it would be lost in a model."""
    whole, _ = run(name, 9)
    half, _ = run(name, 9, transport="float16")
    for one, other in zip(whole, half, strict=True):
        np.testing.assert_allclose(other, one, atol=STEP / 2)
    assert whole[0][0, 0] > 1 + 8 * STEP


@pytest.mark.parametrize("transport", [None, "float16"])
@pytest.mark.parametrize("name", SINGLE)
def test_what_is_not_sent_of_a_change_is_sent_later(name: str, transport: str | None) -> None:
    whole, _ = run(name, 30)
    sparse, grid = run(name, 30, compression=TopK(0.1), transport=transport)
    assert grid.up < 0.3 * N_FLOATS * (2 if transport else 4)
    moved, wanted = sparse[0] - 1, whole[0] - 1
    # All entries grow alike, so that a tenth of them is sent in turn: all but the last ten steps.
    assert moved.mean() == pytest.approx(wanted.mean(), rel=0.25)
    assert moved.min() > 0.5 * wanted.mean()
    assert (sparse[3], sparse[4].tolist()) == (whole[3], [True, False])


def test_a_number_that_half_floats_do_not_have_is_named_and_travels_in_its_dtype(
    caplog: pytest.LogCaptureFixture,
) -> None:
    start = model()
    start["body.weight"] = Array(np.full((30, 20), 1e5, dtype=np.float32))
    grid = CountingGrid(client_app(Adds), 2)
    with caplog.at_level(logging.WARNING):
        strategy = Ditto(transport="float16", fraction_evaluate=0.0)
        result = strategy.start(grid, start, num_rounds=1).arrays.to_numpy_ndarrays()
    assert "body.weight" in caplog.text
    assert grid.down == 2 * N_FLOATS + 2 * 600 + OTHERS
    assert result[0].mean() > 1e5 - 1


def test_models_of_other_dtypes_come_back_as_they_were() -> None:
    arrays = [np.ones(3), np.ones(3, np.float16), np.ones(3, np.float32)]
    received: list[str] = []

    def change(array: Any) -> Any:
        received.append(str(array.dtype))
        return array

    grid = grid_of(lambda *_: Trains(change), 2)
    strategy = Ditto(transport="float16", fraction_evaluate=0.0)
    result = strategy.start(grid, ArrayRecord(arrays), num_rounds=1).arrays.to_numpy_ndarrays()
    assert [array.dtype for array in result] == [array.dtype for array in arrays]
    assert received == ["float64", "float16", "float32"] * 4  # both of Ditto's models


def test_rules_that_compare_changes_are_for_whole_models() -> None:
    for name in STRATEGIES:
        with pytest.raises(ValueError, match="robust"):
            STRATEGIES[name](compression=TopK(0.1), robust=True)
        with pytest.raises(ValueError, match="transport"):
            STRATEGIES[name](transport="float8")
        with pytest.raises(TypeError, match="compression"):
            STRATEGIES[name](compression=0.1)


def test_a_client_that_trains_in_sums_alone_sends_no_changes() -> None:
    grid = InProcessGrid(client_app(Adds, secure=True), 2)
    with pytest.raises(TooFewReplies):
        Ditto(transport="float16").start(grid, model(), num_rounds=1)


# Which arrays travel -----------------------------------------------------------------------------


@pytest.mark.parametrize("enforced", [False, True])
def test_only_what_is_shared_travels(enforced: bool) -> None:
    app = client_app(Adds, share=["body.*"], names=[*model()]) if enforced else client_app(Adds)
    grid = CountingGrid(app, 2)
    strategy = PersonalizedFedAvg(share=["body.*"])
    result = strategy.start(grid, model(), num_rounds=2).arrays.to_numpy_ndarrays()
    assert grid.down == grid.up == 4 * 600
    assert result[0].mean() > 1
    assert [array.tolist() for array in result[3:]] == [3, [True, False]]


def test_a_client_sends_nothing_but_what_it_shares_whatever_the_server_asks() -> None:
    grid = InProcessGrid(client_app(Adds, share=["body.*"], names=[*model()]), 2)
    result = Ditto(fraction_evaluate=0.0)
    with pytest.raises(ValueError, match="Ditto"):
        result.start(grid, model(), num_rounds=1)
    strategy = PersonalizedFedAvg(["norm.*"], fraction_evaluate=0.0)
    arrays = strategy.start(grid, model(), num_rounds=2).arrays.to_numpy_ndarrays()
    assert arrays[2].mean() == 1.0  # the server's own value is what came back of the head
    assert arrays[0].mean() > 1


def test_share_is_checked() -> None:
    with pytest.raises(ValueError, match="share"):
        PersonalizedFedAvg(["head.*"], share=["body.*"])
    with pytest.raises(ValueError, match="share"):
        client_app(Adds, private=["head.*"], share=["body.*"])
    with pytest.raises(ValueError, match="share"):
        keep_private("head.*", share=["body.*"])
    with pytest.raises(ValueError, match="share"):
        PersonalizedFedAvg()
    strategy = PersonalizedFedAvg(share=["lora.*"])
    with pytest.raises(ValueError, match="share"):
        strategy.start(InProcessGrid(client_app(Adds), 2), model(), num_rounds=1)
    with pytest.raises(ValueError, match="alternate"):
        PersonalizedFedAvg(share="*", alternate=True)
