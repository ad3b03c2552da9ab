"""Which strategy serves these clients: share all, a part, with some, or nothing at all.

`Diagnosis` trains the user's own clients a few rounds by each of the strategies here that take any
model, lets every client evaluate what it would have, and says which to take:

==============  ==================================================================================
candidate       what is trained
==============  ==================================================================================
``shared``      FedAvg
``tuned``       FedAvg's model, trained further by each client alone
``head``        `PersonalizedFedAvg`, the last layer private (or the arrays that are given)
``body``        `PersonalizedFedAvg`, the first layer private
``clusters``    `ClusteredFedAvg` with ``k="auto"``
``near``        `Ditto`
``alone``       each client alone
==============  ==================================================================================

What each party receives is what it receives in these strategies.
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

from flwr_perdl.clients._handlers import LOSSES
from flwr_perdl.clients.keep_private import check_patterns, matched
from flwr_perdl.core import html
from flwr_perdl.core.checks import Matrix, check_count, check_flag, check_kind
from flwr_perdl.core.repr import ShownAsCalled, short_repr
from flwr_perdl.protocol.compat import log
from flwr_perdl.protocol.options import Options, ServerOptions, ServerSettings
from flwr_perdl.protocol.records import EVALUATE, to_arrays
from flwr_perdl.protocol.report import RoundReport
from flwr_perdl.protocol.request import TooFewReplies
from flwr_perdl.protocol.strategy import ProtocolStrategy
from flwr_perdl.random import SERVER, spawn
from flwr_perdl.strategies.clustered import ClusteredFedAvg
from flwr_perdl.strategies.ditto import Ditto
from flwr_perdl.strategies.personalized import PersonalizedFedAvg

#: What to write for each candidate.
WRITE = {
    "shared": "FedAvg: share all, it is enough",
    "tuned": "FedAvg, then fine-tuning at each client",
    "head": "PersonalizedFedAvg({private})",
    "body": "PersonalizedFedAvg({private})",
    "clusters": 'ClusteredFedAvg("auto")',
    "near": "Ditto()",
    "alone": "no federation: clients are better off alone",
}
#: Another strategy is taken where the clients' mean gain over FedAvg is more than so many of its
#: standard errors, and than this share of FedAvg's value: what nobody would notice is no reason.
_ERRORS, _LEAST = 2.0, 0.01
#: Draws of clients by which the choice is made again.
_DRAWS = 1000


class Diagnosed(NamedTuple):
    """What `Diagnosis` has found.

    Attributes
    ----------
    choice : str
        The candidate to take, such as ``"head"``.
    sentence : str
        Which strategy that is, why, and how sure.
    confidence : float
        Share of a thousand draws of clients, with replacement, in which it is the best.
    values : dict of str to ndarray of shape (n_clients,)
        By candidate, the metric of every client's own model.
    clients : list of int
        The clients' partitions, those that evaluated all candidates.
    groups : dict of int to int
        Who is like whom: each client's cluster, by partition.
    higher_is_better : bool, default False
        Of the metric.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.strategies import Diagnosed
    >>> values = {"shared": np.array([0.7, 0.8])}
    >>> print(Diagnosed("shared", "Share all.", 1.0, values, [0, 1], {0: 0, 1: 0}).table())
    candidate    mean    interval  better than shared
    shared     0.7500  +-  0.0980              0 of 2
    """

    choice: str
    sentence: str
    confidence: float
    values: dict[str, Matrix]
    clients: list[int]
    groups: dict[int, int]
    higher_is_better: bool = False

    def table(self) -> str:
        """Return the candidates' means, their 95 % intervals over clients, and who gains."""
        lines = ["candidate    mean    interval  better than shared"]
        for name, values in self.values.items():
            gains = values - self.values["shared"]
            better = int(np.sum(gains > 0 if self.higher_is_better else gains < 0))
            lines.append(
                f"{name:<9}{values.mean():8.4f}  +-{1.96 * _error(values):8.4f}"
                f"{f'{better} of {len(values)}':>20}"
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        """Return the fields in one line; what is large is only described."""
        return short_repr(self)

    def _repr_html_(self) -> str:
        """Return the sentence and the candidates' table, for a notebook."""
        return html.titled(self.sentence, f"<pre>{escape(self.table())}</pre>")


class Diagnosis(ShownAsCalled):
    """Find out on the user's own app which strategy serves its clients.

    Every candidate trains for ``num_rounds``, on the same clients and from the same model; then
    each client evaluates the model that it would have, by its own ``evaluate``. FedAvg is taken
    unless another one's mean gain over it is more than two standard errors over clients, and more
    than a hundredth of its value. Clusters are left out where all clients end in one.

    Parameters
    ----------
    private : sequence of str, optional
        Names of arrays to keep private, or patterns of them; by default the last layer, and in a
        candidate of its own the first.
    metric : str, default "loss"
        The metric of evaluations by which clients are compared, such as ``"accuracy"``; "loss" may
        be called "eval_loss", too. On images or samples that the client does not train on, else
        clients alone look best.
    higher_is_better : bool, optional
        By default False for a metric whose name has "loss" or "error" in it.
    **options
        See `ServerOptions`; without ``checkpoint_dir``, and with all clients in all rounds.

    Raises
    ------
    ValueError, TypeError
        If an option breaks its rule; from `start`, if no client's evaluation has the metric.

    Notes
    -----
    The clients need `client_app`, and an ``evaluate``. A run costs about eight times the rounds of
    FedAvg. `start` returns the metrics and arrays of the candidate that is taken; ``result``
    (`Diagnosed`) says all, and the log its table.

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
        if higher_is_better is not None:
            check_flag("higher_is_better", higher_is_better)
        self.higher_is_better = higher_is_better
        self._server: dict[str, Any] = {**options}
        complete = Options.of(options)
        for name, wanted in (("checkpoint_dir", None), ("fraction_train", 1.0)):
            if getattr(complete, name) != wanted:
                raise ValueError(f"{name} must be left out, got {getattr(complete, name)!r}.")
        self._seed = complete.seed
        self._result: Diagnosed | None = None

    @property
    def result(self) -> Diagnosed:
        """What has been found.

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
        """Train by all candidates, and return what the chosen one comes to.

        Parameters
        ----------
        grid : Grid
            The way to the clients.
        initial_arrays : ArrayRecord
            The model to start from.
        num_rounds : int, default 40
            Communication rounds of each candidate, at least 3. Clients alone learn at once what
            they can, and a shared part later: with too few rounds they look best.
        timeout, train_config, evaluate_config, verbose
            As for every strategy (`ProtocolStrategy.start`).

        Raises
        ------
        ValueError, TypeError
            If an argument breaks its rule, or no client's evaluation has the metric.
        TooFewReplies
            If FedAvg has too few good replies; another candidate is then left out.
        """
        check_kind("initial_arrays", initial_arrays, ArrayRecord, "an ArrayRecord")
        check_count("num_rounds", num_rounds, 3)
        parts = dict(self._parts(initial_arrays))
        found: dict[str, dict[int, float]] = {}
        results: dict[str, Result] = {}

        def run(name: str, strategy: ProtocolStrategy, start: ArrayRecord, rounds: int) -> None:
            log(INFO, "Diagnosis: %s, %d rounds.", name, rounds)
            try:
                results[name] = strategy.start(
                    grid, start, rounds, timeout, train_config, evaluate_config, verbose=verbose
                )
            except TooFewReplies as error:  # such as of models that have grown without bound
                if name == "shared":
                    raise
                log(WARNING, "Diagnosis leaves out %s: %s", name, error)
                return
            evaluations = [one for one in strategy.history if one.step == EVALUATE]
            found[name] = self._best([self._measured(one) for one in evaluations])

        shared = self._make(ClusteredFedAvg, num_rounds, 1)
        run("shared", shared, initial_arrays, num_rounds)
        model = results["shared"].arrays
        run("tuned", self._make(Ditto, 1, 0.0), model, max(num_rounds // 2, 1))
        for name, patterns in parts.items():
            part = self._make(PersonalizedFedAvg, num_rounds, patterns)
            run(name, part, initial_arrays, num_rounds)
        clusters = self._make(ClusteredFedAvg, num_rounds, "auto", start_rounds=5)
        run("clusters", clusters, initial_arrays, num_rounds)
        run("near", self._make(Ditto, num_rounds), initial_arrays, num_rounds)
        run("alone", self._make(Ditto, 1, 0.0), initial_arrays, num_rounds)
        members = clusters.result.members
        if len(set(members.values())) == 1:  # FedAvg after a longer start, which is no difference
            log(INFO, "Diagnosis leaves out clusters: all clients are in one.")
            found.pop("clusters", None)
        result = self._result = self._concluded(found, members, parts)
        log(INFO, "%s\n%s", result.sentence, result.table())
        return results[result.choice]

    def _make(self, kind: Any, every: int, *arguments: Any, **more: Any) -> Any:
        """Return a strategy whose clients evaluate every so many rounds."""
        server = self._server.get("server", ServerSettings())
        options = {**self._server, "server": replace(server, evaluate_every=every), **more}
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

    @property
    def _sign(self) -> float:
        """1 where more of the metric is better, else -1."""
        higher = self.higher_is_better
        if higher is None:
            higher = not any(word in self.metric for word in ("loss", "error"))
        return 1.0 if higher else -1.0

    def _measured(self, report: RoundReport) -> dict[int, float]:
        names = LOSSES if self.metric in LOSSES else (self.metric,)
        measured = report.metrics.items()
        return {p: own[name] for name in reversed(names) for p, own in measured if name in own}

    def _best(self, evaluations: Sequence[dict[int, float]]) -> dict[int, float]:
        """Return the evaluation with the best mean: training alone stops in time."""
        some = [one for one in evaluations if one]
        if not some:
            raise ValueError(
                f"metric must be one of the clients' evaluations, got {self.metric!r}, which none "
                "of them has."
            )
        return max(some, key=lambda one: self._sign * float(np.mean(list(one.values()))))

    def _concluded(
        self,
        found: Mapping[str, dict[int, float]],
        groups: dict[int, int],
        parts: Mapping[str, list[str]],
    ) -> Diagnosed:
        clients = sorted(set.intersection(*(set(own) for own in found.values())))
        if len(clients) < 2:
            raise ValueError(
                f"at least 2 clients must evaluate all candidates, got {len(clients)}."
            )
        values = {name: np.array([own[p] for p in clients]) for name, own in found.items()}
        gains = self._sign * np.stack([own - values["shared"] for own in values.values()])
        best = int(gains.mean(axis=1).argmax())
        least = max(_ERRORS * _error(gains[best]), _LEAST * abs(values["shared"].mean()))
        if gains[best].mean() <= least:
            best = 0
        drawn = spawn(self._seed, SERVER, 2).integers(len(clients), size=(_DRAWS, len(clients)))
        confidence = float(np.mean(gains[:, drawn].mean(axis=2).argmax(axis=0) == best))
        choice = list(values)[best]
        write = WRITE[choice].format(private=parts.get(choice))
        mean, other = values[choice].mean(), values["shared"].mean()
        why = (
            f"{self.metric} {mean:.4g}, with one shared model {other:.4g}"
            if best
            else f"{self.metric} {mean:.4g}, and no other is better by more than chance"
        )
        sentence = f"{write} ({why}; best in {confidence:.0%} of draws of the clients)."
        higher = self._sign > 0
        return Diagnosed(choice, sentence, confidence, values, clients, groups, higher)


def _error(values: Matrix) -> float:
    """Return the standard error of a mean."""
    return float(values.std(ddof=1) / len(values) ** 0.5)
