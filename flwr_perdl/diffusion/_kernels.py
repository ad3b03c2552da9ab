"""The inner loops of dual inference, compiled: agent by agent and sample by sample.

:func:`diffusion` and :func:`admm` do what an agent does before an exchange, what it does with the
messages, and rounds of both where all agents are in one process. In such rounds an agent's numbers
are in the cache when its next message is computed from them: a round passes over memory once. A
network gives the same bits as one process, since the loops are the same.

Arrays have the shapes of `DualState`: (m, n_samples, n_features) for estimates and messages, (m,
n_atoms, n_features) for atoms, (m, n_samples, n_atoms) for codes. The loops index whole arrays: a
slice for every agent would cost as much as 50 features.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl._checks import Matrix
from flwr_perdl._compiled import compiled
from flwr_perdl.dictionary._kernels import _descend as sweep
from flwr_perdl.dictionary._kernels import _newton as newton

Ints = NDArray[np.intp]

#: Newton steps, and halvings of a step, at most.
_STEPS, _HALVINGS = 200, 40
#: Violations of the optimality conditions that count as rounding, in units of the dtype's eps.
_ROUNDING = 32
_EPS = float(np.finfo(np.float64).eps)


class Cost(NamedTuple):
    """What the kernels know of an objective: h."""

    gamma: float
    delta: float
    nonnegative: bool
    #: Whether V_f is not all of space.
    bounded: bool


@compiled
def _code(s: float, cost: Cost) -> float:
    """Return the code (42) of a correlation."""
    if s > cost.gamma:
        return (s - cost.gamma) / cost.delta
    if s < -cost.gamma and not cost.nonnegative:
        return (s + cost.gamma) / cost.delta
    return 0.0


@compiled
def _total(
    k: int,
    i: int,
    first: Ints,
    senders: Ints,
    weights: Matrix,
    messages: Matrix,
    row: Matrix,
) -> None:
    """Write the weighted sum of what agent k has heard about sample i, four senders at a time."""
    n_features = messages.shape[2]
    for f in range(n_features):
        row[f] = 0
    e, end = first[k], first[k + 1]
    while e + 4 <= end:
        a, b, c, d = senders[e], senders[e + 1], senders[e + 2], senders[e + 3]
        u, v, w, z = weights[e], weights[e + 1], weights[e + 2], weights[e + 3]
        for f in range(n_features):
            before = row[f] + u * messages[a, i, f] + v * messages[b, i, f]
            row[f] = before + w * messages[c, i, f] + z * messages[d, i, f]
        e += 4
    while e < end:
        a, u = senders[e], weights[e]
        for f in range(n_features):
            row[f] += u * messages[a, i, f]
        e += 1


@compiled
def _norm(row: Matrix) -> float:
    """Return the norm, also where squares would underflow; the row may be scaled."""
    limits, scale, square = np.finfo(row.dtype), 1.0, float(np.dot(row, row))
    if square < limits.tiny / limits.eps**2:
        scale = 0.0
        for f in range(len(row)):
            scale = max(scale, abs(row[f]))
        if scale > 0:
            for f in range(len(row)):
                row[f] /= scale
            square = float(np.dot(row, row))
    norm: float = scale * np.sqrt(square)
    return norm


@compiled
def norms(A: Matrix, out: Matrix) -> None:
    """Write the norms of the rows of ``A``."""
    row = np.empty(A.shape[1], A.dtype)
    for i in range(len(A)):
        for f in range(len(row)):
            row[f] = A[i, f]
        out[i] = _norm(row)


@compiled
def diffusion(
    received: Matrix,
    n_rounds: int,
    sent: Matrix,
    first: Ints,
    senders: Ints,
    weights: Matrix,
    atoms: Matrix,
    linear: Matrix,
    memory: Matrix,
    excess: Matrix,
    cost: Cost,
    bounds: Matrix,
    mu: float,
    kept: float,
    own: Matrix,
    nu: Matrix,
    measures: Matrix,
) -> None:
    """Continue a diffusion: take in messages, make rounds among the agents here, write messages.

    Parameters
    ----------
    received : ndarray of shape (s, n_samples, n_features)
        The messages that are taken in first; of no senders: none are.
    n_rounds : int
        Rounds among the agents here, which are all there are.
    sent : ndarray of nu's shape
        Where the messages of the next round are written; of no agents: nowhere.
    first, senders, weights : ndarrays
        The combination weights: agent k hears ``senders[first[k] : first[k + 1]]``.
    atoms, linear : ndarrays
        As in `DualState`.
    memory, excess : ndarrays of nu's shape
        As in `DualState`; of no features: none. Are updated.
    cost, bounds
        The objective, and the bound of every feature.
    mu, kept : float
        The step, and the share of nu that it leaves.
    own : ndarray of nu's shape
        The agents' own messages among ``received``.
    nu : ndarray of shape (m, n_samples, n_features)
        The estimates. Is updated.
    measures : ndarray of shape (3, m, n_samples)
        The norms of the last step, of the distance to the neighbors, and of nu, after the last
        round, are written; of shape (0, m, n_samples): are not measured.
    """
    m, n_samples, n_features = nu.shape
    n_atoms, corrected, remembered = atoms.shape[1], memory.shape[2] > 0, excess.shape[2] > 0
    buffers = np.empty((2, m if n_rounds else 0, 1, n_features), nu.dtype)
    row, moves = np.empty(n_features, nu.dtype), np.empty(n_atoms, nu.dtype)
    rest = np.empty(n_features, nu.dtype)
    for i in range(n_samples):
        for round_ in range(n_rounds + 1):
            begins, ends = round_ == 0, round_ == n_rounds
            heard, at = (received, i) if begins else (buffers[round_ % 2], 0)
            out, to = (sent, i) if ends else (buffers[1 - round_ % 2], 0)
            mine, measured = own if begins else heard, ends and len(measures) > 0
            for k in range(m):
                if len(heard) == 0:
                    for f in range(n_features):
                        row[f] = nu[k, i, f]
                else:  # (31b), projected (37b); NIDS adds what the last projection removed
                    _total(k, at, first, senders, weights, heard, row)
                    if measured and corrected:
                        for f in range(n_features):
                            rest[f] = mine[k, at, f] - row[f]
                        measures[1, k, i] = 2 * _norm(rest)
                    if remembered:
                        for f in range(n_features):
                            row[f] += excess[k, i, f]
                            excess[k, i, f] = row[f]
                    if cost.bounded:
                        for f in range(n_features):
                            row[f] = max(-bounds[f], min(bounds[f], row[f]))
                    if remembered:
                        for f in range(n_features):
                            excess[k, i, f] -= row[f]
                    if measured:
                        if not corrected:
                            for f in range(n_features):
                                message = max(-bounds[f], min(bounds[f], mine[k, at, f]))
                                rest[f] = message - row[f]
                            measures[1, k, i] = _norm(rest)
                        for f in range(n_features):
                            rest[f] = row[f] - nu[k, i, f]
                        measures[0, k, i] = _norm(rest)
                        for f in range(n_features):
                            rest[f] = row[f]
                        measures[2, k, i] = _norm(rest)
                    if round_ >= n_rounds - 1:
                        for f in range(n_features):
                            nu[k, i, f] = row[f]
                if len(out) > 0:  # (31a) with the gradient (62)
                    for a in range(n_atoms):
                        moves[a] = mu * _code(np.dot(row, atoms[k, a]), cost)
                    for f in range(n_features):
                        out[k, to, f] = linear[k, i, f] + kept * row[f]
                    for a in range(n_atoms):
                        move = moves[a]
                        for f in range(n_features):
                            out[k, to, f] -= move * atoms[k, a, f]
                    if corrected:  # by the last step: exact diffusion
                        for f in range(n_features):
                            psi = out[k, to, f]
                            out[k, to, f] = psi + row[f] - memory[k, i, f]
                            memory[k, i, f] = psi


@compiled
def _elastic_net(k: int, grams: Matrix, products: Matrix, cost: Cost, y: Matrix) -> None:
    """Find the y that minimise ``y gram y' / 2 - products'y + gamma ||y||_1``, from a guess.

    Agent k's Gram matrix includes delta. Sweeps of coordinate descent find the signs, Newton steps
    the minimum for these signs.
    """
    n_atoms, gram = len(y), grams[k]
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
def _project(row: Matrix, bounds: Matrix) -> None:
    for f in range(len(row)):
        row[f] = max(-bounds[f], min(bounds[f], row[f]))


@compiled
def _free(center: Matrix, W: Matrix, scale: float, y: Matrix, free: Matrix) -> None:
    """Write ``c - y W / a``: nu but for the bounds."""
    free[:] = center
    for a in range(len(y)):
        move = free.dtype.type(scale * y[a])
        for f in range(len(free)):
            free[f] -= move * W[a, f]


@compiled
def _penalty(y: Matrix, cost: Cost) -> float:
    """Return h."""
    value = 0.0
    for a in range(len(y)):
        value += cost.gamma * abs(y[a]) + cost.delta / 2 * y[a] ** 2
    return value


@compiled
def _height(free: Matrix, scale: float, y: Matrix, cost: Cost, bounds: Matrix) -> float:
    """Return ``h(y) + phi_a(a c - y W)``."""
    value = _penalty(y, cost)
    for f in range(len(free)):
        size = np.float64(abs(free[f]))
        inner = min(size, bounds[f])
        value += (size - inner / 2) * inner / scale
    return value


@compiled
def _meet_bounds(
    k: int,
    i: int,
    atoms: Matrix,
    scale: float,
    linear: Matrix,
    cost: Cost,
    bounds: Matrix,
    y: Matrix,
    nu: Matrix,
    to: int,
) -> None:
    """Find the codes and the nu of a center (``linear``) whose nu meets bounds, from a guess.

    Newton steps with a line search. Each is an elastic net in which the features that meet their
    bounds have no curvature.
    """
    center, W, free = linear[k, i], atoms[k], nu[k, to]
    n_atoms, eps = len(y), np.finfo(free.dtype).eps
    inside = np.empty_like(free)
    s, products, new, ahead = (
        np.empty(n_atoms),
        np.empty(n_atoms),
        np.empty(n_atoms),
        np.empty(n_atoms),
    )
    grams = np.empty((1, n_atoms, n_atoms))
    _free(center, W, scale, y, free)
    for _ in range(_STEPS):
        inside[:] = free
        _project(inside, bounds)
        size, gap = np.sqrt(np.dot(inside, inside)) / cost.delta, 0.0
        for a in range(n_atoms):
            s[a] = np.dot(inside, W[a])
            gap = max(gap, abs(y[a] - _code(s[a], cost)))
        if gap <= _ROUNDING * eps * size:
            break
        for a in range(n_atoms):
            for f in range(len(free)):
                inside[f] = W[a, f] if abs(free[f]) < bounds[f] else 0
            new[a], products[a] = y[a], s[a]
            for b in range(n_atoms):
                grams[0, a, b] = scale * np.dot(inside, W[b])
                products[a] += grams[0, a, b] * y[b]
            grams[0, a, a] += cost.delta
        _elastic_net(0, grams, products, cost, new)
        slope = _penalty(new, cost) - _penalty(y, cost)
        for a in range(n_atoms):
            slope -= (new[a] - y[a]) * s[a]
        start, length = _height(free, scale, y, cost, bounds), 1.0
        for _ in range(_HALVINGS):
            for a in range(n_atoms):
                ahead[a] = y[a] + length * (new[a] - y[a])
            _free(center, W, scale, ahead, free)
            gain = 0.1 * length * slope + _ROUNDING * eps * abs(start)
            if _height(free, scale, ahead, cost, bounds) <= start + gain:
                break
            length /= 2
        y[:] = ahead
    _project(free, bounds)


@compiled
def admm(
    received: Matrix,
    n_rounds: int,
    sent: Matrix,
    first: Ints,
    senders: Ints,
    weights: Matrix,
    atoms: Matrix,
    scales: Matrix,
    factors: Matrix,
    linear: Matrix,
    memory: Matrix,
    cost: Cost,
    bounds: Matrix,
    codes: Matrix,
    nu: Matrix,
    shares: Matrix,
    measures: Matrix,
) -> None:
    """Continue an ADMM: take in messages, make rounds among the agents here, write messages.

    An agent's message is the nu at which its cost plus a quadratic is least (39a). From the
    weighted sum of what it hears it updates what it remembers. With its factors a, b, c, d, e, g::

        linear' = a memory + sum + b nu
        memory' = c memory + d linear' + e linear + g nu

    Parameters
    ----------
    received, n_rounds, sent, first, senders, weights
        As in `diffusion`; messages that are taken in are answers to ``nu``.
    atoms : ndarray
        As in `DualState`.
    scales : ndarray of shape (m,)
        ``1 / a``, a the quadratics' curvatures.
    factors : ndarray of shape (m, 6)
        Each agent's.
    linear, memory : ndarrays of nu's shape
        As in `DualState`: the quadratics are least at ``linear``. Are updated.
    cost, bounds
        The objective, and the bound of every feature.
    codes : ndarray of shape (m, n_samples, n_atoms)
        A guess, in which the codes are written.
    nu : ndarray of shape (m, n_samples, n_features)
        The agents' last messages. Is updated.
    shares : ndarray of shape (m,)
        One over the sum of an agent's weights; 0 where it hears nobody.
    measures : ndarray of shape (3, m, n_samples)
        As in `diffusion`; the last step is measured if it is made here.
    """
    m, n_samples, n_features = nu.shape
    n_atoms = atoms.shape[1]
    grams, products, y = np.empty((m, n_atoms, n_atoms)), np.empty(n_atoms), np.empty(n_atoms)
    for k in range(m):
        for a in range(n_atoms):
            for b in range(a + 1):
                product = scales[k] * np.dot(atoms[k, a], atoms[k, b])
                grams[k, a, b] = grams[k, b, a] = product
            grams[k, a, a] += cost.delta
    buffers = np.empty((2, m if n_rounds else 0, 1, n_features), nu.dtype)
    around, moves = np.empty(n_features, nu.dtype), np.empty(n_atoms, nu.dtype)
    rest = np.empty(n_features, nu.dtype)
    for i in range(n_samples):
        for round_ in range(n_rounds + 1):
            begins, ends = round_ == 0, round_ == n_rounds
            heard, at = (received, i) if begins else (buffers[round_ % 2], 0)
            own = nu if begins else heard
            out, to = (sent, i) if ends else (buffers[1 - round_ % 2], 0)
            measured = ends and len(measures) > 0
            for k in range(m):
                if len(heard) > 0:
                    _total(k, at, first, senders, weights, heard, around)
                    if measured:
                        hears = nu.dtype.type(shares[k] > 0)
                        for f in range(n_features):
                            rest[f] = hears * own[k, at, f] - shares[k] * around[f]
                        measures[1, k, i] = _norm(rest)
                        for f in range(n_features):
                            rest[f] = own[k, at, f]
                        measures[2, k, i] = _norm(rest)
                        if not begins:
                            for f in range(n_features):
                                rest[f] = own[k, at, f] - nu[k, i, f]
                            measures[0, k, i] = _norm(rest)
                    fa, fb, fc = factors[k, 0], factors[k, 1], factors[k, 2]
                    fd, fe, fg = factors[k, 3], factors[k, 4], factors[k, 5]
                    for f in range(n_features):
                        around[f] += fa * memory[k, i, f] + fb * own[k, at, f]
                    for f in range(n_features):
                        memory[k, i, f] = fc * memory[k, i, f] + fd * around[f]
                        memory[k, i, f] += fe * linear[k, i, f] + fg * own[k, at, f]
                    for f in range(n_features):
                        linear[k, i, f] = around[f]
                    if round_ >= n_rounds - 1 and not begins:
                        for f in range(n_features):
                            nu[k, i, f] = own[k, 0, f]
                if len(out) > 0:
                    for a in range(n_atoms):
                        y[a] = codes[k, i, a]
                        products[a] = np.dot(linear[k, i], atoms[k, a])
                    if n_atoms == 1:
                        y[0] = cost.delta / grams[k, 0, 0] * _code(products[0], cost)
                    else:
                        _elastic_net(k, grams, products, cost, y)
                    for a in range(n_atoms):
                        moves[a] = scales[k] * y[a]
                    for f in range(n_features):
                        out[k, to, f] = linear[k, i, f]
                    for a in range(n_atoms):
                        move = moves[a]
                        for f in range(n_features):
                            out[k, to, f] -= move * atoms[k, a, f]
                    if cost.bounded:
                        outside = False
                        for f in range(n_features):
                            outside = outside or abs(out[k, to, f]) > bounds[f]
                        if outside:
                            _meet_bounds(k, i, atoms, scales[k], linear, cost, bounds, y, out, to)
                    for a in range(n_atoms):
                        codes[k, i, a] = y[a]
