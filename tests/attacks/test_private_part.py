"""Attacks on a private part: weights that are tied, and a server that renames the arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from flwr_perdl.clients import client_app, keep_private
from flwr_perdl.privacy import Noise
from flwr_perdl.strategies import PersonalizedFedAvg, TooFewReplies
from tests.grids import Tapped, Trains, arrays_in, as_app, asks, context_of, partition_of, promise
from tests.strategies.own_part import Clip

SECRET = 1234.5


def record(*names: str) -> ArrayRecord:
    return ArrayRecord({n: Array(np.full((2, 3), float(i))) for i, n in enumerate(names)})


def seen(grid: Tapped) -> bool:
    """Whether what the client has learned for its private array is in a message."""
    return any(np.isin(array, [SECRET, SECRET + 1]).any() for _, array in arrays_in(grid.replies))


# Tied weights ------------------------------------------------------------------------------------


def tied(message: Message, context: Context) -> Message:
    """Train one matrix of two names, as ``head.weight = embed.weight`` makes it in PyTorch."""
    body = message.content["arrays"]["body"].numpy() + 1
    weights = Array(np.full((2, 3), SECRET + partition_of(context)))
    arrays = ArrayRecord({"body": Array(body), "embed.w": weights, "head.w": weights})
    content = {"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=message)


@pytest.mark.parametrize("patterns", [("head.*",), ("*.w",), ()], ids=["head", "both", "none"])
@pytest.mark.parametrize("alternate", [None, False, True], ids=["FedAvg", "FedPer", "FedRep"])
def test_tied_weights_do_not_leave_by_their_other_name(
    patterns: tuple[str, ...], alternate: bool | None
) -> None:
    """Without private names they leave (the control); with both names private, nothing does."""
    if alternate is not None and not patterns:
        pytest.skip("the strategy wants names")
    app = ClientApp(mods=[keep_private(*patterns)] if patterns else [])
    app.train()(tied)
    grid = Tapped(client_app(app), 2)
    start = record("body", "embed.w", "head.w")
    if alternate is None:
        FedAvg(fraction_evaluate=0.0).start(grid, start, num_rounds=1)
    else:
        strategy = PersonalizedFedAvg(patterns, alternate=alternate, fraction_evaluate=0.0)
        if patterns == ("head.*",):
            with pytest.raises(TooFewReplies, match=r"'embed\.w'.*'head\.w'"):
                strategy.start(grid, start, num_rounds=1)
        else:
            strategy.start(grid, start, num_rounds=1)
    assert seen(grid) == (not patterns)
    refused = [error for error in grid.errors if "'embed.w'" in error and "'head.w'" in error]
    assert len(refused) == len(grid.errors) == (2 if patterns == ("head.*",) else 0)


def test_arrays_that_come_to_zeros_are_not_tied() -> None:
    config = ConfigRecord({"server-round": 1, "perdl.run": "r"})
    arrays = ArrayRecord({name: Array(np.ones(3)) for name in ("body", "head")})
    message = asks(RecordDict({"arrays": arrays, "config": config}))
    zeros, part = Trains(lambda array: 0 * array), {"private": ["head"], "names": ["body", "head"]}
    reply = client_app(lambda _: zeros, **part)(message, context_of())
    assert not reply.content["arrays"]["body"].numpy().any()


class ByPosition(NumPyClient):
    """Its second array is the head, whatever it begins with and the server calls it."""

    def __init__(self, context: Context) -> None:
        self.secret = SECRET + partition_of(context)

    def fit(self, parameters: Any, config: Any) -> Any:
        body, head = parameters
        return [body + 1, np.full(np.shape(head), self.secret)], 1, {}


# Errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kept", "start"),
    [("private", np.inf), ("private", 0), ("ditto", np.inf), ("nothing", np.inf), ("nothing", 0.0)],
)
def test_no_error_says_a_private_value(kept: str, start: float) -> None:
    """What cannot be kept is refused without its values; where nothing is private, they leave."""
    own = {"private": ["head"], "names": ["body", "head"]} if kept == "private" else {}
    app = client_app(ByPosition, **own)
    arrays = ArrayRecord({"body": Array(np.zeros(3)), "head": Array(np.full(3, start))})
    config: dict[str, Any] = {"server-round": 1, "perdl.run": "r"}
    if kept == "ditto":
        config |= {"perdl.protocol": "ditto", "perdl.step": "train"}
        config |= {"perdl.seed": 0, "perdl.pull": 0.5}
    content = RecordDict({"arrays": arrays, "config": ConfigRecord(config)})
    message = asks(content, 2)
    if kept == "nothing":
        assert app(message, context_of()).content["arrays"]["head"].numpy()[0] == SECRET
        return
    with pytest.raises(ValueError, match="'head'") as refused:
        app(message, context_of())
    assert str(SECRET) not in str(refused.value)


# Names -------------------------------------------------------------------------------------------


WAYS = ["nothing", "names", "names of an app", "first run", "numbers", "unknown"]


@pytest.mark.parametrize("known", WAYS)
def test_no_server_renames_the_arrays_of_a_client_by_position(known: str, tmp_path: Path) -> None:
    """A client that leaves it to the server what is private follows its names (the control)."""
    body, head = ("0", "1") if known == "numbers" else ("body", "head")

    def grid() -> Tapped:
        private, names = () if known == "nothing" else [head], [body, head] * ("names" in known)
        where = {"state-dir": str(tmp_path)} if known == "first run" else {}
        own = as_app(ByPosition) if "app" in known else ByPosition
        app = client_app(own, private=private, names=names)
        return Tapped(app, 2, node_config=lambda node: where)

    def ask(grid: Tapped, *names: str) -> None:
        PersonalizedFedAvg([head], fraction_evaluate=0.0).start(grid, record(*names), 1)

    first = grid()
    if known == "unknown":
        with pytest.raises(TooFewReplies, match=r"names=\['body', 'head'\]"):
            ask(first, body, head)
        return
    ask(first, body, head)
    assert not seen(first)
    for again in (first, grid()):  # in the same process, and after a restart
        if known == "nothing":
            ask(again, head, body)
            assert seen(again)
            continue
        with pytest.raises(TooFewReplies, match="arrays"):
            ask(again, head, body)
        assert not seen(again)


def test_names_are_checked() -> None:
    for given in (
        {"names": ["a"]},
        {"private": "a", "names": ["a", "a"]},
        {"share": "a", "names": [1]},
    ):
        with pytest.raises(ValueError, match="names"):
            client_app(ByPosition, **given)


# With noise, and with a user's own part ----------------------------------------------------------

BODY, HEAD = np.zeros(3), np.zeros(3)
#: What a server may try: names in another order, sizes and sums of its own, other parts.
TRICKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "honest": ({"body": BODY, "head": HEAD}, {}),
    "swapped": ({"head": HEAD, "body": BODY}, {}),
    "renamed": ({"body": BODY, "rest": HEAD}, {}),
    "both": ({"body": BODY, "head": HEAD}, {"size": 6}),
    "sums": ({"body": BODY, "head": HEAD}, {"of": "sums"}),
    "rows": ({"body": BODY[None], "head": HEAD[None]}, {"of": "rows"}),
    "left out": ({"body": BODY, "head": HEAD}, {"perdl.left-out": '["body"]'}),
    "all left out": ({"body": BODY, "head": HEAD}, {"perdl.left-out": '["body", "head"]'}),
    "own part": ({"body": BODY, "head": HEAD}, {"perdl.parts": '{"clip": {"norm": 9}}'}),
    "unknown part": ({"body": BODY, "head": HEAD}, {"perdl.parts": '{"other": {}}'}),
    "transport": (
        {"body": BODY, "head": HEAD},
        {"perdl.transport": '{"half": true, "share": null, "changes": true}'},
    ),
    "no promise": ({"body": BODY, "head": HEAD}, {"perdl.promise": None}),
}


@pytest.mark.parametrize("trick", TRICKS)
@pytest.mark.parametrize("noised", [False, True])
def test_no_message_brings_a_private_head_into_what_leaves(trick: str, noised: bool) -> None:
    """With noise a reply is at most the clipped change of the body's three entries."""
    given, others = TRICKS[trick]
    noise = Noise(epsilon=2.0, trust="central", level="client") if noised else None
    app = client_app(
        ByPosition, private=["head"], names=["body", "head"], privacy=noise, parts=[Clip]
    )
    sizes = {name: value for name, value in others.items() if "." not in name}
    config: dict[str, Any] = {"server-round": 1, "perdl.run": "r", "perdl.left-out": '["head"]'}
    config |= {"perdl.promise": promise(**{"size": 3, **sizes})} if noised else {}
    config |= {name: value for name, value in others.items() if "." in name}
    arrays = ArrayRecord({name: Array(array) for name, array in given.items()})
    asked = ConfigRecord({name: value for name, value in config.items() if value is not None})
    grid = Tapped(app, 1)
    (node,) = grid.get_node_ids()
    content = RecordDict({"arrays": arrays, "config": asked})
    (reply,) = grid.send_and_receive([asks(content, node)])
    sent = np.concatenate([np.zeros(0), *(array.ravel() for _, array in arrays_in([reply]))])
    assert np.count_nonzero(sent) <= 3
    assert (np.abs(sent) <= 1).all()  # the head is in the thousands
    if trick == "honest":
        np.testing.assert_allclose(sent, 1 / np.sqrt(3) if noised else 1)
