"""Tables: those of files, and planted ones to try the app with."""

import csv
import sys
from pathlib import Path

import numpy as np


def read(path: Path) -> np.ndarray:
    """Return the rows of a CSV file, with or without a header, or ``X`` of an npz file."""
    if path.suffix == ".npz":
        with np.load(path) as file:
            return file["X"]
    with path.open(newline="", encoding="utf-8-sig") as file:
        lines = [line for line in csv.reader(file) if any(line)]
    if len({len(line) for line in lines}) != 1:
        raise ValueError(f"{path} must have as many columns in every line, separated by commas.")
    rows = np.array([[number(cell) for cell in line] for line in lines])
    words = np.isnan(rows[0])
    if words.all() or (words.any() and np.isfinite(rows[1:, words]).all()):
        rows = rows[1:]  # without the header, in which a name may be a number, as a year is
    wrong = 1 + np.flatnonzero(~np.isfinite(rows).all(axis=0))
    if len(wrong):
        raise ValueError(
            f"{path} must have numbers only, separated by commas, got others in columns "
            f"{wrong.tolist()}."
        )
    return rows


def number(cell: str) -> float:
    """Return the number in a cell, NaN where there is none."""
    try:
        return float(cell)
    except ValueError:
        return np.nan


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
