"""Attacks on `DiffusionClient`, by a server or a neighbor that sends what it likes.

Where the server reads open letters, or sits between nodes without pinned keys, it also writes them:
it is every neighbor. `test_disk.py` attacks what a node keeps; what a server in the middle of
sealed letters can do is in ``end_to_end/test_diffusion_on_flower.py``.
"""

from __future__ import annotations

import json
import tracemalloc
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.client import NumPyClient

from flwr_perdl.clients import DiffusionClient, client_app
from flwr_perdl.network import DataDiffusion, Topology
from flwr_perdl.privacy.sealed import Keys, make_key
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import ClusteredFedAvg, DiffusionAveraging, ServerSettings
from tests.grids import Tapped, Trains, context_of

N_ATOMS, N_FEATURES = 3, 8
NOBODY = np.zeros((0, 4))


class Server:
    """One node with 40 samples of its own, and a server that asks it for what it likes."""

    def __init__(self, **node_config: Any) -> None:
        self.samples = np.random.default_rng(5).standard_normal((40, N_FEATURES))
        self.context = context_of(2, **node_config)
        self.round = 0
        self.ask([NOBODY])

    def ask(self, arrays: list[Any], **config: Any) -> Any:
        self.round += 1
        asked = {"perdl.step": "exchange", "perdl.at": self.round, "server-round": self.round}
        asked |= {"perdl.protocol": "neighbor_relay", "perdl.seed": 0}
        asked |= {"perdl.run": "run", "perdl.asleep": "", "perdl.sealed": False, **config}
        learner = DataDiffusion(N_ATOMS, n_nonzero=1)
        program = learner.program({2: self.samples}, agreement=1)
        return DiffusionClient(program, self.context).fit(arrays, asked)

    def answer_to(self, dictionary: np.ndarray) -> np.ndarray:
        """Return what the node makes of a dictionary: all it hears, from a neighbor of no data."""
        table = np.array([[0.0, 0.0, 1.0, 4.0]])
        rest = np.zeros(N_ATOMS), np.zeros(N_ATOMS), np.zeros((N_ATOMS, N_FEATURES))
        reply, _, metrics = self.ask([table, dictionary, *rest])
        assert metrics == {"perdl.floats": 54}
        return reply[0]


def removals(server: Server, a: np.ndarray, b: np.ndarray, n_steps: int) -> list[np.ndarray]:
    """Return planes, each with a sample in it.

    A sample uses atom ``a`` where its product with it is larger than with the other atom, which
    turns from one that nobody prefers to ``b``. Samples leave ``a`` one after the other, and ``a``
    before and after span a plane with the sample that has left.
    """
    planes, before = [], None
    for t in np.linspace(0, 1, n_steps):
        other = np.cos(t * np.pi / 2) * a + np.sin(t * np.pi / 2) * b
        after = server.answer_to(np.stack([a, other, other]))[0]
        if before is not None and np.linalg.norm(after - before) > 1e-6:
            planes.append(np.linalg.qr(np.stack([before, after]).T)[0])
        before = after
    return planes


def test_a_neighbor_that_lies_reads_samples_of_p3() -> None:
    """What docs/security.md says does not hold: no check of single requests stops it.

    All atoms that leave the node are sums over two samples at least; their differences are not.
    """
    server, rng = Server(), np.random.default_rng(0)
    a, b, c = np.linalg.qr(rng.standard_normal((N_FEATURES, 3)))[0].T
    first, second = (removals(server, a, away, 150) for away in (b, c))
    found = set()
    for one in first:
        for two in second:
            left, cosines, _ = np.linalg.svd(one.T @ two)
            if cosines[0] > 1 - 1e-9:  # a line that both planes have
                line = one @ left[:, 0]
                X = server.samples / np.linalg.norm(server.samples, axis=1, keepdims=True)
                found |= set(np.flatnonzero(np.abs(X @ line) > 0.999))
    assert found  # 7 of 40 here in 801 requests, 22 in 3,201
    assert server.round <= 301


def test_with_pinned_keys_a_server_can_send_no_letter_of_its_own(tmp_path: Path) -> None:
    """The bound of the attack above: only a neighbor can do it, and to its neighbors."""
    public = make_key(tmp_path / "0.pem")
    make_key(tmp_path / "2.pem")
    (tmp_path / "keys.json").write_text(f'{{"0": "{public}"}}')
    config = {"key-file": str(tmp_path / "2.pem"), "neighbor-keys": str(tmp_path / "keys.json")}
    with pytest.raises(ValueError, match="sealed"):
        Server(**config)
    impostor = Keys(0, "run")
    cards = [np.array([0.0]), impostor.card[None]]
    server = Server.__new__(Server)
    server.samples = np.random.default_rng(5).standard_normal((40, N_FEATURES))
    server.context = context_of(2, **config)
    server.round = 0
    (card, letter), _, metrics = server.ask([NOBODY, *cards], **{"perdl.sealed": True})
    assert letter.size == 0
    assert metrics["perdl.rejected-0"] == 1
    own = np.eye(N_ATOMS, N_FEATURES)
    rest = np.zeros(N_ATOMS), np.zeros(N_ATOMS), np.zeros((N_ATOMS, N_FEATURES))
    forged = impostor.seal((own, *rest), 2, 1, card)
    table = np.array([[0.0, 0.0, 1.0, 1.0]])
    (_, letter), _, metrics = server.ask([table, *cards, forged], **{"perdl.sealed": True})
    assert letter.size == 0
    assert metrics["perdl.rejected-0"] == 1


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: DiffusionAveraging(Topology.ring(3), sealed=True, fine_tune=1), "fine_tune"),
        (lambda: DiffusionAveraging(Topology.ring(3)), "sealed=True"),
        (lambda: ClusteredFedAvg(1), "sealed=True"),
    ],
)
def test_what_nodes_with_pinned_keys_do_not_answer_is_refused_before_round_one(
    make: Any, named: str, tmp_path: Path
) -> None:
    grid, strategy = nodes(tmp_path, pins=True), make()
    with pytest.raises(ValueError, match=f"neighbor-keys.*{named}.*client 0"):
        strategy.start(grid, ArrayRecord([np.ones(2)]), num_rounds=2)
    assert {message.metadata.message_type for message in grid.asked} == {"query"}


def half(array: np.ndarray) -> np.ndarray:
    return array / 2


def nodes(folder: Path, *, pins: bool) -> Tapped:
    """Return a grid of three nodes with keys, which they may pin."""
    public = {str(node): make_key(folder / f"{node}.pem") for node in range(3)}
    (folder / "keys.json").write_text(json.dumps(public))

    def keys(node: int) -> dict[str, Any]:
        pinned = {"neighbor-keys": str(folder / "keys.json")} if pins else {}
        return {"key-file": str(folder / f"{node}.pem"), **pinned}

    halves = client_app(lambda _: Trains(half, lambda w: w[0]))
    return Tapped(halves, 3, node_config=keys)


@pytest.mark.parametrize("pins", [False, True])
def test_no_bound_that_the_server_sets_tells_of_what_nodes_with_pinned_keys_send(
    pins: bool, tmp_path: Path
) -> None:
    """A node that says whose message is beyond a bound says, bound by bound, how large it is."""
    grid = nodes(tmp_path, pins=pins)
    options: Any = {"sealed": True, "server": ServerSettings(max_magnitude=50.0)}
    strategy = DiffusionAveraging(Topology.ring(3), evaluate_every=0, **options)
    strategy.start(grid, ArrayRecord([np.full(2, 200.0)]), num_rounds=2)
    assert strategy.averaged.floats_sent > 0
    metrics = {
        name
        for reply in grid.replies
        if "metrics" in reply.content
        for name in reply.content["metrics"]
    }
    assert ("perdl.rejected-0" in metrics) == (not pins)
    assert not pins or metrics == {"num-examples", "perdl.floats"}


HUGE = 1e300
CARD = Keys(0, "run").card[None]


@pytest.mark.parametrize(
    ("arrays", "config", "named"),
    [
        ([], {}, "parameters"),
        ([np.zeros(4)], {}, "messages"),
        ([np.array([[HUGE, 0.0, 0.5, 1.0]])], {}, "messages"),
        ([np.array([[0.0, 0.0, 0.5, HUGE]])], {}, "messages"),
        ([np.array([[0.0, 0.0, 0.5, -1.0]]), np.ones((1, 2))], {}, "messages"),
        ([np.array([[0.5, 0.0, 0.5, 1.0]]), np.ones((1, 2))], {}, "messages"),
        ([NOBODY], {"perdl.at": -1}, "perdl.at"),
        ([NOBODY], {"perdl.at": 10**30}, "perdl.at"),
        ([NOBODY], {"server-round": -1}, "server-round"),
        ([NOBODY], {"server-round": 10**30}, "server-round"),
        ([NOBODY], {"perdl.step": "state"}, "step"),
        ([NOBODY], {"perdl.run": "x" * 1000}, "run"),
        ([NOBODY], {"perdl.sealed": True}, "parameters"),
        ([NOBODY, np.array([-1.0]), CARD], {"perdl.sealed": True}, "receivers"),
        ([NOBODY, np.array([HUGE]), CARD], {"perdl.sealed": True}, "receivers"),
        ([NOBODY, np.array([0.0, 1.0]), CARD], {"perdl.sealed": True}, "cards"),
    ],
)
def test_a_malformed_request_is_refused_by_name_and_changes_nothing(
    arrays: list[Any], config: dict[str, Any], named: str
) -> None:
    server = Server()
    before = {name: dict(server.context.state[name]) for name in server.context.state}
    with pytest.raises(ValueError, match=f"^{named}"):
        server.ask(arrays, **config)
    assert {name: dict(server.context.state[name]) for name in server.context.state} == before


@pytest.mark.parametrize(
    ("step", "config", "n_models", "named"),
    [
        ("train-alone", {"perdl.n-fits": 10**12}, 1, "n-fits"),
        ("measure-models", {}, 10_001, "models"),
    ],
)
def test_what_would_take_a_client_for_ever_is_refused_before_it_begins(
    step: str, config: dict[str, Any], n_models: int, named: str
) -> None:
    class Counting(NumPyClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            raise AssertionError("work has begun")

        evaluate = fit

    request = {"perdl.protocol": "clustered", "perdl.step": step, "perdl.seed": 0}
    request |= {"server-round": 1, **config}
    arrays = ArrayRecord({f"{j}/w": Array(np.zeros(1)) for j in range(n_models)})
    content = RecordDict({"arrays": arrays, "config": ConfigRecord(request)})
    grid = InProcessGrid(client_app(lambda context: Counting()), 1)
    (node,) = grid.get_node_ids()
    (reply,) = grid.send_and_receive([Message(content, node, MessageType.TRAIN)])
    assert named in reply.error.reason


def refusal(arrays: ArrayRecord, config: Any) -> str:
    """Return why a client refuses to train, which takes it no memory."""
    grid = InProcessGrid(client_app(lambda context: Trains(half)), 1)
    (node,) = grid.get_node_ids()
    content = RecordDict({"arrays": arrays, "config": ConfigRecord(config)})
    tracemalloc.start()
    (reply,) = grid.send_and_receive([Message(content, node, MessageType.TRAIN)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**7
    return str(reply.error.reason)


@pytest.mark.parametrize(
    ("at", "changed", "named"),
    [
        (-1, {"arrays": [["0", [10**8], "<f8"]]}, "state-dir"),
        (-1, {"arrays": [["0", [3], f"<U{10**8}"]]}, "perdl.averaging"),
        (0, {"learner": {"compression": None, "groups": "auto", "n_nodes": 10**9}}, "n_nodes"),
    ],
)
def test_a_size_that_a_request_announces_takes_no_memory(
    at: int, changed: dict[str, Any], named: str
) -> None:
    tapped = Tapped(client_app(lambda context: Trains(half)), 3)
    strategy = DiffusionAveraging(Topology.ring(3), fraction_evaluate=0.0)
    strategy.start(tapped, ArrayRecord([np.zeros(3)]), num_rounds=2)
    request = [m for m in tapped.asked if m.metadata.message_type == "train"][at].content
    about = {**json.loads(request["config"]["perdl.averaging"]), **changed}
    config = {**request["config"], "perdl.averaging": json.dumps(about)}
    assert named in refusal(request.array_records["arrays"], config)


@pytest.mark.parametrize(
    ("key", "given"),
    [
        *product(
            ("perdl.transport", "perdl.averaging", "perdl.left-out"),
            ("5", "{", "{}", "[5]", "null", "[" * 10**5),
        ),
        *product(("perdl.transport", "perdl.averaging"), ("[]", '{"arrays": [], "half": 1}')),
        ("perdl.transport", '{"half": true, "share": -1}'),
        ("perdl.transport", '{"half": true, "share": null, "dtypes": {"0": "U50000"}}'),
        ("perdl.transport", '{"half": true, "share": null, "dtypes": [["0", "float64"]]}'),
    ],
)
def test_what_a_key_says_as_json_is_refused_by_its_name(key: str, given: str) -> None:
    config = {"server-round": 1, "perdl.seed": 0, "perdl.run": "run", "perdl.at": 1, key: given}
    if key == "perdl.averaging":
        config |= {"perdl.protocol": "diffusion_averaging", "perdl.step": "exchange"}
    arrays = ArrayRecord([np.zeros((0, 4)), np.zeros(10_000, np.float16)])
    assert f"{key} must" in refusal(arrays, config)


def test_a_client_cannot_fill_the_history_with_metrics() -> None:
    class Talking(NumPyClient):
        def __init__(self, context: Any) -> None:
            self.partition = context.node_config["partition-id"]

        def fit(self, parameters: Any, config: Any) -> Any:
            fresh = {f"{config['server-round']} {i}": 1.0 for i in range(600)}
            fresh |= {"list": [0.0] * 1001} if config["server-round"] > 1 else {}
            return parameters, 1, {"loss": 2.0, **(fresh if self.partition == 0 else {})}

    strategy = ClusteredFedAvg(1, fraction_evaluate=0.0)
    grid = InProcessGrid(client_app(Talking), 3)
    strategy.start(grid, ArrayRecord([np.zeros(2)]), num_rounds=4)
    names = set().union(*(report.metrics[0] for report in strategy.history))
    assert len(names) == 1001  # and the number of examples
    assert "list" not in names
    assert all("loss" in report.metrics[0] for report in strategy.history)
    assert strategy.history[-1].metrics[1]["loss"] == 2.0
    assert [sorted(report.anomalies) for report in strategy.history] == [[], [0], [0], [0]]
