"""Federations in one process: a Flower grid without Ray, and data splits."""

from flwr_perdl.simulations.grid import InProcessGrid
from flwr_perdl.simulations.partition import Partition, imbalanced_partition, natural_partition

__all__ = ["InProcessGrid", "Partition", "imbalanced_partition", "natural_partition"]
