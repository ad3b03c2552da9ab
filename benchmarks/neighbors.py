"""What nodes of `DiffusionAveraging` withstand: two of sixteen lie (see `benchmarks/_liars.py`).

Experiment `decentralized` on the exponential graph, 150 rounds of ATC: the accuracy of the worst
honest node, medians over three seeds, by lie and rule. Writes results/neighbors.md.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
from _liars import NEIGHBORS, among_liars

from perdl_experiments.studies import configure, find

RULES = {"mean": None, "clip": "clip", "trimmed": "trimmed"}
LIES = {
    "nobody lies": None,
    "1e99": "huge",
    "NaN": "nan",
    "a bias of 1e6": "bias",
    "ten times the step, reversed": "flip",
    "a common push of 1.5 standard deviations": "push",
}


def table(shards: int) -> str:
    """Return a line per lie, for images dealt at random (0), or so many shards of sorted ones."""
    config = configure(find("decentralized"), options={"method": "atc", "shards": shards})
    lines = [f"| | {' | '.join(RULES)} |", "| --- |" + " ---: |" * len(RULES)]
    for name, attack in LIES.items():
        found = [
            np.median([among_liars(config, seed, rule, attack) for seed in config.each_seed])
            for rule in RULES.values()
        ]
        lines.append(f"| {name} | {' | '.join(f'{accuracy:.3f}' for accuracy in found)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    assert set(filter(None, LIES.values())) == set(NEIGHBORS)
    logging.getLogger("flwr_perdl").setLevel(logging.ERROR)
    text = f"Two digits per node:\n\n{table(2)}\n\nImages dealt at random:\n\n{table(0)}\n"
    (Path(__file__).parent / "results" / "neighbors.md").write_text(text)
    print(text)
