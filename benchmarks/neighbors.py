"""What nodes of `DiffusionAveraging` withstand: two neighbors in sixteen lie.

Digits on the exponential graph, softmax regression, 150 rounds of ATC: the accuracy of the worst
honest node, the median over three seeds, by lie (see `perdl_experiments.liars`) and rule. Writes
results/neighbors.md.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from flwr_perdl.diffusion import Topology
from flwr_perdl.diffusion.averaging import Averaged
from flwr_perdl.network import InMemoryNetwork
from perdl_experiments.liars import NEIGHBORS, LyingAveraging
from perdl_experiments.studies.decentralized import Config, Nodes

N_NODES, LIARS, SEEDS = 16, [3, 9], 3
RULES = {"mean": None, "clip": "clip", "trimmed": "trimmed"}


def worst(rule: str, attack: str | None, shards: int, seed: int) -> float:
    """Return the accuracy of the worst honest node."""
    options = SimpleNamespace(clients=N_NODES, shards=shards, step=0.5, local_steps=5)
    nodes = Nodes(cast("Config", options), seed)
    ...
