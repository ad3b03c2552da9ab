"""After the training: each client's own model, new clients, and the gain of each.

The clients' half is `flwr_perdl.clients.own_models`. No array leaves a client here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from flwr_perdl.clients._states import NodeStates
from flwr_perdl.clients.base import identify
from flwr_perdl.clients.own_models import (
    ADAPT,
    CLUSTER,
    COMPARE,
    FROZEN,
    INITIAL,
    MOST_FITS,
    N_FITS,
    OWN_MODELS,
    SHARED,
    Find,
    kept_model,
)
from flwr_perdl.clients.personalized import Part, check_patterns
from flwr_perdl.clients.transport import HALF
from flwr_perdl.core import html
from flwr_perdl.core.checks import Matrix, check_choice, check_count, check_kind, plain
from flwr_perdl.protocol.driver import ProtocolRun
from flwr_perdl.protocol.options import ServerSettings
from flwr_perdl.protocol.records import (
    ARRAYS,
    CONFIG,
    LEFT_OUT,
    NAME,
    NUM_EXAMPLES,
    PARTITION_ID,
    Reply,
    for_evaluations,
    named,
    read_reply,
    scalars,
    to_record,
)
from flwr_perdl.protocol.report import RoundReport
from flwr_perdl.protocol.request import read_replies
from flwr_perdl.protocol.roster import LocalGrid, Roster
from flwr_perdl.protocol.strategy import ProtocolStrategy

#: By client and model ("own", "shared", "initial"), the metrics of the client's evaluation.
Table = dict[int, dict[str, dict[str, float]]]
OWN_MODEL = "own"


#: Why a client's own model is not returned.
AT_HAND = (
    "client must keep its own arrays in this process, or state_dir must be the folder where it "
    "does (under `flwr run` the one in FLWR_PERDL_STATE_DIR when the SuperLink started), got "
    "client {client} with state_dir={state_dir!r}."
)


def context_of(client: int, name: str, state_dir: str | Path) -> Context:
    """Return a client's context by which what it keeps on disk is found."""
    together = NodeStates(Path(state_dir)).contexts()  # of a grid's nodes, in one file
    if client < len(together):
        return together[client]
    who: dict[str, Any] = {PARTITION_ID: client, "state-dir": str(state_dir)}
    who |= {} if name == str(client) else {NAME: name}
    return Context(0, 0, who, RecordDict(), {})


def contexts_on(grid: Grid) -> dict[int, Context]:
    """Return the contexts of the clients in this process, by partition."""
    nodes = grid.contexts.values() if isinstance(grid, LocalGrid) else ()
    return {int(identify(context)[PARTITION_ID]): context for context in nodes}


@dataclass(frozen=True, eq=False)
class Own:
    """Where the clients' own models are."""

    names: Mapping[int, str] = field(default_factory=dict)
    find: Callable[[int, str | Path | None], ArrayRecord] | None = None
    table: Table = field(default_factory=dict)
    run: str = ""

    @classmethod
    def of(cls, strategy: ProtocolStrategy, find: Any, table: Table | None = None) -> Own:
        """Return where the own models of a run's clients are found."""
        rounds = strategy._shown_rounds(strategy._running().record.done)
        run = f"{type(strategy).__name__}, rounds: {rounds}"
        return cls(dict(strategy.client_names), find, dict(table or {}), run)

    def model_of(self, client: int | str, state_dir: str | Path | None) -> ArrayRecord:
        """Return a client's own model, see `Learned.model_of`."""
        check_kind("state_dir", state_dir, (str, Path, type(None)), "a path or None")
        known: dict[int | str, int] = {name: p for p, name in self.names.items()}
        known |= {p: p for p in self.names}
        if type(plain(client)) not in (int, str) or client not in known or self.find is None:
            raise ValueError(
                f"client must be one of the run, by its partition or name, got {client!r}."
            )
        return self.find(known[client], state_dir)


@dataclass(frozen=True, eq=False)
class Learned:
    """What a run has learned.

    Attributes
    ----------
    shared : ArrayRecord
        The shared model, from which a new client starts.
    own : Own
        Where the clients' own models are: see `model_of`.

    Examples
    --------
    >>> from flwr.app import ArrayRecord
    >>> from flwr_perdl.strategies import Learned
    >>> Learned(ArrayRecord()).table
    {}
    """

    shared: ArrayRecord
    own: Own = field(default_factory=Own)

    @property
    def table(self) -> Table:
        """What `compare` measured, by client and model: "own", "shared" and "initial"."""
        return self.own.table

    def model_of(self, client: int | str, state_dir: str | Path | None = None) -> ArrayRecord:
        """Return a client's own model, with the names of the initial arrays.

        Parameters
        ----------
        client : int or str
            Its partition, or its name.
        state_dir : str or Path, optional
            Where the clients keep their state, if this machine may read it. By default their state
            in this process's memory.

        Returns
        -------
        ArrayRecord

        Raises
        ------
        ValueError
            If the client was not in the run, or its state is not available.
        """
        return self.own.model_of(client, state_dir)

    def _repr_html_(self) -> str:
        """Return the table, for a notebook."""
        rows = (
            ({"client": self.own.names.get(p, str(p)), "model": model}, metrics)
            for p, models in self.table.items()
            for model, metrics in models.items()
        )
        return html.titled(f"{len(self.own.names)} clients", html.metrics_table(rows))


class EndsWithModels(ProtocolStrategy):
    """A strategy whose clients end with a model of their own."""

    #: The protocol whose steps its clients take after the run.
    after_protocol: ClassVar[str] = OWN_MODELS
    fine_tune = 0
    _part: Part | None = None
    _initial: Sequence[Matrix]
    _contexts: Mapping[int, Context]
    _table: Table
    _ended = False

    def open(self, initial: list[Matrix], names: Iterable[str] = ()) -> ProtocolRun:
        """Begin a run, or take it up from its checkpoint."""
        self._initial, self._table, self._contexts, self._ended = initial, {}, {}, False
        return super().open(initial, names)

    def _after_rounds(self, grid: Grid) -> None:
        """Have the clients train their own models further, once."""
        self._ended, self._contexts = True, contexts_on(grid)
        if self.fine_tune and all(report.step != ADAPT for report in self.history):
            self._after(grid, self._present(grid), ADAPT, {N_FITS: self.fine_tune})

    @property
    def find_own(self) -> Find | None:
        """How a client's whole model is found, None where it is the shared one, but for a part."""
        return None

    def shared_models(self) -> list[list[Matrix]]:
        """Return the models of which a client takes one, none if the server has none."""
        names = self._array_names()
        model = self._running().record.model
        return [model[at : at + len(names)] for at in range(0, len(model), len(names))]

    def models_for(self, step: str) -> dict[str, Sequence[Matrix]]:
        """Return the models that clients receive with a step after the run, by name."""
        models: dict[str, Sequence[Matrix]] = {
            str(j): model for j, model in enumerate(self.shared_models())
        }
        if self._initial and (step == COMPARE or not models):  # a resumed run may have none
            models[INITIAL] = self._initial
        return models

    def private_names(self) -> list[str]:
        """Return the names of the arrays that stay at the clients."""
        return [] if self._part is None else self._part.private(self._array_names())

    def _array_names(self) -> list[str]:
        """Return the names of a model's arrays."""
        return self._running().record.array_names

    @property
    def own(self) -> Own:
        """Where the clients' own models are."""
        return Own() if self._run is None else Own.of(self, self._find, self._table)

    def onboard(self, grid: Grid, *, fits: int = 20) -> dict[int, dict[str, float]]:
        """Give clients that were not in the run their own models.

        A new client takes the shared model; of several the one with the lowest loss. If it has a
        private part, such as local atoms in `PerMA`, it trains this up to ``fits`` times with the
        shared part frozen; with ``fine_tune``, and where clients have whole models of their own, it
        trains the whole model. It keeps the best by the loss of its ``evaluate``, and uses it in
        later evaluations and in `Learned.model_of`. In `FedX` it finds its cluster.

        Parameters
        ----------
        grid : Grid
            The connection to the clients; those of the run are not asked.
        fits : int, default 20
            Largest number of trainings per client.

        Returns
        -------
        dict of int to dict of str to float
            By new client: the losses before and after, and the number of trainings of the model it
            kept.

        Raises
        ------
        ValueError
            If there is no new client, or the run had ``privacy``: this has no noise.
        RuntimeError
            If the run is not over.
        """
        check_count("fits", fits, 0, MOST_FITS)
        nodes, old = self._present_on(grid), self._running().record.names
        new = {p: node for p, node in nodes.items() if p not in old}
        if not new:
            raise ValueError(f"grid must have clients that were not in the run, got {len(nodes)}.")
        if not self.shared_models():
            raise ValueError(
                "strategy must have a model to begin with, got none: the server of "
                "DiffusionAveraging has one with shows_models=True alone."
            )
        private, whole = self.private_names(), self.fine_tune or self.after_protocol != OWN_MODELS
        config = {N_FITS: fits if private or whole else 0, FROZEN: bool(private and not whole)}
        return self._after(grid, new, ADAPT, config).metrics

    def compare(self, grid: Grid) -> Table:
        """Have every client evaluate its own model, the shared one and the initial one.

        Parameters
        ----------
        grid : Grid
            The connection to the clients.

        Returns
        -------
        dict
            By client (partition) and model ("own", "shared", "initial"), the metrics of the
            client's ``evaluate``; also `Learned.table`. "shared" is in `PerMA` the global atoms
            only, and in `FedX` the model of the largest cluster; "initial" is in `PerMA` the
            client's first dictionary, and in `FedX` without initial arrays zero.

        Raises
        ------
        ValueError
            If the run had ``privacy``: this has no noise.
        RuntimeError
            If the run is not over.
        """
        report = self._after(grid, self._present_on(grid), COMPARE, {})
        for partition, metrics in report.metrics.items():
            models: dict[str, dict[str, float]] = {OWN_MODEL: {}}
            for name, value in metrics.items():
                which, _, metric = name.rpartition("/")
                if name not in (NUM_EXAMPLES, CLUSTER):
                    key = which if which in (SHARED, INITIAL) else OWN_MODEL
                    models.setdefault(key, {})[metric if key != OWN_MODEL else name] = value
            self._table[partition] = models
        return dict(self._table)

    def _present_on(self, grid: Grid) -> dict[int, int]:
        """Return the nodes of all clients on a grid, which need not be the run's, by partition."""
        if not self._ended:
            raise RuntimeError("a strategy must have run to its end before, got one that has not.")
        check_kind("grid", grid, Grid, "a Grid")
        if self.privacy is not None:
            raise ValueError(
                f"privacy must be None for what comes after the run, which has no noise, got "
                f"{self.privacy!r}."
            )
        self._contexts = {**self._contexts, **contexts_on(grid)}
        run = self._running()
        run.roster = Roster(ServerSettings.of({"min_clients": 1}))
        return run.roster.find(grid, self._timeout)

    def _after(
        self, grid: Grid, nodes: Mapping[int, int], step: str, config: Mapping[str, Any]
    ) -> RoundReport:
        """Ask clients to take a step with the models that the run has come to."""
        run, names, models = self._running(), self._array_names(), self.models_for(step)
        flat = [array for model in models.values() for array in model]
        private = self.private_names()
        told = {**config, **({LEFT_OUT: json.dumps(private)} if private else {})}
        plan = run.plan_after(step, dict.fromkeys(nodes, flat), told, self.after_protocol)
        keys = [f"{which}/{name}" for which in models for name in names]
        evaluations = for_evaluations(scalars(self._evaluate_config or {}))
        config = ConfigRecord({**(self._train_config or {}), **evaluations, **plan.config})
        content = RecordDict({ARRAYS: to_record(flat, keys), CONFIG: config})
        sent = [(p, Message(content, node, MessageType.TRAIN)) for p, node in nodes.items()]
        replies = grid.send_and_receive([message for _, message in sent], timeout=self._timeout)
        limits = run.limits._replace(expect=(), max_values=0)  # numbers come, and no arrays

        def read(message: Message) -> Reply:
            reply = read_reply(message.content, limits)
            self.check_evaluation(reply, run.record.model)
            return reply

        good, lost = read_replies(sent, replies, read)
        report = run.conclude_after(dict(sorted(good.items())), lost)
        self._tell(report)
        return report

    def _find(self, client: int, state_dir: str | Path | None) -> ArrayRecord:
        """Return a client's own model."""
        run, names = self._running().record, self._array_names()
        context = self._contexts.get(client)
        if state_dir is not None:
            context = context_of(client, run.names.get(client, str(client)), state_dir)
        model = self._model_for(client)
        own: dict[str, Array] | None = None
        if context is not None:
            base = model or dict(to_record(self._initial, names))
            own = kept_model(context, run.token, base, find=self.find_own)
        if own is None and (model is None or self.private_names() or self.find_own is not None):
            raise ValueError(AT_HAND.format(client=client, state_dir=state_dir))
        found = own or model or {}
        return named([*found.values()], [*found])

    def _model_for(self, client: int) -> dict[str, Array] | None:
        """Return the shared model that a client takes, None if the server has none."""
        models = self.shared_models()
        return dict(to_record(models[0], self._array_names())) if models else None


class TrainsModels(EndsWithModels):
    """A strategy whose clients train models of any kind, of which a part may be private."""

    def __init__(
        self,
        *arguments: Any,
        private: str | Sequence[str] = (),
        share: str | Sequence[str] = (),
        transport: str | None = None,
        fine_tune: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._part = Part.of("private", private, share)
        self.private = check_patterns("private", private)
        self.share = check_patterns("share", share)
        wires = (HALF.name,)
        self.transport = None if transport is None else check_choice("transport", transport, wires)
        self.fine_tune = check_count("fine_tune", fine_tune, 0, MOST_FITS)
