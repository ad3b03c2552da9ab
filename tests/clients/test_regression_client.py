"""The client of mixed regression alone: what it is asked, what it replies, what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flwr_perdl.clients.mixed_regression import RegressionClient
from flwr_perdl.regression import LogisticLoss, Polynomial
from tests.grids import context_of

RNG = np.random.default_rng(0)
X = RNG.standard_normal((15, 4))
THETA = RNG.standard_normal((3, 4))
Y = X @ THETA[1] + 0.1 * RNG.standard_normal(15)


def asks(step: str, round_: int = 1, **options: Any) -> dict[str, Any]:
    given = {f"perdl.option.{name}": value for name, value in options.items()}
    config = {"perdl.protocol": "mixed_regression", "perdl.step": step}
    return {**config, "server-round": round_, "perdl.seed": 0, **given}


UPDATE: dict[str, Any] = {"local": "fedavg", "n_steps": 1, "step_size": 0.1}


def client(**options: Any) -> RegressionClient:
    return RegressionClient(X, Y, context_of(3), **options)


def test_a_description_is_its_curvature_and_mean_squares() -> None:
    (sent,), n, metrics = client().fit([], asks("describe"))
    values = np.linalg.eigvalsh(X.T @ X / 15)
    np.testing.assert_allclose(sent, [values[-1], *np.mean(X**2, axis=0)])
    assert (n, metrics) == (15, {})


def test_an_update_is_its_cluster_its_loss_and_one_gradient_step() -> None:
    (sent,), n, _ = client().fit([THETA, np.zeros((0, 4))], asks("update", **UPDATE))
    residual = Y - X @ THETA[1]
    np.testing.assert_allclose(sent[0, :2], [residual @ residual / 30, 1])
    np.testing.assert_allclose(sent[0, 2:], 0.1 * X.T @ residual / 15)
    assert (sent.shape, n) == ((1, 6), 15)


def test_it_keeps_no_arrays_and_changes_nothing() -> None:
    node, arrays = context_of(3), [THETA.copy(), np.zeros((0, 4))]
    before = X.copy(), Y.copy()
    replies = [
        RegressionClient(X, Y, node).fit(arrays, asks("update", **UPDATE))[0][0] for _ in range(2)
    ]
    np.testing.assert_array_equal(*replies)
    assert not node.state.array_records
    for now, then in zip((X, Y, arrays[0]), (*before, THETA), strict=True):
        np.testing.assert_array_equal(now, then)


def test_it_evaluates_its_clusters_model_on_held_out_data() -> None:
    held_out = X[:5], Y[:5] + 1
    loss, n, metrics = client(evaluation=held_out).evaluate([THETA], asks("evaluate"))
    mse = np.mean((Y[:5] + 1 - X[:5] @ THETA[1]) ** 2)
    assert (n, metrics["cluster"]) == (5, 1)
    assert metrics["mse"] == pytest.approx(mse)
    assert loss == pytest.approx(mse / 2)
    for wrong in (("a", "a"), (X, Y[:5]), (X[:, :2], Y)):
        with pytest.raises(ValueError, match=r"^evaluation [Xy] must"):
            client(evaluation=wrong)


def test_it_predicts_with_its_clusters_model() -> None:
    new = RNG.standard_normal((6, 4))
    np.testing.assert_allclose(client().predict(THETA, new), new @ THETA[1])


def test_a_feature_map_comes_first() -> None:
    features = Polynomial(2)
    mapped = features(X)
    with_map = client(features=features, evaluation=(X, Y))
    plain = RegressionClient(mapped, Y, context_of(3), evaluation=(mapped, Y))
    models = RNG.standard_normal((2, mapped.shape[1]))
    asked = [models, np.zeros((0, mapped.shape[1]))], asks("update", **UPDATE)
    np.testing.assert_array_equal(with_map.fit(*asked)[0][0], plain.fit(*asked)[0][0])
    measured = [one.evaluate([models], asks("evaluate")) for one in (with_map, plain)]
    assert measured[0] == measured[1]
    np.testing.assert_array_equal(with_map.predict(models, X), plain.predict(models, mapped))


def test_another_loss_has_no_mean_squared_error() -> None:
    signs = np.where(Y > 0, 1.0, -1.0)
    logistic = RegressionClient(X, signs, context_of(3), loss=LogisticLoss())
    loss, _, metrics = logistic.evaluate([THETA[1:2]], asks("evaluate"))
    assert loss == float(f"{np.mean(np.log1p(np.exp(-signs * (X @ THETA[1])))):.6g}")
    assert set(metrics) == {"cluster"}
