"""A client's part in a noised sum: a guarantee is checked, spent, and kept, whatever the data are.

The order of the work carries the guarantee. (1) The request's guarantee is checked by itself and
against the client's own. (2) The budget is spent. (3) The client is called, and what it returns is
clipped; a client that fails, for whatever reason, adds zero, and the reason goes to its own log.
(4) With distributed trust the client adds its share of the noise. Nothing else leaves: no metrics,
no number of examples, no evaluation.

A budget is for all runs of a client with a guarantee of its own and a folder on its disk (`Own`);
without these, each run of Flower begins a new count.

What is not covered: at record level, a single sample with which the client's own code fails, since
the whole client then adds zero.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from hashlib import sha256
from logging import WARNING
from math import sqrt
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message

from flwr_perdl.core.checks import Matrix, brief_repr, check_choice, check_count
from flwr_perdl.core.models import change, check_trained, fixed_entries, is_float
from flwr_perdl.privacy.ledger import Own, account
from flwr_perdl.privacy.noise import Noise, Release
from flwr_perdl.protocol.compat import log
from flwr_perdl.protocol.records import (
    LARGEST_INT,
    PROMISE,
    ROUND,
    RUN,
    Limits,
    OtherClientError,
    arrays_of,
    config_of,
    error_of,
    read_reply,
    read_request,
    reply_to,
)

#: Answers a message.
Handler = Callable[[Message, Context], Message]

#: The norm by which a sample may move the sum at hand at most. No request can set it: under it a
#: client withholds nothing.
SAMPLE_BOUND: ContextVar[float | None] = ContextVar("sample_bound", default=None)
#: The metric by which a client says that none moves it by more.
BOUND = "perdl.bound"

#: What is summed, see `Summed`. A sample is bounded in the sums themselves: it moves more where a
#: row is a change or none.
SUMS, CHANGES, ROWS = "sums", "changes", "rows"
_KINDS = {"record": (SUMS,), "client": (SUMS, CHANGES, ROWS)}
#: What a guarantee says that a `Noise` says.
BUDGET = "epsilon", "delta", "trust", "level", "clip"
#: The record of a client's state with what it has spent.
_SPENT = "perdl.noised"
#: Maximum number of values in a sum, and steps of the grid to a sensitivity per entry's rounding.
_MOST, _FINE = 2**26, 256


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What a request says of the noise on the sum that its replies become."""

    epsilon: float
    delta: float
    trust: str
    level: str
    clip: float
    #: The sums for which the budget is.
    rounds: int
    #: The fewest clients of which a sum is opened.
    clients: int
    #: The largest magnitude of a reply, in steps of the grid.
    limit: int
    #: The number of values in a sum.
    size: int
    #: What is summed.
    of: str
    #: How many of the ``rounds`` this sum is as good as; the number of values of all sums, where
    #: they differ in size.
    units: int = 1
    entries: int = 0

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Promise:
        """Return the guarantee in a request's config."""
        given = config.get(PROMISE)
        try:
            promise = cls(**json.loads(str(given)))
        except (TypeError, ValueError, RecursionError):
            raise ValueError(f"{PROMISE} must be a guarantee, got {brief_repr(given)}.") from None
        for name, most in (("rounds", LARGEST_INT), ("clients", LARGEST_INT), ("size", _MOST)):
            check_count(f"{name} in {PROMISE}", getattr(promise, name), 1, most)
        check_count(f"units in {PROMISE}", promise.units, 1, promise.rounds)
        check_count(f"entries in {PROMISE}", promise.entries, 0, LARGEST_INT)
        check_choice(f"level in {PROMISE}", promise.level, tuple(_KINDS))
        check_choice(f"of in {PROMISE}", promise.of, _KINDS[promise.level])
        return promise

    @property
    def text(self) -> str:
        """The guarantee as a request carries it."""
        return json.dumps(asdict(self))

    @property
    def noise(self) -> Noise:
        """The guarantee without what one sum needs."""
        return Noise(**{name: getattr(self, name) for name in BUDGET})

    @property
    def release(self) -> Release:
        """How each sum is noised; its grid makes noise larger by less than a hundredth."""
        reach = self.limit * self.clip / (_FINE * sqrt(self.size))
        if self.level == "client" and self.trust == "distributed":
            reach = min(reach, self.clip)
        while True:
            try:
                return self.noise.release(
                    self.rounds,
                    size=self.size,
                    sensitivity=self.clip,
                    reach=reach,
                    n_required=self.clients if self.trust == "distributed" else 1,
                    limit=self.limit,
                    units=self.units,
                    entries=self.entries,
                )
            except ValueError:
                if reach <= self.clip:
                    raise
                reach /= 4  # little noise takes a finer grid


def answer_noised(
    message: Message, context: Context, call_next: Handler, own: Own | None, *, masked: bool = False
) -> Message:
    """Answer a request with what the client adds to a noised sum, and nothing else.

    Its share of the noise is no protection by itself: with ``trust="distributed"`` the reply must
    be ``masked``.
    """
    arrays, config = read_request(message)
    if own is not None and PROMISE not in config:
        raise ValueError(
            "privacy must be the strategy's option too, got a request to send an update without "
            "noise."
        )
    promise = Promise.read(config)
    _check_own(promise, None if own is None else own.noise)
    release, distributed = promise.release, promise.trust == "distributed"
    if masked != distributed:
        wanted = "distributed" if masked else "central"
        raise ValueError(f"trust must be {wanted!r} in such a round, got {promise.trust!r}.")
    run = sha256(str(config.get(RUN, "")).encode()).hexdigest()[:16]  # as short as it may be
    at = run, check_count(ROUND, config.get(ROUND), 1)
    _spend(context, own, promise, at, again=not distributed)
    spent = context.state[_SPENT]
    given = dict(zip(arrays_of(message), arrays, strict=True))
    values = _summand(promise, given, lambda: call_next(message, context))
    context.state[_SPENT] = spent  # the client may have put another state in its place
    if distributed:
        rng = None if own is None else own.noise.rng
        values = release.add_noise(values, None if rng is None else rng())
    return reply_to(message, [values], 1, {})


def _summand(promise: Promise, given: Mapping[str, Matrix], call: Callable[[], Message]) -> Matrix:
    """Return what the client adds to the sum before noise, bounded: zeros where it fails.

    Raises
    ------
    ValueError
        If its replies can be no part of this sum, whatever the data are.
    """
    values: Matrix = np.zeros(promise.size)
    found, by_sample = values, promise.level == "record"
    bound: float | None = promise.clip
    token = SAMPLE_BOUND.set(bound if by_sample else None)
    try:
        with _unsaid("adds nothing to the sum"):
            found, bound = _read(promise, given, call())
            if found.shape == values.shape:
                values = found if by_sample else _clip(found, promise.clip)
    finally:
        SAMPLE_BOUND.reset(token)
    if found.size != promise.size:
        raise ValueError(f"a reply must have {promise.size} values for this sum, got {found.size}.")
    if by_sample and bound != promise.clip:
        raise ValueError(
            'level must be "client" for clients that do not bound what each sample adds, got '
            '"record".'
        )
    return values


def answer_silently(message: Message, context: Context, call_next: Handler) -> Message:
    """Let the client take a step of which nothing leaves it, whatever comes of it."""
    with _unsaid("says nothing"):
        reply = call_next(message, context)
        if reply.has_error():
            raise ValueError(error_of(reply))
    return reply_to(message, [], 1, {})


@contextmanager
def _unsaid(instead: str) -> Iterator[None]:
    """Let a failure be in the client's log alone, which says what the client does instead."""
    try:
        yield
    except (KeyboardInterrupt, OtherClientError):  # not the data's
        raise
    # SystemExit and the panics of extension modules, which are no Exception, may depend on the
    # data as any error may.
    except BaseException as error:
        log(WARNING, f"This client failed, and {instead}: %r", error)


def _read(
    promise: Promise, given: Mapping[str, Matrix], reply: Message
) -> tuple[Matrix, float | None]:
    """Return a reply's values that are summed, as one vector, and its bound of each sample."""
    if reply.has_error():
        raise ValueError(error_of(reply))
    sent = arrays_of(reply)
    names = [name for name in given if name in sent]  # without those that stay at the client
    start = [given[name] for name in names]
    limits = Limits(expect=start) if promise.of == CHANGES else Limits()
    arrays, _, metrics, *_ = read_reply(reply.content, limits, names=names or [*sent])
    if promise.of != SUMS:
        of, pairs = promise.of, enumerate(zip(arrays, start, strict=True))
        arrays = [_change(of, i, *pair) for i, pair in pairs if is_summed(of, pair[1])]
    return _flat(arrays), metrics.get(BOUND)


def fewest(message: Message, context: Context, *, unmask: bool) -> int:
    """Return the fewest clients of which the sum at hand may be opened; 0 without a guarantee."""
    if not unmask:
        config = config_of(message)
        return Promise.read(config).clients if PROMISE in config else 0
    return int(_spent(context).get("clients", 0))


def note_opened(context: Context, own: Own | None) -> None:
    """Note that the client helps to open a sum: it is in no other one of that round."""
    record = _spent(context)
    if not record.get("clients"):
        return
    with _account(context, own) as kept:
        if all(kept.get(name) == record[name] for name in ("run", "round")):
            kept["opened"] = kept["round"]
    context.state[_SPENT] = ConfigRecord({**record, "opened": record["round"], "clients": 0})


def _spent(context: Context) -> dict[str, Any]:
    """Return what the client has spent."""
    record = context.state.get(_SPENT)
    return dict(record) if isinstance(record, ConfigRecord) else {}


@contextmanager
def _account(context: Context, own: Own | None) -> Iterator[dict[str, Any]]:
    """Let the block change what the client has spent, in its ledger or in this run of Flower."""
    if own is None or own.folder is None:
        kept = _spent(context)
        yield kept
    else:
        with account(own, own.folder) as kept:
            yield kept
    context.state[_SPENT] = ConfigRecord(kept)


def _check_own(promise: Promise, own: Noise | None) -> None:
    """Reject a guarantee that is weaker than the client's own."""
    if own is None:
        return
    for name in ("epsilon", "delta"):
        if getattr(promise, name) > getattr(own, name):
            raise ValueError(
                f"{name} must be at most this client's own, {getattr(own, name):g}, got "
                f"{getattr(promise, name):g}."
            )
    for name, strong in (("trust", "distributed"), ("level", "client")):
        if getattr(own, name) == strong != getattr(promise, name):
            raise ValueError(
                f"{name} must be this client's own, {strong!r}, got {getattr(promise, name)!r}."
            )


def _spend(
    context: Context, own: Own | None, promise: Promise, at: tuple[str, int], *, again: bool
) -> None:
    """Spend the budget's share for a sum, once for a round of a run.

    The last round may be asked again where its sum was not opened; where the server is trusted
    (``again``), in any case.
    """
    names = ("epsilon", "delta", "trust", "level", *["entries"] * bool(promise.entries), "rounds")
    terms, (run, round_) = json.dumps([getattr(promise, name) for name in names]), at
    with _account(context, own) as kept:
        before = kept.get("terms", terms)
        last, opened = kept.get("round", 0), kept.get("opened", 0)
        if run != kept.get("run", run):
            last = opened = 0
        if round_ < last or (round_ == last == opened and not again):
            raise ValueError(f"{ROUND} must be more than the last one, {last}, got {round_}.")
        new_sum = int(round_ > last)
        count, most = kept.get("count", 0) + new_sum * promise.units, json.loads(before)[-1]
        values = kept.get("values", 0) + new_sum * promise.size * bool(promise.entries)
        if count > most or values > promise.entries:
            raise ValueError(
                f"rounds must be more to go on: the budget is for {most} sums, which are spent."
            )
        if before != terms:
            raise ValueError(
                f"{PROMISE} must be the same in all requests to one budget, got {terms} after "
                f"{before}."
            )
        new = {"terms": terms, "run": run, "round": round_, "count": count, "opened": opened}
        kept.update(new, clients=promise.clients, values=values)


def is_summed(of: str, array: Matrix) -> bool:
    """Whether an array is a part of the sum: the integers of a model stay as they are."""
    return of != CHANGES or is_float(array)


def _change(of: str, position: int, new: Matrix, old: Matrix) -> Matrix:
    """Return the change of one array."""
    if of == ROWS:
        return (new.astype(np.float64) - old) * new.any(axis=1, keepdims=True)
    fixed = fixed_entries(old)
    check_trained(str(position), new, old, fixed)
    return change(new, old, fixed, np.float64)


def _flat(arrays: Sequence[Matrix]) -> Matrix:
    """Return arrays as one vector in float64."""
    return np.concatenate([np.asarray(array, dtype=np.float64).ravel() for array in arrays])


def _clip(values: Matrix, clip: float) -> Matrix:
    """Return a vector that is scaled down to norm ``clip`` if it has a larger one."""
    peak = float(np.abs(values).max(initial=0))
    if not peak:
        return values
    unit = values / peak  # a square must not overflow
    return unit * min(peak, clip / float(np.linalg.norm(unit)))
