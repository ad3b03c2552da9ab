"""The experiments by name: one module each."""

from __future__ import annotations

from flwr_perdl._checks import check_choice
from perdl_experiments.studies import (
    biclustering,
    comparison,
    denoise,
    digits,
    federations,
    global_atoms,
    images,
    inference,
    mixed_regression,
    novel_documents,
    patches,
    regression,
    separation,
    sharing,
    sites,
    synthetic,
    unmixing,
    video,
)
from perdl_experiments.studies._experiment import (
    Experiment,
    FederatedExperiment,
    Value,
    configure,
)

__all__ = ["EXPERIMENTS", "Experiment", "FederatedExperiment", "Value", "configure", "find"]

EXPERIMENTS: dict[str, Experiment] = {
    digits.NAME: digits,
    images.NAME: images,
    sites.NAME: sites,
    synthetic.NAME: synthetic,
    global_atoms.NAME: global_atoms,
    comparison.NAME: comparison,
    federations.NAME: federations,
    sharing.NAME: sharing,
    mixed_regression.NAME: mixed_regression,
    regression.NAME: regression,
    separation.NAME: separation,
    inference.NAME: inference,
    novel_documents.NAME: novel_documents,
    biclustering.NAME: biclustering,
    denoise.NAME: denoise,
    patches.NAME: patches,
    unmixing.NAME: unmixing,
    video.NAME: video,
}


def find(name: str) -> Experiment:
    """Return the experiment called ``name``; ValueError with all names if there is none."""
    return EXPERIMENTS[check_choice("experiment", name, EXPERIMENTS)]
