"""Driving a protocol: sampling, checking replies, reports, checkpoints; no messages here.

`ProtocolStrategy` translates between Flower's messages and this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from logging import INFO, WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flwr_perdl.core.aggregate import LEFT_OUT
from flwr_perdl.core.checks import Matrix, plain
from flwr_perdl.core.threads import one_blas_thread
from flwr_perdl.protocol.checkpoint import BY_PARTITION, Checkpoints, Run, canonical_identity
from flwr_perdl.protocol.combine import check_models
from flwr_perdl.protocol.compat import log
from flwr_perdl.protocol.events import EventLog
from flwr_perdl.protocol.progress import Observers
from flwr_perdl.protocol.records import (
    AFTER,
    ANEW,
    EVALUATE,
    LOSSES,
    NO_EVALUATE,
    NUM_EXAMPLES,
    PROTOCOL,
    ROUND,
    RUN,
    SEED,
    STEP,
    Limits,
    Replies,
    Reply,
    Scalar,
    brief,
)
from flwr_perdl.protocol.report import RoundReport, first_reason, summarized
from flwr_perdl.protocol.request import (
    CAPPED,
    REFUSED,
    REMEMBERED,
    Lost,
    Request,
    TooFewReplies,
    check_arrays,
    check_request,
)
from flwr_perdl.protocol.roster import Roster
from flwr_perdl.random import EVALUATION, SAMPLING, spawn

if TYPE_CHECKING:
    from flwr_perdl.protocol.strategy import ProtocolStrategy

#: Largest absolute value of a number in replies, and where the model is in single precision.
_DOUBLE, _SINGLE = 1e100, 1e30
#: In an evaluation's aggregate: how many clients have no finite loss, if a third or more.
NO_LOSS = "no-finite-loss"
#: Maximum number of different metrics of a client in a run: reports are kept, and saved.
_MOST_METRICS = 1000
#: What reports call the share of a reply's metrics that are above it.
METRICS_DROPPED = "metrics dropped"


class Plan(NamedTuple):
    """Who is asked what in one exchange: arrays by partition, ascending, and the config of all."""

    arrays: dict[int, list[Matrix]]
    config: dict[str, Scalar]


class Conversation:
    """One run of a protocol: asks its questions, takes the replies, remembers what happened.

    Parameters
    ----------
    strategy : ProtocolStrategy
        Whose protocol it is: what it promises of privacy, the rounds of the run where they are
        known, which metrics are flags and labels, and what is asked of evaluations.
    initial : list of ndarray
        The user's initial arrays, possibly none.
    names : iterable of str, default ()
        Their names; a model of as many arrays has them, too.
    """

    def __init__(
        self, strategy: ProtocolStrategy, initial: list[Matrix], names: Iterable[str] = ()
    ) -> None:
        self.options = options = strategy.options
        self._strategy, self._privacy = strategy, strategy.privacy
        #: What makes two runs the same run; a checkpoint of another one is refused.
        self._identity = canonical_identity(
            {
                "protocol": type(strategy).__name__,
                "settings": strategy.settings(),
                "seed": options.seed,
                "fraction_train": options.fraction_train,
            },
            strict=options.checkpoint_dir is not None,
        )
        digests = canonical_identity({"": initial}, strict=False)[""] if initial else []
        #: What the run has come to, as a checkpoint holds it.
        self.run = Run(digests, list(names), initial)
        self._checkpoints: Checkpoints | None = None
        self._resumed: Path | None = None  # until a step from this checkpoint has gone well
        self._clients_evaluate = self._privacy is None
        self._logged: set[tuple[str, bool]] = set()  # who is left out since, and if of evaluations
        self._metrics: dict[int, set[str]] = {}  # the names of each client's metrics in this run
        #: Which node is which client.
        self.roster = Roster(options.clients_by_node)
        #: What the protocol asks next; None if it is over.
        self.request: Request | None = None
        self._asked: dict[int, list[Matrix]] = {}
        self._asked_at = 0.0
        if options.checkpoint_dir is not None:
            folder, resume = options.checkpoint_dir, options.resume
            self._checkpoints = Checkpoints(folder, self._identity, resume=resume)
        self._events, self._observers = EventLog(options.events), Observers(options.on_round)
        if self._checkpoints is not None and options.resume:
            self._resumed = self._checkpoints.load(self.run)
            for report in self.run.history:
                for partition, own in report.metrics.items():
                    self._metrics.setdefault(partition, set()).update(own.keys() - {NUM_EXAMPLES})
        # The checkpoint has the result: no generator is needed, and no client is asked.
        if self.run.finished:
            return
        if self._space is not None:
            initial = [self._space.project(array) for array in initial]
        state = None if self._resumed is None else self.run.state
        self._steps = strategy.protocol(initial, state)
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
    def _space(self) -> Any:
        """Where the model is learned, if not where the samples are."""
        return None if self._privacy is None else self._privacy.basis

    # Events --------------------------------------------------------------------------------

    def begin(self) -> None:
        """Note that the run begins or goes on."""
        options, name, rounds = self.options, self._identity["protocol"], self._strategy._num_rounds
        self._events.write(
            "begin",
            protocol=name,
            seed=options.seed,
            rounds=rounds,
            done=self.run.done,
            min_clients=options.min_clients,
        )
        if self._privacy is not None:
            log(
                INFO,
                "privacy: replies are sums with noise alone; the clients' evaluations, metrics and "
                "numbers of examples are switched off.",
            )
        own = {"strategy": name, **self._identity["settings"], "num_rounds": rounds}
        direct = ("seed", "min_clients", "num_clients", "fraction_train", "fraction_evaluate")
        self._observers.begin({**own, **{each: getattr(options, each) for each in direct}})

    def end(self, error: BaseException | None = None) -> None:
        """Note that the run is over, and what stopped it; warn of evaluations without a reply."""
        stopped = None if error is None else str(error) or type(error).__name__
        if isinstance(error, SystemExit):  # its text would be a number
            stopped = f"the program was ended from outside, with exit code {error.code}"
        self._events.write("end", done=self.run.done, stopped=stopped)
        self._observers.end(None if error is not None else self.run.named_model)
        evaluations = [report for report in self.run.history if report.step == EVALUATE]
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
        self.run.server_metrics[round_] = dict(metrics)
        self._events.write("server", round=round_, metrics=metrics)

    # Training ------------------------------------------------------------------------------

    @property
    def limits(self) -> Limits:
        """What a reply to the last plan may be, decided before its arrays are read."""
        given, request = self.options.max_magnitude, self.request
        largest = _DOUBLE if given is None else given
        # What float32 cannot hold would be infinite in the model, and in every later round.
        if any(array.dtype == np.float32 for array in self.run.model):
            largest = min(largest, _SINGLE)
        limits = Limits(self.options.max_reply_bytes, magnitude=largest)
        if request is None:
            return limits
        expect = request.expect if request.models is None else request.models.expected
        return limits._replace(most=request.most, expect=expect)

    def plan(self, round_: int, partitions: Collection[int]) -> Plan | None:
        """Return who is asked what in ``round_``; None if there is nothing to ask."""
        if self.request is None or round_ <= self.run.done:
            return None
        channel = self.request.secure
        if channel is not None and channel.ended:
            log(WARNING, "The run ends after round %d: %s.", self.run.done, channel.ended)
            self.request = None
            return None
        if len(partitions) < self.options.min_clients:
            raise TooFewReplies(
                f"Round {round_} has {len(partitions)} client(s) to ask, fewer than "
                f"min_clients={self.options.min_clients}; {self._where_saved()}"
                f"{self.roster.absence()}."
            )
        # Drawn by the round, not by a generator that lives on: a resumed run asks the same clients.
        chosen = self._sample(partitions, self.options.fraction_train, SAMPLING, round_)
        request, own, same = self.request, self.request.own, list(self.request.arrays)
        arrays = dict.fromkeys(chosen, same)
        if own is not None:
            # The first thing that a state from another program would break.
            with self._going_on():
                arrays = {p: check_arrays("Request.own(partition)", own(p)) for p in chosen}
        secure = {} if request.secure is None else request.secure.config(len(chosen))
        return self._plan(round_, arrays, request.step, {**request.config, **secure})

    def conclude(
        self, round_: int, replies: Mapping[int, Reply], lost: Mapping[int, Lost]
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

        Raises
        ------
        TooFewReplies
            If fewer than ``min_clients`` good replies remain.
        """
        request = self.request
        if request is None:
            raise RuntimeError("conclude must follow a plan.")
        good, bad = _checked(partial(_check, request), replies)
        if (models := request.models) is not None:
            wrong = check_models(models, good, self.options.max_magnitude)
            bad |= {partition: Lost(REFUSED, brief(why)) for partition, why in wrong.items()}
            good = good.sharing({p: reply for p, reply in good.items() if p not in wrong})
        bad = {**lost, **bad}
        if request.max_weight is not None:
            self._cap(good, request.max_weight, round_, request.step)
        self._log_lost(round_, request.step, bad)
        self._check_enough(round_, request.step, good, bad)
        # One thread: sums in another order would give other bits on a machine with more cores.
        self._warn_of_lost_state(good)
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
        self._log_lost(round_, request.step, unlike)
        kept = {partition: reply for partition, reply in good.items() if partition not in unlike}
        self._check_enough(round_, request.step, kept, bad | unlike)
        for partition in unlike:
            self.run.last.pop(partition, None)
        # A client that is back is named again when it is lost the next time.
        for partition in kept:
            self._logged.discard((self.roster.label(partition), False))
        report = self._report(round_, request.step, kept, bad | unlike)
        for partition, what in good.noted.items():
            report.anomalies.setdefault(partition, {}).update(what)
        self.run.done = round_
        self._remember(report)
        return report

    def _check_enough(
        self, round_: int, step: str, good: Mapping[int, Reply], bad: Mapping[int, Lost]
    ) -> None:
        """Raise a TooFewReplies, before anything is saved, if too few good replies remain."""
        if len(good) >= self.options.min_clients:
            return
        report = self._report(round_, step, good, bad)
        self._tell(report)
        raise TooFewReplies(
            f"Round {round_} has {len(good)} good replies, fewer than "
            f"min_clients={self.options.min_clients}; {self._where_saved()}"
            + first_reason(report.dropped, f", asked for step {step!r}")
            + "."
        )

    def _with_absent(self, request: Request, round_: int, good: Replies) -> Replies:
        """Return the replies, with the last ones of clients that have none and are remembered."""
        if not request.remember:
            self.run.last = {}
            return good
        absent = {
            p: reply
            for p, (step, when, reply) in self.run.last.items()
            if p not in good and step == request.step and when >= round_ - request.remember
        }
        recalled, _ = _checked(partial(_check, request), absent)
        new = {p: (request.step, round_, reply) for p, reply in good.items()}
        self.run.last = {p: self.run.last[p] for p in recalled} | new
        replies = good.sharing(dict(sorted({**recalled, **good}.items())))
        replies.note(REMEMBERED, dict.fromkeys(recalled, 1.0))
        return replies

    def _cap(self, good: Replies, most: float, round_: int, step: str) -> None:
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
                *(round_, step, self.roster.label(partition), bound, most),
            )
        good.note(CAPPED, {p: 1 - bound / reply.num_examples for p, reply in above.items()})

    def _warn_of_lost_state(self, good: Mapping[int, Reply]) -> None:
        """Warn of clients that took part before and have lost their private state since."""
        if ANEW not in self._strategy.flags:  # of anybody's clients it is a metric of their own
            return
        anew = {partition for partition, reply in good.items() if reply.metrics.get(ANEW)}
        before: set[int] = set()
        if anew:
            before = {
                p for report in self.run.history if report.step != EVALUATE for p in report.metrics
            }
        if anew & before:
            log(
                WARNING,
                "The private state of %s was lost and is made anew, so the results differ from "
                "those of a run without that loss. To keep it on disk, give every client a "
                '"state-dir" in its node config, set FLWR_PERDL_STATE_DIR where clients run, or '
                "make the grid InProcessGrid(..., state_dir=FOLDER).",
                ", ".join(map(self.roster.label, sorted(anew & before))),
            )

    # Evaluation ----------------------------------------------------------------------------

    def evaluates(self, round_: int) -> bool:
        """Return whether clients evaluate the model after ``round_``."""
        options, run = self.options, self.run
        due = options.fraction_evaluate > 0 and round_ % options.evaluate_every == 0
        due = due and self._clients_evaluate and bool(run.model)
        return due and run.evaluated < round_ == run.done

    def plan_evaluation(
        self, round_: int, partitions: Collection[int], config: Mapping[str, Scalar]
    ) -> Plan:
        """Return who evaluates the model after ``round_``."""
        fraction = self.options.fraction_evaluate
        chosen = self._sample(partitions, fraction, EVALUATION, round_)
        steps = (report.step for report in reversed(self.run.history) if report.step != EVALUATE)
        last = next(steps, None)
        after = {} if last is None else {AFTER: last}
        config = {**config, **after}
        return self._plan(round_, dict.fromkeys(chosen, self.run.model), EVALUATE, config)

    def conclude_evaluation(
        self, round_: int, replies: Mapping[int, Reply], lost: Mapping[int, Lost]
    ) -> RoundReport | None:
        """Note the replies to the last evaluation; None if no client has any way to evaluate."""
        if lost and not replies and all(why.code == NO_EVALUATE for why in lost.values()):
            self._clients_evaluate, self.run.evaluated = False, round_
            log(
                INFO,
                "No client defines evaluate, so this run has no further evaluations; with "
                "fraction_evaluate=0 it asks for none.",
            )
            return None

        def check(reply: Reply) -> None:
            self._strategy.check_evaluation(reply, self.run.model)

        replies, bad = _checked(check, replies)
        lost = {**lost, **bad}
        self._warn_of_lost_state(replies)
        self._log_lost(round_, EVALUATE, lost)
        self._logged -= {(self.roster.label(partition), True) for partition in replies}
        report = self._report(round_, EVALUATE, replies, lost)
        self._count_losses(report)
        self.run.evaluated = round_
        self._remember(report)
        return report

    def _count_losses(self, report: RoundReport) -> None:
        """Warn, in log and result, if a third of the clients or more have no finite loss."""
        found = sum(not own.keys().isdisjoint(LOSSES) for own in report.metrics.values())
        missing, asked = len(self._asked) - found, len(self._asked)
        evaluations = [report, *(past for past in self.run.history if past.step == EVALUATE)]
        measured = any(not one.aggregate.keys().isdisjoint(LOSSES) for one in evaluations)
        if measured and missing and 3 * missing >= asked:  # else the app measures no loss
            report.aggregate[NO_LOSS] = float(missing)
            log(
                WARNING,
                "Round %d (evaluate): %d of %d clients have no finite loss; the mean is that of "
                "the others.",
                *(report.round, missing, asked),
            )

    # What both share -------------------------------------------------------------------------

    def past(self, round_: int, *, evaluation: bool) -> RoundReport | None:
        """Return the report of an exchange of ``round_``, None if there was none."""
        for report in self.run.history:
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
        common: dict[str, Scalar] = {STEP: step, ROUND: round_, SEED: seed, RUN: self.run.token}
        if self._strategy.protocol_name:
            common[PROTOCOL] = self._strategy.protocol_name
        self._asked, self._asked_at = arrays, time.monotonic()
        self._events.write("ask", round=round_, step=step, asked=len(arrays))
        return Plan(arrays, {**{key: plain(value) for key, value in config.items()}, **common})

    def _ask(self, request: object) -> None:
        """Take up what the protocol asks next."""
        asked, sums = check_request(request), self._strategy._sums
        if asked.summed is not None and sums is not None:
            asked = check_request(asked._replace(secure=sums(asked.summed)))
        if asked.secure is not None:
            least = self.options.min_clients
            channel = asked.secure.begin(
                self.run.kept, self._strategy._num_rounds, least, self.save
            )
            asked = asked._replace(secure=channel)
        elif self._privacy is not None:
            raise ValueError(
                "initial_arrays must be given with privacy, public or random ones, so that every "
                f"reply is a part of a sum, got none, and a step {asked.step!r} whose is not."
            )
        self.request = asked
        self.run.model = self._lifted(asked.arrays if asked.model is None else asked.model)
        self.run.state = asked.state

    def _lifted(self, model: Sequence[Matrix]) -> list[Matrix]:
        """Return a model as evaluations and the result see it."""
        space = self._space
        return list(model) if space is None else [space.lift(array) for array in model]

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
        self.request = None
        self.run.model = self._lifted(check_arrays("what protocol returns", model))
        self.run.state, self.run.finished = {}, True

    def _report(
        self, round_: int, step: str, good: Mapping[int, Reply], lost: Mapping[int, Lost]
    ) -> RoundReport:
        """Return the report of an exchange."""
        self.run.names |= {p: self.roster.called(p) for p in self.roster.names}
        dropped = {self.roster.label(p): why.reason for p, why in sorted(lost.items())}
        dropped |= {f"node {node}": why for node, why in self.roster.unanswered.items()}
        metrics = {
            p: {NUM_EXAMPLES: r.num_examples, **self._bounded(p, r.metrics)}
            for p, r in good.items()
        }
        aggregate = summarized(metrics, self._strategy.flags, self._strategy.labels)
        aggregate |= {"clients": float(len(good)), "dropped": float(len(dropped))}
        if uncounted := self.roster.uncounted & good.keys():
            aggregate["uncounted-runs"] = float(len(uncounted))
        ups = [sum(array.size for array in reply.arrays) for reply in good.values()]
        downs = [sum(array.size for array in self._asked[partition]) for partition in good]
        return RoundReport(
            round=round_,
            step=step,
            metrics=metrics,
            aggregate=aggregate,
            dropped=dropped,
            floats_down=float(np.mean(downs)) if downs else 0.0,
            floats_up=float(np.mean(ups)) if ups else 0.0,
            anomalies={
                **{partition: {why.kind: 1.0} for partition, why in sorted(lost.items())},
                **{
                    partition: {METRICS_DROPPED: 1 - len(metrics[partition]) / (1 + len(r.metrics))}
                    for partition, r in good.items()
                    if len(metrics[partition]) <= len(r.metrics)
                },
            },
        )

    def _bounded(self, partition: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Return a client's metrics, without new names once it has reported too many."""
        known = self._metrics.setdefault(partition, set())
        new = [name for name in metrics if name not in known]
        dropped = set(new[_MOST_METRICS - len(known) :] if new else ())
        known |= set(new) - dropped
        if not dropped:
            return metrics
        log(
            WARNING,
            "%s reports more than %d different metrics in this run; %d are dropped, such as %r.",
            *(self.roster.label(partition), _MOST_METRICS, len(dropped), min(dropped)),
        )
        return {name: value for name, value in metrics.items() if name not in dropped}

    def _log_lost(self, round_: int, step: str, lost: Mapping[int, Lost]) -> None:
        """Log who was left out, once until it is back; those with one reason in one line."""
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
        self.run.history.append(report)
        self._tell(report)
        self.save()
        self._observers(report)

    def _tell(self, report: RoundReport) -> None:
        """Write an exchange's event."""
        fields = report._asdict()
        for name in BY_PARTITION:
            fields[name] = {self.run.names.get(p, p): each for p, each in fields[name].items()}
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

    def save(self) -> None:
        """Write a checkpoint of the state after the last finished round."""
        if self._checkpoints is not None:
            self._checkpoints.save(self.run)

    def _where_saved(self) -> str:
        """Return the clause that says where the last good state is."""
        if self._checkpoints is None or not self.run.done:
            return "nothing is saved"
        return f"the state after round {self.run.done} is saved in {self.options.checkpoint_dir}"


def _check(request: Request, reply: Reply) -> object:
    """Raise an error unless a reply has what is asked for; return what its own check does."""
    for name in request.metrics:
        if name not in reply.metrics:
            raise ValueError(f"metrics must have {name!r}, got {sorted(reply.metrics)}")
    if request.combine is not None:
        request.combine.check(reply)
    returned: object = request.check(reply)
    return returned


def _checked(
    check: Callable[[Reply], object], replies: Mapping[int, Reply]
) -> tuple[Replies, dict[int, Lost]]:
    """Return the replies that pass a check, and why the others do not."""
    good, bad = Replies(), {}
    for partition in sorted(replies):
        try:
            returned = check(replies[partition])
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
        good[partition] = replies[partition]
    return good, bad
