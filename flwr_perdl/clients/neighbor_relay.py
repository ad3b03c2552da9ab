"""The client of a distributed algorithm: a node that sends messages through the server."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from logging import WARNING
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from flwr_perdl.clients.dispatch import ProtocolClient, step
from flwr_perdl.core.arrays import Array, count_values
from flwr_perdl.core.checks import check_choice, check_count, check_flag, check_function
from flwr_perdl.core.files import LAST_ROUND
from flwr_perdl.core.models import magnitude
from flwr_perdl.core.npy import pack, pack_arrays, unpack
from flwr_perdl.network.combine import (
    Program,
    check_message,
    check_state,
    reported,
)
from flwr_perdl.network.messages import Delivery, Neighborhood, neighborhood_of
from flwr_perdl.protocol.client_state import PrivateState
from flwr_perdl.protocol.compat import log
from flwr_perdl.protocol.local import Local, StepRequest, StepResult
from flwr_perdl.protocol.records import KEY_FILE, NEW_STATE, OURS, PINNED_KEYS, SEALED, Scalar

#: The protocol, and its steps.
RELAY = "neighbor_relay"
ANNOUNCE = "announce"
EXCHANGE = "exchange"
SHOW = "show"
#: The keys of its requests' config: the algorithm's round, who is asleep in it, and how many rounds
#: old a message that counts may be.
AT = "perdl.at"
ASLEEP = "perdl.asleep"
STALENESS = "perdl.staleness"
#: The metrics of its replies: floats of the message, whether it is not finite, and whose messages
#: were left out.
SENT_FLOATS = f"{OURS}floats"
BROKEN = f"{OURS}broken"
REJECTED = f"{OURS}rejected-"
#: Prefix of the state's fields among what a node shows.
STATE = "state."

SHOWS = ("observed", "state", "nothing")

#: Names of the private arrays besides the program's state, see `RelayState`.
_RUN_KEY = "run-key"
_REST = "rest"


class DiffusionClient(ProtocolClient):
    """A node of a network that runs a distributed algorithm on its own data.

    In every round the node receives its neighbors' messages of the last round, combines them, does
    its work for the next round, and sends its own message, which the server delivers.

    **What leaves the node**: its messages to its neighbors, which the server can read unless they
    are sealed (docs/decentralized-learning.md); their size, and whose messages were left out; after
    every round, in the clear, what the program's ``report`` returns, if it has one, unless the node
    pins its neighbors' keys; at the end whatever ``shows`` says. The algorithm's docstring says
    what messages reveal to neighbors that follow the protocol. A malicious neighbor, or a server
    that can write messages, may learn samples from the answers (docs/security.md).

    Parameters
    ----------
    program : Program
        The algorithm, with the data of this node only. Its ``start`` is called for every message
        and should be cheap.
    context : Context
        The argument of the client's factory: identifies the node (``partition-id``) and keeps its
        state.
    shows : {"observed", "state", "nothing"}, default "observed"
        What the server receives at the end: the result of the program's ``observe``; also the whole
        state; or nothing.
    sealed : bool, default False
        Whether the node refuses to send messages that the server can read. A node that pins its
        neighbors' keys always does.
    on_end : callable, optional
        Called at the node with its last state; more than once if the server asks again.
    state_dir : str or Path, optional
        Folder for the private state; by default see `private_store`.

    Notes
    -----
    With sealed messages the last step ends the run for the node: it deletes its key of the run, in
    memory and on disk, and from then on only repeats what it has shown.

    Node config: ``key-file`` is the file of this node's lasting private key, ``neighbor-keys`` the
    JSON file of its neighbors' public keys, which it then pins.

    Raises
    ------
    ValueError
        If the context does not identify the node, or the keys cannot be read.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.clients import DiffusionClient, client_app
    >>> from flwr_perdl.network import Averaging, Topology
    >>> from flwr_perdl.simulations import InProcessGrid
    >>> from flwr_perdl.strategies import NeighborRelay
    >>> values = {node: np.array([float(node)]) for node in range(4)}
    >>> app = client_app(lambda context: DiffusionClient(Averaging(values), context))
    >>> relay = NeighborRelay(Topology.ring(4), n_rounds=30)
    >>> result = relay.start(InProcessGrid(app, 4))
    >>> relay.outcome.rounds, relay.outcome.floats_sent
    (30, 240.0)
    """

    only = (
        "this strategy needs a DiffusionClient at every node; the strategy DiffusionAveraging "
        "takes ordinary clients"
    )

    def __init__(
        self,
        program: Program[Any],
        context: Context,
        *,
        shows: str = "observed",
        sealed: bool = False,
        on_end: Callable[[Any], Any] | None = None,
        state_dir: str | Path | None = None,
    ) -> None:
        algorithm = f"diffusion, {type(program).__name__}"
        super().__init__(context, algorithm=algorithm, state_dir=state_dir)
        for method in ("start", "message", "combine", "adapt", "observe"):
            if not callable(getattr(program, method, None)):
                raise TypeError(
                    f"program must be a Program with a method {method}, got {program!r}."
                )
        self.program = program
        self.shows = check_choice("shows", shows, SHOWS)
        self.on_end = check_function("on_end", on_end)
        self.node = self.partition
        self._keys = own_keys(context)
        self.sealed = check_flag("sealed", sealed)

    def exchange(self, request: StepRequest, private: PrivateState) -> StepResult:
        """Take in what the neighbors have sent, do the work of a round, and send a message.

        The request's arrays are a ``Delivery`` (``network/messages.py``). The reply is the node's
        message; at the end, what the node shows, packed into one array. Its metrics are
        ``"perdl.floats"`` of the message, ``"perdl.broken": 1`` if it has NaN or infinite values
        (it is not sent), ``"perdl.rejected-K": 1`` for every neighbor K whose message, or card, was
        left out, ``"perdl.state-lost": 1`` if the node found no state after round one, and began
        from its start, and what the program reports about the round before, as far as it is finite.
        """
        turn = Turn(self.node, self._keys, request, private, sealed=self.sealed)
        program, state = self.program, self._state(turn.saved)
        if turn.is_new:
            # Combination comes first: the messages of the last round have only now been delivered.
            if turn.pending:
                inbox = turn.received(self._message(state)).inbox
                state = check_state("combine", program.combine(state, inbox), 1)
                reports = reported(program, state)
                turn.combined({name: float(own) for name, (own,) in reports.items()})
            if turn.works:
                state = check_state("adapt", program.adapt(state, turn.round), 1)
        message = self._message(state) if turn.awaits else []
        fields = state._asdict()
        shown = self._shown(state) if turn.shows else []
        return turn.result({k: own[0, ...] for k, own in fields.items()}, message, shown)

    def _message(self, state: Any) -> list[Array]:
        """Return the node's message, without the axis of nodes."""
        return [array[0, ...] for array in check_message(self.program.message(state), 1)]

    def _state(self, saved: Mapping[str, Array] | None) -> Any:
        """Return the state that was saved, or the program's start."""
        start = check_state("start", self.program.start(np.array([self.node])), 1)
        if saved is None:
            return start
        return type(start)(**{name: saved[name][None] for name in start._fields})

    def _shown(self, state: Any) -> list[Array]:
        """Call ``on_end``, and return what the node shows at the end of a run."""
        if self.on_end is not None:
            self.on_end(state)
        shown: dict[str, Array] = {}
        if self.shows != "nothing":
            shown.update(self.program.observe(state))
        if self.shows == "state":
            shown.update({STATE + name: field for name, field in state._asdict().items()})
        return [pack_arrays(shown)] if shown else []


def own_keys(context: Context) -> dict[str, Any]:
    """Return the lasting keys that the node config names, as `Keys` takes them, or none."""
    config = context.node_config
    if not {KEY_FILE, PINNED_KEYS} & config.keys():
        return {}
    from flwr_perdl.privacy.sealed import lasting_keys

    return lasting_keys(config)


class Turn:
    """A request to a node, and all that is done with it but the algorithm's own work.

    ``keys`` are the node's `own_keys`, ``sealed`` whether it refuses to send other messages
    than sealed ones, and ``encode`` has messages travel in fewer bytes.

    Attributes
    ----------
    step, round : str, int
        The step, and the algorithm's round.
    saved : dict of str to ndarray, or None
        The algorithm's state that the node has kept, without an axis of nodes.
    delivery : Delivery
        What the request has brought.
    is_new : bool
        Whether it is not asked for again: its work is to be done.
    pending : int
        The round whose messages the node waits for; 0 if it waits for none.
    works, awaits, shows : bool
        Whether the node is to do the work of a round, awaits messages after this request, and is to
        show what it has at the end of the run.
    hides : bool
        Whether the run's messages are sealed, whatever this request says.
    """

    def __init__(
        self,
        node: int,
        keys: Mapping[str, Any],
        request: StepRequest,
        private: PrivateState,
        *,
        sealed: bool = False,
        encode: Callable[[list[Array]], list[Array]] | None = None,
    ) -> None:
        config, self.step = request.config, request.step
        self.node, self._request, self._encode = node, request, encode
        self._pins = keys.get("pinned") is not None
        self.round = check_count(AT, config.get(AT, 0), 0, LAST_ROUND)
        asleep = str(node) in str(config.get(ASLEEP, "")).split()
        self.works, self.shows = self.step == EXCHANGE and not asleep, self.step == SHOW
        asks_sealed = bool(config.get(SEALED))
        if (sealed or self._pins) and not asks_sealed:
            raise ValueError(f"node {node} sends sealed messages only, and was asked for others.")
        kept, self.saved = RelayState.from_arrays(private.newest())
        if kept.over and not self.shows:
            raise ValueError(
                f"step must be {SHOW!r} after node {node} has deleted its key of this run, got "
                f"{self.step!r}."
            )
        if kept.asked > request.round and not kept.over:  # there is no state, and that is logged
            kept, self.saved = RelayState.from_arrays(private.before(request.round))
        self.delivery = Delivery()
        if not kept.over and (request.arrays or self.step != ANNOUNCE):
            self.delivery = Delivery.from_arrays(request.arrays, asks_sealed)
        # A server that crashed asks for a round again, and gets the same messages.
        self.is_new = not kept.over and (kept.asked, kept.step) != (request.round, self.step)
        self.pending = kept.pending
        self.awaits = self.works if self.is_new else bool(kept.pending)
        self._keys = None
        if asks_sealed and not kept.over:
            from flwr_perdl.privacy.sealed import Keys  # few nodes need its ciphers

            self._keys = Keys(node, request.run, run_key=kept.run_key, **keys)
            kept = kept._replace(run_key=self._keys.run_key)
        self.hides = kept.over or kept.run_key is not None
        self._kept, self._metrics = kept, dict[str, Scalar]()

    def received(self, message: Sequence[Array]) -> Neighborhood:
        """Return what counts of the messages that the node, which sent this one, waits for."""
        kept, delivery, round_ = self._kept, self.delivery, self._kept.pending
        staleness = check_count(STALENESS, self._request.config.get(STALENESS, 0), 0, LAST_ROUND)
        if staleness:  # after an absence it takes in what its neighbors have sent since
            round_ = self.round - 1
        if round_ != self.round - 1:
            delivery = delivery._replace(messages=())
        around, left_out = neighborhood_of(
            *(self.node, round_, message, kept.sizes, delivery),
            staleness=staleness,
            unseal=None if self._keys is None else self._keys.open,
            half=self._encode is not None,
        )
        self._metrics = self._left_out(left_out)
        return around

    def combined(self, reports: Mapping[str, float], rejected: Mapping[int, str] = {}) -> None:
        """Note what the algorithm reports, and whose messages it has rejected, and why."""
        metrics = self._left_out(rejected)
        if not self._pins:  # else no number that follows from a model leaves, nor its size
            reports = {name: own for name, own in reports.items() if isfinite(own)}
            self._metrics = {**reports, **metrics, **self._metrics}

    def result(
        self,
        state: Mapping[str, Array],
        message: list[Array],
        shown: Sequence[Array],
        silent: bool = False,
    ) -> StepResult:
        """Return the reply, and what the node keeps.

        ``message`` is what the node sends, if it awaits an answer and is not ``silent``, and
        ``shown`` what it shows, if it is to. ``state`` is kept, without an axis of nodes.
        """
        kept = self._kept
        if self.is_new:
            lost = self.round > 1 and kept.asked < 0
            metrics = {**self._metrics, **({NEW_STATE: 1} if lost else {})}
            # Past messages cannot be opened once the key is gone, by a thief of the disk either.
            over = self.shows and kept.run_key is not None
            kept = RelayState(
                run_key=None if over else kept.run_key,
                pending=self.round if self.works else 0,
                asked=self._request.round,
                step=self.step,
                metrics=metrics,
                sizes=[*map(magnitude, message)],
                over=over,
            )
        reply: Sequence[Array] = [] if self._keys is None else [self._keys.card]
        more: dict[str, Scalar] = {}
        if self.shows:
            reply = shown
        elif kept.pending:
            sent, more = ([], {SENT_FLOATS: 0}) if silent else self._sent(kept, message)
            reply = [*reply, *sent]
        keep = None if self._kept.over else kept.to_arrays(state)
        return StepResult(reply, 1, {**kept.metrics, **more}, keep, last=True)

    def _sent(
        self, kept: RelayState, message: list[Array]
    ) -> tuple[Sequence[Array], dict[str, Scalar]]:
        """Return what the node sends, sealed for each receiver or open for all, and its metrics."""
        metrics: dict[str, Scalar] = {SENT_FLOATS: count_values(*message)}
        if not all(map(isfinite, kept.sizes)):
            return [], {**metrics, BROKEN: 1}
        message = message if self._encode is None else self._encode(message)
        if self._keys is None:
            return message, metrics
        cards = self.delivery.cards or {}
        sealed, rejected = self._keys.seal_each(message, kept.pending, cards)
        return sealed, metrics | self._left_out(rejected)

    def _left_out(self, reasons: Mapping[int, str]) -> dict[str, Scalar]:
        """Log which neighbors' messages or cards were rejected; return the metrics of that."""
        for neighbor, reason in reasons.items():
            log(WARNING, "Node %d leaves out node %d: %s", self.node, neighbor, reason)
        return {f"{REJECTED}{neighbor}": 1 for neighbor in reasons}


class RelayState(NamedTuple):
    """What a node keeps between two requests, besides the algorithm's state.

    Attributes
    ----------
    run_key : bytes or None
        The node's private key in this run.
    pending : int
        The round whose messages the node waits for; 0 if it waits for none.
    asked, step : int, str
        The communication round and the step of the last request; -1 at the start.
    metrics : dict
        What that request's work came to, for the reply.
    sizes : sequence of float
        The largest absolute value of each array of the message that the node waits with.
    over : bool
        Whether the run is over for this node.
    """

    run_key: bytes | None = None
    pending: int = 0
    asked: int = -1
    step: str = ""
    metrics: Mapping[str, Scalar] = {}
    sizes: Sequence[float] = ()
    over: bool = False

    def to_arrays(self, state: Mapping[str, Array]) -> dict[str, NDArray[Any]]:
        """Return the private arrays, with those of the algorithm's state."""
        run_key, *rest = self
        arrays = {STATE + name: array for name, array in state.items()}
        if run_key is not None:
            arrays[_RUN_KEY] = np.frombuffer(run_key, dtype=np.uint8)
        return {**arrays, _REST: pack(json.dumps(rest).encode())}

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, Array] | None
    ) -> tuple[RelayState, dict[str, Array] | None]:
        """Return what `to_arrays` was called on; of others, or none, what a node begins with."""
        if arrays is None or _REST not in arrays:  # another protocol's, under the same token
            return cls(), None
        state = {n.removeprefix(STATE): own for n, own in arrays.items() if n.startswith(STATE)}
        run_key = arrays[_RUN_KEY].tobytes() if _RUN_KEY in arrays else None
        return cls(run_key, *json.loads(unpack(arrays[_REST]))), state


@step(RELAY, ANNOUNCE, client=DiffusionClient, seals=True)
@step(RELAY, EXCHANGE, client=DiffusionClient, seals=True)
@step(RELAY, SHOW, client=DiffusionClient, seals=True)
def exchange(local: Local, request: StepRequest) -> StepResult:
    """Take a step of the network's algorithm."""
    node: DiffusionClient = local.client
    return node.exchange(request, local.kept)
