"""The same protocols on Flower's older interface, ``ServerAppComponents(strategy=…)``."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from flwr_perdl.clients._clusters import CLUSTERED, for_evaluations
from flwr_perdl.core.checks import Matrix, check_function, check_kind, plain
from flwr_perdl.protocol.compat import older_interface
from flwr_perdl.protocol.driver import Conversation, Plan
from flwr_perdl.protocol.records import NUM_EXAMPLES, Reply, Scalar, brief, read_parts, with_loss
from flwr_perdl.protocol.request import FAILED, REFUSED, Lost
from flwr_perdl.protocol.roster import Roster, settle
from flwr_perdl.protocol.strategy import ProtocolStrategy

#: How the server's own loss is called among the metrics that a checkpoint keeps.
_LOSS = "perdl.loss"
_SECURE = (
    "strategy must be started with its own start for secure rounds, got it for the older "
    "interface, where every update would reach the server by itself."
)

#: Flower's older types, which are looked up when `as_legacy` is called.
ClientManager: TypeAlias = Any
ClientProxy: TypeAlias = Any
FitIns: TypeAlias = Any
FitRes: TypeAlias = Any
EvaluateIns: TypeAlias = Any
EvaluateRes: TypeAlias = Any
Parameters: TypeAlias = Any

#: Flower's ``(round, model arrays, config)``.
EvaluateFn = Callable[..., tuple[float, dict[str, Scalar]] | None]
#: Flower's ``round -> config``.
ConfigFn = Callable[[int], Mapping[str, Scalar]]


def as_legacy(
    strategy: ProtocolStrategy,
    *,
    initial: Sequence[Matrix] = (),
    evaluate_fn: EvaluateFn | None = None,
    on_fit_config_fn: ConfigFn | None = None,
    on_evaluate_config_fn: ConfigFn | None = None,
) -> Any:
    """Return ``strategy`` behind Flower's older strategy interface.

    The clients are the same NumPyClients, through ``.to_client()``; the results are the same bits.

    Parameters
    ----------
    strategy : ProtocolStrategy
        Any strategy of this library.
    initial : sequence of ndarray
        Initial arrays, possibly none.
    evaluate_fn : callable, optional
        ``(round, model arrays, config) -> (loss, metrics) or None``: evaluation at the server,
        after every round, and of initial arrays where there are any. As in Flower's own strategies
        the config is empty. What it said of rounds before a resumed one is remembered.
    on_fit_config_fn, on_evaluate_config_fn : callable, optional
        ``round -> config``: what the clients' ``fit`` and ``evaluate`` receive in that round, such
        as a learning rate.

    Raises
    ------
    TypeError
        If an argument is of another kind.
    ValueError
        If the strategy has ``secure=True``; a later secure round is refused when it comes.
    ImportError
        If Flower has no older strategies.

    Examples
    --------
    >>> from flwr.server import ServerAppComponents, ServerConfig
    >>> from flwr_perdl.strategies import PerMA, as_legacy
    >>> strategy = as_legacy(PerMA(n_global=2))
    >>> components = ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=5))
    """
    check_kind("strategy", strategy, ProtocolStrategy, "a strategy of this library")
    if getattr(strategy, "secure", None) not in (None, False):
        raise ValueError(_SECURE)
    check_kind("initial", initial, (list, tuple), "a list of arrays")
    for array in initial:
        check_kind("initial", array, np.ndarray, "a list of arrays")
    return LegacyStrategy(
        strategy,
        list(initial),
        check_function("evaluate_fn", evaluate_fn),
        check_function("on_fit_config_fn", on_fit_config_fn),
        check_function("on_evaluate_config_fn", on_evaluate_config_fn),
    )


@dataclass(eq=False, repr=False)
class LegacyStrategy:
    """See `as_legacy`, which makes a Flower ``Strategy`` of it."""

    strategy: ProtocolStrategy
    initial: list[Matrix]
    evaluate_fn: EvaluateFn | None
    on_fit_config_fn: ConfigFn | None
    on_evaluate_config_fn: ConfigFn | None

    def __post_init__(self) -> None:
        """Become one of Flower's strategies."""
        self._flower, kind = older_interface()
        kind.register(type(self))
        self._asked: dict[str, int] = {}
        self._begun: Conversation | None = None
        self._error: BaseException | None = None

    @property
    def conversation(self) -> Conversation:
        """The run that is on."""
        return self.strategy._conversation or self._open()

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters:
        """Begin the run (or take it up from its checkpoint) and return its model."""
        self._end()
        conversation = self._begun = self._open()
        conversation.begin()
        atexit.register(self._end)  # nothing here says which round is the last
        return self._flower.ndarrays_to_parameters(conversation.run.model)

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Ask this round's question of the sampled clients."""
        if server_round == self.conversation.run.done + 1:
            request = self.conversation.request
            if request is not None and request.secure is not None:
                raise ValueError(_SECURE)
            proxies = self._present(client_manager)
            with self._noting():
                plan = self.conversation.plan(server_round, list(proxies))
            own = self._config("on_fit_config_fn", server_round)
            if plan is not None and CLUSTERED in plan.config:  # clients evaluate to choose
                own |= for_evaluations(self._config("on_evaluate_config_fn", server_round))
            return [
                (p, self._flower.FitIns(a, {**own, **c})) for p, a, c in self._ask(plan, proxies)
            ]
        return []

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[Any],
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Hand the good replies to the protocol and return its new model."""
        replies = {
            proxy.cid: (result.num_examples, result.parameters, result.metrics)
            for proxy, result in results
        }
        good, lost = self._read(replies, failures)
        with self._noting():
            report = self.conversation.conclude(server_round, good, lost)
        model = self._flower.ndarrays_to_parameters(self.conversation.run.model)
        return model, dict(report.aggregate)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Remember what stopped the run, for its end."""
        try:
            yield
        except BaseException as error:
            self._error = error
            raise

    def _end(self) -> None:
        """End the run that has begun, for its events and its observers."""
        atexit.unregister(self._end)
        if self._begun is not None:
            self._begun.end(self._error)
        self._begun = self._error = None

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, EvaluateIns]]:
        """Ask the sampled clients to evaluate the model."""
        if not self.conversation.evaluates(server_round):
            return []
        proxies = self._present(client_manager)
        config = self._config("on_evaluate_config_fn", server_round)
        plan = self.conversation.plan_evaluation(server_round, list(proxies), config)
        return [(p, self._flower.EvaluateIns(a, c)) for p, a, c in self._ask(plan, proxies)]

    def aggregate_evaluate(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, EvaluateRes]],
        failures: list[Any],
    ) -> tuple[float | None, dict[str, Scalar]]:
        """Return the means of the clients' losses and evaluation metrics."""
        none = self._flower.ndarrays_to_parameters([])
        replies = {
            proxy.cid: (result.num_examples, none, with_loss(result.loss, result.metrics))
            for proxy, result in results
        }
        good, lost = self._read(replies, failures)
        report = self.conversation.conclude_evaluation(server_round, good, lost)
        if report is None:
            return None, {}
        return report.aggregate.get("loss"), dict(report.aggregate)

    def evaluate(
        self, server_round: int, parameters: Parameters
    ) -> tuple[float, dict[str, Scalar]] | None:
        """Evaluate the model at the server."""
        if self.evaluate_fn is None or not parameters.tensors:
            return None
        known = self.conversation.run.server_metrics.get(server_round)
        if known is not None and _LOSS in known:
            return known[_LOSS], {k: v for k, v in known.items() if k != _LOSS}
        if server_round < self.conversation.run.done:  # the model at hand is a later one
            return None
        found = self.evaluate_fn(server_round, self._flower.parameters_to_ndarrays(parameters), {})
        if found is not None:
            numbers = {k: plain(v) for k, v in found[1].items()}
            numeric = {k: v for k, v in numbers.items() if isinstance(v, bool | int | float | str)}
            self.conversation.measured(server_round, {**numeric, _LOSS: float(found[0])})
        return found

    def _config(self, name: str, round_: int) -> dict[str, Scalar]:
        """Return what one of the user's functions gives as a round's config."""
        function = getattr(self, name)
        given = {} if function is None else function(round_)
        check_kind(f"what {name} returns", given, Mapping, "a mapping")
        for key in given:
            check_kind(f"keys of what {name} returns", key, str, "strings")
        return {key: plain(value) for key, value in given.items()}

    def _open(self) -> Conversation:
        """Begin a run, in which nodes are known by their texts."""
        conversation = self.strategy.open(self.initial)
        allowed = conversation.roster.allowed
        if allowed is not None:
            allowed = {str(node): partition for node, partition in allowed.items()}
        conversation.roster = Roster(allowed)
        return conversation

    def _count(self, client_manager: ClientManager) -> int:
        """Return how many clients have registered that may take part."""
        allowed = self.conversation.roster.allowed
        if allowed is None:
            return int(client_manager.num_available())
        return sum(cid in allowed for cid in client_manager.all())

    def _present(self, client_manager: ClientManager) -> dict[int, ClientProxy]:
        """Return the present clients by partition; new ones are asked who they are."""
        if not self.conversation.roster.names:
            settle(lambda: self._count(client_manager), self.strategy.options)
        proxies, roster = client_manager.all(), self.conversation.roster
        self._ask_who(proxies, roster.unknown(list(proxies)))
        self._ask_who(proxies, roster.contested(list(proxies)))
        return {part: proxies[cid] for part, cid in roster.present(list(proxies)).items()}

    def _ask_who(self, proxies: Mapping[str, ClientProxy], cids: list[str]) -> None:
        """Ask clients who they are, and note their answers."""
        for cid in sorted(cids):
            try:
                ask = self._flower.GetPropertiesIns(config={})
                answer = proxies[cid].get_properties(ask, timeout=None, group_id=None)
                if answer.status.code != self._flower.Code.OK:
                    raise ValueError(answer.status.message)
                self.conversation.roster.enrol(cid, answer.properties)
            except Exception as error:
                self.conversation.roster.refuse(cid, str(error))

    def _ask(
        self, plan: Plan | None, proxies: Mapping[int, ClientProxy]
    ) -> list[tuple[ClientProxy, Parameters, dict[str, Scalar]]]:
        """Return proxy, parameters and config of everyone who is asked."""
        if plan is None:
            return []
        self._asked = {proxies[partition].cid: partition for partition in plan.arrays}
        different = {id(arrays): arrays for arrays in plan.arrays.values()}
        parameters = {
            key: self._flower.ndarrays_to_parameters(arrays) for key, arrays in different.items()
        }
        return [
            (proxies[partition], parameters[id(arrays)], dict(plan.config))
            for partition, arrays in plan.arrays.items()
        ]

    def _read(
        self,
        replies: Mapping[str, tuple[int, Parameters, Mapping[str, Scalar]]],
        failures: Sequence[Any],
    ) -> tuple[dict[int, Reply], dict[int, Lost]]:
        """Return the readable replies by partition, and why the other clients have none."""
        good: dict[int, Reply] = {}
        lost: dict[int, Lost] = {}
        causes = "; ".join(sorted({str(f) for f in failures if isinstance(f, BaseException)}))
        for cid, partition in self._asked.items():
            if cid not in replies:
                lost[partition] = Lost(FAILED, brief(causes) or "no reply in time")
                continue
            n_samples, parameters, metrics = replies[cid]
            numbers = {**metrics, NUM_EXAMPLES: n_samples}
            try:
                limits = self.conversation.limits
                good[partition] = read_parts(parameters.tensors, numbers, limits)
            except Exception as error:
                lost[partition] = Lost(REFUSED, brief(str(error)))
        return good, lost
