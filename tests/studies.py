"""A study run in this process, without files: what it returns and what its page says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from perdl_experiments.engine import federate
from perdl_experiments.outcome import Outcome, to_results
from perdl_experiments.render import Table
from perdl_experiments.studies import configure, find


class Ran(NamedTuple):
    """An outcome, and the metrics, tables and notes that the study's page makes of it."""

    outcome: Outcome
    results: dict[str, Any]

    @property
    def metrics(self) -> dict[str, float]:
        return self.results["metrics"]

    @property
    def tables(self) -> list[Table]:
        return [Table(**table) for table in self.results["tables"]]

    @property
    def notes(self) -> list[str]:
        return self.results["notes"]

    @property
    def figures(self) -> list[str]:
        return [one["file"] for one in self.results["figures"]]

    @property
    def arrays(self) -> Mapping[str, Any]:
        return self.outcome.arrays

    @property
    def curves(self) -> Mapping[str, Any]:
        return self.outcome.curves


def compute_all(name: str, compute: Callable[[], Any], *, of: int = 0) -> Any:
    """Keep nothing."""
    return compute()


class Kept(dict[str, Any]):
    """Keeps the parts of a run, and gives them to a later one, which computes none."""

    whole = False

    def __call__(self, name: str, compute: Callable[[], Any], *, of: int = 0) -> Any:
        assert name in self or not self.whole, "a resumed run computes nothing again"
        return self[name] if name in self else self.setdefault(name, compute())


def config_of(name: str, **options: Any) -> Any:
    """Return the typed config of an experiment."""
    return configure(find(name), options=options)


def run_study(name: str, keep: Any = compute_all, **options: Any) -> Ran:
    """Run a study with these options."""
    experiment, config = find(name), config_of(name, **options)
    study: Any = experiment.code
    if experiment.federated:
        outcome = study.run(config, partial(federate, study), keep)
    else:
        outcome = study.run(config, keep)
    return Ran(outcome, to_results(outcome, experiment.page, config=config.options))


def save(folder: Path, **arrays: Any) -> str:
    """Write arrays to a data file in a folder, and return its path."""
    path = folder / "data.npz"
    np.savez(path, **arrays)
    return str(path)
