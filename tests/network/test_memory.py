from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from flwr_perdl.network import Faults, InMemoryNetwork, Schedule, Topology, metropolis_weights
from flwr_perdl.network.topology import averaging_weights
from tests.network.programs import Consensus, Held, sleeping


def draw(n: int, columns: int = 3, seed: int = 0) -> NDArray[np.float64]:
    return np.random.default_rng(seed).standard_normal((n, columns))


def by_mailboxes(
    network: Schedule, faults: Faults, values: NDArray[np.float64], n_rounds: int, staleness: int
) -> NDArray[np.float64]:
    """The reference: one node after the other, one message per link, everything by hand."""
    n = network.n_nodes
    messages: list[NDArray[np.float64]] = [values]
    for round_ in range(1, n_rounds + 1):
        weights, awake, new = network.matrix(round_), network.awake(round_), values.copy()
        messages.append(values)
        ages = range(min(staleness, round_ - 1) + 1)
        passed = [faults.links(weights.topology, round_ - age) for age in ages]
        pairs = [{*zip(*(ids.tolist() for ids in links), strict=True)} for links in passed]
        for k in np.flatnonzero(awake):
            total, own = np.zeros(values.shape[1]), 1.0
            for j in range(n):
                heard = (a for a in ages if (k, j) in pairs[a] and network.awake(round_ - a)[j])
                if (age := next(heard, None)) is not None:
                    weight = weights.matrix[k, j]
                    total = total + weight * messages[round_ - age][j]
                    own -= weight
            new[k] = total + own * values[k]
        values = new
    return values


def test_one_round_by_hand() -> None:
    # A path 0 - 1 - 2 with Metropolis weights of 1/3 per link.
    topology = Topology.from_edges(3, [(0, 1), (1, 2)])
    run = InMemoryNetwork(topology).run(Consensus(np.array([[3.0], [0.0], [6.0]])), 1)
    np.testing.assert_allclose(run.state.value.ravel(), [2.0, 3.0, 4.0])
    assert run.rounds == 1
    assert run.floats_sent == 4.0
    np.testing.assert_array_equal(run.traffic.toarray(), topology.adjacency.toarray())


def test_consensus_reaches_the_mean_at_the_rate_of_the_spectral_gap() -> None:
    topology = Topology.erdos_renyi(20, 0.3, seed=1)
    weights = metropolis_weights(topology)
    values = draw(20)
    run = InMemoryNetwork(topology, weights).run(Consensus(values), 80)
    error = np.linalg.norm(run.state.value - values.mean(axis=0))
    start = np.linalg.norm(values - values.mean(axis=0))
    assert error <= start * (1 - weights.spectral_gap) ** 80 + 1e-12
    assert run.floats_sent == 80 * 3 * 2 * topology.n_edges


@settings(max_examples=25)
@given(
    st.integers(2, 9),
    st.sampled_from([0.0, 0.4]),
    st.sampled_from([0.0, 0.3]),
    st.integers(0, 3),
    st.booleans(),
    st.integers(0, 99),
)
def test_stacked_products_equal_mailboxes_under_every_fault(
    n: int, drop: float, sleep: float, staleness: int, dead: bool, seed: int
) -> None:
    weights = averaging_weights(Topology.erdos_renyi(n, 0.6, seed=seed))
    away = {0: range(3, 99)} if dead else None
    network, faults = sleeping(weights, sleep, away, seed), Faults(drop, seed)
    values = draw(n, 2, seed)
    run = InMemoryNetwork(network, faults=faults, staleness=staleness).run(Consensus(values), 6)
    expected = by_mailboxes(network, faults, values, 6, staleness)
    np.testing.assert_allclose(run.state.value, expected, atol=1e-13)


@pytest.mark.parametrize(
    ("staleness", "expected"),
    [(0, [22 / 9, 23 / 9, 4]), (1, [83 / 27, 29 / 9, 35 / 9]), (2, [83 / 27, 4, 35 / 9])],
)
def test_the_last_messages_of_sleeping_nodes_by_hand(staleness: int, expected: list[float]) -> None:
    # A path 0 - 1 - 2, a third per link. Node 2 sleeps in rounds 2 and 3, node 1 in round 4.
    path = metropolis_weights(Topology.from_edges(3, [(0, 1), (1, 2)]))
    network = InMemoryNetwork(sleeping(path, away={2: (2, 3), 1: (4,)}), staleness=staleness)
    # Round 1: 2, 3, 4. Round 2, stale: 7/3, (2 + 3 + 6)/3, 4. Round 3: 25/9, (7/3 + 11/3 + 6)/3
    # where two rounds count, 4. Round 4: nodes 0 and 2 use the 11/3 that node 1 sent in round 3.
    run = network.run(Consensus(np.array([[3.0], [0.0], [6.0]])), 4)
    np.testing.assert_allclose(run.state.value.ravel(), expected)
    assert run.floats_sent == {0: 8, 1: 11, 2: 12}[staleness]


def test_lost_links_keep_the_mean() -> None:
    values = draw(12)
    network = InMemoryNetwork(Topology.erdos_renyi(12, 0.5), faults=Faults(drop=0.2, seed=3))
    run = network.run(Consensus(values), 60)
    np.testing.assert_allclose(run.state.value.mean(axis=0), values.mean(axis=0), atol=1e-13)
    np.testing.assert_allclose(run.state.value, np.tile(values.mean(axis=0), (12, 1)), atol=1e-6)
    full = 60 * 3 * 2 * network.topology.n_edges
    assert 0.75 * full < run.floats_sent < 0.85 * full


def test_the_others_agree_without_a_node_that_is_dead_or_sends_nan() -> None:
    class Broken(Consensus):
        def adapt(self, state: Held, round_: int) -> Held:
            state.value[1] *= np.nan if round_ >= 3 else 1
            return state

    network = sleeping(metropolis_weights(Topology.complete(6)), away={2: range(4, 999)})
    run = InMemoryNetwork(network).run(Broken(draw(6)), 100)
    others = np.isin(np.arange(6), [1, 2], invert=True)
    assert run.alive.tolist() == [True, True, False, True, True, True]
    assert run.dropped_messages == {1: 98}
    np.testing.assert_allclose(np.ptp(run.state.value[others], axis=0), 0, atol=1e-12)
    assert np.isfinite(run.state.value).all()


def test_a_node_whose_own_estimate_is_nan_recovers_from_its_neighbours() -> None:
    values = draw(5)
    values[3] = np.nan
    run = InMemoryNetwork(Topology.complete(5)).run(Consensus(values), 50)
    np.testing.assert_allclose(run.state.value, np.tile(run.state.value[0], (5, 1)), atol=1e-9)
    assert run.dropped_messages == {3: 1}
    alone = InMemoryNetwork(Topology.ring(1)).run(Consensus(np.array([[np.nan]])), 2)
    assert alone.state.value.tolist() == [[0.0]]


def test_a_sequence_of_matrices_is_cycled_through() -> None:
    # Neither of two networks is connected; together they are.
    first = metropolis_weights(Topology.from_edges(4, [(0, 1), (2, 3)]))
    second = metropolis_weights(Topology.from_edges(4, [(1, 2), (3, 0)]))
    network = InMemoryNetwork(Schedule.of(first, second))
    values = draw(4)
    one = network.run(Consensus(values), 1).state.value
    np.testing.assert_allclose(one, first.matrix @ values)
    two = network.run(Consensus(values), 2)
    np.testing.assert_allclose(two.state.value, second.matrix @ (first.matrix @ values))
    assert two.traffic.toarray().astype(bool).sum() == 8


def test_float32_stays_float32_and_inputs_are_not_modified() -> None:
    values = draw(4).astype(np.float32)
    before = values.copy()
    run = InMemoryNetwork(Topology.complete(4)).run(Consensus(values), 3)
    assert run.state.value.dtype == np.float32
    np.testing.assert_array_equal(values, before)


def test_callback_and_stop() -> None:
    seen: list[int] = []

    def near(state: Held) -> bool:
        return float(np.ptp(state.value, axis=0).max()) < 1e-3

    network, program = InMemoryNetwork(Topology.ring(6)), Consensus(draw(6))
    run = network.run(program, 100, callback=lambda round_, _: seen.append(round_), stop=near)
    assert seen == list(range(1, run.rounds + 1))
    assert run.rounds < 100


def test_memory_grows_with_edges_not_with_nodes_squared() -> None:
    network, program = InMemoryNetwork(Topology.ring(20_000)), Consensus(np.ones((20_000, 1)))
    tracemalloc.start()
    network.run(program, 2)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100e6  # one dense 20,000 x 20,000 matrix would take 3.2 GB
