from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flwr_perdl.dictionary import iterate, normalize_atoms
from perdl_experiments.perpca import personalized_pca
from perdl_experiments.studies import _methods, complete, configure, find, images

GIVEN: dict[str, Any] = {
    "clients": 3,
    "rounds": 6,
    "options": {"n_atoms": 12, "n_global": 6, "samples_per_client": 40, "methods": "all"},
}


def config() -> images.Config:
    return configure(find("digits"), **GIVEN)


def test_images_that_choose_are_not_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    task, learned, judged = config().task, [], []
    learn, error = _methods.learn, _methods._error

    def learning(method: str, setting: float, samples: Any, *given: Any) -> _methods.Learned:
        learned.extend(samples)
        return learn(method, setting, samples, *given)

    def judging(X: Any, D: Any) -> float:
        judged.append(X)
        return error(X, D)

    monkeypatch.setattr(_methods, "learn", learning)
    monkeypatch.setattr(_methods, "_error", judging)
    _methods.learn_tuned("finetuned", task.clients, config(), images.START)
    known, chosen = ({row.tobytes() for X in parts for row in X} for parts in (learned, judged))
    assert not known & chosen
    assert known | chosen == {row.tobytes() for X in task.clients for row in X}


def test_fine_tuning_keeps_what_is_best_for_each_client() -> None:
    task, learner = config().task, _methods.make_learner(config(), 12, 0.1)
    D = normalize_atoms(np.random.default_rng(0).standard_normal((12, 64)))
    steps = {0: 3, 1: 0, 2: 100}

    def error(client: int, tried: Any) -> float:
        once = iterate(learner, task.clients[client], D, [1.0] * steps[client])
        return float(np.abs(tried - once).max())

    found = _methods.finetuned(learner, D, task.clients, error)
    assert [taken for _, taken in found] == list(steps.values())
    np.testing.assert_array_equal(found[1][0], D)


def test_perpca_is_the_mathematics_in_one_place_rotated_to_principal_axes() -> None:
    task = config().task
    learned = _methods.learn("perpca", 1.0, task.clients, config(), images.START)
    expected = personalized_pca(task.clients, 6, 6, n_rounds=5)
    (shared,), U = learned.shared, expected.global_components
    np.testing.assert_allclose(shared.T @ shared, U.T @ U, atol=1e-12)
    assert [len(D) for D in learned.full] == [12] * 3
    pooled = np.vstack(task.clients)
    for X, axes in [(pooled, shared), (task.clients[1], learned.full[1][6:])]:
        products = axes @ X.T @ X @ axes.T
        np.testing.assert_allclose(products, np.diag(np.diag(products)), atol=1e-9)
        assert (np.diff(np.diag(products)) <= 0).all()


def test_the_papers_coder_keeps_the_largest_products_above_the_threshold() -> None:
    X = np.array([[3.0, -2.0, 0.4, 1.0], [0.1, 0.2, -0.6, 0.3]])
    D = np.eye(4)[[1, 0, 3, 2]]
    expected = [[-2.0, 3.0, 0, 0], [0, 0, 0, -0.6]]
    np.testing.assert_array_equal(complete.largest(X, D, 0.5, 2), expected)
