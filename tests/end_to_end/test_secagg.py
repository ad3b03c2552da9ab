"""SecAgg+: the server learns the mean, and no client's update.

On a real SuperLink with ``PerMA(secure=True)``, and through Flower's legacy workflow. Attacks are
in ``tests/attacks/test_secure.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from inspect import getsource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.client import ClientApp, NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.server import LegacyContext, ServerConfig
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow

from flwr_perdl.clients import RegressionClient, client_app
from flwr_perdl.dictionary import dictionary_distance, reconstruct, sparse_code
from flwr_perdl.regression import Refinement
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import FedX, PerMA, ProtocolStrategy, TooFewReplies, as_legacy
from perdl_experiments.deployment import Deployment
from perdl_experiments.mixed_regression_data import mixed_regression
from tests.attacks.test_secure import arrays_in_memory
from tests.grids import Tapped, stage

MakeFederation = Callable[..., Any]

ROUNDS = 3
#: Flower rounds replies to a few digits before it adds them up: noise to the acceleration.
STEP = Refinement(step_size=0.1, n_steps=5, momentum=False)


def aggregate(
    make_client: Callable[[Context], NumPyClient],
    n_clients: int,
    strategy: ProtocolStrategy,
    start: np.ndarray,
    rounds: int = ROUNDS,
    **options: Any,
) -> tuple[np.ndarray, Tapped]:
    """Run a strategy from a given model with SecAgg+ in every round."""
    app = ClientApp(
        client_fn=lambda context: make_client(context).to_client(), mods=[secaggplus_mod]
    )
    grid = Tapped(app, n_clients, **options)
    server = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={})
    found: list[np.ndarray] = []

    def evaluate(round_: int, arrays: list[np.ndarray], config: Any) -> None:
        found.append(arrays[0])

    legacy = LegacyContext(
        context=server,
        config=ServerConfig(num_rounds=rounds),
        strategy=as_legacy(strategy, initial=[start], evaluate_fn=evaluate),
    )
    DefaultWorkflow(fit_workflow=SecAggPlusWorkflow(1.0, 0.5))(grid, legacy)
    return found[-1], grid


def secure(planted: Any, start: np.ndarray, **options: Any) -> tuple[np.ndarray, Tapped, PerMA]:
    """Run PerMA from given atoms."""
    n_clients = len(planted.planted.samples)
    strategy = PerMA(3, aggregation="mean", num_clients=n_clients, fraction_evaluate=0.0)
    found, grid = aggregate(planted.make_client, n_clients, strategy, start, **options)
    return found, grid, strategy


@pytest.fixture
def nearby(federation: MakeFederation) -> tuple[Any, np.ndarray]:
    """A federation, and atoms near its global ones."""
    planted = federation(5, noise=0.05)
    atoms = planted.planted.global_atoms
    return planted, atoms + 0.1 * np.random.default_rng(1).standard_normal(atoms.shape)


@pytest.mark.parametrize(("rounds", "atol"), [(1, 1e-4), (ROUNDS, 1e-2)])
def test_the_mean_is_that_of_a_run_without_masks(
    nearby: tuple[Any, np.ndarray], rounds: int, atol: float
) -> None:
    """It counts in 2**22 steps, and rounds at random; a threshold may then fall the other way."""
    planted, start = nearby
    found, grid, strategy = secure(planted, start, rounds=rounds)
    assert grid.shown == 0, "updates left a client in the clear"
    np.testing.assert_allclose(found, _plain(planted, start, rounds), atol=atol)
    assert dictionary_distance(found, start) > 0.1
    assert [len(report.metrics) for report in strategy.history] == [5] * rounds


def test_a_client_that_dies_in_the_middle_is_left_out(nearby: tuple[Any, np.ndarray]) -> None:
    planted, start = nearby

    def faults(partition: int, message: Message) -> str | None:
        return "error" if partition == 4 and stage(message) == "collect_masked_vectors" else None

    found, _, strategy = secure(planted, start, faults=faults)
    four = planted._replace(planted=planted.planted._replace(samples=planted.planted.samples[:4]))
    np.testing.assert_allclose(found, _plain(four, start, ROUNDS), atol=1e-2)
    assert [list(report.dropped) for report in strategy.history] == [["client 4"]] * ROUNDS


def regression(n_models: int) -> tuple[Callable[[Context], NumPyClient], np.ndarray]:
    """Return the clients of a mixed regression, and its models."""
    shares = np.full(n_models, 1 / n_models)
    data = mixed_regression(np.array([40] * 5), shares, np.random.default_rng(0), d=4)

    def make_client(context: Context) -> NumPyClient:
        i = int(context.node_config["partition-id"])
        return RegressionClient(data.X[i], data.y[i], context)

    return make_client, data.theta


def test_fedavg_takes_a_mean() -> None:
    make_client, truth = regression(1)
    options: dict[str, Any] = {"num_clients": 5, "fraction_evaluate": 0.0}
    start = np.zeros_like(truth)
    found, grid = aggregate(make_client, 5, FedX(1, phase_2=STEP, **options), start)
    plain = FedX(1, phase_2=STEP, **options).start(
        InProcessGrid(client_app(make_client), 5), ArrayRecord([start]), num_rounds=ROUNDS
    )
    np.testing.assert_allclose(found, plain.arrays.to_numpy_ndarrays()[0], atol=3e-4)
    assert grid.shown == 0
    assert np.abs(found - truth).max() < np.abs(truth).max() / 2


def test_a_mean_of_cluster_names_is_refused(warned: Any) -> None:
    make_client, truth = regression(2)
    options: dict[str, Any] = {"num_clients": 5, "fraction_evaluate": 0.0}
    with pytest.raises(TooFewReplies):
        aggregate(make_client, 5, FedX(2, phase_2=replace(STEP, check_every=0), **options), truth)
    assert "cluster 0." in warned.text


def _plain(planted: Any, start: np.ndarray, rounds: int) -> np.ndarray:
    """Return what PerMA learns from the same atoms without secure aggregation."""
    strategy = PerMA(3, aggregation="mean", fraction_evaluate=0.0)
    result = strategy.start(planted.grid(), ArrayRecord([start]), num_rounds=rounds)
    return result.arrays.to_numpy_ndarrays()[0]


DIGITS = """\
import gc
import sys
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from sklearn.datasets import load_digits

from flwr_perdl.clients import DictionaryClient, client_app
from flwr_perdl.core.npy import view_file
from flwr_perdl.dictionary import OrthogonalLearner
from flwr_perdl.privacy import Noise
from flwr_perdl.strategies import PerMA

X, y = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(X))
X, y = X[order] / 16, y[order]
held_out, X, y = X[:300], X[300:], y[300:]
START = np.linalg.svd(X, full_matrices=False)[2][:16]
NOISED = {"privacy": Noise(epsilon=1000.0), "min_clients": 3}
OPTIONS = {"secure": {"secure": True}, "noised": NOISED}


def make_client(context):
    k = int(context.node_config["partition-id"])
    own = X[np.concatenate([np.flatnonzero(y == k)[:108], np.arange(12 * k, 12 * k + 12)])]
    return DictionaryClient(own, OrthogonalLearner(24), context)


def learn(grid, **options):
    strategy = PerMA(16, num_clients=4, fraction_evaluate=0.0, **options)
    result = strategy.start(grid, ArrayRecord([START]), num_rounds=1)
    return result.arrays.to_numpy_ndarrays()[0], strategy.history


client = client_app(make_client, secure=True)
server = ServerApp()


@server.main()
def main(grid, context):
    seen, ask = [], grid.send_and_receive

    def watched(*args, **options):
        replies = list(ask(*args, **options))
        seen.extend(
            np.array(one, float).ravel() for one in arrays_in_memory() if one.size == START.size
        )
        return replies

    gc.freeze()  # what is here before is not gone through again and again
    grid.send_and_receive = watched
    atoms, history = learn(grid, **OPTIONS[Path(context.run_config["out"]).stem])
    dropped = [len(one.dropped) for one in history]
    np.savez(context.run_config["out"], atoms=atoms, dropped=dropped, seen=np.unique(seen, axis=0))
"""


@pytest.mark.slow
@pytest.mark.deployment
def test_digits_on_a_superlink_cost_at_most_five_percent(tmp_path: Path) -> None:
    """And the server's memory holds no client's statistics of the first round, after any exchange.

    A secure run differs from one in process by the masks' random rounding alone.
    """
    code = f"{DIGITS}\n\n{getsource(arrays_in_memory)}".replace("Iterator[np.ndarray]", "object")
    code = code.replace("Any", "object")
    app: dict[str, Any] = {}
    exec(code, app)
    with Deployment(tmp_path / "deployment", 4, app=code) as deployment:
        for how in app["OPTIONS"]:
            deployment.run({"out": str(tmp_path / f"{how}.npz")}, timeout=500)

    def error(atoms: np.ndarray) -> float:
        codes = sparse_code(app["held_out"], atoms, n_nonzero=10)
        return float(np.mean((app["held_out"] - reconstruct(codes, atoms)) ** 2))

    def noting(context: Context) -> NumPyClient:
        made: NumPyClient = app["make_client"](context)
        fit = made.fit

        def noted(parameters: Any, config: Any) -> Any:
            fitted = fit(parameters, config)
            sent.extend(array.ravel() for array in fitted[0] if config["server-round"] == 1)
            return fitted

        made.__dict__["fit"] = noted
        return made

    plain, _ = app["learn"](InProcessGrid(client_app(app["make_client"]), 4))
    for how, options in app["OPTIONS"].items():
        sent: list[np.ndarray] = []
        local, _ = app["learn"](InProcessGrid(client_app(noting, secure=True), 4), **options)
        with np.load(tmp_path / f"{how}.npz") as deployed:
            atoms, dropped, seen = deployed["atoms"], deployed["dropped"], deployed["seen"]
        print(how, f"{error(atoms):.5f}, here {error(local):.5f}, clear {error(plain):.5f}")
        assert not dropped.any()
        assert error(atoms) < 1.05 * error(local)
        if how == "secure":
            assert error(atoms) < 1.05 * error(plain)
            np.testing.assert_allclose(atoms, local, atol=1e-2)
        assert len(sent) == 4
        assert len(seen) > 4, "arrays of that size are there: masked ones, and the sum"
        seen = seen - seen.mean(axis=1, keepdims=True)
        for own in sent:
            cosines = seen @ (own - own.mean()) / np.linalg.norm(own - own.mean())
            assert (cosines <= 0.9999 * np.linalg.norm(seen, axis=1)).all()
