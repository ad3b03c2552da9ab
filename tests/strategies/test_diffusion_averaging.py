"""DiffusionAveraging over apps that know nothing of it: bits, names, what stays, who is absent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context
from flwr.client import NumPyClient
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping
from numpy.testing import assert_array_equal as assert_same_bits
from numpy.typing import NDArray

from flwr_perdl.clients import client_app, keep_private
from flwr_perdl.network import (
    CombinationMatrix,
    InMemoryNetwork,
    RandomQuantization,
    Schedule,
    TopK,
    Topology,
    diffusion_averaging,
    metropolis_weights,
    push_weights,
)
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import DiffusionAveraging, ServerSettings, TooFewReplies
from tests.clients.test_keep_private import STEPS, assert_private_stays, make_app, model
from tests.grids import Forgetting, Tapped, arrays_in, as_app, partition_of
from tests.network.objectives import AVERAGING
from tests.network.programs import sleeping

N, FEATURES, ROUNDS = 5, 3, 6
NET = Topology.from_edges(5, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0), (1, 3)])
START = np.array([1.0, -2.0, 0.5])
PARTS = [f"w{i}" for i in range(FEATURES)]


class LeastSquares(NumPyClient):
    """A gradient step on its own samples; its evaluation shows the whole model."""

    def __init__(self, node: int) -> None:
        rng = np.random.default_rng(node)
        self.X, self.y = rng.standard_normal((9, FEATURES)), node + rng.standard_normal(9)

    def fit(self, parameters: list[NDArray[Any]], config: Any) -> Any:
        (w,) = parameters
        return (
            [w - 0.1 * self.X.T @ (self.X @ w - self.y) / 9],
            9,
            {"round": config["server-round"]},
        )

    def evaluate(self, parameters: list[NDArray[Any]], config: Any) -> Any:
        (w,) = parameters
        loss = float(np.mean((self.X @ w - self.y) ** 2))
        return (
            loss,
            9,
            {"round": config["server-round"], **dict(zip(PARTS, w.tolist(), strict=True))},
        )


def by_node(context: Context) -> LeastSquares:
    return LeastSquares(partition_of(context))


APP = client_app(by_node)
SHOWN: dict[str, Any] = {"metrics": ["round", *PARTS]}


def models_of(strategy: DiffusionAveraging) -> NDArray[np.floating]:
    """Return every node's model after every round: (rounds, nodes, features)."""
    return np.stack([strategy.averaged.curves[f"evaluate-{part}"] for part in PARTS], axis=-1)


def start(grid: InProcessGrid, n: int = ROUNDS, arrays: Any = None, **options: Any) -> Any:
    strategy = DiffusionAveraging(options.pop("topology", NET), **{**SHOWN, **options})
    given = ArrayRecord([START]) if arrays is None else arrays
    return strategy, strategy.start(grid, given, num_rounds=n)


def averaged(network: Any, **options: Any) -> Any:
    """Return what the same nodes learn in memory."""
    return diffusion_averaging(LeastSquares, network, ROUNDS, initial=[START], **options, **SHOWN)


def assert_same(strategy: DiffusionAveraging, learned: Any) -> None:
    found = strategy.averaged
    # In memory a metric that no node has is a curve of NaN.
    curves = {name: rows for name, rows in learned.curves.items() if not np.isnan(rows).all()}
    assert found.curves.keys() == curves.keys()
    for name, rows in curves.items():
        assert_same_bits(found.curves[name], rows)
    assert found[3:7] == learned[3:7]  # rounds, floats, bytes, whose messages were left out


@pytest.mark.parametrize("sealed", [False, True], ids=["open", "sealed"])
@pytest.mark.parametrize("method", AVERAGING)
def test_the_bits_are_those_in_memory(method: str, sealed: bool) -> None:
    strategy, result = start(InProcessGrid(APP, N), method=method, sealed=sealed)
    here = averaged(NET, method=method)
    assert_same(strategy, here)
    assert_same_bits(models_of(strategy)[-1], np.stack([w for (w,) in here.models.values()]))
    assert (strategy.result.models, len(result.arrays)) == ([], 0)
    assert [*result.evaluate_metrics_clientapp] == [*range(1, ROUNDS + 1)]
    last = result.evaluate_metrics_clientapp[ROUNDS]
    assert last["loss"] == pytest.approx(here.curves["evaluate-loss"][-1].mean())
    for metrics in (last, result.train_metrics_clientapp[ROUNDS]):
        assert metrics["round"] == ROUNDS
    strategy.start(InProcessGrid(APP, N), ArrayRecord([START]), num_rounds=1)  # once more
    assert strategy.averaged.rounds == 1


@pytest.mark.parametrize("method", ["atc", "gradient_tracking"])
def test_models_are_shown_where_the_strategy_says_so(method: str, tmp_path: Path) -> None:
    options = {"method": method, "shows_models": True, "checkpoint_dir": tmp_path}
    strategy, result = start(InProcessGrid(APP, N), **options)
    models = np.stack([strategy.result.model_of(node)["0"].numpy() for node in range(N)])
    assert_same_bits(models, models_of(strategy)[-1])
    np.testing.assert_allclose(result.arrays["0"].numpy(), models.mean(axis=0))
    _, again = start(InProcessGrid(APP, N), **options, server=ServerSettings(resume=True))
    assert_same_bits(again.arrays["0"].numpy(), result.arrays["0"].numpy())


@pytest.mark.parametrize("sealed", [False, True])
def test_a_node_whose_messages_are_sealed_shows_no_model(sealed: bool) -> None:
    """A server that asks for models after all gets none; where nothing is sealed it does."""

    class Curious(InProcessGrid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
            asked = list(messages)
            for message in asked:
                config = message.content.config_records.get("config", {})
                if "perdl.averaging" in config:
                    about = {**json.loads(config["perdl.averaging"]), "shows": True}
                    changed: dict[str, Any] = {"perdl.averaging": json.dumps(about)}
                    if config["perdl.step"] == "show":  # in the clear, too
                        changed["perdl.sealed"] = False
                        message.content["arrays"] = ArrayRecord([np.zeros((0, 4))])
                    message.content["config"] = ConfigRecord({**config, **changed})
            return super().send_and_receive(asked, timeout=timeout)

    strategy, _ = start(Curious(APP, N), sealed=sealed)
    assert (strategy.outcome.state is None) == sealed


@pytest.mark.parametrize(
    "options",
    [
        {"method": "atc", "robust": "clip"},
        {"method": "atc", "robust": "trimmed"},
        {"method": "gradient_tracking", "compression": TopK(0.7)},
        {"method": "exact_diffusion", "compression": RandomQuantization(5, seed=3)},
    ],
)
def test_rules_and_compressions_are_those_in_memory(options: dict[str, Any]) -> None:
    net = Topology.complete(N)
    sealed = "compression" in options
    strategy, _ = start(InProcessGrid(APP, N), topology=net, sealed=sealed, **options)
    assert_same(strategy, averaged(net, **options))
    plain, _ = start(InProcessGrid(APP, N), topology=net, method=options["method"])
    assert (models_of(plain)[-1] != models_of(strategy)[-1]).any()


def test_changing_weights_and_rounds_between_evaluations_are_those_in_memory() -> None:
    pairs = ([(0, 1), (2, 3)], [(1, 2), (3, 4)])
    network = Schedule.of(*(metropolis_weights(Topology.from_edges(5, own)) for own in pairs))
    options: dict[str, Any] = {"evaluate_every": 2, "method": "atc"}
    strategy, _ = start(InProcessGrid(APP, N), topology=network, **options)
    assert_same(strategy, averaged(network, **options))


@pytest.mark.parametrize(
    ("options", "sealed"), [({}, True), ({"method": "cta"}, False), ({"robust": "clip"}, True)]
)
def test_stale_models_count_as_in_memory(options: dict[str, Any], sealed: bool) -> None:
    net = sleeping(metropolis_weights(Topology.complete(N)), 0.4, seed=2)
    strategy, _ = start(InProcessGrid(APP, N), topology=net, sealed=sealed, staleness=2, **options)
    here = InMemoryNetwork(net, staleness=2)
    assert_same(strategy, averaged(here, **options))
    method = options.get("method", "atc")  # what suits such a network
    plain, _ = start(InProcessGrid(APP, N), topology=net, **options | {"method": method})
    assert strategy.averaged.floats_sent > plain.averaged.floats_sent


# Any app -----------------------------------------------------------------------------------------

#: Not in the order of the alphabet; a counter, a half float and a row of nothing.
FORMS = {
    "fc.weight": np.ones((2, 3), np.float32),
    "bn.count": np.array(4),
    "bn.bias": np.ones(2, np.float16),
    "a.none": np.zeros(0, np.float32),
}


def test_an_app_of_the_message_api_sees_what_fedavg_sends() -> None:
    seen: list[Any] = []

    class Noted(NumPyClient):
        def note(self, kind: str, parameters: Any, config: Any) -> None:
            forms = [(array.shape, array.dtype) for array in parameters]
            seen.append((kind, forms, config["server-round"], config["lr"]))
            assert not any("averaging" in key for key in config)

        def fit(self, parameters: Any, config: Any) -> Any:
            self.note("train", parameters, config)
            new = [np.asarray(array + 1, array.dtype) for array in parameters]
            return new, 1, {"train_loss": 2.0}

        def evaluate(self, parameters: Any, config: Any) -> Any:
            self.note("evaluate", parameters, config)
            sums = [float(array.sum()) for array in parameters]
            return 0.5, 1, dict(zip(FORMS, sums, strict=True))

    class FallingRate(DiffusionAveraging):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            now = ConfigRecord({**config, "lr": config["lr"] / server_round})
            return super().configure_train(server_round, arrays, now, grid)

    strategy = FallingRate(Topology.ring(3), metrics=["train_loss", *FORMS])
    given = ArrayRecord({name: Array(array) for name, array in FORMS.items()})
    result = strategy.start(
        InProcessGrid(client_app(as_app(lambda context: Noted())), 3),
        given,
        2,
        train_config=ConfigRecord({"lr": 1.0}),
        evaluate_config=ConfigRecord({"lr": 7.0}),
    )
    forms = [(array.shape, array.dtype) for array in FORMS.values()]
    training, evaluations = [("train", forms, t, 1 / t) for t in (1, 2)], ("evaluate", forms)
    assert seen == [
        *[training[0]] * 3,
        *[(*evaluations, 1, 7.0), training[1]] * 3,
        *[(*evaluations, 2, 7.0)] * 3,
    ]
    assert dict(result.evaluate_metrics_clientapp[2]) == {
        "loss": 0.5,
        **{name: float((array + 2).sum()) for name, array in FORMS.items()},
    }
    assert result.train_metrics_clientapp[2]["train_loss"] == 2
    assert set(strategy.history[-1].metrics[0]) == {
        "num-examples",
        "neighbor-distance",
        "floats-received",
        "bytes-received",
        "train-train_loss",
        "evaluate-loss",
        *(f"evaluate-{name}" for name in FORMS),
    }


def test_without_an_evaluation_nodes_only_train() -> None:
    class Adds(NumPyClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            return [array + 1 for array in parameters], 1, {"seen": parameters[0][0]}

    grid = InProcessGrid(client_app(lambda context: Adds().to_client()), N)
    strategy, result = start(grid, 3, metrics=["seen"])
    assert strategy.averaged.curves["train-seen"].tolist() == [[1.0] * N, [2.0] * N, [3.0] * N]
    assert result.evaluate_metrics_clientapp == {}


# What stays at the node --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "mod", "sealed"),
    [("atc", True, False), ("atc", False, True), ("cta", True, True), ("cta", False, False)],
)
def test_private_arrays_stay_and_the_rest_is_averaged(
    method: str, mod: bool, sealed: bool, tmp_path: Path
) -> None:
    keep = ["head.*"]
    app = make_app(keep_private(*keep)) if mod else make_app()
    grid = Tapped(
        client_app(app) if mod else client_app(app, private=keep),
        3,
        node_config=lambda node: {"state-dir": str(tmp_path)},
    )
    strategy, _ = start(
        grid,
        3,
        model(),
        topology=Topology.ring(3),
        method=method,
        sealed=sealed,
        metrics=["head", "body"],
    )
    assert grid.errors == []
    found = strategy.averaged
    trained = np.outer([1, 2, 3], [1, 2, 3])  # (p + 1) thousands in every round
    assert (found.curves["evaluate-head"] == trained).all()
    mean = 2 * STEPS["body.weight"]
    last = [3 * mean] * 3 if method == "atc" else [2 * mean + p + 1 for p in range(3)]
    np.testing.assert_allclose(found.curves["evaluate-body"][-1], last)
    assert_private_stays(grid)
    assert found.floats_sent == 3 * 2 * 3 * 4  # rounds, neighbors, nodes; four of eight numbers
    if not sealed:
        assert {report.floats_up for report in strategy.history[:-1]} == {4}


# Who is absent -----------------------------------------------------------------------------------


class Late(Tapped):
    """A grid whose last node comes before exchange ``joins``."""

    joins, exchanges = 3, 0

    def get_node_ids(self) -> Any:
        nodes = sorted(super().get_node_ids())
        return nodes if self.exchanges >= self.joins - 1 else nodes[:-1]

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        sent = list(messages)
        self.exchanges += any(message.metadata.message_type == "train" for message in sent)
        return super().send_and_receive(sent, timeout=timeout)


def test_a_node_that_joins_late_begins_with_the_initial_arrays() -> None:
    grid = Late(APP, N)
    strategy, _ = start(grid, method="atc", num_clients=N - 1)
    w, A = np.tile(START, (N, 1)), metropolis_weights(NET).matrix.toarray()
    clients = [LeastSquares(node) for node in range(N)]
    found = models_of(strategy)
    for t in range(1, ROUNDS + 1):
        there, weights = np.arange(N) < (N if t >= Late.joins else N - 1), A.copy()
        lost = weights * ~there[None]
        weights += np.diag(lost.sum(axis=1)) - lost
        psi = np.stack([clients[k].fit([w[k]], {"server-round": t})[0][0] for k in range(N)])
        w = np.where(there[:, None], weights @ psi, w)
        np.testing.assert_allclose(found[t - 1, there], w[there], rtol=1e-12)
        assert np.isnan(found[t - 1, ~there]).all()
    assert strategy.averaged.alive.all()
    sent = [name for name, array in arrays_in(grid.asked) if np.array_equal(array, START)]
    assert len(sent) == N  # once to each


class Dying(Forgetting):
    """A grid whose node 0 dies before exchange 3, and is back in it."""

    forgets = 3


@pytest.mark.parametrize("private", [False, True], ids=["all", "private"])
def test_a_restarted_node_goes_on_from_its_state_dir(private: bool, tmp_path: Path) -> None:
    def run(kind: type[InProcessGrid], **options: Any) -> DiffusionAveraging:
        app = client_app(make_app(keep_private("head.*"))) if private else APP
        arrays, metrics = (model(), ["head", "body"]) if private else (None, SHOWN["metrics"])
        return start(kind(app, N, **options), ROUNDS, arrays, metrics=metrics)[0]

    grid = {"node_config": lambda node: {"state-dir": str(tmp_path)}}
    assert_same(run(Dying, **grid), run(InProcessGrid).averaged)


def test_without_one_it_misses_a_round_and_begins_anew() -> None:
    grid = Dying(APP, N)
    strategy, _ = start(grid, method="atc")
    assert len(grid.errors) == 1
    assert "state-dir" in grid.errors[0]
    assert ["client 0" in report.dropped for report in strategy.history].count(True) == 1
    assert strategy.history[3].aggregate["perdl.state-lost"] == 1
    seen = strategy.averaged.curves["train-round"][:, 0]
    assert np.isnan(seen).tolist() == [False, True, True, False, False, False]
    assert strategy.averaged.alive.all()


def test_a_node_that_is_asked_again_sends_the_same_message_and_trains_no_more() -> None:
    """As a server asks that crashed before it had saved the round."""
    rng, trained = np.random.default_rng(), list[int]()

    class Random(LeastSquares):
        def fit(self, parameters: list[NDArray[Any]], config: Any) -> Any:
            trained.append(config["server-round"])
            return [w + rng.standard_normal(w.shape) for w in parameters], 9, {}

    grid = Tapped(client_app(lambda context: Random(partition_of(context))), N)
    strategy = DiffusionAveraging(NET)
    stopped = list[list[int]]()

    def stop(_: int, result: Any) -> bool:
        stopped.append([*result.evaluate_metrics_clientapp])
        return len(stopped) == 2

    strategy.start(grid, ArrayRecord([START]), num_rounds=3, should_stop=stop)
    assert stopped == [[1], [1, 2]]
    request, before, count = grid.asked[-1], grid.replies[-1].content, len(trained)
    (again,) = grid.send_and_receive([request])
    assert {name: again.content[name] for name in before} == dict(before)
    assert (count, len(trained)) == (3 * N, count)


# Bad replies, bad input --------------------------------------------------------------------------


RING = Topology.ring(4)
PATH = Topology.from_edges(3, [(0, 1), (1, 2)])
THIRDS = np.array([[2, 1, 0], [1, 1, 1], [0, 1, 2]]) / 3.0
ONE_WAY = Topology.from_edges(3, [(0, 1), (1, 2), (2, 0), (0, 2)], directed=True)
HALVES = np.array([[0.5, 0.5, 0.0], [0.3, 0.4, 0.3], [0.0, 0.5, 0.5]])


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"topology": Topology.from_edges(4, [(0, 1), (2, 3)])}, ValueError, "connected"),
        ({"topology": PATH, "weights": CombinationMatrix(HALVES, PATH)}, ValueError, "weights"),
        ({"topology": RING, "weights": CombinationMatrix(THIRDS, PATH)}, ValueError, "weights"),
        ({"method": "atc", "robust": "clip", "n_liars": 2}, ValueError, "n_liars"),
        ({"method": "push_sum", "staleness": 1}, ValueError, "method"),
        ({"method": "atc", "staleness": 1, "compression": TopK(0.5)}, ValueError, "network"),
        (
            {"topology": ONE_WAY, "weights": push_weights(ONE_WAY), "staleness": 1},
            ValueError,
            "staleness",
        ),
        ({"fraction_evaluate": 1.0}, ValueError, "fraction_evaluate"),
        ({"shows_models": True, "sealed": True}, ValueError, "shows_models"),
        ({"shows_models": "x"}, ValueError, "shows_models"),
        ({"optimizer": None}, TypeError, "optimizer"),
    ],
)
def test_options_are_checked(options: Any, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        DiffusionAveraging(**{"topology": RING, **options})


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"initial_arrays": None}, ValueError, "initial_arrays"),
        ({"initial_arrays": ArrayRecord([np.ones(2, complex)])}, ValueError, "initial_arrays"),
        ({"initial_arrays": ArrayRecord([np.ones(2, bool)])}, ValueError, "initial"),
        ({"num_rounds": 0}, ValueError, "num_rounds"),
        ({"evaluate_fn": print}, ValueError, "evaluate_fn"),
        ({"should_stop": 3}, TypeError, "should_stop"),
    ],
)
def test_what_a_run_starts_with_is_checked(
    options: Any, error: type[Exception], named: str
) -> None:
    grid = Tapped(APP, 4)
    with pytest.raises(error, match=named):
        DiffusionAveraging(RING).start(grid, **{"initial_arrays": model(), **options})
    assert not grid.asked


def test_fewer_clients_than_the_network_has_are_counted() -> None:
    grid = InProcessGrid(APP, 6)
    with pytest.raises(TooFewReplies, match="topology"):
        DiffusionAveraging(Topology.ring(10)).start(grid, model())


def test_flowers_own_start_does_not_say_how_many_rounds_there_are() -> None:
    wrapper = DifferentialPrivacyClientSideFixedClipping(DiffusionAveraging(RING), 1.0, 1.0, N)
    with pytest.raises(ValueError, match="start"):
        wrapper.start(InProcessGrid(APP, N), model(), num_rounds=2)
