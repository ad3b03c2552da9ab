"""Networks that change from round to round, and directed ones: what converges on them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flwr_perdl.network import Averaging, Faults, InMemoryNetwork, Schedule, diffusion_averaging
from flwr_perdl.network.topology import CombinationMatrix, Topology, averaging_weights, push_weights
from tests.network.programs import Quadratic, sleeping

Array = NDArray[Any]
N = 6
#: Node 0 sends to three others, most to one.
UNEQUAL = Topology.from_edges(
    N, [*((k, (k + 1) % N) for k in range(N)), (2, 0), (3, 0), (4, 1)], directed=True
)


def one_way(round_: int) -> Topology:
    """Return the graph in which one node sends to all."""
    hub = round_ % N
    return Topology.from_edges(N, [(k, hub) for k in range(N) if k != hub], directed=True)


SAME = partial(Quadratic, a=0.0, targets=np.arange(N) ** 2.0)


def values(models: dict[int, list[Array]]) -> Array:
    return np.array([w[0] for (w,) in models.values()])


def learn(network: Any, n_rounds: int, clients: Any = SAME, **options: Any) -> Any:
    return diffusion_averaging(clients, network, n_rounds, evaluate_every=0, **options)


# Rates -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "rate"),
    [
        # On a ring of four, targets (4, 0, -4, 0) belong to the eigenvalue 1/3 of the weights.
        # Exact diffusion: z^2 = l ((2 - a) z - (1 - a)), l = (1 + 1/3) / 2; |z| = sqrt(1/3).
        ("exact_diffusion", np.sqrt(1 / 3)),
        # Gradient tracking: z^2 = l ((2 - a) z - (l - a)), l = 1/3.
        ("gradient_tracking", (0.5 + np.sqrt(0.25 + 2 / 9)) / 2),
    ],
)
def test_disagreement_shrinks_at_the_rate_that_is_computed_by_hand(
    method: str, rate: float
) -> None:
    client = partial(Quadratic, a=0.5, targets=np.array([4.0, 0, -4, 0]))
    early, late = (learn(Topology.ring(4), t, client, method=method).models for t in (24, 36))
    ratio = np.abs(values(late)).max() / np.abs(values(early)).max()
    assert ratio == pytest.approx(rate**12, rel=1e-3)


@pytest.mark.parametrize(
    ("method", "network"),
    [
        ("exact_diffusion", Topology.ring(4)),
        ("gradient_tracking", Topology.ring(4)),
        ("gradient_tracking", Schedule.one_peer_exponential(4)),
        ("gradient_tracking", Schedule.random_pairs(4)),
    ],
)
def test_the_mean_moves_as_gradient_descent_on_the_sum(method: str, network: Any) -> None:
    client = partial(Quadratic, a=0.05, targets=np.array([1.0, 2, 3, 10]))
    learned = learn(network, 100, client, method=method, initial=[np.zeros(1)])
    left = 4 - np.mean([w[0] for (w,) in learned.models.values()])
    assert left == pytest.approx(4 * 0.95**100, rel=1e-9)


# Push-sum ----------------------------------------------------------------------------------------


def test_push_sum_finds_the_mean_where_plain_averaging_does_not() -> None:
    mean, weights = np.mean(np.arange(N) ** 2.0), push_weights(UNEQUAL)
    assert len(set(weights.matrix.diagonal())) > 1
    lossy = InMemoryNetwork(sleeping(weights, 0.1), faults=Faults(drop=0.3, seed=1))
    changing = Schedule(N, lambda t: UNEQUAL if t % 2 else one_way(t), window=2)
    for network in (UNEQUAL, changing, lossy):
        learned = learn(network, 120)
        np.testing.assert_allclose(values(learned.models), mean, rtol=0, atol=1e-10)
    plain = Averaging(np.arange(N) ** 2.0)
    for other in (weights, averaging_weights(UNEQUAL)):
        ended = InMemoryNetwork(UNEQUAL, other).run(plain, 60).state.estimate
        assert np.abs(ended - mean).max() > 0.1


def test_push_sum_ends_near_the_solution_the_nearer_the_shorter_the_steps() -> None:
    targets = np.arange(N) ** 2.0
    errors = []
    for a in (0.1, 0.02):
        found = values(learn(UNEQUAL, 500, partial(Quadratic, a=a, targets=targets)).models)
        errors.append(np.abs(found - targets.mean()).max())
    assert errors[1] < 0.3 * errors[0] < 1


# The networks themselves -------------------------------------------------------------------------


def test_random_pairs_are_new_in_each_round_and_the_same_for_a_seed() -> None:
    first, again, other = (Schedule.random_pairs(7, seed=seed) for seed in (3, 3, 4))
    rounds = range(1, 30)
    drawn = [first.matrix(t).matrix.toarray() for t in rounds]
    for t, weights in zip(rounds, drawn, strict=True):
        assert sorted(np.diag(weights)) == [0.5] * 6 + [1.0]
        np.testing.assert_array_equal(weights, again.matrix(t).matrix.toarray())
    assert len({weights.tobytes() for weights in drawn}) > 20
    assert any((other.matrix(t).matrix.toarray() != drawn[t - 1]).any() for t in rounds)


def test_a_one_peer_exponential_graph_finds_the_mean_in_log2_rounds() -> None:
    schedule = Schedule.one_peer_exponential(8)
    product = np.eye(8)
    for t in (1, 2, 3):
        assert schedule.matrix(t).topology.neighbours(7).tolist() == [(7 + 2 ** (t - 1)) % 8]
        product = schedule.matrix(t).matrix.toarray() @ product
    np.testing.assert_array_equal(product, np.full((8, 8), 1 / 8))
    assert not (schedule.matrix(4).matrix != schedule.matrix(1).matrix).nnz


@pytest.mark.parametrize("carrier", [lambda schedule: schedule, InMemoryNetwork])
def test_a_node_takes_part_from_when_it_joins_until_it_leaves(carrier: Callable[..., Any]) -> None:
    network = carrier(Schedule.members(Topology.ring(4), joins={1: 4}, leaves={2: 6}))
    client = partial(Quadratic, a=0.1, targets=np.arange(4.0))
    before, after = learn(network, 5, client), learn(network, 9, client)
    there = np.isfinite(after.curves["neighbor-distance"])
    assert there[:, 1].tolist() == [False] * 3 + [True] * 6
    assert there[:, 2].tolist() == [True] * 5 + [False] * 4
    assert there[:, [0, 3]].all()
    assert learn(network, 3, client).models[1][0][0] == 1.0
    assert before.models[2][0][0] == after.models[2][0][0]
    assert after.alive.tolist() == [True, True, False, True]
    # Two links with three nodes (rounds 1 to 3, and from 6 on), four with all: a model and tracker.
    assert after.floats_sent == 4 * (2 * 2 * 3 + 2 * 4 * 2 + 2 * 2 * 4)


# The method by default ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("network", "links", "floats"),
    [
        (Topology.ring(N), 12, 2),
        (InMemoryNetwork(Topology.ring(N)), 12, 2),
        (Schedule.random_pairs(N), 6, 4),
        (Schedule.one_peer_exponential(N), 6, 4),
        (Schedule.one_peer_exponential(N).matrix(1), 6, 4),  # fixed, directed, doubly stochastic
        (UNEQUAL, 9, 3),
        (InMemoryNetwork(Schedule(N, lambda t: UNEQUAL)), 9, 3),
    ],
)
def test_the_default_sends_what_the_method_that_suits_the_network_sends(
    network: Any, links: int, floats: int
) -> None:
    """Two parameters: exact diffusion sends these, tracking twice, push-sum a weight besides."""
    assert learn(network, 1).floats_sent == floats * links


# What is rejected --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("network", "method", "named"),
    [
        (Schedule.random_pairs(N), "exact_diffusion", "network"),
        (Schedule.one_peer_exponential(N).matrix(1), "exact_diffusion", "network"),
        (UNEQUAL, "atc", "network"),
        (UNEQUAL, "exact_diffusion", "network"),
        (InMemoryNetwork(UNEQUAL, push_weights(UNEQUAL)), "gradient_tracking", "network"),
        (averaging_weights(Topology.star(N)), None, "network"),
        (InMemoryNetwork(Topology.star(N), averaging_weights(Topology.star(N))), None, "network"),
        (Topology.from_edges(4, [(0, 1), (2, 3)]), None, "network"),
        (Topology.from_edges(2, [(0, 1)], directed=True), None, "network"),
        (4, None, "network"),
        (averaging_weights(Topology.star(N)), "push_sum", "network"),
        (Schedule(4, lambda t: [(0, 1), (2, 3)], window=5), None, "network"),
        (Schedule(4, lambda t: [(0, 1)] if t < 9 else [(2, 3)], window=4), None, "network"),
        (Schedule(N, lambda t: Topology.ring(N) if t < 5 else UNEQUAL), "atc", "network"),
        (Schedule(4, lambda t: [(0, 4)]), None, "edges"),
        (Schedule(4, lambda t: Topology.ring(5)), None, "at"),
        (Schedule(4, lambda t: t), None, "at"),
    ],
)
def test_a_network_that_does_not_suit_is_rejected_before_any_client_is_called(
    network: Any, method: str | None, named: str
) -> None:
    def nobody(node: int) -> Any:
        raise AssertionError(node)

    with pytest.raises((ValueError, TypeError), match=rf"^{named}"):
        learn(network, 12, nobody, method=method)


def test_arguments_that_are_rejected() -> None:
    ring, pairs = Topology.ring(4), Schedule.random_pairs(4)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("weights", lambda: CombinationMatrix(push_weights(UNEQUAL).matrix * 0.9, UNEQUAL)),
        ("weights", lambda: InMemoryNetwork(pairs, push_weights(ring))),
        ("seed", lambda: Schedule.random_pairs(4, seed=-1)),
        ("joins", lambda: Schedule.members(ring, joins={4: 1})),
        ("leaves", lambda: Schedule.members(ring, leaves={0: 0})),
        ("topology", lambda: Schedule.members(pairs)),  # type: ignore[arg-type]
    ]
    for named, call in calls:
        with pytest.raises((ValueError, TypeError), match=rf"^{named}"):
            call()
