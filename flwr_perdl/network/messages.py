"""Messages between neighbors: which of them count, their records, and their form on Flower's wire.

A request of the server to a node is a `Delivery`: the `Message` of every neighbor that it hears,
and whose public keys it needs for its own next one. `neighborhood_of` says which messages count,
and with which weights. The arrays of a node's reply are its message, none if it is asleep or its
message is not finite; where messages are *sealed* (`flwr_perdl.privacy.sealed`) its card, and then
a message for each receiver, in the order of `Delivery.cards`, of size 0 where a card was rejected.

In memory a `Mailbox` keeps the messages of the last rounds, of all nodes in stacks; a server has a
`MessageStore` of single messages that it need not be able to read. Which of them arrive,
`LinkPlan.sources` and `Links.first` say for both, and `shared_weights` says what a node does
without the others.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from math import isfinite, nan
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from flwr_perdl.core.aggregate import NEIGHBOR_RULES
from flwr_perdl.core.arrays import Array, count_values, row_norms
from flwr_perdl.core.checks import FLOATS, Matrix, check_array
from flwr_perdl.core.models import blocks, magnitude
from flwr_perdl.core.npy import text_array, texts_of
from flwr_perdl.network.combine import Inbox
from flwr_perdl.network.schedule import LinkPlan
from flwr_perdl.network.topology import Csr

#: The "receiver" of a message that is the same for all neighbors.
EVERYBODY = -1
#: Up to here every whole number is a float.
_LARGEST = 2**53


class Rejected(ValueError):
    """A message, or a card, that is refused; the text says why."""


class Message(NamedTuple):
    """One neighbor's message to one node, sent ``late`` rounds ago.

    ``weight`` is the receiver's combination weight for the sender; the arrays are the sender's own,
    without an axis of nodes; sealed it is one array of numbers that carry its bytes.
    """

    sender: int
    late: int
    weight: float
    arrays: Sequence[Array]


class Delivery(NamedTuple):
    """What the server hands to a node in an exchange.

    On the wire: a table with a row (sender, rounds late, weight, number of arrays) per message;
    where messages are sealed, the receivers and their cards, else None, public keys of those who
    may hear the node's next message; then the arrays of all messages, and last those that a node
    without a state begins with (``start``). ``total`` is what the weights sum to, the node's own
    included; if not one, it is a row of no arrays, -1 rounds late.
    """

    messages: Sequence[Message] = ()
    cards: Mapping[int, Array] | None = None
    start: Sequence[Array] = ()
    total: float = 1.0

    def to_arrays(self) -> list[Array]:
        """Return the arrays of the request."""
        rows = [[m.sender, m.late, m.weight, len(m.arrays)] for m in self.messages]
        rows += [[0, -1, self.total, 0]] if self.total != 1 else []
        arrays: list[Array] = [np.array(rows, dtype=np.float64).reshape(-1, 4)]
        if self.cards is not None:
            cards = np.stack([*self.cards.values()]) if self.cards else np.zeros((0, 1), np.uint8)
            arrays += [np.array([*self.cards], dtype=np.float64), cards]
        sent = [array for message in self.messages for array in message.arrays]
        return [*arrays, *sent, *self.start]

    @classmethod
    def from_arrays(cls, arrays: Sequence[Matrix], sealed: bool) -> Delivery:
        """Return what the arrays of a request mean, checked."""
        fewest = 3 if sealed else 1
        if len(arrays) < fewest:
            raise ValueError(f"parameters must have {fewest} arrays or more, got {len(arrays)}.")
        table = check_array("messages", arrays[0], columns=4).tolist()
        _check_whole("messages", [number for row in table for number in (row[0], row[3])])
        _check_whole("rounds late", [abs(row[1]) for row in table])
        own = [row for row in table if row[1] < 0 and not row[3]]
        total = max((row[2] for row in own), default=1.0)
        table = [row for row in table if row not in own] if own else table
        weights = [row[2] for row in table]
        if min(weights, default=0) < 0 or sum(weights) > total + 1e-9:
            raise ValueError(f"weights must be from 0 on, {total:g} in all at most, got {weights}.")
        cards = None
        if sealed:
            receivers = check_array("receivers", arrays[1], ndim=1).tolist()
            _check_whole("receivers", receivers)
            keys = arrays[2]
            if keys.dtype != np.uint8 or keys.ndim != 2 or len(keys) != len(receivers):
                raise ValueError(
                    f"cards must be the bytes of {len(receivers)} receivers, got {keys.dtype} of "
                    f"shape {keys.shape}."
                )
            cards = dict(zip(map(int, receivers), keys, strict=True))
        messages, at = [], fewest
        for sender, late, weight, n_arrays in table:
            end = at + int(n_arrays)
            messages.append(Message(int(sender), int(late), weight, arrays[at:end]))
            at = end
        return cls(messages, cards, arrays[at:], total)


@dataclass(frozen=True, eq=False)
class Neighborhood:
    """A node's own message and those of its neighbors that count, in a round.

    Attributes
    ----------
    round : int
        The round, from 1.
    own : int
        Where the node's own message stands among all.
    senders, messages, sizes : list
        All senders, their messages, and of each the largest absolute value of each array.
    weights : list of float
        The combination weights; they sum to what the network's do.
    rejected : collection of int
        Where the messages stand that the node has rejected.
    """

    round: int
    own: int
    senders: list[int]
    messages: list[Sequence[Array]]
    sizes: list[Sequence[float]]
    weights: list[float]
    rejected: Collection[int] = ()

    @property
    def neighbors(self) -> list[int]:
        """Where the neighbors' messages stand."""
        return [j for j in range(len(self.senders)) if j != self.own and j not in self.rejected]

    @property
    def terms(self) -> list[int]:
        """Where the messages stand that are combined, by sender's id: the order of every sum."""
        there = [j for j, weight in enumerate(self.weights) if weight]
        return sorted(there, key=self.senders.__getitem__)

    @property
    def inbox(self) -> Inbox:
        """These messages as a `Program` receives them."""
        n, own, others = len(self.senders), np.array([self.own]), np.array(self.neighbors, int)
        values = np.array([self.weights])
        arrays = tuple(map(np.stack, zip(*self.messages, strict=True)))
        at = np.flatnonzero(values)
        weights = _by_rows(values[0, at], np.zeros_like(at), at, (1, n))
        links = _by_rows(np.ones(len(others)), np.zeros_like(others), others, (1, n))
        senders = np.array(self.senders)
        return Inbox(self.round, senders[own], senders, arrays, weights, links, own)

    def without(self, rejected: Collection[int]) -> Neighborhood:
        """Return the messages but those at these places, whose weights fall to the node itself."""
        lost = sum(self.weights[j] for j in sorted(rejected))
        weights = [0.0 if j in rejected else weight for j, weight in enumerate(self.weights)]
        weights[self.own] += lost
        return replace(self, weights=weights, rejected=rejected)

    def mean(self, k: int) -> Array:
        """Return the weighted mean of the k-th array of the messages."""
        return self.mean_of([message[k] for message in self.messages])

    def mean_of(self, rows: Sequence[Array]) -> Array:
        """Return the weighted mean of an array of each message.

        Half floats are averaged in float32, integers in float64.
        """
        first = rows[self.own]
        if (dtype := first.dtype) not in FLOATS:
            dtype = np.dtype(np.float32 if dtype.kind == "f" else np.float64)
        total = np.zeros(first.size, dtype)
        terms = [(dtype.type(self.weights[j]), rows[j].reshape(-1)) for j in self.terms]
        for part in blocks(first.size):
            into = total[part]
            for weight, flat in terms:
                into += weight * flat[part].astype(dtype, copy=False)
        return total.reshape(first.shape)

    def robust_means(self, places: Sequence[int], rule: str, n_liars: int) -> Iterator[Array]:
        """Yield what a rule makes of each of these arrays.

        The distances of messages are sums over arrays, which are read twice, one at a time.
        """
        terms = [j for j in self.terms if j != self.own]
        squares = np.zeros(len(terms))

        def rows(k: int) -> tuple[Array, Array]:
            own = self.messages[self.own][k].ravel()
            dtype = np.result_type(own, np.float32)
            others = np.array([self.messages[j][k].ravel() for j in terms], dtype)
            return own.astype(dtype, copy=False), others.reshape(len(terms), own.size)

        for k in places:
            own, others = rows(k)
            squares += np.square(row_norms(others - own))
        for k in places:
            own, others = rows(k)
            weights = np.array([self.weights[j] for j in terms], own.dtype)
            mean = NEIGHBOR_RULES[rule](own, others, weights, n_liars, np.sqrt(squares))
            yield mean.reshape(self.messages[self.own][k].shape)


def neighborhood_of(
    node: int,
    round_: int,
    own: Sequence[Array],
    sizes: Sequence[float],
    delivery: Delivery,
    *,
    staleness: int = 0,
    unseal: Callable[[Array, int, int], Sequence[Array]] | None = None,
    half: bool = False,
) -> tuple[Neighborhood, dict[int, str]]:
    """Return what a node combines of what it received, by the rules of `Mailbox`.

    A message counts if it comes from another node and is at most ``staleness`` rounds late, is the
    first from that sender and round, can be unsealed, has the shapes and dtypes of the node's own
    message, and is finite. Returned are also the senders of the others, with the reason.

    Parameters
    ----------
    node, round_ : int
        The receiver, and the round, from 1.
    own, sizes : sequence of ndarray, sequence of float
        Its own message, and the largest absolute value of each array.
    delivery : Delivery
        What it received.
    staleness : int, default 0
        How many rounds late a message may be.
    unseal : callable, optional
        ``unseal(array, sender, round)`` returns the arrays of a sealed message or raises
        `Rejected`.
    half : bool, default False
        Whether half floats stand for floats of the own message's dtypes.
    """
    form = [(array.shape, array.dtype) for array in own]
    good: dict[tuple[int, int], tuple[float, Sequence[Array], Sequence[float]]] = {}
    left_out: dict[int, str] = {}
    for sender, late, weight, arrays in delivery.messages:
        try:
            if not 0 <= late <= min(staleness, round_ - 1):
                raise Rejected(f"it is {late} rounds late")
            if sender == node or (late, sender) in good:
                raise Rejected("it is the node's own, or a second one")
            if unseal is not None:
                if len(arrays) != 1:
                    raise Rejected(f"it has {len(arrays)} arrays, and is not sealed")
                arrays = unseal(arrays[0], sender, round_ - late)
            if half and len(arrays) == len(own):
                arrays = [*starmap(_restored, zip(arrays, own, strict=True))]
            alike = [(array.shape, array.dtype) for array in arrays] == form
            largest = [*map(magnitude, arrays)] if alike else [nan]
            if not all(map(isfinite, largest)):
                raise Rejected("it has another form, or NaN or infinite values")
            good[late, sender] = weight, arrays, largest
        except Rejected as reason:
            left_out[sender] = str(reason)
    sound = np.array([all(map(isfinite, sizes))])
    if not sound:
        own, sizes = [*map(np.zeros_like, own)], [0.0] * len(own)
    # The node's own message stands among the others in the order of (late, sender).
    good[0, node] = 0.0, own, sizes
    order = sorted(good)
    given, messages, all_sizes = map(list, zip(*(good[key] for key in order), strict=True))
    at, n = order.index((0, node)), len(order)
    columns = np.delete(np.arange(n), at)
    places, totals = (np.zeros_like(columns), columns), np.array([delivery.total])
    shared = shared_weights(np.delete(given, at), places, np.array([at]), sound, totals)
    weights = np.zeros(n)
    weights[shared[2]] = shared[0]
    senders = [sender for _, sender in order]
    found = Neighborhood(round_, at, senders, messages, all_sizes, weights.tolist())
    return found, left_out


def _restored(array: Array, own: Array) -> Array:
    """Return half floats as floats of another array's dtype, everything else as it is."""
    is_half = array.dtype == np.float16 and own.dtype.kind == "f"
    return array.astype(own.dtype) if is_half else array


class Mailbox:
    """Messages of the last rounds in memory, and the inbox of all nodes."""

    def __init__(self, plan: LinkPlan) -> None:
        self.plan = plan
        self.nodes = np.arange(plan.n_nodes)
        #: In which round whose message was left out, and by whom (see `tally`).
        self.left_out: set[tuple[int, int, int]] = set()
        self._traffic: Csr = sparse.csr_array((plan.n_nodes, plan.n_nodes))
        self._last: deque[tuple[tuple[Array, ...], NDArray[np.bool_]]] = deque(
            maxlen=plan.staleness + 1
        )  # messages, and which of them can be heard
        #: By the turn of the schedule, where all messages arrive: weights and links of the inbox,
        #: and the floats that each link has carried. A sparse sum takes longer than a round.
        self._routes: dict[int, tuple[Csr, Csr]] = {}
        self._floats: dict[int, float] = {}

    def inbox(self, round_: int, arrays: tuple[Array, ...]) -> Inbox:
        """Return what the nodes hear in a round.

        Parameters
        ----------
        round_ : int
            The round, from 1.
        arrays : tuple of ndarray of shape (n_nodes, ...)
            The nodes' messages of the round; those of nodes that are asleep are ignored.
        """
        finite, sent = finite_rows(arrays), self.plan.awake(round_)
        if not finite.all():
            arrays = tuple(array.copy() for array in arrays)
            for array in arrays:
                array[~finite] = 0
            broken = np.flatnonzero(~finite & sent).tolist()
            self.left_out |= {(round_, node, node) for node in broken}
        received = finite & sent
        # As many rounds are held as a message can be old; the newest stands first, at late = 0.
        self._last.appendleft((arrays, received))
        senders, stacked = self.nodes, arrays
        if len(self._last) > 1:
            senders = np.tile(senders, len(self._last))
            stacked = tuple(
                np.concatenate([old[i] for old, _ in self._last]) for i in range(len(arrays))
            )
        # Without faults the routes of a round are those of any other with its matrix: kept.
        schedule = self.plan.schedule
        faulty = self.plan.faults.drop or self.plan.staleness or schedule.present
        simple = schedule.repeats and not faulty and bool(received.all())
        self._turn = schedule.turn(round_) if simple else None
        route = None if self._turn is None else self._routes.get(self._turn)
        if route is None:
            route = self._route(round_, len(senders), finite)
            if self._turn is not None:
                self._routes[self._turn] = route
        return Inbox(round_, self.nodes, senders, stacked, *route, self.nodes)

    def count(self, inbox: Inbox) -> None:
        """Count the messages of an inbox."""
        floats = count_values(*(rows[0] for rows in inbox.arrays))
        if self._turn is not None:
            self._floats[self._turn] = self._floats.get(self._turn, 0.0) + floats
            return
        self._traffic = self._traffic + self._carried(inbox.links, inbox.senders, floats)

    def _route(self, round_: int, n_columns: int, sound: NDArray[np.bool_]) -> tuple[Csr, Csr]:
        """Return the round's weights and links over the stacked messages."""
        n, links = self.plan.n_nodes, self.plan.sources(round_)
        received = np.stack([received for _, received in self._last])
        # A message can be from before the first round: it was never sent.
        there = links.late < len(received)
        there[there] = received[links.late[there], links.senders[there]]
        links = links.first(there)
        places = links.receivers, links.late * n + links.senders
        totals, shape = self.plan.totals(round_), (n, n_columns)
        weights = shared_weights(links.weights, places, self.nodes, sound, totals)
        return _by_rows(*weights, shape), _by_rows(np.ones(len(links.weights)), *places, shape)

    @property
    def traffic(self) -> Csr:
        """Floats that node k has heard from node j so far, shape (n_nodes, n_nodes)."""
        on_all_links = (
            self._carried(self._routes[turn][1], self.nodes, floats)
            for turn, floats in self._floats.items()
        )
        return sum(on_all_links, self._traffic)

    def _carried(self, links: Csr, senders: NDArray[np.intp], floats: float) -> Csr:
        """Return the floats that the links of an inbox have carried, (n_nodes, n_nodes)."""
        rows, columns = sparse.coo_array(links).coords
        entries = np.array([rows, senders[columns], np.full(len(rows), floats)])
        return matrix_of(entries, self.plan.n_nodes)


class MessageStore:
    """Messages in transit through a server, each for its receiver: what `Mailbox` is in memory.

    Parameters
    ----------
    plan : LinkPlan
        Which nodes are neighbors.
    sealed : bool
        Whether a node sends a message to each neighbor, or one to all.
    start : dict of str to ndarray
        What nodes without a state begin with.
    """

    def __init__(
        self, plan: LinkPlan, sealed: bool = False, start: Mapping[str, Matrix] = {}
    ) -> None:
        n = plan.n_nodes
        self.plan, self.sealed, self.start = plan, sealed, dict(start)
        #: Who has a state, as far as it is known: nodes lose it while a run is not on.
        self.known: set[int] = set()
        self.round = 0
        self.took_part = np.zeros(n, dtype=bool)
        #: In which round whose message was left out, and by whom (see `tally`).
        self.left_out: set[tuple[int, int, int]] = set()
        self.traffic: Csr = sparse.csr_array((n, n))
        self.cards: dict[int, Matrix] = {}
        # By round and sender: the size before it was sealed, and the arrays by receiver.
        self._floats: dict[tuple[int, int], float] = {}
        self._arrays: dict[tuple[int, int, int], Sequence[Matrix]] = {}

    def begin(self, round_: int) -> None:
        """Begin a round, and forget the messages that are too old to be delivered."""
        # Nothing is held for longer than it can count: the server is a relay, not an archive.
        oldest = round_ - self.plan.staleness
        self._floats = {key: value for key, value in self._floats.items() if key[0] >= oldest}
        self._arrays = {key: value for key, value in self._arrays.items() if key[0] >= oldest}
        self.round, self.took_part = round_, np.zeros(self.plan.n_nodes, dtype=bool)

    def put(
        self, round_: int, sender: int, floats: float, arrays: Mapping[int, Sequence[Matrix]]
    ) -> None:
        """Take in a node's message, by receiver, or `EVERYBODY` where all get the same."""
        self._floats[round_, sender] = floats
        self._arrays |= {(round_, sender, to): own for to, own in arrays.items()}

    def deliveries(self, round_: int) -> dict[int, Delivery]:
        """Return what each node receives in an exchange: the messages of the round before."""
        n = self.plan.n_nodes
        messages: list[list[Message]] = [[] for _ in range(n)]
        totals = [1.0] * n
        if self.round:
            totals = self.plan.totals(self.round).tolist()
            links = self.plan.sources(self.round)
            here = self.took_part | bool(self.plan.staleness)
            each = zip(links.receivers.tolist(), links.senders.tolist(), links.late, strict=True)
            there = [
                here[to] and self._key(to, sender, late) in self._arrays
                for to, sender, late in each
            ]
            links = links.first(np.array(there, dtype=bool))
            for to, sender, late, weight in zip(*(x.tolist() for x in links), strict=True):
                arrays = self._arrays[self._key(to, sender, late)]
                messages[to].append(Message(sender, late, weight, arrays))
        next_ = self.plan.schedule.matrix(round_).topology if self.sealed else None
        hearers = None if next_ is None else next_.adjacency.T.tocsr()
        new, deliveries = [*self.start.values()], {}
        for node in range(n):
            cards = None
            if hearers is not None:
                to_all = sorted(hearers.indices[slice(*hearers.indptr[node : node + 2])].tolist())
                cards = {to: self.cards[to] for to in to_all if to in self.cards}
            start = [] if node in self.known else new
            deliveries[node] = Delivery(messages[node], cards, start, totals[node])
        return deliveries

    def _key(self, receiver: int, sender: int, late: int) -> tuple[int, int, int]:
        return self.round - late, sender, receiver if self.sealed else EVERYBODY

    def count(self, received: Mapping[int, Delivery], left_out: Container[tuple[int, int]]) -> None:
        """Count what nodes have received; ``left_out`` has pairs of sender and receiver."""
        entries: list[tuple[int, int, float]] = []
        for receiver, delivery in received.items():
            for sender, late, *_ in delivery.messages:
                if (sender, receiver) in left_out:
                    self.left_out.add((self.round, sender, receiver))
                else:
                    entries.append((receiver, sender, self._floats[self.round - late, sender]))
        if entries:
            self.traffic = self.traffic + matrix_of(np.array(entries).T, self.plan.n_nodes)

    def keep_cards(self, sent: Mapping[int, Sequence[Matrix]]) -> None:
        """Keep the nodes' public keys, each the first array that a node has sent."""
        known = {node: arrays[0] for node, arrays in sent.items() if arrays}
        # Cards of another size than most are no public keys, and would fail at every receiver.
        size = Counter(card.shape for card in known.values()).most_common(1)
        self.cards |= {node: card for node, card in known.items() if card.shape == size[0][0]}

    @property
    def all_left_out(self) -> NDArray[np.int64]:
        """The messages that were left out as an array, in order."""
        return np.array(sorted(self.left_out), dtype=np.int64).reshape(-1, 3)

    def pack(self) -> dict[str, NDArray[Any]]:
        """Return all of this as named arrays."""
        floats = [[*key, own] for key, own in self._floats.items()]
        return {
            "round": np.array(self.round),
            "took_part": self.took_part.copy(),
            "left_out": self.all_left_out,
            "traffic": entries_of(self.traffic),
            "floats": np.array(floats, dtype=np.float64).reshape(-1, 3),
            **({"names": text_array([*self.start])} if self.start else {}),
            **{f"start/{i:06d}": array for i, array in enumerate(self.start.values())},
            **{f"card/{node}": card for node, card in self.cards.items()},
            **{
                "/".join(map(str, ("message", *key, i))): array
                for key, arrays in self._arrays.items()
                for i, array in enumerate(arrays)
            },
        }

    def unpack(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue from what `pack` returned."""
        self.round, self.took_part = int(state["round"]), state["took_part"].astype(bool)
        self.left_out = set(map(tuple, state["left_out"].tolist()))
        self.traffic = matrix_of(state["traffic"], self.plan.n_nodes)
        if "names" in state:
            arrays = [state[name] for name in sorted(state) if name.startswith("start/")]
            self.start = dict(zip(texts_of(state["names"]), arrays, strict=True))
        for round_, sender, floats in state["floats"].tolist():
            self._floats[int(round_), int(sender)] = floats
        for name, array in state.items():
            kind, *key = name.split("/")
            if kind == "card":
                self.cards[int(key[0])] = array
            elif kind == "message":
                round_, sender, receiver, _ = map(int, key)
                before = self._arrays.get((round_, sender, receiver), ())
                self._arrays[round_, sender, receiver] = [*before, array]


def tally(left_out: Iterable[tuple[int, int, int]]) -> tuple[dict[int, int], dict[int, list[int]]]:
    """Return in how many rounds messages were left out, and by which receivers, by their sender.

    ``left_out`` has the round, the sender, and the receiver, which is the sender itself where the
    network has found what is wrong.
    """
    all_of_them = set(left_out)
    rounds = Counter(sender for _, sender in {(at, sender) for at, sender, _ in all_of_them})
    by: dict[int, set[int]] = {}
    for _, sender, receiver in all_of_them:
        if receiver != sender:
            by.setdefault(sender, set()).add(receiver)
    return dict(sorted(rounds.items())), {node: sorted(by[node]) for node in sorted(by)}


def curves(rows: Sequence[Mapping[str, Array]], n_nodes: int) -> dict[str, Array]:
    """Return the reports of all rounds by name, (rounds, n_nodes); NaN where there is none."""
    silent = np.full(n_nodes, np.nan)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: np.stack([row.get(name, silent) for row in rows]) for name in names}


def spread(rows: Array, there: NDArray[np.bool_]) -> Array:
    """Return the rows of the nodes that are there, with NaN for the others."""
    if there.all():
        return rows
    full = np.full((len(there), *rows.shape[1:]), np.nan, np.result_type(rows, np.float32))
    full[there] = rows
    return full


def entries_of(matrix: Csr) -> Matrix:
    """Return the rows, columns and values of a sparse matrix, (3, n_entries)."""
    entries = sparse.coo_array(matrix)
    return np.stack([*entries.coords, entries.data])


def matrix_of(entries: Matrix, n: int) -> Csr:
    """Return the sparse matrix of shape (n, n) with these entries; several at a place add up."""
    return sparse.csr_array((entries[2], entries[:2].astype(np.intp)), shape=(n, n))


def shared_weights(
    received: NDArray[np.float64],
    places: tuple[NDArray[np.intp], NDArray[np.intp]],
    own: NDArray[np.intp],
    sound: NDArray[np.bool_],
    totals: NDArray[np.float64],
) -> tuple[Array, Array, Array]:
    """Return the weights of an inbox, with their rows and columns: the rule for what is missing.

    The weight of what a node has not received falls to the node itself. A node whose own message is
    not finite (``sound``) takes the mean of its neighbors' alone.

    ``received`` are the combination weights of the messages, ``places`` the row of the receiver,
    ascending, and the column of each, ``own`` the columns of the receivers' own messages, and
    ``totals`` what each receiver's weights sum to.
    """
    (rows, columns), n = places, len(own)
    there = np.bincount(rows, received, minlength=n)
    lost = ~sound & (there > 0)
    scale = np.where(lost, totals / np.where(lost, there, 1.0), 1.0)
    rest = np.where(lost, 0.0, totals - there)
    values = np.concatenate([received * scale[rows], rest])
    rows, columns = np.concatenate([rows, np.arange(n)]), np.concatenate([columns, own])
    order = np.lexsort((columns, rows))
    order = order[values[order] != 0]
    return values[order], rows[order], columns[order]


def _by_rows(values: Array, rows: Array, columns: Array, shape: tuple[int, int]) -> Csr:
    """Return the sparse array of entries that are in the order of their rows."""
    starts = np.zeros(shape[0] + 1, dtype=np.int32)
    np.cumsum(np.bincount(rows, minlength=shape[0]), out=starts[1:])
    return sparse.csr_array((values, columns.astype(np.int32), starts), shape=shape)


def finite_rows(arrays: Sequence[Array]) -> NDArray[np.bool_]:
    """Return which rows are finite in all arrays, shape (n_rows,)."""
    finite = np.ones(len(arrays[0]), dtype=bool)
    for array in arrays:
        flat = array.reshape(len(array), -1)
        with np.errstate(over="ignore", invalid="ignore"):
            sums = flat.sum(axis=1)  # finite only if all terms are
        odd = ~np.isfinite(sums)
        if odd.any():
            odd[odd] = ~np.isfinite(flat[odd]).all(axis=1)
        finite &= ~odd
    return finite


def _check_whole(name: str, numbers: Sequence[float]) -> None:
    """Raise a ValueError if floats are not ids or counts."""
    for number in numbers:
        if not 0 <= number <= _LARGEST or number != int(number):
            raise ValueError(f"{name} must have whole numbers from 0 on, got {number:g}.")
