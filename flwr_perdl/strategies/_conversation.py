"""Driving a protocol: sampling, checking replies, reports, checkpoints; no messages here.

The adapters to Flower's two strategy interfaces only translate between their messages and this.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from fnmatch import fnmatchcase
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar

import numpy as np
from flwr.common import log
from numpy.typing import NDArray

from flwr_perdl import _store
from flwr_perdl._checks import (
    Matrix,
    check_count,
    check_flag,
    check_kind,
    check_real,
    own_numbers,
    plain,
)
from flwr_perdl._events import EventLog
from flwr_perdl._random import EVALUATION, SAMPLING, spawn
from flwr_perdl._records import (
    AFTER,
    ANEW,
    EVALUATE,
    LARGEST_INT,
    NAME,
    NUM_EXAMPLES,
    PARTITION_ID,
    ROUND,
    RUN,
    SEED,
    STEP,
    Limits,
    Reply,
    Scalar,
    brief,
    printable,
    read_partition,
)
from flwr_perdl._threads import one_blas_thread
from flwr_perdl.clients._clusters import NO_EVALUATE
from flwr_perdl.strategies._protocol import (
    CAPPED,
    REFUSED,
    Lost,
    Protocol,
    Replies,
    Request,
    RoundReport,
    State,
    check_arrays,
    check_request,
)

#: Characters of a client's name in logs and reports.
_LONGEST_NAME = 80
#: Characters of a run's token in a checkpoint.
_LONGEST_RUN = 64


#: What a project can do whose nodes do not say who they are.
_REMEDY = (
    "; make the ClientApp with flwr_perdl.clients.client_app, which says who a client is, or "
    'answer in its @app.query() with the ConfigRecord "config": {"partition-id": ...}'
)


class TooFewReplies(RuntimeError):
    """A round had fewer good replies than ``min_clients``.

    Examples
    --------
    >>> from flwr.client import NumPyClient
    >>> from flwr_perdl.clients import client_app
    >>> from flwr_perdl.simulations import InProcessGrid
    >>> from flwr_perdl.strategies import PerMA, TooFewReplies
    >>> grid = InProcessGrid(client_app(lambda context: 1 / 0), 2)
    >>> try:
    ...     PerMA(n_global=2).start(grid, num_rounds=1)
    ... except TooFewReplies:
    ...     print("Both clients failed.")
    Both clients failed.
    """


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What a server rarely has to be told: ``server=ServerSettings(...)`` of every strategy.

    Parameters
    ----------
    resume : bool, default False
        Continue from the newest checkpoint in ``checkpoint_dir``; where there is none, begin.
    evaluate_every : int, default 1
        Rounds from one evaluation by the clients to the next.
    allow_fewer : bool, default False
        Whether the run begins with fewer than ``num_clients``, but at least ``min_clients``, where
        not all have come in time; otherwise it stops with `TooFewReplies`.
    node_timeout : float, default 60.0
        Seconds to wait for them.
    on_round : callable, optional
        Called with each `RoundReport`.
    events : str or Path, optional
        File to which every event of the run is appended as a line of JSON (docs/faults.md).
    max_reply_bytes : int, default 2**28
        Most bytes of arrays in a reply; a larger one is refused before its arrays are read.
    max_magnitude : float, default 1e100
        Largest size of a number in a reply, of metrics too; a reply with a larger one is refused.
    clients_by_node : mapping of int to int, optional
        The partition of every node that may take part, by Flower's node id. Other nodes are not
        asked, and a node that says that it is another client is left out. Without it, the first
        node that claims a partition keeps it while it is connected.

    Raises
    ------
    ValueError, TypeError
        If an option breaks its rule.

    Examples
    --------
    >>> from flwr_perdl.strategies import PerMA, ServerSettings
    >>> settings = ServerSettings(evaluate_every=5, on_round=lambda report: print(report.round))
    >>> strategy = PerMA(n_global=2, server=settings)
    >>> strategy.options.evaluate_every
    5
    """

    resume: bool = False
    evaluate_every: int = 1
    allow_fewer: bool = False
    node_timeout: float = 60.0
    on_round: Callable[[RoundReport], None] | None = None
    events: str | Path | None = None
    max_reply_bytes: int = 2**28
    max_magnitude: float = 1e100
    clients_by_node: Mapping[int, int] | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        own_numbers(self)
        check_flag("resume", self.resume)
        check_count("evaluate_every", self.evaluate_every, 1)
        check_flag("allow_fewer", self.allow_fewer)
        check_real("node_timeout", self.node_timeout, 0)
        if self.on_round is not None and not callable(self.on_round):
            raise TypeError(f"on_round must be a function or None, got {self.on_round!r}.")
        check_kind("events", self.events, (str, Path, type(None)), "a path or None")
        check_count("max_reply_bytes", self.max_reply_bytes, 1)
        check_real("max_magnitude", self.max_magnitude, 0, open_low=True)
        nodes = self.clients_by_node
        check_kind("clients_by_node", nodes, (Mapping, type(None)), "a mapping or None")
        if nodes is not None and not nodes:
            raise ValueError("clients_by_node must name at least one node, got an empty mapping.")
        for node, partition in ({} if nodes is None else nodes).items():
            check_count("node ids in clients_by_node", node)
            check_count("partitions in clients_by_node", partition, 0, LARGEST_INT)


class ServerOptions(TypedDict, total=False):
    """The options that every strategy of this library takes, all by keyword.

    fraction_train, fraction_evaluate : float, default 1.0
        Share of the clients asked in a training round, and of those that evaluate the model after
        it by their own ``evaluate``. With ``fraction_evaluate=0`` nobody is asked to evaluate: for
        clients that define no ``evaluate``, and for protocols whose arrays are no model.
    min_clients : int, default 2
        Fewest good replies with which a round goes on; also the fewest clients sampled.
    num_clients : int or None, default None
        Number of clients to wait for before round one; None waits until ``min_clients`` are there
        and no further one has come for a few seconds.
    seed : int, default 0
        The run's one seed, below 2**63.
    checkpoint_dir : str, Path or None, default None
        Folder for a checkpoint after every round; one that holds a run is refused without
        ``resume``.
    server : ServerSettings
        Everything else: ``resume``, ``on_round``, ``events``, ``clients_by_node``, …

    Examples
    --------
    >>> from flwr_perdl.strategies import PerMA, ServerOptions
    >>> options = ServerOptions(fraction_train=0.5, min_clients=3, seed=7)
    >>> PerMA(n_global=2, **options).options.min_clients
    3
    """

    fraction_train: float
    fraction_evaluate: float
    min_clients: int
    num_clients: int | None
    seed: int
    checkpoint_dir: str | Path | None
    server: ServerSettings


@dataclass(frozen=True, kw_only=True)
class Options(ServerSettings):
    """`ServerOptions` with `ServerSettings`'s fields among them, complete and checked.

    Examples
    --------
    >>> from flwr_perdl.strategies import FedX
    >>> options = FedX(2, num_clients=10).options
    >>> options.num_clients, options.fraction_train, options.resume
    (10, 1.0, False)
    """

    fraction_train: float = 1.0
    fraction_evaluate: float = 1.0
    min_clients: int = 2
    num_clients: int | None = None
    seed: int = 0
    checkpoint_dir: str | Path | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Return the options with defaults filled in; ValueError or TypeError if one is wrong."""
        refuse_unknown("Options", given, ServerOptions.__annotations__)
        direct = dict(given)
        server = check_kind(
            "server", direct.pop("server", ServerSettings()), ServerSettings, "a ServerSettings"
        )
        return cls(**vars(server), **direct)

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        check_real("fraction_train", self.fraction_train, 0, 1, open_low=True)
        check_real("fraction_evaluate", self.fraction_evaluate, 0, 1)
        check_count("min_clients", self.min_clients, 1)
        if self.num_clients is not None:
            check_count("num_clients", self.num_clients, 1)
        check_count("seed", self.seed, 0, LARGEST_INT)
        path = self.checkpoint_dir
        check_kind("checkpoint_dir", path, (str, Path, type(None)), "a path or None")
        if self.resume and path is None:
            raise ValueError("resume must come with a checkpoint_dir, got checkpoint_dir=None.")


def spelled(argument: str, kind: type) -> dict[str, str]:
    """Return how each field of a dataclass that is an argument is given, by its name."""
    names = [field.name for field in fields(kind)]
    return {name: f"{argument}={kind.__name__}({name}=...)" for name in names}


def refuse_unknown(
    owner: str, given: Iterable[str], known: Iterable[str], inside: Mapping[str, str] | None = None
) -> None:
    """Raise a TypeError that says what there is instead if an option is given that is not known.

    Parameters
    ----------
    owner : str
        Whose options they are.
    given, known : iterable of str
        The options that are given, and those that there are.
    inside : mapping of str to str, optional
        How options are given that are fields of another one, by their names.
    """
    names, inside = list(known), {} if inside is None else inside
    for name in given:
        if name in inside:
            raise TypeError(f"{owner} has no option {name!r}: it is given as {inside[name]}.")
        if name not in names:
            close = get_close_matches(name, [*names, *inside], n=1)
            place = f", given as {inside[close[0]]}" if close and close[0] in inside else ""
            meant = f"did you mean {close[0]!r}{place}? " if close else ""
            raise TypeError(f"{owner} has no option {name!r}: {meant}It takes {', '.join(names)}.")


class Plan(NamedTuple):
    """Who is asked what in one exchange: arrays by partition, ascending, and the config of all."""

    arrays: dict[int, list[Matrix]]
    config: dict[str, Scalar]


Node = TypeVar("Node", bound=Hashable)


class Roster(Generic[Node]):
    """Which node is which client: Flower's node ids are random, partitions are not.

    Of several nodes that say that they are the same client, the first has the place as long as it
    is present. A newcomer makes the driver ask the first again (`contested`): a node that has died
    counts as present for a while, and the newcomer may be its successor.

    Parameters
    ----------
    allowed : mapping, optional
        Partition by node: no other node takes part, and none as another client.
    """

    def __init__(self, allowed: Mapping[Node, int] | None = None) -> None:
        self.allowed = allowed
        self._partitions: dict[Node, int] = {}
        self._doubles: set[tuple[Node, Node]] = set()
        self._told: set[tuple[Node, Node]] = set()
        self._silent: set[Node] = set()
        self._names: dict[Node, str] = {}
        #: How the clients call themselves.
        self.names: dict[int, str] = {}
        #: Why nodes take no part that do not say who they are.
        self.strangers: dict[Node, str] = {}

    def unknown(self, nodes: Iterable[Node]) -> list[Node]:
        """Return the nodes that are to say who they are."""
        known = self._partitions.keys() - self._silent
        return [node for node in nodes if node not in known and self._admits(node)]

    def enrol(self, node: Node, properties: Mapping[str, Any]) -> None:
        """Note who ``node`` says it is.

        Raises
        ------
        ValueError
            If it does not say its partition-id, or not the one that it is allowed.
        """
        partition = read_partition(properties.get(PARTITION_ID))
        if self.allowed is not None and partition != self.allowed[node]:
            raise ValueError(
                f"it says that it is client {partition}, and clients_by_node that it is client "
                f"{self.allowed[node]}"
            )
        self.strangers.pop(node, None)
        self._silent.discard(node)
        if self._partitions.get(node, partition) != partition:
            del self._partitions[node]  # who becomes another client is not the first to be it
        self._partitions[node] = partition
        name = properties.get(NAME)
        own = printable(name, _LONGEST_NAME) if isinstance(name, str) else ""
        self._names[node] = own or str(partition)
        self.names.setdefault(partition, self._names[node])

    def refuse(self, node: Node, reason: str) -> None:
        """Note why a node takes no part; one that has enrolled loses its place until it answers."""
        self._silent.add(node)
        self.strangers[node] = brief(reason)
        log(
            WARNING,
            "Left out node %s, which does not say who it is: %s",
            *(node, self.strangers[node]),
        )

    def contested(self, nodes: Collection[Node]) -> list[Node]:
        """Return the nodes whose place a newcomer claims: they are to say again who they are."""
        here = self._here(nodes)
        holders = self._holders(here)
        if len(holders) == len(here):
            return []
        claims = {
            (holders[self._partitions[node]], node)
            for node in here
            if holders[self._partitions[node]] != node
        }
        new = claims - self._doubles
        self._doubles |= new
        return [node for node in holders.values() if any(node == holder for holder, _ in new)]

    def present(self, nodes: Collection[Node]) -> dict[int, Node]:
        """Return the present clients' nodes by partition, ascending; the first enrolled wins."""
        here = self._here(nodes)
        holders = self._holders(here)
        for node in here:
            holder = holders[self._partitions[node]]
            if node == holder:
                self.names[self._partitions[node]] = self._names[node]
            elif (holder, node) not in self._told:
                self._told.add((holder, node))
                log(
                    WARNING,
                    "Nodes %s and %s both say that they are %s: only %s, the first, is asked. Each "
                    "needs a partition-id of its own; clients_by_node says which node is which.",
                    *(holder, node, self.label(self._partitions[node]), holder),
                )
        return dict(sorted(holders.items()))

    def _admits(self, node: Node) -> bool:
        """Whether a node may take part; why not is logged once."""
        if self.allowed is None or node in self.allowed:
            return True
        if node not in self.strangers:
            self.strangers[node] = "clients_by_node does not name it"
            log(WARNING, "Left out node %s: clients_by_node does not name it.", node)
        return False

    def _here(self, nodes: Collection[Node]) -> list[Node]:
        """Return the present nodes that have said who they are, in the order in which they did."""
        here = set(nodes) - self._silent
        return [node for node in self._partitions if node in here]

    def _holders(self, here: Sequence[Node]) -> dict[int, Node]:
        """Return, by partition, who has the place: the first of these, as `_here` orders them."""
        return {self._partitions[node]: node for node in reversed(here)}

    def label(self, partition: int) -> str:
        """Return how logs and reports call a client."""
        name = self.names.get(partition, str(partition))
        return f"client {partition}" if name == str(partition) else f"client {partition} ({name})"


def settle(
    count: Callable[[], int], options: Options, *, fixed: bool = False, poll: float = 0.5
) -> int:
    """Wait until the clients of a run have registered, and return how many there are.

    In a simulation the ServerApp starts while virtual nodes still register, so that a strategy
    that begins at once trains on a few of them.

    Parameters
    ----------
    count : callable
        Returns the number of nodes registered so far.
    options : Options
        ``num_clients``, ``allow_fewer``, ``min_clients`` and ``node_timeout`` apply.
    fixed : bool
        True where all nodes are known to be there from the start.
    poll : float
        Seconds between two looks; without ``num_clients``, six looks alike end the wait.

    Raises
    ------
    TooFewReplies
        If fewer than ``min_clients`` nodes are there in time, or, without ``allow_fewer``, fewer
        than ``num_clients``.
    """
    wanted = options.num_clients or options.min_clients
    deadline = time.monotonic() + options.node_timeout
    seen, same = count(), 0
    if not fixed:
        patience = f"at most {options.node_timeout:g} s"
        log(INFO, "Waiting for clients to register: %d of %d so far, %s.", seen, wanted, patience)
    while time.monotonic() < deadline and not (fixed and seen < wanted):
        if seen >= wanted and (fixed or options.num_clients is not None or same >= 6):
            return seen
        time.sleep(poll)
        before, seen = seen, count()
        same = same + 1 if seen == before else 0
    waited = f" within {0 if fixed else options.node_timeout:g} s"
    if seen < options.min_clients:
        raise TooFewReplies(
            f"{seen} client(s) registered{waited}, fewer than the "
            f"{options.min_clients} that a round needs (min_clients)."
        )
    if seen < wanted and not options.allow_fewer:
        raise TooFewReplies(
            f"{seen} client(s) registered{waited}, fewer than num_clients={wanted}; with "
            "ServerSettings(allow_fewer=True) the run begins without the others."
        )
    if seen < wanted:
        log(WARNING, "Starting with %d of %d clients%s.", seen, wanted, waited)
    return seen


class Conversation:
    """One run of a protocol: asks its questions, takes the replies, remembers what happened.

    Parameters
    ----------
    protocol : callable
        ``(initial arrays, state or None) -> generator`` as in `_protocol`.
    options : Options
        The server's options.
    identity : mapping
        What makes two runs the same run; a checkpoint of another one is refused.
    initial : list of ndarray
        The user's initial arrays, possibly none.
    flags, labels : collection of str
        Metrics of which a mean says nothing, see `summarized`.
    evaluation_config : mapping, optional
        What is added to the config of all evaluations.
    """

    def __init__(
        self,
        protocol: Callable[[list[Matrix], State | None], Protocol],
        options: Options,
        identity: Mapping[str, Any],
        initial: list[Matrix],
        *,
        flags: Collection[str] = (),
        labels: Collection[str] = (),
        evaluation_config: Mapping[str, Scalar] | None = None,
    ) -> None:
        self.options = options
        self._evaluation_config = dict(evaluation_config or {})
        self._flags, self._labels = flags, labels
        self.identity = said(identity, strict=options.checkpoint_dir is not None)
        self.history: list[RoundReport] = []
        self._journal: _store.Journal | None = None
        self._noted = 0  # reports that are in the journal
        self.server_metrics: dict[int, dict[str, Any]] = {}
        self.model: list[Matrix] = initial
        self.done = 0
        self._run = uuid.uuid4().hex
        self._evaluated = 0
        self._warned_of_no_state = False
        self._clients_evaluate = True
        self._told: set[tuple[str, str]] = set()  # who was left out of evaluations, and why
        self._request: Request | None = None
        self._asked: dict[int, list[Matrix]] = {}
        self._asked_at = 0.0
        if not options.resume:
            _refuse_earlier_run(options.checkpoint_dir)
        self._events = EventLog(options.events)
        saved = self._load() if options.resume else None
        if saved is not None and saved.meta["finished"]:
            return
        state = None if saved is None else _part(saved.arrays, "state")
        self._steps = protocol(initial, state)
        if not hasattr(self._steps, "send"):
            raise ValueError(
                f"protocol must be a generator, with yield Request(...), got {self._steps!r}."
            )
        try:
            self._advance(lambda: next(self._steps))
        except (KeyError, TypeError, IndexError) as error:
            if saved is None:
                raise
            raise ValueError(
                f"checkpoint_dir must hold this protocol's state, got one that it cannot go on "
                f"from in {options.checkpoint_dir}: {error!r}."
            ) from error

    @property
    def request(self) -> Request | None:
        """What the protocol asks next; None if it is over."""
        return self._request

    @property
    def finished(self) -> bool:
        """Whether the protocol is over: ``model`` is what it returned."""
        return self._request is None

    # Events --------------------------------------------------------------------------------

    def begin(self, rounds: int | None) -> None:
        """Note that the run begins or goes on; ``rounds`` of it in all, None where not known."""
        name, seed = self.identity.get("protocol"), self.options.seed
        least = self.options.min_clients
        self._events.write(
            "begin", protocol=name, seed=seed, rounds=rounds, done=self.done, min_clients=least
        )

    def end(self, error: BaseException | None = None) -> None:
        """Note that the run is over, and what stopped it."""
        stopped = None if error is None else str(error) or type(error).__name__
        self._events.write("end", done=self.done, stopped=stopped)

    def measured(self, round_: int, metrics: Mapping[str, Any]) -> None:
        """Remember the server's own evaluation of the model after ``round_``."""
        self.server_metrics[round_] = dict(metrics)
        self._events.write("server", round=round_, metrics=metrics)

    # Training ------------------------------------------------------------------------------

    @property
    def limits(self) -> Limits:
        """What a reply to the last plan may be, decided before its arrays are read."""
        most = None if self._request is None else self._request.most
        return Limits(self.options.max_reply_bytes, most, self.options.max_magnitude)

    def plan(
        self, round_: int, partitions: Collection[int], roster: Roster[Any] | None = None
    ) -> Plan | None:
        """Return who is asked what in ``round_``; None if there is nothing to ask."""
        if self._request is None or round_ <= self.done:
            return None
        if len(partitions) < self.options.min_clients:
            strangers = {} if roster is None else roster.strangers
            raise TooFewReplies(
                f"Round {round_} has {len(partitions)} client(s) to ask, fewer than "
                f"min_clients={self.options.min_clients}; {self._where_saved()}"
                + _first_reason({f"node {node}": why for node, why in strangers.items()})
                + (_REMEDY if strangers and self.options.clients_by_node is None else "")
                + "."
            )
        chosen = self._sample(partitions, self.options.fraction_train, SAMPLING, round_)
        request, own, same = self._request, self._request.own, list(self._request.arrays)
        arrays = dict.fromkeys(chosen, same)
        if own is not None:
            arrays = {p: check_arrays("Request.own(partition)", own(p)) for p in chosen}
        return self._plan(round_, arrays, request.step, request.config)

    def conclude(
        self,
        round_: int,
        replies: Mapping[int, Reply],
        lost: Mapping[int, Lost],
        roster: Roster[Any],
    ) -> RoundReport:
        """Check the replies to the last plan, move the protocol on, and save the new state.

        Parameters
        ----------
        round_ : int
            The round they belong to.
        replies : mapping of int to Reply
            Readable replies by partition.
        lost : mapping of int to Lost
            Who has no readable reply, and why, by partition.
        roster : Roster
            For the clients' names.

        Raises
        ------
        TooFewReplies
            If fewer than ``min_clients`` good replies remain.
        """
        request = self._request
        if request is None:
            raise RuntimeError("conclude must follow a plan.")
        good: dict[int, Reply] = {}
        bad = dict(lost)
        for partition in sorted(replies):
            try:
                _check_metrics(request.metrics, replies[partition])
                told = request.check(replies[partition])
                if told is not None:
                    raise TypeError(
                        "Request.check must raise a ValueError for a wrong reply, and return "
                        f"nothing, got {told!r}."
                    )
            except ValueError as error:
                bad[partition] = Lost(REFUSED, brief(str(error)))
            else:
                good[partition] = replies[partition]
        good, capped = _capped(good, request.max_weight)
        for partition in capped:
            log(
                WARNING,
                "Round %d (%s): %s counts for %d examples, as more than %g times the median is not "
                "believed (Request.max_weight).",
                *(round_, request.step, roster.label(partition), good[partition].num_examples),
                request.max_weight,
            )
        report = self._report(round_, request.step, good, bad, roster)
        if len(good) < self.options.min_clients:
            self._tell(report)
            raise TooFewReplies(
                f"Round {round_} has {len(good)} good replies, fewer than "
                f"min_clients={self.options.min_clients}; {self._where_saved()}"
                + _first_reason(report.dropped, f", asked for step {request.step!r}")
                + "."
            )
        self._warn_of_lost_state(good, roster)
        with one_blas_thread():
            heard = Replies(good)
            heard.note(CAPPED, capped)
            self._advance(lambda: self._steps.send(heard))
        for partition, what in heard.noted.items():
            report.anomalies.setdefault(partition, {}).update(what)
        self.done = round_
        self._remember(report)
        return report

    def _warn_of_lost_state(self, good: Mapping[int, Reply], roster: Roster[Any]) -> None:
        """Warn of clients that took part before and have lost their private state since."""
        anew = {partition for partition, reply in good.items() if reply.metrics.get(ANEW)}
        before: set[int] = set()
        if anew:
            before = {
                p for report in self.history if report.step != EVALUATE for p in report.metrics
            }
        if anew & before:
            log(
                WARNING,
                "The private state of %s was lost and is made anew, so the results differ from "
                "those of a run without that loss. To keep it on disk, give every client a "
                '"state-dir" in its node config (InProcessGrid(..., node_config=lambda partition: '
                '{"state-dir": FOLDER})) or in the run config.',
                ", ".join(map(roster.label, sorted(anew & before))),
            )

    # Evaluation ----------------------------------------------------------------------------

    def evaluates(self, round_: int) -> bool:
        """Return whether clients evaluate the model after ``round_``."""
        due = self.options.fraction_evaluate > 0 and round_ % self.options.evaluate_every == 0
        due = due and self._clients_evaluate
        return due and bool(self.model) and round_ == self.done and round_ > self._evaluated

    def plan_evaluation(
        self, round_: int, partitions: Collection[int], config: Mapping[str, Scalar]
    ) -> Plan:
        """Return who evaluates the model after ``round_``."""
        fraction = self.options.fraction_evaluate
        chosen = self._sample(partitions, fraction, EVALUATION, round_)
        steps = (report.step for report in reversed(self.history) if report.step != EVALUATE)
        last = next(steps, None)
        after = {} if last is None else {AFTER: last}
        config = {**config, **after, **self._evaluation_config}
        return self._plan(round_, dict.fromkeys(chosen, self.model), EVALUATE, config)

    def conclude_evaluation(
        self,
        round_: int,
        replies: Mapping[int, Reply],
        lost: Mapping[int, Lost],
        roster: Roster[Any],
    ) -> RoundReport | None:
        """Note the replies to the last evaluation; None if no client has any way to evaluate."""
        if lost and not replies and all(NO_EVALUATE in why.reason for why in lost.values()):
            self._clients_evaluate, self._evaluated = False, round_
            log(
                INFO,
                "No client defines evaluate, so this run has no further evaluations; with "
                "fraction_evaluate=0 it asks for none.",
            )
            return None
        self._warn_of_lost_state(replies, roster)
        report = self._report(round_, EVALUATE, replies, lost, roster)
        self._evaluated = round_
        self._remember(report)
        return report

    # What both share -------------------------------------------------------------------------

    def past(self, round_: int, *, evaluation: bool) -> RoundReport | None:
        """Return the report of an exchange of ``round_``, None if there was none."""
        for report in self.history:
            if report.round == round_ and (report.step == EVALUATE) == evaluation:
                return report
        return None

    def _sample(
        self, partitions: Collection[int], fraction: float, draws: int, round_: int
    ) -> list[int]:
        """Return the partitions that take part, ascending."""
        size = max(round(fraction * len(partitions)), self.options.min_clients)
        if size >= len(partitions):
            return sorted(partitions)
        rng = spawn(self.options.seed, draws, round_)
        return sorted(rng.choice(sorted(partitions), size=size, replace=False).tolist())

    def _plan(
        self,
        round_: int,
        arrays: dict[int, list[Matrix]],
        step: str,
        config: Mapping[str, Scalar],
    ) -> Plan:
        """Return the plan that asks these clients to take ``step``."""
        seed = self.options.seed
        common: dict[str, Scalar] = {STEP: step, ROUND: round_, SEED: seed, RUN: self._run}
        self._asked, self._asked_at = arrays, time.monotonic()
        self._events.write("ask", round=round_, step=step, asked=len(arrays))
        return Plan(arrays, {**{key: plain(value) for key, value in config.items()}, **common})

    def _advance(self, move: Callable[[], Request]) -> None:
        """Move the protocol to its next request, or to its end."""
        try:
            self._request = check_request(move())
            model = self._request.model
            self.model = list(self._request.arrays if model is None else model)
        except StopIteration as end:
            if end.value is None:
                raise ValueError(
                    "protocol must end with `return [arrays]`, its final model, got its end "
                    "without one."
                ) from None
            self._request = None
            self.model = check_arrays("what protocol returns", end.value)

    def _report(
        self,
        round_: int,
        step: str,
        good: Mapping[int, Reply],
        lost: Mapping[int, Lost],
        roster: Roster[Any],
    ) -> RoundReport:
        """Return the report of an exchange, and log who was left out."""
        dropped = {roster.label(p): why.reason for p, why in sorted(lost.items())}
        for reason in dict.fromkeys(dropped.values()):
            who = [label for label, why in dropped.items() if why == reason]
            if step == EVALUATE:  # a client without evaluate has none in the next round either
                who = [label for label in who if (label, reason) not in self._told]
                self._told |= {(label, reason) for label in who}
            if who:
                log(
                    WARNING,
                    "Round %d (%s): left out %s: %s",
                    *(round_, step, ", ".join(who), reason),
                )
        aggregate = summarized(good, self._flags, self._labels)
        aggregate |= {"clients": float(len(good)), "dropped": float(len(dropped))}
        ups = [sum(array.size for array in reply.arrays) for reply in good.values()]
        downs = [sum(array.size for array in self._asked[partition]) for partition in good]
        return RoundReport(
            round=round_,
            step=step,
            metrics={
                p: {NUM_EXAMPLES: reply.num_examples, **reply.metrics} for p, reply in good.items()
            },
            aggregate=aggregate,
            dropped=dropped,
            floats_down=float(np.mean(downs)) if downs else 0.0,
            floats_up=float(np.mean(ups)) if ups else 0.0,
            anomalies={partition: {why.kind: 1.0} for partition, why in sorted(lost.items())},
        )

    def _remember(self, report: RoundReport) -> None:
        """Append ``report`` to the history, save, and tell who wants to know."""
        self.history.append(report)
        self._tell(report)
        self.save()
        if self.options.on_round is not None:
            self.options.on_round(report)

    def _tell(self, report: RoundReport) -> None:
        """Write an exchange's event."""
        fields = report._asdict()
        self._events.write(
            "round",
            asked=len(self._asked),
            good=len(report.metrics),
            seconds=round(time.monotonic() - self._asked_at, 3),
            clients=fields.pop("metrics"),
            metrics=fields.pop("aggregate"),
            failed=fields.pop("dropped"),
            **fields,
        )

    # Checkpoints -----------------------------------------------------------------------------

    def _where_saved(self) -> str:
        """Return the clause that says where the last good state is."""
        if self.options.checkpoint_dir is None:
            return "nothing is saved, since there is no checkpoint_dir"
        if not self.done:
            return "nothing is saved, since no round has finished"
        return f"the state after round {self.done} is saved in {self.options.checkpoint_dir}"

    def save(self) -> None:
        """Write a checkpoint of the state after the last finished round."""
        if self.options.checkpoint_dir is None:
            return
        folder, request = Path(self.options.checkpoint_dir), self._request
        if self._journal is None:
            self._journal = _store.Journal(folder / f"history-{self._run}.jsonl")
        self._journal.append(report._asdict() for report in self.history[self._noted :])
        self._noted = len(self.history)
        state = request.state if request is not None and request.state is not None else {}
        resumable = request is None or request.state is not None
        if not resumable and not self._warned_of_no_state:
            self._warned_of_no_state = True
            log(WARNING, "This run cannot be resumed: its protocol yields a Request without state.")
        arrays: dict[str, NDArray[Any]] = {
            f"state/{name}": np.asarray(a) for name, a in state.items()
        }
        arrays |= {f"model/{i:04d}": array for i, array in enumerate(self.model)}
        meta = {
            "identity": self.identity,
            "run": self._run,
            "round": self.done,
            "evaluated": self._evaluated,
            "finished": self.finished,
            "resumable": resumable,
            "history": self._journal.mark,
            "server_metrics": self.server_metrics,
        }
        _store.save_round(folder, self.done, arrays, meta)
        for other in set(folder.glob("history-*.jsonl")) - {self._journal.path}:
            other.unlink(missing_ok=True)  # of a run that this one replaces

    def _load(self) -> _store.Saved | None:
        """Take up the newest readable checkpoint; None if there is none."""
        folder = Path(str(self.options.checkpoint_dir))
        for round_ in reversed(_store.rounds_in(folder)):
            path = _store.round_path(folder, round_)
            try:
                saved = _store.load(path)
                meta = _meta_from(saved.meta)
                mark = dict(saved.meta["history"])
            except ValueError as error:
                log(WARNING, "%s The checkpoint before it is used.", error)
                continue
            except (KeyError, TypeError, AttributeError) as error:
                log(WARNING, "%s is no checkpoint (%r). The one before it is used.", path, error)
                continue
            if not _same(saved.meta["identity"], self.identity):
                raise ValueError(
                    f"checkpoint_dir must hold a run with the same options, got one of "
                    f"{saved.meta['identity']}; this is {self.identity}."
                )
            if not saved.meta.get("resumable", True):
                raise ValueError(
                    f"checkpoint_dir must hold a state to go on from, got none in {path}: the "
                    "protocol yielded its Request without state=."
                )
            self._run, self.done, self._evaluated, self.server_metrics = meta
            self._recall(folder, mark)
            model = _part(saved.arrays, "model")
            self.model = [model[name] for name in sorted(model)]
            log(INFO, "Resuming after round %d from %s.", self.done, folder)
            return saved
        return None

    def _recall(self, folder: Path, mark: Mapping[str, Any]) -> None:
        """Take up the history; one that is damaged does not stop the run."""
        try:
            self._journal, entries = _store.Journal.read(folder, mark)
            self.history = [_report_from(entry) for entry in entries]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log(WARNING, "%s The run goes on without the reports of its first rounds.", error)
            self._journal, self.history = None, []
        self._noted = len(self.history)


def said(identity: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """Return a run's identity as its checkpoint says it, and as it is read again.

    Tuples become lists, keys texts, arrays a digest, functions and classes their names.

    Raises
    ------
    ValueError
        If ``strict``, and something cannot be said.
    """

    def word(value: Any) -> Any:
        if isinstance(value, np.generic):
            return plain(value)
        if isinstance(value, np.ndarray):
            digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:16]
            return f"{value.dtype} {value.shape} {digest}"
        if hasattr(value, "__qualname__"):
            return f"{value.__module__}.{value.__qualname__}"
        if strict:
            raise TypeError(f"{value!r}")
        return repr(value)

    try:
        found: dict[str, Any] = json.loads(json.dumps(identity, default=word))
    except (TypeError, ValueError) as error:
        if not strict:
            return {"settings": repr(identity)}
        raise ValueError(
            "settings must be numbers, texts, arrays, functions, or lists and mappings of them, "
            f"for a checkpoint to say which run it is of, got one that is not: {error}."
        ) from None
    return found


def _same(one: Any, other: Any) -> bool:
    """Whether two identities say the same; NaN is the same as NaN here."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _refuse_earlier_run(checkpoint_dir: str | Path | None) -> None:
    """Raise a ValueError if a folder for checkpoints has those of a run: they would be deleted."""
    rounds = [] if checkpoint_dir is None else _store.rounds_in(Path(checkpoint_dir))
    if rounds:
        raise ValueError(
            f"checkpoint_dir must hold no run, got one after round {rounds[-1]} in "
            f"{str(checkpoint_dir)!r}: resume=True goes on with it; a new run needs another folder."
        )


def _check_metrics(names: Iterable[str], reply: Reply) -> None:
    """Raise a ValueError if a reply lacks one of these metrics."""
    for name in names:
        if name not in reply.metrics:
            raise ValueError(f"metrics must have {name!r}, got {sorted(reply.metrics)}")


def _capped(
    replies: dict[int, Reply], most: float | None
) -> tuple[dict[int, Reply], dict[int, float]]:
    """Return the replies with bounded numbers of examples, and by which shares they went down.

    Parameters
    ----------
    replies : dict of int to Reply
        By partition.
    most : float or None
        The bound in medians; None: none.
    """
    if most is None or not replies:
        return replies, {}
    bound = int(min(most * np.median([reply.num_examples for reply in replies.values()]), 2**53))
    above = {p: reply for p, reply in replies.items() if reply.num_examples > bound}
    shares = {p: 1 - bound / reply.num_examples for p, reply in above.items()}
    return {**replies, **{p: r._replace(num_examples=bound) for p, r in above.items()}}, shares


def summarized(
    replies: Mapping[int, Reply], flags: Collection[str] = (), labels: Collection[str] = ()
) -> dict[str, float]:
    """Return each metric's mean over the replies that have it, weighted by their examples.

    Of a flag, the number of clients where it is not zero instead; of a label, under
    ``"NAME_LABEL"``, the number of clients with each. A name that ends with ``*`` stands for all
    that begin so.
    """
    names = {name: None for reply in replies.values() for name in reply.metrics}
    found: dict[str, float] = {}
    for name in names:
        having = [reply for reply in replies.values() if name in reply.metrics]
        values = [reply.metrics[name] for reply in having]
        if any(fnmatchcase(name, flag) for flag in flags):
            found[name] = float(sum(value != 0 for value in values))
        elif name in labels:
            sizes = Counter(values)
            found |= {f"{name}_{label:g}": float(sizes[label]) for label in sorted(sizes)}
        else:
            total = sum(reply.num_examples for reply in having)
            found[name] = sum(reply.num_examples * reply.metrics[name] for reply in having) / total
    return found


def _first_reason(reasons: Mapping[str, str], asked: str = "") -> str:
    """Return the clause that quotes the first of these reasons, nothing if there are none."""
    for who, why in reasons.items():
        rest = f" ({len(reasons)} in all)" if len(reasons) > 1 else ""
        return f"; the first reason{rest}: {who}{asked}: {why.rstrip('.')}"
    return ""


def _part(arrays: Mapping[str, NDArray[Any]], kind: str) -> dict[str, NDArray[Any]]:
    """Return the arrays saved under ``kind/``."""
    start = f"{kind}/"
    return {name.removeprefix(start): a for name, a in arrays.items() if name.startswith(start)}


def _meta_from(
    meta: Mapping[str, Any],
) -> tuple[str, int, int, dict[int, dict[str, Any]]]:
    """Return what a checkpoint's record says: run, rounds, the server's metrics."""
    for key in ("identity", "finished"):
        if key not in meta:
            raise KeyError(key)
    metrics = {int(round_): dict(found) for round_, found in meta["server_metrics"].items()}
    run = str(meta["run"])
    if not run.isalnum() or len(run) > _LONGEST_RUN:  # it is part of a file's name
        raise ValueError(
            f"run must be at most {_LONGEST_RUN} letters and digits in a checkpoint, got "
            f"{run[:_LONGEST_RUN]!r}."
        )
    done, evaluated = (
        check_count(f"{name} in a checkpoint", meta[name], 0, _store.LAST_ROUND)
        for name in ("round", "evaluated")
    )
    return run, done, evaluated, metrics


def _report_from(entry: Mapping[str, Any]) -> RoundReport:
    """Return a report as it was before it was saved (JSON's keys are strings)."""
    by_partition = {
        name: {int(partition): values for partition, values in entry.get(name, {}).items()}
        for name in ("metrics", "anomalies")
    }
    return RoundReport(**{**entry, **by_partition})
