"""`diffusion_averaging` with ``groups="auto"``: nodes find out which neighbors are like them.

=========================================  ======================================================
step                                       here
=========================================  ======================================================
``psi_k = fit_k(w_k)``                     `AveragingProgram.adapt`; in its first ``local_rounds``
                                           rounds a node sends nothing: `GroupsProgram.silent`
``L_k((psi_k + psi_l) / 2) < L_k(psi_k)``  `GroupsProgram.combine`: k accepts its neighbor l;
                                           ``L_k`` is the loss of the client's ``evaluate``
``w_k <-`` the mean of ``psi_k`` and of    `AveragingProgram.combine`, with equal weights
those accepted
=========================================  ======================================================

Sources of the idea. Zhao, Sayed, "Distributed clustering and learning over networks", IEEE TSP 63,
2015, compare distances of models; Onoszko, Karlsson, Mogren, Listo Zec, "Decentralized federated
learning of deep neural networks on non-iid data" (PENS), 2021, take the neighbors' models of the
lowest loss on a node's own data, a number of them that is given.

Deviations: a neighbor is judged by the midpoint with the node's own model, since models that were
trained apart may each be good where their mean is not; how many are accepted is not given; the
choice is made anew in every round, without a memory.
"""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from flwr_perdl.core.keys import PURPOSE, ROUND, SELECT
from flwr_perdl.core.models import cleared, is_float, settled
from flwr_perdl.core.threads import one_blas_thread
from flwr_perdl.network.averaging_program import (
    AveragingProgram,
    arrays_of,
    fixed_of,
    state_type,
)
from flwr_perdl.network.combine import Array, Inbox

#: What a node reports of its choice: how often it has called ``evaluate`` for it, and how long
#: that took.
EVALUATIONS, SECONDS = "choice-evaluations", "choice-seconds"


class GroupsProgram(AveragingProgram):
    """`AveragingProgram` with ``groups="auto"``: see `diffusion_averaging`.

    Its state has besides: ``trained`` (m,), rounds in which the node has trained since its start;
    ``met`` and ``accepted`` (m, n_nodes), how often it has judged each other node's model and taken
    it in; ``choice`` (m, 2), its reports of that.
    """

    def start(self, nodes: NDArray[np.intp]) -> Any:
        """Return the state before the first round."""
        first, m, n = super().start(nodes), len(nodes), self.options.n_nodes
        more = {"trained": np.zeros(m, np.intp), "choice": np.zeros((m, 2))}
        more |= {name: np.zeros((m, n), np.intp) for name in ("met", "accepted")}
        return state_type((*first._fields, *more))(*first, *more.values())

    @one_blas_thread()
    def adapt(self, state: Any, round_: int) -> Any:
        """Train every node's model; in its first round, see that it can be evaluated."""
        state = super().adapt(state, round_)
        for i in map(int, np.flatnonzero(state.trained == 0)):
            self._loss(state, i, self._given(arrays_of(state, "model"), i), round_)
        return state._replace(trained=state.trained + 1)

    def silent(self, state: Any) -> NDArray[np.bool_]:
        """Return which nodes send nothing in this round: those in local training, (m,)."""
        alone: NDArray[np.bool_] = state.trained <= self.options.local_rounds
        return alone

    @one_blas_thread()
    def combine(self, state: Any, inbox: Inbox) -> Any:
        """Average with the neighbors whose midpoint with the own model has a lower loss."""
        met, accepted, choice = state.met.copy(), state.accepted.copy(), np.zeros_like(state.choice)
        rows, columns = [*range(len(state.met))], [*map(int, inbox.own)]
        for i in map(int, np.flatnonzero(~self.silent(state))):
            begin = perf_counter()
            neighbors = inbox.links.indices[slice(*inbox.links.indptr[i : i + 2])]
            own = self._given(arrays_of(state, "model"), i) if len(neighbors) else []
            least = self._loss(state, i, own, inbox.round) if own else np.nan
            for j in map(int, neighbors):
                better = self._loss(state, i, self._midpoint(state, i, inbox, j), inbox.round)
                met[i, inbox.senders[j]] += 1
                if better < least:
                    accepted[i, inbox.senders[j]] += 1
                    rows.append(i)
                    columns.append(j)
            choice[i] = len(neighbors) + bool(own), perf_counter() - begin
        sizes = np.bincount(rows)
        weights = sparse.csr_array((1 / sizes[rows], (rows, columns)), shape=inbox.weights.shape)
        state = state._replace(met=met, accepted=accepted, choice=choice)
        return super().combine(state, replace(inbox, weights=weights))

    def observe(self, state: Any) -> dict[str, Array]:
        """Return how often each node has met and accepted each other, (m, n_nodes)."""
        return {"met": state.met, "accepted": state.accepted}

    def report(self, state: Any) -> dict[str, Array]:
        """Return what `AveragingProgram` reports, and number and seconds of the evaluations."""
        choice = dict(zip((EVALUATIONS, SECONDS), state.choice.T, strict=True))
        return {**super().report(state), **choice}

    def _midpoint(self, state: Any, i: int, inbox: Inbox, j: int) -> list[Array]:
        """Return the midpoint of a node's model and a message: of floats, the rest is its own."""
        model = self._given(arrays_of(state, "model"), i)
        for k, at in enumerate(self._of(state).sent):
            if is_float(model[at]):
                fixed = fixed_of(state, at)
                own = fixed if fixed is None else fixed[i]
                total = cleared(model[at], own).astype(np.result_type(model[at], np.float32))
                total += inbox.rows[k][j]
                total /= 2
                # Written as it is sent to the client, which then takes no copy.
                model[at] = self._written(settled(total, model[at], own)[None])[0, ...]
        return model

    def _loss(self, state: Any, i: int, model: list[Array], round_: int) -> float:
        """Return the loss of a model at a node."""
        node = int(state.nodes[i])
        loss, n_examples, _ = self._client(node).evaluate(model, {ROUND: round_, PURPOSE: SELECT})
        if not n_examples:
            raise ValueError(
                f"evaluate of node {node} must return a loss of at least one example with groups, "
                "by which the node chooses its neighbors, got none."
            )
        return float(loss)
