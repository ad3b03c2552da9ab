from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perdl_experiments import run_experiment
from perdl_experiments.studies import _methods, configure, find, images

GIVEN: dict[str, Any] = {
    "clients": 3,
    "rounds": 6,
    "options": {"n_atoms": 12, "n_global": 6, "samples_per_client": 40, "methods": "all"},
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, list[Any]]:
    out, seen = tmp_path_factory.mktemp("digits"), []
    return run_experiment("digits", out=out, progress=seen.append, **GIVEN), out, seen


def config() -> images.Config:
    return configure(find("digits"), **GIVEN)


def test_every_method_has_quality_and_cost(ran: Any) -> None:
    results, _, seen = ran
    metrics = results["metrics"]
    rows = [*_methods.METHODS, "perma_full", "perpca_full"]
    for field in ("mse", "psnr", "ssim"):
        assert {f"{field}_tuned_{row}_{k}" for row in rows for k in (5, 10, 20)} <= set(metrics)
    quality, cost = results["tables"][-2:]
    variants = {images.TUNED[row] for row in ("half", "papers")}  # the learner is orthogonal
    assert {row[0] for row in cost["rows"]} == {*_methods.METHODS.values(), *variants}
    assert metrics["rounds_tuned_half"] == 3
    assert metrics["floats_up_tuned_half"] < metrics["floats_up_tuned_perma"]
    atoms = {row[0]: row[1] for row in quality["rows"]}
    assert [atoms["PerMA"], atoms["PerMA, global + local"]] == ["6", "12"]
    for pooled in ("pooled", "sklearn"):  # nobody wins by more atoms
        assert atoms[_methods.METHODS[pooled]] == "6"
        assert atoms[_methods.METHODS[f"{pooled}_full"]] == "12"
    assert metrics["rounds_tuned_naive"] == 1
    assert metrics["rounds_tuned_perma"] == metrics["rounds_tuned_perpca"] == 6
    assert metrics["floats_up_tuned_local"] == 0
    assert metrics["floats_up_tuned_finetuned"] > metrics["floats_up_tuned_perma"]
    assert metrics["floats_up_tuned_pooled"] == metrics["samples_per_client"] * 4 / 5 * 64
    assert (seen[5].done, seen[-1].done, seen[-1].total) == (6, 20, 20)


def test_more_atoms_of_their_own_help_and_matching_beats_the_naive_average(ran: Any) -> None:
    metrics = ran[0]["metrics"]
    for method in ("perma", "perpca"):
        assert metrics[f"mse_tuned_{method}_full_10"] < metrics[f"mse_tuned_{method}_10"]
    assert metrics["mse_tuned_perma_full_10"] < metrics["mse_tuned_naive_10"]


def test_images_that_choose_are_not_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    task, learned, judged = config().task, [], []
    learn, error = _methods.learn, _methods._error

    def learning(method: str, setting: float, samples: Any, *given: Any) -> _methods.Learned:
        learned.extend(samples)
        return learn(method, setting, samples, *given)

    def judging(X: Any, D: Any) -> float:
        judged.append(X)
        return error(X, D)

    monkeypatch.setattr(_methods, "learn", learning)
    monkeypatch.setattr(_methods, "_error", judging)
    _methods.learn_tuned("finetuned", task.clients, config(), images.START)
    known, chosen = ({row.tobytes() for X in parts for row in X} for parts in (learned, judged))
    assert not known & chosen
    assert known | chosen == {row.tobytes() for X in task.clients for row in X}


SMALL: dict[str, Any] = {
    "clients": 3,
    "rounds": 2,
    "options": {"n_atoms": 8, "n_global": 4, "samples_per_client": 20, "methods": "all"},
}


@pytest.mark.slow
def test_a_method_that_fails_costs_its_row_and_not_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learn = _methods.learn

    def failing(method: str, setting: float, *given: Any) -> _methods.Learned:
        if method == "naive" or (method == "perpca" and setting == 0.5):
            raise RuntimeError("too few replies.")
        return learn(method, setting, *given)

    monkeypatch.setattr(_methods, "learn", failing)
    results = run_experiment("digits", **SMALL)
    for table in results["tables"][-2:]:
        (row,) = [row for row in table["rows"] if row[0] == "Naive average"]
        assert row[1] == "failed"
        assert len(row) == len(table["columns"])
    assert not [name for name in results["metrics"] if "tuned_naive" in name]
    assert "mse_tuned_perpca_10" in results["metrics"]
    assert any("failed" in note for note in results["notes"])
