"""Counts of the structure, which may only fall."""

from __future__ import annotations

import gc
import inspect
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

import flwr_perdl
from flwr_perdl import strategies
from flwr_perdl.clients import client_app
from flwr_perdl.network import Topology
from flwr_perdl.simulations import InProcessGrid

ROOT = Path(flwr_perdl.__file__).parent
START = {"w": np.zeros(3), "v": np.zeros(2)}
#: By strategy: calls of ours between an engine's call of the app and the user's ``fit``, and files
#: of ours (but for ``core``) of which a function is called in a run of two rounds.
RUNS: dict[str, tuple[Any, int, int]] = {
    "ClusteredFedAvg": (lambda: strategies.ClusteredFedAvg(2, seed=0), 8, 18),
    "PersonalizedFedAvg": (lambda: strategies.PersonalizedFedAvg(["v"]), 7, 17),
    "Ditto": (lambda: strategies.Ditto(0.1), 8, 17),
    "DiffusionAveraging": (lambda: strategies.DiffusionAveraging(Topology.ring(4)), 10, 25),
}


class Client:
    """Training that notes how deep it is called."""

    depth = 0

    def fit(self, parameters: Any, config: Any) -> Any:
        files = [Path(frame.filename) for frame in inspect.stack(0)]
        within = files[: next(i for i, file in enumerate(files) if file.name == "grid.py")]
        Client.depth = sum(file.is_relative_to(ROOT) for file in within)
        return parameters, 5, {}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        return 0.5, 5, {}


def run(make: Any) -> None:
    start = ArrayRecord({name: Array(array) for name, array in START.items()})
    grid = InProcessGrid(client_app(lambda context: Client()), 4)
    make().start(grid, start, num_rounds=2, verbose="quiet")


@pytest.mark.parametrize("name", RUNS)
def test_a_users_training_is_a_few_calls_from_the_engine(name: str) -> None:
    make, most, _ = RUNS[name]
    run(make)
    assert 0 < Client.depth <= most


@pytest.mark.parametrize("name", RUNS)
def test_a_round_runs_through_a_few_files(name: str) -> None:
    make, _, most = RUNS[name]
    run(make)
    seen: set[str] = set()

    def note(frame: Any, event: str, argument: Any) -> None:
        seen.add(frame.f_code.co_filename)

    gc.collect()  # generators that other tests have left are closed here, not in the run
    sys.setprofile(note)
    threading.setprofile(note)
    try:
        run(make)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    ours = {file.relative_to(ROOT) for file in map(Path, seen) if file.is_relative_to(ROOT)}
    assert 0 < len({f for f in ours if f.parts[0] != "core" and f.stem != "__init__"}) <= most


def test_no_strategy_overrides_what_another_class_of_ours_does() -> None:
    found = set()
    for module in iter_modules(strategies.__path__):
        listed = vars(import_module(f"{strategies.__name__}.{module.name}")).values()
        for one in (own for own in listed if inspect.isclass(own)):
            ours = [base for base in one.__mro__[1:] if base.__module__.startswith("flwr_perdl.")]
            kinds = (property, classmethod, staticmethod)
            for base in ours if one.__module__.startswith("flwr_perdl.") else ():
                methods = {
                    name
                    for name, value in vars(base).items()
                    if inspect.isfunction(value) or isinstance(value, kinds)
                }
                found |= {f"{one.__name__}.{name}" for name in methods & vars(one).keys()}
    dunder = {name for name in found if ".__" in name or name.endswith(".protocol")}
    assert found - dunder <= {"DiffusionAveraging.start"}


def test_a_client_loads_few_modules() -> None:
    code = "import sys; from flwr_perdl.clients import client_app; print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    ours = [name for name in shown.stdout.split() if name.startswith("flwr_perdl")]
    assert 1 < len(ours) <= 29
