"""Who is there: which node is which client, and waiting until the clients of a run have come."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from logging import INFO, WARNING
from typing import Any

from flwr_perdl.protocol.compat import log
from flwr_perdl.protocol.options import Options
from flwr_perdl.protocol.records import (
    CONFIG,
    NAME,
    PARTITION_ID,
    PRIVATE,
    UNCOUNTED,
    brief,
    named_partition,
    printable,
    read_partition,
)
from flwr_perdl.protocol.report import first_reason
from flwr_perdl.protocol.request import TooFewReplies

#: Characters of a client's name in logs and reports.
_LONGEST_NAME = 80
#: What a project can do whose nodes do not say who they are.
_REMEDY = (
    "; an app of flwr_perdl.clients.client_app says who a client is, as does one that answers in "
    'its @app.query() with the ConfigRecord "config": {"partition-id": ...}'
)
#: What reasons say of a node that does not answer who it is.
_NO_ANSWER = ("query", PARTITION_ID, f"no ConfigRecord {CONFIG!r}")
#: A name that could be taken for the number of another client.
_NUMBERED = re.compile(r"\d+( \(.*\))?")


class Roster:
    """Which node is which client: Flower's node ids are random, partitions are not.

    Of several nodes that say that they are the same client, the first has the place as long as it
    is present. A newcomer makes the driver ask the first again (`contested`): a node that has died
    counts as present for a while, and the newcomer may be its successor.

    Parameters
    ----------
    allowed : mapping, optional
        Partition by node: no other node takes part, and none as another client.
    """

    def __init__(self, allowed: Mapping[int, int] | None = None) -> None:
        self.allowed = allowed
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
        #: Why nodes take no part that do not say who they are.
        self.strangers: dict[int, str] = {}
        #: Why nodes that are there now, and were asked, do not say who they are.
        self.unanswered: dict[int, str] = {}

    def unknown(self, nodes: Iterable[int]) -> list[int]:
        """Return the nodes that are to say who they are."""
        known = self._partitions.keys() - self._silent
        return [node for node in nodes if node not in known and self._admits(node)]

    def enrol(self, node: int, properties: Mapping[str, Any]) -> None:
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
        # The order in which nodes enrolled decides who has a place, and dicts keep that order.
        if self._partitions.get(node, partition) != partition:
            del self._partitions[node]  # who becomes another client is not the first to be it
        self._partitions[node] = partition
        self.private.pop(partition, None)
        if patterns := properties.get(PRIVATE):
            self.private[partition] = printable(str(patterns), _LONGEST_NAME)
        (self.uncounted.add if properties.get(UNCOUNTED) else self.uncounted.discard)(partition)
        name = properties.get(NAME)
        own = printable(name, _LONGEST_NAME) if isinstance(name, str) else ""
        self._names[node] = own or str(partition)
        if own and partition == named_partition(str(name)):
            self._hashed.add(partition)
        if partition not in self.names:
            self._call(partition, self._names[node])

    def refuse(self, node: int, reason: str) -> None:
        """Note why a node takes no part; one that has enrolled loses its place until it answers."""
        self._silent.add(node)
        self.strangers[node] = brief(reason)
        log(
            WARNING,
            "Left out node %s, whose client does not say who it is: %s",
            *(node, self.strangers[node]),
        )

    def contested(self, nodes: Collection[int]) -> list[int]:
        """Return the nodes whose place a newcomer claims: they are to say again who they are."""
        here = self._here(nodes)
        # A node that was restarted has another id: its old one may be listed for a while yet.
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

    def present(self, nodes: Collection[int]) -> dict[int, int]:
        """Return the present clients' nodes by partition, ascending; the first enrolled wins."""
        here = self._here(nodes)
        holders = self._holders(here)
        self.unanswered = {
            node: self.strangers[node]
            for node in nodes
            if node in self._silent and self._partitions.get(node) not in holders
        }
        for node in here:
            holder = holders[self._partitions[node]]
            if node == holder:
                self._call(self._partitions[node], self._names[node])
            elif (holder, node) not in self._logged:
                self._logged.add((holder, node))
                log(
                    WARNING,
                    "Nodes %s and %s both say that they are %s: only %s, the first, is asked. Each "
                    "needs a partition-id of its own; clients_by_node says which node is which.",
                    *(holder, node, self.label(self._partitions[node]), holder),
                )
        return dict(sorted(holders.items()))

    def absence(self) -> str:
        """Return the clause that says why nodes take no part, and what to do; empty if all do."""
        reasons = {f"node {node}": why for node, why in self.strangers.items()}
        asks = any(mark in why for why in reasons.values() for mark in _NO_ANSWER)
        return first_reason(reasons) + (_REMEDY if asks else "")

    def _admits(self, node: int) -> bool:
        """Whether a node may take part; why not is logged once."""
        if self.allowed is None or node in self.allowed:
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
            return f"client {self.called(partition)}"
        return f"client {partition} ({name})"

    def called(self, partition: int) -> str:
        """Return a client's name, with its number where it is not unique; or its number alone."""
        name = self.names.get(partition, str(partition))
        alone = self._count[name] == 1 and not _NUMBERED.fullmatch(name)
        return name if alone or name == str(partition) else f"{partition} ({name})"

    def _call(self, partition: int, name: str) -> None:
        """Note a client's name."""
        self._count[self.names.get(partition, "")] -= 1
        self._count[name] += 1
        self.names[partition] = name


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
        text = "Waiting for clients to register: %d so far, %d needed, at most %g s."
        log(INFO, text, seen, wanted, options.node_timeout)
    # Without a number to wait for, a run begins when no client has come for a while.
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
