"""From a Flower run config (``--run-config``) to an experiment and its options.

Flower refuses keys that ``[tool.flwr.app.config]`` does not list, so that all options of all
experiments are listed there; ``""`` stands for the experiment's own default. Keys have hyphens, as
all of Flower's; the names of options have underscores, and are taken as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perdl_experiments.studies import EXPERIMENTS

#: Keys that say how to run, not what, and their empty values.
_HOW: dict[str, Any] = {
    "experiment": "digits",
    "out": "",
    "resume": False,
    "overwrite": False,
}


def read_run_config(run_config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the experiment's name and the options that are set."""
    options = {
        key.replace("-", "_"): value
        for key, value in run_config.items()
        if key not in _HOW and value != ""
    }
    return str(run_config.get("experiment", "digits")), options


def to_key(option: str) -> str:
    """Return the key of an option."""
    return option.replace("_", "-")


def all_keys() -> dict[str, Any]:
    """Return every key that a run config may have, with its empty value."""
    federated = [one for one in EXPERIMENTS.values() if one.federated]
    options = {to_key(name): "" for experiment in federated for name in experiment.options}
    return {**_HOW, **options}
