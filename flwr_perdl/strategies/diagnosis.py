"""Diagnosis: which strategy fits these clients.

`Diagnosis` trains your own clients for a few rounds with every model-agnostic strategy, lets each
client evaluate the model it would end up with, and recommends one:

===================  =============================================================================
candidate            what is trained
===================  =============================================================================
``fedavg``           FedAvg
``fine-tuned``       FedAvg for half of the rounds, then fine-tuned by each client
``head``             `PersonalizedFedAvg` with the last layer private (or the given arrays)
``body``             `PersonalizedFedAvg` with the first layer private
``head-fine-tuned``  as ``head`` for half of the rounds, then all arrays fine-tuned by each client
``ditto``            `Ditto`
``clusters``         `ClusteredFedAvg` with ``k="auto"``, robust
``clusters-head``    the same, with the private arrays of ``head``
``local``            local training only
===================  =============================================================================

The simplest comes first, and is preferred. With every candidate a client's model is trained
``num_rounds`` times and evaluated equally often.

Two candidates are compared by the clients' gains: their mean and its interval, without outliers,
which are more than three times as far from the median as the 80 % closest gains. So a few clients
cannot decide the outcome, whatever they report.

Each party receives what it receives in these strategies; private arrays never leave their client.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from logging import INFO, WARNING
from typing import Any, NamedTuple, Unpack

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray
from scipy.special import stdtrit

from flwr_perdl.clients.personalized import Private, check_patterns, matched
from flwr_perdl.core import html
from flwr_perdl.core.aggregate import TRIM
from flwr_perdl.core.checks import Matrix, check_count, check_kind
from flwr_perdl.core.repr import ShownAsCalled, short_repr
from flwr_perdl.protocol.compat import log
from flwr_perdl.protocol.options import ServerOptions, ServerSettings
from flwr_perdl.protocol.records import APART, EVALUATE, LOSSES, to_arrays
from flwr_perdl.protocol.report import RoundReport, is_higher_better
from flwr_perdl.protocol.request import Protocol, State, TooFewReplies
from flwr_perdl.random import SERVER, spawn
from flwr_perdl.strategies.clustered import ClusteredFedAvg
from flwr_perdl.strategies.ditto import Ditto
from flwr_perdl.strategies.personalized import PersonalizedFedAvg

#: What to write for each candidate, the simplest first.
WRITE = {
    "fedavg": "FedAvg: one shared model is enough",
    "fine-tuned": "FedAvg, then fine-tuning at each client",
    "head": "PersonalizedFedAvg({private})",
    "body": "PersonalizedFedAvg({private})",
    "head-fine-tuned": "PersonalizedFedAvg({private}), then fine-tuning at each client",
    "ditto": "Ditto()",
    "clusters": 'ClusteredFedAvg("auto") with start_rounds=5, robust=True',
    "clusters-head": 'ClusteredFedAvg("auto", private={private}) with start_rounds=5, robust=True',
    "local": "no federation: local training is better",
}
#: A candidate that is as good as the others is passed over with about this probability (intervals
#: are of 95 % on both sides), and never for a gain of less than this share, which nobody notices.
_LEVEL, _LEAST = 0.025, 0.01
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
        The recommendation in words, and by how much the best candidate leads, with an interval.
    confidence : float
        Share of 1,000 bootstrap samples of the clients in which it is recommended.
    values : dict of str to ndarray of shape (n_clients,)
        By candidate, simplest first: the metric of each client's own model.
    clients : list of int
        Partitions of the clients that evaluated all candidates.
    groups : dict of int to int
        Each client's cluster, by partition.
    best, over : str
        The best candidate and the one it is compared with: the recommended one, or, if that is the
        best, the runner-up.
    lead : tuple of float
        By how much ``best`` leads ``over``: the mean over clients, and the ends of its interval.
    higher_is_better : bool, default False
        Whether a larger metric is better.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.strategies import Diagnosed
    >>> values, lead = {"fedavg": np.array([0.7, 0.8])}, ("fedavg", "fedavg", (0.0, 0.0, 0.0))
    >>> print(Diagnosed("fedavg", "Share all.", 1.0, values, [0, 1], {0: 0, 1: 0}, *lead).table())
    candidate            median        gain    interval  clients that gain
    fedavg                 0.75           0  +-       0             0 of 2
    """

    choice: str
    sentence: str
    confidence: float
    values: dict[str, Matrix]
    clients: list[int]
    groups: dict[int, int]
    best: str
    over: str
    lead: tuple[float, float, float]
    higher_is_better: bool = False

    def table(self) -> str:
        """Return a table of the candidates: medians over clients, and mean gains over FedAvg.

        The intervals cover all true gains together with a probability of about 0.95.

        Returns
        -------
        str
        """
        lines = ["candidate            median        gain    interval  clients that gain"]
        for name, values in self.values.items():
            gains = (values - self.values["fedavg"]) * (1 if self.higher_is_better else -1)
            gain, width = middle(gains, len(self.values))
            n_gain = f"{int(np.sum(gains > 0))} of {len(gains)}"
            lines.append(
                f"{name:<15}{np.median(values):>12.4g}{gain:>12.4g}  +-{width:>8.4g}{n_gain:>19}"
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        """Return the fields in one line; what is large is only described."""
        return short_repr(self)

    def _repr_html_(self) -> str:
        """Return the sentence and the candidates' table, for a notebook."""
        return html.titled(self.sentence, f"<pre>{escape(self.table())}</pre>")


class Diagnosis(ShownAsCalled):
    """Find out which strategy fits your clients, by trying them on your own app.

    With every candidate each client trains ``num_rounds`` times from the same initial model, and
    evaluates its own model by its ``evaluate``. The last evaluation counts, or an earlier one that
    was clearly better, where the two halves of the clients pick the round for each other so that
    noise favors no candidate. The recommendation is the simplest candidate that no other clearly
    beats: by more than the interval and by more than 0.01. Clusters drop out where all clients end
    in one.

    Parameters
    ----------
    private : sequence of str, optional
        Names or patterns of the arrays to keep private. By default the last layer, and as another
        candidate the first.
    metric : str, default "loss"
        The evaluation metric to compare, such as ``"accuracy"``; "loss" also matches "eval_loss".
        Evaluate on held-out samples: on training samples local training always looks best.
    higher_is_better : bool, optional
        Whether a larger metric is better. By default inferred from its name, such as "eval_acc",
        "rmse" or "perplexity".
    **options
        See `ServerOptions`; without ``checkpoint_dir``, and with all clients in all rounds.

    Raises
    ------
    ValueError, TypeError
        If an option breaks its rule, or ``higher_is_better`` can't be inferred; from `start`, if no
        client's evaluation has the metric.

    Notes
    -----
    Clients need `client_app` and an ``evaluate``. With T rounds a run takes at most 8.5 T
    communication rounds, in which a client trains at most 11 T times and evaluates after each
    round; with ``"clusters"`` and ``"clusters-head"`` once per cluster's model.

    The interval of a lead is Student's t of the clients' differences, at 95 % for all comparisons
    with one candidate together (Bonferroni).

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
    >>> result = diagnosis.start(InProcessGrid(client_app(Mean), 6), start, num_rounds=8)
    >>> diagnosis.result.choice
    'clusters'
    """

    def __init__(
        self,
        private: Sequence[str] | None = None,
        *,
        metric: str = "loss",
        higher_is_better: bool | None = None,
        **options: Unpack[ServerOptions],
    ) -> None:
        self.private = None if private is None else check_patterns("private", private)
        self.metric = str(check_kind("metric", metric, str, "a name"))
        self.higher_is_better = is_higher_better(self.metric, higher_is_better)
        self._server: dict[str, Any] = {**options}
        complete = ServerSettings.of(options)
        rules = (("checkpoint_dir", None), ("fraction_train", 1.0), ("fraction_evaluate", 1.0))
        for name, wanted in rules:
            if getattr(complete, name) != wanted:
                raise ValueError(f"{name} must be left out, got {getattr(complete, name)!r}.")
        self._seed = complete.seed
        self._result: Diagnosed | None = None

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
        timeout, train_config, evaluate_config, verbose
            As for every strategy (`ProtocolStrategy.start`).

        Returns
        -------
        Result
            Metrics and arrays of the recommended candidate.

        Raises
        ------
        ValueError, TypeError
            If an argument breaks its rule, or no client's evaluation has the metric.
        TooFewReplies
            If FedAvg has too few good replies; another candidate is then left out.
        """
        check_kind("initial_arrays", initial_arrays, ArrayRecord, "an ArrayRecord")
        check_count("num_rounds", num_rounds, 3)
        parts, half = dict(self._parts(initial_arrays)), num_rounds // 2
        candidates = dict(self._candidates(parts, num_rounds))
        measured: dict[str, list[dict[int, float]]] = {}
        results: dict[str, Result] = {}
        models: list[ArrayRecord] = []

        def keep(round_: int, _: Result) -> bool:
            if round_ == half:
                models.extend(candidates["fedavg"][0].result.models)
            return False

        for name, (strategy, rounds) in candidates.items():
            log(INFO, "Diagnosis: %s, %d rounds.", name, rounds)
            strategy._title = f"Diagnosis, {name}"
            strategy._told = {**strategy._told, APART: True}
            first, start = name == "fedavg", models[0] if name == "fine-tuned" else initial_arrays
            configs = timeout, train_config, evaluate_config
            stop = keep if first else None
            try:
                results[name] = strategy.start(
                    grid, start, rounds, *configs, should_stop=stop, verbose=verbose
                )
            except TooFewReplies as error:  # such as of models that have grown without bound
                if first:
                    raise
                log(WARNING, "Diagnosis leaves out %s: %s", name, error)
                continue
            evaluations = [self._measured(one) for one in strategy.history if one.step == EVALUATE]
            if any(evaluations):
                measured[name] = evaluations
            elif first:
                raise ValueError(
                    f"metric must be one of the clients' evaluations, got {self.metric!r}, which "
                    "none of them has."
                )
        groups: dict[str, dict[int, int]] = {}
        for name in [name for name in candidates if name.startswith("clusters")]:
            groups[name] = candidates[name][0].result.members
            if len(set(groups[name].values())) == 1:  # a longer start alone is no difference
                log(WARNING, "Diagnosis leaves out %s: all clients are in one cluster.", name)
                measured.pop(name, None)
        result = self._result = self._concluded(measured, groups, parts)
        log(INFO, "%s\n%s", result.sentence, result.table())
        return results[result.choice]

    def _candidates(
        self, parts: Mapping[str, list[str]], num_rounds: int
    ) -> Iterator[tuple[str, tuple[Any, int]]]:
        """Yield each candidate's strategy and rounds, after which all have trained as often."""
        yield "fedavg", (self._make(ClusteredFedAvg, 1), num_rounds)
        # From the shared model after the other half of the rounds.
        yield "fine-tuned", (self._make(Ditto, 0.0), num_rounds - num_rounds // 2)
        for name, patterns in parts.items():
            yield name, (self._make(PersonalizedFedAvg, patterns), num_rounds)
        head = parts.get("head")
        if head is not None:
            strategy = self._make(_FineTunedPart, head, num_rounds // 2)
            yield "head-fine-tuned", (strategy, num_rounds)
        yield "ditto", (self._make(Ditto), num_rounds)
        # The first round trains several times, and the second one measures only. Robust, since one
        # client with huge losses would join all clusters.
        first = min(_START_ROUNDS, num_rounds // 3)
        options: Any = {"start_rounds": first, "robust": True}
        clusters = self._make(ClusteredFedAvg, "auto", **options)
        yield "clusters", (clusters, num_rounds - first + 2)
        if head is not None:
            clusters = self._make(ClusteredFedAvg, "auto", private=head, **options)
            yield "clusters-head", (clusters, num_rounds - first + 2)
        yield "local", (self._make(Ditto, 0.0), num_rounds)

    def _make(self, kind: Any, *arguments: Any, **more: Any) -> Any:
        """Return a strategy whose clients evaluate in every round."""
        server = self._server.get("server", ServerSettings())
        options = {**self._server, "server": replace(server, evaluate_every=1), **more}
        return kind(*arguments, **options)

    def _parts(self, record: ArrayRecord) -> Iterator[tuple[str, list[str]]]:
        """Yield the names that a candidate keeps private."""
        names = list(record)
        if self.private is not None:
            yield "head", matched("private", self.private, names)
            return
        layers: dict[str, list[str]] = {}
        for name, array in zip(names, to_arrays(record), strict=True):
            # A layer's arrays have one prefix; without names a vector belongs to what is before.
            own = name.rpartition(".")[0]
            if own or array.ndim != 1 or not layers:
                layers.setdefault(own or name, [])
            layers[own or list(layers)[-1]].append(name)
        if len(layers) > 1:
            yield "head", list(layers.values())[-1]
            yield "body", next(iter(layers.values()))

    def _measured(self, report: RoundReport) -> dict[int, float]:
        names = LOSSES if self.metric in LOSSES else (self.metric,)
        measured = report.numbers.items()
        return {p: own[name] for name in reversed(names) for p, own in measured if name in own}

    def _concluded(
        self,
        measured: Mapping[str, list[dict[int, float]]],
        groups: Mapping[str, dict[int, int]],
        parts: Mapping[str, list[str]],
    ) -> Diagnosed:
        sign = 1 if self.higher_is_better else -1
        partitions = sorted({p for one in measured["fedavg"] for p in one})
        n, rng = len(partitions), spawn(self._seed, SERVER, 2)
        half = _halves([groups["clusters"].get(p, -1) for p in partitions], rng)
        n_times = min(map(len, measured.values()))
        found = {}
        for name, evaluations in measured.items():
            times = np.linspace(len(evaluations) - 1, 0, n_times).round().astype(int)
            some = [[evaluations[t].get(p, np.nan) for p in partitions] for t in times]
            scores = _of_chosen_times(sign * np.array(some), half)
            if 2 * np.isfinite(scores).sum() >= n:
                found[name] = scores
            else:
                log(WARNING, "Diagnosis leaves out %s: most clients never evaluated it.", name)
        all_of_them = np.all([np.isfinite(scores) for scores in found.values()], axis=0)
        clients = [p for p, has_all in zip(partitions, all_of_them, strict=True) if has_all]
        if "fedavg" not in found or len(clients) < 2:
            raise ValueError(f"2 clients or more must evaluate all candidates, got {len(clients)}.")
        scores = np.stack([own[all_of_them] for own in found.values()])
        best, taken = _taken(scores)
        drawn = rng.integers(len(clients), size=(_DRAWS, len(clients)))
        confidence = float(np.mean(_taken(scores[:, drawn])[1] == taken))
        names = list(found)
        values = dict(zip(names, sign * scores, strict=True))
        choice = names[taken]
        gains = middle(scores[best] - scores)[0]
        nearest = next((i for i in np.argsort(gains, kind="stable") if i != best), best)
        over = int(nearest if taken == best else taken)
        ahead, width = middle(scores[best] - scores[over], len(names))
        lead = (float(ahead), float(ahead - width), float(ahead + width))
        typical = {name: f"{np.median(own):.4g}" for name, own in values.items()}
        write = WRITE[choice].format(private=parts.get("body" if choice == "body" else "head"))
        compared = f"{lead[0]:.4g} over {names[over]}, interval {lead[1]:.4g} to {lead[2]:.4g}"
        less = f"less than {_LEAST:.0%}" if taken != best and lead[1] > 0 else ""
        said = less or ("significant" if lead[1] > 0 else "not significant")
        sentence = (
            f"{write}: median {self.metric} {typical[choice]}, with one shared model "
            f"{typical['fedavg']}; best by mean gain is {names[best]} ({compared}: {said}); "
            f"{choice} is chosen in {confidence:.0%} of bootstrap resamples of the clients."
        )
        own, ends = groups.get(choice, groups["clusters"]), (names[best], names[over], lead)
        higher = self.higher_is_better
        return Diagnosed(choice, sentence, confidence, values, clients, own, *ends, higher)


class _FineTunedPart(PersonalizedFedAvg):
    """`PersonalizedFedAvg` for some rounds; then each client trains all arrays alone."""

    def __init__(self, private: Sequence[str], shared_rounds: int, **options: Any) -> None:
        super().__init__(private, **options)
        self._shared_rounds = shared_rounds

    def protocol(self, initial: list[Matrix], state: State | None) -> Protocol:
        """Train and average what is shared; then have clients keep all arrays, and train them."""
        steps = super().protocol(initial, state)
        request = next(steps)
        for _ in range(self._shared_rounds):
            request = steps.send((yield request))
        private = next(part for part in self._running().parts if isinstance(part, Private))
        private.keep_all()
        while True:
            yield replace(request, combine=None)


def _halves(groups: Sequence[int], rng: np.random.Generator) -> NDArray[np.bool_]:
    """Return which clients are in one half of them, drawn so that each group is split evenly."""
    half = np.zeros(len(groups), dtype=bool)
    drawn = rng.permutation(len(groups))
    half[drawn[np.argsort(np.array(groups)[drawn], kind="stable")][::2]] = True
    return half


def _of_chosen_times(scores: Matrix, half: NDArray[np.bool_]) -> Matrix:
    """Return each client's score at the time that the clients of the other half choose.

    That is the last one, unless another is clearly better. If clients chose for themselves, it
    would be one where they were lucky.

    ``scores`` (n_times, n_clients): more is better, the last time first; NaN where there is none,
    which counts as the client's worst.
    """
    filled = np.where(np.isnan(scores), np.nan_to_num(np.fmin.reduce(scores)), scores)
    chosen = []
    for choosing in (~half, half):
        ahead, width = middle((filled - filled[0])[:, choosing])
        chosen.append(scores[(ahead - width).argmax()])
    scored: Matrix = np.where(half, *chosen)
    return scored


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


def _taken(scores: Matrix) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the best candidate, and the first one of which no other is clearly ahead.

    ``scores`` (n_candidates, ..., n_clients): more is better, the simplest candidate first. The
    best one is that whose least lead over another is the largest.
    """
    least = _LEAST * np.abs(np.median(scores, axis=-1))
    least_leads, behind = [], np.zeros(scores.shape[:-1], dtype=bool)
    for own in scores:
        ahead, width = middle(own - scores, len(scores))
        least_leads.append(ahead.min(axis=0))
        behind |= ahead > np.maximum(width, least)
    best = np.array(least_leads).argmax(axis=0)
    np.put_along_axis(behind, best[None], values=False, axis=0)
    return best, behind.argmin(axis=0)
