"""What docs/from-fedavg.md says of combinations that fail; test_wheel.py runs its blocks."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.client import NumPyClient
from flwr.client.mod import LocalDpMod as OlderLocalDpMod
from flwr.client.mod import fixedclipping_mod, secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from flwr.server.strategy import FedAvg as OlderFedAvg
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg

from flwr_perdl.clients import DictionaryClient, DiffusionClient, RegressionClient, client_app
from flwr_perdl.dictionary import OrthogonalLearner
from flwr_perdl.network import Averaging
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import (
    ClusteredFedAvg,
    FedX,
    PerMA,
    PersonalizedFedAvg,
    ServerOptions,
    ServerSettings,
    TooFewReplies,
)
from tests.grids import Tapped, as_app, partition_of

MODEL, ATOMS = ArrayRecord([np.zeros(3)]), ArrayRecord([np.eye(2, 6)])


class MeanClient(NumPyClient):
    def __init__(self, context: Context) -> None:
        self.X = np.random.default_rng(partition_of(context)).random((20, 3))

    def fit(self, parameters: Any, config: Any) -> Any:
        mean = self.X.mean(axis=0)
        return [mean + i + 0 * array for i, array in enumerate(parameters)], len(self.X), {}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        return float(np.mean((self.X - parameters[0]) ** 2)), len(self.X), {}


def make_dictionary_client(context: Context) -> DictionaryClient:
    rng = np.random.default_rng(partition_of(context))
    return DictionaryClient(rng.standard_normal((30, 6)), OrthogonalLearner(4), context)


MEANS, DICTIONARIES = client_app(MeanClient), client_app(make_dictionary_client)
REGRESSIONS = client_app(lambda context: RegressionClient(np.eye(4), np.ones(4), context))
GOSSIP = Averaging(np.zeros((3, 1)))
DIFFUSIONS = client_app(lambda context: DiffusionClient(GOSSIP, context))
WITH_NOISE = [LocalDpMod(1.0, 1.0, 1.0, 1e-3)]
TWO = ArrayRecord([np.zeros(3), np.zeros(3)])
#: As Flower's app with XGBoost begins and goes on.
TREES = ArrayRecord([np.frombuffer(b"{}", np.uint8)])
OLDER_MODS = [
    (secaggplus_mod, "secaggplus_mod"),
    (fixedclipping_mod, "fixedclipping_mod"),
    (OlderLocalDpMod(1.0, 1.0, 1.0, 1e-3), "LocalDpMod"),
]


def own_app(mod: Any) -> ClientApp:
    """Return an app whose training handler has a mod, where nobody sees it before it is called."""
    app, handlers = ClientApp(), as_app(MeanClient)
    app.train(mods=[mod])(handlers)
    app.evaluate()(handlers)
    return client_app(app)


class Reads(MeanClient):
    """Reads what Flower's simulation gives to a node, and a SuperNode has not."""

    def __init__(self, context: Context) -> None:
        del context.node_config["num-partitions"]
        self.n_clients = context.node_config["num-partitions"]


class Forgets(MeanClient):
    """Returns no loss."""

    def evaluate(self, parameters: Any, config: Any) -> Any:
        return float("nan"), 1, {}


def run(strategy: Any, app: ClientApp, model: ArrayRecord | None = None) -> Any:
    return strategy.start(InProcessGrid(app, 3), model, num_rounds=4)


@pytest.mark.parametrize(
    ("combine", "error", "said"),
    [
        (lambda: run(ClusteredFedAvg(1), DICTIONARIES, ATOMS), TooFewReplies, "perdl.protocol"),
        (lambda: run(PerMA(2), MEANS), TooFewReplies, "DictionaryClient"),
        (lambda: run(PerMA(2), client_app(as_app(MeanClient))), TooFewReplies, "DictionaryClient"),
        (lambda: run(FedX(2), MEANS), TooFewReplies, "RegressionClient"),
        (lambda: run(ClusteredFedAvg(2), ClientApp(), MODEL), TooFewReplies, "client_app"),
        (
            lambda: client_app(ClientApp(client_fn=lambda c: MeanClient(c).to_client())),
            TypeError,
            "make_client",
        ),
        (
            lambda: run(PerMA(2), client_app(make_dictionary_client, train_mods=WITH_NOISE)),
            TooFewReplies,
            "LocalDpMod",
        ),
        *(
            (partial(client_app, MeanClient, train_mods=[mod]), ValueError, name)
            for mod, name in OLDER_MODS
        ),
        *(
            (lambda mod=mod: run(PersonalizedFedAvg(["0"]), own_app(mod), TWO), TooFewReplies, said)
            for mod, _ in OLDER_MODS
            for said in ["flwr.clientapp.mod"]
        ),
        (
            lambda: client_app(ClientApp(mods=[fixedclipping_mod])),
            ValueError,
            "fixedclipping_mod",
        ),
        (
            lambda: run(PersonalizedFedAvg(["0"]), client_app(Reads), TWO),
            TooFewReplies,
            "num-partitions",
        ),
        (lambda: run(ClusteredFedAvg(2), client_app(Forgets), MODEL), TooFewReplies, "loss"),
        (
            lambda: ClusteredFedAvg(1).start(
                InProcessGrid(MEANS, 3), MODEL, evaluate_fn=lambda *_: (1.0, {})
            ),
            TypeError,
            "evaluate_fn",
        ),
        (lambda: run(ClusteredFedAvg(1), MEANS, TREES), ValueError, "initial_arrays"),
        (
            lambda: run(
                DifferentialPrivacyServerSideFixedClipping(PersonalizedFedAvg(["0"]), 0.1, 1.0, 3),
                MEANS,
                ArrayRecord([np.zeros(3), np.zeros(3)]),
            ),
            ValueError,
            "DifferentialPrivacy",
        ),
    ],
)
def test_what_fails_says_why(combine: Callable[[], Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=re.escape(said)):
        combine()


@pytest.mark.parametrize("theirs", [FedAvg, OlderFedAvg])
def test_every_option_of_fedavg_has_its_place_named(theirs: Any) -> None:
    for name in set(signature(theirs).parameters) - set(ServerOptions.__annotations__):
        with pytest.raises(TypeError, match=f"'{name}'") as error:
            PerMA(2, **{name: 3})
        assert "It takes" not in str(error.value)  # a list of all options names no place


def test_options_are_the_settings_with_those_given_to_the_strategy() -> None:
    settings = ServerSettings(evaluate_every=5)
    options = PerMA(2, seed=np.int64(3), server=settings).options
    assert (options.evaluate_every, options.seed, options.min_clients) == (5, 3, 2)
    assert type(options.seed) is int
    assert settings.seed == 0  # which another strategy may be given, too
    with pytest.raises(TypeError, match="seed"):
        ServerSettings(**{"seed": 3})


def test_an_option_of_ones_own_may_have_fedavgs_name() -> None:
    class Own(ClusteredFedAvg):
        def __init__(self, k: int, evaluate_fn: Any, **options: Any) -> None:
            super().__init__(k, **options)
            self.measure = evaluate_fn

    assert Own(2, evaluate_fn=len, num_clients=3).measure is len


@pytest.mark.parametrize("app", [DICTIONARIES, REGRESSIONS, DIFFUSIONS])
def test_fedavg_is_refused_with_a_sentence_by_a_client_of_another_protocol(app: ClientApp) -> None:
    grid = Tapped(app, 3)
    result = FedAvg(fraction_evaluate=0.0).start(grid, ATOMS, num_rounds=1)
    assert len(result.arrays) == 0
    assert result.train_metrics_clientapp == {}
    assert len(grid.errors) == 3
    sentence = "the strategies that this client is made for send it, Flower's own, such as FedAvg,"
    assert all(sentence in reason for reason in grid.errors)


@pytest.mark.parametrize(
    ("base", "options"), [(FedAvg, {}), (ClusteredFedAvg, {"k": 2}), (ClusteredFedAvg, {"k": 1})]
)
def test_an_override_of_configure_train_changes_the_config_by_round(
    base: Any, options: Any
) -> None:
    seen = []

    class Client(MeanClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            seen.append(config["lr"])
            return super().fit(parameters, config)

    class Halving(base):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            config["lr"] /= 2
            return super().configure_train(server_round, arrays, config, grid)

    grid = InProcessGrid(client_app(Client), 3)
    Halving(**options).start(grid, MODEL, 3, train_config=ConfigRecord({"lr": 1.0}))
    assert sorted(seen, reverse=True) == [0.5] * 3 + [0.25] * 3 + [0.125] * 3
