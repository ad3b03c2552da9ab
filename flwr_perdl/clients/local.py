"""What a protocol step at a client receives, uses and returns.

Any client, and any ClientApp, is two functions to it: training and evaluation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
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
from numpy.typing import NDArray

from flwr_perdl.clients.base import PrivateState, StateStore, identify
from flwr_perdl.core.checks import Matrix
from flwr_perdl.core.models import as_dtype
from flwr_perdl.protocol.compat import NumPyClient, like
from flwr_perdl.protocol.records import (
    AGAIN,
    ALTERNATE,
    ARRAYS,
    CONFIG,
    LEFT_OUT,
    LOSSES,
    MEASURING,
    METRICS,
    NUM_EXAMPLES,
    PARTITION_ID,
    ROUND,
    RUN,
    SEED,
    Scalar,
    encode,
    error_of,
    in_order,
    named,
    route_of,
    scalars,
    view,
)
from flwr_perdl.random import spawn

Call = Callable[[Message, Context], Message]
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
    names : tuple of str
        The arrays' names: those that stay at the client are not among them.
    """

    sent: list[Array]
    num_examples: int
    metrics: dict[str, Scalar]
    names: tuple[str, ...] = ()

    @property
    def arrays(self) -> list[Matrix]:
        """The trained model's arrays; not to be changed."""
        return [view(array) for array in self.sent]


class StepRequest(NamedTuple):
    """A request as a step receives it; independent of the client's data.

    Attributes
    ----------
    step : str
        The step's name.
    arrays : list of ndarray
        The request's arrays; read-only.
    config : mapping of str to scalar
        The request's config.
    round, seed : int
        The communication round, from 1, and the run's one seed.
    run : str
        The run's token.
    names : tuple of str
        The arrays' names.
    received : sequence of flwr.app.Array
        The arrays as they were received: pass these on to avoid a copy.

    Examples
    --------
    >>> from flwr_perdl.clients import StepRequest
    >>> StepRequest("mean", [], {}, round=1, seed=0, run="").step
    'mean'
    """

    step: str
    arrays: list[Matrix]
    config: Mapping[str, Scalar]
    round: int
    seed: int
    run: str
    names: tuple[str, ...] = ()
    received: Sequence[Array] = ()

    @property
    def models(self) -> dict[str, dict[str, Array]]:
        """The arrays as they came, where several models did: called by model, "/", own name."""
        found: dict[str, dict[str, Array]] = {}
        for name, array in zip(self.names, self.received, strict=True):
            model, _, own = name.partition("/")
            found.setdefault(model, {})[own] = array
        return found


class StepResult(NamedTuple):
    """The result of a step.

    Attributes
    ----------
    arrays : sequence of ndarray or flwr.app.Array
        What leaves the client; nothing in an evaluation.
    num_examples : int
        The reply's weight.
    metrics : mapping of str to float
        Metrics that leave the client; an evaluation's loss is ``"loss"``.
    keep : mapping of str to ndarray, or None
        What the client keeps for the next step; None changes nothing. An evaluation keeps nothing.
    names : sequence of str
        The arrays' names; by default the request's, if it has as many.
    last : bool, default False
        Whether ``keep`` replaces everything kept before, so that no earlier round can be repeated.
    start : sequence of flwr.app.Array
        What training started from, if not the request's arrays of the same names.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.clients import StepResult
    >>> StepResult([np.zeros(2)], 10).metrics
    {}
    """

    arrays: Sequence[Any]
    num_examples: int
    metrics: Mapping[str, Scalar] = {}
    keep: Mapping[str, NDArray[Any]] | None = None
    names: Sequence[str] = ()
    last: bool = False
    start: Sequence[Array] = ()


class Local:
    """What a step may use at a client.

    Attributes
    ----------
    partition : int
        The client's partition.
    rng : numpy.random.Generator
        The generator of (seed, partition, round).
    kept : PrivateState
        Private arrays: ``kept.before(round)`` in training, ``kept.after(round)`` in evaluation.
        Save by ``StepResult(keep=...)``.
    client : object
        The result of ``make_client``, if the step is for clients of its class; else None.

    Examples
    --------
    A step that trains the server's model twice as long as the app does:

    >>> from flwr_perdl.clients import StepResult, step
    >>> @step("twice", "train")
    ... def train(local, request):
    ...     once = local.fit(request.arrays)
    ...     twice = local.fit(once.arrays)
    ...     return StepResult(twice.arrays, twice.num_examples, twice.metrics)
    """

    def __init__(
        self,
        context: Context,
        request: StepRequest,
        store: StateStore | None,
        *,
        client: Any = None,
        message: Message | None = None,
        call: Call | None = None,
        keeps: Any = None,
    ) -> None:
        self.context, self.client, self.keeps = context, client, keeps
        self._request, self._store, self._message, self._call = request, store, message, call
        self._trained = False

    @cached_property
    def partition(self) -> int:
        """Which client this is."""
        return int(identify(self.context)[PARTITION_ID])

    @cached_property
    def rng(self) -> np.random.Generator:
        """The generator of (seed, partition, round)."""
        return spawn(self._request.seed, self.partition, self._request.round)

    @cached_property
    def kept(self) -> PrivateState:
        """The client's private arrays in this run."""
        return PrivateState(self.context, self._request.run, self._store)

    def fit(
        self, arrays: Sequence[Any], names: Sequence[str] = (), *, state: str = "", **config: Any
    ) -> Trained:
        """Train with the user's own training, as in FedAvg, mods included.

        Parameters
        ----------
        arrays : sequence of ndarray or flwr.app.Array
            The model to start from.
        names : sequence of str, optional
            Its arrays' names, by default those of the request.
        state : str, optional
            Name of the model, if there are several: the app's ``context.state`` is kept separately
            for each.
        **config
            Added to the request's config.

        Returns
        -------
        Trained
            Arrays, number of examples and metrics.
        """
        model, names = [*map(encoded, arrays)], names or self._request.names
        stays = json.loads(str(self._configs[MessageType.TRAIN].get(LEFT_OUT, "[]")))
        with state_of(self.context, state) if state else nullcontext():
            content = self._ask(MessageType.TRAIN, model, names, config)
        found = content.get(ARRAYS)
        if not isinstance(found, ArrayRecord):
            raise ValueError(f"a training reply must have an ArrayRecord {ARRAYS!r}, got none.")
        if stays:  # they are no part of what is found
            pairs = zip(names, model, strict=True)
            kept = {name: own for name, own in pairs if name in found or name not in stays}
            names, model = [*kept], [*kept.values()]
        trained = [*in_order(found, names).values()]
        shapes, wanted = ([tuple(array.shape) for array in some] for some in (trained, model))
        if shapes != wanted:
            raise ValueError(f"fit must return arrays of shapes {wanted}, got {shapes}.")
        metrics, n = numbers_of(content)
        sent = [sendable(*pair) for pair in zip(trained, model, strict=True)]
        return Trained(sent, n, metrics, tuple(names))

    def evaluate(
        self, arrays: Sequence[Any], names: Sequence[str] = (), **config: Any
    ) -> Evaluated:
        """Evaluate with the user's own evaluation; the loss is NaN if the app has none.

        Parameters
        ----------
        arrays : sequence of ndarray or flwr.app.Array
            The model.
        names : sequence of str, optional
            Its arrays' names, by default those of the request.
        **config
            Added to the request's config.

        Returns
        -------
        Evaluated
            Loss, number of examples and metrics.
        """
        names = names or self._request.names
        content = self._ask(MessageType.EVALUATE, [*map(encoded, arrays)], names, config)
        numbers, n = numbers_of(content)
        loss = next((float(numbers[name]) for name in LOSSES if name in numbers), nan)
        return loss, n, numbers

    @cached_property
    def _configs(self) -> dict[str, dict[str, Scalar]]:
        """What the user's training and evaluation receive of the request's config."""
        train: dict[str, Scalar] = {}
        measure: dict[str, Scalar] = {}
        for key, value in self._request.config.items():
            if key.startswith(MEASURING):
                measure[key.removeprefix(MEASURING)] = value
            elif not key.startswith(_OURS) or key in _FOR_HANDLERS:
                train[key] = value
        return {MessageType.TRAIN: train, MessageType.EVALUATE: {**train, **measure}}

    def _ask(
        self, kind: str, model: Sequence[Array], names: Sequence[str], config: Mapping[str, Any]
    ) -> RecordDict:
        """Return what the app's handler replies."""
        if self._call is None or self._message is None:
            raise TypeError("step must be without client= to train and evaluate by the app.")
        told = {**self._configs[kind], **config}
        keeps = self.keeps is not None or LEFT_OUT in told
        if keeps and ROUND not in config and route_of(self._message)[0] == MessageType.TRAIN:
            told[AGAIN] = self._trained
        asked = ConfigRecord(told)
        content = RecordDict({ARRAYS: named(model, names), CONFIG: asked})
        reply = self._call(like(self._message, content, kind), self.context)
        if reply.has_error():
            raise ValueError(error_of(reply))
        self._trained |= kind == MessageType.TRAIN
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


def sendable(array: Array, given: Array) -> Array:
    """Return a trained array with the dtype that it came with; one that has it is not copied."""
    if array.dtype == given.dtype:
        return array
    return encode(as_dtype(view(array), np.dtype(given.dtype)))


def encoded(array: Any) -> Array:
    """Return an array as a record has it; one that is so is not copied."""
    return array if isinstance(array, Array) else encode(array)


def evaluation_of(client: Any) -> Callable[[list[Matrix], dict[str, Scalar]], Evaluated]:
    """Return the client's ``evaluate``, or raise a NotImplementedError if it has none."""
    evaluate = getattr(client, "evaluate", None)
    if evaluate is None or getattr(evaluate, "__func__", None) is NumPyClient.evaluate:
        raise NoEvaluateError
    found: Callable[[list[Matrix], dict[str, Scalar]], Evaluated] = evaluate
    return found
