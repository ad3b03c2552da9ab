"""The experiments by name: one module each."""

from __future__ import annotations

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
    check_name,
    configure,
    meaning,
)

__all__ = [
    "COMMON",
    "EXPERIMENTS",
    "Experiment",
    "FederatedExperiment",
    "Value",
    "configure",
    "find",
    "meaning",
    "one_federation",
]

#: Options that the command line has under their own names.
COMMON = ("clients", "rounds", "seed", "data")

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
    return EXPERIMENTS[check_name("experiment", name, EXPERIMENTS)]


def one_federation(experiment: Experiment) -> dict[str, Value]:
    """Return the options' defaults inside a Flower run, which is one federation."""
    return {"seeds": 1} if "seeds" in experiment.DEFAULTS else {}
