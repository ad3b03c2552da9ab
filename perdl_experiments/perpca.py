"""Personalized PCA: components that all clients share, and each client's own (Shi and Kontar).

Shi, Kontar, "Personalized PCA: Decoupling shared and unique features" (2022), which PerMA (Liang et
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
clients' shared parts and orthonormalises. As PerMA's clients, these withhold components that too
few samples make up (`flwr_perdl.privacy.may_send`).

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
from numpy.typing import NDArray

from flwr_perdl.core.arrays import squared_norm
from flwr_perdl.core.checks import (
    LARGE,
    Matrix,
    check_choice,
    check_count,
    check_each,
    check_real,
)
from flwr_perdl.dictionary import aggregate_atoms, polar_factor, principal_directions, remainder
from flwr_perdl.privacy import may_send

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

    Attributes
    ----------
    global_components : ndarray of shape (n_global, n_features)
        Orthonormal rows.
    local_components : list of ndarray of shape (n_local, n_features)
        Per client orthonormal rows: after its last step, orthogonal to its own shared components.
    losses : list of float
        The clients' summed loss, round by round.
    floats_up, floats_down : float
        What a client sent, on average, and received.
    """

    global_components: Matrix
    local_components: list[Matrix]
    losses: list[float]
    floats_up: float
    floats_down: float


def shared_start(directions: Sequence[Matrix], n_global: int) -> Matrix:
    """Return the subspace that the clients' directions have in common: where PerPCA starts.

    ``directions`` are orthonormal rows per client: as many principal directions as it will have
    components, so that what all share is among them where a client's own features are the stronger
    ones. The start maximizes the summed squared projections on the clients' subspaces.
    """
    found = np.vstack(directions)
    if len(found):
        found = principal_directions(found, n_global)
    return apart(found, found[:0], n_global)


def local_start(X: Matrix, U: Matrix, n_local: int) -> Matrix:
    """Return the principal directions of what the shared components ``U`` leave of ``X``."""
    check_count("n_local", n_local, 0, X.shape[1] - len(U))
    own = principal_directions(remainder(X, (X @ U.T) @ U), n_local)
    return apart(own, U, n_local)[len(U) :]


def _root(X: Matrix) -> Matrix:
    """Return the samples, or their Gram matrix over the features where that is smaller."""
    return X.T @ X if len(X) >= X.shape[1] else X


def take_step(root: Matrix, energy: float, U: Matrix, V: Matrix, step: float) -> PCAStep:
    """Take a client's step: correct V against U, a gradient step on both, retract.

    Its samples have this root and this sum of squares; ``step`` is a multiple of
    ``1 / ||X W'||_2^2`` with ``W`` both components, orthonormal rows.
    """
    W = apart(V, U, len(V))
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
    min_support: int = 0,
) -> PersonalizedPCA:
    """Run personalized PCA over a list of clients.

    Parameters
    ----------
    samples : sequence of ndarray of shape (n_samples, n_features)
        One array per client.
    n_global, n_local : int
        Shared components, and components of each client; together at most ``n_features``.
    n_rounds : int, default 20
        Rounds after the start, which is one more. 0: the authors' two-shot form.
    step : float, default 1.0
        The first step, as a multiple of ``1 / ||X_i W'||_2^2`` with the client's components ``W``;
        halved whenever the loss has risen.
    aggregation : {"mean", "median", "geometric-median", "trimmed"}, default "mean"
        How the server combines the clients' shared components (:func:`aggregate_atoms`). "mean" is
        the authors'. What the others find depends on the basis of the shared subspace, since they
        compare component by component.
    min_support : int, default 0
        How many samples must stand behind a component that a client sends.

    Examples
    --------
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

    def allowed(X: Matrix, W: Matrix) -> NDArray[np.bool_]:
        return may_send(X @ W.T, X, min_support) if min_support else np.full(len(W), True)

    directions = [principal_directions(X, n_global + n_local) for X in samples]
    sent = [W[allowed(X, W)] for X, W in zip(samples, directions, strict=True)]
    U = shared_start(sent, n_global)
    roots, energies = [_root(X) for X in samples], [squared_norm(X) for X in samples]
    own = [local_start(X, U, n_local) for X in samples]
    losses: list[float] = []
    errors: list[float] = []
    for _ in range(n_rounds):
        steps = [
            take_step(root, energy, U, V, step)
            for root, energy, V in zip(roots, energies, own, strict=True)
        ]
        own = [one.local_components for one in steps]
        shared = [
            np.where(allowed(X, one.global_components)[:, None], one.global_components, 0)
            for X, one in zip(samples, steps, strict=True)
        ]
        stack = np.stack(shared)
        U = aggregate_atoms(stack, U, method=aggregation, orthogonal=True).global_atoms
        losses.append(sum(one.loss for one in steps))
        # Six digits of each client's: a loss that rises by rounding does not shorten the step.
        told = [float(f"{one.loss / X.size:.6g}") for X, one in zip(samples, steps, strict=True)]
        errors.append(float(np.average(told, weights=[len(X) for X in samples])))
        step = next_step(step, errors)
    floats = float(n_rounds * U.size)
    return PersonalizedPCA(U, own, losses, float(np.mean([W.size for W in sent])) + floats, floats)


def apart(V: Matrix, U: Matrix, n_rows: int) -> Matrix:
    """Return ``U`` and, below, ``n_rows`` orthonormal rows near those of ``V``."""
    wanted = np.zeros((len(U) + n_rows, U.shape[1]), U.dtype)
    if not len(wanted):
        return wanted
    # Shared components win: the own ones are made orthogonal to them, not the other way round.
    wanted[: len(U)] = U
    wanted[len(U) :][: len(V)] = V - (V @ U.T) @ U
    return polar_factor(wanted, np.eye(*wanted.shape, dtype=U.dtype))
