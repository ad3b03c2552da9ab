"""Any client, or any ClientApp, as the two functions that a protocol here needs of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isnan, nan
from typing import Any

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
    ARRAYS,
    CONFIG,
    LOSSES,
    METRICS,
    NUM_EXAMPLES,
    Scalar,
    decode,
    encode,
    error_of,
    in_order,
    named,
    reply_to,
    scalars,
    with_loss,
)

Fitted = tuple[list[Matrix], int, dict[str, Scalar]]
Evaluated = tuple[float, int, dict[str, Scalar]]

#: How the library's records in ``context.state`` are called.
_OURS = "perdl."


class NoEvaluateError(NotImplementedError):
    """A client that defines no evaluation is asked for one."""

    def __init__(self) -> None:
        super().__init__(
            "the client must define evaluate, for evaluations and to choose among several models, "
            "got none."
        )


class Handlers:
    """The train and evaluate handlers of an app, as ``fit`` and ``evaluate``.

    The app receives the messages that FedAvg sends: mods around its handlers see those.

    Parameters
    ----------
    message : Message
        The request that all this is to answer.
    context : Context
        The client's.
    call : callable
        Answers a message by the app's handlers.
    names : collection of str
        The names of a model's arrays, see `named`.
    """

    def __init__(
        self,
        message: Message,
        context: Context,
        call: Callable[[Message, Context], Message],
        names: Collection[str],
    ) -> None:
        self._message, self._context, self._call, self._names = message, context, call, names

    def fit(self, model: list[Matrix], config: dict[str, Scalar]) -> Fitted:
        """Train by the app's handler."""
        content, arrays = self.train([*map(encode, model)], config)
        numbers, n = numbers_of(content)
        return [decode(array) for array in arrays], n, numbers

    def evaluate(self, model: list[Matrix], config: dict[str, Scalar]) -> Evaluated:
        """Evaluate by the app's handler; NaN where its reply has no loss."""
        numbers, n = numbers_of(self._ask(MessageType.EVALUATE, [*map(encode, model)], config))
        loss = next((float(numbers[name]) for name in LOSSES if name in numbers), nan)
        return loss, n, numbers

    def train(
        self, model: Sequence[Array], config: Mapping[str, Scalar]
    ) -> tuple[RecordDict, list[Array]]:
        """Return the content of a training reply, and its arrays in the order of the model's."""
        content = self._ask(MessageType.TRAIN, model, config)
        found = content.get(ARRAYS)
        if not isinstance(found, ArrayRecord):
            raise ValueError(f"a training reply must have an ArrayRecord {ARRAYS!r}, got none.")
        return content, [*in_order(found, self._names).values()]

    def _ask(self, kind: str, model: Sequence[Array], config: Mapping[str, Scalar]) -> RecordDict:
        arrays = named(model, self._names)
        content = RecordDict({ARRAYS: arrays, CONFIG: ConfigRecord({**config})})
        reply = self._call(like(self._message, content, kind), self._context)
        if reply.has_error():
            raise ValueError(error_of(reply))
        return reply.content


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


def says(message: Message, *keys: str) -> bool:
    """Whether a request's config has one of these keys."""
    record = message.content.get(CONFIG)
    return isinstance(record, ConfigRecord) and any(key in record for key in keys)


def all_sendable(arrays: Sequence[Array], given: Sequence[Array]) -> list[Array]:
    """Return a trained model's arrays with the dtypes that they came with, see `sendable`."""
    _check_shapes(arrays, given)
    return [sendable(*pair) for pair in zip(arrays, given, strict=True)]


def sendable(array: Array, given: Array) -> Array:
    """Return a trained array with the dtype that it came with; one that has it is not copied."""
    if array.dtype == given.dtype:
        return array
    return encode(as_dtype(decode(array), np.dtype(given.dtype)))


def as_given(model: Sequence[Any], given: Sequence[Matrix]) -> list[Matrix]:
    """Return a trained model with the dtypes that it came with: training may have promoted them."""
    arrays = [np.asarray(array) for array in model]
    _check_shapes(arrays, given)
    return [as_dtype(array, old.dtype) for array, old in zip(arrays, given, strict=True)]


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


def evaluation_reply(
    message: Message, loss: float, num_examples: int, metrics: dict[str, Scalar]
) -> Message:
    """Return the reply to an evaluation."""
    measured = metrics if isnan(loss) else with_loss(loss, metrics)  # NaN: too few samples to say
    return reply_to(message, None, num_examples, measured)
