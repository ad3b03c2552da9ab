from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perdl_experiments import run_experiment
from perdl_experiments.studies import comparison
from perdl_experiments.studies.comparison import METHODS

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
    for method in ("averaging", "naive", "perpca", "pooled"):
        assert metrics[f"error_{method}"] > 0.1
        assert metrics[f"error_own_{method}"] > 0.1
    for of in ("shared", "own"):  # with enough samples nobody needs the others
        assert metrics[f"error_{of}_local"] < 1e-6


def test_every_method_has_a_row_a_setting_and_curves(small: Any) -> None:
    results, out = small
    (table,) = results["tables"]
    assert [row[0] for row in table["rows"]] == list(METHODS.values())
    assert {row[-1].split()[0] for row in table["rows"]} == {"threshold", "step"}
    for method in METHODS:
        for axis in ("dimension", "clients", "density"):
            assert len(results["curves"][f"error_weak_{method}_{axis}"]) == 1
        assert results["metrics"][f"seconds_{method}"] > 0
    assert (out / "comparison.png").stat().st_size > 20_000


def test_a_resumed_run_takes_up_what_is_kept(small: Any) -> None:
    results, out = small
    again = run_experiment("comparison", clients=6, rounds=12, out=out, options=SMALL, resume=True)
    assert again["metrics"] == results["metrics"]
    assert again["seconds"] < results["seconds"] / 2


def test_a_rival_that_fails_costs_its_row_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    learn = comparison._learn

    def failing(config: comparison.Config, federate: Any) -> comparison.Errors:
        if config.method == "naive" or (config.method == "pooled" and config.seed < 10_000):
            raise RuntimeError("too few replies.")
        if config.method == "perpca" and config.setting == 1.0:
            raise RuntimeError("one setting of several")
        return learn(config, federate)

    monkeypatch.setattr(comparison, "_learn", failing)
    results = run_experiment("comparison", clients=3, rounds=2, options=SMALL)
    rows = {row[0]: row[1:] for row in results["tables"][0]["rows"]}
    for title in ("naive average", "pooled data"):
        assert rows[title] == ["failed", *["-"] * 7]
        assert f"{title} failed: too few replies." in results["notes"]
    assert rows["PerPCA"][-1].startswith("step")
    assert not any("naive" in n or "pooled" in n for n in [*results["metrics"], *results["curves"]])
    monkeypatch.setattr(comparison, "METHODS", {"perma": "PerMA"})
    monkeypatch.setattr(comparison, "_learn", lambda config, federate: learn(None, federate))
    with pytest.raises(AttributeError):  # ours is no rival
        run_experiment("comparison", clients=3, rounds=2, options=SMALL)
