"""What a protocol step at a client receives, uses and returns.

Any client, and any ClientApp, is two functions to it: training and evaluation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from logging import WARNING
from math import inf, isfinite, isnan, nan
from typing import Any, NamedTuple

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from numpy.typing import NDArray

from flwr_perdl.core.checks import Matrix, brief_repr, check_real
from flwr_perdl.core.keys import PURPOSE, REPORT, SELECT
from flwr_perdl.core.models import as_dtype
from flwr_perdl.protocol.client_state import PREFIX, PrivateState, StateStore, identify
from flwr_perdl.protocol.compat import NumPyClient, like, log, new_record
from flwr_perdl.protocol.records import (
    AGAIN,
    ALTERNATE,
    ARRAYS,
    CONFIG,
    FORK,
    HIGHER_IS_BETTER,
    LARGEST_INT,
    LEFT_OUT,
    LOSSES,
    MEASURING,
    METRIC,
    METRICS,
    NO_EVALUATE,
    NUM_EXAMPLES,
    OURS,
    PARTITION_ID,
    ROUND,
    RUN,
    SEED,
    STATE_LOST,
    UNTRAINED,
    OtherClientError,
    Scalar,
    encode,
    error_of,
    in_order,
    left_out_of,
    named,
    numbers_in,
    route_of,
    texts_in,
    view,
    with_loss,
)
from flwr_perdl.random import spawn

Call = Callable[[Message, Context], Message]
Evaluated = tuple[float, int, dict[str, Scalar]]

#: What precedes the app's own records of a kind of training, and of a run whose records are apart;
#: the record that says that this run has begun.
_TRAININGS, _APART, _APART_RUN = f"{OURS}app.", f"{OURS}apart/", f"{OURS}apart-run/"
#: What is a number in an error's text, and what is said of those that are not shown.
_NUMBER = re.compile(r"[-+.\d]*\d[.\d]*(?:e[-+]?\d+)?", re.IGNORECASE)
_HIDDEN = "numbers are hidden, since some may be private; the client's log has them"
#: Which of these keys an app's handlers receive: the run, its seed, and what `keep_private` reads.
_FOR_HANDLERS = (RUN, SEED, LEFT_OUT, ALTERNATE, FORK)


class NoEvaluateError(NotImplementedError):
    """A client that defines no evaluation is asked for one."""

    code = NO_EVALUATE

    def __init__(self) -> None:
        super().__init__(
            "the client must define evaluate, for evaluations and to choose among several models, "
            "got none."
        )


class StateLostError(ValueError):
    """A client has lost what it kept of the run, and the request does not bring it again."""

    code = STATE_LOST

    def __init__(self, lost: str) -> None:
        super().__init__(
            f"state-dir must be in the client's node config for its state to survive a restart, "
            f"got a request that needs {lost}, which is lost."
        )


class HiddenError(ValueError):
    """An error where private arrays are at hand, without the numbers in it: one may be theirs."""

    def __init__(self, text: str) -> None:
        super().__init__(f"{_NUMBER.sub('#', text)} ({_HIDDEN})")


class UntrainedError(ValueError):
    """A client is to evaluate that has a private part, of other runs than the request's."""

    code = UNTRAINED

    def __init__(self) -> None:
        super().__init__(
            "the client must train in a run before it evaluates there, since it keeps a private "
            "part from another one, got a request to evaluate."
        )


#: Errors that the server is to tell from others.
CODED = (NoEvaluateError, StateLostError, UntrainedError)


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


class Measured(NamedTuple):
    """What the user's evaluation returns of one of several models.

    Attributes
    ----------
    cost : float
        By what models are chosen, less is better: infinite where it is not known.
    num_examples : int
        Number of examples.
    metrics : dict
        The user's metrics, the loss as ``"loss"``.
    records : dict
        What the app then had in ``context.state``.
    """

    cost: float
    num_examples: int
    metrics: dict[str, Scalar]
    records: dict[str, Any]

    def keep_records(self, context: Context) -> None:
        """Leave the app what it had after this evaluation."""
        replace_records(context, self.records)


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
        stays = left_out_of(self._configs[MessageType.TRAIN])
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
            raise ValueError(
                f"fit (of a ClientApp train) must return arrays of shapes {wanted}, got {shapes}."
            )
        metrics, n = metrics_of(content)
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
        metrics, n = metrics_of(content)
        numbers = numbers_in(metrics)
        if texts := [name for name in LOSSES if name in metrics.keys() - numbers.keys()]:
            raise ValueError(f"{texts[0]} must be a number, got {brief_repr(metrics[texts[0]])}.")
        loss = next((float(numbers[name]) for name in LOSSES if name in numbers), nan)
        return loss, n, metrics

    def select(self, arrays: Sequence[Any], names: Sequence[str] = (), **config: Any) -> Measured:
        """Evaluate one of several models, of which one is to be chosen, by the user's evaluation.

        The app's records in ``context.state`` are afterwards as they were: it is asked about models
        that the client may never have.

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
        Measured
            The cost, by the metric that the strategy chooses by.
        """
        before = copy_records(self.context)
        loss, n, metrics = self.evaluate(arrays, names, **{**config, PURPOSE: SELECT})
        records = copy_records(self.context)
        replace_records(self.context, before)
        others = numbers_in(metrics)
        value = loss if self._metric in LOSSES else others.get(self._metric, nan)
        cost = -value if self._request.config.get(HIGHER_IS_BETTER) else value
        return Measured(inf if isnan(cost) else cost, n, with_loss(loss, metrics), records)

    def check_cost(self, measured: Iterable[Measured]) -> None:
        """Raise a ValueError unless one of these models has a finite cost.

        Parameters
        ----------
        measured : iterable of Measured
            Of all models among which the client chooses.
        """
        measured = [*measured]
        if any(isfinite(one.cost) for one in measured):
            return
        others = ", ".join(sorted(measured[0].metrics)) or "none"
        also = ' (a ClientApp: as the metric "loss" or "eval_loss")' * (self._metric in LOSSES)
        raise ValueError(
            f"evaluate must return a finite {self._metric} of at least one model{also}, got none; "
            f"other metrics: {others}."
        )

    @property
    def _metric(self) -> str:
        """By which metric the client chooses."""
        return str(self._request.config.get(METRIC, LOSSES[0]))

    @cached_property
    def _configs(self) -> dict[str, dict[str, Scalar]]:
        """What the user's training and evaluation receive of the request's config."""
        train: dict[str, Scalar] = {}
        measure: dict[str, Scalar] = {}
        for key, value in self._request.config.items():
            if key.startswith(MEASURING):
                measure[key.removeprefix(MEASURING)] = value
            elif not key.startswith(OURS) or key in _FOR_HANDLERS:
                train[key] = value
        return {MessageType.TRAIN: train, MessageType.EVALUATE: {**train, **measure}}

    def _ask(
        self, kind: str, model: Sequence[Array], names: Sequence[str], config: Mapping[str, Any]
    ) -> RecordDict:
        """Return what the app's handler replies."""
        if self._call is None or self._message is None:
            raise TypeError("step must be without client= to train and evaluate by the app.")
        purpose = {PURPOSE: REPORT} if kind == MessageType.EVALUATE else {}
        told = new_record(ConfigRecord, self._configs[kind])
        told.update({**purpose, **config})
        keeps = self.keeps is not None or LEFT_OUT in told
        if keeps and ROUND not in config and route_of(self._message)[0] == MessageType.TRAIN:
            told[AGAIN] = self._trained
        content = RecordDict({ARRAYS: named(model, names), CONFIG: told})
        reply = self._call(like(self._message, content, kind), self.context)
        if reply.has_error():
            raise ValueError(error_of(reply))
        self._trained |= kind == MessageType.TRAIN
        return reply.content


def metrics_of(content: RecordDict) -> tuple[dict[str, Any], int]:
    """Return a reply's metrics, and the number of its examples."""
    record = content.get(METRICS)
    if not isinstance(record, MetricRecord) or NUM_EXAMPLES not in record:
        raise ValueError(f"a reply must have a MetricRecord {METRICS!r} with {NUM_EXAMPLES!r}.")
    metrics: dict[str, Any] = {**texts_in(content), **record}
    return metrics, int(check_real(NUM_EXAMPLES, metrics.pop(NUM_EXAMPLES), 0, LARGEST_INT))


def copy_records(context: Context) -> dict[str, Any]:
    """Return copies of what the app keeps in ``context.state``: all that is not the library's."""
    return {name: context.state[name].copy() for name in context.state if _is_app(name)}


def replace_records(context: Context, records: Mapping[str, Any]) -> None:
    """Give the app other records in ``context.state``."""
    _pop(context.state, _is_app)
    context.state.update(records)


@contextmanager
def state_of(context: Context, training: str) -> Iterator[None]:
    """Let the app find in ``context.state`` what it kept in this kind of training, and no more.

    An optimizer's state is of the model that it trained.
    """
    with _swapped(context.state, f"{_TRAININGS}{training}/", _is_app):
        yield


@contextmanager
def state_apart(context: Context, config: Mapping[str, Any]) -> Iterator[None]:
    """Have what is kept in ``context.state`` be of the run that a request's config names.

    Strategies that are tried in turns begin alike, with copies of the app's records from before
    them; or with all of the run from which this one goes on.
    """
    run, origin, state = config.get(RUN), config.get(FORK, ""), context.state
    prefix, other = f"{_APART}{run}/", f"{_APART}{origin}/"
    if (begun := f"{_APART_RUN}{run}") not in state:
        named = {name: name for name in state if _is_apps_anywhere(name)}
        if origin:
            named = {name: name.removeprefix(other) for name in state if name.startswith(other)}
        copies = {prefix + own: state[name].copy() for name, own in named.items()}
        state.update({**copies, begun: ConfigRecord()})
    with _swapped(state, prefix, lambda own: _is_apps_anywhere(own) or own.startswith(PREFIX)):
        yield


@contextmanager
def _swapped(state: RecordDict, prefix: str, meant: Callable[[str], bool]) -> Iterator[None]:
    """Have the records with a prefix, without it, in place of those that are meant."""
    others = _pop(state, meant)
    kept = _pop(state, lambda name: name.startswith(prefix))
    state.update({name.removeprefix(prefix): record for name, record in kept.items()})
    try:
        yield
    finally:
        kept = _pop(state, meant)
        state.update({prefix + name: record for name, record in kept.items()} | others)


def _pop(state: RecordDict, meant: Callable[[str], bool]) -> dict[str, Any]:
    return {name: state.pop(name) for name in [*state] if meant(name)}


def _is_app(name: str) -> bool:
    return not name.startswith(OURS)


def _is_apps_anywhere(name: str) -> bool:
    return _is_app(name) or name.startswith(_TRAININGS)


@contextmanager
def hide_numbers(where: str = "") -> Iterator[None]:
    """Let an error say no number, nor what it follows from; one without either stays as it is."""
    try:
        yield
    except (HiddenError, *CODED, OtherClientError):
        raise
    except Exception as error:
        text = f"{where}{type(error).__name__}: {error}"
        if not (_NUMBER.search(text) or error.__cause__ or error.__context__):
            raise
        log(WARNING, "This client's error, of which the server gets no number: %s", text)
        raise HiddenError(text) from None


def hiding(call: Call) -> Call:
    """Return what answers messages, with no number in the errors that it raises or returns."""

    def answer(message: Message, context: Context) -> Message:
        with hide_numbers():
            reply = call(message, context)
        if reply.has_error():
            hidden = HiddenError(reply.error.reason or "")
            return Message(Error(reply.error.code, str(hidden)), reply_to=message)
        return reply

    return answer


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


def has_evaluation(client: Any) -> bool:
    """Whether a client defines ``evaluate``."""
    evaluate = getattr(client, "evaluate", None)
    return evaluate is not None and getattr(evaluate, "__func__", None) is not NumPyClient.evaluate


def evaluation_of(client: Any) -> Callable[[list[Matrix], dict[str, Scalar]], Evaluated]:
    """Return the client's ``evaluate``, or raise a NotImplementedError if it has none."""
    if not has_evaluation(client):
        raise NoEvaluateError
    found: Callable[[list[Matrix], dict[str, Scalar]], Evaluated] = client.evaluate
    return found
