"""The repository as a Flower app, on Ray, through the command of the installed Flower version."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perdl_experiments import run_experiment

ROOT = Path(__file__).parents[2]


def run_app(environment: dict[str, str], nodes: int, run_config: str = "") -> str:
    """Run an app on Ray with ``nodes`` virtual nodes; return what it printed."""
    simulation = Path(sys.executable).with_name("flower-simulation")
    if simulation.exists():
        backend = json.dumps({"client_resources": {"num_cpus": 1}})
        command = [str(simulation), "--app", ".", "--num-supernodes", str(nodes)]
        command += ["--backend-config", backend]
    else:
        federation = f"num-supernodes={nodes} client-resources-num-cpus=1"
        command = [str(Path(sys.executable).with_name("flwr")), "run", ".", "--stream"]
        command += ["--federation-config", federation]
    command += ["--run-config", run_config] if run_config else []
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=540
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed[-6000:]
    return printed


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize(
    ("name", "nodes", "rounds", "options", "learned"),
    [
        pytest.param("synthetic", 4, 3, {"seeds": 1}, "global_atoms", marks=pytest.mark.tour),
        ("synthetic", 100, 3, {"seeds": 1}, "global_atoms"),
        ("mixed-regression", 200, 12, {"seeds": 1, "setting": "C1"}, "models"),
    ],
)
def test_the_app_learns_what_the_in_process_run_learns(
    flower_environment: dict[str, str],
    tmp_path: Path,
    name: str,
    nodes: int,
    rounds: int,
    options: dict[str, Any],
    learned: str,
) -> None:
    app, here = tmp_path / "app", tmp_path / "here"
    config = {"experiment": name, "rounds": rounds, "out": str(app), **options}
    pairs = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
    run_app(flower_environment, nodes, pairs)
    run_experiment(name, clients=nodes, rounds=rounds, out=here, options=options)
    with np.load(app / "arrays.npz") as flower, np.load(here / "arrays.npz") as in_process:
        np.testing.assert_array_equal(flower[learned], in_process[learned])
    assert (app / "report.html").exists()
