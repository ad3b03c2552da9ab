"""What the benchmarks share: timing in turn, and results with where they came from."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from matplotlib.figure import Figure
from threadpoolctl import threadpool_limits

from flwr_perdl.core.threads import n_threads

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("flwr", "numpy", "scipy", "scikit-learn")

#: Threads at most; `on` changes what `n_threads` says.
CORES = n_threads()

Key = TypeVar("Key", bound=Hashable)


def timed(run: Callable[[], Any], clock: Callable[[], float] = time.process_time) -> float:
    """Return the processor's seconds of ``run``, which other work on the machine disturbs least."""
    start = clock()
    run()
    return clock() - start


#: The seconds that a run took: for what computes in several threads.
wall = partial(timed, clock=time.perf_counter)


def in_turn(
    runs: Mapping[Key, Callable[[], Any]],
    turns: int,
    seconds: Callable[[Callable[[], Any]], float] = timed,
) -> dict[Key, np.ndarray]:
    """Return the seconds of each run in every turn; in a turn all run, one after the other.

    Two runs are compared turn by turn: what slows the machine down for a while slows both. A turn
    before all, in which code is compiled, does not count.
    """
    found = [[seconds(run) for run in runs.values()] for _ in range(1 + turns)]
    return dict(zip(runs, np.swapaxes(found[1:], 0, 1), strict=True))


def cell(turns: Any, form: str = ".3g") -> str:
    """Return a table's cell: the median of all turns, and their range."""
    median, *ends = (format(of(turns), form) for of in (np.median, np.min, np.max))
    return f"{median} ({' to '.join(ends)})"


def on(cores: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` computing in so many threads at most."""

    def limited(*args: Any) -> Any:
        os.environ["OMP_NUM_THREADS"] = str(cores)
        return function(*args)

    return limited


def main(
    name: str,
    about: str,
    ratios: Callable[[], dict[str, Any]],
    rest: Callable[[], dict[str, Any]],
    tables: Callable[[dict[str, Any]], str | dict[str, str]],
    picture: Callable[[dict[str, Any]], Figure] | None = None,
) -> None:
    """Measure with one BLAS thread, print, and write ``NAME.json``, ``NAME.md`` and ``NAME.png``.

    Parameters
    ----------
    name : str
        The script's, without its ending.
    about : str
        What ``--help`` says.
    ratios : callable
        Measures times; its entry ``"ratios"`` has names and quotients of every turn, larger is
        better. The medians are stored, which `benchmarks/_check.py` compares, and beside them
        ``"ranges"``.
    rest : callable
        Measures everything else; left out with ``--ratios``.
    tables : callable
        Results to Markdown, or to a text per file.
    picture : callable, optional
        Results to a drawing.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--ratios", action="store_true", help="the ratios of times only")
    given = parser.parse_args()
    with threadpool_limits(1):
        measured = ratios()
        turns = measured.pop("ratios", {})
        results = {
            "command": f"python benchmarks/{name}.py",
            "commit": commit(),
            "machine": {
                "platform": platform.platform(),
                "processor": processor_name(),
                "cores": os.cpu_count(),
            },
            "versions": {
                "python": platform.python_version(),
                **{package: version(package) for package in PACKAGES},
            },
            "ratios": {name: np.median(of) for name, of in turns.items()},
            "ranges": {name: [np.min(of), np.max(of)] for name, of in turns.items()},
            **measured,
            **({} if given.ratios else rest()),
        }
    given.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=2, default=lambda array: array.tolist())
    (given.out / f"{name}.json").write_text(text + "\n")
    if not given.ratios:
        made = tables(results)
        for file, text in ({name: made} if isinstance(made, str) else made).items():
            (given.out / f"{file}.md").write_text(text)
            sys.stdout.write(text)
        if picture is not None:
            picture(results).savefig(given.out / f"{name}.png", dpi=80)


def processor_name() -> str:
    """Return the processor's name, and what tells it from others of the same name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        said = {key.strip(): value.strip() for key, _, value in (s.partition(":") for s in lines)}
        return f"{said['model name']}, family {said['cpu family']}, model {said['model']}"
    except (OSError, KeyError):  # not Linux, or not of Intel's kind
        return platform.processor() or platform.machine()


def commit() -> str | None:
    """Return the commit that is measured, None outside of a repository."""
    asked = ["git", "rev-parse", "HEAD"]
    said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    return said or None
