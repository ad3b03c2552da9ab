"""Regression of many clients: FedMD and FedX + clustering, and ridge regression from sums.

NumPy and SciPy only.
"""

from __future__ import annotations

from flwr_perdl.regression.fedmd import cluster_anchors
from flwr_perdl.regression.losses import LogisticLoss, Loss, Polynomial, SquaredLoss, model_error
from flwr_perdl.regression.mixed_model import fit_mixed_model
from flwr_perdl.regression.moments import moment_step, residual_moment
from flwr_perdl.regression.phases import Refinement, TwoPhase
from flwr_perdl.regression.ridge import RidgeModel
from flwr_perdl.regression.statistics import choose_mixture, sufficient_statistics
from flwr_perdl.regression.two_phase import answer, two_phases

__all__ = [
    "LogisticLoss",
    "Loss",
    "Polynomial",
    "Refinement",
    "RidgeModel",
    "SquaredLoss",
    "TwoPhase",
    "answer",
    "choose_mixture",
    "cluster_anchors",
    "fit_mixed_model",
    "model_error",
    "moment_step",
    "residual_moment",
    "sufficient_statistics",
    "two_phases",
]
