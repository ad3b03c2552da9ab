"""Learning without a server: topologies, learners, and networks of nodes.

A `Program` gives the same numbers in memory (`InMemoryNetwork`) and on a Flower federation
(`flwr_perdl.strategies.NeighborRelay`).
"""

from typing import TYPE_CHECKING

from flwr_perdl.core.lazy import lazily

if TYPE_CHECKING:
    from flwr_perdl.network.averaging_in_memory import diffusion_averaging
    from flwr_perdl.network.combine import Averaging, Inbox, Program, Run
    from flwr_perdl.network.compression import RandomQuantization, TopK
    from flwr_perdl.network.data_diffusion import DataDiffusion
    from flwr_perdl.network.exchange import InMemoryNetwork
    from flwr_perdl.network.inference import exact_dual, infer, local_costs
    from flwr_perdl.network.model_diffusion import ModelDiffusion
    from flwr_perdl.network.objectives import (
        Biclustering,
        HuberNMF,
        NonnegativeMF,
        Objective,
        SparseSVD,
    )
    from flwr_perdl.network.schedule import Faults, Schedule
    from flwr_perdl.network.topology import (
        CombinationMatrix,
        Topology,
        metropolis_weights,
        push_weights,
        relative_degree_variance_weights,
    )

__all__ = [
    "Averaging",
    "Biclustering",
    "CombinationMatrix",
    "DataDiffusion",
    "Faults",
    "HuberNMF",
    "InMemoryNetwork",
    "Inbox",
    "ModelDiffusion",
    "NonnegativeMF",
    "Objective",
    "Program",
    "RandomQuantization",
    "Run",
    "Schedule",
    "SparseSVD",
    "TopK",
    "Topology",
    "diffusion_averaging",
    "exact_dual",
    "infer",
    "local_costs",
    "metropolis_weights",
    "push_weights",
    "relative_degree_variance_weights",
]

__getattr__, __dir__ = lazily(__name__, __file__)
