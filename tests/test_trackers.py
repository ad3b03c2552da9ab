"""What functions in `on_round` get; and what docs/trackers.md logs, by the tools' own readers."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord

from flwr_perdl.strategies import ClusteredFedAvg, RoundReport
from perdl_experiments import run_experiment
from tests.grids import Trains, grid_of

Metrics = dict[tuple[str, int], float]
PAGE = (Path(__file__).parents[1] / "docs" / "trackers.md").read_text()


def from_wandb(folder: Path) -> Metrics:
    pytest.importorskip("wandb").teardown()  # waits until all is written
    found: Metrics = {}
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    for record in records(path.read_bytes()):
        row = {one.nested_key[0] or one.key: one.value_json for one in record.history.item}
        step = record.history.step.num
        found |= {(name, step): json.loads(value) for name, value in row.items() if "/" in name}
    return found


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


def from_mlflow(folder: Path) -> Metrics:
    client = pytest.importorskip("mlflow").MlflowClient()
    (run,) = client.search_runs(["0"])
    histories = [client.get_metric_history(run.info.run_id, name) for name in run.data.metrics]
    return {(one.key, one.step): one.value for history in histories for one in history}


def from_tensorboard(folder: Path) -> Metrics:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder / "runs" / "first")).Reload()
    names = events.Tags()["scalars"]
    return {(name, one.step): one.value for name in names for one in events.Scalars(name)}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize(
    ("title", "library", "read"),
    [
        ("Weights & Biases", "wandb", from_wandb),
        ("MLflow", "mlflow", from_mlflow),
        ("TensorBoard", "tensorboardX", from_tensorboard),
    ],
)
def test_a_tools_own_reader_finds_what_the_page_logs(
    title: str, library: str, read: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/runs.db")
    first, *sections = PAGE.split("\n## ")
    (own,) = (one for one in sections if one.startswith(title))
    names: dict[str, Any] = {}
    for text in (first, own):
        exec(text.partition("```python\n")[2].partition("```")[0], names)
    found, reports = read(tmp_path), names["strategy"].history
    expected = {(k, one.round): v for one in reports for k, v in names["numbers"](one).items()}
    assert {step for _, step in expected} == {1, 2, 3}
    assert any(name.endswith("/client-3") for name, _ in expected)
    assert {key: found.get(key) for key in expected} == pytest.approx(expected)


def test_an_error_in_a_function_is_logged_once_and_others_get_everything(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[int] = []
    rest: list[int] = []

    def fails(report: RoundReport) -> None:
        seen.append(report.round)
        raise KeyError("mse")

    strategy = ClusteredFedAvg(
        1,
        start="given",
        fraction_evaluate=0.0,
        on_round=[fails, lambda report: rest.append(report.round)],
    )
    grid = grid_of(lambda *_: Trains(lambda array: array), 2)
    strategy.start(grid, ArrayRecord([np.ones((1, 1))]), 3, verbose="quiet")
    warnings = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert ["fails" in text for text in warnings] == [True]
    assert seen == rest == [1, 2, 3]


def test_rounds_are_counted_over_all_federations_of_an_experiment() -> None:
    seen: list[int] = []
    few: dict[str, Any] = {"clients": 2, "rounds": 2, "options": {"seeds": 2}}
    run_experiment("synthetic", **few, on_round=lambda report: seen.append(report.round))
    assert sorted(set(seen)) == [1, 2, 3, 4]
