"""The networks: the same algorithms in memory, on Ray actors, and on Flower.

`FlowerNetwork` drives a strategy and stands in `flwr_perdl.strategies.neighbor_relay`; the others
are in `flwr_perdl._network`, below the clients, who read and write its messages.
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
