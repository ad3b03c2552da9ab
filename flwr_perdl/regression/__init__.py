"""Clustered mixed regression: the maths of FedMD and FedX + clustering, NumPy and SciPy only."""

from __future__ import annotations

from flwr_perdl.regression.anchors import cluster_anchors
from flwr_perdl.regression.batched import Clients, simulate, simulate_rounds
from flwr_perdl.regression.clustering import (
    assign,
    lemma1_filter,
    model_error,
)
from flwr_perdl.regression.exchange import Answers, Ask, Descent, State
from flwr_perdl.regression.features import FeatureMap, Polynomial
from flwr_perdl.regression.losses import SQUARED, LogisticLoss, Loss, SquaredLoss
from flwr_perdl.regression.moments import (
    left_subspace,
    moment_step,
    orthonormal,
    residual_moment,
    sketch,
)
from flwr_perdl.regression.phases import MomentDescent, Refinement, TwoPhase
from flwr_perdl.regression.statistics import choose_mixture, fit_mixture, sufficient_statistics
from flwr_perdl.regression.two_phase import two_phases

__all__ = [
    "SQUARED",
    "Answers",
    "Ask",
    "Clients",
    "Descent",
    "FeatureMap",
    "LogisticLoss",
    "Loss",
    "MomentDescent",
    "Polynomial",
    "Refinement",
    "SquaredLoss",
    "State",
    "TwoPhase",
    "assign",
    "choose_mixture",
    "cluster_anchors",
    "fit_mixture",
    "left_subspace",
    "lemma1_filter",
    "model_error",
    "moment_step",
    "orthonormal",
    "residual_moment",
    "simulate",
    "simulate_rounds",
    "sketch",
    "sufficient_statistics",
    "two_phases",
]
