"""Where nodes that talk to neighbors run: in memory, in Ray actors, on a Flower federation.

An algorithm of `flwr_perdl.diffusion` gives the same numbers on all three.
"""

from typing import TYPE_CHECKING, Any

from flwr_perdl.diffusion.combine import Run
from flwr_perdl.network.faults import Faults
from flwr_perdl.network.memory import InMemoryNetwork
from flwr_perdl.network.ray import RayNetwork

if TYPE_CHECKING:
    from flwr_perdl.strategies.neighbor_relay import FlowerNetwork

__all__ = ["Faults", "FlowerNetwork", "InMemoryNetwork", "RayNetwork", "Run"]


def __getattr__(name: str) -> Any:
    """Return `FlowerNetwork`, which stands beside its strategy, above this room."""
    if name != "FlowerNetwork":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flwr_perdl.strategies import neighbor_relay

    return neighbor_relay.FlowerNetwork
