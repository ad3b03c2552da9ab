"""A project made from Flower's PyTorch template, unseeded net and all, with every strategy."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from flwr.app import ArrayRecord  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from benchmarks._deployment import Deployment  # noqa: E402
from flwr_perdl.network import Topology  # noqa: E402
from flwr_perdl.pytorch import norm_layers  # noqa: E402
from flwr_perdl.simulations import InProcessGrid  # noqa: E402
from flwr_perdl.strategies import (  # noqa: E402
    ClusteredFedAvg,
    DiffusionAveraging,
    Ditto,
    Momentum,
    PersonalizedFedAvg,
    ServerSettings,
)
from perdl_experiments.cli import app as commands  # noqa: E402
from tests.engines import on_ray, project  # noqa: E402
from tests.grids import Tapped, arrays_in  # noqa: E402

SOURCE = Path(__file__).with_name("pytorch_project.py").read_text()
APP = project(SOURCE)
NET, BEGIN = APP["Net"], APP["begin"]
N, ROUNDS = 4, 3


def run(strategy: Any, app: Any = APP["client"], **options: Any) -> tuple[Tapped, Any]:
    grid = Tapped(app, N)
    return grid, BEGIN(strategy, grid, **options)


def check(found: dict[str, Any]) -> None:
    assert found == {
        "resumed": True,
        "named": ["known/cluster-0", "known/cluster-1"],
        "clusters": [2, 2],
        "dropped": [["client 1", True]],
        "head": True,
        "calls": [1, 1, 2, 2, 0, 1],
        "nodes": True,
    }


def test_resume_models_and_masks_in_process(tmp_path: Path) -> None:
    grid = InProcessGrid(APP["client"], 2)
    check(APP["serve"](grid, tmp_path))
    resumed = {"checkpoint_dir": tmp_path / "run", "server": ServerSettings(resume=True)}
    other = ClusteredFedAvg(2, start="anchors", num_clients=2, fraction_evaluate=0.0, **resumed)
    with pytest.raises(ValueError, match="initial_arrays"):
        BEGIN(other, grid, ArrayRecord(torch.nn.Linear(2, 2).state_dict()))


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.torch
def test_resume_models_and_masks_on_ray(tmp_path: Path) -> None:
    check(on_ray(APP["client"], lambda grid: APP["serve"](grid, tmp_path), 2))


@pytest.mark.slow
@pytest.mark.deployment
@pytest.mark.torch
def test_resume_models_and_masks_on_two_supernodes(tmp_path: Path) -> None:
    with Deployment(tmp_path / "run", 2, app=SOURCE) as deployment:
        deployment.run({"out": str(tmp_path)}, timeout=500)
    check(json.loads((tmp_path / "found.json").read_text()))


STRATEGIES: dict[str, Callable[[], Any]] = {
    "clusters": lambda: ClusteredFedAvg(2, seed=1),
    "auto": lambda: ClusteredFedAvg("auto", seed=1),
    "momentum": lambda: ClusteredFedAvg(1, optimizer=Momentum()),
    "bn": lambda: PersonalizedFedAvg(norm_layers(NET())),
    "fedrep": lambda: PersonalizedFedAvg("head.*", alternate=True),
    "ditto": lambda: Ditto(),
    "nodes": lambda: DiffusionAveraging(
        Topology.ring(N), shows_models=True, metrics=["trainings", "batches"]
    ),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_trains_it(
    name: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "flwr")
    strategy, rounds = STRATEGIES[name](), 10 if name == "momentum" else ROUNDS
    grid, result = run(strategy, rounds=rounds)
    assert grid.errors == []
    assert not any(report.dropped for report in strategy.history)
    APP["loaded"](result.arrays)
    dtypes = {name: array.numpy().dtype for name, array in NET().state_dict().items()}
    for array_name, array in arrays_in([*grid.asked, *grid.replies]):
        assert array.dtype == dtypes.get(array_name, array.dtype)
    evaluated = result.evaluate_metrics_clientapp
    assert [*evaluated] == [*range(1, rounds + 1)]
    for round_, metrics in evaluated.items():
        assert "perdl.no-finite-loss" not in metrics
        assert metrics["batches"] == 4 * round_ or name == "auto"
    if name in ("ditto", "fedrep"):  # two trainings a round, each with an optimizer of its own
        assert result.train_metrics_clientapp[rounds]["trainings"] == rounds
    said = capfd.readouterr().err
    assert f"round {rounds} of {rounds}: " in said
    assert "loss" in said
    assert ("groups: " in said) == (name in ("clusters", "auto"))
    if name == "auto":  # no model without clients, and no number
        found = strategy.result
        assert sorted(set(found.members.values())) == [*range(len(found.models))]


def test_a_net_is_a_model_to_begin_a_diagnosis_with(tmp_path: Path) -> None:
    (tmp_path / "pytorch_app.py").write_text(SOURCE)
    (tmp_path / "pyproject.toml").write_text(
        '[tool.flwr.app.components]\nclientapp = "pytorch_app:client"\n'
    )
    given = ["diagnose", str(tmp_path), "--initial", "pytorch_app:Net", "--train-config", "lr=0.1"]
    given += ["--clients", "4", "--rounds", "3", "--out", str(tmp_path / "found.png")]
    result = CliRunner().invoke(commands, given)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "found.png").exists()
