"""A history as a table: a row for every client that was asked in a round."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr_perdl.estimators._base import data_frame
from flwr_perdl.strategies import RoundReport


def history_rows(history: Iterable[RoundReport]) -> list[dict[str, Any]]:
    """Return a row for every client that was asked in a round.

    Parameters
    ----------
    history : iterable of RoundReport
        An estimator's ``history_``, or a strategy's ``history``.

    Returns
    -------
    list of dict
        ``"round"``, ``"step"``, ``"client"`` (its partition); the metrics that it reported;
        ``"floats_up"`` and ``"floats_down"``, the round's means over the good replies; and what was
        odd, such as ``"failed"``: 1.0 (see ``RoundReport.anomalies``). Rows have the keys that
        apply to them.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.estimators import PersonalizedDictionaryLearning, history_rows
    >>> sites = list(np.random.default_rng(0).standard_normal((2, 30, 5)))
    >>> rows = history_rows(PersonalizedDictionaryLearning(4, 2, rounds=3).fit(sites).history_)
    >>> [(row["round"], row["step"], row["client"]) for row in rows[:3]]
    [(1, 'start', 0), (1, 'start', 1), (2, 'update', 0)]
    """
    rows: list[dict[str, Any]] = []
    for report in history:
        about = {"round": report.round, "step": report.step}
        sent = {"floats_up": report.floats_up, "floats_down": report.floats_down}
        for client in sorted({*report.metrics, *report.anomalies}):
            measured = {**report.metrics.get(client, {}), **report.anomalies.get(client, {})}
            rows.append({**about, "client": client, **measured, **sent})
    return rows


def to_frame(history: Iterable[RoundReport]) -> Any:
    """Return `history_rows` as a pandas DataFrame.

    Examples
    --------
    >>> from flwr_perdl.estimators import to_frame
    >>> from flwr_perdl.strategies import RoundReport
    >>> history = [RoundReport(1, "update", {0: {"mse": 0.5}}, {}, {}, 12.0, 6.0, {})]
    >>> len(to_frame(history))
    1
    """
    return data_frame(history_rows(history))
