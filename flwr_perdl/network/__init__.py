"""The neighbor-message layer: the same algorithms in memory, on Ray actors, and on Flower."""

from importlib import import_module
from typing import Any

from flwr_perdl.network._exchange import Run
from flwr_perdl.network.faults import Faults
from flwr_perdl.network.memory import InMemoryNetwork
from flwr_perdl.network.ray import RayNetwork

__all__ = ["Faults", "FlowerNetwork", "InMemoryNetwork", "RayNetwork", "Run"]


def __getattr__(name: str) -> Any:
    """Import `FlowerNetwork`, which lives on a floor above, when it is asked for."""
    if name == "FlowerNetwork":
        return import_module("flwr_perdl.strategies.neighbor_relay").FlowerNetwork
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
