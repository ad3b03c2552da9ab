"""Bring measured figures into the guides: ``make docs-figures``.

``python docs/figures.py PAGE…`` does some of the pages.

A page names its source between markers, ``<!-- begin SOURCE -->`` and ``<!-- end -->``. A source is
``runs/NAME``, the tables of the experiment NAME with its defaults; ``gallery/NAME``, those of the
first run on the gallery's page NAME; ``comparisons/NAME``, metrics of that experiment with several
options, see ``COMPARISONS``; ``topologies`` and ``support``, see there; a file of an example; or a
Markdown file: a picture of its name beside it becomes one of the guides'. All but the gallery's and
these are made here.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flwr_perdl import strategies
from flwr_perdl.network import Topology, metropolis_weights
from flwr_perdl.strategies import ProtocolStrategy
from perdl_experiments import run_experiment
from perdl_experiments.pictures import networks
from perdl_experiments.render import markdown_table

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    ROOT / "docs" / "which-algorithm.md",
    ROOT / "docs" / "from-fedavg.md",
    ROOT / "benchmarks" / "README.md",
    ROOT / "docs" / "perma.md",
    ROOT / "docs" / "decentralized-learning.md",
    ROOT / "docs" / "groups-without-a-server.md",
    ROOT / "docs" / "model-diffusion.md",
    ROOT / "docs" / "security.md",
    ROOT / "docs" / "scale.md",
    ROOT / "docs" / "speed.md",
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
    "batches": "batches",
    "clusters": "groups",
    "private": "private parts",
}
REGION = re.compile(r"(<!-- begin (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

PAPER = {"matching": "paths", "aggregation": "mean", "min_support": 0}
AGGREGATIONS = ("statistics", "mean", "weighted", "median", "geometric-median", "trimmed")


class Comparison(NamedTuple):
    """An experiment with several options: a row per setting, a column per metric."""

    settings: Mapping[str, Mapping[str, str | int | float]]
    metrics: Mapping[str, str]


COMPARISONS = {
    "synthetic": Comparison(
        {
            f"{words}, {variant}": {"seeds": 40, **regime, **options}
            for words, regime in {
                "good start": {"start": "good"},
                "poor start": {"start": "poor"},
                "three clients with 20 samples": {"start": "good", "weak": 3},
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
        return tables(name)
    if kind == "gallery":
        stored = json.loads((ROOT / "docs" / "gallery" / "results.json").read_text())[name]
        return shown(next(iter(stored.values()))["tables"])
    if kind == "comparisons":
        settings, metrics = COMPARISONS[name]
        rows = []
        for words, options in settings.items():
            measured = run_experiment(name, options=options)["metrics"]
            rows.append([words, *(f"{measured[metric]:.3g}" for metric in metrics)])
        return markdown_table(["", *metrics.values()], rows)
    if kind == "topologies":
        return topologies()
    if kind == "support":
        return support()
    if kind == "examples":
        return fenced(ROOT / source)
    for picture in ((ROOT / source).with_suffix(suffix) for suffix in (".svg", ".png")):
        if picture.exists():
            shutil.copy(picture, ROOT / "docs" / "images")
    return (ROOT / source).read_text()


def fenced(file: Path) -> str:
    """Return a file as a block of code."""
    language = {".py": "python"}.get(file.suffix, file.suffix[1:])
    return f"```{language}\n{file.read_text()}```\n"


def topologies(n_nodes: int = 64, accuracy: float = 1e-3) -> str:
    """Compare the constructors: how far, how fast, at what price; keep a picture of some."""
    made = {
        "ring": Topology.ring(n_nodes),
        "grid, 8 x 8": Topology.grid(8, n_nodes // 8),
        "small world (4, .2)": Topology.small_world(n_nodes, 4, 0.2),
        "4-regular": Topology.k_regular(n_nodes, 4),
        "8-regular": Topology.k_regular(n_nodes, 8),
        "Erdos-Renyi (.15)": Topology.erdos_renyi(n_nodes, 0.15),
        "star": Topology.star(n_nodes),
        "complete": Topology.complete(n_nodes),
    }
    rows = []
    for name, topology in made.items():
        weights = metropolis_weights(topology)
        rest = np.eye(n_nodes) - 1 / n_nodes  # disagreement, whatever the nodes start with
        rounds = 0
        while np.linalg.norm(rest, 2) > accuracy:
            rest = weights.matrix @ rest
            rounds += 1
        rows.append(
            [
                name,
                str(topology.n_edges),
                str(topology.diameter),
                f"{weights.spectral_gap:.3f}",
                str(rounds),
                f"{2 * topology.n_edges * rounds:,}",
            ]
        )
    networks(
        {
            name: metropolis_weights(made[name])
            for name in ("ring", "grid, 8 x 8", "small world (4, .2)", "4-regular")
        }
    ).savefig(ROOT / "docs" / "images" / "topologies.png", dpi=100)
    return markdown_table(
        ["", "edges", "diameter", "spectral gap", f"rounds to {accuracy:g}", "messages"], rows
    )


def learners() -> dict[str, type[ProtocolStrategy]]:
    """Return the strategies that declare what they do not support, by name."""
    public = {name: getattr(strategies, name) for name in strategies.__all__}
    return {
        name: one
        for name, one in public.items()
        if isinstance(one, type) and issubclass(one, ProtocolStrategy) and one.unsupported
    }


def support() -> str:
    """Tabulate what the strategies support, with the reasons for what they do not."""
    notes: dict[str, int] = {}

    def cell(strategy: type[ProtocolStrategy], name: str) -> str:
        if name in strategy.unsupported:
            return f"no ({notes.setdefault(strategy.unsupported[name], len(notes) + 1)})"
        return "yes *" if any(name in need.given for need in strategy.needs) else "yes"

    rows = [[f"`{own}`", *(cell(s, name) for name in SUPPORT)] for own, s in learners().items()]
    reasons = "; ".join(f"({number}) {why}" for why, number in notes.items())
    said = "\\* not with every other option: the error says which."
    return f"{markdown_table(['', *SUPPORT.values()], rows)}\n{said}\nWhy not: {reasons}.\n"


def tables(name: str) -> str:
    """Run an experiment with its defaults and return its tables."""
    out = ROOT / "runs" / "figures" / name
    return shown(run_experiment(name, out=out, overwrite=True)["tables"])


def shown(found: Sequence[Mapping[str, Any]]) -> str:
    """Return an experiment's tables as Markdown."""
    parts = []
    for one in found:
        table = markdown_table(one["columns"], one["rows"])
        parts += [f"**{one['title']}**\n", table, f"{one['caption']}\n"]
    return "\n".join(parts)


if __name__ == "__main__":
    logging.getLogger("flwr").setLevel(logging.WARNING)
    for page in [Path(given).resolve() for given in sys.argv[1:]] or PAGES:
        text = page.read_text()
        page.write_text(REGION.sub(lambda m: m[1] + content(m[2]) + m[3], text))
        print(f"{page.relative_to(ROOT)}: {len(REGION.findall(text))} regions")
