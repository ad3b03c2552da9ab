"""From a ``NumPyClient``, or any ``ClientApp``, to one that works with every strategy here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, Context, Error, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp

from flwr_perdl.clients.base import identify, private_store
from flwr_perdl.clients.dispatch import (
    ProtocolClient,
    Step,
    find_step,
    read_step,
    reject_other_client,
    steps_of,
    take,
    take_by,
)
from flwr_perdl.clients.local import (
    CODED,
    Call,
    Local,
    NoEvaluateError,
    StepResult,
    encoded,
    evaluation_of,
    has_evaluation,
    hiding,
    state_apart,
    within,
)
from flwr_perdl.clients.personalized import (
    KeepPrivate,
    Part,
    aside,
    asked_to_keep,
    check_mods,
    check_patterns,
    refuse_untrained,
)
from flwr_perdl.clients.transport import TRANSPORT, Transport
from flwr_perdl.core.checks import check_count, check_flag, check_kind
from flwr_perdl.privacy.ledger import Own
from flwr_perdl.privacy.noise import Noise
from flwr_perdl.privacy.noised_client import answer_silently
from flwr_perdl.privacy.secure_client import MIN_CLIENTS, OTHER_MOD, answer_for_sum
from flwr_perdl.protocol.compat import FITINS, SECAGG, has_handler, is_legacy, like, mods_of
from flwr_perdl.protocol.records import (
    APART,
    ARRAYS,
    CONFIG,
    DEFAULT,
    LEFT_OUT,
    PARTITION_ID,
    PINNED_KEYS,
    PRIVATE,
    PROMISE,
    RUN,
    SEALED,
    SEALS_ALL,
    SILENT,
    UNABLE_TO_EVALUATE,
    UNCOUNTED,
    Scalar,
    config_of,
    directed,
    named,
    read_request,
    reply_to,
    route_of,
    scalars,
    view,
    with_loss,
)

#: Makes a client: an object with ``fit`` and ``evaluate``, or what its ``to_client()`` returns.
Factory = Callable[[Context], Any]
#: The client that answers all parts of one message.
_MADE: ContextVar[Any] = ContextVar("made", default=None)


class Guards(NamedTuple):
    """What a client insists on, whatever its app is, and its own protocols: see `client_app`."""

    min_clients: int = MIN_CLIENTS
    part: Part | None = None
    privacy: Noise | None = None
    steps: Mapping[tuple[str, str, str], Step] = {}
    evaluate: bool = True


def client_app(
    make_client: Factory | ClientApp,
    *,
    train_mods: Sequence[Any] = (),
    evaluate_mods: Sequence[Any] = (),
    secure: bool = False,
    min_clients: int = MIN_CLIENTS,
    private: str | Sequence[str] = (),
    share: str | Sequence[str] = (),
    names: Sequence[str] = (),
    evaluate: bool = True,
    privacy: Noise | None = None,
    protocols: Sequence[Any] = (),
) -> ClientApp:
    """Return the ClientApp whose train and evaluate handlers call a NumPyClient.

    The client may be a NumPyClient, or any other object with ``fit`` and ``evaluate``. With these
    it works with every strategy for any model, and with Flower's own strategies.

    Parameters
    ----------
    make_client : callable or ClientApp
        ``Context -> client``; called for every message. A ``client_fn`` that returns
        ``client.to_client()`` works as it is. Under Ray the app is pickled with every message: read
        the data in ``make_client`` instead of closing over it. Or a ClientApp with its own handlers
        (``@app.train()``, ``@app.evaluate()``): for `ClusteredFedAvg` its evaluation replies need
        the metric ``"loss"`` or ``"eval_loss"``.
    train_mods, evaluate_mods : sequence of Flower mods
        Mods around training and evaluation, outermost first. Requests and replies carry one
        ArrayRecord each, so Flower's differential-privacy mods work; of `ClusteredFedAvg`'s
        requests they see one model at a time.
    secure : bool, default False
        Whether to train in secure rounds only (`PerMA` with ``secure=True``, `SecureMean`), except
        for a protocol's first step, whose request has no arrays, such as PerMA's. By default the
        client takes part in secure and other rounds.
    min_clients : int, default 3
        Fewest clients, at least 2, in a secure round that the client takes part in. It counts
        distinct public keys: with fewer it sends no update, and does not help to unmask a sum.
    private : str or sequence of str, default ()
        Names or patterns of arrays that never leave the client: `keep_private` around all mods, of
        which ``train_mods`` see the shared arrays only. Arrays without names are "0", "1", ….
    share : str or sequence of str, default ()
        Instead, names or patterns of the only arrays that leave the client.
    names : sequence of str, default ()
        With ``private`` or ``share``: the names of all arrays, in the order in which a NumPyClient
        takes them, so that no server can call a private array by another's name. By default they
        are "0", "1", …; with a ``state-dir`` those of the client's first run.
    evaluate : bool, default True
        Whether the server learns losses: of models that it chooses they tell of the data and of
        private arrays. False is as if the client defined no evaluation.
    privacy : Noise, optional
        The client answers only requests whose guarantee is at least as strong, with noised sums,
        and only for as many rounds as the guarantee covers: with ``state-dir`` in the node config
        over all runs, else within one Flower run. Its ``basis`` and ``clip`` do not count. By
        default it trusts every request's guarantee.
    protocols : sequence of modules or functions, default ()
        Your own protocols: modules with functions registered by `step`, or such functions. If they
        are all that is asked, the client needs no ``fit``.

    Returns
    -------
    ClientApp
        Training replies have ``"arrays"`` and ``"metrics"``, evaluation replies ``"metrics"`` with
        the loss as ``"loss"``, unless it is NaN; metrics that are texts are in a ConfigRecord
        ``"texts"``. A query returns the client's properties, with the
        context's ``partition-id`` if the client does not say its own.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If ``min_clients`` is below 2; if an option comes with a ClientApp, which has its own
        (``min_clients`` and ``private`` only with one of `client_app`); if ``names`` come without
        ``private`` or ``share``, or one twice; if `keep_private` is among
        the mods, and not the first of a ClientApp's; if one of ``protocols`` has no steps.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr.client import NumPyClient
    >>> from flwr_perdl.clients import client_app
    >>> class Mean(NumPyClient):
    ...     def __init__(self, X):
    ...         self.X = X
    ...     def fit(self, parameters, config):
    ...         return [self.X.mean(axis=0)], len(self.X), {}
    ...     def evaluate(self, parameters, config):
    ...         return float(np.mean((self.X - parameters[0]) ** 2)), len(self.X), {}
    >>> app = client_app(lambda context: Mean(np.eye(3)))
    """
    check_flag("secure", secure)
    check_flag("evaluate", evaluate)
    check_count("min_clients", min_clients, 2)
    part = Part.of("private", private, share)
    check_kind("privacy", privacy, (Noise, type(None)), "a Noise or None")
    steps, names = steps_of(protocols), check_patterns("names", names)
    if (names and part is None) or len({*names}) < len(names):
        raise ValueError(f"names must come with private or share, and each once, got {names}.")
    guards = Guards(min_clients, part, privacy, steps, evaluate)
    if isinstance(make_client, ClientApp):
        ours = isinstance(make_client, AnsweringApp)
        if train_mods or evaluate_mods or secure or names or (ours and guards != Guards()):
            raise ValueError(
                "train_mods, evaluate_mods, secure and names must be left out with a ClientApp, "
                "which has its own, and min_clients, private, evaluate, privacy and protocols with "
                "one of client_app, got some of them."
            )
        if is_legacy(make_client):
            raise TypeError(
                "make_client must be the client_fn itself where a ClientApp was made from one, got "
                "ClientApp(client_fn)."
            )
        own_mods = mods_of(make_client)
        keeps = part is None and isinstance(next(iter(own_mods), None), KeepPrivate)
        check_mods("mods of the ClientApp", own_mods[keeps:])
        return make_client if ours else OtherApp(make_client, guards)
    if not callable(make_client):
        raise TypeError(
            f"make_client must be a function that makes a client from Flower's Context, got "
            f"{make_client!r}."
        )
    for name, mods in (("train_mods", train_mods), ("evaluate_mods", evaluate_mods)):
        if not isinstance(mods, tuple) or mods:
            check_mods(name, mods)
    return NumPyClientApp(make_client, train_mods, evaluate_mods, secure, names, guards)


def _numpy_client(client: Any, *, needs_fit: bool) -> Any:
    """Return the client that ``make_client`` made, or of which it made ``to_client()``."""
    made = getattr(client, "numpy_client", client)
    if isinstance(made, type) or (needs_fit and not callable(getattr(made, "fit", None))):
        raise TypeError(
            f"make_client must be a function that returns a client with a method fit, got {made!r}."
        )
    return made


def _properties(client: Any, context: Context) -> dict[str, Any]:
    """Return what a client says of itself, and who its context says it is."""
    given = getattr(client, "get_properties", None)
    properties: dict[str, Any] = {} if given is None else dict(given({}))
    return properties if PARTITION_ID in properties else {**identify(context), **properties}


class AnsweringApp(ClientApp):
    """A ClientApp that takes part in this library's protocols, by its own handlers.

    What guards the client wraps the dispatcher, outermost first: whether its guarantee of
    privacy or its pinned keys let it answer at all, secure sums, noise. Its private arrays are put
    in and taken out around its handlers, of which a step may call several, each with one model.
    """

    #: Whether it trains in secure rounds alone.
    _secure = False
    #: The `keep_private` that the app has of its own.
    own_keep: KeepPrivate | None = None
    #: Mods around training, which see what is shared.
    _train_mods: Sequence[Any] = ()

    def __init__(self, guards: Guards) -> None:
        super().__init__()
        self._min_clients, part, self._privacy, self._steps, self._evaluation = guards
        self._keep = None if part is None else KeepPrivate(part)

    @property
    def kept_part(self) -> Part | None:
        """Which arrays stay at the client whatever a server asks."""
        keep = self._keep or self.own_keep
        return None if keep is None else keep.part

    def made(self, context: Context) -> Any:
        """Return the client that answers this message, None where handlers do."""
        return None

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message, also where a mod returned something else than a reply to it."""
        kind, action = route_of(message)
        config = config_of(message)
        apart = state_apart(context, str(config.get(RUN))) if APART in config else nullcontext()
        try:
            if action != DEFAULT:  # nothing here knows what an app's own actions send
                if self._privacy or self._keep or _pins_keys(context):
                    raise ValueError(
                        f"the message's type must be {kind} alone for a client with privacy, "
                        f"private or pinned keys, got the action {action!r}."
                    )
                answered = self._handle(message, context)
            else:
                # Flower's mods, too, see no training in "train.default".
                if message.metadata.message_type != kind:
                    message = like(message, message.content, kind)
                with apart:
                    answered = self._guarded(kind, message, context)
        except CODED as error:  # the server is to tell them from others
            answered = Message(Error(error.code, str(error)), reply_to=message)
        except KeyError as error:
            key = error.args[0] if error.args else None
            if key in (SECAGG, FITINS) and key not in message.content:
                raise ValueError(OTHER_MOD.format("one of flwr.client.mod")) from error
            if key in (PARTITION_ID, "num-partitions") and key not in context.node_config:
                raise ValueError(
                    f"node_config must have {key!r}, which the app reads, got "
                    f"{sorted(context.node_config)}."
                ) from error
            raise
        reply: Any = directed(answered, message)
        answer: Message = reply
        return answer

    def _guarded(self, kind: str, message: Message, context: Context) -> Message:
        """Answer a message with what may leave the client; no key of a query's config counts."""
        if kind == MessageType.QUERY:
            return self._answer(message, context)
        if self._privacy is not None and kind == MessageType.EVALUATE:
            raise NoEvaluateError
        asked = find_step(config_of(message), kind, self._steps)
        seals = asked is not None and asked.seals and config_of(message).get(SEALED)
        if _pins_keys(context) and (kind == MessageType.EVALUATE or not seals):
            raise ValueError(
                "neighbor-keys in the node config must be left out for such a request: a node "
                f"that pins keys sends only sealed messages, got one to {kind}."
            )
        call: Call = self._answer
        if asked is not None and asked.client is None:
            call = partial(self.take_step, asked)
        if asked is not None and asked.whole:
            if not self._evaluation:
                raise NoEvaluateError
            if self.kept_part is not None or LEFT_OUT in config_of(message):
                refuse_untrained(context, str(config_of(message).get(RUN, "")))
        if asked is not None and (asked.whole or seals):
            call = hiding(call)
        trains, secure = kind == MessageType.TRAIN, SECAGG in message.content
        summed = self._privacy or secure or PROMISE in config_of(message)
        if (transport := _transport_of(message)) is not None:
            if summed or self._secure or (asked is not None and asked.client is not None):
                raise ValueError(
                    "transport and compression must be left out where clients require secure "
                    "sums or privacy, or send no model, got a request with them."
                )
            message = transport.restored(message)
        if trains and config_of(message).get(SILENT):
            return answer_silently(message, context, call)
        if self._secure and trains and not secure and not _is_start(message, asked):
            raise ValueError(
                "secure=True must be the strategy's option too, got a request to send an update in "
                "the clear."
            )
        if trains and summed:
            return answer_for_sum(message, context, call, self._min_clients, self._own(context))
        return call(message, context)

    def take_step(self, asked: Step, message: Message, context: Context) -> Message:
        """Take a step that works with any app."""
        record = message.content.array_records[ARRAYS]
        config, received = scalars(config_of(message)), [*record.values()]
        request = read_step(config, [view(array) for array in received], record, received)
        store = private_store(context, asked.protocol)
        keeps = self._keep or self.own_keep or asked_to_keep(message)
        call = self._aside if asked.whole else self._answer
        local = Local(context, request, store, message=message, call=call, keeps=keeps)
        result = take(asked, local, request)
        reply, transport = _reply(message, asked, result), _transport_of(message)
        if transport is not None and transport.changes:
            names = reply.content.array_records[ARRAYS]
            begun = dict(zip(names, result.start, strict=True)) if result.start else record
            transport.shorten(reply, begun, message, context)
        return reply

    def _own(self, context: Context) -> Own | None:
        """Return what the client insists on, and where it counts what it spends."""
        if self._privacy is None:
            return None
        store = private_store(context, "noise")
        return Own(self._privacy, *((None, "") if store is None else store[:2]))

    def _who(self, context: Context) -> dict[str, Scalar]:
        """Return who the client is, and whether it counts what it spends over all runs."""
        own = self._own(context)
        uncounted = {} if own is None or own.folder is not None else {UNCOUNTED: True}
        return {**identify(context), **uncounted}

    def _answer(self, message: Message, context: Context) -> Message:
        """Answer a message by the handlers, with the client's private arrays in it."""
        keep = self._keep
        if keep is None and self.own_keep is None and LEFT_OUT in config_of(message):
            keep = asked_to_keep(message)
        kind, transport = route_of(message)[0], _transport_of(message)
        if kind == MessageType.EVALUATE and not self._evaluation:
            raise NoEvaluateError
        begun = dict(message.content.array_records.get(ARRAYS, {})) if transport else {}
        mods = self._train_mods if kind == MessageType.TRAIN else ()
        if keep is None:
            reply = within(mods, self._handle)(message, context)
        else:
            reply = keep(message, context, self._handle, mods)
        if transport is not None and transport.changes and not reply.has_error():
            transport.shorten(reply, begun, message, context)
        who = reply.content.get(CONFIG) if kind == MessageType.QUERY else None
        if isinstance(who, ConfigRecord):
            if (part := self.kept_part) is not None:
                who[PRIVATE] = str(part)
            evaluates = self._evaluation and self._evaluates(context)
            if self._privacy is None and not evaluates:
                who[UNABLE_TO_EVALUATE] = True
            if _pins_keys(context):
                who[SEALS_ALL] = True
        return reply

    def _evaluates(self, context: Context) -> bool:
        """Whether the handlers define an evaluation."""
        return True

    def _silent(self, context: Context) -> bool:
        """Whether no answer of the app to who it is may leave: it may be of its data."""
        return self._privacy is not None or _pins_keys(context)

    def _aside(self, message: Message, context: Context) -> Message:
        """Answer by the handlers alone, which have the whole model: no array of it leaves."""
        with aside():
            return self._handle(message, context)

    def _handle(self, message: Message, context: Context) -> Message:
        """Answer a message by the handlers."""
        return super().__call__(message, context)


def _transport_of(message: Message) -> Transport | None:
    """Return how a message's arrays travel, None if as they are."""
    return Transport.of(message) if TRANSPORT in config_of(message) else None


def _pins_keys(context: Context) -> bool:
    """Whether a node's config names the only keys that its messages may be sealed for."""
    return bool(context.node_config.get(PINNED_KEYS))


def _is_start(message: Message, asked: Step | None) -> bool:
    """Whether a client of the library is asked for its start; any other client would train."""
    kind = None if asked is None else asked.client
    return kind is not None and issubclass(kind, ProtocolClient) and not message.content.get(ARRAYS)


def _reply(message: Message, asked: Step, result: StepResult) -> Message:
    """Return the reply that carries a step's result."""
    trains = asked.kind == MessageType.TRAIN
    reply = reply_to(message, None, result.num_examples, result.metrics)
    if trains:
        arrays = [*map(encoded, result.arrays)]
        reply.content[ARRAYS] = named(arrays, result.names, message.content.get(ARRAYS, ()))
    return reply


class OtherApp(AnsweringApp):
    """A ClientApp of somebody else; who the client is this one says for it."""

    def __init__(self, app: ClientApp, guards: Guards) -> None:
        super().__init__(guards)
        self._app = app
        self.own_keep = next((m for m in mods_of(app) if isinstance(m, KeepPrivate)), None)

    def _handle(self, message: Message, context: Context) -> Message:
        route = route_of(message)
        asks_who = route == (MessageType.QUERY, DEFAULT)
        if asks_who and (self._silent(context) or not has_handler(self._app, "query.default")):
            who = ConfigRecord({**self._who(context)})
            return Message(RecordDict({CONFIG: who}), reply_to=message)
        if route == (MessageType.EVALUATE, DEFAULT) and not self._evaluates(context):
            raise NoEvaluateError
        if route[1] == DEFAULT and route[0] != MessageType.QUERY:
            reject_other_client(find_step(config_of(message), route[0], self._steps), self._app)
        return self._app(message, context)

    def _evaluates(self, context: Context) -> bool:
        return has_handler(self._app, "evaluate.default", unknown=True)


class NumPyClientApp(AnsweringApp):
    """See `client_app`."""

    def __init__(
        self,
        make_client: Factory,
        train_mods: Sequence[Any],
        evaluate_mods: Sequence[Any],
        secure: bool,
        names: Sequence[str],
        guards: Guards,
    ) -> None:
        super().__init__(guards)
        if guards.part is not None:
            self._keep = KeepPrivate(guards.part, names=names)
        self._make_client = make_client
        self._secure = secure
        self._train_mods = tuple(train_mods)
        self.train()(self._train)
        self.evaluate(mods=list(evaluate_mods))(self._evaluate)
        self.query()(self._query)

    @contextmanager
    def answering_by(self, client: Any) -> Iterator[None]:
        """Have this client, from `made`, answer what this thread asks."""
        token = _MADE.set(client)
        try:
            yield
        finally:
            _MADE.reset(token)

    # Methods and not closures: Ray pickles the app with every message, these by their names.

    def take_step(self, asked: Step, message: Message, context: Context) -> Message:
        """Take a step that works with any app."""
        with self.answering_by(self.made(context)):  # many models, one client: it reads data once
            return super().take_step(asked, message, context)

    def made(self, context: Context) -> Any:
        """Return the client that answers this message."""
        client = _MADE.get()
        if client is not None:
            return client
        return _numpy_client(self._make_client(context), needs_fit=not self._steps)

    def _evaluates(self, context: Context) -> bool:
        return has_evaluation(self.made(context))

    def _train(self, message: Message, context: Context) -> Message:
        return self._by_client(MessageType.TRAIN, message, context)

    def _evaluate(self, message: Message, context: Context) -> Message:
        return self._by_client(MessageType.EVALUATE, message, context)

    def _by_client(self, kind: str, message: Message, context: Context) -> Message:
        """Answer by the client's ``fit`` or ``evaluate``, or by a step that is for such clients."""
        client = self.made(context)
        arrays, config = read_request(message, writable=not isinstance(client, ProtocolClient))
        asked = find_step(config, kind, self._steps)
        if asked is not None and self._dispatches(asked, client):
            return _reply(message, asked, take_by(client, context, asked, arrays, config))
        if kind == MessageType.TRAIN:
            return reply_to(message, *client.fit(arrays, config))
        loss, n, metrics = evaluation_of(client)(arrays, config)
        return reply_to(message, None, n, with_loss(loss, metrics))

    def _dispatches(self, asked: Step, client: Any) -> bool:
        """Whether a step is taken here: a client of the library's protocols takes it in ``fit``."""
        reject_other_client(asked, client)
        own = (asked.protocol, asked.kind, asked.name) in self._steps
        return asked.client is not None and (own or not isinstance(client, ProtocolClient))

    def _query(self, message: Message, context: Context) -> Message:
        silent = self._silent(context)
        who = {**self._who(context)} if silent else _properties(self.made(context), context)
        return Message(RecordDict({CONFIG: ConfigRecord({**who})}), reply_to=message)
