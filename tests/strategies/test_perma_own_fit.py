"""PerMA with any client: nothing but its own ``fit`` and ``evaluate``, as for FedAvg."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from flwr_perdl.clients import client_app
from flwr_perdl.dictionary import OrthogonalLearner, dictionary_distance, warm_start
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import PerMA, ServerSettings
from tests.grids import as_app, partition_of

N_ATOMS, N_GLOBAL, CLIENTS = 12, 3, 4
LEARNER = OrthogonalLearner(N_ATOMS)
BASIS = np.linalg.qr(np.random.default_rng(0).standard_normal((N_ATOMS, N_ATOMS)))[0]
SHARED, OTHERS = BASIS[:N_GLOBAL], BASIS[N_GLOBAL:]


def samples(partition: int) -> Any:
    rng = np.random.default_rng(partition + 1)
    own = np.linalg.qr(rng.standard_normal((len(OTHERS), len(OTHERS))))[0] @ OTHERS
    used = rng.choice([-1, 0, 1], (150, N_ATOMS), p=[0.1, 0.8, 0.1])
    return (used * rng.uniform(1, 2, used.shape)) @ np.vstack([SHARED, own])


def train(X: Any, partition: int, parameters: list[Any]) -> Any:
    if not parameters:
        return warm_start(X, LEARNER, rng=np.random.default_rng(partition)).dictionary
    return LEARNER.step(X, parameters[0])


def error(X: Any, D: Any) -> float:
    return float(np.mean((X - LEARNER.code(X, D) @ D) ** 2))


class Ordinary(NumPyClient):
    """A dictionary client as for FedAvg; its atoms have the norm 2, in another order each time."""

    def __init__(self, context: Context) -> None:
        self.partition = partition_of(context)
        self.X = samples(self.partition)

    def fit(self, parameters: Any, config: Any) -> Any:
        assert "perdl.step" not in config
        return [2 * train(self.X, self.partition, parameters)[::-1]], len(self.X), {}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        (D,) = parameters
        return error(self.X, D), len(self.X), {"atoms": len(D)}


def messages() -> ClientApp:
    """The same as an app of Flower's quickstart."""
    return as_app(Ordinary)


@pytest.mark.parametrize("app", [Ordinary, messages()], ids=["NumPyClient", "ClientApp"])
@pytest.mark.parametrize(
    "options", [{}, {"secure": True}, {"aggregation": "median", "local_steps": 2}]
)
def test_any_client_learns_the_shared_atoms_and_keeps_its_own(
    app: Any, options: dict[str, Any]
) -> None:
    grid = InProcessGrid(client_app(app), CLIENTS)
    strategy = PerMA(N_GLOBAL, **{"aggregation": "mean", **options})
    result = strategy.start(grid, num_rounds=4)
    (atoms,) = result.arrays.to_numpy_ndarrays()
    assert dictionary_distance(SHARED, atoms) < 1e-6
    measured = result.evaluate_metrics_clientapp[4]
    assert measured["atoms"] == N_ATOMS, "a client evaluates the global atoms and its own"
    assert float(measured["loss"]) < 1e-10
    sent = [report.floats_up for report in strategy.history if report.step != "evaluate"]
    assert sent == [N_ATOMS * N_ATOMS, *[N_GLOBAL * N_ATOMS] * 3]
    for partition, own in enumerate(grid.local_atoms()):
        assert own.shape == (N_ATOMS - N_GLOBAL, N_ATOMS)
        assert np.abs(own @ SHARED.T).max() < 1e-6, partition


def test_a_client_that_was_not_there_at_the_start_makes_its_own_atoms_anew() -> None:
    strategy = PerMA(N_GLOBAL, aggregation="mean")
    grid = InProcessGrid(client_app(Ordinary), CLIENTS)
    strategy.start(grid, ArrayRecord([SHARED]), num_rounds=2)
    anew = [r.aggregate["anew"] for r in strategy.history if r.step != "evaluate"]
    assert anew == [CLIENTS, 0]
    assert all(len(own) == N_ATOMS - N_GLOBAL for own in grid.local_atoms())


@pytest.mark.parametrize("app", [Ordinary, messages()], ids=["NumPyClient", "ClientApp"])
def test_numbers_of_shared_atoms_are_measured_by_the_clients_own_evaluate(app: Any) -> None:
    strategy = PerMA("auto", aggregation="mean")
    grid = InProcessGrid(client_app(app), CLIENTS)
    (atoms,) = strategy.start(grid, num_rounds=4).arrays.to_numpy_ndarrays()
    assert dictionary_distance(SHARED, atoms) < 1e-6
    tried = next(r for r in reversed(strategy.history) if r.step == "choose").aggregate
    assert tried["mse_held_out_3"] < 1e-10 < tried["mse_held_out_12"]


def test_local_atoms_survive_on_disk_and_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    def learn(rounds: int, own: dict[str, Any], **options: Any) -> Any:
        grid = InProcessGrid(client_app(Ordinary), CLIENTS, node_config=lambda partition: own)
        strategy = PerMA(N_GLOBAL, aggregation="mean", **options)
        return strategy.start(grid, num_rounds=rounds).arrays.to_numpy_ndarrays()[0]

    disk, kept = {"state-dir": str(tmp_path / "state")}, {"checkpoint_dir": tmp_path / "run"}
    learn(2, disk, **kept)
    again = learn(4, disk, server=ServerSettings(resume=True), **kept)
    np.testing.assert_array_equal(again, learn(4, {}))
