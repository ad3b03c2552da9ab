"""Messages between neighbors through the server: a distributed algorithm on a Flower federation.

Flower's nodes can reach the server only. The server delivers what one neighbor addresses to
another, and never combines: the algorithm, a `flwr_perdl.network.Program`, runs at the nodes
(`flwr_perdl.clients.DiffusionClient`), each with its own data only.

=====================================  =========================================================
the algorithm                          here
=====================================  =========================================================
start, adapt, message of round one     the node's reply to the first ``"exchange"``
round i: what node k hears             the request of exchange i + 1 to node k
combine, adapt, message of round i+1   its reply
observe                                its reply to ``"show"``
=====================================  =========================================================

A message takes this way: `DiffusionClient.fit` of the sender, reply, `_Held.take`,
`_Held.deliveries`, `Delivery.to_arrays`, request, `DiffusionClient.fit` of the receiver,
`Delivery.from_arrays`, and `inbox_of`, which decides whether it counts. Its form on the wire, and
the rules, are in `flwr_perdl.network.messages`.

``n_rounds`` rounds of the algorithm take ``n_rounds + 1`` communication rounds, and one more for
the nodes' public keys where messages are sealed. A node that does not reply is silent in that
round: the others give its weight to themselves, or use its last message (``staleness``). A node
that joins late, or returns under another node id, is identified by its ``partition-id``, and
continues from the state that it has kept, or from its start.

What each party receives:

- *The server*: every message of every node, in the clear; with ``sealed=True`` its ciphertext and
  the nodes' public keys instead. In both cases: who sends to whom and how many floats, who could
  not read what, in every round what the node's program reports about the last one (numbers, in the
  clear), and at the end what each node chooses to show. Never: data, or states that are neither
  sent nor shown.
- *A node*: the messages of the neighbors that it hears, with their ids, its weights for them, and
  their delays; sealed, also the public keys of those who hear it. With simulated faults: who is
  asleep.
- *A node that is no neighbor*: nothing.

The algorithm's docstring says what a message reveals to neighbors that follow it. A neighbor that
sends what it likes may learn samples (docs/security.md).
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict, namedtuple
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from keyword import iskeyword
from logging import WARNING
from typing import Any, NamedTuple, Unpack

import numpy as np
from flwr.serverapp import Grid
from numpy.typing import NDArray
from scipy import sparse

from flwr_perdl.clients.neighbor_relay import (
    ANNOUNCE,
    ASLEEP,
    AT,
    BROKEN,
    EXCHANGE,
    FLOATS,
    REJECTED,
    RELAY,
    SHOW,
    STATE,
    DiffusionClient,
)
from flwr_perdl.core.checks import Matrix, check_count, check_flag, check_kind, check_real
from flwr_perdl.core.packing import (
    pack_arrays,
    text_array,
    texts_of,
    unpack,
    unpack_arrays,
)
from flwr_perdl.network.averaging import BYTES
from flwr_perdl.network.averaging import FLOATS as RECEIVED
from flwr_perdl.network.combine import Run, curves
from flwr_perdl.network.exchange import Plan, spread
from flwr_perdl.network.faults import Faults
from flwr_perdl.network.messages import Delivery, Message
from flwr_perdl.network.schedule import Schedule
from flwr_perdl.network.topology import CombinationMatrix, Topology
from flwr_perdl.protocol.compat import log
from flwr_perdl.protocol.options import ServerOptions
from flwr_perdl.protocol.progress import observers
from flwr_perdl.protocol.records import (
    ANEW,
    NUM_EXAMPLES,
    SEALED,
    Replies,
    Reply,
    Scalar,
    brief,
    check_names,
)
from flwr_perdl.protocol.report import RoundReport
from flwr_perdl.protocol.request import Protocol, Request, State, TooFewReplies
from flwr_perdl.protocol.strategy import ProtocolStrategy

Weights = CombinationMatrix | Sequence[CombinationMatrix] | None

#: In the final model beside what nodes show, whose names are none of these: all traffic; and per
#: node how many messages were not heard, whether it took part in the last round, and showed all.
_TRAFFIC, _NODES, _REJECTED = "/traffic", "/nodes", "/rejected"
#: The metrics of a reply that are no report of the node's program.
_ABOUT_MESSAGES = NUM_EXAMPLES, ANEW, BROKEN, FLOATS
#: The "receiver" of a message that is the same for all neighbors.
EVERYBODY = -1

#: What the sender of a reply of another kind is told.
_ONLY = DiffusionClient.only


class NeighborRelay(ProtocolStrategy):
    """Deliver the messages of neighbors that run a distributed algorithm.

    Parameters
    ----------
    topology : Topology or Schedule
        Who hears whom; node k is the client with ``partition-id`` k.
    n_rounds : int
        Rounds of the algorithm.
    weights : CombinationMatrix, or sequence of them, optional
        Combination weights of a topology; Metropolis weights by default. A sequence is cycled
        through.
    faults : Faults, optional
        Faults to simulate: the relay drops or delays messages, and tells nodes when they are
        asleep; none by default. The nodes' ``max_delay`` must allow the delays.
    staleness : int, default 0
        As in `InMemoryNetwork`: the relay holds messages for so many rounds, and a node that has
        not replied receives its neighbors' last ones with the next request. The nodes'
        ``max_delay`` must allow it.
    sealed : bool, default False
        Whether messages are sealed: encrypted end to end (docs/decentralized-learning.md).
    **options
        See `ServerOptions`; ``num_clients`` is by default the number of nodes.

    Raises
    ------
    ValueError
        If an option breaks its rule, or weights and topology differ in their numbers of nodes.

    Notes
    -----
    Floats per node and round: its message up (sealed: once per neighbor, a seventh more, and about
    ninety for keys and headers), its neighbors' messages down. A checkpoint holds the messages in
    transit. ``outcome`` has the result, which travels as one array of packed bytes.

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
    >>> result = relay.start(grid, num_rounds=31)
    >>> relay.outcome.rounds, relay.outcome.alive.tolist()
    (30, [True, True, True, True])
    """

    protocol_name = RELAY
    flags = (ANEW, BROKEN, f"{REJECTED}*")
    _default_rounds = None

    def __init__(
        self,
        topology: Topology | Schedule,
        n_rounds: int,
        *,
        weights: Weights = None,
        faults: Faults | None = None,
        staleness: int = 0,
        sealed: bool = False,
        **options: Unpack[ServerOptions],
    ) -> None:
        n = check_kind("topology", topology, (Topology, Schedule), "a Topology").n_nodes
        check_kind("faults", faults, (Faults, type(None)), "a Faults or None")
        several = list(weights) if isinstance(weights, Sequence) else [weights]
        for one in [] if weights is None else several:
            check_kind("weights", one, CombinationMatrix, "a CombinationMatrix or several")
        if check_real("fraction_evaluate", options.get("fraction_evaluate", 0), 0, 1):
            raise ValueError(
                f"fraction_evaluate must be 0, got {options['fraction_evaluate']}: there is no "
                "model to evaluate, and no node may see what the others show."
            )
        server = ServerOptions(num_clients=n, min_clients=min(2, n), fraction_evaluate=0.0)
        server.update(options)
        super().__init__(**server)
        self.topology = topology
        self.n_rounds = check_count("n_rounds", n_rounds)
        self.plan = Plan.make(topology, weights, faults, staleness)
        self.sealed = check_flag("sealed", sealed)

    @property
    def exchanges(self) -> int:
        """Communication rounds that the run takes: ``num_rounds`` of `start`."""
        return self.n_rounds + 1 + self.sealed

    @property
    def outcome(self) -> Run:
        """How the run ended.

        ``state`` is that of the nodes that show theirs (its field ``nodes``), None if there are
        none; what a node did not observe is NaN. ``unheard`` counts the rounds in which a node's
        message was not finite, or was left out by a node that received it.

        Raises
        ------
        RuntimeError
            If the run is not over.
        """
        if self._conversation is None or not self._conversation.run.finished:
            raise RuntimeError(f"the run must be over, which takes {self.exchanges} exchanges.")
        ended, n = unpack_arrays(self._conversation.run.model[0]), self.topology.n_nodes
        unheard, alive, whole = ended.pop(_NODES)
        traffic, rejected = ended.pop(_TRAFFIC), ended.pop(_REJECTED)
        by: dict[int, list[int]] = {}
        for sender, receiver in rejected.tolist():
            by.setdefault(sender, []).append(receiver)
        state = {name: rows for name, rows in ended.items() if name.startswith(STATE)}
        reported = {self.round_of(report): self.reports_of(report) for report in self.history}
        return Run(
            state=_state(state, np.flatnonzero(whole)) if whole.any() else None,
            observed={name: rows for name, rows in ended.items() if name not in state},
            rounds=self.n_rounds,
            floats_sent=float(traffic[2].sum()),
            traffic=_matrix(traffic, n),
            unheard={int(k): int(unheard[k]) for k in np.flatnonzero(unheard)},
            alive=alive.astype(bool),
            curves=curves([reported.get(i + 1, {}) for i in range(self.n_rounds)], n),
            unheard_by=by,
        )

    def round_of(self, report: RoundReport) -> int:
        """Return the round of the algorithm that is over with an exchange; 0 or less: none yet."""
        return report.round - 1 - self.sealed

    def _round_of(self, report: RoundReport) -> int:
        return self.round_of(report)

    def _shown_rounds(self, rounds: int) -> int:
        return self.n_rounds

    def _in_words(self, report: RoundReport) -> list[str]:
        counts = {*_ABOUT_MESSAGES, RECEIVED, BYTES}
        metrics = {
            node: {name: value for name, value in own.items() if name not in counts}
            for node, own in report.metrics.items()
        }
        return super()._in_words(report._replace(metrics=metrics))

    def reports_of(self, report: RoundReport) -> dict[str, Matrix]:
        """Return what the nodes reported in an exchange, by name, NaN where nothing: (n_nodes,)."""
        rows: dict[str, Matrix] = {}
        for node, metrics in report.metrics.items():
            for name in metrics:
                about_messages = name in _ABOUT_MESSAGES or name.startswith(REJECTED)
                if node < self.topology.n_nodes and not about_messages:
                    row = rows.setdefault(name, np.full(self.topology.n_nodes, np.nan))
                    row[node] = metrics[name]
        return rows

    def settings(self) -> dict[str, Any]:
        """Return what makes two runs the same run; the network by a digest."""
        digest = hashlib.sha256()
        schedule = self.plan.schedule
        for round_ in range(1, 1 + (schedule.window if schedule.repeats else self.n_rounds)):
            weights = schedule.matrix(round_)
            for matrix in (weights.matrix, weights.topology.adjacency):
                for part in (matrix.indptr, matrix.indices, matrix.data):
                    digest.update(np.ascontiguousarray(part).tobytes())
        return {
            "network": f"{self.topology!r} {digest.hexdigest()[:16]}",
            "n_rounds": self.n_rounds,
            "faults": self.plan.faults,
            "staleness": self.plan.staleness,
            "sealed": self.sealed,
        }

    def _present(self, grid: Grid) -> dict[int, int]:
        """Return the present nodes; if too few are there for the topology, say so."""
        try:
            return super()._present(grid)
        except TooFewReplies as error:
            there = len([*grid.get_node_ids()])
            if there >= self.topology.n_nodes:
                raise
            # To begin with fewer breaks the network's paths.
            raise TooFewReplies(f"{error} Or make the topology of {there} nodes.") from None

    def _least_rounds(self) -> int:
        return self.exchanges

    def _first_model(self, initial: list[Matrix]) -> dict[str, Matrix]:
        """Return the arrays that nodes begin with, by name; here they have a start of their own."""
        if initial:
            raise ValueError(f"initial_arrays must be left out, got {len(initial)} arrays.")
        return {}

    def _node_config(self, start: Mapping[str, Matrix]) -> dict[str, Scalar]:
        """Return what every request says to the nodes besides, if they begin with these arrays."""
        return {}

    def protocol(self, initial: list[Matrix], state: State | None) -> Protocol:
        """Deliver messages round by round; nothing is combined here."""
        n = self.topology.n_nodes
        held = _Held(self.plan, self.sealed, self._first_model(initial))
        stranger = Delivery((), {} if self.sealed else None)  # for a client that is no node
        if state is not None:
            held.unpack(state)
        besides = self._node_config(held.start)
        if state is None and self.sealed:
            check = partial(_check_reply, ANNOUNCE, 1)
            config = {SEALED: True, **besides}
            first = stranger._replace(start=[*held.start.values()]).to_arrays()
            arrays = first if held.start else ()
            replies = yield Request(
                ANNOUNCE, arrays, config, check=check, model=(), max_weight=None
            )
            held.known = set(replies)
            held.keep_cards(replies)
        for round_ in range(held.round + 1, self.n_rounds + 2):
            asleep = np.flatnonzero(~self.plan.awake(round_))
            last = round_ > self.n_rounds
            deliveries = held.deliveries(round_)
            contents = defaultdict(
                stranger.to_arrays, {k: each.to_arrays() for k, each in deliveries.items()}
            )
            step = SHOW if last else EXCHANGE
            silent = int(self.sealed) if len(asleep) else None  # who sleeps sends at most a card
            config = {AT: round_, ASLEEP: " ".join(map(str, asleep)), SEALED: self.sealed}
            replies = yield Request(
                step,
                config={**config, **besides},
                state=held.pack(),
                check=partial(_check_reply, step, 1 if last else silent),
                own=contents.__getitem__,
                model=(),
                max_weight=None,
                expect=None,
            )
            held.count(replies, deliveries)
            if not last:
                held.take(replies, deliveries, round_)
        shown = {node: _opened(node, reply) for node, reply in replies.items() if node < n}
        there = np.isin(np.arange(n), list(shown))
        rows = _rows(shown, n)
        fields = [name for name in rows if name.startswith(STATE)]
        whole = np.all([np.full(n, bool(fields)), *(rows[name][1] for name in fields)], axis=0)
        states = {name: rows[name][0][whole[rows[name][1]]] for name in fields}
        alive = held.took_part if self.n_rounds else there & self.plan.awake(1)
        ended = {name: spread(*row) for name, row in rows.items()} | states
        ended |= {_TRAFFIC: _entries(held.traffic), _NODES: np.stack([held.unheard, alive, whole])}
        ended[_REJECTED] = held.rejections
        return [pack_arrays(ended)]


class FlowerNetwork:
    """Nodes of a Flower federation that send messages to their neighbors only.

    The counterpart of `flwr_perdl.network.InMemoryNetwork` on SuperNodes: every node runs a
    `flwr_perdl.clients.DiffusionClient` with the program and its own data.

    Parameters
    ----------
    grid : Grid
        Flower's grid: what the ServerApp's main function receives, or an
        `flwr_perdl.simulations.InProcessGrid`.
    topology, weights, faults, staleness
        As in `NeighborRelay`.
    sealed : bool, default False
        Whether messages are sealed.
    timeout : float, default 3600.0
        Seconds to wait for the replies of a round.
    **options
        See `ServerOptions`: ``checkpoint_dir``, ``seed``, ``server``, …

    Raises
    ------
    ValueError
        As `NeighborRelay`.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.clients import DiffusionClient, client_app
    >>> from flwr_perdl.network import Averaging, Topology
    >>> from flwr_perdl.simulations import InProcessGrid
    >>> from flwr_perdl.strategies import FlowerNetwork
    >>> values = {node: np.array([float(node)]) for node in range(4)}
    >>> app = client_app(lambda context: DiffusionClient(Averaging(values), context))
    >>> run = FlowerNetwork(InProcessGrid(app, 4), Topology.ring(4)).run(None, 30)
    >>> {name: value.ravel().round(3) for name, value in run.observed.items()}
    {'estimate': array([1.5, 1.5, 1.5, 1.5])}
    """

    #: The program that `run` is given is ignored: it may be None.
    nodes_have_programs = True

    def __init__(
        self,
        grid: Grid,
        topology: Topology | Schedule,
        weights: Weights = None,
        faults: Faults | None = None,
        *,
        staleness: int = 0,
        sealed: bool = False,
        timeout: float = 3600.0,
        **options: Unpack[ServerOptions],
    ) -> None:
        check_kind("grid", grid, Grid, "a Grid")
        check_real("timeout", timeout, 0)
        self.topology = topology
        self._grid, self._timeout, self._options = grid, timeout, options
        self._relay = partial(
            NeighborRelay,
            topology,
            weights=weights,
            faults=faults,
            staleness=staleness,
            sealed=sealed,
        )
        unused = self._relay(0, **options)  # refuses bad arguments at once
        self.plan = unused.plan
        #: What happened in every exchange of the last run: who was left out, and why.
        self.history: list[RoundReport] = unused.history

    def run(
        self,
        program: Any,
        n_rounds: int,
        *,
        state: None = None,
        callback: Callable[[int, Any], Any] | None = None,
        stop: None = None,
        on_report: Callable[[int, dict[str, Matrix]], Any] | None = None,
    ) -> Run:
        """Run the nodes' algorithm for some rounds.

        Parameters
        ----------
        program : object
            Ignored, and may be None: the nodes run their own.
        n_rounds : int
            Rounds, at least 0.
        state, stop : None
            Nodes keep their states. To continue a run, use ``checkpoint_dir`` and ``resume``.
        callback : callable, optional
            Called after every round with the round and None for the state.
        on_report : callable, optional
            Called after every round with the round and what the nodes report, as in
            `InMemoryNetwork.run`. The log has the means, and `NeighborRelay.history` all of it.

        Returns
        -------
        Run
            See `NeighborRelay.outcome`.

        Raises
        ------
        ValueError
            If ``state`` or ``stop`` is given.
        TooFewReplies
            If fewer than ``min_clients`` nodes reply in a round as a `DiffusionClient` does.
        """
        for name, given in (("state", state), ("stop", stop)):
            if given is not None:
                raise ValueError(f"{name} must be None on Flower, where nodes keep their states.")
        options = self._options.copy()
        failed: list[Exception] = []

        def tell(report: RoundReport) -> None:
            over = relay.round_of(report)
            try:
                if over > 0 and callback is not None:
                    callback(over, None)
                if over > 0 and on_report is not None:
                    on_report(over, relay.reports_of(report))
            except Exception as error:  # of the caller, whom it ends, as on other networks
                failed.append(error)

        options["on_round"] = [*observers(options.get("on_round")), tell]
        relay = self._relay(n_rounds, **options)
        try:
            relay.start(self._grid, timeout=self._timeout, should_stop=lambda *_: bool(failed))
        finally:
            self.history = relay.history
        if failed:
            raise failed[0]
        return relay.outcome


class _HeldMessage(NamedTuple):
    """A node's message of one round, as long as the server holds it.

    Attributes
    ----------
    floats : float
        Its size before it was sealed.
    arrays : dict of int to list of ndarray
        What each receiver gets; ``EVERYBODY`` where all get the same.
    """

    floats: float
    arrays: dict[int, Sequence[Matrix]]


class _Held:
    """What the server holds: messages in transit, the nodes' cards, and counts.

    Parameters
    ----------
    plan : Plan
        Who hears whom.
    sealed : bool
        Whether a node sends a message to each neighbor, or one to all.
    start : dict of str to ndarray
        What nodes without a state begin with.
    """

    def __init__(self, plan: Plan, sealed: bool, start: dict[str, Matrix]) -> None:
        n = plan.n_nodes
        self.plan, self.sealed, self.start = plan, sealed, start
        #: Who has a state, as far as it is known: nodes lose it while a run is not on.
        self.known: set[int] = set()
        self.round = 0
        self.took_part = np.zeros(n, dtype=bool)
        self.unheard = np.zeros(n)
        #: Sender and receiver, where the receiver has said that it has left out a message.
        self.rejected: set[tuple[int, int]] = set()
        self.traffic: Any = sparse.csr_array((n, n))
        self.cards: dict[int, Matrix] = {}
        #: By round and sender.
        self.messages: dict[tuple[int, int], _HeldMessage] = {}

    def deliveries(self, round_: int) -> dict[int, Delivery]:
        """Return what each node receives in an exchange: the messages of the round before."""
        n = self.plan.n_nodes
        messages: list[list[Message]] = [[] for _ in range(n)]
        totals = [1.0] * n
        if self.round:
            totals = self.plan.totals(self.round).tolist()
            links = self.plan.sources(self.round)
            for receiver, sender, late, weight in zip(*(x.tolist() for x in links), strict=True):
                held = self.messages.get((self.round - late, sender))
                arrays = held and held.arrays.get(receiver if self.sealed else EVERYBODY)
                served = [message.sender for message in messages[receiver][-1:]] == [sender]
                here = self.took_part[receiver] or self.plan.staleness
                if arrays is not None and here and not served:
                    messages[receiver].append(Message(sender, late, weight, arrays))
        hearers = sparse.csr_array(self.plan.hearing(round_).T) if self.sealed else None
        new, deliveries = [*self.start.values()], {}
        for node in range(n):
            cards = None
            if self.sealed:
                cards = {to: self.cards[to] for to in _row(hearers, node) if to in self.cards}
            start = [] if node in self.known else new
            deliveries[node] = Delivery(messages[node], cards, start, totals[node])
        return deliveries

    def count(self, replies: Replies, deliveries: Mapping[int, Delivery]) -> None:
        """Count what was heard: who answers has heard all messages that it has not left out."""
        n, left_out = self.plan.n_nodes, set()
        received: list[tuple[int, int, float]] = []
        for node, reply in replies.items():
            # A node that begins anew has no message with which it could combine those.
            reads = node in deliveries and ANEW not in reply.metrics
            for message in deliveries[node].messages if reads else ():
                if f"{REJECTED}{message.sender}" in reply.metrics:
                    left_out.add(message.sender)
                    self.rejected.add((message.sender, node))
                else:
                    held = self.messages[self.round - message.late, message.sender]
                    received.append((node, message.sender, held.floats))
        self.unheard[list(left_out)] += 1
        self.known = set(replies)
        if received:
            self.traffic = self.traffic + _matrix(np.array(received).T, n)

    @property
    def rejections(self) -> NDArray[np.int64]:
        """Who has said of whom that it has left out a message, ascending, (n, 2)."""
        return np.array(sorted(self.rejected), dtype=np.int64).reshape(-1, 2)

    def take(self, replies: Replies, deliveries: Mapping[int, Delivery], round_: int) -> None:
        """Take in the messages of a round, and forget those that are too old to be delivered."""
        n, faults = self.plan.n_nodes, self.plan.faults
        # Nothing is held for longer than it can count: the server is a relay, not an archive.
        oldest = round_ - self.plan.oldest
        self.messages = {key: held for key, held in self.messages.items() if key[0] >= oldest}
        awake, broken = self.plan.awake(round_), faults.broken(n, round_)
        self.round, self.took_part = round_, np.zeros(n, dtype=bool)
        if self.sealed:
            self.keep_cards(replies)
        for node, reply in replies.items():
            if node not in deliveries:
                log(WARNING, "Client %d is no node of a network of %d: it is left out.", node, n)
            elif awake[node]:
                self.took_part[node] = True
                cards = deliveries[node].cards
                addressed: dict[int, Sequence[Matrix]]
                flaw = ""
                if cards is None:  # open: one message for all
                    floats = float(sum(array.size for array in reply.arrays))
                    addressed = {EVERYBODY: reply.arrays}
                    if not reply.arrays:
                        flaw = "it has no arrays"
                else:  # the node's card, and a sealed message for each receiver
                    floats, sent = float(reply.metrics.get(FLOATS, 0.0)), reply.arrays[1:]
                    each = zip(cards, sent, strict=False)
                    addressed = {to: [array] for to, array in each if array.size}
                    if len(sent) != len(cards):
                        flaw = f"it is {len(sent)} sealed messages for {len(cards)} receivers"
                if BROKEN in reply.metrics:
                    flaw = "it has NaN or infinite values"
                elif broken[node]:
                    flaw = "a simulated fault broke it"
                if not flaw:
                    self.messages[round_, node] = _HeldMessage(floats, addressed)
                    continue
                self.unheard[node] += 1
                log(
                    WARNING,
                    "Round %d (%s): left out the message of node %d: %s",
                    *(round_ + self.sealed, EXCHANGE, node, flaw),
                )

    def keep_cards(self, replies: Replies) -> None:
        """Keep the nodes' public keys."""
        known = {node: reply.arrays[0] for node, reply in replies.items() if reply.arrays}
        # Cards of another size than most are no public keys, and would fail at every receiver.
        size = Counter(card.shape for card in known.values()).most_common(1)
        self.cards |= {node: card for node, card in known.items() if card.shape == size[0][0]}

    def pack(self) -> dict[str, NDArray[Any]]:
        """Return all of this as named arrays."""
        floats = [[*key, held.floats] for key, held in self.messages.items()]
        return {
            "round": np.array(self.round),
            "took_part": self.took_part.copy(),
            "unheard": self.unheard.copy(),
            "rejected": self.rejections,
            "traffic": _entries(self.traffic),
            "floats": np.array(floats, dtype=np.float64).reshape(-1, 3),
            **({"names": text_array([*self.start])} if self.start else {}),
            **{f"start/{i:06d}": array for i, array in enumerate(self.start.values())},
            **{f"card/{node}": card for node, card in self.cards.items()},
            **{
                "/".join(map(str, ("message", *key, receiver, i))): array
                for key, held in self.messages.items()
                for receiver, arrays in held.arrays.items()
                for i, array in enumerate(arrays)
            },
        }

    def unpack(self, state: State) -> None:
        """Continue from what `pack` returned."""
        self.round, self.took_part = int(state["round"]), state["took_part"].astype(bool)
        self.unheard = state["unheard"].copy()
        self.rejected = {(sender, receiver) for sender, receiver in state["rejected"].tolist()}
        self.traffic = _matrix(state["traffic"], self.plan.n_nodes)
        if "names" in state:
            arrays = [state[name] for name in sorted(state) if name.startswith("start/")]
            self.start = dict(zip(texts_of(state["names"]), arrays, strict=True))
        for round_, sender, floats in state["floats"]:
            self.messages[int(round_), int(sender)] = _HeldMessage(float(floats), {})
        for name, array in state.items():
            kind, *key = name.split("/")
            if kind == "card":
                self.cards[int(key[0])] = array
            elif kind == "message":
                round_, sender, receiver, _ = map(int, key)
                addressed = self.messages[round_, sender].arrays
                addressed[receiver] = [*addressed.get(receiver, ()), array]


def _row(matrix: Any, k: int) -> list[int]:
    """Return the columns that are stored in a row of a sparse matrix, ascending."""
    return sorted(matrix.indices[matrix.indptr[k] : matrix.indptr[k + 1]].tolist())


def _entries(matrix: Any) -> Matrix:
    """Return the rows, columns and values of a sparse matrix, (3, n_entries)."""
    entries = sparse.coo_array(matrix)
    return np.stack([*entries.coords, entries.data])


def _matrix(entries: Matrix, n: int) -> Any:
    """Return the sparse matrix of shape (n, n) with these entries; several at a place add up."""
    return sparse.csr_array((entries[2], entries[:2].astype(np.intp)), shape=(n, n))


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
    if step == EXCHANGE and FLOATS in reply.metrics:
        return
    if most is None:
        raise ValueError(f"metrics must have {FLOATS!r}, got none of that name: {_ONLY}")
    if len(reply.arrays) > most:
        raise ValueError(f"arrays must be at most {most} here, got {len(reply.arrays)}: {_ONLY}")
    for array in reply.arrays:
        try:
            unpack(array)
        except ValueError as error:
            raise ValueError(
                f"arrays must hold packed bytes, got other numbers: {_ONLY}"
            ) from error


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
