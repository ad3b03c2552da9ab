"""The noise of a sum: its size, its grid, and what an observer can tell from it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from flwr.common.secure_aggregation.quantization import dequantize, quantize
from scipy.stats import beta, chi2, chisquare, norm

from flwr_perdl.dictionary.bounded import bounded_statistics
from flwr_perdl.privacy import Noise, PublicBasis
from flwr_perdl.privacy.noise import (
    Release,
    discrete_gaussian,
    noise_multiplier,
    spent,
)

N_TRIALS = 100_000


def audited(release: Release, delta: float) -> float:
    """Return a lower bound on epsilon, at confidence .999, of a sum with and without a record.

    The record is what moves a sum the furthest: a code and a sample of norm 1 along one axis. The
    threshold is chosen by the first half of the trials, the bound is of the second.
    """
    rng = np.random.default_rng(0)
    sums = [np.zeros(2), np.array([1.0, 1.0])]  # of A and B; the others' are the same in both
    seen = []
    for total in sums:
        shares = [np.zeros((N_TRIALS, 2))] * (release.n_required - 1)
        replies = [release.add_noise(own, rng) for own in (*shares, np.tile(total, (N_TRIALS, 1)))]
        seen.append(np.sum([release.read(reply) for reply in replies], axis=0).sum(axis=1))
    without, with_ = np.array(seen).reshape(2, 2, -1)
    n = without.shape[1]

    def bound(counts: tuple[int, int], error: float) -> float:
        low = beta.ppf(error, counts[1], n - counts[1] + 1) if counts[1] else 0.0
        high = beta.ppf(1 - error, counts[0] + 1, n - counts[0])
        return float(np.log(max(low - delta, 1e-300) / high))

    def counts(half: int, threshold: float) -> tuple[int, int]:
        return int((without[half] > threshold).sum()), int((with_[half] > threshold).sum())

    tried = np.quantile(without[0], np.linspace(0.5, 1, 200))
    best = max(tried, key=lambda threshold: bound(counts(0, threshold), 5e-4))
    return bound(counts(1, best), 5e-4)


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 2.0])
def test_an_audit_stays_below_the_promise_and_can_fail(epsilon: float) -> None:
    noise = Noise(epsilon=epsilon)
    release = noise.release(1, size=2, sensitivity=2**0.5, reach=10.0, n_required=4)
    assert 0.3 * epsilon < audited(release, noise.delta) <= epsilon
    assert audited(release._replace(share=release.share / 4), noise.delta) > epsilon


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
def test_what_is_sent_keeps_the_promise(epsilon: float) -> None:
    """On a grid that is just fine enough: the sum of the shares, and all that rounding may do."""
    options: dict[str, Any] = {"size": 1, "sensitivity": 1.0, "reach": 0.0, "n_required": 4}
    noise, limit = Noise(epsilon=epsilon), 64
    while not (release := _release_or_none(noise, limit, options)):
        limit += 4
    cells = np.arange(-limit * 2, limit * 2 + 1)
    share = np.exp(-(cells**2) / (2 * release.share**2))
    share /= share.sum()
    two = np.convolve(share, share)
    total = np.convolve(two, two)
    far = int(np.ceil(1 / release.step))  # 5.3 steps apart may be rounded to 6, and not to 7
    moved = np.concatenate([np.zeros(far), total])
    total = np.concatenate([total, np.zeros(far)])
    delta = np.maximum(total - np.exp(epsilon) * moved, 0).sum()
    assert delta <= noise.delta
    # What is to spare is a fraction of epsilon: that grid's steps, and what is set aside.
    assert np.maximum(total - np.exp(0.97 * epsilon) * moved, 0).sum() > noise.delta


@pytest.mark.parametrize("variance", [0.5, 1.0, 20.0])
def test_discrete_noise_is_as_near_to_normal_noise_as_the_bounds_say(variance: float) -> None:
    n, x = 4, np.arange(-200, 201)
    one, all_of = (np.exp(-(x**2) / (2 * v)) for v in (variance, n * variance))
    one, all_of = one / one.sum(), all_of / all_of.sum()
    total = np.convolve(one, one)[200:-200]
    total = np.convolve(total, total)[200:-200]
    near = np.abs(x) < 6 * (n * variance) ** 0.5
    k = np.arange(1, n)
    bound = 5 * np.exp(-2 * np.pi**2 * variance * k / (k + 1)).sum() + 1e-9
    assert np.abs(np.log(total[near] / all_of[near])).max() <= bound
    # A rounded normal number and a discrete one of the same variance.
    near = np.abs(x) < 6 * variance**0.5
    far = np.abs(x[near])
    rounded = np.diff(norm.sf([far + 0.5, far - 0.5], scale=variance**0.5), axis=0)[0]
    ratio = np.log(rounded / one[near])
    rest = 3 * np.exp(-2 * np.pi**2 * variance) + 1e-12  # as much are the cells' sum and 1 apart
    assert (ratio >= -1 / (24 * variance) - rest).all()
    assert (ratio <= far**2 / (24 * variance**2) + rest).all()


def _release_or_none(noise: Noise, limit: int, options: dict[str, Any]) -> Release | None:
    try:
        return noise.release(1, limit=limit, **options)
    except ValueError:
        return None


@pytest.mark.parametrize(("epsilon", "n_releases"), [(8.0, 6), (2.0, 6), (0.5, 1)])
def test_the_exact_accountant_agrees_with_the_definition(epsilon: float, n_releases: int) -> None:
    """By hand: Phi(mu / 2 - epsilon / mu) - e^epsilon Phi(-mu / 2 - epsilon / mu) = delta."""
    mu = n_releases**0.5 / noise_multiplier(epsilon, 1e-5, n_releases)
    rest = norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    assert rest == pytest.approx(1e-5, rel=1e-6)
    assert spent(n_releases**0.5 / mu, 1e-5, n_releases) == pytest.approx(epsilon, rel=1e-6)
    assert spent(1.0, 1e-5, 0) == 0
    release = Noise(epsilon=epsilon).release(n_releases, size=5136, sensitivity=1.0, reach=500.0)
    assert 1 < release.sigma * mu / n_releases**0.5 < 1.02  # the grid's price


@pytest.mark.parametrize("n_releases", [1, 10])
def test_the_exact_accountant_agrees_with_another_one(n_releases: int) -> None:
    one = GaussianDpEvent(noise_multiplier(1.0, 1e-5, n_releases))
    found = PLDAccountant().compose(SelfComposedDpEvent(one, n_releases)).get_epsilon(1e-5)
    assert found == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("orthogonal", [True, False])
def test_a_record_moves_the_statistics_by_no_more_than_the_bound(orthogonal: bool) -> None:
    rng = np.random.default_rng(0)
    moved = []
    for scale in (1e-3, 1.0, 30.0):
        C, X = scale * rng.standard_normal((40, 3)), rng.standard_normal((40, 5))
        whole = bounded_statistics(X, C, 0.7, orthogonal=orthogonal)
        for i in range(len(X)):
            less = np.delete(X, i, axis=0), np.delete(C, i, axis=0)
            moved.append(whole - bounded_statistics(*less, 0.7, orthogonal=orthogonal))
    norms = np.linalg.norm(moved, axis=(1, 2))
    assert norms.max() == pytest.approx(0.7)  # it is met, and short terms stay short
    assert norms.max() <= 0.7 + 1e-9
    assert norms.min() < 0.01


def test_rounding_to_the_grid_is_in_the_noise() -> None:
    """With few steps per unit a record moves the rounded sum further, and the noise is larger."""
    rng = np.random.default_rng(0)
    release = Noise(epsilon=1.0).release(
        1, size=400, sensitivity=1.0, reach=2.0, limit=2**14, n_required=1
    )
    exact = release._replace(share=0.0)
    a, b = rng.uniform(-2, 2, (2, 400))
    b = a + (b - a) / np.linalg.norm(b - a)  # one apart
    moved = max(
        float(np.linalg.norm(exact.add_noise(a + shift, rng) - exact.add_noise(b + shift, rng)))
        for shift in rng.uniform(0, release.step, 50)
    )
    far = release.share / noise_multiplier(1.0, 1e-5)  # steps that the noise is for
    assert moved <= far
    assert far > 1 / release.step + 400**0.5


@pytest.mark.parametrize("n_clients", [3, 20])
def test_secure_sums_do_not_change_whole_numbers(n_clients: int) -> None:
    """Flower clips to a range, shifts, scales and rounds at random: here it changes nothing."""
    bits = 32 - n_clients.bit_length()  # as many as the sum's modulus, 2**32, has room for
    limit = 2 ** (bits - 1)
    rng = np.random.default_rng(0)
    release = Noise(epsilon=8.0).release(
        6, size=600, sensitivity=2**0.5, reach=500.0, n_required=2, limit=limit
    )
    sums = rng.uniform(-700, 700, (n_clients, 600))  # some are cut
    replies = [release.add_noise(one, rng) for one in sums]
    replies[0][:2] = -limit, limit
    sent = [quantize([reply / limit], 1.0, 2 * limit)[0] for reply in replies]
    total = sum(one.astype(np.int64) for one in sent)
    assert n_clients * 2 * limit <= 2**32
    # As the workflow reads it: a sum with an offset, then the mean.
    (mean,) = dequantize([total], 1.0, 2 * limit)
    mean = (mean - (n_clients - 1)) * (1 / n_clients)
    found = release.read(mean * limit * n_clients)
    np.testing.assert_array_equal(found, release.step * np.sum(replies, axis=0))
    plain = release._replace(share=0.0)
    cut = np.sum([plain.read(plain.add_noise(one, rng)) for one in sums], axis=0)
    assert np.abs(found - cut)[2:].max() < 6 * release.sigma * (n_clients / 2) ** 0.5
    assert np.abs(plain.read(plain.add_noise(sums[0], rng))).max() <= 500


@pytest.mark.parametrize("n_required", [1, 16])
def test_the_required_shares_have_the_promised_variance(n_required: int) -> None:
    noise, size = Noise(epsilon=2.0), 2000
    rng = np.random.default_rng(0)
    release = noise.release(
        6, size=size, sensitivity=1.0, reach=500.0, n_required=n_required, limit=2**30
    )
    zeros = np.zeros(size)
    total = np.sum([release.read(release.add_noise(zeros, rng)) for _ in range(n_required)], axis=0)
    low, high = np.sqrt(chi2.ppf([1e-6, 1 - 1e-6], size) / size)
    assert low < total.std() / release.sigma < high
    assert release.sigma == pytest.approx(noise_multiplier(2.0, 1e-5, 6), rel=0.002)


def test_noise_comes_from_the_operating_system_unless_a_generator_is_given() -> None:
    drawn = [discrete_gaussian(3.0, 1500, None) for _ in range(2)]
    assert (drawn[0] != drawn[1]).any()
    edges = np.arange(-5, 6)
    expected = np.exp(-(edges**2) / 18) / np.exp(-(np.arange(-60, 61) ** 2) / 18).sum()
    for one in (*drawn, discrete_gaussian(3.0, 1500, np.random.default_rng(0))):
        found = np.array([(one == edge).sum() for edge in edges])
        rest = [one.size - found.sum()], [one.size * (1 - expected.sum())]
        both = np.concatenate([found, rest[0]]), np.concatenate([one.size * expected, rest[1]])
        assert chisquare(*both).pvalue > 1e-6
    release = Noise(epsilon=1.0).release(1, size=3, sensitivity=1.0, reach=1.0)
    seeded = [release.add_noise(np.ones(3), np.random.default_rng(1)) for _ in range(2)]
    np.testing.assert_array_equal(*seeded)


@pytest.mark.parametrize("shape", [(8, 6), (40,)])
def test_a_public_basis_keeps_what_is_in_it(shape: tuple[int, ...]) -> None:
    basis = PublicBasis.dct(shape, 10)
    np.testing.assert_allclose(basis.matrix @ basis.matrix.T, np.eye(10), atol=1e-12)
    np.testing.assert_allclose(np.ptp(basis.matrix[0]), 0, atol=1e-12)  # the constant comes first
    codes = np.random.default_rng(0).standard_normal((4, 10)).astype(np.float32)
    lifted = basis.lift(codes)
    assert lifted.dtype == np.float32
    np.testing.assert_allclose(basis.project(lifted), codes, atol=1e-5)
    grid = np.arange(shape[-1]) + 0.5
    slow = np.broadcast_to(np.cos(np.pi * grid / shape[-1]), shape).reshape(1, -1)
    np.testing.assert_allclose(basis.lift(basis.project(slow)), slow, atol=1e-12)


FINE: dict[str, Any] = {"size": 10, "sensitivity": 1.0, "reach": 1.0}


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Noise(epsilon=1.0, delta=1.0), "delta"),
        (lambda: Noise(epsilon=1.0).release(0, **FINE), "n_releases"),
        (lambda: Noise(epsilon=1.0).release(1, **FINE | {"reach": -1.0}), "reach"),
        (lambda: Noise(epsilon=1.0).release(1, **FINE, n_required=0), "n_required"),
        (lambda: Noise(epsilon=1.0).release(1, **FINE, limit=9), "limit"),
        (lambda: Noise(epsilon=1.0).release(1, **FINE | {"reach": 1e9}), "limit"),
        (lambda: noise_multiplier(1.0, 1e-5, 0), "n_releases"),
        (lambda: PublicBasis(np.ones((2, 3))), "matrix"),
        (lambda: PublicBasis(np.full((1, 2), 1e200)), "matrix"),
        (lambda: PublicBasis.dct((4, 4), 17), "n"),
        (lambda: PublicBasis.dct((0, 4), 1), "shape"),
        (lambda: PublicBasis.dct((4, 4), 2).project(np.ones((1, 3))), "X"),
    ],
)
def test_bad_input_is_named(make: Any, name: str) -> None:
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        make()
