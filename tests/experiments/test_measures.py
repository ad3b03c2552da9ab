import numpy as np
import pytest
from skimage.metrics import structural_similarity as reference

from perdl_experiments.measures import quality, structural_similarity


@pytest.mark.parametrize(
    ("shape", "window"), [((28, 28), 11), ((8, 8), 7), ((5, 9), 5), ((3, 3), 3)]
)
def test_ssim_is_scikit_images(shape, window):
    rng = np.random.default_rng(0)
    images = rng.random((6, *shape))
    rebuilt = images + 0.3 * rng.standard_normal(images.shape)
    expected = [
        reference(x, y, data_range=1, gaussian_weights=True, sigma=1.5, win_size=window)
        for x, y in zip(images, np.clip(rebuilt, 0, 1), strict=True)
    ]
    np.testing.assert_allclose(structural_similarity(images, rebuilt), expected, atol=1e-12)


def test_quality_by_hand():
    images = np.array([np.full(9, 0.5), np.zeros(9)])
    rebuilt = np.array([np.full(9, 0.6), np.full(9, 0.01)])
    found = quality(images, rebuilt, (3, 3))
    assert found.mse == pytest.approx((0.01 + 0.0001) / 2)
    assert found.psnr == pytest.approx((20 + 40) / 2)
