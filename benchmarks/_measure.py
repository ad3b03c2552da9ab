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


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that ``function`` took, and what it returned."""
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def fastest(
    runs: Mapping[Key, Callable[[], Any]],
    times: int,
    *,
    clock: Callable[[], float] = time.process_time,
) -> dict[Key, float]:
    """Return the least time of each run in seconds, all of them run in turn.

    The processor's time of the one thread is what other work on the machine disturbs least; what
    runs in several threads is to be measured by another clock.
    """
    seconds = dict.fromkeys(runs, np.inf)
    for _ in range(times):
        for name, run in runs.items():
            start = clock()
            run()
            seconds[name] = min(seconds[name], clock() - start)
    return seconds


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
        Measures times; its entry ``"ratios"`` has names and numbers, larger is better. These are
        what `benchmarks/_check.py` compares.
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
        results = {
            "command": f"python benchmarks/{name}.py",
            "commit": commit(),
            "machine": {"platform": platform.platform(), "cores": os.cpu_count()},
            "versions": {
                "python": platform.python_version(),
                **{package: version(package) for package in PACKAGES},
            },
            **ratios(),
            **({} if given.ratios else rest()),
        }
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / f"{name}.json").write_text(json.dumps(results, indent=2) + "\n")
    if not given.ratios:
        made = tables(results)
        for file, text in ({name: made} if isinstance(made, str) else made).items():
            (given.out / f"{file}.md").write_text(text)
            sys.stdout.write(text)
        if picture is not None:
            picture(results).savefig(given.out / f"{name}.png", dpi=80)


def commit() -> str | None:
    """Return the commit that is measured, None outside of a repository."""
    asked = ["git", "rev-parse", "HEAD"]
    said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    return said or None
