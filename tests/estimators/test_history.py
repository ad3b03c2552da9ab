from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from flwr_perdl.estimators import to_frame
from flwr_perdl.strategies import RoundReport

REPORTS = [
    RoundReport(1, "start", {0: {"mse": 0.5}, 1: {"mse": 0.7}}, {}, {}, 0.0, 8.0, {}),
    RoundReport(
        2, "update", {0: {"mse": 0.4}}, {}, {"client 1": "no reply"}, 4.0, 4.0, {1: {"failed": 1.0}}
    ),
]
FIRST = {"round": 1, "step": "start", "floats_up": 8.0, "floats_down": 0.0}
SECOND = {"round": 2, "step": "update", "floats_up": 4.0, "floats_down": 4.0}
ROWS = [
    {**FIRST, "client": 0, "mse": 0.5},
    {**FIRST, "client": 1, "mse": 0.7},
    {**SECOND, "client": 0, "mse": 0.4},
    {**SECOND, "client": 1, "failed": 1.0},
]


def test_every_client_of_every_round_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=tuple))
    assert to_frame(REPORTS) == tuple(ROWS)
    assert to_frame([]) == ()
    monkeypatch.setitem(sys.modules, "pandas", None)  # as where it is not installed
    with pytest.raises(ImportError, match=r"^pandas"):
        to_frame(REPORTS)
