"""Attacks on the server, by clients that send what they like, and on who reads a run's files.

Whoever holds a registered node chooses its replies. What the server spends on one, shows of it, and
lets it change must stay within bounds.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from rich.console import Console

from flwr_perdl.clients import RegressionClient, client_app
from flwr_perdl.network import Topology
from flwr_perdl.protocol import records
from flwr_perdl.protocol.records import Replies, Reply, read_parts, read_reply
from flwr_perdl.regression import TwoPhase, two_phases
from flwr_perdl.regression.phases import Answers, Stage
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import (
    ClusteredFedAvg,
    DiffusionAveraging,
    Ditto,
    FedMD,
    FedX,
    OneShotClustering,
    PerMA,
    PersonalizedFedAvg,
    ProtocolStrategy,
    ServerSettings,
)
from perdl_experiments import runner
from perdl_experiments.report import write_report
from perdl_experiments.terminal import Rows
from tests.grids import asks, grid_of


def unit_atoms(n_atoms: int, seed: int = 0) -> Any:
    atoms = np.random.default_rng(seed).standard_normal((n_atoms, 8))
    return atoms / np.linalg.norm(atoms, axis=1, keepdims=True)


def start_replies(sizes: list[int]) -> Replies:
    """Return start replies of clients with so many atoms each."""
    made = {i: Reply([unit_atoms(n, i)], 100, {"n_atoms": n}) for i, n in enumerate(sizes)}
    return Replies(made)


# Item 8: a dictionary with far too many atoms ------------------------------------------------


@pytest.mark.parametrize("colluders", [1, 3])
@pytest.mark.parametrize("matching", ["consensus", "paths"])
def test_only_dictionaries_of_likely_sizes_are_matched(matching: str, colluders: int) -> None:
    steps = PerMA(3, matching=matching).protocol([], None)
    next(steps)
    replies = start_replies([8] * (9 - colluders) + [80] + [81] * colluders)
    steps.send(replies)
    liars = range(10 - colluders, 10)
    assert list(replies.outliers) == [*liars]
    assert all("81 atoms" in why for why in replies.outliers.values())


def test_no_client_may_send_more_atoms_than_the_limit() -> None:
    def asked(n_atoms: int, **options: Any) -> None:
        request = next(PerMA(2, **options).protocol([], None))
        request.check(Reply([unit_atoms(n_atoms)], 1, {}))

    asked(4096)
    with pytest.raises(ValueError, match="max_atoms"):
        asked(4097)
    asked(5000, max_atoms=5000)
    with pytest.raises(ValueError, match="max_atoms"):
        asked(8, max_atoms=7)
    with pytest.raises(ValueError, match=r"^max_atoms"):
        asked(8, max_atoms=0)


# Items 10 and 11: metrics ------------------------------------------------------------------------


def answer(metrics: dict[str, Any], arrays: list[Any] | None = None) -> Message:
    """Return a reply whose records are whatever the client says."""
    content = RecordDict(
        {
            "arrays": ArrayRecord([np.ones(1)] if arrays is None else arrays),
            "metrics": MetricRecord({"num-examples": 1, **metrics}),
        }
    )
    return Message(content, reply_to=asks(RecordDict()))


@pytest.mark.parametrize(
    ("metrics", "named"),
    [
        ({"x" * 101: 1.0}, " 101\\b"),
        ({"\x1b]0;" + "x" * 10**6: 1.0}, " 1000004\\b"),
        ({"\x1b[2Jmse": 1.0}, r"'\\x1b\[2Jmse'"),
        ({"right\u202eleft": 1.0}, r"'right\\u202eleft'"),
        ({"two\nlines": 1.0}, r"'two\\nlines'"),
        ({"many": [0.0] * 10_000}, "10001"),
        ({f"m{i}": 0.0 for i in range(10_001)}, "1000[12]"),
    ],
)
def test_metrics_that_cannot_be_shown_are_refused_before_anything_is_copied(
    monkeypatch: pytest.MonkeyPatch, metrics: dict[str, Any], named: str
) -> None:
    hostile = answer(metrics)
    monkeypatch.setattr(records, "view_file", None)  # arrays are not read
    with pytest.raises(ValueError, match=named) as caught:
        read_reply(hostile.content)
    assert len(str(caught.value)) < 200
    with pytest.raises(ValueError, match=named):  # of a secure round
        read_parts([], {**metrics, "num-examples": 1})


def test_an_array_for_every_byte_is_refused() -> None:
    many = {"arrays": ArrayRecord([np.zeros(0)] * 10_001)}
    with pytest.raises(ValueError, match="10001"):
        read_reply(RecordDict({**many, "metrics": MetricRecord({"num-examples": 1})}))


def test_a_run_goes_on_without_the_client_whose_metrics_are_refused(
    federation: Callable[..., Any], warned: pytest.LogCaptureFixture
) -> None:
    def lying(message: Message, context: Any, call: Any) -> Message:
        reply = call(message, context)
        if context.node_config["partition-id"] == 2:
            reply.content["metrics"]["\x1b[31m" + "x" * 10**6] = 1.0
        return reply

    app = client_app(federation().make_client, train_mods=[lying])
    strategy = PerMA(3, fraction_evaluate=0.0)
    strategy.start(InProcessGrid(app, 5), num_rounds=2)
    assert [list(report.dropped) for report in strategy.history] == [["client 2"]] * 2
    said = warned.text + str([report.dropped for report in strategy.history])
    assert "\x1b[31m" not in said
    assert len(said) < 20_000


HOSTILE = "\x1b]0;title\x07\x1b[2J\u202e\x9b31m"


def test_nothing_in_a_table_reaches_the_terminal_as_a_command() -> None:
    name = HOSTILE + "name"
    out = io.StringIO()
    rows = Rows([name], [[name]], name)
    Console(file=out, width=120).print(rows)
    said = out.getvalue()
    assert "name" in said
    assert all(one.isprintable() or one == "\n" for one in said)


# Item 12: a results.json of somebody else's ------------------------------------------------------

TABLE = {"title": "t", "caption": "c", "columns": ["a"], "rows": [["b"]]}
RESULTS = {
    "experiment": "digits",
    "title": "title",
    "about": "about",
    "source": "source",
    "engine": "in-process",
    "config": {"clients": 3},
    "versions": {},
    "seed": 0,
    "rounds": 2,
    "floats_up": 1.0,
    "floats_down": 1.0,
    "seconds": 1.0,
    "tables": [TABLE],
    "figures": [],
    "notes": ["n"],
    "clients": {"0": {"asked": 1.0}},
}


def write_results(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "results.json").write_text(json.dumps({**RESULTS, **changes}))
    return folder


def figure(file: str, title: str = "t") -> dict[str, str]:
    return {"file": file, "title": title, "caption": "c"}


@pytest.mark.parametrize(
    "name",
    [
        "../secret.png",
        "{secret}",
        "link.png",
        "linked/secret.png",
        "x.png' onerror='alert(1)",
        "x.png\\..\\y.png",
        "folder.png",
        "absent.png",
        "results.json",
        "",
    ],
)
def test_a_report_embeds_pictures_of_its_own_folder_only(tmp_path: Path, name: str) -> None:
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"a secret")
    folder = write_results(tmp_path / "run", figures=[figure(name.format(secret=secret))])
    (folder / "link.png").symlink_to(secret)
    (folder / "linked").symlink_to(tmp_path)
    (folder / "folder.png").mkdir()
    with pytest.raises(ValueError, match=r"run/results.json'"):
        write_report(folder)
    assert not (folder / "report.html").exists()


def test_no_text_of_a_results_file_becomes_markup(tmp_path: Path) -> None:
    bad = "'\"><script>alert(1)</script>"
    table = {"title": bad, "caption": bad, "columns": [bad], "rows": [[bad]]}
    folder = write_results(
        tmp_path / "run",
        **dict.fromkeys(("experiment", "about", "title", "engine", "seed"), bad),
        config={"clients": bad, bad: bad},
        versions={bad: bad},
        tables=[table],
        figures=[figure(f"{bad.replace('/', '')}.png", bad)],
        notes=[bad],
        clients={bad: {"asked": 1.0, bad: 1.0}},
    )
    (folder / f"{bad.replace('/', '')}.png").write_bytes(b"")
    page = write_report(folder).read_text()
    body = page[page.index("<body>") :]
    assert "<script" not in body
    assert "'\"" not in body


def test_a_replaced_run_removes_no_file_outside_its_folder(tmp_path: Path) -> None:
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"a secret")
    folder = write_results(tmp_path / "run", figures=[figure("../secret.png")])
    (folder / "run.json").write_text(json.dumps({"config": {"experiment": "digits"}}))
    runner._remove_run(folder)
    assert secret.exists()


# Item 9: a node that says that it is somebody else -----------------------------------------------


class Hospitals(InProcessGrid):
    """Three clients in process; further nodes come and say what they like.

    Parameters
    ----------
    federation : Federation
        The clients' data.
    """

    def __init__(self, federation: Any) -> None:
        self.queried: list[int] = []
        self.trained: list[tuple[int, int]] = []
        self.dead: set[int] = set()
        super().__init__(client_app(federation.make_client), 3)
        self.honest = list(self.contexts)

    def send_and_receive(self, messages: Any, **options: Any) -> Any:
        alive = []
        for message in messages:
            node, kind = message.metadata.dst_node_id, message.metadata.message_type
            if kind == "query":
                self.queried.append(node)
            if kind == "train":
                self.trained.append((int(message.content["config"]["server-round"]), node))
            if node not in self.dead:
                alive.append(message)
        return super().send_and_receive(alive, **options)

    def join(self, node: int, partition: int) -> None:
        """Let a node register that says that it is this client."""
        first = self.contexts[self.honest[partition]]
        self.contexts[node] = replace(first, node_id=node, state=RecordDict())

    def asked(self, round_: int) -> list[int]:
        """Return the nodes that were asked to train in a round."""
        return sorted(node for when, node in self.trained if when == round_)


@pytest.fixture
def hospitals(federation: Callable[..., Any]) -> Hospitals:
    return Hospitals(federation(3))


def run_with(grid: Hospitals, events: dict[int, Callable[[], Any]], **settings: Any) -> PerMA:
    """Run four rounds; after each, what ``events`` says happens."""
    strategy = PerMA(
        3,
        fraction_evaluate=0.0,
        on_round=lambda report: events.get(report.round, lambda: None)(),
        server=ServerSettings(**settings),
    )
    strategy.start(grid, num_rounds=4)
    return strategy


LIAR = 1  # the smallest node id there can be: order of ids gives it no place


def test_a_node_cannot_take_the_place_of_one_that_lives(
    hospitals: Hospitals, warned: pytest.LogCaptureFixture
) -> None:
    run_with(hospitals, {1: lambda: hospitals.join(LIAR, 0)})
    assert all(hospitals.asked(round_) == sorted(hospitals.honest) for round_ in (1, 2, 3, 4))
    first = hospitals.honest[0]
    assert hospitals.queried == [*sorted(hospitals.honest), LIAR, first]  # is the first there?
    assert f"Nodes {first} and 1 " in warned.text


@pytest.mark.parametrize("listed", [False, True], ids=["gone", "dead and still listed"])
def test_a_restarted_node_has_its_place_again(hospitals: Hospitals, listed: bool) -> None:
    first = hospitals.honest[0]

    def restart() -> None:
        hospitals.join(77, 0)
        if listed:
            hospitals.dead.add(first)
        else:
            del hospitals.contexts[first]

    strategy = run_with(hospitals, {1: restart})
    assert hospitals.asked(1) == sorted(hospitals.honest)
    for round_ in (2, 3, 4):
        assert hospitals.asked(round_) == sorted([77, *hospitals.honest[1:]])
    assert not any(report.dropped for report in strategy.history)


def test_a_node_has_its_place_back_after_a_moment_of_absence(hospitals: Hospitals) -> None:
    first = hospitals.contexts[hospitals.honest[0]]

    def leave() -> None:
        hospitals.join(LIAR, 0)
        del hospitals.contexts[first.node_id]

    def come_back() -> None:
        hospitals.contexts[first.node_id] = first

    run_with(hospitals, {1: leave, 2: come_back})
    assert hospitals.asked(2) == sorted([LIAR, *hospitals.honest[1:]])  # only a list prevents that
    assert hospitals.asked(3) == hospitals.asked(4) == sorted(hospitals.honest)


def test_a_list_of_nodes_says_who_is_who(
    hospitals: Hospitals, warned: pytest.LogCaptureFixture
) -> None:
    first = hospitals.contexts[hospitals.honest[0]]

    def leave() -> None:
        hospitals.join(LIAR, 0)
        del hospitals.contexts[first.node_id]

    known = {node: partition for partition, node in enumerate(hospitals.honest)}
    run_with(hospitals, {1: leave}, clients_by_node=known)
    assert hospitals.asked(2) == sorted(hospitals.honest[1:])
    assert LIAR not in hospitals.queried
    said = {id(one) for one in warned.records if "Left out node 1: clients" in one.getMessage()}
    assert len(said) == 1


def test_a_list_of_nodes_is_checked() -> None:
    with pytest.raises(ValueError, match="clients_by_node"):
        PerMA(server=ServerSettings(clients_by_node={1: -1}))
    with pytest.raises(TypeError, match=r"^clients_by_node"):
        PerMA(server=ServerSettings(clients_by_node=[1]))


# Item 15: a curvature that is not true -----------------------------------------------------------


def described(robust: str, factor: float, n_liars: int) -> Stage:
    """Return the state after ten clients' descriptions, some of them false."""
    rng = np.random.default_rng(0)
    stack = np.column_stack([rng.uniform(1, 2, 10), np.ones((10, 3))])
    stack[10 - n_liars :, 0] *= factor
    settings = TwoPhase(2, robust=robust)
    run = two_phases(settings, settings.begin(np.zeros((2, 3))))
    next(run)
    return run.send((Answers(np.arange(10), np.full(10, 50.0), stack), rng)).state


@pytest.mark.parametrize("robust", ["mean", "filtered", "clip"])
@pytest.mark.parametrize(("factor", "n_liars"), [(1e3, 1), (1e6, 3), (9.0, 3)])
def test_a_false_curvature_does_not_shrink_everybodys_step(
    robust: str, factor: float, n_liars: int
) -> None:
    honest, found = described(robust, 1, 0), described(robust, factor, n_liars)
    bound = 12 if robust == "mean" and factor < 10 else 3
    assert honest.step_size / bound < found.step_size < 1.5 * honest.step_size
    assert not len(honest.steep)


def test_who_is_too_steep_for_the_step_moves_no_model(warned: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(0)
    theta = np.array([1.0, -2.0, 0.5])
    features = [rng.standard_normal((30, 3)) for _ in range(4)]
    features[3] *= 100  # its steps diverge: with them, the mean ends beyond 1e9

    def make_client(context: Any, i: int) -> RegressionClient:
        return RegressionClient(features[i], features[i] @ theta, context)

    strategy = FedX(1, fraction_evaluate=0.0)
    grid = grid_of(make_client, 4)
    result = strategy.start(grid, ArrayRecord([np.zeros((1, 3))]), num_rounds=40)
    np.testing.assert_allclose(result.arrays.to_numpy_ndarrays()[0], theta[None], atol=1e-3)
    assert strategy.history[0].anomalies == {3: {"left out": 1.0}}
    assert "clients [3]" in warned.text


# Item 16: liars who agree ------------------------------------------------------------------------


def test_robust_is_the_same_argument_of_all_strategies() -> None:
    assert PerMA(robust=True).aggregation == PerMA(aggregation="geometric-median").aggregation
    assert PerMA(robust=True).settings() == PerMA(aggregation="geometric-median").settings()
    assert PerMA(robust="median").settings() == PerMA(aggregation="median").settings()
    network = partial(DiffusionAveraging, n_liars=1)
    for strategy, argument, best in (
        (FedX, 2, "filtered"),
        (FedMD, 2, "filtered"),
        (OneShotClustering, 2, "filtered"),
        (ClusteredFedAvg, 2, "filtered"),
        (PersonalizedFedAvg, "head", "filtered"),
        (Ditto, 0.1, "filtered"),
        (network, Topology.complete(4), "clip"),
    ):
        make = cast("Callable[..., ProtocolStrategy]", strategy)
        assert make(argument, robust=True).settings() == make(argument, robust=best).settings()
        assert make(argument, robust=False).settings() == make(argument, robust="mean").settings()
        with pytest.raises(ValueError, match=r"^robust"):
            make(argument, robust="krum")
    with pytest.raises(ValueError, match=r"^aggregation"):
        PerMA(robust=True, aggregation="mean")
    with pytest.raises(ValueError, match=r"^robust"):
        PerMA(robust="filtered")
