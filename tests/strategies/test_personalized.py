"""PersonalizedFedAvg over apps that know nothing of it: hand arithmetic, messages, floats."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from flwr_perdl.clients import client_app, keep_private
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import (
    Adam,
    ClusteredFedAvg,
    Ditto,
    Momentum,
    PersonalizedFedAvg,
    ServerSettings,
    TooFewReplies,
    Yogi,
)
from tests.clients.test_keep_private import NAMES, ask, assert_private_stays, make_app, model
from tests.grids import Forgetting, Tapped, arrays_in, context_of, partition_of

RESUME = ServerSettings(resume=True)
HEAD = ["head.*"]


def personal(*mods: Any, **options: Any) -> Any:
    return client_app(make_app(keep_private("head.*"), *mods, **options))


def start(grid: InProcessGrid, n: int = 3, arrays: Any = None, **options: Any) -> Any:
    strategy = PersonalizedFedAvg(HEAD, **options)
    result = strategy.start(grid, model() if arrays is None else arrays, num_rounds=n)
    return strategy, result


def names_sent(messages: list[Message], kind: str) -> list[list[str]]:
    return [
        list(message.content["arrays"])
        for message in messages
        if message.metadata.message_type == kind and "arrays" in message.content
    ]


def test_the_body_is_averaged_and_nothing_private_travels() -> None:
    grid = Tapped(personal(), 3)
    strategy, result = start(grid)
    assert grid.errors == []
    assert list(result.arrays) == list(NAMES)
    values = [array.numpy().tolist() for array in result.arrays.values()]
    assert values == [[6, 6], [0, 0], [12, 12], [0, 0]]
    assert grid.measured("head") == {0: 3, 1: 6, 2: 9}
    assert set(grid.measured("body").values()) == {6}
    assert_private_stays(grid)
    shared = ["body.weight", "body.bias"]
    assert names_sent(grid.asked, "train") == 3 * [list(NAMES)] + 6 * [shared]
    assert names_sent(grid.asked, "evaluate") == 9 * [shared]
    replied = [list(r.content["arrays"]) for r in grid.replies if "arrays" in r.content]
    assert replied == 9 * [shared]
    floats = [(report.floats_down, report.floats_up) for report in strategy.history]
    assert floats == [(8, 4), (4, 0), (4, 4), (4, 0), (4, 4), (4, 0)]
    first = {"num-examples": 1, "perdl.kept-private": 4, "perdl.state-lost": 0}
    assert strategy.history[0].metrics[1] == first
    assert strategy.history[-1].metrics[1] == {"num-examples": 1, "head": 6, "body": 6}


def test_evaluate_fn_gets_the_shared_part_with_the_initial_private_one(logged: Any) -> None:
    """And the log says so."""
    seen: list[dict[str, Any]] = []

    def evaluate(_: int, arrays: ArrayRecord, cluster: int | None = 3) -> None:
        assert cluster is None  # there are none
        seen.append({name: array.numpy() for name, array in arrays.items()})

    initial = model()
    PersonalizedFedAvg(["head.*"]).start(
        InProcessGrid(personal(), 3), initial, num_rounds=2, evaluate_fn=evaluate
    )
    assert len(seen) == 3
    for name in initial:
        same = np.array_equal(seen[-1][name], initial[name].numpy())
        assert same == name.startswith("head.")
    said = [(record.levelname, record.getMessage()) for record in logged.records]
    assert {level for level, text in said if "evaluate_fn" in text} == {"WARNING"}


def test_who_was_not_there_gets_a_start_when_it_comes() -> None:
    grid = Tapped(personal(), 6)
    strategy, _ = start(grid, 4, fraction_train=0.5, seed=1)
    assert grid.errors == []
    trained: dict[int, int] = dict.fromkeys(range(6), 0)
    for training, evaluation in zip(strategy.history[::2], strategy.history[1::2], strict=True):
        new = [p for p in training.metrics if not trained[p]]
        assert training.floats_down == 4 + 4 * len(new) / 3
        assert training.aggregate["perdl.state-lost"] == 0
        for p in training.metrics:
            trained[p] += 1
        assert {p: m["head"] for p, m in evaluation.metrics.items()} == {
            p: (p + 1) * n for p, n in trained.items()
        }
        assert evaluation.floats_down == 4 + 4 * list(trained.values()).count(0) / 6
    assert sum(trained.values()) == 12


def test_a_client_keeps_more_than_the_server_leaves_out() -> None:
    app = client_app(make_app(keep_private("head.*", "body.bias")))
    grid = Tapped(app, 2)
    _, result = start(grid, 2)
    assert result.arrays["body.bias"].numpy().tolist() == [0, 0]
    assert result.arrays["body.weight"].numpy().tolist() == [3, 3]
    assert_private_stays(grid)


def test_clients_that_keep_less_are_left_out() -> None:
    with pytest.raises(TooFewReplies, match="patterns"):
        start(Tapped(client_app(make_app(keep_private("head.bias"))), 2))


def test_clients_without_patterns_keep_what_the_server_leaves_out() -> None:
    grid = Tapped(client_app(make_app()), 2)
    _, result = start(grid, 2)
    _, other = start(Tapped(client_app(make_app(keep_private("head.*"))), 2), 2)
    for name, array in result.arrays.items():
        np.testing.assert_array_equal(array.numpy(), other.arrays[name].numpy())
    assert_private_stays(grid)


def test_a_client_that_lost_its_part_begins_anew_in_the_next_round() -> None:
    grid = Forgetting(personal(), 3)
    strategy, _ = start(grid, 3)
    assert len(grid.errors) == 1
    assert "state-dir" in grid.errors[0]
    one, two, three = strategy.history[::2]
    assert sorted(two.metrics) == [1, 2]
    assert [report.aggregate["perdl.state-lost"] for report in (one, two, three)] == [0, 0, 1]
    assert three.floats_down == pytest.approx((8 + 4 + 4) / 3)
    assert grid.measured("head") == {0: 1, 1: 6, 2: 9}


def by_hand(optimizer: Any, changes: list[float]) -> float:
    """Return where Reddi et al.'s Algorithm 2, in numbers of Python's, goes from 0."""
    x = m = 0.0
    v = getattr(optimizer, "tau", 0.0) ** 2
    for d in changes:
        if isinstance(optimizer, Momentum):
            m = optimizer.beta * m + d
            x += optimizer.learning_rate * m
            continue
        m = 0.9 * m + 0.1 * d
        if isinstance(optimizer, Yogi):
            v = v - 0.01 * d**2 * np.sign(v - d**2)
        else:
            v = 0.99 * v + 0.01 * d**2
        x += optimizer.learning_rate * m / (v**0.5 + optimizer.tau)
    return float(x)


@pytest.mark.parametrize(
    "optimizer",
    [
        Momentum(learning_rate=0.5, beta=0.9),
        Adam(learning_rate=0.2, tau=0.3),
        Yogi(learning_rate=0.2, tau=0.3),
    ],
)
def test_the_servers_steps_are_those_of_the_paper(optimizer: Any) -> None:
    changes = [3.0, 0.25, -1.0, 2.0]

    def moves(own: dict[str, np.ndarray], config: Any) -> None:
        own["body.weight"] += changes[config["server-round"] - 1] - 1.5  # the app's own mean

    _, result = start(Tapped(personal(spoil=moves), 2), 4, optimizer=optimizer)
    expected = by_hand(optimizer, changes)
    np.testing.assert_allclose(result.arrays["body.weight"].numpy(), expected, rtol=1e-12)
    assert expected != pytest.approx(sum(changes))


class Coupled(NumPyClient):
    """Body and head move by each other; it notes which names it is told."""

    def __init__(self, obeys: bool, told: list[Any]) -> None:
        self.obeys, self.told = obeys, told

    def fit(self, parameters: Any, config: Any) -> Any:
        body, head = parameters
        names = json.loads(config["train-names"])
        self.told.append(names)
        new = {"0": body + head, "1": head + body + 1}
        if not self.obeys:
            names = ["0", "1"]
        return [new[n] if n in names else p for n, p in zip("01", parameters, strict=True)], 1, {}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        assert "train-names" not in config
        return float(parameters[1][0]), 1, {}


@pytest.mark.parametrize("obeys", [True, False])
def test_fedrep_trains_the_head_first_then_the_body(obeys: bool) -> None:
    told: list[Any] = []
    grid = Tapped(client_app(lambda context: Coupled(obeys, told), private=["1"]), 2)
    strategy = PersonalizedFedAvg(["1"], alternate=True)
    given = ArrayRecord([np.ones(1), np.zeros(1)])
    body = strategy.start(grid, given, num_rounds=2).arrays["0"].numpy()
    assert told == 4 * [["1"], ["0"]]
    # head 0 + 1 + 1 = 2, body 1 + 2 = 3; head 2 + 3 + 1 = 6, body 3 + 6 = 9
    assert body.tolist() == [9]
    assert grid.measured("loss") == {0: 6, 1: 6}


@pytest.mark.parametrize("private", [["tail"], ["*"]])
def test_private_names_match_some_arrays_and_not_all(private: list[str]) -> None:
    with pytest.raises(ValueError, match="private"):
        PersonalizedFedAvg(private).start(Tapped(personal(), 2), model())


def test_a_model_is_needed() -> None:
    for strategy in (PersonalizedFedAvg(HEAD), Ditto()):
        with pytest.raises(ValueError, match="initial_arrays"):
            strategy.start(Tapped(personal(), 2))


@pytest.mark.parametrize(
    "strategy",
    [partial(Ditto, 0.1), partial(PersonalizedFedAvg, HEAD, alternate=True)],
    ids=["Ditto", "FedRep"],
)
def test_each_training_finds_the_state_that_it_kept_and_no_other(strategy: Any) -> None:
    """The app keeps in its state in which call of a round it wrote there: the first or second."""
    calls: list[tuple[int, list[int]]] = []

    class Remembers(NumPyClient):
        def __init__(self, context: Context) -> None:
            self.state = context.state

        def found(self) -> list[int]:
            return [int(i) for i in self.state.config_records.get("mine", {"calls": []})["calls"]]

        def fit(self, parameters: Any, config: Any) -> Any:
            calls.append((config["server-round"], self.found()))
            self.state["mine"] = ConfigRecord({"calls": [*self.found(), len(calls) % 2]})
            return [array + 10.0**i for i, array in enumerate(parameters)], 1, {}

        def evaluate(self, parameters: Any, config: Any) -> Any:
            assert self.found() == [0] * config["server-round"]
            return 0.0, 1, {}

    grid = Tapped(client_app(Remembers), 1)
    strategy(min_clients=1).start(grid, model(), num_rounds=3)
    assert grid.errors == []
    assert calls == [(t, [of] * (t - 1)) for t in (1, 2, 3) for of in (1, 0)]


# Ditto --------------------------------------------------------------------------------------


def test_ditto_by_hand() -> None:
    grid = Tapped(client_app(make_app()), 2)
    strategy = Ditto(pull=0.25)
    result = strategy.start(grid, model(), num_rounds=3)
    assert grid.errors == []
    assert list(result.arrays) == list(NAMES)
    np.testing.assert_array_equal(result.arrays["body.weight"].numpy(), 3 * 1.5)
    for p, found in grid.measured("body").items():
        own, shared = 0.0, 0.0
        for _ in range(3):
            own += p + 1
            own += 0.25 * (shared - own)
            shared += 1.5
        assert found == pytest.approx(own)
    floats = [(report.floats_down, report.floats_up) for report in strategy.history]
    assert floats == 3 * [(8, 8), (8, 0)]
    assert [report.aggregate["perdl.state-lost"] for report in strategy.history[::2]] == [0, 0, 0]


def test_no_client_s_own_model_travels() -> None:
    grid = Tapped(client_app(make_app()), 3)
    Ditto(pull=0.3).start(grid, model(), num_rounds=3)
    sent = [array for _, array in arrays_in(grid.asked + grid.replies)]
    own = [
        array.numpy()
        for context in grid.contexts.values()
        for record in context.state.array_records.values()
        for array in record.values()
    ]
    assert len(own) == 3 * 2 * 4
    assert not any(np.isin(mine, array).any() for mine in own for array in sent)


def test_ditto_keeps_what_it_has_if_a_training_fails() -> None:
    calls: list[int] = []

    def fails(own: dict[str, np.ndarray], config: Any) -> None:
        assert not [key for key in config if key in ("perdl.protocol", "perdl.pull")]
        calls.append(config["server-round"])
        if len(calls) == 3 * 2 + 2:  # client 0 in round 2, its own model
            raise RuntimeError("no")

    grid = Tapped(client_app(make_app(spoil=fails)), 3)
    Ditto(pull=0.0).start(grid, model(), num_rounds=3)
    assert len(grid.errors) == 1
    assert grid.measured("body") == {0: 2, 1: 6, 2: 9}


@pytest.mark.parametrize(
    "app",
    [
        client_app(make_app(), private=HEAD),
        client_app(make_app(keep_private(*HEAD))),
        client_app(lambda context: Coupled(True, []), private=HEAD),
    ],
    ids=["option", "mod", "NumPyClient"],
)
def test_ditto_refuses_clients_with_a_private_part_at_the_start(app: Any) -> None:
    grid = Tapped(app, 2)
    with pytest.raises(ValueError, match=r"private.*client 0.*'head\.\*'"):
        Ditto().start(grid, model(), num_rounds=2)
    assert {message.metadata.message_type for message in grid.asked} == {"query"}


def test_ditto_goes_on_without_one_client_that_has_a_private_part() -> None:
    plain, keeping = client_app(make_app()), client_app(make_app(), private=HEAD)

    class Mixed(ClientApp):
        def __call__(self, message: Message, context: Context) -> Message:
            return (plain if partition_of(context) else keeping)(message, context)

    strategy = Ditto(pull=0.25)
    strategy.start(Tapped(Mixed(), 3), model(), num_rounds=2)
    assert [list(report.metrics) for report in strategy.history] == 4 * [[1, 2]]


def test_a_server_of_ditto_that_sends_another_model_is_refused() -> None:
    app, context, ditto = (
        client_app(make_app()),
        context_of(),
        {"perdl.protocol": "ditto", "perdl.step": "train", "perdl.seed": 0},
    )
    ask(app, context, 1, model(), **ditto, **{"perdl.pull": 0.5})
    with pytest.raises(ValueError, match="arrays"):
        ask(app, context, 2, model(head=3), **ditto, **{"perdl.pull": 0.5})


def test_a_run_goes_on_where_all_clients_lost_their_part(tmp_path: Path) -> None:
    start(Tapped(personal(), 2), 1, checkpoint_dir=tmp_path)
    grid = Tapped(personal(), 2)
    start(grid, 2, checkpoint_dir=tmp_path, server=RESUME)
    assert grid.errors == []
    assert grid.measured("head") == {0: 1, 1: 2}


def test_trainings_of_one_message_go_on_from_each_others_private_arrays() -> None:
    class Counts(NumPyClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            return [array + 1 for array in parameters], 1, {}

        def evaluate(self, parameters: Any, config: Any) -> Any:
            return 0.0, 1, dict(zip(("shared", "private"), map(float, parameters), strict=True))

    app = client_app(lambda context: Counts(), private=["1"])
    strategy = ClusteredFedAvg(2, start_rounds=3)
    first = ArrayRecord([np.array(0.0), np.array(0.5)])
    strategy.start(InProcessGrid(app, 3), first, num_rounds=2, verbose="quiet")
    counted = [report.aggregate for report in strategy.history if report.step == "evaluate"]
    assert [(own["shared"], own["private"]) for own in counted] == [(3, 3.5), (4, 4.5)]
