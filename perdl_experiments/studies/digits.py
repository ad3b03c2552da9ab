"""Training with imbalanced data: Section 5.2 and Fig. 3, on scikit-learn's handwritten digits."""

from __future__ import annotations

from perdl_experiments.studies import images
from perdl_experiments.studies._experiment import Value
from perdl_experiments.studies.images import (
    ERROR,
    FIGURES,
    SOURCE,
    client,
    federations,
    run,
    strategy,
)

__all__ = [
    "ABOUT",
    "DEFAULTS",
    "ERROR",
    "FIGURES",
    "HELP",
    "NAME",
    "SOURCE",
    "client",
    "federations",
    "run",
    "strategy",
]

NAME = "digits"
ABOUT = "PerMA on handwritten digits, every client with one digit in the majority"
_OWN: dict[str, Value] = {
    "rounds": 40,
    "samples_per_client": 100,
    "n_atoms": 48,
    "n_global": 24,
    "methods": "main",
}
DEFAULTS: dict[str, Value] = {
    name: _OWN.get(name, value) for name, value in images.DEFAULTS.items() if name != "data"
}
HELP: dict[str, str] = {name: text for name, text in images.HELP.items() if name != "data"}
