"""The conditions under which PerMA provably works, measured on a dictionary and its codes.

======================================= ====================================================
paper (Liang et al., NeurIPS 2023)      here
======================================= ====================================================
Assumption 1, ``mu``                    ``Assumptions.incoherence``
Assumption 2, ``beta``                  ``Assumptions.identifiability``
Theorem 1, on the sum of ``epsilon_i``  ``Assumptions.start_error``
Theorem 3, Arora et al. (2015), 1.2     the other fields
======================================= ====================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from flwr_perdl.core.arrays import row_norms
from flwr_perdl.core.checks import Matrix, check_array, check_list
from flwr_perdl.dictionary.atoms import atom_distances, normalize_atoms


class Assumptions(NamedTuple):
    """What holds of one client's dictionary and codes; see `assumptions`.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import assumptions
    >>> found = assumptions(np.eye(2), np.array([[1.0, 0.0], [0.0, -1.0]]))
    >>> found.n_nonzero < found.unique_below
    True
    """

    #: ``mu``: the largest absolute cosine of two atoms, times the root of n_features.
    incoherence: float
    #: The dictionary's spectral norm, over the least that its shape allows.
    spectral_norm: float
    #: The most atoms that a sample uses.
    n_nonzero: int
    #: Codes of fewer atoms than this are unique, and matching pursuit finds them (Tropp, 2004).
    unique_below: float
    #: The least and the largest non-zero code, over the root mean square of its atom's.
    bounds: tuple[float, float]
    #: The largest absolute mean of an atom's non-zero codes, over their root mean square; ideal: 0.
    bias: float
    #: The shares of samples that use the least and the most used atom, over the mean; ideal: 1.
    usage: tuple[float, float]
    #: How often two atoms are used together, at most, over how often by chance; ideal: 1.
    pairs: float
    #: Between which numbers the largest ``beta`` is; None without local dictionaries.
    identifiability: tuple[float, float] | None
    #: The sum of all clients' starting errors, d_{1,2}, up to which "paths" is proven right.
    start_error: float


def assumptions(D: Matrix, C: Matrix, local: Sequence[Matrix] = ()) -> Assumptions:
    """Measure by how much a dictionary and its codes meet the conditions of P0's theorems.

    The theorems have constants that nobody knows: the numbers say what is near an ideal case, and
    what is far. Those on codes are estimates from these samples.

    Parameters
    ----------
    D : ndarray of shape (n_atoms, n_features)
        One client's atoms, of any length but 0.
    C : ndarray of shape (n_samples, n_atoms)
        Its codes.
    local : sequence of ndarray of shape (n_local, n_features), optional
        All clients' local atoms, for Assumption 2.

    Returns
    -------
    Assumptions

    Raises
    ------
    ValueError
        If ``D`` or ``C`` is empty, a shape does not fit, or an atom is zero.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import assumptions
    >>> D = np.array([[1.0, 0.0], [0.6, 0.8]])
    >>> found = assumptions(D, np.array([[1.0, 0.0], [0.0, 2.0]]))
    >>> round(found.incoherence, 3), round(found.unique_below, 3)
    (0.849, 1.333)
    """
    D = _with_atoms("D", D)
    r, d = D.shape
    C = check_array("C", C, min_rows=1, columns=r, squares=True) * row_norms(D)
    D, locals_ = normalize_atoms(D), enumerate(check_list("local", local))
    others = [normalize_atoms(_with_atoms(f"local[{i}]", L, columns=d)) for i, L in locals_]
    coherence = float(np.abs(D @ D.T)[~np.eye(r, dtype=bool)].max(initial=0))
    used = C != 0
    counts = np.maximum(used.sum(axis=0), 1)
    sizes = np.sqrt((C**2).sum(axis=0) / counts)
    relative = C / np.where(sizes > 0, sizes, 1)
    shares = used.mean(axis=0)
    chance = np.outer(shares, shares)
    together = used.T.astype(np.float64) @ used / len(C) / np.where(chance > 0, chance, 1)
    np.fill_diagonal(together, 0)
    magnitudes = np.abs(relative[used]) if used.any() else np.zeros(1)
    usage = shares / (shares.mean() or 1)
    nearest = [
        max(float(atom_distances(v[None], L).min()) for L in others) for M in others for v in M
    ]
    beta = (min(nearest) / 2, min(nearest)) if nearest else None
    limit = float(np.sqrt(max(2 - 2 * coherence, 0)))
    return Assumptions(
        incoherence=coherence * d**0.5,
        spectral_norm=float(np.linalg.norm(D, 2)) / max(1.0, (r / d) ** 0.5),
        n_nonzero=int(used.sum(axis=1).max()),
        unique_below=(1 + 1 / coherence) / 2 if coherence > 0 else np.inf,
        bounds=(float(magnitudes.min()), float(magnitudes.max())),
        bias=float(np.abs(relative.sum(axis=0) / counts).max()),
        usage=(float(usage.min()), float(usage.max())),
        pairs=float(together.max()),
        identifiability=beta,
        start_error=min(limit, beta[0] if beta else limit) / 4,
    )


def _with_atoms(name: str, value: object, **rules: Any) -> Matrix:
    """Return a dictionary in float64 that has atoms, none of them zero."""
    D = check_array(name, value, min_rows=1, squares=True, **rules).astype(np.float64)
    if not (known := D.any(axis=1)).all():
        raise ValueError(f"{name} must have no zero row, got one at {known.argmin()}.")
    return D
