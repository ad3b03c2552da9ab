"""How close a reconstruction comes to its image, and when a learning curve reaches its goal.

Images are rows, brought to [0, 1]. The error and the PSNR are taken of the reconstructions as they
are, SSIM of the reconstructions clipped to [0, 1]. PSNR and SSIM are means over images.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy import stats
from scipy.ndimage import gaussian_filter1d

from flwr_perdl.core.checks import Matrix

SIGMA = 1.5
#: Probability that an interval covers the mean difference.
COVERAGE = 0.95
_REACH = 5  # the Gaussian window ends 3.5 sigma from its center
_FLOOR = 1e-10  # an image rebuilt exactly counts as 100 dB


class Quality(NamedTuple):
    """Reconstruction quality over a set of images.

    Attributes
    ----------
    mse : float
        Mean squared error per pixel.
    psnr : float
        Mean over images of 10 log10(1 / error), in dB.
    ssim : float
        Mean structural similarity.
    """

    mse: float
    psnr: float
    ssim: float


def quality(images: Matrix, reconstructions: Matrix, shape: tuple[int, int]) -> Quality:
    """Measure reconstructions against their images.

    Parameters
    ----------
    images, reconstructions : ndarray of shape (n_images, height * width)
        One image per row, values in [0, 1].
    shape : tuple of int
        Height and width, at least 3 each.

    Returns
    -------
    Quality
        MSE, PSNR and SSIM.
    """
    errors = np.mean((images - reconstructions) ** 2, axis=1)
    psnr = -10 * np.log10(np.maximum(errors, _FLOOR))
    stack = (-1, *shape)
    ssim = structural_similarity(images.reshape(stack), reconstructions.reshape(stack))
    return Quality(float(errors.mean()), float(psnr.mean()), float(ssim.mean()))


def structural_similarity(images: Matrix, reconstructions: Matrix) -> Matrix:
    """Return the SSIM of every image with its reconstruction (Wang et al., 2004).

    Gaussian window (sigma 1.5, 11 pixels wide), data range 1, sample covariances, mean over the
    pixels that the window covers wholly: scikit-image's figure, for all images at once. For images
    less than 11 pixels wide, the nominal width is the largest odd one that fits.

    Parameters
    ----------
    images, reconstructions : ndarray of shape (n_images, height, width)
        Both are clipped to [0, 1]. Height and width are at least 3.

    Returns
    -------
    ndarray of shape (n_images,)
    """
    x, y = np.clip(images, 0, 1), np.clip(reconstructions, 0, 1)
    reach = min(_REACH, (min(x.shape[1:]) - 1) // 2)
    pixels = (2 * reach + 1) ** 2

    rows, columns = (_window(size)[reach:-reach] for size in x.shape[1:])

    def mean(values: Matrix) -> Matrix:
        smooth: Matrix = rows @ values @ columns.T
        return smooth

    mean_x, mean_y = mean(x), mean(y)
    sample = pixels / (pixels - 1)
    var_x = sample * (mean(x * x) - mean_x**2)
    var_y = sample * (mean(y * y) - mean_y**2)
    cov = sample * (mean(x * y) - mean_x * mean_y)
    c1, c2 = 0.01**2, 0.03**2
    similarity = ((2 * mean_x * mean_y + c1) * (2 * cov + c2)) / (
        (mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2)
    )
    averages: Matrix = similarity.mean(axis=(1, 2))
    return averages


def _window(size: int) -> Matrix:
    """Return the matrix that smooths ``size`` pixels in a row, reflected at the ends."""
    smooth: Matrix = gaussian_filter1d(np.eye(size), SIGMA, axis=0, radius=_REACH)
    return smooth


def rounds_to(values: Matrix, target: float) -> float:
    """Return the round from which on values stay at a target or above it; infinite: never.

    Parameters
    ----------
    values : ndarray of shape (n_rounds,)
        One value per round.
    target : float
        What is to be reached.
    """
    below = np.flatnonzero(values < target)
    last = int(below[-1]) + 1 if len(below) else 0
    return float(last + 1) if last < len(values) else np.inf


def half_width(differences: Matrix, ratio: float) -> float:
    """Return half the width of a 95 % interval of the mean over random splits.

    Test parts of random splits overlap, so the variance of the mean is that of the differences
    times ``1 / n + ratio``, not ``1 / n`` (Nadeau and Bengio, "Inference for the generalization
    error", Machine Learning 2003).

    Parameters
    ----------
    differences : ndarray of shape (n_splits,)
        Of two methods, on the same splits.
    ratio : float
        Rows to test by, per row to train with.

    Returns
    -------
    float
        Infinite for one split.
    """
    n = len(differences)
    if n < 2:
        return float("inf")
    variance = float(differences.var(ddof=1)) * (1 / n + ratio)
    return float(stats.t.ppf((1 + COVERAGE) / 2, n - 1)) * float(np.sqrt(variance))
