"""Bring measured figures into README.md and the guides: ``make docs-figures``.

A page names its source between markers, ``<!-- begin SOURCE -->`` and ``<!-- end -->``. A source is
``runs/NAME``, the tables of the experiment NAME with its defaults; ``comparisons/NAME``, metrics of
that experiment with several options, see ``COMPARISONS``; or a Markdown file. All are run here.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from flwr_perdl.simulations import run_experiment

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "perma.md", ROOT / "docs" / "regression.md")
PICTURES = {"digits": "reconstructions.png"}
REGION = re.compile(r"(<!-- begin (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

PAPER = {"matching": "paths", "aggregation": "mean", "min_support": 0}
AGGREGATIONS = ("statistics", "mean", "weighted", "median", "geometric-median", "trimmed")


class Comparison(NamedTuple):
    """The same experiment with several options: a row per setting, a column per metric."""

    settings: Mapping[str, Mapping[str, str | int]]
    metrics: Mapping[str, str]


COMPARISONS = {
    "synthetic": Comparison(
        {
            f"{words}, {variant}": {"seeds": 40, **regime, **options}
            for words, regime in {
                "good start": {},
                "poor start": {"start": "poor"},
                "three clients with 20 samples": {"weak": 3},
            }.items()
            for variant, options in {"defaults": {}, "the paper's": PAPER}.items()
        },
        {
            "share_below_1e_2": "below 1e-2",
            "share_below_1e_3": "below 1e-3",
            "share_below_1e_6": "below 1e-6",
            "error_global_median": "median",
        },
    ),
    "digits": Comparison(
        {aggregation: {"aggregation": aggregation} for aggregation in AGGREGATIONS},
        {f"mse_global_{k}": f"MSE {k}" for k in (5, 10, 20)},
    ),
}


def content(source: str) -> str:
    """Return what a page shows of ``source``."""
    kind, _, name = source.partition("/")
    if kind == "runs":
        return "\n".join(tables(name))
    if kind == "comparisons":
        settings, metrics = COMPARISONS[name]
        rows = []
        for words, options in settings.items():
            measured = run_experiment(name, options=options)["metrics"]
            rows.append([words, *(f"{measured[metric]:.3g}" for metric in metrics)])
        return markdown(["", *metrics.values()], rows)
    return (ROOT / source).read_text()


def tables(name: str) -> list[str]:
    """Run an experiment with its defaults and return its tables; keep its picture."""
    out = ROOT / "runs" / name
    found = run_experiment(name, out=out)["tables"]
    if name in PICTURES:
        shutil.copy(out / PICTURES[name], ROOT / "docs" / "images" / f"{name}.png")
    return [
        f"**{table['title']}**\n\n{markdown(table['columns'], table['rows'])}\n{table['caption']}\n"
        for table in found
    ]


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as Markdown."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    logging.getLogger("flwr").setLevel(logging.WARNING)
    for page in PAGES:
        text = page.read_text()
        page.write_text(REGION.sub(lambda m: m[1] + content(m[2]) + m[3], text))
        print(f"{page.relative_to(ROOT)}: {len(REGION.findall(text))} regions")
