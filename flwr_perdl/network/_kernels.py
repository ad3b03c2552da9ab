"""The inner loops of diffusion, compiled: what NumPy and SciPy do in more passes over long rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.checks import Matrix
from flwr_perdl.core.compiled import compiled

Ints = NDArray[np.intp]


@compiled
def weighted_sums(
    first: Ints, senders: Ints, weights: Matrix, messages: Matrix, sums: Matrix
) -> None:
    """Write each node's weighted sum of the messages it receives: (m, n) of (s, n).

    Node k receives from ``senders[first[k] : first[k + 1]]``, with the same part of ``weights``.
    Messages are added up in this order, up to four in a pass.
    """
    n = messages.shape[1]
    for k in range(len(sums)):
        e, end = first[k], first[k + 1]
        for f in range(n):
            sums[k, f] = 0
        while e + 4 <= end:
            p, q, r, s = senders[e], senders[e + 1], senders[e + 2], senders[e + 3]
            t, u, v, w = weights[e], weights[e + 1], weights[e + 2], weights[e + 3]
            for f in range(n):
                two = sums[k, f] + t * messages[p, f] + u * messages[q, f]
                sums[k, f] = two + v * messages[r, f] + w * messages[s, f]
            e += 4
        while e < end:
            p, t = senders[e], weights[e]
            for f in range(n):
                sums[k, f] += t * messages[p, f]
            e += 1


@compiled
def relax(
    around: Matrix,
    linear: Matrix,
    memory: Matrix,
    nu: Matrix,
    whole: Matrix,
    r: np.floating[Any],
    ahead: Matrix,
) -> None:
    """Write the next ``linear`` of `ConsensusADMM` over ``around``, and ``memory`` to ``ahead``."""
    m, n_samples, n = nu.shape
    for k in range(m):
        share = whole[k]
        for i in range(n_samples):
            for f in range(n):
                before = memory[k, i, f]
                step = around[k, i, f] - before
                around[k, i, f] = linear[k, i, f] + step
                ahead[k, i, f] = before + r * (step + (share * nu[k, i, f] - before))
