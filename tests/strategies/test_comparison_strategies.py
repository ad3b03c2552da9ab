"""DictionaryAveraging and PerPCA end to end, and what PerMA has in common with them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context
from scipy.linalg import subspace_angles

from flwr_perdl.clients import (
    DictionaryAveragingClient,
    DictionaryClient,
    LearnerClient,
    PerPCAClient,
)
from flwr_perdl.dictionary import (
    GradientLearner,
    KSVDLearner,
    MODLearner,
    OrthogonalLearner,
    dictionary_distance,
    normalize_atoms,
    personalized_pca,
    warm_start,
)
from flwr_perdl.random import spawn
from flwr_perdl.strategies import (
    DictionaryAveraging,
    PerMA,
    PerPCA,
    ProtocolStrategy,
)
from perdl_experiments.engine import arranged, federate

MakeFederation = Callable[..., Any]
STRATEGIES: dict[str, Callable[..., ProtocolStrategy]] = {
    "perma": lambda **options: PerMA(3, **options),
    "averaging": DictionaryAveraging,
    "perpca": lambda **options: PerPCA(3, **options),
}


CLIENTS: dict[str, type[LearnerClient]] = {
    "perma": DictionaryClient,
    "averaging": DictionaryAveragingClient,
    "perpca": PerPCAClient,
}


@pytest.mark.parametrize(
    "learner",
    [
        OrthogonalLearner(6, threshold=0.15),
        # The planted atoms are orthogonal: Algorithm 5's own coder finds them from far away.
        GradientLearner(6, coding="threshold"),
        MODLearner(6, coding="threshold"),
        KSVDLearner(6),
    ],
)
def test_averaging_finds_a_dictionary_that_all_share(
    federation: MakeFederation, learner: Any
) -> None:
    planted = federation(client=DictionaryAveragingClient, n_global=6, learner=learner, seed=2)
    strategy = DictionaryAveraging(local_steps=2)
    atoms = planted.learn(strategy, 8)
    assert dictionary_distance(atoms, planted.planted.global_atoms) < 1e-2
    last = strategy.history[-1].aggregate
    assert last["mse_full"] == last["mse_global"] < 1e-3


def test_the_naive_average_is_the_plain_mean_and_ends_the_run(federation: MakeFederation) -> None:
    planted = federation(client=DictionaryAveragingClient, n_global=6, min_support=0)
    strategy = DictionaryAveraging(start_from="own", weighted=False)
    atoms = planted.learn(strategy, 5)
    assert [report.step for report in strategy.history] == ["average", "evaluate"]
    own = [
        warm_start(X, OrthogonalLearner(6), rng=spawn(0, i)).dictionary
        for i, X in enumerate(planted.planted.samples)
    ]
    np.testing.assert_allclose(atoms, normalize_atoms(np.mean(own, axis=0)), atol=1e-12)
    assert dictionary_distance(atoms, planted.planted.global_atoms) > 0.3


def test_perpca_finds_the_shared_subspace(federation: MakeFederation) -> None:
    planted = federation(client=PerPCAClient, learner=OrthogonalLearner(4, threshold=0.0))
    for X, local in zip(planted.planted.samples, planted.planted.local_atoms, strict=True):
        X -= (X @ local[1:].T) @ local[1:]  # one direction of its own is left to each client
    strategy = PerPCA(3)
    U = planted.learn(strategy, 60)
    assert subspace_angles(U.T, planted.planted.global_atoms.T).max() < 1e-4
    assert strategy.history[-1].aggregate["mse_full"] < 1e-6
    assert [report.floats_up for report in strategy.history[:3:2]] == [4 * 6, 3 * 6]


def test_perpca_does_what_it_does_in_one_place(federation: MakeFederation) -> None:
    planted = federation(client=PerPCAClient, learner=OrthogonalLearner(5), noise=0.1)
    U = planted.learn(PerPCA(3), 11)
    together = personalized_pca(planted.planted.samples, 3, 2, n_rounds=10)
    np.testing.assert_array_equal(U, together.global_components)


def test_the_two_shot_form_is_what_round_one_finds(federation: MakeFederation) -> None:
    planted = federation(
        client=PerPCAClient, learner=OrthogonalLearner(5, threshold=0.0), noise=0.1
    )
    strategy = PerPCA(3)
    U = planted.learn(strategy, 1)
    together = personalized_pca(planted.planted.samples, 3, 2, n_rounds=0)
    np.testing.assert_array_equal(U, together.global_components)
    assert [report.floats_up for report in strategy.history] == [5 * 6, 0]
    errors = [
        np.mean((X - X @ W.T @ W) ** 2)
        for X, V in zip(planted.planted.samples, together.local_components, strict=True)
        for W in [np.vstack([U, V])]
    ]
    assert strategy.history[-1].aggregate["mse_full"] == pytest.approx(np.mean(errors), rel=1e-5)


def test_perpca_halves_its_step_when_the_error_rises(federation: MakeFederation) -> None:
    planted = federation(client=PerPCAClient, learner=OrthogonalLearner(5), noise=0.3)
    strategy = PerPCA(3, step=50.0, fraction_evaluate=0.0)
    planted.learn(strategy, 40)
    errors = [report.aggregate["mse"] for report in strategy.history[1:]]
    assert errors[-1] <= min(errors) * (1 + 1e-3)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_client_that_joins_late_carries_on(federation: MakeFederation, name: str) -> None:
    grid = federation(client=CLIENTS[name]).grid()
    late = grid.contexts.pop(next(iter(grid.contexts)))

    def join(report: Any) -> None:
        if report.round == 2:
            grid.contexts[late.node_id] = late

    strategy = STRATEGIES[name](on_round=join)
    strategy.start(grid, num_rounds=4)
    assert 0 not in strategy.history[0].metrics
    assert strategy.history[-1].metrics[0]["mse_full"] < (1e-12 if name == "perma" else 1)
    assert not any(report.dropped for report in strategy.history)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_run_may_start_from_given_atoms(federation: MakeFederation, name: str) -> None:
    planted = federation(client=CLIENTS[name], noise=0.05)
    strategy = STRATEGIES[name](fraction_evaluate=0.0)
    strategy.start(planted.grid(), ArrayRecord([planted.planted.global_atoms]), num_rounds=2)
    assert [len(report.metrics) for report in strategy.history] == [5, 5]
    assert "start" not in {report.step for report in strategy.history}


def test_perpca_refuses_components_that_are_not(federation: MakeFederation) -> None:
    skew = normalize_atoms(np.random.default_rng(0).standard_normal((3, 6)))
    with pytest.raises(ValueError, match="initial_arrays"):
        PerPCA(3).start(federation(client=PerPCAClient).grid(), ArrayRecord([skew]), num_rounds=1)


@pytest.mark.slow
@pytest.mark.ray
def test_ray_gives_the_same_bits() -> None:
    def client(context: Context, config: Any) -> LearnerClient:
        rng = np.random.default_rng(int(context.node_config["partition-id"]))
        return PerPCAClient(rng.standard_normal((50, 8)), OrthogonalLearner(5), context)

    experiment: Any = SimpleNamespace(
        client=client, strategy=lambda config, **o: PerPCA(3, **arranged(o))
    )
    config: Any = SimpleNamespace(clients=3, rounds=3, seed=0)
    one, other = (federate(experiment, config, engine=e) for e in ("in-process", "ray"))
    np.testing.assert_array_equal(one.arrays[0], other.arrays[0])


def test_more_shared_components_than_components_are_refused(federation: MakeFederation) -> None:
    with pytest.raises(ValueError, match="n_global=7"):
        federation(client=PerPCAClient).learn(PerPCA(7))


@pytest.mark.parametrize("name", STRATEGIES)
def test_clients_with_too_few_samples_are_told_so_or_withhold(
    federation: MakeFederation, name: str
) -> None:
    planted = federation(client=CLIENTS[name], n_samples=2)
    if name != "averaging":
        with pytest.raises(ValueError, match="min_support"):
            planted.learn(STRATEGIES[name]())
    else:  # a dictionary that nobody uses stays what the server drew
        np.testing.assert_allclose(np.linalg.norm(planted.learn(STRATEGIES[name]()), axis=1), 1)


@pytest.mark.parametrize("name", STRATEGIES)
def test_clients_that_were_never_asked_evaluate_what_they_would_begin_with(
    federation: MakeFederation, name: str
) -> None:
    strategy = STRATEGIES[name](fraction_train=0.4)
    planted = federation(client=CLIENTS[name], learner=OrthogonalLearner(5), noise=0.05)
    planted.learn(strategy, 2)
    for report in strategy.history:
        if report.step != "evaluate":
            continue
        for metrics in report.metrics.values():
            if name == "averaging":  # there are no local atoms
                assert metrics["mse_full"] == metrics["mse_global"]
            else:
                assert metrics["mse_full"] < metrics["mse_global"]
