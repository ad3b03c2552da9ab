"""NumPyClients of the protocols, and the way to a Message-API ClientApp."""

from flwr_perdl.clients.app import client_app
from flwr_perdl.clients.base import Member, PrivateState, private_shelf
from flwr_perdl.clients.dictionary import LearnerClient
from flwr_perdl.clients.diffusion import DiffusionClient
from flwr_perdl.clients.keep_private import keep_private
from flwr_perdl.clients.perma import DictionaryClient
from flwr_perdl.clients.personal import kept_local_atoms, local_atoms
from flwr_perdl.clients.regression import RegressionClient
from flwr_perdl.clients.steps import ProtocolClient, StepRequest, StepResult, step

__all__ = [
    "DictionaryClient",
    "DiffusionClient",
    "LearnerClient",
    "Member",
    "PrivateState",
    "ProtocolClient",
    "RegressionClient",
    "StepRequest",
    "StepResult",
    "client_app",
    "keep_private",
    "kept_local_atoms",
    "local_atoms",
    "private_shelf",
    "step",
]
