"""Diagnosis: which strategy fits these clients.

`Diagnosis` trains your own clients for a few rounds with every model-agnostic strategy, lets each
client evaluate the model it would end up with, and recommends one:

===================  =============================================================================
candidate            what is trained
===================  =============================================================================
``fedavg``           FedAvg: the reference
``fine-tuned``       FedAvg for half of the rounds, then fine-tuned by each client
``head``             `PersonalizedFedAvg` with the last layer private (or the given arrays)
``body``             `PersonalizedFedAvg` with the first layer private
``head-fine-tuned``  as ``head`` for half of the rounds, then all arrays fine-tuned by each client
``ditto``            `Ditto`
``clusters``         `ClusteredFedAvg` with ``k="auto"``, at least two clusters, robust
``clusters-head``    the same, with the private arrays of ``head``
``local``            local training only
===================  =============================================================================

With every candidate a client's model is trained ``num_rounds`` times at most. After a third of the
rounds only the reference and the best three others go on. A fine-tuned candidate goes on from the
half of another one, whose rounds are not taken again.

Candidates are compared by the clients' gains over the reference: their mean, without outliers,
which are more than three times as far from the median as the 80 % closest gains. So a few clients
cannot decide the outcome, whatever they report.

Each party receives what it receives in these strategies; private arrays never leave their client.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from inspect import signature
from itertools import product
from logging import INFO, WARNING
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Unpack

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray
from scipy.special import stdtrit

from flwr_perdl.core import html
from flwr_perdl.core.aggregate import TRIM
from flwr_perdl.core.checks import Matrix, check_count, check_kind, check_real
from flwr_perdl.core.repr import ShownAsCalled, short_repr
from flwr_perdl.parts import all_private
from flwr_perdl.parts.private import check_patterns, matched
from flwr_perdl.protocol.compat import log
from flwr_perdl.protocol.options import ServerOptions, ServerSettings
from flwr_perdl.protocol.records import APART, EVALUATE, FORK, LOSSES, TRAIN, brief, to_arrays
from flwr_perdl.protocol.report import RoundReport, is_higher_better
from flwr_perdl.protocol.request import Protocol, Request, State, TooFewReplies
from flwr_perdl.protocol.strategy import ProtocolStrategy
from flwr_perdl.random import SERVER, spawn
from flwr_perdl.strategies._models import pack_model
from flwr_perdl.strategies.clustered import ClusteredFedAvg
from flwr_perdl.strategies.ditto import Ditto
from flwr_perdl.strategies.personalized import PersonalizedFedAvg

#: ``(initial_arrays, num_rounds, **options) -> strategy``; None: the candidate does not apply.
Make = Callable[..., ProtocolStrategy | None]
#: The reference, if it is among the candidates; else the first one is.
FEDAVG = "fedavg"
#: Intervals are of 95 %, on both sides; how much a mean gain may be below the largest, as a share
#: of the reference's metric; with fewer clients an interval that holds 0 leaves it undecided; from
#: this share of resamples on a choice is no tie, whatever the lead.
_LEVEL, _WITHIN, _FEW, _SURE = 0.025, 0.01, 8, 0.95
#: How many candidates go on with the reference.
_GO_ON = 3
#: Outliers are so many times as far from the median as all clients but a fifth are. One in five may
#: then report anything; of normally distributed gains it is nearly four standard deviations.
_FAR = 3.0
#: Draws of clients by which the choice is made again.
_DRAWS = 1000
#: How often a client trains alone before clusters are found, in runs of enough rounds.
_START_ROUNDS = 5


class Diagnosed(NamedTuple):
    """The findings of a `Diagnosis`.

    Attributes
    ----------
    choice : str
        The recommended candidate, such as ``"head"``.
    sentence : str
        The recommendation in words, at most 32 of them.
    code : str
        What to write to follow it.
    confidence : float
        Share of 1,000 bootstrap resamples of the clients (as many, drawn with replacement) in which
        it is recommended.
    values : dict of str to ndarray of shape (n_clients,)
        By candidate, in the order given: the metric of each client's own model.
    gains : dict of str to ndarray of shape (n_clients,)
        Likewise: by how much that is better than the reference's, FedAvg's or the first
        candidate's, after as many rounds.
    clients : list of int
        Partitions of the clients that evaluated all candidates.
    groups : dict of int to int
        Each client's cluster, by partition.
    strategies : dict of str to str
        By candidate: the strategy as one writes it.
    rounds : dict of str to int
        By candidate: how often its models were trained; less than the others where it was stopped.
    rates : dict of str to float
        By candidate: its best learning rate, if there was a choice.
    over : str
        The other candidate with the largest mean gain.
    lead : tuple of float
        By how much the recommended one leads it: the mean over clients, and the ends of its
        interval.
    left_out : dict of str to str
        Why other candidates are not compared, by name.
    metric : str, default "loss"
        What is compared.
    higher_is_better : bool, default False
        Whether a larger metric is better.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.strategies import Diagnosed
    >>> values, gains = {"fedavg": np.array([0.7, 0.8])}, {"fedavg": np.zeros(2)}
    >>> about = {"fedavg": "FedAvg()"}, {"fedavg": 40}, {}, "fedavg", (0.0, 0.0, 0.0)
    >>> print(Diagnosed("fedavg", "One", "", 1.0, values, gains, [0, 1], {}, *about).table())
    rounds  median loss  gain  interval  clients that gain  strategy
        40         0.75     0    0 to 0             0 of 2  FedAvg()
    """

    choice: str
    sentence: str
    code: str
    confidence: float
    values: dict[str, Matrix]
    gains: dict[str, Matrix]
    clients: list[int]
    groups: dict[int, int]
    strategies: dict[str, str]
    rounds: dict[str, int]
    rates: dict[str, float]
    over: str
    lead: tuple[float, float, float]
    left_out: Mapping[str, str] = MappingProxyType({})
    metric: str = "loss"
    higher_is_better: bool = False

    def table(self) -> str:
        """Return a table of the candidates: clients' medians, mean gains over the reference.

        The intervals cover all true gains together with a probability of about 0.95.

        Returns
        -------
        str
        """
        cells = self._cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        widths[-1] = 0  # the last column is on the left
        return "\n".join(["  ".join(map(str.rjust, row, widths)) for row in cells] + self._notes())

    def _notes(self) -> list[str]:
        """Return a line on the clusters, and one for each candidate that is not in the table."""
        sizes = np.unique([*self.groups.values()], return_counts=True)[1].tolist()
        found = [f"clients per cluster: {', '.join(map(str, sizes))}"] if sizes else []
        return found + [f"not compared: {name}: {why}" for name, why in self.left_out.items()]

    def _cells(self) -> list[list[str]]:
        """Return the table's cells, by rows, of which the first one has the columns' names."""
        median, most = f"median {self.metric}", max(self.rounds.values())
        cells = [["rounds", median, "gain", "interval", "clients that gain", "strategy"]]
        for name, gains in self.gains.items():
            gain, low, high = interval(gains[np.isfinite(gains)], len(self.gains))
            cells.append(
                [
                    str(self.rounds[name]),
                    f"{np.nanmedian(self.values[name]):.4g}",
                    f"{gain:.4g}",
                    f"{low:.4g} to {high:.4g}",
                    f"{int(np.sum(gains > 0))} of {len(gains)}",
                    self.strategies[name] + " (stopped early)" * (self.rounds[name] < most),
                ]
            )
        return cells

    def __repr__(self) -> str:
        """Return the fields in one line; what is large is only described."""
        return short_repr(self)

    def _repr_html_(self) -> str:
        """Return the sentence, the candidates' table and the code, for a notebook."""
        code = "".join(f"<pre>{escape(text)}</pre>" for text in (*self._notes(), self.code))
        columns, *rows = self._cells()
        return html.section(self.sentence, html.table(columns, rows), code)


class _Local(ProtocolStrategy):
    """Local training: every client trains a model of its own, and sends none of it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(all_private(), **options)

    def protocol(self, initial: list[Matrix], state: State | None) -> Protocol:
        """Train everywhere."""
        while True:
            yield Request(TRAIN, initial, state=pack_model(initial))


class _FineTuned(NamedTuple):
    """A candidate that goes on from the half of another one by local training."""

    of: str


def _layer(initial: ArrayRecord, which: int) -> list[str] | None:
    """Return names, or a pattern, of one of the model's layers; None if it has only one."""
    names, layers = list(initial), dict[str, list[str]]()
    for name, array in zip(names, to_arrays(initial), strict=True):
        # A layer's arrays have one prefix; without names a vector belongs to what is before.
        own = name.rpartition(".")[0]
        if own or array.ndim != 1 or not layers:
            layers.setdefault(own or name, [])
        layers[own or list(layers)[-1]].append(name)
    if len(layers) < 2:
        return None
    prefix, found = list(layers.items())[which]
    alike = [name for name in names if name.startswith(f"{prefix}.")] == found
    return [f"{prefix}.*"] if alike and not {*prefix} & {*"*?["} else found


def _personal(
    initial: ArrayRecord, _: int, *, layer: int = -1, private: Any = None, **options: Any
) -> ProtocolStrategy | None:
    """Return `PersonalizedFedAvg` with a private part, by default a layer."""
    part = private or _layer(initial, layer)
    return PersonalizedFedAvg(part, **options) if part else None


def _clustered(
    initial: ArrayRecord, num_rounds: int, *, head: bool = False, private: Any = None, **more: Any
) -> ProtocolStrategy | None:
    """Return `ClusteredFedAvg`, on request with the last layer private."""
    # The first round trains several times, and the second one measures only. Robust, since one
    # client with huge losses would join all clusters.
    part = private or _layer(initial, -1) if head else None
    own: dict[str, Any] = {"private": part} if head else {}
    own |= {"start_rounds": min(_START_ROUNDS, num_rounds // 3), "robust": True, **more}
    return None if head and not part else ClusteredFedAvg("auto", min_clusters=2, **own)


class Diagnosis(ShownAsCalled):
    """Find out which strategy fits your clients, by trying them on your own app.

    With every candidate each client trains at most ``num_rounds`` times from the same initial
    model, and evaluates its own model by its ``evaluate``. The last evaluation counts, or an
    earlier one that was clearly better, where the two halves of the clients pick the round for each
    other so that noise favors no candidate. Recommended is the first candidate whose mean gain over
    FedAvg is at most 1 % of FedAvg's metric below the largest.

    Parameters
    ----------
    private : sequence of str, optional
        Names or patterns of the arrays to keep private. By default the last layer, and as another
        candidate the first. Not with ``candidates``.
    metric : str, default "loss"
        The evaluation metric to compare, such as ``"accuracy"``; "loss" also matches "eval_loss".
        Evaluate on held-out samples: on training samples local training always looks best.
    higher_is_better : bool, optional
        Whether a larger metric is better. By default inferred from its name, such as "eval_acc",
        "rmse" or "perplexity".
    candidates : mapping of str to callable, optional
        What to try instead of `Diagnosis.defaults`, the preferred ones first: functions
        ``(initial_arrays, num_rounds, **options)`` that return a strategy of this library or a
        subclass of `ProtocolStrategy`, to which they pass ``options`` on. The first is the
        reference if none is called "fedavg". ``Diagnosis.defaults | {"mine": make_strategy}`` adds
        one, ``{"mine, fine-tuned": Diagnosis.fine_tuned("mine")}`` one that goes on from its half,
        if that is a `PersonalizedFedAvg` or ``ClusteredFedAvg(1)``.
    rates : sequence of float, default ()
        Learning rates, each tried with every candidate, which is judged by its best one.
    rate_key : str, default "lr"
        What your training calls it in its config.
    **options
        See `ServerOptions`; without ``checkpoint_dir``, and with all clients in all rounds.

    Attributes
    ----------
    defaults : mapping of str to callable
        The candidates.

    Raises
    ------
    ValueError, TypeError
        If an option breaks its rule, or ``higher_is_better`` can't be inferred; from `start`, if no
        client's evaluation has the metric.

    Notes
    -----
    Clients need `client_app` and an ``evaluate``. With the default candidates and T rounds a client
    trains at most 7 T times, times the number of ``rates``, and evaluates after each round; with
    clusters once per cluster's model. After T / 3 rounds only the reference and the best three
    others go on; fine-tuned ones belong to the candidate whose half they begin with.

    The interval of a lead is Student's t of the clients' differences, at 95 % for all comparisons
    with one candidate together (Bonferroni). It is reported, and decides nothing.

    `start` returns the metrics and arrays of the recommended candidate; ``result`` (`Diagnosed`)
    has all findings, and the log its table.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr.app import ArrayRecord
    >>> from flwr_perdl.clients import client_app
    >>> from flwr_perdl.simulations import InProcessGrid
    >>> from flwr_perdl.strategies import Diagnosis
    >>> class Mean:
    ...     def __init__(self, context):
    ...         self.mean = float(context.node_config["partition-id"] % 2)
    ...     def fit(self, parameters, config):
    ...         return [x + 0.5 * (self.mean - x) for x in parameters], 1, {}
    ...     def evaluate(self, parameters, config):
    ...         return float(np.mean([(x - self.mean) ** 2 for x in parameters])), 1, {}
    >>> diagnosis = Diagnosis()
    >>> start = ArrayRecord([np.zeros(2), np.zeros(2)])
    >>> result = diagnosis.start(InProcessGrid(client_app(Mean), 8), start, num_rounds=8)
    >>> diagnosis.result.strategies["clusters"]
    'ClusteredFedAvg("auto", min_clusters=2, start_rounds=2, robust=True)'
    """

    fine_tuned = _FineTuned
    defaults: ClassVar[MappingProxyType[str, Make | _FineTuned]] = MappingProxyType(
        {
            FEDAVG: lambda *_, **options: ClusteredFedAvg(1, **options),
            "fine-tuned": _FineTuned(FEDAVG),
            "head": _personal,
            "body": partial(_personal, layer=0),
            "head-fine-tuned": _FineTuned("head"),
            "ditto": lambda *_, **options: Ditto(**options),
            "clusters": _clustered,
            "clusters-head": partial(_clustered, head=True),
            "local": lambda *_, **options: _Local(**options),
        }
    )

    def __init__(
        self,
        private: Sequence[str] | None = None,
        *,
        metric: str = "loss",
        higher_is_better: bool | None = None,
        candidates: Mapping[str, Make | _FineTuned] | None = None,
        rates: Sequence[float] = (),
        rate_key: str = "lr",
        **options: Unpack[ServerOptions],
    ) -> None:
        self.private = None if private is None else check_patterns("private", private)
        self.metric = str(check_kind("metric", metric, str, "a name"))
        self.higher_is_better = is_higher_better(self.metric, higher_is_better)
        tried = self.defaults if candidates is None else candidates
        tried = check_kind("candidates", tried, Mapping, "a mapping or None")
        self.candidates: dict[str, Any] = {**tried}
        self.rates = [check_real("rates", rate, 0) for rate in rates]
        self.rate_key = str(check_kind("rate_key", rate_key, str, "a name"))
        if self.private is not None:
            if candidates is not None:
                raise ValueError(f"private must be left out with candidates, got {private!r}.")
            del self.candidates["body"]
            for name in ("head", "clusters-head"):
                self.candidates[name] = partial(self.candidates[name], private=list(self.private))
        if not self.candidates:
            raise ValueError("candidates must name at least one function, got none.")
        given = self.candidates.items()
        self._tuned = {name: make.of for name, make in given if isinstance(make, _FineTuned)}
        self._makes = {name: make for name, make in given if name not in self._tuned}
        for name, make in given:
            if name in self._tuned and make.of not in self._makes:
                raise ValueError(
                    f"candidates[{name!r}] must go on from another candidate, got {make.of!r}."
                )
            if name in self._makes and not _makes_strategies(make):
                raise ValueError(
                    f"candidates[{name!r}] must be a function (initial_arrays, num_rounds, "
                    f"**options), got {make!r}."
                )
        complete, usual = ServerSettings.of(options), ServerSettings()
        for option in ("checkpoint_dir", "fraction_train", "fraction_evaluate"):
            if (value := getattr(complete, option)) != getattr(usual, option):
                raise ValueError(f"{option} must be left out, got {value!r}.")
        server = replace(options.get("server", usual), evaluate_every=1)
        self._options, self._seed = {**options, "server": server}, complete.seed
        self._result: Diagnosed | None = None
        self._left_out: dict[str, str] = {}

    @property
    def result(self) -> Diagnosed:
        """The findings.

        Raises
        ------
        RuntimeError
            Before `start`.
        """
        if self._result is None:
            raise RuntimeError("start must be called first.")
        return self._result

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 40,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        *,
        verbose: int | str | None = None,
    ) -> Result:
        """Train all candidates, and return the result of the recommended one.

        Parameters
        ----------
        grid : Grid
            The connection to the clients.
        initial_arrays : ArrayRecord
            The initial model.
        num_rounds : int, default 40
            Communication rounds of each candidate, at least 3. With too few rounds local training
            looks best, since a shared part learns more slowly.
        timeout : float, default 3600
            Seconds to wait for the replies of a phase; None: no limit.
        train_config, evaluate_config : ConfigRecord, optional
            Added to the config that clients receive, such as ``ConfigRecord({"lr": 0.1})``.
        verbose : {0, 1, 2, "quiet", "lines", "log", "bar"}, optional
            What is logged, as for every strategy (`ProtocolStrategy.start`).

        Returns
        -------
        Result
            Metrics and arrays of the recommended candidate.

        Raises
        ------
        ValueError, TypeError
            If an argument breaks its rule, or no client's evaluation has the metric.
        TooFewReplies
            If the reference has too few good replies; another candidate is then left out.
        """
        check_kind("initial_arrays", initial_arrays, ArrayRecord, "an ArrayRecord")
        check_count("num_rounds", num_rounds, 3)
        if self.private is not None:
            matched("private", self.private, list(initial_arrays))
        third, half, self._left_out = num_rounds // 3, num_rounds // 2, {}
        runs = [*self._begin(initial_arrays, num_rounds, train_config or ConfigRecord())]
        if not runs:
            raise ValueError(f"candidates must have one for this model, got {self._left_out}.")
        n_rates = max(1, len(self.rates))
        longest = min(len(runs) // n_rates, 1 + _GO_ON) * (num_rounds - third)
        total = third * len(runs) + n_rates * (longest + len(self._tuned) * (num_rounds - half))
        done, began = 0, time.monotonic()

        def take(run: _Run, trainings: int) -> None:
            nonlocal done
            place = f"{1 + [*self.candidates].index(run.name)} of {len(self.candidates)} candidates"
            left = _time_left(began, done / total)
            run.strategy._title = f"Diagnosis, {place}, {self._label(run)}{left}"
            run.strategy._bar_metric = self.metric
            same = {"timeout": timeout, "evaluate_config": evaluate_config, "verbose": verbose}
            done += run.take(trainings, grid, **same)

        for run in runs:
            take(run, third)
        early = self._judged(self._of_best_rates(runs))
        going, ended = self._going_on(early), list[_Run]()
        for run in [run for run in runs if run.name in going and run.error is None]:
            for name in [name for name, of in self._tuned.items() if of == run.name]:
                take(run, half)
                if run.error is None:
                    ended.append(run.fork(name, _Local(**self._options)))
                    take(ended[-1], num_rounds)
            take(run, num_rounds)
            ended.append(run)
        self._result, chosen = self._concluded(early, ended)
        log(INFO, "%s\n%s\n\n%s", self._result.sentence, self._result.table(), self._result.code)
        return chosen.result

    def _begin(self, initial: ArrayRecord, trainings: int, config: ConfigRecord) -> Iterator[_Run]:
        """Yield the candidates that go on from no other, with each learning rate."""
        for rate, (name, make) in product(self.rates or (None,), self._makes.items()):
            strategy = make(initial, trainings, **self._options)
            if strategy is None:
                ours = make in self.defaults.values()
                why = "the model has one layer" if ours else "its function returned None"
                self._left_out[name] = why
                continue
            if not isinstance(strategy, ProtocolStrategy):
                raise ValueError(
                    f"candidates[{name!r}] must return a strategy of this library or a subclass of "
                    f"ProtocolStrategy, got {type(strategy).__module__}.{type(strategy).__name__}."
                )
            if strategy.fine_tune:
                raise ValueError(
                    f"candidates[{name!r}] must leave fine_tune out, got {strategy.fine_tune}: add "
                    f"Diagnosis.fine_tuned({name!r}) as another candidate."
                )
            own_rate = {} if rate is None else {self.rate_key: rate}
            told = ConfigRecord({**config, **own_rate})
            run = _Run(name, strategy, initial, trainings, rate, told)
            single = isinstance(strategy, PersonalizedFedAvg) or getattr(strategy, "k", 0) == 1
            if name in self._tuned.values() and not single:
                raise ValueError(
                    f"Diagnosis.fine_tuned({name!r}) must be of PersonalizedFedAvg or "
                    f"ClusteredFedAvg(1), got {run.typed}."
                )
            yield run

    def _label(self, run: _Run) -> str:
        """Return what a line calls a run."""
        return run.name if run.rate is None else f"{run.name} with {self.rate_key}={run.rate:g}"

    def _of_best_rates(self, runs: Sequence[_Run]) -> list[_Run]:
        """Return each candidate's run with the learning rate that is best for the clients."""
        found = []
        for name in self.candidates:
            own = [run for run in runs if run.name == name]
            own = [run for run in own if run.error is None] or own[:1]
            if len(own) > 1:
                judged = self._judged(own)
                own = [judged.runs[judged.order[0]]]
            found += own
        return found

    def _going_on(self, judged: _Judged) -> list[str]:
        """Return the candidates that go on: the reference, and those with the largest gains."""
        others = [i for i in judged.order if i != judged.reference][:_GO_ON]
        return [judged.runs[i].name for i in (judged.reference, *others)]

    def _measured(self, run: _Run) -> list[dict[int, float]]:
        """Return the metric by client, for each evaluation that has it."""
        names = LOSSES if self.metric in LOSSES else (self.metric,)
        each = [one.numbers.items() for one in run.evaluations if run.error is None]
        found = [{p: own[n] for n in reversed(names) for p, own in one if n in own} for one in each]
        return [own for own in found if own]

    def _judged(self, runs: Sequence[_Run]) -> _Judged:
        """Return the runs that can be compared, by what the clients measured so far."""
        first = next((run for run in runs if run.name == FEDAVG), runs[0])
        if first.error is not None:
            raise first.error
        partitions = sorted({p for one in self._measured(first) for p in one})
        if not partitions:
            raise ValueError(
                f"metric must be one of the clients' evaluations, got {self.metric!r}, which none "
                "of them has."
            )
        sign, kept, found = 2 * self.higher_is_better - 1, list[_Run](), list[Matrix]()
        for run in runs:
            measured = self._measured(run) or [{}]
            each = np.array([[sign * one.get(p, np.nan) for p in partitions] for one in measured])
            scores = each[self._counts(each), np.arange(len(partitions))]
            if 2 * np.isfinite(scores).sum() >= len(partitions):
                kept.append(run)
                found.append(scores)
            else:
                why = brief(str(run.error or "most clients never evaluated it")).rstrip(".")
                self._left_out[run.name] = why
                log(WARNING, "Diagnosis leaves out %s: %s.", self._label(run), why)
        complete = [j for j in range(len(partitions)) if all(np.isfinite(own[j]) for own in found)]
        if first not in kept or (n := len(complete)) < 2:
            raise ValueError(f"2 clients or more must evaluate all candidates, got {n}.")
        scores, reference = np.stack(found)[:, complete], kept.index(first)
        clients = [partitions[j] for j in complete]
        return _Judged(kept, clients, scores, scores - scores[reference], reference)

    def _counts(self, scores: Matrix) -> NDArray[np.intp]:
        """Return the number of the evaluation that counts, for each client.

        That is the last one, unless an earlier one was clearly better. Each half of the clients
        chooses for the other one: for themselves they would choose where they were lucky.

        ``scores`` (n_times, n_clients): more is better; NaN counts as the client's worst.
        """
        filled = np.where(np.isnan(scores), np.nan_to_num(np.fmin.reduce(scores)), scores)[::-1]
        half = spawn(self._seed, SERVER, 2).permutation(scores.shape[1]) % 2 == 0
        chosen = []
        for choosing in (~half, half):
            ahead, width = middle((filled - filled[0])[:, choosing])
            chosen.append(len(scores) - 1 - (ahead - width).argmax())
        return np.where(half, *chosen)

    def _concluded(self, early: _Judged, ended: Sequence[_Run]) -> tuple[Diagnosed, _Run]:
        """Return the findings, and the run of the recommended candidate."""
        judged = self._judged(self._of_best_rates(ended))
        gains, reference = judged.gains, judged.scores[judged.reference]
        taken, n = int(_taken(gains, reference)), len(judged.clients)
        drawn = spawn(self._seed, SERVER, 3).integers(n, size=(_DRAWS, n))
        confidence = float(np.mean(_taken(gains[:, drawn], reference[drawn]) == taken))
        over = next((i for i in judged.order if i != taken), taken)
        lead = interval(gains[taken] - gains[over], len(gains))
        # Those that were stopped: after as many rounds as the reference then.
        found = early.of(judged.clients) | judged.of(judged.clients)
        shown = {name: found[name] for name in self.candidates if name in found}
        runs, chosen = {name: run for name, (run, _, _) in shown.items()}, judged.runs[taken]
        sign = 2 * self.higher_is_better - 1
        lost = "the candidate from which it goes on was stopped"
        result = Diagnosed(
            chosen.name,
            self._sentence(judged, taken, over, lead, confidence),
            chosen.code,
            confidence,
            {name: sign * scores for name, (_, scores, _) in shown.items()},
            {name: own for name, (_, _, own) in shown.items()},
            judged.clients,
            next((run.groups for run in (chosen, *runs.values()) if run.groups), {}),
            {name: run.typed for name, run in runs.items()},
            {name: run.trained for name, run in runs.items()},
            {name: run.rate for name, run in runs.items() if run.rate is not None},
            judged.runs[over].name,
            lead,
            {n: self._left_out.get(n, lost) for n in self.candidates if n not in shown},
            self.metric,
            self.higher_is_better,
        )
        return result, chosen

    def _sentence(
        self, judged: _Judged, taken: int, over: int, lead: Sequence[float], confidence: float
    ) -> str:
        """Return the recommendation in at most 32 words."""
        typed, reference = [run.typed for run in judged.runs], judged.reference
        tied = lead[1] <= 0 <= lead[2] and over != taken
        if len(judged.clients) < _FEW and tied:
            worst = (judged.gains[taken] - judged.gains[over]).min()
            return (
                f"Undecided between {typed[taken]} and {typed[over]}: the former leads by "
                f"{lead[0]:.3g} on average, {worst:.3g} for the worst client."
            )
        gain, low, high = interval(judged.gains[taken], len(typed))
        better = f"better by {gain:.3g} ({low:.3g} to {high:.3g}) than {typed[reference]}"
        why = f"mean {self.metric} {better}"
        if taken == reference:
            why = f"no other candidate is better by more than {_WITHIN:.0%} of the {self.metric}"
        tie = f", a tie with {typed[over]}" if tied and confidence < _SURE else ""
        share = f"{confidence:.0%} of bootstrap resamples of clients"
        return f"{typed[taken]}: {why}; chosen in {share}{tie}."


class _Judged(NamedTuple):
    """Runs that can be compared: more of a score is better; gains are those over the reference."""

    runs: list[_Run]
    clients: list[int]
    scores: Matrix
    gains: Matrix
    reference: int

    @property
    def order(self) -> list[int]:
        """The runs' numbers, those with the largest mean gains first."""
        return list(np.argsort(-middle(self.gains)[0], kind="stable").tolist())

    def of(self, clients: Sequence[int]) -> dict[str, tuple[_Run, Matrix, Matrix]]:
        """Return the runs, by name, with their scores and gains for these clients, else NaN."""
        at = [self.clients.index(p) if p in self.clients else 0 for p in clients]
        known = np.isin(clients, self.clients)
        scores, gains = (np.where(known, own[:, at], np.nan) for own in (self.scores, self.gains))
        return {run.name: (run, scores[i], gains[i]) for i, run in enumerate(self.runs)}


@dataclass
class _Run:
    """A candidate with one learning rate, which is trained in parts.

    ``trainings`` are those of each client in all. Where it goes on from another candidate's half,
    that is its ``origin``, with the reports ``earlier`` after ``before`` trainings.
    """

    name: str
    strategy: Any
    initial: ArrayRecord
    trainings: int
    rate: float | None
    config: ConfigRecord
    origin: _Run | None = None
    earlier: Sequence[RoundReport] = ()
    before: int = 0
    trained: int = 0
    error: TooFewReplies | None = None
    result: Result = field(default_factory=Result)

    def rounds(self, trainings: int) -> int:
        """Return the communication rounds with so many trainings of each client."""
        strategy, rounds = self.strategy, trainings - self.before
        if isinstance(strategy, ClusteredFedAvg) and strategy.k != 1:
            if strategy.start_from in ("one-shot", "anchors"):
                rounds += 1 - strategy.start_rounds
            rounds += strategy.k == "auto"
        return max(rounds, 1)

    def take(self, trainings: int, grid: Grid, **options: Any) -> int:
        """Go on up to so many trainings, and return how many these were."""
        if self.error is not None or trainings <= self.trained:
            return 0
        last, n, own = self.rounds(trainings), trainings - self.trained, self.strategy
        own._paused = self.result if self.trained > self.before else None
        own._told = {**own._told, APART: True}
        options |= {"train_config": self.config, "should_stop": lambda round_, _: round_ >= last}
        try:
            self.result = own.start(grid, self.initial, self.rounds(self.trainings), **options)
        except TooFewReplies as error:  # such as of models that have grown without bound
            self.error = error
        self.trained = trainings
        return n

    @property
    def evaluations(self) -> list[RoundReport]:
        """The evaluations so far."""
        return [one for one in (*self.earlier, *self.strategy.history) if one.step == EVALUATE]

    @property
    def groups(self) -> dict[int, int]:
        """The clients' clusters, if there are any."""
        clustered = isinstance(self.strategy, ClusteredFedAvg) and self.strategy.k != 1
        return self.strategy.result.members if clustered else {}

    def fork(self, name: str, strategy: _Local) -> _Run:
        """Return a candidate that goes on from here by local training."""
        own, half = self.strategy, self.trained
        strategy._told = {FORK: own._running().record.token}
        since: dict[str, Any] = {"origin": self, "earlier": [*own.history], "before": half}
        since |= {"initial": own._presented(), "result": Result()}
        return replace(self, name=name, strategy=strategy, **since)

    @property
    def typed(self) -> str:
        """The strategy as one writes it, without the options of its server."""
        strategy = (self.origin or self).strategy
        if isinstance(strategy, _Local):
            return "local training"
        args, given = strategy._called
        options = {k: v for k, v in given.items() if k not in ServerOptions.__annotations__}
        if self.origin is not None:
            options["fine_tune"] = self.trainings - self.before
        if type(strategy) is ClusteredFedAvg and args == (1,) and not options:
            return "FedAvg()"
        each = [*map(repr, args), *(f"{name}={value!r}" for name, value in options.items())]
        return f"{type(strategy).__name__}({', '.join(each)})".replace("'", '"')

    @property
    def code(self) -> str:
        """What to write in an app."""
        root, typed, config = self.origin or self, self.typed, dict(self.config)
        if isinstance(root.strategy, _Local):
            return "# Local training: each client trains its own model, without a server."
        module = type(root.strategy).__module__
        if module.startswith("flwr_perdl."):
            module = "flwr_perdl.strategies"
        if typed == "FedAvg()":
            module = "flwr.serverapp.strategy"
        told = f", train_config=ConfigRecord({config})" if config else ""
        imports = "from flwr.app import ConfigRecord\n" if config else ""
        rounds = root.rounds(self.before or self.trainings)
        return (
            "# In the ServerApp, with your grid and initial arrays:\n"
            f"{imports}from {module} import {typed.partition('(')[0]}\n\n"
            f"strategy = {typed}\n"
            f"result = strategy.start(grid, initial_arrays, num_rounds={rounds}{told})\n\n"
            "# After your ClientApp, which is called app:\n"
            "from flwr_perdl.clients import client_app\n\n"
            "app = client_app(app)"
        )


def _time_left(began: float, done: float) -> str:
    """Return how long the rest takes, once a share is done, as a part of a line."""
    seconds = (time.monotonic() - began) * max(1 / done - 1, 0) if done else 0
    minutes = f"about {seconds / 60:.0f}" if seconds >= 60 else "under 1"
    return f", {minutes} min left" if done else ""


def _makes_strategies(make: Any) -> bool:
    """Return whether this can be called as a candidate is."""
    try:
        signature(make).bind(None, 0, **ServerOptions.__annotations__)
    except (TypeError, ValueError):
        return False
    return not isinstance(make, type)


def interval(values: Matrix, n_candidates: int) -> tuple[float, float, float]:
    """Return the mean without outliers, and the ends of its interval."""
    mean, width = middle(values, n_candidates)
    return float(mean), float(mean - width), float(mean + width)


def middle(values: Matrix, n_candidates: int = 2) -> tuple[Matrix, Matrix]:
    """Return means along the last axis without outliers, and half the widths of their intervals.

    The level of an interval is such that those of all candidates' gains over one hold together.
    """
    n_clients = values.shape[-1]
    if n_clients < 2:
        return values.mean(axis=-1), np.full(values.shape[:-1], np.inf)
    distances = np.abs(values - np.median(values, axis=-1, keepdims=True))
    within = np.sort(distances, axis=-1)[..., [n_clients - 1 - int(TRIM * n_clients)]]
    kept = distances <= _FAR * within
    n = kept.sum(axis=-1)
    errors = values.std(axis=-1, ddof=1, where=kept) / np.sqrt(n)
    quantiles = stdtrit(n - 1, 1 - _LEVEL / max(n_candidates - 1, 1))
    return values.mean(axis=-1, where=kept), quantiles * errors


def _taken(gains: Matrix, reference: Matrix) -> NDArray[np.intp]:
    """Return the first candidate whose mean gain is within 1 % of the largest.

    That is 1 % of the reference's median score. ``gains`` (n_candidates, ..., n_clients) over
    ``reference`` (..., n_clients): more is better, the preferred candidate first.
    """
    means = middle(gains)[0]
    least = means.max(axis=0) - _WITHIN * np.abs(np.median(reference, axis=-1))
    taken: NDArray[np.intp] = (means >= least).argmax(axis=0)
    return taken
