"""Draw README's first picture, docs/images/hero.png: three questions, what is learned, who wins.

    python docs/hero.py

The numbers are those of docs/gallery/results.json; the atoms are learned here, from scikit-learn's
digits as sites of the experiment `cameras` see them. README's words for the picture follow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from sklearn.datasets import load_digits

from flwr_perdl.core.checks import Matrix
from flwr_perdl.estimators import PersonalizedDictionaryLearning
from flwr_perdl.network import Topology
from perdl_experiments.plots import COLORS

DOCS = Path(__file__).resolve().parent
#: How README shows the picture; the site inverts a chart on a dark page.
SHOWN = "docs/images/hero.png#chart"
#: Points of all text: nine pixels where the picture is 420 wide.
TEXT = 14.5
#: Images of a site in the usual view and in its own, as in the experiment.
USUAL, OWN = 60, 30
CAMERAS = {
    "turned": lambda stack: np.rot90(stack, axes=(1, 2)),
    "flipped": lambda stack: stack[:, ::-1],
    "mirrored": lambda stack: stack[:, :, ::-1],
}
LOSER, WINNER = "#b9c6d3", COLORS[0]
ARROWS = {"lower": "↓", "higher": "↑"}


def learned() -> tuple[Matrix, list[Matrix]]:
    """Return the shared atoms of sites with a camera each, and each one's own, most used first."""
    stack = load_digits().images / 16
    stack = stack[np.random.default_rng(0).permutation(len(stack))]
    parts = np.split(stack[: len(CAMERAS) * (USUAL + OWN)], len(CAMERAS))
    sites = [
        np.vstack([part[:USUAL], camera(part[USUAL:])]).reshape(USUAL + OWN, -1)
        for part, camera in zip(parts, CAMERAS.values(), strict=True)
    ]
    model = PersonalizedDictionaryLearning(32, 20).fit(sites)
    used = [np.abs(model.transform(X, i)).sum(axis=0) for i, X in enumerate(sites)]
    shared = np.argsort(-sum(one[:20] for one in used))
    own = [D[np.argsort(-one[20:])] for D, one in zip(model.local_atoms_, used, strict=True)]
    return model.global_atoms_[shared], own


def tile(axes: Axes, pixels: Matrix, left: float, top: float, side: float, edge: str = "") -> None:
    """Draw a small square image at a place of the axes."""
    extent = (left, left + side, top - side, top)
    axes.imshow(pixels, cmap="gray", extent=extent, interpolation="nearest", zorder=1)
    if edge:
        corners = [(left, top), (left + side, top), (left + side, top - side), (left, top - side)]
        axes.fill(*zip(*corners, strict=True), fill=False, ec=edge, lw=3, zorder=2)


def scaled(atom: Matrix) -> Matrix:
    """Return an atom as an image, its greatest entry white."""
    image: Matrix = (atom * np.sign(atom[np.abs(atom).argmax()])).reshape(8, 8)
    return image


def draw_atoms(axes: Axes) -> None:
    """Draw shared atoms, and below them those of three sites."""
    shared, own = learned()
    axes.text(0, 5.02, "shared by all sites", fontsize=TEXT, va="bottom")
    for i in range(12):
        tile(axes, scaled(shared[i]), 1.02 * (i % 6), 4.95 - 1.01 * (i // 6), 0.94)
    for i, (name, D) in enumerate(zip(CAMERAS, own, strict=True)):
        for j in range(4):
            tile(axes, scaled(D[j]), 2.08 * i + 0.96 * (j % 2), 1.98 - 0.97 * (j // 2), 0.9)
        axes.text(2.08 * i, 2.06, name, fontsize=TEXT, va="bottom", color=COLORS[1])


def draw_kinds(axes: Axes) -> None:
    """Draw a digit of clients of four kinds, framed by what the server finds."""
    images = load_digits().images
    for i, color in enumerate(COLORS[:4]):
        for row, digit in enumerate((3, 5, 4)):  # the first ten are 0 to 9
            tile(axes, np.rot90(images[digit], i), 1.57 * i, 4.95 - 1.57 * row, 1.35, color)
    axes.text(0, 5.02, "the four kinds it finds", fontsize=TEXT, va="bottom")


def draw_ring(axes: Axes, n: int = 16) -> None:
    """Draw nodes and their links."""
    angles = 2 * np.pi * np.arange(n) / n
    places = np.stack([3.05 + 2.3 * np.sin(angles), 2.6 + 2.3 * np.cos(angles)], axis=1)
    k, j = Topology.ring(n).adjacency.nonzero()
    for one, other in zip(k, j, strict=True):
        axes.plot(*places[[one, other]].T, color="#8593a3", lw=2.5, zorder=1)
    axes.scatter(*places.T, s=230, color=WINNER, zorder=2)
    axes.text(3.05, 2.6, "16 nodes\non a ring", fontsize=TEXT, ha="center", va="center")


def draw_bars(axes: Axes, what: str, better: str, values: Mapping[str, float], digits: int) -> None:
    """Draw a bar per method with its number, the first one ours."""
    most = max(values.values())
    axes.text(0, -1.12, what, fontsize=TEXT, va="center", color="#5a5a5a")
    axes.text(0, -0.66, f"{ARROWS[better]} {better} is better", fontsize=TEXT, va="center")
    for at, (name, value) in enumerate(values.items()):
        look: dict[str, Any] = {"fontsize": TEXT, "va": "center"}
        if not at:
            look |= {"weight": "bold", "color": WINNER, "fontsize": TEXT - 0.8}
        axes.text(0, at, name, **look)
        axes.text(most, at, f"{value:.{digits}f}".lstrip("0"), ha="right", **look)
        axes.barh(at + 0.4, value, 0.2, color=LOSER if at else WINNER)
    axes.set(xlim=(0, most), ylim=(len(values) - 0.35, -1.45))


#: Question, drawing, gallery entry, what is measured, which is better, its digits, and the methods:
#: ours first.
PANELS = (
    (
        "Clients share a part,\ndiffer in the rest?",
        draw_atoms,
        "cameras",
        "error on new images",
        "lower",
        4,
        {"PerMA": "error_perma", "alone": "error_alone", "all shared": "error_shared"},
    ),
    (
        "Clients of several\nunknown kinds?",
        draw_kinds,
        "rotated-digits",
        "accuracy",
        "higher",
        3,
        {
            "ClusteredFedAvg": "accuracy_one-shot",
            "alone": "accuracy_alone",
            "FedAvg": "accuracy_fedavg",
        },
    ),
    (
        "No server,\nonly neighbors?",
        draw_ring,
        "decentralized",
        "worst node's accuracy",
        "higher",
        3,
        {
            "DiffusionAveraging": "accuracy_worst_ring",
            "FedAvg with a server": "accuracy_fedavg",
            "alone": "accuracy_alone",
        },
    ),
)


def measured(
    results: Mapping[str, Any], entry: str, methods: Mapping[str, str]
) -> dict[str, float]:
    """Return the medians of an entry's metrics, by the methods' names."""
    found = results[entry]["defaults"]["metrics"]
    return {name: found[metric]["median"] for name, metric in methods.items()}


def draw(results: Mapping[str, Any]) -> Figure:
    """Return the picture: a column per question."""
    figure = Figure(figsize=(9, 5.3))
    FigureCanvasAgg(figure)
    for i, (question, drawing, entry, what, better, digits, methods) in enumerate(PANELS):
        left, width = 0.006 + 0.346 * i, 0.296
        figure.text(left, 0.985, question, fontsize=TEXT + 1, weight="bold", va="top")
        above = figure.add_axes((left, 0.405, width, 0.472))
        drawing(above)
        above.set(xlim=(-0.05, 6.1), ylim=(0, 5.7), aspect="equal", anchor="NW")
        below = figure.add_axes((left, 0.01, width, 0.385))
        draw_bars(below, what, better, measured(results, entry, methods), digits)
        for axes in (above, below):
            axes.set_axis_off()
    return figure


def words(results: Mapping[str, Any]) -> str:
    """Return what the picture says, for those who do not see it."""
    said = []
    for question, _, entry, what, better, digits, methods in PANELS:
        values = measured(results, entry, methods).items()
        found = ", ".join(f"{name} {value:.{digits}f}" for name, value in values)
        measure = f"{what.capitalize()} ({better} is better)"
        said.append(f"{' '.join(question.split())} {measure}: {found}.")
    return " ".join(said)


def main() -> None:
    """Write the picture, and README's words for those who do not see it."""
    results = json.loads((DOCS / "gallery" / "results.json").read_text())
    drawn = BytesIO()
    draw(results).savefig(drawn, dpi=200)
    colors = Image.open(drawn).convert("RGB").quantize(256)  # a third of the bytes
    colors.save(DOCS / "images" / "hero.png", optimize=True)
    readme, shown = DOCS.parent / "README.md", re.compile(rf"!\[[^]]*\](?=\({SHOWN}\))")
    readme.write_text(shown.sub(f"![{words(results)}]", readme.read_text()))


if __name__ == "__main__":
    main()
