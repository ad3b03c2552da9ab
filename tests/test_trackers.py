"""What a run's observers get, and that each tracker's own reader finds every round's metrics."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context
from typer.testing import CliRunner

from flwr_perdl.clients import client_app
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import ClusteredFedAvg, RoundReport, TooFewReplies
from flwr_perdl.trackers import (
    MLflowTracker,
    TensorBoardTracker,
    Tracker,
    WandbTracker,
)
from perdl_experiments import run_experiment
from perdl_experiments.cli import app
from perdl_experiments.deployment import free_port
from tests.grids import partition_of

Metrics = dict[tuple[str, int], float]
NAMES = {"fit": 3.0, "..": 1.0}  # the second is none that every tool takes

#: Of MLflow's and Weights & Biases' own libraries.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


class Client:
    """Moves a number half of the way to its own, which is near that of each second client."""

    def __init__(self, context: Context) -> None:
        self.target = 10.0 * (partition_of(context) % 2)

    def fit(self, parameters: Any, config: Any) -> Any:
        return [(parameters[0] + self.target) / 2], 10, {**NAMES, "own": self.target}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        return float(abs(parameters[0] - self.target).sum()), 10, {}


def clustered(on_round: Any, rounds: int = 3, **options: Any) -> ClusteredFedAvg:
    strategy = ClusteredFedAvg(2, start="given", seed=7, on_round=on_round, **options)
    initial = ArrayRecord([np.array([[1.0], [9.0]])])
    strategy.start(InProcessGrid(client_app(Client), 4), initial, rounds, verbose="quiet")
    return strategy


def expected(strategy: ClusteredFedAvg) -> Metrics:
    """Return all clients', each client's and each cluster's own numbers, from the history."""
    found: Metrics = {}
    for report in strategy.history:
        for name in ("num-examples", "fit", "own") if report.step == "cluster" else ("loss",):
            if name in report.aggregate:
                found[f"{report.step}/{name}", report.round] = report.aggregate[name]
            for client, own in report.metrics.items():
                found[f"{report.step}/{name}/client-{client}", report.round] = own[name]
        found[f"{report.step}/floats_up", report.round] = report.floats_up
        if report.step == "cluster":
            for client in (0, 1):
                number = int(report.metrics[client]["cluster"])
                found[f"cluster/own/cluster-{number}", report.round] = 10.0 * client
    assert len(found) > 60
    return found


def from_mlflow(folder: Path) -> tuple[Metrics, dict[str, str], set[str]]:
    client = pytest.importorskip("mlflow").MlflowClient(uri_of(folder))
    (run,) = client.search_runs([client.get_experiment_by_name("flwr-perdl").experiment_id])
    assert run.info.status == "FINISHED"
    histories = [client.get_metric_history(run.info.run_id, name) for name in run.data.metrics]
    found = {(one.key, one.step): one.value for history in histories for one in history}
    options = {n.removeprefix("perdl."): value for n, value in run.data.params.items()}
    return found, options, {one.path for one in client.list_artifacts(run.info.run_id)}


def from_tensorboard(folder: Path) -> tuple[Metrics, dict[str, str], set[str]]:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder)).Reload()
    tags = events.Tags()
    found = {(n, one.step): one.value for n in tags["scalars"] for one in events.Scalars(n)}
    (text,) = events.Tensors("options/text_summary")[0].tensor_proto.string_val
    rows = [line.strip("| ").split(" | ") for line in text.decode().splitlines()[2:]]
    files = {path.name for path in folder.iterdir()} | {f"{n}.png" for n in tags["images"]}
    return found, dict(rows), files


def from_wandb(folder: Path) -> tuple[Metrics, dict[str, str], set[str]]:
    pytest.importorskip("wandb").teardown()  # waits until all is written
    found: Metrics = {}
    options: dict[str, str] = {}
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    for record in records(path.read_bytes()):
        row = {one.nested_key[0] or one.key: one.value_json for one in record.history.item}
        step = record.history.step.num
        numbers = {name: value for name, value in row.items() if "/" in name}
        found |= {(name, step): json.loads(value) for name, value in numbers.items()}
        options |= {one.key: str(json.loads(one.value_json)) for one in record.run.config.update}
    return found, options, {one.name for one in (path.parent / "files").iterdir()}


def records(data: bytes) -> Iterator[Any]:
    """Yield the records of an offline run, which is a log of LevelDB's format."""
    from wandb.proto import wandb_internal_pb2

    at, whole, block = 7, b"", 2**15
    while at < len(data):
        if block - at % block < 7:
            at += block - at % block
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


def uri_of(folder: Path) -> str:
    return f"sqlite:///{folder}/runs.db"


#: By the name of --track: the library, the tracker of a folder, and its own reader.
TOOLS: dict[str, tuple[str, Callable[[Path], Tracker], Callable[[Path], Any]]] = {
    "mlflow": ("mlflow", lambda folder: MLflowTracker(uri_of(folder)), from_mlflow),
    "tensorboard": ("tensorboardX", TensorBoardTracker, from_tensorboard),
    "wandb": ("wandb", WandbTracker, from_wandb),
}


@pytest.fixture(params=TOOLS)
def tool(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a tool's name; what it writes beside a folder of its own is in ``tmp_path``."""
    pytest.importorskip(TOOLS[request.param][0])
    monkeypatch.chdir(tmp_path)
    return str(request.param)


def test_a_tools_own_reader_finds_every_rounds_metrics(tool: str, tmp_path: Path) -> None:
    _, make, read = TOOLS[tool]
    strategy = clustered(make(tmp_path))
    found, options, files = read(tmp_path)
    for key, value in expected(strategy).items():
        assert found[key] == pytest.approx(value), key
    assert {round_ for _, round_ in found} == {1, 2, 3}
    wanted = {"strategy": "ClusteredFedAvg", "seed": "7", "start": "given", "num_rounds": "3"}
    assert wanted.items() <= options.items()
    assert "arrays.npz" in files


def test_a_run_of_the_command_line_is_tracked_with_its_figures(tool: str, tmp_path: Path) -> None:
    """The clients' own atoms are not among the files."""
    own, out = tmp_path / "own", tmp_path / "out"
    own.mkdir()
    where = uri_of(own) if tool == "mlflow" else own
    done = invoke("--out", out, "--keep-local", "--track", f"{tool}={where}")
    assert done.exit_code == 0, done.output
    found, options, files = TOOLS[tool][2](own)
    assert {round_ for name, round_ in found if "/client-0" in name} == {1, 2, 3}
    assert (options["strategy"], options["seeds"]) == ("synthetic", "1")
    figures = {path.name for path in out.glob("*.png")}
    assert figures
    assert {*figures, "results.json", "report.html", "arrays.npz"} <= files
    assert "local-atoms.npz" not in files


def invoke(*arguments: object) -> Any:
    few = ("run", "synthetic", "--clients", 2, "--rounds", 3, "-o", "seeds=1")
    return CliRunner().invoke(app, list(map(str, (*few, *arguments))))


def test_an_active_mlflow_run_goes_on_with_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(uri_of(tmp_path))
    with mlflow.start_run() as run:
        clustered(MLflowTracker())
        mlflow.log_metric("own", 1.0)
    found = mlflow.MlflowClient().get_run(run.info.run_id).data.metrics
    assert {"own", "cluster/fit/client-3"} <= set(found)


def test_a_server_that_is_not_there_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("mlflow")
    tracker = MLflowTracker(f"http://127.0.0.1:{free_port()}")
    assert warnings_of(caplog, tracker) == ["MLflowTracker"]


def test_a_server_that_never_answers_is_asked_once_and_not_for_minutes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the environment says of MLflow's patience is left as it was."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    before = dict(os.environ)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(0)
        tracker = MLflowTracker(f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert warnings_of(caplog, tracker) == ["MLflowTracker"]
        silent.accept()  # it was asked,
        with pytest.raises(BlockingIOError):
            silent.accept()  # and only once
    assert dict(os.environ) == before


class Failing(Tracker):
    """Fails where it is told to, and notes what it gets."""

    def __init__(self, where: str) -> None:
        self.where, self.seen = where, list[str]()

    def note(self, what: str) -> None:
        self.seen.append(what)
        if what == self.where:
            raise RuntimeError(f"{what} fails")

    def begin(self, options: Any) -> None:
        self.note("begin")

    def __call__(self, report: RoundReport) -> None:
        self.note("report")

    def end(self, result: Any) -> None:
        self.note("end" if result is None else f"end with {list(result)}")


def warnings_of(caplog: pytest.LogCaptureFixture, on_round: Any) -> list[str]:
    """Return who is warned of in a run of three rounds, which goes on."""
    assert len(clustered(on_round).history) == 6
    found = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    return [text.split()[0] for text in found if "failed" in text]


def test_an_error_in_an_observer_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A function is called again; a tracker is not. Others get everything."""
    seen: list[int] = []

    def fails(report: RoundReport) -> None:
        seen.append(report.round)
        raise KeyError("mse")

    trackers = [Failing(where) for where in ("begin", "report", "nowhere")]
    assert warnings_of(caplog, [fails, *trackers]) == ["Failing", "fails", "Failing"]
    assert seen == [1, 1, 2, 2, 3, 3]
    end = "end with ['0/0', '1/0']"
    assert [one.seen for one in trackers] == [
        ["begin"],
        ["begin", "report"],
        ["begin", *["report"] * 6, end],
    ]


def test_a_tracker_gets_that_a_run_has_failed() -> None:
    tracker = Failing("")
    with pytest.raises(TooFewReplies):
        clustered(tracker, min_clients=5)
    assert tracker.seen == ["begin", "end"]


def test_rounds_are_counted_over_all_federations_of_an_experiment() -> None:
    seen, tracker = list[int](), Failing("")
    few: dict[str, Any] = {"clients": 2, "rounds": 2, "options": {"seeds": 2}}
    observers = [lambda report: seen.append(report.round), tracker]
    run_experiment("synthetic", **few, on_round=observers)
    assert sorted(set(seen)) == [1, 2, 3, 4]
    assert tracker.seen == ["begin", *["report"] * len(seen), "end with []"]


@pytest.mark.parametrize(
    ("text", "message"),
    [("mlflow", "track"), ("=x", "track"), ("neptune=x", "track")],
)
def test_a_tracker_that_is_not_known_is_a_sentence(text: str, message: str, tmp_path: Path) -> None:
    done = invoke("--out", tmp_path / "out", "--track", text)
    assert (done.exit_code, message in done.stderr) == (2, True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tracker_that_is_not_installed_is_a_sentence(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, TOOLS[tool][0], None)
    done = invoke("--out", tmp_path / "out", "--track", f"{tool}={tmp_path}")
    assert (done.exit_code, f"'.[{tool}]'" in done.stderr) == (2, True)
    assert not (tmp_path / "out").exists()
