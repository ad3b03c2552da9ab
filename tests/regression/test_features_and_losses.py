from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import approx_fprime
from sklearn.preprocessing import PolynomialFeatures

from flwr_perdl.regression import LogisticLoss, Polynomial
from flwr_perdl.regression.losses import SQUARED


@pytest.mark.parametrize("degree", [1, 2, 3])
@pytest.mark.parametrize("intercept", [True, False])
def test_polynomial_features_are_scikit_learns(degree: int, intercept: bool) -> None:
    X = np.random.default_rng(0).standard_normal((5, 3))
    ours = Polynomial(degree, intercept)(X)
    theirs = PolynomialFeatures(degree, include_bias=intercept).fit_transform(X)
    np.testing.assert_allclose(ours, theirs, rtol=1e-14)


@pytest.mark.parametrize("loss", [SQUARED, LogisticLoss()])
def test_gradients_are_those_of_the_values(loss: LogisticLoss) -> None:
    rng = np.random.default_rng(1)
    X, theta = rng.standard_normal((7, 4)), rng.standard_normal(4)
    y = np.sign(rng.standard_normal(7))
    numeric = approx_fprime(theta, lambda t: float(loss.values(X, y, t[None])[0]))
    np.testing.assert_allclose(loss.gradient(X, y, theta), numeric, atol=1e-6)


@pytest.mark.parametrize("shape", [(3, 6), (9, 4), (1, 2)])
def test_curvature_of_the_squared_loss_is_the_largest_eigenvalue(shape: tuple[int, int]) -> None:
    X = np.random.default_rng(2).standard_normal(shape)
    largest = np.linalg.norm(X, 2) ** 2 / len(X)
    assert SQUARED.curvature(X) == pytest.approx(largest, rel=1e-12)
    assert LogisticLoss().curvature(X) == pytest.approx(largest / 4, rel=1e-12)


def test_squared_loss_by_hand() -> None:
    X, y = np.array([[1.0, 0.0], [0.0, 2.0]]), np.array([1.0, 4.0])
    centers = np.array([[1.0, 2.0], [0.0, 0.0]])
    np.testing.assert_allclose(SQUARED.values(X, y, centers), [0.0, (1 + 16) / 4])
