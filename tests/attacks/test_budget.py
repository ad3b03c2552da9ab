"""A server that starts runs until it has what it wants: the budget of a client's own `Noise`.

With a folder on its disk a client counts over runs, restarts and processes; without one it says
that it does not.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client import NumPyClient

from flwr_perdl.clients import client_app
from flwr_perdl.privacy import Noise
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import PersonalizedFedAvg, TooFewReplies
from tests.grids import as_app, asks, context_of, promise

ROUNDS = 4
NOISE = Noise(epsilon=2.0, trust="central", level="client")


class Moving(NumPyClient):
    """A client that moves its model; where its process is to die, it does so then."""

    def fit(self, parameters: Any, config: Any) -> Any:
        if config.get("dies"):
            os._exit(9)
        return [array + 0.25 for array in parameters], 1, {}


def make(context: Context) -> Moving:
    return Moving()


APP = client_app(make, privacy=NOISE)


def restarted(folder: Path | None, partition: int = 0, **run_config: Any) -> Context:
    """Return the context of a client whose process has just begun."""
    context = context_of(partition, **({} if folder is None else {"state-dir": str(folder)}))
    context.run_config = run_config
    return context


def ask(context: Context, round_: int, run: str = "run", app: Any = APP, **config: Any) -> Message:
    """Ask for a sum."""
    said = promise(rounds=ROUNDS)
    known = {"perdl.promise": said, "perdl.run": run, "server-round": round_, **config}
    content = RecordDict({"arrays": ArrayRecord([np.zeros(2)]), "config": ConfigRecord(known)})
    reply: Message = app(asks(content), context)
    return reply


def gives(*asked: Any, **options: Any) -> bool:
    """Whether a client answers a request for a sum."""
    try:
        return bool(ask(*asked, **options))
    except ValueError:
        return False


def answered(contexts: list[Context], **options: Any) -> int:
    """Return how many sums runs get, of one client, in each of these lives of its process."""
    rounds = range(1, ROUNDS + 1)
    return sum(
        gives(context, round_, f"run {run}", **options)
        for run, context in enumerate(contexts)
        for round_ in rounds
    )


@pytest.mark.parametrize("app", [APP, client_app(as_app(make), privacy=NOISE)])
def test_three_runs_have_one_budget(app: Any, tmp_path: Path) -> None:
    # The control: without a folder of its own, whatever folder those who start the run may name.
    elsewhere = [restarted(None, **{"state-dir": str(tmp_path / str(i))}) for i in range(3)]
    assert answered(elsewhere, app=app) == 3 * ROUNDS
    assert answered([restarted(tmp_path) for _ in range(3)], app=app) == ROUNDS
    # Another client, and another promise, have budgets of their own.
    assert answered([restarted(tmp_path, 1)], app=app) == ROUNDS
    other = client_app(make, privacy=replace(NOISE, epsilon=3.0))
    assert answered([restarted(tmp_path)], app=other) == ROUNDS


def test_sums_of_unequal_shares_and_sizes_have_one_budget(tmp_path: Path) -> None:
    """Of 16 units the second sum takes 15; neither more units nor more values are answered."""

    def sums(*asked: tuple[int, int]) -> list[bool]:
        context = restarted(tmp_path / str(asked))
        said = (promise(rounds=16, units=u, size=2, entries=n) for u, n in asked)
        return [gives(context, i, **{"perdl.promise": one}) for i, one in enumerate(said, start=1)]

    assert sums((1, 4), (15, 4)) == [True, True]
    assert sums((1, 4), (15, 4), (1, 4)) == [True, True, False]
    assert sums((2, 4), (15, 4)) == [True, False]
    assert sums((1, 3), (15, 3)) == [True, False]
    assert sums((1, 4), (15, 8)) == [True, False]
    assert sums((17, 4)) == [False]


def test_a_client_that_restarts_within_a_run_goes_on_counting(tmp_path: Path) -> None:
    rounds = [1, 2, 3, 4, 5, 6, 2]
    assert all(gives(restarted(None), round_) for round_ in rounds)  # the control
    assert [gives(restarted(tmp_path), round_) for round_ in rounds] == [True] * ROUNDS + [
        False
    ] * 3


COMMAND = """
import sys
from pathlib import Path
from tests.attacks.test_budget import gives, restarted
who, folder, dies = sys.argv[1:]
context = restarted(Path(folder))
print("ready", flush=True)
sys.stdin.readline()
print(sum(gives(context, round_, who, dies=bool(dies)) for round_ in range(1, 4)))
"""


def process(who: str, folder: Path, dies: str = "") -> subprocess.Popen[str]:
    """Start a client's process, which waits for a word before it answers."""
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, who, str(folder), dies],
        **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True},
        **{"cwd": Path(__file__).parents[2]},
    )


def test_processes_at_once_share_a_budget_and_what_a_crash_answered_is_counted(
    tmp_path: Path,
) -> None:
    running = [process("one", tmp_path), process("two", tmp_path), process("3", tmp_path, "dies")]
    for each in running:
        assert each.stdout is not None
        assert each.stdout.readline() == "ready\n"
    *two, dying = running
    assert dying.communicate("\n")[0] == ""
    assert dying.returncode == 9
    for each in two:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    # Before the one that died could answer, its sum was spent.
    assert sum(int(each.communicate()[0]) for each in two) == ROUNDS - 1
    with pytest.raises(ValueError, match=r"^rounds"):
        ask(restarted(tmp_path), 1, "last")


def test_a_ledger_is_the_owners_alone_and_one_that_cannot_be_read_stops_the_client(
    tmp_path: Path,
) -> None:
    ask(restarted(tmp_path), 1)
    folder = tmp_path / "client-0"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    file = folder / "noise.npz"
    whole = file.read_bytes()
    ask(restarted(tmp_path, 1), 1)
    others = (tmp_path / "client-1" / "noise.npz").read_bytes()
    changed = whole.replace("count".encode("utf-32-le"), "c0unt".encode("utf-32-le"))
    assert changed != whole
    for damaged in (b"", whole[: len(whole) // 2], changed, others):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="noise"):
            ask(restarted(tmp_path), 2)
        assert file.read_bytes() == damaged
    file.unlink()
    file.symlink_to(tmp_path / "client-1" / "noise.npz")
    with pytest.raises(ValueError, match=r"noise\.npz"):
        ask(restarted(tmp_path), 2)


@pytest.mark.parametrize("trust", ["central", "distributed"])
@pytest.mark.parametrize("kept", [False, True])
def test_a_client_without_a_folder_says_that_nothing_limits_further_runs(
    kept: bool, trust: str, tmp_path: Path, warned: pytest.LogCaptureFixture
) -> None:
    """And a second start on one grid says that the budget is spent."""
    noise = Noise(epsilon=50.0, trust=trust, level="client")
    config = {"state-dir": str(tmp_path)} if kept else {}

    def grid_of() -> InProcessGrid:
        return InProcessGrid(client_app(make, privacy=noise), 3, node_config=lambda i: config)

    def start(grid: InProcessGrid) -> PersonalizedFedAvg:
        strategy = PersonalizedFedAvg(share="*", privacy=noise, min_clients=3)
        strategy.start(grid, ArrayRecord([np.zeros(2)]), num_rounds=2)
        return strategy

    grid = grid_of()
    counts = [report.aggregate.get("uncounted-runs", 0) for report in start(grid).history]
    assert counts == ([0, 0] if kept else [3, 3])
    assert ("Nothing limits further runs at client 0, client 1, client 2" in warned.text) != kept
    for again in (grid, *([grid_of()] if kept else [])):
        with pytest.raises(TooFewReplies, match="rounds"):
            start(again)
