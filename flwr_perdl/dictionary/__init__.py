"""Personalized dictionary learning: the maths of PerMA."""

from __future__ import annotations

from flwr_perdl.dictionary.aggregation import (
    Aggregation,
    aggregate_atoms,
    aggregate_statistics,
    average_dictionaries,
    common_start,
    local_statistics,
)
from flwr_perdl.dictionary.assumptions import Assumptions, assumptions
from flwr_perdl.dictionary.atoms import (
    AtomMatch,
    atom_distances,
    dictionary_distance,
    match_atoms,
    normalize_atoms,
)
from flwr_perdl.dictionary.coding import (
    Lasso,
    hard_threshold,
    lasso,
    omp,
    reconstruct,
    soft_threshold,
    sparse_code,
)
from flwr_perdl.dictionary.components import Factors, RobustComponents, hmf, robust_components
from flwr_perdl.dictionary.learners import (
    CodeSums,
    GradientLearner,
    KSVDLearner,
    LassoLearner,
    Learner,
    MODLearner,
    OrthogonalLearner,
    atom_support,
    update_weights,
)
from flwr_perdl.dictionary.matching import Alignment, Matching, align_to_global, global_matching
from flwr_perdl.dictionary.perpca import PersonalizedPCA, personalized_pca
from flwr_perdl.dictionary.polar import polar_factor
from flwr_perdl.dictionary.refinement import refine_local
from flwr_perdl.dictionary.spectral import spectral_start
from flwr_perdl.dictionary.warm_start import WarmStart, iterate, warm_start

__all__ = [
    "Aggregation",
    "Alignment",
    "Assumptions",
    "AtomMatch",
    "CodeSums",
    "Factors",
    "GradientLearner",
    "KSVDLearner",
    "Lasso",
    "LassoLearner",
    "Learner",
    "MODLearner",
    "Matching",
    "OrthogonalLearner",
    "PersonalizedPCA",
    "RobustComponents",
    "WarmStart",
    "aggregate_atoms",
    "aggregate_statistics",
    "align_to_global",
    "assumptions",
    "atom_distances",
    "atom_support",
    "average_dictionaries",
    "common_start",
    "dictionary_distance",
    "global_matching",
    "hard_threshold",
    "hmf",
    "iterate",
    "lasso",
    "local_statistics",
    "match_atoms",
    "normalize_atoms",
    "omp",
    "personalized_pca",
    "polar_factor",
    "reconstruct",
    "refine_local",
    "robust_components",
    "soft_threshold",
    "sparse_code",
    "spectral_start",
    "update_weights",
    "warm_start",
]
