"""A study run in this process, without files: what it returns and what its page says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse
from scipy.ndimage import gaussian_filter
from sklearn.datasets import make_biclusters

from perdl_experiments.documents import Documents, planted_documents
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


def save(folder: Path, file: str = "data.npz", **arrays: Any) -> str:
    """Write arrays to a data file in a folder, and return its path."""
    path = folder / file
    np.savez(path, **arrays)
    return str(path)


# Small data ----------------------------------------------------------------------------------


def subjects() -> dict[str, Any]:
    """Return 24 subjects of three types in 45 genes, each gene with a level of its own."""
    rng = np.random.default_rng(3)
    X, rows, _ = make_biclusters((24, 45), 3, minval=1, maxval=2, random_state=1)
    X = X + 0.6 * rng.standard_normal(X.shape) + rng.uniform(5, 9, 45)
    return {"X": X, "y": rows.argmax(axis=0)}


def materials() -> dict[str, Any]:
    """Return the pixels of three materials in bands of rows, mixed where they meet."""
    rng, side = np.random.default_rng(0), 12
    endmembers = rng.random((3, 20)) + 0.1
    row = np.indices((side, side))[0].ravel() / (side - 1)
    shares = np.maximum(1 - np.abs(2 * row[:, None] - [0, 1, 2]), 0)
    return {"X": shares @ endmembers, "shape": [side, side], "endmembers": endmembers}


def slopes(seed: int = 0) -> dict[str, Any]:
    """Thirty clients, the even ones with opposite slopes to the odd ones, features of any scale."""
    rng = np.random.default_rng(seed)
    client = np.repeat(np.arange(30), rng.integers(20, 60, 30))
    X = rng.standard_normal((len(client), 3)) * [1.0, 100.0, 0.01] + [5.0, 0.0, 1.0]
    slopes = np.where(client % 2, 1.0, -1.0)[:, None] * [1.0, 0.01, 50.0]
    y = 3 + np.sum((X - [5.0, 0.0, 1.0]) * slopes, axis=1) + 0.3 * rng.standard_normal(len(client))
    return {"X": X, "y": y, "client": np.array([f"c{i:02}" for i in client])}


def mixed() -> dict[str, Any]:
    """Return rows of five clients, each with an intercept and slopes around common ones."""
    rng, k, n, d = np.random.default_rng(0), 5, 40, 3
    who, X = np.repeat(np.arange(k), n), rng.standard_normal((k * n, d))
    theta = rng.standard_normal(d) + 0.3 * rng.standard_normal((k, d))
    y = np.sum(X * theta[who], axis=1) + rng.standard_normal(k)[who]
    return {"X": X, "y": y + 0.5 * rng.standard_normal(k * n), "client": who}


def weather() -> dict[str, Any]:
    """Return two years' hours of two quantities at three stations under the same weather."""
    rng, n = np.random.default_rng(0), 730 * 24
    slow = 0.05 * np.cumsum(rng.standard_normal((n, 2)), axis=0)
    noise = 0.3 * rng.standard_normal((3, n, 2))
    return {"X": np.exp(np.sin(slow - 0.05 * np.roll(slow, 24, axis=0)) + noise)}


def clip(seed: int, *, n_frames: int = 14, size: int = 48, noise: float = 0.02) -> dict[str, Any]:
    """Return gray frames, mask and background: squares cross a texture, the light falls."""
    rng = np.random.default_rng(seed)
    grain = rng.standard_normal((2, size, size))
    scene = 0.45 + 0.1 * gaussian_filter(grain[0], 1) + 0.4 * gaussian_filter(grain[1], 4)
    mask = np.zeros((n_frames, size, size), dtype=bool)
    frames = np.tile(scene, (n_frames, 1, 1))
    for t in range(n_frames):
        for row, speed in ((size // 8, 5), (size * 5 // 8, -4)):
            columns = np.arange(speed * t + row, speed * t + row + size // 5) % size
            mask[t][np.ix_(np.arange(row, row + size // 5), columns)] = True
    frames[mask] = 0.95
    light = np.linspace(1, 0.8, n_frames)[:, None, None]
    noisy = frames * light + noise * rng.standard_normal(frames.shape)
    return {"X": np.clip(noisy, 0, 1), "mask": mask, "background": scene * light}


def news(seed: int = 0, **options: Any) -> Documents:
    """Return 370 documents of twelve topics."""
    given = {"n_documents": 370, "n_topics": 12, "n_terms": 800, "block": 40, **options}
    return planted_documents(np.random.default_rng(seed), **given)


def counted(counts: Any, y: Any, **more: Any) -> dict[str, Any]:
    """Return the arrays of a file of documents, as the manual tells users to write them."""
    rows = sparse.csr_array(counts)
    parts = {"data": rows.data, "indices": rows.indices, "indptr": rows.indptr}
    return {**parts, "shape": rows.shape, "format": b"csr", "y": y, **more}
