"""Compiled loops: where their machine code may lie, and who waits for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flwr_perdl.core import compiled as module
from flwr_perdl.core.compiled import compiled

ROOT = Path(__file__).resolve().parent.parent

DOUBLED = "def doubled(x):\n    return 2 * x / 1\n"


@pytest.mark.slow
def test_machine_code_is_kept_for_other_processes(tmp_path: Path) -> None:
    script = """
from flwr_perdl.dictionary import omp
import numpy as np
omp(np.ones((1, 2)), np.eye(2), 1)
from flwr_perdl.dictionary._kernels import pursue
print(sum(pursue.stats.cache_hits.values()), sum(pursue.stats.cache_misses.values()))
"""
    said = [
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env={"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for _ in range(2)
    ]
    assert said == [["0", "1"], ["1", "0"]]


def test_where_nothing_can_be_written_code_is_compiled_all_the_same(
    warned: pytest.LogCaptureFixture,
) -> None:
    module._warn_once.cache_clear()
    space: dict[str, object] = {}
    exec(compile(DOUBLED, "/nowhere/at/all.py", "exec"), space)  # a file that has no folder
    first, second = compiled(space["doubled"]), compiled(space["doubled"])
    assert first(1.5) == second(1.5) == 3.0
    assert any("set NUMBA_CACHE_DIR" in record.message for record in warned.records)


def test_imports_do_not_wait_for_numba() -> None:
    asked = """
import sys
import flwr_perdl.strategies, flwr_perdl.simulations, flwr_perdl.diffusion
print("numba" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", asked], cwd=ROOT, capture_output=True, check=True)
    assert done.stdout.split() == [b"False"]
