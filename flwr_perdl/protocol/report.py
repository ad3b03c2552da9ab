"""Reports of a run, its progress lines or bar, and callbacks."""

from __future__ import annotations

import logging
import re
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from logging import WARNING
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from flwr_perdl.core import html
from flwr_perdl.core.checks import Matrix, brief_repr, check_choice, check_flag, check_kind
from flwr_perdl.core.repr import short_repr
from flwr_perdl.protocol.compat import log
from flwr_perdl.protocol.records import (
    CLUSTER,
    EVALUATE,
    NUM_EXAMPLES,
    OURS,
    Reply,
    brief,
    numbers_in,
    to_record,
)
from flwr_perdl.protocol.request import State

#: Words in the names of metrics of which less is better, and what such words end with; words in the
#: names of those of which more is.
_LOWER = {"loss", "error", "mse", "rmse", "mae", "mape", "nll", "entropy", "perplexity", "ppl"}
_LOWER_ENDINGS = ("loss", "error")
_HIGHER = {"accuracy", "acc", "auc", "auroc", "f1", "precision", "recall", "r2", "iou", "dice"}
_HIGHER |= {"sensitivity", "specificity", "psnr", "ssim", "bleu"}
#: Maximum number of different metrics of a client in a run, and of numbers in the lists of a reply.
_MOST_METRICS = 1000
#: What reports call the share of a reply's metrics that are above it.
METRICS_DROPPED = "metrics dropped"


class RoundReport(NamedTuple):
    """What happened in one exchange: the messages of a training round, or of an evaluation.

    Attributes
    ----------
    round : int
        Communication round, from 1.
    step : str
        The protocol's step, or ``"evaluate"``.
    metrics : dict of int to dict
        Every good reply's metrics, by partition: numbers, lists of numbers, and texts. Names that
        begin with ``"perdl."``, such as ``"perdl.state-lost"``, are the library's.
    aggregate : dict of str to float, or list of float
        The means of numbers, and of lists as long as each other, weighted by numbers of examples,
        and ``"clients"`` and ``"dropped"``; with ``privacy`` also ``"uncounted-runs"``: at how many
        clients each Flower run has its own budget.
    dropped : dict of str to str
        Who was left out, and why.
    floats_down, floats_up : float
        Values sent to, and received from, a client; the mean over the good replies.
    anomalies : dict of int to dict
        By partition: ``"failed"`` (an error, or no reply), ``"refused"`` (a reply that broke a
        rule), ``"capped"`` (by which share its weight was reduced, see `Request.max_weight`), and
        the share of the reply that the aggregation changed, such as ``"left out"`` or
        ``"clipped"``.

    Examples
    --------
    >>> from flwr_perdl.strategies import RoundReport, client_report
    >>> report = RoundReport(1, "update", {0: {"error": 0.5}}, {"error": 0.5}, {}, 12.0, 6.0, {})
    >>> report.metrics[0], report.floats_up
    ({'error': 0.5}, 6.0)
    """

    round: int
    step: str
    metrics: dict[int, dict[str, Any]]
    aggregate: dict[str, Any]
    dropped: dict[str, str]
    floats_down: float
    floats_up: float
    anomalies: dict[int, dict[str, float]]

    @property
    def numbers(self) -> dict[int, dict[str, float]]:
        """The metrics that are numbers, by partition."""
        return {partition: numbers_in(own) for partition, own in self.metrics.items()}

    def __repr__(self) -> str:
        """Return the fields in one line; what is large is only described."""
        return short_repr(self)

    def _repr_html_(self) -> str:
        """Return the fields as a table, for a notebook."""
        return html.record(self)


class History(list[RoundReport]):
    """The reports of a run; a notebook shows a row for each."""

    @property
    def evaluations(self) -> list[RoundReport]:
        """The reports of evaluations."""
        return [report for report in self if report.step == EVALUATE]

    @property
    def trainings(self) -> list[RoundReport]:
        """The others."""
        return [report for report in self if report.step != EVALUATE]

    @property
    def trained(self) -> set[int]:
        """Who has trained in this run."""
        return {partition for report in self.trainings for partition in report.metrics}

    def of(self, round_: int, *, evaluation: bool) -> RoundReport | None:
        """Return the report of an exchange, None if there was none."""
        among = self.evaluations if evaluation else self.trainings
        return next((report for report in among if report.round == round_), None)

    def _repr_html_(self) -> str:
        rows = (
            ({"round": one.round, "step": one.step, "left out": len(one.dropped)}, one.aggregate)
            for one in self
        )
        return html.section(f"{len(self)} exchanges", html.metrics_table(rows))


@dataclass
class RunRecord:
    """What a run has come to: all that a checkpoint holds.

    Attributes
    ----------
    array_names : list of str
        The names of the model's arrays, where they have names.
    model : list of ndarray
        What evaluations and the result see.
    state : mapping of str to ndarray, or None
        From where the protocol goes on; None if it cannot.
    finished : bool
        Whether the protocol has returned the model.
    token : str
        What tells it from other runs.
    done, evaluated : int
        The last round that is finished, and the last that was evaluated.
    history : list of RoundReport
        A report per exchange.
    names : dict of int to str
        How reports call the clients.
    server_metrics : dict of int to dict
        The server's own evaluations, by round.
    last : dict of int to (str, int, Reply)
        Step, round and reply of each client's last good one (`Request.reuse_last_reply`).
    initial : list of str
        Digests of the arrays that it began with, once there is a checkpoint.
    kept : dict of str to ndarray
        What the requests' channel keeps, such as what is spent of a budget.
    """

    array_names: list[str]
    model: list[Matrix]
    state: State | None = None
    finished: bool = False
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    done: int = 0
    evaluated: int = 0
    history: History = field(default_factory=History)
    names: dict[int, str] = field(default_factory=dict)
    server_metrics: dict[int, dict[str, Any]] = field(default_factory=dict)
    last: dict[int, tuple[str, int, Reply]] = field(default_factory=dict)
    initial: list[str] = field(default_factory=list)
    kept: dict[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def named_model(self) -> dict[str, Matrix]:
        """The model's arrays by name, those of several as "0/NAME", or by number without names."""
        names, n_models = self.array_names, len(self.model) / (len(self.array_names) or 1)
        if not names or n_models % 1:
            names = [f"{i:04d}" for i in range(len(self.model))]
        elif n_models != 1:
            names = [f"{j}/{name}" for j in range(int(n_models)) for name in names]
        return dict(zip(names, self.model, strict=True))


#: In what a run keeps: clients with their models, where the server finds these.
MEMBERS = "members"


@dataclass(frozen=True, kw_only=True)
class Models:
    """What a strategy says of its run's models; by default there is one.

    Parameters
    ----------
    names : sequence of str, default ()
        The names of a model's arrays, where they are not those of the initial ones.
    numbered : bool, default False
        Whether there are several, one after the other; evaluations call arrays "NUMBER/NAME".
    stack : int, optional
        Which array has a row for each model, where they are not one after the other.
    form : callable, optional
        ``model -> its arrays by name``, where they are not those in the record.
    first : tuple of str, default ()
        Steps before there are clusters: what clients said of theirs until then is of other models.
    drops_empty : bool, default False
        Whether models that no client has are left out of the result: nobody has set their number.
    """

    names: Sequence[str] = ()
    numbered: bool = False
    stack: int | None = None
    form: Callable[[Sequence[Matrix]], dict[str, Matrix]] | None = None
    first: tuple[str, ...] = ()
    drops_empty: bool = False

    def names_in(self, record: RunRecord) -> list[str]:
        """Return the names of a model's arrays."""
        return [*(self.names or record.array_names)]

    def split(self, record: RunRecord) -> list[list[Matrix]]:
        """Return the models."""
        model, at = record.model, self.stack
        if at is not None:
            rows = [row for stack in model[at : at + 1] for row in stack]
            return [[*model[:at], row, *model[at + 1 :]] for row in rows]
        size = (self.numbered and len(self.names_in(record))) or len(model) or 1
        return [model[i : i + size] for i in range(0, len(model), size)]

    def named(self, model: Sequence[Matrix], record: RunRecord) -> ArrayRecord:
        """Return one of the models, with the names of its arrays."""
        if self.form is None:
            return to_record(model, self.names_in(record))
        arrays = self.form(model)
        return to_record([*arrays.values()], [*arrays])

    def members(self, record: RunRecord, n: int, clients: Collection[int]) -> dict[int, int]:
        """Return which of ``n`` models is each client's, by partition: as it said last."""
        kept = record.kept.get(MEMBERS)
        if n == 1 and kept is None:
            return dict.fromkeys(clients, 0)
        members: dict[int, int] = {}
        for report in reversed(record.history):
            if report.step in self.first:
                break
            for p in report.metrics.keys() - members.keys():
                j = report.metrics[p].get(CLUSTER)
                if isinstance(j, int | float) and 0 <= j < n:
                    members[p] = int(j)
        found = {} if kept is None else dict(kept.tolist())
        return dict(sorted({**members, **found}.items()))


def client_report(history: Iterable[RoundReport]) -> dict[int, dict[str, float]]:
    """Return what happened to each client's replies, over all exchanges.

    Parameters
    ----------
    history : iterable of RoundReport
        A strategy's history.

    Returns
    -------
    dict of int to dict
        By partition: ``"asked"``, the number of exchanges that included the client, and the sums of
        its `RoundReport.anomalies`. A client without anomalies has ``"asked"`` alone.

    Examples
    --------
    >>> from flwr_perdl.strategies import RoundReport, client_report
    >>> history = [RoundReport(1, "update", {0: {"error": 0.5}}, {}, {}, 12.0, 6.0, {})]
    >>> client_report(history)[0]
    {'asked': 1.0}
    """
    totals: dict[int, dict[str, float]] = {}
    try:
        reports = iter(history)
    except TypeError:
        raise TypeError(f"history must be iterable, got {brief_repr(history)}.") from None
    for report in reports:
        check_kind("history", report, RoundReport, "RoundReports")
        for partition in {*report.metrics, *report.anomalies}:
            total = totals.setdefault(partition, {})
            for what, share in {"asked": 1.0, **report.anomalies.get(partition, {})}.items():
                total[what] = total.get(what, 0.0) + share
    return dict(sorted(totals.items()))


def summarize(
    metrics: Mapping[int, Mapping[str, Any]],
    flags: Collection[str] = (),
    labels: Collection[str] = (),
) -> dict[str, Any]:
    """Return each metric's mean over the clients that have it, weighted by their examples.

    Texts have none, lists one of each entry where they are as long as each other.

    Of a flag, or a metric of the library, the number of clients where it is not zero instead; of a
    label, under ``"NAME_LABEL"``, the number of clients with each.
    """
    names = dict.fromkeys(name for own in metrics.values() for name in own if name != NUM_EXAMPLES)
    found: dict[str, Any] = {}
    for name in names:
        all_ = ((own.get(name, ""), own[NUM_EXAMPLES]) for own in metrics.values())
        having = [one for one in all_ if not isinstance(one[0], str)]
        lengths = {len(own) if isinstance(own, list) else None for own, _ in having}
        if len(lengths) != 1:
            continue
        if lengths != {None}:
            rows, weights = zip(*having, strict=True)
            found[name] = np.average(rows, axis=0, weights=weights).tolist()
        elif name in flags or name.startswith(OURS):
            found[name] = float(sum(value != 0 for value, _ in having))
        elif name in labels:
            sizes = Counter(value for value, _ in having)
            found |= {f"{name}_{label:.15g}": float(sizes[label]) for label in sorted(sizes)}
        else:
            found[name] = sum(n * value for value, n in having) / sum(n for _, n in having)
    return found


class MetricLimit:
    """How many different metrics a client may report in a run: reports are kept, and saved."""

    def __init__(self, history: History, label: Callable[[int], str]) -> None:
        self._label, self._known = label, dict[int, set[str]]()
        for report in history:
            for partition, metrics in report.metrics.items():
                self._known.setdefault(partition, set()).update(metrics.keys() - {NUM_EXAMPLES})

    def __call__(self, partition: int, metrics: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a client's metrics, without new names once it has reported too many."""
        lists = {name: len(own) for name, own in metrics.items() if isinstance(own, list)}
        dropped = {*lists} if sum(lists.values()) > _MOST_METRICS else set()
        known = self._known.setdefault(partition, set())
        new = [name for name in metrics if name not in known and name not in dropped]
        dropped |= set(new[_MOST_METRICS - len(known) :] if new else ())
        known |= set(new) - dropped
        if not dropped:
            return metrics
        log(
            WARNING,
            "%s reports more than %d different metrics in this run, or as many numbers in lists at "
            "once; %d are dropped, such as %r.",
            *(self._label(partition), _MOST_METRICS, len(dropped), min(dropped)),
        )
        return {name: value for name, value in metrics.items() if name not in dropped}


def lower_is_better(name: str) -> bool | None:
    """Return whether less of a metric is better, by the words of its name; None: nobody knows."""
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    lower, higher = bool(words & _LOWER), bool(words & _HIGHER)
    lower |= any(word.endswith(_LOWER_ENDINGS) for word in words)
    return None if lower == higher else lower


def is_higher_better(metric: str, given: bool | None) -> bool:
    """Return whether more of a metric is better: as given, or by the words of its name."""
    if given is not None:
        return check_flag("higher_is_better", given)
    lower = lower_is_better(metric)
    if lower is None:
        raise ValueError(
            "higher_is_better must be given for a metric whose name does not say it, got "
            f"metric={metric!r}."
        )
    return not lower


def in_words(report: RoundReport, labels: Collection[str], hidden: Collection[str]) -> list[str]:
    """Return an exchange's metrics as a log says them: means, and the worst client's."""
    found = []
    numbers = report.numbers.values()
    for name, mean in report.aggregate.items():
        values = [own[name] for own in numbers if name in own]
        same = name == "loss" and report.aggregate.get("eval_loss") == mean
        if not values or same or name in hidden or name.startswith(OURS):
            continue
        found.append(f"{name} {mean:.4g}{_name_worst(name, values)}")
    for label in labels:
        sizes = Counter(own[label] for own in numbers if label in own)
        if sizes:
            each = ", ".join(str(sizes[number]) for number in sorted(sizes))
            found.append(f"{len(sizes)} group{'s' * (len(sizes) > 1)}: {each} clients")
    if report.dropped:
        found.append(f"{len(report.dropped)} left out")
    return found


def _name_worst(name: str, values: Sequence[float]) -> str:
    """Return the worst of some clients' values of a metric in words, if it is known which is."""
    lower = lower_is_better(name)
    if lower is None or len(values) < 2:
        return ""
    return f" (worst client {max(values) if lower else min(values):.4g})"


def first_reason(reasons: Mapping[str, str], asked: str = "") -> str:
    """Return the clause that quotes the first of these reasons, nothing if there are none."""
    for who, why in reasons.items():
        rest = f" ({len(reasons)} in all)" if len(reasons) > 1 else ""
        return f"; the first reason{rest}: {who}{asked}: {why.rstrip('.')}"
    return ""


# Whom a run tells ------------------------------------------------------------------------

#: What is called with each report.
OnRound = Callable[[RoundReport], object] | Sequence[Callable[[RoundReport], object]] | None
#: How much a run shows; the first three by number, too.
VERBOSE = ("quiet", "lines", "log", "bar")
#: Seconds between two drawings of a bar within a round.
_REDRAW_SECONDS = 0.3


def list_observers(on_round: OnRound) -> list[Callable[[RoundReport], object]]:
    """Return the callables of ``on_round``; a TypeError if there is anything else in it."""
    if on_round is None:
        return []
    given: list[Any] = list(on_round) if isinstance(on_round, list | tuple) else [on_round]
    if not given or not all(map(callable, given)):
        wrong = brief_repr(on_round)
        raise TypeError(f"on_round must be a function, a list of some, or None, got {wrong}.")
    return given


class Observers:
    """Calls functions with each report; the first error of each is logged, and the run goes on."""

    def __init__(self, on_round: OnRound) -> None:
        self._all = list_observers(on_round)
        self._failed: set[int] = set()

    def __call__(self, report: RoundReport) -> None:
        """Tell what happened in an exchange."""
        for one in self._all:
            try:
                one(report)
            except Exception as error:
                if id(one) not in self._failed:
                    self._failed.add(id(one))
                    name = getattr(one, "__name__", type(one).__name__)
                    why = brief(f"{type(error).__name__}: {error}").rstrip(".")
                    log(WARNING, "%s failed: %s. The run goes on.", name, why)


def check_verbose(verbose: object, *, local: bool) -> str:
    """Return one of `VERBOSE`; by default lines where all clients are in this process."""
    if verbose is None:
        verbose = 1 if local else 2
    if isinstance(verbose, int) and verbose in (0, 1, 2):
        verbose = VERBOSE[verbose]
    return check_choice("verbose", verbose, VERBOSE)


@contextmanager
def show_run(verbose: str, name: str, rounds: int, metric: str = "") -> Iterator[Show]:
    """Yield what takes a run's reports; Flower's lines are kept out of the log but for warnings.

    Parameters
    ----------
    verbose : {"quiet", "lines", "log", "bar"}
        Warnings alone; a line per round on stderr, unless the level of Flower's log is above INFO;
        Flower's lines, as its own strategies write them; or a progress bar of the rounds, by tqdm
        where that is installed, else lines.
    name : str
        The strategy's name, before the bar.
    rounds : int
        Communication rounds in all.
    metric : str, optional
        What a bar shows of an exchange that has it, instead of the first metric.
    """
    logger = logging.getLogger("flwr")
    if verbose == "lines" and not logger.isEnabledFor(logging.INFO):
        verbose = "log"
    show, level = Show(verbose, name, rounds, metric), logger.level
    if verbose != "log":
        logger.setLevel(max(level, logging.WARNING))
    try:
        yield show
    finally:
        show.close()
        logger.setLevel(level)


class Show:
    """A bar of rounds that are over, with the first metric of each step; lines with all; nothing.

    Parameters
    ----------
    verbose : str, default "quiet"
        "bar" or "lines"; nothing is shown otherwise.
    name, rounds, metric : str, int, str
        The strategy's name, communication rounds in all, and which metric a bar shows.
    """

    def __init__(
        self, verbose: str = "quiet", name: str = "", rounds: int = 0, metric: str = ""
    ) -> None:
        self._name, self._rounds, self._found = name, rounds, dict[str, str]()
        self._metric = metric
        self._words: dict[str, None] = {}  # what training and evaluation both say is said once
        self._bar: Any = None
        self._round = self._printed = 0
        tqdm = _tqdm() if verbose == "bar" else None
        self._lines = verbose == "lines" or (verbose == "bar" and tqdm is None)
        if tqdm is not None:
            self._bar = tqdm.tqdm(total=rounds, desc=name, unit="round")
        self._drawn = time.monotonic()

    def __call__(self, report: RoundReport, round_: int, words: Sequence[str]) -> None:
        """Take an exchange's report, the round that it is of, and what to say of it."""
        self._round = round_
        self._words.update(dict.fromkeys(words))
        self._found.pop("replies", None)
        numbers = {n: v for n, v in numbers_in(report.aggregate).items() if not n.startswith(OURS)}
        # By default the loss of the step.
        for name in [self._metric] if self._metric in numbers else list(numbers)[:1]:
            self._found[name] = f"{numbers[name]:.4g}"
        if report.dropped:
            self._found["left out"] = str(len(report.dropped))
        if self._bar is not None:
            self._bar.n = max(round_, 0)
            self._draw()

    def end_round(self) -> None:
        """Take note that a round is over, its evaluation included."""
        if self._lines and self._round > self._printed:
            self._printed = self._round
            text = ", ".join(self._words)
            at = f"round {self._round} of {self._rounds}"
            print(": ".join(filter(None, [self._name, at, text])), file=sys.stderr, flush=True)
        self._words = {}

    def replies(self, done: int, asked: int) -> None:
        """Draw how many clients have replied, of so many asked, a few times a second."""
        if self._bar is not None and time.monotonic() > self._drawn + _REDRAW_SECONDS:
            self._found["replies"] = f"{done}/{asked}"
            self._draw()

    def _draw(self) -> None:
        self._bar.set_postfix(self._found, refresh=False)
        self._bar.refresh()
        self._drawn = time.monotonic()

    def close(self) -> None:
        """End the bar; replies that come after the run draw nothing."""
        if self._bar is not None:
            self._bar.close()
        self._bar = None


def _tqdm() -> ModuleType | None:
    """Return tqdm in the form that suits a terminal or a notebook; None where it is missing."""
    try:
        return import_module("tqdm.auto")
    except ImportError:
        return None
