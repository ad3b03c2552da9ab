"""Keep a part of any model at its client: a Flower mod around any ClientApp.

The arrays whose names match are the client's own. Before the app sees a request, the client's
values replace the server's; before a reply leaves, the server's replace the client's. So the server
needs no change: all replies have all names, as FedAdam, clipping mods and PyTorch's
``load_state_dict`` expect. A strategy with a private part (`Private`) asks the mod to leave it out
of the messages.

What leaves the client: the other arrays after training, and the rest of the app's reply. What these
reveal of the samples, and of the private arrays, is not hidden; a shared array that is a copy of a
private one (tied weights) is rejected. The server names the arrays: an app that takes arrays by
position, such as a NumPyClient, needs their names (``client_app(names=[...])``); with a
``state-dir`` it may trust those of its first run, and rejects others.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from glob import escape
from itertools import cycle
from logging import INFO, WARNING
from math import prod
from threading import Lock
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

from flwr_perdl.core import files
from flwr_perdl.core.checks import Matrix, check_count, check_list
from flwr_perdl.core.models import check_dtypes, check_trained, fixed_entries
from flwr_perdl.core.npy import as_file
from flwr_perdl.protocol.at_rest import locked, read
from flwr_perdl.protocol.client_state import (
    INNER,
    PrivateArrays,
    PrivateState,
    StateStore,
    private_store,
)
from flwr_perdl.protocol.compat import like, log, new_record, older_mod
from flwr_perdl.protocol.local import (
    Call,
    StateLostError,
    UntrainedError,
    hide_numbers,
    hiding,
    sendable,
    state_of,
    within,
)
from flwr_perdl.protocol.part import PRIVATE_RANK, Arrays, Asked, Part, split
from flwr_perdl.protocol.records import (
    AGAIN,
    ALTERNATE,
    FORK,
    LEFT_OUT,
    METRICS,
    NEW_STATE,
    OTHER_MOD,
    OURS,
    PROMISE,
    ROUND,
    RUN,
    Kept,
    Reply,
    Scalar,
    config_of,
    encode,
    left_out_of,
    route_of,
    view,
)

#: What the app reads where a request wants two steps: the names of the arrays to train, as JSON.
TRAIN_NAMES = "train-names"
#: The metric of a reply that leaves arrays out: how many numbers stay at the client.
KEPT = f"{OURS}kept-private"

#: What the state is of, and its entries: the names of all arrays, and the private ones.
_ALGORITHM, _NAMES, _ARRAY = "keep-private", "names", "array/"
#: An entry of the state that says that the private arrays are the server's, until they are trained.
_UNTRAINED = "untrained"
#: Where the names of a client's first run are: in ``context.state``, and on disk.
_FIRST, _FIRST_FILE = "perdl.names", "names.npz"

Kind = TypeVar("Kind", ArrayRecord, ConfigRecord)


def keep_private(
    *patterns: str | Sequence[str], share: str | Sequence[str] = (), inside: Sequence[Any] = ()
) -> KeepPrivate:
    """Return a Flower mod that keeps the arrays with these names at the client.

    ``ClientApp(mods=[keep_private("head.*")])`` personalizes a Message API app without another
    change, with Flower's own strategies as with `PersonalizedFedAvg`. For NumPyClients:
    ``client_app(make_client, private=["head.*"])``.

    Parameters
    ----------
    *patterns : str or sequence of str
        Names of arrays, or ``fnmatch`` patterns such as ``"fc3.*"``. Arrays without names are "0",
        "1", ….
    share : str or sequence of str, default ()
        Instead, names or patterns of the only arrays that are sent: ``share=["*lora*"]`` keeps all
        others private.
    inside : sequence of Flower mods, default ()
        Mods around training, outermost first, that see only the shared arrays, such as
        ``LocalDpMod``: private ones are neither clipped nor noised, and do not count in norms.

    Returns
    -------
    callable
        The mod, for ``ClientApp(mods=[...])``. It must be the first, so that the others see the
        client's whole model; `client_app` rejects any other place.

    Raises
    ------
    TypeError
        If ``inside`` has something that is not a function.
    ValueError
        If there are no patterns, or both kinds, or one is not a string. When a message comes, as
        the error of the reply and with the stored arrays unchanged: if the patterns match no array
        or all of them (one unused pattern of several is a warning); if names or shapes changed
        within the run, or names are others than a client of `client_app` takes by position; if the
        config has no ``"server-round"``; if the app does not return the arrays that it received, or
        returns private ones that are not finite, or a shared array of floats that its training
        changed and that equals a private one (tied weights).

    Notes
    -----
    A client starts from the server's values. From then on its own are kept in ``context.state``;
    with ``state-dir`` in the node config also on disk, encrypted on request, where they survive a
    restart (`PrivateState`). They are saved only after a successful training, and a repeated round
    starts from the state before it. Evaluations use them. Flower's strategies do not tell runs
    apart: all runs in one Flower run continue with the same arrays.

    Arrays in a reply to an evaluation or a query are dropped, once with a warning.

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
    >>> start = ArrayRecord({"body": Array(np.zeros(1)), "head": Array(np.ones(1))})
    >>> grid = InProcessGrid(app, 2)
    >>> result = FedAvg(fraction_evaluate=0.0).start(grid, start, num_rounds=3)
    >>> result.arrays.to_numpy_ndarrays()
    [array([3.]), array([1.])]
    """
    own = tuple(one for some in patterns for one in check_patterns("patterns", some))
    part = Patterns.of("patterns", own, share)
    if part is None:
        raise ValueError("patterns must name at least one array, got none.")
    return KeepPrivate(part, inside=check_mods("inside", inside))


def kept_private(context: Context, run: str) -> dict[str, Array]:
    """Return the private arrays that a run has come to, nothing before a client's first training.

    ``run`` is the token of the run.
    """
    state = PrivateState(context, run, private_store(context, _ALGORITHM)).newest() or {}
    own = {name: array for name, array in state.items() if name.startswith(_ARRAY)}
    return {name.removeprefix(_ARRAY): encode(array) for name, array in own.items()}


def asked_to_keep(config: Mapping[str, Any]) -> KeepPrivate | None:
    """Return what keeps the arrays that a server leaves out, where the client names none itself."""
    left_out = left_out_of(config)
    return KeepPrivate(Patterns("patterns", tuple(map(escape, left_out)))) if left_out else None


def check_mods(name: str, mods: Any) -> tuple[Any, ...]:
    """Return mods, or say that one is no function, or another `keep_private`."""
    listed = tuple(check_list(name, mods))
    if not all(map(callable, listed)):
        raise TypeError(f"{name} must be functions, got {mods!r}.")
    if any(isinstance(mod, KeepPrivate) for mod in listed):
        raise ValueError(
            f"{name} must be without keep_private, which wraps all mods, of training and of "
            "evaluation: give client_app private=[...], or make it the ClientApp's first mod."
        )
    if older := next(filter(None, map(older_mod, listed)), ""):
        raise ValueError(f"{name}: {OTHER_MOD.format(older)}")
    return listed


def check_patterns(name: str, patterns: Any) -> tuple[str, ...]:
    """Return patterns of arrays' names, one or several, or say which is none."""
    patterns = [patterns] if isinstance(patterns, str) else check_list(name, patterns)
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise ValueError(f"{name} must be names of arrays, or patterns, got {pattern!r}.")
    return tuple(patterns)


def matched(name: str, patterns: Sequence[str], names: Collection[str]) -> list[str]:
    """Return which of these names match: at least one, and not all."""
    found = [one for one in names if any(fnmatchcase(one, each) for each in patterns)]
    if not found:
        raise ValueError(
            f"{name} must match arrays, got {_list(patterns)} with arrays called {_list(names)}."
        )
    if len(found) == len(names):
        raise ValueError(
            f"{name} must leave arrays to share and to keep, got {_list(patterns)}: all match."
        )
    return found


class Patterns(NamedTuple):
    """Which arrays of a model are private: those with names that match, or all but those."""

    #: What the patterns are called in errors: "share" where they are of what is shared.
    argument: str
    patterns: tuple[str, ...]

    @classmethod
    def of(cls, argument: str, private: Any, share: Any) -> Patterns | None:
        """Return the part by one of the two lists of patterns, None if all arrays are shared."""
        given = {
            argument: check_patterns(argument, private),
            "share": check_patterns("share", share),
        }
        if all(given.values()):
            raise ValueError(f"share must be left out with {argument}, got {share!r}.")
        if given["share"] == ("*",):
            return None
        return next((cls(*item) for item in given.items() if item[1]), None)

    def private(self, names: Collection[str]) -> list[str]:
        """Return which of these arrays are private: at least one, and not all."""
        found = matched(self.argument, self.patterns, names)
        return [one for one in names if one not in found] if self.argument == "share" else found

    def warn(self, names: Collection[str]) -> None:
        """Warn of patterns that match no array, where others do."""
        own = [one for one in self.patterns if not any(fnmatchcase(each, one) for each in names)]
        if own:
            text = "%s: %s matches none of the arrays, which are called %s."
            log(WARNING, text, self.argument, _list(own), _list(names))

    def __str__(self) -> str:
        """Return what is private, as a report says it."""
        return "all but " * (self.argument == "share") + ", ".join(map(repr, self.patterns))


@dataclass(frozen=True, eq=False)
class Private(Part):
    """The server's half of a private part: the algorithm sees the shared arrays alone.

    Clients receive the initial private arrays until they have trained, and leave theirs out of
    replies (the client's half is `KeepPrivate`, around the app's handlers).

    Parameters
    ----------
    patterns : Patterns
        Which arrays are private.
    """

    name, rank = "private", PRIVATE_RANK

    patterns: Patterns
    #: Whether all arrays are private: clients receive the initial model once, and train it alone.
    alone: bool = False
    #: Of a run: the names of a model's arrays; of those that stay at the clients; the initial
    #: private ones of each model; who has its own.
    names: list[str] = field(default_factory=list)
    stays: list[str] = field(default_factory=list)
    initial: list[dict[str, Matrix]] = field(default_factory=list)
    trained: set[int] = field(default_factory=set)

    def begin(
        self, names: Sequence[str], model: list[Matrix], kept: Kept
    ) -> tuple[Private, Sequence[str], list[Matrix]]:
        """Keep the initial private arrays; the algorithm gets the others."""
        if self.alone:
            return Private(self.patterns, alone=True, names=[*names], stays=[*names]), names, model
        private = self.patterns.private(names) if names else []
        models = [dict(zip(names, own, strict=True)) for own in split(model, len(names))]
        if not any(f"{self.name}/0/{name}" in kept for name in private):
            self.patterns.warn(names)
            for j, own in enumerate(models):
                check_dtypes("initial_arrays", [*own], [*own.values()])
                kept |= {f"{self.name}/{j}/{name}": as_file(own[name]) for name in private}
        # Clients may lose their part while a run is not on: a resumed one begins with nobody known.
        held = [name.split("/", 2)[1:] for name in kept if name.startswith(f"{self.name}/")]
        initial: list[dict[str, Matrix]] = [{} for _ in {number for number, _ in held}]
        for number, name in held:
            initial[int(number)][name] = kept[f"{self.name}/{number}/{name}"]
        shared = [name for name in names if name not in private]
        part = Private(self.patterns, names=[*names], stays=private, initial=initial)
        return part, shared, [own[name] for own in models for name in shared]

    def log_begin(self, *, evaluates: bool) -> None:
        """Say what the result is not."""
        log(
            WARNING if evaluates else INFO,
            "Private arrays have their initial values in the result%s; clients have their own.",
            " and for evaluate_fn" if evaluates else "",
        )

    def whole(self, model: Sequence[Matrix]) -> list[Matrix]:
        """Return models with the initial private arrays in their places."""
        if not self.initial:
            return list(model)
        found: list[Matrix] = []
        n_private = len(self.initial[0])
        for j, own in enumerate(split(model, len(self.names) - n_private)):
            private, rest = self.initial[min(j, len(self.initial) - 1)], iter(own)
            found += [private[name] if name in private else next(rest) for name in self.names]
        return found

    def case(self, partition: int) -> bool:
        """Whether a client has its own private arrays."""
        return partition in self.trained

    def to_client(
        self, partition: int, arrays: Arrays, asked: Asked
    ) -> tuple[Arrays, dict[str, Scalar]]:
        """Leave out what a client has of its own."""
        told: dict[str, Scalar] = {LEFT_OUT: json.dumps(self.stays)}
        if partition not in self.trained:
            return arrays, told
        pairs = zip(arrays.items(), cycle(self.names), strict=False)
        return {key: array for (key, array), name in pairs if name not in self.stays}, told

    def from_client(self, reply: Reply, asked: Asked) -> Reply:
        """Accept a reply of a client that keeps its part."""
        if asked.models is not None and KEPT not in reply.metrics:
            raise ValueError(f"metrics must have {KEPT!r}, got {sorted(reply.metrics)}")
        return reply

    def conclude(self, asked: Collection[int], good: Collection[int]) -> None:
        """Note that who has trained has a private part of its own."""
        self.trained.difference_update(asked)
        self.trained.update(good)


class _About(NamedTuple):
    """What one message is about."""

    #: The arrays as the server sent them.
    given: ArrayRecord
    #: The names of all arrays, in the app's order; of the private ones; of those left out.
    names: list[str]
    private: list[str]
    left_out: list[str]


#: Whether the handlers get the model as it is, since no array leaves the client.
_ASIDE: ContextVar[bool] = ContextVar("aside", default=False)


@contextmanager
def aside() -> Iterator[None]:
    """Have `keep_private` stand aside in this thread: for steps that send numbers alone."""
    token = _ASIDE.set(True)
    try:
        yield
    finally:
        _ASIDE.reset(token)


class KeepPrivate:
    """See `keep_private`."""

    def __init__(
        self, part: Patterns, *, inside: Sequence[Any] = (), names: Sequence[str] | None = None
    ) -> None:
        self.part = part
        self._inside = tuple(inside)
        #: The names of an app's arrays that takes them by position, none if they are not known.
        self._names = None if names is None else check_patterns("names", names)
        if len({*(self._names or ())}) < len(self._names or ()):
            raise ValueError(f"names must be different, got {names}.")

    def __call__(
        self, message: Message, context: Context, call_next: Call, inside: Sequence[Any] = ()
    ) -> Message:
        """Answer a message by the app, with the client's own arrays in it."""
        if _ASIDE.get():
            return call_next(message, context)
        kind = route_of(message)[0]
        if kind == MessageType.QUERY:
            return _without_arrays(hiding(call_next)(message, context), str(context.run_id))
        record, given = _only_arrays(message.content, "a request")
        configs = _of_kind(message.content, ConfigRecord).values()
        config = next((one for one in configs if ROUND in one), ConfigRecord())
        round_ = check_count(ROUND, config.get(ROUND))
        run = str(config.get(RUN, context.run_id))
        store = private_store(context, _ALGORITHM)
        state = PrivateState(context, run, store)
        # A step may train several times; what it evaluates before, the round before has trained.
        again = bool(config.pop(AGAIN, kind != MessageType.TRAIN))
        kept = state.after(round_) if again else state.before(round_)
        if (origin := config.pop(FORK, None)) and kept is None:  # goes on from another run
            kept = PrivateState(context, str(origin), store).newest()
        part = self._part(given, kept, left_out_of(config))
        config.pop(LEFT_OUT, None)
        if self._names is not None:
            seen = () if store is None else _first_names(context, store) or part.names
            _check_order(part.names, self._names or seen)
        alternate, call_next = bool(config.pop(ALTERNATE, False)), hiding(call_next)

        model = _model(part, kept)
        if kept is None:
            self.part.warn(part.names)
        if kind != MessageType.TRAIN:
            _refuse_untrained(context, store, kept)
            message.content[record] = new_record(ArrayRecord, model)
            reply = _without_arrays(call_next(message, context), run)
            _mark(reply, {NEW_STATE: 1} if kept is None and RUN in config else {})
            return reply

        mods = (*self._inside, *inside)
        shared = [name for name in part.names if name not in part.private]
        for names in (part.private, shared) if alternate else (part.names,):
            if alternate:
                config[TRAIN_NAMES] = json.dumps(names)
            apart = state_of(context, "private") if names is part.private else nullcontext()
            with apart:
                reply, found = _trained(message, record, context, mods, call_next, part, model)
            if reply.has_error():
                return reply
            model = {**model, **{name: sendable(found[name], model[name]) for name in names}}
        state.save(round_, _to_keep(part, model))
        if _first_names(context, store) is None:
            _keep_names(context, store, part.names)
        answered, _ = _only_arrays(reply.content, "a training reply")
        reply.content[answered] = new_record(ArrayRecord, _to_send(part, model))
        n_kept = sum(prod(model[name].shape) for name in part.left_out)
        marks = {KEPT: n_kept} if part.left_out else {}
        _mark(reply, {**marks, NEW_STATE: int(kept is None)} if RUN in config else {})
        return reply

    @staticmethod
    def refuse_untrained(context: Context, run: str) -> None:
        """Raise an UntrainedError where a client has trained a private part in other runs alone."""
        store = private_store(context, _ALGORITHM)
        states = [PrivateState(context, run + own, store).newest() for own in ("", INNER)]
        _refuse_untrained(context, store, *states)

    @staticmethod
    def check_whole(context: Context, run: str, models: Iterable[Collection[str]]) -> None:
        """Accept the names of whole models, if the client has trained in the run: as it has there.

        Else a private array by another name would be the server's.
        """
        store = private_store(context, _ALGORITHM)
        kept = PrivateState(context, run, store).newest()
        _refuse_untrained(context, store, kept)
        if kept is not None and _NAMES in kept:
            for given in models:
                _check_called(_read_names(kept[_NAMES]), given)

    def begin(self, context: Context, run: str, model: Mapping[str, Array]) -> None:
        """Keep this model's private arrays for requests without them, unless there are some."""
        state = PrivateState(context, run, private_store(context, _ALGORITHM))
        if state.newest() is None:
            part = self._part(new_record(ArrayRecord, model), None, [])
            state.save(0, {**_to_keep(part, dict(model)), _UNTRAINED: np.zeros(1)})

    def _part(self, given: ArrayRecord, kept: PrivateArrays | None, left_out: list[str]) -> _About:
        """Return what a request is about, or say what is wrong with it."""
        own = {} if kept is None else kept
        if own and _NAMES not in own:
            raise ValueError(
                "the app must keep no private state of its own, as Ditto's clients and "
                "DictionaryClient do, got keep_private around such an app."
            )
        lost = [name for name in left_out if name not in given and f"{_ARRAY}{name}" not in own]
        if lost:
            raise StateLostError(f"this client's {_list(lost)}")
        names = list(given) if kept is None else _read_names(kept[_NAMES])
        # Where the server leaves out all arrays, the client trains alone.
        private = names if left_out and left_out == names else self.part.private(names)
        if not set(left_out) <= set(private):
            raise ValueError(
                f"{self.part.argument} must keep all that the server leaves out, "
                f"{_list(left_out)}, got {_list(self.part.patterns)}."
            )
        if list(given) != [name for name in names if name not in left_out]:
            _check_called(names, given)
        for name in private:
            before = own.get(f"{_ARRAY}{name}")
            if name in given and before is not None and tuple(given[name].shape) != before.shape:
                raise ValueError(
                    f"array {name!r} must have shape {before.shape}, which this client keeps of "
                    f"it, got {tuple(given[name].shape)}: a changed model needs a new run."
                )
        return _About(given, names, private, left_out)


def _refuse_untrained(
    context: Context, store: StateStore | None, *states: PrivateArrays | None
) -> None:
    trained = (one is not None and _NAMES in one and _UNTRAINED not in one for one in states)
    if not any(trained) and _first_names(context, store) is not None:
        raise UntrainedError


def _check_called(names: Sequence[str], given: Collection[str]) -> None:
    """Accept the names that a model's arrays have in the run."""
    if [*given] != names:
        raise ValueError(
            f"arrays must be called {_list(names)}, as in this run before, got {_list(given)}."
        )


def _check_order(names: Sequence[str], known: Sequence[str]) -> None:
    """Accept the names of an app that takes arrays by position, where none are known numbers."""
    wanted = [*(known or map(str, range(len(names))))]
    if names != wanted:
        how = "" if known else f"; if these are right, give client_app names={[*names]}"
        raise ValueError(
            f"arrays must be called {_list(wanted)}, in this order, by a client that takes them by "
            f"position, got {_list(names)}{how}."
        )


def _list(names: Collection[str]) -> str:
    """Return names as an error can show them."""
    shown = ", ".join(map(repr, list(names)[:8]))
    return f"{shown}, … ({len(names)} in all)" if len(names) > 8 else shown or "none"


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


def _without_arrays(reply: Message, run: str) -> Message:
    for name in () if reply.has_error() else _of_kind(reply.content, ArrayRecord):
        del reply.content[name]
        with _ONE_AT_A_TIME:  # a cache alone lets two threads in
            _warn_dropped(run)
    return reply


def _mark(reply: Message, marks: Mapping[str, int]) -> None:
    """Add metrics to a reply that has some."""
    numbers = None if reply.has_error() else reply.content.get(METRICS)
    if isinstance(numbers, MetricRecord):
        numbers.update(marks)


_ONE_AT_A_TIME = Lock()


@cache
def _warn_dropped(run: str) -> None:
    """Warn once in a run."""
    text = "A reply that is none to training has arrays: they are dropped, since some are private."
    log(WARNING, text)


def _model(part: _About, kept: PrivateArrays | None) -> dict[str, Array]:
    """Return what the app receives."""
    own = {} if kept is None else kept
    private = {n: encode(own[f"{_ARRAY}{n}"]) for n in part.private if f"{_ARRAY}{n}" in own}
    return {name: private[name] if name in private else part.given[name] for name in part.names}


def _trained(
    message: Message,
    record: str,
    context: Context,
    mods: Sequence[Any],
    call: Call,
    part: _About,
    model: Mapping[str, Array],
) -> tuple[Message, dict[str, Array]]:
    """Return the app's reply, and the model after training; mods see its shared arrays alone.

    ``record`` is what the request calls its arrays.
    """
    private = {name: model[name] for name in part.private}

    def whole(asked: Message, context: Context) -> Message:
        """Train by the app, which has the whole model."""
        _, shared = _only_arrays(asked.content, "a request")
        given = {n: private[n] if n in private else shared[n] for n in part.names}
        content = RecordDict({**asked.content, record: new_record(ArrayRecord, given)})
        reply = call(like(asked, content), context)
        if reply.has_error():
            return reply
        answered, found = _only_arrays(reply.content, "a training reply")
        # A client that adds nothing to a noised sum keeps its old part.
        _check_found(found, given, part.private, whole=PROMISE in config_of(message))
        private.update({name: found[name] for name in private})
        reply.content[answered] = new_record(ArrayRecord, _without(found, private))
        return reply

    message.content[record] = new_record(ArrayRecord, _without(model, private))
    reply = within(mods, whole)(message, context)
    if reply.has_error():
        return reply, {}
    _, shared = _only_arrays(reply.content, "a training reply")
    _check_names(shared, _without(model, private))
    return reply, {**private, **shared}


def _without(model: Mapping[str, Array], private: Collection[str]) -> dict[str, Array]:
    return {name: array for name, array in model.items() if name not in private}


def _check_names(found: ArrayRecord, model: Mapping[str, Array]) -> None:
    if found.keys() != model.keys():
        raise ValueError(f"a training reply must have {_list(model)}, got {_list(found)}.")


def _check_found(
    found: ArrayRecord, model: Mapping[str, Array], private: Sequence[str], *, whole: bool
) -> None:
    """Accept a training reply with the model's arrays, whose private ones can be kept.

    With ``whole`` the others are checked, too, as a server does.
    """
    _check_names(found, model)
    for name in model if whole else private:
        shape, wanted = tuple(found[name].shape), tuple(model[name].shape)
        if shape != wanted:
            raise ValueError(f"array {name!r} must have shape {wanted}, got {shape}.")
        with hide_numbers(f"{'private ' * (name in private)}array {name!r}: "):
            before, after = view(model[name]), view(sendable(found[name], model[name]))
            check_trained(name, after, before, fixed_entries(before))
        if name not in private or not view(found[name]).any():
            continue
        for other in found.keys() - set(private):
            tied = _equal(found[other], found[name])
            if tied and not _equal(found[other], model[other]):
                raise ValueError(
                    f"array {other!r} must not equal the private array {name!r} after training, as "
                    "tied weights do: keep both private, or none."
                )


def _equal(one: Array, other: Array) -> bool:
    """Whether two arrays of floats have the same values, in whatever shape."""
    alike = one.dtype == other.dtype and prod(one.shape) == prod(other.shape)
    if not alike or np.dtype(one.dtype).kind != "f":
        return False
    return np.array_equal(view(one).ravel(), view(other).ravel(), equal_nan=True)


def _to_keep(part: _About, model: Mapping[str, Array]) -> PrivateArrays:
    own = {f"{_ARRAY}{name}": view(model[name]) for name in part.private}
    return {_NAMES: _written_names(part.names), **own}


def _written_names(names: Sequence[str]) -> Matrix:
    letters = np.frombuffer(json.dumps(names).encode(), dtype=np.uint8)
    return letters.astype(np.float64)  # records take longer for other dtypes


def _read_names(array: Matrix) -> list[str]:
    names: list[str] = json.loads(array.astype(np.uint8).tobytes())
    return names


def _first_names(context: Context, store: StateStore | None) -> list[str] | None:
    """Return the names of the arrays in this client's first run, None before its training."""
    record = context.state.get(_FIRST)
    if isinstance(record, ArrayRecord):
        return _read_names(view(record[_NAMES]))
    path = None if store is None else store.folder / _FIRST_FILE
    if store is None or path is None or not path.exists():
        return None
    files.refuse_link(store.folder)
    saved = read(path, ["client"], lambda _: None)
    return None if saved is None else _read_names(saved.arrays[_NAMES])


def _keep_names(context: Context, store: StateStore | None, names: Sequence[str]) -> None:
    """Keep the names of a client's first run, where it keeps its private arrays."""
    written = _written_names(names)
    context.state[_FIRST] = new_record(ArrayRecord, {_NAMES: encode(written)})
    if store is not None:  # its folder is there: a state was saved
        path = store.folder / _FIRST_FILE
        files.save(path, *locked({_NAMES: written}, {"client": store.client}))


def _to_send(part: _About, model: Mapping[str, Array]) -> dict[str, Array]:
    """Return what leaves: of the private arrays the server's own values, or nothing."""
    return {
        name: part.given[name] if name in part.private else model[name]
        for name in part.names
        if name not in part.left_out
    }
