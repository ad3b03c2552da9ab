import io
import json
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from flwr_perdl import __version__
from flwr_perdl.dictionary import OrthogonalLearner
from flwr_perdl.estimators import PersonalizedDictionaryLearning
from flwr_perdl.export import load
from perdl_experiments import cli
from perdl_experiments.cli import app
from perdl_experiments.cli import main as run
from perdl_experiments.runner import Progress
from perdl_experiments.studies import EXPERIMENTS, TOPICS
from perdl_experiments.terminal import Rows


def invoke(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_run_and_report_print_the_table_and_where_the_page_is(tmp_path):
    out = tmp_path / "mine"
    result = invoke(
        "run", "synthetic", "--out", out, "--clients", 3, "--rounds", 3, "-o", "seeds=1"
    )
    assert result.exit_code == 0
    table, _, end = result.stdout.partition("3 rounds; each client sent ")
    assert "PerMA, shared atoms" in table
    results = json.loads((out / "results.json").read_text())
    told = results["tables"][0]
    table, caption = table.split(told["caption"][:20])
    assert len(table.splitlines()) <= 15  # a title, and empty lines
    assert " ".join(f"{told['caption'][:20]}{caption}".split()).startswith(told["caption"])
    for i, j in told["best"]:
        assert f"*{told['rows'][i][j]}" in table or j > 1
    assert (out / "report.html").as_uri() in end
    verdict = results["finding"]
    assert verdict.startswith("Too few clients (3; default 10) and rounds (3; default 30)")
    assert " ".join(end.split()).endswith(verdict)
    page = (out / "report.html").read_text()
    (out / "report.html").unlink()
    result = invoke("report", out)
    assert result.exit_code == 0
    assert "Client by client" in result.stdout
    assert (out / "report.html").read_text() == page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "digit"], "got 'digit'; did you mean 'digits'?"),
        (["run", "digits", "-o", "n_atom=3"], "did you mean 'n_atoms'?"),
        (["run", "digits", "--engine", "spark"], "engine"),
        (["run", "inference", "--engine", "ray"], "inference"),
        (["run", "images"], "images"),
        (["run", "digits", "-o", "n_atoms=3", "-o", "n_atoms=4"], "n_atoms"),
        (["options", "digit"], "did you mean 'digits'?"),
        (["run", "digits", "--resume"], "which holds no run"),
        (["run", "digits", "--resume", "--overwrite"], "must not be given together"),
        (["run", "digits", "-o", "n_atoms"], "option"),
        (["run", "digits", "--data", "nowhere.npz"], "digits makes its own data"),
        (
            ["report", "nowhere"],
            "'nowhere' must be the folder of a finished run, but has",
        ),
        (["fetch", "mnist", "--out", "four/0.npz"], "out"),
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


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run"], "Missing argument 'EXPERIMENT'. See `flwr-perdl run --help`."),
        (["run", "digits", "--round", "3"], "No such option"),
        (["runs", "digits"], "No such command 'runs'."),
        (["run", "digits", "--seed", "x"], "Invalid value for '--seed': 'x' is not a valid int"),
        (["report", "out"], "'out' must be the folder of a finished run"),
    ],
)
def test_wrong_usage_is_said_as_other_mistakes_are(monkeypatch, capsys, arguments, sentence):
    monkeypatch.setattr(sys, "argv", ["flwr-perdl", *arguments])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as stopped:
        run()
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"flwr-perdl: {sentence}")


def test_the_list_of_experiments_is_that_of_the_page():
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    for topic, experiments in TOPICS.items():
        named = [f"`{one.name}`" + r" \*" * ("data" in one.options) for one in experiments]
        assert f"| {topic} | {', '.join(named)} |" in page
    shown = invoke("list").stdout
    places = [shown.index(part) for part in (*TOPICS, "cameras ")]
    assert places == [places[0], *sorted(places[1:-1]), places[-1]]
    assert all(f"{name} " in shown for name in EXPERIMENTS)
    assert "source" not in shown


def test_the_version_and_help_have_short_ways():
    for arguments in (["-h"], ["run", "-h"], ["options", "-h"]):
        assert "Usage" in invoke(*arguments).stdout
    assert invoke("--version").stdout.startswith(f"flwr-perdl {__version__}, flwr ")


@pytest.mark.parametrize("columns", [30, 40, *range(55, 85, 3), 200])
def test_no_number_is_broken_at_any_width(columns):
    heads = ["", *(f"MSE {k}" for k in (5, 10, 20)), "a longer head", "below 1e-6"]
    rows = [["PerMA, global + local atoms (48)", "0.0123", "12,345,678", "1.5e-16", "9.87", "99%"]]
    printed = io.StringIO()
    Console(file=printed, width=columns, color_system=None).print(Rows(heads, rows, "E"))
    lines = printed.getvalue().splitlines()
    assert all(len(line) <= columns for line in lines)
    for cell in rows[0][1:]:
        assert any(cell in line for line in lines)


def test_without_a_terminal_a_line_says_what_a_run_does_also_within_a_long_part(monkeypatch):
    lines, told = [], threading.Event()

    def tell(line):
        lines.append(line)
        told.set()

    monkeypatch.setattr(cli, "_SILENCE", 0.01)
    monkeypatch.setattr(cli, "_tell", tell)
    with cli._bar(Console(file=io.StringIO())) as update:
        update(Progress(0, 6, doing="computing C1-seed-0"))
        assert told.wait(60)  # without a further update
    assert lines == ["computing C1-seed-0, step 0 of 6"]


def test_an_interrupt_says_how_to_go_on(tmp_path):
    code = (
        "import os, signal\n"
        # Whoever runs the tests in the background ignores it, and its children inherit that.
        "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        "from perdl_experiments import cli\n"
        "from perdl_experiments.runner import _Session\n"
        "tell = _Session._tell\n"
        "def ending(self, before, report):\n"
        "    tell(self, before, report)\n"
        "    if report.round == 2: os.kill(os.getpid(), signal.SIGINT)\n"
        "_Session._tell = ending\n"
        "cli.main()\n"
    )
    given = ["run", "synthetic", "--clients", "2", "--rounds", "4", "-o", "seeds=1"]
    given += ["--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-c", code, *given],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
    )
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr.endswith("stopped by SIGINT; continue with --resume.\n")
    assert invoke(*given, "--resume").exit_code == 0


def test_local_atoms_of_a_run_are_written_where_they_are_asked_for(tmp_path):
    out = tmp_path / "run"
    given = ("--clients", 3, "--rounds", 2, "-o", "seeds=1")
    assert invoke("run", "synthetic", "--out", out, "--keep-local", *given).exit_code == 0
    with np.load(out / "local-atoms.npz") as kept:
        atoms = dict(kept)
    assert list(atoms) == ["0", "1", "2"]
    np.testing.assert_allclose(np.linalg.norm(atoms["1"], axis=1), 1)
    check_estimator_of(out, atoms["2"])
    result = invoke("export", out, "--out", tmp_path / "models")
    assert "4 models" in result.stdout
    (exported,) = (tmp_path / "models").glob("client-2.*")
    np.testing.assert_array_equal(load(exported)["local_atoms"], atoms["2"])
    invoke("run", "synthetic", "--out", out, "--overwrite", *given)
    assert not (out / "local-atoms.npz").exists()
    (out / "results.json").unlink()  # as of a run that is not over
    unfinished = invoke("export", out, "--out", tmp_path / "others")
    assert unfinished.exit_code == 2
    assert "folder" in unfinished.stderr
    assert not (tmp_path / "others").exists()


def check_estimator_of(out, atoms):
    """Check that a finished run gives an estimator with the dictionary of client 2."""
    read = partial(PersonalizedDictionaryLearning.from_run, out, learner=OrthogonalLearner)
    alone, shared = read(client=2), read(n_nonzero=2)
    with np.load(out / "arrays.npz") as arrays:
        learned = arrays["global_atoms"]
    np.testing.assert_array_equal(alone.atoms(), np.vstack([learned, atoms]))
    X = np.random.default_rng(0).standard_normal((30, learned.shape[1]))
    np.testing.assert_array_equal(alone.transform(X), alone.transform(X, client=2))
    assert list(alone.get_feature_names_out())[len(learned)] == "local0"
    assert shared.transform(X).shape == (30, len(learned))
    assert (shared.rounds, shared.n_nonzero) == (2, 2)
    assert alone.add_site(X) == 3
    with pytest.raises(ValueError, match=r"^client"):
        read(client=3)
    with pytest.raises(ValueError, match=r"^learner"):
        PersonalizedDictionaryLearning.from_run(out)
    with pytest.raises(ValueError, match=r"^folder"):
        PersonalizedDictionaryLearning.from_run(out / "state")
