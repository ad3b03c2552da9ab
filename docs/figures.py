"""Bring measured figures into the guides: ``make docs-figures``.

``python docs/figures.py PAGE…`` does some of the pages.

A page names its source between markers, ``<!-- begin SOURCE -->`` and ``<!-- end -->``. A source is
``support``, see there; a file of an example; or a Markdown file: a picture of its name beside it
replaces the guides'.
"""

from __future__ import annotations

import re
import shutil
import sys
from html import escape
from pathlib import Path

from flwr_perdl import strategies
from flwr_perdl.strategies import ProtocolStrategy

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    ROOT / "docs" / "which-algorithm.md",
    ROOT / "docs" / "from-fedavg.md",
    ROOT / "benchmarks" / "README.md",
    ROOT / "docs" / "security.md",
    ROOT / "docs" / "rivals.md",
    ROOT / "docs" / "use-in-your-project.md",
    ROOT / "docs" / "clustered-learning.md",
    ROOT / "docs" / "keep-a-part-private.md",
)
#: What a strategy may support: an option's name, or a word of its own, and the column's title.
SUPPORT = {
    "secure": "secure sums",
    "privacy": "privacy",
    "robust": "robust",
    "reuse_last_reply": "last replies",
    "missing": "missing entries",
    "clusters": "groups",
    "private": "private parts",
    "parts": "your own `Part`",
}
REGION = re.compile(r"(<!-- begin (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def content(source: str) -> str:
    """Return what a page shows of ``source``."""
    if source == "support":
        return support()
    if source.startswith("examples/"):
        return fenced(ROOT / source)
    picture = (ROOT / source).with_suffix(".png")
    copy = ROOT / "docs" / "images" / picture.name
    if picture.exists() and copy.exists():
        shutil.copy(picture, copy)
    return (ROOT / source).read_text()


def fenced(file: Path) -> str:
    """Return a file as a block of code."""
    language = {".py": "python"}.get(file.suffix, file.suffix[1:])
    return f"```{language}\n{file.read_text()}```\n"


def learners() -> dict[str, type[ProtocolStrategy]]:
    """Return the strategies that declare what they do not support, by name."""
    public = {name: getattr(strategies, name) for name in strategies.__all__}
    return {
        name: one
        for name, one in public.items()
        if isinstance(one, type) and issubclass(one, ProtocolStrategy) and one.unsupported
    }


def support(*, reasons: bool = False) -> str:
    """Tabulate what the strategies support; on the site with the reasons for what they do not."""

    def cell(strategy: type[ProtocolStrategy], name: str) -> str:
        if why := strategy.unsupported.get(name):
            return f'<abbr title="{escape(why)}">✗</abbr>' if reasons else "✗"
        return "✓ \\*" if any(name in need.given for need in strategy.needs) else "✓"

    lines = [["", *SUPPORT.values()], ["---"] * (len(SUPPORT) + 1)]
    for own, strategy in learners().items():
        page = f"reference/flwr_perdl.strategies/{own}.md#what-it-does-not-support"
        lines.append([f"[`{own}`]({page})", *(cell(strategy, name) for name in SUPPORT)])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    for page in [Path(given).resolve() for given in sys.argv[1:]] or PAGES:
        text = page.read_text()
        page.write_text(REGION.sub(lambda m: m[1] + content(m[2]) + m[3], text))
        print(f"{page.relative_to(ROOT)}: {len(REGION.findall(text))} regions")
