"""Waiting for the nodes of a run, and identifying their clients."""

from __future__ import annotations

import re
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from logging import INFO, WARNING
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from flwr_perdl.core.checks import check_kind
from flwr_perdl.protocol.compat import log
from flwr_perdl.protocol.options import ServerSettings
from flwr_perdl.protocol.records import (
    CONFIG,
    KEEPS_PRIVATE,
    NAME,
    PARTITION_ID,
    SEALS_ALL,
    UNABLE_TO_EVALUATE,
    UNCOUNTED,
    brief,
    named_partition,
    printable,
    read_partition,
    read_properties,
)
from flwr_perdl.protocol.report import first_reason
from flwr_perdl.protocol.request import Lost, TooFewReplies, read_replies
from flwr_perdl.random import spawn

#: Characters of a client's name in logs and reports.
_LONGEST_NAME = 80
#: What a project can do whose nodes do not say who they are.
_REMEDY = (
    "; an app of flwr_perdl.clients.client_app says who a client is; any other app needs an "
    '@app.query() that returns the ConfigRecord "config": {"partition-id": ...}'
)
_UNCOUNTED = (
    "Nothing limits further runs at %s: without a state-dir in its node config a client counts "
    "its privacy budget within one Flower run only."
)
#: What reasons say of a node that does not answer who it is.
_NO_ANSWER = ("query", PARTITION_ID, f"no ConfigRecord {CONFIG!r}")
_FEWER = "with ServerSettings(allow_fewer=True) the run begins without the others"
#: A name that could be taken for the number of another client.
_NUMBERED = re.compile(r"\d+( \(.*\))?")
#: Seconds between two looks at how many nodes there are; without ``num_clients``, so many looks
#: with the same number end the wait.
_LOOK_SECONDS, _SAME_LOOKS = 0.5, 6


class LocalGrid(Grid):
    """A grid in this process: all of its nodes are there from the start, and answer at once."""

    #: The nodes' contexts, with what their clients keep, by node.
    contexts: Mapping[int, Context]

    @abstractmethod
    def begin_run(self, on_reply: Callable[[int, int], object]) -> None:
        """Begin a run of Flower; a strategy's ``start`` calls it.

        Parameters
        ----------
        on_reply : callable
            Called with the numbers of nodes that have replied in an exchange, and that are asked.
        """


class Roster:
    """Which node is which client: Flower's node ids are random, partitions are not.

    Of several nodes that say that they are the same client, the first has the place as long as it
    is present. For a newcomer the first is asked again (`duplicates`): a node that has died counts
    as present for a while, and the newcomer may be its successor.

    Parameters
    ----------
    options : ServerSettings
        How many clients are waited for, how long, and which nodes may be which.
    """

    def __init__(self, options: ServerSettings) -> None:
        self._options, self._allowed = options, options.clients_by_node
        self._partitions: dict[int, int] = {}
        self._doubles: set[tuple[int, int]] = set()
        self._logged: set[tuple[int, int]] = set()
        self._silent: set[int] = set()
        self._names: dict[int, str] = {}
        #: Partitions that were made of the client's name: they say nothing to a reader.
        self._hashed: set[int] = set()
        self._count: Counter[str] = Counter()
        #: Partitions of which nothing limits how many runs spend their privacy.
        self.uncounted: set[int] = set()
        #: How the clients call themselves.
        self.names: dict[int, str] = {}
        #: The patterns of arrays that clients say they keep private.
        self.private: dict[int, str] = {}
        #: Partitions whose clients say that they define no evaluation.
        self.unable_to_evaluate: set[int] = set()
        #: Partitions whose clients send sealed messages alone.
        self.sealing: set[int] = set()
        #: Why nodes take no part that do not say who they are.
        self.strangers: dict[int, str] = {}
        #: Why nodes that are there now, and were asked, do not say who they are.
        self.unanswered: dict[int, str] = {}

    def find(self, grid: Grid, timeout: float | None) -> dict[int, int]:
        """Return the present clients' nodes by partition; new nodes are asked who they are.

        Raises
        ------
        TooFewReplies
            If it is the first time, and fewer clients say who they are than the run is to have.
        """
        first, options = not self.names, self._options
        if first:
            await_nodes(grid, options)
        ids = sorted(grid.get_node_ids())
        lost = self._ask(grid, self.unknown(ids), "new", timeout)
        self._ask(grid, self.duplicates(ids), "known", timeout)
        present, wanted = self.present(ids), options.num_clients or 0
        if first and self.uncounted:
            log(WARNING, _UNCOUNTED, ", ".join(map(self.label, sorted(self.uncounted))))
        if first and lost and len(present) < wanted and not options.allow_fewer:
            more = f"; {_FEWER}" if len(present) >= options.min_clients else ""
            raise TooFewReplies(
                f"{len(present)} client(s) are identified, fewer than num_clients={wanted}{more}"
                f"{self.absence()}."
            )
        return present

    def _ask(
        self, grid: Grid, nodes: Sequence[int], kind: str, timeout: float | None
    ) -> dict[int, Lost]:
        """Ask nodes who they are, note their answers, and return why others have none."""
        if not nodes:
            return {}
        questions = [
            (node, Message(RecordDict({CONFIG: ConfigRecord()}), node, MessageType.QUERY))
            for node in nodes
        ]
        if self.names:  # who has not answered before is not waited for as long again
            timeout = self._options.node_timeout
        elif timeout is not None:  # workers may yet be starting
            timeout = max(timeout, self._options.node_timeout)
        if not isinstance(grid, LocalGrid):
            log(INFO, "Identifying %d %s node(s), %s.", len(nodes), kind, describe_timeout(timeout))
        replies = grid.send_and_receive([message for _, message in questions], timeout=timeout)
        answers, lost = read_replies(questions, replies, read_properties)
        for node in nodes:
            try:
                if node in lost:
                    raise ValueError(lost[node].reason)
                self.add(node, answers[node])
            except ValueError as error:
                self.exclude(node, str(error))
        return lost

    def unknown(self, nodes: Iterable[int]) -> list[int]:
        """Return the nodes that are to say who they are."""
        known = self._partitions.keys() - self._silent
        return [node for node in nodes if node not in known and self._admits(node)]

    def add(self, node: int, properties: Mapping[str, Any]) -> None:
        """Note who ``node`` says it is.

        Raises
        ------
        ValueError
            If it does not say its partition-id, or not the one that it is allowed.
        """
        partition = read_partition(properties.get(PARTITION_ID))
        if self._allowed is not None and partition != self._allowed[node]:
            raise ValueError(
                f"it says that it is client {partition}, and clients_by_node that it is client "
                f"{self._allowed[node]}"
            )
        self.strangers.pop(node, None)
        self._silent.discard(node)
        # The order in which nodes were added decides who has a place, and dicts keep that order.
        if self._partitions.get(node, partition) != partition:
            del self._partitions[node]  # who becomes another client is not the first to be it
        self._partitions[node] = partition
        self.private.pop(partition, None)
        if patterns := properties.get(KEEPS_PRIVATE):
            self.private[partition] = printable(str(patterns), _LONGEST_NAME)
        said = (
            (UNCOUNTED, self.uncounted),
            (UNABLE_TO_EVALUATE, self.unable_to_evaluate),
            (SEALS_ALL, self.sealing),
        )
        for key, partitions in said:
            (partitions.add if properties.get(key) else partitions.discard)(partition)
        name = properties.get(NAME)
        own = printable(name, _LONGEST_NAME) if isinstance(name, str) else ""
        self._names[node] = own or str(partition)
        if own and partition == named_partition(str(name)):
            self._hashed.add(partition)
        if partition not in self.names:
            self._note_name(partition, self._names[node])

    def exclude(self, node: int, reason: str) -> None:
        """Note why a node takes no part; one that was added loses its place until it answers."""
        self._silent.add(node)
        self.strangers[node] = brief(reason)
        text = "Left out node %s, whose client does not say who it is: %s"
        log(WARNING, text, node, self.strangers[node])

    def duplicates(self, nodes: Collection[int]) -> list[int]:
        """Return the nodes whose place a newcomer claims: they are to say again who they are."""
        here = self._here(nodes)
        # A node that was restarted has another id: its old one may be listed for a while yet.
        holders = self._holders(here)
        if len(holders) == len(here):
            return []
        claims = {(holders[self._partitions[node]], node) for node in here}
        new = {(holder, node) for holder, node in claims - self._doubles if holder != node}
        self._doubles |= new
        claimed = {holder for holder, _ in new}
        return [node for node in holders.values() if node in claimed]

    def present(self, nodes: Collection[int]) -> dict[int, int]:
        """Return the present clients' nodes by partition, ascending: of several the first added."""
        here = self._here(nodes)
        holders = self._holders(here)
        self.unanswered = {
            node: self.strangers[node]
            for node in nodes
            if node in self._silent and self._partitions.get(node) not in holders
        }
        for node in here:
            partition = self._partitions[node]
            if node == holders[partition]:
                self._note_name(partition, self._names[node])
            else:
                self._warn_of_double(holders[partition], node)
        return dict(sorted(holders.items()))

    def _warn_of_double(self, first: int, second: int) -> None:
        """Warn once of two nodes that say that they are the same client."""
        if (first, second) not in self._logged:
            self._logged.add((first, second))
            log(
                WARNING,
                "Nodes %s and %s both claim to be %s: only %s, the first, is asked. Each needs its "
                "own partition-id; clients_by_node says which node is which.",
                *(first, second, self.label(self._partitions[second]), first),
            )

    def sample(
        self, partitions: Collection[int], fraction: float, draws: int, round_: int
    ) -> list[int]:
        """Return the partitions that take part, ascending."""
        size = max(round(fraction * len(partitions)), self._options.min_clients)
        if size >= len(partitions):
            return sorted(partitions)
        rng = spawn(self._options.seed, draws, round_)
        return sorted(rng.choice(sorted(partitions), size=size, replace=False).tolist())

    def absence(self) -> str:
        """Return the clause that says why nodes take no part, and what to do; empty if all do."""
        reasons = {f"node {node}": why for node, why in self.strangers.items()}
        asks = any(mark in why for why in reasons.values() for mark in _NO_ANSWER)
        return first_reason(reasons) + (_REMEDY if asks else "")

    def _admits(self, node: int) -> bool:
        """Whether a node may take part; why not is logged once."""
        if self._allowed is None or node in self._allowed:
            return True
        if node not in self.strangers:
            self.strangers[node] = "clients_by_node does not name it"
            log(WARNING, "Left out node %s: clients_by_node does not name it.", node)
        return False

    def _here(self, nodes: Collection[int]) -> list[int]:
        """Return the present nodes that have said who they are, in the order in which they did."""
        here = set(nodes) - self._silent
        return [node for node in self._partitions if node in here]

    def _holders(self, here: Sequence[int]) -> dict[int, int]:
        """Return, by partition, who has the place: the first of these, as `_here` orders them."""
        return {self._partitions[node]: node for node in reversed(here)}

    def label(self, partition: int) -> str:
        """Return how logs and reports call a client; no two have the same label."""
        name = self.names.get(partition, str(partition))
        if partition in self._hashed or name == str(partition):
            return f"client {self.name_of(partition)}"
        return f"client {partition} ({name})"

    def name_of(self, partition: int) -> str:
        """Return a client's name, with its number where it is not unique; or its number alone."""
        name = self.names.get(partition, str(partition))
        if name == str(partition) or (self._count[name] == 1 and not _NUMBERED.fullmatch(name)):
            return name
        return f"{partition} ({name})"

    def _note_name(self, partition: int, name: str) -> None:
        """Note a client's name."""
        self._count[self.names.get(partition, "")] -= 1
        self._count[name] += 1
        self.names[partition] = name


def await_nodes(grid: Grid, options: ServerSettings) -> int:
    """Wait until the nodes of a run have connected, and return their number.

    In a simulation the ServerApp starts while virtual nodes still connect; a strategy that begins
    at once would train on a few of them.

    Parameters
    ----------
    grid : Grid
        The connection to the nodes.
    options : ServerSettings
        A strategy's options: ``num_clients``, ``allow_fewer``, ``min_clients``, ``node_timeout``
        and ``clients_by_node`` apply.

    Returns
    -------
    int

    Raises
    ------
    TooFewReplies
        If fewer than ``min_clients`` nodes connect in time, or, without ``allow_fewer``, fewer than
        ``num_clients``.

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
    check_kind("options", options, ServerSettings, "a strategy's options")
    wanted = options.num_clients or options.min_clients
    local = isinstance(grid, LocalGrid)
    seen = _count(grid, options) if local else _wait_for_clients(grid, options, wanted)
    if seen >= wanted:
        return seen
    waited = f" within {0 if local else options.node_timeout:g} s"
    if seen < options.min_clients or not options.allow_fewer:
        least, more = f"num_clients={wanted}", f"; {_FEWER}"
        if seen < options.min_clients:
            least, more = f"the {options.min_clients} that a round needs (min_clients)", ""
        raise TooFewReplies(f"{seen} client(s) registered{waited}, fewer than {least}{more}.")
    log(WARNING, "Starting with %d of %d clients%s.", seen, wanted, waited)
    return seen


def _wait_for_clients(grid: Grid, options: ServerSettings, wanted: int) -> int:
    """Return how many clients have come, once that are as many as wanted, or in time."""
    deadline, seen, same = time.monotonic() + options.node_timeout, _count(grid, options), 0
    text = "Waiting for clients to register: %d so far, %d needed, at most %g s."
    log(INFO, text, seen, wanted, options.node_timeout)
    # Without a number to wait for, a run begins when no client has come for a while.
    looks = _SAME_LOOKS if options.num_clients is None else 0
    while time.monotonic() < deadline and (seen < wanted or same < looks):
        time.sleep(_LOOK_SECONDS)
        before, seen = seen, _count(grid, options)
        same = same + 1 if seen == before else 0
    return seen


def _count(grid: Grid, options: ServerSettings) -> int:
    """Return the number of nodes that have registered and may take part."""
    allowed = options.clients_by_node
    return sum(allowed is None or node in allowed for node in grid.get_node_ids())


def describe_timeout(seconds: float | None) -> str:
    """Return how a log says a timeout."""
    return "as long as it takes" if seconds is None else f"at most {seconds:g} s"
