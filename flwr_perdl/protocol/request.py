"""A protocol: a generator whose every ``yield`` is one communication round.

A protocol reads like the paper's listing. It yields a `Request`, gets the good replies by
partition, computes, and yields the next one; it ends by ``return [arrays]``, its final model, or
runs until the rounds are over::

    def protocol(self, initial, state):
        if state is None:
            replies = yield Request("start")
            state = {"model": first_guess(replies)}
        while True:
            replies = yield Request("update", [state["model"]], state=state)
            state = {"model": average(replies)}

A request may declare how its replies are combined (`Request.combine`): the driver checks them, adds
the reused ones of absent clients, and puts the combination into ``replies.combined``.

Keep nothing outside ``state``: every request names the state from which a fresh generator yields
the same request again. A checkpoint needs nothing else.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from logging import WARNING
from numbers import Real
from typing import Any, NamedTuple, TypeVar

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid
from numpy.typing import NDArray

from flwr_perdl.core.aggregate import RULES
from flwr_perdl.core.checks import (
    Matrix,
    brief_repr,
    check_choice,
    check_count,
    check_function,
    check_kind,
    check_list,
    check_real,
    plain,
)
from flwr_perdl.core.models import (
    DTYPES,
    Start,
    aggregate_models,
    changes_of,
    check_trained,
    far_too_large,
    fixed_entries,
    is_float,
)
from flwr_perdl.protocol.compat import log
from flwr_perdl.protocol.records import (
    NEW_STATE,
    STATE_LOST,
    Kept,
    Limits,
    Replies,
    Reply,
    Scalar,
    brief,
    check_group,
    check_shapes,
    error_of,
)

T = TypeVar("T")

#: Named arrays from which a protocol continues.
State = Mapping[str, NDArray[Any]]
#: Partitions and the requests to them.
Sent = Sequence[tuple[int, Message]]

#: Kinds of anomaly that the driver itself notes: an error or no reply; a reply that broke a rule.
FAILED, REFUSED = "failed", "refused"
#: The weight was brought down to the request's bound.
CAPPED = "capped"
#: The client has no good reply, and its last one counts.
REMEMBERED = "remembered"


def accept(reply: Reply) -> None:
    """Accept every reply (the default check of a request).

    Parameters
    ----------
    reply : Reply
    """


class TooFewReplies(RuntimeError):
    """A round had fewer good replies than ``min_clients``.

    Examples
    --------
    >>> from flwr.client import NumPyClient
    >>> from flwr_perdl.clients import client_app
    >>> from flwr_perdl.simulations import InProcessGrid
    >>> from flwr_perdl.strategies import PerMA, TooFewReplies
    >>> grid = InProcessGrid(client_app(lambda context: 1 / 0), 2)
    >>> try:
    ...     PerMA(n_global=2).start(grid, num_rounds=1)
    ... except TooFewReplies:
    ...     print("Both clients failed.")
    Both clients failed.
    """


class Lost(NamedTuple):
    """Why a client that was asked has no good reply.

    Attributes
    ----------
    kind : str
        ``FAILED``, ``REFUSED``, ``OUTLIER`` or ``NEW_STATE``.
    reason : str
        A sentence.
    code : int or None, default None
        The code of the error that the client answered with.
    """

    kind: str
    reason: str
    code: int | None = None


def read_replies(
    sent: Sent, replies: Iterable[Message], read: Callable[[Message], T]
) -> tuple[dict[int, T], dict[int, Lost]]:
    """Read the replies: return them by who was asked, and why others have no good reply.

    The message that a reply answers identifies the sender: the source of an error may be the
    server's own id.
    """
    answers = _match_replies(sent, replies)
    good: dict[int, T] = {}
    lost: dict[int, Lost] = {}
    for who, _ in sent:
        if who not in answers:
            lost[who] = Lost(FAILED, "no reply in time")
        elif (why := error_of(answers[who])) is not None:
            code = answers[who].error.code
            lost[who] = Lost(NEW_STATE if code == STATE_LOST else FAILED, why, code)
        else:
            try:
                good[who] = read(answers[who])
            except Exception as error:
                lost[who] = Lost(REFUSED, brief(str(error)))
    return good, lost


def _match_replies(sent: Sent, replies: Iterable[Message]) -> dict[int, Message]:
    """Return the first reply to each message, by who was asked."""
    asked = {message.metadata.message_id: who for who, message in sent}
    answers: dict[int, Message] = {}
    for reply in replies:
        who = asked.get(reply.metadata.reply_to_message_id)
        if who is not None and who not in answers:
            answers[who] = reply
            continue
        what = "a second reply to one message" if who in answers else "a reply to no message"
        why, node = error_of(reply), reply.metadata.src_node_id
        log(WARNING, "Left out %s, from node %d%s", what, node, f": {why}" if why else ".")
    return answers


@dataclass(frozen=True, kw_only=True)
class Combine:
    """How replies are combined into one, or one per group.

    Parameters
    ----------
    start : sequence of ndarray
        What clients started from: replies have arrays of these shapes and dtypes. With ``group`` a
        list of such lists, one per group, and so is the combination. Integers are always averaged
        by "mean" and rounded; booleans and entries that are not finite must not change.
    rule : str, default "mean"
        "mean", weighted by numbers of examples; "filtered", "clip", "trimmed", "median" or
        "geometric-median" of the changes from ``start`` (`flwr_perdl.core.aggregate`), which limit
        the influence of malicious (Byzantine) clients. The report says whose replies a rule
        changed.
    group : str, optional
        The metric with the number of a reply's group, from 0; by default there is one group.

    Raises
    ------
    ValueError
        If ``rule`` is unknown, ``start`` has no arrays, or those of two groups differ in shape or
        dtype.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.protocol.records import Reply
    >>> from flwr_perdl.strategies import Combine, Replies
    >>> replies = Replies({0: Reply([np.array([1.0])], 1, {}), 1: Reply([np.array([4.0])], 2, {})})
    >>> Combine(start=[np.zeros(1)])(replies)
    [array([3.])]
    """

    start: Sequence[Matrix] | Sequence[Sequence[Matrix]]
    rule: str = "mean"
    group: str | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        check_kind("group in combine", self.group, (str, type(None)), "a name or None")
        if self.group == "":
            raise ValueError("group in combine must be a metric's name or None, got an empty one.")
        check_choice("rule in combine", self.rule, RULES)
        check_list("start in combine", self.start)
        forms, name = set(), "start in combine"
        wanted = "a list of arrays of numbers" + ", one per group," * (self.group is not None)
        for model in self._starts:
            for array in check_list(name, model):
                check_kind(name, array, np.ndarray, wanted)
                if array.dtype not in DTYPES:
                    raise ValueError(
                        "start in combine must be arrays of booleans, integers, float16, float32 "
                        f"or float64, got {array.dtype}."
                    )
            forms.add(tuple((array.shape, array.dtype) for array in model))
        if len(forms) != 1 or () in forms:
            raise ValueError(
                "start in combine must have at least one array, of the same shapes and dtypes in "
                f"all groups, got {len(self._starts)} group(s) of {len(forms)} kinds."
            )

    @property
    def _starts(self) -> list[Sequence[Matrix]]:
        """Each group's model."""
        starts: Any = [self.start] if self.group is None else self.start
        return list(starts)

    @property
    def expected(self) -> list[Matrix]:
        """Arrays of the shapes and dtypes of a reply's."""
        return list(self._starts[0])

    @cached_property
    def _models(self) -> list[list[Start]]:
        """Each group's model: its arrays, and which of their entries stay."""
        return [[(array, fixed_entries(array)) for array in model] for model in self._starts]

    def begun(self, reply: Reply) -> list[Start]:
        """Return what a reply's arrays began from, or raise a ValueError."""
        if self.group is not None:
            check_group(self.group, reply, len(self._models))
        return self._models[self._label(reply)]

    def check(self, reply: Reply) -> None:
        """Accept arrays of the shapes that are asked for, and the number of a group."""
        check_shapes([array.shape for array in self.expected], reply)
        if self.group is not None:
            check_group(self.group, reply, len(self._starts))

    def magnitudes(self, reply: Reply) -> list[float]:
        """Return the largest value of each array, 0 if it is of no floats.

        Raises
        ------
        ValueError
            If an entry is a boolean, or no finite number, and not the one that was sent.
        """
        found = []
        starts = self._models[self._label(reply)]
        for i, (array, start) in enumerate(zip(reply.arrays, starts, strict=True)):
            size = check_trained(reply.name(i), array, *start)
            found.append(size if is_float(array) else 0.0)
        return found

    def __call__(self, replies: Replies) -> list[Any]:
        """Return what the replies come to; a group without replies stays at its start."""
        models, shares = [], dict.fromkeys(replies, 0.0)
        for j, start in enumerate(self._models):
            own = replies.sharing({p: r for p, r in replies.items() if self._label(r) == j})
            model = [array for array, _ in start]
            if own:
                arrays = [reply.arrays for reply in own.values()]
                model, found = aggregate_models(self.rule, start, arrays, own.sizes)
                shares.update(zip(own, found.tolist(), strict=True))
            models.append(model)
        replies.note(RULES[self.rule].effect, shares)
        return models[0] if self.group is None else models

    def _label(self, reply: Reply) -> int:
        """Return a reply's group."""
        return 0 if self.group is None else int(reply.metrics[self.group])

    def changes(self, replies: Replies) -> Matrix:
        """Return each reply's changes of all floats as a row (`core.models.changes_of`)."""
        return changes_of(self._models[0], [reply.arrays for reply in replies.values()])


def _check_models(
    combine: Combine, replies: Mapping[int, Reply], bound: float | None
) -> dict[int, str]:
    """Return what is wrong with replies' models, by partition.

    Without a ``bound`` of absolute values, that of each array follows from all replies, see
    `flwr_perdl.core.models.far_too_large`.
    """
    wrong: dict[int, str] = {}
    sizes: dict[int, list[float]] = {}
    for partition, reply in replies.items():
        try:
            sizes[partition] = combine.magnitudes(reply)
        except ValueError as error:
            wrong[partition] = str(error)
    if sizes:
        table = np.array(list(sizes.values())).T  # (n_arrays, n_replies)
        limits = far_too_large(table) if bound is None else np.full(len(table), bound)
        for position, i in np.argwhere(table > limits[:, None])[::-1].tolist():
            partition = list(sizes)[i]
            wrong[partition] = (
                f"array {replies[partition].name(position)!r} has numbers far too large: up to "
                f"{table[position, i]:.3g}, more than {limits[position]:.3g}"
            )
    return wrong


def sort_replies(
    check: Callable[[Reply], object], replies: Mapping[int, Reply]
) -> tuple[Replies, dict[int, Lost]]:
    """Return the replies that pass a check, and why the others do not."""
    good, bad = Replies(), {}
    for partition in sorted(replies):
        try:
            returned = check(replies[partition])
        except ValueError as error:
            bad[partition] = Lost(REFUSED, brief(str(error)))
            continue
        except Exception as error:  # no reply that a check did not expect may end the run
            bad[partition] = Lost(REFUSED, brief(f"the check of the reply ended with {error!r}"))
            continue
        if returned is not None:
            raise TypeError(
                "Request.check must raise a ValueError for a wrong reply, and return nothing, "
                f"got {returned!r}."
            )
        good[partition] = replies[partition]
    return good, bad


@typing.runtime_checkable
class Channel(typing.Protocol):
    """How replies reach the server: an exchange of its own, after which no single one is seen.

    `SecureMean` is one. The clients' half stands in front of their handlers (`client_app`).
    """

    @property
    def ended(self) -> str:
        """Why the run ends before its last round; empty if it goes on."""
        ...

    def begin(
        self, kept: Kept, rounds: int | None, min_clients: int, save: Callable[[], None]
    ) -> Channel:
        """Return the channel of a run, or raise a ValueError that says why there is none.

        Parameters
        ----------
        kept : dict of str to ndarray
            What the channel keeps, in checkpoints too; empty at first.
        rounds : int or None
            The run's rounds in all, where they are known.
        min_clients : int
            The fewest good replies with which a round goes on.
        save : callable
            Writes a checkpoint, where the run has any.
        """
        ...

    def config(self, n_clients: int) -> Mapping[str, Scalar]:
        """Return what the clients are told besides, where so many are asked."""
        ...

    def gather(
        self, grid: Grid, sent: Sent, round_: int, *, limits: Limits, timeout: float | None
    ) -> tuple[dict[int, Reply], dict[int, Lost]]:
        """Return, by partition, what stands for each reply, and who is not in it.

        Parameters
        ----------
        grid : Grid
            The way to the clients.
        sent : sequence of (int, Message)
            Partitions and the requests to them, which have not been sent.
        round_ : int
            The communication round.
        limits : Limits
            What a reply may be at most.
        timeout : float or None
            Seconds to wait for each exchange.
        """
        ...


class Summed(NamedTuple):
    """What of a request's replies is summed where the server is to get no single one.

    Attributes
    ----------
    start : sequence of ndarray
        The arrays of a reply: their shapes and dtypes and, of changes, what they begin from.
    of : {"sums", "changes", "rows"}, default "sums"
        With noise: the arrays themselves; their changes from ``start``, of floats alone; or changes
        of rows, where a row of zeros stands for no change. A secure sum without noise is of one
        array, itself.
    norm : float, default 1.0
        The bound per client in a secure sum, of the norm of its array; with noise it is ``clip``.
    max_weight : int, default 1
        A client counts in a secure sum by its number of examples, and for at most so many.
    by_sample : bool, default False
        Whether an array is a sum over samples, of which the client can bound each.
    earlier : float, default 0.0
        The weight with which a sum with noise counts in that of the next round.
    finish : callable, optional
        ``(arrays, deviation) -> arrays``: what is made of a mean, in whose entries noise has this
        standard deviation.
    budget : tuple of int, optional
        What a sum with noise takes of the run's budget, where sums differ in size: how many units
        of how many in all, and the number of values of all sums. By default each round takes one.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.protocol.request import Summed
    >>> Summed([np.zeros(2)], norm=3.0).of
    'sums'
    """

    start: Sequence[Matrix]
    of: str = "sums"
    norm: float = 1.0
    max_weight: int = 1
    by_sample: bool = False
    earlier: float = 0.0
    finish: Callable[[list[Matrix], float], list[Matrix]] | None = None
    budget: tuple[int, int, int] | None = None


@dataclass(frozen=True, eq=False)
class Request:
    """One round's request to every participating client.

    Parameters
    ----------
    step : str
        The protocol's step that the client takes.
    arrays : sequence of ndarray
        What every client receives.
    config : mapping
        Further scalars for the client.
    state : mapping of str to ndarray, or None
        The state from which the protocol yields this request again; None for a fresh start.
    check : callable
        Raises a ValueError that says what is wrong with a reply, which is then left out.
    per_client : callable, optional
        ``partition -> arrays``: what each client receives instead of ``arrays``.
    numbers : callable, optional
        ``partition -> numbers``: of the models that a client receives, where these are several;
        their arrays are then called "NUMBER/NAME".
    model : sequence of ndarray, optional
        The model for evaluations and the result; by default ``arrays``.
    max_values : int, optional
        Maximum number of values in a reply. A reply whose header announces more is rejected before
        it is read.
    metrics : sequence of str, default ()
        Metrics that the protocol needs; a reply without one of them is rejected.
    max_weight : float or None, default 10.0
        Upper bound of a reply's ``num_examples``, as a multiple of the round's median. A client
        above it is named in the log and in `client_report` (``"capped"``). None: no bound.
    summed : Summed or None, default None
        What is summed over replies where the strategy has secure sums or privacy. None: nothing may
        be; with privacy such a request is rejected.
    secure : Channel or None, default None
        How replies travel if the server must not see single ones, such as `SecureMean`. The clients
        need `client_app`.
    reuse_last_reply : int, default 0
        Rounds for which the last reply of a client without a good one is used again; it is checked
        again and named in the report. For replies that don't refer to an older model. The server,
        and its checkpoints, then hold a reply per client.
    combine : Combine, optional
        How the good replies are combined, into ``replies.combined``; a round's models are held
        only until then.
    expect : sequence of ndarray, or None, default ()
        A model: the replies' arrays must have these shapes and dtypes, no values that are far too
        large, and the same values where they can't be averaged (`flwr_perdl.core.models`). By
        default the start of ``combine``; without it, finite float32 or float64 arrays. None: finite
        numbers of any dtype.

    Raises
    ------
    ValueError, TypeError
        If an argument breaks its rule.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.strategies import Request
    >>> Request("update", [np.zeros((2, 3))], {"steps": 5}).config
    {'steps': 5}
    """

    step: str
    arrays: Sequence[Matrix] = ()
    config: Mapping[str, Scalar] = field(default_factory=dict)
    state: State | None = None
    check: Callable[[Reply], object] = accept
    per_client: Callable[[int], Sequence[Matrix]] | None = None
    numbers: Callable[[int], Sequence[int]] | None = None
    model: Sequence[Matrix] | None = None
    max_values: int | None = None
    metrics: Sequence[str] = ()
    max_weight: float | None = 10.0
    summed: Summed | None = None
    secure: Channel | None = None
    reuse_last_reply: int = 0
    combine: Combine | None = None
    expect: Sequence[Matrix] | None = ()

    def __post_init__(self) -> None:
        """Check the arguments."""
        if not check_kind("Request.step", self.step, str, "a name"):
            raise ValueError("Request.step must be a name, got an empty one.")
        for name in ("arrays", "model", "expect"):
            if (own := getattr(self, name)) is not None or name == "arrays":
                check_arrays(f"Request.{name}", own)
        check_kind("Request.config", self.config, Mapping, "a mapping")
        for name, value in self.config.items():
            if not isinstance(name, str) or not isinstance(plain(value), Scalar):
                raise ValueError(
                    "Request.config must have names with numbers, texts or bytes, got "
                    f"{name!r}: {brief_repr(value)}."
                )
        if self.state is not None:
            _check_state(self.state)
        if not callable(self.check):
            raise TypeError(f"Request.check must be a function, got {brief_repr(self.check)}.")
        check_function("Request.per_client", self.per_client)
        check_function("Request.numbers", self.numbers)
        if self.max_values is not None:
            check_count("Request.max_values", self.max_values)
        for name in check_list("Request.metrics", self.metrics):
            check_kind("Request.metrics", name, str, "a list of names")
        if self.max_weight is not None:
            check_real("Request.max_weight", self.max_weight, 1)
        check_count("Request.reuse_last_reply", self.reuse_last_reply)
        kinds = {"summed": Summed, "secure": Channel, "combine": Combine}
        for name, kind in kinds.items():
            wanted = f"a {'SecureMean' if kind is Channel else kind.__name__} or None"
            check_kind(f"Request.{name}", getattr(self, name), (kind, type(None)), wanted)
        if self.reuse_last_reply and self.secure is not None:  # there is no single reply to keep
            raise ValueError(
                f"Request.reuse_last_reply must be 0 with secure, got {self.reuse_last_reply}."
            )

    @property
    def models(self) -> Combine | None:
        """What the replies are models for, None if they are none or not seen."""
        if self.secure is not None:
            return None
        return self.combine or (Combine(start=self.expect) if self.expect else None)

    @property
    def max_bytes(self) -> int:
        """Most bytes of the arrays of a reply that says what is asked for."""
        models = self.models
        asked: Sequence[Matrix] = () if models is None else models.expected
        if self.secure is not None and self.summed is not None:
            asked = self.summed.start
        n_values = sum(array.size for array in asked) or self.max_values
        # Of 8 bytes each; a few more are the headers'.
        return 2**28 if n_values is None else 8 * n_values + 2**20


#: What `ProtocolStrategy.protocol` returns: a generator that yields a request and receives its
#: replies, once per round, and returns the result.
Protocol = Generator[Request, Replies, list[Matrix]]


def check_reply(request: Request, reply: Reply) -> object:
    """Raise an error unless a reply has what is asked for; return what its own check does."""
    for name in request.metrics:
        if name not in reply.metrics:
            raise ValueError(f"metrics must have {name!r}, got {sorted(reply.metrics)}")
    if request.combine is not None:
        request.combine.check(reply)
    return request.check(reply)


def check_replies(
    request: Request, replies: Mapping[int, Reply], bound: float | None
) -> tuple[Replies, dict[int, Lost]]:
    """Return the replies that have what is asked for, and why the others have not.

    ``bound`` is that of absolute values in models, if there is one.
    """
    good, bad = sort_replies(partial(check_reply, request), replies)
    if (models := request.models) is not None:
        wrong = _check_models(models, good, bound)
        bad |= {partition: Lost(REFUSED, brief(why)) for partition, why in wrong.items()}
        good = good.sharing({p: reply for p, reply in good.items() if p not in wrong})
    return good, bad


def check_arrays(name: str, arrays: object) -> list[Matrix]:
    """Return a list of arrays as such, or raise a ValueError that says what is wrong with it."""
    if isinstance(arrays, np.ndarray):
        raise ValueError(f"{name} must be a list of arrays, got one array: write [array].")
    given = list(check_list(name, arrays))
    for array in given:
        if not isinstance(array, np.ndarray) or array.dtype.hasobject:
            raise ValueError(
                f"{name} must be a list of arrays of numbers, got {brief_repr(array)}."
            )
    return given


def _check_state(state: object) -> None:
    """Raise an error unless a checkpoint can hold this state."""
    wanted = "a mapping of names to arrays"
    for name, value in check_kind("Request.state", state, Mapping, wanted).items():
        number = isinstance(value, Real | np.generic)
        array = isinstance(value, np.ndarray) and not value.dtype.hasobject
        if not isinstance(name, str) or not (number or array):
            raise ValueError(
                f"Request.state must have names with arrays or numbers, got {name!r}: "
                f"{brief_repr(value)}."
            )
