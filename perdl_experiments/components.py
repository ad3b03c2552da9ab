"""Components that all clients share, each client's own, and outliers of any size.

*HMF*: Shi, Al Kontar, Fattahi, "Heterogeneous matrix factorization: when features differ by
datasets" (2023). *TCMF*: the same, "Triple component matrix factorization: untangling global,
local, and noisy components" (JMLR 2024). The papers' samples are columns.

=========================================== ==================================================
paper (columns)                             here (rows)
=========================================== ==================================================
``M_i``, client i's matrix                  ``samples[i]``, (n_samples, n_features)
``U_g``, ``V_gi``                           ``Factors.global_components``, ``.global_codes``
``U_li``, ``V_li``                          ``Factors.local_components``, ``.local_codes``
HMF's gradient step, mean, correction       :func:`hmf_step`, the mean in `hmf`, `hmf_correct`
TCMF, with PerPCA or HMF within             :func:`robust_components`
``lambda_t``, falling geometrically         ``RobustComponents.thresholds``
=========================================== ==================================================

Deviations: HMF starts where PerPCA does (`perdl_experiments.perpca`), not at random; the
clients' matrices are divided by the largest of their spectral norms, so that the step has no unit;
the step is halved where the clients' loss has risen. TCMF starts its inner factorization afresh in
every iteration, and its first threshold is by default five robust standard deviations of all
entries, where the theory wants the largest entry of the low-rank parts, which is not known. Both
run in one place, without messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flwr_perdl.core.arrays import squared_norm
from flwr_perdl.core.checks import Matrix, check_choice, check_count, check_each, check_real
from flwr_perdl.dictionary import hard_threshold, principal_directions
from perdl_experiments.perpca import (
    apart,
    local_start,
    next_step,
    personalized_pca,
    shared_start,
)

#: First step of HMF, for matrices of spectral norm 1 and components of about norm 1.
STEP = 0.1
#: The first threshold of TCMF, as a multiple of the median of all |entries|: five sigma.
FIRST = 5 / 0.6745
#: Weight of HMF's penalty on components that are not orthonormal.
PENALTY = 0.25


class Factors(NamedTuple):
    """A client's low-rank parts, as codes and components.

    Examples
    --------
    >>> (found,) = hmf([np.diag([3.0, 2.0])], n_global=1, n_local=1)
    >>> found.common.round(3).tolist(), found.unique.round(3).tolist()
    ([[3.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 2.0]])
    """

    #: (n_samples, n_global)
    global_codes: Matrix
    #: (n_global, n_features), the same at every client.
    global_components: Matrix
    #: (n_samples, n_local)
    local_codes: Matrix
    #: (n_local, n_features), orthogonal to the global ones.
    local_components: Matrix

    @property
    def common(self) -> Matrix:
        """What the components of all clients make of the samples."""
        return self.global_codes @ self.global_components

    @property
    def unique(self) -> Matrix:
        """What the client's own components make of the samples."""
        return self.local_codes @ self.local_components


class RobustComponents(NamedTuple):
    """What :func:`robust_components` finds.

    Examples
    --------
    >>> X = np.outer(np.ones(6), np.arange(1.0, 9))
    >>> found = robust_components([X, -2 * X], n_global=1, n_local=0)
    >>> bool(np.allclose(found.factors[1].common, -2 * X))
    True
    """

    #: Per client its common and unique parts.
    factors: list[Factors]
    #: Per client its outliers, like its samples, zero nearly everywhere.
    sparse: list[Matrix]
    #: The threshold of every iteration.
    thresholds: list[float]


def hmf_step(X: Matrix, factors: Factors, step: float, penalty: float) -> Factors:
    """Take a gradient step on ``|X - common - unique|^2 + penalty * (non-orthonormality)``."""
    A, G, B, L = factors
    error = factors.common + factors.unique - X
    uneven_G, uneven_L = (W @ W.T - np.eye(len(W), dtype=W.dtype) for W in (G, L))
    return Factors(
        A - 2 * step * error @ G.T,
        G - 2 * step * (A.T @ error + 2 * penalty * uneven_G @ G),
        B - 2 * step * error @ L.T,
        L - 2 * step * (B.T @ error + 2 * penalty * uneven_L @ L),
    )


def hmf_correct(factors: Factors) -> Factors:
    """Make the local components orthogonal to the global ones; common + unique stays."""
    A, G, B, L = factors
    # L = along @ G + a part orthogonal to G
    along = np.linalg.lstsq(G.T, L.T, rcond=None)[0].T
    return Factors(A + B @ along, G, B, L - along @ G)


def hmf(
    samples: Sequence[Matrix],
    n_global: int,
    n_local: int,
    *,
    n_rounds: int = 100,
    step: float = STEP,
    penalty: float = PENALTY,
) -> list[Factors]:
    """Factorize clients' matrices into common and unique parts (HMF), in one place.

    Parameters
    ----------
    samples : sequence of ndarray of shape (n_samples, n_features)
        One array per client.
    n_global, n_local : int
        Shared components, and components of each client; together at most ``n_features``.
    n_rounds : int, default 100
        Rounds: a step at every client, the mean of the global components, a correction.
    step : float, default 0.1
        The first step, for samples of spectral norm 1; halved whenever the loss has risen.
    penalty : float, default 0.25
        Weight of ``|G G' - I|^2 + |L L' - I|^2``.

    Returns
    -------
    list of Factors
        One per client.

    Raises
    ------
    ValueError
        If an argument breaks its rule.

    Examples
    --------
    >>> found = hmf([np.diag([3.0, 2.0, 0.0]), np.diag([3.0, 0.0, 2.0])], n_global=1, n_local=1)
    >>> np.abs(found[0].common + found[0].unique).round(3).tolist()
    [[3.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 0.0]]
    """
    samples = _checked(samples, n_global, n_local)
    check_count("n_rounds", n_rounds)
    check_real("step", step, 0, 1)
    check_real("penalty", penalty, 0, 1)
    scale = max(float(np.linalg.norm(X, 2)) for X in samples) or 1.0
    scaled = [X / X.dtype.type(scale) for X in samples]
    directions = [principal_directions(X, n_global + n_local) for X in scaled]
    G = shared_start(directions, n_global)
    found = []
    for X in scaled:
        L = local_start(X, G, n_local)
        found.append(Factors(X @ G.T, G, X @ L.T, L))
    losses: list[float] = []
    for _ in range(n_rounds):
        stepped = [hmf_step(X, one, step, penalty) for X, one in zip(scaled, found, strict=True)]
        G = np.mean([one.global_components for one in stepped], axis=0)
        found = [hmf_correct(one._replace(global_components=G)) for one in stepped]
        losses.append(
            sum(
                squared_norm(X - one.common - one.unique)
                for X, one in zip(scaled, found, strict=True)
            )
        )
        step = next_step(step, losses)
    return [
        one._replace(global_codes=scale * one.global_codes, local_codes=scale * one.local_codes)
        for one in found
    ]


def robust_components(
    samples: Sequence[Matrix],
    n_global: int,
    n_local: int,
    *,
    method: str = "perpca",
    n_iter: int = 60,
    n_rounds: int = 5,
    threshold: float | None = None,
    decay: float = 0.9,
    floor: float = 0.0,
) -> RobustComponents:
    """Separate clients' matrices into common, unique and sparse parts (TCMF), in one place.

    Alternates: outliers are the entries of ``X - common - unique`` of at least the threshold;
    common and unique parts are those of ``X - sparse``. The threshold falls as
    ``floor + decay**t * (threshold - floor)``.

    Parameters
    ----------
    samples : sequence of ndarray of shape (n_samples, n_features)
        One array per client.
    n_global, n_local : int
        Shared components, and components of each client; together at most ``n_features``.
    method : {"perpca", "hmf"}, default "perpca"
        The factorization inside: :func:`personalized_pca` or :func:`hmf`.
    n_iter : int, default 60
        Iterations.
    n_rounds : int, default 5
        Rounds of the factorization in every iteration.
    threshold : float, optional
        The first threshold, in the unit of the samples; by default 7.4 times the median of their
        entries' absolute values (the largest of them where that is 0). Larger entries of the
        common and unique parts are taken for outliers at first.
    decay : float, default 0.9
        Factor by which the threshold falls.
    floor : float, default 0.0
        The threshold's limit: entries below it are noise. Set it to about three standard
        deviations of the noise; with 0 the sparse part ends with the noise in it.

    Returns
    -------
    RobustComponents

    Raises
    ------
    ValueError
        If an argument breaks its rule.

    Examples
    --------
    >>> X = np.outer(np.ones(20), np.arange(1.0, 31))
    >>> X[3, 7] += 50
    >>> found = robust_components([X, X], n_global=1, n_local=0, floor=1.0)
    >>> np.argwhere(found.sparse[0]).tolist()
    [[3, 7]]
    """
    samples = _checked(samples, n_global, n_local)
    check_choice("method", method, ("perpca", "hmf"))
    check_count("n_iter", n_iter, 1)
    check_count("n_rounds", n_rounds)
    check_real("decay", decay, 0, 1)
    limit = check_real("floor", floor, 0)
    if threshold is None:
        entries = np.abs(np.concatenate([X.ravel() for X in samples]))
        threshold = max(limit, FIRST * float(np.median(entries)) or float(entries.max()))
    first = check_real("threshold", threshold, limit)
    thresholds = [limit + decay**t * (first - limit) for t in range(n_iter)]
    low_rank = [np.zeros_like(X) for X in samples]
    for value in thresholds:
        sparse = [hard_threshold(X - L, value) for X, L in zip(samples, low_rank, strict=True)]
        rest = [X - S for X, S in zip(samples, sparse, strict=True)]
        if method == "hmf":
            factors = hmf(rest, n_global, n_local, n_rounds=n_rounds)
        else:
            factors = perpca_factors(rest, n_global, n_local, n_rounds)
        low_rank = [one.common + one.unique for one in factors]
    return RobustComponents(factors, sparse, thresholds)


def perpca_factors(
    samples: Sequence[Matrix], n_global: int, n_local: int, n_rounds: int
) -> list[Factors]:
    """Return PerPCA's components with the samples' projections on them as codes."""
    found = personalized_pca(samples, n_global, n_local, n_rounds=n_rounds)
    G = found.global_components
    own = [apart(V, G, n_local)[n_global:] for V in found.local_components]
    return [Factors(X @ G.T, G, X @ V.T, V) for X, V in zip(samples, own, strict=True)]


def _checked(samples: Sequence[Matrix], n_global: int, n_local: int) -> list[Matrix]:
    """Return the clients' arrays, of one number of features, which the components fit into."""
    samples = check_each("samples", samples, "client's array", min_rows=1, squares=True)
    check_count("n_global", n_global, 0, samples[0].shape[1])
    check_count("n_local", n_local, 0, samples[0].shape[1] - n_global)
    return samples
