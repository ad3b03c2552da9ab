"""Any client, or any ClientApp, as the two functions that a step of a protocol may call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from math import nan
from typing import Any, NamedTuple

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)

from flwr_perdl.core.checks import Matrix
from flwr_perdl.core.models import as_dtype
from flwr_perdl.protocol.compat import NumPyClient, like
from flwr_perdl.protocol.records import (
    ALTERNATE,
    ARRAYS,
    CONFIG,
    LEFT_OUT,
    LOSSES,
    MEASURING,
    METRICS,
    NUM_EXAMPLES,
    RUN,
    SEED,
    Scalar,
    decode,
    encode,
    error_of,
    in_order,
    named,
    scalars,
    view,
)

Evaluated = tuple[float, int, dict[str, Scalar]]

#: How the library's records in ``context.state`` are called, and the keys of a config.
_OURS = "perdl."
#: Which of these keys an app's handlers receive: the run, its seed, and what `keep_private` reads.
_FOR_HANDLERS = (RUN, SEED, LEFT_OUT, ALTERNATE)


class NoEvaluateError(NotImplementedError):
    """A client that defines no evaluation is asked for one."""

    def __init__(self) -> None:
        super().__init__(
            "the client must define evaluate, for evaluations and to choose among several models, "
            "got none."
        )


class Trained(NamedTuple):
    """What the user's training returns.

    Attributes
    ----------
    sent : list of flwr.app.Array
        The trained model, with the shapes and dtypes that it came with.
    num_examples : int
        Number of examples.
    metrics : dict
        The user's metrics.
    """

    sent: list[Array]
    num_examples: int
    metrics: dict[str, Scalar]

    @property
    def arrays(self) -> list[Matrix]:
        """The trained model's arrays; not to be changed."""
        return [view(array) for array in self.sent]


class Handlers:
    """The train and evaluate handlers of an app, as the two functions that a step may call.

    The app receives the messages that FedAvg sends, with none of the protocol's keys: mods around
    its handlers see those.

    Parameters
    ----------
    message : Message
        The request that all this is to answer.
    context : Context
        The client's.
    call : callable
        Answers a message by the app's handlers.
    """

    def __init__(
        self, message: Message, context: Context, call: Callable[[Message, Context], Message]
    ) -> None:
        self._message, self._context, self._call = message, context, call
        self._train: dict[str, Any] = {}
        measure: dict[str, Any] = {}
        for key, value in message.content.config_records[CONFIG].items():
            if key.startswith(MEASURING):
                measure[key.removeprefix(MEASURING)] = value
            elif not key.startswith(_OURS) or key in _FOR_HANDLERS:
                self._train[key] = value
        self._measure = {**self._train, **measure}

    def fit(
        self,
        model: Sequence[Array],
        names: Sequence[str],
        config: Mapping[str, Scalar],
        state: str = "",
    ) -> Trained:
        """Train by the app's handler, see `flwr_perdl.clients.Local.fit`."""
        with state_of(self._context, state) if state else nullcontext():
            content = self._ask(MessageType.TRAIN, model, names, {**self._train, **config})
        found = content.get(ARRAYS)
        if not isinstance(found, ArrayRecord):
            raise ValueError(f"a training reply must have an ArrayRecord {ARRAYS!r}, got none.")
        metrics, n = numbers_of(content)
        return Trained(all_sendable([*in_order(found, names).values()], model), n, metrics)

    def evaluate(
        self, model: Sequence[Array], names: Sequence[str], config: Mapping[str, Scalar]
    ) -> Evaluated:
        """Evaluate by the app's handler; NaN where its reply has no loss."""
        content = self._ask(MessageType.EVALUATE, model, names, {**self._measure, **config})
        numbers, n = numbers_of(content)
        loss = next((float(numbers[name]) for name in LOSSES if name in numbers), nan)
        return loss, n, numbers

    def _ask(
        self, kind: str, model: Sequence[Array], names: Sequence[str], config: Mapping[str, Any]
    ) -> RecordDict:
        content = RecordDict({ARRAYS: named(model, names), CONFIG: ConfigRecord({**config})})
        reply = self._call(like(self._message, content, kind), self._context)
        if reply.has_error():
            raise ValueError(error_of(reply))
        return reply.content


def trained_by(client: Any, model: Sequence[Array], config: Mapping[str, Scalar]) -> Trained:
    """Train by a client's ``fit``."""
    arrays, n, metrics = client.fit([decode(array) for array in model], {**config})
    return Trained(all_sendable([encode(array) for array in arrays], model), n, metrics)


def numbers_of(content: RecordDict) -> tuple[dict[str, Scalar], int]:
    """Return a reply's metrics that are numbers, and the number of its examples."""
    record = content.get(METRICS)
    if not isinstance(record, MetricRecord) or NUM_EXAMPLES not in record:
        raise ValueError(f"a reply must have a MetricRecord {METRICS!r} with {NUM_EXAMPLES!r}.")
    numbers = scalars(record)
    return numbers, int(numbers[NUM_EXAMPLES])


@contextmanager
def state_of(context: Context, training: str) -> Iterator[None]:
    """Let the app find in ``context.state`` what it kept in this kind of training, and no more.

    An optimizer's state is of the model that it trained. All records that are not the library's are
    the app's.
    """
    prefix = f"{_OURS}app.{training}/"

    def taken(state: RecordDict, own: Callable[[str], bool]) -> dict[str, Any]:
        return {name: state.pop(name) for name in [*state] if own(name)}

    def is_app(name: str) -> bool:
        return not name.startswith(_OURS)

    others = taken(context.state, is_app)
    for name, record in taken(context.state, lambda name: name.startswith(prefix)).items():
        context.state[name.removeprefix(prefix)] = record
    try:
        yield
    finally:
        for name, record in taken(context.state, is_app).items():
            context.state[prefix + name] = record
        for name, record in others.items():
            context.state[name] = record


@contextmanager
def unsaid(name: str) -> Iterator[None]:
    """Let an error about a private array name the array, and none of its values: errors leave."""
    try:
        yield
    except ValueError:
        raise ValueError(
            f"array {name!r} must keep its dtype in training, and be finite and not too large but "
            "for entries that stay as they were sent; it is private, and its values are not shown."
        ) from None


def within(
    mods: Sequence[Any], call: Callable[[Message, Context], Message]
) -> Callable[[Message, Context], Message]:
    """Return ``call`` with these mods around it, outermost first."""
    if not mods:
        return call
    inner = within(mods[1:], call)
    return lambda message, context: mods[0](message, context, inner)


def all_sendable(arrays: Sequence[Array], given: Sequence[Array]) -> list[Array]:
    """Return a trained model's arrays with the dtypes that they came with, see `sendable`."""
    _check_shapes(arrays, given)
    return [sendable(*pair) for pair in zip(arrays, given, strict=True)]


def sendable(array: Array, given: Array) -> Array:
    """Return a trained array with the dtype that it came with; one that has it is not copied."""
    if array.dtype == given.dtype:
        return array
    return encode(as_dtype(decode(array), np.dtype(given.dtype)))


def _check_shapes(arrays: Sequence[Any], given: Sequence[Any]) -> None:
    """Accept a trained model's arrays, of NumPy's or Flower's."""
    found, shapes = ([tuple(array.shape) for array in some] for some in (arrays, given))
    if found != shapes:
        raise ValueError(f"fit must return arrays of shapes {shapes}, got {found}.")


def evaluation_of(client: Any) -> Callable[[list[Matrix], dict[str, Scalar]], Evaluated]:
    """Return the client's ``evaluate``, or raise a NotImplementedError if it has none."""
    evaluate = getattr(client, "evaluate", None)
    if evaluate is None or getattr(evaluate, "__func__", None) is NumPyClient.evaluate:
        raise NoEvaluateError
    found: Callable[[list[Matrix], dict[str, Scalar]], Evaluated] = evaluate
    return found
