"""Nodes in Ray actors: messages go from actor to actor, and not through the driver.

Every actor hosts some nodes, next to each other by id. In a round it puts its nodes' messages into
Ray's object store and gives the driver a reference; the driver passes references to the actors
that host neighbors, which fetch the messages themselves. The driver waits for rounds to be done
(which tells it when an actor is lost), and sees states only where a callback or a stopping rule
asks for them. Every actor computes with one BLAS thread: there are as many actors as processors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from logging import getLogger
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from flwr_perdl.core.checks import check_count
from flwr_perdl.diffusion.combine import Array, Csr, Program, State, curves
from flwr_perdl.diffusion.topology import CombinationMatrix, Topology
from flwr_perdl.network.exchange import Network, Plan, Run, spread, unheard_of
from flwr_perdl.network.faults import Faults
from flwr_perdl.network.memory import Host

#: How many rounds the driver asks for ahead of the slowest actor.
AHEAD = 16

_LOG = getLogger(__name__)


class RayNetwork(Network):
    """Nodes in Ray actors that send messages to their neighbors only: see `Network`.

    Runs on the Ray cluster that this process is connected to; if there is none, one is started on
    this machine and ended afterwards. If an actor is lost, its nodes are silent from then on; the
    others continue without them, and the log says so.

    Parameters
    ----------
    topology, weights, faults
        See `Network`.
    agents_per_actor : int, optional
        Nodes per actor; by default there is one actor per processor of the cluster.

    Raises
    ------
    ValueError
        See `Network`; or if ``agents_per_actor`` is less than one.

    Examples
    --------
    >>> from flwr_perdl.diffusion import Topology
    >>> from flwr_perdl.network import RayNetwork
    >>> network = RayNetwork(Topology.ring(4), agents_per_actor=2)
    """

    def __init__(
        self,
        topology: Topology,
        weights: CombinationMatrix | Sequence[CombinationMatrix] | None = None,
        faults: Faults | None = None,
        *,
        agents_per_actor: int | None = None,
    ) -> None:
        super().__init__(topology, weights, faults)
        if agents_per_actor is not None:
            check_count("agents_per_actor", agents_per_actor, 1)
        self.agents_per_actor = agents_per_actor

    def run(
        self,
        program: Program[State],
        n_rounds: int,
        *,
        state: State | None = None,
        callback: Callable[[int, State], Any] | None = None,
        stop: Callable[[State], bool] | None = None,
        on_report: Callable[[int, dict[str, Array]], Any] | None = None,
    ) -> Run:
        """Run a distributed algorithm for some rounds: see `InMemoryNetwork.run`.

        Parameters
        ----------
        program : Program
            If it has a method ``hosted(nodes)`` that returns it with these nodes' data only, an
            actor receives no more than that.
        n_rounds, state
            See `InMemoryNetwork.run`.
        callback, stop : callable, optional
            See `InMemoryNetwork.run`; the driver then fetches the states and waits in every round.
        on_report : callable, optional
            See `InMemoryNetwork.run`; called up to ``AHEAD`` rounds after the fastest actor.

        Returns
        -------
        Run
            Of lost nodes there is no state (the field ``nodes`` says whose there is), what they
            observed is NaN, and ``alive`` is False.

        Raises
        ------
        ModuleNotFoundError
            If Ray is not installed.
        RuntimeError
            If all actors are lost.
        """
        check_count("n_rounds", n_rounds)
        with _ray() as ray:
            crew = _Crew(ray, self.plan, self._groups(ray))
            try:
                rows = crew.go(program, n_rounds, state, callback, stop, on_report)
                ends = crew.ask("end")
            finally:
                crew.dismiss()
        faults, n, done = self.plan.faults, self.plan.n_nodes, len(rows)
        there = np.zeros(n, dtype=bool)
        there[np.concatenate([end.nodes for end in ends])] = True
        traffic = sum((end.traffic for end in ends), sparse.csr_array((n, n)))
        return Run(
            state=_joined([end.state for end in ends]),
            observed={
                name: spread(np.concatenate([end.observed[name] for end in ends]), there)
                for name in ends[0].observed
            },
            rounds=done,
            floats_sent=float(traffic.sum()),
            traffic=traffic,
            unheard=unheard_of(set().union(*(end.left_out for end in ends))),
            alive=faults.awake(n, max(done, 1)) & there,
            curves=curves(rows, n),
        )

    def _groups(self, ray: Any) -> list[NDArray[np.intp]]:
        """Return the nodes of every actor."""
        n, size = self.plan.n_nodes, self.agents_per_actor
        if size is None:
            size = -(-n // max(int(ray.cluster_resources().get("CPU", 1)), 1))
        return [np.arange(first, min(first + size, n)) for first in range(0, n, size)]


class _End(NamedTuple):
    """The result of an actor's nodes."""

    nodes: NDArray[np.intp]
    state: Any
    observed: dict[str, Array]
    traffic: Csr
    left_out: set[tuple[int, int]]


class _Actor:
    """The nodes of one actor."""

    def begin(
        self, program: Any, plan: Plan, groups: list[NDArray[np.intp]], me: int, state: Any
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
        self._host.receive(round_, arrays, np.concatenate(there))
        reports = self._host.reported(round_)
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

    def end(self) -> _End:
        """Return the result of the actor's nodes."""
        state, mailbox = self._host.state, self._host.mailbox
        observed = self._program.observe(state)
        return _End(self._nodes, state, observed, mailbox.traffic, mailbox.left_out)


class _Crew:
    """The actors of a run. The driver handles references to messages, never messages."""

    def __init__(self, ray: Any, plan: Plan, groups: list[NDArray[np.intp]]) -> None:
        self._ray, self._plan, self._groups = ray, plan, groups
        home = np.repeat(np.arange(len(groups)), [len(nodes) for nodes in groups])
        self._hears = [set(home[plan.senders_to(nodes)].tolist()) for nodes in groups]
        make = ray.remote(_Actor).options(scheduling_strategy="SPREAD")
        self._actors: dict[int, Any] = {host: make.remote() for host in range(len(groups))}

    def go(
        self,
        program: Program[State],
        n_rounds: int,
        state: State | None,
        callback: Callable[[int, Any], Any] | None,
        stop: Callable[[Any], bool] | None,
        on_report: Callable[[int, dict[str, Array]], Any] | None,
    ) -> list[dict[str, Array]]:
        """Run up to ``n_rounds`` rounds and return what the nodes reported after each."""
        hosted: Callable[[NDArray[np.intp]], Any] | None = getattr(program, "hosted", None)
        whole = None if hosted else self._ray.put(program)
        plan, groups = self._ray.put(self._plan), self._ray.put(self._groups)
        begun = {}
        for host, actor in self._actors.items():
            nodes = self._groups[host]
            start = None if state is None else _rows(state, nodes)
            own = hosted(nodes) if hosted else whole
            begun[host] = actor.begin.remote(own, plan, groups, host, start)
        self._collect(begun)
        sent = {h: actor.send.remote(1) for h, actor in self._actors.items() if n_rounds}
        self._collect(sent)
        ahead: deque[dict[int, Any]] = deque()
        rows: list[dict[str, Array]] = []

        def note(done: Mapping[int, Any]) -> None:
            """Wait until a round is done, and note what was reported."""
            rows.append(self._by_node(self._collect(done)))
            if on_report is not None:
                on_report(len(rows), rows[-1])

        for round_ in range(1, n_rounds + 1):
            here, sent, done = sent, {}, {}
            for host, actor in self._actors.items():
                messages = {h: here[h] for h in here if h in self._hears[host] and h != host}
                step = actor.step.options(num_returns=2)
                sent[host], done[host] = step.remote(round_, messages, round_ == n_rounds)
            ahead.append(done)
            if len(ahead) > AHEAD:
                note(ahead.popleft())
            if callback is not None or stop is not None:
                now = _joined(self.ask("state"))
                if callback is not None:
                    callback(round_, now)
                if stop is not None and stop(now):
                    break
        for done in ahead:
            note(done)
        return rows

    def _by_node(self, reports: Mapping[int, Mapping[str, Array]]) -> dict[str, Array]:
        """Return the reports of all nodes, NaN for those of lost actors."""
        names = dict.fromkeys(name for report in reports.values() for name in report)
        row = {name: np.full(self._plan.n_nodes, np.nan) for name in names}
        for host, report in reports.items():
            for name, values in report.items():
                row[name][self._groups[host]] = values
        return row

    def ask(self, method: str) -> list[Any]:
        """Return the answers of all actors that are left."""
        answers = {host: getattr(actor, method).remote() for host, actor in self._actors.items()}
        return list(self._collect(answers).values())

    def _collect(self, answers: Mapping[int, Any]) -> dict[int, Any]:
        """Return the answers; an actor without one is lost.

        Raises
        ------
        RuntimeError
            If no actor is left.
        """
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

    def dismiss(self) -> None:
        """End the actors."""
        for actor in self._actors.values():
            self._ray.kill(actor)


@contextmanager
def _ray() -> Iterator[Any]:
    """Import Ray and connect to it; end what was started here."""
    if find_spec("ray") is None:
        raise ModuleNotFoundError(
            "RayNetwork needs Ray, which is not installed (the extra 'simulation' brings it)."
        )
    ray: Any = import_module("ray")
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


def _rows(state: Any, nodes: NDArray[np.intp]) -> Any:
    """Return the state of some nodes."""
    return type(state)(*(leaf[nodes] for leaf in state))


def _joined(states: Sequence[Any]) -> Any:
    """Return the state of all nodes of states that follow each other."""
    return type(states[0])(*(np.concatenate(leaves) for leaves in zip(*states, strict=True)))
