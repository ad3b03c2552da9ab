"""From a ``NumPyClient`` to a Message-API ``ClientApp``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import isnan
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from flwr_perdl._checks import check_flag, check_kind
from flwr_perdl._records import (
    CONFIG,
    PARTITION_ID,
    directed,
    read_request,
    reply_to,
)
from flwr_perdl._threads import one_blas_thread
from flwr_perdl.clients._cohort import cohort_of
from flwr_perdl.clients._secure import in_secure_round, masked
from flwr_perdl.clients.base import identify

Factory = Callable[[Context], NumPyClient]

_NOT_BOTH = "with LocalPrivacy, which adds noise to every single reply"


def client_app(
    factory: Factory,
    *,
    train_mods: Sequence[Any] = (),
    evaluate_mods: Sequence[Any] = (),
    secure: bool = False,
) -> ClientApp:
    """Return the ClientApp whose train and evaluate handlers call a NumPyClient.

    The same client runs in older projects as ``ClientApp(lambda context:
    factory(context).to_client())``.

    Parameters
    ----------
    factory : callable
        ``Context -> NumPyClient``; called for every message. Under Ray the app is pickled with
        every message: close over no data, read it in the factory.
    train_mods, evaluate_mods : sequence of Flower mods
        Mods around training and around evaluation, outermost first. Requests and replies carry one
        ArrayRecord each way, so that Flower's differential-privacy mods compose. A training mod
        with a true ``for_all_messages``, as `LocalPrivacy`, is around evaluation and queries too.
    secure : bool, default False
        Whether to train in secure rounds alone (`PerMA` with ``secure=True``), but for a protocol's
        first round. With False the client takes part in secure rounds and in others.

    Returns
    -------
    ClientApp
        Training replies carry ``"arrays"`` and ``"metrics"``, evaluation replies ``"metrics"``
        with the loss, unless it is NaN, as ``"loss"``. A query is answered with the client's
        properties; the ``partition-id`` of a client that does not say it is its context's.
    """
    for name, given in (
        ("factory", [factory]),
        ("train_mods", train_mods),
        ("evaluate_mods", evaluate_mods),
    ):
        check_kind(name, given, Sequence, "a sequence of functions")
        for function in given:
            if not callable(function):
                raise TypeError(f"{name} must be callable, got {function!r}.")
    app = NumPyClientApp(factory, train_mods, evaluate_mods, check_flag("secure", secure))
    if secure and app.noisy:
        raise ValueError(f"secure must be False {_NOT_BOTH}, got True.")
    return app


class NumPyClientApp(ClientApp):
    """See `client_app`; in process it can also answer for many clients at once."""

    def __init__(
        self,
        factory: Factory,
        train_mods: Sequence[Any],
        evaluate_mods: Sequence[Any],
        secure: bool = False,
    ) -> None:
        super().__init__()
        self._factory = factory
        self._secure = secure
        self._one_by_one = bool(train_mods)

        # Local privacy is a promise about all that leaves a client: one mention is enough.
        everywhere = [mod for mod in train_mods if getattr(mod, "for_all_messages", False)]
        self.noisy = bool(everywhere)
        self.train(mods=list(train_mods))(self._train)
        self.evaluate(mods=[*everywhere, *evaluate_mods])(self._evaluate)
        self.query(mods=everywhere)(self._query)

    # Methods and not closures: Ray pickles the app with every message, these by their names.

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message, also where a mod returned something else than a reply to it."""
        call = super().__call__
        if in_secure_round(message):
            if self.noisy:
                raise ValueError(f"the round must not be a secure one {_NOT_BOTH}.")
            answered = masked(message, context, call)
        else:
            answered = call(message, context)
        reply: Any = directed(answered, message)
        answer: Message = reply
        return answer

    def _train(self, message: Message, context: Context) -> Message:
        arrays, config = read_request(message)
        if self._secure and arrays and not in_secure_round(message):
            raise ValueError(
                "secure=True must be the strategy's option too, got a request to send an update in "
                "the clear."
            )
        updated, num_examples, metrics = self._factory(context).fit(arrays, config)
        return reply_to(message, updated, num_examples, metrics)

    def _evaluate(self, message: Message, context: Context) -> Message:
        arrays, config = read_request(message)
        loss, num_examples, metrics = self._factory(context).evaluate(arrays, config)
        measured = {} if isnan(loss) else {"loss": loss}  # NaN: too few samples to say
        return reply_to(message, None, num_examples, {**measured, **metrics})

    def _query(self, message: Message, context: Context) -> Message:
        properties: dict[str, Any] = dict(self._factory(context).get_properties({}))
        if PARTITION_ID not in properties:
            properties = {**identify(context), **properties}
        return Message(RecordDict({CONFIG: ConfigRecord(properties)}), reply_to=message)

    def lifespan(self) -> Any:
        """Register a lifespan, as `ClientApp.lifespan`; every client then has its own."""
        self._one_by_one = True
        return super().lifespan()

    def train_together(
        self, messages: Sequence[Message], contexts: Sequence[Context]
    ) -> list[Message] | None:
        """Return the replies to training messages that ask the same of several clients.

        Parameters
        ----------
        messages : sequence of Message
            One per client, alike in content.
        contexts : sequence of Context
            The clients' own.

        Returns
        -------
        list of Message or None
            None where the clients have to be called one by one: their type has no ``fit_cohort``,
            or there are mods or a lifespan.
        """
        if self._one_by_one or self._secure or in_secure_round(messages[0]):
            return None
        first = self._factory(contexts[0])
        together = cohort_of(first)
        if together is None:
            self._one_by_one = True
            return None
        arrays, config = read_request(messages[0])
        for array in arrays:
            array.flags.writeable = False
        with one_blas_thread():
            fitted = list(together(self._like(first, contexts[1:]), arrays, config))
        reply = reply_to(messages[0], *fitted[0])
        others = zip(messages[1:], fitted[1:], strict=True)
        return [reply, *(reply_to(message, *one, like=reply) for message, one in others)]

    def _like(self, first: NumPyClient, contexts: Sequence[Context]) -> Iterator[NumPyClient]:
        """Yield ``first`` and the clients of these contexts."""
        yield first
        for client in map(self._factory, contexts):
            if type(client) is not type(first) or "fit" in vars(client):
                raise TypeError("a cohort must be of one type.")
            yield client
