"""DiffusionAveraging: nodes train any model and average with their neighbors.

The algorithms, with their sources, are in `flwr_perdl.network.averaging`, whose program runs at
the nodes (`flwr_perdl.clients.diffusion_averaging`). The server delivers messages as
`NeighborRelay` does; it sends the initial arrays to a node that has no model yet, and takes no
part in the averaging.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from logging import INFO, WARNING
from typing import Any, ClassVar, Unpack

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from flwr_perdl.clients.diffusion_averaging import AVERAGING, averaging_config
from flwr_perdl.core.checks import Matrix, check_count, check_flag, check_function
from flwr_perdl.network.averaging_options import Averaged, AveragingOptions, models_of
from flwr_perdl.network.compression import RandomQuantization, TopK
from flwr_perdl.network.schedule import Schedule
from flwr_perdl.network.topology import CombinationMatrix, Topology, averaging_weights
from flwr_perdl.protocol.compat import log
from flwr_perdl.protocol.options import Needs, ServerOptions, check_support
from flwr_perdl.protocol.records import LEFT_OUT, Scalar, for_evaluations, scalars
from flwr_perdl.protocol.report import MEMBERS
from flwr_perdl.protocol.request import Protocol, State
from flwr_perdl.strategies._models import TrainsModels, check_initial
from flwr_perdl.strategies.neighbor_relay import NeighborRelay

_ENCODED = "a part sees a message as it travels"
_TRAINED, _EVALUATED = "train-", "evaluate-"


class DiffusionAveraging(TrainsModels, NeighborRelay):
    """Train any model at nodes that average with their neighbors; no server has the model.

    The nodes run `client_app`: a ClientApp with train and evaluate handlers, or a NumPyClient, as
    for FedAvg. All start from the initial arrays. In every round each node trains its own model and
    replaces it by the weighted mean of its own and its neighbors' models. Arrays that a node keeps
    private (`keep_private`) stay there; all nodes must keep the same ones.

    For what each party receives see `flwr_perdl.network.diffusion_averaging`. The server sends the
    initial arrays and has no model afterwards, unless ``shows_models``; it can read the messages
    that it delivers, unless ``sealed``.

    Parameters
    ----------
    topology : Topology or Schedule
        Which nodes are neighbors, connected; node k is the client with ``partition-id`` k.
    method : {"atc", "cta", "exact_diffusion", "gradient_tracking", "push_sum"}, optional
        See `flwr_perdl.network.diffusion_averaging`; by default chosen by the network.
    robust, n_liars
        Against malicious (Byzantine) neighbors, as there.
    compression
        For smaller messages, as there.
    groups, local_rounds
        With ``groups="auto"`` nodes find out by themselves which neighbors are in their group
        (docs/groups-without-a-server.md), as there; ``num_rounds`` must be more than
        ``local_rounds``.
    evaluate_every : int, default 1
        Rounds between two evaluations of a node's own model by its own ``evaluate``; 0: none. The
        curves have NaN in the other rounds, also in the last one unless it is a multiple.
    metrics : sequence of str, default ()
        Metrics of training and evaluation that leave the nodes; the evaluation loss always does.
    private, share : str or sequence of str, default ()
        Names of arrays that stay at the nodes, or of the only ones that are sent, as in
        `PersonalizedFedAvg`.
    fine_tune : int, default 0
        After the last round each node fine-tunes its model for up to this many trainings, and keeps
        the best by its ``evaluate``.
    metric : str, default "loss"
        The metric of ``evaluate`` by which nodes choose among models, for ``groups`` and
        ``fine_tune``; "loss" also matches "eval_loss".
    higher_is_better : bool, optional
        Whether a larger ``metric`` is better; by default inferred from its name.
    transport : "float16", optional
        Send floats to neighbors in half precision, whose rounding stays in the models; not with
        ``compression``. By default every array keeps its dtype.
    shows_models : bool, default False
        Whether the nodes send the server their models, and their correction terms, at the end. Not
        with ``sealed``, nor with private arrays.
    weights, staleness, sealed
        As in `NeighborRelay`; the weights are doubly stochastic, for "push_sum" column-stochastic.
        ``staleness`` is for "atc" and "cta".
    **options
        See `ServerOptions`; ``num_clients`` is by default the number of nodes.

    Raises
    ------
    ValueError, TypeError
        If an option breaks its rule, or the network is not connected.

    Notes
    -----
    Communication per node and round: as in `NeighborRelay`, and the initial arrays in the first
    exchange and after one that the node missed. A node without a model, such as one restarted
    without a ``state-dir``, misses a round and starts again from the initial arrays.

    An app without ``evaluate`` is not evaluated. Nodes that pin their neighbors' keys report no
    metrics, and refuse ``fine_tune``.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr.app import ArrayRecord
    >>> from flwr.client import NumPyClient
    >>> from flwr_perdl.clients import client_app
    >>> from flwr_perdl.network import Topology
    >>> from flwr_perdl.simulations import InProcessGrid
    >>> from flwr_perdl.strategies import DiffusionAveraging
    >>> class Client(NumPyClient):
    ...     def __init__(self, context):
    ...         self.target = float(context.node_config["partition-id"])
    ...
    ...     def fit(self, parameters, config):
    ...         return [w - 0.5 * (w - self.target) for w in parameters], 1, {}
    ...
    ...     def evaluate(self, parameters, config):
    ...         return 0.0, 1, {"model": float(parameters[0][0])}
    >>> grid = InProcessGrid(client_app(Client), 4)
    >>> strategy = DiffusionAveraging(Topology.ring(4), metrics=["model"])
    >>> result = strategy.start(grid, ArrayRecord([np.zeros(1)]), num_rounds=60)
    >>> strategy.averaged.curves["evaluate-model"][-1].round(6)
    array([1.5, 1.5, 1.5, 1.5])
    """

    protocol_name = after_protocol = AVERAGING
    _wrappable = False
    _called_as: ClassVar = {**NeighborRelay._called_as, "averaging": "*"}
    unsupported: ClassVar = {
        "secure": "no server sums: sealed hides the messages from it",
        "privacy": "neighbors receive a node's own model, not a sum",
        "reuse_last_reply": "staleness says for how long a neighbor's message counts",
    }
    needs = (
        Needs(("sealed",), "shows_models", (False,), "the server then learns no model"),
        Needs(("transport",), "compression", (None,), "such messages have few bytes already"),
        *(Needs((name,), "parts", (None,), _ENCODED) for name in ("sealed", "transport")),
        Needs(("compression",), "parts", (None,), _ENCODED),
        Needs(("groups",), "weights", (None,), "nodes then take plain means of those they accept"),
    )

    def __init__(
        self,
        topology: Topology | Schedule,
        *,
        method: str | None = None,
        robust: bool | str = False,
        n_liars: int = 1,
        compression: TopK | RandomQuantization | None = None,
        groups: str | None = None,
        local_rounds: int = 5,
        evaluate_every: int = 1,
        metrics: Sequence[str] = (),
        shows_models: bool = False,
        weights: CombinationMatrix | None = None,
        staleness: int = 0,
        sealed: bool = False,
        private: str | Sequence[str] = (),
        share: str | Sequence[str] = (),
        fine_tune: int = 0,
        metric: str = "loss",
        higher_is_better: bool | None = None,
        transport: str | None = None,
        **options: Unpack[ServerOptions],
    ) -> None:
        used = weights
        if groups is not None and weights is None and isinstance(topology, Topology):
            used = averaging_weights(topology)  # they do not count, but a topology may be directed
        network: dict[str, Any] = {"weights": used, "staleness": staleness}
        own: dict[str, Any] = {"private": private, "share": share, "fine_tune": fine_tune}
        own |= {"transport": transport, "sealed": sealed}
        own |= {"metric": metric, "higher_is_better": higher_is_better}
        super().__init__(topology, 0, **network, **own, **options)
        self.averaging = AveragingOptions(
            method=method,
            robust=robust,
            n_liars=n_liars,
            compression=compression,
            groups=groups,
            local_rounds=local_rounds,
            evaluate_every=evaluate_every,
            metrics=metrics,
            max_magnitude=self.options.max_magnitude,
        ).suited_to(self, 0)
        self._chooses |= groups is not None
        self.shows_models = check_flag("shows_models", shows_models)
        check_support(
            self, self._options_with(compression=compression, groups=groups, weights=weights)
        )
        self._learned: Averaged | None = None
        self._sent_models = []

    @property
    def averaged(self) -> Averaged:
        """What the nodes reported: curves by node and round, communication, who took part.

        It has no models, which stay at the nodes: see ``result``.

        Raises
        ------
        RuntimeError
            If the run is not over.
        """
        if self._learned is None:
            raise RuntimeError(f"the run must be over, which takes {self.exchanges} exchanges.")
        return self._learned

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Any = None,
        should_stop: Callable[[int, Result], bool] | None = None,
        *,
        verbose: int | str | None = None,
    ) -> Result:
        """Run ``num_rounds`` rounds of the algorithm, by default 3.

        This takes one communication round more, sealed two, and log and ``history`` count those:
        nodes combine the messages of a round, and report on it, when the next exchange begins.

        Parameters
        ----------
        grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, verbose
            As in `ProtocolStrategy.start`; the initial arrays are every node's first model.
        evaluate_fn : None
            The server has no model to evaluate.
        should_stop : callable, optional
            ``(round, result) -> bool``, called after each round of the algorithm.

        Returns
        -------
        Result
            Means over the nodes of their reports on each round. ``arrays`` is the mean of the
            nodes' models with ``shows_models``; else it is empty: every node has its own model. See
            also ``strategy.result``.

        Raises
        ------
        ValueError, TypeError
            If an argument breaks its rule.
        TooFewReplies
            If fewer than ``min_clients`` good replies come in a round.
        """
        if evaluate_fn is not None:
            raise ValueError(
                f"evaluate_fn must be None, got {evaluate_fn!r}: the server has no model to "
                "evaluate, nodes evaluate their own."
            )
        check_function("should_stop", should_stop)
        self.n_rounds = check_count("num_rounds", 3 if num_rounds is None else num_rounds, 1)
        self.averaging.suited_to(self, self.n_rounds)
        self._learned, self._sent_models, self._sent_by = None, [], {}

        def stops(exchange: int, result: Result) -> bool:
            round_ = exchange - self._ahead
            if should_stop is None or round_ < 1:
                return False
            return should_stop(round_, self._reported(round_))

        configs = (train_config, evaluate_config, None, stops)
        rounds = self._least_rounds = self.exchanges
        super().start(grid, initial_arrays, rounds, timeout, *configs, verbose=verbose)
        models: dict[int, list[Matrix]] = {}
        if self._running().record.finished:
            run = self.outcome
            shown = {} if run.state is None else models_of(run.state)
            learned = self.averaging.learned(run, shown)
            models = self._whole(shown) if self.shows_models else {}
            if models:
                self._sent_models = [[*map(_mean, zip(*models.values(), strict=True))]]
            self._sent_by = {node: self._named(model) for node, model in models.items()}
            self._learned = learned._replace(models={})
            groups = [[node, j] for j, some in enumerate(learned.groups) for node in some]
            if groups:
                self._running().record.kept[MEMBERS] = np.array(groups)
        found = self._reported(self.n_rounds)
        self._add_tuned(found, self.n_rounds + 1)
        if models:
            found.arrays = self._presented()
        elif not self.shows_models and verbose not in (0, "quiet"):
            log(
                INFO,
                "The result has no model, since each node has its own: save it in the app's "
                "evaluate, which receives it, or use shows_models=True.",
            )
        return found

    def _whole(self, shown: Mapping[int, list[Matrix]]) -> dict[int, list[Matrix]]:
        """Return the models that the nodes have shown, of the form of the initial arrays."""
        forms = [array.shape for array in self._running().initial]
        whole = {k: own for k, own in shown.items() if [a.shape for a in own] == forms}
        if len(whole) < self.topology.n_nodes:
            log(
                WARNING,
                "%d of %d nodes show a model; those that keep arrays private show none.",
                *(len(whole), self.topology.n_nodes),
            )
        return whole

    def protocol(self, initial: list[Matrix], state: State | None) -> Protocol:
        """Deliver messages round by round, as `NeighborRelay` does, from one model."""
        start = dict(zip(self._array_names(), initial, strict=True)) if initial else {}
        return self._deliver(start, state, self._config)

    def _config(self, start: Mapping[str, Matrix]) -> dict[str, Scalar]:
        """Return what every request says to the nodes besides."""
        model = [*start.values()]
        check_initial(model, [*start])
        evaluations = for_evaluations(scalars(self._evaluate_config or {}))
        half = self.transport is not None
        own = averaging_config(self.averaging, start, self.shows_models, half)
        if private := self.private_names():
            own = {**own, LEFT_OUT: json.dumps(private)}
        return {**own, **evaluations}

    def _reported(self, last: int) -> Result:
        """Return Flower's result, with the means of what nodes reported up to a round."""
        found = Result()
        for report in self.history:
            round_ = self._round_of(report)
            if 0 < round_ <= last:
                rows = self.reports_of(report)
                means = {name: float(np.nanmean(row)) for name, row in rows.items()}
                measured = {name for name in means if name.startswith(_EVALUATED)}
                trained = {n.removeprefix(_TRAINED): means[n] for n in means if n not in measured}
                evaluated = {n.removeprefix(_EVALUATED): means[n] for n in means if n in measured}
                found.train_metrics_clientapp[round_] = MetricRecord({**trained})
                if measured:
                    found.evaluate_metrics_clientapp[round_] = MetricRecord({**evaluated})
        return found


def _mean(arrays: Sequence[Matrix]) -> Matrix:
    """Return the mean of the nodes' arrays, in their dtype: integers rounded, booleans as sent."""
    first = arrays[0]
    if first.dtype.kind == "b":
        return first
    mean = np.mean(arrays, axis=0)
    return np.asarray(np.rint(mean) if first.dtype.kind in "iu" else mean, first.dtype)
