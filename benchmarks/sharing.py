"""How well `n_global="auto"` chooses, on data of natural sites.

``python benchmarks/sharing.py FOLDER`` with the folder of the data files. A dictionary of 24 atoms
per site is learned with 1, 6, 12, 18 and 24 of them shared, and with "auto"; further samples are
rebuilt of four atoms each. The table has medians over three seeds: the best of the five numbers by
these samples, what "auto" shares, and its mean squared error over that of the best number (1.03:
3 % higher). Writes results/sharing.md. About ten minutes.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from flwr_perdl.core.checks import Matrix
from flwr_perdl.estimators import PersonalizedDictionaryLearning
from perdl_experiments.data import hourly_days
from perdl_experiments.render import markdown_table

SEEDS, N_ATOMS, N_NONZERO, TEST = range(3), 24, 4, 150
NUMBERS = (1, 6, 12, 18, 24)
POLLUTANTS = ("PM2.5", "SO2", "NO2", "CO", "O3")
#: Of each site: samples to learn from, and further ones.
Sites = list[tuple[Matrix, Matrix]]


def days(folder: Path, rng: np.random.Generator, n: int, *names: str) -> Sites:
    """Return days of Beijing's stations: concentrations and rain as logarithms."""
    with np.load(file := folder / "beijing.npz") as arrays:
        columns = list(arrays["columns"])
    own = hourly_days(str(file))[..., [columns.index(name) for name in names]]
    if not {"TEMP", "PRES", "DEWP"} & {*names}:
        own = np.log1p(own)
    return [drawn(rng, n, X[~np.isnan(X).any(axis=(1, 2))], (0, 1)) for X in own]


def windows(folder: Path, rng: np.random.Generator, share: float) -> Sites:
    """Return people's windows of a phone's sensors."""
    with np.load(folder / "phones18.npz") as file:
        X, client = file["X"].astype(np.float64), file["client"]
    X = np.where(np.isnan(X), np.nanmean(X, axis=0), X)
    people = [X[client == one] for one in np.unique(client)]
    return [drawn(rng, int(share * len(own)), own, 0) for own in people]


def digits(folder: Path, rng: np.random.Generator, n: int) -> Sites:
    """Return scikit-learn's digits, a site for each."""
    X, y = load_digits(return_X_y=True)
    X = (X - X.mean(axis=0)) / 8
    own = [rng.permutation(X[y == one]) for one in range(10)]
    return [(one[:n], one[n : n + 80]) for one in own]


def drawn(
    rng: np.random.Generator, n: int, X: Matrix, axis: int | tuple[int, int]
) -> tuple[Matrix, Matrix]:
    """Return a site's samples at the scale of those to learn from."""
    train, test, _ = np.split(X[rng.permutation(len(X))], [n, n + TEST])
    mean, scale = train.mean(axis=axis), train.std(axis=axis)
    scale = np.where(scale > 0, scale, 1)
    train, test = ((part - mean) / scale for part in (train, test))
    return train.reshape(len(train), -1), test.reshape(len(test), -1)


#: Most were at hand when "auto" was given its number of rounds; the last two were not.
TASKS: dict[str, Callable[[Path, np.random.Generator], Sites]] = {
    "Beijing, temperature, 40 days": lambda *at: days(*at, 40, "TEMP"),
    "... with the dew point": lambda *at: days(*at, 40, "TEMP", "DEWP"),
    "... air pressure": lambda *at: days(*at, 40, "PRES"),
    "... rain": lambda *at: days(*at, 40, "RAIN"),
    "... wind": lambda *at: days(*at, 40, "WSPM"),
    "... five pollutants": lambda *at: days(*at, 40, *POLLUTANTS),
    "... five pollutants, 20 days": lambda *at: days(*at, 20, *POLLUTANTS),
    "... temperature, ozone, dew point": lambda *at: days(*at, 40, "TEMP", "O3", "DEWP"),
    "... nitrogen dioxide, 150 days": lambda *at: days(*at, 150, "NO2"),
    "activities, 30 % of the windows": partial(windows, share=0.3),
    "activities, 60 %": partial(windows, share=0.6),
    "digits, one per site, 30 images": partial(digits, n=30),
    "Beijing, sulfur dioxide and wind, 60 days": lambda *at: days(*at, 60, "SO2", "WSPM"),
    "... carbon monoxide, 30 days": lambda *at: days(*at, 30, "CO"),
}


def learned(sites: Sites, n_global: int | str, seed: int) -> tuple[int, float]:
    """Return the number of shared atoms, and the mean squared error of further samples."""
    model = PersonalizedDictionaryLearning(N_ATOMS, n_global, n_nonzero=N_NONZERO, seed=seed)
    model.fit([train for train, _ in sites])
    errors = [
        np.mean((model.reconstruct(test, client=i) - test) ** 2)
        for i, (_, test) in enumerate(sites)
    ]
    return len(model.global_atoms_), float(np.mean(errors))


def row(name: str, folder: Path) -> Sequence[str]:
    """Return a task's row."""
    found = []
    for seed in SEEDS:
        sites = TASKS[name](folder, np.random.default_rng(seed))
        found.append([learned(sites, n, seed) for n in (*NUMBERS, "auto")])
    shared, errors = np.moveaxis(np.array(found), 2, 0)
    *fixed, chosen = np.median(errors, axis=0)
    best, number = int(np.argmin(fixed)), ", ".join(f"{n:.0f}" for n in shared[:, -1])
    print(f"{name}: {chosen / fixed[best]:.3f}", flush=True)
    return [name, str(NUMBERS[best]), number, f"{chosen / fixed[best]:.3f}"]


def main() -> None:
    """Run all tasks, and write the table."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows = [row(name, Path(sys.argv[1])) for name in TASKS]
    heads = ["sites", "best number of 24", '"auto", by seed', "error over the best"]
    text = markdown_table(heads, rows)
    (Path(__file__).parent / "results" / "sharing.md").write_text(text)


if __name__ == "__main__":
    main()
