"""Averaging with compressed messages: the compressors, where nodes end, and what is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from flwr_perdl.clients import client_app
from flwr_perdl.core.npy import pack
from flwr_perdl.network import (
    Faults,
    InMemoryNetwork,
    RandomQuantization,
    Schedule,
    TopK,
    diffusion_averaging,
)
from flwr_perdl.network.messages import MessageStore
from flwr_perdl.network.topology import CombinationMatrix, Topology, metropolis_weights
from flwr_perdl.random import spawn
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import DiffusionAveraging
from tests.grids import partition_of
from tests.network.programs import Quadratic

Array = NDArray[Any]

N, SIZE = 6, 8
RING = Topology.ring(N)
CURVATURE = np.stack([spawn(1, k).uniform(0.3, 1, SIZE) for k in range(N)])
TARGET = np.stack([spawn(2, k).standard_normal(SIZE) + k for k in range(N)])
MINIMUM = (CURVATURE * TARGET).sum(axis=0) / CURVATURE.sum(axis=0)
TRACKED: dict[str, Any] = {"method": "gradient_tracking", "compression": TopK(0.25)}


class Client(Quadratic):
    def __init__(self, node: int) -> None:
        super().__init__(node, 0.3 * CURVATURE[node], TARGET)


def learn(rounds: int, network: Any = RING, dtype: type = float, **options: Any) -> Any:
    initial = [np.zeros(SIZE, dtype)]
    return diffusion_averaging(
        Client, network, rounds, initial=initial, evaluate_every=0, **options
    )


def on_flower(rounds: int, clients: Any = Client, **options: Any) -> Any:
    app = client_app(lambda context: clients(partition_of(context)))
    strategy = DiffusionAveraging(RING, evaluate_every=0, **options)
    strategy.start(InProcessGrid(app, N), ArrayRecord([np.zeros(SIZE)]), num_rounds=rounds)
    return strategy.averaged


def models_of(learned: Any) -> Array:
    return np.stack([w for (w,) in learned.models.values()])


# Compressors -------------------------------------------------------------------------------------


def test_top_k_by_hand() -> None:
    rng = np.random.default_rng(0)
    values, gaps = TopK(0.4).encode(np.array([1.0, -5.0, 0.0, 2.0, 3.0]), rng)
    assert (values.dtype, values.tolist()) == (np.float32, [-5.0, 3.0])
    assert (gaps.dtype, gaps.tolist()) == (np.uint8, [1, 2])
    assert TopK(0.4).decode((values, gaps), 5).tolist() == [0.0, -5.0, 0.0, 0.0, 3.0]


@pytest.mark.parametrize("at", [[0, 999], [254, 255], [255, 510], [256, 999], [998, 999]])
def test_positions_far_apart_take_a_byte_more_per_255(at: list[int]) -> None:
    vector = np.zeros(1000)
    vector[at] = 3.0, -4.0
    sent = TopK(0.002).encode(vector, np.random.default_rng(0))
    assert sent[1].nbytes == 2 + 998 // 255
    np.testing.assert_array_equal(TopK(0.002).decode(sent, 1000), vector)
    with pytest.raises(ValueError, match="positions"):
        TopK(0.002).decode(sent, at[1])


@pytest.mark.parametrize("bits", [4, 7, 8])
def test_quantization_is_unbiased_and_within_its_bound(bits: int) -> None:
    n, draws, compression = 70, 2000, RandomQuantization(bits)
    vector = np.concatenate([spawn(0).standard_normal(64), np.zeros(3), [1e-3, -2e-3, 3e-3]])
    rng = spawn(3)
    sent = [compression.encode(vector, rng) for _ in range(draws)]
    assert (sent[0][0].nbytes, sent[0][1].nbytes) == (8, -(-n * bits // 8))
    received = np.stack([compression.decode(each, n) for each in sent])
    unit = np.repeat([np.abs(vector[:64]).max(), 3e-3], [64, 6]) / (2 ** (bits - 1) - 1)
    assert (np.abs(received - vector) <= unit * (1 + 1e-6)).all()
    assert (np.abs(received.mean(axis=0) - vector) < 5 * unit / 2 / draws**0.5).all()
    error = ((received - vector) ** 2).sum(axis=1).mean()
    assert error <= (1 - compression.contraction) * (vector**2).sum()
    zeros = compression.decode(compression.encode(np.zeros(n), rng), n)
    assert zeros.tolist() == [0.0] * n


# Where the nodes end -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "compression"),
    [
        ("gradient_tracking", TopK(0.25)),
        ("gradient_tracking", RandomQuantization(4)),
        ("exact_diffusion", RandomQuantization(4)),
    ],
)
def test_corrected_methods_end_at_the_minimum(method: str, compression: Any) -> None:
    learned = learn(350, method=method, compression=compression)
    np.testing.assert_allclose(models_of(learned), np.tile(MINIMUM, (N, 1)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("compression", [TopK(0.25), RandomQuantization(4)])
@pytest.mark.parametrize("method", ["atc", "cta"])
def test_the_others_end_where_they_do_with_weights_moved_by_the_step(
    method: str, compression: Any
) -> None:
    step = 2 * compression.contraction / (1 + compression.contraction)
    moved = (1 - step) * np.eye(N) + step * metropolis_weights(RING).matrix.toarray()
    expected = learn(150, CombinationMatrix(moved, RING), method=method)
    learned = learn(150, method=method, compression=compression)
    np.testing.assert_allclose(models_of(learned), models_of(expected), atol=1e-6)


# What is sent ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("compression", "floats", "n_bytes"),
    [
        (None, 2 * SIZE, None),
        # Values in float32, and bytes, of which eight count as a value.
        (TopK(0.25), 2 * (2 + 2 / 8), 2 * (2 * 4 + 2)),
        (RandomQuantization(8), 2 * (1 + SIZE / 8), 2 * (4 + SIZE)),
    ],
)
def test_floats_and_bytes_are_counted(
    compression: Any, floats: float, n_bytes: int | None, dtype: Any
) -> None:
    learned = learn(3, dtype=dtype, method="gradient_tracking", compression=compression)
    each = floats * dtype().itemsize if n_bytes is None else n_bytes
    assert (learned.floats_sent, learned.bytes_sent) == (3 * 2 * N * floats, 3 * 2 * N * each)
    assert (learned.curves["floats-received"] == 2 * floats).all()
    assert (learned.curves["bytes-received"] == 2 * each).all()


def test_a_message_that_is_lost_is_warned_of() -> None:
    class Fails(Client):
        def fit(self, parameters: list[Array], config: Any) -> Any:
            if config["server-round"] == 2 and (self.target == TARGET[1]).all():
                raise RuntimeError("out of memory")
            return super().fit(parameters, config)

    with pytest.warns(RuntimeWarning, match="compression"):
        on_flower(4, Fails, **TRACKED)


@pytest.mark.parametrize("compression", [TopK(0.25), RandomQuantization(4)])
@pytest.mark.parametrize("odd", ["no bytes", "other bytes"])
def test_a_message_that_cannot_be_read_is_left_out_and_counted(
    compression: Any, odd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = pack(b"\xf0" * (7 if compression.unbiased else 2))  # too many, or far positions
    if odd == "no bytes":
        codes = np.full(2, 0.25)
    put = MessageStore.put

    def tampered(store: Any, round_: int, sender: int, floats: float, arrays: Any) -> None:
        if sender == 2:
            arrays = {to: [own[0], codes[None]] for to, own in arrays.items()}
        put(store, round_, sender, floats, arrays)

    monkeypatch.setattr(MessageStore, "put", tampered)
    with pytest.warns(RuntimeWarning, match="compression"):
        learned = on_flower(3, method="atc", compression=compression)
    assert learned.dropped_messages == {2: 3}


# What is rejected --------------------------------------------------------------------------------

TWO = Schedule.of(metropolis_weights(RING), metropolis_weights(Topology.exponential(N)))


@pytest.mark.parametrize(
    "network", [TWO, InMemoryNetwork(RING, faults=Faults(drop=0.1))], ids=["changing", "faults"]
)
def test_public_copies_need_one_network_without_faults(network: Any) -> None:
    with pytest.raises(ValueError, match=r"^network"):
        learn(3, network, **TRACKED)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"method": "exact_diffusion", "compression": TopK(0.1)}, "compression"),
        ({"method": "push_sum", "compression": TopK(0.1)}, "compression"),
        ({"robust": "clip", "compression": TopK(0.1)}, "robust"),
        ({"method": "atc", "compression": "top-k"}, "compression"),
        ({"method": "atc", "compression": TopK}, "compression"),
    ],
)
def test_options_that_exclude_each_other(options: dict[str, Any], name: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{name} "):
        learn(1, **options)


def test_a_compression_that_keeps_nothing_is_rejected_before_any_fit() -> None:
    class Never(Client):
        def fit(self, parameters: list[Array], config: Any) -> Any:
            raise AssertionError

    with pytest.raises(ValueError, match=r"^compression"):
        diffusion_averaging(
            Never, RING, 1, initial=[np.zeros(SIZE)], method="atc", compression=TopK(0.05)
        )
