"""PerMA end to end, in process: planted truth, faults, late clients, resumption, bad input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message

from flwr_perdl.clients import DictionaryClient
from flwr_perdl.dictionary import (
    GradientLearner,
    KSVDLearner,
    LassoLearner,
    MODLearner,
    OrthogonalLearner,
    WarmStart,
    dictionary_distance,
    normalize_atoms,
)
from flwr_perdl.random import spawn
from flwr_perdl.strategies import PerMA, ServerSettings
from tests.grids import grid_of

MakeFederation = Callable[..., Any]


@pytest.mark.parametrize(
    "aggregation", ["statistics", "mean", "weighted", "median", "geometric-median", "trimmed"]
)
@pytest.mark.parametrize("matching", ["consensus", "paths"])
def test_the_planted_atoms_are_found(
    federation: MakeFederation, aggregation: str, matching: str
) -> None:
    planted = federation()
    strategy = PerMA(3, aggregation=aggregation, matching=matching)
    atoms = planted.learn(strategy)
    assert dictionary_distance(atoms, planted.planted.global_atoms) < 1e-6
    assert strategy.history[-1].aggregate["mse_full"] < 1e-12


def test_the_number_of_global_atoms_is_found(federation: MakeFederation) -> None:
    planted = federation(n_global=2)
    assert planted.learn(PerMA()).shape == (2, 6)


@pytest.mark.parametrize(
    "learner",
    [
        OrthogonalLearner(6, threshold=0.15),
        GradientLearner(6),
        MODLearner(6),
        KSVDLearner(6),
        LassoLearner(6),
    ],
)
@pytest.mark.parametrize("aggregation", ["statistics", "mean"])
def test_any_learner_works_with_any_aggregation(
    federation: MakeFederation, learner: Any, aggregation: str
) -> None:
    planted = federation(learner=learner, noise=0.01)
    atoms = planted.learn(PerMA(3, aggregation=aggregation, local_steps=2, refine_steps=1), 6)
    np.testing.assert_allclose(np.linalg.norm(atoms, axis=1), 1, rtol=1e-12)
    assert dictionary_distance(atoms, planted.planted.global_atoms) < 0.2


def test_different_atoms_whose_means_are_one_direction_do_not_end_a_run() -> None:
    rng = np.random.default_rng(0)
    light = np.ones(9) / 3  # what most samples are, as patches of photos
    starts = [normalize_atoms(light + 0.06 * rng.standard_normal((6, 9))) for _ in range(20)]

    def make_client(context: Context, i: int) -> DictionaryClient:
        own = WarmStart(starts[i], 0.0, (0.0,))
        X = starts[i].repeat(3, axis=0)
        options: Any = {"start": lambda X, learner, rng: own, "min_support": 0}
        return DictionaryClient(X, LassoLearner(6), context, **options)

    strategy = PerMA(4, seed=0)
    strategy.start(grid_of(make_client, 20), num_rounds=3, verbose="quiet")
    assert not any(report.dropped for report in strategy.history)


def test_float32_stays_float32(federation: MakeFederation) -> None:
    planted = federation()
    samples = [X.astype(np.float32) for X in planted.planted.samples]
    planted.planted.samples[:] = samples
    atoms = planted.learn(PerMA(3))
    assert atoms.dtype == np.float32
    assert dictionary_distance(atoms, planted.planted.global_atoms.astype(np.float32)) < 1e-3


def test_a_run_that_ends_while_it_chooses_is_resumed_to_the_same_bits(
    federation: MakeFederation, tmp_path: Path
) -> None:
    def strategy(**server: bool) -> PerMA:
        return PerMA(checkpoint_dir=tmp_path / "run", server=ServerSettings(**server))

    def own(partition: int) -> dict[str, str]:
        return {"state-dir": str(tmp_path / "nodes")}

    planted = federation(noise=0.05)
    whole = planted.learn(PerMA(), 8)
    grid = planted.grid(node_config=own)
    strategy().start(grid, num_rounds=8, should_stop=lambda round_, _: round_ == 3)
    resumed = planted.learn(strategy(resume=True), 8, node_config=own)
    np.testing.assert_array_equal(resumed, whole)


def test_more_global_atoms_than_atoms_are_refused(federation: MakeFederation) -> None:
    with pytest.raises(ValueError, match="n_global=7"):
        federation().learn(PerMA(7))


def test_no_common_atom_is_told(
    federation: MakeFederation, warned: pytest.LogCaptureFixture
) -> None:
    atoms = federation(n_global=0).learn(PerMA("agree"), rounds=2)
    assert atoms.shape == (0, 6)
    assert "n_global" in warned.text


def test_withheld_atoms_lower_the_number_of_global_ones(federation: MakeFederation) -> None:
    """With 30 samples not every atom has the support of 5; the run goes on with those that do."""
    atoms = federation(2, n_samples=30, min_support=5).learn(PerMA(6, matching="paths"))
    assert 0 < len(atoms) < 6


def test_clients_with_nothing_to_send_are_told_so(federation: MakeFederation) -> None:
    with pytest.raises(ValueError, match=r"^min_support"):
        federation(2, n_samples=2).learn(PerMA(2))


def test_a_client_that_joins_late_carries_on(federation: MakeFederation) -> None:
    grid = federation().grid()
    late = grid.contexts.pop(next(iter(grid.contexts)))

    def join(report: Any) -> None:
        if report.round == 2:
            grid.contexts[late.node_id] = late

    strategy = PerMA(3, on_round=join)
    strategy.start(grid, num_rounds=4)
    assert 0 not in strategy.history[0].metrics
    assert strategy.history[-1].metrics[0]["mse_full"] < 1e-12
    assert not any(report.dropped for report in strategy.history)


def test_where_clients_fail_at_random_the_error_is_that_of_a_run_without_faults(
    federation: MakeFederation,
) -> None:
    planted = federation(10, noise=0.05)

    def faults(partition: int, message: Message) -> str | None:
        rng = spawn(9, partition, int(message.content["config"].get("server-round", 0)))
        kinds = ("error", "silence", "nan", "shape", "empty")
        trains = message.metadata.message_type == "train"
        return str(rng.choice(kinds)) if trains and rng.random() < 0.3 else None

    strategies = [PerMA(3, reuse_last_reply=10) for _ in range(2)]
    errors = [
        dictionary_distance(planted.learn(one, 10, **options), planted.planted.global_atoms)
        for one, options in zip(strategies, ({}, {"faults": faults}), strict=True)
    ]
    assert errors[1] < 1.1 * errors[0]
    assert sum(len(report.dropped) for report in strategies[1].history) > 20


def test_clients_that_were_never_asked_evaluate_what_they_would_begin_with(
    federation: MakeFederation,
) -> None:
    strategy = PerMA(3, fraction_train=0.4)
    federation(learner=OrthogonalLearner(5), noise=0.05).learn(strategy, 2)
    evaluations = [report.metrics for report in strategy.history if report.step == "evaluate"]
    assert [len(metrics) for metrics in evaluations] == [5, 5]
    for metrics in (one for report in evaluations for one in report.values()):
        assert metrics["mse_full"] < metrics["mse_global"]


@pytest.mark.parametrize("aggregation", ["statistics", "mean"])
def test_an_orthonormal_start_does_not_make_other_learners_atoms_orthonormal(
    federation: MakeFederation, aggregation: str
) -> None:
    """What the learner is decides, as it does where clients bring their own starts."""
    rng = np.random.default_rng(0)
    truth = normalize_atoms(np.eye(3, 6) + 0.3)  # every two of them have a cosine of 0.5
    planted = federation(learner=MODLearner(3))
    for X in planted.planted.samples:
        X[:] = (rng.standard_normal((len(X), 3)) * (rng.random((len(X), 3)) < 0.4)) @ truth
    learned = []
    for start in (np.eye(3, 6), normalize_atoms(np.eye(3, 6) + 1e-4)):
        strategy = PerMA(3, aggregation=aggregation, fraction_evaluate=0.0)
        result = strategy.start(planted.grid(), ArrayRecord([start]), num_rounds=10)
        learned.append(result.arrays.to_numpy_ndarrays()[0])
    assert dictionary_distance(*learned) < 1e-2
    assert np.abs(learned[0] @ learned[0].T - np.eye(3)).max() > 0.05


@pytest.mark.parametrize("aggregation", ["statistics", "mean"])
def test_a_learner_of_another_kind_is_left_out_of_every_round(aggregation: str) -> None:
    X = np.random.default_rng(0).standard_normal((4, 60, 5))
    learners = [OrthogonalLearner(3)] * 3 + [MODLearner(3)]

    def run(n_clients: int) -> tuple[np.ndarray, PerMA]:
        strategy = PerMA(2, aggregation=aggregation, fraction_evaluate=0.0)
        grid = grid_of(lambda c, i: DictionaryClient(X[i], learners[i], c), n_clients)
        return strategy.start(grid, num_rounds=3).arrays.to_numpy_ndarrays()[0], strategy

    without, _ = run(3)
    learned, strategy = run(4)
    np.testing.assert_array_equal(learned, without)
    assert [list(report.anomalies) for report in strategy.history] == [[3]] * 3


@pytest.mark.parametrize("options", [{}, {"min_support": 0}])
def test_where_all_atoms_are_global_a_federation_learns_what_pooled_samples_give(
    federation: MakeFederation, options: dict[str, Any]
) -> None:
    planted = federation(learner=LassoLearner(6), noise=0.05, **options)
    grid, learner = planted.grid(), LassoLearner(6)
    start = PerMA(6).start(grid, num_rounds=1).arrays
    atoms = start.to_numpy_ndarrays()[0]
    found = PerMA().start(planted.grid(), start, num_rounds=5).arrays.to_numpy_ndarrays()[0]
    for _ in range(5):
        atoms = learner.step(np.vstack(planted.planted.samples), atoms)
    np.testing.assert_allclose(found, atoms, rtol=0, atol=1e-8)
