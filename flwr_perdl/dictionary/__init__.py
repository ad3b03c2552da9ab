"""Personalized dictionary learning: the maths of PerMA."""

from __future__ import annotations

from flwr_perdl.dictionary.aggregation import aggregate_atoms, local_statistics
from flwr_perdl.dictionary.atoms import dictionary_distance, normalize_atoms, principal_directions
from flwr_perdl.dictionary.coding import (
    Lasso,
    hard_threshold,
    lasso,
    omp,
    reconstruct,
    remainder,
    soft_threshold,
    sparse_code,
)
from flwr_perdl.dictionary.learners import (
    AUTO_PENALTY,
    AUTO_THRESHOLD,
    GradientLearner,
    KSVDLearner,
    LassoLearner,
    Learner,
    MODLearner,
    OrthogonalLearner,
)
from flwr_perdl.dictionary.matching import Matching, align_to_global, global_matching
from flwr_perdl.dictionary.polar import polar_factor
from flwr_perdl.dictionary.refinement import refine_local
from flwr_perdl.dictionary.warm_start import WarmStart, iterate, warm_start

__all__ = [
    "AUTO_PENALTY",
    "AUTO_THRESHOLD",
    "GradientLearner",
    "KSVDLearner",
    "Lasso",
    "LassoLearner",
    "Learner",
    "MODLearner",
    "Matching",
    "OrthogonalLearner",
    "WarmStart",
    "aggregate_atoms",
    "align_to_global",
    "dictionary_distance",
    "global_matching",
    "hard_threshold",
    "iterate",
    "lasso",
    "local_statistics",
    "normalize_atoms",
    "omp",
    "polar_factor",
    "principal_directions",
    "reconstruct",
    "refine_local",
    "remainder",
    "soft_threshold",
    "sparse_code",
    "warm_start",
]
