"""Every example by the commands in its own README, and what the README says that they print."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.examples.readme import EXAMPLES, ROOT, Readme, copied, read, run

READMES = [read(name) for name in EXAMPLES]
SCREEN = 60  # lines
#: The command of the other Flower versions: 1.26.1 is the last with `flower-simulation`.
OTHER = "flwr run" if Path(sys.executable).with_name("flower-simulation").exists() else "flower-sim"


def named(readmes: list[Readme]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("readme", readmes, ids=[readme.name for readme in readmes])


def simulated(readme: Readme) -> bool:
    return any(block.startswith("flwr run") for block in readme.blocks)


def test_the_table_has_every_example() -> None:
    assert sorted(EXAMPLES) == sorted(
        path.parent.name for path in (ROOT / "examples").glob("*/README.md")
    )


@named(READMES)
def test_a_readme_is_a_screen_and_has_commands_and_what_they_print(readme: Readme) -> None:
    lines = (ROOT / "examples" / readme.name / "README.md").read_text().splitlines()
    assert len(lines) <= SCREEN
    assert readme.blocks
    assert readme.printed


@named([readme for readme in READMES if readme.scripts])
def test_scripts_print_what_the_readme_says(readme: Readme, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    run(readme, readme.scripts, copied(readme, tmp_path), environment)


@pytest.mark.slow
@pytest.mark.ray
@named([readme for readme in READMES if simulated(readme)])
def test_apps_print_what_the_readme_says(
    readme: Readme, flower_environment: dict[str, str], tmp_path: Path
) -> None:
    """Also where the project lists flwr-perdl: the cure of exit code 608 is in the environment."""
    here = copied(readme, tmp_path)
    project = here / "pyproject.toml"
    listed = 'dependencies = ["flwr-perdl"]'
    project.write_text(project.read_text().replace("dependencies = []", listed))
    assert listed in project.read_text()
    blocks = [block for block in readme.blocks if not block.startswith(OTHER)]
    run(readme, blocks, here, {**flower_environment, "PYTHONPATH": str(ROOT)})
