"""A Flower Grid in this process: it calls the ClientApp directly, without Ray or a SuperLink."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from logging import DEBUG, WARNING
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    Context,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp

from flwr_perdl.clients.app import NumPyClientApp
from flwr_perdl.core.checks import Matrix, check_count, check_function, check_kind
from flwr_perdl.core.repr import ShownAsCalled
from flwr_perdl.core.threads import in_threads
from flwr_perdl.protocol import compat
from flwr_perdl.protocol.compat import CLIENT_APP_RAISED_EXCEPTION, log
from flwr_perdl.protocol.records import ANSWERED, PARTITION_ID, directed
from flwr_perdl.protocol.roster import LocalGrid

if TYPE_CHECKING:
    from flwr_perdl.clients._states import NodeStates

RUN_ID, _FIRST_NODE = 1, 1000
#: More nodes than this, each with a context of its own, do not fit into a process.
_MOST_NODES = 10_000_000

#: What may go wrong with one message: ``(partition, message) -> fault or None``.
MessageFault = Callable[[int, Message], str | None]
#: Most of what records are made of, none of which can change.
_FIXED = {bool, bytes, float, int, str, tuple, FunctionType}
FAULTS = ("error", "silence", "nan", "shape", "empty")


class InProcessGrid(ShownAsCalled, LocalGrid):
    """Virtual nodes in this process, without Ray or a SuperLink.

    Nodes run one after the other, or on several cores if their clients compute for long and only
    with this library's code; the replies are the same bits. Records are copied both ways, as on a
    wire. An exception in the ClientApp becomes an error reply and leaves the client's state
    unchanged; ``FLWR_LOG_LEVEL=DEBUG`` and ``start(..., verbose=2)`` log its traceback. The timeout
    of `send_and_receive` applies to each node separately, since nodes of a network compute in
    parallel.

    Parameters
    ----------
    app : ClientApp
        The app of every node.
    num_nodes : int
        Number of nodes; node i has ``partition-id`` i.
    run_config : mapping, optional
        Every node's ``context.run_config``.
    node_config : callable, optional
        ``partition -> mapping``: further node config, such as ``state-dir``.
    faults : callable, optional
        For tests: ``(partition, message) -> None`` or one of ``FAULTS``: the node replies with an
        error ("error"), not at all ("silence"), with NaN ("nan"), with an array that lacks a row
        ("shape"), or without records ("empty").
    state_dir : str or Path, optional
        Folder for the arrays of all nodes' ``context.state``, in one file ``nodes/nodes.npz``, from
        which a later grid with as many nodes continues. With a folder of its own (`private_store`)
        a node keeps files there as well, which with thousands of small nodes takes most of the
        time.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.clients import RegressionClient, client_app
    >>> from flwr_perdl.simulations import InProcessGrid
    >>> from flwr_perdl.strategies import FedX
    >>> X = np.random.default_rng(0).standard_normal((6, 10, 2))
    >>> def make_client(context):
    ...     own = X[context.node_config["partition-id"]]
    ...     return RegressionClient(own, own @ [2.0, -1.0], context)
    >>> grid = InProcessGrid(client_app(make_client), 6)
    >>> result = FedX(1).start(grid, num_rounds=20)
    >>> len(grid.contexts)
    6
    """

    def __init__(
        self,
        app: ClientApp,
        num_nodes: int,
        *,
        run_config: Mapping[str, Any] | None = None,
        node_config: Callable[[int], Mapping[str, Any]] | None = None,
        faults: MessageFault | None = None,
        state_dir: str | Path | None = None,
    ) -> None:
        check_kind("app", app, ClientApp, "a ClientApp")
        check_count("num_nodes", num_nodes, 1, _MOST_NODES)
        check_function("node_config", node_config)
        check_function("faults", faults)
        check_kind("run_config", run_config, (Mapping, type(None)), "a mapping or None")
        check_kind("state_dir", state_dir, (str, Path, type(None)), "a path or None")
        self.app = app
        self.faults = faults
        self.contexts = {
            _FIRST_NODE + partition: Context(
                run_id=RUN_ID,
                node_id=_FIRST_NODE + partition,
                node_config={
                    PARTITION_ID: partition,
                    "num-partitions": num_nodes,
                    **(node_config(partition) if node_config else {}),
                },
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for partition in range(num_nodes)
        }
        self._states: NodeStates | None = None
        if state_dir is not None:
            from flwr_perdl.clients._states import NodeStates  # loads what clients need

            self._states = NodeStates(Path(state_dir))
            self._states.restore(list(self.contexts.values()))
        self._run = compat.empty_run(RUN_ID)
        self._replies: dict[str, Message] = {}
        self._timeout = float("inf")
        self._count = 0
        self._on_reply: Callable[[int, int], object] = lambda done, asked: None
        compat.become_server(RUN_ID)

    def local_atoms(self) -> list[Matrix]:
        """Return every client's own atoms, by partition: see `flwr_perdl.clients.local_atoms`.

        They are read where the clients keep them, in this process; no message contains them.

        Returns
        -------
        list of ndarray of shape (n_local, n_features)
        """
        from flwr_perdl.clients import local_atoms  # loads what clients need

        return [local_atoms(context) for context in self.contexts.values()]

    def set_run(self, run: Any) -> None:
        """Set the run; ids and runs are both taken, as Flower's versions hand in either."""
        self._run = compat.empty_run(run) if isinstance(run, int) else run

    def begin_run(self, on_reply: Callable[[int, int], object]) -> None:
        """Begin a run of Flower: the clients answer as many requests as in their first one.

        A strategy's ``start`` calls it. The clients' data lie in the caller's process, from whom
        their limits on requests (`DictionaryClient`'s ``max_runs``) hide nothing; other grids are
        one run of Flower each. Everything else that the clients keep stays.

        Parameters
        ----------
        on_reply : callable
            Called with the numbers of nodes that have replied in an exchange, and that are asked.
        """
        self._on_reply = on_reply
        for context in self.contexts.values():
            context.state.pop(ANSWERED, None)

    @property
    def run(self) -> Any:
        """The run that this grid operates in."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a message to a node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Call the ClientApp, and return the messages' ids; the replies wait to be pulled.

        What clients keep on disk is there when this returns, with one sync for all of them.
        """
        pushed = list(messages)
        asked: list[tuple[Message, str | None]] = []
        for message in pushed:
            self._count += 1
            compat.stamp(message, RUN_ID, f"message-{self._count}")
            node = message.metadata.dst_node_id
            if node in self.contexts:
                asked.append((message, self._fault(message)))
            else:
                log(WARNING, "There is no node %d.", node)
        for done, ((message, _), reply) in enumerate(
            zip(asked, self._call_each(asked), strict=True), start=1
        ):
            if reply is not None:
                self._replies[message.metadata.message_id] = reply
            self._on_reply(done, len(asked))
        trained = any(one.metadata.message_type == MessageType.TRAIN for one in pushed)
        if self._states is not None and trained:
            self._states.save(list(self.contexts.values()))
        return [message.metadata.message_id for message in pushed]

    def _call_each(self, asked: list[tuple[Message, str | None]]) -> Iterator[Message | None]:
        """Yield the nodes' replies; clients that allow it are called several at a time."""
        # Two messages to one node share its state: they are answered one after the other.
        nodes = {message.metadata.dst_node_id for message, _ in asked}
        if len(nodes) < max(2, len(asked)) or not isinstance(self.app, NumPyClientApp):
            yield from (self._call(*one) for one in asked)
            return
        calls = (self._made(self.app, *one) for one in asked)
        for call, in_thread in calls:
            if in_thread:
                yield from in_threads(_answer, map(_here, chain([(call, True)], calls)))
            else:
                yield call()

    def _made(
        self, app: NumPyClientApp, message: Message, fault: str | None
    ) -> tuple[Callable[[], Message | None], bool]:
        """Make a node's client in this thread; return what calls it, and if another thread may."""
        try:
            client = None if fault else app.made(self._context(message))
        except Exception:  # its own call says why
            client = None

        def call() -> Message | None:
            return self._call(message, fault, partial(app, client=client))

        return call, getattr(client, "allows_threads", False)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to these messages, each once."""
        wanted = (self._replies.pop(identifier, None) for identifier in message_ids)
        return [reply for reply in wanted if reply is not None]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push the messages and return the replies that come in time (``timeout``: each node's)."""
        self._timeout = float("inf") if timeout is None else timeout
        try:
            return self.pull_messages(self.push_messages(messages))
        finally:
            self._timeout = float("inf")

    def _fault(self, message: Message) -> str | None:
        """Return what is to go wrong with this message."""
        if self.faults is None:
            return None
        fault = self.faults(int(self._context(message).node_config[PARTITION_ID]), message)
        if fault is not None and fault not in FAULTS:
            raise ValueError(f"a fault must be one of {FAULTS}, got {fault!r}.")
        return fault

    def _context(self, message: Message) -> Context:
        return self.contexts[message.metadata.dst_node_id]

    def _call(
        self, message: Message, fault: str | None, app: Callable[..., Message] | None = None
    ) -> Message | None:
        """Return the reply of the node that ``message`` is for."""
        context, began = self._context(message), time.monotonic()
        if fault == "silence":
            return None
        # As a SuperNode does: what a client that failed wrote into its state is not kept.
        kept = _copy(context.state)
        try:
            if fault == "error":
                raise RuntimeError("a fault was injected")
            # Clients of one round share a message's content; on a network each has its own.
            received = compat.like(message, _copy(message.content))
            reply = directed((app or self.app)(received, context), received)
            if time.monotonic() - began >= self._timeout:
                return None
            if reply is None or reply.has_error():
                return reply
            reply.content = _spoil(_copy(reply.content), fault)
        except (Exception, SystemExit) as error:
            context.state = kept
            partition = context.node_config[PARTITION_ID]
            log(DEBUG, "Client %s failed.", partition, exc_info=error)
            reason = f"{type(error).__name__}: {error}"
            reply = Message(Error(CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
        return reply


def _here(item: tuple[Callable[[], Message | None], bool]) -> Callable[[], Message | None]:
    """Return a call for another thread, or the reply of one that must be made in this one."""
    call, in_thread = item
    if in_thread:
        return call
    reply = call()
    return lambda: reply


def _answer(call: Callable[[], Message | None]) -> Message | None:
    return call()


def _copy(value: Any) -> Any:
    """Return a copy of records in which only what cannot change is shared, as the arrays' bytes.

    Flower's own copy of a record shares its arrays, and other ones are put in with many checks.
    """
    if isinstance(value, dict):
        return {k: one if type(one) in _FIXED else _copy(one) for k, one in value.items()}
    if isinstance(value, list):  # of numbers or texts
        return value[:]
    if not isinstance(value, (Array, Mapping)):
        return value
    new = object.__new__(type(value))
    vars(new).update(_copy(vars(value)))
    return new


def _spoil(content: RecordDict, fault: str | None) -> RecordDict:
    """Return a reply's content with an injected fault in it."""
    if fault is None:
        return content
    if fault == "empty":
        return RecordDict({"metrics": MetricRecord()})
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            arrays = record.to_numpy_ndarrays()
            if fault == "nan":
                kinds = [None if array.dtype.kind == "f" else float for array in arrays]
                arrays = [
                    np.full_like(a, np.nan, kind) for a, kind in zip(arrays, kinds, strict=True)
                ]
            else:
                arrays = [array[1:] for array in arrays]
            content[name] = ArrayRecord(arrays)
    return content
