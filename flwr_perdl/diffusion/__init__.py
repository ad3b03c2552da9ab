"""Learning by talking to neighbors only: topologies, dual inference, both diffusion learners."""

from flwr_perdl.diffusion.averaging import DiffusionAveraging
from flwr_perdl.diffusion.combine import Averaging, Inbox, Program
from flwr_perdl.diffusion.compression import RandomQuantization, TopK
from flwr_perdl.diffusion.data_diffusion import DataDiffusion
from flwr_perdl.diffusion.inference import exact_dual, infer, local_costs
from flwr_perdl.diffusion.model_diffusion import ModelDiffusion
from flwr_perdl.diffusion.objectives import (
    Biclustering,
    HuberNMF,
    NonnegativeMF,
    Objective,
    SparseSVD,
)
from flwr_perdl.diffusion.schedule import Schedule
from flwr_perdl.diffusion.topology import (
    CombinationMatrix,
    Topology,
    averaging_weights,
    metropolis_weights,
    push_weights,
    relative_degree_variance_weights,
)

__all__ = [
    "Averaging",
    "Biclustering",
    "CombinationMatrix",
    "DataDiffusion",
    "DiffusionAveraging",
    "HuberNMF",
    "Inbox",
    "ModelDiffusion",
    "NonnegativeMF",
    "Objective",
    "Program",
    "RandomQuantization",
    "Schedule",
    "SparseSVD",
    "TopK",
    "Topology",
    "averaging_weights",
    "exact_dual",
    "infer",
    "local_costs",
    "metropolis_weights",
    "push_weights",
    "relative_degree_variance_weights",
]
