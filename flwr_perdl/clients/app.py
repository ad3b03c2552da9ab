"""From a ``NumPyClient``, or any ``ClientApp``, to one that works with every strategy here."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from math import nan
from typing import Any, NamedTuple

from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MessageType,
    RecordDict,
)
from flwr.clientapp import ClientApp

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
from flwr_perdl.core.checks import check_count, check_flag, check_kind, check_list
from flwr_perdl.parts.private import KeepPrivate, Patterns, aside, asked_to_keep, check_mods
from flwr_perdl.privacy.ledger import Own
from flwr_perdl.privacy.noise import Noise
from flwr_perdl.protocol.client_state import UNSENT, PrivateState, identify, private_store
from flwr_perdl.protocol.compat import (
    FITINS,
    SECAGG,
    has_handler,
    is_legacy,
    lifespan_of,
    like,
    mods_of,
    new_record,
)
from flwr_perdl.protocol.local import (
    CODED,
    Call,
    Local,
    NoEvaluateError,
    StepResult,
    encoded,
    evaluation_of,
    has_evaluation,
    hide_numbers,
    hiding,
    state_apart,
    within,
)
from flwr_perdl.protocol.part import OWN_RANK, PARTS, Part, classes_in, parts_of
from flwr_perdl.protocol.records import (
    APART,
    ARRAYS,
    CONFIG,
    DEFAULT,
    KEEPS_PRIVATE,
    LEFT_OUT,
    MIN_CLIENTS,
    OTHER_MOD,
    PARTITION_ID,
    PINNED_KEYS,
    PROMISE,
    ROUND,
    RUN,
    SEALED,
    SEALS_ALL,
    SILENT,
    TRANSPORT,
    UNABLE_TO_EVALUATE,
    UNCOUNTED,
    Scalar,
    arrays_of,
    config_of,
    directed,
    named,
    read_request,
    reply_to,
    route_of,
    with_loss,
)

#: Makes a client: an object with ``fit`` and ``evaluate``, or what its ``to_client()`` returns.
Factory = Callable[[Context], Any]


class Guards(NamedTuple):
    """What a client insists on, whatever its app is, and its own protocols: see `client_app`."""

    min_clients: int = MIN_CLIENTS
    part: Patterns | None = None
    privacy: Noise | None = None
    steps: Mapping[tuple[str, str, str], Step] = {}
    evaluate: bool = True
    parts: Mapping[str, type[Part]] = {}


def client_app(
    make_client: Factory | ClientApp,
    *,
    train_mods: Sequence[Any] = (),
    secure: bool = False,
    min_clients: int = MIN_CLIENTS,
    private: str | Sequence[str] = (),
    share: str | Sequence[str] = (),
    names: Sequence[str] = (),
    evaluate: bool = True,
    privacy: Noise | None = None,
    protocols: Sequence[Any] = (),
    parts: Sequence[Any] = (),
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
    train_mods : sequence of Flower mods
        Mods around training, outermost first. Requests and replies carry one ArrayRecord each, so
        Flower's differential-privacy mods work; of `ClusteredFedAvg`'s requests they see one model
        at a time.
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
        With ``private`` or ``share``: the names of all arrays, in the order in which the app takes
        them, so that no server can call a private array by another's name. Of a NumPyClient they
        are by default "0", "1", …, with a ``state-dir`` those of the client's first run; a
        ClientApp is by default trusted to take arrays by their names.
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
    parts : sequence of modules or classes, default ()
        Your own parts of strategies: modules with subclasses of `Part`, or these classes.

    Returns
    -------
    ClientApp
        Training replies have ``"arrays"`` and ``"metrics"``, evaluation replies ``"metrics"`` with
        the loss as ``"loss"``, unless it is NaN; metrics that are texts are in a ConfigRecord
        ``"texts"``. A query returns the client's properties, with the context's ``partition-id`` if
        the client does not say its own.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If ``min_clients`` is below 2; if an option comes with a ClientApp, which has its own
        (``min_clients`` and ``private`` only with one of `client_app`); if ``names`` come without
        ``private`` or ``share``, or one twice; if `keep_private` is among the mods, and not the
        first of a ClientApp's; if one of ``protocols`` has no steps.

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
    part = Patterns.of("private", private, share)
    check_kind("privacy", privacy, (Noise, type(None)), "a Noise or None")
    steps, names = steps_of(protocols), [*check_list("names", names)]
    if names and part is None:
        raise ValueError(f"names must come with private or share, got {names} alone.")
    known = classes_in(parts) if check_list("parts", parts) else {}
    guards = Guards(min_clients, part, privacy, steps, evaluate, known)
    if isinstance(make_client, ClientApp):
        ours = isinstance(make_client, AnsweringApp)
        if train_mods or secure or (ours and guards != Guards()):
            raise ValueError(
                "train_mods and secure must be left out with a ClientApp, which has its own mods, "
                "and min_clients, private, evaluate, privacy, protocols and parts with one of "
                "client_app, got some of them."
            )
        if is_legacy(make_client):
            raise TypeError(
                "make_client must be the client_fn itself where a ClientApp was made from one, got "
                "ClientApp(client_fn)."
            )
        own_mods = mods_of(make_client)
        keeps = part is None and isinstance(next(iter(own_mods), None), KeepPrivate)
        check_mods("mods of the ClientApp", own_mods[keeps:])
        return make_client if ours else OtherApp(make_client, guards, names or None)
    if not callable(make_client):
        raise TypeError(
            f"make_client must be a function that makes a client from Flower's Context, got "
            f"{make_client!r}."
        )
    check_mods("train_mods", train_mods)
    return NumPyClientApp(make_client, train_mods, secure, names, guards)


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

    def __init__(self, guards: Guards, names: Sequence[str] | None = None) -> None:
        super().__init__()
        self._min_clients, part, self._privacy, self._steps, self._evaluation, self._parts = guards
        self._keep = None if part is None else KeepPrivate(part, names=names)

    @property
    def kept_part(self) -> Patterns | None:
        """Which arrays stay at the client whatever a server asks."""
        keep = self._keep or self.own_keep
        return None if keep is None else keep.part

    @abstractmethod
    def handlers(self, context: Context, client: Any = None) -> Handlers:
        """Return what answers one message, by this client if there is one."""

    def __call__(self, message: Message, context: Context, client: Any = None) -> Message:
        """Answer a message, also where a mod returned something else than a reply to it."""
        kind, action = route_of(message)
        config = config_of(message)
        apart = nullcontext() if APART not in config else state_apart(context, config)
        try:
            if action != DEFAULT:  # nothing here knows what an app's own actions send
                if self._privacy or self._keep or not self._evaluation or _pins_keys(context):
                    raise ValueError(
                        f"the message's type must be {kind} alone for a client with privacy, "
                        f"private, evaluate=False or pinned keys, got the action {action!r}."
                    )
                answered = self.act(message, context)
            else:
                # Flower's mods, too, see no training in "train.default".
                if message.metadata.message_type != kind:
                    message = like(message, message.content, kind)
                with apart, lifespan_of(self, context):
                    answered = self._guarded(kind, message, context, client)
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

    def _guarded(self, kind: str, message: Message, context: Context, client: Any) -> Message:
        """Answer a message with what may leave the client; no key of a query's config counts."""
        handlers, config = self.handlers(context, client), config_of(message)
        if kind == MessageType.QUERY:
            with hide_numbers() if _pins_keys(context) else nullcontext():
                return self._tell(handlers, message, context)
        if kind == MessageType.EVALUATE and (self._privacy or not self._evaluation):
            raise NoEvaluateError
        asked = find_step(config, kind, self._steps)
        seals = asked is not None and asked.seals and config.get(SEALED)
        if _pins_keys(context) and (kind == MessageType.EVALUATE or not seals):
            raise ValueError(
                "neighbor-keys in the node config must be left out for such a request: a node "
                f"that pins keys sends only sealed messages, got one to {kind}."
            )
        parts = self._parts_for(config)
        call: Call
        if asked is not None and asked.client is None:
            call = partial(self.take_step, asked, handlers, parts=parts)
        else:
            inner = handlers if asked is None else partial(_take_by, asked, handlers)
            call = self._around(inner, self._outer_keep(config))
        if asked is not None and asked.whole:
            if not self._evaluation:
                raise NoEvaluateError
            if self.kept_part is not None or LEFT_OUT in config:
                KeepPrivate.refuse_untrained(context, str(config.get(RUN, "")))
        if asked is not None and (asked.whole or seals):
            call = hiding(call)
        trains, secure = kind == MessageType.TRAIN, SECAGG in message.content
        summed = self._privacy or secure or PROMISE in config
        if parts:
            if summed or self._secure or (asked is not None and asked.client is not None):
                raise ValueError(
                    "transport, compression and parts must be left out where clients require "
                    "secure sums or privacy, or send no model, got a request with them."
                )
            message = _received(message, parts)
        if trains and config.get(SILENT):
            from flwr_perdl.privacy.noised_client import answer_silently  # few clients load it

            return answer_silently(message, context, call)
        if self._secure and trains and not secure and not _is_start(message, asked):
            raise ValueError(
                "secure=True must be the strategy's option too, got a request to send an update in "
                "the clear."
            )
        if trains and summed:
            from flwr_perdl.privacy.secure_client import answer_for_sum

            return answer_for_sum(message, context, call, self._min_clients, self._own(context))
        begun = dict(arrays_of(message)) if parts else {}
        reply = call(message, context)
        if parts and asked is None and trains and not reply.has_error():
            _send(parts, reply, begun, message, context)
        return reply

    def _parts_for(self, config: Mapping[str, Any]) -> list[Part]:
        """Return what changes a request's arrays, and those of its reply, in turn."""
        found = parts_of(config, self._parts) if PARTS in config else []
        if TRANSPORT in config:
            from flwr_perdl.parts.transport import Transport  # few clients load it

            found.append(Transport.of(config))
        return found

    def take_step(
        self,
        asked: Step,
        handlers: Handlers,
        message: Message,
        context: Context,
        parts: Sequence[Part] = (),
    ) -> Message:
        """Take a step that works with any app; ``parts`` change what it sends."""
        arrays, config = read_request(message, writable=False)
        record = arrays_of(message)
        request = read_step(config, arrays, record, [*record.values()])
        store = private_store(context, asked.protocol)
        keep = self._outer_keep(config)
        call = _aside(handlers) if asked.whole else self._around(handlers, keep)
        keeps = keep or self.own_keep
        local = Local(context, request, store, message=message, call=call, keeps=keeps)
        result = take(asked, local, request)
        reply = _reply(message, asked, result)
        if parts and asked.kind == MessageType.TRAIN:
            names = arrays_of(reply)
            begun = dict(zip(names, result.start, strict=True)) if result.start else record
            _send(parts, reply, begun, message, context)
        return reply

    def _own(self, context: Context) -> Own | None:
        """Return what the client insists on, and where it counts what it spends."""
        if self._privacy is None:
            return None
        store = private_store(context, "noise")
        return Own(self._privacy, *((None, "") if store is None else store[:2]))

    def _outer_keep(self, config: Mapping[str, Any]) -> KeepPrivate | None:
        """Return what keeps private arrays around the handlers; None where their own app does."""
        if self._keep or self.own_keep or LEFT_OUT not in config:
            return self._keep
        return asked_to_keep(config)

    def _around(self, call: Call, keep: KeepPrivate | None) -> Call:
        """Return what answers parts of a message, with the client's private arrays in them."""
        if not self._evaluation:
            call = _without_evaluation(call)
        if keep is not None:
            return partial(keep, call_next=call, inside=self._train_mods)
        in_training = within(self._train_mods, call)

        def answer(part: Message, context: Context) -> Message:
            trains = route_of(part)[0] == MessageType.TRAIN
            return (in_training if trains else call)(part, context)

        return answer if self._train_mods else call

    def _tell(self, handlers: Handlers, message: Message, context: Context) -> Message:
        """Answer who the client is."""
        if self.silent(context):
            said = RecordDict({CONFIG: ConfigRecord({**self.who(context)})})
            reply = Message(said, reply_to=message)
        else:
            reply = self._around(handlers, self._keep)(message, context)
        if isinstance(who := reply.content.get(CONFIG), ConfigRecord):
            if (part := self.kept_part) is not None:
                who[KEEPS_PRIVATE] = str(part)
            if self._privacy is None and not (self._evaluation and handlers.evaluates):
                who[UNABLE_TO_EVALUATE] = True
            if _pins_keys(context):
                who[SEALS_ALL] = True
        return reply

    def silent(self, context: Context) -> bool:
        """Whether no answer of the app to who it is may leave: it may be of its data."""
        return self._privacy is not None or _pins_keys(context)

    def who(self, context: Context) -> dict[str, Scalar]:
        """Return who the client is, and whether it counts what it spends over all runs."""
        own = self._own(context)
        uncounted = {} if own is None or own.folder is not None else {UNCOUNTED: True}
        return {**identify(context), **uncounted}

    def act(self, message: Message, context: Context) -> Message:
        """Answer a message to an action of the app's own."""
        return super().__call__(message, context)


def _received(message: Message, parts: Sequence[Part]) -> Message:
    """Return a request with its arrays as the step sees them."""
    arrays = dict(arrays_of(message))
    for part in reversed(parts):
        arrays = part.receive(arrays)
    return like(message, RecordDict({**message.content, ARRAYS: new_record(ArrayRecord, arrays)}))


def _send(
    parts: Sequence[Part],
    reply: Message,
    begun: Mapping[str, Array],
    message: Message,
    context: Context,
) -> None:
    """Replace the arrays of a reply by what its parts send, and save what these keep."""
    config, arrays = config_of(message), dict(arrays_of(reply))
    round_, run = check_count(ROUND, config.get(ROUND)), str(config.get(RUN, context.run_id))
    state = PrivateState(context, run + UNSENT, private_store(context, "parts"))
    before = state.before(round_) or {}
    after: dict[str, Any] = {}
    for part in parts:
        start = f"{part.name}/"
        own = {n.removeprefix(start): one for n, one in before.items() if n.startswith(start)}
        every = part.rank != OWN_RANK  # a user's part is not asked about integers and bytes
        seen = {n: one for n, one in arrays.items() if every or one.dtype.startswith("float")}
        sent = part.send(seen, begun, own)
        left = {n: one for n, one in arrays.items() if n in sent or n not in seen}
        arrays = left | sent
        after |= {start + name: one for name, one in own.items()}
    if after:
        state.save(round_, after)
    reply.content[ARRAYS] = new_record(ArrayRecord, arrays)


def _pins_keys(context: Context) -> bool:
    """Whether a node's config names the only keys that its messages may be sealed for."""
    return bool(context.node_config.get(PINNED_KEYS))


def _is_start(message: Message, asked: Step | None) -> bool:
    """Whether a client of the library is asked for its start; any other client would train."""
    starts = asked is not None and getattr(asked.client, "starts_open", False)
    return starts and not message.content.get(ARRAYS)


def _reply(message: Message, asked: Step, result: StepResult) -> Message:
    """Return the reply that carries a step's result."""
    trains = asked.kind == MessageType.TRAIN
    metrics = dict(result.metrics)
    if not trains:
        metrics = with_loss(float(metrics.pop("loss", nan)), metrics)
    reply = reply_to(message, None, result.num_examples, metrics)
    if trains:
        arrays = [*map(encoded, result.arrays)]
        reply.content[ARRAYS] = named(arrays, result.names, message.content.get(ARRAYS, ()))
    return reply


def _without_evaluation(call: Call) -> Call:
    """Return what answers all but evaluations."""

    def answer(message: Message, context: Context) -> Message:
        if route_of(message)[0] == MessageType.EVALUATE:
            raise NoEvaluateError
        return call(message, context)

    return answer


def _aside(call: Call) -> Call:
    """Return what answers by the handlers alone, with the whole model: no array of it leaves."""

    def answer(message: Message, context: Context) -> Message:
        with aside():
            return call(message, context)

    return answer


def _take_by(asked: Step, handlers: Handlers, message: Message, context: Context) -> Message:
    """Take a step that is for clients of a class."""
    client = handlers.client
    reject_other_client(asked, client)
    if isinstance(client, ProtocolClient) and client.answers_itself:
        return handlers(message, context)
    arrays, config = read_request(message, writable=not isinstance(client, ProtocolClient))
    return _reply(message, asked, take_by(client, context, asked, arrays, config))


class OtherApp(AnsweringApp):
    """A ClientApp of somebody else; who the client is this one says for it."""

    def __init__(self, app: ClientApp, guards: Guards, names: Sequence[str] | None = None) -> None:
        super().__init__(guards, names)
        self.app = app
        self.own_keep = next((m for m in mods_of(app) if isinstance(m, KeepPrivate)), None)

    def handlers(self, context: Context, client: Any = None) -> Handlers:
        """Return what answers a message."""
        return _AppsHandlers(self.app)

    def silent(self, context: Context) -> bool:
        """Whether no answer of the app to who it is may leave, or there is none."""
        return super().silent(context) or not has_handler(self.app, "query.default")

    def act(self, message: Message, context: Context) -> Message:
        """Answer a message to an action of the app's own."""
        return self.app(message, context)


class _AppsHandlers:
    """A ClientApp's own handlers."""

    client = None

    def __init__(self, app: ClientApp) -> None:
        self._app = app

    @property
    def evaluates(self) -> bool:
        return has_handler(self._app, "evaluate.default", unknown=True)

    def __call__(self, message: Message, context: Context) -> Message:
        kind = route_of(message)[0]
        if kind == MessageType.EVALUATE and not self.evaluates:
            raise NoEvaluateError
        reply: Message = self._app(message, context)
        check_kind(f"the reply to {kind}", reply, Message, "a Message")
        return reply


class NumPyClientApp(AnsweringApp):
    """See `client_app`."""

    def __init__(
        self,
        make_client: Factory,
        train_mods: Sequence[Any],
        secure: bool,
        names: Sequence[str],
        guards: Guards,
    ) -> None:
        super().__init__(guards, names)
        self._make_client = make_client
        self._secure = secure
        self._train_mods = tuple(train_mods)

    def made(self, context: Context) -> Any:
        """Return a node's client."""
        return _numpy_client(self._make_client(context), needs_fit=not self._steps)

    def handlers(self, context: Context, client: Any = None) -> Handlers:
        """Return what answers a message."""
        return _ClientsMethods(self, context, client)


class _ClientsMethods:
    """A client's ``fit`` and ``evaluate``; for a message it is made, and reads its data, once."""

    def __init__(self, outer: NumPyClientApp, context: Context, client: Any) -> None:
        self._outer, self._context, self._given = outer, context, client

    @cached_property
    def client(self) -> Any:
        return self._outer.made(self._context) if self._given is None else self._given

    @property
    def evaluates(self) -> bool:
        return has_evaluation(self.client)

    def __call__(self, message: Message, context: Context) -> Message:
        kind = route_of(message)[0]
        if kind == MessageType.QUERY:
            who = ConfigRecord(_properties(self.client, context))
            return Message(RecordDict({CONFIG: who}), reply_to=message)
        client = self.client
        arrays, config = read_request(message, writable=not isinstance(client, ProtocolClient))
        if kind == MessageType.TRAIN:
            return reply_to(message, *client.fit(arrays, config))
        loss, n, metrics = evaluation_of(client)(arrays, config)
        return reply_to(message, None, n, with_loss(loss, {**metrics, "loss": loss}))


#: What answers one message, and the messages that a step makes of it.
Handlers = _AppsHandlers | _ClientsMethods
