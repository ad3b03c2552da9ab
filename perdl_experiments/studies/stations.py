"""Natural sites with signals, such as weather stations: what their dictionaries share.

A sample is a day of a station: 24 hours of several quantities. A site has a few days to train
with, others to choose by, and others again, on which two errors are measured: of days rebuilt from
``n_nonzero`` atoms, and of entries that were hidden and are filled in from the rest of the day.

================  ================================================================================
method            what it is
================  ================================================================================
``perma``         `PerMA`: some atoms shared, the others each site's own; how many is chosen
``alone``         local training, five times the iterations
``shared``        `PerMA` with all atoms shared
``tuned``         ``shared``, fine-tuned at each site
``averaging``     one dictionary, averaged in every round from a common start
``either``        half as many atoms of ``alone`` and of ``shared`` each: per day the one that
                  rebuilds the visible entries better, at the same storage (and one bit per day)
``both``          the atoms of these two together
``pooled``        scikit-learn's dictionary of all sites' days in one place
``gaussian``      no dictionary: hidden entries by a normal distribution of all sites' days in one
                  place, days from as many of its principal components as others have atoms
``interpolated``  no dictionary: hidden entries by linear interpolation within the day
================  ================================================================================

What a method leaves open is chosen as in `cameras`, by the mean of both errors.

``--data FILE.npz`` with ``X`` (n_sites, n_hours, n_quantities), hourly from midnight on, NaN where
missing: the Beijing multi-site air quality data, of which the first ``quantities`` count. A day
with a missing hour is left out. Without a file, planted days.

Metrics: ``error_VIEW_METHOD``, mean squared errors of quantities that have variance 1 over all
sites' training days; ``lead_METHOD``, by how much PerMA's filled-in error is below a method's, as a
share of it, with the interval ``lead_low_METHOD`` to ``lead_high_METHOD``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import mode
from typing import Any

import numpy as np

from flwr_perdl.core.checks import Matrix
from flwr_perdl.random import DATA, spawn
from perdl_experiments.data import HOURS, cached_by_file, hourly_days, planted_clients
from perdl_experiments.outcome import Outcome
from perdl_experiments.render import Record
from perdl_experiments.studies import cameras
from perdl_experiments.studies._experiment import Arrays, Keep, leads, words
from perdl_experiments.studies._parts import keep_all
from perdl_experiments.studies.cameras import Site

#: Days of a site to choose by and to measure, and the share of hidden entries; shares of a
#: covariance that the variance of its average entry is added to.
CHOOSE, TEST, HIDDEN = 60, 120, 0.3
RIDGES = (0.003, 0.01, 0.03, 0.1)
VIEWS, METHODS = words("stations", "view"), words("stations")


@dataclass(frozen=True, kw_only=True)
class Config(cameras.Config):
    """The options of stations.toml; of those of `cameras`, sites and views follow from the data."""

    days: int
    quantities: int
    sites: int = 0
    common: int = 0
    own: int = 0

    def check(self) -> None:
        """Reject options that do not fit together."""
        self.check_nodes(len(_load(self.data, self.quantities)), "site of the data")
        if self.n_global != "auto" and self.n_global > self.n_atoms:
            raise ValueError(
                f"n_global must be at most n_atoms={self.n_atoms}, got {self.n_global}."
            )

    @property
    def sized(self) -> Config:
        """The same, with the number of sites."""
        return replace(self, sites=len(_load(self.data, self.quantities)))


class Comparison(cameras.Comparison):
    """All methods on one choice of days."""

    def measured(self, sets: Sequence[Matrix], rebuilt: Sequence[Matrix]) -> list[float]:
        """Return the errors of whole days, and of what is hidden in the second set."""
        whole, hidden = sets[0], np.isnan(sets[1])
        errors = [(whole - rebuilt[0]) ** 2, (whole - rebuilt[1])[hidden] ** 2]
        return [float(np.mean(one)) for one in errors]


# The data ------------------------------------------------------------------------------------


@cached_by_file(maxsize=2)
def _load(path: str, quantities: int) -> list[Matrix]:
    """Return every site's complete days, as (n_days, hours * quantities)."""
    if not path:
        return planted_clients(
            spawn(0, DATA), [12] * 6, [400] * 6, 6, n_features=2 * HOURS, noise=0.1
        ).samples
    days = hourly_days(path)[..., :quantities]
    flat = days.reshape(*days.shape[:2], -1)
    return [own[~np.isnan(own).any(axis=1)] for own in flat]


def load_sites(config: Config, seed: int) -> list[Site]:
    """Return every site's days, quantities scaled, and some entries of the held-out ones hidden."""
    rng, found = spawn(seed, DATA), list[list[Matrix]]()
    for own in _load(config.data, config.quantities):
        need = config.days + CHOOSE + TEST
        if len(own) < need:
            raise ValueError(f"data must have {need} complete days of each site, got {len(own)}.")
        found.append(
            np.split(own[rng.permutation(len(own))[:need]], [config.days, config.days + CHOOSE])
        )
    train = np.vstack([own[0] for own in found])
    each = train.reshape(-1, train.shape[1] // HOURS)
    center, scale = (np.tile(part, HOURS) for part in (each.mean(axis=0), each.std(axis=0)))
    sites = []
    for i, parts in enumerate(found):
        scaled = [(X - center) / scale for X in parts]
        holed = [np.where(rng.random(X.shape) < HIDDEN, np.nan, X) for X in scaled[1:]]
        pairs = [[X, Y] for X, Y in zip(scaled[1:], holed, strict=True)]
        sites.append(Site(str(i), scaled[0], *pairs))
    return sites


# Without a dictionary ------------------------------------------------------------------------


def interpolated(Y: Matrix) -> Matrix:
    """Return days with their hidden entries between the hours before and after."""
    filled = Y.reshape(len(Y), HOURS, -1).copy()
    hours = np.arange(HOURS)
    for day in filled:
        for signal in day.T:
            known = ~np.isnan(signal)
            signal[~known] = (
                np.interp(hours[~known], hours[known], signal[known]) if any(known) else 0
            )
    return filled.reshape(Y.shape)


def conditional(Y: Matrix, mean: Matrix, covariance: Matrix) -> Matrix:
    """Return days with the means of their hidden entries, given the others, of a distribution."""
    filled = Y.copy()
    for day in filled:
        hidden = np.isnan(day)
        known = ~hidden
        inverse = np.linalg.solve(covariance[np.ix_(known, known)], (day - mean)[known])
        day[hidden] = mean[hidden] + covariance[np.ix_(hidden, known)] @ inverse
    return filled


def plain(config: Config, sites: Sequence[Site]) -> dict[str, Matrix]:
    """Return the errors of what needs no dictionary, (n_sites, n_views), NaN for what it lacks."""

    def missed(X: Matrix, Y: Matrix, filled: Matrix) -> float:
        return float(np.mean((X - filled)[np.isnan(Y)] ** 2))

    pooled = np.vstack([site.train for site in sites])
    mean, covariance = pooled.mean(axis=0), np.cov(pooled.T)
    unit = np.trace(covariance) / len(mean) * np.eye(len(mean))

    def error(ridge: float, part: str) -> list[float]:
        sets = (getattr(site, part) for site in sites)
        return [missed(X, Y, conditional(Y, mean, covariance + ridge * unit)) for X, Y in sets]

    ridge = min(RIDGES, key=lambda one: float(np.mean(error(one, "choose"))))
    axes = np.linalg.svd(pooled - mean, full_matrices=False)[2][: config.n_nonzero]
    away = [site.test[0] - mean for site in sites]
    rebuilt = [float(np.mean((X - X @ axes.T @ axes) ** 2)) for X in away]
    between = [missed(X, Y, interpolated(Y)) for X, Y in (site.test for site in sites)]
    return {
        "gaussian": np.column_stack([rebuilt, error(ridge, "test")]),
        "interpolated": np.column_stack([np.full(len(sites), np.nan), between]),
    }


# The run -------------------------------------------------------------------------------------


def compare(config: Config, seed: int) -> Arrays:
    """Return every site's errors by every method, and the curve of shared atoms."""
    config = config.sized
    sites = load_sites(config, seed)
    these = Comparison(config, seed, sites)
    curve, n_global = these.curve()
    shared = curve[config.tried[-1]]
    found = {
        "perma": curve[n_global]._replace(setting=n_global),
        "alone": these.penalized("local"),
        "shared": shared,
        "tuned": these.finetuned(shared),
        "averaging": these.penalized("averaging"),
        "pooled": these.penalized("sklearn"),
        **these.halves(),
    }
    return {
        **{f"error_{name}": one.test for name, one in found.items()},
        **{f"error_{name}": errors for name, errors in plain(config, sites).items()},
        **{f"setting_{name}": np.array(one.setting) for name, one in found.items()},
        "curve": np.array([one.test.mean(axis=0) for one in curve.values()]),
        "floats": np.array(curve[n_global].floats),
    }


def run(config: Config, keep: Keep) -> Outcome:
    """Compare all methods with every seed."""
    parts = {f"seed-{seed}": partial(compare, config, seed) for seed in config.each_seed}
    kept, config = keep_all(keep, parts), config.sized
    means = {  # (n_seeds, n_views)
        name: np.array([one[f"error_{name}"].mean(axis=0) for one in kept]) for name in METHODS
    }
    order = sorted(means, key=lambda name: float(means[name][:, 1].mean()))
    curve = np.array([one["curve"] for one in kept])
    return Outcome(
        records=[
            *(
                Record("error", means[name][:, i], name, {"view": view})
                for name in order
                for i, view in enumerate(VIEWS)
                if np.isfinite(means[name][:, i]).all()
            ),
            *(
                Record("setting", np.array([one[f"setting_{name}"] for one in kept]), name)
                for name in order
                if f"setting_{name}" in kept[0]
            ),
            *leads(
                {n: 1 - means["perma"][:, 1] / each[:, 1] for n, each in means.items()}, "perma"
            ),
            *(
                Record("curve", curve[:, i, j], "", {"shared": n, "view": view})
                for i, n in enumerate(config.tried)
                for j, view in enumerate(VIEWS)
            ),
            Record("n_global", mode(int(one["setting_perma"]) for one in kept)),
        ],
        curves={"n_global": config.tried, "curve": curve[:, :, 1].mean(axis=0).tolist()},
        arrays={f"error_{name}": values for name, values in means.items()},
        figures=_figures(config, means, curve, order),
        rounds=config.rounds,
        floats_up=float(kept[0]["floats"][0]),
        floats_down=float(kept[0]["floats"][1]),
        facts={"best": METHODS[order[0]], "n_sites": config.sites, "hidden_share": f"{HIDDEN:.0%}"},
    )


def _figures(
    config: Config, means: Mapping[str, Matrix], curve: Matrix, order: Sequence[str]
) -> dict[str, Any]:
    from perdl_experiments import pictures  # an extra: clients must not need it

    whole = np.insert(curve, 0, means["alone"], axis=1)
    ordered = [(name, means[name]) for name in order]
    n_global = config.tried[int(curve[:, :, 1].mean(axis=0).argmin())]
    return {
        "errors": pictures.intervals(
            {
                said: pictures.ranges(
                    {METHODS[n]: m[:, i] for n, m in ordered if np.isfinite(m[:, i]).all()},
                    np.mean,
                )
                for i, said in enumerate(VIEWS.values())
            },
            ours=[METHODS["perma"]],
        ),
        "curve": pictures.chosen(
            [0, *config.tried],
            {said: whole[:, :, i] for i, said in enumerate(VIEWS.values())},
            n_global,
            x=f"atoms that are shared, of {config.n_atoms}",
            y="mean squared error",
        ),
    }
