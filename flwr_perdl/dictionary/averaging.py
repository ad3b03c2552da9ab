"""One dictionary for all clients, averaged atom by atom in every round, without matching.

What P0 (Liang et al., NeurIPS 2023, B.1, Fig. 5 and Table 1) compares PerMA with: Gkillas et al.
(2022), who broadcast a dictionary, let every client code and take gradient steps, and average; and
Huang et al. (2022), whose clients run K-SVD and count by their numbers of samples. This is the fair
version of both: from a common start atoms keep their places, so that no matching is needed; any
learner; plain or weighted means; atoms that nobody uses are replaced. Averages of dictionaries from
*different* starts mix atoms that have nothing to do with each other: that is the naive version.

======================================= ====================================================
in words                                here
======================================= ====================================================
a client's round                        `flwr_perdl.clients.DictionaryAveragingClient`
the server's round                      :func:`average_dictionaries`
a start that all have in common         :func:`common_start`
======================================= ====================================================

Deviations: atoms are brought back to unit norm (orthonormal rows for orthogonal learners);
replacements, which neither paper has, are what all clients' residuals have in common, never a
sample.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flwr_perdl.core.checks import (
    Matrix,
    check_array,
    check_count,
    check_flag,
    check_kind,
    check_rng,
)
from flwr_perdl.dictionary.aggregation import aggregate_atoms, finish_atoms
from flwr_perdl.dictionary.atoms import normalize_atoms, principal_directions
from flwr_perdl.dictionary.polar import polar_factor

#: Directions shorter than this after projection lie in the span of the other atoms.
_TINY = 1e-6


def average_dictionaries(
    stack: Matrix,
    current: Matrix,
    *,
    weights: Matrix | None = None,
    orthogonal: bool,
    replace: bool = True,
) -> Matrix:
    """Average the clients' dictionaries atom by atom, and replace atoms that nobody uses.

    Parameters
    ----------
    stack : ndarray of shape (n_clients, n_atoms + 1, n_features)
        Every client's atoms, zeros where it does not send one, and in the last row the leading
        direction of what they leave of its samples, or zeros.
    current : ndarray of shape (n_atoms, n_features)
        The dictionary that they started from; an unused atom that is not replaced stays.
    weights : ndarray of shape (n_clients,), optional
        Numbers of samples; by default all clients count alike.
    orthogonal : bool
        Whether atoms are orthonormal.
    replace : bool, default True
        Whether unused atoms become the leading directions of what the dictionary leaves of the
        clients' samples.

    Returns
    -------
    ndarray of shape (n_atoms, n_features)

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import average_dictionaries
    >>> one, other = np.eye(3)[[0, 1, 2]], np.eye(3)[[0, 1, 2]]
    >>> one[1] = other[1] = 0  # nobody uses atom 1: what is left of the samples replaces it
    >>> average_dictionaries(np.stack([one, other]), np.eye(3)[:2], orthogonal=True)
    array([[1., 0., 0.],
           [0., 0., 1.]])
    """
    orthogonal = check_flag("orthogonal", orthogonal)
    replace = check_flag("replace", replace)
    current = check_array("current", current)
    stack = check_array("stack", stack, ndim=3, min_rows=1, columns=current.shape[1])
    check_count("rows of stack", stack.shape[1], len(current) + 1, len(current) + 1)
    atoms = aggregate_atoms(
        stack[:, :-1],
        current,
        method="mean" if weights is None else "weighted",
        weights=weights,
        orthogonal=orthogonal,
    ).global_atoms
    unused = np.flatnonzero(~np.any(stack[:, :-1] != 0, axis=(0, 2)))
    spare = stack[:, -1][np.any(stack[:, -1] != 0, axis=1)]
    if not (replace and len(unused) and len(spare)):
        return atoms
    if orthogonal:
        kept = np.delete(atoms, unused, axis=0)
        spare = spare - (spare @ kept.T) @ kept
        spare = spare[np.linalg.norm(spare, axis=1) > _TINY]
        if not len(spare):
            return atoms
    fresh = principal_directions(spare, min(len(unused), spare.shape[1]))
    atoms[unused[: len(fresh)]] = fresh
    moved = np.full(len(atoms), True)
    moved[unused[len(fresh) :]] = False
    return finish_atoms(atoms, current, moved, orthogonal=orthogonal)


def common_start(
    dictionaries: Mapping[int, Matrix],
    sizes: Mapping[int, int],
    rng: np.random.Generator,
    *,
    orthogonal: bool = False,
) -> Matrix:
    """Return the dictionary of the client with the most samples, for all to start from.

    Parameters
    ----------
    dictionaries : mapping of int to ndarray of shape (n_atoms, n_features)
        By client; withheld atoms are zero.
    sizes : mapping of int to int
        Numbers of samples; of clients with as many, the first counts.
    rng : Generator
        Draws atoms where that client's are withheld.
    orthogonal : bool, default False
        Whether atoms are orthonormal: then those that are drawn are orthogonal to the others.

    Returns
    -------
    ndarray of shape (n_atoms, n_features)
        Unit atoms.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import common_start
    >>> rng = np.random.default_rng(0)
    >>> common_start({0: np.eye(2), 1: np.eye(2)[::-1]}, {0: 10, 1: 50}, rng, orthogonal=True)
    array([[0., 1.],
           [1., 0.]])
    """
    check_kind("dictionaries", dictionaries, Mapping, "a mapping of clients to dictionaries")
    if not dictionaries:
        raise ValueError("dictionaries must hold at least one dictionary, got none.")
    check_kind("sizes", sizes, Mapping, "a mapping of clients to numbers of samples")
    if missing := [client for client in dictionaries if client not in sizes]:
        raise ValueError(f"sizes must have all clients of dictionaries, got none of {missing[0]}.")
    counts = {client: check_count("sizes", sizes[client]) for client in dictionaries}
    check_rng(rng)
    orthogonal = check_flag("orthogonal", orthogonal)
    first = max(dictionaries, key=lambda i: (counts[i], -i))
    D = check_array(f"dictionaries[{first}]", dictionaries[first])
    drawn = normalize_atoms(rng.standard_normal(D.shape).astype(D.dtype))
    if orthogonal and not D.any(axis=1).all():
        return polar_factor(D, polar_factor(drawn, drawn))
    return normalize_atoms(D, drawn)
