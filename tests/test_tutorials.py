"""The tutorials: each runs, and its page and notebook show what it prints."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TUTORIALS = runpy.run_path(str(ROOT / "docs" / "tutorials.py"))
FOLDER = ROOT / "docs" / "tutorials"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(source.stem for source in FOLDER.glob("*.py")))
def test_a_tutorial_runs_and_its_page_and_notebook_show_what_it_prints(name: str) -> None:
    done = TUTORIALS["execute"]((FOLDER / f"{name}.py").read_text())
    text, pictures = TUTORIALS["page"](name, done)
    assert text == (FOLDER / f"{name}.md").read_text(), f"make tutorials ARGS={name}"
    assert all((FOLDER / file).exists() for file in pictures)
    stored = json.loads((FOLDER / f"{name}.ipynb").read_text())
    assert [one["source"] for one in stored["cells"]] == [
        one["source"] for one in json.loads(TUTORIALS["notebook"](done))["cells"]
    ]
