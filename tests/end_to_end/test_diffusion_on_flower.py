"""A diffusion on Flower: who learns what, and attacks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, Context, Message, RecordDict
from numpy.typing import NDArray

from flwr_perdl.clients import DiffusionClient
from flwr_perdl.core.npy import pack, unpack, unpack_arrays
from flwr_perdl.network import Inbox, InMemoryNetwork, Topology, metropolis_weights
from flwr_perdl.privacy.sealed import Keys, Rejected, make_key
from flwr_perdl.random import spawn
from flwr_perdl.strategies import NeighborRelay
from tests.grids import Tapped, arrays_in, grid_of, relayed

Array = NDArray[Any]
ROUNDS = 4


class Held(NamedTuple):
    nodes: NDArray[np.intp]
    value: Array
    secret: Array


class Private:
    """Sends ``value``; ``secret`` and the data, from which both come, stay at home."""

    def __init__(self, data: dict[int, Array]) -> None:
        self.data = data

    def start(self, nodes: NDArray[np.intp]) -> Held:
        X = np.stack([self.data[int(k)] for k in nodes])
        return Held(nodes, X.mean(axis=1), X.std(axis=1))

    def adapt(self, state: Held, round_: int) -> Held:
        X = np.stack([self.data[int(k)] for k in state.nodes])
        secret = np.sqrt(((X - state.value[:, None]) ** 2).mean(axis=1))
        step = 0.1 * (X.mean(axis=1) - state.value)
        return state._replace(value=state.value + step, secret=secret)

    def message(self, state: Held) -> tuple[Array, ...]:
        return (state.value,)

    def combine(self, state: Held, inbox: Inbox) -> Held:
        return state._replace(value=inbox.mean())

    def observe(self, state: Held) -> dict[str, Array]:
        return {"size": np.linalg.norm(state.value, axis=1)}


N = 5
TOPOLOGY = Topology.from_edges(N, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0), (1, 3)])
DATA = {k: spawn(5, k).standard_normal((7, 3)) + k for k in range(N)}


class Written:
    """Everything that a run of `Private` computes: what each node sends, and what it keeps."""

    def __init__(self) -> None:
        self.messages: list[Array] = []
        self.secrets: list[Array] = []

        class Noted(Private):
            def message(_, state: Held) -> tuple[Array, ...]:
                self.messages.append(state.value)
                self.secrets.append(state.secret)
                return super().message(state)

        self.run = InMemoryNetwork(TOPOLOGY).run(Noted(DATA), ROUNDS)


def which(message: Message) -> tuple[int, int]:
    """Return the server's round and the node of a request."""
    round_ = int(message.content["config"].get("server-round", 0))
    return round_, message.metadata.dst_node_id - 1000


class Tap(Tapped):
    """A grid that may change requests on their way, and has all by server round and node."""

    change: Callable[[int, int, list[Array], str], None] | None = None

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        asked = list(messages)
        for message in asked:
            round_, node = which(message)
            if self.change is not None and round_:
                record = message.content["arrays"]
                arrays = record.to_numpy_ndarrays()
                self.change(round_, node, arrays, str(message.content["config"]["perdl.run"]))
                for name, array in zip(list(record), arrays, strict=True):
                    record[name] = FlowerArray(array)
        return super().send_and_receive(asked, timeout=timeout)

    @property
    def requests(self) -> dict[tuple[int, int], RecordDict]:
        return {which(asked): asked.content for asked in self.asked}

    @property
    def replied(self) -> dict[tuple[int, int], RecordDict]:
        pairs = zip(self.asked, self.replies, strict=True)
        return {which(asked): reply.content for asked, reply in pairs}

    def arrays(self, content: RecordDict) -> list[Array]:
        return content["arrays"].to_numpy_ndarrays() if "arrays" in content else []

    def everything(self) -> bytes:
        """All bytes that crossed the grid."""
        arrays = [array.tobytes() for _, array in arrays_in(self.asked + self.replies)]
        contents = [message.content for message in self.asked + self.replies]
        records = [one for content in contents for one in content.values()]
        others = [repr(dict(one)) for one in records if not isinstance(one, ArrayRecord)]
        return b"".join([*arrays, *(text.encode() for text in others)])


def federation(
    node_config: Callable[[int], dict[str, Any]] | None = None, change: Any = None, **client: Any
) -> Tap:
    def make_client(context: Context, node: int) -> DiffusionClient:
        return DiffusionClient(Private({node: DATA[node]}), context, **client)

    tap: Tap = grid_of(make_client, N, Tap, node_config=node_config)
    tap.change = change
    return tap


def occurrences(numbers: Iterable[Array], seen: bytes) -> int:
    """How many of these numbers occur in what was seen."""
    return sum(value.tobytes() in seen for rows in numbers for value in rows.ravel())


# What each party receives ------------------------------------------------------------------------


@pytest.mark.parametrize("sealed", [False, True], ids=["open", "sealed"])
def test_data_and_what_is_not_sent_stay_at_home(sealed: bool) -> None:
    tap = federation()
    relayed(tap, TOPOLOGY, ROUNDS, sealed=sealed)
    written = Written()
    seen = tap.everything()
    assert occurrences(DATA.values(), seen) == 0
    assert occurrences(written.secrets, seen) == 0
    assert occurrences([written.run.state.value], seen) == 0
    # What the server sees: open, every message; sealed, none of it.
    messages = sum(message.size for message in written.messages)
    found = occurrences(written.messages, seen)
    if sealed:
        assert found == 0
    else:  # the last bits of sums differ here and there
        assert found > messages / 4


def test_open_the_server_sees_the_messages_and_nothing_else() -> None:
    tap = federation()
    relayed(tap, TOPOLOGY, ROUNDS)
    written = Written()
    for (round_, node), content in tap.replied.items():
        if 1 <= round_ <= ROUNDS:
            assert dict(content["metrics"]) == {"num-examples": 1, "perdl.floats": 3}
            (sent,) = tap.arrays(content)
            np.testing.assert_allclose(sent, written.messages[round_ - 1][node], atol=1e-14)
    ends = [tap.replied[ROUNDS + 1, node] for node in range(5)]
    shown = [dict(content["metrics"]) for content in ends]
    assert shown == [{"num-examples": 1}] * 5
    packed = [unpack_arrays(*tap.arrays(content)) for content in ends]
    assert [list(own) for own in packed] == [["size"]] * 5
    sizes = np.concatenate([own["size"] for own in packed])
    np.testing.assert_allclose(sizes, written.run.observed["size"], atol=1e-14)


@pytest.mark.parametrize("sealed", [False, True], ids=["open", "sealed"])
def test_a_node_receives_its_neighbours_messages_and_nothing_else(sealed: bool) -> None:
    tap = federation()
    relayed(tap, TOPOLOGY, ROUNDS, sealed=sealed)
    written = Written()
    W = metropolis_weights(TOPOLOGY).matrix.toarray()
    for (server_round, node), content in tap.requests.items():
        round_ = server_round - sealed  # the exchange; its letters are of the round before
        if round_ < 1:
            assert tap.arrays(content) == []
            continue
        assert set(content["config"]) == {
            "perdl.asleep",
            "perdl.at",
            "perdl.protocol",
            "perdl.run",
            "perdl.sealed",
            "perdl.seed",
            "perdl.staleness",
            "perdl.step",
            "server-round",
        }
        assert content["config"]["perdl.asleep"] == ""
        table, *letters = tap.arrays(content)
        neighbours = TOPOLOGY.neighbours(node).tolist() if round_ > 1 else []
        np.testing.assert_array_equal(table[:, 0], neighbours)
        np.testing.assert_array_equal(table[:, 1], 0)
        np.testing.assert_allclose(table[:, 2], W[node, neighbours])
        if sealed:
            receivers, cards, *letters = letters
            np.testing.assert_array_equal(receivers, TOPOLOGY.neighbours(node))
            for receiver, card in zip(receivers.astype(int), cards, strict=True):
                announced = tap.arrays(tap.replied[1, receiver])[0]
                np.testing.assert_array_equal(card, announced)
        assert len(letters) == len(neighbours)
        for sender, letter in zip(neighbours, letters, strict=True):
            if sealed:
                sent = tap.arrays(tap.replied[server_round - 1, sender])[1:]
                place = TOPOLOGY.neighbours(sender).tolist().index(node)
                np.testing.assert_array_equal(letter, sent[place])
            else:
                message = written.messages[round_ - 2][sender]
                np.testing.assert_allclose(letter, message, atol=1e-14)


def test_sealed_the_server_holds_ciphertext_and_public_keys_only() -> None:
    tap = federation(shows="nothing")
    relayed(tap, TOPOLOGY, ROUNDS, sealed=True)
    cards = {node: unpack(tap.arrays(tap.replied[1, node])[0]) for node in range(5)}
    assert all(len(card) == 64 for card in cards.values())
    strangers = [Keys(node, "run") for node in range(5)]
    texts = []
    for (round_, node), content in tap.replied.items():
        if round_ == ROUNDS + 2:
            assert dict(content["metrics"]) == {"num-examples": 1}
            assert tap.arrays(content) == []
        elif round_ > 1:
            assert dict(content["metrics"]) == {"num-examples": 1, "perdl.floats": 3}
            card, *letters = map(unpack, tap.arrays(content))
            assert card == cards[node]
            assert len(letters) == len(TOPOLOGY.neighbours(node))
            for letter in letters:
                assert letter[:64] == card
                texts.append(np.frombuffer(letter[64:], dtype=np.uint8))
                for stranger in strangers:
                    with pytest.raises(Rejected):
                        stranger.open(pack(letter), node, round_ - 1)
    # Ciphertext looks like noise: mean and spread of bytes that are uniform.
    noise = np.concatenate(texts)
    assert len(noise) > 5000
    assert abs(noise.mean() - 127.5) < 5 * 73.9 / np.sqrt(len(noise))
    assert np.bincount(noise, minlength=256).max() < 3 * len(noise) / 256


# Attacks by the server --------------------------------------------------------------------------


def keyed(folder: Path) -> Callable[[int], dict[str, Any]]:
    """Key files of the nodes; each pins its neighbours' keys."""
    public = [make_key(folder / f"{node}.pem") for node in range(N)]
    for node in range(N):
        pinned = {int(k): public[k] for k in TOPOLOGY.neighbours(node)}
        (folder / f"{node}.json").write_text(json.dumps(pinned))
    return lambda node: {
        "key-file": str(folder / f"{node}.pem"),
        "neighbor-keys": str(folder / f"{node}.json"),
    }


class InTheMiddle:
    """A server that hands on its own cards, reads every letter and passes it on."""

    def __init__(self) -> None:
        self.keys: dict[int, Keys] = {}  # as whom it writes and reads
        self.cards: dict[int, Array] = {}  # the nodes' own
        self.read: dict[tuple[int, int, int], Array] = {}

    def __call__(self, round_: int, node: int, arrays: list[Array], run: str) -> None:
        if round_ < 2:
            return
        table, receivers, cards = arrays[:3]
        for i, sender in enumerate(table[:, 0].astype(int)):
            (message,) = self.keys[node].open(arrays[3 + i], sender, round_ - 2)
            self.read[round_ - 2, sender, node] = message
            own = self.keys[sender]
            arrays[3 + i] = own.seal((message,), node, round_ - 2, self.cards[node])
        for i, receiver in enumerate(receivers.astype(int)):
            self.cards[receiver] = cards[i].copy()
            self.keys.setdefault(receiver, Keys(receiver, run))
            cards[i] = self.keys[receiver].card


def test_without_pinned_keys_a_server_in_the_middle_reads_everything() -> None:
    """Why the guide says "honest-but-curious server"; and: the test below would see an attack."""
    attack = InTheMiddle()
    relay = NeighborRelay(TOPOLOGY, ROUNDS, sealed=True)
    relay.start(federation(change=attack))
    written = Written()
    assert len(attack.read) == ROUNDS * 2 * TOPOLOGY.n_edges
    for (round_, sender, _), message in attack.read.items():
        np.testing.assert_allclose(message, written.messages[round_ - 1][sender], atol=1e-14)
    np.testing.assert_allclose(relay.outcome.observed["size"], written.run.observed["size"])


def test_with_pinned_keys_it_reads_nothing_and_is_found_out(tmp_path: Path) -> None:
    attack = InTheMiddle()
    tap = federation(keyed(tmp_path), attack)
    relay = NeighborRelay(TOPOLOGY, ROUNDS, sealed=True)
    relay.start(tap)
    assert attack.read == {}
    for node in range(5):
        rejected = {f"perdl.rejected-{k}" for k in TOPOLOGY.neighbours(node)}
        for report in relay.history[1:-1]:
            assert rejected <= set(report.metrics[node])
    assert relay.outcome.floats_sent == 0
    assert occurrences(Written().messages, tap.everything()) == 0
    # Everybody heard nobody: the values of nodes that are alone.
    alone = InMemoryNetwork(Topology.from_edges(5, [])).run(Private(DATA), ROUNDS)
    np.testing.assert_allclose(relay.outcome.observed["size"], alone.observed["size"])


def test_pinned_and_undisturbed_the_numbers_are_those_in_memory(tmp_path: Path) -> None:
    tap = federation(keyed(tmp_path))
    run = relayed(tap, TOPOLOGY, ROUNDS, sealed=True)
    written = Written()
    np.testing.assert_allclose(run.observed["size"], written.run.observed["size"], atol=1e-14)
    assert run.dropped_messages == {}
    np.testing.assert_array_equal(run.traffic.toarray(), written.run.traffic.toarray())


def test_changed_and_replayed_letters_are_rejected_named_and_counted() -> None:
    kept: dict[int, Array] = {}

    def change(round_: int, node: int, arrays: list[Array], run: str) -> None:
        # Server round r carries the letters of round r - 2. From node 1 to node 0: changed in
        # round 1, replayed in round 2; from node 3 to node 4: of another edge in round 3.
        table, letters = (arrays[0], arrays) if round_ > 2 else (np.zeros((0, 4)), [])
        senders = table[:, 0].astype(int).tolist()
        if node == 0 and round_ in (3, 4):
            place = 3 + senders.index(1)
            if round_ == 3:
                kept[1] = letters[place].copy()
                letters[place][150] ^= 1
            else:
                letters[place] = kept[1]
        if round_ == 5 and node == 2:
            kept[3] = letters[3 + senders.index(3)].copy()
        if round_ == 5 and node == 4:
            letters[3 + senders.index(3)] = kept[3]

    tap = federation(change=change)
    relay = NeighborRelay(TOPOLOGY, ROUNDS, sealed=True)
    relay.start(tap)
    named = {
        (report.round - 2, node, name)
        for report in relay.history
        for node, metrics in report.metrics.items()
        for name in metrics
        if name.startswith("perdl.rejected")
    }
    by = "perdl.rejected-"
    assert named == {(1, 0, f"{by}1"), (2, 0, f"{by}1"), (3, 4, f"{by}3")}
    assert relay.outcome.dropped_messages == {1: 2, 3: 1}
    assert relay.outcome.traffic.toarray()[0, 1] == 3 * (ROUNDS - 2)
    assert relay.outcome.traffic.toarray()[4, 3] == 3 * (ROUNDS - 1)
    # The same by hand: what was not heard falls to the node itself.
    W = metropolis_weights(TOPOLOGY).matrix.toarray()
    means = np.stack([X.mean(axis=0) for X in DATA.values()])
    value = means
    for round_ in range(1, ROUNDS + 1):
        now = W.copy()
        for lost, receiver, sender in ((1, 0, 1), (2, 0, 1), (3, 4, 3)):
            if lost == round_:
                now[receiver, receiver] += now[receiver, sender]
                now[receiver, sender] = 0
        value = now @ (value + 0.1 * (means - value))
    np.testing.assert_allclose(relay.outcome.observed["size"], np.linalg.norm(value, axis=1))
