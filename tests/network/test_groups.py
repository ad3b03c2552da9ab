"""Groups without a server: who accepts whom, what leaves a node, and the same bits everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from flwr.client import NumPyClient
from numpy.testing import assert_array_equal as assert_same_bits
from numpy.typing import NDArray

from flwr_perdl.clients import client_app
from flwr_perdl.network import InMemoryNetwork, Schedule, TopK, diffusion_averaging
from flwr_perdl.network.topology import Topology, metropolis_weights
from flwr_perdl.random import spawn
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import DiffusionAveraging
from tests.grids import Forgetting, Tapped, partition_of
from tests.network.programs import sleeping

N, SIZE, ROUNDS, LOCAL = 6, 32, 8, 2
PAIRS = Schedule.random_pairs(N, 3, seed=1)
START = {"w": np.zeros(SIZE), "n": np.array(0), "flag": np.array([True])}
GROUPS = [[0, 2, 4], [1, 3, 5]]
CHOOSES: dict[str, Any] = {"groups": "auto", "local_rounds": LOCAL, "metrics": ["n"]}


class Pulled(NumPyClient):
    """Halfway to one of two points, by the node's parity, as noisy samples show it."""

    def __init__(self, node: int) -> None:
        self.node, self.target = node, np.full(SIZE, 5.0 * (-1) ** node)

    def fit(self, parameters: list[NDArray[Any]], config: Any) -> Any:
        w, n, *rest = parameters
        noise = spawn(0, self.node, config["server-round"]).standard_normal(SIZE)
        return [(w + self.target + noise).astype(w.dtype) / 2, n + 1, *rest], 1, {}

    def evaluate(self, parameters: list[NDArray[Any]], config: Any) -> Any:
        w, n, *_ = parameters
        return float(np.sum((w - self.target) ** 2)), 3, {"n": float(n)}


def here(network: Any = PAIRS, rounds: int = ROUNDS, start: Any = START, **more: Any) -> Any:
    initial = ArrayRecord({name: Array(array) for name, array in start.items()})
    given = {**CHOOSES, **more}
    return diffusion_averaging(Pulled, network, rounds, initial=initial, **given)


def relayed(
    topology: Any = PAIRS, rounds: int = ROUNDS, start: Any = START, grid: Any = None, **more: Any
) -> Any:
    app = client_app(lambda context: Pulled(partition_of(context)))
    strategy = DiffusionAveraging(topology, **{**CHOOSES, **more})
    record = ArrayRecord({name: Array(array) for name, array in start.items()})
    strategy.start(grid or InProcessGrid(app, N), record, num_rounds=rounds)
    return strategy.averaged


def assert_same(found: Any, expected: Any) -> None:
    for name, rows in expected.curves.items():
        if name != "choice-seconds" and not np.isnan(rows).all():  # a metric that no node has
            assert_same_bits(found.curves[name], rows, err_msg=name)
    assert_same_bits(found.met, expected.met)
    assert_same_bits(found.accepted, expected.accepted)
    assert found[3:6] == expected[3:6]


def by_hand(rounds: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return models and acceptances by the definition, with the floats alone."""
    clients, w, accepted = [Pulled(k) for k in range(N)], np.zeros((N, SIZE)), np.zeros((N, N))
    for t in range(1, rounds + 1):
        psi = np.stack(
            [clients[k].fit([w[k], np.array(0)], {"server-round": t})[0][0] for k in range(N)]
        )
        w = psi.copy()
        for k in range(N if t > LOCAL else 0):
            neighbors = PAIRS.matrix(t).topology.neighbours(k)
            loss = [clients[k].evaluate([(psi[k] + psi[j]) / 2, 0], {})[0] for j in neighbors]
            likes = neighbors[np.array(loss) < clients[k].evaluate([psi[k], 0], {})[0]]
            accepted[k, likes] += 1
            w[k] = psi[sorted([k, *likes])].mean(axis=0)
    return w, accepted


def test_nodes_accept_whose_midpoint_is_better_and_find_their_groups() -> None:
    found = here()
    models, accepted = by_hand(ROUNDS)
    np.testing.assert_allclose([w for w, *_ in found.models.values()], models, rtol=1e-12)
    assert_same_bits(found.accepted, accepted)
    met = sum(PAIRS.matrix(t).topology.adjacency for t in range(LOCAL + 1, ROUNDS + 1)).toarray()
    assert_same_bits(found.met, met)
    assert found.accepted[0::2, 1::2].sum() == found.accepted[1::2, 0::2].sum() == 0
    assert 0 < found.accepted.sum() < found.met.sum()
    floats = np.where(np.arange(1, ROUNDS + 1) > LOCAL, found.curves["floats-received"].sum(1), 0)
    assert_same_bits(found.curves["floats-received"].sum(axis=1), floats)  # none while alone
    assert found.floats_sent == floats.sum() == (SIZE + 1) * met.sum()
    calls = np.stack([PAIRS.matrix(t).topology.degrees + 1 for t in range(1, ROUNDS + 1)])
    calls[:LOCAL] = 0
    assert_same_bits(found.curves["choice-evaluations"], calls)
    assert (found.curves["choice-seconds"] >= 0).all()
    assert {flag.tolist()[0] for *_, flag in found.models.values()} == {True}


def test_groups_are_those_that_accept_each_other_in_more_than_half_of_their_meetings() -> None:
    found = here(Topology.complete(N), 12)
    assert found.groups == GROUPS
    met = np.full((4, 4), 4.0)
    once = np.array([[0, 4, 2, 0], [3, 0, 0, 0], [4, 0, 0, np.nan], [0, 0, 4, 0]])
    assert found._replace(met=met, accepted=once).groups == [[0, 1], [2], [3]]
    assert here(groups=None, method="atc").groups == []


class Tie(Pulled):
    """All models are as good; at node 0 none has a loss."""

    def evaluate(self, parameters: list[NDArray[Any]], config: Any) -> Any:
        return np.nan if self.target[0] > 0 else 1.0, 1, {}


def test_ties_and_nan_are_not_accepted() -> None:
    start = [np.zeros(SIZE), np.array(0)]
    options: dict[str, Any] = {"groups": "auto", "local_rounds": 1, "evaluate_every": 0}
    found = diffusion_averaging(Tie, PAIRS, 5, initial=start, **options)
    assert (found.accepted.sum(), found.met.sum() > 0) == (0, True)


ASLEEP = sleeping(metropolis_weights(Topology.complete(N)), 0.3, seed=3)
NETWORKS: dict[str, dict[str, Any]] = {
    "schedule": {},
    "directed": {"topology": Topology.from_edges(N, [(k, (k + d) % N) for k in range(N)
                                                     for d in (1, 2)], directed=True)},
    "apart": {"topology": Topology.from_edges(N, [(0, 2), (2, 4), (1, 3), (3, 5)])},
    "stale": {"topology": ASLEEP, "staleness": 2},
    "absent": {"topology": Schedule(N, PAIRS.at, PAIRS.window,
                                    present=lambda t: np.arange(N) != (2 if 2 <= t < 5 else N))},
}  # fmt: skip


@pytest.mark.parametrize("sealed", [False, True], ids=["open", "sealed"])
@pytest.mark.parametrize("name", [*NETWORKS])
def test_the_relay_has_the_bits_of_memory(name: str, sealed: bool) -> None:
    given = {"topology": PAIRS, **NETWORKS[name]}
    network = InMemoryNetwork(**given) if given["topology"] is ASLEEP else given["topology"]
    assert_same(relayed(sealed=sealed, **given), here(network))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_other_dtypes_have_the_same_bits_too(dtype: Any) -> None:
    start = {**START, "w": np.zeros(SIZE, dtype)}
    assert_same(relayed(start=start), here(start=start))


class Restarted(Forgetting):
    """A grid whose node 0 loses its state before exchange 5."""

    forgets = 5


def test_a_node_that_lost_its_state_trains_alone_again() -> None:
    app = client_app(lambda context: Pulled(partition_of(context)))
    found = relayed(Topology.complete(N), 12, grid=Restarted(app, N))
    spent = found.curves["choice-evaluations"][:, 0]
    # It combines round 3, misses the message of round 5, and is back alone in rounds 6 and 7.
    assert np.flatnonzero(spent > 0).tolist() == [2, *range(7, 12)]
    assert found.dropped_messages == {}
    assert (found.curves["choice-evaluations"][5:7, 1:] == N - 1).all()  # five heard, one silent


def test_messages_are_empty_while_nodes_train_alone_and_counts_leave_once(tmp_path: Path) -> None:
    app = client_app(lambda context: Pulled(partition_of(context)), private=["n"])
    grid = Tapped(app, N, node_config=lambda node: {"state-dir": str(tmp_path)})
    found = relayed(Topology.complete(N), grid=grid)
    replies = [reply for step, _, reply in grid.exchanges() if step == "exchange"]
    sent = [len(reply["arrays"]) for reply in replies if reply.array_records]
    rounds = [{*sent[N * t : N * (t + 1)]} for t in range(ROUNDS)]
    assert rounds == [{0}] * LOCAL + [{1}] * (ROUNDS - LOCAL)
    assert grid.errors == []
    assert found.groups == GROUPS
    assert (found.curves["evaluate-n"][-1] == ROUNDS).all()  # each node's own


class Nothing(Pulled):
    def evaluate(self, parameters: list[NDArray[Any]], config: Any) -> Any:
        return 0.0, 0, {}


def test_an_evaluation_without_examples_is_found_in_the_first_exchange() -> None:
    with pytest.raises(ValueError, match="evaluate"):
        diffusion_averaging(Nothing, PAIRS, 6, initial=[np.zeros(SIZE), np.array(0)], groups="auto")
    grid = Tapped(client_app(lambda context: Nothing(partition_of(context))), N)
    with pytest.raises(RuntimeError):
        relayed(grid=grid)
    assert len(grid.errors) == N
    assert all("evaluate" in error for error in grid.errors)


@pytest.mark.parametrize(
    ("named", "options"),
    [
        ("groups", {"groups": "all"}),
        ("method", {"method": "cta"}),
        ("robust", {"robust": "trimmed"}),
        ("compression", {"compression": TopK(0.5), "method": "atc"}),
        ("local_rounds", {"local_rounds": -1}),
        ("local_rounds", {"local_rounds": ROUNDS}),
        ("network", {"topology": Topology.from_edges(N, [(0, 1)])}),
        ("network", {"topology": Topology.from_edges(2, [(0, 1)], directed=True)}),
    ],
)
def test_what_does_not_go_with_groups_is_refused(named: str, options: dict[str, Any]) -> None:
    topology = options.pop("topology", PAIRS)
    with pytest.raises(ValueError, match=named):
        here(topology, **options)
    with pytest.raises(ValueError, match=named):
        relayed(topology, **options)


def test_weights_are_refused() -> None:
    weights = PAIRS.matrix(1)
    with pytest.raises(ValueError, match="weights"):
        DiffusionAveraging(weights.topology, weights=weights, groups="auto")
