"""All that is not public in Flower, and what differs between its versions: flwr >= 1.26.1, < 2.

Public is what ``flwr.app``, ``flwr.clientapp`` and ``flwr.serverapp`` list in ``__all__``. No other
module of the library imports anything else of Flower, and this one does so where a feature needs it
(the application imports ``flwr.simulation``, for ``--engine ray``):

====================  ===================================  ========================================
name                  from Flower                          without it
====================  ===================================  ========================================
`NumPyClient`         ``flwr.client``; if it is gone,      a base class of our own
                      ``flwr.compat.client``
`secagg_client`,      SecAgg+'s mod and workflow, and      a client that is asked for a secure sum,
`secagg_server`       its words                            or its server, raises an ImportError
`empty_run`           1.26: ``flwr.common``; later         ``InProcessGrid.run`` has a run id alone
                      ``flwr.supercore``
`become_server`       from 1.38: ``TaskIdentity``          before 1.38 messages need no identity
====================  ===================================  ========================================

Private attributes are read or set here alone too: of a message's metadata, which a grid stamps, of
a ClientApp, whose handlers have no public list, of records, and of the grid of Flower's simulation
engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

#: What Flower's ``flwr.common.log`` is; its handler is there once ``flwr.app`` is imported.
log = logging.getLogger("flwr").log
#: Flower's ``ErrorCode`` of a ClientApp that raised an exception; it is part of the wire format.
CLIENT_APP_RAISED_EXCEPTION = 2
#: The record that SecAgg+'s requests and replies carry; it is part of the wire format.
SECAGG = "secaggplus_configs"
#: The record that mods for Flower's older interface read.
FITINS = "fitins.parameters"
#: Seconds between looks for replies in a simulation.
_PULL_INTERVAL = 0.05


class _Client:
    """A client by its methods, for Flower's versions without a ``NumPyClient``."""

    def fit(
        self, parameters: list[NDArray[Any]], config: dict[str, Any]
    ) -> tuple[list[NDArray[Any]], int, dict[str, Any]]:
        """Train, and return the arrays, the number of samples and metrics."""
        raise NotImplementedError("the client must define fit, got none.")

    def evaluate(
        self, parameters: list[NDArray[Any]], config: dict[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        """Evaluate, and return the loss, the number of samples and metrics."""
        raise NotImplementedError("the client must define evaluate, got none.")


def _first(*places: Callable[[], Any]) -> Any:
    """Return what is in the first of these places of Flower that exists, or None."""
    for place in places:
        try:
            return place()
        except (ImportError, AttributeError):
            continue
    return None


if TYPE_CHECKING:
    NumPyClient = _Client
else:
    NumPyClient = (
        _first(
            lambda: import_module("flwr.client").NumPyClient,
            lambda: import_module("flwr.compat.client.numpy_client").NumPyClient,
        )
        or _Client
    )


@contextmanager
def _secagg(part: str) -> Iterator[None]:
    """Raise an ImportError that says so where this Flower does not have this part of SecAgg+."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"a secure sum needs Flower's SecAgg+ ({part}), which this version does not have."
        ) from error


@cache
def secagg_client() -> Any:
    """Return the client's part of SecAgg+: its mod, and the words of its messages."""
    with _secagg("flwr.client.mod.secaggplus_mod"):
        words = import_module("flwr.common.secure_aggregation.secaggplus_constants")
        return SimpleNamespace(
            mod=import_module("flwr.client.mod").secaggplus_mod,
            state=words.RECORD_KEY_STATE,
            Key=words.Key,
            Stage=words.Stage,
        )


@cache
def secagg_server() -> Any:
    """Return the server's part of SecAgg+: its workflow, with all names that this one uses."""
    with _secagg("flwr.server.workflow.SecAggPlusWorkflow"):
        return import_module("flwr.server.workflow.secure_aggregation.secaggplus_workflow")


def empty_run(run_id: int) -> Any:
    """Return a Flower ``Run`` with nothing in it but its id."""
    kind = _first(
        lambda: import_module("flwr.supercore.run").Run,
        lambda: import_module("flwr.common").typing.Run,
    )
    return SimpleNamespace(run_id=run_id) if kind is None else kind.create_empty(run_id)


def become_server(run_id: int) -> None:
    """Let this process create messages outside a Flower run.

    Since 1.38 a message takes its origin from the process-wide TaskIdentity; inside a real run
    that is set already and is left alone.
    """
    identity = _first(lambda: import_module("flwr.supercore.task_identity").TaskIdentity)
    if identity is not None and identity._run_id is None:
        identity.run_id, identity.node_id, identity.task_id = run_id, 1, 1


def stamp(message: Message, run_id: int, message_id: str) -> None:
    """Give ``message`` what Flower's link gives it when it is pushed."""
    message.metadata.__dict__.update(_run_id=run_id, _message_id=message_id, _src_node_id=1)


def like(request: Message, content: RecordDict, kind: str | None = None) -> Message:
    """Return ``request`` with this content, and of this type; a reply to it answers ``request``.

    Since 1.38 a process that is no server, as a client's, can make a request in no other way.
    """
    metadata = request.metadata
    if kind is not None:
        metadata = copy(metadata)
        metadata.message_type = kind
    made: Any = Message  # its signatures do not list metadata
    message: Message = made(content=content, metadata=metadata)
    return message


def has_handler(app: ClientApp, name: str, *, unknown: bool = False) -> bool:
    """Whether a ClientApp has a handler of this name; ``unknown`` where it has no list of them."""
    registered = getattr(app, "_registered_funcs", {})
    return name in registered if registered else unknown


def lifespan_of(app: ClientApp, context: Context) -> AbstractContextManager[Any]:
    """Return what a ClientApp's ``@app.lifespan()`` does around a message."""
    around = getattr(app, "_lifespan", None)
    lifespan: AbstractContextManager[Any] = nullcontext() if around is None else around(context)
    return lifespan


def is_legacy(app: ClientApp) -> bool:
    """Whether a ClientApp was made from a ``client_fn``."""
    return getattr(app, "_call", None) is not None


def mods_of(app: ClientApp) -> list[Any]:
    """Return the mods around all handlers of a ClientApp, outermost first."""
    return list(getattr(app, "_mods", ()))


def older_mod(mod: Any) -> str:
    """Return the name of a mod that is for Flower's older interface; nothing of another one."""
    module = str(getattr(mod, "__module__", ""))
    older = module.startswith(("flwr.client.mod.", "flwr.compat.client.mod."))
    name = getattr(mod, "__name__", type(mod).__name__)
    return f"{name} of flwr.client.mod" if older and not module.endswith("comms_mods") else ""


@contextmanager
def poll_faster(grid: Any) -> Iterator[None]:
    """Have Flower's simulation engine look for replies twenty times a second, instead of ten."""
    interval: float | None = getattr(grid, "pull_interval", None)
    if interval is None:  # a grid of another kind
        yield
        return
    grid.pull_interval = min(interval, _PULL_INTERVAL)
    try:
        yield
    finally:
        grid.pull_interval = interval


Record = TypeVar("Record", ArrayRecord, ConfigRecord, MetricRecord)


def new_array(dtype: str, shape: tuple[int, ...], stype: str, data: bytes) -> Array:
    """Return ``Array(dtype, shape, stype, data)``, without checks of what these are.

    They take 9 us, and those of `new_record` 4 us per array: for a model of 122 arrays, which a
    node makes seven times in a round, as long as to read it four times.
    """
    array = Array.__new__(Array)
    vars(array).update(dtype=dtype, shape=shape, stype=stype, data=data)
    return array


def new_record(kind: type[Record], entries: Mapping[str, Any]) -> Record:
    """Return a record of these arrays themselves, or of scalars, without checks."""
    record = kind()
    vars(record)["_data"].update(entries)
    return record
