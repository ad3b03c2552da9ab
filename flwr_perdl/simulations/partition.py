"""Splits of labeled samples into clients."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.checks import as_array, check_count, check_real, check_rng

MAX_TEST = 1000
_GIVEN = 0.9  # at most this share of all images, and of each label, goes to the clients


class Partition(NamedTuple):
    """Each client's images, and a held-out part.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.simulations import natural_partition
    >>> split = natural_partition(np.repeat([7, 9], 20), 2, 5, np.random.default_rng(0))
    >>> split.labels, [len(indices) for indices in split.clients], len(split.test)
    ([7, 9], [5, 5], 4)
    """

    #: Indices of each client's images.
    clients: list[NDArray[np.intp]]
    #: Each client's own label; of natural clients, their numbers.
    labels: list[int]
    #: Indices of the held-out images.
    test: NDArray[np.intp]


def imbalanced_partition(
    y: NDArray[np.integer[Any]],
    n_clients: int,
    n_samples: int,
    rng: np.random.Generator,
    *,
    share: float = 0.9,
) -> Partition:
    """Split images with label skew: most of a client's images have one label (PerMA, Section 5.2).

    At most 90 % of the images, and of each label, go to the clients: if ``n_samples`` is more than
    that, every client gets fewer. Of the rest, up to 1,000 are held out for the test.

    Parameters
    ----------
    y : ndarray of shape (n_images,)
        Labels; client i's main label is the (i mod number of labels)-th.
    n_clients : int
        Number of clients.
    n_samples : int
        Images per client.
    rng : Generator
        Draws the split.
    share : float, default 0.9
        Share of a client's main label, with at least one image.

    Returns
    -------
    Partition

    Raises
    ------
    ValueError
        If an argument breaks its rule, or there are too few images for the clients.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.simulations import imbalanced_partition
    >>> y = np.arange(100) % 2
    >>> split = imbalanced_partition(y, 2, 20, np.random.default_rng(0))
    >>> [y[indices].tolist().count(1) for indices in split.clients]
    [2, 18]
    """
    y = _labels("y", y)
    check_count("n_clients", n_clients, 1, len(y))
    check_count("n_samples", n_samples, 1)
    check_real("share", share, 0, 1, open_low=True)
    check_rng(rng)
    labels, counts = np.unique(y, return_counts=True)
    own = [i % len(labels) for i in range(n_clients)]
    holders = np.bincount(own, minlength=len(labels))
    room = [_GIVEN * len(y) / n_clients]
    given = np.minimum(_GIVEN * counts, counts - 1)
    with np.errstate(over="ignore", divide="ignore"):  # a tiny share leaves room for all
        room += [g / (share * h) for g, h in zip(given, holders, strict=True) if h]
    size = min(n_samples, int(min(room)))
    n_own = round(share * size)
    if n_own < 1:
        raise ValueError(
            f"y must have more images: {len(y)}, the rarest label {counts.min()} times, are too "
            f"few for n_clients={n_clients}."
        )
    order = rng.permutation(len(y))
    free = np.ones(len(y), dtype=bool)

    def take(candidates: NDArray[np.bool_], count: int) -> NDArray[np.intp]:
        taken = order[(candidates & free)[order]][:count]
        free[taken] = False
        return taken

    seen = [take(y == label, 1) for label in labels]  # every label is in the test
    majority = [take(y == labels[i], n_own) for i in own]
    minority = [take(y != labels[i], size - n_own) for i in own]
    clients = [np.concatenate(parts) for parts in zip(majority, minority, strict=True)]
    test = np.concatenate([*seen, take(free, MAX_TEST - len(labels))])
    return Partition(clients, [int(labels[i]) for i in own], test)


def natural_partition(
    owners: NDArray[np.integer[Any]], n_clients: int, n_samples: int, rng: np.random.Generator
) -> Partition:
    """Split images by their owners; a tenth of each owner's images is held out.

    Parameters
    ----------
    owners : ndarray of shape (n_images,)
        The owner of each image.
    n_clients : int
        Number of clients: the owners with the most images, at least two; ties go to the lowest
        numbers.
    n_samples : int
        Largest number of images per client.
    rng : Generator
        Draws what is held out, up to 1,000 in all, and what is used.

    Returns
    -------
    Partition
        Its ``labels`` are the clients' numbers in ``owners``.

    Raises
    ------
    ValueError
        If an argument breaks its rule, or fewer than ``n_clients`` owners have two images.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.simulations import natural_partition
    >>> owners = np.repeat([7, 8, 9], [20, 5, 30])
    >>> split = natural_partition(owners, 2, 100, np.random.default_rng(0))
    >>> [set(owners[indices].tolist()) for indices in split.clients]
    [{9}, {7}]
    """
    owners = _labels("owners", owners)
    check_count("n_clients", n_clients, 1)
    check_count("n_samples", n_samples, 1)
    check_rng(rng)
    names, counts = np.unique(owners, return_counts=True)
    able = np.argsort(-counts, kind="stable")[:n_clients]
    if len(able) < n_clients or counts[able].min() < 2:
        raise ValueError(
            f"owners must have n_clients={n_clients} clients with 2 images or more, got "
            f"{(counts > 1).sum()}."
        )
    clients, test = [], []
    for name in names[able]:
        own = rng.permutation(np.flatnonzero(owners == name))
        held = min(max(round((1 - _GIVEN) * len(own)), 1), max(MAX_TEST // n_clients, 1))
        test.append(own[:held])
        clients.append(own[held:][:n_samples])
    return Partition(clients, names[able].tolist(), np.concatenate(test))


def _labels(name: str, values: Any) -> NDArray[np.integer[Any]]:
    """Return a vector of integers, or raise a ValueError that says what it must be."""
    array = as_array(name, values)
    if array.ndim != 1 or not len(array) or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"{name} must be a vector of integers, one per image, got shape {array.shape} of "
            f"{array.dtype}."
        )
    return array
