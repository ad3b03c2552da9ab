"""Nodes in Ray actors: messages go from actor to actor, not through the driver.

Every actor hosts some nodes, next to each other by id. In a round it puts its nodes' messages into
Ray's object store and gives the driver a reference; the driver passes references to the actors
that host neighbors, which fetch the messages themselves. The driver waits for rounds to be done
(which tells it when an actor is lost), and sees states only where a callback or a stopping rule
asks for them. Every actor computes with one BLAS thread: there are as many actors as processors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from logging import getLogger
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.checks import check_count
from flwr_perdl.core.extras import load_extra
from flwr_perdl.network.combine import Array, Program, State
from flwr_perdl.network.exchange import Ended, Host, Network, joined
from flwr_perdl.network.schedule import LinkPlan

#: How many rounds the driver asks for ahead of the slowest actor.
AHEAD = 16

_LOG = getLogger(__name__)


@dataclass(eq=False, repr=False)
class RayNetwork(Network):
    """Nodes in Ray actors that send messages to their neighbors only.

    Runs on the Ray cluster that this process is connected to; without one, it starts one on this
    machine and ends it afterwards. If an actor is lost, its nodes are silent from then on, the
    others continue, and the log says so. If a program has a method ``hosted(nodes)`` that returns
    it with these nodes' data only, an actor receives only that. With a ``callback`` or ``stop`` the
    driver fetches the states and waits in every round; ``on_report`` is called up to 16 rounds
    after the fastest actor.

    Parameters
    ----------
    topology, weights, faults, staleness
        As in `InMemoryNetwork`.
    agents_per_actor : int, optional
        Nodes per actor; by default one actor per processor of the cluster.

    Raises
    ------
    ValueError
        As `InMemoryNetwork`; or if ``agents_per_actor`` is less than one.
    ImportError, RuntimeError
        In a run: if Ray is not installed; if all actors are lost.

    Examples
    --------
    >>> from flwr_perdl.network import Topology
    >>> from flwr_perdl.network import RayNetwork
    >>> network = RayNetwork(Topology.ring(4), agents_per_actor=2)
    """

    agents_per_actor: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Check the arguments."""
        super().__post_init__()
        if self.agents_per_actor is not None:
            check_count("agents_per_actor", self.agents_per_actor, 1)

    @contextmanager
    def _workers(self, program: Program[State], state: State | None) -> Iterator[_Workers]:
        with _ray() as ray:
            workers = _Workers(ray, self.plan, self._groups(ray))
            try:
                workers.begin(program, state)
                yield workers
            finally:
                workers.close()

    def _groups(self, ray: Any) -> list[NDArray[np.intp]]:
        """Return the nodes of every actor."""
        n, size = self.plan.n_nodes, self.agents_per_actor
        if size is None:
            size = -(-n // max(int(ray.cluster_resources().get("CPU", 1)), 1))
        return [np.arange(first, min(first + size, n)) for first in range(0, n, size)]


class _Actor:
    """The nodes of one actor."""

    def begin(
        self, program: Any, plan: LinkPlan, groups: list[NDArray[np.intp]], me: int, state: Any
    ) -> None:
        """Begin with a state, or the program's start; ``groups[me]`` are the nodes hosted here."""
        self._ray: Any = import_module("ray")
        if find_spec("threadpoolctl"):  # without it OMP_NUM_THREADS counts, which Ray sets to one
            import_module("threadpoolctl").threadpool_limits(1, "blas")
        self._program, self._me, self._nodes = program, me, groups[me]
        senders = plan.senders_to(self._nodes)
        self._host = Host(program, plan, self._nodes, senders, state)
        # The rows of every actor's messages that matter here; together, the mailbox's senders.
        self._rows = {i: np.flatnonzero(np.isin(nodes, senders)) for i, nodes in enumerate(groups)}

    def send(self, round_: int) -> list[Any]:
        """Do the work before the exchange of a round; return a reference to the messages."""
        self._sent = self._host.send(round_)
        return [self._ray.put(self._sent)]

    def step(
        self, round_: int, messages: Mapping[int, Any], last: bool
    ) -> tuple[list[Any], dict[str, Array]]:
        """Take in the messages of a round, and send those of the next one; return the reports."""
        blocks, there = [], []
        received = {self._me: self._sent, **self._fetched(messages)}
        for host, rows in self._rows.items():
            block = received.get(host)
            there.append(np.full(len(rows), block is not None))
            if block is None:
                blocks.append([np.zeros((len(rows), *a.shape[1:]), a.dtype) for a in self._sent])
            else:
                blocks.append([array[rows] for array in block])
        arrays = tuple(np.concatenate(parts) for parts in zip(*blocks, strict=True))
        reports = self._host.receive(round_, arrays, np.concatenate(there))
        return ([] if last else self.send(round_ + 1)), reports

    def _fetched(self, messages: Mapping[int, Any]) -> dict[int, tuple[Array, ...]]:
        """Return the messages of other actors, but for those that are lost."""
        try:
            references = [sent[0] for sent in self._ray.get(list(messages.values()))]
            return dict(zip(messages, self._ray.get(references), strict=True))
        except _lost(self._ray):
            if len(messages) == 1:
                return {}
        each = (self._fetched({host: sent}) for host, sent in messages.items())
        return {host: block for found in each for host, block in found.items()}

    def state(self) -> Any:
        """Return the state after the last round."""
        return self._host.state

    def ended(self) -> Ended:
        """Return the result of the actor's nodes."""
        return self._host.ended()[0]


class _Workers:
    """The actors of a run. The driver handles references to messages, never messages."""

    def __init__(self, ray: Any, plan: LinkPlan, groups: list[NDArray[np.intp]]) -> None:
        self._ray, self._plan, self._groups = ray, plan, groups
        home = np.repeat(np.arange(len(groups)), [len(nodes) for nodes in groups])
        self._hears = [set(home[plan.senders_to(nodes)].tolist()) for nodes in groups]
        make = ray.remote(_Actor).options(scheduling_strategy="SPREAD")
        self._actors: dict[int, Any] = {host: make.remote() for host in range(len(groups))}
        self._sent: dict[int, Any] = {}
        self._ahead: deque[dict[int, Any]] = deque()

    def begin(self, program: Program[State], state: State | None) -> None:
        """Begin with a state, or the program's start."""
        hosted: Callable[[NDArray[np.intp]], Any] | None = getattr(program, "hosted", None)
        whole = None if hosted else self._ray.put(program)
        plan, groups = self._ray.put(self._plan), self._ray.put(self._groups)
        begun = {}
        for host, actor in self._actors.items():
            nodes = self._groups[host]
            start = None if state is None else type(state)(*(leaf[nodes] for leaf in state))
            own = hosted(nodes) if hosted else whole
            begun[host] = actor.begin.remote(own, plan, groups, host, start)
        self._collect(begun)

    def step(self, round_: int, last: bool) -> list[dict[str, Array]]:
        """Begin a round; return what was reported in one that is `AHEAD` rounds ago."""
        if round_ == 1:
            self._sent = {host: actor.send.remote(1) for host, actor in self._actors.items()}
            self._collect(self._sent)
        here, done, self._sent = self._sent, {}, {}
        for host, actor in self._actors.items():
            messages = {h: here[h] for h in here if h in self._hears[host] and h != host}
            step = actor.step.options(num_returns=2)
            self._sent[host], done[host] = step.remote(round_, messages, last)
        self._ahead.append(done)
        if len(self._ahead) <= AHEAD:
            return []
        return [self._by_node(self._collect(self._ahead.popleft()))]

    def drain(self) -> Iterator[dict[str, Array]]:
        """Wait for all rounds, and return what was reported in them."""
        for done in self._ahead:
            yield self._by_node(self._collect(done))

    @property
    def state(self) -> Any:
        """The state of all nodes."""
        return joined(self._ask("state"))

    def ended(self) -> list[Ended]:
        """Return the results of all actors that are left."""
        return self._ask("ended")

    def _by_node(self, reports: Mapping[int, Mapping[str, Array]]) -> dict[str, Array]:
        """Return the reports of all nodes, NaN for those of lost actors."""
        names = dict.fromkeys(name for report in reports.values() for name in report)
        row = {name: np.full(self._plan.n_nodes, np.nan) for name in names}
        for host, report in reports.items():
            for name, values in report.items():
                row[name][self._groups[host]] = values
        return row

    def _ask(self, method: str) -> list[Any]:
        """Return the answers of all actors that are left."""
        answers = {host: getattr(actor, method).remote() for host, actor in self._actors.items()}
        return list(self._collect(answers).values())

    def _collect(self, answers: Mapping[int, Any]) -> dict[int, Any]:
        """Return the answers; an actor without one is lost, and one must be left."""
        collected = {}
        for host, answer in answers.items():
            try:
                collected[host] = self._ray.get(answer)
            except _lost(self._ray) as error:
                if self._actors.pop(host, None) is not None:
                    nodes, why = self._groups[host], str(error).splitlines()[0]
                    _LOG.warning("Nodes %d to %d are lost: %s", nodes[0], nodes[-1], why)
                if not self._actors:
                    raise RuntimeError(
                        f"a run on Ray must keep one actor, but all {len(self._groups)} are lost."
                    ) from error
        return collected

    def close(self) -> None:
        """End the actors."""
        for actor in self._actors.values():
            self._ray.kill(actor)


@contextmanager
def _ray() -> Iterator[Any]:
    """Import Ray and connect to it; end what was started here."""
    ray = load_extra("ray", "RayNetwork", "simulation")
    started = not ray.is_initialized()
    if started:
        ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        yield ray
    finally:
        if started:
            ray.shutdown()


def _lost(ray: Any) -> tuple[type[Exception], ...]:
    """Return the exceptions for a lost actor, or a lost object of it."""
    return ray.exceptions.RayActorError, ray.exceptions.ObjectLostError
