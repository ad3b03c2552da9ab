"""Randomness for code of one's own: one seed, and a generator per (seed, partition, round).

``spawn(seed, partition, round_)`` draws the same numbers on every engine. Draws that are not a
client's have "partitions" of their own, listed here.
"""

from flwr_perdl._random import DATA, EVALUATION, FAILURES, SAMPLING, SERVER, spawn

__all__ = ["DATA", "EVALUATION", "FAILURES", "SAMPLING", "SERVER", "spawn"]
