"""Personalized PCA: components that all clients share, and each client's own (Shi and Kontar).

Shi, Kontar, "Personalized PCA: Decoupling shared and unique features" (2022), which P0 (Liang et
al., NeurIPS 2023, B.1, Fig. 6 and Table 1) compares PerMA with. The paper's components are columns.

======================================= ====================================================
paper (columns)                         here (rows)
======================================= ====================================================
``U``, shared components                ``global_components`` (n_global, n_features)
``V_i``, client i's own                 ``local_components`` (n_local, n_features)
``S_i = Y_i Y_i' / n_i``                never formed: ``W @ X.T @ X``
generalized retraction                  :func:`polar_factor`
``sum_i ||Y_i - (P_U + P_V) Y_i||^2``   sum of ``PCAStep.loss``
======================================= ====================================================

One round: every client corrects its local components against the shared ones it was sent, takes a
gradient step on both together and retracts them to orthonormal rows; the server averages the
clients' shared parts and orthonormalises.

Deviations: the step is a multiple of ``1 / ||X_i W'||_2^2``, the largest eigenvalue of the samples
along the components ``W``, so that no client's scale matters. The start is the subspace that the
clients' own principal directions have in common, where the paper starts at random; with no round
after it, it is the authors' two-shot form. Means (:func:`aggregate_atoms`) are made orthonormal by
the polar factor, whose rows span what those of a QR decomposition do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flwr_perdl.core.arrays import squared_norm
from flwr_perdl.core.checks import (
    LARGE,
    Matrix,
    check_array,
    check_choice,
    check_count,
    check_each,
    check_real,
)
from flwr_perdl.dictionary.aggregation import aggregate_atoms
from flwr_perdl.dictionary.atoms import principal_directions
from flwr_perdl.dictionary.coding import remainder
from flwr_perdl.dictionary.polar import polar_factor

#: First step, as a multiple of 1 / ||X_i W'||_2^2; halved whenever the clients' loss has risen.
STEP = 1.0
#: How the clients' shared components can be combined: as atoms, without weights.
AGGREGATIONS = ("mean", "median", "geometric-median", "trimmed")


class PCAStep(NamedTuple):
    """What one round comes to at a client."""

    #: The shared components after this client's step, (n_global, n_features).
    global_components: Matrix
    #: Its own, orthonormal and orthogonal to those above, (n_local, n_features).
    local_components: Matrix
    #: Squared error of its samples before the step, with both kinds of components.
    loss: float


class PersonalizedPCA(NamedTuple):
    """What :func:`personalized_pca` finds.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import personalized_pca
    >>> found = personalized_pca([np.diag([3.0, 2.0, 0.0]), np.diag([3.0, 0.0, 2.0])], 1, 1)
    >>> [np.abs(one).round(3).tolist() for one in found.local_components]
    [[[0.0, 1.0, 0.0]], [[0.0, 0.0, 1.0]]]
    """

    #: Orthonormal rows, (n_global, n_features).
    global_components: Matrix
    #: Per client orthonormal rows, orthogonal to the global ones, (n_local, n_features).
    local_components: list[Matrix]
    #: The clients' summed loss, round by round.
    losses: list[float]


def shared_start(directions: Sequence[Matrix], n_global: int) -> Matrix:
    """Return the subspace that the clients' directions have in common: where PerPCA starts.

    ``directions`` are orthonormal rows per client: as many principal directions as it will have
    components, so that what all share is among them where a client's own features are the stronger
    ones. The start maximizes the summed squared projections on the clients' subspaces.
    """
    found = np.vstack(directions)
    if len(found):
        found = principal_directions(found, n_global)
    return _apart(found, found[:0], n_global)


def local_start(X: Matrix, U: Matrix, n_local: int) -> Matrix:
    """Return the principal directions of what the shared components ``U`` leave of ``X``."""
    check_count("n_local", n_local, 0, X.shape[1] - len(U))
    own = principal_directions(remainder(X, (X @ U.T) @ U), n_local)
    return _apart(own, U, n_local)[len(U) :]


def perpca_step(X: Matrix, U: Matrix, V: Matrix, step: float) -> PCAStep:
    """Take a client's step: correct V against U, a gradient step on both, retract.

    ``step`` is a multiple of ``1 / ||X W'||_2^2`` with ``W`` both components, orthonormal rows.
    """
    X = check_array("X", X, min_rows=1, squares=True)
    U = check_array("U", U, columns=X.shape[1])
    V = check_array("V", V, columns=X.shape[1])
    check_real("step", step, 0, LARGE)
    return _step(_root(X), squared_norm(X), U, V, step)


def _root(X: Matrix) -> Matrix:
    """Return the samples, or their Gram matrix over the features where that is smaller."""
    return X.T @ X if len(X) >= X.shape[1] else X


def _step(root: Matrix, energy: float, U: Matrix, V: Matrix, step: float) -> PCAStep:
    """Take the step of a client whose samples have this root and this sum of squares."""
    W = _apart(V, U, len(V))
    if not len(W):
        return PCAStep(W, W, energy)
    product = W @ root if len(root) == root.shape[1] else (root @ W.T).T @ root  # W S
    inner = product @ W.T
    # The loss curves by the largest eigenvalue of W S W': the step has no unit.
    curvature = np.linalg.eigvalsh(inner)[-1]
    length = step / curvature if curvature > 0 else 0.0
    # The generalized retraction of the paper: the nearest orthonormal rows.
    moved = polar_factor(W + W.dtype.type(length) * product, W)
    lost = max(energy - float(np.trace(inner)), 0.0)
    return PCAStep(moved[: len(U)], moved[len(U) :], lost)


def next_step(step: float, losses: Sequence[float]) -> float:
    """Return the step of the next round: half where the last loss is above the one before."""
    return step / 2 if len(losses) > 1 and losses[-1] > losses[-2] else step


def personalized_pca(
    samples: Sequence[Matrix],
    n_global: int,
    n_local: int,
    *,
    n_rounds: int = 20,
    step: float = STEP,
    aggregation: str = "mean",
) -> PersonalizedPCA:
    """Run personalized PCA with all clients' samples in one place.

    The bits of `flwr_perdl.strategies.PerPCA` with all clients in every round, and one round more:
    the start is a round of its own there.

    Parameters
    ----------
    samples : sequence of ndarray of shape (n_samples, n_features)
        One array per client.
    n_global, n_local : int
        Shared components, and components of each client; together at most ``n_features``.
    n_rounds : int, default 20
        Rounds after the start. 0: the authors' two-shot form.
    step : float, default 1.0
        The first step, see :func:`perpca_step`; halved whenever the loss has risen.
    aggregation : {"mean", "median", "geometric-median", "trimmed"}, default "mean"
        How the server combines the clients' shared components (:func:`aggregate_atoms`). "mean":
        the authors', and the only one of `flwr_perdl.strategies.PerPCA`. What the others find
        depends on the basis of the shared subspace, since they compare component by component.

    Returns
    -------
    PersonalizedPCA

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import personalized_pca
    >>> samples = [np.diag([3.0, 2.0, 0.0]), np.diag([3.0, 0.0, 2.0])]
    >>> found = personalized_pca(samples, n_global=1, n_local=1)
    >>> np.abs(found.global_components).round(3)
    array([[1., 0., 0.]])
    """
    samples = check_each("samples", samples, "client's array", min_rows=1, squares=True)
    d = samples[0].shape[1]
    check_count("n_global", n_global, 0, d)
    check_count("n_local", n_local, 0, d - n_global)
    check_count("n_rounds", n_rounds)
    check_real("step", step, 0, LARGE)
    check_choice("aggregation", aggregation, AGGREGATIONS)
    U = shared_start([principal_directions(X, n_global + n_local) for X in samples], n_global)
    roots, energies = [_root(X) for X in samples], [squared_norm(X) for X in samples]
    own = [local_start(X, U, n_local) for X in samples]
    losses: list[float] = []
    for _ in range(n_rounds):
        steps = [
            _step(root, energy, U, V, step)
            for root, energy, V in zip(roots, energies, own, strict=True)
        ]
        own = [one.local_components for one in steps]
        shared = np.stack([one.global_components for one in steps])
        U = aggregate_atoms(shared, U, method=aggregation, orthogonal=True).global_atoms
        losses.append(sum(one.loss for one in steps))
        step = next_step(step, losses)
    return PersonalizedPCA(U, [_apart(V, U, n_local)[n_global:] for V in own], losses)


def _apart(V: Matrix, U: Matrix, n_rows: int) -> Matrix:
    """Return ``U`` and, below, ``n_rows`` orthonormal rows near those of ``V``."""
    wanted = np.zeros((len(U) + n_rows, U.shape[1]), U.dtype)
    if not len(wanted):
        return wanted
    # Shared components win: the own ones are made orthogonal to them, not the other way round.
    wanted[: len(U)] = U
    wanted[len(U) :][: len(V)] = V - (V @ U.T) @ U
    return polar_factor(wanted, np.eye(*wanted.shape, dtype=U.dtype))
