"""Names of keys and arrays in messages, for your own clients.

==================  ==============================================================================
name                where it stands
==================  ==============================================================================
``PARTITION_ID``    key of a node's config
``ROUND``, ``RUN``  keys of a request's config: the round, and the token of the strategy's run
``SEED``, ``STEP``  keys of a request's config: the seed, and which step is asked for
``NUM_EXAMPLES``,   keys of a reply's metrics: weight, and whether the private state was lost
``NEW_STATE``
``EVALUATE``        the step of a report that is an evaluation
``Scalar``          type of a value in a config or in metrics
``to_arrays``       the arrays of a record, in order
==================  ==============================================================================

Requests carry an ArrayRecord ``"arrays"`` and a ConfigRecord ``"config"``; replies an ArrayRecord
``"arrays"`` and a MetricRecord ``"metrics"`` with ``"num-examples"``: what Flower's FedAvg uses.

Arrays travel as the bytes of NumPy's ``.npy`` format, which is Flower's choice. For a small array,
writing and parsing the header costs more than the numbers. A federation has few different headers,
so each is written and parsed once.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import dropwhile, takewhile
from math import isfinite, isnan, nan
from typing import Any, NamedTuple

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from numpy.typing import NDArray

from flwr_perdl.core.checks import FLOATS, Matrix, brief_repr
from flwr_perdl.core.keys import ROUND
from flwr_perdl.core.models import DTYPES
from flwr_perdl.core.npy import file_of, view_file
from flwr_perdl.protocol.compat import CLIENT_APP_RAISED_EXCEPTION, new_array, new_record

__all__ = [
    "EVALUATE",
    "NEW_STATE",
    "NUM_EXAMPLES",
    "PARTITION_ID",
    "ROUND",
    "SEED",
    "STEP",
    "Scalar",
    "to_arrays",
]

#: What the library's own names begin with, so that none is an app's: metrics of replies, keys of
#: configs, and records in ``context.state``.
OURS = "perdl."
#: A value of a config or of a metric.
Scalar = bool | bytes | float | int | str
#: Named arrays that a part keeps: at the server in checkpoints, at a client in its state.
Kept = dict[str, NDArray[Any]]
#: For `isinstance`: tuples, as ``int | float`` would be made anew for every number of every reply.
_NUMBERS, _TEXTS = (int, float), (bytes, str)

#: What Flower calls an array in NumPy's ``.npy`` format.
NPY = "numpy.ndarray"
ARRAYS = "arrays"
CONFIG = "config"
METRICS = "metrics"
#: The ConfigRecord of a reply with those of its metrics that are texts, which Flower's MetricRecord
#: does not hold.
TEXTS = "texts"
#: The metric that says how many examples a reply stands for.
NUM_EXAMPLES = "num-examples"

#: What messages ask for, and the action that each has where its type names none.
_KINDS = (MessageType.TRAIN, MessageType.EVALUATE, MessageType.QUERY)
DEFAULT = "default"

#: Whose step a request asks for, and which; without a protocol it is a request as FedAvg's.
PROTOCOL = "perdl.protocol"
STEP = "perdl.step"
#: The start of the keys of a training request's config that only ``evaluate`` receives.
MEASURING = "perdl.evaluate."
#: The names, as JSON, of the private arrays that the server leaves out of its requests to a client
#: that has them, and wants left out of replies; whether to train in two steps, as FedRep.
LEFT_OUT = "perdl.left-out"
ALTERNATE = "perdl.alternate"
#: In a request that a step makes to the app's handlers: whether these have trained in this step.
AGAIN = "perdl.again"
#: By which metric clients choose, if not by the loss, and whether more of it is better; whether
#: what the app keeps in ``context.state`` is of this run alone (`Diagnosis`: some in turns), and
#: the token of the run from which this one goes on.
METRIC, HIGHER_IS_BETTER = "perdl.metric", "perdl.higher-is-better"
APART, FORK = "perdl.apart", "perdl.fork"
#: In evaluations: which step made the model.
AFTER = "perdl.after"
#: The run's one seed.
SEED = "perdl.seed"
#: A token of the run: private state of another run is not taken up.
RUN = "perdl.run"

#: How a request's replies travel. Under masks, in a sum: a client counts by its number of samples,
#: and for at most so many; and the largest norm of the arrays that it sends. With noise: what the
#: run promises of privacy. Encrypted, to a neighbor.
MAX_WEIGHT = "perdl.max-weight"
NORM = "perdl.norm"
PROMISE = "perdl.promise"
SEALED = "perdl.sealed"
#: The key of a request's config that says as JSON how its arrays travel, and its reply's.
TRANSPORT = "perdl.transport"
#: The fewest clients whose sum a client takes part in, by default.
MIN_CLIENTS = 3
#: What mods must be; a request fails with a KeyError of the record that others read.
OTHER_MOD = (
    "mods must be those of flwr.clientapp.mod, got {}, which is for Flower's older interface; "
    "secure rounds need none."
)
#: Whether nothing leaves the client: whatever comes of the request, the reply is the same.
SILENT = "perdl.silent"
#: Keys of a node's config: the file of its lasting private key; that of its neighbors' public keys,
#: with which it sends sealed messages alone.
KEY_FILE, PINNED_KEYS = "key-file", "neighbor-keys"

#: What a client says of itself when it is asked who it is; the last, with a promise of privacy of
#: its own, where it keeps no count of what it has answered over several runs.
PARTITION_ID = "partition-id"
NAME = "name"
#: Names, or patterns, of the arrays that it keeps private; nothing where it keeps none.
KEEPS_PRIVATE = "perdl.keeps-private"
UNCOUNTED = "perdl.uncounted-runs"
#: The metric of a client that found no private state of the run and began with a new one; reports
#: have 1 only for clients that took part in the run before. It is a kind of anomaly, too.
NEW_STATE = f"{OURS}state-lost"

#: The metric of a client that says which of several models is its own.
CLUSTER = "cluster"
#: What apps call the loss of an evaluation, the first of these that is there.
LOSSES = ("loss", "eval_loss")
#: The metric of a client whose app has returned NaN as the loss, which is then left out; in an
#: evaluation's aggregate, how many clients have no finite loss, if a third or more.
NO_LOSS = f"{OURS}no-finite-loss"
#: What helps where a metric is not finite.
DIVERGED = "try a lower learning rate, or look for NaN in the data"
#: What training and evaluation are called: as steps, in reports, and as kinds of requests.
TRAIN = "train"
EVALUATE = "evaluate"

#: What a client says of itself: that it defines no evaluation; that it sends sealed messages alone.
UNABLE_TO_EVALUATE, SEALS_ALL = "perdl.no-evaluate", "perdl.seals-all"
#: The code of the error with which a client answers an evaluation that it does not define.
NO_EVALUATE = 4501
#: The codes of the errors of a client that lacks the state that a request needs; and of one with a
#: private part from another run that is to evaluate before it trains in this one.
STATE_LOST, UNTRAINED = 4502, 4503

#: The record of a client's state that says which requests of this run of Flower it has answered.
ANSWERED = "perdl.answered"

#: The largest integer that Flower's records carry, signed or not.
LARGEST_INT = 2**63 - 1
#: Maximum number of examples (a float counts up to there), of arrays, and of numbers in the
#: metrics of a reply, lists included.
_MOST_EXAMPLES = 2**53
_MOST_ARRAYS = 10_000
_MOST_METRICS = 10_000
#: Characters of a metric's name, all of them printable.
_LONGEST_NAME = 100
#: What precedes the text of a ClientApp's exception in an error's reason, and what the whole of it
#: begins with; a line of a traceback.
_SAID = "Message: "
_CLASS = re.compile(r"\A<class '(?:\w+\.)*(\w+)'>:<'")
_FRAME = re.compile(r'^[ \t]+File ".*\n?', re.MULTILINE)
#: Maximum number of characters of a client's text in logs and reports, and of those searched.
_LONGEST_REASON = 300
_READ_OF_REASON = 100_000


class OtherClientError(ValueError):
    """A step is for clients of another kind: of this client's data the error says nothing."""


class Limits(NamedTuple):
    """The limits of a reply, checked before its arrays are read.

    Attributes
    ----------
    n_bytes : int
        Maximum number of bytes of all its arrays.
    max_values : int or None
        Maximum number of values in all its arrays, as their headers announce them.
    magnitude : float
        Maximum absolute value of a number in an array or a metric.
    expect : sequence of ndarray, or None
        A model: the reply's arrays have these shapes and dtypes. They are not copied, and whoever
        asked checks their values. Empty: float32 or float64 of any shapes; None: any numbers.
    """

    n_bytes: int = 2**28
    max_values: int | None = None
    magnitude: float = np.inf
    expect: Sequence[Matrix] | None = ()


class Reply(NamedTuple):
    """One client's good reply.

    Attributes
    ----------
    arrays : list of ndarray
        What the client sent; finite float arrays, or a model's.
    num_examples : int
        Number of samples behind it.
    metrics : dict of str to float
        The client's metrics that are numbers.
    names : tuple of str
        The arrays' names; empty where they have none.
    others : dict of str to list of float, or str
        Its metrics that are lists of numbers, or texts.
    """

    arrays: list[Matrix]
    num_examples: int
    metrics: dict[str, float]
    names: tuple[str, ...] = ()
    others: Mapping[str, Any] = {}

    def name(self, position: int) -> str:
        """Return an array's name, by default its position."""
        return self.names[position] if self.names else str(position)


class Replies(dict[int, Reply]):
    """The good replies of a round, by partition, in ascending order.

    Examples
    --------
    >>> from flwr_perdl.strategies import Replies
    >>> list(Replies({}))
    []
    """

    #: What the replies come to by `Request.combine`: arrays, not to be written to, or a list of
    #: such for each group.
    combined: Sequence[Any] = ()

    @cached_property
    def noted(self) -> dict[int, dict[str, float]]:
        """What the protocol noted of each client, see `note`."""
        return {}

    def note(self, what: str, shares: Mapping[int, float]) -> None:
        """Note for the report what the aggregation did to clients' replies.

        Parameters
        ----------
        what : str
            Such as "left out", "clipped" or "trimmed".
        shares : mapping of int to float
            By partition, the share of the reply that is affected; 0 is not noted.
        """
        for partition, share in shares.items():
            if share > 0:
                self.noted.setdefault(partition, {})[what] = float(share)

    @cached_property
    def outliers(self) -> dict[int, str]:
        """Why replies are left out that do not fit the others, see `leave_out`."""
        return {}

    def leave_out(self, reasons: Mapping[int, str]) -> Replies:
        """Return the replies without these, which count as dropped.

        Parameters
        ----------
        reasons : mapping of int to str
            By partition, why the reply is left out, for log and report.

        Returns
        -------
        Replies
        """
        self.outliers.update(reasons)
        return self.sharing({p: reply for p, reply in self.items() if p not in reasons})

    def keep_majority(
        self, trait: Callable[[Reply], Any], describe: Callable[[Any], str]
    ) -> Replies:
        """Return the replies that share the most common trait; the others are left out.

        Parameters
        ----------
        trait : callable
            ``reply -> anything`` that can be compared.
        describe : callable
            ``trait -> str``: in words, for log and report.

        Returns
        -------
        Replies
        """
        found = {partition: trait(reply) for partition, reply in self.items()}
        most = Counter(found.values()).most_common(1)[0][0]
        others = {partition: own for partition, own in found.items() if own != most}
        why = f"it has {{}}, and most have {describe(most)}"
        return self.leave_out({p: why.format(describe(own)) for p, own in others.items()})

    @property
    def sizes(self) -> Matrix:
        """The replies' numbers of examples."""
        return np.array([float(reply.num_examples) for reply in self.values()])

    def sharing(self, replies: Mapping[int, Reply]) -> Replies:
        """Return other replies whose notes are added to these."""
        others = Replies(replies)
        others.noted, others.outliers = self.noted, self.outliers
        return others


def check_shapes(shapes: Sequence[tuple[int, ...]], reply: Reply) -> None:
    """Accept arrays of these shapes."""
    given = [array.shape for array in reply.arrays]
    if given != list(shapes):
        raise ValueError(f"wrong shapes: {list(shapes)} are asked for, got {given}")


def check_group(name: str, reply: Reply, n_groups: int) -> None:
    """Accept the number of one of the groups."""
    group = reply.metrics.get(name, nan)
    if group not in range(n_groups):
        raise ValueError(f"{name} must be one of {n_groups}, from 0, got {group:g}")


#: How Flower writes the dtypes of models; NumPy takes long to find a dtype's name.
_NAMES = {dtype: str(dtype) for dtype in DTYPES}
#: No limits but what a message can be.
_ANY = Limits(n_bytes=2**63)


def encode(array: Matrix) -> Array:
    """Return what Flower's ``Array(array)`` is, in the order of the rows.

    An array that is a `view` of such a file, as one that was received, is not copied.
    """
    array = np.asarray(array)
    dtype = _NAMES.get(array.dtype)
    if dtype is None:
        return Array(array)
    return new_array(dtype, array.shape, NPY, file_of(array))


def to_record(arrays: Iterable[Matrix], names: Collection[str] = ()) -> ArrayRecord:
    """Return the ArrayRecord of a list of arrays, under their names (see `named`)."""
    return named([*map(encode, arrays)], names)


def to_records(
    lists: Mapping[int, Sequence[Matrix]], names_of: Callable[[int], Collection[str]]
) -> dict[int, ArrayRecord]:
    """Return the lists' ArrayRecords; what several share, a list or an array, is there once."""
    serialised: dict[int, Array] = {}
    records: dict[int, ArrayRecord] = {}
    for key, arrays in lists.items():
        if id(arrays) in records:
            continue
        for array in arrays:
            if id(array) not in serialised:
                serialised[id(array)] = encode(array)
        own = [serialised[id(array)] for array in arrays]
        records[id(arrays)] = named(own, names_of(key))
    return {key: records[id(arrays)] for key, arrays in lists.items()}


def named(arrays: Sequence[Array], *names: Collection[str]) -> ArrayRecord:
    """Return a record of arrays, under the first of these lists of names that has as many.

    Without one the names are "0", "1", …, as Flower gives them.
    """
    numbers = map(str, range(len(arrays)))
    found = next((each for each in names if len(each) == len(arrays)), numbers)
    return new_record(ArrayRecord, dict(zip(found, arrays, strict=True)))


def in_order(record: Mapping[str, Array], names: Collection[str]) -> dict[str, Array]:
    """Return a record's arrays in the order of these names, if it has just these; else in its."""
    return {name: record[name] for name in (names if record.keys() == set(names) else record)}


def to_arrays(record: ArrayRecord) -> list[Matrix]:
    """Return an ArrayRecord's arrays in their order; read-only.

    Parameters
    ----------
    record : ArrayRecord

    Returns
    -------
    list of ndarray

    Examples
    --------
    >>> import numpy as np
    >>> from flwr.app import ArrayRecord
    >>> from flwr_perdl.protocol.records import to_arrays
    >>> to_arrays(ArrayRecord([np.eye(2)]))
    [array([[1., 0.],
           [0., 1.]])]
    """
    return [view(array) for array in record.values()]


def decode(array: Array) -> Matrix:
    """Return a copy of the array, as ``array.numpy()`` does.

    Raises
    ------
    ValueError
        If the bytes are no ``.npy`` file, or fewer than its header says: nothing is allocated.
    """
    return view(array).copy("A")


def view(array: Array) -> Matrix:
    """Return the array where its bytes lie, if they are a ``.npy`` file: not to be changed."""
    return array.numpy() if array.stype != NPY else view_file(array.data)[0]


def for_evaluations(config: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return a config of evaluations as a request to train carries it."""
    return {f"{MEASURING}{key}": value for key, value in config.items()}


def reply_to(
    message: Message,
    arrays: Sequence[Matrix] | None,
    num_examples: int,
    metrics: Mapping[str, Scalar],
) -> Message:
    """Return the reply that carries ``arrays`` (none for an evaluation) and ``metrics``.

    As many arrays as the request has keep the request's names.
    """
    texts = {n: str(v) for n, v in metrics.items() if isinstance(n, str) and isinstance(v, str)}
    given = {NUM_EXAMPLES: num_examples, **metrics}
    numbers = {name: _to_number(name, own) for name, own in given.items() if name not in texts}
    records: dict[str, Any] = {METRICS: new_record(MetricRecord, numbers)}
    if texts:
        records[TEXTS] = ConfigRecord({**texts})
    if arrays is not None:
        records[ARRAYS] = to_record(arrays, message.content.get(ARRAYS, ()))
    return Message(RecordDict(records), reply_to=message)


def _to_number(name: object, value: Any) -> Any:
    """Return a metric as a record has it, or raise a TypeError."""
    if isinstance(name, str) and not isinstance(value, _TEXTS):
        try:
            if isinstance(value, list):
                return [float(one) for one in value]
            return int(value) if isinstance(value, int) else float(value)
        except (TypeError, ValueError):
            pass
    raise TypeError(
        "metrics must be numbers, lists of numbers, or texts, with names, got "
        f"{name!r}: {brief(repr(value))}."
    )


def texts_in(content: RecordDict) -> dict[str, str]:
    """Return a reply's metrics that are texts: in Flower, a ConfigRecord of any name has them."""
    records = [record for record in content.values() if isinstance(record, ConfigRecord)]
    pairs = [pair for record in records for pair in record.items()]
    return {n: v for n, v in pairs if isinstance(v, str) and not n.startswith(OURS)}


def numbers_in(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are numbers."""
    return {name: value for name, value in metrics.items() if isinstance(value, _NUMBERS)}


def with_loss(loss: float, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return an evaluation's metrics, the loss first; an app's own NaN is left out, and marked."""
    if isnan(loss):
        known = {name: v for name, v in metrics.items() if name not in LOSSES or v == v}
        return known | ({NO_LOSS: 1} if len(known) < len(metrics) else {})
    return {"loss": loss} | {**metrics, "loss": loss}


def route_of(message: Message) -> tuple[str, str]:
    """Return what a message asks for, "train", "evaluate" or "query", and the action of that.

    As Flower routes it: "train.default" goes to the handler of "train". All that guards a handler
    reads the type here.

    Raises
    ------
    ValueError
        If the type is no such one.
    """
    given = message.metadata.message_type
    kind, dot, action = given.partition(".")
    if kind not in _KINDS or (dot and not action.isidentifier()):
        raise ValueError(
            f"the message's type must be one of {', '.join(_KINDS)}, alone or with an action, got "
            f"{brief_repr(given)}."
        )
    return kind, action or DEFAULT


def directed(reply: Message | None, message: Message) -> Message | None:
    """Return ``reply`` as a reply to ``message``, which it may not be behind a mod.

    Flower's own mods, where they refuse a reply, return an error that answers the reply instead of
    the request. No engine can deliver that, and the server would wait for nothing.
    """
    asked = message.metadata.message_id
    if reply is None or reply.metadata.reply_to_message_id == asked:
        return reply
    if reply.has_error():
        return Message(reply.error, reply_to=message)
    reason = "A mod must return a reply to the message that it was given, got another message."
    return Message(Error(CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def read_partition(value: object) -> int:
    """Return a partition id, which simulations may give as a text.

    Raises
    ------
    ValueError
        If it is no integer from 0 to 2**63 - 1, nor the digits of one.
    """
    digits = isinstance(value, str) and value.isascii() and value.isdigit()
    partition = int(str(value)) if digits else value
    if type(partition) is int and 0 <= partition <= LARGEST_INT:
        return partition
    raise ValueError(f"{PARTITION_ID} must be an integer from 0 to 2**63 - 1, got {value!r}.")


def named_partition(name: str) -> int:
    """Return the partition id of a client that has a name alone."""
    return zlib.crc32(name.encode())


def error_of(message: Message) -> str | None:
    """Return the error that a message is, in one short line; None if it is none.

    The line is the exception's type and text, as far as the engine says them: SuperNodes quote the
    text behind the type, Ray behind ``Message: ``, with a traceback before it.
    """
    if not message.has_error():
        return None
    reason = (message.error.reason or "")[-_READ_OF_REASON:].strip()
    # Users should read what their client says, not the engine's way of quoting it.
    traceback, marker, text = reason.rpartition(_SAID)
    quoted = 1
    if not marker:
        text, quoted = _CLASS.subn(r"\1: ", reason)
    lines = _message_lines(text.removesuffix("'>") if quoted else text)
    first, *more = lines or ["no reason given"]
    typed = [line for line in traceback.splitlines() if line.endswith(f": {first}")]
    why = " ".join(line.strip() for line in (*(typed[-1:] or [first]), *more))
    return f"error {message.error.code}: {brief(why)}"


def _message_lines(text: str) -> list[str]:
    """Return the first line of an exception's text, which follows a traceback, and its indented."""
    *before, text = _FRAME.split(text)
    lines = [line for line in text.splitlines() if line.strip()]
    if before:  # the source of the last frame
        lines = [*dropwhile(_indented, lines)]
    return [*lines[:1], *takewhile(_indented, lines[1:])]


def _indented(line: str) -> bool:
    return line[0].isspace()


def brief(text: str) -> str:
    """Return a client's words as a log can show them: printable, and not too many."""
    return printable(text, _LONGEST_REASON)


def printable(text: str, length: int) -> str:
    """Return the printable characters among the first ``length`` of a text.

    No control character, which a terminal would obey, and none that reverses what follows it.
    """
    return "".join(filter(str.isprintable, text[:length]))


def check_metrics(metrics: Mapping[str, Any]) -> None:
    """Raise a ValueError if a reply's metrics are too many, or a name cannot be shown as it is.

    A value may be a list.
    """
    count = len(metrics)
    for value in metrics.values():
        if isinstance(value, list):
            count += len(value) - 1
    if count > _MOST_METRICS:
        raise ValueError(f"metrics must hold at most {_MOST_METRICS} numbers, got {count}")
    check_names("metrics", tuple(metrics))


@lru_cache(maxsize=64)  # all clients of a round use the same names; what raises is not kept
def check_names(what: str, names: tuple[str, ...]) -> None:
    """Raise a ValueError if a name from a client is too long, or not printable."""
    for name in names:
        if len(name) > _LONGEST_NAME:
            raise ValueError(
                f"names of {what} must have at most {_LONGEST_NAME} characters, got {len(name)}: "
                f"{printable(name, 20)!r}..."
            )
        if not name.isprintable():
            raise ValueError(f"names of {what} must be printable, got {name!r}")


def read_reply(
    content: RecordDict,
    limits: Limits = _ANY,
    *,
    with_arrays: bool = True,
    names: Collection[str] = (),
) -> Reply:
    """Return what a reply says, by the rules for the replies of all protocols.

    Parameters
    ----------
    content : RecordDict
        The reply's records.
    limits : Limits
        The limits of a reply.
    with_arrays : bool, default True
        Whether it must have arrays; without, none are read.
    names : collection of str
        The names of the request's arrays, whose order those of the reply are brought to.

    Raises
    ------
    ValueError
        If a record is missing, metrics break a rule of `check_metrics`, arrays exceed the limits
        (found before any is copied), an array has another dtype than is expected, a number is not
        finite or too large (but see `Limits`), there are no examples, or more of them than can be
        counted.
    """
    metrics = content.get(METRICS)
    if not isinstance(metrics, MetricRecord) or NUM_EXAMPLES not in metrics:
        raise ValueError(f"no MetricRecord {METRICS!r} with {NUM_EXAMPLES!r}")
    if not with_arrays:
        limits = limits._replace(expect=())
    record = content.get(ARRAYS) if with_arrays else ArrayRecord()
    if not isinstance(record, ArrayRecord):
        raise ValueError(f"no ArrayRecord {ARRAYS!r}")
    arrays = in_order(record, names)
    given: dict[str, Any] = {**texts_in(content), **metrics}
    return read_parts([one.data for one in arrays.values()], given, limits, tuple(arrays))


def read_parts(
    files: Sequence[bytes],
    metrics: Mapping[str, Any],
    limits: Limits = _ANY,
    names: tuple[str, ...] = (),
) -> Reply:
    """Return what a reply says that has no records, as `read_reply` does.

    Parameters
    ----------
    files : sequence of bytes
        Its arrays, as ``.npy`` files.
    metrics : mapping of str to any
        Its metrics, with the number of examples.
    limits : Limits
        The limits of a reply.
    names : tuple of str
        The arrays' names, where they have any.
    """
    check_metrics(metrics)
    if len(files) > _MOST_ARRAYS:
        raise ValueError(f"too many arrays: at most {_MOST_ARRAYS} are read, got {len(files)}")
    size = sum(map(len, files))
    if size > limits.n_bytes:
        raise ValueError(f"too large: {size} bytes of arrays, at most {limits.n_bytes} are read")
    views = [view_file(data)[0] for data in files]
    count = sum(view.size for view in views)
    if limits.max_values is not None and count > limits.max_values:
        raise ValueError(f"too many numbers: {limits.max_values} are asked for, {count} came")
    arrays = views if limits.expect else _numbers(views, limits)
    if limits.expect:
        _check_forms(views, limits.expect)
    num_examples = metrics[NUM_EXAMPLES]
    if not isinstance(num_examples, _NUMBERS) or not 1 <= num_examples <= _MOST_EXAMPLES:
        raise ValueError(f"{NUM_EXAMPLES} is {num_examples}")
    numbers = {name: float(v) for name, v in metrics.items() if isinstance(v, _NUMBERS)}
    del numbers[NUM_EXAMPLES]
    others = {
        name: brief(value) if isinstance(value, str) else [*map(float, value)]
        for name, value in metrics.items()
        if isinstance(value, list | str)
    }
    listed = ((name, one) for name, own in others.items() if isinstance(own, list) for one in own)
    for name, value in (*numbers.items(), *listed):
        if not isfinite(value) or abs(value) > limits.magnitude:
            raise ValueError(f"metric {name} is {value}: {DIVERGED}")
    return Reply(arrays, int(num_examples), numbers, names, others)


def _check_forms(arrays: Sequence[Matrix], expected: Sequence[Matrix]) -> None:
    """Accept arrays of a model's shapes and dtypes, in its order."""
    found, forms = ([(a.shape, a.dtype) for a in some] for some in (arrays, expected))
    if found != forms:
        raise ValueError(f"wrong shapes or dtypes: {forms} are asked for, got {found}")


def _numbers(arrays: list[Matrix], limits: Limits) -> list[Matrix]:
    """Return arrays that are no model, checked."""
    known = FLOATS if limits.expect is not None else DTYPES
    for position, array in enumerate(arrays):
        if array.dtype not in known:
            raise ValueError(f"array {position} has dtype {array.dtype}, not float32 or float64")
        if array.dtype.kind != "f":
            continue
        # The sum of squares is finite only if all are, and bounds each; beyond that all are seen.
        squares = float(np.vdot(array, array))
        if not isfinite(squares) and not np.isfinite(array).all():
            raise ValueError(f"array {position} has NaN or infinite values")
        largest = limits.magnitude
        if squares > largest * largest and float(np.abs(array).max()) > largest:
            raise ValueError(f"array {position} has numbers beyond {limits.magnitude:g}")
    return arrays


def read_request(
    message: Message, *, writable: bool = True
) -> tuple[list[Matrix], dict[str, Scalar]]:
    """Return a request's arrays, copies if a user's client may write to them, and its config."""
    record, config = message.content[ARRAYS], message.content[CONFIG]
    if not isinstance(record, ArrayRecord) or not isinstance(config, ConfigRecord):
        raise ValueError(
            f"a request must carry an ArrayRecord {ARRAYS!r} and a ConfigRecord {CONFIG!r}"
        )
    read = decode if writable else view
    return [read(array) for array in record.values()], scalars(config)


def left_out_of(config: Mapping[str, Any]) -> list[str]:
    """Return the names of the arrays that a request leaves out, or raise a ValueError."""
    text = str(config.get(LEFT_OUT, "[]"))
    with suppress(ValueError, RecursionError):
        names = json.loads(text)
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return names
    raise ValueError(f"{LEFT_OUT} must be a list of names as JSON, got {brief_repr(text)}.")


def arrays_of(message: Message) -> ArrayRecord:
    """Return a message's arrays, or raise a ValueError."""
    record = message.content.get(ARRAYS)
    if isinstance(record, ArrayRecord):
        return record
    raise ValueError(f"a message must have an ArrayRecord {ARRAYS!r}, got {[*message.content]}.")


def config_of(message: Message) -> Mapping[str, Any]:
    """Return a request's config; nothing where it has none."""
    record = message.content.get(CONFIG)
    return record if isinstance(record, ConfigRecord) else {}


def scalars(record: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return what is no list in a record of a config or of metrics."""
    return {key: value for key, value in record.items() if not isinstance(value, list)}


def read_properties(answer: Message) -> Mapping[str, Any]:
    """Return what a node says of itself."""
    record = answer.content.get(CONFIG)
    if not isinstance(record, ConfigRecord):
        raise ValueError(f"no ConfigRecord {CONFIG!r}")
    return record
