"""Draw the stored ratios to other programs, ``ratios.png``, and list all in ``ratios.md``.

Ratios are medians of several turns; in brackets the range of these turns. ``make bench`` does this
at its end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from _measure import RESULTS
from matplotlib.figure import Figure

from perdl_experiments.plots import COLORS, SMALL, WIDTH
from perdl_experiments.render import markdown_table

#: Script and other program -> the task, as the picture has it.
RIVALS = {
    ("regression", "plain loops"): "FedX\nvs. plain loops",
    ("regression", "IFCA's plain loop"): "FedX\nvs. IFCA in a loop",
    ("clustered", "FedAvg"): "ClusteredFedAvg\nvs. FedAvg",
    ("large_models", "FedAvg of Flower"): "large models\nvs. FedAvg",
    ("perpca", "plain loop"): "PerPCA\nvs. plain loop",
    ("coding", "SPAMS"): "sparse coding\nvs. SPAMS (C++)",
    ("coding", "scikit-learn"): "sparse coding\nvs. scikit-learn",
    ("learners", "DictionaryLearning"): "dictionaries\nvs. scikit-learn",
    ("learners", "MiniBatchDictionaryLearning"): "dictionaries\nvs. scikit-learn, mini-batch",
    ("inference", "loop"): "dual inference\nvs. loop over agents",
    ("matching", "networkx"): "atom matching\nvs. networkx",
}

#: Of a script and what it divides by ours, each ratio with the range of its turns.
Groups = dict[tuple[str, str], list[tuple[float, list[float]]]]


def stored() -> dict[str, dict[str, Any]]:
    """Return the results of all benchmarks that have ratios, by script."""
    every = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    return {name: results for name, results in every.items() if results.get("ratios")}


def grouped(results: Mapping[str, Mapping[str, Any]]) -> Groups:
    """Return the ratios by script and by what is divided, the least first."""
    found: Groups = {}
    for script, of in results.items():
        for name, ratio in of["ratios"].items():
            group = found.setdefault((script, name.partition(" / ")[0]), [])
            group.append((ratio, of["ranges"][name]))
    return dict(sorted(found.items(), key=lambda one: min(one[1])))


def picture(groups: Groups) -> Figure:
    """Draw a dot for each ratio to another program, on a logarithmic axis."""
    figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
    axes = figure.add_subplot()
    shown = [key for key in groups if key in RIVALS]
    for row, key in enumerate(shown):
        ratios = np.array([ratio for ratio, _ in groups[key]])
        axes.hlines(row, ratios.min(), ratios.max(), color="0.8", lw=3, zorder=1)
        colors = [COLORS[int(ratio < 1)] for ratio in ratios]
        axes.scatter(ratios, np.full(len(ratios), row), s=22, color=colors, zorder=2)
    axes.set_yticks(range(len(shown)), [RIVALS[key] for key in shown], fontsize=SMALL)
    axes.set_xscale("log")
    axes.set_xlabel("their time over ours", fontsize=SMALL)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.invert_yaxis()
    axes.axvline(1, color="black", lw=0.8)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", alpha=0.25)
    return figure


def table(results: Mapping[str, Mapping[str, Any]], groups: Groups) -> str:
    """Return all ratios, the least first, and what was measured where, as Markdown."""
    rows: dict[bool, list[list[str]]] = {True: [], False: []}
    for (script, divided), found in groups.items():
        ends = [
            f"{ratio:.3g}" + (f" ({a:.3g} to {b:.3g})" if a < b else "")
            for ratio, (a, b) in (min(found), max(found))
        ]
        median = f"{np.median([ratio for ratio, _ in found]):.3g}"
        row = [f"`{script}.py`", divided, str(len(found)), median, *ends]
        rows[(script, divided) in RIVALS].append(row)
    where = []
    for script, of in results.items():
        machine, versions = of["machine"], of["versions"]
        packages = ", ".join(f"{package} {version}" for package, version in versions.items())
        system = f"{machine['platform'].partition('-')[0]}, {machine['cores']} cores"
        place = [system, machine["processor"]]
        where.append([f"`{script}.py`", (of["commit"] or "-")[:7], *place, packages])
    shown = [
        markdown_table(["script", what, "ratios", "median", "least", "greatest"], rows[rival])
        for rival, what in ((True, "other program / ours"), (False, "our own part or size / ours"))
    ]
    machines = markdown_table(["script", "commit", "machine", "processor", "versions"], where)
    return "\n".join([*shown, machines])


if __name__ == "__main__":
    found = stored()
    picture(grouped(found)).savefig(RESULTS / "ratios.png", dpi=180)
    (RESULTS / "ratios.md").write_text(table(found, grouped(found)))
