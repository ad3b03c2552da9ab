"""Differential privacy of sums: how much noise, who adds it, and on which grid.

What is released is a noised sum over records, or over clients. Two data sets are neighbors if one
has a record (``level="client"``: a client) that the other lacks: *add or remove one*, not *replace
one*, which changes a sum by up to twice as much. All sums of a run together are (epsilon,
delta)-differentially private.

==============================  ====================================================================
step                            why the guarantee holds
==============================  ====================================================================
a record moves a sum by at      Its term, of that record and of what is public alone, is scaled down
most ``sensitivity``            to a norm. Cutting a sum's entries to ``reach`` moves no two sums
                                further apart
the sum is rounded to a grid    By less than a step per entry: two sums are then at most
                                sensitivity / step + sqrt(size) steps apart
each client adds a share        Independent discrete Gaussians of variance s^2 / n_required, s the
                                standard deviation that is needed. Any n_required of them suffice.
                                Kairouz, Liu and Steinke, "The Distributed Discrete Gaussian
                                Mechanism", 2021: the probabilities of a sum of n discrete Gaussians
                                of variance v are those of one of variance n v but for a factor of
                                exp(+-5 sum_(0<k<n) exp(-2 pi^2 v k / (k + 1))), which is 1 in
                                float64 from v = 100 on
one discrete Gaussian is as     Let N be the entries of all releases, s in steps of the grid, mu the
good as a continuous one        distance of two runs' sums over s. A rounded normal distribution R
                                has exactly the privacy of the continuous one, as data on the grid
                                can be rounded with the noise. By Jensen's inequality, and as
                                sinh(a) / a <= exp(a^2 / 6), the discrete Gaussian D has
                                -N / 24 s^2 <= log R(x) / D(x) <= |x|^2 / 24 s^4, so that
                                delta_D(epsilon) <= exp(N / 24 s^2) delta_R(epsilon - eta) + exp(-u)
                                where eta = (N + (sqrt(N) + sqrt(2 u) + mu)^2) / 24 s^2, and exp(-u)
                                bounds the odds that |x| is not as small. A thousandth of epsilon
                                and of delta is set aside for it; a grid on which that is too little
                                is rejected
sums differ in size, or count   Each is checked as if all were on its grid; the one with the fewest
for more than one (``units``)   steps then decides. Squared distances over variances add up
releases are counted            `noise_multiplier`, by dp-accounting: Balle and Wang, "Improving the
                                Gaussian Mechanism for Differential Privacy", 2018, and Dong, Roth
                                and Su, "Gaussian Differential Privacy", 2019, are exact; Renyi
                                divergence would ask for 6 to 9 % more noise
==============================  ====================================================================

Limitations. A record on which a client fails (NaN, or out of the range that it computes in) removes
that client's whole sum: only records that clients accept are covered. A client knows its own share:
against it the noise is that of ``n_required - 1`` shares, and against k clients that collude with
the server that of ``n_required - k``. Floating point: noise and sums are integers when they are
added, so the last bits of a reply reveal nothing (Mironov, "On Significance of the Least
Significant Bits", 2012). Before that, a float64 sum over n records is off by at most n^2 2^-53
records, which for up to 90,000 records per client is below the 1e-6 by which every sensitivity is
enlarged; float32 sums are not covered. Timing: the time of an answer may depend on the data, and
that of OpenDP's sampler on its random numbers; neither is hidden. ``rng`` instead of the operating
system's random numbers is for tests and simulations: anyone who knows its seed can remove the
noise, and there is no guarantee.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from math import floor, log, sqrt
from typing import NamedTuple

import numpy as np

from flwr_perdl.core.checks import (
    LARGE,
    Matrix,
    check_choice,
    check_count,
    check_function,
    check_kind,
    check_real,
    own_numbers,
)
from flwr_perdl.core.extras import load_extra
from flwr_perdl.privacy.basis import PublicBasis

#: The share of epsilon and of delta for the difference of discrete and continuous noise; and how
#: much larger a sensitivity is taken, for rounding errors of floats.
_ASIDE, _SLACK = 1e-3, 1e-6
#: Noise is within its bounds but for exp(-10) of delta; an entry's, at up to exp(10) clients too.
_RARE = 10.0
#: Budgets that the accountant's floats resolve.
_EPSILONS = 1e-7, 1e9
#: The largest number of steps of a sum and its noise, where nothing else limits it.
_LARGEST = 2**40


@dataclass(frozen=True, kw_only=True)
class Noise:
    """A guarantee of (epsilon, delta)-differential privacy for all rounds of a run.

    Parameters
    ----------
    epsilon : float
        The budget, 1e-7 to 1e9. With epsilon 1, an observer who knows all other records can raise
        the odds that one record is present by a factor of at most e.
    delta : float, default 1e-5
        Probability, in (0, 1), with which that may fail: choose it well below 1 / number of
        records.
    trust : {"distributed", "central"}, default "distributed"
        Who adds the noise: each client a share of it before secure sums, so that the server sees
        only noised sums; or the server, which sees each client's sum.
    level : {"record", "client"}, default "record"
        What is hidden: the presence of a record, or of all data of a client.
    clip : float, default 1.0
        Largest norm of a record, or of a client's reply; longer ones are scaled down.
    basis : PublicBasis, optional
        Subspace in which the model is learned; by default that of the samples.
    rng : callable, optional
        Makes a NumPy generator for each draw, for reproducible tests and simulations. Anyone who
        knows its seed can remove the noise, so nothing is guaranteed. By default OpenDP draws from
        the operating system's random numbers.

    Raises
    ------
    ValueError, TypeError
        If an argument breaks its rule.

    Examples
    --------
    >>> from flwr_perdl.privacy import Noise, PublicBasis
    >>> noise = Noise(epsilon=2.0, basis=PublicBasis.dct((28, 28), 144))
    >>> release = noise.release(6, size=5136, sensitivity=2**0.5, reach=500.0, n_required=16)
    >>> round(release.sigma, 2)  # of the sum that the server sees
    6.92
    """

    epsilon: float
    delta: float = 1e-5
    trust: str = "distributed"
    level: str = "record"
    clip: float = 1.0
    basis: PublicBasis | None = None
    rng: Callable[[], np.random.Generator] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the arguments."""
        own_numbers(self)
        _check_budget(self.epsilon, self.delta)
        check_choice("trust", self.trust, ("distributed", "central"))
        check_choice("level", self.level, ("record", "client"))
        check_real("clip", self.clip, 0, LARGE, open_low=True)
        check_kind("basis", self.basis, (PublicBasis, type(None)), "a PublicBasis or None")
        check_function("rng", self.rng, "a function that makes a generator")

    def release(
        self,
        n_releases: int,
        *,
        size: int,
        sensitivity: float,
        reach: float,
        n_required: int = 1,
        limit: int = 2**26,
        units: int = 1,
        entries: int = 0,
    ) -> Release:
        """Return how each of the run's sums is noised.

        Parameters
        ----------
        n_releases : int
            Number of sums that the run releases.
        size : int
            Number of entries of a sum.
        sensitivity : float
            Largest norm of a record's (or a client's) contribution to a sum.
        reach : float
            Largest magnitude of an entry of a client's sum; larger ones are clipped.
        n_required : int, default 1
            Fewest clients in a sum: with that many shares the guarantee holds. With
            ``trust="central"`` one share is the whole noise.
        limit : int, default 2**26
            Largest magnitude of a client's reply in steps of the grid.
        units : int, default 1
            How many of the ``n_releases`` this sum counts as, in what is guaranteed: its noise is
            smaller by the root of that.
        entries : int, optional
            Number of entries of all sums together, where they differ in ``size``.

        Returns
        -------
        Release

        Raises
        ------
        ValueError
            If an argument breaks its rule, or ``limit`` makes the grid too coarse.
        """
        check_count("n_releases", n_releases, 1)
        check_count("size", size, 1)
        check_real("sensitivity", sensitivity, 0, LARGE, open_low=True)
        check_real("reach", reach, 0, LARGE)
        check_count("n_required", n_required, 1)
        check_count("limit", limit, 1, _LARGEST)
        budget = (1 - _ASIDE) * self.epsilon, (1 - _ASIDE) * self.delta
        check_count("units", units, 1, n_releases)
        entries = check_count("entries", entries) or n_releases * size
        multiplier = noise_multiplier(*budget, n_releases) / sqrt(units)
        far = sensitivity * (1 + _SLACK)
        # Of all shares, delta / exp(_RARE) are beyond so many of the sum's standard deviations.
        rare = log(2 * entries / self.delta) + 2 * _RARE
        tail = sqrt(2 * rare) * multiplier / sqrt(n_required)
        # step * limit = reach + tail * (far + sqrt(size) * step), for the share of one client
        room = limit - tail * sqrt(size)
        step = (reach + tail * far) / room if room > 0 else 0.0
        steps = multiplier * (far / step + sqrt(size)) if step else 0.0
        if not steps or not self._fine(steps, entries, sqrt(n_releases / units) / multiplier):
            raise ValueError(
                f"limit must be larger for {n_releases} sums of {size} entries up to {reach:g} at "
                f"epsilon {self.epsilon:g}, got {limit}."
            )
        return Release(step, steps / sqrt(n_required), floor(reach / step), limit, n_required)

    def _fine(self, steps: float, entries: int, distance: float) -> bool:
        """Whether what is set aside is enough for noise of so many steps of the grid, in all sums.

        The ``distance`` is that of two runs' sums in units of the noise. Where sums differ, the one
        with the fewest steps decides for all, and each is checked by itself as if it were that one.
        """
        rare = _RARE - log(self.delta)
        longest = sqrt(entries) + sqrt(2 * rare) + distance
        eta = (entries + longest**2) / 24 / steps**2
        return eta <= _ASIDE * min(self.epsilon, 0.5)


class Release(NamedTuple):
    """A sum of clients' replies on a grid of whole numbers, with noise; made by `Noise.release`."""

    #: The step of the grid, in the sum's own unit.
    step: float
    #: The standard deviation of one client's share of the noise, in steps.
    share: float
    #: The largest magnitude of an entry of one client's sum, and with noise, in steps.
    reach: int
    limit: int
    #: The number of shares that the promise needs.
    n_required: int

    @property
    def sigma(self) -> float:
        """The standard deviation of the sum's noise if just ``n_required`` clients answer."""
        return self.step * self.share * sqrt(self.n_required)

    def add_noise(self, values: Matrix, rng: np.random.Generator | None = None) -> Matrix:
        """Return a client's sum in steps of the grid, with the client's share of the noise.

        Parameters
        ----------
        values : ndarray
            The sum, of any shape; entries beyond the reach are cut.
        rng : numpy.random.Generator, optional
            The source of the noise in tests and simulations. By default OpenDP draws it from the
            operating system's random numbers; only then is anything guaranteed.

        Returns
        -------
        ndarray
            Whole numbers as float64, at most ``limit`` large.
        """
        steps = np.asarray(values, dtype=np.float64) / self.step
        whole = np.rint(np.clip(steps, -self.reach, self.reach))
        noise = discrete_gaussian(self.share, whole.size, rng).reshape(whole.shape)
        return np.clip(whole + noise, -self.limit, self.limit)

    def read(self, total: Matrix) -> Matrix:
        """Return a sum of clients' replies in its own unit; rounding errors of a mean go."""
        return self.step * np.rint(np.asarray(total, dtype=np.float64))


def noise_multiplier(epsilon: float, delta: float, n_releases: int = 1) -> float:
    """Return the standard deviation of Gaussian noise per unit of sensitivity.

    ``n_releases`` releases with it are together (epsilon, delta)-differentially private.

    Parameters
    ----------
    epsilon, delta : float
        The budget of all releases.
    n_releases : int, default 1
        Their number.

    Raises
    ------
    ValueError
        If an argument breaks its rule.
    ImportError
        If dp-accounting is not installed.

    Examples
    --------
    >>> from flwr_perdl.privacy.noise import noise_multiplier
    >>> round(noise_multiplier(2.0, 1e-5, 6), 3)
    4.884
    """
    _check_budget(epsilon, delta)
    check_count("n_releases", n_releases, 1)
    return _deviation(epsilon, delta) * sqrt(n_releases)


@lru_cache(maxsize=64)  # a search that takes as long as some clients' training
def _deviation(epsilon: float, delta: float) -> float:
    """Return the standard deviation of one release's noise per unit of sensitivity."""
    with np.errstate(all="ignore"):  # of probabilities that vanish
        accountant = load_extra("dp_accounting.gaussian_mechanism", "privacy", "privacy")
        return float(accountant.get_sigma_gaussian(epsilon, delta))


def spent(multiplier: float, delta: float, n_releases: int) -> float:
    """Return the epsilon of so many releases with a `noise_multiplier`: 0 if there were none."""
    if not n_releases:
        return 0.0
    with np.errstate(all="ignore"):
        accountant = load_extra("dp_accounting.gaussian_mechanism", "privacy", "privacy")
        return float(accountant.get_epsilon_gaussian(multiplier / sqrt(n_releases), delta))


def discrete_gaussian(deviation: float, size: int, rng: np.random.Generator | None) -> Matrix:
    """Return so many whole numbers from a discrete Gaussian, as float64.

    OpenDP's sampler is exact, from the operating system's random numbers (Canonne, Kamath and
    Steinke, "The Discrete Gaussian for Differential Privacy", 2020). With ``rng``, for tests and
    simulations, they are rounded normal numbers.
    """
    if rng is None:
        return np.array(_gaussian(deviation)([0] * size), dtype=np.float64)
    return np.rint(deviation * rng.standard_normal(size))


@lru_cache(maxsize=64)
def _gaussian(deviation: float) -> Callable[[list[int]], list[int]]:
    """Return OpenDP's mechanism that adds discrete Gaussian noise to integers."""
    opendp = load_extra("opendp.prelude", "privacy", "privacy")  # here, since it takes 0.3 s
    opendp.enable_features("contrib")  # vetted, but not yet by all of its reviewers
    space = opendp.vector_domain(opendp.atom_domain(T="i64")), opendp.l2_distance(T="f64")
    mechanism: Callable[[list[int]], list[int]] = opendp.m.make_gaussian(*space, scale=deviation)
    return mechanism


def _check_budget(epsilon: float, delta: float) -> None:
    """Raise a ValueError where a budget is none, or the accountant's floats do not resolve it."""
    check_real("epsilon", epsilon, *_EPSILONS)
    if check_real("delta", delta, 0, 1, open_low=True) == 1:
        raise ValueError("delta must be in (0, 1), got 1.")
