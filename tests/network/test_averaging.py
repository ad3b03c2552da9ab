from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message
from flwr.client import NumPyClient
from numpy.typing import NDArray
from scipy.linalg import block_diag

from flwr_perdl.clients import client_app
from flwr_perdl.network import Faults, InMemoryNetwork, Schedule, diffusion_averaging
from flwr_perdl.network.averaging import AveragingNode, NodeState
from flwr_perdl.network.topology import CombinationMatrix, Topology, metropolis_weights
from flwr_perdl.random import spawn
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import DiffusionAveraging
from tests.grids import Tapped, arrays_in, partition_of
from tests.network.objectives import AVERAGING
from tests.network.programs import sleeping

Array = NDArray[Any]

N, FEATURES, SAMPLES = 6, 3, 12
RING = Topology.ring(N)
START = [np.zeros(FEATURES)]


def samples(node: int) -> tuple[Array, Array]:
    """Return a node's least squares, whose solutions differ by much from node to node."""
    X = spawn(1, node).standard_normal((SAMPLES, FEATURES))
    return X, X @ (spawn(2, node).standard_normal(FEATURES) + node)


class LeastSquares(NumPyClient):
    """One gradient step per fit."""

    step = 0.1

    def __init__(self, node: int) -> None:
        self.X, self.y = samples(node)

    def fit(self, parameters: list[Array], config: Any) -> tuple[list[Array], int, dict[str, Any]]:
        (w,) = parameters
        error = self.X @ w - self.y
        metrics = {"loss": float(error @ error), "secret": float(self.y[0]), "name": "someone"}
        w -= self.step * self.X.T @ error / SAMPLES  # in place: the array is the client's own
        return [w], SAMPLES, metrics

    def evaluate(self, parameters: list[Array], config: Any) -> tuple[float, int, dict[str, Any]]:
        (w,) = parameters
        error = self.X @ w - self.y
        return float(error @ error), SAMPLES, {"round": config["server-round"]}


def with_step(step: float) -> Callable[[int], LeastSquares]:
    return type("LeastSquares", (LeastSquares,), {"step": step})


GRAMS = [X.T @ X / SAMPLES for X, _ in map(samples, range(N))]
MOMENTS = [X.T @ y / SAMPLES for X, y in map(samples, range(N))]
CONSENSUS = np.linalg.solve(sum(GRAMS), sum(MOMENTS))


def learn(network: Any, n_rounds: int, clients: Any = LeastSquares, **options: Any) -> Any:
    given = {"initial": START, "evaluate_every": 0, **options}
    return diffusion_averaging(clients, network, n_rounds, **given)


def on_flower(grid: InProcessGrid, n_rounds: int, **options: Any) -> DiffusionAveraging:
    strategy = DiffusionAveraging(RING, **{"evaluate_every": 0, **options})
    strategy.start(grid, ArrayRecord(START), num_rounds=n_rounds)
    return strategy


def client(context: Context) -> LeastSquares:
    return LeastSquares(partition_of(context))


def models_of(learned: Any) -> Array:
    return np.stack([w for (w,) in learned.models.values()])


# Where the nodes end -----------------------------------------------------------------------------


WEIGHTS = metropolis_weights(RING)
FAULTY = InMemoryNetwork(sleeping(WEIGHTS, 0.1, seed=1), faults=Faults(drop=0.2, seed=1))
PAIRS = InMemoryNetwork(Schedule.random_pairs(N), faults=Faults(drop=0.2, seed=1))


@pytest.mark.parametrize(
    ("method", "network"),
    [
        ("exact_diffusion", InMemoryNetwork(RING)),
        ("gradient_tracking", FAULTY),
        ("gradient_tracking", PAIRS),
        ("gradient_tracking", Schedule.members(RING, joins={2: 9}, leaves={5: 150})),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_corrected_methods_end_at_the_solution_of_all_data(method: str, network: Any) -> None:
    learned = learn(network, 250, with_step(0.2), method=method)
    np.testing.assert_allclose(models_of(learned), np.tile(CONSENSUS, (N, 1)), rtol=0, atol=1e-6)
    assert learned.disagreement < 1e-6
    assert learned.dropped_messages == {}  # no message of an honest node is beyond a limit


@pytest.mark.parametrize("method", ["atc", "cta"])
def test_the_bias_of_the_other_methods_is_the_known_one_and_shrinks_with_the_step(
    method: str,
) -> None:
    """Their fixed point solves a linear system over all nodes' models, stacked."""
    A = np.kron(metropolis_weights(RING).matrix.toarray(), np.eye(FEATURES))
    H = block_diag(*GRAMS)
    b, one = np.concatenate(MOMENTS), np.eye(N * FEATURES)
    biases = []
    for step in (0.2, 0.1):
        map_, shift = (one - step * H) @ A, step * b  # cta: w <- fit(A w)
        if method == "atc":  # w <- A fit(w)
            map_, shift = A @ (one - step * H), A @ (step * b)
        fixed = np.linalg.solve(one - map_, shift).reshape(N, FEATURES)
        learned = learn(RING, 300, with_step(step), method=method)
        np.testing.assert_allclose(models_of(learned), fixed, rtol=0, atol=1e-6)
        biases.append(np.linalg.norm(fixed - CONSENSUS, axis=1).max())
    assert biases[0] > biases[1] > 0.1


def test_one_round_by_hand() -> None:
    """Two nodes at 0 and 4 that move halfway to 8: 4 and 6 after fit, 5 after the mean."""

    class Half(NumPyClient):
        def __init__(self, node: int) -> None:
            self.first = 4.0 * node

        def get_parameters(self, config: Any) -> list[Array]:
            return [np.array([self.first])]

        def fit(self, parameters: list[Array], config: Any) -> Any:
            return [(parameters[0] + 8) / 2], 1, {"seen": parameters[0][0]}

        def evaluate(self, parameters: list[Array], config: Any) -> Any:
            return parameters[0][0], 1, {}

    pair = Topology.complete(2)
    learned = diffusion_averaging(Half, pair, 1, method="atc", metrics=["seen"])
    assert models_of(learned).tolist() == [[5.0], [5.0]]
    assert learned.curves["train-seen"].tolist() == [[0.0, 4.0]]
    assert np.isnan(learned.curves["evaluate-seen"]).tolist() == [[True, True]]
    assert learned.curves["evaluate-loss"].tolist() == [[5.0, 5.0]]
    assert learned.curves["neighbor-distance"].tolist() == [[1.0, 1.0]]
    assert (learned.rounds, learned.floats_sent, learned.disagreement) == (1, 2.0, 0.0)
    # Combine first: both at 2, then halfway to 8.
    assert models_of(diffusion_averaging(Half, pair, 1, method="cta")).tolist() == [[5.0]] * 2
    # Two corrected rounds. Exact diffusion halves the step to the mean: 4.5 and 5.5; then fit gives
    # 6.25 and 6.75, phi 6.25 + 4.5 - 4 and 6.75 + 5.5 - 6, mean 6.5.
    exact = diffusion_averaging(Half, pair, 2, method="exact_diffusion")
    assert models_of(exact).tolist() == [[6.625], [6.375]]
    tracking = diffusion_averaging(Half, pair, 2, method="gradient_tracking")
    # g: -4 and -2, w: 5, y: -3; g: -1.5, y: -3 - 1.5 + 4 and -3 - 1.5 + 2, w - y: 5.5 and 7.5.
    assert models_of(tracking).tolist() == [[6.5], [6.5]]
    assert tracking.floats_sent == 8


def test_several_epochs_end_where_the_changes_sum_to_zero() -> None:
    class Three(LeastSquares):
        def fit(self, parameters: list[Array], config: Any) -> Any:
            for _ in range(3):
                parameters, *rest = super().fit(parameters, config)
            return parameters, *rest

    learned = learn(RING, 400, Three, method="exact_diffusion")
    w = models_of(learned)
    changes = sum(Three(k).fit([w[k].copy()], {})[0][0] - w[k] for k in range(N))
    assert np.abs(changes).max() < 1e-9
    assert learned.disagreement < 1e-9


def test_evaluations_come_every_few_rounds_and_see_the_model_after_the_round() -> None:
    told: list[int] = []
    options: dict[str, Any] = {"evaluate_every": 3, "metrics": ["round", "loss"]}
    learned = learn(RING, 7, callback=lambda at, _: told.append(at), **options)
    assert told == [1, 2, 3, 4, 5, 6, 7]
    rounds = learned.curves["evaluate-round"]
    assert np.isfinite(rounds).all(axis=1).tolist() == [False, False, True] * 2 + [False]
    assert rounds[2].tolist() == [3.0] * N
    # Without any combination the loss before round 4 is the one that was evaluated after round 3.
    alone = CombinationMatrix(np.eye(2), Topology.from_edges(2, []))
    learned = learn(alone, 4, evaluate_every=1, metrics=["loss"])
    train, evaluated = learned.curves["train-loss"], learned.curves["evaluate-loss"]
    np.testing.assert_array_equal(train[1:], evaluated[:-1])


# Nodes that die, and nodes that lie --------------------------------------------------------------

DEAD = 3


def test_disagreement_after_a_death_is_that_of_the_living(warned: Any) -> None:
    memory = InMemoryNetwork(sleeping(WEIGHTS, away={DEAD: range(5, 99)}))
    here = learn(memory, 9)
    living = np.delete(models_of(here), DEAD, axis=0)
    apart = np.linalg.norm(living - living.mean(axis=0), axis=1).max()
    assert here.disagreement == pytest.approx(apart)
    assert here.alive.tolist() == [node != DEAD for node in range(N)]

    def dies(node: int, message: Message) -> str | None:
        round_ = message.content.get("config", {}).get("server-round", 0)
        return "error" if node == DEAD and round_ >= 5 else None

    grid = InProcessGrid(client_app(client), N, faults=dies)
    learned = on_flower(grid, 9, shows_models=True).averaged
    assert learned.alive.tolist() == here.alive.tolist()
    assert learned.disagreement == pytest.approx(here.disagreement)
    assert warned.text.count(f"left out client {DEAD}") == 1


@pytest.fixture
def lies(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Have the last array of node 3's messages be a lie: its tracker, or its model."""
    honest = AveragingNode.message

    def begin(lie: Any) -> None:
        def message(node: AveragingNode, state: NodeState) -> list[Array]:
            *others, last = honest(node, state)
            return [*others, last + lie * (node.node == DEAD)]

        monkeypatch.setattr(AveragingNode, "message", message)

    return begin


ONE_VALUE = np.array([1e6, 0, 0])


@pytest.mark.parametrize(
    ("method", "lie"), [*((method, 1e6) for method in AVERAGING), ("atc", ONE_VALUE)]
)
def test_the_others_end_as_without_a_node_that_lies_without_measure(
    method: str, lie: Any, lies: Any
) -> None:
    graph = Topology.exponential(N)
    dead = InMemoryNetwork(sleeping(metropolis_weights(graph), away={DEAD: range(99)}))
    expected = learn(dead, 60, method=method)
    lies(lie)
    learned = learn(InMemoryNetwork(graph), 60, method=method)
    others = np.arange(N) != DEAD
    np.testing.assert_allclose(models_of(learned)[others], models_of(expected)[others], atol=1e-9)
    assert learned.alive.all()
    assert learned.dropped_messages == {DEAD: 60}


# Who learns what ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sealed", [False, True], ids=["open", "sealed"])
def test_the_server_sees_the_metrics_that_are_named_and_models_only_where_they_are_open(
    sealed: bool,
) -> None:
    models: list[bytes] = []

    class Noted(LeastSquares):
        def fit(self, parameters: list[Array], config: Any) -> Any:
            own, *rest = super().fit(parameters, config)
            models.append(own[0].tobytes())
            return own, *rest

    grid = Tapped(client_app(lambda context: Noted(partition_of(context))), N)
    reports: list[dict[int, dict[str, float]]] = []
    learned = on_flower(
        grid,
        3,
        method="atc",
        metrics=["loss"],  # the node sends what fit returns
        evaluate_every=1,
        sealed=sealed,
        on_round=lambda report: reports.append(report.metrics),
    ).averaged
    crossed = b"".join(array.tobytes() for _, array in arrays_in(grid.asked + grid.replies))
    assert len(models) == 3 * N
    assert all((model in crossed) != sealed for model in models)
    told = {"neighbor-distance", "floats-received", "bytes-received", "train-loss", "evaluate-loss"}
    seen = {name for _, _, reply in grid.exchanges() for name in reply.get("metrics", ())}
    assert seen - {"num-examples", "perdl.floats"} == told
    assert set(learned.curves) == told
    # While it runs: from the second exchange on, every node's report about the round before.
    assert told.isdisjoint(reports[int(sealed)][0])
    for t, report in enumerate(reports[1 + sealed :]):
        for name in told:
            assert [report[k][name] for k in range(N)] == learned.curves[name][t].tolist()


# What is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "returned",
    [([np.zeros(4)], 1, {}), ([np.full(3, np.nan)], 1, {}), ([np.zeros(3)], 1, {"loss": "low"})],
)
def test_what_a_client_returns_is_checked(returned: Any) -> None:
    class Wrong(LeastSquares):
        def fit(self, parameters: list[Array], config: Any) -> Any:
            return returned

    with pytest.raises(ValueError, match=r"^fit\b"):
        learn(RING, 1, Wrong, metrics=["loss"])
