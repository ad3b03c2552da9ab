"""keep_private around apps that know nothing of it, under Flower's own strategies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.serverapp.strategy import FedAdam, FedAvg, FedProx

from flwr_perdl.clients import client_app, keep_private
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import PersonalizedFedAvg
from tests.grids import Tapped, arrays_in, failing, partition_of

NAMES = ("body.weight", "head.weight", "body.bias", "head.bias")
#: Added by client p in every training to each array: nobody's step is another's sum.
STEPS = {"body.weight": 1.0, "head.weight": 1e3, "body.bias": 2.0, "head.bias": 1e6}


def model(**shapes: int) -> ArrayRecord:
    return ArrayRecord({n: Array(np.zeros(shapes.get(n.partition(".")[0], 2))) for n in NAMES})


def make_app(
    *mods: Any,
    spoil: Callable[[dict[str, np.ndarray], Any], Any] | None = None,
    talks: bool = False,
) -> Any:
    """Return an app of the Message API that adds ``(p + 1) * STEPS``, and reports its head.

    ``talks``: its model is in all replies, as in Flower's template for Hugging Face.
    """
    app = ClientApp(mods=list(mods))

    def arrays_of(message: Message) -> dict[str, np.ndarray]:
        return {n: array.numpy() for n, array in message.content["arrays"].items()}

    @app.train()
    def train(message: Message, context: Context) -> Message:
        own = arrays_of(message)
        p = partition_of(context)
        for name in own:
            own[name] = own[name] + (p + 1) * STEPS[name]
        if spoil is not None:
            spoil(own, message.content["config"])
        content = {
            "arrays": ArrayRecord({name: Array(array) for name, array in own.items()}),
            "metrics": MetricRecord({"num-examples": 1}),
        }
        return Message(RecordDict(content), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        own = arrays_of(message)
        numbers = {"num-examples": 1, "head": float(own["head.weight"][0]) / 1e3}
        numbers["body"] = float(own["body.weight"][0])
        content = {"metrics": MetricRecord(numbers)} | ({**message.content} if talks else {})
        return Message(RecordDict(content), reply_to=message)

    @app.query()
    def query(message: Message, context: Context) -> Message:
        content: Any = {"config": ConfigRecord({"partition-id": partition_of(context)})}
        content |= {"arrays": model()} if talks else {}
        return Message(RecordDict(content), reply_to=message)

    return app


def private_values(grid: InProcessGrid, part: str = "head") -> list[np.ndarray]:
    """Return all private arrays in the states of a grid's clients that are not zeros."""
    found = []
    for context in grid.contexts.values():
        for record in context.state.array_records.values():
            found += [a.numpy() for name, a in record.items() if part in name]
    return [array for array in found if array.any()]


def assert_private_stays(grid: Tapped) -> None:
    """Look for the values, and the bytes, of every private array in all messages."""
    private = private_values(grid)
    assert private
    seen = list(arrays_in(grid.asked + grid.replies))
    assert seen
    for name, array in seen:
        if "head" in name:
            np.testing.assert_allclose(array, 0, atol=1e-9)
        for own in private:
            assert own.tobytes() not in array.tobytes()
            assert not np.isin(own, array).any()


STRATEGIES = {
    "FedAvg": FedAvg,
    "FedAdam": FedAdam,
    "FedProx": lambda **options: FedProx(proximal_mu=0.1, **options),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_flowers_own_strategies_share_the_body_alone(name: str) -> None:
    grid = Tapped(make_app(keep_private("head.*")), 3)
    result = STRATEGIES[name]().start(grid, model(), num_rounds=3)
    assert grid.errors == []
    assert set(result.arrays) == set(NAMES)
    assert grid.measured("head") == {0: 3, 1: 6, 2: 9}  # three trainings each, of its own
    np.testing.assert_allclose(result.arrays["head.bias"].numpy(), 0, atol=1e-9)
    if name == "FedAdam":  # of a body that moves, in steps of the server's
        assert (result.arrays["body.bias"].numpy() > 0).all()
    else:
        np.testing.assert_allclose(result.arrays["body.weight"].numpy(), 3 * 2)
        np.testing.assert_allclose(result.arrays["body.bias"].numpy(), 3 * 4)
    assert_private_stays(grid)


def test_without_the_mod_the_same_app_shares_everything() -> None:
    grid = Tapped(make_app(), 3)
    FedAvg().start(grid, model(), num_rounds=3)
    assert set(grid.measured("head").values()) == {6.0}


def test_a_client_that_was_absent_goes_on_with_its_own_part() -> None:
    grid = Tapped(make_app(keep_private("head.*")), 3, faults=failing("silence", [0], [2]))
    FedAvg().start(grid, model(), num_rounds=3)
    assert grid.measured("head") == {0: 2, 1: 6, 2: 9}


def test_a_step_that_fails_leaves_the_state_as_it_was() -> None:
    def fails(own: dict[str, np.ndarray], config: Any) -> None:
        if config["server-round"] == 2:
            raise RuntimeError("no")

    grid = Tapped(make_app(keep_private("head.*"), spoil=fails), 2)
    FedAvg().start(grid, model(), num_rounds=3)
    assert len(grid.errors) == 2
    assert grid.measured("head") == {0: 2, 1: 4}


def test_a_round_that_is_asked_for_again_has_the_same_reply() -> None:
    app, context = make_app(keep_private("head.*")), InProcessGrid(ClientApp(), 1).contexts[1000]
    for round_, head in ((1, 1), (2, 2), (2, 2), (3, 3)):
        assert ask(app, context, round_, model()).content["arrays"].keys() == set(NAMES)
        assert ask(app, context, round_, model(), "evaluate").content["metrics"]["head"] == head


def ask(
    app: Any,
    context: Context,
    round_: int | None,
    arrays: ArrayRecord,
    kind: str = "train",
    **config: Any,
) -> Message:
    """Send one message as FedAvg does."""
    grid = InProcessGrid(ClientApp(), 1)
    number = {} if round_ is None else {"server-round": round_}
    content = RecordDict({"arrays": arrays, "config": ConfigRecord({**number, **config})})
    message = grid.create_message(content, kind, 1000, "")
    answer: Message = app(message, context)
    return answer


def renamed() -> ArrayRecord:
    return ArrayRecord({n.replace("body", "trunk"): a for n, a in model().items()})


def swapped() -> ArrayRecord:
    return ArrayRecord({n: model()[n] for n in reversed(NAMES)})


@pytest.mark.parametrize(
    ("arrays", "named"),
    [
        (renamed, "arrays"),
        (swapped, "arrays"),
        (lambda: model(head=3), "head.weight"),
        (lambda: ArrayRecord({n: model()[n] for n in NAMES[:3]}), "arrays"),
        (lambda: ArrayRecord({"body.weight": Array(np.zeros(2))}), "arrays"),
    ],
)
def test_another_model_than_before_is_refused(
    arrays: Callable[[], ArrayRecord], named: str
) -> None:
    app, context = make_app(keep_private("head.*")), InProcessGrid(ClientApp(), 1).contexts[1000]
    ask(app, context, 1, model())
    before = stored(context)
    for kind in ("train", "evaluate"):
        with pytest.raises(ValueError, match=named):
            ask(app, context, 2, arrays(), kind)
    assert stored(context) == before != {}


def stored(context: Context) -> dict[str, bytes]:
    records = context.state.array_records.items()
    return {f"{of}/{name}": one.data for of, record in records for name, one in record.items()}


@pytest.mark.parametrize("patterns", [("tail.*",), ("tail", "x"), ("*",), ("head.*", "b*")])
def test_patterns_that_match_none_or_all_become_the_replys_error(patterns: tuple[str, ...]) -> None:
    grid = Tapped(make_app(keep_private(*patterns)), 2)
    FedAvg().start(grid, model(), num_rounds=1)
    assert len(grid.errors) == 4
    assert all("ValueError: patterns must" in error for error in grid.errors)
    assert not any(context.state for context in grid.contexts.values())


def test_a_pattern_that_matches_none_beside_one_that_does_is_a_warning(warned: Any) -> None:
    for app, strategy in (
        (make_app(keep_private("head.*", "tail")), FedAvg()),
        (client_app(make_app()), PersonalizedFedAvg(["head.*", "tail"])),
    ):
        warned.clear()
        grid = Tapped(app, 2)
        strategy.start(grid, model(), num_rounds=2)
        assert "'tail'" in warned.text
        assert_private_stays(grid)


@pytest.mark.parametrize("given", [(), ("",), (3,), (None,), ([],), (["head", 3],)])
def test_patterns_must_be_texts(given: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="patterns"):
        keep_private(*given)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("head.*", {"head.weight", "head.bias"}),
        (["head.weight", "head.b*"], {"head.weight", "head.bias"}),
    ],
)
def test_all_take_one_name_or_several(given: Any, names: set[str]) -> None:
    for app, strategy in (
        (make_app(keep_private(given)), FedAvg()),
        (make_app(keep_private(*[given] if isinstance(given, str) else given)), FedAvg()),
        (client_app(make_app(), private=given), FedAvg()),
        (client_app(make_app()), PersonalizedFedAvg(given)),
    ):
        grid = Tapped(app, 2)
        strategy.start(grid, model(), num_rounds=1)
        assert grid.errors == []
        sent = {name for name, array in arrays_in(grid.replies) if array.any()}
        assert sent == set(NAMES) - names


def spoil_shape(own: dict[str, np.ndarray], config: Any) -> None:
    own["head.bias"] = np.zeros(9)


def spoil_number(own: dict[str, np.ndarray], config: Any) -> None:
    own["head.bias"] = np.full(2, np.nan)


def spoil_names(own: dict[str, np.ndarray], config: Any) -> None:
    own["head.extra"] = own.pop("head.bias")


@pytest.mark.parametrize("spoil", [spoil_shape, spoil_number, spoil_names])
def test_a_reply_that_cannot_be_kept_is_an_error(spoil: Any) -> None:
    grid = Tapped(make_app(keep_private("head.*"), spoil=spoil), 2)
    FedAvg().start(grid, model(), num_rounds=1)
    assert len([error for error in grid.errors if "head.bias" in error]) == 2
    assert not any(context.state for context in grid.contexts.values())


@pytest.mark.parametrize("name", ["FedAvg", "PersonalizedFedAvg"])
def test_arrays_in_replies_to_evaluations_and_queries_are_dropped_and_named_once(
    name: str, warned: Any
) -> None:
    grid = Tapped(client_app(make_app(keep_private("head.*"), talks=True)), 2)
    strategy = FedAvg() if name == "FedAvg" else PersonalizedFedAvg(["head.*"])
    result = strategy.start(grid, model(), num_rounds=2)
    assert grid.errors == []
    assert [m["head"] for m in result.evaluate_metrics_clientapp.values()] == [1.5, 3.0]
    assert_private_stays(grid)
    assert len({id(record) for record in warned.records if "dropped" in record.getMessage()}) == 1


def test_a_training_reply_has_one_record_of_arrays() -> None:
    app = ClientApp(mods=[keep_private("head.*")])
    context = InProcessGrid(ClientApp(), 1).contexts[1000]

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = message.content["arrays"]
        return Message(RecordDict({"arrays": arrays, "again": arrays}), reply_to=message)

    for round_, named in ((1, "reply"), (None, "server-round")):
        with pytest.raises(ValueError, match=named):
            ask(app, context, round_, model(), "train")


@pytest.mark.parametrize("which", ["inside", "train_mods", "the server's names"])
def test_noise_and_clipping_see_the_shared_part_alone(which: str) -> None:
    """The steps of the head are longer than the norm that updates are clipped to."""
    mods = [LocalDpMod(100.0, 0.0, 1.0, 0.1), LocalDpMod(100.0, 1e-3, 1.0, 0.1)]
    private = {"private": ["head.*"], "names": NAMES} if which == "train_mods" else {}
    if which == "inside":
        app = client_app(make_app(keep_private("head.*", inside=mods)))
    else:
        app = client_app(ByPosition, train_mods=mods, **private)
    grid = Tapped(app, 2)
    strategy = PersonalizedFedAvg(["head.*"]) if which == "the server's names" else FedAvg()
    result = strategy.start(grid, model(), num_rounds=2)
    assert grid.errors == []
    assert grid.measured("head") == {0: 2, 1: 4}
    assert_private_stays(grid)
    body = result.arrays["body.bias"].numpy()
    assert (body != 6.0).all()
    np.testing.assert_allclose(body, 6.0, atol=0.1)


class ByPosition(NumPyClient):
    """Does what the app of `make_app` does."""

    def __init__(self, context: Context) -> None:
        self.p = partition_of(context)

    def fit(self, parameters: Any, config: Any) -> Any:
        steps = zip(parameters, STEPS.values(), strict=True)
        return [array + (self.p + 1) * step for array, step in steps], 1, {}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        return 0.0, 1, {"head": float(parameters[1][0]) / 1e3}


def test_the_mod_stands_outermost_or_client_app_says_so() -> None:
    keep = keep_private("head.*")
    client_app(make_app(keep, fixedclipping_mod))
    for wrong in (
        lambda: client_app(make_app(fixedclipping_mod, keep)),
        lambda: client_app(make_app(keep), private=["head.*"]),
        lambda: client_app(ByPosition, train_mods=[keep]),
        lambda: keep_private("head.*", inside=[keep]),
    ):
        with pytest.raises(ValueError, match="mods"):
            wrong()
    with pytest.raises(ValueError, match="private"):
        client_app(client_app(ByPosition), private=["1"])
    with pytest.raises(TypeError, match="private"):
        client_app(ByPosition, private=3)
