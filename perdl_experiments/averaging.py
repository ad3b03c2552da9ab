"""One dictionary, averaged atom by atom without matching: what PerMA is compared with.

PerMA (Liang et al., NeurIPS 2023, B.1) compares PerMA with Gkillas et al. (2022), who average
gradient steps, and Huang et al. (2022), who average K-SVD's by numbers of samples. `average` is the
fair version of both: from a common start atoms keep their places, so that no matching is needed;
atoms that nobody uses are replaced by what all clients' residuals have in common. `naive_average`
has the clients' own dictionaries, whose atoms are in any order: what matching is for.

As PerMA's clients, these withhold atoms that too few samples make up
(`flwr_perdl.privacy.may_send`). A client sends its atoms, and a direction of its residuals in place
of an atom that it does not send.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from flwr_perdl.core.checks import Matrix
from flwr_perdl.dictionary import (
    Learner,
    aggregate_atoms,
    normalize_atoms,
    polar_factor,
    principal_directions,
    reconstruct,
    remainder,
    warm_start,
)
from flwr_perdl.dictionary.learners import update_weights
from flwr_perdl.privacy import may_send
from flwr_perdl.random import SERVER, spawn
from perdl_experiments.baselines import Start

#: Directions shorter than this after projection lie in the span of the other atoms.
_TINY = 1e-6


class Averaged(NamedTuple):
    """A dictionary of all clients, and what it cost.

    Attributes
    ----------
    atoms : ndarray of shape (n_atoms, n_features)
        Unit atoms; orthonormal if the learner's are, but for the naive average.
    floats_up, floats_down : float
        What a client sent and received.
    """

    atoms: Matrix
    floats_up: float
    floats_down: float


def average(
    samples: Sequence[Matrix],
    learner: Learner,
    n_rounds: int,
    *,
    seed: int,
    start: Start = warm_start,
    weighted: bool = True,
    local_steps: int = 1,
    min_support: int = 3,
) -> Averaged:
    """Average the clients' dictionaries in every round, from the largest client's start.

    Parameters
    ----------
    samples : sequence of ndarray of shape (n_samples, n_features)
        One array per client.
    learner : Learner
        The clients' algorithm.
    n_rounds : int
        Communication rounds; in the first the clients send their own dictionaries.
    seed : int
        Of the starts.
    start : callable, default `warm_start`
        How a client makes its own dictionary.
    weighted : bool, default True
        Whether clients count by their numbers of samples.
    local_steps : int, default 1
        Iterations of the learner per round.
    min_support : int, default 3
        How many samples must stand behind an atom that a client sends.
    """
    stack = _own(samples, learner, seed, start, min_support)
    D = _common_start(stack[:, :-1], samples, seed, learner)
    for _ in range(n_rounds - 1):
        sent = partial(send, learner=learner, D=D, n_steps=local_steps, min_support=min_support)
        stack = np.stack([sent(X) for X in samples])
        D = combine(stack, D, _weights(samples, weighted), orthogonal=learner.orthogonal)
    return Averaged(D, float(n_rounds * stack[0].size), float((n_rounds - 1) * D.size))


def naive_average(
    samples: Sequence[Matrix],
    learner: Learner,
    *,
    seed: int,
    start: Start = warm_start,
    weighted: bool = True,
    min_support: int = 3,
) -> Averaged:
    """Average the clients' own dictionaries, once; the parameters are those of `average`."""
    stack = _own(samples, learner, seed, start, min_support)
    D = _common_start(stack[:, :-1], samples, seed, learner)
    D = _mean(stack[:, :-1], D, _weights(samples, weighted), orthogonal=False)
    return Averaged(D, float(stack[0].size), 0.0)


def send(X: Matrix, learner: Learner, D: Matrix, n_steps: int, min_support: int) -> Matrix:
    """Return what a client sends after iterations from ``D``.

    Returns
    -------
    ndarray of shape (n_atoms + 1, n_features)
        Its atoms, zeros for those it withholds; last, the leading direction of its residuals where
        it sends one, else zeros.
    """
    C = learner.code(X, D)
    before = C, D
    for _ in range(n_steps):
        before = C, D
        D = learner.update(X, C, D)
        C = learner.code(X, D)
    weights = update_weights(learner, X, *before) if n_steps else C
    rest = remainder(X, reconstruct(C, D))
    used = np.any(C, axis=0) & may_send(weights, X, min_support)
    sent = np.vstack([np.where(used[:, None], D, 0), np.zeros_like(D[:1])])
    if not used.all() and rest.any():
        direction = principal_directions(rest, 1)
        if may_send(rest @ direction.T, rest, min_support)[0]:
            sent[-1] = direction
    return sent


def combine(stack: Matrix, current: Matrix, weights: Matrix | None, *, orthogonal: bool) -> Matrix:
    """Average what clients `send` atom by atom, and replace atoms that nobody uses.

    Parameters
    ----------
    stack : ndarray of shape (n_clients, n_atoms + 1, n_features)
        What they sent.
    current : ndarray of shape (n_atoms, n_features)
        The dictionary that they started from; an unused atom that nothing can replace stays.
    weights : ndarray of shape (n_clients,) or None
        None: all clients count alike.
    orthogonal : bool
        Whether atoms are orthonormal.
    """
    own, spare = stack[:, :-1], stack[:, -1][np.any(stack[:, -1] != 0, axis=1)]
    atoms = _mean(own, current, weights, orthogonal=orthogonal)
    unused = np.flatnonzero(~np.any(own != 0, axis=(0, 2)))
    if len(unused) and orthogonal:
        kept = np.delete(atoms, unused, axis=0)
        spare = spare - (spare @ kept.T) @ kept
        spare = spare[np.linalg.norm(spare, axis=1) > _TINY]
    if not (len(unused) and len(spare)):
        return atoms
    fresh = principal_directions(spare, min(len(unused), atoms.shape[1]))
    atoms[unused[: len(fresh)]] = fresh
    fixed = np.isin(np.arange(len(atoms)), unused[len(fresh) :])
    if orthogonal:
        return polar_factor(atoms, current, fixed)
    atoms[~fixed] = normalize_atoms(atoms[~fixed])
    return atoms


def _own(
    samples: Sequence[Matrix], learner: Learner, seed: int, start: Start, min_support: int
) -> Matrix:
    """Return what the clients send of their local dictionaries."""
    found = [start(X, learner, rng=spawn(seed, i)).dictionary for i, X in enumerate(samples)]
    pairs = zip(samples, found, strict=True)
    return np.stack([send(X, learner, D, 0, min_support) for X, D in pairs])


def _common_start(own: Matrix, samples: Sequence[Matrix], seed: int, learner: Learner) -> Matrix:
    """Return the dictionary of the client with the most samples; withheld atoms are drawn."""
    D = own[int(np.argmax([len(X) for X in samples]))]
    drawn = normalize_atoms(spawn(seed, SERVER, 1).standard_normal(D.shape).astype(D.dtype))
    if learner.orthogonal and not D.any(axis=1).all():
        return polar_factor(D, polar_factor(drawn, drawn))
    return normalize_atoms(D, drawn)


def _weights(samples: Sequence[Matrix], weighted: bool) -> Matrix | None:
    return np.array([float(len(X)) for X in samples]) if weighted else None


def _mean(own: Matrix, current: Matrix, weights: Matrix | None, *, orthogonal: bool) -> Matrix:
    method = "mean" if weights is None else "weighted"
    found = aggregate_atoms(own, current, method=method, weights=weights, orthogonal=orthogonal)
    return found.global_atoms
