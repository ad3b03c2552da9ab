"""The base class of all strategies, between Flower's Message API and a protocol."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from logging import INFO, WARNING
from math import prod
from types import MappingProxyType
from typing import Any, ClassVar, Unpack

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flwr_perdl.core.checks import (
    Matrix,
    check_count,
    check_function,
    check_kind,
    check_list,
    check_real,
)
from flwr_perdl.core.repr import ShownAsCalled
from flwr_perdl.protocol.compat import log, new_record, poll_faster
from flwr_perdl.protocol.driver import Plan, ProtocolRun
from flwr_perdl.protocol.options import (
    Needs,
    ServerOptions,
    ServerSettings,
    check_support,
    refuse_unknown,
    spell_fields,
)
from flwr_perdl.protocol.part import OWN_RANK, Part, own_parts
from flwr_perdl.protocol.records import (
    ARRAYS,
    CLUSTER,
    CONFIG,
    PINNED_KEYS,
    Reply,
    Scalar,
    check_group,
    read_reply,
    scalars,
    to_arrays,
    to_record,
    to_records,
)
from flwr_perdl.protocol.report import (
    History,
    Models,
    RoundReport,
    Show,
    check_verbose,
    in_words,
    show_run,
)
from flwr_perdl.protocol.request import (
    Lost,
    Protocol,
    State,
    TooFewReplies,
    read_replies,
)
from flwr_perdl.protocol.roster import LocalGrid, describe_timeout

EvaluateFn = Callable[..., MetricRecord | None]
StopFn = Callable[[int, Result], bool]


class ProtocolStrategy(ShownAsCalled, Strategy):
    """Base class of all strategies: a Flower Strategy that runs the generator of its ``protocol``.

    A subclass sets its own options as public attributes, passes the others on, and writes
    ``protocol``.

    Parameters
    ----------
    **options
        See `ServerOptions`.

    Attributes
    ----------
    protocol_name : str
        The protocol whose steps the clients take, see `flwr_perdl.clients.step`; empty where they
        train and evaluate as in FedAvg.
    flags, labels : tuple of str
        Metrics for which a mean over clients is meaningless. A flag is aggregated to the number of
        clients where it is not zero, as is a metric of the library, which begins with ``"perdl."``;
        a label to the number of clients with each value, as ``"NAME_LABEL"``. The label
        ``"cluster"`` says which of the protocol's models is the client's.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr.client import NumPyClient
    >>> from flwr_perdl.clients import client_app
    >>> from flwr_perdl.simulations import InProcessGrid
    >>> from flwr_perdl.strategies import ProtocolStrategy, Request
    >>> class FederatedMean(ProtocolStrategy):
    ...     def protocol(self, initial, state):
    ...         mean = np.zeros(2)
    ...         while True:
    ...             replies = yield Request("mean", [mean], state={"mean": mean})
    ...             mean = np.mean([reply.arrays[0] for reply in replies.values()], axis=0)
    >>> class Client(NumPyClient):
    ...     def fit(self, parameters, config):
    ...         return [np.array([1.0, 3.0])], 1, {}
    >>> grid = InProcessGrid(client_app(lambda context: Client()), 3)
    >>> strategy = FederatedMean()
    >>> result = strategy.start(grid, num_rounds=2)
    >>> [report.step for report in strategy.history]
    ['mean', 'mean']
    """

    protocol_name: ClassVar[str] = ""
    flags: ClassVar[tuple[str, ...]] = ()
    labels: ClassVar[tuple[str, ...]] = ()
    #: Metrics that lines and log leave out.
    _not_in_words: ClassVar[tuple[str, ...]] = ()
    #: How its run's models are read.
    _reads: Models = Models()
    #: The models, where they are those that clients have sent at the end; and whose is which.
    _sent_models: list[list[Matrix]] | None = None
    _sent_by: Mapping[int, ArrayRecord] = MappingProxyType({})
    #: The step in which clients make models of their own and measure them, after all others.
    _last_step: str = ""
    #: What it does not support, and why: options, and what docs/which-algorithm.md's table has.
    unsupported: ClassVar[Mapping[str, str]] = {}
    #: What options need of others.
    needs: ClassVar[tuple[Needs, ...]] = ()
    #: How many models the initial arrays are stacks of, if not one.
    _n_stacked: int = 0
    #: Whether another strategy's `start` may call this one's steps.
    _wrappable: ClassVar[bool] = True
    #: What attributes are called as options, properties too; "": they are none; "*": their fields.
    _called_as: ClassVar[Mapping[str, str]] = {}
    #: How options are given that are fields of another one.
    _inside: ClassVar[Mapping[str, str]] = {}
    #: ``num_rounds`` where it is not given; None: as many as it takes.
    _default_rounds: ClassVar[int | None] = 3
    #: After how many rounds there is a result, where no initial arrays are given; and how many come
    #: before the first one that users count.
    _least_rounds, _ahead = 1, 0
    #: What can be done where too few clients are there, after the options that can.
    _if_fewer: ClassVar[str] = ""
    #: What every request's config says besides.
    _told: Mapping[str, Scalar] = MappingProxyType({})
    #: Whether clients' messages are sealed; how often clients train once the run is over; whether
    #: they choose among models, by their evaluation.
    sealed, fine_tune, _chooses = False, 0, False
    #: What follows the last round, and adds what it measures.
    _after_rounds: Sequence[Callable[[Grid, Result], object]] = ()
    #: What the lines of a run call it, if not by its class.
    _title: str = ""
    #: The metric of an exchange that a bar shows, if not its first one.
    _bar_metric: str = ""
    #: What a run has come to that ``should_stop`` has ended and the next `start` takes up again.
    _paused: Result | None = None

    def __init__(self, *given: Part, **options: Unpack[ServerOptions]) -> None:
        parameters = signature(type(self).__init__).parameters.values()
        own = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)][1:]
        known = [*own, *ServerOptions.__annotations__]
        inside = {**spell_fields("server", ServerSettings), **self._inside}
        parts = [*check_list("parts", options.get("parts", ()))]
        check_support(self, {**options, "parts": parts or None})
        refuse_unknown(type(self).__name__, options, known, inside)
        options["parts"] = [*given, *parts]
        self._options = ServerSettings.of(options)
        self._run: ProtocolRun | None = None
        self._grid: Grid | None = None
        self._sent: list[tuple[int, Message]] | None = None
        #: A secure round's replies, as `read_replies` returns those of other rounds.
        self._gathered: tuple[dict[int, Reply], dict[int, Lost]] | None = None
        self._returned: ArrayRecord | None = None
        self._timeout = 3600.0
        self._num_rounds: int | None = None
        self._train_config: ConfigRecord | None = None
        self._evaluate_config: ConfigRecord | None = None
        self._show = Show()
        self._last: RoundReport | None = None

    def _options_with(self, **others: Any) -> dict[str, Any]:
        """Return the options by name, for `check_support`; some are not attributes."""
        own = [part for part in self._options.parts if part.rank == OWN_RANK]
        return {**vars(self), "parts": own or None, **others}

    @abstractmethod
    def protocol(self, initial: list[Matrix], state: State | None) -> Protocol:
        """Return the protocol's generator (see `flwr_perdl.protocol.request`).

        Parameters
        ----------
        initial : list of ndarray
            The arrays that the user started the strategy with, possibly none.
        state : mapping of str to ndarray, or None
            The state of the request to begin with; None for a fresh start.

        Returns
        -------
        Protocol
            A generator of requests.
        """

    def check_evaluation(self, reply: Reply, model: list[Matrix]) -> None:
        """Raise a ValueError if a reply to an evaluation is wrong: names none of the models.

        Parameters
        ----------
        reply : Reply
            The client's number of examples and metrics.
        model : list of ndarray
            What was evaluated.
        """
        if CLUSTER in self.labels and CLUSTER in reply.metrics:
            check_group(CLUSTER, reply, len(self._models))

    @property
    def options(self) -> ServerSettings:
        """All server options, defaults included."""
        return self._options

    @property
    def history(self) -> list[RoundReport]:
        """One report per training round and per evaluation so far."""
        return History() if self._run is None else self._run.record.history

    @property
    def client_names(self) -> dict[int, str]:
        """The clients' names in reports, by partition: the name that each sent, else its number.

        Duplicate names are prefixed with the number.
        """
        return {} if self._run is None else self._run.client_names

    def settings(self) -> dict[str, Any]:
        """Return the strategy's own options by name."""
        found: dict[str, Any] = {}
        for name in dict.fromkeys([*vars(self), *self._called_as]):
            called = self._called_as.get(name, "" if name.startswith("_") else name)
            if called:
                value = getattr(self, name)
                found |= vars(value) if called == "*" else {called: value}
        return found

    @property
    def model_names(self) -> Sequence[str]:
        """What the algorithm's arrays are called, of one model."""
        return self._running().names

    def open(self, initial: list[Matrix], names: Iterable[str] = ()) -> ProtocolRun:
        """Begin a run, or take it up from its checkpoint."""
        self._returned = None
        self._run = run = ProtocolRun(self, initial, names, self._num_rounds)
        run.begin()
        return run

    # Flower's interface --------------------------------------------------------------------

    def summary(self) -> None:
        """Log the strategy's options that are not the defaults."""
        own = signature(type(self).__init__).parameters.items()
        defaults = {**{name: one.default for name, one in own}, **vars(ServerSettings())}
        for name, value in {**self.settings(), **vars(self._options)}.items():
            if str(value) != str(defaults.get(name)):  # arrays have no one answer to !=
                log(INFO, "\t├──> %s: %s", name, value)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
        should_stop: StopFn | None = None,
        *,
        verbose: int | str | None = None,
    ) -> Result:
        """Run the protocol for ``num_rounds`` communication rounds.

        The arguments are those of `flwr.serverapp.strategy.Strategy.start`, and ``should_stop`` and
        ``verbose``, with every version of Flower. A resumed run does not repeat finished rounds.

        Parameters
        ----------
        grid : Grid
            The connection to the clients.
        initial_arrays : ArrayRecord, optional
            The initial model; many protocols need none.
        num_rounds : int, optional
            Total communication rounds, including those before a resume: by default 3, for
            `NeighborRelay` its ``exchanges``.
        timeout : float, default 3600
            Seconds to wait for the replies of a phase; None: no limit.
        train_config, evaluate_config : ConfigRecord, optional
            Added to the config that clients receive. A subclass that overrides `configure_train`
            may change it from round to round.
        evaluate_fn : callable, optional
            ``(server_round, arrays) -> MetricRecord or None``: evaluation at the server. With a
            third argument, without a default or called ``cluster``, it is told the number of the
            cluster whose model it gets; None where there are no clusters.
        should_stop : callable, optional
            ``(server_round, result) -> bool``, called after each round with the result so far. The
            run ends when it returns true. A resumed run first calls it for the finished rounds,
            with their metrics and the last arrays.
        verbose : {0, 1, 2, "quiet", "lines", "log", "bar"}, optional
            0, "quiet": warnings only. 1, "lines": also a line per round. 2, "log": Flower's log,
            which says what a deployment is waiting for. "bar": a progress bar. By default 1 if all
            clients are in this process (`InProcessGrid`), else 2.

        Returns
        -------
        Result
            The final arrays, and the metrics of every round.

        Raises
        ------
        ValueError, TypeError
            If an argument breaks its rule, such as ``num_rounds`` too small for a result without a
            ``checkpoint_dir`` to resume from.
        TooFewReplies
            If fewer than ``min_clients`` good replies come in a round.
        """
        initial = ArrayRecord() if initial_arrays is None else initial_arrays
        configs, functions = (train_config, evaluate_config), (evaluate_fn, should_stop)
        mode = _check_start(grid, initial, timeout, configs, functions, verbose)
        rounds = self._check_rounds(num_rounds, initial)
        self._timeout, self._evaluate_config, self._num_rounds = timeout, evaluate_config, rounds
        self._train_config, self._grid = train_config, grid
        run = self.open(to_arrays(initial), initial) if self._paused is None else self._running()
        name = self._title or type(self).__name__
        show = show_run(mode, name, rounds - self._ahead, self._bar_metric)
        run.log_begin(evaluates=evaluate_fn is not None)
        with poll_faster(grid), show as self._show:
            if isinstance(grid, LocalGrid):
                grid.begin_run(self._show.replies)
            result = self._run_rounds(
                grid,
                initial,
                rounds,
                train_config or ConfigRecord(),
                evaluate_config or ConfigRecord(),
                evaluate_fn,
                should_stop,
            )
            for step in self._after_rounds:
                step(grid, result)
            run.warn_of_evaluations()
        done, least = run.record.done, self._least_rounds
        if not run.record.model and done < least:
            log(
                WARNING,
                "The run has no result yet: %d of the %d rounds that it needs are done. Continue "
                "from its checkpoint with ServerSettings(resume=True).",
                *(done, least),
            )
        result.arrays = self._presented()
        return result

    def _check_rounds(self, num_rounds: int | None, initial: ArrayRecord) -> int:
        """Return the number of rounds; a ValueError if there would be no result after them."""
        least = 1 if len(initial) else self._least_rounds
        rounds = (self._default_rounds or least) if num_rounds is None else num_rounds
        check_count("num_rounds", rounds, 1)
        if rounds < least and self._options.checkpoint_dir is None:
            raise ValueError(
                f"num_rounds must be at least {least} for these settings, got {rounds}: there is "
                "no result before, and no checkpoint_dir keeps the run to go on with."
            )
        return rounds

    # What it has learned ---------------------------------------------------------------------

    def _array_names(self) -> list[str]:
        """Return the names of a model's arrays."""
        return self._reads.names_in(self._running().record)

    @property
    def _models(self) -> list[list[Matrix]]:
        """The models that the server has, of which a client takes one."""
        found = self._sent_models
        return self._reads.split(self._running().record) if found is None else found

    def _named(self, model: Sequence[Matrix]) -> ArrayRecord:
        """Return one of the models, with the names of its arrays."""
        return self._reads.named(model, self._running().record)

    def _members(self) -> dict[int, int]:
        """Return which model is each client's, by partition."""
        record, n = self._running().record, len(self._models)
        return self._reads.members(record, n, self.client_names)

    def _found(self) -> tuple[list[list[Matrix]], dict[int, int]]:
        """Return the models of the result, and which of them is each client's."""
        models, members = self._models, self._members()
        if not self._reads.drops_empty or not members:
            return models, members
        numbers = sorted({*members.values()})
        return [models[j] for j in numbers], {p: numbers.index(j) for p, j in members.items()}

    def _presented(self) -> ArrayRecord:
        """Return the model as `start` returns it, of several the one that most clients have."""
        record, models = self._running().record, self._models
        if self._reads.stack is not None:
            return to_record(record.model, record.array_names)
        own = [*self._members().values()] if len(models) > 1 else []
        most = max(range(len(models)), key=own.count, default=0)
        return to_record(models[most] if models else [], record.array_names)

    def _evaluated(self, arrays: ArrayRecord) -> dict[int | None, ArrayRecord]:
        """Return what ``evaluate_fn`` gets, by cluster."""
        if not self._reads.numbered:
            return {None: arrays}
        return dict(enumerate(map(self._named, self._found()[0])))

    def _run_rounds(
        self,
        grid: Grid,
        arrays: ArrayRecord,
        num_rounds: int,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
        evaluate_fn: EvaluateFn | None,
        should_stop: StopFn | None,
    ) -> Result:
        """Take the rounds as Flower's `start` does, whose loop cannot end early up to 1.42."""
        resumed, began, first = self._running().record.done, time.monotonic(), 0
        result = Result()
        if self._paused is not None:
            result, arrays, first = self._paused, self._returned or arrays, 1 + resumed
        log(INFO, "Starting %s strategy for %d rounds:", type(self).__name__, num_rounds)
        self.summary()
        for round_ in range(first, num_rounds + 1):  # before the first one the server evaluates
            if round_:
                log(INFO, "")
                log(INFO, "[ROUND %s/%s]", round_, num_rounds)
                arrays = self._train(grid, round_, arrays, train_config, result)
                self._evaluate(grid, round_, arrays, evaluate_config, result)
            if evaluate_fn is not None:
                metrics = self._evaluate_at_server(evaluate_fn, round_, arrays, resumed)
                if metrics is not None:
                    log(INFO, "\t└──> Server's evaluation: %s", metrics)
                    result.evaluate_metrics_serverapp[round_] = metrics
            self._show.end_round()
            over = round_ and should_stop is not None and should_stop(round_, result)
            if over and round_ >= resumed:
                log(INFO, "should_stop ends the run after round %d.", round_)
                break
        log(INFO, "Strategy execution finished in %.2fs", time.monotonic() - began)
        log(INFO, "Final results:\n%s", result)
        return result

    def _train(
        self, grid: Grid, round_: int, arrays: ArrayRecord, config: ConfigRecord, result: Result
    ) -> ArrayRecord:
        """Take a round's training, and return the model after it."""
        asked = self.configure_train(round_, arrays, config, grid)
        replies = grid.send_and_receive(messages=asked, timeout=self._timeout)
        model, metrics = self.aggregate_train(round_, replies)
        if model is not None:
            arrays = result.arrays = model
        self._note("Training", result.train_metrics_clientapp, round_, metrics)
        return arrays

    def _evaluate(
        self, grid: Grid, round_: int, arrays: ArrayRecord, config: ConfigRecord, result: Result
    ) -> None:
        """Have the clients evaluate the model after a round."""
        asked = self.configure_evaluate(round_, arrays, config, grid)
        replies = grid.send_and_receive(messages=asked, timeout=self._timeout)
        metrics = self.aggregate_evaluate(round_, replies)
        self._note("Evaluation", result.evaluate_metrics_clientapp, round_, metrics)

    def _tell(self, report: RoundReport) -> None:
        """Show what happened in an exchange."""
        self._last, words = report, self._in_words(report)
        self._show(report, self._round_of(report), words)

    def _in_words(self, report: RoundReport) -> list[str]:
        """Return what the log says of an exchange."""
        return in_words(report, self.labels, (*self.flags, *self._not_in_words))

    def _round_of(self, report: RoundReport) -> int:
        """Return the round that users count, 0 or less before the first one is over."""
        return report.round - self._ahead

    def _note(
        self, what: str, found: dict[int, MetricRecord], round_: int, metrics: MetricRecord | None
    ) -> None:
        """Log a round's metrics, also those that a subclass adds, and add them to the others'."""
        if metrics is None:
            return
        said, known, last = list[str](), set[str](), self._last
        if last is not None:
            said, known, over = self._in_words(last), {*last.aggregate}, self._round_of(last)
            if over != last.round:  # a round of the algorithm is over in a later exchange
                what = f"Round {over} of {(self._num_rounds or 0) - self._ahead}"
        said += [f"{name} {value}" for name, value in metrics.items() if name not in known]
        if said:
            log(INFO, "\t└──> %s: %s", what, ", ".join(said))
        found[round_], self._last = metrics, None

    def _evaluate_at_server(
        self, evaluate_fn: EvaluateFn, round_: int, arrays: ArrayRecord, resumed: int
    ) -> MetricRecord | None:
        """Return ``evaluate_fn``'s metrics; of rounds before the resumed one, from memory.

        Where there is no model yet, it is not called; where there are several, once for each.
        """
        run = self._running()
        if len(arrays) and round_ in run.record.server_metrics:
            return MetricRecord(run.record.server_metrics[round_])
        if not len(arrays) or round_ < resumed:  # the model at hand is a later one
            return None
        found, models = dict[str, Any](), self._evaluated(arrays)
        for cluster, model in models.items():
            said = evaluate_model(evaluate_fn, round_, model, cluster)
            ending = f"/cluster-{cluster}" if len(models) > 1 else ""
            found |= {f"{name}{ending}": value for name, value in (said or {}).items()}
        if found:
            run.measured(round_, found)
        return MetricRecord(found) if found else None

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask this round's question of the sampled clients."""
        if self._run is None and not self._wrappable:
            raise ValueError(f"strategy must be started with its own start, got {_WRAPPED}.")
        run = self._run or self.open(to_arrays(arrays), arrays)
        self._sent = self._gathered = None
        self._check_returned(arrays)
        if server_round <= run.record.done:
            log(INFO, "configure_train: this round was finished before; nobody is asked again")
            return []
        nodes = self._present(grid)
        plan = run.plan(server_round, list(nodes))
        if plan is None:
            return []
        self._log_asked("configure_train", plan, nodes, grid)
        messages = self._ask(plan, nodes, MessageType.TRAIN, config)
        secure = None if run.request is None else run.request.secure
        if secure is None:
            return messages
        self._gathered = secure.gather(
            grid, self._sent or [], server_round, limits=run.limits, timeout=self._timeout
        )
        return []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Hand the good replies to the protocol and return its new model."""
        report = self._conclude(server_round, replies, evaluation=False)
        if report is None:
            return None, None
        self._returned = self._presented()
        return self._returned, MetricRecord(dict(report.aggregate))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask the sampled clients to evaluate the model."""
        run = self._running()
        self._sent = self._gathered = None
        if not run.evaluates(server_round):
            return []
        self._check_returned(arrays)
        nodes = self._present(grid)
        plan = run.plan_evaluation(server_round, list(nodes), scalars(config))
        self._log_asked("configure_evaluate", plan, nodes, grid)
        return self._ask(plan, nodes, MessageType.EVALUATE, config)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the means (of flags and labels, the counts) of the clients' evaluation metrics."""
        report = self._conclude(server_round, replies, evaluation=True)
        return None if report is None else MetricRecord(dict(report.aggregate))

    def _conclude(
        self, round_: int, replies: Iterable[Message], *, evaluation: bool
    ) -> RoundReport | None:
        """Read the replies to what was sent, and return the report of the exchange, if any."""
        run = self._running()
        if self._sent is None:
            report = run.record.history.of(round_, evaluation=evaluation)
        else:
            limits, names = run.limits, () if evaluation else run.names

            def read(reply: Message) -> Reply:
                if evaluation:
                    return read_reply(reply.content, limits, with_arrays=False)
                return run.received(read_reply(reply.content, limits, names=names))

            good, lost = self._gathered or read_replies(self._sent, replies, read)
            phase = "aggregate_evaluate" if evaluation else "aggregate_train"
            log(INFO, "%s: Received %d results and %d failures", phase, len(good), len(lost))
            conclude = run.conclude_evaluation if evaluation else run.conclude
            report = conclude(good, lost)
        if report is not None:
            self._tell(report)
        return report

    def _check_returned(self, arrays: ArrayRecord) -> None:
        """Refuse a model that is not the one that the last aggregation returned.

        A protocol goes on from its own state: what a wrapper changes, as Flower's strategies for
        central differential privacy do when they add noise, would never reach a client.
        """
        known = self._returned
        if known is None or known is arrays or _are_equal(to_arrays(known), to_arrays(arrays)):
            return
        raise ValueError(
            f"arrays must be those that aggregate_train returned, got others: {_WRAPPED}; another "
            "run wants another strategy."
        )

    # Messages ------------------------------------------------------------------------------

    def _running(self) -> ProtocolRun:
        """Return the run that is on."""
        if self._run is None:
            raise RuntimeError("a strategy must be started before it can aggregate.")
        return self._run

    def _present(self, grid: Grid) -> dict[int, int]:
        """Return the node ids of the clients that may be asked, by partition."""
        try:
            nodes = self._running().roster.find(grid, self._timeout)
        except TooFewReplies as error:
            raise TooFewReplies(f"{error}{self._if_fewer}") from None
        unfit = {who: why for who in nodes if (why := self._unfit(who)) is not None}
        if not unfit:
            return nodes
        others = f" ({len(unfit)} of {len(nodes)} clients in all)" if len(unfit) > 1 else ""
        sentence = f"{next(iter(unfit.values()))}{others}."
        if len(nodes) - len(unfit) < self._options.min_clients:
            raise ValueError(sentence)
        log(WARNING, "Left out of this round: %s", sentence)
        return {who: node for who, node in nodes.items() if who not in unfit}

    def _unfit(self, partition: int) -> str | None:
        """Return why a client can take no part, by what it says of itself; None: it can."""
        roster, alone = self._running().roster, self.unsupported.get("private")
        if alone and partition in roster.private:
            label = f"{roster.label(partition)}, which keeps {roster.private[partition]}"
            return (
                f"clients of {type(self).__name__} must keep nothing private, since {alone}, got "
                f"{label}: remove keep_private, or private= of client_app"
            )
        if self._chooses and partition in roster.unable_to_evaluate:
            why = "clients must define evaluate, by which they choose among models, got none of"
        elif partition in roster.sealing and (self.fine_tune or not self.sealed):
            where = "with fine_tune" if self.sealed else "without sealed=True"
            why = (
                f"{PINNED_KEYS} must be left out of the node config {where}, since such a node "
                "answers sealed messages alone, got them at"
            )
        else:
            return None
        return f"{why} {roster.label(partition)}"

    def _log_asked(self, phase: str, plan: Plan, nodes: Mapping[int, int], grid: Grid) -> None:
        """Log a phase as Flower's own strategies do, and in deployments what is waited for."""
        step = "" if phase == "configure_evaluate" else f" for step {plan.step!r}"
        local = isinstance(grid, LocalGrid)
        wait = "" if local else f"; waiting for their replies, {describe_timeout(self._timeout)}"
        sampled, all_of_them = len(plan.arrays), len(nodes)
        log(INFO, "%s: Sampled %d nodes (out of %d)%s%s", phase, sampled, all_of_them, step, wait)

    def _ask(
        self, plan: Plan, nodes: Mapping[int, int], message_type: str, config: ConfigRecord
    ) -> list[Message]:
        """Return a message per client; as in Flower's own strategies they share their content."""
        run, told = self._running(), ConfigRecord({**config, **plan.config})
        made: dict[Any, tuple[RecordDict, int]] = {}
        self._sent = []
        records = to_records(plan.arrays, run.names_for)
        for partition, record in records.items():
            case = (id(record), *[part.case(partition) for part in run.parts])
            if case not in made:
                content = self._content(run, partition, record, told)
                arrays = content.array_records[ARRAYS].values()
                made[case] = content, sum(prod(array.shape) for array in arrays)
            content, run.sent_values[partition] = made[case]
            self._sent.append((partition, Message(content, nodes[partition], message_type)))
        return [message for _, message in self._sent]

    @staticmethod
    def _content(
        run: ProtocolRun, partition: int, record: ArrayRecord, told: ConfigRecord
    ) -> RecordDict:
        """Return a message's content, as the run's parts make it."""
        if not run.parts:
            return RecordDict({ARRAYS: record, CONFIG: told})
        arrays, config = dict(record), {**told, **own_parts(run.parts)}
        for part in run.parts:
            arrays, own = part.to_client(partition, arrays, run.asked)
            config |= own
        return RecordDict({ARRAYS: new_record(ArrayRecord, arrays), CONFIG: ConfigRecord(config)})


def evaluate_model(
    evaluate_fn: EvaluateFn, round_: int, model: ArrayRecord, cluster: int | None
) -> MetricRecord | None:
    """Return what ``evaluate_fn`` measures; it is told the cluster if it takes a third argument."""
    try:
        third = [*signature(evaluate_fn).parameters.values()][2:3]
    except (TypeError, ValueError):  # of a function that is not Python's
        third = []
    takes = any(
        one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
        and (one.default is one.empty or one.name == "cluster")
        for one in third
    )
    found = evaluate_fn(round_, model, *([cluster] if takes else []))
    kinds = (MetricRecord, Mapping, type(None))
    check_kind("what evaluate_fn returns", found, kinds, "a MetricRecord or None")
    return found


def _check_start(
    grid: Grid,
    initial_arrays: ArrayRecord,
    timeout: float | None,
    configs: Sequence[ConfigRecord | None],
    functions: Sequence[Callable[..., Any] | None],
    verbose: int | str | None,
) -> str:
    """Check what `ProtocolStrategy.start` takes, and return what is shown."""
    check_kind("grid", grid, Grid, "a Grid")
    check_kind("initial_arrays", initial_arrays, ArrayRecord, "an ArrayRecord or None")
    if timeout is not None:
        check_real("timeout", timeout, 0)
    for name, given in zip(("train_config", "evaluate_config"), configs, strict=True):
        check_kind(name, given, (ConfigRecord, type(None)), "a ConfigRecord or None")
    for name, function in zip(("evaluate_fn", "should_stop"), functions, strict=True):
        check_function(name, function)
    return check_verbose(verbose, local=isinstance(grid, LocalGrid))


#: Why a strategy around ours is refused.
_WRAPPED = (
    "a strategy around it, as Flower's DifferentialPrivacy wrappers are (the option privacy of "
    "PerMA and FedX adds noise to sums)"
)


def _are_equal(some: list[Matrix], others: list[Matrix]) -> bool:
    pairs = zip(some, others, strict=False)
    return len(some) == len(others) and all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)
