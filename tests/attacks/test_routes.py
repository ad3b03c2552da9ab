"""A server that asks by every type of message that Flower routes, with every protocol's keys.

The client's training and its evaluation each show a secret. Behind a guard no request may bring it
out, by whatever type and with whatever keys of protocols it comes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from itertools import combinations, product
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from flwr_perdl import clients
from flwr_perdl.clients import Member, StepResult, client_app, keep_private, step
from flwr_perdl.clients.dispatch import steps_of
from flwr_perdl.network.messages import Delivery
from flwr_perdl.privacy import Noise
from flwr_perdl.privacy.sealed import make_key
from tests.grids import as_app, asks, context_of, promise

SECRET, SHAPE = 0.1234567, (2,)
MODEL = {"body": np.zeros(SHAPE), "head": np.zeros(SHAPE)}
SENT = {name: Array(array) for name, array in MODEL.items()}
TYPES = [
    *("train", "evaluate", "query", "train.default", "evaluate.default", "query.default"),
    *("train.own", "evaluate.own", "query.own", "system", "train.", "train.default.more", "Train"),
]
ABOUT = {
    "learner": {"method": "atc", "compression": None, "evaluate_every": 1, "metrics": []}
    | {"robust": "mean", "n_liars": 1, "max_magnitude": None},
    **{"shows": False, "half": False},
    "arrays": [[name, SHAPE, "<f8"] for name in MODEL],
}
MARKS: dict[str, dict[str, Any]] = {
    "sealed": {"perdl.sealed": True},
    "unsealed": {"perdl.sealed": False},
    "promise": {"perdl.promise": promise(epsilon=1e6, clip=1e3, rounds=9, size=4)},
    "changes": {"perdl.transport": '{"half": false, "share": 0.5, "changes": true}'},
    "left out": {"perdl.left-out": '["head"]'},
    "masks": {},
    "silent": {"perdl.silent": True},
}
RELAYED = {"perdl.at": 1, "perdl.asleep": ""}
AVERAGED = {"perdl.averaging": json.dumps(ABOUT), **RELAYED}
RIDGE = {"perdl.features": 0, "perdl.classes": 0, "perdl.random": "all"}
SUMMED = {**RIDGE, **RELAYED, "perdl.folds": 3, "perdl.switch": 0, "perdl.nodes": 2}
SUMMED |= {"perdl.scale": 2.0, "perdl.penalties": "0.1 1.0", "perdl.level": "personal"}
#: Every step of every protocol: its mark, what precedes its arrays' names, and its config.
Key = tuple[str, str, str]
STEPS: dict[Key, tuple[str, str, dict[str, Any]]] = {
    ("clustered", "train", "train-alone"): ("", "", {"perdl.n-fits": 1}),
    ("clustered", "train", "measure-models"): ("", "0/", {}),
    ("clustered", "train", "cluster"): ("", "0/", {}),
    ("clustered", "evaluate", "evaluate"): ("", "0/", {}),
    ("diffusion_averaging", "train", "announce"): ("seals", "", AVERAGED),
    ("diffusion_averaging", "train", "exchange"): ("seals", "", AVERAGED),
    ("diffusion_averaging", "train", "show"): ("seals", "", AVERAGED),
    ("diffusion_averaging", "train", "tune"): ("whole", "initial/", {"perdl.n-fits": 1}),
    ("ditto", "train", "train"): ("", "", {"perdl.pull": 0.5}),
    ("ditto", "evaluate", "evaluate"): ("", "", {}),
    ("ditto", "train", "tune"): ("whole", "0/", {"perdl.n-fits": 1}),
    ("mixed_regression", "train", "describe"): ("", "", {}),
    ("mixed_regression", "train", "moment"): ("", "", {}),
    ("mixed_regression", "train", "anchors"): ("", "", {}),
    ("mixed_regression", "train", "update"): ("", "", {}),
    ("mixed_regression", "evaluate", "evaluate"): ("", "", {}),
    ("neighbor_relay", "train", "announce"): ("seals", "", RELAYED),
    ("neighbor_relay", "train", "exchange"): ("seals", "", RELAYED),
    ("neighbor_relay", "train", "show"): ("seals", "", RELAYED),
    ("own_models", "train", "tune"): ("whole", "0/", {"perdl.n-fits": 1}),
    ("perma", "train", "start"): ("", "", {}),
    ("perma", "train", "choose"): ("", "", {}),
    ("perma", "train", "update"): ("", "", {}),
    ("ridge", "train", "moments"): ("", "", {}),
    ("ridge", "train", "sums"): ("", "", RIDGE),
    ("ridge", "train", "errors"): ("", "", RIDGE),
    ("ridge", "train", "solve"): ("", "", RIDGE),
    ("ridge", "evaluate", "evaluate"): ("", "", RIDGE),
    ("ridge", "train", "announce"): ("seals", "", SUMMED),
    ("ridge", "train", "exchange"): ("seals", "", SUMMED),
    ("ridge", "train", "show"): ("seals", "", SUMMED),
    ("perma", "evaluate", "evaluate"): ("", "", {}),
}
OWN, FEDAVG = ("own", "train", "tell"), ("", "train", "")
CASES = [
    (kind, step_, marks)
    for kind, step_ in product(TYPES, [FEDAVG, OWN, *STEPS])
    for size in range(2 + (step_ == FEDAVG))
    for marks in combinations(MARKS, size)
]


class Telling(NumPyClient):
    """A client whose head is the secret after training, and whose loss is."""

    loss = SECRET

    def fit(self, parameters: Any, config: Any) -> Any:
        # Of an array with names and of a list, the last one is the head.
        return [*parameters[:-1], parameters[-1] + SECRET], 7, {"mse": self.loss}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        return self.loss, 7, {"accuracy": self.loss}


class Quiet(Telling):
    """The same, with nothing to hide but arrays."""

    loss = 0.5


@step("own", "tell")
def tell(local: Any, request: Any) -> StepResult:
    """Send the secret, by a protocol of the client's own."""
    return StepResult([np.full(SHAPE, SECRET)], 7)


class OwnMember(Member, Telling):  # type: ignore[misc]
    """A client of another protocol."""


@cache
def delivered(*, sealed: bool) -> dict[str, Array]:
    """Return the arrays of a relay's delivery."""
    given = Delivery(cards={} if sealed else None, start=[*MODEL.values()]).to_arrays()
    return {f"{i:03d}": Array(array) for i, array in enumerate(given)}


def ask(
    app: Any, context: Context, kind: str, step_: Key, marks: Sequence[str] = (), **more: Any
) -> Message | str:
    """Return the reply, or its error, to a request of this type for this step."""
    config: dict[str, Any] = {"server-round": 1, "perdl.run": "run", "perdl.seed": 0}
    _, prefix, own = STEPS.get(step_, ("", "", {}))
    config |= {**own, "perdl.protocol": step_[0], "perdl.step": step_[2]} if step_[0] else {}
    for mark in marks:
        config |= MARKS[mark]
    config |= more
    model = {f"{prefix}{name}": array for name, array in SENT.items()}
    if "perdl.averaging" in config:
        model = delivered(sealed=bool(config.get("perdl.sealed")))
    content = RecordDict({"arrays": ArrayRecord(model), "config": ConfigRecord(config)})
    if "masks" in marks:
        content["secaggplus_configs"] = ConfigRecord({"stage": "collect_masked_vectors"})
    message = asks(content)
    vars(message.metadata)["_message_type"] = kind  # a server need not check it
    try:
        reply = app(message, context)
    except Exception as error:  # as an engine sends it
        return str(error)
    return str(reply.error.reason) if reply.has_error() else reply


def shows(reply: Message | str) -> bool:
    """Whether the secret is in the clear among the numbers of a reply, or in its error."""
    if isinstance(reply, str):
        return str(SECRET) in reply
    records: Mapping[str, Any] = reply.content
    numbers: list[Any] = []
    for record in records.values():
        for value in record.values():
            found = value.numpy() if isinstance(value, Array) else value
            numbers += [] if isinstance(found, str | bytes) else [*np.ravel(found)]
    return bool(np.isclose(np.asarray(numbers, dtype=float), SECRET, rtol=1e-5).any())


def leaks(app: Any, **node_config: Any) -> set[tuple[str, Key, tuple[str, ...]]]:
    """Return the requests whose reply shows the secret, each to a client without a past."""
    return {c for c in CASES if shows(ask(app, context_of(0, **node_config), *c))}


@pytest.fixture
def pinning(tmp_path: Path) -> dict[str, str]:
    """Return the node config of a node that pins its neighbors' keys."""
    public = make_key(tmp_path / "0.pem")
    (tmp_path / "keys.json").write_text(f'{{"1": "{public}"}}')
    return {"key-file": str(tmp_path / "0.pem"), "neighbor-keys": str(tmp_path / "keys.json")}


def own_action(app: ClientApp) -> ClientApp:
    """Return the app, with a training handler of another action."""

    @app.train("own")
    def own(message: Message, context: Context) -> Message:
        vars(message.metadata)["_message_type"] = "train"
        reply: Message = app(message, context)
        return reply

    return app


def make(kind: type[Telling]) -> Any:
    return lambda context: kind()


NOISE = Noise(epsilon=1.0)
PART: Any = {"private": ["head"], "names": [*MODEL]}


@pytest.mark.parametrize("own", [False, True], ids=["client", "app"])
def test_without_a_guard_the_attack_works(own: bool) -> None:
    client = own_action(as_app(make(Telling))) if own else make(Telling)
    found = leaks(client_app(client, protocols=[tell]))
    reached = ("clustered", "ditto", "own_models"), ("exchange", "tune")
    steps = [key for key in STEPS if key[0] in reached[0] or key[2] in reached[1]]
    steps = [*(key for key in steps if key[0] not in ("neighbor_relay", "ridge")), OWN, FEDAVG]
    asked = {(f"{key[1]}{end}", key, ()) for key in steps for end in ("", ".default")}
    assert asked <= found
    assert (("train.own", FEDAVG, ()) in found) == own
    # Queries are no requests to train, whatever their config says.
    assert not any(kind.startswith("query") for kind, *_ in found)


def test_every_step_of_every_protocol_is_in_the_table_with_its_mark() -> None:
    found: dict[Key, str] = {}
    for file in iter_modules(clients.__path__, f"{clients.__name__}."):
        with suppress(ValueError):  # a file without steps
            steps = steps_of([import_module(file.name)]).items()
            found |= {k: "seals" * one.seals + "whole" * one.whole for k, one in steps}
    assert found == {key: mark for key, (mark, *_) in STEPS.items()}


@pytest.mark.parametrize(
    ("app", "pins"),
    [
        (client_app(make(Telling), privacy=NOISE, protocols=[tell]), False),
        (client_app(own_action(as_app(make(Telling))), privacy=NOISE), False),
        (client_app(make(Telling), privacy=NOISE, **PART), False),
        (client_app(make(Telling), privacy=NOISE, secure=True), True),
        (client_app(make(Telling), protocols=[tell]), True),
        (client_app(OwnMember), True),
        (client_app(own_action(as_app(make(Telling)))), True),
        (client_app(make(Telling), **PART), True),
        (client_app(make(Quiet), secure=True, protocols=[tell]), False),
        (client_app(make(Quiet), **PART), False),
        (client_app(own_action(as_app(make(Quiet))), private=["head"]), False),
        (client_app(make(Quiet), **PART, secure=True), False),
    ],
)
def test_nothing_is_in_the_clear_by_whatever_way_a_guarded_client_is_asked(
    app: ClientApp, pins: bool, pinning: dict[str, str]
) -> None:
    assert leaks(app, **(pinning if pins else {})) == set()


def test_a_mod_that_keeps_arrays_reads_types_as_flower_routes_them() -> None:
    """Without `client_app` around it."""
    app, mod = own_action(as_app(make(Quiet))), keep_private("head")
    assert leaks(app)
    assert not leaks(lambda message, context: mod(message, context, app))


@pytest.mark.parametrize("pins", [False, True])
def test_a_node_that_pins_keys_tells_no_loss_of_models_that_the_server_chose(
    pins: bool, pinning: dict[str, str]
) -> None:
    """The server begins runs as it likes; without pinned keys, losses tell it of a sample."""

    class Open(Telling):
        def get_properties(self, config: Any) -> Any:
            return {"mean": SECRET}

    app, context = client_app(make(Open)), context_of(0, **(pinning if pins else {}))
    told = {"perdl.averaging": json.dumps({**ABOUT, "shows": True}).replace("[]", '["mse"]', 1)}
    replies: list[Message | str] = []
    for run in "ab":
        for at, name in enumerate(("announce", "exchange", "exchange", "tune", "show", "show")):
            more = {"server-round": at + 1, "perdl.at": at, "perdl.run": run}
            key = ("diffusion_averaging", "train", name)
            more |= {} if name == "tune" else told
            replies.append(ask(app, context, "train", key, ["sealed"], **more))
    assert any(map(shows, replies)) == (not pins)
    errors = [reply for reply in replies if isinstance(reply, str)]
    assert len(errors) == 2 * pins
    assert all("neighbor-keys" in error for error in errors)
    assert shows(ask(app, context, "query", FEDAVG)) == (not pins)
