"""All protocols in one federation, on Flower's engines: the same bits as in this process."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks._deployment import Deployment
from flwr_perdl.network import Topology
from tests.engines import on_ray
from tests.strategies.everyone import Everyone
from tests.strategies.protocols import CASES, VARIANTS

NETWORK = "ridge, network"
ALL = {**CASES, NETWORK: VARIANTS[NETWORK]}
#: On SuperNodes these are another's steps once more: as ClusteredFedAvg, FedX, and NeighborRelay.
ALIKE = ["measured", "personal", "fedmd", "one-shot", "averaging", "own"]
APP = """\
from flwr.serverapp import ServerApp

from tests.strategies.everyone import Everyone

client = Everyone()
server = ServerApp()


@server.main()
def main(grid, context):
    import numpy as np  # a client's process, one per message, loads nothing of this

    from tests.end_to_end.test_all_protocols import learn

    case = context.run_config["experiment"]
    np.savez(context.run_config["out"], **learn(grid, [case]))
"""


def learn(grid: Any = None, names: Iterable[str] = ALL) -> dict[str, np.ndarray]:
    """Return what two clients learn by protocols."""
    found = {}
    for name in names:
        case = ALL[name]
        neighbors = name == NETWORK or name.partition(",")[0] in ("relay", "averaging")
        options = {"topology": Topology.complete(2)} if neighbors else {}
        here = case.grid(n=2) if grid is None else grid
        for i, array in enumerate(case.run(here, case.cut + 2, **options)):
            found[f"{name} {i}"] = array
    return found


def check(found: Any, names: Iterable[str] = ALL) -> None:
    here = learn(names=names)
    assert {*found} == {*here}
    for name, array in here.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.slow
@pytest.mark.ray
def test_on_ray() -> None:
    check(on_ray(Everyone(), learn, 2))


@pytest.mark.slow
@pytest.mark.deployment
@pytest.mark.parametrize(
    "names",
    [
        pytest.param([name for name in ALL if name not in ALIKE], id="one_of_each_kind"),
        pytest.param(ALIKE, id="the_others", marks=pytest.mark.weekly),
    ],
)
def test_on_two_supernodes(
    names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run each, four at once: while one waits for its next message, another has its own."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    out = {name: str(tmp_path / f"{i}.npz") for i, name in enumerate(names)}
    with (
        Deployment(tmp_path / "deployment", 2, app=APP) as deployment,
        ThreadPoolExecutor(4) as runs,
    ):

        def run(name: str) -> str:
            return deployment.run({"experiment": name, "out": out[name]}, timeout=1800)

        for _ in runs.map(run, names):
            pass
    found: dict[str, np.ndarray] = {}
    for file in out.values():
        with np.load(file) as learned:
            found |= learned
    check(found, names)
