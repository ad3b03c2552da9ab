"""The names of records and keys in messages, defined once, and the way between records and lists.

Requests carry an ArrayRecord ``"arrays"`` and a ConfigRecord ``"config"``; replies an ArrayRecord
``"arrays"`` and a MetricRecord ``"metrics"`` with ``"num-examples"``: what Flower's FedAvg uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from flwr_perdl._checks import Matrix

Scalar = bool | bytes | float | int | str

ARRAYS = "arrays"
CONFIG = "config"
METRICS = "metrics"
NUM_EXAMPLES = "num-examples"

#: Which step of a protocol a request asks for.
STEP = "perdl.step"
#: The communication round; Flower's own strategies use this name.
ROUND = "server-round"
#: The run's one seed.
SEED = "perdl.seed"
#: A token of the run: private state of another run is not taken up.
RUN = "perdl.run"

#: What a client says of itself when it is asked who it is.
PARTITION_ID = "partition-id"
NAME = "name"


class Reply(NamedTuple):
    """One client's good reply.

    Attributes
    ----------
    arrays : list of ndarray
        What the client sent; finite float arrays.
    num_examples : int
        Number of samples behind it.
    metrics : dict of str to float
        The client's metrics.
    """

    arrays: list[Matrix]
    num_examples: int
    metrics: dict[str, float]


def to_record(arrays: Iterable[Matrix]) -> ArrayRecord:
    """Return the ArrayRecord of a list of arrays (names "0", "1", …, as Flower gives them)."""
    return ArrayRecord([np.ascontiguousarray(array) for array in arrays])


def to_records(lists: Mapping[int, Sequence[Matrix]]) -> dict[int, ArrayRecord]:
    """Return an ArrayRecord per list; an array that several share is serialised once."""
    serialised: dict[int, Array] = {}
    for array in (array for arrays in lists.values() for array in arrays):
        if id(array) not in serialised:
            serialised[id(array)] = Array(np.ascontiguousarray(array))
    return {
        key: ArrayRecord({str(i): serialised[id(array)] for i, array in enumerate(arrays)})
        for key, arrays in lists.items()
    }


def to_arrays(record: ArrayRecord) -> list[Matrix]:
    """Return an ArrayRecord's arrays in the order in which they were put in."""
    return record.to_numpy_ndarrays()


def reply_to(
    message: Message,
    arrays: Sequence[Matrix] | None,
    num_examples: int,
    metrics: Mapping[str, Scalar],
) -> Message:
    """Return the reply that carries ``arrays`` (none for an evaluation) and ``metrics``."""
    record = MetricRecord({NUM_EXAMPLES: num_examples})
    for name, value in metrics.items():
        if isinstance(value, bytes | str):
            raise TypeError(f"metrics must be numbers, got {name}={value!r}.")
        record[name] = int(value) if isinstance(value, bool | int) else float(value)
    content = RecordDict({METRICS: record})
    if arrays is not None:
        content[ARRAYS] = to_record(arrays)
    return Message(content, reply_to=message)


def read_reply(message: Message, *, with_arrays: bool) -> Reply:
    """Return what a reply says.

    Raises
    ------
    ValueError
        If it is an error, or a record is missing; the message says which.
    """
    if message.has_error():
        reason = (message.error.reason or "no reason given").strip().splitlines()[-1]
        raise ValueError(f"error {message.error.code}: {reason}")
    content = message.content
    metrics = content.get(METRICS)
    if not isinstance(metrics, MetricRecord) or NUM_EXAMPLES not in metrics:
        raise ValueError(f"no MetricRecord {METRICS!r} with {NUM_EXAMPLES!r}")
    arrays: list[Matrix] = []
    if with_arrays:
        record = content.get(ARRAYS)
        if not isinstance(record, ArrayRecord):
            raise ValueError(f"no ArrayRecord {ARRAYS!r}")
        arrays = to_arrays(record)
    numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
    return check_reply(arrays, numbers.pop(NUM_EXAMPLES, float("nan")), numbers)


def check_reply(
    arrays: Sequence[Matrix], num_examples: float, metrics: Mapping[str, Scalar]
) -> Reply:
    """Return the reply made of these parts.

    Raises
    ------
    ValueError
        If an array is not float32 or float64, a number is not finite, or there are no examples.
    """
    for position, array in enumerate(arrays):
        if array.dtype not in (np.float32, np.float64):
            raise ValueError(f"array {position} has dtype {array.dtype}")
        if not np.isfinite(array).all():
            raise ValueError(f"array {position} has NaN or infinite values")
    if not isfinite(num_examples) or num_examples < 1:
        raise ValueError(f"{NUM_EXAMPLES} is {num_examples}")
    numbers = {name: float(v) for name, v in metrics.items() if isinstance(v, int | float)}
    for name, value in numbers.items():
        if not isfinite(value):
            raise ValueError(f"metric {name} is {value}")
    return Reply(list(arrays), int(num_examples), numbers)


def read_request(message: Message) -> tuple[list[Matrix], dict[str, Scalar]]:
    """Return a request's arrays and config."""
    record, config = message.content[ARRAYS], message.content[CONFIG]
    if not isinstance(record, ArrayRecord) or not isinstance(config, ConfigRecord):
        raise ValueError(
            f"a request must carry an ArrayRecord {ARRAYS!r} and a ConfigRecord {CONFIG!r}"
        )
    scalars = {key: value for key, value in config.items() if not isinstance(value, list)}
    return to_arrays(record), scalars
