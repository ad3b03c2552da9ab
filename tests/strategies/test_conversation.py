"""The driver of protocols, on protocols small enough to follow by hand."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, MetricRecord
from flwr.client import NumPyClient

from flwr_perdl.clients import client_app
from flwr_perdl.privacy import PublicBasis
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import (
    ClusteredFedAvg,
    ProtocolStrategy,
    Request,
    SecureMean,
    ServerSettings,
    TooFewReplies,
    client_report,
)
from tests.grids import Tapped, failing, partition_of

RESUME = ServerSettings(resume=True)


class Adder(NumPyClient):
    """Adds its partition id to what it receives."""

    def __init__(self, context: Context) -> None:
        self.partition = partition_of(context)

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        return {"partition-id": self.partition}

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> Any:
        return [parameters[0] + self.partition], self.partition + 1, {"seen": config["n"]}

    def evaluate(self, parameters: list[Any], config: dict[str, Any]) -> Any:
        return float(parameters[0].sum()), 1, {}


class Sum(ProtocolStrategy):
    """Adds up what the clients send; stops by itself after ``stop`` rounds."""

    def __init__(self, stop: int = 100, **options: Any) -> None:
        super().__init__(**options)
        self.stop = stop

    def protocol(self, initial: Any, state: Any) -> Any:
        state = state or {"total": np.zeros(1), "n": np.array(0)}
        while int(state["n"]) < self.stop:
            replies = yield Request("add", [state["total"]], {"n": int(state["n"])}, state)
            total = sum(reply.arrays[0] for reply in replies.values())
            state = {"total": np.asarray(total), "n": state["n"] + 1}
        return [state["total"]]


def grid(n: int = 3, **options: Any) -> InProcessGrid:
    return InProcessGrid(client_app(Adder), n, **options)


def test_a_protocol_is_driven_round_by_round() -> None:
    strategy = Sum()
    result = strategy.start(grid(), num_rounds=2)
    # Round 1: 0 + 1 + 2 = 3; round 2: 3 + 4 + 5 = 12.
    np.testing.assert_array_equal(result.arrays.to_numpy_ndarrays()[0], [12.0])
    training = [report for report in strategy.history if report.step == "add"]
    assert [report.round for report in training] == [1, 2]
    assert training[1].metrics[2] == {"num-examples": 3, "seen": 1.0}
    assert training[1].aggregate == {"seen": 1.0, "clients": 3.0, "dropped": 0.0}
    assert (training[0].floats_down, training[0].floats_up) == (1.0, 1.0)
    assert [report.aggregate["loss"] for report in strategy.history if report.step != "add"] == [
        3,
        12,
    ]


def test_a_protocol_may_end_before_the_rounds_do_and_stays_ended(tmp_path: Path) -> None:
    for server in (ServerSettings(), RESUME):
        strategy = Sum(stop=1, checkpoint_dir=tmp_path, server=server)
        result = strategy.start(grid(), num_rounds=5)
        np.testing.assert_array_equal(result.arrays.to_numpy_ndarrays()[0], [3.0])
        assert len([report for report in strategy.history if report.step == "add"]) == 1


def test_sampling_depends_on_seed_and_round_only() -> None:
    def asked(seed: int) -> list[list[int]]:
        strategy = Sum(fraction_train=0.3, fraction_evaluate=0.0, seed=seed)
        strategy.start(grid(20), num_rounds=4)
        return [list(report.metrics) for report in strategy.history]

    first = asked(0)
    assert first == asked(0)
    assert first != asked(1)
    assert all(len(partitions) == 6 and partitions == sorted(partitions) for partitions in first)
    assert len({tuple(partitions) for partitions in first}) > 1


def test_too_few_good_replies_stop_the_run_with_the_last_state_saved(tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint_dir": tmp_path, "fraction_evaluate": 0.0}
    with pytest.raises(TooFewReplies, match="min_clients=2"):
        Sum(**options).start(grid(faults=failing("error", [1, 2], [2])), num_rounds=3)
    resumed = Sum(**options, server=RESUME)
    result = resumed.start(grid(), num_rounds=3)
    np.testing.assert_array_equal(result.arrays.to_numpy_ndarrays()[0], [39.0])
    assert [report.round for report in resumed.history] == [1, 2, 3]


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    Sum(checkpoint_dir=tmp_path).start(grid(), num_rounds=2)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for server, named in ((ServerSettings(), "checkpoint_dir"), (RESUME, "seed")):
        with pytest.raises(ValueError, match=named):  # nor resumed with other options
            Sum(checkpoint_dir=tmp_path, seed=1, server=server).start(grid(), num_rounds=3)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_checkpoint_does_not_grow_with_the_rounds(tmp_path: Path) -> None:
    sizes = []
    for rounds in (2, 40):
        folder = tmp_path / f"{rounds}"
        Sum(checkpoint_dir=folder).start(grid(), num_rounds=rounds)
        sizes.append((folder / f"round-{rounds:06d}.npz").stat().st_size)
        assert len(list(folder.iterdir())) == 3  # two rounds, one history
    assert sizes[1] < 1.1 * sizes[0]
    again = Sum(checkpoint_dir=folder, server=RESUME)
    again.start(grid(), num_rounds=40)
    assert [report.round for report in again.history if report.step == "add"] == [*range(1, 41)]


def test_a_damaged_history_does_not_stop_the_run(tmp_path: Path, warned: Any) -> None:
    Sum(checkpoint_dir=tmp_path).start(grid(), num_rounds=2)
    (history,) = tmp_path.glob("history-*.jsonl")
    history.write_text(history.read_text().replace("1", "2"))
    for _ in range(2):
        again = Sum(checkpoint_dir=tmp_path, server=RESUME)
        result = again.start(grid(), num_rounds=3)
        np.testing.assert_array_equal(result.arrays.to_numpy_ndarrays()[0], [39.0])
        assert [report.round for report in again.history] == [3, 3]
    assert str(history) in warned.text


def test_a_run_is_resumed_with_its_own_initial_arrays_or_none(tmp_path: Path) -> None:
    class Shifted(ProtocolStrategy):
        def protocol(self, initial: Any, state: Any) -> Any:
            model = [state["model"]] if state is not None else initial
            while True:
                yield Request("add", model, {"n": 0}, {"model": model[0]})

    def begin(*arrays: Any, rounds: int = 2, **options: Any) -> None:
        given = ArrayRecord(list(arrays)) if arrays else None
        Shifted(checkpoint_dir=tmp_path, **options).start(grid(), given, num_rounds=rounds)

    begin(np.zeros(3), rounds=1)
    with pytest.raises(ValueError, match="initial_arrays"):
        begin(np.zeros(4), server=RESUME)
    begin(server=RESUME)
    begin(np.ones(3), server=RESUME, rounds=3)  # of a network that is drawn anew: not used
    result = Shifted(checkpoint_dir=tmp_path, server=RESUME).start(grid(), num_rounds=3)
    np.testing.assert_array_equal(result.arrays["0"].numpy(), np.zeros(3))
    renamed = ArrayRecord({"other": Array(np.zeros(3))})
    with pytest.raises(ValueError, match="initial_arrays"):
        Shifted(checkpoint_dir=tmp_path, server=RESUME).start(grid(), renamed, num_rounds=4)


def test_the_fewest_good_replies_are_counted_after_unlike_ones_are_left_out(
    tmp_path: Path,
) -> None:
    class Choosy(Sum):
        def protocol(self, initial: Any, state: Any) -> Any:
            while True:
                replies = yield Request("add", [np.zeros(1)], {"n": 0}, {"t": np.zeros(1)})
                replies.leave_out(dict.fromkeys(list(replies)[1:], "unlike the first"))

    strategy = Choosy(min_clients=2, fraction_evaluate=0.0, checkpoint_dir=tmp_path)
    with pytest.raises(TooFewReplies, match="min_clients"):
        strategy.start(grid(), num_rounds=1)
    assert not list(tmp_path.glob("round-*"))


def test_numbers_in_a_state_are_numbers_again(tmp_path: Path) -> None:
    seen = []

    class Counting(ProtocolStrategy):
        def protocol(self, initial: Any, state: Any) -> Any:
            state = state or {"t": 0, "rate": 0.1, "on": True, "w": np.array(2.0)}
            while True:
                seen.append(dict(state))
                yield Request("add", [np.zeros(1)], {"n": 0, "t": state["t"]}, state)
                state = {**state, "t": state["t"] + 1}

    Counting(checkpoint_dir=tmp_path).start(grid(), num_rounds=2)
    Counting(checkpoint_dir=tmp_path, server=RESUME).start(grid(), num_rounds=3)
    before, after = seen[2], seen[3]
    assert [type(value) for value in after.values()] == [type(v) for v in before.values()]
    assert after == before


class Weighted(Sum):
    """Has settings that JSON knows no form of."""

    def __init__(self, weights: Any, **options: Any) -> None:
        super().__init__(**options)
        self.weights = weights


BASES = np.linalg.qr(np.random.default_rng(0).standard_normal((2, 60, 60)))[0]


@pytest.mark.parametrize(
    ("weights", "others"),
    [
        ((1, 2), (1, 3)),
        ({1: 2}, {1: 3}),
        (np.arange(3.0), np.arange(4.0)),
        ({"x": np.float32(0.5)}, {"x": np.float32(0.25)}),
        (np.median, np.mean),
        (PublicBasis(BASES[0]), PublicBasis(BASES[1])),  # whose representations are alike
        (float("nan"), 0.0),
    ],
)
def test_a_protocols_settings_may_be_tuples_arrays_and_functions(
    tmp_path: Path, weights: Any, others: Any
) -> None:
    Weighted(weights, checkpoint_dir=tmp_path).start(grid(), num_rounds=1)
    again = Weighted(weights, checkpoint_dir=tmp_path, server=RESUME)
    result = again.start(grid(), num_rounds=2)
    np.testing.assert_array_equal(result.arrays.to_numpy_ndarrays()[0], [12.0])
    with pytest.raises(ValueError, match="weights"):
        Weighted(others, checkpoint_dir=tmp_path, server=RESUME).start(grid(), num_rounds=2)


def test_a_setting_that_no_checkpoint_can_tell_is_named(tmp_path: Path) -> None:
    Weighted(object()).start(grid(), num_rounds=1)
    with pytest.raises(ValueError, match="settings"):
        Weighted(object(), checkpoint_dir=tmp_path).start(grid(), num_rounds=1)


def test_who_cannot_come_is_not_waited_for() -> None:
    began, options = time.monotonic(), {"node_timeout": 30.0}
    with pytest.raises(TooFewReplies, match="num_clients=9"):
        Sum(num_clients=9, server=ServerSettings(**options)).start(grid(), num_rounds=1)
    few = Sum(num_clients=9, server=ServerSettings(**options, allow_fewer=True))
    few.start(grid(), num_rounds=1)
    assert few.history[0].aggregate["clients"] == 3
    assert time.monotonic() - began < 15


def test_a_resumed_run_does_not_measure_a_later_model_for_an_early_round(tmp_path: Path) -> None:
    def measured(round_: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"total": float(arrays["0"].numpy()[0])})

    Sum(checkpoint_dir=tmp_path).start(grid(), num_rounds=2)
    again = Sum(checkpoint_dir=tmp_path, server=RESUME)
    result = again.start(grid(), num_rounds=3, timeout=None, evaluate_fn=measured)  # no limit
    assert list(result.evaluate_metrics_serverapp) == [2, 3]


class Asks(ProtocolStrategy):
    """Makes these requests one after the other, and returns what it is told to."""

    def __init__(self, *requests: Any, returns: Any = None, **options: Any) -> None:
        super().__init__(**{"fraction_evaluate": 0.0, **options})
        self._requests, self._returns = requests, returns

    def protocol(self, initial: Any, state: Any) -> Any:
        for request in self._requests:
            self.heard = yield request
        return self._returns


ONE = [np.zeros(1)]


def times(log: pytest.LogCaptureFixture, text: str) -> int:
    """Return how often this is said; some loggers hand a record to the fixture twice."""
    return len({id(record) for record in log.records if text in record.getMessage()})


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"step": ""}, "step"),
        ({"arrays": np.zeros(4)}, "arrays"),
        ({"arrays": [[0.0, 1.0]]}, "arrays"),
        ({"arrays": [np.array([{}])]}, "arrays"),
        ({"arrays": "text"}, "arrays"),
        ({"arrays": None}, "arrays"),
        ({"model": np.zeros(2)}, "model"),
        ({"expect": np.zeros(2)}, "expect"),
        ({"config": 3}, "config"),
        ({"config": {"n": [1]}}, "config.*'n'"),
        ({"state": [1]}, "state"),
        ({"state": {"a": {"b": 1}}}, "state.*'a'"),
        ({"metrics": "seen"}, "metrics"),
        ({"reuse_last_reply": 1, "secure": SecureMean((1,))}, "reuse_last_reply"),
        ({"max_weight": 0.5}, "max_weight"),
        ({"max_values": -1}, "max_values"),
        ({"check": None}, "check"),
        ({"per_client": ONE}, "per_client"),
        ({"summed": ONE}, "summed"),
        ({"combine": {"group": "a"}}, "combine"),
    ],
)
def test_what_a_protocol_asks_is_checked_before_anything_is_sent(
    arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"^Request\.{named}"):
        Request(**{"step": "add", "arrays": ONE, **arguments})


def test_what_a_protocol_yields_is_a_request(tmp_path: Path) -> None:
    here = Tapped(client_app(Adder), 3)
    with pytest.raises(TypeError, match="protocol"):
        Asks("add", checkpoint_dir=tmp_path).start(here, num_rounds=1)
    assert not here.asked
    assert not list(tmp_path.iterdir())


def test_what_each_client_receives_is_checked() -> None:
    with pytest.raises(ValueError, match="per_client"):
        Asks(Request("add", per_client=lambda partition: np.zeros(1))).start(grid(), num_rounds=1)


def test_a_check_that_trips_over_a_reply_leaves_it_out() -> None:
    request = Request("add", ONE, {"n": 0}, check=lambda reply: reply.arrays[7])
    with pytest.raises(TooFewReplies, match="IndexError"):
        Asks(request, returns=ONE).start(grid(), num_rounds=1)


def test_a_protocol_that_ends_without_a_model_is_told_how() -> None:
    class NoGenerator(Asks):
        def protocol(self, initial: Any, state: Any) -> Any:
            return None

    request = Request("add", ONE, {"n": 0})
    for wrong in (Asks(request), Asks(request, returns=np.zeros(2)), NoGenerator()):
        with pytest.raises(ValueError, match="protocol"):
            wrong.start(grid(), num_rounds=2)


def test_a_reply_without_a_metric_that_is_asked_for_is_left_out() -> None:
    class Some(Adder):
        def fit(self, parameters: Any, config: Any) -> Any:
            metrics = {} if self.partition == 1 else {"loss": 1.0}
            return parameters, 1, metrics

    strategy = Asks(Request("add", ONE, metrics=("loss",)), returns=ONE)
    strategy.start(InProcessGrid(client_app(Some), 3), num_rounds=1)
    assert list(strategy.heard) == [0, 2]
    assert strategy.history[0].dropped == {"client 1": "metrics must have 'loss', got []"}
    assert client_report(strategy.history)[1]["refused"] == 1


class Talks(Adder):
    """Returns metrics of all kinds."""

    def fit(self, parameters: Any, config: Any) -> Any:
        odd = [0.5] * (1 + self.partition)  # which is averaged nowhere
        metrics = {"site": f"site {self.partition}", "recall": [self.partition, 1], "odd": odd}
        return [parameters[0] + 1], self.partition + 1, metrics

    def evaluate(self, parameters: Any, config: Any) -> Any:
        return 1.0, *self.fit(parameters, config)[1:]


@pytest.mark.parametrize("kind", [Sum, ClusteredFedAvg])
def test_texts_and_lists_among_metrics_are_kept_and_lists_averaged_as_fedavg_does(
    kind: Any, tmp_path: Path, capsys: Any
) -> None:
    nodes, initial = InProcessGrid(client_app(Talks), 3), ArrayRecord([np.zeros(1)])
    mean = [(0 + 2 + 6) / 6, 1.0]
    options = {"k": 2} if kind is ClusteredFedAvg else {}
    kind(**options, checkpoint_dir=tmp_path).start(nodes, initial, num_rounds=2)
    strategy = kind(**options, checkpoint_dir=tmp_path, server=RESUME)
    result = strategy.start(nodes, initial, num_rounds=3, verbose="bar")
    for report in strategy.history:
        own = report.metrics[2]
        assert (own["site"], own["recall"], own["odd"]) == ("site 2", [2.0, 1.0], [0.5] * 3)
        assert report.aggregate["recall"] == pytest.approx(mean)
        assert not {"site", "odd"} & {*report.aggregate}
        assert not {"site", "odd", "recall"} & {*report.numbers[2]}
    assert result.evaluate_metrics_clientapp[3]["recall"] == pytest.approx(mean)
    history: Any = strategy.history
    assert "recall" in history._repr_html_()
    assert "loss" in capsys.readouterr().err


@pytest.mark.parametrize("bound", [None, 2.0, "default"])
def test_a_client_that_claims_many_examples_is_capped_and_named(bound: Any, warned: Any) -> None:
    class Boasts(Adder):
        def fit(self, parameters: Any, config: Any) -> Any:
            return parameters, 2**53 if self.partition == 2 else 4, {"value": self.partition}

    options = {} if bound == "default" else {"max_weight": bound}
    strategy = Asks(Request("add", ONE, **options), returns=ONE)
    strategy.start(InProcessGrid(client_app(Boasts), 3), num_rounds=1)
    counts = {"default": 40, None: 2**53, 2.0: 8}[bound]
    assert [reply.num_examples for reply in strategy.heard.values()] == [4, 4, counts]
    report = strategy.history[0]
    assert report.aggregate["value"] == pytest.approx((4 + 2 * counts) / (8 + counts))
    named = client_report(strategy.history)[2].get("capped", 0.0)
    assert named == pytest.approx(1 - counts / 2**53)
    assert ("client 2 counts for" in warned.text) == (bound is not None)


def test_a_run_without_state_cannot_be_resumed(tmp_path: Path, warned: Any) -> None:
    request = Request("add", ONE, {"n": 0})
    Asks(*[request] * 4, returns=ONE, checkpoint_dir=tmp_path).start(grid(), num_rounds=2)
    assert times(warned, "This run cannot be resumed") == 1
    again = Asks(*[request] * 4, returns=ONE, checkpoint_dir=tmp_path, server=RESUME)
    with pytest.raises(ValueError, match="checkpoint_dir"):
        again.start(grid(), num_rounds=4)


def test_clients_without_evaluate_are_asked_once_and_nobody_is_blamed(warned: Any) -> None:
    class Silent(NumPyClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            return parameters, 1, {}

    strategy = Asks(*[Request("add", ONE)] * 3, returns=ONE, fraction_evaluate=1.0)
    result = strategy.start(InProcessGrid(client_app(lambda context: Silent()), 3), num_rounds=3)
    assert [report.step for report in strategy.history] == ["add"] * 3
    assert not result.evaluate_metrics_clientapp
    assert not warned.text

    class Both(Silent):
        evaluate = Adder.evaluate

    mixed = Asks(*[Request("add", ONE)] * 3, returns=ONE, fraction_evaluate=1.0)
    app = client_app(lambda c: Silent() if partition_of(c) == 1 else Both())
    mixed.start(InProcessGrid(app, 3), num_rounds=3)
    assert times(warned, "left out client 1: error 4501: the client must") == 1
    assert client_report(mixed.history)[1]["failed"] == 3


def test_evaluations_that_all_fail_are_named_at_the_end_and_in_the_result(warned: Any) -> None:
    class Errs(Adder):
        def evaluate(self, parameters: Any, config: Any) -> Any:
            raise RuntimeError("Error(s) in loading state_dict:\n\tMissing key(s): weight")

    strategy = Asks(*[Request("add", ONE, {"n": 1})] * 3, returns=ONE, fraction_evaluate=1.0)
    result = strategy.start(InProcessGrid(client_app(Errs), 3), num_rounds=3, verbose="quiet")
    for metrics in result.evaluate_metrics_clientapp.values():
        assert dict(metrics) == {"clients": 0, "dropped": 3}
    assert list(result.evaluate_metrics_clientapp) == [1, 2, 3]
    last = warned.records[-1].getMessage()
    assert "3 of 3 evaluations" in last
    assert "Missing key(s): weight" in last
