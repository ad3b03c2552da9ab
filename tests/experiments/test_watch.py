"""The live view: what it says of a run, from its events alone."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from flwr_perdl.protocol.events import EVENTS, EventLog, has_writer, read_events
from perdl_experiments import run_experiment
from perdl_experiments.cli import app
from perdl_experiments.watch import View, watch


def shown(view: View) -> str:
    out = io.StringIO()
    Console(file=out, width=120, highlight=False).print(view.render())
    return out.getvalue()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("run")
    options = {"seeds": 2, "samples": 60}
    return out, run_experiment("synthetic", clients=3, rounds=3, out=out, options=options)


def test_a_run_is_told_from_its_beginning_to_its_end(finished: Any) -> None:
    out, results = finished
    events, _ = read_events(out / EVENTS)
    assert events[0] == {**events[0], "event": "run", "experiment": "synthetic", "rounds": 6}
    assert [e["seed"] for e in events if e["event"] == "begin"] == [0, 1]
    assert [e["name"] for e in events if e["event"] == "part"] == ["seed-0", "seed-1"]
    last = events[-1]
    assert (last["event"], last["stopped"]) == ("done", None)
    assert last["clients"] == results["clients"]
    assert results["clients"]["0"]["asked"] == 2 * 6


def test_a_resumed_run_counts_what_it_kept(finished: Any) -> None:
    out, results = finished
    options = {"seeds": 2, "samples": 60}
    again = run_experiment("synthetic", clients=3, rounds=3, out=out, options=options, resume=True)
    assert again["clients"] == results["clients"]


def test_once_prints_the_run_for_scripts(finished: Any) -> None:
    result = CliRunner().invoke(app, ["watch", str(finished[0]), "--once"])
    assert result.exit_code == 0
    assert "synthetic, seed 1, round 3 of 3, finished" in result.stdout
    assert "error_global" in result.stdout


def test_the_view_follows_a_run_to_its_end(tmp_path: Path) -> None:
    """The run happens while the view sleeps: one event at a time, the last one in two halves."""
    log, path = EventLog(tmp_path / EVENTS), tmp_path / EVENTS
    done = json.dumps({"event": "done", "stopped": None}).encode() + b"\n"
    steps = [
        lambda: log.write("run", experiment="digits"),
        lambda: log.write("begin", seed=0, rounds=2, done=0),
        lambda: log.write("ask", round=1, step="start", asked=5),
        lambda: path.write_bytes(path.read_bytes() + done[:9]),
        lambda: path.write_bytes(path.read_bytes() + done[9:]),
    ]
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True, highlight=False)
    watch(tmp_path, console, sleep=lambda _: steps.pop(0)())
    assert not steps
    text = out.getvalue()
    assert "Waiting for" in text
    assert "5 clients" in text
    assert "digits, seed 0, round 0 of 2, finished" in text


def test_the_view_names_who_failed_and_why() -> None:
    view = View()
    view.take(
        [
            {"event": "begin", "protocol": "PerMA", "seed": 3, "rounds": 9, "done": 4},
            {
                "event": "round",
                "round": 5,
                "step": "update",
                "asked": 3,
                "good": 2,
                "failed": {"client 1 [bold]": "error 2: [red]no[/red]"},
                "anomalies": {"1": {"failed": 1.0}, "2": {"left out": 1.0}},
            },
            {"event": "what is this"},
            {"event": "end", "stopped": "Round 6 has 0 good replies."},
        ]
    )
    text = shown(view)
    assert "PerMA, seed 3, round 5 of 9, stopped: Round 6 has 0 good replies." in text
    assert "round 5, client 1 [bold]: error 2: [red]no[/red]" in text
    assert "left out 1" in text


SERVER = """
import sys
from flwr_perdl.protocol.events import EventLog
log = EventLog(sys.argv[1])
log.write("run", experiment="digits")
log.write("begin", seed=0, rounds=5, done=0)
log.write("ask", round=1, step="start", asked=3)
print("asked", flush=True)
sys.stdin.read()
"""


def test_a_killed_server_is_told_apart_from_one_that_waits(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    path = tmp_path / EVENTS
    command = [sys.executable, "-c", SERVER, str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "asked\n"
        once = CliRunner().invoke(app, ["watch", str(tmp_path), "--once"]).stdout
        assert "3 clients" in " ".join(once.split())
        server.kill()
    last = read_events(path)[0][-1]["time"]
    said = " ".join(CliRunner().invoke(app, ["watch", str(tmp_path), "--once"]).stdout.split())
    assert f"since {last}" in said
    assert "--resume" in said
    assert "waiting" not in said


def test_a_writer_is_seen_though_a_reader_looked_at_its_first_event(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    path = tmp_path / EVENTS
    log = EventLog(path)
    path.touch()
    with path.open("rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_EX)
        log.write("begin", rounds=2, done=0)
    assert not has_writer(path)
    log.write("ask", round=1, step="start", asked=3)
    assert has_writer(path)
    assert [event["event"] for event in read_events(path)[0]] == ["begin", "ask"]


def test_the_view_of_a_killed_server_goes_on_when_the_run_is_resumed(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    (tmp_path / EVENTS).write_text('{"event": "begin", "time": "noon", "rounds": 2}\n')
    logs = []

    def resume(_: float) -> None:
        logs.append(EventLog(tmp_path / EVENTS))
        logs[0].write("begin", rounds=2, done=1)
        logs[0].write("end", done=2, stopped=None)

    out = io.StringIO()
    console = Console(file=out, width=200, force_terminal=True, highlight=False)
    watch(tmp_path, console, sleep=resume)
    assert "since noon" in out.getvalue()
    assert "ServerSettings(resume=True)" in out.getvalue()
    assert "finished" in out.getvalue()
