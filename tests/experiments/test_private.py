"""The experiment private: what noise costs, and beside what."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import numpy as np
import pytest

from flwr_perdl.privacy.noise import noise_multiplier
from perdl_experiments.studies import private
from tests.studies import config_of


@pytest.mark.parametrize(("trust", "shares"), [("distributed", 5 / 4), ("central", 1)])
def test_the_components_second_moments_have_the_noise_of_the_promise(
    trust: str, shares: float
) -> None:
    one = config_of("private", clients=5, trust=trust)
    images = np.vstack([one.space.project(X) for X in one.task.clients])
    images /= np.linalg.norm(images, axis=1, keepdims=True)
    noise = private.noised_moments(one) - images.T @ images
    np.testing.assert_array_equal(noise, noise.T)
    sigma = sqrt(shares) * noise_multiplier(one.epsilon, private.DELTA)
    apart = noise[np.triu_indices(len(noise), 1)]
    assert apart.std() == pytest.approx(sigma / sqrt(2), rel=0.1)
    assert np.diag(noise).std() == pytest.approx(sigma, rel=0.3)
    found = private.principal_components(replace(one, epsilon=1e3))
    exact = np.linalg.svd(images, full_matrices=False)[1][: private.N_ATOMS]
    assert np.sum((images @ found.T) ** 2) == pytest.approx(np.sum(exact**2), rel=1e-3)


def test_more_frequencies_than_pixels_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"^basis"):
        config_of("private", basis=65)
