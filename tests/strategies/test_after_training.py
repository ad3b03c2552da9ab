"""What comes after the training, for every strategy whose clients end with a model of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, MessageType, RecordDict

from flwr_perdl.clients import DictionaryClient, RegressionClient, adapt, client_app
from flwr_perdl.dictionary import OrthogonalLearner
from flwr_perdl.export import load, save
from flwr_perdl.network import Topology
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import (
    ClusteredFedAvg,
    DiffusionAveraging,
    Ditto,
    FedX,
    PerMA,
    PersonalizedFedAvg,
    ServerSettings,
    client_report,
)

#: Slopes of the two groups of clients; each has an intercept of its own.
SLOPES = np.array([[1.0, -1.0, 0.5], [-1.0, 2.0, 0.0]])
N_CLIENTS = 6


class Linear:
    """A linear regression on a client's points."""

    def __init__(self, context: Context) -> None:
        partition = int(context.node_config["partition-id"])
        rng = np.random.default_rng(partition)
        self.X = rng.standard_normal((30, 3))
        self.y = self.X @ SLOPES[partition % 2] + rng.standard_normal()

    def fit(self, parameters: Any, config: Any) -> Any:
        """Take some gradient steps."""
        slope, intercept = (np.array(array) for array in parameters)
        for _ in range(5):
            errors = self.X @ slope + intercept - self.y
            slope -= 0.1 * self.X.T @ errors / len(errors)
            intercept -= 0.1 * errors.mean()
        return [slope, intercept], len(self.y), {}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        """Return the mean squared error."""
        slope, intercept = parameters
        loss = float(np.mean((self.X @ slope + intercept - self.y) ** 2))
        return loss, len(self.y), {"error": loss**0.5}


def start() -> ArrayRecord:
    """Return the first model."""
    return ArrayRecord({"slope": Array(np.zeros(3)), "intercept": Array(np.zeros(1))})


PRIVATE = ["intercept"]
STRATEGIES: dict[str, Callable[..., Any]] = {
    "clustered": lambda **options: ClusteredFedAvg(2, start_rounds=3, **options),
    "clustered, private": lambda **options: ClusteredFedAvg(
        2, start_rounds=3, private=PRIVATE, **options
    ),
    "personalized": lambda **options: PersonalizedFedAvg(PRIVATE, **options),
    "ditto": lambda **options: Ditto(**options),
    "averaging": lambda **options: DiffusionAveraging(Topology.ring(N_CLIENTS), **options),
    "averaging, private": lambda **options: DiffusionAveraging(
        Topology.ring(N_CLIENTS), private=PRIVATE, **options
    ),
    "averaging, groups": lambda **options: DiffusionAveraging(
        Topology.ring(N_CLIENTS), groups="auto", local_rounds=1, **options
    ),
    "averaging, sealed": lambda **options: DiffusionAveraging(
        Topology.ring(N_CLIENTS), sealed=True, **options
    ),
}
NAMES = pytest.mark.parametrize("name", STRATEGIES)


def as_lists(record: ArrayRecord) -> dict[str, Any]:
    """Return a record's arrays as lists."""
    return {name: array.numpy().tolist() for name, array in record.items()}


class Kind(NamedTuple):
    """Clients of a strategy, what they start with, and the loss of one's own model."""

    client: Callable[[Context], Any]
    start: Callable[[], ArrayRecord | None]
    loss: Callable[[Any, list[Any]], float]


#: Two atoms that all clients share, and two of each one's own.
ATOMS = np.linalg.qr(np.random.default_rng(9).standard_normal((20, 20)))[0]


def dictionary_client(context: Context) -> DictionaryClient:
    """Return a client of the planted atoms."""
    i = int(context.node_config["partition-id"])
    D, rng = ATOMS[[0, 1, 2 + 2 * i, 3 + 2 * i]], np.random.default_rng(i)
    X = rng.standard_normal((60, 4)) * (rng.random((60, 4)) < 0.5) @ D
    X += 0.01 * rng.standard_normal(X.shape)
    test = {"": X[40:]}
    return DictionaryClient(X[:40], OrthogonalLearner(4), context, evaluation=test)


def dictionary_loss(client: DictionaryClient, model: list[Any]) -> float:
    """Return the error with global and local atoms."""
    D, X = np.vstack(model), client.evaluation[""]
    return float(np.mean((X - client.learner.code(X, D) @ D) ** 2))


def regression_client(context: Context) -> RegressionClient:
    """Return a client whose slope is one of two."""
    i = int(context.node_config["partition-id"])
    X = np.random.default_rng(i).standard_normal((30, 3))
    return RegressionClient(X, X @ SLOPES[i % 2], context)


def regression_loss(client: RegressionClient, model: list[Any]) -> float:
    """Return half the mean squared error."""
    return float(np.mean((client.X @ np.ravel(model[0]) - client.y) ** 2) / 2)


#: Of strategies whose clients are the library's own.
KINDS = {
    "perma": Kind(dictionary_client, lambda: None, dictionary_loss),
    "fedx": Kind(regression_client, lambda: None, regression_loss),
}
OWN: dict[str, Callable[..., Any]] = {
    "perma": lambda **options: PerMA(2, **options),
    "fedx": lambda **options: FedX(2, **options),
}
ALL_NAMES = pytest.mark.parametrize("name", [*STRATEGIES, *KINDS])


def kind_of(name: str) -> Kind:
    """Return the clients of a strategy."""
    user = Kind(Linear, start, lambda client, model: float(client.evaluate(model, {})[0]))
    return KINDS.get(name, user)


class RecordingGrid(InProcessGrid):
    """Remembers what training replies carry."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.sent: list[set[str]] = []
        self.result: Any = None

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        """Push messages, and return the replies."""
        replies = list(super().send_and_receive(messages, timeout=timeout))
        trained = [one for one in replies if one.metadata.message_type == MessageType.TRAIN]
        records = [own for one in trained for own in one.content.array_records.values()]
        self.sent.append({name for record in records for name in record})
        return replies


def run(name: str, n_rounds: int = 8, app: Any = None, **options: Any) -> tuple[Any, RecordingGrid]:
    """Return a strategy that has run, and its grid."""
    kind = kind_of(name)
    grid = RecordingGrid(app or client_app(kind.client), N_CLIENTS)
    strategy = {**STRATEGIES, **OWN}[name](**options)
    rounds = 40 if name == "fedx" else n_rounds
    grid.result = strategy.start(grid, kind.start(), num_rounds=rounds)
    return strategy, grid


def context_of(client: int) -> Context:
    """Return a client's context."""
    return Context(1, 1, {"partition-id": client}, RecordDict(), {})


def loss_of(client: int, model: ArrayRecord, name: str = "") -> float:
    """Return a client's loss of a model."""
    kind = kind_of(name)
    return kind.loss(kind.client(context_of(client)), model.to_numpy_ndarrays())


@ALL_NAMES
def test_each_clients_model_is_at_hand_in_process(name: str) -> None:
    strategy, grid = run(name)
    evaluated = [report for report in strategy.history if report.step == "evaluate"]
    for client in range(N_CLIENTS):
        model = strategy.result.model_of(client)
        if evaluated and name in [*STRATEGIES, "fedx"]:
            loss = evaluated[-1].metrics[client]["loss"]
            assert loss_of(client, model, name) == pytest.approx(loss, rel=1e-5, abs=1e-12)
        if name in STRATEGIES:
            assert list(model) == ["slope", "intercept"]
        if name == "perma":
            local = grid.local_atoms()[client]
            np.testing.assert_array_equal(model["local_atoms"].numpy(), local)


@NAMES
def test_fine_tuning_keeps_the_best_and_sends_numbers_alone(name: str) -> None:
    plain, _ = run(name)
    tuned, grid = run(name, fine_tune=5)
    report = tuned.history[-1]
    assert report.step == "tune"
    assert grid.sent[-1] == set()
    for client, metrics in report.metrics.items():
        before, after = (loss_of(client, one.result.model_of(client)) for one in (plain, tuned))
        assert metrics["loss-before"] == pytest.approx(before)
        assert metrics["loss"] == pytest.approx(after)
        assert metrics["error-before"] == pytest.approx(before**0.5)
        assert metrics["error"] == pytest.approx(after**0.5)
        assert after <= before
    assert report.aggregate["fits-kept"] > 0
    last = [*grid.result.evaluate_metrics_clientapp.values()][-1]
    assert dict(last) == report.aggregate


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_metric_that_chooses_is_the_users(name: str) -> None:
    """The loss says the opposite here."""

    class Misled(Linear):
        def evaluate(self, parameters: Any, config: Any) -> Any:
            loss, n, _ = super().evaluate(parameters, config)
            return -loss, n, {"score": -loss, "eval_logloss": loss}

    plain, _ = run(name)
    for options in ({"metric": "score", "higher_is_better": True}, {"metric": "eval_logloss"}):
        tuned, _ = run(name, app=client_app(Misled), fine_tune=5, **options)
        for client in range(N_CLIENTS):
            before, after = (loss_of(client, one.result.model_of(client)) for one in (plain, tuned))
            assert after <= before
        assert tuned.history[-1].aggregate["fits-kept"] > 0
    with pytest.raises(ValueError, match="higher_is_better"):
        STRATEGIES[name](metric="score of mine")


@pytest.mark.parametrize("name", ["clustered", "averaging, groups", "personalized", "ditto"])
def test_who_defines_no_evaluate_is_refused_before_the_first_round(name: str) -> None:
    class Trains:
        def __init__(self, context: Context) -> None:
            self.fit = Linear(context).fit

    options = {} if name in ("clustered", "averaging, groups") else {"fine_tune": 1}
    strategy = STRATEGIES[name](**options)
    with pytest.raises(ValueError, match="evaluate"):
        strategy.start(InProcessGrid(client_app(Trains), N_CLIENTS), start(), num_rounds=8)
    assert not strategy.history


KEPT = ["clustered, private", "personalized", "ditto", "averaging", "averaging, private"]
KEPT += ["averaging, groups", "averaging, sealed", *KINDS]


class Restarting(InProcessGrid):
    """A grid whose clients, or some of them, lose ``context.state`` after every exchange."""

    which: Any = slice(None)

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        """Push messages, and return the replies."""
        replies = list(super().send_and_receive(messages, timeout=timeout))
        for context in [*self.contexts.values()][self.which]:
            context.state.clear()
        return replies


@pytest.mark.parametrize("name", KEPT)
def test_what_clients_keep_on_disk_outlives_their_processes(name: str, tmp_path: Path) -> None:
    kind, options = kind_of(name), {} if name in KINDS else {"fine_tune": 2}
    found = []
    for grid_type in (InProcessGrid, Restarting):
        folder = str(tmp_path / grid_type.__name__)
        where = {"state-dir": folder}
        app = client_app(kind.client)
        grid = grid_type(app, N_CLIENTS, node_config=lambda _, where=where: where)
        strategy = {**STRATEGIES, **OWN}[name](**options)
        strategy.start(grid, kind.start(), num_rounds=40 if name == "fedx" else 4)
        models = [strategy.result.model_of(i, folder) for i in range(N_CLIENTS)]
        assert not any(report.dropped for report in strategy.history)
        found.append(([as_lists(one) for one in models], strategy.history[-1].metrics))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", [one for one in KEPT if one != "fedx"])
def test_a_lost_state_is_in_the_report(name: str) -> None:
    kind, options = kind_of(name), {} if name in KINDS else {"fine_tune": 2}
    grid = Restarting(client_app(kind.client), N_CLIENTS)
    grid.which = slice(1)
    strategy = {**STRATEGIES, **OWN}[name](**options)
    strategy.start(grid, kind.start(), num_rounds=4)
    lost = client_report(strategy.history)[0].get("perdl.state-lost", 0)
    own = [report.metrics.get(0, {}) for report in strategy.history]
    lost += sum(metrics.get("perdl.state-lost", 0) for metrics in own)
    assert lost >= 2
    if name in STRATEGIES:
        assert set(strategy.history[-1].metrics) == set(range(1, N_CLIENTS))
        with pytest.raises(ValueError, match="client"):
            strategy.result.model_of(0)


JOINED = ["clustered", "clustered, private", "personalized", "ditto", *KINDS]


def test_a_private_part_that_the_server_knows_nothing_of_is_lost_aloud() -> None:
    grid = Restarting(client_app(Linear, private=PRIVATE, names=[*start()]), N_CLIENTS)
    grid.which = slice(1)
    strategy = ClusteredFedAvg(1)
    strategy.start(grid, start(), num_rounds=3)
    lost = [report.metrics[0]["perdl.state-lost"] for report in strategy.history]
    assert lost == [0, 1, 1, 1, 1, 1]
    assert not any(report.metrics[1].get("perdl.state-lost") for report in strategy.history)
    assert strategy.result.model_of(1)["intercept"].numpy() != 0
    with pytest.raises(ValueError, match="client 0"):  # the shared model is none of its own
        strategy.result.model_of(0)


@pytest.mark.parametrize("name", JOINED)
def test_a_new_client_is_as_well_off_as_those_that_took_part(name: str) -> None:
    strategy, _ = run(name, 20)
    part = PRIVATE if name in ("clustered, private", "personalized") else ()
    app = client_app(kind_of(name).client, private=part)
    for client in (N_CLIENTS, N_CLIENTS + 1):
        context = context_of(client)
        own = adapt(app, strategy.result, context, fits=40)
        old = [loss_of(p, strategy.result.model_of(p), name) for p in range(N_CLIENTS)]
        assert loss_of(client, own, name) <= 1.1 * max(old) + 1e-3
        assert not context.state
        if name == "clustered, private":
            cluster = strategy.result.models[strategy.result.members[client % 2]]
            np.testing.assert_array_equal(own["slope"].numpy(), cluster["slope"].numpy())


def test_what_adapt_is_given() -> None:
    strategy, _ = run("clustered, private", 20)
    context, app = context_of(N_CLIENTS), client_app(Linear, private=PRIVATE)
    for_training: list[Any] = []

    class Reads(Linear):
        def fit(self, parameters: Any, config: Any) -> Any:
            for_training.append(config["lr"])
            return super().fit(parameters, config)

    adapt(client_app(Reads), strategy.result, context, fits=1, train_config={"lr": 0.5})
    assert for_training == [0.5]
    configs: list[Any] = [0.5, np.zeros(2), {"lr": np.zeros(2)}, {"lr": None}, {1: 2}]
    for wrong in configs:
        with pytest.raises(TypeError, match="train_config"):
            adapt(app, strategy.result, context, train_config=wrong)
    with pytest.raises(TypeError, match="app"):
        adapt(None, strategy.result, context)  # type: ignore[arg-type]


def test_a_node_begins_with_the_mean_of_the_models_that_others_show() -> None:
    strategy, _ = run("averaging", shows_models=True)
    shared = strategy.result.shared
    models = [strategy.result.model_of(i)["slope"].numpy() for i in range(N_CLIENTS)]
    np.testing.assert_allclose(shared["slope"].numpy(), np.mean(models, axis=0))
    own = adapt(client_app(Linear), strategy.result, context_of(9), fits=5)
    assert loss_of(9, own) < loss_of(9, shared)
    hidden, _ = run("averaging")
    with pytest.raises(ValueError, match="result"):
        adapt(client_app(Linear), hidden.result, context_of(9))


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", ["clustered", *KEPT])
def test_what_clients_keep_on_disk_is_at_hand(name: str, together: bool, tmp_path: Path) -> None:
    """Also on their machines, by the folder that the server has saved without it."""
    kept, kind = tmp_path / "states", kind_of(name)
    calls = {"node_config": lambda i: {"name": f"ward/{i}", "state-dir": str(kept)}}
    options: Any = {"state_dir": kept} if together else calls
    grid = InProcessGrid(client_app(kind.client), N_CLIENTS, **options)
    strategy = {**STRATEGIES, **OWN}[name](**({} if name in KINDS else {"fine_tune": 2}))
    strategy.start(grid, kind.start(), num_rounds=40 if name == "fedx" else 4)
    wanted = as_lists(strategy.result.model_of(1))
    assert as_lists(strategy.result.model_of(1, state_dir=kept)) == wanted
    save(tmp_path / "models", strategy.result, state_dir=tmp_path / "elsewhere")
    saved = load(tmp_path / "models")
    for client in (1, np.int64(1), "1" if together else "ward/1"):
        assert as_lists(saved.model_of(client, state_dir=kept)) == wanted
    if name != "fedx":  # a client's model is at the server
        with pytest.raises(ValueError, match="state_dir"):
            saved.model_of(1)


def test_a_resumed_run_is_fine_tuned_once(tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint_dir": tmp_path, "fine_tune": 3}
    first, grid = run("personalized", 2, **options)
    again = STRATEGIES["personalized"](**options, server=ServerSettings(resume=True))
    again.start(grid, start(), num_rounds=2)
    assert [report.step for report in again.history].count("tune") == 1
    assert again.history[-1].metrics == first.history[-1].metrics
    other = PersonalizedFedAvg(["slope"], **options, server=ServerSettings(resume=True))
    with pytest.raises(ValueError, match="private"):
        other.start(grid, start(), num_rounds=2)


@pytest.mark.parametrize("name", ["clustered, private", "personalized"])
def test_a_run_goes_on_without_its_initial_arrays(name: str, tmp_path: Path) -> None:
    whole, _ = run(name, 4)
    _, grid = run(name, 2, checkpoint_dir=tmp_path)
    again = STRATEGIES[name](checkpoint_dir=tmp_path, server=ServerSettings(resume=True))
    again.start(grid, num_rounds=4)
    for client in range(N_CLIENTS):
        one, other = (run.result.model_of(client) for run in (whole, again))
        assert as_lists(one) == as_lists(other)


@ALL_NAMES
def test_what_is_wrong_is_named(name: str) -> None:
    with pytest.raises((TypeError, ValueError), match="fine_tune"):
        {**STRATEGIES, **OWN}[name](fine_tune=-1)
    strategy, _ = run(name, 2)
    with pytest.raises(ValueError, match="client"):
        strategy.result.model_of(77)


@pytest.mark.parametrize("name", ["personalized", *KINDS])
def test_a_result_of_another_strategy_is_rejected(name: str) -> None:
    strategy, _ = run(name, 3)
    for other in [one for one in ("personalized", *KINDS) if one != name]:
        app, context = client_app(kind_of(other).client), context_of(0)
        with pytest.raises(ValueError, match=r"^result"):
            adapt(app, strategy.result, context)
        adapt(app, run(other, 3)[0].result, context)  # the same client can go on


def test_clusters_that_have_not_been_learned_are_none() -> None:
    assert ClusteredFedAvg(2).result.models == []


# Dictionaries and regressions --------------------------------------------------------------------
