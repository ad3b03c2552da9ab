"""Federations in one process: a Flower grid without Ray, and splits of data over clients."""

from flwr_perdl.simulations.grid import InProcessGrid

__all__ = ["InProcessGrid"]
