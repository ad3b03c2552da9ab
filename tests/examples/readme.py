"""What an example's README says: what to install, what to type, and what is printed then."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
#: In the order of examples/README.md.
EXAMPLES = re.findall(r"\]\(([\w-]+)/README\.md\)", (ROOT / "examples" / "README.md").read_text())

BLOCK = re.compile(r"^```(sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STARTS_FLOWER = re.compile(r"^(?:flwr|flower-\w+) ", re.MULTILINE)
INSTALL = re.compile(r"^pip install (?:\.|'\.\[(?P<extras>[\w,]+)\]')", re.MULTILINE)


class Readme(NamedTuple):
    """An example's README."""

    name: str
    extras: str
    """Of the installation, such as ``simulation``."""
    blocks: list[str]
    """Of commands, without the one that installs."""
    printed: list[str]
    """Lines that the commands print."""

    @property
    def scripts(self) -> list[str]:
        """Return the blocks that need neither Ray nor a SuperLink."""
        return [block for block in self.blocks if not STARTS_FLOWER.search(block)]


def read(name: str) -> Readme:
    """Return what the README of an example says."""
    text = (ROOT / "examples" / name / "README.md").read_text()
    blocks = [match.groups() for match in BLOCK.finditer(text)]
    first, *commands = (block for kind, block in blocks if kind == "sh")
    install = INSTALL.match(first)
    assert install, f"{name} does not begin with what to install"
    assert f"cd examples/{name}\n" in first, f"{name} does not say where its commands run"
    return Readme(
        name,
        install["extras"] or "",
        commands,
        [line for kind, block in blocks if kind == "text" for line in block.splitlines()],
    )


def copied(readme: Readme, folder: Path) -> Path:
    """Return a copy of the example in ``folder``."""
    ignored = shutil.ignore_patterns("__pycache__")
    return shutil.copytree(ROOT / "examples" / readme.name, folder / readme.name, ignore=ignored)


def run(readme: Readme, blocks: list[str], here: Path, environment: Mapping[str, str]) -> None:
    """Run blocks in a folder, and compare what they print with what the README says."""
    done = subprocess.run(
        ["bash", "-eu", "-c", "\n".join(blocks)],
        cwd=here,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, f"{readme.name}\n{done.stdout[-6000:]}"
    missing = [line for line in readme.printed if line not in done.stdout]
    assert not missing, f"{readme.name} does not print {missing}\n{done.stdout[-6000:]}"
