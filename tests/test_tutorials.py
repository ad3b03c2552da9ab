"""The tutorials: each runs, and its page and notebook show what it prints."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TUTORIALS = runpy.run_path(str(ROOT / "docs" / "tutorials.py"))
FOLDER = ROOT / "docs" / "tutorials"


def test_cells_are_what_stands_between_their_marks() -> None:
    program = "# ignored\n# %% [markdown]\n# # Title\n#\n# Text\n\n# %% a line\nx = 1\nx\n\n# %%\ny"
    assert TUTORIALS["cells"](program) == [
        ("", "# Title\n\nText"),
        ("a line", "x = 1\nx"),
        (" ", "y"),
    ]


def test_a_cell_prints_its_last_expression_and_draws() -> None:
    program = (
        "# %%\nprint('a')\n1 + 1\n# %% A line\nimport matplotlib.pyplot as plt\nplt.plot([1, 2])"
    )
    first, second = TUTORIALS["execute"](program)
    assert (first.text, first.pictures) == ("a\n2", [])
    assert second.text == ""
    assert second.pictures[0].png.startswith(b"\x89PNG")
    text, pictures = TUTORIALS["page"]("x", [first, first, second])
    assert "![A line](x-1.png#chart)" in text
    assert list(pictures) == ["x-1.png"]


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
