from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict
from numpy.typing import NDArray

from flwr_perdl.clients import DiffusionClient
from flwr_perdl.network import (
    CombinationMatrix,
    InMemoryNetwork,
    Schedule,
    Topology,
    metropolis_weights,
    push_weights,
)
from flwr_perdl.network.topology import averaging_weights
from flwr_perdl.random import spawn
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import NeighborRelay, ServerSettings
from tests.grids import Tapped, failing, grid_of, relayed
from tests.network.programs import Consensus, Drift, assert_same, sleeping

Array = NDArray[Any]

RESUME = ServerSettings(resume=True)
RING = metropolis_weights(Topology.ring(4))


def values(n: int, seed: int = 3) -> dict[int, Array]:
    return {k: spawn(seed, k).standard_normal(2) for k in range(n)}


def grid(
    data: dict[int, Array],
    *,
    program: Callable[[dict[int, Array]], Any] = Drift,
    kind: type[InProcessGrid] = InProcessGrid,
    client: dict[str, Any] | None = None,
    **options: Any,
) -> InProcessGrid:
    shown = {"shows": "state", **(client or {})}

    def make_client(context: Context, node: int) -> DiffusionClient:
        return DiffusionClient(program({node: data[node]}), context, **shown)

    return grid_of(make_client, len(data), kind, **options)


# The same numbers ------------------------------------------------------------------------------


SIX = averaging_weights(Topology.erdos_renyi(6, 0.5, seed=5))
ONE_WAY = Topology.from_edges(
    6, [*((k, (k + 1) % 6) for k in range(6)), (2, 0), (3, 0), (4, 1)], directed=True
)
NETWORKS: dict[str, Any] = {
    "weights": Schedule.of(SIX),
    "gone": sleeping(SIX, away={3: range(4, 99), 1: range(99)}),
    "asleep": sleeping(SIX, 0.3, {3: range(4, 99)}, seed=4),
    "pairs": Schedule.random_pairs(6, seed=2),
    "one peer": Schedule.one_peer_exponential(6),
    "members": Schedule.members(Topology.ring(6), joins={2: 3}, leaves={4: 5}),
    "one way": sleeping(push_weights(ONE_WAY), 0.2),
}


@pytest.mark.parametrize("sealed", [False, True], ids=["open", "sealed"])
@pytest.mark.parametrize("name", [*NETWORKS])
def test_the_same_numbers_as_in_memory(name: str, sealed: bool) -> None:
    network, data = NETWORKS[name], values(6)
    run = relayed(grid(data), network, 7, sealed=sealed)
    assert_same(run, InMemoryNetwork(network).run(Drift(data), 7))


RING_OF_THREE = metropolis_weights(Topology.ring(3))


@pytest.mark.parametrize("away", [None, {1: range(99)}])
@pytest.mark.parametrize("rounds", [0, 1])
def test_few_rounds(rounds: int, away: Any) -> None:
    data, network = values(3), sleeping(RING_OF_THREE, away=away)
    run = relayed(grid(data), network, rounds)
    assert_same(run, InMemoryNetwork(network).run(Drift(data), rounds))


# What a run takes ------------------------------------------------------------------------------


def test_rounds_and_floats_are_counted() -> None:
    relay = NeighborRelay(Topology.ring(4), 6)
    relay.start(grid(values(4), program=Consensus))
    steps = [report.step for report in relay.history]
    assert steps == ["exchange"] * 6 + ["show"]
    assert len(steps) == relay.exchanges == 7
    # Up: the node's two numbers. Down: two messages of two numbers, and four on each message.
    assert [report.floats_up for report in relay.history[:6]] == [2.0] * 6
    assert [report.floats_down for report in relay.history] == [0.0] + [12.0] * 6
    assert relay.outcome.floats_sent == 6 * 4 * 2 * 2


def test_what_a_node_shows_is_its_own_choice() -> None:
    data = values(3)
    topology = Topology.ring(3)
    here = InMemoryNetwork(topology).run(Drift(data), 2)
    observed = relayed(grid(data, client={"shows": "observed"}), topology, 2)
    assert observed.state is None
    np.testing.assert_allclose(observed.observed["norm"], here.observed["norm"], atol=1e-12)
    nothing = relayed(grid(data, client={"shows": "nothing"}), topology, 2)
    assert nothing.state is None
    assert nothing.observed == {}
    np.testing.assert_array_equal(nothing.traffic.toarray(), here.traffic.toarray())

    def make_client(context: Context, node: int) -> DiffusionClient:
        shows = "nothing" if node == 1 else "state"
        return DiffusionClient(Drift({node: data[node]}), context, shows=shows)

    run = relayed(grid_of(make_client, 3), topology, 2)
    assert run.state.nodes.tolist() == [0, 2]
    np.testing.assert_allclose(run.state.value, here.state.value[[0, 2]], atol=1e-12)
    assert np.isnan(run.observed["norm"]).tolist() == [False, True, False]
    assert run.alive.all()


# Nodes that fail -------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["silence", "error", "nan", "shape", "empty"])
def test_a_node_that_fails_in_a_round_is_silent_in_it(fault: str) -> None:
    # Exchange 2 fails at node 2: it neither hears round 1 nor sends in round 2.
    data = {0: np.array([0.0, 1]), 1: np.array([3.0, 1]), 2: np.array([6.0, 1])}
    topology = Topology.complete(3)
    faulty = grid(data, program=Consensus, faults=failing(fault, [2], [2]))
    run = relayed(faulty, topology, 2)
    # Round 1: nodes 0 and 1 get the mean 3. Round 2: their two thirds of 3, and 3 for node 2.
    state = run.state.value[:, 0]
    np.testing.assert_allclose(state[:2], [3.0, 3.0])
    heard = run.traffic.toarray()
    assert heard[0].tolist() == [0, 4, 2]
    if fault == "shape":  # readable, but of another form: the others leave it out
        assert state[2] == pytest.approx(3.0)
        assert heard[2].tolist() == [4, 4, 0]
        assert run.dropped_messages == {2: 1}
        assert run.alive.all()
        return
    # Of round 2 the node has heard nothing; of round 1 only where it got its messages and the
    # reply was lost or spoilt on the way.
    assert state[2] == pytest.approx(3.0 if fault in ("nan", "empty") else 6.0)
    assert heard[2].tolist() == [0, 0, 0]
    assert run.dropped_messages == {}
    assert run.alive.tolist() == [True, True, False]


@pytest.mark.parametrize("sealed", [False, True], ids=["open", "sealed"])
@pytest.mark.parametrize(("fault", "own"), [("silence", 6), ("error", 6), ("nan", 3)])
def test_the_last_message_of_a_node_that_fails_counts_again(
    fault: str, own: float, sealed: bool
) -> None:
    # Two exchanges fail at node 2: it sends nothing in rounds 2 and 3.
    data = {0: np.array([0.0, 1]), 1: np.array([3.0, 1]), 2: np.array([6.0, 1])}
    faults = failing(fault, [2], [2 + sealed, 3 + sealed])
    nodes = grid(data, program=Consensus, faults=faults)
    run = relayed(nodes, Topology.complete(3), 3, staleness=1, sealed=sealed)
    # Nodes 0 and 1 have 3 after round 1, and a third more of node 2's 6 after round 2; in round 3
    # the 6 is too old. Node 2 answers again with its own last message, and twice 4 of round 3.
    np.testing.assert_allclose(run.state.value[:, 0], [4, 4, (own + 4 + 4) / 3])
    received = run.traffic.toarray()
    assert received[0].tolist() == [0, 6, 4]
    assert received[2].tolist() == [2, 2, 0]
    assert run.alive.tolist() == [True, True, False]


def test_a_message_of_another_form_is_left_out_by_those_who_receive_it() -> None:
    data = values(4)
    data[2] = np.ones(5)
    relay = NeighborRelay(Topology.ring(4), 3)
    relay.start(grid(data, program=Consensus, client={"shows": "observed"}))
    rejected = [report.metrics[1].get("perdl.rejected-2") for report in relay.history]
    assert rejected == [None, 1, 1, 1]
    assert "perdl.rejected-2" not in relay.history[1].metrics[0]
    assert relay.outcome.dropped_messages == {1: 3, 2: 3, 3: 3}
    assert relay.outcome.traffic.toarray()[1].tolist() == [6, 0, 0, 0]
    # The three others agree without it: a path 3 - 0 - 1.
    path = InMemoryNetwork(sleeping(RING, away={2: range(99)}))
    here = path.run(Consensus({**data, 2: np.ones(2)}), 3).observed["norm"]
    np.testing.assert_allclose(relay.outcome.observed["norm"][[0, 1, 3]], here[[0, 1, 3]])


def test_a_client_that_is_no_node_of_the_network_is_left_out() -> None:
    run = relayed(grid(values(5)), Topology.ring(3), 3)
    assert_same(run, InMemoryNetwork(Topology.ring(3)).run(Drift(values(5)), 3))


def lines(warned: Any, part: str) -> list[str]:
    """Return the lines of the log with this part; a record comes once for every logger above."""
    records = dict.fromkeys(warned.records)
    return [line for line in (record.getMessage() for record in records) if part in line]


# Clients of another kind ------------------------------------------------------------------------


class Odd(DiffusionClient):
    """Answers as an ordinary client would."""

    sent: ClassVar[list[Array]] = [np.ones(2)]

    def fit(self, parameters: list[Array], config: Any) -> Any:
        return self.sent, 20, {"error": 0.5}


def ordinary(nodes: Iterable[int], n: int = 4) -> InProcessGrid:
    """Return a federation in which these nodes have another client."""
    few, data = set(nodes), values(n)

    def make_client(context: Context, node: int) -> DiffusionClient:
        kind = Odd if node in few else DiffusionClient
        return kind(Drift({node: data[node]}), context, shows="state")

    return grid_of(make_client, n)


@pytest.mark.parametrize(("sleep", "sealed"), [(0.0, False), (0.4, True)])
def test_one_ordinary_client_is_left_out_in_every_exchange_and_named_once(
    sleep: float, sealed: bool, warned: Any
) -> None:
    weights = metropolis_weights(Topology.complete(4))
    relay = NeighborRelay(sleeping(weights, sleep, seed=1), 3, sealed=sealed)
    relay.start(ordinary([2]))
    assert [list(report.dropped) for report in relay.history] == [["client 2"]] * relay.exchanges
    assert all("DiffusionClient" in report.dropped["client 2"] for report in relay.history)
    assert all(report.anomalies == {2: {"refused": 1.0}} for report in relay.history)
    assert len(lines(warned, "left out client 2: ")) == 1
    assert not relay.outcome.alive[2]
    assert relay.outcome.traffic.toarray()[:, 2].tolist() == [0, 0, 0, 0]
    without = sleeping(weights, sleep, {2: range(99)}, seed=1)
    here = InMemoryNetwork(without).run(Drift(values(4)), 3)
    others = [0, 1, 3]
    np.testing.assert_allclose(
        relay.outcome.observed["norm"][others], here.observed["norm"][others], atol=1e-12
    )


# Who is left out, in the log -------------------------------------------------------------------


class Moving(InProcessGrid):
    """Node 1 is restarted under another node id, and has lost its state, before exchange 4."""

    keeps_state = False

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in super().get_node_ids() if node != getattr(self, "gone", None)]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        asked = list(messages)
        rounds = {m.content["config"].get("server-round") for m in asked}
        ids = super().push_messages(asked)
        if rounds == {3}:
            old = self.contexts.pop(1001)
            state = old.state if self.keeps_state else RecordDict()
            self.contexts[77] = Context(
                run_id=old.run_id,
                node_id=77,
                node_config=old.node_config,
                state=state,
                run_config=old.run_config,
            )
        return ids


class MovingWithState(Moving):
    keeps_state = True


@pytest.mark.parametrize("sealed", [False, True], ids=["open", "sealed"])
@pytest.mark.parametrize("on_disk", [False, True])
def test_a_node_that_comes_back_under_another_id_is_the_same_node(
    tmp_path: Path, sealed: bool, on_disk: bool
) -> None:
    """With its state in memory, or restarted and with a ``state-dir``."""
    data, topology = values(4), Topology.ring(4)
    here = InMemoryNetwork(topology).run(Drift(data), 6)
    kind = Moving if on_disk else MovingWithState
    config = (lambda node: {"state-dir": str(tmp_path)}) if on_disk else None
    moved = grid(data, kind=kind, node_config=config)
    assert_same(relayed(moved, topology, 6, sealed=sealed), here)


@pytest.mark.parametrize("sealed", [False, True], ids=["open", "sealed"])
def test_a_node_that_has_lost_its_state_starts_again(sealed: bool) -> None:
    data, topology = values(4), Topology.complete(4)
    moved = grid(data, program=Consensus, kind=Moving)
    run = relayed(moved, topology, 60, sealed=sealed)
    # All have the mean when node 1 comes back with its first value, and is heard in round 4.
    mean, first = np.mean(list(data.values()), axis=0), data[1]
    heard = 0.75 * mean + 0.25 * first
    # Sealed, it has lost its key too, and cannot read what the others wrote to it in round 4.
    agreed = 0.75 * heard + 0.25 * first if sealed else heard
    np.testing.assert_allclose(run.state.value, np.tile(agreed, (4, 1)), atol=1e-9)
    assert run.alive.all()
    assert run.dropped_messages == ({0: 1, 2: 1, 3: 1} if sealed else {})


class Late(InProcessGrid):
    """Node 1 is there from exchange 4 on (server round 4, or 5 where keys come first)."""

    joins = 4
    _round = 0

    def get_node_ids(self) -> Iterable[int]:
        self._round += 1  # asked for once in every round, and once to wait for the nodes
        here = list(super().get_node_ids())
        return here if self._round > self.joins else [node for node in here if node != 1001]


class LateSealed(Late):
    joins = 5


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("sealed", [False, True], ids=["open", "sealed"])
def test_a_node_that_comes_late_joins_in(sealed: bool, staleness: int) -> None:
    data, topology = values(4), Topology.complete(4)
    late = grid(data, program=Consensus, kind=LateSealed if sealed else Late)
    relay = NeighborRelay(topology, 60, sealed=sealed, num_clients=3, staleness=staleness)
    relay.start(late)
    asked = [len(report.metrics) for report in relay.history]
    assert asked == [3] * (3 + sealed) + [4] * 58
    # Three nodes have agreed, a quarter of their weights kept for node 1 falling to themselves.
    three = np.mean([data[k] for k in (0, 2, 3)], axis=0)
    W = np.full((3, 3), 0.25) + 0.25 * np.eye(3)
    rows = np.linalg.matrix_power(W, 3) @ np.stack([data[k] for k in (0, 2, 3)])
    np.testing.assert_allclose(rows.mean(axis=0), three)
    heard = 0.25 * (rows.sum(axis=0) + data[1])
    # Sealed, nobody could write to it in round 4: its public key comes with its first reply.
    agreed = 0.75 * heard + 0.25 * data[1] if sealed else heard
    np.testing.assert_allclose(relay.outcome.state.value, np.tile(agreed, (4, 1)), atol=1e-9)
    assert relay.outcome.dropped_messages == {}
    assert relay.outcome.alive.all()
    assert relay.outcome.traffic.toarray()[1, 0] == 2 * (57 - sealed)  # of rounds in which it sent


# Checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sealed", [False, True], ids=["open", "sealed"])
def test_too_few_rounds_are_refused_before_the_first_message(sealed: bool) -> None:
    nodes = grid(values(3), kind=Tapped)
    relay = NeighborRelay(Topology.ring(3), 3, sealed=sealed)
    for few in (0, 2, relay.exchanges - 1, "all"):
        with pytest.raises((ValueError, TypeError), match=r"^num_rounds"):
            relay.start(nodes, num_rounds=few)
    assert nodes.asked == relay.history == []
    with pytest.raises(RuntimeError):
        _ = relay.outcome


def test_a_part_of_a_run_is_allowed_with_checkpoints_and_says_that_it_is_one(
    tmp_path: Path, warned: Any
) -> None:
    topology, nodes = Topology.ring(3), grid(values(3))
    for done in (1, 2, 2):  # and with no further round
        server = ServerSettings(resume=True)
        relay = NeighborRelay(topology, 3, checkpoint_dir=tmp_path, server=server)
        relay.start(nodes, num_rounds=done)
        (line,) = lines(warned, "has no result")
        assert f"{done} of the 4 rounds" in line
        with pytest.raises(RuntimeError):
            _ = relay.outcome
        warned.clear()
    again = NeighborRelay(topology, 3, checkpoint_dir=tmp_path, server=RESUME)
    again.start(nodes, num_rounds=4)
    assert lines(warned, "has no result") == []
    assert_same(again.outcome, InMemoryNetwork(topology).run(Drift(values(3)), 3))


LAZY = CombinationMatrix(0.5 * RING.matrix.toarray() + 0.5 * np.eye(4), RING.topology)
#: The same weights, and more who are heard without any.
CROSSED = CombinationMatrix(RING.matrix, Topology.complete(4))


@pytest.mark.parametrize(
    ("topology", "n_rounds", "options"),
    [
        (Topology.complete(4), 2, {}),
        (Topology.ring(4), 3, {}),
        (Topology.ring(4), 2, {"weights": LAZY}),
        (Topology.ring(4), 2, {"weights": CROSSED}),
        (sleeping(RING, 0.1), 2, {}),
        (Topology.ring(4), 2, {"staleness": 1}),
        (Topology.ring(4), 2, {"sealed": True}),
    ],
    ids=["topology", "rounds", "weights", "links", "asleep", "staleness", "sealed"],
)
def test_a_checkpoint_of_another_run_is_refused(
    tmp_path: Path, topology: Topology, n_rounds: int, options: dict[str, Any]
) -> None:
    NeighborRelay(Topology.ring(4), 2, checkpoint_dir=tmp_path).start(grid(values(4)))
    other = NeighborRelay(topology, n_rounds, checkpoint_dir=tmp_path, server=RESUME, **options)
    with pytest.raises(ValueError, match=r"^checkpoint_dir"):
        other.start(grid(values(4)))
