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

Deviation: the papers take one gradient step of a known length where this takes the client's
``fit``. The two corrected methods then end where the changes that the nodes' ``fit`` would make sum
to zero; for one full gradient step that is the minimum of the sum of the nodes' losses.

Compressed messages: `flwr_perdl.network._compressed`.
"""

from __future__ import annotations

import copy
import warnings
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from logging import getLogger
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.aggregate import NEIGHBOR_RULES
from flwr_perdl.core.checks import (
    brief_repr,
    check_choice,
    check_count,
    check_function,
    check_kind,
    check_list,
    check_real,
    check_robust,
)
from flwr_perdl.core.models import (
    as_dtype,
    check_dtypes,
    check_trained,
    cleared,
    far_too_large,
    fixed_entries,
    is_float,
    is_plain,
    largest_averaged,
    settled,
)
from flwr_perdl.core.threads import one_blas_thread
from flwr_perdl.network.combine import Array, Inbox, run_program, weighted
from flwr_perdl.network.compression import Compression, check_compression
from flwr_perdl.network.schedule import schedule_of
from flwr_perdl.network.topology import Topology, weights_of

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
    unheard_by : dict of int to list of int
        Node -> which nodes say that they have left out its message; a node that lies may.
    """

    models: dict[int, list[Array]]
    curves: dict[str, Array]
    disagreement: float
    rounds: int
    floats_sent: float
    bytes_sent: float
    unheard: dict[int, int]
    alive: NDArray[np.bool_]
    unheard_by: dict[int, list[int]]


class DiffusionAveraging:
    """Train any model at many nodes that exchange models with their neighbors only.

    In every round each node trains its model with its client's ``fit`` and replaces it by the
    weighted mean of its own and its neighbors' models. There is no server and no global model:
    every node ends with a model of its own, and these are nearly the same.

    A node leaves out a message that has a value far larger than those of its neighborhood (see
    ``max_magnitude``), or one that is not finite, or a push-sum weight that is not positive. The
    weight of that message falls to the node itself, ``unheard`` of the result names the sender, and
    ``unheard_by`` who has left it out.

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
    robust : bool or str, default False
        What replaces the mean where neighbors may lie (`flwr_perdl.core.aggregate`), for "atc"
        and "cta": True stands for "clip", False for "mean". "clip": a node moves toward no neighbor
        by more than toward the farthest but ``n_liars``. "trimmed": in every coordinate it leaves
        out the ``n_liars`` largest and smallest values of its neighbors. Both cost accuracy where
        the nodes' data differ.
    n_liars : int, default 1
        How many neighbors of any node may lie: less than half. Without ``robust`` it is not used.
    max_magnitude : float, optional
        The largest absolute value of a float in a message that counts. By default 100 times, in
        each array, the lower median of the largest absolute values at the node and its neighbors,
        which counts as one at least.

    Raises
    ------
    ValueError
        If an argument is not as described, or ``robust`` comes with another method.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.network import DiffusionAveraging, Topology
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
        robust: bool | str = False,
        n_liars: int = 1,
        max_magnitude: float | None = None,
    ) -> None:
        self.robust = check_robust(robust, ("mean", *NEIGHBOR_RULES), best="clip")
        trusting = self.robust == "mean"
        if method is None:
            plain = None if compression is None else "gradient_tracking"
            method = plain if trusting else "atc"
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
        self.n_liars = check_count("n_liars", n_liars, 1)
        self.max_magnitude = max_magnitude
        if max_magnitude is not None:
            self.max_magnitude = check_real("max_magnitude", max_magnitude, 0, open_low=True)
        if not trusting and compression is not None:
            raise ValueError(f"robust must be False with compression, got {robust!r}.")
        if not trusting and self.method not in ("atc", "cta"):
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
        there, losses = run.curves.get(DISTANCE), run.curves.get("evaluate-loss")
        if there is not None and losses is not None:
            measured = np.isfinite(there) & np.isfinite(losses).any(axis=1, keepdims=True)
            missing = (measured & ~np.isfinite(losses)).sum(axis=1)
            few = (missing > 0) & (3 * missing >= measured.sum(axis=1))
            if few.any():
                text = f"In {few.sum()} rounds a third of the nodes or more had no finite loss."
                warnings.warn(text, RuntimeWarning, stacklevel=2)
        received = run.curves.get(FLOATS, np.zeros((1, 1)))
        lost = run.unheard or (received != received.max(axis=0, initial=0)).any()
        if self.compression is not None and lost:
            text = "Messages were lost: with compression the models keep an error of that."
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        for node, n_times in run.unheard.items():
            by = ", ".join(map(str, run.unheard_by.get(node, ())))
            said = f", as node {by} says" if by else ""
            _LOG.warning("Messages of node %d were left out in %d rounds%s.", node, n_times, said)
        models: dict[int, list[Array]] = {}
        apart = np.nan
        if run.state is not None:
            models = {} if program is None else program.models(run.state)
            apart = _disagreement(run.state, run.alive[run.state.nodes])
        costs = run.rounds, run.floats_sent, float(np.nansum(run.curves.get(BYTES, 0.0)))
        return Averaged(models, run.curves, apart, *costs, run.unheard, run.alive, run.unheard_by)

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
        if self.robust != "mean" and min(degrees) <= 2 * self.n_liars:
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
        self,
        clients: Clients,
        *,
        initial: Sequence[Array] | Any = None,
        array_names: Sequence[str] = (),
    ) -> AveragingProgram:
        """Return the program that a network runs; on Flower, one for each `DiffusionClient`.

        ``clients`` and ``initial`` are those of `fit`; ``array_names`` are the names of a list's
        arrays, by default those of an ArrayRecord, or "0", "1", ….
        """
        if self.compression is not None:
            from flwr_perdl.network._compressed import CompressedProgram  # which builds on this

            return CompressedProgram(self, clients, initial, array_names)
        return AveragingProgram(self, clients, initial, array_names)


@lru_cache
def state_type(fields: tuple[str, ...]) -> Any:
    """Return the type of a state with these fields."""
    return namedtuple("AveragingState", fields)  # its fields are the model's


def arrays_of(state: Any, kind: str) -> list[Array]:
    """Return a state's arrays of one kind, see `AveragingProgram`."""
    pairs = zip(state._fields, state, strict=True)
    return [array for name, array in pairs if name.startswith(f"{kind}_")]


def with_arrays(state: Any, **kinds: Sequence[Array]) -> Any:
    """Return a state with other arrays of some kinds."""
    new: dict[str, Array] = {}
    for kind, arrays in kinds.items():
        names = [name for name in state._fields if name.startswith(f"{kind}_")]
        new.update(zip(names, arrays, strict=True))
    return state._replace(**new)


def is_fixed(array: Any) -> bool:
    """Whether nobody can write to an array through this name."""
    return isinstance(array, np.ndarray) and not array.flags.writeable


class AveragingProgram:
    """`DiffusionAveraging` as a `Program`: see `DiffusionAveraging.program`.

    The state of m nodes hosted here is a NamedTuple of arrays with their first axis: ``nodes``;
    ``reports`` (m, n_reports) about the last round, in the order of ``names``; ``model_0``,
    ``model_1``, … in the dtypes of the model's arrays, ``w``, after ``adapt`` what is sent. Of each
    array that the method corrects there are ``last_i``, which is ``psi`` of exact diffusion or
    ``g`` of gradient tracking, and ``tracker_i``, its ``y``. Push-sum has ``weight_0`` (m, 1), and
    after ``adapt`` the numerators in ``model_i``. Not corrected, but averaged plainly, are integers
    and the statistics of batch normalization (`flwr_perdl.core.models`); booleans are not sent.
    """

    def __init__(
        self,
        learner: DiffusionAveraging,
        clients: Clients,
        initial: Sequence[Array] | Any,
        array_names: Sequence[str] = (),
    ) -> None:
        # A ClientApp can be called, too; the maths do not import Flower.
        if not callable(clients) or hasattr(clients, "lifespan"):
            raise TypeError(
                "clients must be a function that takes a node's number and returns its "
                f"NumPyClient, got {brief_repr(clients)}."
            )
        if hasattr(initial, "to_numpy_ndarrays"):  # an ArrayRecord
            array_names, initial = [*initial], initial.to_numpy_ndarrays()
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
        # What cannot be written to is not copied: it may be large, or stand for no values at all.
        own = [a if is_fixed(a) else np.array(a) for a in initial or ()]
        self.initial = None if initial is None else own
        self._array_names = list(array_names)
        self._known_form: Form | None = None
        self._trained = list(dict.fromkeys(learner.metrics))
        self._evaluated = list(dict.fromkeys(("loss", *learner.metrics)))
        if not learner.evaluate_every:
            self._evaluated = []
        fitted = (f"train-{name}" for name in self._trained)
        #: Names of the reports.
        self.names = [*_OWN, *fitted, *(f"evaluate-{name}" for name in self._evaluated)]

    def start(self, nodes: NDArray[np.intp]) -> Any:
        """Return the state before the first round."""
        firsts = zip(*(self._first(int(node)) for node in nodes), strict=True)
        model = [np.stack(arrays) for arrays in firsts]
        corrected = {}
        for i in self._form(int(nodes[0])).corrected:
            corrected[i] = cleared(model[i], fixed_entries(model[i]))
        fields = {"nodes": nodes, "reports": np.full((len(nodes), len(self.names)), np.nan)}
        fields |= {f"model_{i}": array for i, array in enumerate(model)}
        if self.learner.method == "exact_diffusion":
            fields |= {f"last_{i}": array for i, array in corrected.items()}
        elif self.learner.method == "gradient_tracking":
            for kind in ("last", "tracker"):
                fields |= {f"{kind}_{i}": np.zeros_like(a) for i, a in corrected.items()}
        elif self.learner.method == "push_sum":
            dtype = np.result_type(np.float32, *corrected.values())
            fields["weight_0"] = np.ones((len(nodes), 1), dtype)
        return state_type(tuple(fields))(**fields)

    @one_blas_thread()
    def adapt(self, state: Any, round_: int) -> Any:
        """Train every node's model; what is sent is the result, corrected where the method does."""
        method, w = self.learner.method, arrays_of(state, "model")
        if method == "cta":
            return state
        state, psi = self._train(state, w, round_)
        last, trackers = arrays_of(state, "last"), arrays_of(state, "tracker")
        sent, new_last, new_trackers = list(psi), [], []
        for j, i in enumerate(self._of(state).corrected if method != "atc" else ()):
            fixed = fixed_entries(w[i])
            old, new = cleared(w[i], fixed), cleared(psi[i], fixed)
            if method == "exact_diffusion":
                found = new + old - last[j]
                new_last.append(new)
            elif method == "gradient_tracking":
                new_last.append(old - new)
                new_trackers.append(trackers[j] + new_last[j] - last[j])
                found = old - new_trackers[j]
            else:
                found = old * by_row(state.weight_0, old) + new - old
            sent[i] = settled(found, w[i], fixed)
        arrays = {"model": sent, "last": new_last, "tracker": new_trackers}
        return with_arrays(state, **{kind: own for kind, own in arrays.items() if own})

    def message(self, state: Any) -> tuple[Array, ...]:
        """Return the model; with gradient tracking the tracker, with push-sum the weight.

        Booleans are not in it, and zeros stand for values that are not averaged.
        """
        model = arrays_of(state, "model")
        sent = [cleared(model[i], fixed_entries(model[i])) for i in self._of(state).sent]
        return (*sent, *arrays_of(state, "tracker"), *arrays_of(state, "weight"))

    @one_blas_thread()
    def combine(self, state: Any, inbox: Inbox) -> Any:
        """Average over the neighborhood; evaluate the model where it is the round for that."""
        method, every, form = self.learner.method, self.learner.evaluate_every, self._of(state)
        sent, means = arrays_of(state, "model"), self._means(state, inbox)
        model, squares = list(sent), np.zeros(len(state.nodes))
        for i, mean in zip(form.sent, means, strict=True):
            fixed = fixed_entries(sent[i])
            own = cleared(sent[i], fixed)
            if method == "push_sum" and i in form.corrected:
                own = own / by_row(state.weight_0, own)
            if is_float(own):
                squares += np.square((own - mean).reshape(len(own), -1)).sum(axis=1)
            if method == "exact_diffusion" and i in form.corrected:
                mean = (own + mean) / 2
            model[i] = settled(mean, sent[i], fixed)
        reports = state.reports.copy()
        reports[:, 0] = np.sqrt(squares)
        reports[:, 1] = inbox.degrees * sum(array[0].size for array in inbox.arrays)
        reports[:, 2] = inbox.degrees * sum(array[0].nbytes for array in inbox.arrays)
        trackers = self._tracked(state, inbox)
        state = with_arrays(state._replace(reports=reports), model=model, tracker=trackers)
        if method == "push_sum":
            state = state._replace(weight_0=inbox.mean(-1, ordered=True))
        if method == "cta":
            state, w = self._train(state, model, inbox.round)
            state = with_arrays(state, model=w)
        return self._evaluate(state, inbox.round) if every else state

    def _means(self, state: Any, inbox: Inbox) -> list[Array]:
        """Return the neighborhood's means of all arrays of the model that are sent."""
        form, rule = self._of(state), self.learner.robust
        floats = [k for k in range(len(form.sent)) if is_float(inbox.arrays[k])]
        robust = {} if rule == "mean" else inbox.robust_means(floats, rule, self.learner.n_liars)
        if self.learner.method != "push_sum":
            each = range(len(form.sent))
            return [robust[k] if k in robust else inbox.mean(k, ordered=True) for k in each]
        means, weights = [], inbox.arrays[-1]
        total = inbox.mean(-1, ordered=True)
        for k, i in enumerate(form.sent):
            array = inbox.arrays[k]
            if i not in form.corrected:  # sent as it is: the weights are not in it
                array = array * by_row(weights, array)
            mean = replace(inbox, arrays=(array,)).mean(ordered=True)
            means.append(mean / by_row(total, mean))
        return means

    def _tracked(self, state: Any, inbox: Inbox) -> list[Array]:
        """Return the neighborhood's means of the trackers."""
        first, trackers = len(self._of(state).sent), arrays_of(state, "tracker")
        means = (inbox.mean(first + j, ordered=True) for j in range(len(trackers)))
        return [mean.astype(own.dtype) for mean, own in zip(means, trackers, strict=True)]

    def rejects(self, state: Any, inbox: Inbox) -> dict[str, NDArray[np.bool_]]:
        """Return by reason which of the inbox's links brought a message that does not count."""
        columns = inbox.links.indices
        sizes = np.array([_row_magnitudes(array) for array in inbox.arrays])
        floats, bound = [is_float(array) for array in inbox.arrays], self.learner.max_magnitude
        limits = [largest_averaged(array.dtype) for array in inbox.arrays]
        large = np.zeros(len(columns), dtype=bool)
        for k, own in enumerate(inbox.own):
            links = slice(inbox.links.indptr[k], inbox.links.indptr[k + 1])
            there = sizes[:, [own, *columns[links]]]
            most = np.where(floats, far_too_large(there) if bound is None else bound, limits)
            large[links] = (there[:, 1:] > most[:, None]).any(axis=0)
        reasons = {"it has a value that is far larger than those of the neighborhood": large}
        if self.learner.method == "push_sum":
            reasons["its weight is not positive"] = inbox.arrays[-1][columns, 0] <= 0
        return reasons

    def observe(self, state: Any) -> dict[str, Array]:
        """Return nothing: the models stay at the nodes."""
        return {}

    def report(self, state: Any) -> dict[str, Array]:
        """Return what the nodes report to the operator about the last round, (m,) by name."""
        return dict(zip(self.names, state.reports.T, strict=True))

    def models(self, state: Any) -> dict[int, list[Array]]:
        """Return the nodes' models, as their clients have them: what ``on_end`` may keep."""
        return {
            int(node): [np.array(array[i]) for array in arrays_of(state, "model")]
            for i, node in enumerate(state.nodes)
        }

    def _train(self, state: Any, models: list[Array], round_: int) -> tuple[Any, list[Array]]:
        """Return the state with reports of ``fit``, and what ``fit`` makes of the models."""
        fitted, reports = [np.empty_like(array) for array in models], state.reports.copy()
        for i, node in enumerate(map(int, state.nodes)):
            form, config = self._form(node), {ROUND: round_, **self.learner.config}
            given = [np.array(array[i]) for array in models]  # the client may change them
            parameters, _, metrics = self._client(node).fit(given, config)
            whose, before = f"fit of node {node}", [array[i] for array in models]
            for array, own in zip(fitted, form.checked(whose, parameters, before), strict=True):
                array[i] = own
            numbers = _numbers(whose, metrics, self._trained)
            reports[i, len(_OWN) : len(_OWN) + len(self._trained)] = numbers
        return state._replace(reports=reports), fitted

    def _evaluate(self, state: Any, round_: int) -> Any:
        """Return the state with reports of ``evaluate``; NaN where this is no round for that."""
        reports, first = state.reports.copy(), len(_OWN) + len(self._trained)
        reports[:, first:] = np.nan
        due, config = round_ % self.learner.evaluate_every == 0, self.learner.config
        for i, (node, given) in enumerate(self.models(state).items() if due else ()):
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

    def _first(self, node: int) -> list[Array]:
        """Return a node's first model."""
        name, own = "initial", self.initial
        if own is None:
            name, own = f"get_parameters of node {node}", self._client(node).get_parameters({})
        return self._form(node).checked(name, own)

    def _of(self, state: Any) -> Form:
        return self._form(int(state.nodes[0]))

    def _form(self, node: int) -> Form:
        """Return the models' form; without ``initial``, the client of a hosted node says it."""
        if self._known_form is None:
            first = self.initial
            if first is None:
                first = [np.asarray(a) for a in self._client(node).get_parameters({})]
            names = self._array_names or list(map(str, range(len(first))))
            check_dtypes("initial, or what get_parameters returns,", names, first)
            self._known_form = Form(names, first)
        return self._known_form


@dataclass(frozen=True, eq=False)
class Form:
    """The arrays of a model: their names, and a model of that form."""

    names: Sequence[str]
    like: Sequence[Array]

    @cached_property
    def sent(self) -> list[int]:
        """Which arrays are sent to the neighbors: all but booleans."""
        return [i for i, array in enumerate(self.like) if array.dtype.kind != "b"]

    @cached_property
    def corrected(self) -> list[int]:
        """Which arrays a method may correct; the others are averaged plainly."""
        arrays = zip(self.names, self.like, strict=True)
        return [i for i, (name, array) in enumerate(arrays) if not is_plain(name, array)]

    def checked(
        self, whose: str, arrays: Sequence[Array], before: Sequence[Array] | None = None
    ) -> list[Array]:
        """Return a model, trained from the one ``before``, in the dtypes of this form."""
        own, shapes = [np.asarray(array) for array in arrays], [a.shape for a in self.like]
        if (found := [array.shape for array in own]) != shapes:
            raise ValueError(f"{whose} must have arrays of shapes {shapes}, got {found}.")
        try:
            own = [as_dtype(array, old.dtype) for array, old in zip(own, self.like, strict=True)]
            for name, array, old in zip(self.names, own, before or own, strict=True):
                check_trained(name, array, old, None if before is None else fixed_entries(old))
        except ValueError as error:
            raise ValueError(f"{whose} must return what can be averaged: {error}") from None
        return own


def by_row(weights: Array, array: Array) -> Array:
    """Return weights of rows (m, 1) in as many dimensions as ``array`` (m, ...)."""
    rows: Array = weights.reshape(-1, *(1,) * (array.ndim - 1))
    return rows


def _row_magnitudes(array: Array) -> Array:
    """Return the largest absolute value of each row, (s,)."""
    flat = array.reshape(len(array), -1)
    largest = flat.max(axis=1, initial=0).astype(float)
    found: Array = np.maximum(largest, -flat.min(axis=1, initial=0).astype(float))
    return found


def _disagreement(state: Any, living: NDArray[np.bool_]) -> float:
    """Return the largest distance of a living node's model from their mean, of floats."""
    squares = np.zeros(int(living.sum()))
    for array in filter(is_float, arrays_of(state, "model")):
        own = cleared(array[living], fixed_entries(array[living]))
        squares += np.square((own - own.mean(axis=0)).reshape(len(own), -1)).sum(axis=1)
    return float(np.sqrt(squares.max())) if len(squares) else np.nan


def _numbers(whose: str, metrics: Mapping[str, Any], names: Sequence[str]) -> list[float]:
    """Return the metrics of these names; NaN for one that a client does not have."""
    for name in names:
        if not isinstance(metrics.get(name, 0.0), Real):
            raise ValueError(f"{whose} must return a number as {name!r}, got {metrics[name]!r}.")
    return [float(metrics.get(name, np.nan)) for name in names]
