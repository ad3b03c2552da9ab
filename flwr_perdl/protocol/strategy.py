"""The base of every strategy: Flower's Message API on one side, a protocol on the other."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from inspect import signature
from logging import INFO, WARNING
from typing import Any, ClassVar, TypeVar, Unpack

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flwr_perdl.core.checks import Matrix, check_count, check_function, check_kind, check_real
from flwr_perdl.core.repr import ShownAsCalled
from flwr_perdl.protocol.compat import log
from flwr_perdl.protocol.driver import Conversation, Plan
from flwr_perdl.protocol.options import (
    Options,
    ServerOptions,
    ServerSettings,
    refuse_unknown,
    spelled,
)
from flwr_perdl.protocol.progress import Show, check_verbose, shown
from flwr_perdl.protocol.records import (
    ANEW,
    ARRAYS,
    CONFIG,
    STEP,
    Reply,
    brief,
    error_of,
    read_reply,
    scalars,
    to_arrays,
    to_record,
    to_records,
)
from flwr_perdl.protocol.report import History, RoundReport, in_words
from flwr_perdl.protocol.request import (
    FAILED,
    REFUSED,
    Channel,
    Lost,
    Promised,
    Protocol,
    State,
    Summed,
    TooFewReplies,
)
from flwr_perdl.protocol.roster import settle

T = TypeVar("T")

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]

#: Seconds between looks for replies in a simulation.
_PULL_INTERVAL = 0.05


class ProtocolStrategy(ShownAsCalled, Strategy):
    """A Flower Strategy that drives the generator of its ``protocol`` method.

    A subclass sets its own options as public attributes, passes the rest on, and writes
    ``protocol``; there is nothing else to do.

    Parameters
    ----------
    **options
        See `ServerOptions`.

    Attributes
    ----------
    protocol_name : str
        Whose steps clients take, see `flwr_perdl.clients.step`; empty where they train and evaluate
        as in FedAvg.
    flags, labels : tuple of str
        Metrics of which a mean over clients says nothing. The aggregate of a flag is the number of
        clients where it is not zero; of a label it is the number of clients with each label, under
        ``"NAME_LABEL"``. A flag that ends with ``*`` stands for all names that begin so.

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
    flags: ClassVar[tuple[str, ...]] = (ANEW,)
    labels: ClassVar[tuple[str, ...]] = ()
    #: Whether another strategy's `start` may call this one's steps.
    _wrappable: ClassVar[bool] = True
    #: What a run promises of privacy, for all of its sums; None: nothing.
    privacy: Promised | None = None
    #: How what requests declare is summed, where the server is to get no single reply.
    _sums: Callable[[Summed], Channel] | None = None
    #: The names of the arrays that a request has before the model's.
    _before_model: ClassVar[tuple[str, ...]] = ()
    #: How options are given that are fields of another one.
    _inside: ClassVar[Mapping[str, str]] = {}
    #: ``num_rounds`` where it is not given; None: as many as it takes.
    _default_rounds: ClassVar[int | None] = 3

    def __init__(self, **options: Unpack[ServerOptions]) -> None:
        parameters = signature(type(self).__init__).parameters.values()
        own = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)][1:]
        known = [*own, *ServerOptions.__annotations__]
        inside = {**spelled("server", ServerSettings), **self._inside}
        refuse_unknown(type(self).__name__, options, known, inside)
        self._options = Options.of(options)
        self._conversation: Conversation | None = None
        self._sent: list[tuple[int, Message]] | None = None
        #: A secure round's replies, as `read_replies` returns those of other rounds.
        self._gathered: tuple[dict[int, Reply], dict[int, Lost]] | None = None
        self._returned: ArrayRecord | None = None
        self._timeout = 3600.0
        self._num_rounds: int | None = None
        self._evaluate_config: ConfigRecord | None = None
        self._show = Show()
        self._last: RoundReport | None = None

    @abstractmethod
    def protocol(self, initial: list[Matrix], state: State | None) -> Protocol:
        """Return the protocol's generator (see `flwr_perdl.protocol.request`).

        Parameters
        ----------
        initial : list of ndarray
            The arrays that the user started the strategy with, possibly none.
        state : mapping of str to ndarray, or None
            The state of the request to begin with; None for a fresh start.
        """

    def check_evaluation(self, reply: Reply, model: list[Matrix]) -> None:
        """Raise a ValueError if a reply to an evaluation is wrong; a subclass's to say.

        Parameters
        ----------
        reply : Reply
            The client's number of examples and metrics.
        model : list of ndarray
            What was evaluated.
        """

    @property
    def options(self) -> Options:
        """The server's options, complete."""
        return self._options

    @property
    def history(self) -> list[RoundReport]:
        """What happened so far: one report per training round and per evaluation."""
        return History() if self._conversation is None else self._conversation.run.history

    @property
    def client_names(self) -> dict[int, str]:
        """How reports call the clients, by partition: the name that each sent, else its number.

        Where several have one name, the number is before it.
        """
        if self._conversation is None:
            return {}
        run, roster = self._conversation.run, self._conversation.roster
        return dict(sorted({**run.names, **{p: roster.called(p) for p in roster.names}}.items()))

    def settings(self) -> dict[str, Any]:
        """Return the strategy's own options by name."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def open(self, initial: list[Matrix], names: Iterable[str] = ()) -> Conversation:
        """Begin a run (or take it up from its checkpoint) and return its conversation."""
        self._returned = None
        self._conversation = Conversation(self, initial, names)
        return self._conversation

    # Flower's interface --------------------------------------------------------------------

    def summary(self) -> None:
        """Log the strategy's options that are not the defaults."""
        own = signature(type(self).__init__).parameters.items()
        defaults = {**{name: one.default for name, one in own}, **vars(Options())}
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
        should_stop: Callable[[int, Result], bool] | None = None,
        *,
        verbose: int | str | None = None,
    ) -> Result:
        """Run the protocol for ``num_rounds`` communication rounds.

        As `flwr.serverapp.strategy.Strategy.start` of Flower 1.43, with any version; a resumed
        run does not ask the clients for its finished rounds again.

        Parameters
        ----------
        grid : Grid
            The way to the clients.
        initial_arrays : ArrayRecord, optional
            What the protocol starts from; many need none.
        num_rounds : int, optional
            Communication rounds in all, those of a run that is resumed included: 3 by default, for
            `NeighborRelay` its ``exchanges``.
        timeout : float, default 3600
            Seconds to wait for the replies of a phase; None: as long as it takes.
        train_config, evaluate_config : ConfigRecord, optional
            What the clients' ``config`` has besides what the protocol sends. A subclass that
            overrides `configure_train` may change it from round to round.
        evaluate_fn : callable, optional
            ``(server_round, arrays) -> MetricRecord or None``: evaluation at the server.
        should_stop : callable, optional
            ``(server_round, result) -> bool``, called after each round with the result so far. The
            run ends when it returns true. A resumed run first calls it for the rounds that are
            done, with their metrics and the last arrays, so that it can count.
        verbose : {0, 1, 2, "quiet", "lines", "log", "bar"}, optional
            0, "quiet": warnings, which are always logged. 1, "lines": also a line per round. 2,
            "log": Flower's lines, which say what a deployment waits for. "bar": a progress bar. By
            default 1 where all clients are in this process (`InProcessGrid`), else 2.

        Raises
        ------
        ValueError, TypeError
            If an argument breaks its rule, among them a ``num_rounds`` after which there would be
            no result, without a ``checkpoint_dir`` from which
            ``ServerSettings(resume=True)`` goes on.
        TooFewReplies
            If fewer than ``min_clients`` good replies come in a round.
        """
        initial = ArrayRecord() if initial_arrays is None else initial_arrays
        configs, functions = (train_config, evaluate_config), (evaluate_fn, should_stop)
        mode = _check_start(grid, initial, timeout, configs, functions, verbose)
        least = 1 if len(initial) else self._least_rounds()
        rounds = (self._default_rounds or least) if num_rounds is None else num_rounds
        check_count("num_rounds", rounds, 1)
        if rounds < least and self._options.checkpoint_dir is None:
            raise ValueError(
                f"num_rounds must be at least {least} for these settings, got {rounds}: there is "
                "no result before, and no checkpoint_dir keeps the run to go on with."
            )
        self._timeout, self._evaluate_config, self._num_rounds = timeout, evaluate_config, rounds
        conversation = self.open(to_arrays(initial), initial)
        if rounds < conversation.run.done:
            raise ValueError(
                f"num_rounds must be at least the {conversation.run.done} rounds that the run to "
                f"resume has done, got {rounds}."
            )
        # From here on whatever ends the run is written to its events, also an interrupt.
        conversation.begin()
        getattr(grid, "begin_run", lambda: None)()  # only an InProcessGrid has it
        try:
            with (
                poll_faster(grid),
                shown(mode, type(self).__name__, self._shown_rounds(rounds)) as self._show,
            ):
                if hasattr(grid, "on_reply"):  # an InProcessGrid
                    grid.on_reply = self._show.replies
                result = self._run_rounds(
                    grid,
                    initial,
                    rounds,
                    train_config or ConfigRecord(),
                    evaluate_config or ConfigRecord(),
                    None if evaluate_fn is None else self._remembering(evaluate_fn),
                    should_stop,
                )
        except BaseException as error:
            conversation.end(error)
            raise
        conversation.end()
        if not conversation.run.model and conversation.run.done < least:
            log(
                WARNING,
                "The run has no result yet: %d of the %d rounds that it takes are done. A strategy "
                "with ServerSettings(resume=True) goes on from its checkpoint.",
                *(conversation.run.done, least),
            )
        result.arrays = self._presented()
        return result

    def _presented(self) -> ArrayRecord:
        """Return the model as `start` returns it: what loads into the user's own."""
        run = self._running().run
        return to_record(run.model, run.array_names)

    def _evaluated(self, arrays: ArrayRecord) -> dict[str, ArrayRecord]:
        """Return what ``evaluate_fn`` gets, by what is added to its metrics' names."""
        return {"": arrays}

    def _run_rounds(
        self,
        grid: Grid,
        arrays: ArrayRecord,
        num_rounds: int,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
        evaluate_fn: EvaluateFn | None,
        should_stop: Callable[[int, Result], bool] | None,
    ) -> Result:
        """Take the rounds as Flower's `start` does, whose loop cannot end early before 1.43."""
        result, resumed, began = Result(), self._running().run.done, time.monotonic()
        log(INFO, "Starting %s strategy for %d rounds:", type(self).__name__, num_rounds)
        self.summary()
        for round_ in range(num_rounds + 1):  # before the first one the server evaluates
            if round_:
                log(INFO, "")
                log(INFO, "[ROUND %s/%s]", round_, num_rounds)
                asked = self.configure_train(round_, arrays, train_config, grid)
                replies = grid.send_and_receive(messages=asked, timeout=self._timeout)
                model, metrics = self.aggregate_train(round_, replies)
                if model is not None:
                    arrays = result.arrays = model
                self._note("Training", result.train_metrics_clientapp, round_, metrics)
                asked = self.configure_evaluate(round_, arrays, evaluate_config, grid)
                replies = grid.send_and_receive(messages=asked, timeout=self._timeout)
                metrics = self.aggregate_evaluate(round_, replies)
                self._note("Evaluation", result.evaluate_metrics_clientapp, round_, metrics)
            if evaluate_fn is not None:
                metrics = evaluate_fn(round_, arrays)
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

    def _tell(self, report: RoundReport) -> None:
        """Show what happened in an exchange."""
        self._last, words = report, self._in_words(report)
        self._show(report, self._round_of(report), words)

    def _in_words(self, report: RoundReport) -> list[str]:
        """Return what the log says of an exchange."""
        return in_words(report, self.flags, self.labels)

    def _round_of(self, report: RoundReport) -> int:
        """Return the round that users count, 0 or less before the first one is over."""
        return report.round

    def _shown_rounds(self, rounds: int) -> int:
        """Return how many rounds users count."""
        return rounds

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
                what = f"Round {over} of {self._shown_rounds(0)}"
        said += [f"{name} {value}" for name, value in metrics.items() if name not in known]
        if said:
            log(INFO, "\t└──> %s: %s", what, ", ".join(said))
        found[round_], self._last = metrics, None

    def _remembering(self, evaluate_fn: EvaluateFn) -> EvaluateFn:
        """Return ``evaluate_fn`` that answers for rounds before the resumed one from memory.

        Where there is no model yet, it is not called; where there are several, once for each.
        """
        conversation = self._running()
        resumed = conversation.run.done

        def evaluate(round_: int, arrays: ArrayRecord) -> MetricRecord | None:
            if not len(arrays):
                return None
            if round_ in conversation.run.server_metrics:
                return MetricRecord(conversation.run.server_metrics[round_])
            if round_ < resumed:  # the model at hand is a later one
                return None
            found: dict[str, Any] = {}
            for ending, model in self._evaluated(arrays).items():
                record = evaluate_fn(round_, model)
                found |= {f"{name}{ending}": value for name, value in (record or {}).items()}
            if not found:
                return None
            conversation.measured(round_, found)
            return MetricRecord(found)

        return evaluate

    def _least_rounds(self) -> int:
        """Return after how many rounds there is a result, where no initial arrays are given."""
        return 1

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask this round's question of the sampled clients."""
        if self._conversation is None and not self._wrappable:
            raise ValueError(f"strategy must be started with its own start, got {_WRAPPED}.")
        conversation = self._conversation or self.open(to_arrays(arrays), arrays)
        self._sent = self._gathered = None
        self._check_returned(arrays)
        if server_round <= conversation.run.done:
            log(INFO, "configure_train: this round was finished before; nobody is asked again")
            return []
        nodes = self._present(grid)
        plan = conversation.plan(server_round, list(nodes))
        if plan is None:
            return []
        self._log_asked("configure_train", plan, nodes, grid)
        messages = self._ask(plan, nodes, MessageType.TRAIN, config)
        secure = None if conversation.request is None else conversation.request.secure
        if secure is None:
            return messages
        self._gathered = secure.gather(
            grid,
            self._sent or [],
            server_round,
            limits=conversation.limits,
            timeout=self._timeout,
        )
        return []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Hand the good replies to the protocol and return its new model."""
        conversation = self._running()
        if self._sent is not None:
            limits, names = conversation.limits, conversation.run.array_names
            good, lost = self._gathered or read_replies(
                self._sent, replies, lambda reply: read_reply(reply.content, limits, names=names)
            )
            _log_received("aggregate_train", good, lost)
            report: RoundReport | None = conversation.conclude(server_round, good, lost)
        else:
            report = conversation.past(server_round, evaluation=False)
        if report is None:
            return None, None
        self._tell(report)
        self._returned = self._presented()
        return self._returned, MetricRecord(dict(report.aggregate))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask the sampled clients to evaluate the model."""
        conversation = self._running()
        self._sent = None
        if not conversation.evaluates(server_round):
            return []
        self._check_returned(arrays)
        nodes = self._present(grid)
        plan = conversation.plan_evaluation(server_round, list(nodes), scalars(config))
        self._log_asked("configure_evaluate", plan, nodes, grid)
        return self._ask(plan, nodes, MessageType.EVALUATE, config)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the means (of flags and labels, the counts) of the clients' evaluation metrics."""
        conversation = self._running()
        if self._sent is not None:
            limits = conversation.limits
            good, lost = read_replies(
                self._sent,
                replies,
                lambda reply: read_reply(reply.content, limits, with_arrays=False),
            )
            _log_received("aggregate_evaluate", good, lost)
            report = conversation.conclude_evaluation(server_round, good, lost)
        else:
            report = conversation.past(server_round, evaluation=True)
        if report is None:
            return None
        self._tell(report)
        return MetricRecord(dict(report.aggregate))

    def _check_returned(self, arrays: ArrayRecord) -> None:
        """Refuse a model that is not the one that the last aggregation returned.

        A protocol goes on from its own state: what a wrapper changes, as Flower's strategies for
        central differential privacy do when they add noise, would never reach a client.
        """
        known = self._returned
        if known is None or known is arrays or _equal(to_arrays(known), to_arrays(arrays)):
            return
        raise ValueError(
            f"arrays must be those that aggregate_train returned, got others: {_WRAPPED}; another "
            "run wants another strategy."
        )

    # Messages ------------------------------------------------------------------------------

    def _running(self) -> Conversation:
        """Return the conversation of the run that is on."""
        if self._conversation is None:
            raise RuntimeError("a strategy must be started before it can aggregate.")
        return self._conversation

    def _present(self, grid: Grid) -> dict[int, int]:
        """Return the present clients' node ids by partition; new nodes are asked who they are."""
        roster = self._running().roster
        first = not roster.names
        if first:
            await_nodes(grid, self._options)
        ids = sorted(grid.get_node_ids())
        lost = self._ask_who(grid, roster.unknown(ids), "new")
        self._ask_who(grid, roster.contested(ids), "known")
        present, wanted = roster.present(ids), self._options.num_clients or 0
        if first and roster.uncounted:
            log(
                WARNING,
                "Nothing limits further runs at %s: without a state-dir in its node config a "
                "client counts what it spends of privacy within one run of Flower.",
                ", ".join(map(roster.label, sorted(roster.uncounted))),
            )
        if first and lost and len(present) < wanted and not self._options.allow_fewer:
            begin = "; with ServerSettings(allow_fewer=True) the run begins without the others"
            raise TooFewReplies(
                f"{len(present)} client(s) have said who they are, fewer than num_clients={wanted}"
                f"{begin if len(present) >= self._options.min_clients else ''}"
                f"{roster.absence()}."
            )
        return present

    def _ask_who(self, grid: Grid, nodes: list[int], kind: str) -> dict[int, Lost]:
        """Ask nodes who they are, note their answers, and return why others have none."""
        if not nodes:
            return {}
        roster = self._running().roster
        questions = [
            (node, Message(RecordDict({CONFIG: ConfigRecord()}), node, MessageType.QUERY))
            for node in nodes
        ]
        patience = self._timeout  # None: as long as it takes
        if roster.names:  # who has not answered before is not waited for as long again
            patience = self._options.node_timeout
        elif patience is not None:  # workers may yet be starting
            patience = max(patience, self._options.node_timeout)
        if not _fixed(grid):
            log(INFO, "Asking %d %s node(s) who they are, %s.", len(nodes), kind, _within(patience))
        replies = grid.send_and_receive([message for _, message in questions], timeout=patience)
        answers, lost = read_replies(questions, replies, _properties)
        for node in nodes:
            try:
                if node in lost:
                    raise ValueError(lost[node].reason)
                roster.enrol(node, answers[node])
            except ValueError as error:
                roster.refuse(node, str(error))
        return lost

    def _log_asked(self, phase: str, plan: Plan, nodes: Mapping[int, int], grid: Grid) -> None:
        """Log a phase as Flower's own strategies do, and in deployments what is waited for."""
        step = "" if phase == "configure_evaluate" else f" for step {plan.config[STEP]!r}"
        wait = "" if _fixed(grid) else f"; waiting for their replies, {_within(self._timeout)}"
        sampled, all_of_them = len(plan.arrays), len(nodes)
        log(INFO, "%s: Sampled %d nodes (out of %d)%s%s", phase, sampled, all_of_them, step, wait)

    def _ask(
        self, plan: Plan, nodes: Mapping[int, int], message_type: str, config: ConfigRecord
    ) -> list[Message]:
        """Return a message per client; as in Flower's own strategies they share their content."""
        shared = ConfigRecord({**config, **plan.config})
        contents: dict[int, RecordDict] = {}
        self._sent = []
        names = self._running().run.array_names
        records = to_records(plan.arrays, names, (*self._before_model, *names))
        for partition, record in records.items():
            if id(record) not in contents:
                contents[id(record)] = RecordDict({ARRAYS: record, CONFIG: shared})
            message = Message(contents[id(record)], nodes[partition], message_type)
            self._sent.append((partition, message))
        return [message for _, message in self._sent]


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
    return check_verbose(verbose, local=_fixed(grid))


#: Why a strategy around ours is refused.
_WRAPPED = (
    "a strategy around it, as Flower's DifferentialPrivacy wrappers are (the option privacy of "
    "PerMA and FedX adds noise to sums)"
)


@contextmanager
def poll_faster(grid: Grid) -> Iterator[None]:
    """Have Flower's simulation engine look for replies twenty times a second, instead of ten."""
    engine: Any = grid
    interval: float | None = getattr(grid, "pull_interval", None)
    if interval is None:  # a grid of another kind
        yield
        return
    engine.pull_interval = min(interval, _PULL_INTERVAL)
    try:
        yield
    finally:
        engine.pull_interval = interval


def await_nodes(grid: Grid, options: Options) -> int:
    """Wait until the nodes of a run have registered (see `settle`), and return their number.

    Examples
    --------
    >>> from flwr_perdl.clients import client_app
    >>> from flwr_perdl.simulations import InProcessGrid
    >>> from flwr_perdl.strategies import PerMA, await_nodes
    >>> grid = InProcessGrid(client_app(lambda context: None), 3)
    >>> await_nodes(grid, PerMA(num_clients=3).options)
    3
    """
    check_kind("grid", grid, Grid, "a Grid")
    allowed = check_kind("options", options, Options, "a strategy's options").clients_by_node

    def count() -> int:
        return sum(allowed is None or node in allowed for node in grid.get_node_ids())

    return settle(count, options, fixed=_fixed(grid))


def _fixed(grid: Grid) -> bool:
    """Whether all nodes of a grid are there from the start, and answer at once."""
    return bool(getattr(grid, "nodes_are_fixed", False))


def _within(seconds: float | None) -> str:
    return "as long as it takes" if seconds is None else f"at most {seconds:g} s"


def read_replies(
    sent: Sequence[tuple[int, Message]], replies: Iterable[Message], read: Callable[[Message], T]
) -> tuple[dict[int, T], dict[int, Lost]]:
    """Read the replies: return them by who was asked, and why others have no good reply.

    The message that a reply answers identifies the sender: the source of an error may be the
    server's own id.
    """
    asked = {message.metadata.message_id: who for who, message in sent}
    answers: dict[int, Message] = {}
    for reply in replies:
        who = asked.get(reply.metadata.reply_to_message_id)
        if who is None or who in answers:
            what = "a second reply to one message" if who in answers else "a reply to no message"
            why = error_of(reply)
            node = reply.metadata.src_node_id
            log(WARNING, "Left out %s, from node %d%s", what, node, f": {why}" if why else ".")
            continue
        answers[who] = reply
    good: dict[int, T] = {}
    lost: dict[int, Lost] = {}
    for who, _ in sent:
        if who not in answers:
            lost[who] = Lost(FAILED, "no reply in time")
            continue
        if (why := error_of(answers[who])) is not None:
            lost[who] = Lost(FAILED, why, answers[who].error.code)
            continue
        try:
            good[who] = read(answers[who])
        except Exception as error:
            lost[who] = Lost(REFUSED, brief(str(error)))
    return good, lost


def _log_received(phase: str, good: Sized, lost: Sized) -> None:
    """Log the replies of a phase as Flower's own strategies do."""
    log(INFO, "%s: Received %d results and %d failures", phase, len(good), len(lost))


def _properties(answer: Message) -> Mapping[str, Any]:
    """Return the properties that a node reports."""
    record = answer.content.get(CONFIG)
    if not isinstance(record, ConfigRecord):
        raise ValueError(f"no ConfigRecord {CONFIG!r}")
    return record


def _equal(some: list[Matrix], others: list[Matrix]) -> bool:
    pairs = zip(some, others, strict=False)
    return len(some) == len(others) and all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)
