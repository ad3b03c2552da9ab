"""What docs/from-fedavg.md says of combinations that fail; test_wheel.py runs its blocks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg

from flwr_perdl.clients import DictionaryClient, client_app
from flwr_perdl.dictionary import OrthogonalLearner
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import ClusteredFedAvg, FedX, PerMA, TooFewReplies

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "from-fedavg.md").read_text()
MODEL, ATOMS = ArrayRecord([np.zeros(3)]), ArrayRecord([np.eye(2, 6)])


class MeanClient(NumPyClient):
    def __init__(self, context: Context) -> None:
        self.X = np.random.default_rng(int(context.node_config["partition-id"])).random((20, 3))

    def fit(self, parameters: Any, config: Any) -> Any:
        return [self.X.mean(axis=0) + 0 * parameters[0]], len(self.X), {}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        return float(np.mean((self.X - parameters[0]) ** 2)), len(self.X), {}


def make_dictionary_client(context: Context) -> DictionaryClient:
    rng = np.random.default_rng(int(context.node_config["partition-id"]))
    return DictionaryClient(rng.standard_normal((30, 6)), OrthogonalLearner(4), context)


MEANS, DICTIONARIES = client_app(MeanClient), client_app(make_dictionary_client)
WITH_NOISE = [LocalDpMod(1.0, 1.0, 1.0, 1e-3)]


def run(strategy: Any, app: ClientApp, model: ArrayRecord | None = None) -> Any:
    return strategy.start(InProcessGrid(app, 3), model, num_rounds=2)


@pytest.mark.parametrize(
    ("combine", "error", "said"),
    [
        (
            lambda: PerMA(2, **{"min_available_nodes": 3}),
            TypeError,
            "PerMA has no option 'min_available_nodes': It takes n_global, ",
        ),
        (lambda: run(ClusteredFedAvg(1), DICTIONARIES, ATOMS), TooFewReplies, "must have 'perdl."),
        (lambda: run(PerMA(2), MEANS), TooFewReplies, "IndexError"),
        (lambda: run(FedX(2), MEANS), TooFewReplies, "IndexError"),
        (
            lambda: run(ClusteredFedAvg(2), ClientApp(), MODEL),
            TooFewReplies,
            "make the ClientApp with flwr_perdl.clients.client_app, which says who a client is",
        ),
        (
            lambda: client_app(ClientApp(client_fn=lambda c: MeanClient(c).to_client())),
            TypeError,
            "factory must be the client_fn itself",
        ),
        (
            lambda: run(ClusteredFedAvg(2), MEANS),
            ValueError,
            "initial_arrays must be the arrays of a model, got none.",
        ),
        (lambda: run(PerMA(2, num_clients=4), DICTIONARIES), TooFewReplies, "3 client(s) regis"),
        (
            lambda: run(PerMA(2), client_app(make_dictionary_client, train_mods=WITH_NOISE)),
            TooFewReplies,
            "LocalDpMod expects the keys",
        ),
        (
            lambda: run(
                DifferentialPrivacyServerSideFixedClipping(PerMA(2), 0.1, 1.0, 3),
                DICTIONARIES,
                ATOMS,
            ),
            ValueError,
            "Flower's DifferentialPrivacy wrappers",
        ),
    ],
)
def test_what_fails_says_why(combine: Callable[[], Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=re.escape(said)):
        combine()


def test_fedavg_learns_nothing_from_a_client_of_another_protocol() -> None:
    result = run(FedAvg(), DICTIONARIES, ATOMS)
    assert len(result.arrays) == 0
    assert result.train_metrics_clientapp == {}


def test_noise_at_the_client_goes_with_clusters() -> None:
    result = run(ClusteredFedAvg(1), client_app(MeanClient, train_mods=WITH_NOISE), MODEL)
    assert result.evaluate_metrics_clientapp[2]["clients"] == 3


@pytest.mark.parametrize(
    "quoted",
    [
        "make the ClientApp with flwr_perdl.clients.client_app, which says who a client is",
        "initial_arrays must be the arrays of a model, got none.",
        "PerMA has no option 'min_available_nodes': It takes n_global, ",
    ],
)
def test_the_page_quotes_what_is_said(quoted: str) -> None:
    assert quoted in PAGE
