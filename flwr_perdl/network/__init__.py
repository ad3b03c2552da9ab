"""Where nodes that talk to neighbors run: in memory, in Ray actors, on a Flower federation.

An algorithm of `flwr_perdl.diffusion` gives the same numbers on all three.
"""

from flwr_perdl._network._exchange import Run
from flwr_perdl._network.faults import Faults
from flwr_perdl._network.memory import InMemoryNetwork
from flwr_perdl._network.ray import RayNetwork
from flwr_perdl._network.sealed import make_key, public_key
from flwr_perdl.strategies.neighbor_relay import FlowerNetwork

__all__ = [
    "Faults",
    "FlowerNetwork",
    "InMemoryNetwork",
    "RayNetwork",
    "Run",
    "make_key",
    "public_key",
]
