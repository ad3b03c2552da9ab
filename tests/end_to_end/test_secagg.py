"""SecAgg+ through Flower's legacy workflow: the server learns the mean, and no client's update."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.client import ClientApp
from flwr.client.mod import secaggplus_mod
from flwr.server import LegacyContext, ServerConfig
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow

from flwr_perdl.dictionary import dictionary_distance
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import PerMA, as_legacy

MakeFederation = Callable[..., Any]

ROUNDS = 3


class Tap(InProcessGrid):
    """A grid that keeps what clients reply, by the protocol's stage."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.masked: list[np.ndarray] = []
        self.shown = 0

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        replies = list(super().send_and_receive(messages, timeout=timeout))
        for reply in replies:
            if reply.has_error() or reply.metadata.message_type != "train":
                continue
            self.shown += sum(len(record) for record in reply.content.array_records.values())
            for config in reply.content.config_records.values():
                if "masked_params" in config:
                    _, masked = (np.load(BytesIO(part)) for part in config["masked_params"])
                    self.masked.append(masked)
        return replies


def stage(message: Message) -> str:
    """Return which step of the secure aggregation a message asks for."""
    configs = message.content.config_records.values()
    return str(next((c["stage"] for c in configs if "stage" in c), ""))


def secure(planted: Any, start: np.ndarray, **options: Any) -> tuple[np.ndarray, Tap, PerMA]:
    """Run PerMA from given atoms with SecAgg+ in every round."""
    app = ClientApp(
        client_fn=lambda context: planted.make_client(context).to_client(), mods=[secaggplus_mod]
    )
    n_clients = len(planted.planted.samples)
    grid = Tap(app, n_clients, **options)
    strategy = PerMA(3, aggregation="mean", num_clients=n_clients, fraction_evaluate=0.0)
    server = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={})
    found: list[np.ndarray] = []

    def evaluate(round_: int, arrays: list[np.ndarray]) -> None:
        found.append(arrays[0])

    legacy = LegacyContext(
        context=server,
        config=ServerConfig(num_rounds=ROUNDS),
        strategy=as_legacy(strategy, initial=[start], evaluate_fn=evaluate),
    )
    DefaultWorkflow(fit_workflow=SecAggPlusWorkflow(1.0, 0.5))(grid, legacy)
    return found[-1], grid, strategy


@pytest.fixture
def nearby(federation: MakeFederation) -> tuple[Any, np.ndarray]:
    """A federation, and atoms near its global ones."""
    planted = federation(5, noise=0.05)
    atoms = planted.planted.global_atoms
    return planted, atoms + 0.1 * np.random.default_rng(1).standard_normal(atoms.shape)


def test_the_mean_is_that_of_a_run_without_masks(nearby: tuple[Any, np.ndarray]) -> None:
    planted, start = nearby
    found, grid, strategy = secure(planted, start)
    assert grid.shown == 0, "updates left a client in the clear"
    plain = _plain(planted, start)
    np.testing.assert_allclose(found, plain, atol=1e-4)  # it counts in 2**22 steps
    assert dictionary_distance(found, planted.planted.global_atoms) < 0.02
    assert [len(report.metrics) for report in strategy.history] == [5] * ROUNDS


def test_a_masked_update_is_noise(nearby: tuple[Any, np.ndarray]) -> None:
    """Over their whole range, and others in every run: the same update, the same result."""
    planted, start = nearby
    (first, one, _), (second, other, _) = (secure(planted, start) for _ in range(2))
    np.testing.assert_allclose(first, second, atol=1e-4)  # it rounds at random
    drawn = np.stack([*one.masked, *other.masked]) / 2.0**32
    assert len(drawn) == 2 * ROUNDS * 5
    assert drawn.min() < 0.02
    assert drawn.max() > 0.98
    # Uniform: mean 1/2, standard error 0.29 / sqrt(number).
    assert abs(drawn.mean() - 0.5) < 5 * 0.29 / np.sqrt(drawn.size)


def test_a_client_that_dies_in_the_middle_is_left_out(nearby: tuple[Any, np.ndarray]) -> None:
    planted, start = nearby

    def faults(partition: int, message: Message) -> str | None:
        return "error" if partition == 4 and stage(message) == "collect_masked_vectors" else None

    found, _, strategy = secure(planted, start, faults=faults)
    four = planted._replace(planted=planted.planted._replace(samples=planted.planted.samples[:4]))
    np.testing.assert_allclose(found, _plain(four, start), atol=1e-4)
    assert [list(report.dropped) for report in strategy.history] == [["client 4"]] * ROUNDS


def _plain(planted: Any, start: np.ndarray) -> np.ndarray:
    """Return what PerMA learns from the same atoms without secure aggregation."""
    strategy = PerMA(3, aggregation="mean", fraction_evaluate=0.0)
    result = strategy.start(planted.grid(), ArrayRecord([start]), num_rounds=ROUNDS)
    return result.arrays.to_numpy_ndarrays()[0]
