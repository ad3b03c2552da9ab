"""From a ``NumPyClient``, or another ``ClientApp``, to one that every strategy here can ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from flwr.app import ConfigRecord, Context, Error, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp

from flwr_perdl.clients._clusters import CLUSTERED, answer_clustered
from flwr_perdl.clients._handlers import (
    NoEvaluateError,
    evaluation_of,
    evaluation_reply,
    says,
    within,
)
from flwr_perdl.clients.base import Member, identify, private_shelf
from flwr_perdl.clients.diffusion import ONLY_DIFFUSION, DiffusionClient
from flwr_perdl.clients.diffusion_averaging import AVERAGING, answer_averaging
from flwr_perdl.clients.ditto import DITTO, answer_ditto
from flwr_perdl.clients.keep_private import (
    KeepPrivate,
    asked_to_keep,
    check_mods,
    check_patterns,
)
from flwr_perdl.clients.perma import ONLY_DICTIONARY, SENDS
from flwr_perdl.clients.regression import LINEAR, ONLY_LINEAR
from flwr_perdl.core.checks import check_count, check_flag, check_kind
from flwr_perdl.privacy.ledger import Own
from flwr_perdl.privacy.noise import Noise
from flwr_perdl.privacy.secure_client import MIN_CLIENTS, OTHER_MOD, answer_for_sum
from flwr_perdl.protocol.compat import SECAGG, has_handler, is_legacy, like, mods_of
from flwr_perdl.protocol.records import (
    CONFIG,
    DEFAULT,
    NO_EVALUATE,
    PARTITION_ID,
    PINNED_KEYS,
    PRIVATE,
    PROMISE,
    SEALED,
    UNCOUNTED,
    Scalar,
    directed,
    read_request,
    reply_to,
    route_of,
)

#: Makes a client: an object with ``fit`` and ``evaluate``, or what its ``to_client()`` returns.
Factory = Callable[[Context], Any]
#: Answers a message by several calls of an app's handlers.
Parts = Callable[[Message, Context, Callable[[Message, Context], Message]], Message]

#: Marks of requests that only a client of their protocol answers, and what others are told.
_ONLY = {LINEAR: ONLY_LINEAR, SEALED: ONLY_DIFFUSION, SENDS: ONLY_DICTIONARY}

#: The client that answers all parts of one message.
_MADE: ContextVar[Any] = ContextVar("made", default=None)


def client_app(
    make_client: Factory | ClientApp,
    *,
    train_mods: Sequence[Any] = (),
    evaluate_mods: Sequence[Any] = (),
    secure: bool = False,
    min_clients: int = MIN_CLIENTS,
    private: str | Sequence[str] = (),
    privacy: Noise | None = None,
) -> ClientApp:
    """Return the ClientApp whose train and evaluate handlers call a NumPyClient.

    The client may be a NumPyClient, or any other object with ``fit`` and ``evaluate``. With these
    it takes part in `ClusteredFedAvg`, `DiffusionAveraging` and Flower's own strategies. A client
    that answers a protocol's steps by itself is a `Member`.

    Parameters
    ----------
    make_client : callable or ClientApp
        ``Context -> client``; called for every message. A ``client_fn`` that returns
        ``client.to_client()`` may stay as it is. Under Ray the app is pickled with every message:
        close over no data, read it in ``make_client``. A ClientApp with handlers of its own
        (``@app.train()``, ``@app.evaluate()``) may stand in its place: its evaluation replies need
        the metric ``"loss"`` or ``"eval_loss"`` for `ClusteredFedAvg`.
    train_mods, evaluate_mods : sequence of Flower mods
        Mods around training and around evaluation, outermost first. Requests and replies carry one
        ArrayRecord each way, so that Flower's differential-privacy mods compose; of
        `ClusteredFedAvg`'s requests they see one model at a time.
    secure : bool, default False
        Whether to train in secure rounds alone (`PerMA` with ``secure=True``, `SecureMean`), but
        for a `Member`'s reply to a request without arrays, as PerMA's first. With False the client
        takes part in secure rounds and in others.
    min_clients : int, default 3
        The fewest clients in a secure round that the client takes part in, at least 2. It counts
        different public keys: in a round with fewer it sends no update, and it does not help to
        unmask a sum over fewer.
    private : str or sequence of str, default ()
        Names of arrays that never leave the client, or patterns of them: `keep_private`, with
        ``train_mods`` inside, which see the shared arrays alone, and around all other mods. Where
        the strategy's initial arrays have no names, they are "0", "1", ….
    privacy : Noise, optional
        The client answers only requests whose promise is at least as strong, with sums to which
        noise is added, and only for as many rounds as the promise is for: with ``state-dir`` in the
        node config over all runs, else within one run of Flower. Its ``basis`` and ``clip`` do
        not count. By default it believes every request's promise.

    Returns
    -------
    ClientApp
        Training replies carry ``"arrays"`` and ``"metrics"``, evaluation replies ``"metrics"``
        with the loss, unless it is NaN, as ``"loss"``. A query is answered with the client's
        properties; the ``partition-id`` of a client that does not say it is its context's.

    Raises
    ------
    TypeError
        If an argument is of another kind.
    ValueError
        If ``min_clients`` is below 2, or an option comes with a ClientApp, which has its own
        (``min_clients`` and ``private`` with one of `client_app` only); if `keep_private` is among
        the mods, and not the first of a ClientApp's.

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
    check_count("min_clients", min_clients, 2)
    names = check_patterns("private", private)
    check_kind("privacy", privacy, (Noise, type(None)), "a Noise or None")
    if isinstance(make_client, ClientApp):
        ours = isinstance(make_client, AnsweringApp)
        own = min_clients != MIN_CLIENTS or names or privacy is not None
        if train_mods or evaluate_mods or secure or (ours and own):
            raise ValueError(
                "train_mods, evaluate_mods and secure must be left out with a ClientApp, which has "
                "its own mods, and min_clients, private and privacy with one of client_app, got "
                "some of them."
            )
        if is_legacy(make_client):
            raise TypeError(
                "make_client must be the client_fn itself where a ClientApp was made from one, got "
                "ClientApp(client_fn)."
            )
        check_mods("mods of the ClientApp", mods_of(make_client)[0 if names else 1 :])
        return make_client if ours else OtherApp(make_client, min_clients, names, privacy)
    if not callable(make_client):
        raise TypeError(
            f"make_client must be a function that makes a client from Flower's Context, got "
            f"{make_client!r}."
        )
    for name, mods in (("train_mods", train_mods), ("evaluate_mods", evaluate_mods)):
        check_mods(name, mods)
    return NumPyClientApp(
        make_client, train_mods, evaluate_mods, secure, min_clients, names, privacy
    )


def _numpy_client(client: Any) -> Any:
    """Return the client that ``make_client`` made, or of which it made ``to_client()``."""
    made = getattr(client, "numpy_client", client)
    if isinstance(made, type) or not callable(getattr(made, "fit", None)):
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
    """A ClientApp that takes part in secure and in clustered rounds, by its own handlers."""

    #: The `keep_private` that the app has of its own.
    own_keep: KeepPrivate | None = None
    #: Mods around training, which see what is shared.
    _train_mods: Sequence[Any] = ()

    def __init__(self, min_clients: int, private: tuple[str, ...], privacy: Noise | None) -> None:
        super().__init__()
        self._privacy = privacy
        self._min_clients = min_clients
        self._keep = KeepPrivate(private) if private else None

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message, also where a mod returned something else than a reply to it."""
        kind, action = route_of(message)
        try:
            if action != DEFAULT:  # nothing here knows what an app's own actions send
                if self._privacy or self._keep or context.node_config.get(PINNED_KEYS):
                    raise ValueError(
                        f"the message's type must be {kind} alone for a client with privacy, "
                        f"private or pinned keys, got the action {action!r}."
                    )
                answered = self._handle(message, context)
            else:
                # Flower's mods, too, see no training in "train.default".
                message = like(message, message.content, kind)
                answered = self._guarded(kind, message, context)
        except NoEvaluateError as error:  # the server is to tell it from a failure
            answered = Message(Error(NO_EVALUATE, str(error)), reply_to=message)
        except KeyError as error:
            if error.args == (SECAGG,) and SECAGG not in message.content:
                raise ValueError(OTHER_MOD) from error
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
        call = self._answer
        if kind == MessageType.TRAIN and says(message, AVERAGING):
            parts = partial(answer_averaging, keep=self._keep or self.own_keep)
            call = partial(self._answer_in_parts, parts)
        elif context.node_config.get(PINNED_KEYS):
            # Besides, a DiffusionClient answers: with sealed messages alone.
            if kind == MessageType.EVALUATE or not says(message, SEALED):
                raise ValueError(
                    "neighbour-keys in the node config must be left out for such a request: a node "
                    f"that pins keys sends sealed messages alone, got one to {kind}."
                )
        elif says(message, CLUSTERED):
            call = partial(self._answer_in_parts, answer_clustered)
        elif says(message, DITTO):
            call = partial(self._answer_in_parts, answer_ditto)
        if kind == MessageType.TRAIN and (
            self._privacy or SECAGG in message.content or says(message, PROMISE)
        ):
            return answer_for_sum(message, context, call, self._min_clients, self._own(context))
        return call(message, context)

    def _own(self, context: Context) -> Own | None:
        """Return what the client insists on, and where it counts what it spends."""
        if self._privacy is None:
            return None
        shelf = private_shelf(context, "noise")
        return Own(self._privacy, *((None, "") if shelf is None else shelf[:2]))

    def _who(self, context: Context) -> dict[str, Scalar]:
        """Return who the client is, and whether it counts what it spends over all runs."""
        own = self._own(context)
        uncounted = {} if own is None or own.folder is not None else {UNCOUNTED: True}
        return {**identify(context), **uncounted}

    def _answer(self, message: Message, context: Context) -> Message:
        """Answer a message by the handlers, with the client's private arrays in it."""
        keep = self._keep or (None if self.own_keep else asked_to_keep(message))
        kind = route_of(message)[0]
        mods = self._train_mods if kind == MessageType.TRAIN else ()
        if keep is None:
            reply = within(mods, self._handle)(message, context)
        else:
            reply = keep(message, context, self._handle, mods)
        keep = keep or self.own_keep
        if kind == MessageType.QUERY and keep is not None and not reply.has_error():
            who = reply.content.get(CONFIG)
            if isinstance(who, ConfigRecord):
                who[PRIVATE] = ", ".join(map(repr, keep.patterns))
        return reply

    def _handle(self, message: Message, context: Context) -> Message:
        """Answer a message by the handlers."""
        return super().__call__(message, context)

    def _answer_in_parts(self, answer: Parts, message: Message, context: Context) -> Message:
        """Answer a message that takes several calls of the handlers."""
        return answer(message, context, self._answer)


class OtherApp(AnsweringApp):
    """A ClientApp of somebody else; who the client is this one says for it."""

    def __init__(
        self,
        app: ClientApp,
        min_clients: int,
        private: tuple[str, ...],
        privacy: Noise | None,
    ) -> None:
        super().__init__(min_clients, private, privacy)
        self._app = app
        self.own_keep = next((m for m in mods_of(app) if isinstance(m, KeepPrivate)), None)

    def _handle(self, message: Message, context: Context) -> Message:
        route = route_of(message)
        asks_who = route == (MessageType.QUERY, DEFAULT)
        if asks_who and (self._privacy or not has_handler(self._app, "query.default")):
            who = ConfigRecord({**self._who(context)})
            return Message(RecordDict({CONFIG: who}), reply_to=message)
        measures = route == (MessageType.EVALUATE, DEFAULT)
        if measures and not has_handler(self._app, "evaluate.default", unknown=True):
            raise NoEvaluateError
        _check_answerable(message)
        return self._app(message, context)


def _check_answerable(message: Message) -> None:
    """Raise a ValueError if a request is for clients that are made for its protocol."""
    for key, why in _ONLY.items():
        if says(message, key):
            raise ValueError(f"the client must be another one: {why}.")


class NumPyClientApp(AnsweringApp):
    """See `client_app`."""

    def __init__(
        self,
        make_client: Factory,
        train_mods: Sequence[Any],
        evaluate_mods: Sequence[Any],
        secure: bool,
        min_clients: int,
        private: tuple[str, ...],
        privacy: Noise | None,
    ) -> None:
        super().__init__(min_clients, private, privacy)
        if private:
            self._keep = KeepPrivate(private, by_position=True)
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

    def _answer_in_parts(self, answer: Parts, message: Message, context: Context) -> Message:
        with self.answering_by(self.made(context)):  # many models, one client: it reads data once
            return super()._answer_in_parts(answer, message, context)

    def made(self, context: Context) -> Any:
        """Return the client that answers this message."""
        client = _MADE.get()
        return _numpy_client(self._make_client(context)) if client is None else client

    def _train(self, message: Message, context: Context) -> Message:
        arrays, config = read_request(message)
        client = self.made(context)
        first = isinstance(client, Member) and not arrays  # any other client would train
        if self._secure and not first and SECAGG not in message.content:
            raise ValueError(
                "secure=True must be the strategy's option too, got a request to send an update in "
                "the clear."
            )
        if not isinstance(client, DiffusionClient if says(message, SEALED) else Member):
            _check_answerable(message)
        return reply_to(message, *client.fit(arrays, config))

    def _evaluate(self, message: Message, context: Context) -> Message:
        arrays, config = read_request(message)
        evaluate = evaluation_of(self.made(context))
        return evaluation_reply(message, *evaluate(arrays, config))

    def _query(self, message: Message, context: Context) -> Message:
        if self._privacy is None:
            properties = _properties(self.made(context), context)
        else:  # what a client says of itself may be of its data
            properties = self._who(context)
        return Message(RecordDict({CONFIG: ConfigRecord(properties)}), reply_to=message)
