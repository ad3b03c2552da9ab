"""Parts of a strategy: what is the same for every algorithm, and changes what travels.

An algorithm is a generator of requests, and says nothing of private arrays or of how messages
travel. These are parts: values that a strategy lists, and that the driver applies to every request
in order, and to every reply in reverse. A part has both halves, the server's and the client's:

==============================  ==================================================================
server                          client
==============================  ==================================================================
`Part.to_client`: a request's   `Part.receive`: the request's arrays, as the step is to see them
arrays
`Part.from_client`: a reply,    `Part.send`: the arrays that leave the client
in the algorithm's terms
==============================  ==================================================================

A request names the user's own parts and their options; a client finds them among those of
``client_app(parts=[...])``. No part knows an algorithm, and no algorithm a part.

Withholding and sealing change what travels, too, and are no parts. Withholding
(`flwr_perdl.privacy.withholding`) decides before a sum is formed, by the terms of single samples,
which no message has. Sealing (`flwr_perdl.privacy.sealed`) makes one message per neighbor, under a
key of each pair that an exchange of its own announces.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from flwr.app import Array

from flwr_perdl.core.checks import Matrix, brief_repr, check_kind, check_list
from flwr_perdl.protocol.records import Kept, Reply, Scalar

if TYPE_CHECKING:
    from flwr_perdl.protocol.request import Channel, Combine, Request, Summed

#: The ranks of parts: in this order they are applied.
PRIVATE_RANK, OWN_RANK, TRANSPORT_RANK, SUMS_RANK = range(4)
#: The key of a request's config with the user's own parts, as JSON: names and options, in order.
PARTS = "perdl.parts"
Arrays = dict[str, Array]


class Asked(NamedTuple):
    """What is asked in an exchange.

    Attributes
    ----------
    trains : bool
        Whether for training; else for an evaluation.
    names : sequence of str
        The names of the arrays of one model, as the algorithm has them.
    request : Request or None
        The algorithm's request; None after the last one.
    """

    trains: bool
    names: Sequence[str]
    request: Request | None

    @property
    def models(self) -> Combine | None:
        """What the replies to the request are models for, None if they are none or not seen."""
        return None if self.request is None else self.request.models


@dataclass(frozen=True, eq=False)
class Part:
    """What a strategy does to all messages, whatever its algorithm is.

    A subclass is a frozen dataclass whose fields are its options, and overrides what it changes.

    Attributes
    ----------
    name : str
        What requests call it.
    rank : int
        Parts are applied in this order: private arrays 0, the user's own 1, transport 2, sums 3.

    Examples
    --------
    Clients whose updates have norm 1 at most, whatever is learned:

    >>> from dataclasses import dataclass
    >>> import numpy as np
    >>> from flwr.app import Array
    >>> from flwr_perdl.strategies import ClusteredFedAvg, Part
    >>> @dataclass(frozen=True, eq=False)
    ... class Clip(Part):
    ...     name = "clip"
    ...     norm: float = 1.0
    ...     def send(self, arrays, start, kept):
    ...         return {name: self.clipped(array.numpy()) for name, array in arrays.items()}
    ...     def clipped(self, array):
    ...         return Array(array / max(np.linalg.norm(array) / self.norm, 1))
    >>> strategy = ClusteredFedAvg(2, parts=[Clip(2.0)])
    """

    name: ClassVar[str] = ""
    rank: ClassVar[int] = OWN_RANK

    # At the server --------------------------------------------------------------------------

    def log_begin(self, *, evaluates: bool) -> None:
        """Log what users should know of a run with this part.

        Parameters
        ----------
        evaluates : bool
            Whether the server evaluates the model.
        """

    def begin(
        self, names: Sequence[str], model: list[Matrix], kept: Kept
    ) -> tuple[Part, Sequence[str], list[Matrix]]:
        """Return the part of a run, and what the algorithm sees of the initial model.

        Parameters
        ----------
        names : sequence of str
            The names of a model's arrays.
        model : list of ndarray
            Its arrays, those of several models one after the other; none where a run is resumed.
        kept : dict of str to ndarray
            What the part keeps in checkpoints, empty at first: to be changed in place.

        Returns
        -------
        part : Part
        names : sequence of str
        model : list of ndarray
        """
        return self, names, model

    def whole(self, model: Sequence[Matrix]) -> list[Matrix]:
        """Return an algorithm's model, or several, with all arrays of the initial one.

        Parameters
        ----------
        model : sequence of ndarray
            The algorithm's arrays.

        Returns
        -------
        list of ndarray
        """
        return list(model)

    def lift(self, model: Sequence[Matrix]) -> list[Matrix]:
        """Return an algorithm's model as evaluations and the result see it.

        Parameters
        ----------
        model : sequence of ndarray

        Returns
        -------
        list of ndarray
        """
        return list(model)

    @property
    def sums_only(self) -> bool:
        """Whether nothing but sums may leave the clients: no metrics and no evaluations."""
        return False

    def channel(self, summed: Summed) -> Channel | None:
        """Return how the replies to a request reach the server; None: as they are.

        Parameters
        ----------
        summed : Summed
            What of them is summed, where the server is to get no single one.

        Returns
        -------
        Channel or None
        """
        return None

    def case(self, partition: int) -> Hashable:
        """Return in what `to_client` depends on the client: one message is made for each.

        Parameters
        ----------
        partition : int

        Returns
        -------
        hashable
        """
        return None

    def to_client(
        self, partition: int, arrays: Arrays, asked: Asked
    ) -> tuple[Arrays, dict[str, Scalar]]:
        """Return a request's arrays as they are sent, and what its config says besides.

        Parameters
        ----------
        partition : int
            The client, or one of several in the same `case`.
        arrays : dict of str to Array
            The request's arrays.
        asked : Asked

        Returns
        -------
        arrays : dict of str to Array
        config : dict of str to scalar
        """
        return arrays, {}

    def recodes(self, asked: Asked) -> bool:
        """Whether replies come in another form than the algorithm's, to be checked afterwards.

        Parameters
        ----------
        asked : Asked

        Returns
        -------
        bool
        """
        return False

    def from_client(self, reply: Reply, asked: Asked) -> Reply:
        """Return a reply to training in the algorithm's terms, or raise a ValueError.

        Parameters
        ----------
        reply : Reply
        asked : Asked

        Returns
        -------
        Reply
        """
        return reply

    def conclude(self, asked: Collection[int], good: Collection[int]) -> None:
        """Take note of who has trained, of those who were asked, before the algorithm goes on.

        Parameters
        ----------
        asked, good : collection of int
            Partitions.
        """

    # At a client ------------------------------------------------------------------------------

    def receive(self, arrays: Arrays) -> Arrays:
        """Return a request's arrays as the step sees them.

        Parameters
        ----------
        arrays : dict of str to Array

        Returns
        -------
        dict of str to Array
        """
        return arrays

    def send(self, arrays: Arrays, start: Mapping[str, Array], kept: Kept) -> Arrays:
        """Return the arrays of a reply to training as they leave the client.

        Parameters
        ----------
        arrays : dict of str to Array
            The step's, of floats alone: integers, booleans and bytes leave as they are.
        start : mapping of str to Array
            What its training began with, where that is known.
        kept : dict of str to ndarray
            What the part keeps at the client, saved with the step: to be changed in place.

        Returns
        -------
        dict of str to Array
        """
        return arrays

    @property
    def options(self) -> dict[str, Any]:
        """The fields by name, as a request says them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def unstack(arrays: Sequence[Matrix], n_models: int) -> list[Matrix]:
    """Return so many models, one after the other, of arrays that are stacks of theirs."""
    for array in arrays:
        if not array.ndim or len(array) != n_models:
            raise ValueError(
                f"initial_arrays must be {n_models} models, stacked along a first axis, with "
                f'start="given", got an array of shape {array.shape}.'
            )
    return [array[j] for j in range(n_models) for array in arrays]


def split(arrays: Sequence[Matrix], size: int) -> list[Sequence[Matrix]]:
    """Return the models in a list of arrays, each of so many; one that has none is empty."""
    if not size:
        return [()]
    return [arrays[at : at + size] for at in range(0, len(arrays), size)]


def in_turn(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Return parts in the order in which they are applied, or raise an error.

    Raises
    ------
    TypeError, ValueError
        If one is no part, or has no name, or two have one.
    """
    wanted = "a list of Part"
    listed = [check_kind("parts", one, Part, wanted) for one in check_list("parts", parts)]
    names = [part.name for part in listed]
    if "" in names or len({*names}) < len(names):
        raise ValueError(f"parts must have different names, got {names}.")
    return tuple(sorted(listed, key=lambda part: part.rank))


def classes_in(places: object) -> dict[str, type[Part]]:
    """Return the parts in modules and among classes, which are a list of both, by name."""
    found: dict[str, type[Part]] = {}
    for place in check_list("parts", places):
        listed = vars(place).values() if isinstance(place, ModuleType) else [place]
        classes = [one for one in listed if isinstance(one, type) and issubclass(one, Part)]
        own = [one for one in classes if one.name]
        if not own:
            raise ValueError(
                f"parts must be subclasses of Part, or modules of some, got {place!r}."
            )
        found |= {one.name: one for one in own}
    return found


def own_parts(parts: Iterable[Part]) -> dict[str, Scalar]:
    """Return what a request says of the user's own parts."""
    own = {part.name: part.options for part in parts if part.rank == OWN_RANK}
    return {PARTS: json.dumps(own)} if own else {}


def parts_of(config: Mapping[str, Any], known: Mapping[str, type[Part]]) -> list[Part]:
    """Return the user's own parts that a request names, of those that a client knows.

    Raises
    ------
    ValueError
        If it names another one, or options that break its rules.
    """
    text = config[PARTS]
    try:
        named = {name: dict(options) for name, options in json.loads(str(text)).items()}
    except (AttributeError, TypeError, ValueError, RecursionError):
        raise ValueError(
            f"{PARTS} must be options by part, as JSON, got {brief_repr(text)}."
        ) from None
    for name in named:
        if name not in known:
            raise ValueError(
                f"{PARTS} must be parts that this client knows, got {name[:100]!r}: a part of your "
                "own is client_app(parts=[...])."
            )
    try:
        return [known[name](**options) for name, options in named.items()]
    except TypeError as error:
        raise ValueError(f"{PARTS} must have options of its parts, got {error}.") from None
