"""What the recommendations of a diagnosis cost, as the benchmark measures it."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.regret import regret, tables


def test_regret_is_that_of_the_means_over_seeds() -> None:
    runs: list[dict[str, Any]] = [
        {"choice": "ditto", "test": {"fedavg": 2.0, "ditto": 1.0}},
        {"choice": "fedavg", "test": {"fedavg": 1.0, "ditto": 1.0}},
    ]
    assert regret(runs) == 0
    assert regret([runs[1], runs[1]]) == 0
    assert regret([{**runs[0], "choice": "fedavg"}]) == pytest.approx(1)
    table, losses = tables({"hospitals": runs})
    assert "| hospitals | `Ditto` 1; FedAvg 1 | `Ditto` | 0.0% |\n" in table
    assert "| largest |  |  | 0.0% |\n" in table
    assert losses.startswith("| federation | FedAvg | `Ditto` |\n")
    assert losses.endswith("| hospitals | 1.500 | 1.000 |\n")
