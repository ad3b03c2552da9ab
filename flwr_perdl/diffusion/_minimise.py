"""The exact minimum of an agent's cost plus a quadratic: what ADMM solves, and a lone agent's dual.

For atoms W, any number of centers c, and curvature a > 0:

    nu = argmin over V_f of  a / 2 ||nu - c||^2 + h*(W nu)
    y  = argmin of  h(y) + phi_a(a c - y W),   nu = clip(c - y W / a),   y = code(W nu)

where ``phi_a`` is the conjugate of ``a / 2 ||nu||^2`` on V_f: half a square over a, or Huber's loss
that turns linear at a. With all atoms in one place, a = ``strong_convexity`` and c = x / a this is
the inference problem (7) itself and its dual (28).

The codes are an elastic net in as many unknowns as there are atoms, found by Newton steps with a
line search; under Huber's loss, a few such elastic nets in turn. Both are piecewise quadratic, so
that finitely many steps end at the minimum, but for rounding. Without such accuracy
:func:`descend` is faster for many atoms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flwr_perdl._checks import Matrix
from flwr_perdl.diffusion.objectives import Objective

if TYPE_CHECKING:
    from flwr_perdl.diffusion._kernels import Cost

#: Proximal gradient steps, at most, and steps between two looks at the duality gap.
_DESCENTS, _CHECK = 10_000, 10


class Minimum(NamedTuple):
    """Where the cost is least.

    Attributes
    ----------
    nu : ndarray of shape (m, n_samples, n_features)
    codes : ndarray of shape (m, n_samples, n_atoms)
    """

    nu: Matrix
    codes: Matrix


def minimise(
    objective: Objective,
    atoms: Matrix,
    centres: Matrix,
    a: Matrix,
    codes: Matrix | None = None,
) -> Minimum:
    """Return the minima of ``m`` agents and ``n_samples`` centers each.

    Parameters
    ----------
    objective : Objective
        Gives h and V_f.
    atoms : ndarray of shape (m, n_atoms, n_features)
        Each agent's atoms.
    centres : ndarray of shape (m, n_samples, n_features)
        Where the squares are least.
    a : ndarray of shape (m,)
        Each agent's curvature, positive.
    codes : ndarray of shape (m, n_samples, n_atoms), optional
        A guess of the codes; zeros by default. It matters for the time only.
    """
    from flwr_perdl.diffusion import _kernels  # compiled: Numba is imported where it is needed

    centres = np.ascontiguousarray(centres)
    if codes is None:
        codes = np.zeros((*centres.shape[:2], atoms.shape[1]), dtype=centres.dtype)
    codes, nu, none = codes.copy(), np.empty_like(centres), np.empty_like(centres[:0])
    edges = np.empty(0, np.intp), np.empty(0, np.intp), np.empty(0, centres.dtype)
    factors, cost = np.empty((0, 6), centres.dtype), cost_of(objective, centres)
    given = (*edges, atoms, 1 / a, factors, centres, none, *cost, codes, nu, factors[:, 0], none)
    _kernels.admm(none, 0, nu, *given)
    return Minimum(nu, codes)


def cost_of(objective: Objective, nu: Matrix) -> tuple[Cost, Matrix]:
    """Return what the kernels know of an objective, and the bound of every feature of ``nu``."""
    from flwr_perdl.diffusion import _kernels

    gamma, delta = float(objective.gamma), float(objective.delta)
    bounded = bool(np.isfinite(objective.bound))
    cost = _kernels.Cost(gamma, delta, bool(objective.nonnegative), bounded)
    return cost, objective.project(np.full(nu.shape[-1], np.inf, dtype=nu.dtype))


def descend(objective: Objective, W: Matrix, X: Matrix, tolerance: float) -> Matrix:
    """Return codes whose residuals are the duals within a relative error, under the squared loss.

    Accelerated proximal gradient steps on (7); the momentum knows that h is strongly convex
    (delta). They end when the duality gap shows that ``||nu - nu^o|| <= tolerance * ||x||`` for
    every sample: f* is strongly convex (1), so that ``||nu - nu^o||^2 / 2`` is at most the gap.
    For many atoms this is faster than Newton steps, whose linear systems grow with them.

    Parameters
    ----------
    objective : Objective
        With the squared loss.
    W : ndarray of shape (n_atoms, n_features)
        All atoms.
    X : ndarray of shape (n_samples, n_features)
        Samples.
    tolerance : float
        Positive.
    """
    gram, products = W @ W.T, X @ W.T
    lesser = gram if len(W) <= W.shape[1] else W.T @ W
    top = float(np.linalg.eigvalsh(lesser)[-1])
    forward = X.dtype.type(top) * np.eye(len(W), dtype=X.dtype) - gram
    shrink = objective.delta / (top + objective.delta)
    momentum = X.dtype.type((1 - np.sqrt(shrink)) / (1 + np.sqrt(shrink)))
    size = np.maximum(np.linalg.norm(X, axis=1), np.finfo(X.dtype).tiny)
    codes = ahead = np.zeros_like(products)
    for n_iter in range(1, _DESCENTS + 1):
        before = codes
        codes = objective.code(ahead @ forward + products) * X.dtype.type(shrink)
        ahead = codes + momentum * (codes - before)
        if n_iter % _CHECK == 0:
            nu = X - codes @ W
            gap = costs(objective, W, X, codes, nu)[1]
            if (np.sqrt(2 * np.maximum(gap, 0)) / size <= tolerance).all():
                break
    return codes


def costs(
    objective: Objective, W: Matrix, X: Matrix, codes: Matrix, nu: Matrix
) -> tuple[Matrix, Matrix]:
    """Return the cost (7) of codes, and by how much it exceeds the dual value (28) of nu."""
    cost = objective.loss(X - codes @ W) + objective.regulariser(codes)
    conjugates = objective.conjugate(nu) + objective.regulariser_conjugate(nu @ W.T)
    return cost, cost + conjugates - np.einsum("sm,sm->s", nu, X)


def correlate(nu: Matrix, atoms: Matrix) -> Matrix:
    """Return ``W nu``: (m, n_samples, n_atoms)."""
    correlations: Matrix = np.matmul(nu, atoms.swapaxes(1, 2))
    return correlations


def reconstruct(codes: Matrix, atoms: Matrix) -> Matrix:
    """Return ``y W``: (m, n_samples, n_features)."""
    combined: Matrix = codes * atoms if atoms.shape[1] == 1 else np.matmul(codes, atoms)
    return combined
