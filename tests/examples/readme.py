"""What an example's README says: what to install, what to type, and what is printed then."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
#: In the order of examples/README.md.
EXAMPLES = re.findall(r"\]\(([\w-]+)/README\.md\)", (ROOT / "examples" / "README.md").read_text())

BLOCK = re.compile(r"^```(sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INSTALL = re.compile(r"^pip install (?:\.|'(?:\.|flwr-perdl)\[(?P<extras>[\w,]+)\]')", re.MULTILINE)
FLOWER = re.compile(r"^(?:flwr|flower-\w+) ", re.MULTILINE)


class Step(NamedTuple):
    """A block of commands."""

    commands: str
    printed: list[str]
    """Lines of the block below, which the commands print."""

    @property
    def starts_flower(self) -> bool:
        """Return whether Ray or a SuperLink is needed."""
        return FLOWER.search(self.commands) is not None


class Readme(NamedTuple):
    """An example's README."""

    name: str
    extras: str
    """Of the installation, such as ``simulation``."""
    torch: bool
    """Whether it needs PyTorch."""
    steps: list[Step]
    """All but the installation."""

    @property
    def scripts(self) -> list[Step]:
        """Return the steps that need neither Ray nor a SuperLink."""
        return [step for step in self.steps if not step.starts_flower]


def read(name: str) -> Readme:
    """Return what the README of an example says."""
    text = (ROOT / "examples" / name / "README.md").read_text()
    steps: list[Step] = []
    for kind, block in BLOCK.findall(text):
        if kind == "sh":
            steps.append(Step(block, []))
        else:
            steps[-1].printed.extend(block.splitlines())
    first = steps.pop(0).commands
    install = INSTALL.match(first)
    assert install, f"{name} does not begin with what to install"
    assert re.search(rf"^cd (examples/)?{name}$", first, re.MULTILINE), (
        f"{name} does not say where its commands run"
    )
    return Readme(name, install["extras"] or "", "torch" in first, steps)


def tells(name: str) -> bool:
    """Return whether an example's README says what its scripts print."""
    return any(step.printed for step in read(name).scripts)


def copied(readme: Readme, folder: Path) -> Path:
    """Return a copy of the example in ``folder``."""
    ignored = shutil.ignore_patterns("__pycache__")
    return shutil.copytree(ROOT / "examples" / readme.name, folder / readme.name, ignore=ignored)


def run(steps: Iterable[Step], here: Path, environment: Mapping[str, str]) -> str:
    """Take steps in a folder, compare what they print with what the README says, and return it."""
    steps = list(steps)
    process = subprocess.Popen(
        ["bash", "-eu", "-c", "\n".join(step.commands for step in steps)],
        cwd=here,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=540)
    finally:
        with contextlib.suppress(ProcessLookupError):  # what the commands left running
            os.killpg(process.pid, signal.SIGKILL)
    logs = [f"{log.name}\n{log.read_text()[-1000:]}" for log in sorted(here.glob("*.log"))]
    said = "\n".join([here.name, printed[-6000:], *logs])
    assert process.returncode == 0, said
    missing = [line for step in steps for line in step.printed if line not in printed]
    assert not missing, f"{missing} is not in {said}"
    return printed
