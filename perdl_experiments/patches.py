"""Images as overlapping patches, and back: what dictionary learning denoises by.

A noisy image is cut into all its patches, each less its own mean; what a dictionary makes of them
is put back in place, means added, and every pixel is the average of all patches that cover it
(Elad and Aharon, IEEE Trans. Image Process. 2006).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flwr_perdl.core.checks import Matrix, check_array, check_count


class Patches(NamedTuple):
    """All patches of one image.

    Attributes
    ----------
    X : ndarray of shape (n_patches, side * side)
        Patches of mean zero, row by row over the image.
    means : ndarray of shape (n_patches, 1)
        What was taken off.
    shape : tuple of int
        Height and width of the image.
    side : int
        Height and width of a patch.
    """

    X: Matrix
    means: Matrix
    shape: tuple[int, int]
    side: int


def cut(image: Matrix, side: int) -> Patches:
    """Cut an image into its patches, one at every pixel where it fits.

    Parameters
    ----------
    image : ndarray of shape (height, width)
        The image.
    side : int
        Height and width of a patch, at most those of the image.

    Returns
    -------
    Patches
        In the image's dtype.

    Raises
    ------
    ValueError
        If the image is no matrix of floats, or the patch does not fit.
    """
    from sklearn.feature_extraction.image import extract_patches_2d  # an extra

    image = check_array("image", image)
    check_count("side", side, 1, min(image.shape))
    X = extract_patches_2d(image, (side, side)).reshape(-1, side * side)
    means = X.mean(axis=1, keepdims=True)
    return Patches(X - means, means, (image.shape[0], image.shape[1]), side)


def join(patches: Patches) -> Matrix:
    """Return the image whose every pixel is the mean of the patches that cover it.

    Parameters
    ----------
    patches : Patches
        Of one image, in the order of :func:`cut`; ``X`` may have changed.

    Returns
    -------
    ndarray of shape (height, width)
        ``join(cut(image, side))`` is the image.
    """
    side, places = patches.side, [size - patches.side + 1 for size in patches.shape]
    stack = (patches.X + patches.means).reshape(*places, side, side)
    image = np.zeros(patches.shape)
    for i, j in np.ndindex(side, side):
        image[i : i + places[0], j : j + places[1]] += stack[:, :, i, j]
    counts = [np.convolve(np.ones(n), np.ones(side)) for n in places]
    joined: Matrix = (image / np.outer(*counts)).astype(patches.X.dtype)
    return joined
