"""A history as a table: a row for every client that was asked in a round."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr_perdl.core.checks import check_kind
from flwr_perdl.core.extras import load_extra
from flwr_perdl.strategies import RoundReport


def to_frame(history: Iterable[RoundReport]) -> Any:
    """Return a pandas DataFrame with a row for every client that was asked in a round.

    Parameters
    ----------
    history : iterable of RoundReport
        An estimator's ``history_``, or a strategy's ``history``.

    Returns
    -------
    pandas.DataFrame
        ``"round"``, ``"step"``, ``"client"`` (its partition); the metrics that it reported;
        ``"floats_up"`` and ``"floats_down"``, the round's means over the good replies; and
        anomalies, such as ``"failed"``: 1.0 (see ``RoundReport.anomalies``).

    Examples
    --------
    >>> from flwr_perdl.estimators import to_frame
    >>> from flwr_perdl.strategies import RoundReport
    >>> history = [RoundReport(1, "update", {0: {"mse": 0.5}}, {}, {}, 12.0, 6.0, {})]
    >>> len(to_frame(history))
    1
    """
    rows: list[dict[str, Any]] = []
    for report in check_kind("history", history, Iterable, "an iterable of RoundReport"):
        check_kind("history", report, RoundReport, "an iterable of RoundReport")
        about = {"round": report.round, "step": report.step}
        sent = {"floats_up": report.floats_up, "floats_down": report.floats_down}
        for client in sorted({*report.metrics, *report.anomalies}):
            measured = {**report.metrics.get(client, {}), **report.anomalies.get(client, {})}
            rows.append({**about, "client": client, **measured, **sent})
    return load_extra("pandas", "data frames").DataFrame(rows)
