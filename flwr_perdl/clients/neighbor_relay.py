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
from flwr_perdl.core.arrays import count_values
from flwr_perdl.core.checks import Matrix, check_choice, check_count, check_flag, check_function
from flwr_perdl.core.files import LAST_ROUND
from flwr_perdl.core.models import magnitude
from flwr_perdl.core.npy import pack_arrays, text_array, texts_of
from flwr_perdl.network.averaging_program import BYTES
from flwr_perdl.network.combine import (
    Array,
    Program,
    check_message,
    check_state,
    reported,
    screened,
    silent_nodes,
)
from flwr_perdl.network.messages import Delivery, inbox_of
from flwr_perdl.parts.transport import halved
from flwr_perdl.privacy.sealed import Keys, lasting_keys
from flwr_perdl.protocol.client_state import PrivateState
from flwr_perdl.protocol.compat import log
from flwr_perdl.protocol.local import Local, StepRequest, StepResult
from flwr_perdl.protocol.records import KEY_FILE, NEW_STATE, PINNED_KEYS, SEALED, Scalar

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
FLOATS = "floats"
BROKEN = "broken"
REJECTED = "rejected-"
#: Prefix of the state's fields among what a node shows.
STATE = "state."

SHOWS = ("observed", "state", "nothing")

#: Names of the private arrays besides the program's state, see `Kept`.
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

    #: Whether messages travel in half floats.
    half = False
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
        config = context.node_config
        self._lasting = lasting_keys(config) if {KEY_FILE, PINNED_KEYS} & config.keys() else {}
        self.pins = bool(config.get(PINNED_KEYS))
        self.sealed = check_flag("sealed", sealed) or self.pins

    def exchange(self, request: StepRequest, private: PrivateState) -> StepResult:
        """Take in what the neighbors have sent, do the work of a round, and send a message.

        The request's arrays are a ``Delivery`` (``network/messages.py``). The reply is the node's
        message; at the end, what the node shows, packed into one array. Its metrics are
        ``"floats"`` of the message, ``"broken": 1`` if it has NaN or infinite values (it is not
        sent), ``"rejected-K": 1`` for every neighbor K whose message, or card, was left out,
        ``"state-lost": 1`` if the node found no state after round one, and began from its start,
        and what the program reports about the round before, as far as it is finite.
        """
        step_, config = request.step, request.config
        round_ = check_count(AT, config.get(AT, 0), 0, LAST_ROUND)
        sealed = bool(config.get(SEALED))
        if self.sealed and not sealed:
            raise ValueError(
                f"node {self.node} sends sealed messages only, and was asked for others."
            )
        kept = self._kept(private.newest())
        if kept.over:
            if step_ != SHOW:
                raise ValueError(
                    f"step must be {SHOW!r} after node {self.node} has deleted its key of this run,"
                    f" got {step_!r}."
                )
            return StepResult(self._end(kept.state, sealed=True), 1, kept.metrics)
        if kept.asked > request.round:
            kept = self._kept(private.before(request.round))  # which are none, and that is logged
        delivery = Delivery() if step_ == ANNOUNCE else Delivery.from_arrays(request.arrays, sealed)
        keys = None
        if sealed:
            keys = Keys(self.node, request.run, run_key=kept.run_key, **self._lasting)
            kept = kept._replace(run_key=keys.run_key)
        # A server that crashed asks for a round again, and gets the same messages.
        if (kept.asked, kept.step) != (request.round, step_):
            kept = self._next(kept, request, round_, delivery, keys)
        reply: Sequence[Array] = [] if keys is None else [keys.card]
        more: dict[str, Scalar] = {}
        if step_ == SHOW:
            reply = self._end(kept.state, sealed=kept.over)
        elif kept.pending:
            sent, more = self._sent(kept, delivery, keys)
            reply = [*reply, *sent]
        return StepResult(reply, 1, {**kept.metrics, **more}, kept.to_arrays(), last=True)

    def _next(
        self, kept: Kept, request: StepRequest, round_: int, delivery: Delivery, keys: Keys | None
    ) -> Kept:
        """Return what the node keeps after a request's work."""
        state, pending, sizes = kept.state, kept.pending, kept.sizes
        metrics: dict[str, Scalar] = {NEW_STATE: 1} if round_ > 1 and kept.asked < 0 else {}
        # Combination comes first: the messages of the last round have only now been delivered.
        if pending:
            staleness = check_count(STALENESS, request.config.get(STALENESS, 0), 0, LAST_ROUND)
            if staleness:  # after an absence it takes in what its neighbors have sent since
                pending = round_ - 1
            if pending != round_ - 1:
                delivery = delivery._replace(messages=())
            state, more = self._combined(kept, pending, delivery, keys, staleness)
            metrics, pending = more | metrics, 0
        asleep = str(self.node) in str(request.config.get(ASLEEP, "")).split()
        if request.step == EXCHANGE and not asleep:
            state, pending = check_state("adapt", self.program.adapt(state, round_), 1), round_
            sizes = [*map(magnitude, self._message(state))]
        # Past messages cannot be opened once the key is gone, by a thief of the disk either.
        over = request.step == SHOW and kept.run_key is not None
        key = None if over else kept.run_key
        return Kept(state, key, pending, request.round, request.step, metrics, sizes, over)

    def _combined(
        self, kept: Kept, round_: int, delivery: Delivery, keys: Keys | None, staleness: int
    ) -> tuple[Any, dict[str, Scalar]]:
        """Return the state with a round's messages taken in, and the metrics of that."""
        inbox, left_out = inbox_of(
            self.node,
            round_,
            self._message(kept.state),
            kept.sizes,
            delivery.messages,
            staleness=staleness,
            total=delivery.total,
            unseal=None if keys is None else keys.open,
            half=self.half,
        )
        inbox, rejected = screened(self.program, kept.state, inbox)
        state = check_state("combine", self.program.combine(kept.state, inbox), 1)
        reports = {name: float(own) for name, (own,) in reported(self.program, state).items()}
        metrics: dict[str, Scalar] = {k: own for k, own in reports.items() if isfinite(own)}
        if self.half and BYTES in metrics:  # the inbox has them in full
            whole = self._message(kept.state)
            sizes = [sum(array.nbytes for array in some) for some in (self._halved(whole), whole)]
            metrics[BYTES] = float(metrics[BYTES]) * sizes[0] / sizes[1]
        metrics |= self._left_out({one.sender: one.reason for one in rejected})
        # With pinned keys no number that follows from a model leaves, nor whether it is too large.
        return state, ({} if self.pins else metrics) | self._left_out(left_out)

    def _message(self, state: Any) -> list[Array]:
        """Return the node's message, without the axis of nodes."""
        return [array[0, ...] for array in check_message(self.program.message(state), 1)]

    def _kept(self, arrays: Mapping[str, Array] | None) -> Kept:
        """Return what was kept, or the program's start."""
        start = check_state("start", self.program.start(np.array([self.node])), 1)
        return Kept(start) if arrays is None else Kept.from_arrays(arrays, type(start))

    def _sent(
        self, kept: Kept, delivery: Delivery, keys: Keys | None
    ) -> tuple[Sequence[Array], dict[str, Scalar]]:
        """Return what the node sends, sealed for each receiver or open for all, and its metrics."""
        if silent_nodes(self.program, kept.state).any():
            return [], {FLOATS: 0}
        message = self._message(kept.state)
        metrics: dict[str, Scalar] = {FLOATS: count_values(*message)}
        if not np.isfinite(kept.sizes).all():
            return [], {**metrics, BROKEN: 1}
        message = self._halved(message)
        if keys is None:
            return message, metrics
        sealed, rejected = keys.seal_each(message, kept.pending, delivery.cards or {})
        return sealed, metrics | self._left_out(rejected)

    def _halved(self, message: list[Array]) -> list[Array]:
        """Return a message as it is sent; a single number, as push-sum's weight, in full."""
        if not self.half:
            return message
        return [a if a.size == 1 else halved(str(i), a) for i, a in enumerate(message)]

    def _left_out(self, reasons: Mapping[int, str]) -> dict[str, Scalar]:
        """Log which neighbors' messages or cards were rejected; return the metrics of that."""
        for neighbor, reason in reasons.items():
            log(WARNING, "Node %d leaves out node %d: %s", self.node, neighbor, reason)
        return {f"{REJECTED}{neighbor}": 1 for neighbor in reasons}

    def _end(self, state: Any, *, sealed: bool) -> list[Matrix]:
        """Call ``on_end``, and return what the node shows at the end of a run."""
        if self.on_end is not None:
            self.on_end(state)
        return self._shown(state)

    def _shown(self, state: Any) -> list[Array]:
        shown: dict[str, Array] = {}
        if self.shows != "nothing":
            shown.update(self.program.observe(state))
        if self.shows == "state":
            shown.update({STATE + name: field for name, field in state._asdict().items()})
        return [pack_arrays(shown)] if shown else []


class Kept(NamedTuple):
    """What a node keeps between two requests.

    Attributes
    ----------
    state : NamedTuple of arrays
        The program's state.
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

    state: Any
    run_key: bytes | None = None
    pending: int = 0
    asked: int = -1
    step: str = ""
    metrics: Mapping[str, Scalar] = {}
    sizes: Sequence[float] = ()
    over: bool = False

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the private arrays."""
        state, run_key, *rest = self
        arrays = {STATE + name: field[0, ...] for name, field in state._asdict().items()}
        if run_key is not None:
            arrays[_RUN_KEY] = np.frombuffer(run_key, dtype=np.uint8)
        return {**arrays, _REST: text_array([json.dumps(rest)])}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array], state: Any) -> Kept:
        """Return what `to_arrays` was called on; ``state`` is the type of the program's state."""
        return cls(
            state(**{name: arrays[STATE + name][None] for name in state._fields}),
            arrays[_RUN_KEY].tobytes() if _RUN_KEY in arrays else None,
            *json.loads(*texts_of(arrays[_REST])),
        )


@step(RELAY, ANNOUNCE, client=DiffusionClient, seals=True)
@step(RELAY, EXCHANGE, client=DiffusionClient, seals=True)
@step(RELAY, SHOW, client=DiffusionClient, seals=True)
def exchange(local: Local, request: StepRequest) -> StepResult:
    """Take a step of the network's algorithm."""
    node: DiffusionClient = local.client
    return node.exchange(request, local.kept)
