"""What a run says, keeps and refuses: clients that fail, folders in use, odd arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.client import NumPyClient
from flwr.serverapp.strategy import Result

from flwr_perdl.clients import DictionaryClient, client_app
from flwr_perdl.dictionary import OrthogonalLearner
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import ClusteredFedAvg, PerMA, RoundReport, ServerSettings, TooFewReplies
from tests.grids import Tapped, partition_of

RESUME = ServerSettings(resume=True)


def samples(partition: int, columns: int = 6) -> np.ndarray:
    return np.random.default_rng(partition).standard_normal((30, columns))


def dictionary(context: Context) -> DictionaryClient:
    X = samples(partition_of(context))
    return DictionaryClient(X, OrthogonalLearner(6), context)


class Model(NumPyClient):
    """Moves three numbers half of the way to its own; client 3 does what ``odd`` says."""

    def __init__(self, context: Context, odd: dict[str, Any]) -> None:
        self.partition = partition_of(context)
        self.odd = odd if self.partition == 3 else {}
        self.target = np.full(3, 1.0 + self.partition % 2, np.float32)

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> Any:
        moved = [(parameters[0] + self.target) / 2]
        return self.odd.get("arrays", moved), 10, self.odd.get("fit", {})

    def evaluate(self, parameters: list[Any], config: dict[str, Any]) -> Any:
        loss = float(np.square(parameters[0] - self.target).sum())
        return loss, 10, self.odd.get("evaluate", {})


def clustered(
    k: int = 1, n_rounds: int = 3, *, odd: dict[str, Any] | None = None, **options: Any
) -> tuple[ClusteredFedAvg, np.ndarray]:
    """Run four clients; the third is odd."""
    strategy = ClusteredFedAvg(k, **{"start": "given", **options})
    grid = InProcessGrid(client_app(lambda context: Model(context, odd or {})), 4)
    initial = np.arange(3.0 * k, dtype=np.float32).reshape(k, 3)
    strategy.start(grid, ArrayRecord([initial]), n_rounds, verbose="quiet")
    return strategy, np.stack([model["0"].numpy() for model in strategy.result.models])


@pytest.mark.parametrize("value", [1e60, 1e31])
def test_a_model_of_single_precision_does_not_overflow(value: float) -> None:
    strategy, model = clustered(odd={"arrays": [np.full(3, value)]})
    assert np.abs(model).max() < 10
    assert all("array '0'" in r.dropped["client 3"] for r in strategy.history[::2])


@pytest.mark.parametrize("allow_fewer", [False, True])
def test_a_client_that_cannot_be_made_is_named(allow_fewer: bool) -> None:
    def make(context: Context) -> DictionaryClient:
        if context.node_config["partition-id"] == 3:
            raise OSError("cannot read /data/ward-3.csv")
        return dictionary(context)

    grid = InProcessGrid(client_app(make), 4)
    strategy = PerMA(2, num_clients=4, server=ServerSettings(allow_fewer=allow_fewer))
    if not allow_fewer:
        with pytest.raises(TooFewReplies, match=r"/data/ward-3"):
            strategy.start(grid, num_rounds=2, verbose="quiet")
        return
    strategy.start(grid, num_rounds=2, verbose="quiet")
    for report in strategy.history:
        ((who, why),) = report.dropped.items()
        assert who.startswith("node ")
        assert "cannot read /data/ward-3.csv" in why
        assert report.aggregate["dropped"] == 1


@pytest.mark.parametrize(
    ("metrics", "why"),
    [
        ({"evaluate": {"per_class": [0.1, 0.2]}, "fit": {"several": [1, 2.5]}}, ""),
        ({"fit": {"lost": None}}, "'lost'"),
        ({"fit": {"lost": np.ones(2)}}, "'lost'"),
        ({"fit": {"lost": ["a"]}}, "'lost'"),
    ],
)
def test_a_metric_that_is_a_list_is_not_read_and_others_are_named(
    metrics: dict[str, Any], why: str
) -> None:
    strategy, _ = clustered(odd=metrics)
    if why:
        assert why in strategy.history[0].dropped["client 3"]
    else:
        assert not any(report.dropped for report in strategy.history)


def test_a_folder_that_cannot_be_written_to_is_refused_before_any_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    grid = Tapped(client_app(dictionary), 2)
    with pytest.raises(ValueError, match=r"^checkpoint_dir"):
        PerMA(2, checkpoint_dir=tmp_path / "file").start(grid)
    assert not grid.asked


def test_two_runs_in_one_folder_do_not_overwrite_each_other(tmp_path: Path) -> None:
    def other(report: RoundReport) -> None:
        if (report.round, report.step) == (2, "evaluate"):
            for path in first.glob("*"):
                (tmp_path / "both" / path.name).write_bytes(path.read_bytes())

    first, both = tmp_path / "first", tmp_path / "both"
    clustered(1, checkpoint_dir=first)
    with pytest.raises(ValueError, match=r"^checkpoint_dir"):
        clustered(1, 4, checkpoint_dir=both, on_round=other)


def test_a_resumed_run_has_no_fewer_rounds_than_were_done(tmp_path: Path) -> None:
    clustered(1, 4, checkpoint_dir=tmp_path)
    with pytest.raises(ValueError, match=r"^num_rounds"):
        clustered(1, 2, checkpoint_dir=tmp_path, server=RESUME)
    strategy, _ = clustered(1, 4, checkpoint_dir=tmp_path, server=RESUME)
    assert strategy.history[-1].round == 4


class WithScore(ClusteredFedAvg):
    """Adds a metric to the clients', as a Flower project may."""

    def aggregate_evaluate(self, server_round: int, replies: Any) -> MetricRecord | None:
        metrics = super().aggregate_evaluate(server_round, replies)
        return metrics and MetricRecord({**metrics, "score": -metrics["loss"]})


def test_should_stop_ends_a_run_as_its_last_round_would(tmp_path: Path) -> None:
    scores: list[tuple[int, float]] = []

    def at_three(server_round: int, result: Result) -> bool:
        last = result.evaluate_metrics_clientapp[server_round]
        assert result.evaluate_metrics_serverapp[server_round]["sum"] == measure(result.arrays)
        scores.append((server_round, last["score"]))
        return len(scores) == 3

    def measure(arrays: ArrayRecord) -> float:
        return float(arrays.to_numpy_ndarrays()[0].sum())

    def run(n_rounds: int, folder: str, *, resume: bool = False, stop: Any = None) -> Any:
        server = ServerSettings(resume=resume)
        strategy = WithScore(1, start="given", checkpoint_dir=tmp_path / folder, server=server)
        grid = InProcessGrid(client_app(lambda context: Model(context, {})), 4)
        return strategy.start(
            grid,
            ArrayRecord([np.arange(3.0, dtype=np.float32).reshape(1, 3)]),
            n_rounds,
            evaluate_fn=lambda _, arrays, f=measure: MetricRecord({"sum": f(arrays)}),
            should_stop=stop,
        )

    assert repr(run(9, "stopped", stop=at_three)) == repr(run(3, "whole"))
    assert [server_round for server_round, _ in scores] == [1, 2, 3]
    longer = run(5, "stopped", resume=True)
    assert list(longer.train_metrics_clientapp) == [1, 2, 3, 4, 5]
    assert repr(longer) == repr(run(5, "whole", resume=True))


def test_a_resumed_run_stops_where_one_without_a_break_does(tmp_path: Path) -> None:
    def third(seen: list[int]) -> Any:
        return lambda server_round, result: seen.append(server_round) or len(seen) >= 3

    seen: list[int] = []
    for rounds in (2, 9, 9):
        seen.clear()
        server = ServerSettings(resume=True)
        strategy = ClusteredFedAvg(1, start="given", checkpoint_dir=tmp_path, server=server)
        grid = InProcessGrid(client_app(lambda context: Model(context, {})), 4)
        initial = ArrayRecord([np.zeros((1, 3), np.float32)])
        strategy.start(grid, initial, rounds, should_stop=third(seen))
    assert seen == [1, 2, 3]
    assert strategy.history[-1].round == 3
