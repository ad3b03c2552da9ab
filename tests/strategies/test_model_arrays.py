"""The arrays of a model as a PyTorch app sends it, through all strategies for any model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from flwr_perdl.clients import client_app
from flwr_perdl.network import TopK, Topology, push_weights
from flwr_perdl.privacy import Noise
from flwr_perdl.protocol.records import Reply
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import (
    Adam,
    ClusteredFedAvg,
    Combine,
    DiffusionAveraging,
    Ditto,
    Momentum,
    PersonalizedFedAvg,
    Replies,
    Yogi,
)
from tests.grids import Tapped, arrays_in, as_app, partition_of
from tests.network.objectives import AVERAGING

N, ROUNDS = 4, 4
#: A network with batch normalization, a mask of attention, a table, and flags.
MODEL = {
    "conv.weight": np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3),
    "conv.scale": np.ones(3, np.float16),
    "bn.running_mean": np.zeros(4, np.float32),
    "bn.running_var": np.ones(4, np.float32),
    "bn.num_batches_tracked": np.array(5),
    "mask": np.array([0, -np.inf, np.nan, -3e38], np.float32),
    "kept": np.array([True, False]),
    "head.weight": np.zeros((2, 4), np.float32),
}
COUNTER = "bn.num_batches_tracked"


def trained(own: dict[str, np.ndarray], p: int) -> dict[str, np.ndarray]:
    """Return a model after a client's training, whose statistics move towards its own."""
    new = dict(own)
    for name in ("conv.weight", "head.weight", "conv.scale"):
        new[name] = (own[name] + 0.1 * (p + 1 - own[name])).astype(own[name].dtype)
    new["bn.running_mean"] = own["bn.running_mean"] + np.float32(0.5) * (p - own["bn.running_mean"])
    rest = np.float32(0.05) - own["bn.running_var"]
    new["bn.running_var"] = own["bn.running_var"] + np.float32(0.8) * rest
    new[COUNTER] = own[COUNTER] + 3
    return new


def make_app(spoil: Callable[[dict[str, np.ndarray], int], Any] = lambda own, p: None) -> ClientApp:
    """Return an app that checks what it receives; its loss needs a positive variance."""

    class Net(NumPyClient):
        def __init__(self, context: Context) -> None:
            self.p = partition_of(context)

        def received(self, parameters: list[np.ndarray]) -> dict[str, np.ndarray]:
            own = dict(zip(MODEL, parameters, strict=True))
            for name, array in MODEL.items():
                assert (own[name].shape, own[name].dtype) == (array.shape, array.dtype)
                if name in ("mask", "kept"):
                    assert own[name].tobytes() == array.tobytes()
            return own

        def fit(self, parameters: Any, config: Any) -> Any:
            own = trained(self.received(parameters), self.p)
            spoil(own, self.p)
            return [*own.values()], 1, {}

        def evaluate(self, parameters: Any, config: Any) -> Any:
            own = self.received(parameters)
            with np.errstate(invalid="ignore"):
                loss = float(np.sqrt(own["bn.running_var"]).sum())
            loss += float(np.square(own["conv.weight"] - self.p).sum())
            shown = {"counter": own[COUNTER], "var": own["bn.running_var"].min()}
            return loss, 1, {name: float(value) for name, value in shown.items()}

    return as_app(Net)


def start(strategy: Any, app: ClientApp | None = None, rounds: int = ROUNDS) -> Any:
    grid = Tapped(client_app(app or make_app()), N)
    given = ArrayRecord({name: Array(array) for name, array in MODEL.items()})
    return grid, strategy.start(grid, given, num_rounds=rounds)


RING = Topology.ring(N)
DIRECTED = Topology.exponential(N)
STRATEGIES: dict[str, Callable[[], Any]] = {
    "personal": lambda: PersonalizedFedAvg(["head.*"]),
    "personal, robust": lambda: PersonalizedFedAvg(["head.*"], robust=True),
    "personal, mask private": lambda: PersonalizedFedAvg(["mask", "kept"], optimizer=Yogi()),
    "personal, counter private": lambda: PersonalizedFedAvg(["bn.*"]),
    "ditto": lambda: Ditto(),
    "ditto, adam": lambda: Ditto(optimizer=Adam()),
    "one": lambda: ClusteredFedAvg(1, optimizer=Momentum()),
    "groups": lambda: ClusteredFedAvg(2, robust="median"),
    "anchors": lambda: ClusteredFedAvg(2, start="anchors"),
    "random": lambda: ClusteredFedAvg(2, start="random"),
    **{method: lambda m=method: DiffusionAveraging(RING, method=m) for method in AVERAGING},
    "clip": lambda: DiffusionAveraging(Topology.complete(N), robust="clip"),
    "trimmed": lambda: DiffusionAveraging(Topology.complete(N), robust="trimmed"),
    "compressed": lambda: DiffusionAveraging(RING, compression=TopK(0.5)),
    "sealed": lambda: DiffusionAveraging(RING, sealed=True),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_array_keeps_its_dtype_and_what_cannot_be_averaged(name: str) -> None:
    strategy = STRATEGIES[name]()
    grid, result = start(strategy)
    assert grid.errors == []
    assert not any(report.dropped for report in strategy.history)
    clustered = isinstance(strategy, ClusteredFedAvg)
    for arrays in strategy.result.models if clustered else [result.arrays]:
        for array_name, array in arrays.items():
            of_model, own = MODEL[array_name], array.numpy()
            assert (own.dtype, own.shape) == (of_model.dtype, of_model.shape)
            if array_name in ("mask", "kept"):
                assert own.tobytes() == of_model.tobytes()
            if array_name == COUNTER:
                assert own == 5 + 3 * ROUNDS * ("counter" not in name)
            if array_name == "bn.running_var":
                assert (own > 0).all()
    if name.startswith("personal"):  # each client's own counter, or the shared one
        assert set(grid.measured("counter").values()) == {5 + 3 * ROUNDS}


@pytest.mark.parametrize("method", AVERAGING)
def test_messages_between_neighbors_have_the_dtypes_of_the_model(method: str) -> None:
    net = DIRECTED if method == "push_sum" else RING
    weights = {"weights": push_weights(net)} if method == "push_sum" else {}
    strategy = DiffusionAveraging(net, method=method, metrics=["counter", "var", "loss"], **weights)
    grid, _ = start(strategy)
    floats = [array for array in MODEL.values() if array.dtype.kind == "f"]
    n_bytes = sum(array.nbytes for array in MODEL.values() if array.dtype.kind != "b")
    corrected = sum(array.nbytes for array in floats) - 2 * MODEL["bn.running_var"].nbytes
    extra = {"gradient_tracking": corrected, "push_sum": 4}.get(method, 0)
    received = strategy.averaged.curves["bytes-received"]
    degrees = np.asarray(net.adjacency.sum(axis=1)).ravel()
    np.testing.assert_array_equal(received, np.tile(degrees * (n_bytes + extra), (ROUNDS, 1)))
    sent = [array for reply in grid.replies for array in reply.content.get("arrays", {}).values()]
    assert sum(array.numpy().nbytes for array in sent) == N * ROUNDS * (n_bytes + extra)
    asked = [
        array for request in grid.asked for array in request.content.get("arrays", {}).values()
    ]
    assert {id(array.data) for array in sent} <= {id(array.data) for array in asked}  # handed on
    curves = strategy.averaged.curves
    last = curves["evaluate-counter"][-1]
    assert (last == 5 + 3 * ROUNDS).all()
    assert (curves["evaluate-var"] > 0).all()


def test_integers_are_the_weighted_mean_rounded_half_to_even() -> None:
    start = [np.array([0, 0, 0, 2**60]), np.zeros(1)]
    rows = [([1, 2, 0, 2**60], 1), ([2, 3, 0, 2**60], 1), ([0, 0, 8, 2**60], 2)]
    given = Replies(
        {i: Reply([np.array(x), np.array([float(i)])], n, {}) for i, (x, n) in enumerate(rows)}
    )
    for rule in ("mean", "median", "clip"):
        counts, _ = Combine(start=start, rule=rule)(given)
        assert (counts.dtype, counts.tolist()) == (np.int64, [1, 1, 4, 2**60])
    halves = Replies({i: Reply([np.array([x, x + 1])], 1, {}) for i, x in enumerate((1, 2))})
    assert Combine(start=[np.zeros(2, int)])(halves)[0].tolist() == [2, 2]


def test_a_rule_that_leaves_out_a_client_leaves_out_its_integers() -> None:
    values = [*np.linspace(0.9, 1.1, 9).tolist(), 50.0]
    given = Replies(
        {i: Reply([np.full(3, x), np.array(int(x > 2) * 90)], 1, {}) for i, x in enumerate(values)}
    )
    model, count = Combine(start=[np.zeros(3), np.array(0)], rule="filtered")(given)
    assert np.abs(model - 1).max() < 0.1
    assert count == 0


@pytest.mark.parametrize("optimizer", [Momentum(), Adam(), Yogi()])
def test_optimizers_extrapolate_no_statistics(optimizer: Any) -> None:
    strategies = [
        (lambda **o: ClusteredFedAvg(1, **o)),
        (lambda **o: Ditto(**o)),
        (lambda **o: PersonalizedFedAvg(["head.*"], **o)),
    ]
    for make in strategies:
        (_, plain), (grid, moved) = start(make()), start(make(optimizer=optimizer))
        for name in ("bn.running_mean", "bn.running_var", COUNTER):
            assert moved.arrays[name].numpy().tobytes() == plain.arrays[name].numpy().tobytes()
        weights = (one.arrays["conv.weight"].numpy() for one in (plain, moved))
        assert not np.allclose(*weights)
        assert set(grid.measured("var")) == set(range(N))


@pytest.mark.parametrize("of_handlers", [False, True])
@pytest.mark.parametrize(
    ("bad", "since", "expected"),
    [(1, 2, [None, 1]), (2, 2, [None, 2]), (6, 2, [None, 6]), (5, 1, [5, 5]), (6, 1, [6, 6])],
)
def test_an_evaluation_without_a_third_of_the_losses_is_a_warning(
    warned: pytest.LogCaptureFixture,
    bad: int,
    since: int,
    expected: list[int | None],
    of_handlers: bool,
) -> None:
    class Some(NumPyClient):
        """Of six clients the last ``bad`` have no finite loss from a round on."""

        def __init__(self, context: Context) -> None:
            self.p = partition_of(context)

        def fit(self, parameters: Any, config: Any) -> Any:
            return parameters, 1, {}

        def evaluate(self, parameters: Any, config: Any) -> Any:
            lost = self.p >= 6 - bad and config["server-round"] >= since
            return float("nan") if lost else 1.0, 1, {}

    app, strategy = client_app(as_app(Some) if of_handlers else Some), Ditto()
    result = strategy.start(InProcessGrid(app, 6), ArrayRecord([np.zeros(1)]), num_rounds=2)
    found = [m.get("perdl.no-finite-loss") for m in result.evaluate_metrics_clientapp.values()]
    assert found == expected
    said = [one for one in warned.messages if "no finite loss" in one]
    assert [f"Round {since} (evaluate): {bad} of 6" in one for one in said] == [True] * (bad > 1)
    last = strategy.history[-1].metrics
    assert [p for p in last if "perdl.no-finite-loss" in last[p]] == [*range(6 - bad, 6)]


SPOILED: dict[str, tuple[str, Any]] = {
    "a number": ("mask", np.array([0, 7, np.nan, -3e38], np.float32)),
    "another infinity": ("mask", np.array([0, np.inf, np.nan, -3e38], np.float32)),
    "a further NaN": ("mask", np.array([np.nan, -np.inf, np.nan, -3e38], np.float32)),
    "NaN": ("conv.weight", np.full((4, 3), np.nan, np.float32)),
    "a boolean": ("kept", np.array([True, True])),
    "a large integer": (COUNTER, np.array(2**60)),
    "no integer": (COUNTER, np.array(5.5)),
    "complex numbers": ("conv.weight", np.full((4, 3), 1j)),
}


@pytest.mark.parametrize("spoiled", SPOILED)
@pytest.mark.parametrize("name", ["personal", "ditto", "one", "random", "atc"])
def test_what_must_stay_as_it_was_is_named_with_the_client(name: str, spoiled: str) -> None:
    array_name, value = SPOILED[spoiled]
    app = make_app(lambda own, p: own.update({array_name: value}) if p == 3 else None)
    strategy = STRATEGIES[name]()
    start(strategy, app, 2)
    for report in strategy.history:
        if report.step not in ("evaluate", "show"):
            assert list(report.dropped) == ["client 3"]
            reason = report.dropped["client 3"]
            assert array_name in reason or "after training" in reason


def test_private_arrays_are_checked_likewise() -> None:
    app = make_app(lambda own, p: own.update(mask=np.zeros(4, np.float32)) if p == 3 else None)
    strategy = STRATEGIES["personal, mask private"]()
    start(strategy, app, 1)
    assert "mask" in strategy.history[0].dropped["client 3"]


def test_promoted_arrays_come_back_as_they_were_sent() -> None:
    def promote(own: dict[str, np.ndarray], p: int) -> None:
        for name in ("conv.weight", "conv.scale", COUNTER):
            own[name] = own[name].astype(float)

    for name in ("personal", "ditto", "groups", "gradient_tracking"):
        strategy = STRATEGIES[name]()
        grid, _ = start(strategy, make_app(promote))
        assert grid.errors == []
        assert not any(report.dropped for report in strategy.history)
        sent = {array.dtype for key, array in arrays_in(grid.replies) if key in MODEL}
        assert np.dtype(float) not in sent


def test_a_dtype_that_is_none_of_a_model_is_named() -> None:
    for value in (np.ones(2, "V2"), np.ones(2, complex)):
        given = ArrayRecord({"head.w": Array(np.ones(2)), "b": Array(value)})
        for name in ("personal", "ditto", "groups", "atc"):
            grid = Tapped(client_app(make_app()), N)
            with pytest.raises(ValueError, match=r"^initial_arrays.*'b'"):
                STRATEGIES[name]().start(grid, given, num_rounds=1)
            assert not grid.asked


def test_integers_get_no_noise() -> None:
    noise = Noise(epsilon=50, delta=1e-5, clip=1.0, trust="central", level="client")
    strategy = PersonalizedFedAvg(share="*", privacy=noise, fraction_evaluate=0.0)
    grid, result = start(strategy, rounds=2)
    assert grid.errors == []
    for name, before in MODEL.items():
        after = result.arrays[name].numpy()
        assert after.dtype == before.dtype
        kept = before.dtype.kind != "f"
        assert (after.tobytes() == before.tobytes()) == kept
    assert result.arrays["mask"].numpy()[1:].tobytes() == MODEL["mask"][1:].tobytes()
