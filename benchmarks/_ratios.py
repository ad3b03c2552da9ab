"""Draw five of the stored ratios, ``ratios.svg``, and list all in ``ratios.md``, with where from.

Ratios are medians of several turns; in brackets, and as thin lines, the range of these turns.
``make bench`` does this at its end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from textwrap import fill
from typing import Any

import numpy as np
from _measure import RESULTS
from matplotlib.figure import Figure

from perdl_experiments.outcome import vector
from perdl_experiments.plots import COLORS, SMALL, WIDTH
from perdl_experiments.render import markdown_table

#: What is drawn: script and ratio -> what is computed, and whose time is divided by ours.
SHOWN = {
    ("matching", "networkx / chain"): "shortest paths for matching: networkx",
    (
        "coding",
        "scikit-learn / ours, images, 5,000 x 784, 100 atoms: pursuit, k = 20",
    ): "orthogonal matching pursuit: scikit-learn",
    ("inference", "loop / float64, atc, p = 0.1"): "sparse coding over a network: loop over agents",
    (
        "learners",
        "MiniBatchDictionaryLearning / MOD, digits",
    ): "digits to equal error: scikit-learn",
    (
        "coding",
        "SPAMS / ours, images, 5,000 x 784, 100 atoms: lasso, penalty 1",
    ): "lasso: SPAMS",
}


def stored() -> dict[str, dict[str, Any]]:
    """Return the results of all benchmarks that have ratios, by script."""
    every = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    return {name: results for name, results in every.items() if results.get("ratios")}


def turns(of: Mapping[str, Any], name: str) -> tuple[float, list[float]]:
    """Return a ratio and the range of its turns."""
    return of["ratios"][name], of["ranges"][name]


def picture(results: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draw a bar from 1 for each of `SHOWN`, on a logarithmic axis."""
    found = [(*turns(results[script], name), words) for (script, name), words in SHOWN.items()]
    ratios, ends, words = zip(*sorted(found), strict=True)
    figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    axes = figure.add_subplot()
    rows = np.arange(len(ratios))
    colors = [COLORS[ratio < 1] for ratio in ratios]
    axes.barh(rows, np.subtract(ratios, 1), left=1, height=0.6, color=colors)
    axes.hlines(rows, *np.transpose(ends), color="black", lw=0.8)
    for row, (ratio, (least, greatest)) in enumerate(zip(ratios, ends, strict=True)):
        axes.annotate(
            f"{ratio:.3g}",
            (greatest if ratio >= 1 else least, row),
            xytext=(4 if ratio >= 1 else -4, 0),
            textcoords="offset points",
            ha="left" if ratio >= 1 else "right",
            va="center",
            fontsize=SMALL,
        )
    axes.set_yticks(rows, [fill(one, 22) for one in words], fontsize=SMALL)
    axes.set(
        xscale="log", xlim=(min(ratios) / 4, max(ratios) * 3), xlabel="its time, in times of ours"
    )
    axes.invert_yaxis()
    axes.axvline(1, color="black", lw=0.8)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", alpha=0.25)
    return figure


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return all ratios, the least first, and what was measured where, as Markdown."""
    rows, where = [], []
    for script, of in results.items():
        groups: dict[str, list[tuple[float, list[float]]]] = {}
        for name in of["ratios"]:
            groups.setdefault(name.partition(" / ")[0], []).append(turns(of, name))
        for rival, found in groups.items():
            ends = [
                f"{ratio:.3g}" + (f" ({a:.3g} to {b:.3g})" if a < b else "")
                for ratio, (a, b) in (min(found), max(found))
            ]
            median = f"{np.median([ratio for ratio, _ in found]):.3g}"
            rows.append((min(found), [f"`{script}.py`", rival, str(len(found)), median, *ends]))
        machine, versions = of["machine"], of["versions"]
        packages = ", ".join(f"{package} {version}" for package, version in versions.items())
        system = f"{machine['platform'].partition('-')[0]}, {machine['cores']} cores"
        place = [system, machine["processor"]]
        where.append([f"`{script}.py`", (of["commit"] or "-")[:7], *place, packages])
    heads = ["script", "what is divided by ours", "ratios", "median", "least", "greatest"]
    measured = markdown_table(["script", "commit", "machine", "processor", "versions"], where)
    return f"{markdown_table(heads, [row for _, row in sorted(rows)])}\n{measured}"


if __name__ == "__main__":
    found = stored()
    (RESULTS / "ratios.svg").write_bytes(vector(picture(found)))
    (RESULTS / "ratios.md").write_text(table(found))
