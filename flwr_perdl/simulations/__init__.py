"""Experiments, and the engines that they run on."""

from flwr_perdl.simulations.grid import InProcessGrid
from flwr_perdl.simulations.runner import run_experiment

__all__ = ["InProcessGrid", "run_experiment"]
