"""Randomness: one seed, and a generator of its own for every (seed, partition, round)."""

from __future__ import annotations

import numpy as np

#: The "partition" whose draws are the server's own.
SERVER = 2**32 - 1


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
    """
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(partition, round_)))
