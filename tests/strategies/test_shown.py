"""What a run shows: the log, a bar, lines, or nothing; and what a notebook shows."""

from __future__ import annotations

import logging
import re
import sys
from collections import Counter
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context
from flwr.client import NumPyClient

from flwr_perdl.clients import DictionaryClient, DiffusionClient, client_app
from flwr_perdl.dictionary import OrthogonalLearner
from flwr_perdl.network import Averaging, Topology
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import (
    ClusteredFedAvg,
    Diagnosed,
    Diagnosis,
    DiffusionAveraging,
    Learned,
    PerMA,
    ProtocolStrategy,
    Request,
    RoundReport,
    ServerSettings,
)
from tests.grids import Trains, as_app, grid_of, partition_of, relayed

X = np.random.default_rng(0).standard_normal((3, 30, 6))


def grid() -> InProcessGrid:
    return grid_of(lambda c, i: DictionaryClient(X[i], OrthogonalLearner(5), c), len(X))


@pytest.mark.parametrize(
    ("verbose", "mode"),
    [(2, "log"), ("bar", "bar"), (None, "lines"), ("bar", "lines"), ("quiet", "quiet")],
)
def test_a_run_shows_what_is_asked(
    verbose: int | str | None,
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
    logged: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if mode == "lines":
        monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    strategy = PerMA(n_global=2)
    strategy.start(grid(), num_rounds=2, verbose=verbose)
    assert logging.getLogger("flwr").level == logging.INFO
    assert bool(logged.records) == (mode == "log")
    error = capfd.readouterr().err
    last = strategy.history[-1].aggregate["loss"]
    if mode == "bar":
        assert "PerMA: 100%" in error
        assert f"loss={last:.4g}" in error
    elif mode == "lines":
        assert len(error.splitlines()) == 2  # of a round, its evaluation included
        assert error.splitlines()[-1].startswith("PerMA: round 2 of 2: mse ")
        assert f", loss {last:.4g} (worst client " in error.splitlines()[-1]
    else:
        assert not error


def test_a_line_names_what_the_user_has_started(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "flwr")

    class FederatedMean(ProtocolStrategy):
        def protocol(self, initial: Any, state: Any) -> Any:
            yield Request("mean", initial, state={})
            return initial

    own = grid_of(lambda *_: Trains(lambda array: array, lambda first, _: first.sum()), 3)
    start = ArrayRecord([np.ones((2, 1)), np.ones((1, 2))])
    FederatedMean(fraction_evaluate=0).start(own, start, num_rounds=1)
    assert capfd.readouterr().err == "FederatedMean: round 1 of 1\n"
    Diagnosis().start(own, start, num_rounds=3)
    lines = capfd.readouterr().err.splitlines()
    heads = {line.partition(": round ")[0] for line in lines if ": round " in line}
    assert "Diagnosis, 1 of 9 candidates, fedavg" in heads
    assert "Diagnosis, 9 of 9 candidates, local, under 1 min left" in heads
    assert all(re.match(r"Diagnosis, \d of 9 candidates, ", head) for head in heads)

    values = Averaging(np.eye(4))
    nodes = InProcessGrid(client_app(lambda one: DiffusionClient(values, one)), 4)
    relayed(nodes, Topology.ring(4), 2)
    assert "NeighborRelay: round 2 of 2\n" in capfd.readouterr().err


class Talking(NumPyClient):
    """Goes halfway to one of four numbers, and has metrics of its training and its evaluation."""

    def __init__(self, context: Context) -> None:
        self.i = partition_of(context)

    def fit(self, parameters: Any, config: Any) -> Any:
        return [(parameters[0] + self.i % 4) / 2], 1, {"rate": 1.0}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        loss = float(np.sum((parameters[0] - self.i % 4) ** 2))
        return loss, 1, {"eval_acc": 1 - self.i / 8}


@pytest.mark.parametrize("verbose", [1, 2])
@pytest.mark.parametrize(
    ("strategy", "wanted"),
    [
        (
            ClusteredFedAvg(4, start="given"),
            ["4 groups: 2, 2, 2, 2 clients", "rate 1", "eval_acc 0.5625 (worst client 0.125)"],
        ),
        (
            DiffusionAveraging(Topology.ring(8), metrics=["eval_acc"]),
            ["ound 4 of 4: ", "evaluate-eval_acc 0.5625 (worst client 0.125)"],
        ),
    ],
)
def test_a_round_is_told_by_the_users_metrics(
    strategy: Any,
    wanted: list[str],
    verbose: int,
    logged: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Their means and the worst client's, each once; and the rounds are those asked for."""
    initial = np.arange(4.0)[:, None] if isinstance(strategy, ClusteredFedAvg) else np.zeros(1)
    grid_of_8 = InProcessGrid(client_app(as_app(Talking)), 8)
    result = strategy.start(grid_of_8, ArrayRecord([initial]), num_rounds=4, verbose=verbose)
    shown = capfd.readouterr().err if verbose == 1 else logged.text
    for words in wanted:
        assert words in shown
    last = result.evaluate_metrics_clientapp[4]
    name = "eval_loss" if "eval_loss" in last else "loss"
    assert f"{name} {last[name]:.4g} (worst client " in shown
    assert not (" eval_loss " in shown and " loss " in shown)
    assert "5 of 5" not in shown


def test_the_log_has_the_options_that_are_not_the_defaults(logged: Any) -> None:
    settings = ServerSettings(node_timeout=5.0, evaluate_every=1)
    DiffusionAveraging(Topology.ring(3), metrics=["a"], seed=4, server=settings).summary()
    for shown in ("seed: 4", "node_timeout: 5.0", "metrics: ('a',)", "num_clients: 3"):
        assert shown in logged.text
    for left_out in ("checkpoint_dir", "evaluate_every", "resume", "n_liars"):
        assert left_out not in logged.text


class Tags(HTMLParser):
    """Counts the tags of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        """Take a tag."""
        self.found[tag] += 1


def tags_of(shown: str) -> Counter[str]:
    """Return how often each tag is in a notebook's HTML."""
    parser = Tags()
    parser.feed(shown)
    return parser.found


def test_a_notebook_shows_a_history_and_a_report_as_tables() -> None:
    strategy = PerMA(n_global=2)
    strategy.start(grid(), num_rounds=40, verbose=0)
    tags = tags_of(strategy.history._repr_html_())
    assert tags["tr"] < len(strategy.history)  # of many the first and the last
    assert tags["td"] == (tags["tr"] - 1) * tags["th"]
    assert tags_of(strategy.history[0]._repr_html_())["tr"] == 1 + len(RoundReport._fields)


def test_what_a_notebook_shows_is_escaped() -> None:
    clusters = Learned([], {0: 0}, {0: {"num-examples": 1, "<script>": 1.0}})
    found = {"fedavg": np.ones(2)}, {"fedavg": np.zeros(2)}, [0, 1], {}, {"fedavg": "<script>"}
    about = {"fedavg": 3}, {}, "fedavg", (0.0, 0.0, 0.0), {"local": "<script>"}
    diagnosed = Diagnosed("fedavg", "<script>", "<script>", 1.0, *found, *about)
    report = RoundReport(1, "<script>", {}, {}, {"a": "<script>"}, 0.0, 0.0, {})
    history = PerMA(2).history
    history.append(report)
    for one in (clusters, diagnosed, report, history):
        shown = one._repr_html_()
        assert "script" in shown
        assert not tags_of(shown)["script"]
