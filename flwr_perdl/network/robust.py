"""Combination among neighbors that lie: what replaces the weighted mean of a neighborhood.

``psi_k`` is a node's own array, ``psi_l`` those that it received, ``a_kl`` their weights, which sum
to one with its own ``a_kk``, and ``n`` is ``n_liars``.

============================================  ===================================================
literature                                    here
============================================  ===================================================
self-centered clipping (ClippedGossip)        `clipped`
``w_k = psi_k + sum_l a_kl                    a neighbor farther than ``tau_k`` counts as if it
min(1, tau_k / |psi_l - psi_k|)               were at this distance
(psi_l - psi_k)``
``tau_k^2 = sum_l a_kl E|psi_l - psi_k|^2     ``tau_k`` is the distance of the farthest neighbor
/ delta``, honest ``l``, liars' weight delta  but ``n``: no node knows who is honest
trimmed mean (BRIDGE-T)                       `trimmed`
``w_k = sum_l psi_l / (d_k - 2n + 1)`` over   ``sum_l a_kl psi_l / sum_l a_kl`` over the same,
``k`` and the neighbors, but the ``n``        which is the paper's where all weights are equal
largest and the ``n`` smallest of these,
by coordinate
============================================  ===================================================

Sources. He, Karimireddy, Jaggi, "Byzantine-robust decentralized learning via ClippedGossip"
(first "via self-centered clipping"), arXiv:2202.01545, 2022; its nodes send momentum steps, ours
what ``fit`` returns. Fang, Yang, Bajwa, "BRIDGE: Byzantine-resilient decentralized gradient
descent", IEEE Transactions on Signal and Information Processing over Networks 8, 2022; its nodes
combine before the step, ours also after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from flwr_perdl.core.arrays import row_norms
from flwr_perdl.network.combine import Array, Inbox


def clipped(
    own: Array, received: Array, weights: Array, n_liars: int, distances: Array | None = None
) -> Array:
    """Return (p,) of a node's own (p,) and the received (s, p), of weights (s,), s >= 0.

    ``distances`` (s,) are those of the whole models, of which these are a part.
    """
    apart = received - own
    if distances is None:
        distances = row_norms(apart)
    kept = np.sort(distances)[: max(len(distances) - n_liars, 0)]
    radius = kept.max(initial=0)
    far = distances > radius
    factors = np.where(far, radius / np.where(far, distances, 1), 1).astype(own.dtype)
    combined: Array = own + ((weights * factors)[:, None] * apart).sum(axis=0)
    return combined


def trimmed(own: Array, received: Array, weights: Array, n_liars: int) -> Array:
    """Return (p,) of a node's own (p,) and the received (s, p), of weights (s,), s >= 0."""
    order = np.argsort(received, axis=0, kind="stable")[n_liars : max(len(received) - n_liars, 0)]
    apart, shares = np.take_along_axis(received, order, axis=0) - own, weights[order]
    own_weight = 1 - weights.sum()
    total = own_weight + shares.sum(axis=0)
    combined: Array = own + (shares * apart).sum(axis=0) / np.where(total > 0, total, 1)
    return combined


RULES: Mapping[str, Callable[..., Array]] = {"clip": clipped, "trimmed": trimmed}


def robust_means(
    inbox: Inbox, positions: Sequence[int], rule: str, n_liars: int
) -> dict[int, Array]:
    """Return what a rule makes of these arrays of each neighborhood, (m, ...) by position.

    The received are in the order of their senders: the bits are those of any engine.
    """
    wide = (np.result_type(inbox.arrays[i], np.float32) for i in positions)
    sent = {
        i: inbox.arrays[i].reshape(len(inbox.senders), -1).astype(dtype, copy=False)
        for i, dtype in zip(positions, wide, strict=True)
    }
    combined = {i: array[inbox.own] for i, array in sent.items()}
    for k, own in enumerate(inbox.own):
        weights = {at: weight for at, weight in inbox.neighbor_terms(k) if at != own}
        received = list(weights)
        further: list[Array] = []
        if rule == "clip":
            squares = np.zeros(len(received))
            for array in sent.values():
                squares += np.square(row_norms(array[received] - array[own]))
            further = [np.sqrt(squares)]
        for i, array in sent.items():
            shares = np.array(list(weights.values()), array.dtype)
            rows = array[own], array[received]
            combined[i][k] = RULES[rule](*rows, shares, n_liars, *further)
    return {i: rows.reshape(-1, *inbox.arrays[i].shape[1:]) for i, rows in combined.items()}
