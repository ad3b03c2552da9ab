"""Outcomes of kind stay where inputs move by an ulp, and where clients are permuted or rescaled.

Recovered or not, converged or not, which atoms are withheld, who is left out, how many are counted:
on data where linear algebra is tempted to decide by rounding (constant, rank-one, duplicate, few
samples). ``make test-kernels`` runs these tests with several of OpenBLAS's kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flwr_perdl.dictionary import (
    GradientLearner,
    KSVDLearner,
    LassoLearner,
    Learner,
    MODLearner,
    OrthogonalLearner,
    global_matching,
    omp,
    refine_local,
    remainder,
    warm_start,
)
from flwr_perdl.dictionary.aggregation import aggregate_statistics
from flwr_perdl.dictionary.learners import atom_support, update_weights
from flwr_perdl.privacy import may_send

Rng = np.random.Generator
Change = Callable[[np.ndarray, Rng], np.ndarray]

D, R, SHARED = 8, 4, 2


def ulp(A: np.ndarray, rng: Rng) -> np.ndarray:
    """Move most numbers to one beside them; zeros are what was never computed, and stay."""
    towards = rng.choice(np.array([-np.inf, np.inf], A.dtype), A.shape)
    return np.where((rng.random(A.shape) < 0.7) & (A != 0), np.nextafter(A, towards), A)


def rotation(rng: Rng, d: int = D) -> np.ndarray:
    return np.linalg.qr(rng.standard_normal((d, d)))[0]


def constant(rng: Rng, n: int) -> np.ndarray:
    return np.full((n, D), 0.3)


def rank_one(rng: Rng, n: int) -> np.ndarray:
    return rng.standard_normal((n, 1)) * rng.standard_normal(D)


def duplicate(rng: Rng, n: int) -> np.ndarray:
    return rng.standard_normal((3, D))[rng.integers(3, size=n)]


def few(rng: Rng, n: int) -> np.ndarray:
    return rng.standard_normal((2, D))


def sparse(rng: Rng, n: int) -> np.ndarray:
    codes = rng.choice([-1.0, 1.0], (n, R)) * (rng.random((n, R)) < 0.4)
    return (1 + rng.random((n, R))) * codes @ rotation(rng)[:R]


DATA = [constant, rank_one, duplicate, few, sparse]
LEARNERS: list[Learner] = [
    OrthogonalLearner(R),
    GradientLearner(R, n_nonzero=2),
    MODLearner(R, n_nonzero=2),
    KSVDLearner(R, n_nonzero=2),
    LassoLearner(R),
]
CHANGES: dict[str, Change] = {
    "ulp": ulp,
    "permuted": lambda X, rng: X[rng.permutation(len(X))],
    "rescaled": lambda X, rng: 2.0**-30 / 3 * X,
}
changes = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
kinds = pytest.mark.parametrize("make", DATA)
dtypes = pytest.mark.parametrize("dtype", [np.float64, np.float32])


def learned(X: np.ndarray, learner: Learner) -> tuple[np.ndarray, float, list[bool]]:
    """Return a start's dictionary, its relative error, and which atoms are withheld."""
    atoms = warm_start(X, learner, rng=np.random.default_rng(7), n_iter=12).dictionary
    C = learner.code(X, atoms)
    error = np.linalg.norm(X - C @ atoms) / np.linalg.norm(X)
    return atoms, float(error), (atom_support(C) >= 3).tolist()


@dtypes
@changes
@kinds
@pytest.mark.parametrize("learner", LEARNERS, ids=lambda one: type(one).__name__)
def test_a_start_is_as_good_and_withholds_the_same(
    learner: Learner, make: Any, change: Change, dtype: Any
) -> None:
    rng = np.random.default_rng(1)
    X = make(rng, 12).astype(dtype)
    (_, error, withheld) = learned(X, learner)
    (_, other, again) = learned(change(X, rng).astype(dtype), learner)
    assert withheld == again
    assert other == pytest.approx(error, rel=1e-2, abs=1e-4)


@dtypes
@changes
@kinds
def test_an_update_sends_the_same(make: Any, change: Change, dtype: Any) -> None:
    rng = np.random.default_rng(2)
    X = make(rng, 12).astype(dtype)
    start = np.vstack([np.linalg.svd(X)[2][:1], rotation(rng)[:3].astype(dtype)])
    moved = change(X, rng).astype(dtype)
    for learner in LEARNERS[1:]:
        sent = []
        for Y in (X, moved):
            C = learner.code(Y, start)
            sent += [may_send(C, Y, 3), may_send(update_weights(learner, Y, C, start), Y, 3)]
        np.testing.assert_array_equal(sent[:2], sent[2:])


@dtypes
@changes
def test_what_is_left_of_an_exact_fit_makes_no_atoms(change: Change, dtype: Any) -> None:
    """Rounding would double the global atom, and the samples would go to either one."""
    rng = np.random.default_rng(3)
    for d in (8, 192, 2000):
        X = change(np.full((4, d), 0.7), rng).astype(dtype)
        G = np.linalg.svd(X, full_matrices=False)[2][:1]
        other = np.linalg.qr(np.vstack([G, rng.standard_normal((1, d))]).T)[0].T[1:].astype(dtype)
        atoms = np.vstack([G, other])
        for learner in (GradientLearner(2, n_nonzero=2), OrthogonalLearner(2)):
            np.testing.assert_array_equal(refine_local(X, atoms, 1, learner), atoms)
        assert not remainder(X, (X @ G.T) @ G).any()
        C = omp(X, np.vstack([atoms, G]), 3)
        assert C[:, 0].all()
        assert not C[:, 1:].any()


def federation(rng: Rng, n: int, shared: int, r: int = R, eps: float = 0.05) -> list[np.ndarray]:
    """Return orthonormal dictionaries, the first atoms of which all clients have nearly alike."""
    G = rotation(rng)[:shared]
    found = []
    for _ in range(n):
        own = rng.standard_normal((r - shared, D))
        near = G + eps * rng.standard_normal(G.shape) / np.sqrt(D)
        atoms = np.linalg.qr(np.vstack([near, own]).T)[0].T
        atoms *= np.sign((atoms * np.vstack([near, own])).sum(axis=1))[:, None]
        found.append(rng.choice([-1, 1], (r, 1)) * atoms[rng.permutation(r)])
    return found


@pytest.mark.parametrize("method", ["consensus", "paths"])
@pytest.mark.parametrize("eps", [0, 0.05])
@pytest.mark.parametrize("shared", [0, 2, 4])
def test_the_count_stays(shared: int, eps: float, method: str) -> None:
    rng = np.random.default_rng(5)
    clients = federation(rng, 7, shared, eps=eps)
    moved = [
        [ulp(one, rng) for one in clients],
        [-one[rng.permutation(R)] for one in clients],
        [one.astype(np.float32) for one in clients],
        clients + clients,
    ]
    if method == "consensus":  # a chain has an order
        moved += [clients[::-1], [clients[i] for i in rng.permutation(7)]]
    counts = [len(global_matching(one, "auto", method=method).global_atoms) for one in moved]
    assert counts == [shared] * len(moved)


def replies(rng: Rng, kind: str, orthogonal: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the current atoms, and seven clients' statistics, the last one's of another world."""
    G = rotation(rng)[:SHARED]
    stack = []
    for i in range(7):
        codes = rng.standard_normal((9, SHARED))
        if kind == "rank-one":
            codes = codes[:, :1] * np.ones(SHARED)
        atoms = rotation(rng)[:SHARED] if i == 6 and kind != "rank-one" else G
        own = codes.T @ codes
        stack.append(own @ atoms if orthogonal else np.hstack([own, own @ atoms]))
    if kind == "duplicate":
        stack[1:6] = [stack[0]] * 5
    if kind == "few":
        for one in stack[3:5]:
            one[0] = 0
    return G, np.stack(stack)


@dtypes
@pytest.mark.parametrize("orthogonal", [True, False])
@pytest.mark.parametrize("kind", ["plain", "rank-one", "duplicate", "few"])
def test_who_is_left_out_stays(kind: str, orthogonal: bool, dtype: Any) -> None:
    rng = np.random.default_rng(8)
    G, stack = (A.astype(dtype) for A in replies(rng, kind, orthogonal))
    found = aggregate_statistics(stack, G, orthogonal=orthogonal)
    assert found.kept.tolist() == [True] * 6 + [kind == "rank-one"]
    scales = np.array([1, 1, 1, 2**20, 1, 2.0**-20, 1], dtype)[:, None, None]
    for moved in (ulp(stack, rng), 2**40 * stack, stack / dtype(3), scales * stack):
        again = aggregate_statistics(moved.astype(dtype), ulp(G, rng), orthogonal=orthogonal)
        np.testing.assert_array_equal(again.kept, found.kept)
    order = rng.permutation(7)
    again = aggregate_statistics(stack[order], G, orthogonal=orthogonal)
    np.testing.assert_array_equal(again.kept, found.kept[order])
    tolerance = 1e-9 if dtype is np.float64 else 1e-3
    np.testing.assert_allclose(again.global_atoms, found.global_atoms, atol=tolerance)
