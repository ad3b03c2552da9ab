"""Keep a part of any model at its client: a Flower mod around any ClientApp.

The arrays whose names match are the client's own. Before the app sees a request, the client's
values are put in place of the server's; before a reply leaves, the server's in place of the
client's. So the server's side needs no change: all replies have all names, as FedAdam, mods that
clip and PyTorch's ``load_state_dict`` want it. Only `PersonalizedFedAvg` knows of the private part,
and asks the mod to leave it out of the messages.

What leaves the client: the other arrays after training, and what else the app replies. What they
say of the samples, and of the private arrays that they were trained with, is not hidden. The names
of arrays are the server's: an app that takes its arrays by position, as a NumPyClient does, trusts
the first request of a run with which array has which name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from glob import escape
from math import prod
from typing import Any, NamedTuple, TypeVar

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

from flwr_perdl.clients._handlers import says, sendable
from flwr_perdl.clients.base import PrivateArrays, PrivateState, private_shelf
from flwr_perdl.core.checks import check_count, check_list
from flwr_perdl.core.models import check_trained, fixed_entries
from flwr_perdl.protocol.records import (
    ANEW,
    CONFIG,
    METRICS,
    ROUND,
    RUN,
    decode,
    encode,
    named,
    route_of,
)

#: Keys of a request's config: the names, as JSON, that the server leaves out of its requests to a
#: client that has them, and wants left out of replies; whether to train in two steps, as FedRep.
LEFT_OUT = "perdl.left-out"
ALTERNATE = "perdl.alternate"
#: What the app reads in such a step: the names of the arrays to train, as JSON.
TRAIN_NAMES = "train-names"
#: The metric of a reply that leaves arrays out: how many numbers stay at the client.
KEPT = "kept-private"

#: What the state is of, and its entries: the names of all arrays, and the private ones.
_ALGORITHM, _NAMES, _ARRAY = "keep-private", "names", "array/"

Call = Callable[[Message, Context], Message]
Kind = TypeVar("Kind", ArrayRecord, ConfigRecord)


def keep_private(*patterns: str) -> KeepPrivate:
    """Return a Flower mod that keeps the arrays with these names at the client.

    ``ClientApp(mods=[keep_private("head.*")])`` personalizes an app of the Message API without a
    further change, with Flower's own strategies as with `PersonalizedFedAvg`. For NumPyClients:
    ``client_app(make_client, private=["head.*"])``.

    Parameters
    ----------
    *patterns : str
        Names of arrays, or patterns of them as in ``fnmatch``: ``"fc3.*"``. Arrays without names
        are called "0", "1", ….

    Returns
    -------
    callable
        The mod, for ``ClientApp(mods=[...])``: the first of them, so that the others see the
        client's model as it is. `client_app` rejects it at another place.

    Raises
    ------
    ValueError
        If there are no patterns, or one is no text. When a message comes, and then as the error of
        the reply, with the stored arrays as they were: if a pattern matches no array, or the
        patterns match all of them; if names or shapes are not those of the run's messages before;
        if there is no ``"server-round"`` in the config; if the app does not return the arrays that
        it received, or returns private ones that are not finite.

    Notes
    -----
    A client begins with the server's values. Then its own are kept in ``context.state``; with
    ``state-dir`` in the node config also on disk, encrypted on request, and survive a restart
    (`PrivateState`). They are saved only after a training reply that is no error, and a round that
    is asked for again begins from the state before it. Evaluations use them. Flower's strategies do
    not tell one run from another: all that a Flower run starts go on with the same arrays.

    Arrays that a reply to an evaluation or a query carries are rejected.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
    >>> from flwr.clientapp import ClientApp
    >>> from flwr.serverapp.strategy import FedAvg
    >>> from flwr_perdl.clients import keep_private
    >>> from flwr_perdl.simulations import InProcessGrid
    >>> app = ClientApp(mods=[keep_private("head")])
    >>> @app.train()
    ... def train(message, context):
    ...     model = message.content["arrays"].to_numpy_ndarrays(keep_input=True)
    ...     own = {name: Array(array + 1) for name, array in zip(("body", "head"), model)}
    ...     numbers = MetricRecord({"num-examples": 1})
    ...     content = RecordDict({"arrays": ArrayRecord(own), "metrics": numbers})
    ...     return Message(content, reply_to=message)
    >>> start = ArrayRecord({"body": Array(np.zeros(1)), "head": Array(np.zeros(1))})
    >>> grid = InProcessGrid(app, 2)
    >>> result = FedAvg(fraction_evaluate=0.0).start(grid, start, num_rounds=3)
    >>> result.arrays.to_numpy_ndarrays()
    [array([3.]), array([0.])]
    """
    if not patterns:
        raise ValueError("patterns must name at least one array, got none.")
    return KeepPrivate(check_patterns("patterns", patterns))


def asked_to_keep(message: Message) -> KeepPrivate | None:
    """Return what keeps the arrays that a server leaves out, where the client names none itself."""
    if not says(message, LEFT_OUT):
        return None
    left_out = json.loads(str(message.content[CONFIG][LEFT_OUT]))
    return KeepPrivate(tuple(map(escape, left_out))) if left_out else None


def check_patterns(name: str, patterns: Any) -> tuple[str, ...]:
    """Return patterns of arrays' names, or say which is none."""
    for pattern in check_list(name, patterns):
        if not isinstance(pattern, str) or not pattern:
            raise ValueError(f"{name} must be names of arrays, or patterns, got {pattern!r}.")
    return tuple(patterns)


def matched(name: str, patterns: Sequence[str], names: Collection[str]) -> list[str]:
    """Return which of these names match; each pattern must match one, and not all may match."""
    for pattern in patterns:
        if not any(fnmatchcase(one, pattern) for one in names):
            raise ValueError(
                f"{name} must match arrays, got {pattern!r} with arrays called {_list(names)}."
            )
    found = [one for one in names if any(fnmatchcase(one, each) for each in patterns)]
    if len(found) == len(names):
        raise ValueError(f"{name} must leave an array to share, got {_list(patterns)}: all match.")
    return found


class _Part(NamedTuple):
    """What one message is about."""

    #: The arrays as the server sent them.
    given: ArrayRecord
    #: The names of all arrays, in the app's order; of the private ones; of those left out.
    names: list[str]
    private: list[str]
    left_out: list[str]


class KeepPrivate:
    """See `keep_private`."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self.patterns = patterns

    def __call__(self, message: Message, context: Context, call_next: Call) -> Message:
        """Answer a message by the app, with the client's own arrays in it."""
        kind = route_of(message)[0]
        if kind == MessageType.QUERY:
            return _without_arrays(call_next(message, context))
        record, given = _only_arrays(message.content, "a request")
        configs = _of_kind(message.content, ConfigRecord).values()
        config = next((one for one in configs if ROUND in one), ConfigRecord())
        round_ = check_count(ROUND, config.get(ROUND))
        run = str(config.get(RUN, context.run_id))
        state = PrivateState(context, run, private_shelf(context, _ALGORITHM))
        kept = state.before(round_) if kind == MessageType.TRAIN else state.after(round_)
        part = self._part(given, kept, json.loads(str(config.pop(LEFT_OUT, "[]"))))
        alternate = bool(config.pop(ALTERNATE, False))

        def ask(model: Mapping[str, Array], trained: Sequence[str] = ()) -> Message:
            message.content[record] = _record(model)
            if trained:
                config[TRAIN_NAMES] = json.dumps(trained)
            return call_next(message, context)

        model = _model(part, kept)
        if kind != MessageType.TRAIN:
            return _without_arrays(ask(model))
        reply, model = _trained(ask, part, model, alternate)
        if reply.has_error():
            return reply
        state.save(round_, _to_keep(part, model))
        answered, _ = _only_arrays(reply.content, "a training reply")
        reply.content[answered] = _record(_to_send(part, model))
        numbers = reply.content.get(METRICS)
        if part.left_out and isinstance(numbers, MetricRecord):
            numbers[KEPT] = sum(prod(model[name].shape) for name in part.left_out)
            numbers[ANEW] = int(kept is None)
        return reply

    def begin(self, context: Context, run: str, model: Mapping[str, Array]) -> None:
        """Keep this model's private arrays for requests without them, unless there are some."""
        state = PrivateState(context, run, private_shelf(context, _ALGORITHM))
        if state.newest() is None:
            part = self._part(_record(model), None, [])
            state.save(0, _to_keep(part, dict(model)))

    def _part(self, given: ArrayRecord, kept: PrivateArrays | None, left_out: list[str]) -> _Part:
        """Return what a request is about, or say what is wrong with it."""
        own = {} if kept is None else kept
        if own and _NAMES not in own:
            raise ValueError(
                "the app must keep no private state of its own, as Ditto's clients and "
                "DictionaryClient do, got keep_private around such an app."
            )
        lost = [name for name in left_out if name not in given and f"{_ARRAY}{name}" not in own]
        if lost:
            raise ValueError(
                f"arrays must have a start of {_list(lost)}: this client keeps none from before, "
                "and without a state-dir in its node config a restart loses what it kept."
            )
        names = list(given) if kept is None else json.loads(kept[_NAMES].astype(np.uint8).tobytes())
        private = matched("patterns", self.patterns, names)
        if not set(left_out) <= set(private):
            raise ValueError(
                f"patterns must match all that the server leaves out, {_list(left_out)}, got "
                f"{_list(self.patterns)}."
            )
        if list(given) not in (names, [name for name in names if name not in left_out]):
            raise ValueError(
                f"arrays must be called {_list(names)}, as in this run before, got {_list(given)}."
            )
        for name in private:
            before = own.get(f"{_ARRAY}{name}")
            if name in given and before is not None and tuple(given[name].shape) != before.shape:
                raise ValueError(
                    f"array {name!r} must have shape {before.shape}, which this client keeps of "
                    f"it, got {tuple(given[name].shape)}: a changed model wants a new run."
                )
        return _Part(given, names, private, left_out)


def _list(names: Collection[str]) -> str:
    """Return names as an error can show them."""
    shown = ", ".join(map(repr, list(names)[:8]))
    return f"{shown}, … ({len(names)} in all)" if len(names) > 8 else shown or "none"


def _record(arrays: Mapping[str, Array]) -> ArrayRecord:
    return named([*arrays.values()], arrays)


def _of_kind(content: RecordDict, kind: type[Kind]) -> dict[str, Kind]:
    """Return a message's records of one kind; Flower's own way takes twenty times as long."""
    return {name: record for name, record in content.items() if isinstance(record, kind)}


def _only_arrays(content: RecordDict, what: str) -> tuple[str, ArrayRecord]:
    """Return the one ArrayRecord of a message: of a second one nobody knows what it holds."""
    records = _of_kind(content, ArrayRecord)
    if len(records) != 1:
        raise ValueError(f"{what} must have one ArrayRecord, got {len(records)}.")
    ((name, record),) = records.items()
    return name, record


def _without_arrays(reply: Message) -> Message:
    if not reply.has_error() and _of_kind(reply.content, ArrayRecord):
        raise ValueError("a reply must have arrays only if it is one to training, got others.")
    return reply


def _model(part: _Part, kept: PrivateArrays | None) -> dict[str, Array]:
    """Return what the app receives."""
    own = {} if kept is None else kept
    private = {n: encode(own[f"{_ARRAY}{n}"]) for n in part.private if f"{_ARRAY}{n}" in own}
    return {name: private[name] if name in private else part.given[name] for name in part.names}


def _trained(
    ask: Callable[..., Message],
    part: _Part,
    model: dict[str, Array],
    alternate: bool,
) -> tuple[Message, dict[str, Array]]:
    """Return the app's last reply, and the model after its training, in one step or FedRep's two.

    Of a step of FedRep the other part counts as it was, whatever the app made of it.
    """
    shared = [name for name in part.names if name not in part.private]
    for names in (part.private, shared) if alternate else (part.names,):
        reply = ask(model, names if alternate else ())
        if reply.has_error():
            break
        _, found = _only_arrays(reply.content, "a training reply")
        _check_found(found, model, part.private)
        model = {**model, **{name: sendable(found[name], model[name]) for name in names}}
    return reply, model


def _check_found(found: ArrayRecord, model: Mapping[str, Array], private: Sequence[str]) -> None:
    """Accept a training reply with the model's arrays, whose private ones can be kept."""
    if found.keys() != model.keys():
        raise ValueError(f"a training reply must have {_list(model)}, got {_list(found)}.")
    for name in private:
        shape, wanted = tuple(found[name].shape), tuple(model[name].shape)
        if shape != wanted:
            raise ValueError(f"array {name!r} must have shape {wanted}, got {shape}.")
        before, after = decode(model[name]), decode(sendable(found[name], model[name]))
        check_trained(name, after, before, fixed_entries(before))


def _to_keep(part: _Part, model: Mapping[str, Array]) -> PrivateArrays:
    letters = np.frombuffer(json.dumps(part.names).encode(), dtype=np.uint8)
    names = letters.astype(np.float64)  # records take longer for other dtypes
    return {_NAMES: names, **{f"{_ARRAY}{name}": decode(model[name]) for name in part.private}}


def _to_send(part: _Part, model: Mapping[str, Array]) -> dict[str, Array]:
    """Return what leaves: of the private arrays the server's own values, or nothing."""
    return {
        name: part.given[name] if name in part.private else model[name]
        for name in part.names
        if name not in part.left_out
    }
