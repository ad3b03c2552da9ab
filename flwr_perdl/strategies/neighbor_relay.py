"""NeighborRelay: distributed algorithms on a Flower federation, by messages through the server.

Flower's nodes can reach the server only. The server delivers what one neighbor addresses to
another, and never combines: the algorithm, a `flwr_perdl.network.Program`, runs at the nodes
(`flwr_perdl.clients.DiffusionClient`), each with its own data only.

=====================================  =========================================================
the algorithm                          here
=====================================  =========================================================
start, adapt, message of round one     the node's reply to the first ``"exchange"``
round i: what node k receives          the request of exchange i + 1 to node k
combine, adapt, message of round i+1   its reply
observe                                its reply to ``"show"``
=====================================  =========================================================

A message takes this way: `DiffusionClient.fit` of the sender, reply, `MessageStore.put`,
`MessageStore.deliveries`, `Delivery.to_arrays`, request, `DiffusionClient.fit` of the receiver,
`Delivery.from_arrays`, and `neighborhood_of`, which decides whether it counts. Its form on the
wire, and the rules, are in `flwr_perdl.network.messages`.

``n_rounds`` rounds of the algorithm take ``n_rounds + 1`` communication rounds, and one more for
the nodes' public keys where messages are sealed. A node that does not reply is silent in that
round: the others give its weight to themselves, or use its last message (``staleness``). A node
that joins late, or returns under another node id, is identified by its ``partition-id``, and
continues from the state that it has kept, or from its start.

What each party receives:

- *The server*: every message of every node, in the clear; with ``sealed=True`` its ciphertext and
  the nodes' public keys instead. In both cases: sender, receiver and size, which messages could not
  be read, in every round what the node's program reports (numbers, in the clear), and at the end
  what each node chooses to show. Never data, or states that are neither sent nor shown.
- *A node*: the messages of its neighbors, with their ids, its weights for them, and their ages;
  sealed, also the public keys of its receivers; who is absent in a round of a `Schedule`.
- *A node that is no neighbor*: nothing.

The algorithm's docstring says what a message reveals to neighbors that follow it. A malicious
neighbor may learn samples (docs/security.md).
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict, namedtuple
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from keyword import iskeyword
from logging import WARNING
from typing import Any, ClassVar, Unpack

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.clients.neighbor_relay import (
    ANNOUNCE,
    ASLEEP,
    AT,
    BROKEN,
    EXCHANGE,
    REJECTED,
    RELAY,
    SENT_FLOATS,
    SHOW,
    STALENESS,
    STATE,
    DiffusionClient,
)
from flwr_perdl.core.arrays import count_values
from flwr_perdl.core.checks import Matrix, check_count, check_flag, check_kind, check_real
from flwr_perdl.core.npy import pack_arrays, unpack, unpack_arrays
from flwr_perdl.network.averaging import BYTES, RECEIVED
from flwr_perdl.network.combine import Run
from flwr_perdl.network.messages import (
    EVERYBODY,
    Delivery,
    MessageStore,
    curves,
    entries_of,
    matrix_of,
    spread,
    tally,
)
from flwr_perdl.network.schedule import LinkPlan, Schedule
from flwr_perdl.network.topology import CombinationMatrix, Topology
from flwr_perdl.protocol.compat import log
from flwr_perdl.protocol.options import ServerOptions
from flwr_perdl.protocol.records import (
    NEW_STATE,
    NUM_EXAMPLES,
    OURS,
    SEALED,
    Replies,
    Reply,
    Scalar,
    brief,
    check_names,
)
from flwr_perdl.protocol.report import RoundReport
from flwr_perdl.protocol.request import Protocol, Request, State
from flwr_perdl.protocol.strategy import ProtocolStrategy

#: In the final model beside what nodes show, whose names are none of these: all traffic; and per
#: node how many messages were not heard, whether it took part in the last round, and showed all.
_TRAFFIC, _NODES, _LEFT_OUT = "/traffic", "/nodes", "/left-out"

#: What the sender of a reply of another kind is told.
_ONLY = DiffusionClient.only


class NeighborRelay(ProtocolStrategy):
    """Deliver messages between neighbors that run a distributed algorithm.

    Parameters
    ----------
    topology : Topology or Schedule
        Which nodes are neighbors; node k is the client with ``partition-id`` k.
    n_rounds : int
        Rounds of the algorithm.
    weights : CombinationMatrix, optional
        Combination weights of a topology; Metropolis weights by default.
    staleness : int, default 0
        As in `InMemoryNetwork`: the relay holds messages for up to this many rounds, and a node
        that did not reply receives its neighbors' last ones with the next request.
    sealed : bool, default False
        Whether messages are encrypted end to end (docs/decentralized-learning.md).
    **options
        See `ServerOptions`; ``num_clients`` is by default the number of nodes.

    Raises
    ------
    ValueError
        If an option breaks its rule, or weights and topology differ in their numbers of nodes.

    Notes
    -----
    Communication per node and round: its message up (sealed: once per neighbor, a seventh larger,
    plus about ninety values for keys and headers), its neighbors' messages down. A checkpoint has
    the messages in transit. ``outcome`` has the result.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.clients import DiffusionClient, client_app
    >>> from flwr_perdl.network import Averaging, Topology
    >>> from flwr_perdl.simulations import InProcessGrid
    >>> from flwr_perdl.strategies import NeighborRelay
    >>> values = {node: np.array([float(node)]) for node in range(4)}
    >>> app = client_app(lambda context: DiffusionClient(Averaging(values), context))
    >>> grid = InProcessGrid(app, 4)
    >>> relay = NeighborRelay(Topology.ring(4), n_rounds=30)
    >>> result = relay.start(grid)
    >>> relay.outcome.rounds, relay.outcome.alive.tolist()
    (30, [True, True, True, True])
    """

    protocol_name = RELAY
    _called_as: ClassVar = {"topology": "", "plan": "", "network": "network"}
    _not_in_words = (RECEIVED, BYTES)
    _if_fewer = " Or make a topology of fewer nodes."  # fewer of this one break its paths
    _default_rounds = None

    def __init__(
        self,
        topology: Topology | Schedule,
        n_rounds: int,
        *,
        weights: CombinationMatrix | None = None,
        staleness: int = 0,
        sealed: bool = False,
        **options: Unpack[ServerOptions],
    ) -> None:
        n = check_kind("topology", topology, (Topology, Schedule), "a Topology").n_nodes
        if check_real("fraction_evaluate", options.get("fraction_evaluate", 0), 0, 1):
            raise ValueError(
                f"fraction_evaluate must be 0, got {options['fraction_evaluate']}: the server has "
                "no model; nodes of DiffusionAveraging evaluate theirs, by evaluate_every."
            )
        server = ServerOptions(num_clients=n, min_clients=min(2, n), fraction_evaluate=0.0)
        server.update(options)
        super().__init__(**server)
        self.topology = topology
        self.n_rounds = check_count("n_rounds", n_rounds)
        self.plan = LinkPlan.make(topology, weights, staleness=staleness)
        self.staleness = self.plan.staleness
        self.sealed = check_flag("sealed", sealed)
        self._ahead = 1 + self.sealed
        self._least_rounds = self.exchanges

    @property
    def exchanges(self) -> int:
        """Communication rounds that the run takes: ``num_rounds`` of `start`."""
        return self.n_rounds + self._ahead

    @property
    def outcome(self) -> Run:
        """How the run ended.

        ``state`` is that of the nodes that show theirs (its field ``nodes``), None without any;
        values that a node did not observe are NaN. ``dropped_messages`` counts the rounds where a
        node's message was not finite, or was left out by a node that received it.

        Raises
        ------
        RuntimeError
            If the run is not over.
        """
        if self._run is None or not self._run.record.finished:
            raise RuntimeError(f"the run must be over, which takes {self.exchanges} exchanges.")
        ended, n = unpack_arrays(self._run.record.model[0]), self.topology.n_nodes
        (alive, whole), traffic = ended.pop(_NODES), ended.pop(_TRAFFIC)
        dropped_messages, dropped_by = tally(map(tuple, ended.pop(_LEFT_OUT).tolist()))
        state = {name: rows for name, rows in ended.items() if name.startswith(STATE)}
        reported = {self._round_of(report): self.reports_of(report) for report in self.history}
        return Run(
            state=_state(state, np.flatnonzero(whole)) if whole.any() else None,
            observed={name: rows for name, rows in ended.items() if name not in state},
            rounds=self.n_rounds,
            floats_sent=float(traffic[2].sum()),
            traffic=matrix_of(traffic, n),
            dropped_messages=dropped_messages,
            alive=alive.astype(bool),
            curves=curves([reported.get(i + 1, {}) for i in range(self.n_rounds)], n),
            dropped_by=dropped_by,
        )

    def reports_of(self, report: RoundReport) -> dict[str, Matrix]:
        """Return what the nodes reported in an exchange, by name, NaN where nothing: (n_nodes,)."""
        rows: dict[str, Matrix] = {}
        for node, metrics in report.numbers.items():
            for name in metrics:
                of_program = name != NUM_EXAMPLES and not name.startswith(OURS)
                if node < self.topology.n_nodes and of_program:
                    row = rows.setdefault(name, np.full(self.topology.n_nodes, np.nan))
                    row[node] = metrics[name]
        return rows

    @property
    def network(self) -> str:
        """What the network is, with a digest of the rounds' weights."""
        digest = hashlib.sha256()
        schedule = self.plan.schedule
        repeats = schedule.repeats and schedule.present is None
        for round_ in range(1, 1 + (schedule.window if repeats else self.n_rounds)):
            digest.update(schedule.awake(round_).tobytes())
            weights = schedule.matrix(round_)
            for matrix in (weights.matrix, weights.topology.adjacency):
                for part in (matrix.indptr, matrix.indices, matrix.data):
                    digest.update(np.ascontiguousarray(part).tobytes())
        return f"{self.topology!r} {digest.hexdigest()[:16]}"

    def protocol(self, initial: list[Matrix], state: State | None) -> Protocol:
        """Deliver messages round by round; nodes have a start of their own."""
        if initial:
            raise ValueError(f"initial_arrays must be left out, got {len(initial)} arrays.")
        return self._deliver({}, state, lambda start: {})

    def _deliver(
        self,
        start: dict[str, Matrix],
        state: State | None,
        config_of: Callable[[Mapping[str, Matrix]], Mapping[str, Scalar]],
    ) -> Protocol:
        """Deliver messages round by round; nothing is combined here.

        ``start`` has the arrays that nodes begin with, by name; ``config_of`` says of them what
        every request says to the nodes besides.
        """
        n = self.topology.n_nodes
        held = MessageStore(self.plan, self.sealed, start)
        stranger = Delivery((), {} if self.sealed else None)  # for a client that is no node
        if state is not None:
            held.unpack(state)
        besides = config_of(held.start)
        ask = partial(Request, model=(), max_weight=None, expect=None)
        if state is None and self.sealed:
            check = partial(_check_reply, ANNOUNCE, 1)
            first = stranger._replace(start=[*held.start.values()]).to_arrays()
            arrays = first if held.start else ()
            replies = yield ask(ANNOUNCE, arrays, {SEALED: True, **besides}, check=check)
            held.known = set(replies)
            held.keep_cards({node: reply.arrays for node, reply in replies.items()})
        for round_ in range(held.round + 1, self.n_rounds + 2):
            asleep = np.flatnonzero(~self.plan.awake(round_))
            last = round_ > self.n_rounds
            deliveries = held.deliveries(round_)
            contents = defaultdict(
                stranger.to_arrays, {k: each.to_arrays() for k, each in deliveries.items()}
            )
            step = SHOW if last else EXCHANGE
            silent = int(self.sealed) if len(asleep) else None  # who sleeps sends at most a card
            config: dict[str, Scalar] = {AT: round_, ASLEEP: " ".join(map(str, asleep))}
            config |= {SEALED: self.sealed, STALENESS: self.staleness}
            replies = yield ask(
                step,
                config={**config, **besides},
                state=held.pack(),
                check=partial(_check_reply, step, 1 if last else silent),
                per_client=contents.__getitem__,
            )
            self._count(held, replies, deliveries)
            if not last:
                self._take(held, replies, deliveries, round_)
        shown = {node: _opened(node, reply) for node, reply in replies.items() if node < n}
        there = np.isin(np.arange(n), list(shown))
        rows = _rows(shown, n)
        fields = [name for name in rows if name.startswith(STATE)]
        whole = np.all([np.full(n, bool(fields)), *(rows[name][1] for name in fields)], axis=0)
        states = {name: rows[name][0][whole[rows[name][1]]] for name in fields}
        alive = held.took_part if self.n_rounds else there & self.plan.awake(1)
        ended = {name: spread(*row) for name, row in rows.items()} | states
        ended |= {_TRAFFIC: entries_of(held.traffic)}
        ended |= {_NODES: np.stack([alive, whole]), _LEFT_OUT: held.all_left_out}
        return [pack_arrays(ended)]

    def _count(
        self, held: MessageStore, replies: Replies, deliveries: Mapping[int, Delivery]
    ) -> None:
        """Count what was received: a node that replies names the senders it has left out."""
        # A node that begins anew has no message with which it could combine those.
        reads = [
            node
            for node in replies
            if node in deliveries and NEW_STATE not in replies[node].metrics
        ]
        left_out = {
            (message.sender, node)
            for node in reads
            for message in deliveries[node].messages
            if f"{REJECTED}{message.sender}" in replies[node].metrics
        }
        held.count({node: deliveries[node] for node in reads}, left_out)
        held.known = set(replies)

    def _take(
        self, held: MessageStore, replies: Replies, sent: Mapping[int, Delivery], round_: int
    ) -> None:
        """Take in the messages of a round; ``sent`` is what their senders have received."""
        n, awake = self.topology.n_nodes, self.plan.awake(round_)
        held.begin(round_)
        if self.sealed:
            held.keep_cards({node: reply.arrays for node, reply in replies.items()})
        for node, reply in replies.items():
            if node not in sent:
                log(WARNING, "Client %d is no node of a network of %d: it is left out.", node, n)
            elif awake[node]:
                held.took_part[node] = True
                if flaw := _take(held, reply, node, sent[node], round_):
                    held.left_out.add((round_, node, node))
                    said = "Round %d (%s): left out the message of node %d: %s"
                    log(WARNING, said, round_ + self.sealed, EXCHANGE, node, flaw)


def _take(store: MessageStore, reply: Reply, node: int, delivery: Delivery, round_: int) -> str:
    """Store the message in a reply; return what is wrong with it, if anything."""
    floats, cards = float(reply.metrics.get(SENT_FLOATS, 0.0)), delivery.cards
    addressed: dict[int, Sequence[Matrix]] = {EVERYBODY: reply.arrays}
    if BROKEN in reply.metrics:
        return "it has NaN or infinite values"
    if not floats and len(reply.arrays) <= (cards is not None):  # as the node's program wants it
        return ""
    if cards is None:  # open: one message for all
        if not reply.arrays:
            return "it has no arrays"
        floats = count_values(*reply.arrays)
    else:  # the node's card, and a sealed message for each receiver
        sent = reply.arrays[1:]
        if len(sent) != len(cards):
            return f"it is {len(sent)} sealed messages for {len(cards)} receivers"
        each = zip(cards, sent, strict=True)
        addressed = {to: [array] for to, array in each if array.size}
    store.put(round_, node, floats, addressed)
    return ""


def _check_reply(step: str, most: int | None, reply: Reply) -> None:
    """Raise a ValueError if a reply is not one of a `DiffusionClient`.

    Parameters
    ----------
    step : str
        What the nodes were asked for.
    most : int or None
        Maximum number of arrays in a reply that is no message: cards, or what a node shows. None if
        every reply must be a message.
    reply : Reply
        The reply.
    """
    if step == EXCHANGE and SENT_FLOATS in reply.metrics:
        return
    if most is None:
        raise ValueError(f"metrics must have {SENT_FLOATS!r}, got none of that name: {_ONLY}")
    if len(reply.arrays) > most:
        raise ValueError(f"arrays must be at most {most} here, got {len(reply.arrays)}: {_ONLY}")
    for array in reply.arrays:
        try:
            unpack(array)
        except ValueError as error:
            raise ValueError(f"arrays must be bytes, got other numbers: {_ONLY}") from error


def _opened(node: int, reply: Reply) -> dict[str, Matrix]:
    """Return what a node shows; nothing if it cannot be read."""
    if not reply.arrays:
        return {}
    try:
        shown = unpack_arrays(reply.arrays[0])
        check_names("arrays", tuple(shown))
        for name in shown:  # fields of the state that `_state` makes
            field = name.removeprefix(STATE)
            if field != name and (not field.isidentifier() or iskeyword(field) or field[0] == "_"):
                raise ValueError(f"fields of a state must have names, got {name!r}")
    except ValueError as error:
        log(WARNING, "What node %d shows is left out: %s", node, brief(str(error)))
        return {}
    return {name: array for name, array in shown.items() if array.shape[:1] == (1,)}


def _rows(
    shown: Mapping[int, Mapping[str, Matrix]], n_nodes: int
) -> dict[str, tuple[Matrix, NDArray[np.bool_]]]:
    """Return what the nodes showed, by name, and which nodes.

    Names, and the form of each, are those that most nodes have, of states and of observations.
    """
    rows = {}
    for of_states in (True, False):
        parts = {
            node: {k: v for k, v in own.items() if k.startswith(STATE) == of_states}
            for node, own in shown.items()
        }
        parts = {node: own for node, own in parts.items() if own}
        sets = Counter(tuple(own) for own in parts.values()).most_common(1)
        names = sets[0][0] if sets else ()
        if odd := [node for node, own in parts.items() if own.keys() != set(names)]:
            what = "states" if of_states else "observations"
            log(WARNING, "Nodes %s show other fields of their %s than most.", odd, what)
        forms = {
            node: {k: (v.shape, v.dtype) for k, v in own.items()} for node, own in parts.items()
        }
        for name in names:
            there = Counter(form[name] for form in forms.values() if name in form)
            most = there.most_common(1)[0][0]
            nodes = [node for node, form in forms.items() if form.get(name) == most]
            stacked = np.concatenate([shown[node][name] for node in nodes])
            rows[name] = stacked, np.isin(np.arange(n_nodes), nodes)
    return rows


def _state(fields: Mapping[str, Matrix], nodes: NDArray[np.intp]) -> Any:
    """Return a state of these fields; whose it is, is not for the nodes to say."""
    make: Any = namedtuple
    named = {name.removeprefix(STATE): own for name, own in fields.items()} | {"nodes": nodes}
    return make("State", named)(**named)
