"""The options of diffusion averaging, checked, and what a run with them has learned."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from logging import getLogger
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.csgraph import connected_components

from flwr_perdl.core import html
from flwr_perdl.core.aggregate import NEIGHBOR_RULES
from flwr_perdl.core.arrays import Array
from flwr_perdl.core.checks import (
    brief_repr,
    check_choice,
    check_count,
    check_kind,
    check_real,
    check_robust,
)
from flwr_perdl.core.models import cleared, fixed_entries, is_float
from flwr_perdl.core.repr import short_repr
from flwr_perdl.network._compressed import CompressedNode
from flwr_perdl.network._groups import GroupsNode
from flwr_perdl.network.averaging import BYTES, DISTANCE, FIXED, RECEIVED, AveragingNode, Form
from flwr_perdl.network.combine import Run
from flwr_perdl.network.compression import Compression, check_compression
from flwr_perdl.network.schedule import Schedule, schedule_of
from flwr_perdl.network.topology import MOST_NODES

METHODS = ("atc", "cta", "exact_diffusion", "gradient_tracking", "push_sum")
_LOG = getLogger(__name__)


class Averaged(NamedTuple):
    """What the nodes have learned.

    Attributes
    ----------
    models : dict of int to list of ndarray
        Every node's model. Empty on Flower, where models stay at the nodes.
    curves : dict of str to ndarray of shape (rounds, n_nodes)
        What the nodes reported after every round, NaN where nothing: ``"neighbor-distance"``, the
        Euclidean distance between what a node sent and the mean of what it received (compressed:
        between its public copy and the mean of its neighbors'); ``"floats-received"`` and
        ``"bytes-received"``, the size of its neighbors' messages: on a symmetric network a node
        sends as much;
        ``"train-NAME"``, a metric of ``fit``; ``"evaluate-loss"`` and ``"evaluate-NAME"``, loss
        and metrics that ``evaluate`` returned for the node's model after the round.
    disagreement : float
        The largest Euclidean distance of a node's model from the mean, over the nodes that took
        part in the last round; on Flower over those that show their state, NaN if none does.
    rounds : int
        Communication rounds.
    floats_sent, bytes_sent : float
        Floats that reached a neighbor, counted once per link, all nodes and rounds, and the bytes
        of these arrays, before messages are sealed.
    dropped_messages : dict of int to int
        Node -> in how many rounds its message was left out: not finite, too large, or unreadable.
    alive : ndarray of shape (n_nodes,)
        Which nodes took part in the last round.
    dropped_by : dict of int to list of int
        Node -> which nodes say that they have left out its message; a node that lies may.
    met, accepted : ndarray of shape (n_nodes, n_nodes), or None
        With ``groups``: in how many rounds a node (row) has judged a neighbor's model (column), and
        has taken it in; NaN for nodes that have not said so. Each tells of itself only.
    """

    models: dict[int, list[Array]]
    curves: dict[str, Array]
    disagreement: float
    rounds: int
    floats_sent: float
    bytes_sent: float
    dropped_messages: dict[int, int]
    alive: NDArray[np.bool_]
    dropped_by: dict[int, list[int]]
    met: Array | None = None
    accepted: Array | None = None

    @property
    def groups(self) -> list[list[int]]:
        """The groups that nodes have found, each ascending, the one of node 0 first.

        Two nodes are in one group if both have accepted each other in more than half of the rounds
        in which they have met, or if others link them so. Without ``groups`` there are none.
        """
        if self.met is None or self.accepted is None:
            return []
        likes = 2 * self.accepted > self.met  # of NaN: no
        mutual = sparse.csr_array(likes & likes.T, dtype=np.float64)
        _, labels = connected_components(mutual, directed=False)
        return [np.flatnonzero(labels == label).tolist() for label in dict.fromkeys(labels)]

    def __repr__(self) -> str:
        """Return the fields in one line; what is large is only described."""
        return short_repr(self)

    def _repr_html_(self) -> str:
        """Return the fields as a table, for a notebook."""
        return html.record(self)


@dataclass(kw_only=True)
class AveragingOptions:
    """The options of `diffusion_averaging`, checked: what server and nodes agree on.

    Raises
    ------
    ValueError
        If an option is not as described, or ``robust`` comes with another method.
    """

    method: str | None = None
    compression: Compression | None = None
    evaluate_every: int = 1
    metrics: Sequence[str] = ()
    robust: bool | str = False
    n_liars: int = 1
    max_magnitude: float | None = None
    groups: str | None = None
    local_rounds: int = 5
    #: Number of nodes, with ``groups``: how long the rows of counts are; `suited_to` sets it.
    n_nodes: int = 0

    def __post_init__(self) -> None:
        """Check the options."""
        self.robust = check_robust(self.robust, ("mean", *NEIGHBOR_RULES), best="clip")
        trusting, compression = self.robust == "mean", self.compression
        if self.groups is not None:
            check_choice("groups", self.groups, ("auto",))
        if self.method is None:
            plain = None if compression is None else "gradient_tracking"
            self.method = plain if trusting and self.groups is None else "atc"
        if self.method is not None:
            check_choice("method", self.method, METHODS)
        if compression is not None:
            check_compression(self.method, compression)
        self._check_groups()
        check_count("evaluate_every", self.evaluate_every)
        check_kind("metrics", self.metrics, Sequence, "a sequence of names")
        if isinstance(self.metrics, str) or not all(isinstance(x, str) for x in self.metrics):
            raise ValueError(f"metrics must be a sequence of names, got {self.metrics!r}.")
        self.metrics = tuple(self.metrics)
        check_count("n_liars", self.n_liars, 1)
        check_count("n_nodes", self.n_nodes, 0, MOST_NODES)
        if self.max_magnitude is not None:
            self.max_magnitude = check_real("max_magnitude", self.max_magnitude, 0, open_low=True)
        if not trusting and compression is not None:
            raise ValueError(f"robust must be False with compression, got {self.robust!r}.")
        if not trusting and self.method not in ("atc", "cta"):
            raise ValueError(
                "method must be 'atc' or 'cta' with robust, since the corrections of the others "
                f"would accumulate what a rule removes, got {self.method!r}."
            )

    def _check_groups(self) -> None:
        """Raise a ValueError if an option does not go with ``groups``."""
        check_count("local_rounds", self.local_rounds)
        needs = {"method": "atc", "robust": "mean", "compression": None}
        for name, needed in needs.items() if self.groups is not None else ():
            if (value := getattr(self, name)) != needed:
                raise ValueError(
                    f"{name} must be {needed!r} with groups, in which each node takes the plain "
                    f"mean of the whole models that it accepts, got {value!r}."
                )

    def learned(self, run: Run, models: dict[int, list[Array]]) -> Averaged:
        """Return what a run has learned, with warnings; ``models`` are those that are known."""
        for name in self.metrics:
            known = [run.curves.get(f"{kind}-{name}") for kind in ("train", "evaluate")]
            if run.rounds and not any(own is not None and np.isfinite(own).any() for own in known):
                text = f"No node returned the metric {name!r}, neither from fit nor from evaluate."
                warnings.warn(text, RuntimeWarning, stacklevel=3)
        there, losses = run.curves.get(DISTANCE), run.curves.get("evaluate-loss")
        if there is not None and losses is not None:
            measured = np.isfinite(there) & np.isfinite(losses).any(axis=1, keepdims=True)
            missing = (measured & ~np.isfinite(losses)).sum(axis=1)
            few = (missing > 0) & (3 * missing >= measured.sum(axis=1))
            if few.any():
                text = f"In {few.sum()} rounds a third of the nodes or more had no finite loss."
                warnings.warn(text, RuntimeWarning, stacklevel=3)
        received = run.curves.get(RECEIVED, np.zeros((1, 1)))
        lost = run.dropped_messages or (received != received.max(axis=0, initial=0)).any()
        if self.compression is not None and lost:
            text = "Messages were lost: with compression this leaves an error in the models."
            warnings.warn(text, RuntimeWarning, stacklevel=3)
        for node, n_times in run.dropped_messages.items():
            by = ", ".join(map(str, run.dropped_by.get(node, ())))
            said = f", as node {by} says" if by else ""
            _LOG.warning("Messages of node %d were left out in %d rounds%s.", node, n_times, said)
        apart = _disagreement([model for k, model in models.items() if run.alive[k]])
        costs = run.rounds, run.floats_sent, float(np.nansum(run.curves.get(BYTES, 0.0)))
        return Averaged(
            *(models, run.curves, apart, *costs, run.dropped_messages, run.alive, run.dropped_by),
            met=run.observed.get("met"),
            accepted=run.observed.get("accepted"),
        )

    def suited_to(self, network: Any, n_rounds: int) -> AveragingOptions:
        """Return these options with a method: its own, or the one that suits a network.

        Raises
        ------
        ValueError
            If an option does not suit the network, which is as in `diffusion_averaging`.
        """
        check_count("n_rounds", n_rounds)
        schedule = schedule_of(network)
        if self.groups is not None:
            return self._grouped(schedule, n_rounds)
        schedule.check_connected(n_rounds)
        last = schedule.window if schedule.repeats else max(n_rounds, schedule.window)
        rounds = map(schedule.matrix, range(1, last + 1))
        kinds = [
            (m.row_stochastic, m.column_stochastic, m.symmetric, m.topology.degrees.min())
            for m in rounds
        ]
        *stochastic, degrees = zip(*kinds, strict=True)
        rows, columns, symmetric = map(all, stochastic)
        fixed = last == 1 and schedule.repeats and symmetric
        if self.robust != "mean" and min(degrees) <= 2 * self.n_liars:
            raise ValueError(
                "n_liars must be less than half of every node's number of neighbors, got "
                f"{self.n_liars} where a node has {min(degrees)}."
            )
        plan = getattr(network, "plan", None)
        faulty, stale = bool(plan and plan.faults.drop), plan.staleness if plan else 0
        if self.compression is not None and (faulty or stale or not fixed):
            raise ValueError(
                "network must stay the same and have no simulated faults and no staleness with "
                f"compression, got {brief_repr(network)}."
            )
        suited = "atc" if stale else FIXED if fixed else "gradient_tracking"
        method = self.method or (suited if rows and columns else "push_sum")
        if not (columns and (rows or method == "push_sum")):
            kind = "column-stochastic" if method == "push_sum" else "doubly stochastic"
            raise ValueError(f"network must have {kind} weights for {method!r}, got {schedule!r}.")
        if stale and method not in ("atc", "cta"):
            raise ValueError(
                "method must be 'atc' or 'cta' with staleness, since the corrections of the others "
                f"do not forget an old model, got {method!r} with staleness {stale}."
            )
        if method == FIXED and not fixed:
            raise ValueError(
                f"network must be fixed and have symmetric weights for {method!r}, got "
                f"{schedule!r}: 'gradient_tracking' takes any doubly stochastic ones."
            )
        return replace(self, method=method)

    def _grouped(self, schedule: Schedule, n_rounds: int) -> AveragingOptions:
        """Return these options for the nodes of a network, which need not be connected."""
        if 0 < n_rounds <= self.local_rounds:
            raise ValueError(
                f"local_rounds must be less than the number of rounds, {n_rounds}, got "
                f"{self.local_rounds}."
            )
        schedule.check_linked(n_rounds)
        return replace(self, n_nodes=schedule.n_nodes)

    def node(self, form: Form, node: int) -> AveragingNode:
        """Return the algorithm at a node, whose model has this form."""
        kind = AveragingNode if self.compression is None else CompressedNode
        kind = kind if self.groups is None else GroupsNode
        return kind(self, form, node)


def models_of(state: Any) -> dict[int, list[Array]]:
    """Return the nodes' models, as their clients have them, of what they show of their states."""
    pairs = zip(state._fields, state, strict=True)
    arrays = [array for name, array in pairs if name.startswith("model_")]
    nodes = enumerate(state.nodes.tolist())
    return {node: [np.array(array[i]) for array in arrays] for i, node in nodes}


def _disagreement(models: Sequence[Sequence[Array]]) -> float:
    """Return the largest distance of a model from their mean, of floats; NaN without any."""
    squares = np.zeros(len(models))
    for arrays in filter(is_float, map(np.stack, zip(*models, strict=True))):
        own = cleared(arrays, fixed_entries(arrays))
        squares += np.square((own - own.mean(axis=0)).reshape(len(own), -1)).sum(axis=1)
    return float(np.sqrt(squares.max())) if len(squares) else np.nan
