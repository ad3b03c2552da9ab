"""Decentralized averaging of any model: nodes train by themselves and average with their neighbors.

Every node k has a model ``w_k``, data of its own, and a client with Flower's ``fit(parameters,
config)``, which stands for the gradient step: ``fit_k(w) = w - mu g_k(w)``, however many epochs of
whatever optimizer it is. ``A`` are the network's weights, symmetric or at least doubly stochastic,
``t`` is the round.

=========================================  ======================================================
literature                                 here
=========================================  ======================================================
adapt-then-combine (ATC)                   ``method="atc"``
``psi_k = fit_k(w_k)``                     `AveragingProgram.adapt`
``w_k <- sum_l a_kl psi_l``                `AveragingProgram.combine`
combine-then-adapt (CTA)                   ``method="cta"``
``w_k <- fit_k(sum_l a_kl w_l)``           `AveragingProgram.combine`
exact diffusion                            ``method="exact_diffusion"``
``psi_k(t) = fit_k(w_k(t-1))``             `AveragingProgram.adapt`, ``state.last``
``phi_k = psi_k(t) + w_k(t-1)              `AveragingProgram.adapt`; ``psi_k(0) = w_k(0)``
- psi_k(t-1)``
``w_k(t) = (phi_k + sum_l a_kl phi_l)/2``  `AveragingProgram.combine`
gradient tracking                          ``method="gradient_tracking"``
``g_k(t) = w_k(t-1) - fit_k(w_k(t-1))``    `AveragingProgram.adapt`, ``state.last``
``y_k(t) = sum_l a_kl y_l(t-1)             `AveragingProgram.adapt`, ``state.tracker``; zero at
+ g_k(t) - g_k(t-1)``                      the start
``w_k(t) = sum_l a_kl (w_l - y_l)``        `AveragingProgram.combine`
clipping, trimmed mean                     ``robust``: `flwr_perdl.diffusion.robust`
push-sum, stochastic gradient push         ``method="push_sum"``; ``a_kl = 1 / (out-degree of l
                                           + 1)`` by `push_weights`, columns sum to one
``x_k <- x_k + fit_k(z_k) - z_k``          `AveragingProgram.adapt`; ``z`` is ``state.model``
``x_k <- sum_l a_kl x_l,                   `AveragingProgram.combine`, ``state.tracker``; one at
u_k <- sum_l a_kl u_l, z_k = x_k / u_k``   the start
=========================================  ======================================================

Sources. ATC and CTA: Sayed, "Adaptation, learning, and optimization over networks", Foundations and
Trends in Machine Learning 7, 2014. Exact diffusion: Yuan, Ying, Zhao, Sayed, IEEE TSP 67, 2019.
Gradient tracking: Nedić, Olshevsky, Shi, "Achieving geometric convergence for distributed
optimization over time-varying graphs", SIAM Journal on Optimization 27, 2017, combined after the
step. Push-sum: Nedić, Olshevsky, "Distributed optimization over time-varying directed graphs", IEEE
TAC 60, 2015, in the order of Assran, Loizou, Ballas, Rabbat, "Stochastic gradient push for
distributed deep learning", ICML 2019: step, then push.

Deviation: the papers take one gradient step of a known length where this takes the client's
``fit``. The two corrected methods then end where the changes that the nodes' ``fit`` would make sum
to zero; for one full gradient step that is the minimum of the sum of the nodes' losses.

Compressed messages: `flwr_perdl.diffusion._compressed`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from logging import getLogger
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.checks import (
    brief_repr,
    check_choice,
    check_count,
    check_function,
    check_kind,
    check_list,
)
from flwr_perdl.core.threads import one_blas_thread
from flwr_perdl.diffusion.combine import Array, Inbox, run_program, weighted
from flwr_perdl.diffusion.compression import Compression, check_compression
from flwr_perdl.diffusion.robust import RULES, robust_mean
from flwr_perdl.diffusion.schedule import schedule_of
from flwr_perdl.diffusion.topology import Topology, weights_of

#: ``node -> client``; a client has Flower's ``fit``, and ``evaluate`` where models are evaluated.
Clients = Callable[[int], Any]

METHODS = ("atc", "cta", "exact_diffusion", "gradient_tracking", "push_sum")
#: The method by default: where the network is fixed and symmetric, or not known.
_FIXED = "exact_diffusion"

#: The round's name in the config of ``fit`` and ``evaluate``, as Flower's own strategies call it.
ROUND = "server-round"
#: The report that every method makes: how far a node's model was from its neighborhood's mean.
DISTANCE = "neighbor-distance"
#: What else a node reports of itself: the size of the messages that it has received in the round.
FLOATS, BYTES = "floats-received", "bytes-received"
_OWN = (DISTANCE, FLOATS, BYTES)

#: A node leaves out values that are so many times larger than its own, which count as ``LEAST`` at
#: least: nodes of different data may differ by much, above all when models begin at zero.
LARGER, LEAST = 1e4, 10.0

_LOG = getLogger(__name__)


class Averaged(NamedTuple):
    """What the nodes have learned.

    Attributes
    ----------
    models : dict of int to list of ndarray
        Every node's model, without those of lost Ray actors. Empty on Flower, where models stay at
        the nodes.
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
    unheard : dict of int to int
        Node -> in how many rounds its message was left out: not finite, too large, or unreadable.
    alive : ndarray of shape (n_nodes,)
        Which nodes took part in the last round.
    """

    models: dict[int, list[Array]]
    curves: dict[str, Array]
    disagreement: float
    rounds: int
    floats_sent: float
    bytes_sent: float
    unheard: dict[int, int]
    alive: NDArray[np.bool_]


class DiffusionAveraging:
    """Train any model at many nodes that exchange models with their neighbors only.

    In every round each node trains its model with its client's ``fit`` and replaces it by the
    weighted mean of its own and its neighbors' models. There is no server and no global model:
    every node ends with a model of its own, and these are nearly the same.

    A node leaves out a message that has a value beyond 100,000 and beyond 10,000 times the largest
    value of its own message, or one that is not finite. The weight of that message falls to the
    node itself, and ``unheard`` of the result names the sender.

    **What each party receives**:

    - *A neighbor*: in every round the node's model after ``fit`` (``"cta"``: the model itself;
      ``"exact_diffusion"``: corrected by the last change; ``"gradient_tracking"``: the tracker
      besides; ``"push_sum"``: the model times a weight, and the weight; with ``compression`` a part
      of the changes of these). From successive models, and those of all neighbors of the node, it
      computes the change that ``fit`` has made: with one sample per step that may show the sample.
      Use Flower's or the framework's differential privacy in ``fit`` where this matters.
    - *A node that is no neighbor*: nothing.
    - *The server* of a Flower federation: the same messages, in the clear; ciphertext with
      ``FlowerNetwork(..., sealed=True)``. In both cases, for every node and round, in the clear:
      ``"neighbor-distance"``, the size of what it has received, the loss of ``evaluate``, and the
      metrics that ``metrics`` names; no other metric leaves a node. A node's model only where its
      ``DiffusionClient`` has ``shows="state"``.

    Parameters
    ----------
    method : str, optional
        "atc", "cta", "exact_diffusion", "gradient_tracking" or "push_sum"; by default "atc" with
        ``robust`` or a network's ``staleness``, "gradient_tracking" with ``compression``, else what
        suits the network: "exact_diffusion" if it is fixed and its weights are symmetric,
        "gradient_tracking" if other weights sum to one in rows and columns, "push_sum" if they do
        so in columns only (directed networks). "atc": adapt, then combine. "cta": combine, then
        adapt. Where the nodes' data differ both end near the minimum of the sum of losses, the
        nearer the shorter the steps, and so does "push_sum". "exact_diffusion" and
        "gradient_tracking" remove that bias, also where links drop or nodes sleep. Exact diffusion
        sends as many floats as "atc", gradient tracking twice as many. After a late message
        (``Faults(max_delay=...)``), or where a node returns without its state, their corrections no
        longer sum to zero: both keep an error that does not shrink, and so does "push_sum". "atc"
        and "cta" forget such a fault, and only they take a network with ``staleness``.
    compression : TopK or RandomQuantization, optional
        Send compressed differences from public copies, on a network that stays the same and loses
        no message: `TopK` with any method but "exact_diffusion" and "push_sum",
        `RandomQuantization` with all but "push_sum". With "gradient_tracking" (and
        "exact_diffusion") nodes end where they end without; "atc" and "cta" are more biased, as
        they average less per round. ``initial`` is the first public copy and must be the same at
        all nodes. None: whole models are sent.
    consensus_step : float, optional
        How far a node moves to the mean of the public copies, above 0, at most 1; by default it
        follows from the compression, ``2 c / (1 + c)`` where c is its ``contraction``. A larger
        one converges faster or diverges.
    evaluate_every : int, default 1
        Rounds between two calls of ``evaluate``; 0: it is never called.
    metrics : sequence of str, default ()
        Which metrics of ``fit`` and ``evaluate`` are kept (and, on Flower, sent to the server).
    config : mapping, optional
        Config of ``fit`` and ``evaluate``, beside the round under ``"server-round"``.
    robust : {"clip", "trimmed"}, optional
        What replaces the mean where neighbors may lie (`flwr_perdl.diffusion.robust`), for "atc"
        and "cta". "clip": a node moves toward no neighbor by more than toward the farthest but
        ``n_liars``. "trimmed": in every coordinate it leaves out the ``n_liars`` largest and
        smallest values of its neighbors. Both cost accuracy where the nodes' data differ.
    n_liars : int, default 1
        How many neighbors of any node may lie: less than half. Without ``robust`` it is not used.

    Raises
    ------
    ValueError
        If an argument is not as described, or ``robust`` comes with another method.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.diffusion import DiffusionAveraging, Topology
    >>> class Client:  # any flwr.client.NumPyClient
    ...     def __init__(self, node):
    ...         self.target = float(node)
    ...
    ...     def fit(self, parameters, config):
    ...         return [w - 0.5 * (w - self.target) for w in parameters], 1, {}
    ...
    ...     def evaluate(self, parameters, config):
    ...         return float(np.sum((parameters[0] - self.target) ** 2)), 1, {}
    >>> learner = DiffusionAveraging(method="exact_diffusion")
    >>> learned = learner.fit(Client, Topology.ring(4), 60, initial=[np.zeros(1)])
    >>> [round(float(w[0]), 6) for w, in learned.models.values()]
    [1.5, 1.5, 1.5, 1.5]
    """

    def __init__(
        self,
        *,
        method: str | None = None,
        compression: Compression | None = None,
        consensus_step: float | None = None,
        evaluate_every: int = 1,
        metrics: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
        robust: str | None = None,
        n_liars: int = 1,
    ) -> None:
        if method is None:
            plain = None if compression is None else "gradient_tracking"
            method = plain if robust is None else "atc"
        self.method = None if method is None else check_choice("method", method, METHODS)
        self.compression, self.consensus_step = check_compression(
            self.method, compression, consensus_step
        )
        self.evaluate_every = check_count("evaluate_every", evaluate_every)
        check_kind("metrics", metrics, Sequence, "a sequence of names")
        if isinstance(metrics, str) or not all(isinstance(name, str) for name in metrics):
            raise ValueError(f"metrics must be a sequence of names, got {metrics!r}.")
        self.metrics = tuple(metrics)
        self.config = dict(
            check_kind("config", {} if config is None else config, Mapping, "a mapping or None")
        )
        self.robust = None if robust is None else check_choice("robust", robust, RULES)
        self.n_liars = check_count("n_liars", n_liars, 1)
        if robust is not None and compression is not None:
            raise ValueError(f"robust must be None with compression, got {robust!r}.")
        if robust is not None and self.method not in ("atc", "cta"):
            raise ValueError(
                "method must be 'atc' or 'cta' with robust, since what a rule takes from a message "
                f"would add up in the corrections of the others, got {method!r}."
            )

    def fit(
        self,
        clients: Clients | None,
        network: Any,
        n_rounds: int,
        *,
        initial: Sequence[Array] | Any = None,
        callback: Callable[[int, dict[str, Array]], Any] | None = None,
    ) -> Averaged:
        """Train over a network.

        Parameters
        ----------
        clients : callable
            ``node -> client``, called for every round as Flower does: a client keeps nothing
            between two calls. On Ray it is pickled: read the data in it. None on Flower, where
            nodes have their own clients (see `program`). ``client.to_client()`` may be returned.
        network : Topology, CombinationMatrix, Schedule, or a network of `flwr_perdl.network`
            Who hears whom: connected, with doubly stochastic weights, or column-stochastic ones
            for "push_sum". A topology means Metropolis weights, or `push_weights` if it is
            directed. The first three are in this process and without faults.
        n_rounds : int
            Communication rounds.
        initial : sequence of ndarray or ArrayRecord, optional
            The first model of all nodes; by default that of each node's client
            (``get_parameters``). Start networks (neural ones) from equal models.
        callback : callable, optional
            Called with the round and what the nodes report, (n_nodes,) by name, after every round.

        Returns
        -------
        Averaged

        Raises
        ------
        ValueError
            If the network is not as described or does not suit the method, a node has too few
            neighbors for ``n_liars``, or a client returns something else than a finite model of the
            form that it received.
        TooFewReplies
            On Flower, if fewer than ``min_clients`` nodes reply in a round as a `DiffusionClient`.
        """
        check_count("n_rounds", n_rounds)
        check_function("callback", callback)
        network = weights_of(network) if isinstance(network, Topology) else weighted(network)
        learner = self.suited_to(network, n_rounds)
        if clients is None and not getattr(network, "nodes_have_programs", False):
            raise ValueError("clients may be None with a FlowerNetwork only, got None.")
        if clients is None and self.method is None and learner.method != _FIXED:
            raise ValueError(
                f"method must be {learner.method!r} for this network, and named where nodes have "
                "programs of their own, got None."
            )
        program = None if clients is None else learner.program(clients, initial=initial)
        run = run_program(program, network, n_rounds, on_report=callback)
        for name in self.metrics:
            known = [run.curves.get(f"{kind}-{name}") for kind in ("train", "evaluate")]
            if n_rounds and not any(own is not None and np.isfinite(own).any() for own in known):
                text = f"No node returned the metric {name!r}, neither from fit nor from evaluate."
                warnings.warn(text, RuntimeWarning, stacklevel=2)
        received = run.curves.get(FLOATS, np.zeros((1, 1)))
        lost = run.unheard or (received != received.max(axis=0, initial=0)).any()
        if self.compression is not None and lost:
            text = "Messages were lost: with compression the models keep an error of that."
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        if run.unheard:
            _LOG.warning("Messages were left out, in so many rounds by node: %s.", run.unheard)
        models: dict[int, list[Array]] = {}
        apart = np.nan
        if run.state is not None:
            models = {} if program is None else program.models(run.state)
            living = run.state.model[run.alive[run.state.nodes]]
            if len(living):
                apart = float(np.linalg.norm(living - living.mean(axis=0), axis=1).max())
        costs = run.rounds, run.floats_sent, float(np.nansum(run.curves.get(BYTES, 0.0)))
        return Averaged(models, run.curves, apart, *costs, run.unheard, run.alive)

    def suited_to(self, network: Any, n_rounds: int) -> DiffusionAveraging:
        """Return this learner with a method: its own, or the one that suits a network.

        Raises
        ------
        ValueError
            If an option does not suit the network, which is as in `fit`.
        """
        check_count("n_rounds", n_rounds)
        schedule = schedule_of(network)
        if schedule is None:
            return self._with(self.method or _FIXED)
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
        if self.robust is not None and min(degrees) <= 2 * self.n_liars:
            raise ValueError(
                "n_liars must be less than half of every node's number of neighbors, got "
                f"{self.n_liars} where a node has {min(degrees)}."
            )
        plan = getattr(network, "plan", None)
        faulty, stale = bool(plan and plan.faults.any), plan.staleness if plan else 0
        if self.compression is not None and (faulty or stale or not fixed):
            raise ValueError(
                "network must stay the same and have no simulated faults and no staleness with "
                f"compression, got {brief_repr(network)}."
            )
        suited = "atc" if stale else _FIXED if fixed else "gradient_tracking"
        method = self.method or (suited if rows and columns else "push_sum")
        if not (columns and (rows or method == "push_sum")):
            kind = "column-stochastic" if method == "push_sum" else "doubly stochastic"
            raise ValueError(f"network must have {kind} weights for {method!r}, got {schedule!r}.")
        if stale and method not in ("atc", "cta"):
            raise ValueError(
                "method must be 'atc' or 'cta' with staleness, since the corrections of the others "
                f"do not forget an old model, got {method!r} with staleness {stale}."
            )
        if method == _FIXED and not fixed:
            raise ValueError(
                f"network must be fixed and have symmetric weights for {method!r}, got "
                f"{schedule!r}: 'gradient_tracking' takes any doubly stochastic ones."
            )
        return self._with(method)

    def _with(self, method: str) -> DiffusionAveraging:
        """Return this learner with a method."""
        learner = copy.copy(self)
        learner.method = method
        return learner

    def program(
        self, clients: Clients, *, initial: Sequence[Array] | Any = None
    ) -> AveragingProgram:
        """Return the program that a network runs; on Flower, one for each `DiffusionClient`.

        ``clients`` and ``initial`` are those of `fit`.
        """
        if self.compression is not None:
            from flwr_perdl.diffusion._compressed import CompressedProgram  # which builds on this

            return CompressedProgram(self, clients, initial)
        return AveragingProgram(self, clients, initial)


class AveragingState(NamedTuple):
    """The state of the nodes hosted here; models are vectors of all parameters.

    ``model`` (m, n_parameters) is ``w``, after ``adapt`` what is sent; ``last`` is ``psi`` of exact
    diffusion or ``g`` of gradient tracking, and ``tracker`` its ``y``, each (m, 0) where not used,
    or the weights of push-sum, (m, 1), where ``adapt`` leaves the numerator in ``model``;
    ``reports`` (m, n_reports) are about the last round, in the order of `AveragingProgram.names`.
    """

    nodes: NDArray[np.intp]
    model: Array
    last: Array
    tracker: Array
    reports: NDArray[np.float64]


class AveragingProgram:
    """`DiffusionAveraging` as a `Program`: see `DiffusionAveraging.program`."""

    def __init__(
        self, learner: DiffusionAveraging, clients: Clients, initial: Sequence[Array] | Any
    ) -> None:
        # A ClientApp can be called, too; the maths do not import Flower.
        if not callable(clients) or hasattr(clients, "lifespan"):
            raise TypeError(
                "clients must be a function that takes a node's number and returns its "
                f"NumPyClient, got {brief_repr(clients)}."
            )
        if hasattr(initial, "to_numpy_ndarrays"):  # an ArrayRecord
            initial = initial.to_numpy_ndarrays()
        if isinstance(initial, np.ndarray):
            raise ValueError(
                f"initial must be a list of arrays, got one array, of shape {initial.shape}: write "
                "[array]."
            )
        for array in () if initial is None else check_list("initial", initial):
            if isinstance(array, int):  # an array of integers is a counter, and is rounded
                raise ValueError(
                    f"initial must be arrays, got the integer {array}: write {array}.0."
                )
        self.learner = learner if learner.method else learner._with(_FIXED)
        self.clients = clients
        self.initial = None if initial is None else [np.array(array) for array in initial]
        self._known_form: Form | None = None
        self._trained = list(dict.fromkeys(learner.metrics))
        self._evaluated = list(dict.fromkeys(("loss", *learner.metrics)))
        if not learner.evaluate_every:
            self._evaluated = []
        fitted = (f"train-{name}" for name in self._trained)
        #: Names of the reports.
        self.names = [*_OWN, *fitted, *(f"evaluate-{name}" for name in self._evaluated)]

    def start(self, nodes: NDArray[np.intp]) -> AveragingState:
        """Return the state before the first round."""
        model = np.stack([self._first(int(node)) for node in nodes])
        last = tracker = np.zeros((len(nodes), 0), model.dtype)
        if self.learner.method == "exact_diffusion":
            last = model
        elif self.learner.method == "gradient_tracking":
            last = tracker = np.zeros_like(model)
        elif self.learner.method == "push_sum":
            tracker = np.ones((len(nodes), 1), model.dtype)
        reports = np.full((len(nodes), len(self.names)), np.nan)
        return AveragingState(nodes, model, last, tracker, reports)

    @one_blas_thread()
    def adapt(self, state: AveragingState, round_: int) -> AveragingState:
        """Train every node's model; what is sent is the result, corrected where the method does."""
        method, w = self.learner.method, state.model
        if method == "cta":
            return state
        state, psi = self._train(state, w, round_)
        if method == "exact_diffusion":
            return state._replace(model=psi + w - state.last, last=psi)
        if method == "gradient_tracking":
            g = w - psi
            y = state.tracker + g - state.last
            return state._replace(model=w - y, last=g, tracker=y)
        if method == "push_sum":
            return state._replace(model=w * state.tracker + psi - w)
        return state._replace(model=psi)

    def message(self, state: AveragingState) -> tuple[Array, ...]:
        """Return the model; with gradient tracking the tracker, with push-sum the weight."""
        tracking = self.learner.method in ("gradient_tracking", "push_sum")
        return (state.model, state.tracker) if tracking else (state.model,)

    @one_blas_thread()
    def combine(self, state: AveragingState, inbox: Inbox) -> AveragingState:
        """Average over the neighborhood; evaluate the model where it is the round for that."""
        sent, mean = state.model, self._mean(state, inbox, 0)
        method, every = self.learner.method, self.learner.evaluate_every
        if method == "push_sum":
            weight = inbox.mean(1, ordered=True)
            sent, mean = sent / state.tracker, mean / weight
            state = state._replace(tracker=weight)
        reports = state.reports.copy()
        reports[:, 0] = np.linalg.norm(sent - mean, axis=1)
        reports[:, 1] = inbox.degrees * sum(array[0].size for array in inbox.arrays)
        reports[:, 2] = inbox.degrees * sum(array[0].nbytes for array in inbox.arrays)
        state = state._replace(model=mean, reports=reports)
        if method == "cta":
            state, w = self._train(state, mean, inbox.round)
            state = state._replace(model=w)
        elif method == "exact_diffusion":
            state = state._replace(model=(sent + mean) / 2)
        elif method == "gradient_tracking":
            state = state._replace(tracker=self._mean(state, inbox, 1))
        return self._evaluate(state, inbox.round) if every else state

    def _mean(self, state: AveragingState, inbox: Inbox, i: int) -> Array:
        """Return the neighborhood's mean of the ``i``-th array of the message."""
        rule, n_liars = self.learner.robust, self.learner.n_liars
        return inbox.mean(i, ordered=True) if rule is None else robust_mean(inbox, rule, n_liars)

    def limits(self, state: AveragingState) -> Array:
        """Return the largest absolute value that each node accepts in a message, (m,)."""
        own: Array = np.abs(state.model).max(axis=1, initial=0.0)
        return LARGER * np.maximum(own, LEAST)

    def observe(self, state: AveragingState) -> dict[str, Array]:
        """Return nothing: the models stay at the nodes."""
        return {}

    def report(self, state: AveragingState) -> dict[str, Array]:
        """Return what the nodes report to the operator about the last round, (m,) by name."""
        return dict(zip(self.names, state.reports.T, strict=True))

    def models(self, state: AveragingState) -> dict[int, list[Array]]:
        """Return the nodes' models, as their clients have them: what ``on_end`` may keep."""
        return {
            int(node): self._form(int(node)).arrays(w)
            for node, w in zip(state.nodes, state.model, strict=True)
        }

    def _train(
        self, state: AveragingState, models: Array, round_: int
    ) -> tuple[AveragingState, Array]:
        """Return the state with reports of ``fit``, and what ``fit`` makes of the models."""
        fitted, reports = np.empty_like(models), state.reports.copy()
        for i, node in enumerate(map(int, state.nodes)):
            form, config = self._form(node), {ROUND: round_, **self.learner.config}
            parameters, _, metrics = self._client(node).fit(form.arrays(models[i]), config)
            whose = f"fit of node {node}"
            fitted[i] = form.vector(whose, parameters)
            numbers = _numbers(whose, metrics, self._trained)
            reports[i, len(_OWN) : len(_OWN) + len(self._trained)] = numbers
        return state._replace(reports=reports), fitted

    def _evaluate(self, state: AveragingState, round_: int) -> AveragingState:
        """Return the state with reports of ``evaluate``; NaN where this is no round for that."""
        reports, first = state.reports.copy(), len(_OWN) + len(self._trained)
        reports[:, first:] = np.nan
        due = round_ % self.learner.evaluate_every == 0
        for i, node in enumerate(map(int, state.nodes if due else ())):
            given, config = self._form(node).arrays(state.model[i]), self.learner.config
            client = self._client(node)
            loss, n_examples, metrics = client.evaluate(given, {ROUND: round_, **config})
            if n_examples:  # none: the client has nothing to evaluate on
                own = {**metrics, "loss": loss}
                reports[i, first:] = _numbers(f"evaluate of node {node}", own, self._evaluated)
        return state._replace(reports=reports)

    def _client(self, node: int) -> Any:
        """Return a node's client, checked."""
        try:
            client = self.clients(node)
        except AttributeError as error:
            if error.obj is not node:
                raise
            raise TypeError(
                "clients must be a function of the node's number, got one that reads the attribute "
                f"{error.name!r} of its argument: the number itself is the node's partition-id."
            ) from error
        client = getattr(client, "numpy_client", client)  # of what to_client() returned
        needed = ["fit", *(["evaluate"] if self.learner.evaluate_every else [])]
        needed += ["get_parameters"] if self.initial is None else []
        for method in needed:
            if not callable(getattr(client, method, None)):
                raise TypeError(
                    f"clients must return a NumPyClient with a method {method}, got {client!r}."
                )
        return client

    def _first(self, node: int) -> Array:
        """Return a node's first model."""
        name, own = "initial", self.initial
        if own is None:
            name, own = f"get_parameters of node {node}", self._client(node).get_parameters({})
        return self._form(node).vector(name, own)

    def _form(self, node: int) -> Form:
        """Return the models' form; without ``initial``, the client of a hosted node says it."""
        if self._known_form is None:
            first = self.initial
            self._known_form = Form.of(
                self._client(node).get_parameters({}) if first is None else first
            )
        return self._known_form


class Form(NamedTuple):
    """Shapes and types of a model's arrays: the way between the arrays and one vector."""

    shapes: list[tuple[int, ...]]
    dtypes: list[np.dtype[Any]]

    @classmethod
    def of(cls, arrays: Sequence[Array]) -> Form:
        """Return the form of a model."""
        own = [np.asarray(array) for array in arrays]
        if not own or any(array.dtype.kind not in "fiu" for array in own):
            raise ValueError(
                "initial, or what get_parameters returns, must be arrays of real numbers, got "
                f"{[str(array.dtype) for array in own]}."
            )
        return cls([array.shape for array in own], [array.dtype for array in own])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the vector: float32 if all arrays fit into it, else float64."""
        return np.dtype(
            np.float32 if np.result_type(np.float32, *self.dtypes) == np.float32 else float
        )

    def vector(self, name: str, arrays: Sequence[Array]) -> Array:
        """Return all numbers of a model in one vector, checked."""
        own = [np.asarray(array) for array in arrays]
        shapes = [array.shape for array in own]
        if shapes != self.shapes:
            raise ValueError(f"{name} must have arrays of shapes {self.shapes}, got {shapes}.")
        vector = np.concatenate([array.ravel() for array in own]).astype(self.dtype)
        if not np.isfinite(vector).all():
            raise ValueError(f"{name} must be finite, got NaN or an infinite value.")
        return vector

    def arrays(self, vector: Array) -> list[Array]:
        """Return the model of a vector, in arrays of its own; integers are rounded."""
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes])
        parts = zip(np.split(vector, ends[:-1]), self.shapes, self.dtypes, strict=True)
        return [
            (part if dtype.kind == "f" else np.rint(part)).reshape(shape).astype(dtype)
            for part, shape, dtype in parts
        ]


def _numbers(whose: str, metrics: Mapping[str, Any], names: Sequence[str]) -> list[float]:
    """Return the metrics of these names; NaN for one that a client does not have."""
    for name in names:
        if not isinstance(metrics.get(name, 0.0), Real):
            raise ValueError(f"{whose} must return a number as {name!r}, got {metrics[name]!r}.")
    return [float(metrics.get(name, np.nan)) for name in names]
