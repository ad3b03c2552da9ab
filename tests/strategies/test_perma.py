"""PerMA end to end, in process: planted truth, faults, late clients, resumption, bad input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message

from flwr_perdl.clients import DictionaryClient, client_app
from flwr_perdl.dictionary import (
    GradientLearner,
    KSVDLearner,
    LassoLearner,
    MODLearner,
    OrthogonalLearner,
    dictionary_distance,
    normalize_atoms,
)
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import PerMA, ServerSettings
from flwr_perdl.strategies.perma import AGGREGATIONS, MATCHINGS

MakeFederation = Callable[..., Any]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("matching", MATCHINGS)
def test_the_planted_atoms_are_found(
    federation: MakeFederation, aggregation: str, matching: str
) -> None:
    planted = federation()
    strategy = PerMA(3, aggregation=aggregation, matching=matching)
    atoms = planted.learn(strategy)
    assert dictionary_distance(atoms, planted.planted.global_atoms) < 1e-6
    assert strategy.history[-1].aggregate["mse_full"] < 1e-12


@pytest.mark.parametrize(
    ("make", "options"),
    [
        ({}, {}),
        ({"noise": 0.05}, {"aggregation": "mean", "local_steps": 3}),
        ({"noise": 0.05, "min_support": 0}, {"aggregation": "median"}),
        ({"noise": 0.05, "min_support": 25}, {"aggregation": "mean"}),
        ({"n_samples": 8, "noise": 0.1, "min_support": 1}, {}),
        ({}, {"refine_steps": 1}),
        ({"learner": OrthogonalLearner(6, n_nonzero=2)}, {}),
        ({"learner": MODLearner(6)}, {"local_steps": 2}),
        ({"learner": LassoLearner(6)}, {}),
    ],
    ids=[
        "defaults",
        "mean",
        "all sent",
        "withheld",
        "few samples",
        "refined",
        "omp",
        "mod",
        "lasso",
    ],
)
@pytest.mark.parametrize("dtype", [np.float64, pytest.param(np.float32, marks=pytest.mark.slow)])
def test_a_cohort_has_the_bits_of_one_by_one(
    federation: MakeFederation, make: dict[str, Any], options: dict[str, Any], dtype: type
) -> None:
    planted, called = federation(6, **make), []
    sizes = [1.0, 1.0, 0.7, 1.0, 0.7, 1.0]
    for X, share in zip(list(planted.planted.samples), sizes, strict=True):
        planted.planted.samples.append(X[: round(share * len(X))].astype(dtype))
    del planted.planted.samples[:6]

    def noting(message: Message, context: Any, call: Any) -> Message:
        called.append(context.node_id)
        return call(message, context)

    found = []
    for mods in ([], [noting]):
        grid = InProcessGrid(client_app(planted.make_client, train_mods=mods), 6)
        strategy = PerMA(3, server=ServerSettings(evaluate_every=4), **options)
        arrays = strategy.start(grid, num_rounds=4).arrays.to_numpy_ndarrays()
        found.append((arrays[0], strategy.history, states(grid)))
    assert len(called) == 24
    (atoms, history, kept), (other_atoms, other_history, other_kept) = found
    np.testing.assert_array_equal(atoms, other_atoms)
    assert history == other_history
    assert kept == other_kept


def states(grid: InProcessGrid) -> list[dict[str, bytes]]:
    """Return the bytes of all that the clients keep, by round and name."""
    return [
        {
            key: array.data
            for record in context.state.array_records.values()
            for key, array in record.items()
        }
        for context in grid.contexts.values()
    ]


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


def test_float32_stays_float32(federation: MakeFederation) -> None:
    planted = federation()
    samples = [X.astype(np.float32) for X in planted.planted.samples]
    planted.planted.samples[:] = samples
    atoms = planted.learn(PerMA(3))
    assert atoms.dtype == np.float32
    assert dictionary_distance(atoms, planted.planted.global_atoms.astype(np.float32)) < 1e-3


def test_a_rerun_gives_the_same_bits(federation: MakeFederation) -> None:
    runs = [federation(noise=0.05).learn(PerMA(3, fraction_train=0.6, seed=3)) for _ in range(2)]
    np.testing.assert_array_equal(*runs)


def test_a_run_may_start_from_global_atoms(federation: MakeFederation) -> None:
    planted = federation(noise=0.05)
    truth = planted.planted.global_atoms
    strategy = PerMA(aggregation="mean")
    strategy.start(planted.grid(), ArrayRecord([truth]), num_rounds=2)
    assert [report.step for report in strategy.history if report.step != "evaluate"] == [
        "update",
        "update",
    ]
    assert strategy.history[-1].aggregate["mse_full"] < 2 * 0.05**2


@pytest.mark.parametrize("fault", ["error", "silence", "nan", "shape", "empty"])
@pytest.mark.parametrize("round_", [1, 2, 3])
def test_a_client_that_fails_in_any_round_does_no_harm(
    federation: MakeFederation, fault: str, round_: int
) -> None:
    def faults(partition: int, message: Message) -> str | None:
        config = message.content.get("config", {})
        trains = message.metadata.message_type == "train"
        return fault if partition == 2 and trains and config["server-round"] == round_ else None

    planted = federation()
    strategy = PerMA(3, fraction_evaluate=0.0)
    atoms = planted.learn(strategy, faults=faults)
    assert dictionary_distance(atoms, planted.planted.global_atoms) < 1e-6
    dropped = {report.round: list(report.dropped) for report in strategy.history}
    if fault == "shape" and round_ == 1:  # a dictionary with an atom less is a good reply
        assert dropped[1] == []
    else:
        assert dropped.pop(round_) == ["client 2"]
        assert not any(dropped.values())


def test_a_client_with_a_new_node_id_and_no_state_carries_on(federation: MakeFederation) -> None:
    planted = federation()
    grid = planted.grid()

    def replace(report: Any) -> None:
        if report.round == 2 and report.step == "evaluate":
            old = next(iter(grid.contexts))
            context = grid.contexts.pop(old)
            context.node_id = 4711
            context.state.clear()
            grid.contexts[4711] = context

    strategy = PerMA(3, server=ServerSettings(on_round=replace))
    result = strategy.start(grid, num_rounds=5)
    atoms = result.arrays.to_numpy_ndarrays()[0]
    assert dictionary_distance(atoms, planted.planted.global_atoms) < 1e-6
    assert all(list(report.metrics) == [0, 1, 2, 3, 4] for report in strategy.history)
    assert strategy.history[-1].metrics[0]["mse_full"] < 1e-12


def test_a_client_that_joins_late_carries_on(federation: MakeFederation) -> None:
    planted = federation()
    grid = planted.grid()
    late = grid.contexts.pop(next(iter(grid.contexts)))

    def join(report: Any) -> None:
        if report.round == 2:
            grid.contexts[late.node_id] = late

    strategy = PerMA(3, server=ServerSettings(on_round=join))
    strategy.start(grid, num_rounds=4)
    assert 0 not in strategy.history[0].metrics
    assert strategy.history[-1].metrics[0]["mse_full"] < 1e-12


@pytest.mark.parametrize("remember", [1, 3])
def test_an_absent_client_counts_with_its_last_contribution(
    federation: MakeFederation, remember: int
) -> None:
    """Client 2 is silent from round 4 on; who is remembered for long enough is as good as there."""

    def faults(partition: int, message: Message) -> str | None:
        config = message.content.get("config", {})
        gone = message.metadata.message_type == "train" and config["server-round"] > 3
        return "silence" if partition == 2 and gone else None

    def learn(**options: Any) -> tuple[np.ndarray, PerMA]:
        strategy = PerMA(3, fraction_evaluate=0.0, remember=remember)
        return federation(noise=0.05).learn(strategy, 6, **options), strategy

    whole, _ = learn()
    atoms, strategy = learn(faults=faults)
    without = federation(noise=0.05).learn(PerMA(3, fraction_evaluate=0.0), 6, faults=faults)
    lost = dictionary_distance(without, whole)
    if remember == 3:
        assert dictionary_distance(atoms, whole) < 0.2 * lost
    noted = [report.anomalies.get(2, {}).get("remembered", 0) for report in strategy.history]
    assert noted == [0, 0, 0] + [1] * remember + [0] * (3 - remember)


@pytest.mark.parametrize("aggregation", ["statistics", "mean", "remembered", "auto"])
def test_a_resumed_run_has_the_same_bits(
    federation: MakeFederation, tmp_path: Path, aggregation: str
) -> None:
    def node_config(partition: int) -> dict[str, str]:
        return {"state-dir": str(tmp_path / "state")}

    options: dict[str, Any] = {"aggregation": aggregation, "fraction_train": 0.6}
    if aggregation == "remembered":
        options = {"remember": 2, "fraction_train": 0.6}
    n_global: Any = 3
    if aggregation == "auto":  # killed while it chooses
        n_global, options = "auto", {"fraction_train": 0.6}
    planted = federation(noise=0.05)
    whole = planted.learn(PerMA(n_global, **options), 6)
    saving = {**options, "checkpoint_dir": tmp_path / "server"}
    PerMA(n_global, **saving).start(
        planted.grid(node_config=node_config), num_rounds=6, should_stop=lambda r, _: r == 3
    )
    resumed = planted.learn(
        PerMA(n_global, **saving, server=ServerSettings(resume=True)), 6, node_config=node_config
    )
    np.testing.assert_array_equal(resumed, whole)


def test_more_global_atoms_than_atoms_are_refused(federation: MakeFederation) -> None:
    message = "n_global must be at most every client's number of atoms, got n_global=7 with 6 atoms"
    with pytest.raises(ValueError, match=message):
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
    with pytest.raises(ValueError, match="min_support must"):
        federation(2, n_samples=2).learn(PerMA(2))


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
        def make_client(context: Context) -> DictionaryClient:
            partition = int(context.node_config["partition-id"])
            return DictionaryClient(X[partition], learners[partition], context)

        strategy = PerMA(2, aggregation=aggregation, fraction_evaluate=0.0)
        grid = InProcessGrid(client_app(make_client), n_clients)
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
