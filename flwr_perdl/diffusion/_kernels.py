"""The inner loops of diffusion, compiled: agent by agent.

:func:`atc` and :func:`admm` make rounds over a sparse network with all agents in one process,
sample by sample, where every agent has one atom and V_f is all of space. An agent's sum of
messages, its correlation and its next message are computed while its numbers are in the cache: a
round passes over memory once. Over a dense network a product of matrices sums the messages faster;
:func:`admm_step` is what the consensus ADMM does with the sums, in one pass.
:func:`weighted_sums`, :func:`correlations` and :func:`distances` are the steps of such a round that
NumPy would sum in another order. The methods call them where the agents are not in one process, so
that the results are the same bits.

Arrays have the shapes of `DualState`: (m, n_samples, n_features) for estimates and messages, (m,
1, n_features) for atoms. Agent k receives from ``senders[first[k] : first[k + 1]]``, with the same
part of ``weights``. The loops over features index whole arrays: slices of every row would cost as
much as a hundred features.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.checks import Matrix
from flwr_perdl.core.compiled import compiled

Ints = NDArray[np.intp]
Number = float | np.floating[Any]

#: Partial sums of an inner product, which a processor can add up at once.
_LANES = 64


@compiled
def _folded(lanes: Matrix) -> Number:
    """Return the sum of the partial sums, and set them to zero."""
    total: Number = lanes[0]
    lanes[0] = 0
    for lane in range(1, len(lanes)):
        total += lanes[lane]
        lanes[lane] = 0
    return total


@compiled
def _product(A: Matrix, j: int, i: int, atoms: Matrix, k: int, lanes: Matrix) -> Number:
    """Return the inner product of a row and agent k's atom; ``lanes`` are zeros, and stay so."""
    for start in range(0, A.shape[2], _LANES):
        a, b = A[j, i, start : start + _LANES], atoms[k, 0, start : start + _LANES]
        for lane in range(len(a)):
            lanes[lane] += a[lane] * b[lane]
    return _folded(lanes)


@compiled
def _distance(a: Matrix, b: Matrix, scale: Number, lanes: Matrix) -> Number:
    """Return ``||a - scale * b||``, also where squares would underflow."""
    for start in range(0, len(a), _LANES):
        c, d = a[start : start + _LANES], b[start : start + _LANES]
        for lane in range(len(c)):
            difference = c[lane] - scale * d[lane]
            lanes[lane] += difference * difference
    square, limits = _folded(lanes), np.finfo(a.dtype)
    norm: Number = np.sqrt(square)
    # Below this the square has lost digits, or all: scaled by the largest entry it has not.
    if square >= limits.tiny / limits.eps**2:
        return norm
    size = 0.0
    for f in range(len(a)):
        size = max(size, abs(a[f] - scale * b[f]))
    rest = 0.0
    for f in range(len(a)):
        rest += ((a[f] - scale * b[f]) / size) ** 2 if size > 0 else 0.0
    norm = size * np.sqrt(rest)
    return norm


@compiled
def _code(s: Number, gamma: Number, delta: Number, nonnegative: bool) -> Number:
    """Return the code (42) of a correlation."""
    if s > gamma:
        return (s - gamma) / delta
    if s < -gamma and not nonnegative:
        return (s + gamma) / delta
    return s - s  # zero, in single precision where s is


@compiled
def _weighted_sum(
    messages: Matrix, start: int, end: int, senders: Ints, weights: Matrix, sums: Matrix, k: int
) -> None:
    """Write a weighted sum of messages to row k, added up in order, up to four in a pass."""
    n = messages.shape[1]
    if start == end:
        for f in range(n):
            sums[k, 0, f] = 0
        return
    p, t = senders[start], weights[start]
    for f in range(n):
        sums[k, 0, f] = t * messages[p, f]
    e = start + 1
    while e + 4 <= end:
        p, q, r, s = senders[e], senders[e + 1], senders[e + 2], senders[e + 3]
        t, u, v, w = weights[e], weights[e + 1], weights[e + 2], weights[e + 3]
        for f in range(n):
            two = sums[k, 0, f] + t * messages[p, f] + u * messages[q, f]
            sums[k, 0, f] = two + v * messages[r, f] + w * messages[s, f]
        e += 4
    while e < end:
        p, t = senders[e], weights[e]
        for f in range(n):
            sums[k, 0, f] += t * messages[p, f]
        e += 1


@compiled
def weighted_sums(
    first: Ints, senders: Ints, weights: Matrix, messages: Matrix, sums: Matrix
) -> None:
    """Write each agent's weighted sum of the messages that it receives: (m, 1, n) of (s, n)."""
    for k in range(len(sums)):
        _weighted_sum(messages, first[k], first[k + 1], senders, weights, sums, k)


@compiled
def correlations(nu: Matrix, atoms: Matrix, out: Matrix) -> None:
    """Write ``W_k nu_k`` of agents of one atom: (m, n_samples)."""
    lanes = np.zeros(_LANES, nu.dtype)
    for k in range(nu.shape[0]):
        for i in range(nu.shape[1]):
            out[k, i] = _product(nu, k, i, atoms, k, lanes)


@compiled
def distances(A: Matrix, B: Matrix, scales: Matrix, out: Matrix) -> None:
    """Write the norms of ``A - scales * B`` over the last axis, one scale per agent."""
    lanes = np.zeros(_LANES, A.dtype)
    for k in range(A.shape[0]):
        for i in range(A.shape[1]):
            out[k, i] = _distance(A[k, i], B[k, i], scales[k], lanes)


@compiled
def atc(
    n_rounds: int,
    first: Ints,
    senders: Ints,
    weights: Matrix,
    atoms: Matrix,
    linear: Matrix,
    same: Ints,
    gamma: Number,
    delta: Number,
    nonnegative: bool,
    mu: Number,
    kept: Number,
    nu: Matrix,
    messages: Matrix,
    change: Matrix,
    apart: Matrix,
) -> None:
    """Make rounds of ATC diffusion, at least one.

    ``same`` (m,) names for every agent one whose ``linear`` is the same: a few are read instead of
    all. ``mu`` is the step, ``kept`` the share of nu that it leaves. nu is updated; ``messages``
    (2, m, n_features) is memory for those of a sample that are received and sent in a round; the
    lengths of the last step and of the distance to the neighbors are written to ``change`` and
    ``apart`` (m, n_samples).
    """
    m, n_samples, n = nu.shape
    one, lanes = nu.dtype.type(1), np.zeros(_LANES, nu.dtype)
    row = np.empty((1, 1, n), nu.dtype)
    # Samples outermost: all agents' numbers of one sample stay in the cache over the rounds.
    for i in range(n_samples):
        for round_ in range(n_rounds + 1):
            received, sent = messages[round_ % 2], messages[1 - round_ % 2]
            for k in range(m):
                if round_ == 0:
                    for f in range(n):
                        row[0, 0, f] = nu[k, i, f]
                else:  # (31b)
                    _weighted_sum(received, first[k], first[k + 1], senders, weights, row, 0)
                if round_ < n_rounds:  # (31a) with the gradient (62)
                    s = _product(row, 0, 0, atoms, k, lanes)
                    move, known = mu * _code(s, gamma, delta, nonnegative), same[k]
                    for f in range(n):
                        target = linear[known, i, f] - move * atoms[k, 0, f]
                        sent[k, f] = target + kept * row[0, 0, f]
                else:
                    change[k, i] = _distance(row[0, 0], nu[k, i], one, lanes)
                    apart[k, i] = _distance(received[k], row[0, 0], one, lanes)
                # The estimates before the last round measure its step, those after it are returned.
                if round_ >= n_rounds - 1:
                    for f in range(n):
                        nu[k, i, f] = row[0, 0, f]


class Quadratics(NamedTuple):
    """What the consensus ADMM's rounds know beforehand, with curvatures a and relaxation r.

    ``shrink = delta / (delta + ||W_k||^2 / a_k)``, ``scales = 1 / a_k``, ``fade = 1 - r``,
    ``ahead = (2r - 1) / (1 - r)``, ``back = 2 r^2 D_k / a_k / (1 - r)``.
    """

    gamma: Number
    delta: Number
    nonnegative: bool
    shrink: Matrix
    scales: Matrix
    fade: Number
    ahead: Number
    back: Matrix


@compiled
def _move(s: Number, k: int, known: Quadratics) -> Number:
    """Return how far agent k goes against its atom in (39a)."""
    code = _code(s, known.gamma, known.delta, known.nonnegative)
    move: Number = code * known.shrink[k] * known.scales[k]
    return move


@compiled
def admm(
    n_rounds: int,
    first: Ints,
    senders: Ints,
    weights: Matrix,
    shares: Matrix,
    atoms: Matrix,
    known: Quadratics,
    linear: Matrix,
    memory: Matrix,
    nu: Matrix,
    messages: Matrix,
    change: Matrix,
    apart: Matrix,
) -> None:
    """Make rounds of the consensus ADMM, at least one.

    The weights are those of ``ConsensusADMM.edges``, and ``shares`` (m,) one over an agent's sum of
    them. ``linear``, ``memory`` and ``nu`` are updated; the rest is as in `atc`.
    """
    m, n_samples, n = nu.shape
    one, lanes = nu.dtype.type(1), np.zeros(_LANES, nu.dtype)
    row = np.empty((1, 1, n), nu.dtype)
    # Samples outermost: all agents' numbers of one sample stay in the cache over the rounds.
    for i in range(n_samples):
        for round_ in range(n_rounds + 1):
            received, sent = messages[round_ % 2], messages[1 - round_ % 2]
            for k in range(m):
                if round_ > 0:
                    _weighted_sum(received, first[k], first[k + 1], senders, weights, row, 0)
                    if round_ == n_rounds:
                        apart[k, i] = _distance(received[k], row[0, 0], shares[k], lanes)
                    leave = known.back[k]
                    for f in range(n):
                        faded = known.fade * memory[k, i, f]
                        center = row[0, 0, f] + faded
                        mixed = faded + center + known.ahead * linear[k, i, f]
                        memory[k, i, f] = mixed - leave * received[k, f]
                        linear[k, i, f] = center
                if round_ < n_rounds:  # (39a)
                    s = _product(linear, k, i, atoms, k, lanes)
                    move = _move(s, k, known)
                    for f in range(n):
                        sent[k, f] = linear[k, i, f] - move * atoms[k, 0, f]
                if round_ == n_rounds - 1:
                    before = received[k] if round_ > 0 else nu[k, i]
                    change[k, i] = _distance(sent[k], before, one, lanes)
                    for f in range(n):
                        nu[k, i, f] = sent[k, f]


@compiled
def admm_step(
    sums: Matrix, atoms: Matrix, known: Quadratics, linear: Matrix, memory: Matrix, nu: Matrix
) -> None:
    """End a round of the consensus ADMM with the sums of messages, and make the next messages.

    ``sums`` (m, n_samples, n_features) are what the agents received, times the weights of
    ``ConsensusADMM.edges``. ``linear``, ``memory`` and ``nu`` are updated.
    """
    m, n_samples, n = nu.shape
    lanes = np.zeros(_LANES, nu.dtype)
    for k in range(m):
        leave = known.back[k]
        for i in range(n_samples):
            for f in range(n):
                faded = known.fade * memory[k, i, f]
                center = sums[k, i, f] + faded
                mixed = faded + center + known.ahead * linear[k, i, f]
                memory[k, i, f] = mixed - leave * nu[k, i, f]
                linear[k, i, f] = center
            s = _product(linear, k, i, atoms, k, lanes)  # (39a)
            move = _move(s, k, known)
            for f in range(n):
                nu[k, i, f] = linear[k, i, f] - move * atoms[k, 0, f]
