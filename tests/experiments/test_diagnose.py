"""``flwr-perdl diagnose`` on an app in the form of Flower's template."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from matplotlib.figure import Figure
from typer.testing import CliRunner

from flwr_perdl.strategies import Diagnosed
from perdl_experiments.cli import app
from perdl_experiments.diagnose import picture

#: The mean of numbers: odd clients have others than even ones. As in Flower's template, the
#: learning rate comes from the server, and the loss is called ``eval_loss``.
CLIENTS = """\
import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


def initial():
    return ArrayRecord([np.zeros(2), np.zeros(2)])


def read(msg, context):
    return msg.content["arrays"].to_numpy_ndarrays(), context.node_config["partition-id"] % 2


@app.train()
def train(msg, context):
    model, mean = read(msg, context)
    config = msg.content["config"]
    assert config["optimizer"] == "a, b"
    model = [x + config["lr"] * (mean - x) for x in model]
    metrics = MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": ArrayRecord(model), "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg, context):
    model, mean = read(msg, context)
    loss = float(np.mean([(x - mean) ** 2 for x in model]))
    metrics = MetricRecord({"num-examples": 1, "eval_loss": loss, "quality": -loss})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)
"""
PROJECT = """\
[tool.flwr.app.components]
clientapp = "two_means:app"
"""


def diagnose(folder: Path, *more: Any) -> Result:
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "two_means.py").write_text(CLIENTS)
    options = ["--initial", "two_means:initial", "--out", folder / "found.png", "--rounds", 5]
    return CliRunner().invoke(app, ["diagnose", str(folder), *map(str, options), *more])


def test_the_kinds_of_an_app_of_the_template_are_found(tmp_path: Path) -> None:
    given = ["--train-config", "lr=0.5, optimizer='a, b'", "--train-config", "epochs=1"]
    result = diagnose(tmp_path, *given, "--clients", "6")
    assert result.exit_code == 0, result.output
    assert "round/s" not in result.output  # there is no terminal to draw a bar again on
    assert 'strategy = ClusteredFedAvg("auto", min_clusters=2' in result.output
    # One model for both kinds is at best between 0 and 1: a mean loss of a quarter.
    (shared,) = [line for line in result.output.splitlines() if line.endswith(" FedAvg()")]
    assert abs(float(shared.split()[1]) - 0.25) < 0.01
    assert (tmp_path / "found.png").is_file()
    page = (tmp_path / "report.html").read_text()
    assert "strategy = ClusteredFedAvg(&quot;auto&quot;, min_clusters=2" in page
    assert "data:image/png;base64," in page


def test_the_picture_and_the_table_mark_what_was_stopped_early() -> None:
    values = {"fedavg": np.array([0.5, 0.7]), "local": np.array([0.6, 0.9])}
    gains = {name: values["fedavg"] - own for name, own in values.items()}
    typed, rounds = {"fedavg": "FedAvg()", "local": "local training"}, {"fedavg": 12, "local": 4}
    lead, of = (0.0, 0.0, 0.0), [0, 1]
    found = Diagnosed(
        "fedavg", "", "", 1.0, values, gains, of, {}, typed, rounds, {}, "local", lead
    )
    shown = [label.get_text() for label in picture(found).axes[0].get_xticklabels()]
    assert shown == ["fedavg", "local (stopped early)"]
    _, reference, local = found.table().splitlines()
    assert reference.endswith("  FedAvg()")
    assert local.endswith("  local training (stopped early)")


TRAINS = ["--train-config", "lr=0.5, optimizer='a, b'"]


def test_what_is_missing_for_the_picture_is_said_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "two_means", raising=False)
    result = diagnose(tmp_path, *TRAINS)
    assert result.exit_code == 2
    assert "matplotlib" in result.output
    assert "two_means" not in sys.modules  # the app is not even loaded


def test_the_table_is_printed_before_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(Figure, "savefig", fails)
    result = diagnose(tmp_path, *TRAINS)
    assert result.exit_code != 0
    assert "FedAvg()" in result.output


def test_the_direction_of_a_metric_is_an_option(tmp_path: Path) -> None:
    given = diagnose(tmp_path, *TRAINS, "--metric", "quality", "--higher-is-better")
    assert given.exit_code == 0, given.output
    assert 'strategy = ClusteredFedAvg("auto", min_clusters=2' in given.output


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([*TRAINS, "--metric", "quality"], ["higher_is_better"]),
        (["--train-config", "optimizer='a, b'"], ["--train-config 'lr="]),  # which the app reads
        (["--train-config", "lr=fast"], ["train_config must", "lr=fast"]),
        ([*TRAINS, "--candidate", "two_means:his"], ["candidate must", "got 'two_means:his'"]),
        *(
            (["--initial", initial], ["initial must", initial])
            for initial in ("os:getcwd", "os:mkdir", "math:pi", "sys:argv")
        ),
    ],
)
def test_what_it_cannot_do_is_named(tmp_path: Path, given: list[str], said: list[str]) -> None:
    result = diagnose(tmp_path, *given)
    assert result.exit_code == 2, result.exception
    for words in said:
        assert words in result.output


MINE = """\
from flwr_perdl.strategies import Combine, ProtocolStrategy, Request


class Still(ProtocolStrategy):
    def protocol(self, initial, state):
        while True:
            yield Request("train", initial, {"lr": 0.0}, combine=Combine(start=initial))


def mine(initial, num_rounds, **options):
    return Still(**options)
"""


def test_a_strategy_of_ones_own_has_its_row(tmp_path: Path) -> None:
    (tmp_path / "still.py").write_text(MINE)
    result = diagnose(tmp_path, *TRAINS, "--candidate", "still:mine")
    assert result.exit_code == 0, result.output
    # Its rate comes before that of --train-config: zeros are right for half of the clients.
    (row,) = [line for line in result.output.splitlines() if "  Still()" in line]
    assert float(row.split()[1]) == 0.5
