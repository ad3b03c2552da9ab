"""After the training: each client's own model, fine-tuned on request.

The clients' half is `flwr_perdl.clients.own_models`. No array leaves a client here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, ClassVar

from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from flwr_perdl.clients._states import NodeStates
from flwr_perdl.clients.diffusion_averaging import AVERAGING, node_model
from flwr_perdl.clients.ditto import DITTO, personal_model
from flwr_perdl.clients.kept_atoms import kept_local
from flwr_perdl.clients.own_models import (
    INITIAL,
    N_FITS,
    OWN_MODELS,
    TRAINED,
    TUNE,
    Find,
    kept_model,
)
from flwr_perdl.clients.perma import PERMA
from flwr_perdl.clients.ridge import RIDGE, ridge_model
from flwr_perdl.core import html
from flwr_perdl.core.checks import Matrix, check_kind, plain
from flwr_perdl.parts.private import Patterns
from flwr_perdl.protocol.client_state import identify
from flwr_perdl.protocol.compat import new_record
from flwr_perdl.protocol.records import (
    ARRAYS,
    CLUSTER,
    CONFIG,
    LEFT_OUT,
    NAME,
    PARTITION_ID,
    Reply,
    for_evaluations,
    numbers_in,
    read_reply,
    scalars,
    to_record,
)
from flwr_perdl.protocol.report import summarize
from flwr_perdl.protocol.request import read_replies
from flwr_perdl.protocol.roster import LocalGrid
from flwr_perdl.protocol.strategy import ProtocolStrategy

#: How a client's own arrays are found, where they are others than its private ones.
_FIND: Mapping[str, Find] = {
    AVERAGING: node_model,
    DITTO: personal_model,
    PERMA: kept_local,
    RIDGE: ridge_model,
}
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
    who |= {} if name == str(client) else {NAME: _own_name(client, name)}
    return Context(0, 0, who, RecordDict(), {})


def contexts_on(grid: Grid | None) -> dict[int, Context]:
    """Return the contexts of the clients in this process, by partition."""
    nodes = grid.contexts.values() if isinstance(grid, LocalGrid) else ()
    return {int(identify(context)[PARTITION_ID]): context for context in nodes}


def _own_name(client: int, name: str) -> str:
    """Return what a client calls itself, of what reports call it where that is not unique."""
    numbered = f"{client} ("
    return name[len(numbered) : -1] if name.startswith(numbered) else name


@dataclass(frozen=True, eq=False, repr=False)
class Learned:
    """What a run has learned, with any strategy.

    Attributes
    ----------
    shared : ArrayRecord or list of ArrayRecord
        The model from which a new client starts; of several clusters the list of theirs. It is
        empty where the server has no model.
    members : dict of int to int
        Which of the models is each client's, by partition: all 0 where there is one.
    metrics : dict of int to dict
        What each client reported last, by partition.
    names : mapping of int to str
        What reports call the clients.
    run, token : str
        The run in words, and what it is called in the clients' states.
    protocol : str
        The protocol whose steps clients take after the run.
    arrays : sequence of str
        The names of a model's arrays.
    apart : collection of int
        The clients whose own model has arrays that no shared one has.
    contexts : mapping of int to Context
        Of the clients in this process.
    saved : callable, optional
        ``client -> model``: what is saved as its own, or None.

    Examples
    --------
    >>> from flwr.app import ArrayRecord
    >>> from flwr_perdl.strategies import Learned
    >>> metrics = {i: {"num-examples": 10, "loss": i / 4} for i in range(3)}
    >>> learned = Learned([ArrayRecord(), ArrayRecord()], {0: 0, 1: 1, 2: 1}, metrics)
    >>> learned.sizes
    [1, 2]
    >>> print(learned.table())
    model  clients   loss
        0        1      0
        1        2  0.375
    """

    shared: ArrayRecord | list[ArrayRecord]
    members: dict[int, int] = field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)
    run: str = ""
    token: str = ""
    protocol: str = OWN_MODELS
    arrays: Sequence[str] = ()
    apart: Collection[int] = ()
    contexts: Mapping[int, Context] = field(default_factory=dict)
    saved: Callable[[int], ArrayRecord | None] | None = None

    @property
    def models(self) -> list[ArrayRecord]:
        """The shared models, also a single one, in a list."""
        return [self.shared] if isinstance(self.shared, ArrayRecord) else self.shared

    @property
    def sizes(self) -> list[int]:
        """The number of clients of each model."""
        own = [*self.members.values()]
        return [own.count(j) for j in range(max(len(self.models), 1 + max(own, default=-1)))]

    def shared_of(self, client: int) -> ArrayRecord | None:
        """Return the shared model that a client takes, None if there is none.

        Parameters
        ----------
        client : int
            Its partition.

        Returns
        -------
        ArrayRecord or None

        Raises
        ------
        ValueError
            If there are several, and it has chosen none.
        """
        if len(self.models) < 2:
            return next(iter(self.models), None)
        if client not in self.members:
            raise ValueError(f"client must have chosen a cluster in the run, got client {client}.")
        return self.models[self.members[client]]

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
        check_kind("state_dir", state_dir, (str, Path, type(None)), "a path or None")
        known: dict[int | str, int] = {name: p for p, name in self.names.items()}
        known |= {p: p for p in self.names}
        if type(plain(client)) not in (int, str) or client not in known:
            raise ValueError(
                f"client must be one of the run, by its partition or name, got {client!r}."
            )
        number = known[client]
        base = None if self.saved is None else self.saved(number)
        context = self.contexts.get(number)
        if state_dir is not None:
            context = context_of(number, self.names[number], state_dir)
        own: Mapping[str, Array] | None = None
        if context is not None:
            own = kept_model(context, self.token, self.arrays, find=_FIND.get(self.protocol))
        found = {**(base or self.shared_of(number) or {}), **(own or {})}
        apart = base is None and own is None and number in self.apart
        if apart or not {*self.arrays} <= {*found}:
            raise ValueError(AT_HAND.format(client=client, state_dir=state_dir))
        return new_record(ArrayRecord, found)

    def table(self) -> str:
        """Return a table with a row per model: its clients, and their mean metrics.

        Returns
        -------
        str
        """
        rows: list[dict[str, Any]] = []
        for j, size in enumerate(self.sizes):
            said = {p: {**one} for p, one in self.metrics.items() if self.members.get(p) == j}
            for one in said.values():
                one.pop(CLUSTER, None)
            rows.append({"model": j, "clients": size, **summarize(said)})
        columns = list(dict.fromkeys(name for row in rows for name in row))
        cells = [columns, *([html.text(row.get(name, "")) for name in columns] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = (map(str.rjust, line, widths) for line in cells)
        return "\n".join(map("  ".join, lines))

    def __repr__(self) -> str:
        """Return how many models and clients there are."""
        return f"{type(self).__name__}({len(self.models)} models, {len(self.names)} clients)"

    def _repr_html_(self) -> str:
        """Return the table, for a notebook."""
        return html.section(repr(self), f"<pre>{escape(self.table())}</pre>")


class EndsWithModels(ProtocolStrategy):
    """A strategy whose clients end with a model of their own."""

    #: The protocol whose steps its clients take after the run.
    after_protocol: ClassVar[str] = OWN_MODELS
    _part: Patterns | None = None

    def _add_tuned(self, result: Result, round_: int | None = None) -> None:
        """Add what the clients measured of their own models to Flower's result."""
        for report in self.history:
            if report.step == TUNE:
                metrics = MetricRecord(dict(report.aggregate))
                result.evaluate_metrics_clientapp[round_ or report.round] = metrics

    def private_names(self) -> list[str]:
        """Return the names of the arrays that stay at the clients."""
        return [] if self._part is None else self._part.private(self._array_names())

    @property
    def result(self) -> Learned:
        """What the run has learned so far: the shared models, and where each client's own is."""
        if self._run is None:
            return Learned([])
        record, names, (models, members) = self._run.record, self.client_names, self._found()
        shared, metrics = [*map(self._named, models)], dict[int, dict[str, float]]()
        for report in reversed(self.history):
            new = report.metrics.keys() - metrics.keys()
            metrics |= {p: numbers_in(report.metrics[p]) for p in new}
        apart = {p for one in self.history for p in one.metrics if one.step == TUNE}
        steps = {"", *(report.step for report in self.history)}
        if self.private_names() or (self.after_protocol in _FIND and self._last_step in steps):
            apart = {*names}
        return Learned(
            shared[0] if len(shared) == 1 else shared,
            members,
            dict(sorted(metrics.items())),
            names,
            f"{type(self).__name__}, rounds: {max(record.done - self._ahead, 0)}",
            record.token,
            self.after_protocol,
            self._array_names(),
            apart | {*self._run.roster.private},
            contexts_on(self._grid),
            self._sent_by.get,
        )

    def _tune(self, grid: Grid, result: Result) -> None:
        """Have all clients fine-tune their own models, once."""
        if all(report.step != TUNE for report in self.history):
            self._ask_to_tune(grid)
        self._add_tuned(result)

    def _ask_to_tune(self, grid: Grid) -> None:
        """Ask all clients to, and take in what they measure."""
        run, names, private = self._running(), self._array_names(), self.private_names()
        models: dict[str, Sequence[Matrix]]
        models = {str(j): model for j, model in enumerate(self._models)}
        models = models or {INITIAL: run.initial}
        flat = [array for model in models.values() for array in model]
        nodes = self._present(grid)
        left_out = {LEFT_OUT: json.dumps(private)} if private else {}
        plan = run.plan_after(
            TUNE,
            dict.fromkeys(nodes, flat),
            {N_FITS: self.fine_tune, **left_out},
            self.after_protocol,
        )
        evaluations = for_evaluations(scalars(self._evaluate_config or {}))
        config = {**(self._train_config or {}), **evaluations, **plan.config}
        record = to_record(flat, [f"{which}/{name}" for which in models for name in names])
        # Who has trained must have a model of its own: it may have lost it, a newcomer may not.
        contents = {
            trained: RecordDict(
                {ARRAYS: record, CONFIG: ConfigRecord({**config, TRAINED: trained})}
            )
            for trained in (False, True)
        }
        trained = run.record.history.trained
        sent = [
            (p, Message(contents[p in trained], n, MessageType.TRAIN)) for p, n in nodes.items()
        ]
        replies = grid.send_and_receive([message for _, message in sent], timeout=self._timeout)
        limits = run.limits._replace(expect=(), max_values=0)  # numbers come, and no arrays

        def read(message: Message) -> Reply:
            reply = read_reply(message.content, limits)
            self.check_evaluation(reply, run.record.model)
            return reply

        good, lost = read_replies(sent, replies, read)
        self._tell(run.conclude_after(dict(sorted(good.items())), lost))
