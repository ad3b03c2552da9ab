"""Clients of the protocols, and `client_app` for any Flower app."""

from typing import TYPE_CHECKING

from flwr_perdl.core.lazy import lazily

if TYPE_CHECKING:
    from flwr_perdl.clients.app import client_app
    from flwr_perdl.clients.at_site import adapt
    from flwr_perdl.clients.dictionary import LearnerClient
    from flwr_perdl.clients.dispatch import ProtocolClient, step
    from flwr_perdl.clients.kept_atoms import kept_local_atoms, local_atoms
    from flwr_perdl.clients.mixed_regression import RegressionClient
    from flwr_perdl.clients.neighbor_relay import DiffusionClient
    from flwr_perdl.clients.perma import DictionaryClient
    from flwr_perdl.clients.ridge import RidgeClient
    from flwr_perdl.parts.private import keep_private
    from flwr_perdl.protocol.client_state import Member, PrivateState, private_store
    from flwr_perdl.protocol.local import Local, StepRequest, StepResult

__all__ = [
    "DictionaryClient",
    "DiffusionClient",
    "LearnerClient",
    "Local",
    "Member",
    "PrivateState",
    "ProtocolClient",
    "RegressionClient",
    "RidgeClient",
    "StepRequest",
    "StepResult",
    "adapt",
    "client_app",
    "keep_private",
    "kept_local_atoms",
    "local_atoms",
    "private_store",
    "step",
]

__getattr__, __dir__ = lazily(__name__, __file__)
