"""A server that asks for what must fail: no error says a number of what stays at the client.

Every step of every protocol is asked with arrays of other dtypes, shapes, names and values, and
with every key of its config replaced, after the client has trained; so are clients that keep a part
private, whole models of their own, and nodes whose messages are sealed.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from flwr_perdl.clients import (
    DictionaryClient,
    DiffusionClient,
    RegressionClient,
    RidgeClient,
    client_app,
    keep_private,
)
from flwr_perdl.clients.app import AnsweringApp
from flwr_perdl.dictionary import MODLearner
from flwr_perdl.network import DataDiffusion
from flwr_perdl.network.messages import Delivery
from tests.attacks.test_routes import MODEL, STEPS, Key
from tests.grids import as_app, asks, context_of

#: Whatever a client has, it has these digits, as a fraction and as a whole number.
DIGITS, SECRET = "73519", np.array([0.73519, 73519.5])
TRANSPORT, CHANGES = "perdl.transport", '{"half": true, "share": 0.5, "changes": true}'
EXCHANGE: Key = ("diffusion_averaging", "train", "exchange")
DATA = np.random.default_rng(0).standard_normal((40, 2)) * SECRET


PROGRAM = DataDiffusion(3, n_nonzero=1).program({0: DATA}, agreement=1)


def of(protocol: str) -> list[Key]:
    """Return a protocol's steps."""
    return [key for key in STEPS if key[0] == protocol]


class Learning(NumPyClient):
    """Its head is the secret, which it says when something is odd, as an app may."""

    def fit(self, parameters: Any, config: Any) -> Any:
        *body, head = parameters
        own = np.zeros(2) + SECRET
        if not np.isfinite(np.concatenate([np.ravel(one) for one in parameters])).all():
            try:
                raise RuntimeError(f"odd: {own}")
            except RuntimeError as error:
                raise ValueError("parameters are odd") from error
        if head.shape != own.shape:
            raise ValueError(f"head{own[0]}, {own.tolist()!r} and {head} differ")
        return [*(one + 1 for one in body), own], 7, {}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        if not np.isfinite(np.concatenate([np.ravel(one) for one in parameters])).all():
            raise FloatingPointError(f"odd: {parameters[-1]}")
        return float("nan" if "no-loss" in config else 0.5), 7, {}


class Counting(Learning):
    """An app that changes an array that the server calls integers to what is none."""

    def fit(self, parameters: Any, config: Any) -> Any:
        return [*parameters[:-1], np.zeros(2) + SECRET], 7, {}


def odd_models(model: Mapping[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    """Yield models that a server may send in place of one."""
    last = [*model][-1]
    for dtype in ("?", "i8", "u2", "f2", "c16", "U5", "V2"):
        yield {name: np.zeros(array.shape, dtype) for name, array in model.items()}
        yield {**model, last: np.zeros(model[last].shape, dtype)}
    for value in (np.nan, np.inf, 1e300, 73.0):
        yield {name: np.full_like(array, value) for name, array in model.items()}
        yield {**model, last: np.full_like(model[last], value)}
    for shape in ((), (0,), (3,), (2, 2)):
        yield {name: np.zeros(shape) for name in model}
        yield {**model, last: np.zeros(shape)}
    names, arrays = [*model], [*model.values()]
    yield dict(zip(reversed(names), arrays, strict=True))
    yield dict(zip(names, reversed(arrays), strict=True))
    yield {name.replace("head", "5"): array for name, array in model.items()}
    yield {f"{name}/": array for name, array in model.items()}
    yield {**model, "more": np.zeros(2)}
    yield {last: model[last]}
    yield {}


def odd_configs(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield configs that a server may send in place of one."""
    for key in [*config, "perdl.left-out", "perdl.alternate", "perdl.again", "no-loss", TRANSPORT]:
        if key in config:
            yield {k: v for k, v in config.items() if k != key}
        for value in (-1, 10**18, "x", "[", '["head"]', b"\0", CHANGES):
            yield {**config, key: value}


def request_for(key: Key, *, sealed: bool = False) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays and the config of an honest request."""
    _, prefix, config = STEPS.get(key, ("", "", {}))
    model = {f"{prefix}{name}": array for name, array in MODEL.items()}
    if key[0] in ("perma", "mixed_regression"):
        model = {"0": np.eye(2)}
    relays = key[2] in ("announce", "exchange", "show")
    if key[0] == "ridge" and not relays:
        given = [np.zeros(2), np.ones(2), np.ones(1), np.zeros((1, 3, 1))]
        model = {str(i): array for i, array in enumerate(given)}
    if relays:
        start = [*MODEL.values()] if key[0] == "diffusion_averaging" else []
        given = Delivery(cards={} if sealed else None, start=start).to_arrays()
        model = {f"{i:03d}": array for i, array in enumerate(given)}
        config = {**config, "perdl.sealed": sealed}
    if key[0]:
        config = {"perdl.protocol": key[0], "perdl.step": key[2], **config}
    return model, config


class Attack:
    """A client that has taken some steps, which a server then asks for what it likes."""

    def __init__(self, app: Any, begun: Key, *, sealed: bool = False) -> None:
        self.app, self.context, self.sealed = app, context_of(0), sealed
        self.round = 0
        self.ask(self.context, begun[1], *request_for(begun, sealed=sealed))
        kept = [DATA, SECRET]
        for record in self.context.state.array_records.values():
            kept += [
                array.numpy()
                for name, array in record.items()
                if not any(public in name for public in ("body", "names", "rest", "key"))
            ]
        numbers = [one for array in kept for one in array.ravel().tolist()]
        found = {f"{abs(float(one)):.4e}".partition("e")[0].replace(".", "") for one in numbers}
        self.digits = {digits for digits in found if len({*digits}) > 3}

    def ask(self, context: Context, kind: str, model: Any, config: Mapping[str, Any]) -> None:
        self.round += 1
        told = {"server-round": self.round, "perdl.run": "run", "perdl.seed": 0, **config}
        record = ArrayRecord({name: Array(array) for name, array in model.items()})
        content = RecordDict({"arrays": record, "config": ConfigRecord(told)})
        reply = self.app(asks(content, kind=kind), context)
        if reply.has_error():
            raise ValueError(reply.error.reason)

    def found(self, key: Key) -> dict[str, str]:
        """Return errors, by what of them an engine may send, that say private digits."""
        model, config = request_for(key, sealed=self.sealed)
        requests = [(odd, config) for odd in odd_models(model)]
        requests += [(model, odd) for odd in odd_configs({"server-round": 99, **config})]
        leaks, n_errors = {}, 0
        for arrays, told in requests:
            try:
                self.ask(deepcopy(self.context), key[1], arrays, told)
            except Exception as error:
                n_errors += 1
                said = "".join(traceback.format_exception(error, limit=0))
                plain = said.replace(".", "")
                if any(digits in plain for digits in self.digits):
                    leaks[str(error)] = said
        assert n_errors > 20
        return leaks


TRAIN, EVALUATE = ("", "train", ""), ("", "evaluate", "")
FOR_ANY = [TRAIN, EVALUATE, *(key for key in STEPS if key[0] in ("clustered", "own_models"))]
#: What each client has done, and the steps that it is asked for.
CASES: dict[str, tuple[Any, Key, list[Key]]] = {
    "client": (
        client_app(lambda _: Learning(), private=["head"], names=[*MODEL]),
        TRAIN,
        [TRAIN, EVALUATE, *STEPS],
    ),
    "counter": (client_app(lambda _: Counting(), private=["head"], names=[*MODEL]), TRAIN, FOR_ANY),
    "app": (client_app(as_app(lambda _: Learning()), private=["head"]), TRAIN, FOR_ANY),
    "ditto": (client_app(lambda _: Learning()), ("ditto", "train", "train"), of("ditto")),
    "sealed": (client_app(lambda _: Learning()), EXCHANGE, of(EXCHANGE[0])),
    "both": (
        client_app(lambda _: Learning(), private=["head"], names=[*MODEL]),
        EXCHANGE,
        of(EXCHANGE[0]),
    ),
    "perma": (
        client_app(lambda c: DictionaryClient(DATA, MODLearner(3, n_nonzero=1), c)),
        *(("perma", "train", "update"), of("perma")),
    ),
    "regression": (
        client_app(lambda c: RegressionClient(DATA, DATA[:, 0], c)),
        *(("mixed_regression", "train", "describe"), of("mixed_regression")),
    ),
    "ridge": (
        client_app(lambda c: RidgeClient(DATA, DATA[:, 0], c)),
        *(("ridge", "train", "solve"), of("ridge")),
    ),
    "ridge, sums": (
        client_app(lambda c: RidgeClient(DATA, DATA[:, 0], c)),
        *(("ridge", "train", "exchange"), of("ridge")),
    ),
    "diffusion": (
        client_app(lambda c: DiffusionClient(PROGRAM, c)),
        *(("neighbor_relay", "train", "exchange"), of("neighbor_relay")),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_no_error_says_a_number_of_what_stays_at_the_client(name: str) -> None:
    app, begun, keys = CASES[name]
    attack = Attack(app, begun, sealed=name in ("sealed", "both"))
    assert attack.digits
    for key in keys:
        assert attack.found(key) == {}


@pytest.mark.parametrize(
    ("app", "node"),
    [
        (lambda make: client_app(make, private=["head"], names=[*MODEL]), {}),
        (lambda make: ClientApp(mods=[keep_private("head")]), {}),
        (client_app, {"neighbor-keys": "keys.json"}),
    ],
)
def test_nor_does_one_of_who_the_client_is(app: Any, node: Any) -> None:
    def fails(*_: Any) -> Any:
        raise ValueError(f"row {SECRET} is odd")

    asked = app(fails)
    if not isinstance(asked, AnsweringApp):
        asked.query()(fails)
    with pytest.raises(ValueError, match=r"row .* is odd") as caught:
        asked(asks(RecordDict(), kind="query"), context_of(1, **node))
    assert DIGITS not in "".join(traceback.format_exception(caught.value)).replace(".", "")


def test_where_nothing_stays_errors_say_what_was_wrong() -> None:
    """The control, and what helps whoever reads the server's log."""
    attack = Attack(client_app(lambda _: Counting()), TRAIN)
    assert any(DIGITS in said for said in attack.found(("clustered", "train", "train-alone")))
