"""Flower Strategies, one file per protocol."""

from flwr_perdl.privacy.secure_server import SecureMean
from flwr_perdl.protocol.combine import Combine
from flwr_perdl.protocol.options import Options, ServerOptions, ServerSettings
from flwr_perdl.protocol.report import RoundReport, client_report
from flwr_perdl.protocol.request import Protocol, Replies, Request, TooFewReplies
from flwr_perdl.protocol.strategy import ProtocolStrategy, await_nodes
from flwr_perdl.strategies.averaging import DictionaryAveraging
from flwr_perdl.strategies.clustered import ClusteredFedAvg, Clusters
from flwr_perdl.strategies.legacy import as_legacy
from flwr_perdl.strategies.mixed_regression import FedMD, FedX, OneShotClustering
from flwr_perdl.strategies.neighbor_relay import FlowerNetwork, NeighborRelay
from flwr_perdl.strategies.perma import PerMA
from flwr_perdl.strategies.perpca import PerPCA

__all__ = [
    "ClusteredFedAvg",
    "Clusters",
    "Combine",
    "DictionaryAveraging",
    "FedMD",
    "FedX",
    "FlowerNetwork",
    "NeighborRelay",
    "OneShotClustering",
    "Options",
    "PerMA",
    "PerPCA",
    "Protocol",
    "ProtocolStrategy",
    "Replies",
    "Request",
    "RoundReport",
    "SecureMean",
    "ServerOptions",
    "ServerSettings",
    "TooFewReplies",
    "as_legacy",
    "await_nodes",
    "client_report",
]
