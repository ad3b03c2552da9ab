"""Neighbours that talk through the server: a distributed algorithm on a Flower federation.

Flower's nodes can reach the server only. Here the server hands on what one neighbour addressed to
another, and never combines: the algorithm, a `flwr_perdl.diffusion.Program`, runs at the nodes
(`flwr_perdl.clients.DiffusionClient`), each with its own data only.

=====================================  =========================================================
the algorithm                          here
=====================================  =========================================================
start, adapt, message of round one     the node's reply to the first ``"exchange"``
round i: what node k hears             the request of exchange i + 1 to node k
combine, adapt, message of round i+1   its reply
observe                                its reply to ``"show"``
=====================================  =========================================================

``n_rounds`` rounds of the algorithm take ``n_rounds + 1`` communication rounds, and one more for
the nodes' public keys where letters are sealed. Who does not answer is silent in that round: the
others' weights for it fall to themselves. Who comes late, or comes back under another node id, is
the node of its ``partition-id``, and goes on from the state that it has kept, or from its start.

What each party receives:

- *The server*: every message of every node, in the clear; with ``sealed=True`` its ciphertext and
  the nodes' public keys instead. In both cases: who wrote to whom and how many floats, who could
  not read what, and at the end what each node chooses to show. Never: data, or states that are
  neither sent nor shown.
- *A node*: the messages of the neighbours that it hears, with their ids, its weights for them, and
  their ages; sealed, also the public keys of those who hear it. With simulated faults: who sleeps.
- *A node that is no neighbour*: nothing.

What a message gives away is in the algorithm's docstring; it says so for neighbors that do as they
should. A neighbor that sends what it likes may learn samples (docs/security.md).
"""

from __future__ import annotations

import hashlib
from collections import Counter, namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from logging import WARNING
from typing import Any, NamedTuple, Unpack

import numpy as np
from flwr.app import ArrayRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray
from scipy import sparse

from flwr_perdl._checks import Matrix, check_count, check_flag, check_kind
from flwr_perdl._records import ANEW, Reply, brief, check_names
from flwr_perdl.clients.diffusion import (
    ANNOUNCE,
    ASLEEP,
    AT,
    BROKEN,
    EXCHANGE,
    FLOATS,
    REJECTED,
    SEALED,
    SHOW,
    STATE,
)
from flwr_perdl.diffusion.topology import CombinationMatrix, Topology
from flwr_perdl.network._exchange import Plan, Run, entries, spread
from flwr_perdl.network._packing import text_array, texts_of, unpack_arrays
from flwr_perdl.network.faults import Faults
from flwr_perdl.strategies._conversation import ServerOptions, ServerSettings
from flwr_perdl.strategies._protocol import Protocol, Replies, Request, RoundReport, State
from flwr_perdl.strategies._strategy import ProtocolStrategy

Weights = CombinationMatrix | Sequence[CombinationMatrix] | None

#: The "receiver" of a message that goes to all neighbours alike.
EVERYBODY = -1


class NeighborRelay(ProtocolStrategy):
    """Hand on what neighbours send each other while they run a distributed algorithm.

    Parameters
    ----------
    topology : Topology
        Who hears whom; node k is the client with ``partition-id`` k.
    n_rounds : int
        Rounds of the algorithm.
    weights : CombinationMatrix, or sequence of them, optional
        Combination weights; Metropolis weights by default. A sequence is cycled through.
    faults : Faults, optional
        Faults to simulate: the relay does not hand on what is lost, hands on late what is delayed,
        and tells nodes when to sleep; nothing by default. For delays the nodes' ``max_delay`` must
        allow them.
    sealed : bool, default False
        Whether nodes encrypt their letters (see `flwr_perdl.network.sealed`).
    **options
        See `ServerOptions`; ``num_clients`` is by default the number of nodes.

    Raises
    ------
    ValueError
        If an option breaks its rule, or weights and topology differ in their numbers of nodes.

    Notes
    -----
    Floats per node and round: its message up (sealed: once per neighbour, a seventh more, and about
    ninety for keys and headers), its neighbours' messages down. A checkpoint holds the messages in
    transit. ``outcome`` has the result.
    """

    flags = (ANEW, BROKEN, f"{REJECTED}*")

    def __init__(
        self,
        topology: Topology,
        n_rounds: int,
        *,
        weights: Weights = None,
        faults: Faults | None = None,
        sealed: bool = False,
        **options: Unpack[ServerOptions],
    ) -> None:
        n = check_kind("topology", topology, Topology, "a Topology").n_nodes
        check_kind("faults", faults, (Faults, type(None)), "a Faults or None")
        several = list(weights) if isinstance(weights, Sequence) else [weights]
        for one in [] if weights is None else several:
            check_kind("weights", one, CombinationMatrix, "a CombinationMatrix or several")
        if options.get("fraction_evaluate"):
            raise ValueError(
                f"fraction_evaluate must be 0, got {options['fraction_evaluate']}: there is no "
                "model to evaluate, and no node may see what the others show."
            )
        server = ServerOptions(num_clients=n, min_clients=min(2, n), fraction_evaluate=0.0)
        server.update(options)
        super().__init__(**server)
        self.topology = topology
        self.n_rounds = check_count("n_rounds", n_rounds)
        self.plan = Plan.make(topology, weights, faults)
        self.sealed = check_flag("sealed", sealed)

    @property
    def exchanges(self) -> int:
        """Communication rounds that the run takes: ``num_rounds`` of `start`."""
        return self.n_rounds + 1 + self.sealed

    @property
    def outcome(self) -> Run:
        """How the run ended.

        ``state`` is None unless every node shows its own; what a node did not show is NaN.
        ``unheard`` counts the rounds in which a node's message was broken, or left out by one who
        received it.

        Raises
        ------
        RuntimeError
            If the run is not over.
        """
        if self._conversation is None or not self._conversation.finished:
            raise RuntimeError(f"the run must be over, which takes {self.exchanges} exchanges.")
        n = self.topology.n_nodes
        *shown, traffic, (unheard, alive), (whole,), names = self._conversation.model
        named = dict(zip(texts_of(names), shown, strict=True))
        state = {name: rows for name, rows in named.items() if name.startswith(STATE)}
        return Run(
            state=_state(state) if whole else None,
            observed={name: rows for name, rows in named.items() if name not in state},
            rounds=self.n_rounds,
            floats_sent=float(traffic[2].sum()),
            traffic=sparse.csr_array((traffic[2], traffic[:2].astype(np.intp)), shape=(n, n)),
            unheard={int(k): int(unheard[k]) for k in np.flatnonzero(unheard)},
            alive=alive.astype(bool),
        )

    def settings(self) -> dict[str, Any]:
        """Return what makes two runs the same run; the network by a digest."""
        digest = hashlib.sha256()
        for weights in self.plan.matrices:
            for matrix in (weights.matrix, weights.topology.adjacency):
                for part in (matrix.indptr, matrix.indices, matrix.data):
                    digest.update(np.ascontiguousarray(part).tobytes())
        return {
            "network": f"{self.topology!r} {digest.hexdigest()[:16]}",
            "n_rounds": self.n_rounds,
            "faults": repr(self.plan.faults),
            "sealed": self.sealed,
        }

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        *args: Any,
        **options: Any,
    ) -> Result:
        """Run to the end: ``num_rounds`` is by default ``exchanges``."""
        rounds = self.exchanges if num_rounds is None else num_rounds
        return super().start(grid, initial_arrays, rounds, *args, **options)

    def protocol(self, initial: list[Matrix], state: State | None) -> Protocol:
        """Hand on, round by round; nothing is combined here."""
        if initial:
            raise ValueError(f"initial_arrays must be left out, got {len(initial)} arrays.")
        faults, n = self.plan.faults, self.topology.n_nodes
        post = _Post(self.plan, self.sealed)
        if state is not None:
            post.unpack(state)
        elif self.sealed:
            post.keep_cards((yield Request(ANNOUNCE, config={SEALED: True})))
        for round_ in range(post.round + 1, self.n_rounds + 2):
            asleep = np.flatnonzero(~faults.awake(n, round_))
            last = round_ > self.n_rounds
            bags = post.bags(round_)
            replies = yield Request(
                SHOW if last else EXCHANGE,
                config={AT: round_, ASLEEP: " ".join(map(str, asleep)), SEALED: self.sealed},
                state=post.pack(),
                own=_contents(bags),
                model=(),
            )
            post.count(replies, bags)
            if not last:
                post.take(replies, bags, round_)
        shown = {node: _opened(node, reply) for node, reply in replies.items() if node < n}
        there = np.isin(np.arange(n), list(shown))
        rows = _rows(shown, n)
        whole = [nodes.all() for name, (_, nodes) in rows.items() if name.startswith(STATE)]
        traffic = sparse.coo_array(post.traffic)
        alive = post.took_part if self.n_rounds else there & faults.awake(n, 1)
        return [
            *(spread(*row) for row in rows.values()),
            np.stack([*traffic.coords, traffic.data]),
            np.stack([post.unheard, alive]),
            np.array([float(bool(whole) and all(whole))]),
            text_array(list(rows)),
        ]


class FlowerNetwork:
    """Nodes of a Flower federation that talk to their neighbours only.

    What `flwr_perdl.network.InMemoryNetwork` is in one process, on SuperNodes: every node runs a
    `flwr_perdl.clients.DiffusionClient` with the program and its own data.

    Parameters
    ----------
    grid : Grid
        Flower's grid: what the ServerApp's main function receives, or an
        `flwr_perdl.simulations.InProcessGrid`.
    topology, weights, faults
        As in `NeighborRelay`.
    sealed : bool, default False
        Whether nodes encrypt what they write to each other.
    timeout : float, default 3600.0
        Seconds to wait for the replies of a round.
    **options
        See `ServerOptions`: ``checkpoint_dir``, ``seed``, ``server``, …

    Raises
    ------
    ValueError
        As `NeighborRelay`.
    """

    def __init__(
        self,
        grid: Grid,
        topology: Topology,
        weights: Weights = None,
        faults: Faults | None = None,
        *,
        sealed: bool = False,
        timeout: float = 3600.0,
        **options: Unpack[ServerOptions],
    ) -> None:
        self.topology = topology
        self._grid, self._timeout, self._options = grid, timeout, options
        self._relay = partial(
            NeighborRelay, topology, weights=weights, faults=faults, sealed=sealed
        )
        self.plan = self._relay(0, **options).plan  # also to say at once what is wrong

    def run(
        self,
        program: Any,
        n_rounds: int,
        *,
        state: None = None,
        callback: Callable[[int, Any], Any] | None = None,
        stop: None = None,
    ) -> Run:
        """Run the nodes' algorithm for some rounds.

        Parameters
        ----------
        program : object
            Not looked at, and may be None: the nodes run their own.
        n_rounds : int
            Rounds, at least 0.
        state : None
            Nodes keep their states: go on with the options ``checkpoint_dir`` and ``resume``.
        callback : callable, optional
            Called with the round, and None for the state, when the server knows that a round is
            over.
        stop : None
            Nobody sees the states by which to stop.

        Returns
        -------
        Run
            See `NeighborRelay.outcome`.

        Raises
        ------
        ValueError
            If ``state`` or ``stop`` is given.
        TooFewReplies
            If fewer than ``min_clients`` nodes answer in a round.
        """
        for name, given in (("state", state), ("stop", stop)):
            if given is not None:
                raise ValueError(f"{name} must be None on Flower, where nodes keep their states.")
        options = self._options.copy()
        if callback is not None:
            telling = _telling(callback, self._relay(n_rounds, **options))
            options["server"] = replace(options.get("server", ServerSettings()), on_round=telling)
        relay = self._relay(n_rounds, **options)
        relay.start(self._grid, timeout=self._timeout)
        return relay.outcome


class _Bag(NamedTuple):
    """What a node receives in one exchange.

    Attributes
    ----------
    arrays : list of ndarray
        The request's arrays.
    letters : list of (int, int)
        Sender and round of each letter in it.
    receivers : list of int
        To whom it is to write.
    """

    arrays: list[Matrix]
    letters: list[tuple[int, int]]
    receivers: list[int]


class _Post:
    """What the server holds: messages in transit, public keys, and what it has counted.

    Parameters
    ----------
    plan : Plan
        Who hears whom.
    sealed : bool
        Whether a message is one text for all neighbours or a letter for each.
    """

    def __init__(self, plan: Plan, sealed: bool) -> None:
        n = plan.n_nodes
        self.plan, self.sealed = plan, sealed
        self.round = 0
        self.took_part = np.zeros(n, dtype=bool)
        self.unheard = np.zeros(n)
        self.traffic: Any = sparse.csr_array((n, n))
        self.cards: dict[int, Matrix] = {}
        #: By round and sender: floats of the message; and, by receiver too, what is handed on.
        self.floats: dict[tuple[int, int], float] = {}
        self.texts: dict[tuple[int, int, int], list[Matrix]] = {}

    def bags(self, round_: int) -> dict[int, _Bag]:
        """Return what each node receives in an exchange: the letters of the round before."""
        n = self.plan.n_nodes
        rows: list[list[list[float]]] = [[] for _ in range(n)]
        letters: list[list[tuple[int, int]]] = [[] for _ in range(n)]
        texts: list[list[Matrix]] = [[] for _ in range(n)]
        if self.round:
            links = self.plan.links(self.round)
            late = self.plan.faults.delays(links, self.round)
            k, j = sparse.coo_array(links).coords
            weights = entries(self.plan.matrix(self.round).matrix, k, j)
            for receiver, sender, age, weight in zip(
                k.tolist(), j.tolist(), late.tolist(), weights.tolist(), strict=True
            ):
                when = self.round - age
                text = self.texts.get((when, sender, receiver if self.sealed else EVERYBODY))
                if text is not None and self.took_part[receiver]:
                    rows[receiver].append([sender, age, weight, len(text)])
                    letters[receiver].append((sender, when))
                    texts[receiver] += text
        hearers = sparse.csr_array(self.plan.hearing(round_).T)
        bags = {}
        for node in range(n):
            arrays: list[Matrix] = [np.array(rows[node], dtype=np.float64).reshape(-1, 4)]
            out = hearers.indices[hearers.indptr[node] : hearers.indptr[node + 1]].tolist()
            receivers = sorted(receiver for receiver in out if receiver in self.cards)
            if self.sealed:
                cards = [self.cards[receiver] for receiver in receivers]
                arrays += [
                    np.array(receivers, dtype=np.float64),
                    np.stack(cards) if cards else np.zeros((0, 1)),
                ]
            bags[node] = _Bag(arrays + texts[node], letters[node], receivers)
        return bags

    def count(self, replies: Replies, bags: Mapping[int, _Bag]) -> None:
        """Count what was heard: a node that answers has heard its letters but those it left out."""
        n, left_out = self.plan.n_nodes, set()
        heard: list[tuple[int, int, float]] = []
        for node, reply in replies.items():
            for sender, when in bags[node].letters if node in bags else ():
                if f"{REJECTED}{sender}" in reply.metrics:
                    left_out.add(sender)
                else:
                    heard.append((node, sender, self.floats[when, sender]))
        self.unheard[list(left_out)] += 1
        if heard:
            k, j, floats = zip(*heard, strict=True)
            self.traffic = self.traffic + sparse.csr_array((floats, (k, j)), shape=(n, n))

    def take(self, replies: Replies, bags: Mapping[int, _Bag], round_: int) -> None:
        """Take in the messages of a round, and forget those that are too old to be handed on."""
        n, faults = self.plan.n_nodes, self.plan.faults
        oldest = round_ - faults.max_delay
        self.texts = {key: text for key, text in self.texts.items() if key[0] >= oldest}
        self.floats = {key: floats for key, floats in self.floats.items() if key[0] >= oldest}
        awake, broken = faults.awake(n, round_), faults.broken(n, round_)
        self.round, self.took_part = round_, np.zeros(n, dtype=bool)
        if self.sealed:
            self.keep_cards(replies)
        for node, reply in replies.items():
            if node not in bags:
                log(WARNING, "Client %d is no node of a network of %d: it is left out.", node, n)
            elif awake[node]:
                self.took_part[node] = True
                texts = self._texts(reply, bags[node].receivers)
                if broken[node] or texts is None:
                    self.unheard[node] += 1
                    continue
                self.texts.update({(round_, node, to): text for to, text in texts.items()})
                plain = sum(array.size for array in reply.arrays)
                floats = reply.metrics.get(FLOATS, 0.0) if self.sealed else plain
                self.floats[round_, node] = float(floats)

    def _texts(self, reply: Reply, receivers: list[int]) -> dict[int, list[Matrix]] | None:
        """Return what a node sends, by receiver; None if it is broken."""
        if BROKEN in reply.metrics:
            return None
        if not self.sealed:
            return {EVERYBODY: reply.arrays} if reply.arrays else None
        letters = reply.arrays[1:]
        if len(letters) != len(receivers):
            return None
        return {to: [letter] for to, letter in zip(receivers, letters, strict=True) if letter.size}

    def keep_cards(self, replies: Replies) -> None:
        """Keep the nodes' public keys."""
        known = {node: reply.arrays[0] for node, reply in replies.items() if reply.arrays}
        size = Counter(card.shape for card in known.values()).most_common(1)
        self.cards |= {node: card for node, card in known.items() if card.shape == size[0][0]}

    def pack(self) -> dict[str, NDArray[Any]]:
        """Return all of this as named arrays."""
        traffic = sparse.coo_array(self.traffic)
        floats = [[*key, value] for key, value in self.floats.items()]
        return {
            "round": np.array(self.round),
            "took_part": self.took_part.copy(),
            "unheard": self.unheard.copy(),
            "traffic": np.stack([*traffic.coords, traffic.data]),
            "floats": np.array(floats, dtype=np.float64).reshape(-1, 3),
            **{f"card/{node}": card for node, card in self.cards.items()},
            **{
                "/".join(map(str, ("text", *key, i))): array
                for key, text in self.texts.items()
                for i, array in enumerate(text)
            },
        }

    def unpack(self, state: State) -> None:
        """Take up what `pack` returned."""
        n = self.plan.n_nodes
        self.round, self.took_part = int(state["round"]), state["took_part"].astype(bool)
        self.unheard = state["unheard"].copy()
        k, j, floats = state["traffic"]
        self.traffic = sparse.csr_array((floats, (k.astype(np.intp), j.astype(np.intp))), (n, n))
        self.floats = {(int(r), int(k)): float(size) for r, k, size in state["floats"]}
        for name, array in state.items():
            kind, *key = name.split("/")
            if kind == "card":
                self.cards[int(key[0])] = array
            elif kind == "text":
                round_, sender, receiver, _ = map(int, key)
                self.texts.setdefault((round_, sender, receiver), []).append(array)


def _contents(bags: Mapping[int, _Bag]) -> Callable[[int], Sequence[Matrix]]:
    """Return who receives which arrays; one that is no node of the network receives no letters."""
    stranger: list[Matrix] = [np.zeros((0, 4)), np.zeros(0), np.zeros((0, 1))]
    return lambda node: bags[node].arrays if node in bags else stranger


def _opened(node: int, reply: Reply) -> dict[str, Matrix]:
    """Return what a node shows; nothing if it cannot be read."""
    if not reply.arrays:
        return {}
    try:
        shown = unpack_arrays(reply.arrays[0])
        check_names("arrays", shown)
    except ValueError as error:
        log(WARNING, "What node %d shows is left out: %s", node, brief(str(error)))
        return {}
    return {name: array for name, array in shown.items() if array.shape[:1] == (1,)}


def _rows(
    shown: Mapping[int, Mapping[str, Matrix]], n_nodes: int
) -> dict[str, tuple[Matrix, NDArray[np.bool_]]]:
    """Return what the nodes showed, by name, and which nodes; of the form that most have."""
    names = dict.fromkeys(name for own in shown.values() for name in own)
    forms = {node: {k: (v.shape, v.dtype) for k, v in own.items()} for node, own in shown.items()}
    rows = {}
    for name in names:
        most = Counter(form[name] for form in forms.values() if name in form).most_common(1)[0][0]
        nodes = [node for node, form in forms.items() if form.get(name) == most]
        stacked = np.concatenate([shown[node][name] for node in nodes])
        rows[name] = stacked, np.isin(np.arange(n_nodes), nodes)
    return rows


def _state(fields: Mapping[str, Matrix]) -> Any:
    """Return a state of these fields."""
    make: Any = namedtuple
    return make("State", [name.removeprefix(STATE) for name in fields])(*fields.values())


def _telling(
    callback: Callable[[int, Any], Any], relay: NeighborRelay
) -> Callable[[RoundReport], None]:
    """Return the relay's ``on_round``, which also tells which round of the algorithm is over."""

    def tell(report: RoundReport) -> None:
        if relay.options.on_round is not None:
            relay.options.on_round(report)
        over = report.round - relay.exchanges + relay.n_rounds
        if over > 0:
            callback(over, None)

    return tell
