"""Many matrices at once: the bits of one by one, whatever their shapes and ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flwr_perdl.dictionary import (
    OrthogonalLearner,
    align_to_global,
    local_statistics,
    match_atoms,
    normalize_atoms,
    polar_factor,
    update_support,
)
from flwr_perdl.dictionary.atoms import match_stack
from flwr_perdl.dictionary.polar import polar_factors
from flwr_perdl.dictionary.stacks import update_stack
from tests.bits import assert_same_bits

DTYPES = st.sampled_from([np.float64, np.float32])


def orthonormal(m: int, r: int, d: int, rng: np.random.Generator) -> np.ndarray:
    """Return a stack of dictionaries with orthonormal rows."""
    return np.linalg.qr(rng.standard_normal((m, d, r)))[0].swapaxes(1, 2).copy()


@given(
    m=st.integers(1, 6),
    r=st.integers(1, 9),
    more=st.integers(0, 20),
    dtype=DTYPES,
    fault=st.sampled_from(["none", "zero rows", "zero", "rank", "ill"]),
    seed=st.integers(0, 2**16),
)
def test_polar_factors_are_those_of_one_by_one(
    m: int, r: int, more: int, dtype: type, fault: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    S = rng.standard_normal((m, r, r + more)) * 10.0 ** rng.integers(-3, 4, (m, 1, 1))
    some = S[: m // 2 + 1]
    if fault == "zero rows":
        some[:, : r // 2 + 1] = 0
    if fault == "zero":
        some[:] = 0
    if fault == "rank":
        some[:] = some[:, :, :1] * some[:, :1]
    if fault == "ill":
        some *= 10.0 ** -np.linspace(0, 9, r)[:, None]
    S, D = S.astype(dtype), orthonormal(m, r, r + more, rng).astype(dtype)
    for found, one, fallback in zip(polar_factors(S, D), S, D, strict=True):
        assert_same_bits(found, polar_factor(one.copy(), fallback))
        np.testing.assert_allclose(found @ found.T, np.eye(r), atol=2e-6)


@given(
    m=st.integers(1, 5),
    a=st.integers(1, 6),
    more=st.integers(0, 5),
    d=st.integers(1, 40),
    dtype=DTYPES,
    close=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_matches_are_those_of_one_by_one(
    m: int, a: int, more: int, d: int, dtype: type, close: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    A, B = rng.standard_normal((a, d)), rng.standard_normal((m, a + more, d))
    if close:
        B[:, rng.permutation(a + more)[:a]] = -A + 1e-3 * rng.standard_normal((m, a, d))
    A, B = (X / np.linalg.norm(X, axis=-1, keepdims=True) for X in (A, B))
    A, B = A.astype(dtype), B.astype(dtype)
    indices, signs = match_stack(A, B)
    for i in range(m):
        alone = match_atoms(A, B[i])
        np.testing.assert_array_equal(indices[i], alone.indices)
        np.testing.assert_array_equal(signs[i], alone.signs)
        assert signs.dtype == alone.signs.dtype


def test_an_empty_stack_has_no_factors() -> None:
    assert polar_factors(np.zeros((0, 2, 3)), np.zeros((0, 2, 3))).shape == (0, 2, 3)


@pytest.mark.parametrize("size", [1, 40])
def test_large_dictionaries(size: int) -> None:
    rng = np.random.default_rng(size)
    S, D = rng.standard_normal((2, size, 130)), orthonormal(2, size, 130, rng)
    for found, one, fallback in zip(polar_factors(S, D), S, D, strict=True):
        assert_same_bits(found, polar_factor(one, fallback))


@example(
    m=3,
    n_global=3,
    n_local=3,
    n_steps=1,
    n_nonzero=None,
    orthonormal_atoms="none",
    exact=False,
    seed=5392,
)
@given(
    m=st.integers(1, 3),
    n_global=st.integers(0, 3),
    n_local=st.integers(0, 3),
    n_steps=st.integers(1, 2),
    n_nonzero=st.sampled_from([None, 1]),
    orthonormal_atoms=st.sampled_from(["all", "global", "local", "none"]),
    exact=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_updates_are_what_they_are_defined_to_be(
    m: int,
    n_global: int,
    n_local: int,
    n_steps: int,
    n_nonzero: int | None,
    orthonormal_atoms: str,
    exact: bool,
    seed: int,
) -> None:
    n_atoms = max(n_global + n_local, 1)
    learner = OrthogonalLearner(n_atoms, n_nonzero=n_nonzero)
    rng, d = np.random.default_rng(seed), n_atoms + 2
    G = np.linalg.qr(rng.standard_normal((d, n_global)))[0].T
    D = orthonormal(m, n_atoms, d, rng)
    if orthonormal_atoms in ("local", "none"):
        G = normalize_atoms(rng.standard_normal((n_global, d)))
    if orthonormal_atoms in ("global", "none"):
        D = np.stack([normalize_atoms(rng.standard_normal((n_atoms, d))) for _ in range(m)])
    D[:, :n_global] = G
    X = rng.standard_normal((m, 7, n_atoms)) @ D + (not exact) * rng.standard_normal((m, 7, d))
    for statistics in (True, False):
        found = update_stack(
            X,
            D,
            G,
            learner,
            n_steps=n_steps,
            statistics=statistics,
            min_support=4,
        )
        for i in range(m):
            atoms, codes = D[i], learner.code(X[i], D[i])
            error = np.mean((X[i] - codes @ atoms) ** 2)
            for _ in range(n_steps):
                before, codes = atoms, learner.code(X[i], atoms)
                aligned = align_to_global(learner.update(X[i], codes, atoms), G)
                atoms = np.vstack([aligned.global_atoms, aligned.local_atoms])
            sent = local_statistics(X[i], codes, before, n_global, orthogonal=True, min_support=4)
            if not statistics:
                supported = update_support(X[i], codes, atoms, learner)[:n_global] >= 4
                sent = np.where(supported[:, None], atoms[:n_global], 0)
            assert found.errors[i] == pytest.approx(error, rel=1e-6, abs=1e-12)
            local = found.dictionaries[i, n_global:]
            np.testing.assert_allclose(local, atoms[n_global:], atol=1e-9)
            np.testing.assert_allclose(found.sent[i], sent, atol=1e-8)
