"""`diffusion_averaging` with compressed messages: error feedback against public copies.

A node sends the compressed difference of what it would send, ``v_k``, from its *public copy*
``c_k``, which all its neighbors add up alike; so what one message leaves out is in the next ones.
Of its neighbors' copies it keeps the weighted sum ``s_k`` only, which is all that it needs as long
as the network stays the same and no message is lost. ``Q`` is the compression, ``gamma`` the
consensus step, `consensus_step`.

=========================================  ======================================================
literature                                 here
=========================================  ======================================================
``q_k = Q(v_k - c_k)``, ``c_k <- c_k +     `CompressedProgram.adapt`, ``state.copies``
q_k``, ``s_k <- s_k + sum_l a_kl q_l``     `CompressedProgram.combine`, ``state.sums``
``v_k <- v_k + gamma (s_k - c_k)``         `CompressedProgram._means`: those of the neighborhood
CHOCO-SGD                                  ``method="atc"``: ``v = psi``;
                                           ``"cta"``: ``v = w``, then ``fit``
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

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.models import cleared
from flwr_perdl.network.averaging_program import AveragingProgram, arrays_of, fixed_of, state_type
from flwr_perdl.network.combine import Array, Inbox
from flwr_perdl.network.compression import consensus_step
from flwr_perdl.random import spawn


class CompressedProgram(AveragingProgram):
    """`AveragingProgram` with ``compression``: see `diffusion_averaging`.

    Its state has public copies besides: ``copies`` and ``sums`` (m, n_parts, n_parameters) are of
    the arrays that are corrected, as one vector, and, with gradient tracking, of the tracker;
    ``values`` and ``codes`` (m, n_parts, ...) are the message of the round. The other arrays are
    sent as they are.
    """

    def start(self, nodes: NDArray[np.intp]) -> Any:
        """Return the state before the first round."""
        first = super().start(nodes)
        copies = np.zeros_like(self._parts(first))
        if self.initial is not None:  # which all nodes know: it need not be sent
            copies[:, 0] = self._parts(first)[:, 0]
        values, codes = self._encoded(copies, nodes, 0)
        more = {"copies": copies, "sums": copies, "values": values, "codes": codes}
        return state_type((*first._fields, *more))(*first, *more.values())

    def adapt(self, state: Any, round_: int) -> Any:
        """Train every node's model; what is sent is how far the result is from the public copy."""
        state = super().adapt(state, round_)
        values, codes = self._encoded(self._parts(state) - state.copies, state.nodes, round_)
        return state._replace(values=values, codes=codes)

    def message(self, state: Any) -> tuple[Array, ...]:
        """Return the compressed difference, and the arrays that are not compressed."""
        form, model = self._of(state), super().message(state)
        pairs = zip(form.sent, model, strict=False)
        return state.values, state.codes, *(a for i, a in pairs if i not in form.corrected)

    def rejects(self, state: Any, inbox: Inbox) -> dict[str, NDArray[np.bool_]]:
        """Return by reason which of the inbox's links brought a message that does not count."""
        sent = self._all_decoded(state, inbox.rows)
        unreadable = np.array([vectors is None for vectors in sent])
        found = super().rejects(state, inbox)
        return {**found, "it cannot be read": unreadable[inbox.links.indices]}

    def combine(self, state: Any, inbox: Inbox) -> Any:
        """Move the public copies, and combine by their means."""
        copies, sums = state.copies.copy(), state.sums.copy()
        decoded = self._all_decoded(state, inbox.rows)
        # What cannot be read has no weight.
        sent = np.stack([np.zeros_like(copies[0]) if own is None else own for own in decoded])
        copies += sent[inbox.own]
        sums += replace(inbox, rows=(sent,)).mean(ordered=True)
        state = super().combine(state._replace(copies=copies, sums=sums), inbox)
        state.reports[:, 0] /= consensus_step(self.options.compression)
        return state

    def _means(self, state: Any, inbox: Inbox) -> Iterator[Array]:
        """Yield the model, moved towards the mean by the public copies; other arrays' means."""
        form, moved, position = self._of(state), iter(self._moved(state, 0)), count(2)
        for i in form.sent:
            yield next(moved) if i in form.corrected else inbox.mean(next(position), ordered=True)

    def _tracked(self, state: Any, inbox: Inbox) -> list[Array]:
        """Return the trackers, moved towards the mean by the public copies."""
        trackers = arrays_of(state, "tracker")
        moved = self._moved(state, 1) if trackers else []
        return [array.astype(own.dtype) for array, own in zip(moved, trackers, strict=True)]

    def _moved(self, state: Any, part: int) -> list[Array]:
        """Return the arrays of a part, moved towards the mean by the public copies."""
        apart = state.sums[:, part] - state.copies[:, part]
        rows = self._parts(state)[:, part] + consensus_step(self.options.compression) * apart
        arrays = [arrays_of(state, "model")[i] for i in self._of(state).corrected]
        ends = np.cumsum([array[0].size for array in arrays])[:-1]
        parts = zip(np.split(rows, ends, axis=1), arrays, strict=True)
        return [rows.reshape(array.shape) for rows, array in parts]

    def _parts(self, state: Any) -> Array:
        """Return what has a public copy, (m, n_parts, n_parameters)."""
        model = arrays_of(state, "model")
        parts = [[cleared(model[i], fixed_of(state, i)) for i in self._of(state).corrected]]
        if trackers := arrays_of(state, "tracker"):
            parts.append(trackers)
        m = len(state.nodes)
        flat = [[array.reshape(m, -1) for array in arrays] for arrays in parts]
        dtype = np.result_type(np.float32, *parts[0])
        return np.stack([np.concatenate(rows, axis=1, dtype=dtype) for rows in flat], axis=1)

    def _encoded(self, parts: Array, nodes: NDArray[np.intp], round_: int) -> tuple[Array, Array]:
        """Return the compressed vectors, (m, n_parts, ...)."""
        compression, values, codes = self.options.compression, [], []
        assert compression is not None
        for node, own in zip(nodes, parts, strict=True):
            rng = spawn(getattr(compression, "seed", 0), int(node), round_)
            each = [compression.encode(part, rng) for part in own]
            values.append(np.stack([sent for sent, _ in each]))
            codes.append(np.stack([sent for _, sent in each]))
        return np.stack(values), np.stack(codes)

    def _all_decoded(self, state: Any, rows: Sequence[Any]) -> list[Any]:
        """Return the vectors of each message; None of one that cannot be read."""
        n = state.copies.shape[2]
        return [self._decoded(*each, n) for each in zip(rows[0], rows[1], strict=True)]

    def _decoded(self, values: Array, codes: Array, n: int) -> Any:
        """Return the vectors of a message, (n_parts, n_parameters); None if there are none."""
        compression = self.options.compression
        assert compression is not None
        try:
            each = [compression.decode(sent, n) for sent in zip(values, codes, strict=True)]
        except ValueError:
            return None
        return np.stack(each)
