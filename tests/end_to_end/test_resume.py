"""A run that is killed (SIGKILL) around a checkpoint and continued has the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

RUN = """
import os, signal, sys
from flwr_perdl.core import files
from perdl_experiments import run_experiment

moment, engine, out, resume = sys.argv[1:]
save = files.save

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def saving(path, arrays, meta):
    due = "checkpoints" in str(path) and meta["round"] == 3
    if due and moment == "before":
        die()
    if due and moment == "during":
        os.replace = die
    save(path, arrays, meta)
    if due and moment == "after":
        die()

files.save = saving
run_experiment(
    "digits", engine=engine, clients=4, rounds=5, out=out, resume=bool(resume),
    options={"samples_per_client": 60, "n_atoms": 24, "n_global": 12},
)
"""


def run(moment: str, engine: str, out: Path, *, resume: bool = False) -> int:
    """Run in a process of its own, which kills itself at ``moment``; return its exit status."""
    return subprocess.run(
        [sys.executable, "-c", RUN, moment, engine, str(out), "1" if resume else ""],
        env={**os.environ, "PYTHONWARNINGS": "default"},
        capture_output=True,
        check=False,
        timeout=300,
    ).returncode


def learned(out: Path) -> np.ndarray:
    with np.load(out / "arrays.npz") as arrays:
        return np.asarray(arrays["global_atoms"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """Return what an uninterrupted run learns."""
    out = tmp_path_factory.mktemp("whole")
    assert run("never", "in-process", out) == 0
    return learned(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "moment"),
    [
        ("in-process", "before"),
        ("in-process", "during"),
        ("in-process", "after"),
        # The server writes its checkpoints by the same code on every engine: one moment is enough.
        pytest.param("ray", "during", marks=pytest.mark.ray),
    ],
)
def test_a_killed_run_is_continued(
    tmp_path: Path, whole: np.ndarray, engine: str, moment: str
) -> None:
    assert run(moment, engine, tmp_path) == -signal.SIGKILL
    assert not (tmp_path / "results.json").exists()
    assert run("never", engine, tmp_path, resume=True) == 0
    np.testing.assert_array_equal(learned(tmp_path), whole)
