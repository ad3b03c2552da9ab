"""A hundred runs in which everything goes wrong (chaos.py): nearly all end as if nothing had."""

from __future__ import annotations

import importlib.util
import logging
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flwr_perdl.core import files

_spec = importlib.util.spec_from_file_location("chaos", Path(__file__).parent / "chaos.py")
assert _spec is not None
assert _spec.loader is not None
chaos: Any = importlib.util.module_from_spec(_spec)
sys.modules["chaos"] = chaos  # its annotations are looked up there
_spec.loader.exec_module(chaos)

N_RUNS = 100
CLOSE = 1.1
NOTHING = chaos.Schedule({r: set() for r in range(1, chaos.N_ROUNDS + 1)}, {}, {}, [], False)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory where there is one: a hundred runs wait for ten thousand writes."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


def check_private_atoms(ended: Any, folder: Path) -> None:
    """Every client's newest state is still on disk, and can be read."""
    for client, newest in ended.grid.on_disk.items():
        own = chaos.newest_run(folder / f"client-{client}")
        assert files.rounds_in(own)[-1] >= newest
        for round_ in files.rounds_in(own):
            assert files.load(files.round_path(own, round_)).arrays


def check_stopped(seed: int, ended: Any, out: Path, clean: float) -> None:
    """It stopped for want of clients; with all of them back it goes on."""
    assert ended.stopped is not None
    stopped = ended.grid.round
    assert f"min_clients={chaos.MIN_CLIENTS}" in ended.stopped
    plan = ended.grid.plan
    bad = {client for (round_, client), what in plan.bad.items() if round_ == stopped and what}
    assert chaos.N_CLIENTS - len(plan.absent[stopped] | bad) < chaos.MIN_CLIENTS
    again = chaos.run(seed, out, plan=NOTHING, resume=True)
    assert again.error is not None
    assert again.error < CLOSE * clean


@pytest.mark.slow
def test_a_hundred_runs_through_chaos(folder: Path, capsys: Any) -> None:
    logging.disable(logging.CRITICAL)
    counts: Counter[str] = Counter()
    try:
        clean = chaos.undisturbed(folder / "clean")
        for seed in range(N_RUNS):
            out = folder / str(seed)
            ended = chaos.run(seed, out)
            counts["killed"] += ended.kills
            check_private_atoms(ended, out / "state")
            if ended.error is None:
                check_stopped(seed, ended, out, clean)
                counts["stopped, and resumable"] += 1
            else:
                counts["close" if ended.error < CLOSE * clean else "far"] += 1
    finally:
        logging.disable(logging.NOTSET)
    with capsys.disabled():
        print(f"\nchaos, {N_RUNS} runs: {dict(counts)}")
    assert counts["close"] >= 95
    assert counts["far"] == 0
    assert counts["stopped, and resumable"] >= 1
    assert counts["killed"] > 50


def test_a_few_runs_through_chaos(folder: Path) -> None:
    clean = chaos.undisturbed(folder / "clean")
    for seed in (0, 1):
        ended = chaos.run(seed, folder / str(seed))
        check_private_atoms(ended, folder / str(seed) / "state")
        assert ended.error is not None
        assert ended.error < CLOSE * clean
