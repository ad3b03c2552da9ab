from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perdl_experiments import run_experiment

SMALL: dict[str, Any] = {
    "seeds": 1,
    "dimensions": "6",
    "sizes": "4",
    "densities": "20",
    "weak_samples": 12,
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    out = tmp_path_factory.mktemp("comparison")
    return run_experiment("comparison", clients=6, rounds=12, out=out, options=SMALL), out


def test_only_perma_finds_shared_and_own_atoms_and_carries_the_weak(small: Any) -> None:
    metrics = small[0]["metrics"]
    assert metrics["error_perma"] < 1e-6
    assert metrics["error_shared_weak_perma"] < 1e-2 < metrics["error_shared_weak_local"]
    for method in ("averaging", "naive", "perpca", "pooled", "averaging_wide", "pooled_wide"):
        assert metrics[f"error_{method}"] > 0.1
        assert metrics[f"error_own_{method}"] > 0.1
    for of in ("shared", "own"):  # with enough samples nobody needs the others
        assert metrics[f"error_{of}_local"] < 1e-6
