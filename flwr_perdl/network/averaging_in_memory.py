"""Diffusion averaging in memory: all nodes of `flwr_perdl.network.averaging` in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite
from types import SimpleNamespace
from typing import Any

import numpy as np

from flwr_perdl.core.arrays import Array, count_values
from flwr_perdl.core.checks import brief_repr, check_count, check_function, check_list
from flwr_perdl.core.keys import PURPOSE, SELECT
from flwr_perdl.core.models import magnitude
from flwr_perdl.network.averaging import AveragingNode, Form, NodeState, Trainer
from flwr_perdl.network.averaging_options import Averaged, AveragingOptions
from flwr_perdl.network.combine import Run
from flwr_perdl.network.compression import Compression
from flwr_perdl.network.exchange import InMemoryNetwork, resolve_weights
from flwr_perdl.network.messages import EVERYBODY, MessageStore, curves, neighborhood_of, tally
from flwr_perdl.network.schedule import LinkPlan, schedule_of
from flwr_perdl.network.topology import Topology, weights_of

#: ``node -> client``; a client has Flower's ``fit``, and ``evaluate`` where models are evaluated.
Clients = Callable[[int], Any]


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
    if not isinstance(network, InMemoryNetwork):
        network = InMemoryNetwork(schedule_of(network))
    options = options.suited_to(network, n_rounds)
    hosts = Hosts(options, clients, initial)
    nodes = [options.node(hosts.form, k) for k in range(network.plan.n_nodes)]
    states = [node.start(hosts.first(node.node), known=hosts.known) for node in nodes]
    run = run_nodes(nodes, states, hosts.trainer, network.plan, n_rounds, callback)
    return options.learned(*run)


def run_nodes(
    nodes: Sequence[AveragingNode],
    states: list[NodeState],
    trainer: Callable[[int], Trainer],
    plan: LinkPlan,
    n_rounds: int,
    callback: Callable[[int, dict[str, Array]], Any] | None = None,
) -> tuple[Run, dict[int, list[Array]]]:
    """Run the nodes of a network, by the training and evaluation of each; return their models.

    ``states`` is the list that has them from round to round.
    """
    store, rows = MessageStore(plan), []
    for round_ in range(1, n_rounds + 1):
        store.begin(round_)
        sent: dict[int, tuple[list[Array], list[float]]] = {}
        awake = np.flatnonzero(plan.awake(round_)).tolist()
        for k in awake:
            states[k] = nodes[k].adapt(states[k], round_, trainer(k))
        for k in awake:
            message = nodes[k].message(states[k])
            sent[k] = message, [*map(magnitude, message)]
            store.took_part[k] = True
            if not all(map(isfinite, sent[k][1])):
                store.left_out.add((round_, k, k))
            elif not nodes[k].silent(states[k]):
                store.put(round_, k, count_values(*message), {EVERYBODY: message})
        deliveries, left_out = store.deliveries(round_ + 1), set[tuple[int, int]]()
        for k, own in sent.items():
            around, odd = neighborhood_of(k, round_, *own, deliveries[k], staleness=plan.staleness)
            around, rejected = nodes[k].screened(states[k], around)
            left_out |= {(sender, k) for sender in odd | rejected}
            states[k] = nodes[k].combine(states[k], around, trainer(k))
        store.count({k: deliveries[k] for k in sent}, left_out)
        reports = [node.report(own) for node, own in zip(nodes, states, strict=True)]
        there = plan.awake(round_)
        rows.append({n: np.where(there, [own[n] for own in reports], np.nan) for n in reports[0]})
        if callback is not None:
            callback(round_, rows[-1])
    dropped_messages, dropped_by = tally(store.left_out)
    observed = [node.observe(own) for node, own in zip(nodes, states, strict=True)]
    run = Run(
        state=None,
        observed={name: np.stack([own[name] for own in observed]) for name in observed[0]},
        rounds=len(rows),
        floats_sent=float(store.traffic.sum()),
        traffic=store.traffic,
        dropped_messages=dropped_messages,
        alive=plan.awake(max(len(rows), 1)),
        curves=curves(rows, len(nodes)),
        dropped_by=dropped_by,
    )
    return run, {k: [*map(np.array, state.model)] for k, state in enumerate(states)}


class Hosts:
    """The clients of a network in memory, as the algorithm calls them."""

    def __init__(
        self, options: AveragingOptions, clients: Clients, initial: Sequence[Array] | Any = None
    ) -> None:
        # A ClientApp can be called, too; the maths do not import Flower.
        if not callable(clients) or hasattr(clients, "lifespan"):
            raise TypeError(
                "clients must be a function that takes a node's number and returns its "
                f"NumPyClient, got {brief_repr(clients)}."
            )
        names: Sequence[str] = ()
        if hasattr(initial, "to_numpy_ndarrays"):  # an ArrayRecord
            names, initial = [*initial], initial.to_numpy_ndarrays()
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
        self._options, self._clients = options, clients
        self._initial = initial
        #: Whether all nodes begin with the same model.
        self.known = initial is not None
        first = [np.asarray(array) for array in self._first(0)]
        #: The models' form.
        self.form = Form(names or [*map(str, range(len(first)))], first)

    def first(self, node: int) -> list[Array]:
        """Return a copy of a node's first model."""
        whose = "initial" if self.known else f"get_parameters of node {node}"
        return self.form.checked(whose, [*map(np.array, self._first(node))])

    def _first(self, node: int) -> Any:
        return self._initial if self.known else self._client(node).get_parameters({})

    def trainer(self, node: int) -> Trainer:
        """Return a node's client as the algorithm calls it; it may change the arrays it gets."""
        client = self._client(node)

        def call(method: str, arrays: Sequence[Array], **config: Any) -> Any:
            return getattr(client, method)([*map(np.array, arrays)], config)

        def fit(arrays: Sequence[Array], **config: Any) -> Any:
            trained, _, metrics = call("fit", arrays, **config)
            return SimpleNamespace(arrays=trained, metrics=metrics)

        evaluate = partial(call, "evaluate")
        return Trainer(fit, evaluate, partial(evaluate, **{PURPOSE: SELECT}))

    def _client(self, node: int) -> Any:
        """Return a node's client, checked."""
        try:
            client = self._clients(node)
        except AttributeError as error:
            if error.obj is not node:
                raise
            raise TypeError(
                "clients must be a function of the node's number, got one that reads the attribute "
                f"{error.name!r} of its argument: the number itself is the node's partition-id."
            ) from error
        client = getattr(client, "numpy_client", client)  # of what to_client() returned
        evaluates = self._options.evaluate_every or self._options.groups
        needed = ["fit", *(["evaluate"] if evaluates else [])]
        needed += ["get_parameters"] if not self.known else []
        for method in needed:
            if not callable(getattr(client, method, None)):
                raise TypeError(
                    f"clients must return a NumPyClient with a method {method}, got {client!r}."
                )
        return client
