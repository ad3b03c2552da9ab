from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from flwr_perdl.clients import DictionaryAveragingClient
from flwr_perdl.dictionary import (
    GradientLearner,
    Learner,
    MODLearner,
    OrthogonalLearner,
    average_dictionaries,
    common_start,
    normalize_atoms,
)

RNG = np.random.default_rng(0)


def unit(*shape: int) -> np.ndarray:
    return normalize_atoms(RNG.standard_normal(shape))


def sent(D: np.ndarray, spare: np.ndarray | None = None) -> np.ndarray:
    return np.vstack([D, np.zeros(D.shape[1]) if spare is None else spare])


def test_averages_by_hand() -> None:
    A, B = np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[0.0, 1.0], [0.0, 1.0]])
    stack = np.stack([sent(A), sent(B)])
    plain = average_dictionaries(stack, A, orthogonal=False)
    np.testing.assert_allclose(plain, [[0.5**0.5, 0.5**0.5], [0, 1]])
    weighted = average_dictionaries(stack, A, weights=np.array([3.0, 1.0]), orthogonal=False)
    np.testing.assert_allclose(weighted, normalize_atoms(np.array([[3.0, 1.0], [0.0, 1.0]])))


def test_an_atom_that_one_client_withholds_is_the_others() -> None:
    A, B = unit(3, 5), unit(3, 5)
    withheld = A.copy()
    withheld[1] = 0
    average = average_dictionaries(np.stack([sent(withheld), sent(B)]), A, orthogonal=False)
    np.testing.assert_allclose(average[1], B[1])


@pytest.mark.parametrize("orthogonal", [False, True])
@pytest.mark.parametrize("replace", [False, True])
def test_an_atom_that_nobody_uses_becomes_what_is_missing(orthogonal: bool, replace: bool) -> None:
    basis = np.linalg.qr(np.random.default_rng(1).standard_normal((8, 8)))[0].T
    current, missing = basis[:3], basis[5]
    used = current.copy()
    used[2] = 0
    stack = np.stack([sent(used, missing), sent(used, -missing), sent(used)])
    found = average_dictionaries(stack, current, orthogonal=orthogonal, replace=replace)
    np.testing.assert_allclose(found[:2], current[:2], atol=1e-12)
    expected = missing if replace else current[2]
    assert abs(found[2] @ expected) == pytest.approx(1)
    np.testing.assert_allclose(found @ found.T, np.eye(3), atol=1e-12)


def test_unused_atoms_that_are_not_replaced_stay() -> None:
    basis = np.linalg.qr(np.random.default_rng(2).standard_normal((9, 9)))[0].T
    current, missing = basis[:5], normalize_atoms(basis[[3]] + basis[[6]])[0]
    used = current.copy()
    used[2:] = 0
    found = average_dictionaries(np.stack([sent(used, missing)] * 2), current, orthogonal=True)
    np.testing.assert_array_equal(found[3:], current[3:])
    np.testing.assert_allclose(found[:2], current[:2], atol=1e-12)
    assert abs(found[2] @ basis[6]) == pytest.approx(1)
    np.testing.assert_allclose(found @ found.T, np.eye(5), atol=1e-12)


def test_directions_that_the_dictionary_spans_already_replace_nothing() -> None:
    current = np.eye(4)[:3]
    used = current.copy()
    used[2] = 0
    stack = np.stack([sent(used, np.eye(4)[0])] * 2)
    np.testing.assert_array_equal(average_dictionaries(stack, current, orthogonal=True), current)


def asked(X: np.ndarray, D: np.ndarray, learner: Learner, n_steps: int = 1, **options: Any) -> Any:
    """Return what a client sends, and its error, where it is sent the dictionary of all."""
    context = Context(1, 1, {"partition-id": 0}, RecordDict(), {})
    client = DictionaryAveragingClient(X, learner, context, **options)
    config = {"perdl.step": "average", "server-round": 1, "perdl.seed": 0, "perdl.run": "r"}
    (sent,), _, metrics = client.fit([D], {**config, "perdl.local-steps": n_steps})
    return sent, metrics["mse"]


def test_an_unused_atom_is_withheld_with_the_residuals_direction() -> None:
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.standard_normal((6, 6)))[0].T
    X = np.hstack([rng.choice([-3.0, 3.0], (60, 2)), rng.choice([-1.0, 1.0], (60, 1))]) @ basis[:3]
    sent, _ = asked(X, basis[[0, 1, 5]], OrthogonalLearner(3, threshold=0.5))
    np.testing.assert_allclose(sent[:2] @ basis[:2].T, np.eye(2), atol=1e-2)
    assert not sent[2].any()
    assert abs(sent[3] @ basis[2]) == pytest.approx(1, abs=1e-2)


def test_where_all_atoms_are_used_no_residual_is_sent() -> None:
    X = np.random.default_rng(0).standard_normal((200, 6))
    sent, error = asked(X, np.eye(6)[:4], MODLearner(4))
    assert np.all(np.any(sent[:-1] != 0, axis=1))
    assert not sent[-1].any()
    assert error < np.mean(X**2)


def test_steps_are_the_learners() -> None:
    X = np.random.default_rng(0).standard_normal((100, 6))
    learner, D = GradientLearner(5), unit(5, 6)
    sent, _ = asked(X, D, learner, n_steps=2, min_support=0)
    np.testing.assert_array_equal(sent[:-1], learner.step(X, learner.step(X, D)))


def test_the_common_start_is_the_largest_clients() -> None:
    own = {3: unit(4, 6), 1: unit(4, 6), 2: unit(4, 6)}
    own[1][2] = 0
    start = common_start(own, {1: 50, 2: 20, 3: 50}, np.random.default_rng(0))
    np.testing.assert_allclose(start[[0, 1, 3]], own[1][[0, 1, 3]])
    np.testing.assert_allclose(np.linalg.norm(start, axis=1), 1)


def test_orthonormal_atoms_stay_so_where_some_of_the_start_are_withheld() -> None:
    rng = np.random.default_rng(0)
    D = np.linalg.qr(rng.standard_normal((6, 6)))[0][:4]
    held_back = np.array([False, True, False, True])
    own = {0: np.where(held_back[:, None], 0, D)}
    start = common_start(own, {0: 9}, np.random.default_rng(1), orthogonal=True)
    np.testing.assert_allclose(start @ start.T, np.eye(4), atol=1e-12)
    np.testing.assert_allclose(start[~held_back], D[~held_back], atol=1e-12)
    other = common_start(own, {0: 9}, np.random.default_rng(2), orthogonal=True)
    assert not np.allclose(start[held_back], other[held_back])
