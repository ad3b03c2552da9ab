"""Driving a protocol: sampling, checking replies, reports, checkpoints; no messages here.

`ProtocolStrategy` translates between Flower's messages and this.
"""

from __future__ import annotations

import typing
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flwr_perdl.core.aggregate import OUTLIER
from flwr_perdl.core.checks import Matrix, check_kind, plain
from flwr_perdl.core.keys import PURPOSE, REPORT
from flwr_perdl.core.threads import one_blas_thread
from flwr_perdl.protocol.checkpoint import Checkpoints
from flwr_perdl.protocol.compat import log
from flwr_perdl.protocol.options import ServerSettings
from flwr_perdl.protocol.part import SUMS_RANK, Asked, Part, own_parts, unstack
from flwr_perdl.protocol.records import (
    AFTER,
    DIVERGED,
    EVALUATE,
    LOSSES,
    NEW_STATE,
    NO_EVALUATE,
    NO_LOSS,
    NUM_EXAMPLES,
    PROTOCOL,
    ROUND,
    RUN,
    SEED,
    STEP,
    UNTRAINED,
    Limits,
    Replies,
    Reply,
    Scalar,
)
from flwr_perdl.protocol.report import (
    METRICS_DROPPED,
    MetricLimit,
    Models,
    Observers,
    RoundReport,
    RunRecord,
    first_reason,
    summarize,
)
from flwr_perdl.protocol.request import (
    CAPPED,
    REMEMBERED,
    Lost,
    Protocol,
    Request,
    State,
    TooFewReplies,
    check_arrays,
    check_replies,
    check_reply,
    sort_replies,
)
from flwr_perdl.protocol.roster import Roster
from flwr_perdl.random import EVALUATION, SAMPLING

#: Largest absolute value of a number in replies, and where the model is in single precision.
_DOUBLE, _SINGLE = 1e100, 1e30


class Plan(NamedTuple):
    """Who is asked what in one exchange.

    Attributes
    ----------
    round, step : int, str
        What reports call the exchange.
    arrays : dict of int to list of ndarray
        What each client receives, by partition, ascending.
    config : dict of str to scalar
        What all receive.
    """

    round: int
    step: str
    arrays: dict[int, list[Matrix]]
    config: dict[str, Scalar]


class HasProtocol(typing.Protocol):
    """What a run asks of the strategy whose protocol it is (see `ProtocolStrategy`)."""

    protocol_name: typing.ClassVar[str]
    flags: typing.ClassVar[tuple[str, ...]]
    labels: typing.ClassVar[tuple[str, ...]]
    _reads: Models
    _n_stacked: int
    _told: Mapping[str, Scalar]
    _last_step: str

    @property
    def options(self) -> ServerSettings:
        """The server's options, complete."""

    def settings(self) -> dict[str, Any]:
        """Return the strategy's own options."""

    def protocol(self, initial: list[Matrix], state: State | None) -> Protocol:
        """Return the protocol's generator."""

    def check_evaluation(self, reply: Reply, model: list[Matrix]) -> None:
        """Raise a ValueError if a reply to an evaluation is wrong."""


class ProtocolRun:
    """One run of a protocol: asks its questions, takes the replies, remembers what happened.

    Parameters
    ----------
    strategy : HasProtocol
        Whose protocol it is.
    initial : list of ndarray
        The user's initial arrays, possibly none.
    names : iterable of str, default ()
        Their names; a model of as many arrays has them, too.
    rounds : int, optional
        The communication rounds of the run, where they are known.
    """

    def __init__(
        self,
        strategy: HasProtocol,
        initial: list[Matrix],
        names: Iterable[str] = (),
        rounds: int | None = None,
    ) -> None:
        self.options = options = strategy.options
        self._strategy, self._rounds = strategy, rounds
        #: What the run has come to, as a checkpoint holds it.
        self.record = RunRecord([*names] or [*map(str, range(len(initial)))], initial)
        #: Which node is which client.
        self.roster = Roster(options)
        #: What the protocol asks next; None if it is over.
        self.request: Request | None = None
        #: The exchange that is on.
        self._plan = Plan(0, "", {}, {})
        self._sums_only = any(part.sums_only for part in options.parts)
        self._clients_evaluate = not self._sums_only
        self._logged: set[tuple[str, bool]] = set()  # who is left out since, and if of evaluations
        self._observers = Observers(options.on_round)
        self._checkpoints: Checkpoints | None = None
        self._resumed: Path | None = None  # until a step from this checkpoint has gone well
        if options.checkpoint_dir is not None:
            self._load()
        self._limit = MetricLimit(self.record.history, self.roster.label)
        if rounds is not None and rounds < self.record.done:
            raise ValueError(
                f"num_rounds must be at least the {self.record.done} rounds that the run to resume "
                f"has done, got {rounds}."
            )
        #: The parts of this run, and what the algorithm calls a model's arrays.
        self.parts: list[Part] = []
        self.names: Sequence[str] = self.record.array_names
        #: The number of values that each client was sent in the exchange that is on.
        self.sent_values: dict[int, int] = {}
        #: What that exchange asks for.
        self.asked = Asked(trains=True, names=(), request=None)
        self.initial = initial

    def _load(self) -> None:
        """Open the folder of checkpoints, and take up the run that is there, if any."""
        options = self.options
        identity = {
            **self._strategy.settings(),
            "protocol": type(self._strategy).__name__,
            "seed": options.seed,
            "fraction_train": options.fraction_train,
            **own_parts(options.parts),
        }
        self._checkpoints = Checkpoints(options, identity, self.record)
        if options.resume:
            self._resumed = self._checkpoints.load(self.record)

    def begin(self) -> None:
        """Begin the parts, and start the generator, from a saved state where there is one."""
        initial, strategy = self.initial, self._strategy
        if strategy._n_stacked and initial:
            initial = unstack(initial, strategy._n_stacked)
        for part in self.options.parts:
            begun, self.names, initial = part.begin(self.names, initial, self.record.kept)
            self.parts.append(begun)
        if self.record.finished:  # no generator is needed, and no client is asked
            return
        state = None if self._resumed is None else self.record.state
        self._steps = strategy.protocol(initial, state)
        if not isinstance(self._steps, Generator):
            raise ValueError(
                f"protocol must be a generator, with yield Request(...), got {self._steps!r}."
            )
        self._advance(None)

    def _advance(self, replies: Replies | None) -> None:
        """Move the protocol on to its next request or its end; None begins it."""
        with self._going_on():
            try:
                if replies is not None and self.request is not None and self.request.combine:
                    replies.combined = self.request.combine(replies)
                    if not self.request.reuse_last_reply:
                        for reply in replies.values():  # they are large, and counted for already
                            reply.arrays.clear()
                self._take_up(next(self._steps) if replies is None else self._steps.send(replies))
            except StopIteration as end:
                self._finish(end.value)

    @property
    def client_names(self) -> dict[int, str]:
        """How reports call the clients, by partition: those of rounds before a resume as well."""
        known = {p: self.roster.name_of(p) for p in self.roster.names}
        return dict(sorted({**self.record.names, **known}.items()))

    # What a run logs ------------------------------------------------------------------------

    def log_begin(self, *, evaluates: bool) -> None:
        """Log what users should know of the run's parts."""
        for part in self.parts:
            part.log_begin(evaluates=evaluates)

    def warn_of_evaluations(self) -> None:
        """Warn of evaluations without a good reply."""
        evaluations = self.record.history.evaluations
        failed = [report for report in evaluations if not report.metrics]
        if failed:
            log(
                WARNING,
                "%d of %d evaluations have no good reply%s.",
                *(len(failed), len(evaluations)),
                first_reason(failed[0].dropped, f", in round {failed[0].round}"),
            )

    def measured(self, round_: int, metrics: Mapping[str, Any]) -> None:
        """Remember the server's own evaluation of the model after ``round_``."""
        self.record.server_metrics[round_] = dict(metrics)

    # Training ------------------------------------------------------------------------------

    def received(self, reply: Reply) -> Reply:
        """Return a reply to training in the algorithm's terms."""
        for part in reversed(self.parts):
            reply = part.from_client(reply, self.asked)
        return reply

    def names_for(self, partition: int) -> Sequence[str]:
        """Return the names of the arrays in a client's request, whole models."""
        names, request = self.record.array_names, self.request
        numbers = None if request is None or request.numbers is None else request.numbers(partition)
        if self._plan.step == EVALUATE and self._strategy._reads.numbered:
            numbers = range(len(self.record.model) // len(names))
        return names if numbers is None else [f"{j}/{name}" for j in numbers for name in names]

    @property
    def limits(self) -> Limits:
        """What a reply to the last plan may be, decided before its arrays are read."""
        given, request = self.options.max_magnitude, self.request
        largest = _DOUBLE if given is None else given
        # What float32 cannot hold would be infinite in the model, and in every later round.
        if any(array.dtype == np.float32 for array in self.record.model):
            largest = min(largest, _SINGLE)
        limits = Limits(magnitude=largest)
        if request is None:
            return limits
        n_bytes = self.options.max_reply_bytes or request.max_bytes
        expect = request.expect if request.models is None else request.models.expected
        if any(part.recodes(self.asked) for part in self.parts):
            expect = None
        return limits._replace(n_bytes=n_bytes, max_values=request.max_values, expect=expect)

    def plan(self, round_: int, partitions: Collection[int]) -> Plan | None:
        """Return who is asked what in ``round_``; None if there is nothing to ask."""
        if self.request is None or round_ <= self.record.done:
            return None
        channel = self.request.secure
        if channel is not None and channel.ended:
            log(WARNING, "The run ends after round %d: %s.", self.record.done, channel.ended)
            self.request = None
            return None
        if len(partitions) < self.options.min_clients:
            raise TooFewReplies(
                f"Round {round_} has {len(partitions)} client(s) to ask, fewer than "
                f"min_clients={self.options.min_clients}; {self._where_saved()}"
                f"{self.roster.absence()}."
            )
        # Drawn by the round, not by a generator that lives on: a resumed run asks the same clients.
        chosen = self.roster.sample(partitions, self.options.fraction_train, SAMPLING, round_)
        request, own, same = self.request, self.request.per_client, list(self.request.arrays)
        arrays = dict.fromkeys(chosen, self._whole(same))
        if own is not None:
            # The first thing that a state from another program would break.
            with self._going_on():
                given = {p: own(p) for p in chosen}
                name = "Request.per_client(partition)"
                once = {id(one): self._whole(check_arrays(name, one)) for one in given.values()}
                arrays = {p: once[id(one)] for p, one in given.items()}
        secure = {} if request.secure is None else request.secure.config(len(chosen))
        return self._begin_exchange(round_, request.step, arrays, {**request.config, **secure})

    def conclude(self, replies: Mapping[int, Reply], lost: Mapping[int, Lost]) -> RoundReport:
        """Check the replies to the last plan, move the protocol on, and save the new state.

        Parameters
        ----------
        replies : mapping of int to Reply
            Readable replies by partition.
        lost : mapping of int to Lost
            Who has no readable reply, and why, by partition.

        Raises
        ------
        TooFewReplies
            If fewer than ``min_clients`` good replies remain.
        """
        request = self.request
        if request is None:
            raise RuntimeError("conclude must follow a plan.")
        good, bad = check_replies(request, replies, self.options.max_magnitude)
        bad = {**lost, **bad}
        if request.max_weight is not None:
            self._cap(good, request.max_weight)
        self._check_enough(good, bad)
        bad = self._without_untrained(bad)
        self._log_lost(bad)
        self._note_lost_state(good)
        floats_up = {p: _n_values(reply.arrays) for p, reply in good.items()}
        # Of a sum nobody knows whose training went well.
        trained = () if self._sums_only else good
        for part in self.parts:
            part.conclude(self._plan.arrays, trained)
        # One thread: sums in another order would give other bits on a machine with more cores.
        with one_blas_thread():
            self._advance(self._with_absent(request, good))
        self._resumed = None
        outliers = {partition: Lost(OUTLIER, why) for partition, why in good.outliers.items()}
        self._log_lost(outliers)
        kept = {partition: reply for partition, reply in good.items() if partition not in outliers}
        self._check_enough(kept, bad | outliers)
        for partition in outliers:
            self.record.last.pop(partition, None)
        report = self._report(kept, bad | outliers, floats_up)
        for partition, what in good.noted.items():
            report.anomalies.setdefault(partition, {}).update(what)
        self.record.done = report.round
        self._remember(report)
        return report

    def _check_enough(self, good: Mapping[int, Reply], bad: Mapping[int, Lost]) -> None:
        """Raise a TooFewReplies, before anything is saved, if too few good replies remain."""
        if len(good) >= self.options.min_clients:
            return
        report = self._report(good, bad, {})
        raise TooFewReplies(
            f"Round {report.round} has {len(good)} good replies, fewer than "
            f"min_clients={self.options.min_clients}; {self._where_saved()}"
            + first_reason(report.dropped, f", asked for step {report.step!r}")
            + "."
        )

    def _with_absent(self, request: Request, good: Replies) -> Replies:
        """Return the replies, with the last ones of clients that have none and are remembered."""
        if not request.reuse_last_reply:
            self.record.last = {}
            return good
        step, round_ = request.step, self._plan.round
        absent = {
            p: reply
            for p, (of, when, reply) in self.record.last.items()
            if p not in good and of == step and when >= round_ - request.reuse_last_reply
        }
        recalled, _ = sort_replies(partial(check_reply, request), absent)
        new = {p: (step, round_, reply) for p, reply in good.items()}
        self.record.last = {p: self.record.last[p] for p in recalled} | new
        replies = good.sharing(dict(sorted({**recalled, **good}.items())))
        replies.note(REMEMBERED, dict.fromkeys(recalled, 1.0))
        return replies

    def _cap(self, good: Replies, most: float) -> None:
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
                *(*self._plan[:2], self.roster.label(partition), bound, most),
            )
        good.note(CAPPED, {p: 1 - bound / reply.num_examples for p, reply in above.items()})

    def _note_lost_state(self, good: Mapping[int, Reply]) -> None:
        """Warn of clients that have lost their private state; newcomers have none to lose."""
        new = {partition for partition, reply in good.items() if reply.metrics.get(NEW_STATE)}
        lost = sorted(new & self.record.history.trained) if new else []
        for partition in new.difference(lost):
            good[partition].metrics[NEW_STATE] = 0.0
        if lost:
            log(
                WARNING,
                "The private state of %s was lost and reinitialized, so results differ from those "
                "of a run without that loss. To keep it on disk, give every client a "
                '"state-dir" in its node config, set FLWR_PERDL_STATE_DIR where clients run, or '
                "make the grid InProcessGrid(..., state_dir=FOLDER).",
                ", ".join(map(self.roster.label, lost)),
            )

    # Evaluation ----------------------------------------------------------------------------

    def evaluates(self, round_: int) -> bool:
        """Return whether clients evaluate the model after ``round_``."""
        options, run = self.options, self.record
        due = options.fraction_evaluate > 0 and round_ % options.evaluate_every == 0
        due = due and self._clients_evaluate and bool(run.model)
        if not any(part.rank == SUMS_RANK for part in self.parts):  # else nothing was reported
            due = due and all(report.step != self._strategy._last_step for report in run.history)
        return due and run.evaluated < round_ == run.done

    def plan_evaluation(
        self, round_: int, partitions: Collection[int], config: Mapping[str, Scalar]
    ) -> Plan:
        """Return who evaluates the model after ``round_``."""
        fraction = self.options.fraction_evaluate
        chosen = self.roster.sample(partitions, fraction, EVALUATION, round_)
        trainings = self.record.history.trainings
        after = {AFTER: trainings[-1].step} if trainings else {}
        config = {**config, **after, PURPOSE: REPORT}
        arrays = dict.fromkeys(chosen, self.record.model)
        return self._begin_exchange(round_, EVALUATE, arrays, config)

    def conclude_evaluation(
        self, replies: Mapping[int, Reply], lost: Mapping[int, Lost]
    ) -> RoundReport | None:
        """Note the replies to the last evaluation; None if no client has any way to evaluate."""
        lost = self._without_untrained(lost)
        if not replies and all(why.code == NO_EVALUATE for why in lost.values()):
            self._clients_evaluate, self.record.evaluated = not lost, self._plan.round
            text = "No client defines evaluate, so this run has no further evaluations; with %s"
            if lost:
                log(INFO, text, "fraction_evaluate=0 it asks for none.")
            return None

        check, model = self._strategy.check_evaluation, self.record.model
        good, bad = sort_replies(lambda reply: check(reply, model), replies)
        bad = {**lost, **bad}
        self._note_lost_state(good)
        self._log_lost(bad)
        report = self._report(good, bad, {})
        self._count_losses(report)
        self.record.evaluated = report.round
        self._remember(report)
        return report

    def _count_losses(self, report: RoundReport) -> None:
        """Warn, in log and result, if a third of the clients or more have no finite loss."""
        asked, each = len(self._plan.arrays), report.numbers.values()
        missing = asked - sum(not own.keys().isdisjoint(LOSSES) for own in each)
        before = [one.aggregate for one in self.record.history.evaluations]
        known = {name for one in (report.aggregate, *before) for name in one}
        # Without any of these the app measures no loss.
        if missing and 3 * missing >= asked and not known.isdisjoint((*LOSSES, NO_LOSS)):
            report.aggregate[NO_LOSS] = float(missing)
            if not (before and before[-1].get(NO_LOSS) == missing):  # else it has been said
                log(
                    WARNING,
                    "Round %d (evaluate): %d of %d clients have no finite loss%s: %s.",
                    *(report.round, missing, asked),
                    "; the mean is that of the others" if missing < asked else "",
                    DIVERGED,
                )

    # After the last round ----------------------------------------------------------------------

    def plan_after(
        self,
        step: str,
        arrays: dict[int, list[Matrix]],
        config: Mapping[str, Scalar],
        protocol: str,
    ) -> Plan:
        """Return the plan of a step that clients take once the run is over."""
        last = max((report.round for report in self.record.history), default=0)
        return self._begin_exchange(1 + last, step, arrays, config, protocol)

    def conclude_after(self, replies: Mapping[int, Reply], lost: Mapping[int, Lost]) -> RoundReport:
        """Note the replies to such a step."""
        lost = self._without_untrained(lost)
        self._log_lost(lost)
        report = self._report(replies, lost, {})
        self._remember(report)
        return report

    # What both share -------------------------------------------------------------------------

    def _begin_exchange(
        self,
        round_: int,
        step: str,
        arrays: dict[int, list[Matrix]],
        config: Mapping[str, Scalar],
        protocol: str = "",
    ) -> Plan:
        """Return the plan that asks these clients to take ``step``."""
        seed, token = self.options.seed, self.record.token
        common: dict[str, Scalar] = {STEP: step, ROUND: round_, SEED: seed, RUN: token}
        if protocol or self._strategy.protocol_name:
            common[PROTOCOL] = protocol or self._strategy.protocol_name
        whole = {**self._strategy._told, **config, **common}
        plain_config = {name: plain(value) for name, value in whole.items()}
        self._plan, self.sent_values = Plan(round_, step, arrays, plain_config), {}
        self.asked = Asked(step != EVALUATE, self.names, self.request)
        return self._plan

    def _take_up(self, request: object) -> None:
        """Take up what the protocol asks next."""
        asked: Request = check_kind("what protocol yields", request, Request, "a Request")
        if (summed := asked.summed) is not None:
            channels = [found for part in self.parts if (found := part.channel(summed)) is not None]
            asked = replace(asked, secure=next(iter(channels), asked.secure))
        if asked.secure is not None:
            least = self.options.min_clients
            channel = asked.secure.begin(self.record.kept, self._rounds, least, self.save)
            asked = replace(asked, secure=channel)
        elif self._sums_only:
            raise ValueError(
                "initial_arrays must be given with privacy, public or random ones, so that every "
                f"reply is a part of a sum, got none, and a step {asked.step!r} whose is not."
            )
        self.request = asked
        self.record.model = self._lift(asked.arrays if asked.model is None else asked.model)
        self.record.state = asked.state

    def _lift(self, model: Sequence[Matrix]) -> list[Matrix]:
        """Return a model as evaluations and the result see it."""
        for part in reversed(self.parts):
            model = part.lift(model)
        return self._whole(model)

    def _whole(self, model: Sequence[Matrix]) -> list[Matrix]:
        """Return an algorithm's model with all arrays of the initial one."""
        for part in reversed(self.parts):
            model = part.whole(model)
        return list(model)

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
            raise ValueError("protocol must end with `return [arrays]`, its final model, got none.")
        self.request = None
        self.record.model = self._lift(check_arrays("what protocol returns", model))
        self.record.state, self.record.finished = {}, True

    def _report(
        self, good: Mapping[int, Reply], lost: Mapping[int, Lost], floats_up: Mapping[int, int]
    ) -> RoundReport:
        """Return the report of an exchange."""
        self.record.names |= {p: self.roster.name_of(p) for p in self.roster.names}
        dropped = {self.roster.label(p): why.reason for p, why in sorted(lost.items())}
        dropped |= {f"node {node}": why for node, why in self.roster.unanswered.items()}
        metrics, anomalies = {}, {p: {why.kind: 1.0} for p, why in sorted(lost.items())}
        for p, (_, n, numbers, _, others) in good.items():
            own = {**others, **numbers}
            metrics[p] = {NUM_EXAMPLES: n, **self._limit(p, own)}
            if len(metrics[p]) <= len(own):
                anomalies[p] = {METRICS_DROPPED: 1 - len(metrics[p]) / (1 + len(own))}
        aggregate = summarize(metrics, self._strategy.flags, self._strategy.labels)
        aggregate |= {"clients": float(len(good)), "dropped": float(len(dropped))}
        if uncounted := self.roster.uncounted & good.keys():
            aggregate["uncounted-runs"] = float(len(uncounted))
        ups = [floats_up.get(partition, 0) for partition in good]
        arrays, sent = self._plan.arrays, self.sent_values
        downs = [sent[p] if p in sent else _n_values(arrays[p]) for p in good]
        return RoundReport(
            *self._plan[:2],
            metrics,
            aggregate,
            dropped,
            float(np.mean(downs)) if downs else 0.0,
            float(np.mean(ups)) if ups else 0.0,
            anomalies,
        )

    def _without_untrained(self, lost: Mapping[int, Lost]) -> dict[int, Lost]:
        """Return who is lost; who evaluates once it has trained in this run was asked too early."""
        early = {partition for partition, why in lost.items() if why.code == UNTRAINED}
        for partition in early:
            self._plan.arrays.pop(partition, None)
        return {partition: why for partition, why in lost.items() if partition not in early}

    def _log_lost(self, lost: Mapping[int, Lost]) -> None:
        """Log who was left out, once until it is back; those with one reason in one line."""
        round_, step, *_ = self._plan
        new: dict[str, list[str]] = {}
        for partition, (_, reason, _) in sorted(lost.items()):
            label = self.roster.label(partition)
            if (label, step == EVALUATE) not in self._logged:
                self._logged.add((label, step == EVALUATE))
                new.setdefault(reason, []).append(label)
        for reason, who in new.items():
            log(WARNING, "Round %d (%s): left out %s: %s", round_, step, ", ".join(who), reason)

    def _remember(self, report: RoundReport) -> None:
        """Append ``report`` to the history, save, and tell who wants to know."""
        self.record.history.append(report)
        if self._logged:  # a client that is back is named again when it is lost the next time
            back, of = map(self.roster.label, report.metrics), report.step == EVALUATE
            self._logged -= {(label, of) for label in back}
        self.save()
        self._observers(report)

    # Checkpoints -----------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint of the state after the last finished round."""
        if self._checkpoints is not None:
            self._checkpoints.save(self.record)

    def _where_saved(self) -> str:
        """Return the clause that says where the last good state is."""
        if self._checkpoints is None or not self.record.done:
            return "nothing is saved"
        return f"the state after round {self.record.done} is saved in {self.options.checkpoint_dir}"


def _n_values(arrays: Iterable[Matrix]) -> int:
    return sum(array.size for array in arrays)
