"""The papers' experiments: an application of `flwr_perdl`, which imports nothing of it."""

from perdl_experiments.runner import run_experiment

__all__ = ["run_experiment"]
