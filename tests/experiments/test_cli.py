import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from perdl_experiments.cli import app


def invoke(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_list_names_every_experiment_with_its_source():
    result = invoke("list")
    assert result.exit_code == 0
    for words in ("digits", "images", "synthetic", "global-atoms", "Fig. 2", "Fig. 7"):
        assert words in result.stdout


def test_run_and_report_print_the_table_and_where_the_page_is(tmp_path):
    out = tmp_path / "mine"
    result = invoke(
        "run", "synthetic", "--out", out, "--clients", 3, "--rounds", 3, "-o", "seeds=1"
    )
    assert result.exit_code == 0
    assert "PerMA's global atoms" in result.stdout
    assert str(out / "report.html") in result.stdout
    page = (out / "report.html").read_text()
    (out / "report.html").unlink()
    result = invoke("report", out)
    assert result.exit_code == 0
    assert "PerMA's global atoms" in result.stdout
    assert (out / "report.html").read_text() == page


def test_names_in_the_data_are_printed_as_they_are(tmp_path):
    rng, names = np.random.default_rng(0), np.array(["[bold]a", "b[/b]", ":smile:", "d"])
    X, client = rng.standard_normal((80, 2)), names[np.arange(80) % 4]
    y = X @ [1.0, 2.0] + 0.1 * rng.standard_normal(80)
    np.savez(tmp_path / "data.npz", X=X, y=y, client=client)
    options = ("-o", "splits=1", "-o", "k=1")
    out = tmp_path / "or[m]3"
    result = invoke("run", "regression", "--data", tmp_path / "data.npz", "--out", out, *options)
    assert result.exit_code == 0
    assert f"Report: {out / 'report.html'}" in result.stdout
    assert all(name in result.stdout for name in names)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "digit"], "experiment must be one of 'digits'"),
        (["run", "digits", "--engine", "spark"], "engine must be one of"),
        (["run", "digits", "-o", "n_atoms"], "option must be key=value, got 'n_atoms'"),
        (["run", "digits", "-o", "n_atom=3"], "option of digits must be one of"),
        (["run", "digits", "-o", "n_atoms=x"], "n_atoms must be an integer"),
        (["run", "digits", "-o", "n_atoms=-5"], "n_atoms must be at least 1, got -5"),
        (["run", "digits", "--clients", "0"], "clients must be at least 2"),
        (["run", "images"], "images must be given data"),
        (["run", "images", "--data", "nowhere.npz"], "data must be a file"),
        (["run", "digits", "--data", "nowhere.npz"], "digits makes its own data"),
        (["up", "sites", "--data", "."], "data must be a folder with a file per client"),
        (["up", "sites", "--data", "four"], "nodes must be 4, one per file in four, got 3"),
        (["report", "nowhere"], "must be the folder of a finished run"),
        (["bench"], "benchmarks must be a folder with scripts"),
    ],
)
def test_mistakes_get_one_sentence_and_status_2(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("four").mkdir()
    for k in range(4):
        Path(f"four/{k}.npz").touch()
    result = invoke(*arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("flwr-perdl: ")
    assert message in line


def test_bench_runs_the_scripts_and_passes_on_their_status(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "a.py").write_text("open('ran', 'w').close()")
    (folder / "_helper.py").write_text("raise SystemExit(1)")
    assert invoke("bench").exit_code == 0
    assert (tmp_path / "ran").exists()
    (folder / "b.py").write_text("raise SystemExit(3)")
    assert invoke("bench").exit_code == 3


def run_python(*arguments, **environment):
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root), **environment},
        check=False,
    )


def test_a_mistake_in_a_real_process_has_no_traceback(tmp_path):
    done = run_python("-m", "perdl_experiments", "run", "digit", HOME=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("flwr-perdl: experiment must be one of")
    assert "Traceback" not in done.stderr


def test_a_missing_extra_is_named():
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from perdl_experiments import run_experiment; run_experiment('digits')"
    )
    done = run_python("-c", code)
    assert done.returncode == 1
    assert "matplotlib must be installed to run experiments" in done.stderr
