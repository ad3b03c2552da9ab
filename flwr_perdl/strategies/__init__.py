"""Flower strategies: what to share, with whom, and without a server."""

from flwr_perdl.privacy.secure_server import SecureMean
from flwr_perdl.protocol.options import ServerOptions, ServerSettings
from flwr_perdl.protocol.part import Part
from flwr_perdl.protocol.records import Replies
from flwr_perdl.protocol.report import RoundReport, client_report
from flwr_perdl.protocol.request import Combine, Protocol, Request, TooFewReplies
from flwr_perdl.protocol.roster import await_nodes
from flwr_perdl.protocol.strategy import ProtocolStrategy
from flwr_perdl.strategies._models import Adam, Momentum, Yogi
from flwr_perdl.strategies._own_models import Learned
from flwr_perdl.strategies.clustered import ClusteredFedAvg
from flwr_perdl.strategies.diagnosis import Diagnosed, Diagnosis
from flwr_perdl.strategies.diffusion_averaging import DiffusionAveraging
from flwr_perdl.strategies.ditto import Ditto
from flwr_perdl.strategies.mixed_regression import FedMD, FedX, OneShotClustering
from flwr_perdl.strategies.neighbor_relay import NeighborRelay
from flwr_perdl.strategies.perma import PerMA
from flwr_perdl.strategies.personalized import PersonalizedFedAvg
from flwr_perdl.strategies.ridge import FederatedRidge

__all__ = [
    "Adam",
    "ClusteredFedAvg",
    "Combine",
    "Diagnosed",
    "Diagnosis",
    "DiffusionAveraging",
    "Ditto",
    "FedMD",
    "FedX",
    "FederatedRidge",
    "Learned",
    "Momentum",
    "NeighborRelay",
    "OneShotClustering",
    "Part",
    "PerMA",
    "PersonalizedFedAvg",
    "Protocol",
    "ProtocolStrategy",
    "Replies",
    "Request",
    "RoundReport",
    "SecureMean",
    "ServerOptions",
    "ServerSettings",
    "TooFewReplies",
    "Yogi",
    "await_nodes",
    "client_report",
]
