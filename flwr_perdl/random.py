"""Random numbers for your own code: one seed, and a generator per (seed, partition, round).

``spawn(seed, partition, round_)`` draws the same numbers on every engine. Draws that are not a
client's have "partitions" of their own, listed here.
"""

from __future__ import annotations

import numpy as np

from flwr_perdl.core.checks import check_count

__all__ = ["DATA", "FAILURES", "SERVER", "spawn"]

#: "Partitions" whose draws are not a client's: the protocol's at the server, the choice of the
#: clients that train and that evaluate, the making and splitting of experiments' data, who
#: fails in an experiment's round, and random pairs of nodes.
SERVER = 2**32 - 1
SAMPLING = 2**32 - 2
DATA = 2**32 - 3
EVALUATION = 2**32 - 4
FAILURES = 2**32 - 5
PAIRS = 2**32 - 6


def spawn(seed: int, partition: int = SERVER, round_: int = 0) -> np.random.Generator:
    """Return the generator of ``(seed, partition, round_)``, the same on every engine.

    Parameters
    ----------
    seed : int
        The run's one seed, at least 0.
    partition : int
        The client's partition id; the server's draws by default.
    round_ : int
        Communication round, 0 for what happens before the first.

    Returns
    -------
    numpy.random.Generator

    Examples
    --------
    >>> from flwr_perdl.random import spawn
    >>> bool(spawn(0, partition=3).integers(10) == spawn(0, partition=3).integers(10))
    True
    """
    seed = check_count("seed", seed)
    key = check_count("partition", partition), check_count("round_", round_)
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
