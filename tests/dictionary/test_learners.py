"""One table of checks that every learner passes, then what is particular to each."""

from __future__ import annotations

import numpy as np
import pytest

from flwr_perdl.dictionary import (
    GradientLearner,
    KSVDLearner,
    LassoLearner,
    MODLearner,
    OrthogonalLearner,
    dictionary_distance,
    normalize_atoms,
    polar_factor,
    refine_local,
    sparse_code,
    warm_start,
)
from flwr_perdl.dictionary.learners import atom_support

PLAIN = [OrthogonalLearner, GradientLearner, MODLearner, KSVDLearner]
CLASSES = [*PLAIN, LassoLearner]
GENERAL = CLASSES[1:]
#: The three settings of a learner's coder that tests run through; the lasso has penalties.
CODERS = [{}, {"threshold": 0.2}, {"n_nonzero": 2}]
PENALTIES = [{}, {"alpha": 0.2}, {"alpha": 1}]


@pytest.fixture(params=CLASSES, ids=lambda cls: cls.__name__)
def cls(request):
    return request.param


@pytest.fixture(params=range(3))
def coder(request, cls):
    return (PENALTIES if cls is LassoLearner else CODERS)[request.param]


def run(learner, X, rng, n_iter=10):
    D = learner.start(X, rng)
    for _ in range(n_iter):
        D = learner.step(X, D)
    return D


def awkward(rng):
    """Return data of every awkward kind, 8 features each."""
    return {
        "plain": rng.standard_normal((60, 8)),
        "rank two": rng.standard_normal((60, 2)) @ rng.standard_normal((2, 8)),
        "all zero": np.zeros((20, 8)),
        "few samples": rng.standard_normal((3, 8)),
        "one sample": rng.standard_normal((1, 8)),
        "sparse": rng.standard_normal((60, 8)) * (rng.random((60, 8)) < 0.1),
        "tiny": 1e-12 * rng.standard_normal((60, 8)),
        "huge": 1e12 * rng.standard_normal((60, 8)),
        "one outlier": np.vstack([np.full((1, 8), 1e6), rng.standard_normal((30, 8))]),
    }


def test_every_dictionary_has_unit_atoms_and_no_sample(cls, coder, rng):
    for name, X in awkward(rng).items():
        D = run(cls(5, **coder), X, rng)
        assert D.shape == (5, 8), name
        assert np.allclose(np.linalg.norm(D, axis=1), 1, atol=1e-12), name
        if cls.orthogonal:
            assert np.allclose(D @ D.T, np.eye(5), atol=1e-12), name
        if name in {"plain", "few samples", "one sample"}:
            samples = normalize_atoms(X)
            assert np.abs(D @ samples.T).max() < 0.999, name


def test_float32_is_kept_and_inputs_are_not_modified(cls, coder, rng):
    X = rng.standard_normal((40, 6)).astype(np.float32)
    learner, before = cls(4, **coder), X.copy()
    D = learner.start(X, rng)
    old = D.copy()
    C = learner.code(X, D)
    codes = C.copy()
    for result in (D, C, learner.update(X, C, D), learner.step(X, D)):
        assert result.dtype == np.float32
    assert np.array_equal(X, before)
    assert np.array_equal(D, old)
    assert np.array_equal(C, codes)


@pytest.mark.parametrize("cls", GENERAL)
def test_an_atom_of_one_sample_stays_where_it_is(cls, rng, orthonormal):
    D = orthonormal(4, 6)
    X = rng.standard_normal((20, 6))
    C = np.zeros((20, 4))
    C[:10, 0], C[10:, 1], C[3, 2] = 1.0, 0.5, 2.0  # atom 2 has one sample, atom 3 none
    new = cls(4).update(X, C, D)
    assert np.allclose(new[2:], D[2:], atol=1e-15)
    assert not np.allclose(new[:2], D[:2])


def test_mod_is_the_least_squares_dictionary(rng, orthonormal):
    X, C = rng.standard_normal((50, 6)), rng.standard_normal((50, 4))
    expected = normalize_atoms(np.linalg.lstsq(C, X, rcond=None)[0])
    assert np.allclose(MODLearner(4).update(X, C, orthonormal(4, 6)), expected, atol=1e-10)


def test_the_gradient_step_by_hand():
    # C'C = diag(2, 1/2), so the step is half of C'(X - CD) = C'X - C'C D:
    # [[4, 0], [0, 2]] - [[0, 2], [1/2, 0]].
    C = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 0.5], [0.0, 0.5]])
    X = np.array([[2.0, 0.0], [2.0, 0.0], [0.0, 2.0], [0.0, 2.0]])
    D = np.array([[0.0, 1.0], [1.0, 0.0]])
    new = GradientLearner(2).update(X, C, D)
    assert np.allclose(new, normalize_atoms(np.array([[2.0, 0.0], [0.75, 1.0]])))
    assert np.allclose(GradientLearner(2, eta=0.25).update(X, C, D), new)  # 0.5 / ||C'C||_2
    # eta = 1/8: a quarter of C'X - C'C D is added.
    new = GradientLearner(2, eta=0.125).update(X, C, D)
    assert np.allclose(new, normalize_atoms(np.array([[1.0, 0.5], [0.875, 0.5]])))
    huge = GradientLearner(2, eta=1e150).update(*(a.astype(np.float32) for a in (X, C, D)))
    assert np.allclose(huge, normalize_atoms(np.array([[4.0, -2.0], [-0.5, 2.0]])))


def test_ksvd_by_hand():
    # One atom: a power iteration, X' c, from its codes c.
    X = np.array([[2.0, 1.0], [1.0, 1.0], [1.0, 0.0]])
    C = np.array([[2.0], [1.0], [1.0]])
    new = KSVDLearner(1).update(X, C, np.array([[1.0, 0.0]]))
    assert np.allclose(new, normalize_atoms(np.array([[6.0, 3.0]])))


def test_the_automatic_penalty_is_a_share_of_each_sample_s_norm(rng, unit):
    X, D = rng.standard_normal((6, 8)), unit(5, 8)
    X[2] = 0
    expected = [sparse_code(x[None], D, alpha=0.05 * (np.linalg.norm(x) or 1))[0] for x in X]
    assert np.allclose(LassoLearner(5).code(X, D), expected, atol=1e-7)
    expected = [sparse_code(x[None], D, alpha=0.1 * (np.linalg.norm(x) or 1))[0] for x in X]
    assert np.allclose(LassoLearner(5).code(X, D, 2.0), expected, atol=1e-7)
    norms, C = np.linalg.norm(X, axis=1), LassoLearner(5).code(X, D)
    loss = 0.5 * np.sum((X - C @ D) ** 2) + 0.05 * norms @ np.abs(C).sum(axis=1)
    assert np.isclose(LassoLearner(5).loss(X, C, D), loss)


def test_the_lasso_s_learner_comes_near_the_planted_dictionary(rng, unit, sparse):
    truth = unit(12, 8)  # more atoms than features
    X = sparse(600, 12) @ truth
    found = warm_start(X, LassoLearner(12), rng=rng).dictionary
    assert np.median(np.abs(found @ truth.T).max(axis=0)) > 0.99


def test_the_start_spans_the_principal_directions(rng, orthonormal):
    weak = (orthonormal(6, 6) * 10.0 ** -np.linspace(0, 10, 6)) @ orthonormal(6, 20)
    strong = rng.standard_normal((100, 8)) * [9, 8, 7, 1, 1, 1, 1, 1]
    for X, k, within in ((strong, 3, 1e-12), (weak, 5, 1e-5)):
        D = OrthogonalLearner(k).start(X, rng)
        top = np.linalg.svd(X)[2][:k]
        assert np.allclose(D.T @ D, top.T @ top, atol=within)
        assert not np.allclose(np.abs(D @ top.T).max(axis=1), 1, atol=1e-3)  # rotated


# Warm start


@pytest.mark.parametrize("cls", PLAIN)  # the lasso's codes shrink
def test_the_warm_start_finds_the_planted_dictionary(cls, rng, orthonormal, sparse):
    truth = orthonormal(6, 6)
    X = sparse(200, 6) @ truth
    options = {} if cls.orthogonal else {"coding": "threshold"}  # the atoms are orthogonal
    found = warm_start(X, cls(6, **options), rng=rng)
    assert dictionary_distance(found.dictionary, truth) < 1e-6


def test_the_best_of_the_restarts_is_kept(rng, orthonormal, sparse):
    X = sparse(100, 6) @ orthonormal(6, 6)
    learner = OrthogonalLearner(6)
    found = warm_start(X, learner, rng=rng, restarts=4, boost=1, n_iter=20)
    assert len(found.objectives) == 4
    assert found.objective == min(found.objectives) < max(found.objectives)
    C = learner.code(X, found.dictionary)
    assert found.objective == learner.loss(X, C, found.dictionary)


def test_atoms_outside_the_samples_span_are_kept(rng):
    """More atoms than samples: those that are drawn at random lie anywhere."""
    X = rng.standard_normal((3, 40))
    learner = OrthogonalLearner(8)
    found = warm_start(X, learner, rng=np.random.default_rng(1)).dictionary
    np.testing.assert_allclose(found @ found.T, np.eye(8), atol=1e-12)
    assert np.linalg.matrix_rank(found) == 8


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_as_many_samples_as_use_an_atom_alike_stand_behind_it(rng, dtype):
    for m in range(1, 60):
        alike = np.full((m, 3), rng.standard_normal(3), dtype)
        assert np.array_equal(atom_support(alike), np.full(3, m))
    assert atom_support(np.array([[1.0], [1.001]]))[0] < 2
    C = np.array([[1.0, 0.0, 3.0, 2.0], [-1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 1.0]])
    for scale in (1, 1e-200):
        assert np.allclose(atom_support(scale * C), [3, 0, 1, 16 / 6])
    assert np.array_equal(atom_support(np.zeros((0, 2))), [0, 0])


@pytest.mark.parametrize("size", [(30, 6), (12, 6), (5, 40)])  # the last in the samples' row space
@pytest.mark.parametrize("learner", [OrthogonalLearner(4), MODLearner(4)])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_start_is_its_iterations_written_out(learner, size, dtype):
    X = np.random.default_rng(3).standard_normal(size).astype(dtype)
    found = warm_start(X, learner, rng=np.random.default_rng(0), n_iter=12)
    D = learner.start(X, np.random.default_rng(0))
    for t in range(12):
        D = learner.update(X, learner.code(X, D, max(1.0, 8 * 0.97**t)), D)
    np.testing.assert_allclose(found.dictionary, D, atol=1e-4 if dtype == np.float32 else 1e-9)


# Local refinement

REFINERS = [
    OrthogonalLearner(6),
    GradientLearner(6, coding="threshold"),
    MODLearner(6, coding="threshold"),
]


@pytest.mark.parametrize("learner", REFINERS, ids=lambda x: type(x).__name__)
def test_refinement_finds_local_atoms_and_leaves_global_ones(rng, orthonormal, sparse, learner):
    D = orthonormal(6, 8)
    X = sparse(300, 6) @ D
    local = normalize_atoms(D[3:] + 0.1 * rng.standard_normal((3, 8)))
    if learner.orthogonal:
        local = polar_factor(local - local @ D[:3].T @ D[:3], D[3:])
    start = np.vstack([D[:3], local])
    refined = refine_local(X, start, 3, learner, n_iter=30)
    assert np.array_equal(refined[:3], D[:3])
    assert dictionary_distance(refined[3:], D[3:]) < 1e-3 * dictionary_distance(local, D[3:])
    if learner.orthogonal:
        assert np.allclose(refined @ refined.T, np.eye(6), atol=1e-12)


@pytest.mark.parametrize("n_global", [0, 6])
def test_nothing_local_and_nothing_global(rng, orthonormal, n_global):
    D, X = orthonormal(6, 8), rng.standard_normal((50, 8))
    before = D.copy()
    refined = refine_local(X, D, n_global, OrthogonalLearner(6), n_iter=2)
    expected = D if n_global else OrthogonalLearner(6).step(X, OrthogonalLearner(6).step(X, D))
    assert np.array_equal(refined, expected)
    assert np.array_equal(D, before)


# Real images


def test_a_pursuit_that_stops_is_hard_thresholding_of_orthonormal_atoms(rng, orthonormal):
    X, D = rng.standard_normal((40, 9)), orthonormal(7, 9)
    for threshold in (0.0, 0.7, 9.0):
        found = MODLearner(7, threshold=threshold).code(X, D)
        assert np.allclose(found, sparse_code(X, D, threshold=threshold), atol=1e-12)
    found = MODLearner(7, threshold=0.7).code(X, np.vstack([D, D[:2]]))  # twice the same atoms
    assert not found[:, 7:].any()


@pytest.mark.parametrize("cls", PLAIN, indirect=True)  # the codes of the lasso shrink
def test_steps_converge_to_the_planted_dictionary(cls, rng, orthonormal, sparse):
    truth = orthonormal(5, 7)
    X = sparse(300, 5) @ truth
    D = normalize_atoms(truth + 0.05 * rng.standard_normal((5, 7)))
    if cls.orthogonal:
        D = polar_factor(D, truth)
    learner = cls(5, threshold=0.15)
    for _ in range(150):
        D = learner.step(X, D)
    assert dictionary_distance(D, truth) < 1e-8
