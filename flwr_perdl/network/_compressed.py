"""`diffusion_averaging` with compressed messages: error feedback against public copies.

A node sends the compressed difference of what it would send, ``v_k``, from its *public copy*
``c_k``, which all its neighbors add up alike; so what one message leaves out is in the next ones.
Of its neighbors' copies it keeps the weighted sum ``s_k`` only, which is all that it needs as long
as the network stays the same and no message is lost. ``Q`` is the compression, ``gamma`` the
consensus step, `consensus_step`.

=========================================  ======================================================
literature                                 here
=========================================  ======================================================
``q_k = Q(v_k - c_k)``, ``c_k <- c_k +     `CompressedNode.adapt`, ``copies``
q_k``, ``s_k <- s_k + sum_l a_kl q_l``     `CompressedNode.combine`, ``sums``
``v_k <- v_k + gamma (s_k - c_k)``         `CompressedNode._means`: those of the neighborhood
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

from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.arrays import Array
from flwr_perdl.core.models import cleared
from flwr_perdl.network.averaging import AveragingNode, NodeState, Trainer
from flwr_perdl.network.compression import consensus_step
from flwr_perdl.network.messages import Neighborhood
from flwr_perdl.random import spawn


class CompressedNode(AveragingNode):
    """`AveragingNode` with ``compression``: see `diffusion_averaging`.

    Its state has public copies besides: ``copies`` and ``sums`` (n_parts, n_parameters) are of the
    arrays that are corrected, as one vector, and, with gradient tracking, of the tracker;
    ``values`` and ``codes`` (n_parts, ...) are the message of the round. The other arrays are sent
    as they are.
    """

    def start(self, model: Any, *, known: bool = True) -> NodeState:
        """Return the state before the first round."""
        first = super().start(model, known=known)
        copies = np.zeros_like(self._parts(first))
        if known:  # it need not be sent
            copies[0] = self._parts(first)[0]
        return first._replace(more={"copies": copies, "sums": copies, **self._encoded(copies, 0)})

    def adapt(self, state: NodeState, round_: int, trainer: Trainer) -> NodeState:
        """Train the model; what is sent is how far the result is from the public copy."""
        state = super().adapt(state, round_, trainer)
        sent = self._encoded(self._parts(state) - state.more["copies"], round_)
        return state._replace(more={**state.more, **sent})

    def message(self, state: NodeState) -> list[Array]:
        """Return the compressed difference, and the arrays that are not compressed."""
        pairs = zip(self.form.sent, super().message(state), strict=False)
        others = [array for i, array in pairs if i not in self.form.corrected]
        return [state.more["values"], state.more["codes"], *others]

    def rejects(self, state: NodeState, around: Neighborhood) -> dict[str, NDArray[np.bool_]]:
        """Return by reason which neighbors' messages do not count, in their order."""
        sent = self._all_decoded(state, around)
        unreadable = np.array([sent[j] is None for j in around.neighbors], bool)
        return {**super().rejects(state, around), "it cannot be read": unreadable}

    def combine(self, state: NodeState, around: Neighborhood, trainer: Trainer) -> NodeState:
        """Move the public copies, and combine by their means."""
        copies, sums = (state.more[name].copy() for name in ("copies", "sums"))
        sent = self._all_decoded(state, around)
        copies += sent[around.own]
        sums += around.mean_of(sent)
        more = {**state.more, "copies": copies, "sums": sums}
        state = super().combine(state._replace(more=more), around, trainer)
        state.reports[0] /= consensus_step(self._compression)
        return state

    def _means(self, state: NodeState, around: Neighborhood) -> Iterator[Array]:
        """Yield the model, moved towards the mean by the public copies; other arrays' means."""
        moved, position = iter(self._moved(state, 0)), count(2)
        for i in self.form.sent:
            yield next(moved) if i in self.form.corrected else around.mean(next(position))

    def _tracked(self, state: NodeState, around: Neighborhood) -> list[Array]:
        """Return the trackers, moved towards the mean by the public copies."""
        moved = self._moved(state, 1) if state.tracker else []
        return [array.astype(own.dtype) for array, own in zip(moved, state.tracker, strict=True)]

    def _moved(self, state: NodeState, part: int) -> list[Array]:
        """Return the arrays of a part, moved towards the mean by the public copies."""
        apart = state.more["sums"][part] - state.more["copies"][part]
        row = self._parts(state)[part] + consensus_step(self._compression) * apart
        arrays = [state.model[i] for i in self.form.corrected]
        ends = np.cumsum([array.size for array in arrays])[:-1]
        parts = zip(np.split(row, ends), arrays, strict=True)
        return [part.reshape(array.shape) for part, array in parts]

    def _parts(self, state: NodeState) -> Array:
        """Return what has a public copy, (n_parts, n_parameters)."""
        parts = [[cleared(state.model[i], state.fixed[i]) for i in self.form.corrected]]
        parts += [state.tracker] if state.tracker else []
        dtype = np.result_type(np.float32, *parts[0])
        flat = [[array.reshape(-1) for array in arrays] for arrays in parts]
        return np.stack([np.concatenate(rows, dtype=dtype) for rows in flat])

    @property
    def _compression(self) -> Any:
        return self.options.compression

    def _encoded(self, parts: Array, round_: int) -> dict[str, Array]:
        """Return the compressed vectors, (n_parts, ...)."""
        rng = spawn(getattr(self._compression, "seed", 0), self.node, round_)
        each = [self._compression.encode(part, rng) for part in parts]
        return {
            "values": np.stack([sent for sent, _ in each]),
            "codes": np.stack([sent for _, sent in each]),
        }

    def _all_decoded(self, state: NodeState, around: Neighborhood) -> list[Any]:
        """Return the vectors of each message; None of one that cannot be read."""
        n = state.more["copies"].shape[1]
        return [self._decoded(message[0], message[1], n) for message in around.messages]

    def _decoded(self, values: Array, codes: Array, n: int) -> Any:
        """Return the vectors of a message, (n_parts, n_parameters); None if there are none."""
        try:
            each = [self._compression.decode(sent, n) for sent in zip(values, codes, strict=True)]
        except ValueError:
            return None
        return np.stack(each)
