"""Every example by the commands in its own README, and what the README says that they print."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks._deployment import free_port
from tests.examples.readme import EXAMPLES, ROOT, Readme, copied, read, run, tells

READMES = [read(name) for name in EXAMPLES]
#: Whose scripts run in this environment; tests/test_wheel.py runs all in clean ones.
HERE = ("own-protocol", "pytorch-own-protocol", "quickstart-clustered")
#: The command of the other Flower versions: 1.26.1 is the last with `flower-simulation`.
OTHER = "flwr run" if Path(sys.executable).with_name("flower-simulation").exists() else "flower-sim"
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT),
}


def test_the_table_has_every_example() -> None:
    folders = [path.parent.name for path in (ROOT / "examples").glob("*/README.md")]
    assert sorted(EXAMPLES) == sorted(folders)


def test_a_quickstart_node_may_have_a_name_instead_of_a_number_with_pytorch() -> None:
    pytest.importorskip("torch")
    task = runpy.run_path(str(ROOT / "examples/quickstart-clustered/quickstart/task.py"))
    numbers = ({"partition-id": 3}, {"partition-id": "3"}, {"name": "ward-7"})
    loaders = (task["load_data"](node_config)[0] for node_config in numbers)
    first, same, other = (loader.dataset.tensors[0].numpy() for loader in loaders)
    np.testing.assert_array_equal(first, same)
    assert (first != other).all()
    with pytest.raises(ValueError, match=r"^node_config"):
        task["load_data"]({})


@pytest.mark.parametrize(
    "readme",
    [
        pytest.param(
            one,
            id=f"{one.name}-pytorch" if one.torch else one.name,
            marks=[pytest.mark.torch] if one.torch else [],
        )
        for one in READMES
        if tells(one.name) and one.name in HERE
    ],
)
def test_scripts_print_what_the_readme_says(readme: Readme, tmp_path: Path) -> None:
    if readme.torch:
        pytest.importorskip("torch")
    run(readme.scripts, copied(readme, tmp_path), ENVIRONMENT)


@pytest.mark.slow
@pytest.mark.ray
def test_the_quickstart_prints_what_its_readme_says_on_flowers_simulation_with_pytorch(
    flower_environment: dict[str, str], tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    readme = read("quickstart-clustered")
    steps = [step for step in readme.steps if not step.commands.startswith(OTHER)]
    run(steps, copied(readme, tmp_path), {**flower_environment, "PYTHONPATH": str(ROOT)})


@pytest.mark.slow
@pytest.mark.deployment
def test_a_superlink_with_three_supernodes(tmp_path: Path) -> None:
    readme = read("superlink-three-supernodes")
    ports = f"port={free_port(4)};"
    steps = [
        step._replace(commands=step.commands.replace("port=9300;", ports)) for step in readme.steps
    ]
    assert steps != readme.steps
    copied(read("perdl-perma"), tmp_path)  # the app that its nodes run
    run(steps, copied(readme, tmp_path), ENVIRONMENT)
