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
    "Config",
    "Experiment",
    "Value",
    "configure",
    "find",
    "one_federation",
]

#: Options that the command line has under their own names.
COMMON = ("clients", "rounds", "seed", "data")

_FILES = (
    "cameras",
    "stations",
    "digits",
    "images",
    "sites",
    "synthetic",
    "global_atoms",
    "comparison",
    "federations",
    "mixed_regression",
    "regression",
    "patients",
    "rotated_digits",
    "personal",
    "private",
    "inference",
    "novel_documents",
    "biclustering",
    "denoise",
    "patches",
    "unmixing",
    "decentralized",
    "forecast",
    "video",
)
EXPERIMENTS: dict[str, Experiment] = {one.name: one for one in map(load, _FILES)}


def find(name: str) -> Experiment:
    """Return the experiment called ``name``; ValueError with all names if there is none."""
    return EXPERIMENTS[check_name("experiment", name, EXPERIMENTS)]


def one_federation(experiment: Experiment) -> dict[str, Value]:
    """Return the options' defaults inside a Flower run, which is one federation."""
    return {"seeds": 1} if "seeds" in experiment.options else {}
