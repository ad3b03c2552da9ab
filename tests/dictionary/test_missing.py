"""NaN in the samples: entries that are not observed."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_digits

from flwr_perdl.dictionary import (
    GradientLearner,
    KSVDLearner,
    LassoLearner,
    MODLearner,
    OrthogonalLearner,
    lasso,
    normalize_atoms,
    omp,
    refine_local,
    sparse_code,
    warm_start,
)

CODERS = {
    "omp": lambda X, D: omp(X, D, 2),
    "residual": lambda X, D: omp(X, D, 2, selection="residual"),
    "lasso": lambda X, D: lasso(X, D, 0.1, start=np.ones((len(X), len(D)))).codes,
    "n_nonzero": lambda X, D: sparse_code(X, D, n_nonzero=2),
    "alpha": lambda X, D: sparse_code(X, D, alpha=0.1),
}
LEARNERS = [LassoLearner(6, alpha=0.1), MODLearner(6, n_nonzero=2), MODLearner(6)]


def with_nan(X: np.ndarray, share: float = 0.3) -> np.ndarray:
    return np.where(np.random.default_rng(5).random(X.shape) < share, np.nan, X)


@pytest.mark.parametrize("name", CODERS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_codes_are_those_of_the_observed_columns(rng, unit, name, dtype):
    X, D = with_nan(rng.standard_normal((30, 8))).astype(dtype), unit(6, 8).astype(dtype)
    X[3:5], X[7] = X[2], np.nan  # the same entries are missing, and all are
    X[4] *= 2
    kept = X.copy()
    C = CODERS[name](X, D)
    assert C.dtype == dtype
    assert not C[7].any()
    np.testing.assert_array_equal(X, kept)
    for x, c in zip(X, C, strict=True):
        seen = ~np.isnan(x)
        if seen.any():
            alone = CODERS[name](x[None, seen], D[:, seen])[0]
            np.testing.assert_allclose(c, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("learner", LEARNERS, ids=repr)
def test_an_update_is_that_of_samples_completed_by_their_reconstruction(rng, unit, learner):
    full, D = rng.standard_normal((60, 8)), unit(6, 8)
    X = with_nan(full)
    C = learner.code(X, D)
    by_hand = D
    for _ in range(5):
        by_hand = learner.update(np.where(np.isnan(X), C @ by_hand, X), C, by_hand)
    np.testing.assert_array_equal(learner.update(X, C, D), by_hand)
    np.testing.assert_array_equal(learner.step(X, D), by_hand)
    losses = [learner.loss(X, C, E) for E in (D, by_hand)]
    assert losses[1] < losses[0]
    rest = np.nansum((X - C @ by_hand) ** 2) - np.nansum((X - C @ D) ** 2)
    half = 0.5 if isinstance(learner, LassoLearner) else 1
    assert losses[1] - losses[0] == pytest.approx(half * rest)
    assert np.isfinite(refine_local(X, D, 2, learner)).all()


@pytest.mark.parametrize("learner", LEARNERS, ids=repr)
def test_what_no_sample_has_stays_zero(rng, learner):
    X = rng.standard_normal((40, 8)) @ np.diag([3, 1, 1, 1, 1, 1, 1, 1])
    X[:, 5], X[9] = np.nan, np.nan
    D = warm_start(X, learner, rng=rng, n_iter=5).dictionary
    assert not D[:, 5].any()
    np.testing.assert_allclose(np.linalg.norm(D, axis=1), 1)


def digits(rng: np.random.Generator) -> np.ndarray:
    return rng.permutation(load_digits().data / 16)[:1100]


def planted(rng: np.random.Generator) -> np.ndarray:
    """Return noisy samples of a quarter of eight atoms each."""
    D = normalize_atoms(rng.standard_normal((8, 16)))
    C = rng.standard_normal((1200, 8)) * (rng.random((1200, 8)) < 0.25)
    return C @ D + 0.05 * rng.standard_normal((1200, 16))


@pytest.mark.parametrize(
    ("learner", "draw", "n_known", "most"),
    [
        (LassoLearner(32), digits, 700, 0.03),
        (MODLearner(32, n_nonzero=5), digits, 700, 0.04),
        (LassoLearner(8), planted, 600, 0.03),
        (MODLearner(8, n_nonzero=2), planted, 600, 0.05),
    ],
    ids=["lasso-digits", "mod-digits", "lasso-planted", "mod-planted"],
)
def test_a_dictionary_of_samples_with_30_percent_missing_is_nearly_that_of_whole_ones(
    learner, draw, n_known, most
):
    """Hidden entries of new samples are filled in within 8 %, over five draws."""
    errors = np.zeros((5, 2))
    for seed in range(5):
        rng = np.random.default_rng(seed)
        whole = draw(rng)
        hidden = rng.random(whole.shape) < 0.3
        X = np.where(hidden, np.nan, whole)
        for i, known in enumerate((whole, X)):
            start = {"rng": np.random.default_rng(seed), "n_iter": 20, "boost": 4, "decay": 0.85}
            D = warm_start(known[:n_known], learner, **start).dictionary
            rest = whole - learner.code(X, D) @ D
            errors[seed, i] = np.mean(rest[n_known:][hidden[n_known:]] ** 2)
    complete, missing = errors.mean(axis=0)
    assert complete < most
    assert missing < 1.08 * complete


MOD, PLAIN = MODLearner(3, coding="threshold"), OrthogonalLearner(3)


@pytest.mark.parametrize(
    "code",
    [
        *(learner.code for learner in (PLAIN, GradientLearner(3), KSVDLearner(3), MOD)),
        lambda X, D: warm_start(X, PLAIN, rng=np.random.default_rng(0)),
        lambda X, D: sparse_code(X, D, threshold=0.1),
    ],
)
def test_other_coders_reject_it(rng, unit, code):
    with pytest.raises(ValueError, match=r"^X"):
        code(with_nan(rng.standard_normal((20, 8))), unit(3, 8))
