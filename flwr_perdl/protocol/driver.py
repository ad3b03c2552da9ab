"""Driving a protocol: sampling, checking replies, reports, checkpoints; no messages here.

The adapters to Flower's two strategy interfaces only translate between their messages and this.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core import files
from flwr_perdl.core.checks import Matrix, brief_repr, check_count, plain
from flwr_perdl.core.threads import one_blas_thread
from flwr_perdl.protocol.compat import log
from flwr_perdl.protocol.events import EventLog
from flwr_perdl.protocol.options import Options
from flwr_perdl.protocol.records import (
    AFTER,
    ANEW,
    CONFIG,
    EVALUATE,
    NO_EVALUATE,
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
)
from flwr_perdl.protocol.report import RoundReport, first_reason, summarized
from flwr_perdl.protocol.request import (
    CAPPED,
    LEFT_OUT,
    REFUSED,
    REMEMBERED,
    Lost,
    Protocol,
    Replies,
    Request,
    State,
    TooFewReplies,
    check_arrays,
    check_request,
)
from flwr_perdl.protocol.roster import Roster
from flwr_perdl.random import EVALUATION, SAMPLING, spawn

#: Largest size of a number in replies where the model is in single precision.
_SINGLE = 1e30
#: Characters of a run's token in a checkpoint.
_LONGEST_RUN = 64
#: Fields of a report that have an entry per client.
_BY_PARTITION = ("metrics", "anomalies")
#: What a project can do whose nodes do not say who they are.
_REMEDY = (
    "; make the ClientApp with flwr_perdl.clients.client_app, which says who a client is, or "
    'answer in its @app.query() with the ConfigRecord "config": {"partition-id": ...}'
)


def accept_evaluation(reply: Reply, model: list[Matrix]) -> None:
    """Accept every reply to an evaluation."""


class Plan(NamedTuple):
    """Who is asked what in one exchange: arrays by partition, ascending, and the config of all."""

    arrays: dict[int, list[Matrix]]
    config: dict[str, Scalar]


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
    names : iterable of str, default ()
        Their names; a model of as many arrays has them, too.
    flags, labels : collection of str
        Metrics of which a mean says nothing, see `summarized`.
    evaluation_config : mapping, optional
        What is added to the config of all evaluations.
    check_evaluation : callable, optional
        ``(reply, model) -> None``: raises a ValueError that says what is wrong with a reply to an
        evaluation, which is then left out.
    """

    def __init__(
        self,
        protocol: Callable[[list[Matrix], State | None], Protocol],
        options: Options,
        identity: Mapping[str, Any],
        initial: list[Matrix],
        names: Iterable[str] = (),
        *,
        flags: Collection[str] = (),
        labels: Collection[str] = (),
        evaluation_config: Mapping[str, Scalar] | None = None,
        check_evaluation: Callable[[Reply, list[Matrix]], None] = accept_evaluation,
    ) -> None:
        self.options = options
        self._check_evaluation = check_evaluation
        self._evaluation_config = dict(evaluation_config or {})
        self._flags, self._labels = flags, labels
        self.identity = canonical_identity(identity, strict=options.checkpoint_dir is not None)
        self._initial = canonical_identity({"": initial}, strict=False)[""] if initial else []
        self.array_names = list(names)
        self.history: list[RoundReport] = []
        #: How reports call the clients, by partition (`Roster.called`).
        self.names: dict[int, str] = {}
        self._journal: files.Journal | None = None
        self._noted = 0  # reports that are in the journal
        self._saves = False  # whether this process has saved a round
        self.server_metrics: dict[int, dict[str, Any]] = {}
        self.model: list[Matrix] = initial
        self.done = 0
        self._run = uuid.uuid4().hex
        self._resumed: Path | None = None  # until a step from this checkpoint has gone well
        self._evaluated = 0
        self._warned_of_no_state = False
        self._clients_evaluate = True
        self._logged: set[tuple[str, bool]] = set()  # who is left out since, and if of evaluations
        self._request: Request | None = None
        self._asked: dict[int, list[Matrix]] = {}
        self._asked_at = 0.0
        #: The step, the round and the reply of each client's last good one (`Request.remember`).
        self._last: dict[int, tuple[str, int, Reply]] = {}
        if options.checkpoint_dir is not None:
            _check_writable(Path(options.checkpoint_dir))
        if not options.resume:
            _refuse_earlier_run(options.checkpoint_dir)
        self._events = EventLog(options.events)
        saved = self._load() if options.resume else None
        # The checkpoint has the result: no generator is needed, and no client is asked.
        if saved is not None and saved.meta["finished"]:
            return
        self._steps = protocol(initial, None if saved is None else _state_of(saved))
        if not hasattr(self._steps, "send"):
            raise ValueError(
                f"protocol must be a generator, with yield Request(...), got {self._steps!r}."
            )
        with self._going_on():
            try:
                self._ask(next(self._steps))
            except StopIteration as end:
                self._finish(end.value)

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
        """Note that the run is over, and what stopped it; warn of evaluations without a reply."""
        stopped = None if error is None else str(error) or type(error).__name__
        if isinstance(error, SystemExit):  # its text would be a number
            stopped = f"the program was ended from outside, with exit code {error.code}"
        self._events.write("end", done=self.done, stopped=stopped)
        evaluations = [report for report in self.history if report.step == EVALUATE]
        failed = [report for report in evaluations if not report.metrics]
        if failed and error is None:
            log(
                WARNING,
                "%d of %d evaluations have no good reply%s.",
                *(len(failed), len(evaluations)),
                first_reason(failed[0].dropped, f", in round {failed[0].round}"),
            )

    def measured(self, round_: int, metrics: Mapping[str, Any]) -> None:
        """Remember the server's own evaluation of the model after ``round_``."""
        self.server_metrics[round_] = dict(metrics)
        self._events.write("server", round=round_, metrics=metrics)

    # Training ------------------------------------------------------------------------------

    @property
    def limits(self) -> Limits:
        """What a reply to the last plan may be, decided before its arrays are read."""
        most = None if self._request is None else self._request.most
        largest = self.options.max_magnitude
        # What float32 cannot hold would be infinite in the model, and in every later round.
        if any(array.dtype == np.float32 for array in self.model):
            largest = min(largest, _SINGLE)
        return Limits(self.options.max_reply_bytes, most, largest)

    def plan(
        self, round_: int, partitions: Collection[int], roster: Roster[Any] | None = None
    ) -> Plan | None:
        """Return who is asked what in ``round_``; None if there is nothing to ask."""
        if self._request is None or round_ <= self.done:
            return None
        if len(partitions) < self.options.min_clients:
            raise TooFewReplies(
                f"Round {round_} has {len(partitions)} client(s) to ask, fewer than "
                f"min_clients={self.options.min_clients}; {self._where_saved()}"
                + ("" if roster is None else why_absent(roster))
                + "."
            )
        # Drawn by the round, not by a generator that lives on: a resumed run asks the same clients.
        chosen = self._sample(partitions, self.options.fraction_train, SAMPLING, round_)
        request, own, same = self._request, self._request.own, list(self._request.arrays)
        arrays = dict.fromkeys(chosen, same)
        if own is not None:
            # The first thing that a state from another program would break.
            with self._going_on():
                arrays = {p: check_arrays("Request.own(partition)", own(p)) for p in chosen}
        secure = {} if request.secure is None else request.secure.config
        return self._plan(round_, arrays, request.step, {**request.config, **secure})

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
        good, bad = _checked(request, replies)
        bad = {**lost, **bad}
        if request.max_weight is not None:
            self._cap(good, request.max_weight, round_, request.step, roster)
        self._log_lost(round_, request.step, bad, roster)
        if len(good) < self.options.min_clients:
            report = self._report(round_, request.step, good, bad, roster)
            self._tell(report)
            raise TooFewReplies(
                f"Round {round_} has {len(good)} good replies, fewer than "
                f"min_clients={self.options.min_clients}; {self._where_saved()}"
                + first_reason(report.dropped, f", asked for step {request.step!r}")
                + "."
            )
        # One thread: sums in another order would give other bits on a machine with more cores.
        self._warn_of_lost_state(good, roster)
        with one_blas_thread(), self._going_on():
            try:
                replies = self._with_absent(request, round_, good)
                if request.combine is not None:
                    replies.combined = request.combine(replies)
                self._ask(self._steps.send(replies))
            except StopIteration as end:
                self._finish(end.value)
        self._resumed = None
        unlike = {partition: Lost(LEFT_OUT, why) for partition, why in good.unlike.items()}
        self._log_lost(round_, request.step, unlike, roster)
        kept = {partition: reply for partition, reply in good.items() if partition not in unlike}
        for partition in unlike:
            self._last.pop(partition, None)
        # A client that is back is named again when it is lost the next time.
        for partition in kept:
            self._logged.discard((roster.label(partition), False))
        report = self._report(round_, request.step, kept, bad | unlike, roster)
        for partition, what in good.noted.items():
            report.anomalies.setdefault(partition, {}).update(what)
        self.done = round_
        self._remember(report)
        return report

    def _with_absent(self, request: Request, round_: int, good: Replies) -> Replies:
        """Return the replies, with the last ones of clients that have none and are remembered."""
        if not request.remember:
            self._last = {}
            return good
        absent = {
            p: reply
            for p, (step, when, reply) in self._last.items()
            if p not in good and step == request.step and when >= round_ - request.remember
        }
        recalled, _ = _checked(request, absent)
        new = {p: (request.step, round_, reply) for p, reply in good.items()}
        self._last = {p: self._last[p] for p in recalled} | new
        replies = good.sharing(dict(sorted({**recalled, **good}.items())))
        replies.note(REMEMBERED, dict.fromkeys(recalled, 1.0))
        return replies

    def _cap(self, good: Replies, most: float, round_: int, step: str, roster: Roster[Any]) -> None:
        """Have no reply count for more than ``most`` times the median number of examples."""
        numbers = [reply.num_examples for reply in good.values()]
        bound = int(min(most * np.median(numbers), 2**53)) if numbers else 0
        above = {p: reply for p, reply in good.items() if reply.num_examples > bound}
        for partition, reply in above.items():
            good[partition] = reply._replace(num_examples=bound)
            log(
                WARNING,
                "Round %d (%s): %s counts for %d examples, as more than %g times the median is not "
                "believed (Request.max_weight).",
                *(round_, step, roster.label(partition), bound, most),
            )
        good.note(CAPPED, {p: 1 - bound / reply.num_examples for p, reply in above.items()})

    def _warn_of_lost_state(self, good: Mapping[int, Reply], roster: Roster[Any]) -> None:
        """Warn of clients that took part before and have lost their private state since."""
        if ANEW not in self._flags:  # where clients are anybody's, it is a metric of their own
            return
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
        if lost and not replies and all(why.code == NO_EVALUATE for why in lost.values()):
            self._clients_evaluate, self._evaluated = False, round_
            log(
                INFO,
                "No client defines evaluate, so this run has no further evaluations; with "
                "fraction_evaluate=0 it asks for none.",
            )
            return None
        good, lost = dict(replies), dict(lost)
        for partition, reply in replies.items():
            try:
                self._check_evaluation(reply, self.model)
            except ValueError as error:
                lost[partition] = Lost(REFUSED, brief(str(error)))
                del good[partition]
        replies = good
        self._warn_of_lost_state(replies, roster)
        self._log_lost(round_, EVALUATE, lost, roster)
        self._logged -= {(roster.label(partition), True) for partition in replies}
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

    def _ask(self, request: object) -> None:
        """Take up what the protocol asks next."""
        self._request = check_request(request)
        model = self._request.model
        self.model = list(self._request.arrays if model is None else model)

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Have an error in the first step after a resume name the checkpoint."""
        try:
            yield
        except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
            if self._resumed is None:
                raise
            raise ValueError(
                "checkpoint_dir must hold a state that this protocol can go on from, got "
                f"{self._resumed}, and in the first step from it {error!r}."
            ) from error

    def _finish(self, model: object) -> None:
        """Take up what the protocol returns."""
        if model is None:
            raise ValueError(
                "protocol must end with `return [arrays]`, its final model, got its end without "
                "one."
            )
        self._request = None
        self.model = check_arrays("what protocol returns", model)

    def _report(
        self,
        round_: int,
        step: str,
        good: Mapping[int, Reply],
        lost: Mapping[int, Lost],
        roster: Roster[Any],
    ) -> RoundReport:
        """Return the report of an exchange."""
        self.names |= {partition: roster.called(partition) for partition in roster.names}
        dropped = {roster.label(p): why.reason for p, why in sorted(lost.items())}
        dropped |= {f"node {node}": why for node, why in roster.unanswered.items()}
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

    def _log_lost(
        self, round_: int, step: str, lost: Mapping[int, Lost], roster: Roster[Any]
    ) -> None:
        """Log who was left out, once until it is back; those with one reason in one line."""
        new: dict[str, list[str]] = {}
        for partition, (_, reason, _) in sorted(lost.items()):
            label = roster.label(partition)
            if (label, step == EVALUATE) not in self._logged:
                self._logged.add((label, step == EVALUATE))
                new.setdefault(reason, []).append(label)
        for reason, who in new.items():
            log(WARNING, "Round %d (%s): left out %s: %s", round_, step, ", ".join(who), reason)

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
        for name in _BY_PARTITION:
            fields[name] = {self.names.get(p, p): each for p, each in fields[name].items()}
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
        others = set(folder.glob("history-*.jsonl")) - {folder / f"history-{self._run}.jsonl"}
        if others and (self._saves or (not self.options.resume and files.rounds_in(folder))):
            raise ValueError(
                f"checkpoint_dir must be that of one run at a time, got {str(folder)!r}, where "
                "another run has saved its rounds since this one began."
            )
        self._saves = True
        if self._journal is None:
            self._journal = files.Journal(folder / f"history-{self._run}.jsonl")
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
        named = len(self.array_names) == len(self.model)
        arrays |= {
            f"model/{self.array_names[i] if named else f'{i:04d}'}": array
            for i, array in enumerate(self.model)
        }
        last: dict[int, list[Any]] = {}
        for p, (step, when, reply) in self._last.items():
            arrays |= {f"last/{p}/{i:04d}": array for i, array in enumerate(reply.arrays)}
            last[p] = [step, when, reply.num_examples, reply.metrics]
        meta = {
            "identity": self.identity,
            "run": self._run,
            "round": self.done,
            "evaluated": self._evaluated,
            "finished": self.finished,
            "resumable": resumable,
            "initial": self._initial,
            "array_names": self.array_names,
            "numbers": [name for name, a in state.items() if not isinstance(a, np.ndarray)],
            "history": self._journal.mark,
            "names": self.names,
            "server_metrics": self.server_metrics,
            "arrays": _forms(arrays),
            "last": last,
        }
        files.save_round(folder, self.done, arrays, meta)
        for other in others:
            other.unlink(missing_ok=True)  # of a run that this one replaces

    def _load(self) -> files.Saved | None:
        """Take up the newest readable checkpoint; None if there is none."""
        folder = Path(str(self.options.checkpoint_dir))
        for round_ in reversed(files.rounds_in(folder)):
            path = files.round_path(folder, round_)
            try:
                saved = files.load(path)
                meta = _meta_from(saved.meta)
                mark = dict(saved.meta["history"])
                if meta[1] != round_:
                    raise ValueError(f"round must be {round_} in this file, got {meta[1]}")
                forms = _forms(saved.arrays)
                named = saved.meta.get("arrays", forms)  # older files do not say
                odd = [one for one in {**named, **forms} if named.get(one) != forms.get(one)]
                if odd:
                    raise ValueError(f"arrays must be those of its record, got others at {odd}")
                _state_of(saved), _last_of(saved)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                text = "%s is no checkpoint (%r). The checkpoint before it is used."
                log(WARNING, text, path, error)
                continue
            if not _same(saved.meta["identity"], self.identity):
                raise ValueError(
                    "checkpoint_dir must hold a run with the same options, got one in which "
                    f"{_difference(saved.meta['identity'], self.identity)}."
                )
            begun = saved.meta.get("initial", [])
            if self._initial and begun != self._initial:
                raise ValueError(
                    "initial_arrays must be those with which the run to resume began, or be left "
                    f"out, got others: {begun} there and {self._initial} here."
                )
            self._initial = begun
            if not saved.meta.get("resumable", True):
                raise ValueError(
                    f"checkpoint_dir must hold a state to go on from, got none in {path}: the "
                    "protocol yielded its Request without state=."
                )
            self._run, self.done, self._evaluated, self.server_metrics, self.names, arrays = meta
            self.array_names = self.array_names or arrays
            self._resumed, self._last = path, _last_of(saved)
            self._recall(folder, mark)
            self.model = list(_part(saved.arrays, "model").values())
            log(INFO, "Resuming after round %d from %s.", self.done, folder)
            return saved
        return None

    def _recall(self, folder: Path, mark: Mapping[str, Any]) -> None:
        """Take up the history; one that is damaged does not stop the run."""
        try:
            self._journal, entries = files.Journal.read(folder, mark)
            self.history = [_report_from(entry) for entry in entries]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log(WARNING, "%s The run goes on without the reports of its first rounds.", error)
            self._journal, self.history = None, []
        self._noted = len(self.history)


def _checked(request: Request, replies: Mapping[int, Reply]) -> tuple[Replies, dict[int, Lost]]:
    """Return the replies that pass the request's check, and why the others do not."""
    good, bad = Replies(), {}
    for partition in sorted(replies):
        reply = replies[partition]
        try:
            for name in request.metrics:
                if name not in reply.metrics:
                    raise ValueError(f"metrics must have {name!r}, got {sorted(reply.metrics)}")
            if request.combine is not None:
                request.combine.check(reply)
            returned = request.check(reply)
        except ValueError as error:
            bad[partition] = Lost(REFUSED, brief(str(error)))
            continue
        except Exception as error:  # no reply that a check did not expect may end the run
            bad[partition] = Lost(REFUSED, brief(f"the check of the reply ended with {error!r}"))
            continue
        if returned is not None:
            raise TypeError(
                "Request.check must raise a ValueError for a wrong reply, and return nothing, "
                f"got {returned!r}."
            )
        good[partition] = reply
    return good, bad


def canonical_identity(identity: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
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


def _state_of(saved: files.Saved) -> dict[str, Any]:
    """Return a checkpoint's state as the protocol yielded it: numbers are numbers again."""
    state: dict[str, Any] = _part(saved.arrays, "state")
    return state | {name: state[name].item() for name in saved.meta.get("numbers", [])}


def _last_of(saved: files.Saved) -> dict[int, tuple[str, int, Reply]]:
    """Return the clients' last replies in a checkpoint; earlier files have none."""
    found = {}
    for p, (step, when, num_examples, metrics) in saved.meta.get("last", {}).items():
        arrays = list(_part(saved.arrays, f"last/{p}").values())
        found[int(p)] = str(step), int(when), Reply(arrays, int(num_examples), dict(metrics))
    return found


def _difference(found: Any, wanted: Mapping[str, Any]) -> str:
    """Return in what two identities differ."""
    flat = []
    for identity in (found, wanted):
        own = dict(identity) if isinstance(identity, Mapping) else {"identity": identity}
        settings = own.pop("settings", {})
        flat.append({**own, **(settings if isinstance(settings, Mapping) else {"": settings})})
    there, here = flat
    return "; ".join(
        f"{name} is {brief_repr(there.get(name, 'missing'))} and here "
        f"{brief_repr(here.get(name, 'missing'))}"
        for name in {**there, **here}
        if not _same(there.get(name), here.get(name))
    )


def _same(one: Any, other: Any) -> bool:
    """Whether two identities say the same; NaN is the same as NaN here."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _check_writable(folder: Path) -> None:
    """Raise a ValueError if nothing can be saved in a folder, which need not be there yet."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise ValueError(
            f"checkpoint_dir must be a folder that can be written to, got {str(folder)!r}, and "
            f"{there} is not one."
        )


def _refuse_earlier_run(checkpoint_dir: str | Path | None) -> None:
    """Raise a ValueError if a folder for checkpoints has those of a run: they would be deleted."""
    if checkpoint_dir is None:
        return
    rounds = files.rounds_in(Path(checkpoint_dir))
    if rounds:
        raise ValueError(
            f"checkpoint_dir must hold no run, got one after round {rounds[-1]} in "
            f"{str(checkpoint_dir)!r}: with ServerSettings(resume=True) it goes on; another run "
            "wants another folder."
        )


def why_absent(roster: Roster[Any]) -> str:
    """Return the clause that says why nodes take no part, and what to do; empty if all do."""
    strangers = roster.strangers
    remedy = _REMEDY if any(map(_asks_who, strangers.values())) else ""
    return first_reason({f"node {node}": why for node, why in strangers.items()}) + remedy


def _asks_who(why: str) -> bool:
    """Whether this is why a node took no part: its app does not answer who it is."""
    return any(word in why for word in ("query", PARTITION_ID, f"no ConfigRecord {CONFIG!r}"))


def _part(arrays: Mapping[str, NDArray[Any]], kind: str) -> dict[str, NDArray[Any]]:
    """Return the arrays saved under ``kind/``."""
    start = f"{kind}/"
    return {name.removeprefix(start): a for name, a in arrays.items() if name.startswith(start)}


def _forms(arrays: Mapping[str, NDArray[Any]]) -> dict[str, list[Any]]:
    """Return the dtype and the shape of each array, as JSON has them."""
    return {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()}


def _meta_from(
    meta: Mapping[str, Any],
) -> tuple[str, int, int, dict[int, dict[str, Any]], dict[int, str], list[str]]:
    """Return what a checkpoint says: run, rounds, the server's metrics, the names in it."""
    for key in ("identity", "finished"):
        if key not in meta:
            raise KeyError(key)
    metrics = {int(round_): dict(found) for round_, found in meta["server_metrics"].items()}
    names = {int(partition): str(name) for partition, name in meta.get("names", {}).items()}
    run = str(meta["run"])
    if not run.isalnum() or len(run) > _LONGEST_RUN:  # it is part of a file's name
        raise ValueError(
            f"run must be at most {_LONGEST_RUN} letters and digits in a checkpoint, got "
            f"{run[:_LONGEST_RUN]!r}."
        )
    done, evaluated = (
        check_count(f"{name} in a checkpoint", meta[name], 0, files.LAST_ROUND)
        for name in ("round", "evaluated")
    )
    array_names = list(map(str, meta.get("array_names", ())))  # earlier files have none
    if len(set(array_names)) < len(array_names):
        raise ValueError(f"array_names must differ in a checkpoint, got {brief_repr(array_names)}.")
    return run, done, evaluated, metrics, names, array_names


def _report_from(entry: Mapping[str, Any]) -> RoundReport:
    """Return a report as it was before it was saved (JSON's keys are strings)."""
    by_partition = {
        name: {int(partition): values for partition, values in entry.get(name, {}).items()}
        for name in _BY_PARTITION
    }
    return RoundReport(**{**entry, **by_partition})
