"""Clustered mixed regression: the maths of FedMD and FedX + clustering, NumPy and SciPy only."""

from __future__ import annotations

from flwr_perdl.regression.fedmd import cluster_anchors
from flwr_perdl.regression.losses import LogisticLoss, Loss, Polynomial, SquaredLoss, model_error
from flwr_perdl.regression.moments import moment_step, residual_moment
from flwr_perdl.regression.phases import Refinement, TwoPhase
from flwr_perdl.regression.statistics import choose_mixture, sufficient_statistics
from flwr_perdl.regression.two_phase import answer, two_phases

__all__ = [
    "LogisticLoss",
    "Loss",
    "Polynomial",
    "Refinement",
    "SquaredLoss",
    "TwoPhase",
    "answer",
    "choose_mixture",
    "cluster_anchors",
    "model_error",
    "moment_step",
    "residual_moment",
    "sufficient_statistics",
    "two_phases",
]
