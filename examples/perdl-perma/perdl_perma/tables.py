"""Tables: those of files, and planted ones to try the app with."""

import sys
from pathlib import Path

import numpy as np


def read(path: Path) -> np.ndarray:
    """Return the rows of a CSV file, with or without a header, or ``X`` of an npz file."""
    if path.suffix == ".npz":
        with np.load(path) as file:
            return file["X"]
    rows = np.genfromtxt(path, delimiter=",", ndmin=2)
    rows = rows[~np.isnan(rows).all(axis=1)]  # a header is no number
    wrong = 1 + np.flatnonzero(np.isnan(rows).any(axis=0))
    if len(wrong):
        raise ValueError(f"{path} must have numbers only, got others in columns {wrong.tolist()}.")
    return rows


def planted(site: int) -> np.ndarray:
    """Return 200 rows, each of few of six patterns: three are every site's, three its own."""
    basis = np.linalg.qr(np.random.default_rng(0).standard_normal((12, 12)))[0]
    rng = np.random.default_rng([1, site])
    own = np.linalg.qr(rng.standard_normal((9, 9)))[0][:3] @ basis[3:]
    weights = rng.uniform(1, 2, (200, 6)) * rng.choice([-1, 0, 1], (200, 6), p=[0.15, 0.7, 0.15])
    return weights @ np.vstack([basis[:3], own]) + 0.05 * rng.standard_normal((200, 12))


if __name__ == "__main__":
    header = ",".join(f"x{column}" for column in range(12))
    folder, *names = sys.argv[1:]
    for site, name in enumerate(names):
        file = Path(folder) / f"{name}.csv"
        np.savetxt(file, planted(site), "%.6g", ",", header=header, comments="")
