"""The client of a diffusion: one node, which talks to its neighbours through the server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context
from flwr.common import log
from numpy.typing import NDArray

from flwr_perdl._checks import (
    Matrix,
    check_array,
    check_choice,
    check_count,
    check_flag,
    check_kind,
)
from flwr_perdl._records import ANEW, ROUND, RUN, STEP, Scalar
from flwr_perdl._store import LAST_ROUND
from flwr_perdl._threads import one_blas_thread
from flwr_perdl.clients._state import PrivateState, private_shelf
from flwr_perdl.clients.app import Member
from flwr_perdl.diffusion.combine import Array, Program
from flwr_perdl.network._exchange import Letter, finite_rows, inbox_of
from flwr_perdl.network._packing import pack_arrays, text_array, texts_of
from flwr_perdl.network.sealed import Keys, Rejected, read_key, read_pinned

#: The protocol's steps.
ANNOUNCE = "announce"
EXCHANGE = "exchange"
SHOW = "show"
#: The keys of its requests' config: the algorithm's round, and who sleeps through it.
AT = "perdl.at"
ASLEEP = "perdl.asleep"
SEALED = "perdl.sealed"
#: The metrics of its replies: floats of the message, whether it is broken, whose letters were left
#: out.
FLOATS = "floats"
BROKEN = "broken"
REJECTED = "rejected-"
#: How the state's fields are called among what a node shows.
STATE = "state."

SHOWS = ("observed", "state", "nothing")

#: The private state, besides the program's: the round whose letters it waits for, and its key; or,
#: where the run is over for this node, the metrics of its last reply.
_PENDING = "pending"
_RUN_KEY = "run-key"
_OVER = "over"
_NONE = np.zeros(1, dtype=int)
#: Up to here every whole number is a float.
_LARGEST = 2**53


class DiffusionClient(Member):
    """A node of a network that runs a distributed algorithm, with this node's data only.

    In every round the node receives its neighbours' messages of the last round, combines them,
    does its work for the next round, and sends its own message, which the server hands on. What
    leaves the node: its messages to its neighbours, which the server can read unless they are
    sealed (see `flwr_perdl.network.sealed`); how many floats they have, and whose letters could not
    be read; and at the end what ``shows`` says. What the messages give away is the algorithm's
    affair: its docstring says it, for neighbors that do as they should. One that sends what it
    likes, and a server that can write letters, may learn samples from the answers.

    Parameters
    ----------
    program : Program
        The algorithm, with the data of this node only. Its ``start`` is called for every message
        and should be cheap.
    context : Context
        What Flower hands to the client's factory; says which node this is (``partition-id``) and
        keeps its state.
    shows : {"observed", "state", "nothing"}, default "observed"
        What the server receives at the end: what the program's ``observe`` returns; the whole
        state besides; or nothing.
    sealed : bool, default False
        Whether the node refuses to send messages that the server can read. A node that pins its
        neighbours' keys always does.
    max_delay : int, default 0
        How many rounds late a message may be; an older one is left out.
    on_end : callable, optional
        Called at the node with its last state; more than once if the server asks again.
    state_dir : str or Path, optional
        Folder for the private state; by default ``state-dir`` of the node config, then of the run
        config, and nothing is kept on disk where both are missing.

    Notes
    -----
    With sealed letters the last step ends the run for the node: it deletes its key of the run, in
    memory and on disk, and answers from then on only with what it has shown.

    Node config: ``key-file`` is the file of this node's lasting private key, ``neighbour-keys``
    the JSON file of its neighbours' public keys, which pins them.

    Raises
    ------
    ValueError
        If who the node is is not known, or its keys are not readable.
    """

    def __init__(
        self,
        program: Program[Any],
        context: Context,
        *,
        shows: str = "observed",
        sealed: bool = False,
        max_delay: int = 0,
        on_end: Callable[[Any], Any] | None = None,
        state_dir: str | Path | None = None,
    ) -> None:
        super().__init__(context)
        for method in ("start", "message", "combine", "adapt", "observe"):
            if not callable(getattr(program, method, None)):
                raise TypeError(
                    f"program must be a Program with a method {method}, got {program!r}."
                )
        if on_end is not None and not callable(on_end):
            raise TypeError(f"on_end must be a function or None, got {on_end!r}.")
        check_kind("state_dir", state_dir, (str, Path, type(None)), "a path or None")
        self.program = program
        self.context = context
        self.shows = check_choice("shows", shows, SHOWS)
        self.max_delay = check_count("max_delay", max_delay)
        self.on_end = on_end
        self.node = self.partition
        key_file, pinned = (context.node_config.get(k) for k in ("key-file", "neighbour-keys"))
        self._own_key = read_key(str(key_file)) if key_file else None
        self._pinned = read_pinned(str(pinned)) if pinned else None
        self.sealed = check_flag("sealed", sealed) or self._pinned is not None
        algorithm = f"diffusion, {type(program).__name__}"
        self._shelf = private_shelf(context, algorithm, state_dir)

    @one_blas_thread()
    def fit(
        self, parameters: list[Matrix], config: dict[str, Scalar]
    ) -> tuple[list[Matrix], int, dict[str, Scalar]]:
        """Take in what the neighbours sent, and send on.

        Parameters
        ----------
        parameters : list of ndarray
            What the letters are, a row each (sender, rounds late, weight, number of arrays); where
            they are sealed, the receivers of the node's own letters and their cards; then the
            letters' arrays.
        config : dict
            The step, the algorithm's round, whether letters are sealed, and who sleeps.

        Returns
        -------
        parameters : list of ndarray
            The message; or the node's card and a sealed letter per receiver; or, at the end, what
            the node shows, packed into one array.
        num_examples : int
            One.
        metrics : dict
            ``"floats"`` of the message, ``"broken": 1`` if it has NaN or infinite values (it is not
            sent), ``"rejected-K": 1`` for every neighbour K whose letter, or card, was left out,
            ``"anew": 1`` if the node found no state after round one, and began from its start.
        """
        step, run = config[STEP], str(config[RUN])
        round_ = check_count(AT, config.get(AT, 0), 0, LAST_ROUND)
        check_choice("step", step, (ANNOUNCE, EXCHANGE, SHOW))
        if self.sealed and not config.get(SEALED):
            raise ValueError(
                f"node {self.node} sends sealed letters only, and was asked for others."
            )
        private = PrivateState(self.context, run, self._shelf)
        newest = private.newest() or {}
        if _OVER in newest:
            if step != SHOW:
                raise ValueError(
                    f"step must be {SHOW!r} after node {self.node} has deleted its key of this run,"
                    f" got {step!r}."
                )
            return self._end(self._state(newest)), 1, dict.fromkeys(texts_of(newest[_OVER]), 1)
        kept = private.before(int(config[ROUND])) or {}
        keys = self._keys(run, kept) if config.get(SEALED) else None
        desk = _Desk(self, keys)
        if round_ > 1 and _PENDING not in kept:
            desk.metrics[ANEW] = 1
        state, pending = self._state(kept), int(kept.get(_PENDING, _NONE)[0])
        reply: list[Matrix] = [] if keys is None else [keys.card]
        if pending:
            letters = desk.receive(parameters, pending) if pending == round_ - 1 else []
            inbox, odd = inbox_of(self.node, pending, self.program.message(state), letters)
            for letter in odd:
                desk.leave_out(letter.sender, "it has another form, or NaN or infinite values")
            state, pending = self.program.combine(state, inbox), 0
        if step == SHOW:
            reply = self._end(state)
        elif step == EXCHANGE and str(self.node) not in str(config.get(ASLEEP, "")).split():
            state, pending = self.program.adapt(state, round_), round_
            reply += desk.send(parameters, round_, self.program.message(state))
        fields: dict[str, NDArray[Any]] = {
            STATE + name: field for name, field in state._asdict().items()
        }
        over = step == SHOW and (keys is not None or _RUN_KEY in newest)
        if over:
            fields[_OVER] = text_array(list(desk.metrics))
        elif keys is not None:
            fields[_RUN_KEY] = np.frombuffer(keys.run_key, dtype=np.uint8)
        private.save(int(config[ROUND]), {**fields, _PENDING: np.array([pending])}, alone=over)
        return reply, 1, desk.metrics

    def _keys(self, run: str, kept: Mapping[str, Array]) -> Keys:
        """Return this node's keys in this run."""
        known = kept[_RUN_KEY].tobytes() if _RUN_KEY in kept else None
        return Keys(self.node, run, own_key=self._own_key, pinned=self._pinned, run_key=known)

    def _state(self, kept: Mapping[str, Array]) -> Any:
        """Return the state that was kept, or the program's start."""
        state = self.program.start(np.array([self.node]))
        if _PENDING not in kept:
            return state
        return type(state)(**{name: kept[STATE + name] for name in state._fields})

    def _end(self, state: Any) -> list[Matrix]:
        """Call ``on_end``, and return what the node shows at the end."""
        if self.on_end is not None:
            self.on_end(state)
        return self._shown(state)

    def _shown(self, state: Any) -> list[Matrix]:
        shown: dict[str, Array] = {}
        if self.shows != "nothing":
            shown.update(self.program.observe(state))
        if self.shows == "state":
            shown.update({STATE + name: field for name, field in state._asdict().items()})
        return [pack_arrays(shown)] if shown else []


class _Desk:
    """Where a node reads and writes its letters, open or sealed."""

    def __init__(self, client: DiffusionClient, keys: Keys | None) -> None:
        self._client, self._keys = client, keys
        self.metrics: dict[str, Scalar] = {}

    def leave_out(self, neighbour: int, reason: str) -> None:
        """Note that a neighbour is not heard, or not written to."""
        log(WARNING, "Node %d leaves out node %d: %s", self._client.node, neighbour, reason)
        self.metrics[f"{REJECTED}{neighbour}"] = 1

    def receive(self, parameters: list[Matrix], round_: int) -> list[Letter]:
        """Return the letters of a request."""
        table = check_array("letters", _part(parameters, 0), columns=4)
        _check_whole("letters", table[:, [0, 3]])
        _check_whole("rounds late", np.abs(table[:, 1]))
        if (table[:, 2] < 0).any() or table[:, 2].sum() > 1 + 1e-9:
            raise ValueError(f"weights must be at least 0, at most 1 in all, got {table[:, 2]}.")
        texts = parameters[1 if self._keys is None else 3 :]
        letters: dict[tuple[int, int], Letter] = {}
        for sender, late, weight, n_arrays in table.tolist():
            who, when, size = int(sender), int(late), int(n_arrays)
            text, texts = tuple(texts[:size]), texts[size:]
            try:
                if not 0 <= when <= min(self._client.max_delay, round_ - 1):
                    raise Rejected(f"it is {when} rounds late")
                if who == self._client.node or (who, when) in letters:
                    raise Rejected("it is its own, or a second one")
                if self._keys is not None:
                    (sealed,) = text
                    text = self._keys.open(sealed, who, round_ - when)
                letters[who, when] = Letter(who, when, weight, text)
            except Rejected as reason:
                self.leave_out(who, str(reason))
        return list(letters.values())

    def send(
        self, parameters: list[Matrix], round_: int, message: tuple[Array, ...]
    ) -> list[Matrix]:
        """Return the message, or its sealed letters."""
        self.metrics[FLOATS] = sum(array.size for array in message)
        if not finite_rows(message).all():
            self.metrics[BROKEN] = 1
            return []
        if self._keys is None:
            return list(message)
        receivers = check_array("receivers", _part(parameters, 1), ndim=1)
        cards = check_array("cards", _part(parameters, 2))
        _check_whole("receivers", receivers)
        if len(cards) != len(receivers):
            raise ValueError(f"cards must be of {len(receivers)} receivers, got {len(cards)}.")
        letters: list[Matrix] = []
        for receiver, card in zip(receivers.tolist(), cards, strict=True):
            try:
                letters.append(self._keys.seal(message, int(receiver), round_, card))
            except Rejected as reason:
                self.leave_out(int(receiver), str(reason))
                letters.append(np.zeros(0))
        return letters


def _part(parameters: list[Matrix], at: int) -> Matrix:
    """Return an array of a request, or say that there are too few."""
    if len(parameters) <= at:
        raise ValueError(f"parameters must have {at + 1} arrays or more, got {len(parameters)}.")
    return parameters[at]


def _check_whole(name: str, numbers: Matrix) -> None:
    """Raise a ValueError if numbers that travel as floats are no ids or counts."""
    odd = (numbers != np.rint(numbers)) | (numbers < 0) | (numbers > _LARGEST)
    if odd.any():
        raise ValueError(f"{name} must have whole numbers from 0 on, got {numbers[odd][0]:g}.")
