"""ClusteredFedAvg over clients that know nothing of it: hand arithmetic and planted clusters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg

from flwr_perdl.clients import RegressionClient, client_app
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import (
    ClusteredFedAvg,
    FedX,
    Momentum,
    TooFewReplies,
)
from tests.grids import Tapped, as_app, failing, partition_of

#: The kinds of client: client i is of kind i % 3.
TRUTH = np.array([[2.0, 0.0, 1.0], [0.0, 2.0, -1.0], [-2.0, -2.0, 0.0]])
N = 12
START = [np.zeros(3), np.zeros(1)]


class Linear(NumPyClient):
    """A linear model by three gradient steps; it measures its loss on points held out."""

    def __init__(self, partition: int, n: int = 40) -> None:
        rng = np.random.default_rng(partition)
        self.X = rng.standard_normal((2 * n, 3))
        self.y = self.X @ TRUTH[partition % 3] + 0.3 * rng.standard_normal(2 * n)
        self.n = n

    def fit(self, parameters: Any, config: Any) -> Any:
        w, b = parameters
        X, y = self.X[: self.n], self.y[: self.n]
        for _ in range(3):
            error = X @ w + b - y
            w -= 0.3 * X.T @ error / len(y)  # in place, as many a client does
            b -= 0.3 * error.mean()
        return [w, b], len(y), {}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        w, b = parameters
        X, y = self.X[self.n :], self.y[self.n :]
        return float(np.mean((X @ w + b - y) ** 2)), len(y), {"shift": float(b[0])}


def make(context: Context) -> Linear:
    return Linear(partition_of(context))


def app_of(client: Callable[[int], Any]) -> ClientApp:
    return client_app(lambda context: client(partition_of(context)))


def run(
    strategy: ClusteredFedAvg, rounds: int, start: Any = START, app: Any = None, **options: Any
) -> list[np.ndarray]:
    """Return the models that a run finds, stacked."""
    grid = InProcessGrid(app or client_app(make), N, **options)
    strategy.start(grid, ArrayRecord(list(start)), num_rounds=rounds)
    return stacks(strategy)


def stacks(strategy: ClusteredFedAvg) -> list[np.ndarray]:
    models = [model.to_numpy_ndarrays() for model in strategy.result.models]
    return [np.stack(arrays) for arrays in zip(*models, strict=True)]


def kinds(strategy: ClusteredFedAvg) -> list[set[int]]:
    """Return the true kinds of each cluster's members."""
    clusters = strategy.result
    return [
        {partition % 3 for partition, own in clusters.members.items() if own == j}
        for j in range(len(clusters.models))
    ]


class Given(NumPyClient):
    """Has losses of its own for each model, and adds one to what it trains."""

    def __init__(self, losses: dict[float, float], n: int) -> None:
        self.losses, self.n = losses, n

    def fit(self, parameters: Any, config: Any) -> Any:
        assert set(config) == {"server-round", "perdl.seed", "perdl.run", "proximal-mu"} | {
            "proximal_mu"
        }
        return [parameters[0] + config["proximal-mu"]], self.n, {}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        return self.losses[float(parameters[0][0])], self.n, {}


def given(*clients: Given) -> ClientApp:
    return app_of(lambda partition: clients[partition])


def test_a_round_by_hand() -> None:
    nan = float("nan")
    app = given(
        Given({0.0: 1.0, 10.0: 5.0}, 1),
        Given({0.0: 2.0, 10.0: 5.0}, 3),
        Given({0.0: nan, 10.0: 9.0}, 4),
    )
    strategy = ClusteredFedAvg(2, start="given", proximal_mu=1.0, fraction_evaluate=0.0)
    models = ArrayRecord([np.array([[0.0], [10.0]])])
    result = strategy.start(InProcessGrid(app, 3), models, num_rounds=1)
    np.testing.assert_array_equal(result.arrays["0"].numpy(), [1.0])  # the largest cluster's
    (report,) = strategy.history
    assert report.aggregate["cluster_0"] == 2
    assert report.metrics[2] == {"num-examples": 4, "cluster": 1.0, "cluster-loss": 9.0}
    assert report.aggregate["cluster-loss"] == pytest.approx((1 * 1 + 3 * 2 + 4 * 9) / 8)
    assert (report.floats_down, report.floats_up) == (2, 1)  # two models; a model
    clusters = strategy.result
    assert clusters.members == {0: 0, 1: 0, 2: 1}
    assert clusters.sizes == [2, 1]
    assert clusters.metrics == report.numbers
    assert clusters.table().splitlines()[1].split() == ["0", "2", "1.75"]  # (1 * 1 + 3 * 2) / 4
    assert clusters.models[1]["0"].numpy() == [11.0]


def test_an_optimizer_moves_the_clusters_that_are_trained_and_remembers_for_the_others() -> None:
    class Away(Given):
        """Is in the second cluster, but for rounds 2 to 4."""

        def evaluate(self, parameters: Any, config: Any) -> Any:
            second = bool(self.losses) and config["server-round"] in (1, 5)
            return float(second != (parameters[0][0] >= 10)), 1, {}

    strategy = ClusteredFedAvg(
        2, start="given", proximal_mu=1.0, optimizer=Momentum(beta=0.5), fraction_evaluate=0.0
    )
    models = ArrayRecord([np.array([[0.0], [10.0]])])
    grid = InProcessGrid(given(Away({}, 1), Away({10.0: 0.0}, 1)), 2)
    strategy.start(grid, models, num_rounds=5)
    moved = 1 + 1.5 + 1.75 + 1.875 + 1.9375
    np.testing.assert_array_equal(stacks(strategy)[0], [[moved], [10 + 1 + 0 + 0 + 0 + 1.5]])


@pytest.mark.parametrize("k", [3, "auto"])
def test_what_start_returns_and_evaluate_fn_gets_loads_into_the_users_model(k: Any) -> None:
    """One cluster's model at a time, from round 0 on; the metrics are named by cluster."""
    seen = []

    def evaluate(round_: int, arrays: ArrayRecord, which: int) -> MetricRecord:
        w, b = arrays.to_numpy_ndarrays()
        assert (w.shape, b.shape) == ((3,), (1,))
        seen.append((round_, which))
        return MetricRecord({"bias": float(b[0])})

    strategy, grid = ClusteredFedAvg(k), InProcessGrid(client_app(make), N)
    result = strategy.start(grid, ArrayRecord(START), num_rounds=4, evaluate_fn=evaluate)
    measured = {round_: dict(m) for round_, m in result.evaluate_metrics_serverapp.items()}
    biases = [float(model["1"].numpy()[0]) for model in strategy.result.models]
    assert list(measured[0]) == ["bias"]
    assert measured[4] == {f"bias/cluster-{j}": bias for j, bias in enumerate(biases)}
    assert seen[-3:] == [(4, j) for j in range(3)]
    largest = strategy.result.models[int(np.argmax(strategy.result.sizes))]
    assert result.arrays["0"].numpy().tolist() == largest["0"].numpy().tolist()


def test_with_k_auto_models_without_clients_are_gone_from_the_result() -> None:
    """Four groups after local training, of which pairs train to the same model afterwards."""

    class Joining(NumPyClient):
        def __init__(self, i: int) -> None:
            self.kind = 10.0 * np.eye(4)[i // 2 % 2]
            self.own = self.kind + np.eye(4)[2 + i % 2]

        def fit(self, parameters: Any, config: Any) -> Any:
            return [self.own if config["server-round"] == 1 else self.kind], 1, {}

        def evaluate(self, parameters: Any, config: Any) -> Any:
            return float(np.sum((parameters[0] - self.own) ** 2)), 1, {}

    strategy = ClusteredFedAvg("auto", max_clusters=8)
    run(strategy, 4, [np.zeros(4)], app=app_of(Joining))
    assert {own["cluster"] for own in strategy.history[-1].metrics.values()} == {0, 2}
    found = strategy.result
    assert (len(found.models), found.sizes) == (2, [6, 6])
    for i in range(4):
        own = found.models[found.members[i]]["0"].numpy()
        np.testing.assert_allclose(own, 10.0 * np.eye(4)[i // 2], atol=1e-9)


def test_one_cluster_is_fedavg() -> None:
    app = client_app(make)
    flower = FedAvg(fraction_evaluate=0.0, min_available_nodes=N)
    wanted = flower.start(InProcessGrid(app, N), ArrayRecord(START), num_rounds=3)
    found = run(ClusteredFedAvg(1, fraction_evaluate=0.0), 3)
    for array, same in zip(found, wanted.arrays.to_numpy_ndarrays(), strict=True):
        np.testing.assert_allclose(array[0], same, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("start", ["one-shot", "anchors"])
@pytest.mark.parametrize("choose_every", [1, 3])
def test_planted_clusters_are_found(start: str, choose_every: int) -> None:
    strategy = ClusteredFedAvg(3, start=start, choose_every=choose_every)
    w = run(strategy, 8)[0]
    assert sorted(kinds(strategy), key=min) == [{0}, {1}, {2}]
    for j, (kind,) in enumerate(kinds(strategy)):
        np.testing.assert_allclose(w[j], TRUTH[kind], atol=0.2)
    assert strategy.result.sizes == [4, 4, 4]
    assert (START[0] == 0).all()


def test_random_starts_are_perturbations_of_one_model() -> None:
    strategy = ClusteredFedAvg(3, start="random")
    run(strategy, 4)
    assert sum(strategy.result.sizes) == N
    begun = strategy.protocol([np.arange(4.0), np.ones(2)], None)
    arrays = next(begun).arrays
    assert [array.shape for array in arrays] == 3 * [(4,), (2,)]
    assert len(np.unique(arrays[::2])) == 12
    assert (np.array(arrays[1::2]) == 1).all()


class Overflowing(Linear):
    """Has no finite loss for a model of another kind."""

    def evaluate(self, parameters: Any, config: Any) -> Any:
        loss, n, metrics = super().evaluate(parameters, config)
        return loss if loss < 2 else float("nan"), n, metrics


@pytest.mark.parametrize("client", [Linear, Overflowing])
def test_the_number_of_clusters_is_found(client: type[Linear]) -> None:
    strategy = ClusteredFedAvg("auto", start_rounds=3, max_clusters=6)
    run(strategy, 5, app=app_of(client))
    assert sorted(kinds(strategy), key=min) == [{0}, {1}, {2}]
    first = [r for r in strategy.history if r.step != "evaluate"][:3]
    assert [r.step for r in first] == ["train-alone", "measure-models", "cluster"]
    assert not any(r.dropped for r in first)


def test_choices_are_evaluated_with_the_evaluation_config() -> None:
    class Batched(Linear):
        def fit(self, parameters: Any, config: Any) -> Any:
            assert (config["rate"], config["batch"]) == (0.1, 1)
            return super().fit(parameters, config)

        def evaluate(self, parameters: Any, config: Any) -> Any:
            assert config["batch"] == 7
            return super().evaluate(parameters, config)

    strategy = ClusteredFedAvg("auto", max_clusters=4)
    strategy.start(
        InProcessGrid(app_of(Batched), N),
        ArrayRecord(START),
        num_rounds=3,
        train_config=ConfigRecord({"rate": 0.1, "batch": 1}),
        evaluate_config=ConfigRecord({"batch": 7}),
    )
    assert not any(report.dropped for report in strategy.history)


@pytest.mark.parametrize(
    ("k", "options", "purposes"),
    [
        (1, {}, {"report"}),
        (3, {"fraction_evaluate": 0.0}, {"select"}),
        (1, {"fine_tune": 1}, {"report", "select"}),
    ],
)
def test_mods_see_whether_an_evaluation_chooses_or_is_reported(
    k: int, options: dict[str, Any], purposes: set[str]
) -> None:
    seen = []

    def mod(message: Message, context: Context, call: Any) -> Message:
        if message.metadata.message_type == "evaluate":
            seen.append(message.content["config"]["perdl.purpose"])
        reply: Message = call(message, context)
        return reply

    app = ClientApp(mods=[mod])
    app.train()(as_app(make))
    app.evaluate()(as_app(make))
    run(ClusteredFedAvg(k, **options), 2, app=client_app(app))
    assert set(seen) == purposes


def test_between_choices_a_client_receives_its_own_model_unless_it_missed_the_choice() -> None:
    strategy = ClusteredFedAvg(3, choose_every=3, fraction_evaluate=0.0)
    run(strategy, 5, faults=failing("error", [5], [2]))
    downs = [report.floats_down for report in strategy.history]
    every, one = 3 * 4, 4
    # Alone; choice (client 5 is away); own models, but all for client 5; own models; choice.
    assert downs == [4, every, pytest.approx((11 * one + every) / 12), one, every]
    assert strategy.result.members[5] == strategy.result.members[8]


@pytest.mark.parametrize("cluster", [-1.0, 3.0, 0.5])
@pytest.mark.parametrize(("kind", "start"), [(ClusteredFedAvg, START), (FedX, [TRUTH])])
def test_an_evaluation_of_no_cluster_is_left_out_and_named(
    kind: Any, start: Any, cluster: float
) -> None:
    class Lying(InProcessGrid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
            replies = list(super().send_and_receive(messages, timeout=timeout))
            if replies[5].metadata.message_type == "evaluate":
                replies[5].content["metrics"]["cluster"] = cluster
            return replies

    def client(context: Context) -> NumPyClient:
        own = make(context)
        return own if kind is ClusteredFedAvg else RegressionClient(own.X, own.y, context)

    strategy = kind(3)
    strategy.start(Lying(client_app(client), N), ArrayRecord(list(start)), num_rounds=1)
    report = strategy.history[-1]
    assert sorted(report.metrics) == [i for i in range(N) if i != 5]
    assert list(report.dropped) == ["client 5"]
    assert report.anomalies == {5: {"refused": 1.0}}
    assert sum(report.aggregate[f"cluster_{j}"] for j in range(3)) == N - 1


def test_a_cluster_that_is_a_text_is_no_cluster() -> None:
    class Lying(InProcessGrid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
            asked = list(messages)
            replies = list(super().send_and_receive(asked, timeout=timeout))
            for reply in replies if asked[0].metadata.message_type == "evaluate" else ():
                del reply.content["metrics"]["cluster"]
                reply.content["texts"] = ConfigRecord({"cluster": "x", "num-examples": "x"})
            return replies

    strategy = ClusteredFedAvg(3)
    strategy.start(Lying(client_app(make), N), ArrayRecord(START), num_rounds=3)
    assert sum(strategy.result.sizes) == N
    assert "x" in {own.get("cluster") for own in strategy.history[-1].metrics.values()}


def test_one_clients_losses_do_not_decide_k() -> None:
    class Stubborn(Linear):
        asked = False

        def evaluate(self, parameters: Any, config: Any) -> Any:
            _, n, metrics = super().evaluate(parameters, config)
            loss, self.asked = 300.0 * self.asked, True
            return loss, n, metrics

    strategy = ClusteredFedAvg("auto", start_rounds=3, max_clusters=6, robust=True)
    run(strategy, 5, app=app_of(lambda i: Stubborn(i) if i == 5 else Linear(i)))
    assert len(strategy.result.models) == 3


def test_mods_see_one_model_at_a_time() -> None:
    seen: list[int] = []

    def watch(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
        seen.append(sum(a.numpy().size for a in message.content["arrays"].values()))
        return call_next(message, context)

    app = client_app(make, train_mods=[watch, fixedclipping_mod])
    strategy = ClusteredFedAvg(3, fraction_evaluate=0.0, num_clients=N)
    private = DifferentialPrivacyClientSideFixedClipping(
        strategy, noise_multiplier=0.0, clipping_norm=0.1, num_sampled_clients=N
    )
    private.start(InProcessGrid(app, N), ArrayRecord(START), num_rounds=3)
    assert set(seen) == {4}
    models = np.concatenate(stacks(strategy), axis=1)
    assert (np.linalg.norm(models, axis=1) < 0.1 * 3 + 1e-6).all()  # 0.1 a round, from 0
    assert (np.linalg.norm(models, axis=1) > 0.2).all()


def test_what_each_party_receives() -> None:
    """The module's list: what is in a message, in which size, and nothing else."""
    grid = Tapped(client_app(make), N)
    strategy = ClusteredFedAvg("auto", start_rounds=3, max_clusters=4)
    strategy.start(grid, ArrayRecord(START), num_rounds=3)
    seen: dict[tuple[str, str], Any] = {}
    for step, question, reply in grid.exchanges():
        for way, content in (("down", question), ("up", reply)):
            shapes = tuple(array.shape for array in content.get("arrays", {}).values())
            metrics = frozenset(content.get("metrics", {}))
            seen.setdefault((step, way), set()).add((shapes, metrics))
    model, none = ((3,), (1,)), frozenset()
    told = frozenset({"num-examples", "cluster"})
    assert seen == {
        ("query", "down"): {((), none)},
        ("query", "up"): {((), none)},
        ("train-alone", "down"): {(model, none)},
        ("train-alone", "up"): {(model, frozenset({"num-examples"}))},
        ("measure-models", "down"): {(7 * model, none)},
        ("measure-models", "up"): {(((7,),), frozenset({"num-examples"}))},
        ("cluster", "down"): {(3 * model, none)},
        ("cluster", "up"): {(model, told | {"cluster-loss"})},
        ("evaluate", "down"): {(model, none), (3 * model, none)},
        ("evaluate", "up"): {((), told | {"loss", "shift"})},
    }


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"k": 0}, "k"),
        ({"k": "auto", "start": "random"}, "k"),
        ({"k": 2, "start": "fedmd"}, "start"),
        ({"k": 2, "start": "random", "start_rounds": 2}, "start_rounds"),
        ({"k": 2, "max_clusters": 3}, "max_clusters"),
        ({"k": 2, "proximal_mu": -1.0}, "proximal_mu"),
        ({"k": 2, "robust": "krum"}, "robust"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}"):
        ClusteredFedAvg(**options)


@pytest.mark.parametrize(
    ("k", "options", "start"),
    [
        (2, {}, []),
        (2, {"start": "given"}, START),
        (2, {}, [np.array([1j])]),
    ],
)
def test_bad_initial_arrays_are_named(k: int, options: Any, start: Any) -> None:
    with pytest.raises(ValueError, match=r"^initial_arrays"):
        run(ClusteredFedAvg(k, **options), 1, start=start)


def test_more_clusters_than_clients_and_replies_of_other_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"^k"):
        run(ClusteredFedAvg(N + 1), 1)

    class Short(Linear):
        def fit(self, parameters: Any, config: Any) -> Any:
            return [parameters[0]], 1, {}

    with pytest.raises(TooFewReplies, match="shapes"):
        run(ClusteredFedAvg(2, start="random"), 1, app=app_of(Short))


def test_a_loss_that_tells_no_models_apart_is_warned_of(caplog: Any) -> None:
    class Constant(Linear):
        def evaluate(self, parameters: Any, config: Any) -> Any:
            return 0.0, self.n, {}

    for client, warned in ((Constant, True), (Linear, False)):
        caplog.clear()
        run(ClusteredFedAvg(3), 3, app=app_of(client))
        assert ("the same loss for all of the 3 models" in caplog.text) == warned


@pytest.mark.parametrize("name", ["state-lost", "models-alike", "kept-private", "no-finite-loss"])
def test_a_metric_of_an_app_is_its_own_whatever_it_is_called(
    name: str, warned: pytest.LogCaptureFixture
) -> None:
    class Named(Linear):
        def fit(self, parameters: Any, config: Any) -> Any:
            return *super().fit(parameters, config)[:2], {name: 2}

    strategy = ClusteredFedAvg(3, fraction_evaluate=0.0)
    run(strategy, 3, app=app_of(Named))
    assert [report.aggregate[name] for report in strategy.history] == [2, 2, 2]
    assert not warned.messages
