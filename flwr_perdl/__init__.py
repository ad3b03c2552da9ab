"""Federated dictionary learning, clustered regression and decentralized learning on Flower."""

__version__ = "0.1.0"
