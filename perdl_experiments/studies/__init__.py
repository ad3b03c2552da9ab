"""The experiments by name: a TOML file each, and the module of its name or the one it extends."""

from __future__ import annotations

from perdl_experiments.studies._experiment import (
    Config,
    Experiment,
    Value,
    check_name,
    configure,
    load,
)

__all__ = [
    "COMMON",
    "EXPERIMENTS",
    "TOPICS",
    "Config",
    "Experiment",
    "Value",
    "configure",
    "find",
    "one_federation",
]

#: Options that the command line has under their own names.
COMMON = ("clients", "rounds", "seed", "data")

#: The studies' files by topic, in the order in which users see them.
_FILES = {
    "Personalized dictionaries": (
        *("cameras", "stations", "digits", "images", "complete", "sites", "video"),
        *("private", "synthetic", "global_atoms", "comparison", "federations"),
    ),
    "Personalized models of any kind": ("personal", "patients", "people"),
    "Groups of clients": ("rotated_digits", "mixed_regression", "regression"),
    "Without a server": (
        *("decentralized", "forecast", "inference", "novel_documents", "biclustering"),
        *("denoise", "patches", "unmixing"),
    ),
}
TOPICS: dict[str, list[Experiment]] = {
    topic: list(map(load, files)) for topic, files in _FILES.items()
}
EXPERIMENTS: dict[str, Experiment] = {
    one.name: one for experiments in TOPICS.values() for one in experiments
}


def find(name: str) -> Experiment:
    """Return the experiment called ``name``; ValueError with all names if there is none."""
    return EXPERIMENTS[check_name("experiment", name, EXPERIMENTS)]


def one_federation(experiment: Experiment) -> dict[str, Value]:
    """Return the options' defaults inside a Flower run, which is one federation."""
    return {"seeds": 1} if "seeds" in experiment.options else {}
