"""The live view: what it says of a run, from its events alone."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from flwr_perdl.protocol.events import EVENTS, EventLog, read_events
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
    assert "start of round 1: waiting for 5 clients" in text
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
