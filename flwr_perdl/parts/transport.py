"""How a model travels in fewer bytes: in half floats, and of what clients send the largest changes.

==============  ==================================================================================
message         arrays
==============  ==================================================================================
request         with ``transport="float16"`` floats are half floats; the client has them in their
                dtype again before its app sees them
training reply  ``+NAME``: the change of an array of floats from what the client received, with
                float16 in half floats; with ``compression=TopK(...)`` its largest entries, and
                ``@NAME``: their positions. All others as they are
==============  ==================================================================================

The server adds a change to the model that it has in full precision: what the way down has rounded
is in no sum, and steps that are small beside the numbers are not lost. Integers and booleans travel
as they are, and so does, in its own dtype, an array with a number that half floats do not have.

What a client has not sent of a change is added to its next one (error feedback: Stich, Cordonnier,
Jaggi, "Sparsified SGD with memory", NeurIPS 2018; there of gradients, here of the change by a
round's training). The largest are those of each array, one at least, and not of the whole model;
the statistics of batch normalization are sent whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import Array

from flwr_perdl.core.checks import Matrix, brief_repr, check_choice, check_flag
from flwr_perdl.core.models import change, fixed_entries, is_float, is_plain, settled
from flwr_perdl.protocol.compat import log
from flwr_perdl.protocol.part import TRANSPORT_RANK, Arrays, Asked, Part
from flwr_perdl.protocol.records import TRANSPORT, Kept, Reply, Scalar, encode, view

#: The dtype of floats on the wire.
HALF = np.dtype(np.float16)
#: What precedes the name of an array in a reply that is a change, and that are positions.
_CHANGE, _AT = "+", "@"
#: The dtype that half floats stand for, where the config does not say another one.
_USUAL = "float32"
#: Those that they may stand for.
_FULL = ("float16", _USUAL, "float64")


@dataclass(frozen=True)
class Transport(Part):
    """How a message's arrays travel.

    Parameters
    ----------
    half : bool
        Whether as half floats.
    share : float, optional
        The share of the entries that clients send of a change; None: all.
    changes : bool, default False
        Whether the reply is a model, of which changes are sent.
    dtypes : mapping of str to str
        By name, the dtypes that half floats stand for, where they are unusual.
    """

    name, rank = "transport", TRANSPORT_RANK

    half: bool
    share: float | None = None
    changes: bool = False
    dtypes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check what a message says."""
        check_flag("half", self.half)
        check_flag("changes", self.changes)
        if self.share is not None:
            _top(self.share)
        for dtype in self.dtypes.values():
            check_choice("dtypes", dtype, _FULL)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Transport:
        """Return how a message's arrays travel, as its config says."""
        text = str(config[TRANSPORT])
        try:
            return cls(**json.loads(text))
        except (AttributeError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{TRANSPORT} must be JSON as {cls(True, None)}, got {brief_repr(text)}: {error}"
            ) from None

    def __str__(self) -> str:
        """Return it as a config has it."""
        return json.dumps(vars(self))

    # At the server --------------------------------------------------------------------------

    def recodes(self, asked: Asked) -> bool:
        """Whether replies are changes of a model."""
        return asked.trains and asked.models is not None

    def to_client(
        self, partition: int, arrays: Arrays, asked: Asked
    ) -> tuple[Arrays, dict[str, Scalar]]:
        """Return a request's arrays as they are sent, and the unusual dtypes among them."""
        sent, dtypes = Arrays(), dict[str, str]()
        for name, array in arrays.items():
            sent[name] = own = self._halved(name, array)
            if own.dtype == HALF.name and array.dtype != _USUAL:
                dtypes[name] = array.dtype
        return sent, {TRANSPORT: str(replace(self, changes=self.recodes(asked), dtypes=dtypes))}

    def from_client(self, reply: Reply, asked: Asked) -> Reply:
        """Return a reply with the model that came of what it began with, or raise a ValueError."""
        if asked.models is None:
            return reply
        given: dict[str, Any] = dict(zip(reply.names, reply.arrays, strict=True))
        arrays: list[Matrix] = []
        names, starts = asked.names, asked.models.begun(reply)
        pairs = list(zip(names, starts, strict=True))
        wanted = [f"{_CHANGE * is_float(start)}{name}" for name, (start, _) in pairs]
        if {one for one in given if not one.startswith(_AT)} != set(wanted):
            raise ValueError(
                f"arrays must be changes with transport or compression, {wanted[:3]}, …, got "
                f"{[*given][:3]}, …: the client needs client_app"
            )
        for key, (name, (start, fixed)) in zip(wanted, pairs, strict=True):
            array = given[key]
            if is_float(start):
                at = given.get(f"{_AT}{name}")
                if at is not None:
                    array = _top(1).decode((array, at), start.size).reshape(start.shape)
                if array.shape != start.shape:
                    raise ValueError(
                        f"array {key!r} must have shape {start.shape}, got {array.shape}"
                    )
                with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found
                    array = settled(start + array, start, fixed)
            arrays.append(array)
        return reply._replace(arrays=arrays, names=tuple(names))

    # At a client ------------------------------------------------------------------------------

    def receive(self, arrays: Arrays) -> Arrays:
        """Return a request's arrays in their dtypes."""
        full = Arrays()
        for name, array in arrays.items():
            dtype = self.dtypes.get(name, _USUAL)
            same = array.dtype != HALF.name or dtype == HALF.name
            full[name] = array if same or not self.half else encode(view(array).astype(dtype))
        return full

    def send(self, arrays: Arrays, start: Mapping[str, Array], kept: Kept) -> Arrays:
        """Return a model's changes from what it began with; what is not sent is kept."""
        if not self.changes:
            return arrays
        sent = Arrays()
        for name, array in arrays.items():
            begun = view(start[name])
            if not is_float(begun):
                sent[name] = array
                continue
            moved = change(view(array), begun, fixed_entries(begun))
            if not np.isfinite(moved).all():
                raise ValueError(f"array {name!r} must be finite after training, got others.")
            if self.share is None or is_plain(name, begun) or not begun.size:
                sent[_CHANGE + name] = self._halved(name, encode(moved))
                continue
            moved = moved + kept.get(name, 0)
            top = _top(max(self.share, 1 / begun.size))
            found: Any = top.encode(moved.ravel(), np.random.default_rng(0))
            values, at = found
            sent[_CHANGE + name] = values_ = self._halved(name, encode(values))
            sent[_AT + name] = encode(at)
            rest = moved - top.decode((view(values_), at), begun.size).reshape(begun.shape)
            kept[name] = rest.astype(moved.dtype)
        return sent

    def _halved(self, name: str, array: Array) -> Array:
        """Return an array in half floats, or as it is if these do not have all of its numbers."""
        own = view(array)
        sent = halved(name, own) if self.half else own
        return array if sent is own else encode(sent)


def _top(share: float) -> Any:
    """Return a `TopK`, of a room that most clients never load."""
    from flwr_perdl.network.compression import TopK

    return TopK(share)


def halved(name: str, array: Matrix) -> Matrix:
    """Return an array as half floats; as it is if it has no floats, or one that these have not."""
    if not is_float(array) or array.dtype == HALF:
        return array
    with np.errstate(over="ignore"):
        half = array.astype(HALF)
    if np.array_equal(np.isinf(half), np.isinf(array)):
        return half
    text = "array %r has values out of the range of float16: it is sent as %s."
    log(WARNING, text, name, array.dtype)
    return array
