import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from perdl_experiments.cli import app

ROOT = Path(__file__).parents[2]


def invoke(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def rows_of(path):
    with path.open(newline="") as lines:
        return list(csv.DictReader(lines))


def results_in(folder):
    return {path.parent.name: path.stat() for path in folder.glob("*/results.json")}


def test_a_sweep_is_its_runs_and_takes_further_values(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    given = ("sweep", "global-atoms", "--clients", 3, "--out", tmp_path, "-o", "seeds=1")
    lists = ("-o", "samples=60", "-o", "n_global=4", "-o", "n_global=4,6")
    result = invoke(*given, *lists)
    assert result.exit_code == 0
    assert "correct_4" in result.stdout
    runs = ["n_global=4", "n_global=4,6"]
    first = results_in(tmp_path)
    assert sorted(first) == runs
    rows = rows_of(tmp_path / "sweep.csv")
    for row, run in zip(rows, runs, strict=True):
        results = json.loads((tmp_path / run / "results.json").read_text())
        assert row["n_global"] == results["config"]["n_global"]
        assert float(row["correct_4"]) == results["metrics"]["correct_4"]
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    more = (*lists, "-o", "n_global=6")
    assert invoke(*given, *more).exit_code == 2  # there is a sweep
    assert invoke(*given, *more, "--seed", 1, "--resume").exit_code == 2  # with another seed
    assert results_in(tmp_path) == first
    result = invoke(*given, *more, "--resume", "--metric", "correct_6")
    assert result.exit_code == 0
    assert "correct_6" in result.stdout
    assert "correct_4" not in result.stdout
    second = results_in(tmp_path)
    assert len(second) == 3
    assert {name: second[name] for name in first} == first  # they are not run again
    values = [run[1] for run in json.loads((tmp_path / "sweep.json").read_text())["runs"]]
    assert [value is None for value in values] == [True, False, False]

    out = tmp_path / "beside"
    compared = ("compare", *(tmp_path / run for run in runs), "--out", out)
    assert invoke(*compared).exit_code == 0
    beside = rows_of(out / "compare.csv")
    assert [row["run"] for row in beside] == runs
    assert [row["correct_4"] for row in beside] == [row["correct_4"] for row in rows]
    assert invoke(*compared).exit_code == 2  # its own files are there


def test_a_run_that_fails_is_named_and_the_others_are_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    given = ("--clients", 2, "--rounds", 2, "--out", tmp_path, "-o", "seeds=1")
    result = invoke("sweep", "synthetic", *given, "-o", "samples=1,50")
    assert result.exit_code == 2
    assert [row["samples"] for row in rows_of(tmp_path / "sweep.csv")] == ["50"]
    (line,) = [one for one in result.stderr.splitlines() if "min_support" in one]
    assert "samples=1:" in line


@pytest.mark.slow
def test_a_killed_sweep_goes_on(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "images.npz", X=rng.random((200, 6, 6)), y=np.arange(200) % 3)
    values = ("n_global=1,2,3,4,5,6", "n_atoms=6", "samples_per_client=20", "methods=main")
    given = ["sweep", "images", "--data", tmp_path / "images.npz", "--clients", 2, "--rounds", 3]
    given = [*map(str, given), "--out", str(tmp_path / "out"), *(f"-o{one}" for one in values)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("OMP_NUM_THREADS", None)  # on all cores
    started = subprocess.Popen([sys.executable, "-m", "perdl_experiments", *given], env=environment)
    while not results_in(tmp_path / "out"):
        assert started.poll() is None
        time.sleep(0.02)
    started.send_signal(signal.SIGKILL)
    started.wait()
    time.sleep(3)  # its workers end with their next round
    finished = results_in(tmp_path / "out")
    assert 1 <= len(finished) < 6
    result = invoke(*given, "--resume")
    assert result.exit_code == 0
    rows = rows_of(tmp_path / "out" / "sweep.csv")
    assert [row["n_global"] for row in rows] == list("123456")
    for row in rows:
        (line,) = [o for o in result.stdout.splitlines() if o.startswith(f"{row['n_global']} ")]
        assert f"{float(row['mse_global_10']):.4g}" in line
    after = results_in(tmp_path / "out")
    assert {name: after[name] for name in finished} == finished
