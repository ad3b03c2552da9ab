"""The papers' experiments: an application of `flwr_perdl`, which imports nothing of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdl_experiments.runner import run_experiment

__all__ = ["run_experiment"]


def __getattr__(name: str) -> Any:
    """Import what is asked for; until then the command line has not loaded Flower and NumPy."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from perdl_experiments import runner

    return getattr(runner, name)
