"""`DiffusionAveraging` with compressed messages: error feedback against public copies.

A node sends the compressed difference of what it would send, ``v_k``, from its *public copy*
``c_k``, which all its neighbors add up alike; so what one message leaves out is in the next ones.
Of its neighbors' copies it keeps the weighted sum ``s_k`` only, which is all that it needs as long
as the network stays the same and no message is lost. ``Q`` is the compression, ``gamma`` the
consensus step.

=========================================  ======================================================
literature                                 here
=========================================  ======================================================
``q_k = Q(v_k - c_k)``, ``c_k <- c_k +     `CompressedProgram.adapt`, ``state.copies``
q_k``, ``s_k <- s_k + sum_l a_kl q_l``     `CompressedProgram.combine`, ``state.sums``
``v_k <- v_k + gamma (s_k - c_k)``         `CompressedProgram._mean`: the mean of the neighborhood
CHOCO-SGD                                  ``method="cta"``: ``v = w``, then ``fit``;
                                           ``"atc"``: ``v = psi``
compressed gradient tracking (C-GT)        ``"gradient_tracking"``: ``v = w - y``, and a copy and
                                           a sum of the tracker likewise, ``v = y``
LEAD: ``d_k <- d_k - gamma/2 (s_k - c_k)`` ``"exact_diffusion"``: ``v = psi - d``, where
``w_k = psi_k - d_k``                      ``d_k = psi_k(t-1) - w_k(t-1)``
=========================================  ======================================================

Sources. CHOCO: Koloskova, Stich, Jaggi, "Decentralized stochastic optimization and gossip
algorithms with compressed communication", ICML 2019. C-GT: Liao, Li, Huang, Pu, "A compressed
gradient tracking method for decentralized optimization with linear convergence", IEEE TAC 67, 2022.
LEAD: Liu, Li, Wang, Tang, Yan, "Linear convergent decentralized optimization with compression",
ICLR 2021.

Deviations: gradient tracking combines after the step, as without compression. LEAD's copies move by
the whole of ``q`` (its alpha is 1).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.packing import pack, unpack
from flwr_perdl.diffusion.averaging import AveragingProgram
from flwr_perdl.diffusion.combine import Array, Inbox
from flwr_perdl.random import spawn


class CompressedState(NamedTuple):
    """An `AveragingState` with public copies.

    ``copies`` and ``sums`` (m, n_parts, n_parameters) are of the model and, with gradient tracking,
    the tracker; ``values`` and ``codes`` (m, n_parts, ...) are the message of the round.
    """

    nodes: NDArray[np.intp]
    model: Array
    last: Array
    tracker: Array
    reports: NDArray[np.float64]
    copies: Array
    sums: Array
    values: Array
    codes: Array


class CompressedProgram(AveragingProgram):
    """`AveragingProgram` with ``compression``: see `DiffusionAveraging`."""

    def start(self, nodes: NDArray[np.intp]) -> Any:
        """Return the state before the first round."""
        first = super().start(nodes)
        copies = np.zeros_like(self._parts(first))
        if self.initial is not None:  # which all nodes know: it need not be sent
            copies[:, 0] = first.model
        values, codes = self._encoded(copies, nodes, 0)
        return CompressedState(*first, copies, copies, values, codes)

    def adapt(self, state: Any, round_: int) -> Any:
        """Train every node's model; what is sent is how far the result is from the public copy."""
        state = super().adapt(state, round_)
        values, codes = self._encoded(self._parts(state) - state.copies, state.nodes, round_)
        return state._replace(values=values, codes=codes)

    def message(self, state: Any) -> tuple[Array, ...]:
        """Return the compressed difference."""
        return state.values, state.codes

    def readable(self, state: Any, arrays: tuple[Array, ...]) -> NDArray[np.bool_]:
        """Return which messages can be decoded, (s,)."""
        sent = self._all_decoded(state, arrays)
        return np.array([vectors is not None for vectors in sent])

    def combine(self, state: Any, inbox: Inbox) -> Any:
        """Move the public copies, and combine by their means."""
        copies, sums = state.copies.copy(), state.sums.copy()
        decoded = self._all_decoded(state, inbox.arrays)
        # What cannot be read has no weight.
        sent = np.stack([np.zeros_like(copies[0]) if own is None else own for own in decoded])
        copies += sent[inbox.own]
        sums += replace(inbox, arrays=(sent,)).mean(ordered=True)
        state = super().combine(state._replace(copies=copies, sums=sums), inbox)
        state.reports[:, 0] /= self.learner.consensus_step
        return state

    def _mean(self, state: Any, inbox: Inbox, i: int) -> Array:
        """Return the model, or the tracker, moved towards the mean by the public copies."""
        apart = state.sums[:, i] - state.copies[:, i]
        mean: Array = self._parts(state)[:, i] + self.learner.consensus_step * apart
        return mean

    def _parts(self, state: Any) -> Array:
        """Return what has a public copy, (m, n_parts, n_parameters)."""
        return np.stack(super().message(state), axis=1)

    def _encoded(self, parts: Array, nodes: NDArray[np.intp], round_: int) -> tuple[Array, Array]:
        """Return the compressed vectors, (m, n_parts, ...); bytes are packed into floats."""
        compression, values, codes = self.learner.compression, [], []
        assert compression is not None
        for node, own in zip(nodes, parts, strict=True):
            rng = spawn(getattr(compression, "seed", 0), int(node), round_)
            each = [compression.encode(part, rng) for part in own]
            values.append(np.stack([sent for sent, _ in each]))
            codes.append(np.stack([pack(sent.tobytes()) for _, sent in each]))
        return np.stack(values), np.stack(codes)

    def _all_decoded(self, state: Any, arrays: tuple[Array, ...]) -> list[Any]:
        """Return the vectors of each message; None of one that cannot be read."""
        n = state.model.shape[1]
        return [self._decoded(*each, n) for each in zip(arrays[0], arrays[1], strict=True)]

    def _decoded(self, values: Array, codes: Array, n: int) -> Any:
        """Return the vectors of a message, (n_parts, n_parameters); None if there are none."""
        compression = self.learner.compression
        assert compression is not None
        try:
            packed = [np.frombuffer(unpack(part), dtype=np.uint8) for part in codes]
            each = [compression.decode(sent, n) for sent in zip(values, packed, strict=True)]
        except ValueError:
            return None
        return np.stack(each)
