"""Decentralized averaging of any model: nodes train locally and average with their neighbors.

Every node k has a model ``w_k``, its own data, and a client with Flower's ``fit(parameters,
config)``, which takes the place of a gradient step: ``fit_k(w) = w - mu g_k(w)``, with any number
of epochs of any optimizer. ``A`` are the network's weights, symmetric or at least doubly
stochastic, ``t`` is the round.

=========================================  ======================================================
literature                                 here
=========================================  ======================================================
adapt-then-combine (ATC)                   ``method="atc"``
``psi_k = fit_k(w_k)``                     `AveragingProgram.adapt`
``w_k <- sum_l a_kl psi_l``                `AveragingProgram.combine`
combine-then-adapt (CTA)                   ``method="cta"``
``w_k <- fit_k(sum_l a_kl w_l)``           `AveragingProgram.combine`
exact diffusion                            ``method="exact_diffusion"``
``psi_k(t) = fit_k(w_k(t-1))``             `AveragingProgram.adapt`, ``state.last_i``
``phi_k = psi_k(t) + w_k(t-1)              `AveragingProgram.adapt`; ``psi_k(0) = w_k(0)``
- psi_k(t-1)``
``w_k(t) = (phi_k + sum_l a_kl phi_l)/2``  `AveragingProgram.combine`
gradient tracking                          ``method="gradient_tracking"``
``g_k(t) = w_k(t-1) - fit_k(w_k(t-1))``    `AveragingProgram.adapt`, ``state.last_i``
``y_k(t) = sum_l a_kl y_l(t-1)             `AveragingProgram.adapt`, ``state.tracker_i``; 0 at
+ g_k(t) - g_k(t-1)``                      the start
``w_k(t) = sum_l a_kl (w_l - y_l)``        `AveragingProgram.combine`
clipping, trimmed mean                     ``robust``: `flwr_perdl.core.aggregate`
push-sum, stochastic gradient push         ``method="push_sum"``; ``a_kl = 1 / (out-degree of l
                                           + 1)`` by `push_weights`, columns sum to one
``x_k <- x_k + fit_k(z_k) - z_k``          `AveragingProgram.adapt`; ``z``: ``state.model_i``
``x_k <- sum_l a_kl x_l,                   `AveragingProgram.combine`, ``state.weight_0``; 1 at
u_k <- sum_l a_kl u_l, z_k = x_k / u_k``   the start
=========================================  ======================================================

Sources. ATC and CTA: Sayed, "Adaptation, learning, and optimization over networks", Foundations and
Trends in Machine Learning 7, 2014. Exact diffusion: Yuan, Ying, Zhao, Sayed, IEEE TSP 67, 2019.
Gradient tracking: Nedić, Olshevsky, Shi, "Achieving geometric convergence for distributed
optimization over time-varying graphs", SIAM Journal on Optimization 27, 2017, combined after the
step. Push-sum: Nedić, Olshevsky, "Distributed optimization over time-varying directed graphs", IEEE
TAC 60, 2015, in the order of Assran, Loizou, Ballas, Rabbat, "Stochastic gradient push for
distributed deep learning", ICML 2019: step, then push.

Deviation: where the papers take one gradient step of a known learning rate, this calls the client's
``fit``. The two corrected methods then converge to a point where the changes by the nodes' ``fit``
sum to zero; for one full gradient step this is the minimum of the sum of the nodes' losses.

Compressed messages: `flwr_perdl.network._compressed`. Groups: `flwr_perdl.network._groups`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from logging import getLogger
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.csgraph import connected_components

from flwr_perdl.core import html
from flwr_perdl.core.aggregate import NEIGHBOR_RULES
from flwr_perdl.core.checks import (
    brief_repr,
    check_choice,
    check_count,
    check_function,
    check_kind,
    check_real,
    check_robust,
)
from flwr_perdl.core.models import cleared, fixed_entries, is_float
from flwr_perdl.core.repr import short_repr
from flwr_perdl.network._compressed import CompressedProgram
from flwr_perdl.network._groups import GroupsProgram
from flwr_perdl.network.averaging_program import (
    BYTES,
    DISTANCE,
    FIXED,
    FLOATS,
    AveragingProgram,
    Clients,
    arrays_of,
)
from flwr_perdl.network.combine import Array, Run
from flwr_perdl.network.compression import Compression, check_compression
from flwr_perdl.network.exchange import resolve_weights, run_program
from flwr_perdl.network.schedule import Schedule, schedule_of
from flwr_perdl.network.topology import MOST_NODES, Topology, weights_of

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


def diffusion_averaging(
    clients: Clients,
    network: Any,
    n_rounds: int,
    *,
    initial: Sequence[Array] | Any = None,
    callback: Callable[[int, dict[str, Array]], Any] | None = None,
    method: str | None = None,
    compression: Compression | None = None,
    evaluate_every: int = 1,
    metrics: Sequence[str] = (),
    robust: bool | str = False,
    n_liars: int = 1,
    max_magnitude: float | None = None,
    groups: str | None = None,
    local_rounds: int = 5,
) -> Averaged:
    """Train any model at many nodes that exchange models with their neighbors only.

    In every round each node trains its model with its client's ``fit`` and replaces it by the
    weighted mean of its own and its neighbors' models. There is no server and no global model:
    every node ends with its own, and these are nearly the same. On a Flower federation use the
    strategy `flwr_perdl.strategies.DiffusionAveraging`.

    A node leaves out a message with a value far larger than those of its neighborhood (see
    ``max_magnitude``) or not finite, or with a push-sum weight that is not positive. The message's
    weight goes to the node itself; ``dropped_messages`` of the result counts such messages by
    sender, and ``dropped_by`` names the receivers.

    **What each party receives**:

    - *A neighbor*: in every round the node's model after ``fit`` (``"cta"``: the model itself;
      ``"exact_diffusion"``: corrected by the last change; ``"gradient_tracking"``: the tracker as
      well; ``"push_sum"``: the model times a weight, and the weight; with ``compression`` a part of
      their changes). From successive models, and those of all neighbors of the node, it can compute
      the change that ``fit`` made: with one sample per step that may reveal the sample. Where this
      matters, use Flower's or the framework's differential privacy in ``fit``.
    - *A node that is no neighbor*: nothing.
    - *The server* of a Flower federation: the same messages, in the clear; ciphertext with
      ``sealed=True``. In both cases, for every node and round, in the clear:
      ``"neighbor-distance"``, the size of what it received, the loss of ``evaluate``, and the
      metrics that ``metrics`` names; no other metric leaves a node. With ``groups`` also the number
      and seconds of the evaluations by which a node chooses, and once, at the end, two rows of
      counts: how often it met and accepted each other node. A node's model only with
      ``shows_models=True``.

    Parameters
    ----------
    clients : callable
        ``node -> client``, called for every round as in Flower: a client keeps nothing between two
        calls. ``client.to_client()`` works too.
    network : Topology, CombinationMatrix, Schedule or InMemoryNetwork
        Which nodes are neighbors: connected, with doubly stochastic weights, or column-stochastic
        ones for "push_sum". A topology has Metropolis weights, or `push_weights` if it is directed.
        The first three run in this process and without faults.
    n_rounds : int
        Communication rounds.
    initial : sequence of ndarray or ArrayRecord, optional
        The first model of all nodes; by default that of each node's client (``get_parameters``).
        Start neural networks from equal models.
    callback : callable, optional
        Called after every round with the round and the nodes' reports, (n_nodes,) by name.
    method : str, optional
        "atc" (adapt, then combine), "cta" (combine, then adapt), "exact_diffusion",
        "gradient_tracking" or "push_sum". By default "atc" with ``robust`` or a network's
        ``staleness``, "gradient_tracking" with ``compression``, else the one that fits the network:
        "exact_diffusion" if it is fixed with symmetric weights, "gradient_tracking" if other
        weights sum to one in rows and columns, "push_sum" if they do so in columns only (directed
        networks). On non-IID data "atc", "cta" and "push_sum" converge to a biased solution, the
        closer to the minimum of the sum of losses the smaller the learning rate. "exact_diffusion"
        and "gradient_tracking" remove that bias, even if links drop or nodes sleep. Exact diffusion
        sends as much as "atc", gradient tracking twice as much. If a node
        returns without its state, their corrections no longer sum to zero and an error remains, as
        with "push_sum". "atc" and "cta" forget such a fault, and only they take a network with
        ``staleness``.
    compression : TopK or RandomQuantization, optional
        Send compressed differences from public copies (CHOCO), on a fixed network that loses no
        message: `TopK` with any method but "exact_diffusion" and "push_sum", `RandomQuantization`
        with all but "push_sum". "gradient_tracking" (and "exact_diffusion") converge to the same
        point as without; "atc" and "cta" are more biased, as they average less per round.
        ``initial`` is the first public copy and must be the same at all nodes. None: whole models.
    evaluate_every : int, default 1
        Rounds between two calls of ``evaluate``; 0: never. The curves have NaN in the other rounds,
        also in the last one unless it is a multiple.
    metrics : sequence of str, default ()
        Metrics of ``fit`` and ``evaluate`` to keep (and, on Flower, to send to the server).
    robust : bool or str, default False
        Replaces the mean if neighbors may be malicious (`flwr_perdl.core.aggregate`), for "atc" and
        "cta": True is "clip", False "mean". "clip": a node moves toward no neighbor by more than
        toward the farthest but ``n_liars``. "trimmed": in every coordinate it leaves out the
        ``n_liars`` largest and smallest values of its neighbors. Both cost accuracy on non-IID
        data.
    n_liars : int, default 1
        Number of malicious (Byzantine) neighbors that any node may have: less than half. Not used
        without ``robust``.
    max_magnitude : float, optional
        Largest absolute value of a float in a valid message. By default, in each array, 100 times
        the lower median of the largest absolute values at the node and its neighbors, but at least
        100.
    groups : {"auto"}, optional
        "auto": nodes find out by themselves which neighbors are in their group. In every round a
        node evaluates, by its client's ``evaluate``, its trained model and, for each neighbor, the
        midpoint of the two models (of floats; integers and booleans are its own). It accepts the
        neighbors with a lower loss than its own model, and replaces its model by the plain mean of
        its own and theirs. The network's weights are not used, and it may be directed or
        disconnected; every node needs a neighbor in some round. For method "atc" without ``robust``
        and ``compression``. ``evaluate`` should use held-out examples. Related: Zhao and Sayed
        (2015) compare distances of models; PENS (Onoszko et al., 2021) takes a given number of
        neighbors with the lowest losses.
    local_rounds : int, default 5
        Rounds of local training, without messages, before ``groups``: less than ``n_rounds``. A
        node that returns without its state repeats them.

    Returns
    -------
    Averaged

    Raises
    ------
    ValueError
        If an argument breaks its rule, the network does not fit the method, a node has too few
        neighbors for ``n_liars``, or a client does not return a finite model of the form that it
        received.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.network import Topology, diffusion_averaging
    >>> class Client:  # any flwr.client.NumPyClient
    ...     def __init__(self, node):
    ...         self.target = float(node)
    ...
    ...     def fit(self, parameters, config):
    ...         return [w - 0.5 * (w - self.target) for w in parameters], 1, {}
    ...
    ...     def evaluate(self, parameters, config):
    ...         return float(np.sum((parameters[0] - self.target) ** 2)), 1, {}
    >>> learned = diffusion_averaging(Client, Topology.ring(4), 60, initial=[np.zeros(1)])
    >>> [round(float(w[0]), 6) for w, in learned.models.values()]
    [1.5, 1.5, 1.5, 1.5]
    """
    options = AveragingOptions(
        method=method,
        compression=compression,
        evaluate_every=evaluate_every,
        metrics=metrics,
        robust=robust,
        n_liars=n_liars,
        max_magnitude=max_magnitude,
        groups=groups,
        local_rounds=local_rounds,
    )
    check_count("n_rounds", n_rounds)
    check_function("callback", callback)
    network = weights_of(network) if isinstance(network, Topology) else resolve_weights(network)
    program = options.suited_to(network, n_rounds).program(clients, initial=initial)
    return options.learned(run_program(program, network, n_rounds, on_report=callback), program)


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

    def learned(self, run: Run, program: AveragingProgram | None = None) -> Averaged:
        """Return what a run has learned, with warnings; the models only by the program."""
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
        received = run.curves.get(FLOATS, np.zeros((1, 1)))
        lost = run.dropped_messages or (received != received.max(axis=0, initial=0)).any()
        if self.compression is not None and lost:
            text = "Messages were lost: with compression this leaves an error in the models."
            warnings.warn(text, RuntimeWarning, stacklevel=3)
        for node, n_times in run.dropped_messages.items():
            by = ", ".join(map(str, run.dropped_by.get(node, ())))
            said = f", as node {by} says" if by else ""
            _LOG.warning("Messages of node %d were left out in %d rounds%s.", node, n_times, said)
        models: dict[int, list[Array]] = {}
        apart = np.nan
        if run.state is not None:
            models = {} if program is None else program.models(run.state)
            apart = _disagreement(run.state, run.alive[run.state.nodes])
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

    def program(
        self,
        clients: Clients,
        *,
        initial: Sequence[Array] | Any = None,
        array_names: Sequence[str] = (),
        in_files: bool = False,
    ) -> AveragingProgram:
        """Return the program that a network runs; on Flower, one for each `DiffusionClient`.

        ``clients`` and ``initial`` are those of `diffusion_averaging`; ``array_names`` are the
        names of a list's arrays, by default those of an ArrayRecord, or "0", "1", …; ``in_files``
        is that of `AveragingProgram`.
        """
        kind = AveragingProgram if self.compression is None else CompressedProgram
        kind = kind if self.groups is None else GroupsProgram
        return kind(self, clients, initial, array_names, in_files)


def _disagreement(state: Any, living: NDArray[np.bool_]) -> float:
    """Return the largest distance of a living node's model from their mean, of floats."""
    squares = np.zeros(int(living.sum()))
    for array in filter(is_float, arrays_of(state, "model")):
        own = cleared(array[living], fixed_entries(array[living]))
        squares += np.square((own - own.mean(axis=0)).reshape(len(own), -1)).sum(axis=1)
    return float(np.sqrt(squares.max())) if len(squares) else np.nan
