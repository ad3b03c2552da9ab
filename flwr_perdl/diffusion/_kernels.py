"""The inner loops of dual inference, compiled: agent by agent and sample by sample.

What an agent does before an exchange (:func:`descend`, :func:`minimise`), what it does with the
messages (:func:`diffuse`, :func:`recur`), and rounds of both where all agents are in one process
(:func:`diffusion`, :func:`admm`). In such rounds an agent's numbers are in the cache when its next
message is computed from them, so that a round passes over memory once. Both forms call the same
functions: a network gives the same bits as one process.

Arrays have the shapes of `DualState`: (m, n_samples, n_features) for estimates and messages, (m,
n_atoms, n_features) for atoms, (m, n_samples, n_atoms) for codes. All numbers of a call are of one
dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl._checks import Matrix
from flwr_perdl._compiled import compiled
from flwr_perdl.dictionary._kernels import _descend as sweep
from flwr_perdl.dictionary._kernels import _newton as newton

#: Sums of a product of two rows that are added up side by side.
_LANES = 32
#: Newton steps, and halvings of a step, at most.
_STEPS, _HALVINGS = 200, 40
#: Violations of the optimality conditions that count as rounding, in units of the dtype's eps.
_ROUNDING = 32
_EPS = float(np.finfo(np.float64).eps)


class Cost(NamedTuple):
    """What the kernels know of an objective: h, and V_f by the bound of every feature."""

    gamma: float
    delta: float
    nonnegative: bool
    #: Whether any bound is finite.
    bounded: bool
    #: (n_features,).
    bounds: Matrix


class Edges(NamedTuple):
    """A sparse matrix of weights: receiver k hears ``senders[first[k] : first[k + 1]]``."""

    first: NDArray[np.intp]
    senders: NDArray[np.intp]
    weights: Matrix


@compiled
def _dot(row: Matrix, other: Matrix, lanes: Matrix) -> float:
    n = len(row)
    whole = n - n % _LANES
    lanes[:] = 0
    for start in range(0, whole, _LANES):
        a, b = row[start : start + _LANES], other[start : start + _LANES]
        for j in range(_LANES):
            lanes[j] += a[j] * b[j]
    a, b = row[whole:], other[whole:]
    for j in range(len(a)):
        lanes[j] += a[j] * b[j]
    half = _LANES // 2
    while half:
        upper = lanes[half:]
        for j in range(half):
            lanes[j] += upper[j]
        half //= 2
    total: float = lanes[0]
    return total


@compiled
def _code(s: float, cost: Cost) -> float:
    """Return the code (42) of a correlation."""
    if s > cost.gamma:
        return (s - cost.gamma) / cost.delta
    if s < -cost.gamma and not cost.nonnegative:
        return (s + cost.gamma) / cost.delta
    return 0.0


@compiled
def _project(row: Matrix, bounds: Matrix) -> None:
    for f in range(len(row)):
        row[f] = max(-bounds[f], min(bounds[f], row[f]))


@compiled
def _subtract(row: Matrix, codes: Matrix, W: Matrix) -> None:
    """Subtract ``y W`` from a row."""
    for a in range(len(codes)):
        y, atom = codes[a], W[a]
        for f in range(len(row)):
            row[f] -= y * atom[f]


@compiled
def _total(k: int, i: int, edges: Edges, messages: Matrix, row: Matrix) -> None:
    """Write the weighted sum of what agent k has heard about sample i, four senders at a time."""
    row[:] = 0
    e, end = edges.first[k], edges.first[k + 1]
    while e + 4 <= end:
        s, w = edges.senders[e : e + 4], edges.weights[e : e + 4]
        a, b, c, d = messages[s[0], i], messages[s[1], i], messages[s[2], i], messages[s[3], i]
        wa, wb, wc, wd = w[0], w[1], w[2], w[3]
        for f in range(len(row)):
            row[f] = row[f] + wa * a[f] + wb * b[f] + wc * c[f] + wd * d[f]
        e += 4
    while e < end:
        w1, a = edges.weights[e], messages[edges.senders[e], i]
        for f in range(len(row)):
            row[f] += w1 * a[f]
        e += 1


@compiled
def total(edges: Edges, messages: Matrix, out: Matrix) -> None:
    """Write the weighted sums of what each agent has heard."""
    for k in range(out.shape[0]):
        for i in range(out.shape[1]):
            _total(k, i, edges, messages, out[k, i])


@compiled
def _step(
    W: Matrix,
    linear: Matrix,
    nu: Matrix,
    memory: Matrix,
    cost: Cost,
    mu: float,
    kept: float,
    sent: Matrix,
    codes: Matrix,
    lanes: Matrix,
) -> None:
    """Write an agent's message of a diffusion about a sample: a gradient step (31a), (62).

    If there is a memory of the last step, the message is corrected by it (exact diffusion).
    """
    for a in range(len(W)):
        codes[a] = mu * _code(_dot(nu, W[a], lanes), cost)
    for f in range(len(nu)):
        sent[f] = linear[f] + kept * nu[f]
    _subtract(sent, codes, W)
    for f in range(len(memory)):
        psi = sent[f]
        sent[f] = psi + nu[f] - memory[f]
        memory[f] = psi


@compiled
def descend(
    atoms: Matrix,
    linear: Matrix,
    nu: Matrix,
    memory: Matrix,
    cost: Cost,
    mu: float,
    kept: float,
    sent: Matrix,
) -> None:
    """Write the messages of a diffusion, and of exact diffusion its memory.

    Parameters
    ----------
    atoms, linear, nu, memory
        As in `DualState`; without a memory, of no features.
    cost : Cost
        The objective.
    mu, kept : float
        The step, and the share of nu that it leaves.
    sent : ndarray of nu's shape
        Is written.
    """
    codes, lanes = np.empty(atoms.shape[1], nu.dtype), np.empty(_LANES, nu.dtype)
    for k in range(nu.shape[0]):
        for i in range(nu.shape[1]):
            _step(
                atoms[k],
                linear[k, i],
                nu[k, i],
                memory[k, i],
                cost,
                mu,
                kept,
                sent[k, i],
                codes,
                lanes,
            )


@compiled
def _mix(
    k: int, i: int, edges: Edges, messages: Matrix, excess: Matrix, cost: Cost, nu: Matrix
) -> None:
    """Write an agent's next estimate of a sample's dual: (31b), projected (37b).

    If what projections have removed is remembered, it is added first (NIDS).
    """
    _total(k, i, edges, messages, nu)
    for f in range(len(excess)):
        nu[f] += excess[f]
        excess[f] = nu[f]
    if cost.bounded:
        _project(nu, cost.bounds)
    for f in range(len(excess)):
        excess[f] -= nu[f]


@compiled
def diffuse(edges: Edges, messages: Matrix, excess: Matrix, cost: Cost, nu: Matrix) -> None:
    """Write the agents' next estimates, and what the projections have removed.

    Parameters
    ----------
    edges : Edges
        The combination weights.
    messages : ndarray of shape (s, n_samples, n_features)
        What the senders have sent.
    excess : ndarray of nu's shape, or of no features
        As in `DualState`.
    cost : Cost
        The objective.
    nu : ndarray of shape (m, n_samples, n_features)
        Is written.
    """
    for k in range(nu.shape[0]):
        for i in range(nu.shape[1]):
            _mix(k, i, edges, messages, excess[k, i], cost, nu[k, i])


@compiled
def diffusion(
    n_rounds: int,
    edges: Edges,
    atoms: Matrix,
    linear: Matrix,
    memory: Matrix,
    excess: Matrix,
    cost: Cost,
    mu: float,
    kept: float,
    nu: Matrix,
) -> None:
    """Make rounds of :func:`descend` and :func:`diffuse`, with all agents here."""
    m, n_samples, n_features = nu.shape
    codes, lanes = np.empty(atoms.shape[1], nu.dtype), np.empty(_LANES, nu.dtype)
    sent, following = np.empty((m, 1, n_features), nu.dtype), np.empty((m, 1, n_features), nu.dtype)
    spare = np.empty(n_features, nu.dtype)
    for i in range(n_samples):
        for round_ in range(n_rounds + 1):
            for k in range(m):
                row = nu[k, i] if round_ in (0, n_rounds) else spare
                if round_ > 0:
                    _mix(k, 0, edges, sent, excess[k, i], cost, row)
                if round_ < n_rounds:
                    _step(
                        atoms[k],
                        linear[k, i],
                        row,
                        memory[k, i],
                        cost,
                        mu,
                        kept,
                        following[k, 0],
                        codes,
                        lanes,
                    )
            sent, following = following, sent


@compiled
def _elastic_net(gram: Matrix, products: Matrix, cost: Cost, y: Matrix) -> None:
    """Find the y that minimise ``y gram y' / 2 - products'y + gamma ||y||_1``, from a guess.

    The Gram matrix includes delta. Sweeps of coordinate descent find the signs, Newton steps the
    minimum for these signs.
    """
    n_atoms = len(y)
    if n_atoms == 1:
        y[0] = cost.delta / gram[0, 0] * _code(products[0], cost)
        return
    left, step, used = np.empty(n_atoms), np.empty(n_atoms), np.empty(n_atoms, np.intp)
    factor = np.empty((n_atoms, n_atoms))
    largest = 0.0
    for a in range(n_atoms):
        largest = max(largest, abs(products[a]))
    for _ in range(_STEPS):
        wrong = 0.0
        for a in range(n_atoms):
            left[a] = products[a]
            for b in range(n_atoms):
                left[a] -= gram[a, b] * y[b]
            wrong = max(wrong, abs(_code(left[a] + cost.delta * y[a], cost) - y[a]))
        if wrong <= _ROUNDING * _EPS * largest / cost.delta:
            break
        if not sweep(n_atoms, y, left, gram, cost.gamma, cost.nonnegative):
            while not newton(n_atoms, y, left, gram, factor, used, step, cost.gamma):
                pass


@compiled
def _free(center: Matrix, W: Matrix, scale: float, y: Matrix, codes: Matrix, free: Matrix) -> None:
    """Write ``c - y W / a``: nu but for the bounds."""
    for f in range(len(free)):
        free[f] = center[f]
    for a in range(len(y)):
        codes[a] = scale * y[a]
    _subtract(free, codes, W)


@compiled
def _penalty(y: Matrix, cost: Cost) -> float:
    """Return h."""
    value = 0.0
    for a in range(len(y)):
        value += cost.gamma * abs(y[a]) + cost.delta / 2 * y[a] ** 2
    return value


@compiled
def _height(free: Matrix, scale: float, y: Matrix, cost: Cost) -> float:
    """Return ``h(y) + phi_a(a c - y W)``."""
    value = _penalty(y, cost)
    for f in range(len(free)):
        size = np.float64(abs(free[f]))
        inner = min(size, cost.bounds[f])
        value += (size - inner / 2) * inner / scale
    return value


@compiled
def _meet_bounds(
    center: Matrix, W: Matrix, scale: float, cost: Cost, y: Matrix, free: Matrix, lanes: Matrix
) -> None:
    """Find the codes of a center whose nu meets bounds, and ``c - y W / a``, from a guess.

    Newton steps with a line search. Each is an elastic net in which the features that meet their
    bounds have no curvature.
    """
    n_atoms, eps = len(y), np.finfo(free.dtype).eps
    inside, codes = np.empty_like(free), np.empty(n_atoms, free.dtype)
    s, products, new, ahead = (
        np.empty(n_atoms),
        np.empty(n_atoms),
        np.empty(n_atoms),
        np.empty(n_atoms),
    )
    gram = np.empty((n_atoms, n_atoms))
    _free(center, W, scale, y, codes, free)
    for _ in range(_STEPS):
        inside[:] = free
        _project(inside, cost.bounds)
        size, gap = np.sqrt(_dot(inside, inside, lanes)) / cost.delta, 0.0
        for a in range(n_atoms):
            s[a] = _dot(inside, W[a], lanes)
            gap = max(gap, abs(y[a] - _code(s[a], cost)))
        if gap <= _ROUNDING * eps * size:
            break
        for a in range(n_atoms):
            for f in range(len(free)):
                inside[f] = W[a, f] if abs(free[f]) < cost.bounds[f] else 0
            new[a], products[a] = y[a], s[a]
            for b in range(n_atoms):
                gram[a, b] = scale * _dot(inside, W[b], lanes)
                products[a] += gram[a, b] * y[b]
            gram[a, a] += cost.delta
        _elastic_net(gram, products, cost, new)
        slope = _penalty(new, cost) - _penalty(y, cost)
        for a in range(n_atoms):
            slope -= (new[a] - y[a]) * s[a]
        start, length = _height(free, scale, y, cost), 1.0
        for _ in range(_HALVINGS):
            for a in range(n_atoms):
                ahead[a] = y[a] + length * (new[a] - y[a])
            _free(center, W, scale, ahead, codes, free)
            gain = 0.1 * length * slope + _ROUNDING * eps * abs(start)
            if _height(free, scale, ahead, cost) <= start + gain:
                break
            length /= 2
        y[:] = ahead


@compiled
def _gram(W: Matrix, scale: float, delta: float, lanes: Matrix, gram: Matrix) -> None:
    """Write ``W W' / a + delta``."""
    for a in range(len(W)):
        for b in range(a + 1):
            gram[a, b] = gram[b, a] = scale * _dot(W[a], W[b], lanes)
        gram[a, a] += delta


@compiled
def _minimum(
    center: Matrix,
    W: Matrix,
    gram: Matrix,
    scale: float,
    cost: Cost,
    codes: Matrix,
    nu: Matrix,
    products: Matrix,
    y: Matrix,
    lanes: Matrix,
) -> None:
    """Write the nu at which an agent's cost plus a quadratic is least, and its codes."""
    for a in range(len(y)):
        y[a], products[a] = codes[a], _dot(center, W[a], lanes)
    _elastic_net(gram, products, cost, y)
    _free(center, W, scale, y, codes, nu)
    if cost.bounded:
        outside = False
        for f in range(len(nu)):
            outside = outside or abs(nu[f]) > cost.bounds[f]
        if outside:
            _meet_bounds(center, W, scale, cost, y, nu, lanes)
            _project(nu, cost.bounds)
    for a in range(len(y)):
        codes[a] = y[a]


@compiled
def minimise(
    atoms: Matrix, centers: Matrix, scales: Matrix, cost: Cost, codes: Matrix, nu: Matrix
) -> None:
    """Write the minima of agents' costs plus quadratics.

    Parameters
    ----------
    atoms : ndarray of shape (m, n_atoms, n_features)
        Each agent's atoms.
    centers : ndarray of shape (m, n_samples, n_features)
        Where the quadratics are least.
    scales : ndarray of shape (m,)
        ``1 / a``, a the quadratics' curvatures.
    cost : Cost
        The objective.
    codes : ndarray of shape (m, n_samples, n_atoms)
        A guess, in which the codes are written.
    nu : ndarray of shape (m, n_samples, n_features)
        Is written.
    """
    n_atoms, lanes = atoms.shape[1], np.empty(_LANES, nu.dtype)
    gram, products, y = np.empty((n_atoms, n_atoms)), np.empty(n_atoms), np.empty(n_atoms)
    for k in range(nu.shape[0]):
        _gram(atoms[k], scales[k], cost.delta, lanes, gram)
        for i in range(nu.shape[1]):
            _minimum(
                centers[k, i],
                atoms[k],
                gram,
                scales[k],
                cost,
                codes[k, i],
                nu[k, i],
                products,
                y,
                lanes,
            )


@compiled
def _recur(around: Matrix, nu: Matrix, linear: Matrix, memory: Matrix, factors: Matrix) -> None:
    a, b, c, d, e, g = factors
    for f in range(len(nu)):
        new = a * memory[f] + around[f] + b * nu[f]
        memory[f] = c * memory[f] + d * new + e * linear[f] + g * nu[f]
        linear[f] = new


@compiled
def recur(
    edges: Edges, messages: Matrix, factors: Matrix, nu: Matrix, linear: Matrix, memory: Matrix
) -> None:
    """Update what the ADMMs remember, from the weighted sum of what was heard.

    With the agent's factors a, b, c, d, e, g::

        linear' = a memory + sum + b nu
        memory' = c memory + d linear' + e linear + g nu

    Parameters
    ----------
    edges : Edges
        Weights of the senders.
    messages : ndarray of shape (s, n_samples, n_features)
        What the senders have sent.
    factors : ndarray of shape (m, 6)
        Each agent's.
    nu : ndarray of shape (m, n_samples, n_features)
        The agents' own estimates.
    linear, memory : ndarrays of nu's shape
        Are updated.
    """
    around = np.empty(nu.shape[2], nu.dtype)
    for k in range(nu.shape[0]):
        for i in range(nu.shape[1]):
            _total(k, i, edges, messages, around)
            _recur(around, nu[k, i], linear[k, i], memory[k, i], factors[k])


@compiled
def admm(
    n_rounds: int,
    edges: Edges,
    atoms: Matrix,
    scales: Matrix,
    cost: Cost,
    factors: Matrix,
    linear: Matrix,
    memory: Matrix,
    codes: Matrix,
    nu: Matrix,
) -> None:
    """Make rounds of :func:`minimise` and :func:`recur`, with all agents here."""
    m, n_samples, n_features = nu.shape
    n_atoms, lanes = atoms.shape[1], np.empty(_LANES, nu.dtype)
    grams, products, y = np.empty((m, n_atoms, n_atoms)), np.empty(n_atoms), np.empty(n_atoms)
    for k in range(m):
        _gram(atoms[k], scales[k], cost.delta, lanes, grams[k])
    sent, following = np.empty((m, 1, n_features), nu.dtype), np.empty((m, 1, n_features), nu.dtype)
    around = np.empty(n_features, nu.dtype)
    for i in range(n_samples):
        for round_ in range(n_rounds + 1):
            for k in range(m):
                if round_ > 0:
                    _total(k, 0, edges, sent, around)
                    _recur(around, sent[k, 0], linear[k, i], memory[k, i], factors[k])
                if round_ < n_rounds:
                    _minimum(
                        linear[k, i],
                        atoms[k],
                        grams[k],
                        scales[k],
                        cost,
                        codes[k, i],
                        following[k, 0],
                        products,
                        y,
                        lanes,
                    )
                else:
                    nu[k, i] = sent[k, 0]
            sent, following = following, sent
