"""Draw README's first picture, docs/images/hero-light.svg and hero-dark.svg: three questions.

    python docs/hero.py

Each row shows what is learned, and our method beside the strongest rivals. The numbers are those of
docs/gallery/results.json. The words of README and the home page follow.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from flwr_perdl.core.checks import Matrix
from perdl_experiments.plots import COLORS

DOCS = Path(__file__).resolve().parent
#: The picture of README; a dark page shows hero-dark.svg.
SHOWN = "docs/images/hero-light.svg"
#: Pixels: the whole, a row, and where the bars are. Text has at least 14 where it's shown as wide.
WIDTH, ROW, LEFT, TEXT = 420, 152, 142, 14
#: Text, less important text, our bars and the others'.
LOOKS = {
    "light": ("#1a1a1a", "#5a5a5a", COLORS[0], "#b9c6d3"),
    "dark": ("#e8e8e8", "#a9b1ba", "#58b0f2", "#4b5a68"),
}


class Panel(NamedTuple):
    """A question, what is drawn, and the methods, ours first, by their metrics in the gallery."""

    question: str
    drawing: str
    entry: str
    measure: str
    better: str
    digits: int
    methods: Mapping[str, str]


PANELS = (
    Panel(
        "Which part of a model is shared?",
        "intercepts",
        "parkinsons",
        "error, 42 patients",
        "lower",
        2,
        {
            "PersonalizedFedAvg": "error_personal-tuned",
            "mixed model, pooled": "error_intercepts-tuned",
            "FedAvg, fine-tuned": "error_fedavg-tuned",
        },
    ),
    Panel(
        "Which clients learn together?",
        "groups",
        "cifar-rotated",
        "accuracy, CIFAR-10",
        "higher",
        3,
        {
            "ClusteredFedAvg": "accuracy_turned_clustered-tuned",
            "IFCA, best of 5": "accuracy_turned_ifca-best",
            "FedAvg, fine-tuned": "accuracy_turned_tuned",
        },
    ),
    Panel(
        "No server, only neighbors?",
        "network",
        "forecast",
        "error, 12 stations",
        "lower",
        3,
        {
            "DiffusionAveraging": "error_exact",
            "FedAvg with a server": "error_fedavg",
            "random forest, pooled": "error_forest",
        },
    ),
)


def tile(pixels: Matrix, x: float, y: float, side: float, edge: str = "") -> str:
    """Return a small image in [0, 1], with a frame if it has a color."""
    written = BytesIO()
    Image.fromarray((255 * np.clip(pixels, 0, 1)).astype(np.uint8)).save(written, format="PNG")
    place = f"x='{x:.1f}' y='{y:.1f}' width='{side}' height='{side}'"
    data = b64encode(written.getvalue()).decode()
    image = (
        f"<image {place} style='image-rendering:pixelated' href='data:image/png;base64,{data}'/>"
    )
    return image + (f"<rect {place} fill='none' stroke='{edge}' stroke-width='2'/>" if edge else "")


def intercepts(color: str) -> Iterator[str]:
    """Yield clients' points about lines of one slope, each with an intercept of its own."""
    rng = np.random.default_rng(0)
    for i, hue in enumerate(("#2f8fd0", "#d9691a", "#2e9a4b")):
        top = 16 + 24 * i
        yield f"<path d='M4 {top + 24} L116 {top - 8}' stroke='{hue}' stroke-width='2.5'/>"
        for x in 12 + 16 * np.arange(7):
            y = top + 25 - 32 * x / 116 + rng.normal(0, 3.5)
            yield f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2.6' fill='{hue}'/>"
    yield text("private intercepts", 0, 108, color)


def groups(color: str) -> Iterator[str]:
    """Yield a digit as each of the four groups sees it, framed by what the server finds."""
    images = load_digits().images / 16
    for i, edge in enumerate(("#2f8fd0", "#d9691a", "#2e9a4b", "#c052ae")):
        for row, digit in enumerate((3, 5)):  # the first ten are 0 to 9
            yield tile(np.rot90(images[digit], i), 1 + 30.5 * i, 8 + 32 * row, 27, edge)
    yield text("groups it finds", 0, 96, color)


def network(color: str, n: int = 12) -> Iterator[str]:
    """Yield nodes and their links."""
    angles = 2 * np.pi * np.arange(n) / n
    places = np.stack([60 + 44 * np.sin(angles), 48 - 42 * np.cos(angles)], axis=1)
    links = [(i, (i + step) % n) for i in range(n) for step in (1, 2 + i % 2)[: 1 + i % 2]]
    for (x, y), (u, v) in ((places[i], places[j]) for i, j in links):
        at = f"x1='{x:.1f}' y1='{y:.1f}' x2='{u:.1f}' y2='{v:.1f}'"
        yield f"<line {at} stroke='#8593a3' stroke-width='1.5'/>"
    yield from (f"<circle cx='{x:.1f}' cy='{y:.1f}' r='5.5' fill='#2f8fd0'/>" for x, y in places)
    yield text("neighbors only", 0, 112, color)


def text(
    words: str, x: float, y: float, color: str, *, bold: bool = False, anchor: str = ""
) -> str:
    """Return a line of text."""
    look = f"fill='{color}'" + (" font-weight='700'" if bold else "")
    look += f" text-anchor='{anchor}'" if anchor else ""
    return f"<text x='{x}' y='{y}' {look}>{escape(words)}</text>"


def bars(panel: Panel, values: Mapping[str, float], look: tuple[str, ...]) -> Iterator[str]:
    """Yield a bar per method with its number, the first one ours."""
    color, muted, ours, other = look
    yield text(f"{panel.measure}, {panel.better} is better", 0, 14, muted)
    most, wide = max(values.values()), WIDTH - LEFT
    for i, (name, value) in enumerate(values.items()):
        y, shown = 36 + 31 * i, rounded(value, panel)
        yield text(name, 0, y, color if i else ours, bold=not i)
        yield text(shown, wide, y, color if i else ours, bold=not i, anchor="end")
        length = wide * value / most
        fill = other if i else ours
        yield f"<rect x='0' y='{y + 5}' width='{length:.1f}' height='6' rx='1' fill='{fill}'/>"


def rounded(value: float, panel: Panel) -> str:
    """Return a number as it's shown, halves rounded up as in README's table."""
    return f"{value + 1e-9:.{panel.digits}f}"


def measured(results: Mapping[str, Any], panel: Panel) -> dict[str, float]:
    """Return the medians of a panel's metrics, by the methods' names."""
    found = {}
    for name, reference in panel.methods.items():
        run, _, metric = reference.rpartition(":")
        found[name] = results[panel.entry][run or "defaults"]["metrics"][metric]["median"]
    return found


def draw(results: Mapping[str, Any], theme: str) -> str:
    """Return the picture: a row per question."""
    look = LOOKS[theme]
    drawings = {"intercepts": intercepts, "groups": groups, "network": network}
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {ROW * len(PANELS)}' "
        f"width='{WIDTH}' height='{ROW * len(PANELS)}' font-size='{TEXT}' "
        "font-family='system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif'>"
    ]
    for i, panel in enumerate(PANELS):
        parts.append(f"<g transform='translate(0 {ROW * i})'>")
        parts.append(f"<g font-size='16'>{text(panel.question, 0, 17, look[0], bold=True)}</g>")
        parts += ["<g transform='translate(0 32)'>", *drawings[panel.drawing](look[1]), "</g>"]
        shown = bars(panel, measured(results, panel), look)
        parts += [f"<g transform='translate({LEFT} 28)'>", *shown, "</g></g>"]
    return "\n".join([*parts, "</svg>\n"])


def words(results: Mapping[str, Any]) -> str:
    """Return what the picture says, for those who do not see it."""
    said = []
    for panel in PANELS:
        values = measured(results, panel).items()
        found = ", ".join(f"{name} {rounded(value, panel)}" for name, value in values)
        measure = f"{panel.measure[0].upper()}{panel.measure[1:]} ({panel.better} is better)"
        said.append(f"{panel.question} {measure}: {found}.")
    return " ".join(said)


def main() -> None:
    """Write the picture in both forms, and its words for those who do not see it."""
    results = json.loads((DOCS / "gallery" / "results.json").read_text())
    for theme in LOOKS:
        (DOCS / "images" / f"hero-{theme}.svg").write_text(draw(results, theme))
    for page, said in {
        DOCS.parent / "README.md": rf'(?<=<img alt=")[^"]*(?=" src="{SHOWN}")',
        DOCS / "index.md": r"(?<=!\[)[^]]+(?=\]\(images/hero-light)",
    }.items():
        page.write_text(re.sub(said, words(results), page.read_text()))


if __name__ == "__main__":
    main()
