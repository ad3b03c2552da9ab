"""Draw the stored ratios of all benchmarks: ``ratios.png``, and ``ratios.md`` with where from.

``make bench`` does this at its end.
"""

from __future__ import annotations

import json
from typing import Any

from _measure import RESULTS
from matplotlib.figure import Figure

from perdl_experiments.plots import COLORS


def stored() -> dict[str, dict[str, Any]]:
    """Return the results of all benchmarks that have ratios, by script."""
    every = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    return {name: results for name, results in every.items() if results.get("ratios")}


def picture(results: dict[str, dict[str, Any]]) -> Figure:
    """Draw a bar per ratio, from 1, on a logarithmic axis, script by script."""
    counts = [len(of["ratios"]) for of in results.values()]
    figure = Figure(figsize=(10, 0.21 * sum(counts) + 0.5 * len(counts)), layout="constrained")
    panels = figure.subplots(len(counts), 1, sharex=True, squeeze=False, height_ratios=counts)
    for axes, (name, of), color in zip(
        panels[:, 0], results.items(), COLORS * len(counts), strict=False
    ):
        ratios = of["ratios"]
        axes.barh(list(ratios), [ratio - 1 for ratio in ratios.values()], left=1, color=color)
        for row, ratio in enumerate(ratios.values()):
            axes.annotate(
                f"{ratio:.3g}",
                (ratio, row),
                xytext=(3 if ratio >= 1 else -3, 0),
                textcoords="offset points",
                ha="left" if ratio >= 1 else "right",
                va="center",
                fontsize=7,
            )
        axes.set(xscale="log", ylim=(len(ratios) - 0.4, -0.6))
        axes.set_title(f"{name}.py", loc="left", fontsize=9, fontweight="bold")
        axes.tick_params(axis="y", labelsize=7, length=0)
        axes.axvline(1, color="black", lw=0.8)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.grid(axis="x", alpha=0.25)
    every = [ratio for of in results.values() for ratio in of["ratios"].values()]
    axes.set(xlim=(min(every) / 2, max(every) * 2), xlabel="ratio of times: larger is better")
    return figure


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return what was measured where, as Markdown."""
    lines = [
        "| script | ratios | commit | machine | versions |",
        "| --- | ---: | --- | --- | --- |",
    ]
    for name, of in results.items():
        machine, versions = of["machine"], of["versions"]
        where = f"{machine['platform'].partition('-')[0]}, {machine['cores']} cores"
        with_ = ", ".join(f"{package} {version}" for package, version in versions.items())
        commit = (of["commit"] or "-")[:7]
        lines.append(f"| `{name}.py` | {len(of['ratios'])} | {commit} | {where} | {with_} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    found = stored()
    picture(found).savefig(RESULTS / "ratios.png", dpi=80)
    (RESULTS / "ratios.md").write_text(table(found))
