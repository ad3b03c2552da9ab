"""Run the tutorials: docs/tutorials/NAME.py becomes the page NAME.md, its pictures and NAME.ipynb.

    python docs/tutorials.py [NAME ...]

A source is a Python program in cells, as Jupyter's extensions, VS Code and Spyder open it: ``# %%``
begins code, ``# %% [markdown]`` begins text in comments. What stands behind the ``# %%`` of code is
what its picture shows, for those who do not see it. A cell's last expression is printed, as in a
notebook.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import logging
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

FOLDER = Path(__file__).resolve().parent / "tutorials"
#: A notebook's first code. With the release: %pip install --quiet "flwr-perdl[experiments]"
INSTALL = '''\
# This notebook is in docs/tutorials of a clone of the repository, which this installs.
%pip install --quiet "../..[experiments]"'''


class Cell(NamedTuple):
    """A piece of a tutorial."""

    title: str
    """What follows ``# %%``."""
    source: str


class Picture(NamedTuple):
    """What a figure looks like."""

    png: bytes
    chart: bool
    """It has no image in it: the site inverts its colors on a dark page."""


class Done(NamedTuple):
    """What a cell has printed and drawn."""

    cell: Cell
    text: str
    pictures: list[Picture]


def cells(program: str) -> list[Cell]:
    """Return the cells of a program; what stands above the first ``# %%`` is left out."""
    found = []
    for part in f"\n{program}".split("\n# %%")[1:]:
        title, _, source = part.partition("\n")
        if is_text := title.strip() == "[markdown]":
            source = "\n".join(line.removeprefix("#")[1:] for line in source.splitlines())
        found.append(Cell("" if is_text else title.strip() or " ", source.strip("\n")))
    return found


def execute(program: str) -> list[Done]:
    """Run all cells, one after the other, in one namespace."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    done = []
    for cell in cells(program):
        out, pictures = io.StringIO(), []
        if cell.title:
            body = ast.parse(cell.source).body
            last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
            with redirect_stdout(out):
                exec(compile(ast.Module(body, []), "<cell>", "exec"), namespace)
                if isinstance(last, ast.Expr):
                    shown = eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)
                    if shown is not None and not plt.get_fignums():
                        print(repr(shown))
            for number in plt.get_fignums():
                picture = io.BytesIO()
                figure = plt.figure(number)
                figure.savefig(picture, dpi=110, metadata={"Software": None})
                chart = not any(axes.images for axes in figure.axes)
                pictures.append(Picture(picture.getvalue(), chart))
            plt.close("all")
        done.append(Done(cell, out.getvalue().rstrip(), pictures))
    return done


def page(name: str, done: list[Done]) -> tuple[str, dict[str, bytes]]:
    """Return the page, and its pictures by file name."""
    heading, *rest = done
    lines = [heading.cell.source, "", f"[Download the notebook]({name}.ipynb)"]
    pictures: dict[str, bytes] = {}
    for cell, text, drawn in rest:
        lines += ["", f"```python\n{cell.source}\n```" if cell.title else cell.source]
        if text:
            lines += ["", f"```text\n{text}\n```"]
        for picture in drawn:
            file = f"{name}-{len(pictures) + 1}.png"
            pictures[file] = picture.png
            lines += ["", f"![{cell.title}]({file}{'#chart' * picture.chart})"]
    return "\n".join(lines) + "\n", pictures


def notebook(done: list[Done]) -> str:
    """Return the tutorial as a Jupyter notebook, with its outputs; the first code installs."""
    more = " pandas" if any("import pandas" in cell.source for cell, *_ in done) else ""
    source = (INSTALL + more).splitlines(keepends=True)
    install = {"id": "install", "metadata": {}, "source": source}
    listed: list[dict[str, Any]] = []
    for number, (cell, text, drawn) in enumerate(done):
        one: dict[str, Any] = {"id": f"cell-{number}", "metadata": {}}
        one["source"] = cell.source.splitlines(keepends=True)
        if not cell.title:
            listed.append({"cell_type": "markdown", **one})
            if not number:
                code = {"cell_type": "code", **install, "execution_count": None, "outputs": []}
                listed.append(code)
            continue
        outputs: list[dict[str, Any]] = []
        if text:
            lines = f"{text}\n".splitlines(keepends=True)
            outputs.append({"output_type": "stream", "name": "stdout", "text": lines})
        for picture in drawn:
            data = {"image/png": base64.b64encode(picture.png).decode(), "text/plain": [cell.title]}
            outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
        listed.append({"cell_type": "code", **one, "execution_count": None, "outputs": outputs})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    whole = {"cells": listed, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def main(names: list[str]) -> None:
    """Write the pages, pictures and notebooks of these tutorials, or of all."""
    for name in names or sorted(source.stem for source in FOLDER.glob("*.py")):
        done = execute((FOLDER / f"{name}.py").read_text())
        text, pictures = page(name, done)
        (FOLDER / f"{name}.md").write_text(text)
        (FOLDER / f"{name}.ipynb").write_text(notebook(done))
        for file, picture in pictures.items():
            (FOLDER / file).write_bytes(picture)
        print(f"{name}: {len(done)} cells, {len(pictures)} pictures")


if __name__ == "__main__":
    main(sys.argv[1:])
