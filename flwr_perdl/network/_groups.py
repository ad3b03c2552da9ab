"""`diffusion_averaging` with ``groups="auto"``: nodes find out which neighbors are like them.

=========================================  ======================================================
step                                       here
=========================================  ======================================================
``psi_k = fit_k(w_k)``                     `AveragingNode.adapt`; in its first ``local_rounds``
                                           rounds a node sends nothing: `GroupsNode.silent`
``L_k((psi_k + psi_l) / 2) < L_k(psi_k)``  `GroupsNode.combine`: k accepts its neighbor l;
                                           ``L_k`` is the loss of the client's ``evaluate``
``w_k <-`` the mean of ``psi_k`` and of    `AveragingNode.combine`, with equal weights
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

from flwr_perdl.core.arrays import Array
from flwr_perdl.core.keys import ROUND
from flwr_perdl.core.models import cleared, is_float, settled
from flwr_perdl.core.npy import as_file
from flwr_perdl.core.threads import one_blas_thread
from flwr_perdl.network.averaging import AveragingNode, NodeState, Trainer
from flwr_perdl.network.messages import Neighborhood

#: What a node reports of its choice: how often it has called ``evaluate`` for it, and how long
#: that took.
EVALUATIONS, SECONDS = "choice-evaluations", "choice-seconds"


class GroupsNode(AveragingNode):
    """`AveragingNode` with ``groups="auto"``: see `diffusion_averaging`.

    Its state has besides: ``trained``, rounds in which the node has trained since its start;
    ``met`` and ``accepted`` (n_nodes,), how often it has judged each other node's model and taken
    it in; ``choice`` (2,), its reports of that.
    """

    def start(self, model: Any, *, known: bool = True) -> NodeState:
        """Return the state before the first round."""
        more = {"trained": np.array(0), "choice": np.zeros(2)}
        more |= {name: np.zeros(self.options.n_nodes, np.intp) for name in ("met", "accepted")}
        return super().start(model, known=known)._replace(more=more)

    @one_blas_thread()
    def adapt(self, state: NodeState, round_: int, trainer: Trainer) -> NodeState:
        """Train the model; in the first round, see that it can be evaluated."""
        state = super().adapt(state, round_, trainer)
        if not state.more["trained"]:
            self._cost(trainer, state.model, round_)
        trained = np.asarray(state.more["trained"] + 1)
        return state._replace(more={**state.more, "trained": trained})

    def silent(self, state: NodeState) -> bool:
        """Whether the node sends nothing in this round: it is in local training."""
        return bool(state.more["trained"] <= self.options.local_rounds)

    @one_blas_thread()
    def combine(self, state: NodeState, around: Neighborhood, trainer: Trainer) -> NodeState:
        """Average with the neighbors whose midpoint with the own model has a lower loss."""
        met, accepted = (state.more[name].copy() for name in ("met", "accepted"))
        taken, choice = [around.own], np.zeros(2)
        if not self.silent(state):
            begin, neighbors = perf_counter(), around.neighbors
            least = self._cost(trainer, state.model, around.round) if neighbors else np.nan
            for j in neighbors:
                midpoint, sender = self._midpoint(state, around.messages[j]), around.senders[j]
                met[sender] += 1
                if self._cost(trainer, midpoint, around.round) < least:
                    accepted[sender] += 1
                    taken.append(j)
            choice[:] = len(neighbors) + bool(neighbors), perf_counter() - begin
        more = {**state.more, "met": met, "accepted": accepted, "choice": choice}
        shares = [(j in taken) / len(taken) for j in range(len(around.senders))]
        return super().combine(state._replace(more=more), replace(around, weights=shares), trainer)

    def observe(self, state: NodeState) -> dict[str, Array]:
        """Return how often the node has met and accepted each other, (n_nodes,)."""
        return {name: state.more[name] for name in ("met", "accepted")}

    def report(self, state: NodeState) -> dict[str, float]:
        """Return what `AveragingNode` reports, and number and seconds of the evaluations."""
        choice = zip((EVALUATIONS, SECONDS), state.more["choice"].tolist(), strict=True)
        return {**super().report(state), **dict(choice)}

    def _midpoint(self, state: NodeState, message: Any) -> list[Array]:
        """Return the midpoint of a node's model and a message: of floats, the rest is its own."""
        model = [*state.model]
        for k, i in enumerate(self.form.sent):
            if is_float(model[i]):
                own = cleared(model[i], state.fixed[i])
                total = own.astype(np.result_type(own, np.float32))
                total += message[k]
                total /= 2
                model[i] = as_file(settled(total, model[i], state.fixed[i]))
        return model

    def _cost(self, trainer: Trainer, model: list[Array], round_: int) -> float:
        """Return the cost of a model at the node."""
        cost, n_examples, *_ = trainer.select(model, **{ROUND: round_})
        if not n_examples:
            raise ValueError(
                f"evaluate of node {self.node} must return a loss of at least one example with "
                "groups, by which the node chooses its neighbors, got none."
            )
        return float(cost)
