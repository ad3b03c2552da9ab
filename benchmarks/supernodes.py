"""Ten SuperNodes on this machine, one of them killed every five rounds.

Run from the repository's root: ``python benchmarks/supernodes.py``; it writes
``benchmarks/results/supernodes.md``. A killed node (SIGKILL, with all that it started) is started
again at once with its ``state-dir``. The same run in process, where nobody is killed, says what
the result should be. About a quarter of an hour on two cores.
"""

from __future__ import annotations

import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from _deployment import Deployment
from _measure import RESULTS

from perdl_experiments import run_experiment
from perdl_experiments.data import planted_clients
from perdl_experiments.report import read_results

NODES, ROUNDS, EVERY = 10, 20, 5
#: Seconds until the run must be over.
PATIENCE = 3600.0
OPTIONS = {"n_atoms": 6, "n_global": 3, "learner": "orthogonal"}


def disturb(deployment: Deployment, out: Path) -> list[tuple[int, int]]:
    """Kill a node every five rounds and start it again; return the rounds and the nodes."""
    killed = []
    for node, round_ in enumerate(range(EVERY, ROUNDS, EVERY)):
        saved = out / "checkpoints" / f"round-{round_:06d}.npz"
        while not saved.exists():
            time.sleep(0.05)
        deployment.kill(deployment.nodes[node])
        deployment.start_node(node)
        killed.append((round_, node))
    return killed


def learn(folder: Path) -> tuple[dict[str, Any], dict[str, Any], list[tuple[int, int]]]:
    """Return the results in process and on SuperNodes, and who was killed after which round."""
    data = folder / "data"
    data.mkdir()
    made = planted_clients(
        np.random.default_rng(0), [6] * NODES, [200] * NODES, 3, n_features=8, noise=0.05
    )
    for node, X in enumerate(made.samples):
        np.savez(data / f"site-{node}.npz", X=X)
    run_experiment(
        "sites",
        clients=NODES,
        rounds=ROUNDS,
        data=str(data),
        out=folder / "here",
        options=OPTIONS,
    )

    def node_config(node: int) -> dict[str, Any]:
        return {"data": str(data / f"site-{node}.npz"), "state-dir": str(folder / "states")}

    there = folder / "there"
    given = {"experiment": "sites", "clients": NODES, "rounds": ROUNDS, "out": str(there)}
    with (
        Deployment(folder / "run", NODES, node_config=node_config, tell=print) as deployment,
        ThreadPoolExecutor(1) as helper,
    ):
        disturbed = helper.submit(disturb, deployment, there)
        deployment.run({**given, **OPTIONS}, timeout=PATIENCE)
        killed = disturbed.result()
    return read_results(folder / "here"), read_results(there), killed


def table(here: dict[str, Any], there: dict[str, Any], killed: list[tuple[int, int]]) -> str:
    """Return the results as Markdown."""
    who = "; ".join(f"node {node} after round {round_}" for round_, node in killed)
    names = [name for name in here["metrics"] if name.startswith("mse_")]
    lines = [
        f"{NODES} SuperNodes, {there['rounds']} of {ROUNDS} rounds done, {there['seconds']:.0f} s; "
        f"killed: {who}.",
        "",
        "| | in process, nobody killed | on SuperNodes | ratio |",
        "| --- | ---: | ---: | ---: |",
        *(
            f"| `{name}` | {here['metrics'][name]:.5f} | {there['metrics'][name]:.5f} "
            f"| {there['metrics'][name] / here['metrics'][name]:.4f} |"
            for name in names
        ),
        "",
        "What the report says of them:",
        "",
        *(f"- {note}" for note in there["notes"]),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        found = table(*learn(Path(name)))
    (RESULTS / "supernodes.md").write_text(found)
    sys.stdout.write(found)
