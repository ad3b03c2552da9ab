"""After the training: each client's own model, fine-tuned on request.

The clients' half is `flwr_perdl.clients.own_models`. No array leaves a client here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
from flwr_perdl.clients.base import identify
from flwr_perdl.clients.diffusion_averaging import AVERAGING
from flwr_perdl.clients.diffusion_averaging import kept_model as kept_by_averaging
from flwr_perdl.clients.ditto import DITTO
from flwr_perdl.clients.ditto import kept_model as kept_by_ditto
from flwr_perdl.clients.kept_atoms import kept_local
from flwr_perdl.clients.own_models import (
    INITIAL,
    MOST_FITS,
    N_FITS,
    OWN_MODELS,
    TRAINED,
    TUNE,
    Find,
    kept_model,
)
from flwr_perdl.clients.perma import PERMA
from flwr_perdl.clients.personalized import Patterns, check_patterns
from flwr_perdl.clients.ridge import RIDGE
from flwr_perdl.clients.ridge import kept_model as kept_by_ridge
from flwr_perdl.clients.transport import HALF
from flwr_perdl.core.checks import Matrix, check_choice, check_count, check_kind, plain
from flwr_perdl.protocol.driver import ProtocolRun
from flwr_perdl.protocol.records import (
    ARRAYS,
    CONFIG,
    HIGHER_IS_BETTER,
    LEFT_OUT,
    LOSSES,
    METRIC,
    NAME,
    PARTITION_ID,
    Reply,
    for_evaluations,
    named,
    read_reply,
    scalars,
    to_record,
)
from flwr_perdl.protocol.report import is_higher_better
from flwr_perdl.protocol.request import read_replies
from flwr_perdl.protocol.roster import LocalGrid
from flwr_perdl.protocol.strategy import ProtocolStrategy

#: How a client's own arrays are found, where they are others than its private ones.
_FIND: Mapping[str, Find] = {
    AVERAGING: kept_by_averaging,
    DITTO: kept_by_ditto,
    PERMA: kept_local,
    RIDGE: kept_by_ridge,
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


def contexts_on(grid: Grid) -> dict[int, Context]:
    """Return the contexts of the clients in this process, by partition."""
    nodes = grid.contexts.values() if isinstance(grid, LocalGrid) else ()
    return {int(identify(context)[PARTITION_ID]): context for context in nodes}


def _own_name(client: int, name: str) -> str:
    """Return what a client calls itself, of what reports call it where that is not unique."""
    numbered = f"{client} ("
    return name[len(numbered) : -1] if name.startswith(numbered) else name


@dataclass(frozen=True, eq=False)
class Own:
    """Where the clients' own models are, and what they are made of.

    Attributes
    ----------
    run, token : str
        The run in words, and what it is called in the clients' states.
    protocol : str
        The protocol whose steps clients take after the run.
    arrays : sequence of str
        The names of a model's arrays.
    names : mapping of int to str
        What reports call the clients.
    apart : collection of int
        The clients whose own model has arrays that ``base`` has not.
    base : callable
        ``client -> model``: the shared model that a client takes, None if there is none.
    contexts : mapping of int to Context
        Of the clients in this process.
    """

    run: str = ""
    token: str = ""
    protocol: str = OWN_MODELS
    arrays: Sequence[str] = ()
    names: Mapping[int, str] = field(default_factory=dict)
    apart: Collection[int] = ()
    base: Callable[[int], Mapping[str, Array] | None] = lambda _: None
    contexts: Mapping[int, Context] = field(default_factory=dict)

    def model_of(self, client: int | str, state_dir: str | Path | None) -> ArrayRecord:
        """Return a client's own model, see `Learned.model_of`."""
        check_kind("state_dir", state_dir, (str, Path, type(None)), "a path or None")
        known: dict[int | str, int] = {name: p for p, name in self.names.items()}
        known |= {p: p for p in self.names}
        if type(plain(client)) not in (int, str) or client not in known:
            raise ValueError(
                f"client must be one of the run, by its partition or name, got {client!r}."
            )
        number = known[client]
        base, context = self.base(number), self.contexts.get(number)
        if state_dir is not None:
            context = context_of(number, self.names[number], state_dir)
        own: Mapping[str, Array] | None = None
        if context is not None:
            own = kept_model(context, self.token, self.arrays, find=_FIND.get(self.protocol))
        found = {**(base or {}), **(own or {})}
        if (own is None and number in self.apart) or not {*self.arrays} <= {*found}:
            raise ValueError(AT_HAND.format(client=client, state_dir=state_dir))
        return named([*found.values()], [*found])


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
    >>> list(Learned(ArrayRecord()).shared)
    []
    """

    shared: ArrayRecord
    own: Own = field(default_factory=Own)

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


class EndsWithModels(ProtocolStrategy):
    """A strategy whose clients end with a model of their own."""

    #: The protocol whose steps its clients take after the run.
    after_protocol: ClassVar[str] = OWN_MODELS
    _part: Patterns | None = None
    _initial: Sequence[Matrix]
    _contexts: Mapping[int, Context]

    def open(self, initial: list[Matrix], names: Iterable[str] = ()) -> ProtocolRun:
        """Begin a run, or take it up from its checkpoint."""
        self._initial, self._contexts = initial, {}
        return super().open(initial, names)

    def _after_rounds(self, grid: Grid, result: Result) -> None:
        """Have the clients fine-tune their own models, once."""
        self._contexts = contexts_on(grid)
        if self.fine_tune and all(report.step != TUNE for report in self.history):
            self._tune(grid)
        self._add_tuned(result)

    def _add_tuned(self, result: Result, round_: int | None = None) -> None:
        """Add what the clients measured of their own models to Flower's result."""
        for report in self.history:
            if report.step == TUNE:
                metrics = MetricRecord(dict(report.aggregate))
                result.evaluate_metrics_clientapp[round_ or report.round] = metrics

    def shared_models(self) -> list[list[Matrix]]:
        """Return the models of which a client takes one, none if the server has none."""
        names = self._array_names()
        model = self._running().record.model
        return [model[at : at + len(names)] for at in range(0, len(model), len(names))]

    def private_names(self) -> list[str]:
        """Return the names of the arrays that stay at the clients."""
        return [] if self._part is None else self._part.private(self._array_names())

    def _array_names(self) -> list[str]:
        """Return the names of a model's arrays."""
        return self._running().record.array_names

    @property
    def own(self) -> Own:
        """Where the clients' own models are."""
        if self._run is None:
            return Own()
        record, names = self._run.record, self.client_names
        apart = {p for one in self.history if one.step == TUNE for p in one.metrics}
        apart |= {*self._run.roster.private}
        return Own(
            f"{type(self).__name__}, rounds: {self._shown_rounds(record.done)}",
            record.token,
            self.after_protocol,
            self._array_names(),
            names,
            {*names} if self.private_names() or self.after_protocol in _FIND else apart,
            self._model_for,
            self._contexts,
        )

    def _tune(self, grid: Grid) -> None:
        """Ask all clients to fine-tune their own models."""
        run, names, private = self._running(), self._array_names(), self.private_names()
        models: dict[str, Sequence[Matrix]]
        models = {str(j): model for j, model in enumerate(self.shared_models())}
        models = models or {INITIAL: self._initial}
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
        trained = run.trained
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
        metric: str = LOSSES[0],
        higher_is_better: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.metric = check_kind("metric", metric, str, "a name")
        self.higher_is_better = is_higher_better(metric, higher_is_better)
        if metric not in LOSSES or self.higher_is_better:
            self._told = {METRIC: metric, HIGHER_IS_BETTER: self.higher_is_better}
        self._part = Patterns.of("private", private, share)
        self.private = check_patterns("private", private)
        self.share = check_patterns("share", share)
        wires = (HALF.name,)
        self.transport = None if transport is None else check_choice("transport", transport, wires)
        self.fine_tune = check_count("fine_tune", fine_tune, 0, MOST_FITS)
        self._chooses = bool(fine_tune)
