"""How many of a client's samples a server reads that sends what it likes, by option.

It sends client 0 atoms that turn a little from round to round, and all others the same atoms in
every round. What changes from one round to the next, in a reply or in a sum, is then due to client
0's samples, and where one sample alone changes its codes it is that sample. A sample is read if a
row of such a difference is at a cosine above .95 with it. Run from the repository's root:
``python benchmarks/active.py``; it writes ``benchmarks/results/active.md``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message

from flwr_perdl.clients import DictionaryClient, client_app
from flwr_perdl.core.checks import Matrix
from flwr_perdl.dictionary import MODLearner, normalize_atoms
from flwr_perdl.privacy import Noise
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import PerMA

CLIENTS, SAMPLES, FEATURES, ATOMS, ROUNDS = 4, 40, 16, 8, 100
#: How far the victim's atoms turn in a round.
TURN = 0.015
_RNG = np.random.default_rng(0)
PARTS = normalize_atoms(_RNG.standard_normal((CLIENTS * SAMPLES, FEATURES)))
START = normalize_atoms(_RNG.standard_normal((ATOMS, FEATURES)))
OPTIONS: dict[str, dict[str, Any]] = {
    "the defaults": {},
    "`secure=True`": {"secure": True},
    **{f"`privacy=Noise(epsilon={e})`": {"privacy": Noise(epsilon=e)} for e in (8, 2)},
}


def make_client(context: Context) -> DictionaryClient:
    """Return a client with its 40 samples."""
    own = np.split(PARTS, CLIENTS)[int(context.node_config["partition-id"])]
    return DictionaryClient(own, MODLearner(ATOMS, n_nonzero=2), context)


class Deceiving(InProcessGrid):
    """A network whose server sends client 0 atoms of its own."""

    turned = START

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Exchange messages, client 0's changed."""
        asked = list(messages)
        for message in asked:
            if "arrays" not in message.content.array_records:
                continue
            if message.metadata.dst_node_id == min(self.get_node_ids()):
                rng = np.random.default_rng(int(message.content["config"]["server-round"]))
                step = TURN * rng.standard_normal(START.shape)
                self.turned = normalize_atoms(self.turned + step)
                message.content["arrays"] = ArrayRecord([self.turned])
        return super().send_and_receive(asked, timeout=timeout)


class Curious(PerMA):
    """A server that keeps what it receives, and whose own atoms stand still."""

    def _aggregate(self, replies: Any, *asked: Any) -> Matrix:
        """Keep the first reply: client 0's, or with sums what all replies hold."""
        self.__dict__.setdefault("kept", []).append(next(iter(replies.values())).arrays[0])
        return START


def read(rounds: int = ROUNDS, **options: Any) -> int:
    """Return how many of client 0's 40 samples the server reads.

    Parameters
    ----------
    rounds : int, default 100
        Requests to each client.
    **options
        PerMA's.
    """
    strategy = Curious(ATOMS, fraction_evaluate=0.0, min_clients=CLIENTS - 1, **options)
    grid = Deceiving(client_app(make_client, privacy=options.get("privacy")), CLIENTS)
    strategy.start(grid, ArrayRecord([START]), num_rounds=rounds, verbose="quiet")
    sums = np.array(strategy.__dict__["kept"])[:, :, -FEATURES:]
    closest = np.zeros(SAMPLES)
    for share in np.linspace(0, 1, 11):  # of the sum before, which noised sums have in them
        changes = np.diff(sums[1:] - share * sums[:-1], axis=0).reshape(-1, FEATURES)
        rows = normalize_atoms(changes[changes.any(axis=1)])
        closest = np.maximum(closest, np.abs(rows @ PARTS[:SAMPLES].T).max(axis=0, initial=0))
    return int((closest > 0.95).sum())


def main() -> None:
    """Measure, print and write."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    lines = [f"| option | samples read, of {SAMPLES} |", "|---|---:|"]
    lines += [f"| {name} | {read(**options)} |" for name, options in OPTIONS.items()]
    table = "\n".join(lines) + "\n"
    (Path(__file__).parent / "results" / "active.md").write_text(table)
    sys.stdout.write(table)


if __name__ == "__main__":
    main()
