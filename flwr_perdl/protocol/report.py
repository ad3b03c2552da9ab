"""What happened in a run: a report per exchange, and what they come to per client."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from flwr_perdl.core import html
from flwr_perdl.core.checks import brief_repr, check_kind
from flwr_perdl.core.repr import short_repr
from flwr_perdl.protocol.records import NUM_EXAMPLES

#: Words in the names of metrics of which less is better, and of those of which more is.
_LOWER = {"loss", "error", "mse", "rmse", "mae", "mape", "nll", "entropy", "perplexity", "ppl"}
_HIGHER = {"accuracy", "acc", "auc", "auroc", "f1", "precision", "recall", "r2", "iou", "dice"}
_HIGHER |= {"sensitivity", "specificity", "psnr", "ssim", "bleu"}


class RoundReport(NamedTuple):
    """What happened in one exchange: the messages of a training round, or of an evaluation.

    Attributes
    ----------
    round : int
        Communication round, from 1.
    step : str
        The protocol's step, or ``"evaluate"``.
    metrics : dict of int to dict
        Every good reply's metrics, by partition.
    aggregate : dict of str to float
        Their means, weighted by numbers of examples, and ``"clients"`` and ``"dropped"``;
        under a promise of privacy ``"uncounted-runs"``: at how many clients each run of Flower has
        a budget of its own.
    dropped : dict of str to str
        Who was left out, and why.
    floats_down, floats_up : float
        Floats sent to, and received from, a client; the mean over the good replies.
    anomalies : dict of int to dict
        By partition, what was odd: ``"failed"`` (an error, or no reply), ``"refused"`` (a reply
        that broke a rule), ``"capped"`` (by which share its weight was brought down, see
        `Request.max_weight`), and to which share of the reply the aggregation did what, such as
        ``"left out"`` or ``"clipped"``.

    Examples
    --------
    >>> from flwr_perdl.strategies import RoundReport, client_report
    >>> report = RoundReport(1, "update", {0: {"error": 0.5}}, {"error": 0.5}, {}, 12.0, 6.0, {})
    >>> report.metrics[0], report.floats_up
    ({'error': 0.5}, 6.0)
    """

    round: int
    step: str
    metrics: dict[int, dict[str, float]]
    aggregate: dict[str, float]
    dropped: dict[str, str]
    floats_down: float
    floats_up: float
    anomalies: dict[int, dict[str, float]]

    def __repr__(self) -> str:
        """Return the fields in one line; what is large is only described."""
        return short_repr(self)

    def _repr_html_(self) -> str:
        """Return the fields as a table, for a notebook."""
        return html.record(self)


class History(list[RoundReport]):
    """The reports of a run; a notebook shows a row for each."""

    def _repr_html_(self) -> str:
        rows = (
            ({"round": one.round, "step": one.step, "left out": len(one.dropped)}, one.aggregate)
            for one in self
        )
        return html.titled(f"{len(self)} exchanges", html.metrics_table(rows))


def client_report(history: Iterable[RoundReport]) -> dict[int, dict[str, float]]:
    """Return what happened to each client's replies, over all exchanges.

    Parameters
    ----------
    history : iterable of RoundReport
        A strategy's history.

    Returns
    -------
    dict of int to dict
        By partition: ``"asked"``, the exchanges that it was asked in, and sums over them of what
        `RoundReport.anomalies` says. A client that is never left out has ``"asked"`` alone.

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


def summarized(
    metrics: Mapping[int, Mapping[str, float]],
    flags: Collection[str] = (),
    labels: Collection[str] = (),
) -> dict[str, float]:
    """Return each metric's mean over the clients that have it, weighted by their examples.

    Of a flag, the number of clients where it is not zero instead; of a label, under
    ``"NAME_LABEL"``, the number of clients with each. A name that ends with ``*`` stands for all
    that begin so.
    """
    names = dict.fromkeys(name for own in metrics.values() for name in own if name != NUM_EXAMPLES)
    found: dict[str, float] = {}
    for name in names:
        having = [(own[name], own[NUM_EXAMPLES]) for own in metrics.values() if name in own]
        if _is_flag(name, flags):
            found[name] = float(sum(value != 0 for value, _ in having))
        elif name in labels:
            sizes = Counter(value for value, _ in having)
            found |= {f"{name}_{label:.15g}": float(sizes[label]) for label in sorted(sizes)}
        else:
            found[name] = sum(n * value for value, n in having) / sum(n for _, n in having)
    return found


def lower_is_better(name: str) -> bool | None:
    """Return whether less of a metric is better, by the words of its name; None: nobody knows."""
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    lower, higher = bool(words & _LOWER), bool(words & _HIGHER)
    return None if lower == higher else lower


def in_words(
    report: RoundReport, flags: Collection[str] = (), labels: Collection[str] = ()
) -> list[str]:
    """Return an exchange's metrics as a log says them: means, and the worst client's."""
    found = []
    for name, mean in report.aggregate.items():
        values = [own[name] for own in report.metrics.values() if name in own]
        same = name == "loss" and report.aggregate.get("eval_loss") == mean
        if not values or same or _is_flag(name, flags):
            continue
        lower, worst = lower_is_better(name), ""
        if lower is not None and len(values) > 1:
            worst = f" (worst client {max(values) if lower else min(values):.4g})"
        found.append(f"{name} {mean:.4g}{worst}")
    for label in labels:
        sizes = Counter(own[label] for own in report.metrics.values() if label in own)
        if sizes:
            each = ", ".join(str(sizes[number]) for number in sorted(sizes))
            found.append(f"{len(sizes)} group{'s' * (len(sizes) > 1)}: {each} clients")
    if report.dropped:
        found.append(f"{len(report.dropped)} left out")
    return found


def _is_flag(name: str, flags: Collection[str]) -> bool:
    """Whether a metric is a flag; one that ends with ``*`` stands for all that begin so."""
    begin = tuple(flag.removesuffix("*") for flag in flags if flag.endswith("*"))
    return name in flags or name.startswith(begin)


def first_reason(reasons: Mapping[str, str], asked: str = "") -> str:
    """Return the clause that quotes the first of these reasons, nothing if there are none."""
    for who, why in reasons.items():
        rest = f" ({len(reasons)} in all)" if len(reasons) > 1 else ""
        return f"; the first reason{rest}: {who}{asked}: {why.rstrip('.')}"
    return ""
