"""Edge inputs, generated: a right result or one sentence; wrong types are tests/fuzz's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_perdl import dictionary as perdl
from flwr_perdl.dictionary import (
    GradientLearner,
    KSVDLearner,
    MODLearner,
    OrthogonalLearner,
    local_statistics,
    normalize_atoms,
)
from flwr_perdl.privacy import may_send


def with_one(A: np.ndarray, value: float) -> np.ndarray:
    A = A.copy()
    A.flat[A.argmax()] = value
    return A


#: What is odd about an array, made of a plain one.
ODD: dict[str, Callable[[np.ndarray], Any]] = {
    "plain": lambda A: A,
    "float32": lambda A: A.astype(np.float32),
    "zeros": np.zeros_like,
    "zero row": lambda A: np.vstack([0 * A[:1], A[1:]]),
    "constant": np.ones_like,
    "rank one": lambda A: np.outer(A[:, 0], A[0]),
    "long": lambda A: 1e3 * A,
    "huge": lambda A: 1e160 * A,
    "tiny": lambda A: 1e-160 * A,
    "huge in float32": lambda A: (1e20 * A).astype(np.float32),
    "tiny in float32": lambda A: (1e-25 * A).astype(np.float32),
    "a huge value": lambda A: with_one(A, 1e200),
    "NaN": lambda A: with_one(A, np.nan),
    "infinite": lambda A: with_one(A, -np.inf),
    "no rows": lambda A: A[:0],
    "no columns": lambda A: A[:, :0],
    "one row": lambda A: A[:1],
    "one column": lambda A: A[:, :1],
    "more rows": lambda A: np.vstack([A, A, A]),
    "transposed": lambda A: A.T,
    "integers": lambda A: A.astype(int),
    "complex": lambda A: A + 1j,
    "objects": lambda A: A.astype(object),
    "a list": lambda A: A.tolist(),
}
COUNTS = [0, 1, 2, 3, 4, 7, 100, -1, True, 1.5, None, "two", np.int64(2), np.nan]
REALS = [0.0, 0.1, 1.0, 2, -1.0, np.nan, np.inf, True, None, "one", np.float32(0.5), 1e300]

arrays = st.sampled_from(sorted(ODD))
counts = st.sampled_from(COUNTS)
reals = st.sampled_from(REALS)
kinds = st.sampled_from([OrthogonalLearner, GradientLearner, MODLearner, KSVDLearner])
options = st.fixed_dictionaries(
    {},
    optional={
        "threshold": reals | st.just("auto"),
        "n_nonzero": counts,
    },
)


def plain(seed: int, n: int, d: int = 5, *, unit: bool = False) -> np.ndarray:
    A = np.random.default_rng(seed).standard_normal((n, d))
    return normalize_atoms(A) if unit else A


def numbers(result: Any) -> list[np.ndarray]:
    """Return all numbers of a result."""
    if isinstance(result, dict):
        return [A for one in result.values() for A in numbers(one)]
    if isinstance(result, list | tuple):
        return [A for one in result for A in numbers(one)]
    return [np.asarray(result)]


def answers(call: Callable[[], Any], *shapes: tuple[int, ...]) -> None:
    """Hold that a call gives finite numbers, of these shapes, or one sentence."""
    try:
        result, said = call(), ""
    except (ValueError, TypeError) as error:
        result, said = (), str(error) if type(error) in (ValueError, TypeError) else repr(error)
    if said:
        assert said.endswith(".")
        assert not any(words in said for words in ("\n", "operands could not", "matmul"))
    found = numbers(result)
    for A in found:
        if A.dtype.kind == "f":
            assert np.isfinite(A).all()
    for A, shape in zip(found, shapes, strict=False):
        assert A.shape == shape


generated = settings(max_examples=60)


@pytest.mark.parametrize(
    "name",
    [
        "atom_distances",
        "dictionary_distance",
        "match_atoms",
        "align_to_global",
        "polar_factor",
        "normalize_atoms",
        "reconstruct",
    ],
)
@generated
@given(first=arrays, second=arrays)
def test_two_dictionaries(name: str, first: str, second: str) -> None:
    A, B = ODD[first](plain(0, 3, unit=True)), ODD[second](plain(1, 4, unit=True))
    arguments = (B, A) if name == "align_to_global" else (A, B)
    answers(lambda: getattr(perdl, name)(*arguments))


@generated
@given(samples=arrays, atoms=arrays, count=counts, real=reals)
def test_coders(samples: str, atoms: str, count: Any, real: Any) -> None:
    X, D = ODD[samples](plain(0, 6)), ODD[atoms](plain(1, 4, unit=True))
    answers(lambda: perdl.omp(X, D, count))
    answers(lambda: perdl.sparse_code(X, D, threshold=real))
    answers(lambda: perdl.lasso(X, D, real, max_iter=20))
    answers(lambda: perdl.sparse_code(X, D, n_nonzero=count, alpha=real))
    answers(lambda: perdl.atom_support(X))
    answers(lambda: perdl.hard_threshold(X, real))
    answers(lambda: perdl.soft_threshold(X, real))


@generated
@given(kind=kinds, n_atoms=counts, given=options, samples=arrays, atoms=arrays)
def test_learners(kind: Any, n_atoms: Any, given: Any, samples: str, atoms: str) -> None:
    X, D = ODD[samples](plain(0, 6)), ODD[atoms](plain(1, 4, unit=True))
    rng = np.random.default_rng(2)
    answers(lambda: kind(n_atoms, **given).start(X, rng))
    answers(lambda: kind(n_atoms, **given).step(X, D))
    answers(lambda: kind(n_atoms, **given).code(X, D))
    answers(lambda: kind(4).update(X, X, D))
    answers(lambda: kind(4).loss(X, X, D))
    answers(lambda: perdl.warm_start(X, kind(n_atoms, **given), rng=rng, n_iter=3))


@generated
@given(kind=kinds, samples=arrays, atoms=arrays, count=counts, other=counts)
def test_clients(kind: Any, samples: str, atoms: str, count: Any, other: Any) -> None:
    X, D = ODD[samples](plain(0, 6)), ODD[atoms](plain(1, 4, unit=True))
    algorithm = kind(4)
    answers(lambda: perdl.refine_local(X, D, count, algorithm, n_iter=other))
    for shared in ([], [True], [True] * 5, [1.0], count):
        answers(lambda shared=shared: local_statistics(X, D, D, shared, orthogonal=kind.orthogonal))
    answers(lambda: perdl.update_weights(algorithm, X, algorithm.code(X, D), D))
    answers(lambda: may_send(D, X, count))


@generated
@given(
    odd=st.lists(arrays, max_size=3),
    n_global=counts | st.just("auto"),
    method=st.sampled_from(["consensus", "paths", "mean", None]),
)
def test_matching(odd: list[str], n_global: Any, method: Any) -> None:
    clients = [ODD[one](plain(i, 4, unit=True)) for i, one in enumerate(odd)]
    answers(lambda: perdl.global_matching(clients, n_global, method=method))
    answers(lambda: perdl.personalized_pca(clients, n_global, 1, n_rounds=2))
    answers(lambda: perdl.personalized_pca(clients, 1, n_global, n_rounds=1, step=0.5))


@generated
@given(
    odd=st.lists(arrays, min_size=1, max_size=3),
    atoms=arrays,
    method=st.sampled_from([*("mean", "weighted", "median", "geometric-median", "trimmed"), "sum"]),
    orthogonal=st.booleans(),
    weights=st.sampled_from([None, [1.0], [0.0, 1.0], [np.nan] * 2, [1.0, 2.0], "ab"]),
)
def test_servers(odd: list[str], atoms: str, method: str, orthogonal: bool, weights: Any) -> None:
    current = ODD[atoms](np.linalg.qr(plain(9, 3).T)[0].T)
    try:
        stack = np.stack([ODD[one](plain(i, 3)) for i, one in enumerate(odd)])
    except (ValueError, TypeError):  # arrays of several shapes make no stack
        return
    answers(lambda: perdl.aggregate_statistics(stack, current, orthogonal=orthogonal))
    if stack.ndim == 3 and odd != ["objects"]:
        squares = np.concatenate([stack[:, :, : stack.shape[1]], stack], axis=2)
        answers(lambda: perdl.aggregate_statistics(squares, current, orthogonal=False))
    given = {"method": method, "weights": weights, "orthogonal": orthogonal}
    answers(lambda: perdl.aggregate_atoms(stack, current, **given))
    if isinstance(current, np.ndarray):
        options = {"weights": weights, "orthogonal": orthogonal}
        answers(lambda: perdl.average_dictionaries(stack, current[:-1], **options))
