"""``PerMA(secure=True)`` on a real SuperLink; attacks are in ``tests/attacks/test_secure.py``."""

from __future__ import annotations

from inspect import getsource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context
from flwr.client import NumPyClient

from benchmarks._deployment import Deployment
from flwr_perdl.clients import client_app
from flwr_perdl.dictionary import reconstruct, sparse_code
from flwr_perdl.simulations import InProcessGrid
from tests.attacks.test_secure import arrays_in_memory

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
