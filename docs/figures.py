"""Bring measured figures into README.md and the guides: ``make docs-figures``.

A page names its source between markers, ``<!-- begin SOURCE -->`` and ``<!-- end -->``. A source
``runs/NAME`` is the experiment NAME, run here: its tables. Any other source is a Markdown file.
"""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

from flwr_perdl.simulations import run_experiment

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "perma.md")
PICTURES = {"runs/digits": "reconstructions.png"}
REGION = re.compile(r"(<!-- begin (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def content(source: str) -> str:
    """Return what a page shows of ``source``."""
    if not source.startswith("runs/"):
        return (ROOT / source).read_text()
    results = run_experiment(Path(source).name, out=ROOT / source)
    if source in PICTURES:
        name = f"{Path(source).name}.png"
        shutil.copy(ROOT / source / PICTURES[source], ROOT / "docs" / "images" / name)
    return "\n".join(markdown(table) for table in results["tables"])


def markdown(table: dict[str, object]) -> str:
    """Return a table of ``results.json`` as Markdown."""
    columns, rows = list(table["columns"]), [list(row) for row in table["rows"]]
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    body = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"**{table['title']}**\n\n{body}\n\n{table['caption']}\n"


if __name__ == "__main__":
    logging.getLogger("flwr").setLevel(logging.WARNING)
    for page in PAGES:
        text = page.read_text()
        page.write_text(REGION.sub(lambda m: m[1] + content(m[2]) + m[3], text))
        print(f"{page.relative_to(ROOT)}: {len(REGION.findall(text))} regions")
