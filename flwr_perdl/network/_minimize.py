"""The exact minimum of an agent's cost plus a quadratic: what ADMM solves, and a lone agent's dual.

For atoms W, any number of centers c, and curvature a > 0:

    nu = argmin over V_f of  a / 2 ||nu - c||^2 + h*(W nu)
    y  = argmin of  h(y) + phi_a(a c - y W),   nu = clip(c - y W / a),   y = code(W nu)

where ``phi_a`` is the conjugate of ``a / 2 ||nu||^2`` on V_f: half a square over a, or Huber's loss
that turns linear at a. With all atoms in one place, a = ``strong_convexity`` and c = x / a this is
the inference problem (7) itself and its dual (28).

The codes are an elastic net in as many unknowns as there are atoms, found by Newton steps with a
line search; under Huber's loss, a few such elastic nets in turn. Both are piecewise quadratic, so
that finitely many steps end at the minimum, up to rounding. Without such accuracy
:func:`descend` is faster for many atoms.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.checks import Matrix
from flwr_perdl.network.objectives import Objective, broadcast

Rows = NDArray[np.intp]

#: Newton steps, and halvings of a step, at most.
_STEPS, _HALVINGS = 200, 40
#: Proximal gradient steps, at most, and steps between two looks at the duality gap.
_DESCENTS, _CHECK = 10_000, 10
#: Violations of the optimality conditions that count as rounding, in units of the dtype's eps.
_ROUNDING = 32


def minimize(
    objective: Objective, atoms: Matrix, centers: Matrix, a: Matrix, codes: Matrix | None = None
) -> tuple[Matrix, Matrix]:
    """Return nu and codes at the minima of ``m`` agents and ``n_samples`` centers each.

    Parameters
    ----------
    objective : Objective
        Gives h and V_f.
    atoms, centers : ndarrays of shape (m, n_atoms or n_samples, n_features)
        Each agent's atoms, and where the squares are least.
    a : ndarray of shape (m,)
        Each agent's curvature, positive.
    codes : ndarray of shape (m, n_samples, n_atoms), optional
        A guess of the codes; zeros by default. It matters for the time only.
    """
    m, n_samples, n_atoms = len(atoms), centers.shape[1], atoms.shape[1]
    if codes is None:
        codes = np.zeros((m, n_samples, n_atoms), dtype=centers.dtype)
    if objective.own_weights and m > 1 and (n_atoms > 1 or np.isfinite(objective.bound)):
        # Newton steps know one h: agent by agent.
        given = (atoms, centers, a, codes)
        each = [minimize(objective.at([k]), *(x[k : k + 1] for x in given)) for k in range(m)]
        return np.concatenate([nu for nu, _ in each]), np.concatenate([y for _, y in each])
    scale = (1 / a).astype(centers.dtype)[:, None, None]
    hessian = (scale * correlate(atoms, atoms))[:, None]
    codes = _elastic_net(objective, hessian, correlate(centers, atoms), codes)
    nu = combine_atoms(codes * scale, atoms)
    np.subtract(centers, nu, out=nu)
    if np.isfinite(objective.bound):
        # The elastic net alone is the minimum wherever its nu meets no bound: most often.
        outside = np.abs(nu).max(axis=2, initial=0) > objective.bound
        if outside.any():
            k, i = np.nonzero(outside)
            codes = codes.copy()
            codes[k, i] = _newton(objective, atoms, centers[k, i], scale[k, 0], k, codes[k, i])
            nu[k, i] = objective.project(_free(centers[k, i], codes[k, i], scale[k, 0], atoms[k]))
    return nu, codes


def descend(objective: Objective, W: Matrix, X: Matrix, tolerance: float) -> Matrix:
    """Return codes whose residuals are the duals within a relative error, under the squared loss.

    Accelerated proximal gradient steps on (7); the momentum knows that h is strongly convex
    (delta). They end when the duality gap shows that ``||nu - nu^o|| <= tolerance * ||x||`` for
    every sample: f* is strongly convex (1), so that ``||nu - nu^o||^2 / 2`` is at most the gap.
    For many atoms this is faster than Newton steps, whose linear systems grow with them.
    """
    gram, products = W @ W.T, X @ W.T
    # Both have the same largest eigenvalue, the smaller one sooner.
    lesser = gram if len(W) <= W.shape[1] else W.T @ W
    top = float(np.linalg.eigvalsh(lesser)[-1])
    forward = X.dtype.type(top) * np.eye(len(W), dtype=X.dtype) - gram
    delta = broadcast(objective.delta, products)
    shrink = np.asarray(delta / (top + delta), dtype=X.dtype)
    slow = np.sqrt(np.min(shrink))
    momentum = X.dtype.type((1 - slow) / (1 + slow))
    size = np.maximum(np.linalg.norm(X, axis=1), np.finfo(X.dtype).tiny)
    codes = ahead = np.zeros_like(products)
    for n_iter in range(1, _DESCENTS + 1):
        before = codes
        codes = objective.code(ahead @ forward + products) * shrink
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
    # BLAS's short products in single precision may raise this flag for finite (even zero) operands.
    with np.errstate(invalid="ignore"):
        correlations: Matrix = np.matmul(nu, atoms.swapaxes(1, 2))
    return correlations


def combine_atoms(codes: Matrix, atoms: Matrix) -> Matrix:
    """Return ``y W``: (m, n_samples, n_features)."""
    combined: Matrix = codes * atoms if atoms.shape[1] == 1 else np.matmul(codes, atoms)
    return combined


def _free(centers: Matrix, codes: Matrix, scale: Matrix, W: Matrix) -> Matrix:
    """Return ``c - y W / a``, one center each; ``scale`` (n, 1) is 1 / a."""
    free: Matrix = centers - combine_atoms((codes * scale)[:, None], W)[:, 0]
    return free


def _elastic_net(objective: Objective, hessian: Matrix, r: Matrix, codes: Matrix) -> Matrix:
    """Return the y that minimize ``y H y' / 2 - r'y + h(y)``.

    They are ``code(s)`` at ``s = r - H y``, found by Newton's method on the smooth convex function
    ``y H y' / 2 + h*(r - H y)``, whose gradient is ``H (y - code(s))``: each step solves a linear
    system for the codes that are not zero, and the last one knows which.

    ``hessian`` (..., n_atoms, n_atoms) may have fewer leading axes than ``r`` (..., n_atoms).
    """
    n_atoms = r.shape[-1]
    if n_atoms == 0:
        return codes
    if n_atoms == 1:
        # By what the code of one atom falls short of the code of its center.
        delta = broadcast(objective.delta, r)
        shrunk: Matrix = objective.code(r) * (delta / (delta + hessian[..., 0]))
        return shrunk
    H = np.broadcast_to(hessian, (*r.shape, n_atoms)).reshape(-1, n_atoms, n_atoms)
    r, y = r.reshape(-1, n_atoms), codes.reshape(-1, n_atoms).copy()
    gamma, delta = broadcast(objective.gamma, r), broadcast(objective.delta, r)
    identity = delta * np.eye(n_atoms, dtype=r.dtype)
    tolerance = _ROUNDING * np.finfo(r.dtype).eps * np.abs(r).max(axis=1)
    open_ = np.arange(len(y))
    for _ in range(_STEPS):
        h, start = H[open_], y[open_]
        s = r[open_] - _times(h, start)
        target = objective.code(s)
        wrong = (delta * np.abs(target - start)).max(axis=1) > tolerance[open_]
        y[open_] = np.where(wrong[:, None], start, target)
        open_, h, s, start, target = (x[wrong] for x in (open_, h, s, start, target))
        if not len(open_):
            break
        # Where target is 0 the code does not depend on s: these leave the linear system.
        active = target != 0
        system = np.where(active[:, :, None] & active[:, None, :], h, 0) + identity
        wanted = np.where(active, r[open_] - gamma * np.sign(target), 0)
        step = np.linalg.solve(system, wanted[..., None])[..., 0] - start
        bend = _times(h, step)
        slope = np.einsum("ni,ni->n", bend, start - target)

        height = partial(_dual_height, objective, h, s, start, step, bend)
        y[open_] = start + _line_search(height, slope)[:, None] * step
    return y.reshape(codes.shape)


def _dual_height(
    objective: Objective, H: Matrix, s: Matrix, y: Matrix, step: Matrix, bend: Matrix, t: Matrix
) -> Matrix:
    """Return ``y H y' / 2 + h*(r - H y)`` after steps of length t; ``bend`` is ``H step``."""
    ahead = y + t[:, None] * step
    value: Matrix = np.einsum("ni,ni->n", ahead, _times(H, ahead)) / 2
    return value + objective.regulariser_conjugate(s - t[:, None] * bend)


def _primal_height(
    objective: Objective, W: Matrix, c: Matrix, scale: Matrix, y: Matrix, step: Matrix, t: Matrix
) -> Matrix:
    """Return ``h(y) + phi_a(a c - y W)`` after steps of length t; ``scale`` is 1 / a."""
    ahead = y + t[:, None] * step
    v = np.abs(_free(c, ahead, scale, W))
    inner = np.minimum(v, objective.bound)
    value: Matrix = ((v - inner / 2) * inner).sum(axis=1) / scale[:, 0]
    return value + objective.regulariser(ahead)


def _times(H: Matrix, y: Matrix) -> Matrix:
    product: Matrix = np.matmul(H, y[..., None])[..., 0]
    return product


def _line_search(height: Callable[[Matrix], Matrix], slope: Matrix) -> Matrix:
    """Return steps, halved from 1 until each descends a tenth of what its slope predicts."""
    t = np.ones_like(slope)
    start = height(np.zeros_like(slope))
    # Near the minimum differences of heights are rounding: a step that cannot be judged is taken.
    noise = _ROUNDING * np.finfo(slope.dtype).eps * np.abs(start)
    for _ in range(_HALVINGS):
        short = height(t) > start + 0.1 * t * slope + noise
        if not short.any():
            break
        t = np.where(short, t / 2, t)
    return t


def _newton(
    objective: Objective, atoms: Matrix, centers: Matrix, scale: Matrix, agent: Rows, codes: Matrix
) -> Matrix:
    """Return the codes of single centers whose nu meets a bound.

    ``centers`` (n, n_features), ``scale`` = 1/a (n, 1), ``agent`` (n,): whose atoms, ``codes``
    (n, n_atoms): a guess.
    """
    y = codes.copy()
    tolerance = _ROUNDING * np.finfo(y.dtype).eps
    open_ = np.arange(len(y))
    for _ in range(_STEPS):
        W, inverse, start, c = atoms[agent[open_]], scale[open_], y[open_], centers[open_]
        v = _free(c, start, inverse, W)
        S = correlate(objective.project(v)[:, None], W)[:, 0]
        away = broadcast(objective.delta, S) * np.abs(start - objective.code(S))
        gap = away.max(axis=1, initial=0)
        size = np.linalg.norm(objective.project(v), axis=1)
        wrong = gap > tolerance * size
        open_, W, inverse, start, c, v, S = (x[wrong] for x in (open_, W, inverse, start, c, v, S))
        if not len(open_):
            break
        # A feature at its bound is linear in y: it adds to the slope, and nothing to the curvature.
        curved = np.where((np.abs(v) < objective.bound)[:, None], W, 0)
        H = np.matmul(curved, W.swapaxes(1, 2)) * inverse[..., None]
        step = _elastic_net(objective, H, S + _times(H, start), start) - start
        slope = -np.einsum("ni,ni->n", step, S) + (
            objective.regulariser(start + step) - objective.regulariser(start)
        )

        height = partial(_primal_height, objective, W, c, inverse, start, step)
        y[open_] = start + _line_search(height, slope)[:, None] * step
    return y
