"""A server that asks by every type of message that Flower routes, with every protocol's keys.

The client's training and its evaluation each show a secret. Behind a guard no request may bring it
out, by whatever type and with whatever keys of protocols it comes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import chain, combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from flwr_perdl.clients import Member, StepResult, client_app, keep_private, step
from flwr_perdl.network.messages import Delivery
from flwr_perdl.privacy import Noise
from flwr_perdl.privacy.sealed import make_key
from tests.grids import as_app, asks, context_of, promise

SECRET, SHAPE = 0.1234567, (2,)
MODEL = {"body": np.zeros(SHAPE), "head": np.zeros(SHAPE)}
TYPES = [
    *("train", "evaluate", "query", "train.default", "evaluate.default", "query.default"),
    *("train.own", "evaluate.own", "query.own", "system", "train.", "train.default.more", "Train"),
]
ABOUT = {
    "learner": {"method": "atc", "compression": None, "evaluate_every": 1, "metrics": []}
    | {"robust": "mean", "n_liars": 1, "max_magnitude": None},
    **{"max_delay": 0, "shows": False, "half": False},
    "arrays": [[name, SHAPE, "<f8"] for name in MODEL],
}
MARKS: dict[str, dict[str, Any]] = {
    "clustered": {
        **{"perdl.protocol": "clustered", "perdl.step": "train-alone", "perdl.n-fits": 1},
    },
    "ditto": {"perdl.protocol": "ditto", "perdl.step": "train", "perdl.pull": 0.5},
    "averaging": {
        "perdl.averaging": json.dumps(ABOUT),
        **{"perdl.protocol": "diffusion_averaging", "perdl.step": "exchange"},
        **{"perdl.at": 1, "perdl.asleep": ""},
    },
    "sealed": {"perdl.sealed": True},
    "unsealed": {"perdl.sealed": False},
    "promise": {"perdl.promise": promise(epsilon=1e6, clip=1e3, rounds=9, size=4)},
    "left out": {"perdl.left-out": '["head"]'},
    "relay": {"perdl.protocol": "neighbor_relay", "perdl.step": "exchange", "perdl.at": 1},
    "linear": {"perdl.protocol": "mixed_regression", "perdl.step": "update"},
    "own": {"perdl.protocol": "own", "perdl.step": "tell"},
    "masks": {},
}
CASES = [
    (kind, marks)
    for kind, marks in product(
        TYPES, chain.from_iterable(combinations(MARKS, size) for size in (0, 1, 2))
    )
    if not {"sealed", "unsealed"} <= set(marks)
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


def ask(app: Any, context: Context, kind: str, marks: tuple[str, ...]) -> Message | str:
    """Return the reply, or its error, to a request of this type with keys of these protocols."""
    config: dict[str, Any] = {"server-round": 1, "perdl.run": "run", "perdl.seed": 0}
    for mark in marks:
        config |= MARKS[mark]
    model, sealed = {name: Array(array) for name, array in MODEL.items()}, "sealed" in marks
    if "averaging" in marks:
        given = Delivery(cards={} if sealed else None, start=[*MODEL.values()]).to_arrays()
        model = {f"{i:03d}": Array(array) for i, array in enumerate(given)}
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


def leaks(app: Any, **node_config: Any) -> set[tuple[str, tuple[str, ...]]]:
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


@pytest.mark.parametrize("own", [False, True], ids=["client", "app"])
def test_without_a_guard_the_attack_works(own: bool) -> None:
    client = own_action(as_app(make(Telling))) if own else make(Telling)
    found = leaks(client_app(client, protocols=[tell]))
    asked = {(kind, marks) for kind in ("train", "train.default") for marks in [(), ("averaging",)]}
    asked |= {
        ("evaluate.default", ()),
        ("train.default", ("clustered",)),
        ("train", ("ditto",)),
        ("train", ("own",)),
    }
    assert asked <= found
    assert (("train.own", ()) in found) == own
    # Queries are no requests to train, whatever their config says.
    assert not any(kind.startswith("query") for kind, _ in found)


@pytest.mark.parametrize(
    ("app", "pins"),
    [
        (client_app(make(Telling), privacy=NOISE, protocols=[tell]), False),
        (client_app(own_action(as_app(make(Telling))), privacy=NOISE), False),
        (client_app(make(Telling), privacy=NOISE, private=["head"]), False),
        (client_app(make(Telling), privacy=NOISE, secure=True), True),
        (client_app(make(Telling), protocols=[tell]), True),
        (client_app(OwnMember), True),
        (client_app(own_action(as_app(make(Telling)))), True),
        (client_app(make(Telling), private=["head"]), True),
        (client_app(make(Quiet), secure=True, protocols=[tell]), False),
        (client_app(make(Quiet), private=["head"]), False),
        (client_app(own_action(as_app(make(Quiet))), private=["head"]), False),
        (client_app(make(Quiet), private=["head"], secure=True), False),
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
